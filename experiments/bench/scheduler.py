"""Host rollouts whose states do not wait for each other, against rollouts that go turn by turn.

Episodes of several turns over a random model. Lengths are geometric, or all at their limit; a step of the environment
sleeps a time drawn uniformly. Both arms have the same keys, so the same tokens and the same sleeps.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench import Row, Suite, measure
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv, Message
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.rollout import host, scheduler
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.types import Model, Policy, Role, Team

SHAPE = Config(264, 256, 512, 4, 8, 4, 32)
TURNS_NAME = "turn by turn"
WARM = 3  # rollouts before any is timed: which sizes of tables occur depends on when environments return


class Case(NamedTuple):
    """A case.

    Attributes:
        tasks: Number of tasks.
        group: Episodes of each.
        turns: Turns of an episode.
        limit: Largest number of tokens of a completion.
        mean: Mean length of a completion; None: all are at the limit.
        sleep: Longest sleep of a step, in seconds.
        workers: Processes of the environment.
        lanes: Of the scheduler.
        target: Ratio that is asked for.
    """

    tasks: int
    group: int
    turns: int
    limit: int
    mean: float | None
    sleep: float
    workers: int
    lanes: int
    target: float


CASES: dict[str, dict[str, Case]] = {
    "cpu": {
        "lengths of one size, quick environment": Case(16, 4, 4, 64, None, 0.0, 2, 64, 0.97),
        "heavy-tailed lengths, quick environment": Case(16, 4, 4, 192, 24.0, 0.0, 2, 64, 1.0),
        "lengths of one size, slow environment": Case(16, 4, 4, 64, None, 2.0, 64, 64, 1.0),
        "heavy-tailed lengths, slow environment": Case(16, 4, 4, 192, 24.0, 2.0, 64, 64, 1.5),
        "lengths of one size, quick environment, 16 lanes": Case(16, 4, 4, 64, None, 0.0, 2, 16, 0.97),
        "heavy-tailed lengths, slow environment, 16 lanes": Case(16, 4, 4, 192, 24.0, 2.0, 64, 16, 1.5),
    },
    "tiny": {"heavy-tailed lengths, slow environment": Case(2, 2, 2, 8, 3.0, 0.01, 1, 4, 1.0)},
}


def run(suite: Suite) -> Iterator[Row]:
    return (case(suite, name, given) for name, given in CASES.get(suite.name, {}).items())


def environment(turns: int, sleep: float) -> HostEnv:
    """One role that hears what it has said, for ``turns`` turns; a step sleeps up to ``sleep`` seconds."""

    def step(seed: int, state: Any, actions: Any) -> tuple:
        if sleep:
            time.sleep(random.Random(seed).uniform(0, sleep))
        after = state[0], (*state[1], *actions["speaker"].ids, 10)
        return (*after, state[2] + 1), {"speaker": {"length": float(len(actions["speaker"].ids))}}, False

    def observe(state: Any) -> dict[str, tuple[Message, ...]]:
        return {"speaker": (Message("raw", "", (*f"task {state[0]}: say something.\n".encode(), *state[1])),)}

    return HostEnv("speaker", ("speaker",), turns, ("length",), lambda seed, task: (task, (), 0), observe, step)


def policy_of(mean: float | None) -> Policy:
    """A random model whose completions have the mean length ``mean``, or no end."""
    base, tokenizer = make_policy(SHAPE, remat=False), ByteTokenizer()
    bias = np.zeros(SHAPE.vocab_size, np.float32)
    # Logits have a standard deviation of about 1: a token of bias b has the odds e^b against V others.
    bias[list(tokenizer.stop_ids)] = -1e9 if mean is None else np.log(SHAPE.vocab_size * 1.6 / mean)
    return base._replace(unembed=lambda variables, hidden: base.unembed(variables, hidden) + bias)


def case(suite: Suite, name: str, given: Case) -> Row:
    policy, tokenizer = policy_of(given.mean), ByteTokenizer()
    team = Team((Role("speaker", "model", given.limit),), (Model("model", policy, tokenizer),))
    params = {"shared": {}, "agents": {"model": {"params": jax.jit(policy.init)(jax.random.key(0))}}}
    settings = HostSettings(flat(given.group), Sampling(), max_prompt=given.turns * (given.limit + 32))
    tasks, key = list(range(given.tasks)), jax.random.key(1)
    with EnvPool(functools.partial(environment, given.turns, given.sleep), workers=given.workers) as pool:
        asked = team, params, pool, tasks, key, settings
        forms: dict[str, Callable[[], Any]] = {
            "ours": lambda: scheduler.play(*asked, given.lanes),
            TURNS_NAME: lambda: host.play(*asked),
        }
        for _ in range(WARM):
            forms["ours"]()
        length = host.play(*asked).tree.steps
        shown = np.asarray(length.length)[np.asarray(length.valid)]
        facts = {"tokens of a completion": f"mean {shown.mean():.0f}, largest {shown.max()}"}
        return measure("scheduler", name, forms, suite.repeats, targets={TURNS_NAME: given.target}, facts=facts)
