"""The interface of array environments, and what they share: rows of tokens, completions, rewards, samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.types import PyTree


class Finishing(Protocol):
    """A state that knows whether its episode has finished."""

    @property
    def done(self) -> jax.Array: ...


S = TypeVar("S", bound=Finishing)


class Observation(struct.PyTreeNode):
    """Observation of the seats of an array environment at one turn.

    Attributes:
        role: the index of the role in each of the W seats
        tokens: the prompt of each seat, padded to P tokens
        length: the number of tokens of each prompt
        active: False for an empty seat
        expert: the completion that an expert gives in place of the role's model, padded to X tokens; None: no experts
        expert_length: its number of tokens; 0 where the expert gives none, -1 where the model answers itself
    """

    role: Int[Array, " W"]
    tokens: Int[Array, "W P"]
    length: Int[Array, " W"]
    active: Bool[Array, " W"]
    expert: Int[Array, "W X"] | None = None
    expert_length: Int[Array, " W"] | None = None


def all_seats(prompts: Iterable[tuple[Array, Array]], active: Bool[Array, ""]) -> Observation:
    """The observation in which role i takes seat i.

    prompts: (tokens [P], length []) of each seat
    active: whether the seats act
    """
    rows, lengths = zip(*prompts, strict=True)
    seats = len(rows)
    return Observation(jnp.arange(seats, dtype=jnp.int32), jnp.stack(rows), jnp.stack(lengths), jnp.full(seats, active))


class ArrayEnv(NamedTuple):
    """An environment in JAX: whole rollouts compile into one program. States are pytrees of fixed shape.

    name: the environment's name
    roles: the names of the roles, A of them
    seats: the number W of roles that act at one turn
    max_turns: the number of turns of the longest episode
    components: the names of the reward components
    actors: actors[t] are the roles that may act at turn t, as indices into ``roles``; a program compiles only those.
        Where they are as many as the seats, role ``actors[t][w]`` takes seat w. Otherwise any may take any seat.
    reset: reset(key, task) -> state, with ``task`` a pytree of arrays
    observe: observe(state) -> Observation
    step: step(key, state, tokens [W R], length [W]) -> (state, {component: [A]}, done [])
    verify: verify(state) -> {component: [A]}, a local verdict on an unfinished state; None where there is none
    """

    name: str
    roles: tuple[str, ...]
    seats: int
    max_turns: int
    components: tuple[str, ...]
    actors: tuple[tuple[int, ...], ...]
    reset: Callable[[jax.Array, PyTree], PyTree]
    observe: Callable[[PyTree], Observation]
    step: Callable[..., tuple[PyTree, Mapping[str, jax.Array], jax.Array]]
    verify: Callable[[PyTree], Mapping[str, jax.Array]] | None = None

    def seats_of(self, turn: int, roles: Collection[int]) -> list[int]:
        """The seats that one of ``roles`` (indices) may take at ``turn``."""
        actors = self.actors[turn]
        if len(actors) == self.seats:
            return [seat for seat, role in enumerate(actors) if role in roles]
        return list(range(self.seats)) if set(actors) & set(roles) else []


PAD, EOS = ByteTokenizer.PAD, ByteTokenizer.EOS
UNREADABLE = ord("?")  # stands in prompts for what could not be read
Samples = dict[str, dict[str, np.ndarray]]  # demonstrations by role, each as `samples` returns them


# -- rows of tokens ----------------------------------------------------------------------------------------------------


def encoded(text: str) -> Int[Array, " T"]:
    """The bytes of ``text``, one token each."""
    return jnp.array(list(text.encode()), jnp.int32)


def join(pieces: Sequence[tuple[Array, Array | int]], size: int) -> tuple[Int[Array, " P"], Int[Array, ""]]:
    """The pieces one after the other, padded to P = ``size`` tokens, and the number of their tokens.

    A piece is (tokens [T], length []): only its first ``length`` tokens count. Tokens beyond ``size`` are dropped, but
    counted.
    """
    row, end = jnp.full(size, PAD, jnp.int32), jnp.int32(0)
    for tokens, length in pieces:
        here = jnp.arange(tokens.shape[0])
        row = row.at[jnp.where(here < length, end + here, size)].set(tokens, mode="drop")
        end = end + length
    return row, end


def pack(rows: Sequence[Sequence[int]], size: int) -> tuple[Int[np.ndarray, "N T"], Int[np.ndarray, " N"]]:
    """Pad ``rows`` of token ids to T = ``size``. Returns them and their lengths; raises ValueError for a longer row."""
    packed = np.full((len(rows), size), PAD, np.int32)
    for row, ids in zip(packed, rows, strict=True):
        row[: len(ids)] = list(ids)
    return packed, np.array([len(ids) for ids in rows], np.int32)


# -- completions -------------------------------------------------------------------------------------------------------


def completion_end(tokens: Int[Array, "*b R"], length: Int[Array, "*b"]) -> tuple[Bool[Array, "*b"], Int[Array, "*b"]]:
    """Whether each completion ended with eos, and its number of tokens without eos.

    tokens: the completions, padded
    length: the number of sampled tokens of each; a token behind them is never an eos
    """
    stops = (tokens == EOS) & (jnp.arange(tokens.shape[-1]) < length[..., None])
    ended = stops.any(-1)
    return ended, jnp.where(ended, jnp.argmax(stops, axis=-1), length).astype(jnp.int32)


def readable_part(
    tokens: Int[Array, "W R"],
    length: Int[Array, " W"],
    most: int,
    allowed: Callable[[Int[Array, "W T"]], Bool[Array, "W T"]],
    least: int = 0,
) -> tuple[Int[Array, "W T"], Int[Array, " W"]]:
    """Completions as other players read them, padded to T = ``most`` tokens, and their lengths.

    A completion is cut before its eos and behind T tokens. A token that is not allowed is shown as ?, and ? also fills
    a short completion.

    Args:
        tokens: completions [W R]
        length: tokens of each completion [W]
        most: T
        allowed: tokens [W T] -> whether each may be shown [W T]
        least: smallest number of tokens of a result
    """
    cut = jnp.pad(tokens[:, :most], ((0, 0), (0, max(0, most - tokens.shape[1]))), constant_values=EOS)
    here = jnp.arange(most)
    size = completion_end(cut, jnp.minimum(length, most))[1] if most else jnp.zeros_like(length)
    text = jnp.where(allowed(cut) & (here < size[:, None]), cut, UNREADABLE)
    size = jnp.maximum(size, least).astype(jnp.int32)
    return jnp.where(here < size[:, None], text, PAD).astype(jnp.int32), size


# -- rewards and finished episodes -------------------------------------------------------------------------------------


def to_all(roles: Sequence[str], value: Array | float) -> Float[Array, " A"]:
    """One reward ``value`` for each of the A ``roles``."""
    return jnp.full(len(roles), value, jnp.float32)


def unless_finished(
    before: S, after: S, rewards: Mapping[str, Float[Array, " A"]]
) -> tuple[S, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The result of a step: (state, rewards, done). A finished episode keeps its state and earns 0.

    before, after: the states before and behind the step; both have a field ``done`` []
    rewards: component -> [A], of the step
    """
    finished = before.done
    state = jax.tree.map(lambda old, new: jnp.where(finished, old, new), before, after)
    return state, {name: jnp.where(finished, 0.0, r) for name, r in rewards.items()}, state.done


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def task_draws(
    config: Any, seed: int | None, n: int | None, stream: int, held_out: bool = False
) -> tuple[np.random.Generator, int]:
    """The random generator of a task set, and the number of its tasks.

    config: supplies ``seed`` and ``tasks`` where the arguments ``seed`` and ``n`` are None
    stream: tells apart the generators that one environment derives from one seed
    held_out: held-out tasks have a generator of their own
    """
    entropy = [config.seed if seed is None else seed, stream, *([1] if held_out else [])]
    return np.random.default_rng(entropy), config.tasks if n is None else n


