"""Social dilemmas for two players with opposed rewards: the iterated prisoner's dilemma and Trust-and-Split, in JAX.

Both are the environments of Advantage Alignment for language models (arXiv 2511.19405). Each player is paid its own
payoff; ``social`` is the sum of both, to look at. Roles are `matrix`'s first and second; both always act at once.

    ipd    `matrix`'s prisoners for ``rounds`` rounds: payoffs 3, 3 (CC), 0, 5 (CD), 5, 0 (DC), 1, 1 (DD).
           Prompt 1CDCC>: own move, then the other's, of each round so far. ``cooperation``: a player's share of C.
    split  each round deals both players different hands of rock, paper and scissors, seen by their owners alone. The
           winning hand makes a coin worth 10 to its owner, the losing one 1. With ``message`` above 0 both first say
           so many bytes at most (a turn of its own), then both claim coins at once, 0 to 9 or X for ten, of 10:

               q_i = 10 p_i / max(10, p_1 + p_2),    payoff_i = q_i value_i

           Best for both together is that the winner takes all (100 a round); two greedy players earn 50 + 5.

           turn     prompt of the first
           message  1rs37,p>        for each of the last ``shown`` rounds: own hand, the other's, own claim, the other's
           claim    1rs37,p:p:r>    its own hand of this round (p), then what it said and what it heard

An illegal claim is shown as ? and claims nothing. Bytes of a message that prompts are built of, or that do not print,
are heard as ?. Hands are part of the task, so that all episodes of a task see the same ones (common random numbers).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import matrix
from jaxmarl_llm.envs.arrays import encoded, join, samples
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer
from jaxmarl_llm.types import ArrayEnv, Observation

PAD, EOS = ByteTokenizer.PAD, ByteTokenizer.EOS
ROLES = matrix.ROLES
GAMES = ("ipd", "split")
HANDS = "rps"  # each beats the one before it; r beats s
CLAIMS = "0123456789X"
COINS, HIGH, LOW = 10, 10.0, 1.0  # coins of a round; what one is worth to the winning and to the losing hand
ILLEGAL = len(CLAIMS)
MARKS = ">:,?"  # what prompts are built of


@dataclass(frozen=True)
class Config:
    seed: int = 0  # of the training tasks
    tasks: int = 256
    game: str = "ipd"
    rounds: int = 10
    message: int = 1  # split: bytes of a message; 0: no messages, one turn a round
    shown: int = 1  # split: past rounds that a prompt shows (ipd shows all)
    response: int = 1  # R of an ipd completion
    cooperate: float = 0.5  # share of C among the demonstrations (ipd)
    honest: float = 0.5  # demonstrators who say their hand, others say any (split)

    def __post_init__(self):
        one_of("dilemma: game", self.game, GAMES)
        if self.rounds < 1 or self.tasks < 1 or self.message < 0 or self.shown < 0 or self.response < 1:
            raise ConfigError("dilemma: expected rounds, tasks, response >= 1 and message, shown >= 0")
        if not 0 <= self.cooperate <= 1 or not 0 <= self.honest <= 1:
            raise ConfigError("dilemma: expected cooperate and honest in [0, 1]")

    @property
    def max_new(self) -> int:
        return self.response if self.game == "ipd" else max(self.message, 1)

    @property
    def as_matrix(self) -> matrix.Config:
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
    if config.game == "ipd":
        return matrix.prompt_length(config.as_matrix)
    said = 2 + 2 * config.message if config.message else 0
    return 1 + 5 * min(config.shown, config.rounds - 1) + 1 + said + 1


def entry_length(config: Config) -> int:
    """The longest memory entry: a prompt, a completion, sep."""
    return prompt_length(config) + config.max_new + 1


def make(config: Config) -> ArrayEnv:
    """Nothing is random but the tasks: keys are not used."""
    return matrix.make(config.as_matrix)._replace(name="dilemma") if config.game == "ipd" else _split(config)


@struct.dataclass
class State:
    hands: Int[Array, "M 2"]  # index into HANDS
    claims: Int[Array, "M 2"]  # 0 to 10 coins, ILLEGAL; rows from the round on are not played yet
    said: Int[Array, "2 T"]  # this round's messages, padded
    size: Int[Array, "2"]
    turn: Int[Array, ""]


def wins(own: Int[Array, "*b"], other: Int[Array, "*b"]) -> Bool[Array, "*b"]:
    """Whether a hand beats another one."""
    return (own - other) % 3 == 1


def payoffs(hands: Int[Array, "2"], claims: Int[Array, "2"]) -> Float[Array, "2"]:
    """What both players earn in a round; an ILLEGAL claim counts as 0."""
    p = jnp.where(claims == ILLEGAL, 0, claims)
    value = jnp.where(wins(hands, hands[::-1]), HIGH, LOW)
    return value * COINS * p / jnp.maximum(COINS, p.sum())


def _split(config: Config) -> ArrayEnv:
    M, talk, P = config.rounds, config.message > 0, prompt_length(config)
    turns, shown = M * (1 + talk), min(config.shown, M - 1)
    hand_byte, claim_byte = encoded(HANDS), encoded(CLAIMS + "?")

    def place(state: State) -> tuple[jax.Array, jax.Array]:
        """The round that is played, and whether its messages are still to come."""
        return (state.turn // 2, state.turn % 2 == 0) if talk else (state.turn, jnp.bool_(False))

    def reset(key: jax.Array, task: dict) -> State:
        said = jnp.full((2, config.message), PAD, jnp.int32)
        hands = jnp.asarray(task["hands"], jnp.int32)
        return State(hands, jnp.zeros((M, 2), jnp.int32), said, jnp.zeros(2, jnp.int32), jnp.int32(0))

    def observe(state: State) -> Observation:
        at, first = place(state)
        start = jnp.maximum(at - shown, 0)

        def of(seat: int) -> tuple[jax.Array, jax.Array]:
            mine = jnp.array([seat, 1 - seat])
            comma = jnp.full((M, 1), ord(","), jnp.int32)
            past = jnp.concatenate([hand_byte[state.hands[:, mine]], claim_byte[state.claims[:, mine]], comma], 1)
            past = jnp.roll(past, -start, axis=0)[:shown].reshape(-1)
            hand = hand_byte[state.hands[jnp.minimum(at, M - 1), seat]][None]
            pieces: list = [(encoded("12"[seat]), 1), (past, 5 * (at - start)), (hand, 1)]
            if talk:
                late = (~first).astype(jnp.int32)
                for who in (seat, 1 - seat):
                    pieces += [(encoded(":"), late), (state.said[who], late * state.size[who])]
            return join([*pieces, (encoded(">"), 1)], P)

        rows, lengths = zip(of(0), of(1), strict=True)
        active = jnp.full(2, state.turn < turns)
        return Observation(jnp.arange(2, dtype=jnp.int32), jnp.stack(rows), jnp.stack(lengths), active)

    def step(key: jax.Array, state: State, tokens: Int[Array, "W R"], length: Int[Array, "W"]):
        at, first = place(state)
        over = state.turn >= turns
        here = (jnp.arange(M) == at)[:, None] & ~first & ~over
        legal = (tokens[:, :1] == claim_byte[:ILLEGAL]) & (length[:, None] > 0)
        claim = jnp.where(legal.any(1), jnp.argmax(legal, axis=1), ILLEGAL).astype(jnp.int32)
        said, size = heard(tokens, length, config.message)
        after = State(
            state.hands,
            jnp.where(here, claim, state.claims),
            jnp.where(first & ~over, said, state.said),
            jnp.where(first & ~over, size, state.size),
            jnp.minimum(state.turn + 1, turns),
        )
        earned = payoffs(state.hands[jnp.minimum(at, M - 1)], claim)
        payoff = jnp.where(first | over, 0.0, earned)
        return after, {"payoff": payoff, "social": jnp.full(2, payoff.sum())}, after.turn >= turns

    actors = ((0, 1),) * turns
    return ArrayEnv("dilemma", ROLES, 2, turns, ("payoff", "social"), actors, reset, observe, step)


def heard(tokens: Int[Array, "W R"], length: Int[Array, "W"], most: int) -> tuple[Int[Array, "W T"], Int[Array, "W"]]:
    """Messages as the other player reads them: up to eos, T = ``most`` bytes at most, marks and non-text as ?."""
    cut = tokens[:, :most]
    cut = jnp.pad(cut, ((0, 0), (0, most - cut.shape[1])), constant_values=EOS)
    stop = (cut == EOS) | (jnp.arange(most) >= length[:, None])
    size = jnp.where(stop.any(1), jnp.argmax(stop, axis=1), most).astype(jnp.int32) if most else length * 0
    plain = (cut >= 32) & (cut < 127) & ~jnp.isin(cut, encoded(MARKS))
    text = jnp.where(plain, cut, ord("?"))
    return jnp.where(jnp.arange(most) < size[:, None], text, PAD).astype(jnp.int32), size


def make_tasks(config: Config, seed: int | None = None, n: int | None = None) -> dict[str, np.ndarray]:
    if config.game == "ipd":
        return matrix.make_tasks(config.as_matrix, seed, n)
    rng = np.random.default_rng([config.seed if seed is None else seed, 3])
    return {"hands": _deal(rng, (config.tasks if n is None else n, config.rounds))}


def _deal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Two different hands each [..., 2]."""
    first = rng.integers(0, 3, shape)
    return np.stack([first, (first + rng.integers(1, 3, shape)) % 3], -1).astype(np.int32)


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Random players in random places: any legal move. They teach what a move looks like, and nothing of strategy."""
    if config.game == "ipd":
        return matrix.demonstrations(config.as_matrix, seed, n, context=context)
    out = {}
    for seat, role in enumerate(ROLES):
        rng, prompts, completions = np.random.default_rng([seed, 4, seat]), [], []
        letter = lambda: HANDS[rng.integers(3)]
        claim = lambda: CLAIMS[rng.integers(len(CLAIMS))]
        say = lambda hand: (hand if rng.random() < config.honest else letter())[: config.message]
        for _ in range(n):
            rounds = rng.integers(0, min(config.shown, config.rounds - 1) + 1)
            dealt = [[HANDS[h] for h in _deal(rng, ())] for _ in range(rounds + 1)]
            past = "".join(f"{own}{other}{claim()}{claim()}," for own, other in dealt[:-1])
            own, other = dealt[-1]
            asked = f"{1 + seat}{past}{own}"
            if config.message and rng.random() < 0.5:
                reply = say(own)
            else:
                asked += f":{say(own)}:{say(other)}" if config.message else ""
                reply = claim()
            prompts.append([*f"{asked}>".encode()])
            completions.append([*reply.encode(), EOS][: config.max_new])
        out[role] = samples(prompts, completions, prompt_length(config), config.max_new)
    return out
