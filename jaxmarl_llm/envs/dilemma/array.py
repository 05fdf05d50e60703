"""Social dilemmas for two players with opposed rewards: the iterated prisoner's dilemma and Trust-and-Split, in JAX.

Both are the environments of Advantage Alignment for language models (arXiv 2511.19405). Each player is paid its own
payoff; ``social``, the sum of both, is for the log. Roles are `matrix`'s first and second; both always act at once.

    ipd    `matrix`'s prisoners for ``rounds`` rounds: payoffs 3, 3 (CC), 0, 5 (CD), 5, 0 (DC), 1, 1 (DD).
           Prompt 1CDCC>: own move, then the other's, of each round so far. ``cooperation``: a player's share of C.
    split  each round deals both players different hands of rock, paper and scissors, seen by their owners alone. The
           winning hand makes a coin worth 10 to its owner, the losing one 1. With ``message`` above 0 both first send
           that many bytes at most (a turn of its own). Then both claim coins at once, 0 to 9 or X for ten, of 10:

               q_i = 10 p_i / max(10, p_1 + p_2),    payoff_i = q_i value_i

           Best for both together is that the winner takes all (100 a round); two greedy players earn 50 + 5.

           turn     prompt of the first
           message  1rs37,p>        for each of the last ``shown`` rounds: own hand, the other's, own claim, the other's
           claim    1rs37,p:p:r>    its own hand of this round (p), then its message and the other's

An illegal claim is shown as ? and claims nothing. Bytes of a message that prompts are built of, or that do not print,
are heard as ?. Hands are part of the task, so that all episodes of a task have the same ones (common random numbers).

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[2 R] are completions, and ``length`` [2] their numbers of tokens. ``seed`` determines tasks and demonstrations, and
``n`` is the number of samples of a role.
"""

from __future__ import annotations

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
    readable_part,
    task_draws,
    text_samples,
    to_all,
)
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.envs.prompt_grammar import END, prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task

ROLES = matrix.ROLES
GAMES = ("ipd", "split")
HANDS = "rps"  # each beats the one before it; r beats s
CLAIMS = "0123456789X"
COINS, HIGH, LOW = 10, 10.0, 1.0  # coins of a round; the value of one to the winning and to the losing hand
ILLEGAL = len(CLAIMS)
BAR, COMMA = ":", ","  # in prompts: before a message, behind a past round
MARKS = END + BAR + COMMA + "?"  # what prompts are built of


