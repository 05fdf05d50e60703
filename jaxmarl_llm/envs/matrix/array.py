"""Two-player matrix games, one-shot or iterated: two agents move at once, then see what both did. All in JAX.

    turn  role    prompt     a move
    0     first   1>         C or D
    0     second  2>         C or D
    1     first   1CD>       (own move, then the other's, of each round so far)

A move is the first token of a completion. Any other token is no move (shown as ?), and both earn 0 in that round.
Payoffs of (first, second), as in MAGRPO's motivation (its Dec-POMDP against individual rewards) and textbooks:

    game          CC      CD      DC      DD      equilibria                      best social sum
    coordination  5, 5    4, 3    3, 4    0, 0    CC                              10 at CC
    chicken       5, 5    1, 6    6, 1    0, 0    CD, DC and (1/2, 1/2) mixed     10 at CC, no equilibrium
    prisoners     3, 3    0, 5    5, 0    1, 1    DD                              6 at CC

``rewards="joint"`` pays both agents the social sum (a Dec-POMDP), ``"individual"`` each its own payoff. Two components
are for the log alone: ``social``, the sum in both cases, and ``cooperation``, a player's share of C.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[2 R] are completions, and ``length`` [2] their numbers of tokens. ``seed`` determines tasks and demonstrations, and
``n`` is the number of samples of a role.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    PAD,
    UNREADABLE,
    ArrayEnv,
    Observation,
    Samples,
    all_seats,
    encoded,
    letter_samples,
    pack,
    to_all,
)
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text

ROLES = ("first", "second")
COMPONENTS = ("payoff", "social", "cooperation")
MOVES = "CD"
GAMES = {
    "coordination": ((5, 5), (4, 3), (3, 4), (0, 0)),
    "chicken": ((5, 5), (1, 6), (6, 1), (0, 0)),
    "prisoners": ((3, 3), (0, 5), (5, 0), (1, 1)),
}


@dataclass(frozen=True)
class Config:
    """The settings of the game, its rewards and demonstrations."""

    seed: int = 0  # all tasks are the same game
    tasks: int = 64  # training tasks
    game: str = "chicken"  # coordination, chicken or prisoners
    payoffs: tuple[tuple[float, float], ...] | None = None  # of (first, second) at CC, CD, DC, DD, instead of a game
    rewards: str = "joint"  # joint or individual
    rounds: int = 1  # rounds of an episode
    response: int = 1  # R
    cooperate: float = 0.5  # share of C among the demonstrations

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        one_of(f"{path}.game", self.game, tuple(GAMES))
        one_of(f"{path}.rewards", self.rewards, ("joint", "individual"))
        pairs = self.payoffs
        if pairs is not None and (len(pairs) != 4 or not all(math.isfinite(x) for pair in pairs for x in pair)):
            checks.refuse(path, "payoffs", "four pairs of finite numbers, of (first, second) at CC, CD, DC, DD", pairs)
        checks.in_range(path, self, 1, checks.MOST_ROUNDS, "rounds")
        checks.in_range(path, self, 1, checks.MOST_TEXT, "response")
        checks.probabilities(path, self, "cooperate")


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 2 + 2 * (config.rounds - 1)


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion, sep."""
    return prompt_length(config) + config.response + 1


@struct.dataclass
class State:
    """An episode so far, with M = ``rounds``."""

    moves: Int[Array, "M 2"]  # 0 C, 1 D, 2 no move; rows from ``turn`` on are not played yet
    turn: Int[Array, ""]


def payoffs(config: Config) -> np.ndarray:
    """The payoffs of (first, second), [2, 2, 2], by the moves of first and second: 0 C and 1 D."""
    return np.array(config.payoffs or GAMES[config.game], np.float32).reshape(2, 2, 2)


