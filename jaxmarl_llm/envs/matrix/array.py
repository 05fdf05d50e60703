"""Two-player matrix games, one-shot or iterated: two agents move at once, then see what both did. All in JAX.

    turn  role    prompt     a move
    0     first   1>         C or D
    0     second  2>         C or D
    1     first   1CD>       (own move, then the other's, of each round so far)

A move is the first token of a completion; any other token is no move (shown as ?), and both earn 0 in that round.
Payoffs of (first, second), as in MAGRPO's motivation (its Dec-POMDP against individual rewards) and textbooks:

    game          CC      CD      DC      DD      equilibria                      best social sum
    coordination  5, 5    4, 3    3, 4    0, 0    CC                              10 at CC
    chicken       5, 5    1, 6    6, 1    0, 0    CD, DC and (1/2, 1/2) mixed     10 at CC, no equilibrium
    prisoners     3, 3    0, 5    5, 0    1, 1    DD                              6 at CC

``rewards="joint"`` pays both agents the social sum (a Dec-POMDP), ``"individual"`` each its own payoff. Components to
look at: ``social``, the sum in both cases, and ``cooperation``, a player's share of C.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer
from jaxmarl_llm.types import ArrayEnv, Observation

PAD, EOS = ByteTokenizer.PAD, ByteTokenizer.EOS
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
    seed: int = 0  # all tasks are the same game
    tasks: int = 64
    game: str = "chicken"
    payoffs: tuple[tuple[float, float], ...] | None = None  # of (first, second) at CC, CD, DC, DD, instead of a game
    rewards: str = "joint"  # joint or individual
    rounds: int = 1
    response: int = 1  # R
    cooperate: float = 0.5  # share of C among the demonstrations

    def __post_init__(self):
        one_of("matrix: game", self.game, tuple(GAMES))
        one_of("matrix: rewards", self.rewards, ("joint", "individual"))
        if self.payoffs is not None and [len(p) for p in self.payoffs] != [2] * 4:
            raise ConfigError("matrix: payoffs: expected four pairs, of (first, second) at CC, CD, DC, DD")
        if self.rounds < 1 or self.response < 1 or self.tasks < 1 or not 0 <= self.cooperate <= 1:
            raise ConfigError("matrix: expected rounds, response, tasks >= 1 and cooperate in [0, 1]")


def prompt_length(config: Config) -> int:
    return 2 + 2 * (config.rounds - 1)


def entry_length(config: Config) -> int:
    """The longest memory entry: a prompt, a completion, sep."""
    return prompt_length(config) + config.response + 1


@struct.dataclass
class State:
    moves: Int[Array, "M 2"]  # 0 C, 1 D, 2 no move; rows from ``turn`` on are not played yet
    turn: Int[Array, ""]


def payoffs(config: Config) -> np.ndarray:
    """[2, 2, 2]: what (first, second) are paid for the moves of first and second, 0 C and 1 D."""
    return np.array(config.payoffs or GAMES[config.game], np.float32).reshape(2, 2, 2)


def flow(config: Config, cooperate: Float[np.ndarray, "... 2"]) -> Float[np.ndarray, "... 2"]:
    """Where exact policy gradients move both players' probabilities of C in the one-shot game.

    With p = sigmoid(x) of a player's own logit, ``dp = p (1 - p) du/dx = (p (1 - p))^2 (u(C) - u(D))``: u is what
    ``config.rewards`` pays, against the other's mixed move.
    """
    table = payoffs(config)
    pay = np.stack([table.sum(-1)] * 2, axis=-1) if config.rewards == "joint" else table
    p, q = np.moveaxis(np.asarray(cooperate, float), -1, 0)
    gain = pay[0] - pay[1], pay[:, 0] - pay[:, 1]  # of C over D, by the other's move
    first = q * gain[0][0, 0] + (1 - q) * gain[0][1, 0]
    second = p * gain[1][0, 1] + (1 - p) * gain[1][1, 1]
    return np.stack([(p * (1 - p)) ** 2 * first, (q * (1 - q)) ** 2 * second], axis=-1)


def make(config: Config) -> ArrayEnv:
    table = np.zeros((3, 3, 2), np.float32)  # a round without two moves pays nothing
    table[:2, :2] = payoffs(config)
    P, letters = prompt_length(config), jnp.array([*MOVES.encode(), ord("?")], jnp.int32)

    def reset(key: jax.Array, task: dict) -> State:
        return State(jnp.zeros((config.rounds, 2), jnp.int32), jnp.int32(0))

    def observe(state: State) -> Observation:
        def of(seat: int) -> jax.Array:
            history = letters[state.moves[:-1, ::-1] if seat else state.moves[:-1]].reshape(-1)
            row = jnp.concatenate([jnp.array([ord("1") + seat]), history, jnp.array([PAD])])
            at, end = jnp.arange(P), 1 + 2 * state.turn
            return jnp.where(at < end, row, jnp.where(at == end, ord(">"), PAD)).astype(jnp.int32)

        length = jnp.full(2, 2 + 2 * state.turn, jnp.int32)
        active = jnp.full(2, state.turn < config.rounds)
        return Observation(jnp.arange(2, dtype=jnp.int32), jnp.stack([of(0), of(1)]), length, active)

    def step(key: jax.Array, state: State, tokens: Int[Array, "W R"], length: Int[Array, "W"]):
        said = jnp.where(length > 0, tokens[:, 0], PAD)
        move = jnp.where(said == letters[0], 0, jnp.where(said == letters[1], 1, 2)).astype(jnp.int32)
        over = state.turn >= config.rounds
        payoff = jnp.where(over, 0.0, jnp.asarray(table)[move[0], move[1]])
        social = jnp.full(2, payoff.sum())
        here = (jnp.arange(config.rounds) == state.turn)[:, None]
        after = State(jnp.where(here, move, state.moves), jnp.minimum(state.turn + 1, config.rounds))
        rewards = {
            "payoff": social if config.rewards == "joint" else payoff,
            "social": social,
            "cooperation": ((move == 0) & ~over) / config.rounds,
        }
        return after, rewards, after.turn >= config.rounds

    actors = ((0, 1),) * config.rounds
    return ArrayEnv("matrix", ROLES, 2, config.rounds, COMPONENTS, actors, reset, observe, step)


def make_tasks(config: Config, seed: int | None = None, n: int | None = None) -> dict[str, np.ndarray]:
    return {"game": np.zeros(config.tasks if n is None else n, np.int32)}


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Random players: any history, a move that is C with probability ``cooperate``. Teaches legal moves alone."""
    out = {}
    for seat, role in enumerate(ROLES):
        rng = np.random.default_rng([seed, seat])
        tokens = np.full((n, prompt_length(config)), PAD, np.int32)
        completion = np.full((n, config.response), PAD, np.int32)
        length = 2 + 2 * rng.integers(0, config.rounds, n)
        for row in range(n):
            history = rng.choice([*MOVES.encode()], length[row] - 2).tolist()
            tokens[row, : length[row]] = [ord("1") + seat, *history, ord(">")]
        completion[:, 0] = np.where(rng.random(n) < config.cooperate, *MOVES.encode())
        completion[:, 1:2] = EOS
        size = np.full(n, min(2, config.response), np.int32)
        out[role] = dict(tokens=tokens, length=length.astype(np.int32), completion=completion, completion_length=size)
    return out
