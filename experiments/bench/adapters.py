"""Sampling of roles that are adapters of one backbone: one launch for all of them, against a launch for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.bench import SHAPES, Row, Suite, measure
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.rollout.launches import GenerationRequest, TeamSampler
from jaxmarl_llm.types import Model, Role, Team

ONE_BY_ONE = "a launch for each adapter"


class Case(NamedTuple):
    """A case.

    Attributes:
        shape: Name of the backbone's shape.
        adapters: Number of roles.
        rank: Of an adapter.
        nodes: Prompts of a turn; each has one sample, and the roles take turns.
        prompt: Tokens of a prompt.
        response: Tokens of a completion.
    """

    shape: str
    adapters: int
    rank: int
    nodes: int
    prompt: int
    response: int


CASES: dict[str, tuple[Case, ...]] = {
    "cpu": (Case("smollm2_135m", 5, 16, 64, 140, 32),),
    "accelerator": (Case("qwen2_5_0_5b", 5, 16, 64, 512, 64), Case("qwen2_5_3b", 5, 16, 64, 512, 64)),
    "tiny": (Case("tiny", 2, 2, 4, 12, 4),),
    "tiny_accelerator": (Case("tiny", 2, 2, 4, 12, 4),),
}


class OneByOne(TeamSampler):
    """A launch for each model of a turn."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._together = [(index,) for index in range(len(self._team.models))]


def run(suite: Suite) -> Iterator[Row]:
    return (case(suite, given) for given in CASES[suite.name])


def case(suite: Suite, given: Case) -> Row:
    cfg, rng = dataclasses.replace(SHAPES[given.shape], dtype=suite.dtype), np.random.default_rng(0)
    policy, tokenizer = make_policy(cfg), SimpleNamespace(decode=str, stop_ids=(), pad_id=0)
    roles = [f"role {index}" for index in range(given.adapters)]
    models = tuple(Model(role, policy, tokenizer, "base") for role in roles)
    team = Team(tuple(Role(role, role, given.response) for role in roles), models)
    base = jax.jit(policy.init)(jax.random.key(0))
    adapters = {role: {"lora": init_lora(jax.random.key(i), base, given.rank)} for i, role in enumerate(roles)}
    params = {"shared": {"base": base}, "agents": adapters}
    keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(1), given.nodes)))
    prompts = rng.integers(0, cfg.vocab_size, (given.nodes, given.prompt)).tolist()
    requests = [
        GenerationRequest(n % given.adapters, 1, n, n % given.adapters, keys[n], prompt)
        for n, prompt in enumerate(prompts)
    ]

    def turn(sampler: type[TeamSampler]) -> Callable[[], Any]:
        return lambda: sampler(team, params, Sampling()).sample(requests, more=False)

    name = f"{given.shape}, {given.adapters} adapters, N={given.nodes}, P={given.prompt}, R={given.response}"
    return measure("adapters", name, {"ours": turn(TeamSampler), ONE_BY_ONE: turn(OneByOne)}, suite.repeats)
