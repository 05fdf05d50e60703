"""A toy in which any token is a move: a coach names a question, a player answers it. Nothing has to be taught before.

The coach's token t is question t mod 8, and malformed where t mod 5 is 0. The player's token is answer t mod 3, and no
answer where t mod 7 is 0. The right answer to question q is q mod 3. ``flipped`` makes other answers right where the
coach wrote the question. ``mute``: every question of the coach is malformed.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxmarl_llm.envs.array_env import ArrayEnv, Observation, unless_finished


@dataclass(frozen=True)
class Config:
    seed: int = 0
    tasks: int = 16
    flipped: bool = False
    mute: bool = False


@struct.dataclass
class State:
    question: object  # -1 where there is none yet
    given: object
    turn: object
    done: object


def make(config):
    def reset(key, task):
        question = jnp.int32(task["question"])
        return State(question, question >= 0, jnp.int32(0), jnp.bool_(False))

    def observe(state):
        role = jnp.minimum(state.turn, 1)
        tokens = jnp.stack([ord("Q") + role, 48 + jnp.maximum(state.question, 0) * role])
        active = ~state.done & ((role > 0) | ~state.given)
        return Observation(role[None], tokens[None], jnp.array([2]), active[None])

    def step(key, state, tokens, length):
        token, answers, writes = tokens[0, 0], state.turn > 0, (state.turn == 0) & ~state.given
        legal = (token % 5 > 0) & (not config.mute)
        said = jnp.where(token % 7 == 0, -1, token % 3)
        truth = (state.question + jnp.where(config.flipped & ~state.given, 1, 0)) % 3
        after = State(
            jnp.where(writes & legal, token % 8, state.question),
            state.given,
            state.turn + 1,
            answers | (writes & ~legal),
        )
        own = lambda role, value: jnp.float32(jnp.where(jnp.arange(2) == role, value, 0))
        rewards = {
            "accuracy": jnp.full(2, answers & (said == truth), jnp.float32),
            "answer": own(1, jnp.where(answers, said, 0)),
            "malformed": own(0, writes & ~legal),
        }
        return unless_finished(state, after, rewards)

    components = ("accuracy", "answer", "malformed")
    return ArrayEnv("coaching", ("coach", "player"), 1, 2, components, ((0,), (1,)), reset, observe, step)


def make_tasks(config, seed=None, n=None, *, held_out=False):
    count = config.tasks if n is None else n
    return {"question": np.arange(count, dtype=np.int32) % 8 if held_out else np.full(count, -1, np.int32)}


def parts(config, tasks):
    return {"validation": tasks["question"] % 2 == 0, "test": tasks["question"] % 2 == 1}