def samples(
    prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], prompt: int, completion: int
) -> dict[str, np.ndarray]:
    """Demonstrations of one role: tokens [n P] and completion [n R], with length and completion_length [n].

    prompts, completions: token ids of the n samples
    prompt, completion: P and R, to which they are padded
    """
    tokens, length = pack(prompts, prompt)
    reply, size = pack(completions, completion)
    return {"tokens": tokens, "length": length, "completion": reply, "completion_length": size}


def text_samples(pairs: Iterable[tuple[str, str]], prompt: int, completion: int) -> dict[str, np.ndarray]:
    """Demonstrations of one role from ``pairs`` of prompt and completion texts, padded as in `samples`.

    A completion ends with eos unless its text alone has ``completion`` tokens.
    """
    texts = [([*asked.encode()], [*reply.encode()]) for asked, reply in pairs]
    replies = [[*ids, EOS] if len(ids) < completion else ids for _, ids in texts]
    return samples([ids for ids, _ in texts], replies, prompt, completion)


def letter_samples(
    tokens: Int[np.ndarray, "n P"], length: Int[np.ndarray, " n"], letters: Int[np.ndarray, " n"], completion: int
) -> dict[str, np.ndarray]:
    """Demonstrations of one role whose completions are one letter each, and eos where R = ``completion`` has room.

    ``tokens``: prompts [n P]. ``length``: tokens of each prompt [n]. ``letters``: token of each letter [n].
    """
    reply = np.full((len(letters), completion), PAD, np.int32)
    reply[:, 0], reply[:, 1:2] = letters, EOS
    size = np.full(len(letters), min(2, completion), np.int32)
    return {"tokens": tokens, "length": length.astype(np.int32), "completion": reply, "completion_length": size}