def flow(config: Config, cooperate: Float[np.ndarray, "... 2"]) -> Float[np.ndarray, "... 2"]:
    """The change of both players' probabilities of C under exact policy gradients in the one-shot game.

    cooperate: the probabilities of C of (first, second)

    With p = sigmoid(x) of a player's own logit, ``dp = p (1 - p) du/dx = (p (1 - p))^2 (u(C) - u(D))``. Here u is the
    payment by ``config.rewards`` against the other's mixed move.
    """
    table = payoffs(config)
    pay = np.stack([table.sum(-1)] * 2, axis=-1) if config.rewards == "joint" else table
    p, q = np.moveaxis(np.asarray(cooperate, float), -1, 0)
    gain = pay[0] - pay[1], pay[:, 0] - pay[:, 1]  # of C over D, by the other's move
    first = q * gain[0][0, 0] + (1 - q) * gain[0][1, 0]
    second = p * gain[1][0, 1] + (1 - p) * gain[1][1, 1]
    return np.stack([(p * (1 - p)) ** 2 * first, (q * (1 - q)) ** 2 * second], axis=-1)


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random: keys are not used."""
    return ArrayEnv(
        name="matrix",
        roles=ROLES,
        seats=2,
        max_turns=config.rounds,
        components=COMPONENTS,
        actors=((0, 1),) * config.rounds,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode. All tasks are the same, so ``task`` has no effect."""
    return State(jnp.zeros((config.rounds, 2), jnp.int32), jnp.int32(0))


def observe(config: Config, state: State) -> Observation:
    """The prompts of both players."""
    letters = encoded(MOVES + chr(UNREADABLE))

    def prompt(seat: int) -> tuple[Int[Array, " P"], Int[Array, ""]]:
        own_first = state.moves[:-1, ::-1] if seat else state.moves[:-1]
        history = (letters[own_first].reshape(-1), 2 * state.turn)
        return prompt_row("12"[seat], [history], (), prompt_length(config))

    return all_seats((prompt(0), prompt(1)), state.turn < config.rounds)


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "2 R"], length: Int[Array, "2"]
) -> tuple[State, dict[str, Float[Array, "2"]], Bool[Array, ""]]:
    """The state after a round, its rewards, and whether the episode has finished."""
    table = np.zeros((3, 3, 2), np.float32)  # a round without two moves pays nothing
    table[:2, :2] = payoffs(config)
    byte = jnp.where(length > 0, tokens[:, 0], PAD)
    move = jnp.where(byte == ord("C"), 0, jnp.where(byte == ord("D"), 1, 2)).astype(jnp.int32)
    over = state.turn >= config.rounds
    payoff = jnp.where(over, 0.0, jnp.asarray(table)[move[0], move[1]])
    social = to_all(ROLES, payoff.sum())
    here = (jnp.arange(config.rounds) == state.turn)[:, None]
    after = State(jnp.where(here, move, state.moves), jnp.minimum(state.turn + 1, config.rounds))
    rewards = {
        "payoff": social if config.rewards == "joint" else payoff,
        "social": social,
        "cooperation": ((move == 0) & ~over) / config.rounds,
    }
    return after, rewards, after.turn >= config.rounds


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``), all the same: game [n]. ``seed`` and ``held_out`` are not used."""
    return {"game": np.zeros(config.tasks if n is None else n, np.int32)}


def same_tasks(config: Config) -> bool:
    """Whether held-out tasks are those of training: the game is the task, and the rollout's key draws the rest."""
    return True


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Samples of random players: any history, and a move that is C with probability ``cooperate``.

    The samples have legal moves and no strategy. Samples of each role, as in `array_env.samples`. ``context`` is not
    used.
    """
    out = {}
    for seat, role in enumerate(ROLES):
        rng = np.random.default_rng([seed, seat])
        length = 2 + 2 * rng.integers(0, config.rounds, n)
        history = lambda size, rng=rng: bytes(rng.choice([*MOVES.encode()], size).tolist()).decode()
        prompts = [prompt_text("12"[seat], history(size - 2)).encode() for size in length]
        moves = np.where(rng.random(n) < config.cooperate, ord("C"), ord("D"))
        tokens, _ = pack(prompts, prompt_length(config))
        out[role] = letter_samples(tokens, length, moves, config.response)
    return out
