"""Small things that several tests play with: a tiny team, and an array environment of four turns."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import struct

from jaxmarl_llm.qwen import Config, make_policy
from jaxmarl_llm.tokenizer import ByteTokenizer
from jaxmarl_llm.types import ArrayEnv, Model, Observation, Role, Team

TOKENIZER = ByteTokenizer()


def policy(family="qwen2", hidden=16, layers=1, **extra):
    cfg = Config(
        264,
        hidden,
        2 * hidden,
        layers,
        4,
        2,
        hidden // 4,
        family=family,
        attention_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        **extra,
    )
    return make_policy(cfg, remat=False)


@functools.cache
def team(roles=("a", "b"), max_new=3, shared=False):
    p = policy()
    names = ["team" if shared else r for r in roles]
    models = tuple(Model(n, p, TOKENIZER) for n in dict.fromkeys(names))
    return Team(tuple(Role(r, n, max_new) for r, n in zip(roles, names)), models)


def params(t, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(t.models))
    return {"shared": {}, "agents": {m.name: {"params": m.policy.init(k)} for m, k in zip(t.models, keys)}}


@struct.dataclass
class Relay:
    start: jax.Array
    turn: jax.Array
    last: jax.Array
    total: jax.Array


def relay(turns=4, poison=-1):
    """Roles a and b alternate; each pays for the parity of its first token. Never ends before the last turn.

    ``poison``: the turn whose reward is NaN for task 0.
    """

    def reset(key, task):
        start = task["start"].astype(jnp.int32)
        return Relay(start, jnp.int32(0), start, jnp.float32(0))

    def observe(state):
        tokens = jnp.stack([state.last, 65 + state.turn, jnp.int32(62), jnp.int32(256)])[None]
        return Observation((state.turn % 2)[None], tokens.astype(jnp.int32), jnp.array([3]), jnp.array([True]))

    def step(key, state, tokens, length):
        first = tokens[0, 0]
        pay = (first % 2).astype(jnp.float32) + jnp.float32(0.01) * state.turn
        pay = jnp.where((state.turn == poison) & (state.start == 65), jnp.nan, pay)
        new = Relay(state.start, state.turn + 1, 65 + first % 2, state.total + pay)
        return new, {"accuracy": jnp.full(2, pay)}, new.turn >= turns

    def verify(state):
        return {"accuracy": jnp.full(2, state.total)}

    actors = tuple((t % 2,) for t in range(turns))
    return ArrayEnv("relay", ("a", "b"), 1, turns, ("accuracy",), actors, reset, observe, step, verify)


def relay_tasks(n):
    return {"start": jnp.arange(65, 65 + n)}


class Compiles:
    """Programs that the backend compiles, or loads from its cache, while the block runs."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event, duration, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"