@dataclass(frozen=True)
class Config:
    """The settings of the game and its demonstrations."""

    seed: int = 0  # of the training tasks
    tasks: int = 256  # training tasks
    game: str = "ipd"  # ipd, or split: Trust-and-Split
    rounds: int = 10  # rounds of an episode
    message: int = 1  # split: bytes of a message; 0: no messages, one turn a round
    shown: int = 1  # split: past rounds that a prompt shows (ipd shows all)
    response: int = 1  # R of an ipd completion
    cooperate: float = 0.5  # share of C among the demonstrations (ipd)
    honest: float = 0.5  # share of demonstrators whose message is their hand, others send any hand (split)

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        one_of(f"{path}.game", self.game, GAMES)
        checks.in_range(path, self, 1, checks.MOST_ROUNDS, "rounds")
        checks.in_range(path, self, 0, checks.MOST_TEXT, "message")
        checks.at_least(path, self, 0, "shown")
        checks.in_range(path, self, 1, checks.MOST_TEXT, "response")
        checks.probabilities(path, self, "cooperate", "honest")

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the longest completion."""
        return self.response if self.game == "ipd" else max(self.message, 1)

    @property
    def past(self) -> int:
        """The most past rounds in a prompt of split."""
        return min(self.shown, self.rounds - 1)

    @property
    def turns(self) -> int:
        """The number of turns of an episode of split."""
        return self.rounds * (1 + (self.message > 0))

    @property
    def as_matrix(self) -> matrix.Config:
        """The configuration of ipd as a matrix game."""
        return matrix.Config(
            seed=self.seed,
            tasks=self.tasks,
            game="prisoners",
            rewards="individual",
            rounds=self.rounds,
            response=self.response,
            cooperate=self.cooperate,
        )


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    if config.game == "ipd":
        return matrix.prompt_length(config.as_matrix)
    messages = 2 + 2 * config.message if config.message else 0
    return 1 + 5 * config.past + 1 + messages + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion, sep."""
    return prompt_length(config) + config.max_new_tokens + 1


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    if config.game == "ipd":
        return matrix.make(config.as_matrix)._replace(name="dilemma")
    return ArrayEnv(
        name="dilemma",
        roles=ROLES,
        seats=2,
        max_turns=config.turns,
        components=("payoff", "social"),
        actors=((0, 1),) * config.turns,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


@struct.dataclass
class State:
    """An episode of split so far, with M = ``rounds`` and T = ``message``."""

    hands: Int[Array, "M 2"]  # index into HANDS
    claims: Int[Array, "M 2"]  # 0 to 10 coins, ILLEGAL; rows from the round on are not played yet
    messages: Int[Array, "2 T"]  # this round's, padded
    size: Int[Array, "2"]
    turn: Int[Array, ""]


def wins(own: Int[Array, "*b"], other: Int[Array, "*b"]) -> Bool[Array, "*b"]:
    """Whether the hand ``own`` beats the hand ``other``."""
    return (own - other) % 3 == 1


def payoffs(hands: Int[Array, "2"], claims: Int[Array, "2"]) -> Float[Array, "2"]:
    """Payoffs [2] of a round of split.

    ``hands``: hand of each player [2]. ``claims``: claim of each player [2]; an ILLEGAL claim counts as 0.
    """
    p = jnp.where(claims == ILLEGAL, 0, claims)
    value = jnp.where(wins(hands, hands[::-1]), HIGH, LOW)
    return value * COINS * p / jnp.maximum(COINS, p.sum())


def _place(config: Config, state: State) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """The round that is played, and whether its messages are still to come."""
    return (state.turn // 2, state.turn % 2 == 0) if config.message > 0 else (state.turn, jnp.bool_(False))


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode of split on ``task``, one row of `make_tasks`."""
    messages = jnp.full((2, config.message), PAD, jnp.int32)
    hands = jnp.asarray(task["hands"], jnp.int32)
    return State(hands, jnp.zeros((config.rounds, 2), jnp.int32), messages, jnp.zeros(2, jnp.int32), jnp.int32(0))


def observe(config: Config, state: State) -> Observation:
    """The prompts of both players of split."""
    M, (at, first) = config.rounds, _place(config, state)
    start = jnp.maximum(at - config.past, 0)
    hand_byte, claim_byte = encoded(HANDS), encoded(CLAIMS + chr(UNREADABLE))

    def prompt(seat: int) -> tuple[Int[Array, " P"], Int[Array, ""]]:
        mine = jnp.array([seat, 1 - seat])
        comma = jnp.full((M, 1), ord(COMMA), jnp.int32)
        past = jnp.concatenate([hand_byte[state.hands[:, mine]], claim_byte[state.claims[:, mine]], comma], 1)
        past = jnp.roll(past, -start, axis=0)[: config.past].reshape(-1)
        hand = hand_byte[state.hands[jnp.minimum(at, M - 1), seat]][None]
        entries = [(~first, [(state.messages[who], state.size[who])]) for who in (seat, 1 - seat)]
        subject: list = [(past, 5 * (at - start)), (hand, 1)]
        return prompt_row("12"[seat], subject, entries if config.message else (), prompt_length(config), BAR)

    return all_seats((prompt(0), prompt(1)), state.turn < config.turns)


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "2 R"], length: Int[Array, "2"]
) -> tuple[State, dict[str, Float[Array, "2"]], Bool[Array, ""]]:
    """The state after a turn of split, its rewards, and whether the episode has finished."""
    M, (at, first) = config.rounds, _place(config, state)
    over = state.turn >= config.turns
    here = (jnp.arange(M) == at)[:, None] & ~first & ~over
    legal = (tokens[:, :1] == encoded(CLAIMS)) & (length[:, None] > 0)
    claim = jnp.where(legal.any(1), jnp.argmax(legal, axis=1), ILLEGAL).astype(jnp.int32)
    messages, size = heard(tokens, length, config.message)
    after = State(
        hands=state.hands,
        claims=jnp.where(here, claim, state.claims),
        messages=jnp.where(first & ~over, messages, state.messages),
        size=jnp.where(first & ~over, size, state.size),
        turn=jnp.minimum(state.turn + 1, config.turns),
    )
    earned = payoffs(state.hands[jnp.minimum(at, M - 1)], claim)
    payoff = jnp.where(first | over, 0.0, earned)
    return after, {"payoff": payoff, "social": to_all(ROLES, payoff.sum())}, after.turn >= config.turns


def heard(tokens: Int[Array, "W R"], length: Int[Array, " W"], most: int) -> tuple[Int[Array, "W T"], Int[Array, " W"]]:
    """Messages as the other player reads them, and their lengths: up to eos, T = ``most`` bytes at most.

    Marks of the prompt and bytes that do not print are heard as ?.
    """
    plain = lambda cut: (cut >= 32) & (cut < 127) & ~jnp.isin(cut, encoded(MARKS))
    return readable_part(tokens, length, most, plain)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``): hands [n M 2] in split.

    ``held_out``: the side of the split. The hands make a task itself; all tasks of ipd are the same.
    """
    if config.game == "ipd":
        return matrix.make_tasks(config.as_matrix, seed, n)
    rng, count = task_draws(config, seed, n, 3, held_out)
    return {"hands": np.stack([_hands(rng, config, held_out) for _ in range(count)])}


def _hands(rng: np.random.Generator, config: Config, held_out: bool = False) -> np.ndarray:
    """The hands [M 2] of a task of split on one side of the split by content."""
    return draw_task(lambda: _deal(rng, (config.rounds,)), np.ndarray.tobytes, held_out)


def same_tasks(config: Config) -> bool:
    """Whether all tasks are one game."""
    return config.game == "ipd"


def _deal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Two different hands for each element of ``shape``, [..., 2]."""
    first = rng.integers(0, 3, shape)
    return np.stack([first, (first + rng.integers(1, 3, shape)) % 3], -1).astype(np.int32)


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Samples of random players in random places: any legal move.

    The samples have the form of a move and no strategy. Samples of each role, as in `array_env.samples`. ``context`` is
    not used.
    """
    if config.game == "ipd":
        return matrix.demonstrations(config.as_matrix, seed, n, context=context)
    out = {}
    for seat, role in enumerate(ROLES):
        rng = np.random.default_rng([seed, 4, seat])
        pairs = (_demonstration(rng, config, seat) for _ in range(n))
        out[role] = text_samples(pairs, prompt_length(config), config.max_new_tokens)
    return out


def _demonstration(rng: np.random.Generator, config: Config, seat: int) -> tuple[str, str]:
    """A prompt and completion of the player in ``seat`` in split: a round of a training task, whose hands it shows."""
    letter = lambda: HANDS[rng.integers(3)]
    claim = lambda: CLAIMS[rng.integers(len(CLAIMS))]
    message = lambda hand: (hand if rng.random() < config.honest else letter())[: config.message]
    hands = _hands(rng, config)[:, [seat, 1 - seat]]
    rounds = rng.integers(0, config.past + 1)  # that the prompt shows
    at = rng.integers(config.past, config.rounds) if rounds == config.past else rounds  # early rounds show all before
    dealt = [[HANDS[h] for h in pair] for pair in hands[at - rounds : at + 1]]
    past = "".join(f"{own}{other}{claim()}{claim()}{COMMA}" for own, other in dealt[:-1])
    own, other = dealt[-1]
    mark, subject = "12"[seat], past + own
    if config.message and rng.random() < 0.5:
        return prompt_text(mark, subject), message(own)
    messages = [message(own), message(other)] if config.message else []
    return prompt_text(mark, subject, messages, BAR), claim()
