"""Dispatch with one agent alone, which reads the query and answers it: the control that shows what a team adds.

Tasks, rewards and mistakes of the demonstrators are those of `dispatch`. There is no route, so a wrong one misleads
nobody.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` determines tasks and demonstrations, and
``n`` is the number of samples of a role.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs.array_env import EOS, ArrayEnv, Observation, Samples, text_samples, to_all
from jaxmarl_llm.envs.dispatch import array as dispatch
from jaxmarl_llm.envs.dispatch.array import COMPONENTS, KINDS, Config, make_tasks, parts
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text

__all__ = ["Config", "demonstrations", "entry_length", "make", "make_tasks", "parts"]
ROLES = ("solo",)
P = 1 + dispatch.QUERY + 1  # S query >


@struct.dataclass
class State:
    """An episode so far."""

    task: dict[str, Int[Array, "..."]]
    done: Bool[Array, ""]
    verdict: Bool[Array, ""]  # whether the answer was right


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion, sep."""
    return P + config.response + 1


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    play = partial(step, config)
    return ArrayEnv("dispatch_solo", ROLES, 1, 1, COMPONENTS, ((0,),), reset, observe, play, verify)


def reset(key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    return State(dict(task), jnp.array(False), jnp.array(False))


def observe(state: State) -> Observation:
    """The agent's prompt."""
    tokens, length = prompt_row("S", [(state.task["query"], state.task["query_length"])], (), P)
    return Observation(jnp.zeros(1, jnp.int32), tokens[None], length[None], ~state.done[None])


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The last state, the rewards of the answer, and True: the episode has finished."""
    size, R = length[0], config.response
    ended = tokens[0, size - 1] == EOS
    gold = jnp.pad(state.task["answer"], (0, R - dispatch.ANSWER))
    same = jnp.where(jnp.arange(R) < state.task["answer_length"], tokens[0] == gold, True).all()
    right = ended & same & (size == state.task["answer_length"] + 1)
    values = config.accuracy * right, 2 * config.format * ended, config.efficiency * size / R
    rewards = {c: (~state.done * jnp.float32(v))[None] for c, v in zip(COMPONENTS, values, strict=True)}
    return State(state.task, jnp.array(True), right), rewards, jnp.array(True)


def verify(state: State) -> dict[str, Float[Array, " A"]]:
    """The accuracy of the answer, 1 or 0."""
    zero = jnp.zeros(1)
    return {"accuracy": to_all(ROLES, state.verdict), "format": zero, "efficiency": zero}


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0, noise: float = 1.0) -> Samples:
    """The mixture of queries with the specialists' mistakes, scaled by ``noise``. ``context`` is not used."""
    rng = np.random.default_rng([seed, 3])
    weights = np.array(config.mixture)
    pairs = []
    for kind in rng.choice(len(KINDS), size=n, p=weights / weights.sum()):
        values = dispatch.table(rng)
        query, _, answer = dispatch.drawn(rng, config, kind, values, noise)
        pairs.append((prompt_text("S", query), answer))
    return {"solo": text_samples(pairs, P, config.response)}
