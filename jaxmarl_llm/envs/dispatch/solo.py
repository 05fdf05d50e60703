"""Dispatch played by one agent alone: it reads the query and answers it. The control of what a team adds.

Tasks, rewards and mistakes of the demonstrators are those of `dispatch`; there is no route, so nobody is misled by one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs import dispatch
from jaxmarl_llm.envs.arrays import encoded, join, samples
from jaxmarl_llm.envs.dispatch import COMPONENTS, EOS, KINDS, Config, make_tasks
from jaxmarl_llm.types import ArrayEnv, Observation

__all__ = ["Config", "demonstrations", "entry_length", "make", "make_tasks"]
P = 1 + dispatch.QUERY + 1  # S query >


@struct.dataclass
class State:
    task: dict[str, Int[Array, "..."]]
    done: Bool[Array, ""]
    verdict: Bool[Array, ""]


def entry_length(config: Config) -> int:
    return P + config.response + 1


def make(config: Config) -> ArrayEnv:
    R = config.response

    def reset(key: jax.Array, task: dict) -> State:
        return State(task, jnp.array(False), jnp.array(False))

    def observe(state: State) -> Observation:
        mark = encoded("S"), 1
        end = encoded(">"), 1
        tokens, length = join([mark, (state.task["query"], state.task["query_length"]), end], P)
        return Observation(jnp.zeros(1, jnp.int32), tokens[None], length[None], ~state.done[None])

    def step(key: jax.Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]) -> tuple:
        size = length[0]
        ended = tokens[0, size - 1] == EOS
        gold = jnp.pad(state.task["answer"], (0, R - dispatch.ANSWER))
        here = jnp.arange(R)
        same = jnp.where(here < state.task["answer_length"], tokens[0] == gold, True).all()
        right = ended & same & (size == state.task["answer_length"] + 1)
        values = config.accuracy * right, 2 * config.format * ended, config.efficiency * size / R
        live = ~state.done
        rewards = {c: (live * jnp.float32(v))[None] for c, v in zip(COMPONENTS, values)}
        return State(state.task, jnp.array(True), right), rewards, jnp.array(True)

    def verify(state: State) -> dict[str, Float[Array, "A"]]:
        zero = jnp.zeros(1)
        return {"accuracy": state.verdict.astype(jnp.float32)[None], "format": zero, "efficiency": zero}

    return ArrayEnv("dispatch_solo", ("solo",), 1, 1, COMPONENTS, ((0,),), reset, observe, step, verify)


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0, noise: float = 1.0) -> dispatch.Samples:
    """The mixture of queries with the specialists' mistakes; no memory entries."""
    rng = np.random.default_rng([seed, 3])
    weights = np.array(config.mixture)
    prompts, completions = [], []
    for kind in rng.choice(len(KINDS), size=n, p=weights / weights.sum()):
        values = dispatch.table(rng)
        query, _, said = dispatch.draw(rng, config, kind, values, noise)
        prompts.append([*f"S{query}>".encode()])
        completions.append([*said.encode(), EOS])
    return {"solo": samples(prompts, completions, P, config.response)}
