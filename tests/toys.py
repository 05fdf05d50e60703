"""Small things that several tests play with: a tiny team, an array environment of four turns, a game through text,
forests of transitions."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxmarl_llm.envs.array_env import ArrayEnv, Observation
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.messages import HostEnv, Message
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.types import Model, Role, Team

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
def team(roles=("a", "b"), max_new_tokens=3, shared=False):
    p = policy()
    names = ["team" if shared else r for r in roles]
    models = tuple(Model(n, p, TOKENIZER) for n in dict.fromkeys(names))
    return Team(tuple(Role(r, n, max_new_tokens) for r, n in zip(roles, names)), models)


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


def paid(tree):
    """``tree`` with rewards that differ: the untrained teams of these runs earn nothing."""
    moves = tree.transitions
    said = np.where(moves.steps[..., None] >= 0, tree.steps.tokens[np.maximum(moves.steps, 0)], 0)
    worth = (said.sum((1, 2)) % 7 / 7).astype(np.float32)[:, None]
    rewards = {c: np.where(moves.played[:, None], worth, 0) * np.ones_like(r) for c, r in moves.rewards.items()}
    return tree.replace(transitions=moves.replace(rewards=rewards))


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


def random_forest(rng, rows=24, turns=4, roles=2):
    """Rows in any order, some invalid with garbage for rewards, the last few of them padding."""
    used = int(rng.integers(1, rows + 1))
    turn, parent = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
    for j in range(1, used):
        candidates = [i for i in range(j) if turn[i] < turns - 1]
        if candidates and rng.random() < 0.8:
            parent[j] = rng.choice(candidates)
            turn[j] = turn[parent[j]] + 1
    valid = (rng.random(rows) < 0.8) & (np.arange(rows) < used)
    rewards = rng.normal(size=(rows, roles)).astype(np.float32)
    rewards[~valid] = rng.choice([np.nan, np.inf, 1e30], size=(int((~valid).sum()), roles))
    order = rng.permutation(rows)  # row order[i] of the table moves to place i
    place = np.argsort(order)
    parent = np.where(parent >= 0, place[parent], -1)[order].astype(np.int32)
    return rewards[order], parent, turn[order], valid[order]


def text_game(config):
    """The game of a `matrix` configuration through text, for the host engine."""
    table = np.zeros((3, 3, 2))
    table[:2, :2] = np.array(matrix.GAMES[config.game]).reshape(2, 2, 2)

    def observe(state):
        def prompt(seat):
            history = "".join(f"{m[seat]}{m[1 - seat]}" for m in state)
            return (Message("raw", "", tuple(TOKENIZER.encode(f"{1 + seat}{history}>"))),)

        return {role: prompt(seat) for seat, role in enumerate(matrix.ROLES)}

    def step(seed, state, actions):
        said = [actions[r].text[:1] if actions[r].text[:1] in "CD" else "?" for r in matrix.ROLES]
        payoff = table["CD?".index(said[0] or "?"), "CD?".index(said[1] or "?")]
        social = float(payoff.sum())
        earned = [social, social] if config.rewards == "joint" else payoff.tolist()
        new = (*state, tuple(x or "?" for x in said))
        return (
            new,
            {r: {"payoff": earned[i], "social": social} for i, r in enumerate(matrix.ROLES)},
            len(new) >= config.rounds,
        )

    return HostEnv("game", matrix.ROLES, config.rounds, matrix.COMPONENTS, lambda s, t: (), observe, step)


def conversation(turns, *, together=False, summary=False):
    """Roles a and b speak in turn, or both at once; a prompt is the whole conversation. ``summary``: its last turn
    alone, behind a number of the turn, so that no prompt is a continuation."""

    def observe(state):
        task, said = state
        out = {}
        for role in "ab" if together else "ab"[len(said) % 2]:
            system = f"{len(said)}: you are {role}, " if summary else f"you are {role}, "
            prompt = [Message("system", system + "and answer in a few words of plain text"), Message("user", task)]
            for k, turn in enumerate(said[-1:] if summary else said):
                for owner, action in turn:
                    prompt.append(action.message(owner) if owner == role else Message("user", action.text))
                prompt.append(Message("user", f"turn {k} is over; what do you say now, {role}?"))
            out[role] = tuple(prompt)
        return out

    def step(seed, state, actions):
        state = state[0], (*state[1], tuple(sorted(actions.items())))
        return state, {r: {"pay": float(len(a.ids))} for r, a in actions.items()}, len(state[1]) == turns

    verify = lambda state: {"a": {"pay": 1.0}}
    return HostEnv("conversation", ("a", "b"), turns, ("pay",), lambda seed, task: (task, ()), observe, step, verify)
