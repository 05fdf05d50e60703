"""Whole steps, rollout to update, through what a user runs: recipes on an array environment of fixed prompts.

GRPO against TRL and google-tunix, MAGRPO with two agents against CoMLRL: the same shape, tokens and number of samples,
a trivial reward, exactly R new tokens each, one optimizer step; no layer is recomputed in the backward pass.
google-tunix gets a smaller group: its micro-batches are whole groups, of which 16 need 36 GB here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench import SHAPES, Row, Suite, measure, peers, torch_forms, trunk_ratio, update
from experiments.bench.apart import apart
from experiments.bench.decode import sampler
from jaxmarl_llm.envs.array_env import ArrayEnv, Observation
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.models import decoder, decoder_config
from jaxmarl_llm.models.tokenizer import Tokenizer
from jaxmarl_llm.recipes import grpo, magrpo
from jaxmarl_llm.rollout.make_runner import make_env_runner
from jaxmarl_llm.runs import phases
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.algorithm import StepResult
from jaxmarl_llm.training.learner import make_learner
from jaxmarl_llm.training.step_metrics import diagnose
from jaxmarl_llm.training.train_step import TrainStep
from jaxmarl_llm.types import Model, Role, Team

TRL, TUNIX, COMLRL = "TRL", "google-tunix", "CoMLRL"
SIMPLE = "naive JAX", "PyTorch"
STACKED = "agents in one launch"  # also ours: `TeamConfig.batch_models`
# Shape, agents, samples, prompt, response, others, targets.
CASES: dict[str, tuple[tuple[str, int, int, int, int, tuple[str, ...], dict[str, float]], ...]] = {
    "cpu": (
        ("smollm2_135m", 1, 16, 512, 64, (TRL,), {TRL: 5}),
        ("smollm2_135m", 1, 4, 512, 64, (TUNIX,), {TUNIX: 4}),
        ("smollm2_135m", 2, 4, 115, 64, (COMLRL,), {COMLRL: 2}),
        ("7m", 2, 4, 115, 64, (COMLRL,), {COMLRL: 8}),
    ),
    "accelerator": (("qwen2_5_0_5b", 1, 16, 512, 64, SIMPLE, {}),),
    "tiny": (("tiny", 1, 4, 16, 8, (TRL, TUNIX), {TRL: 5}), ("tiny", 2, 4, 16, 8, (COMLRL,), {})),
    "tiny_accelerator": (("tiny", 1, 4, 16, 8, SIMPLE, {}),),
}


class Endless(Tokenizer):
    """Tokenizer whose ids have no text, and none ends a completion."""

    name, pad_id, stop_ids = "ids", 0, ()

    def __init__(self, vocab: int) -> None:
        self.vocab_size = vocab

    def encode(self, text: str) -> list[int]:
        return []

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def layout(self, shape: tuple[tuple[str, bool], ...]) -> tuple:
        return ()


# ------------------------------------------------------------------------------ the environment, as modules of envs are


@dataclass(frozen=True)
class Config:
    agents: int = 1
    prompt: int = 512  # tokens
    vocab: int = 1024
    seed: int = 0
    tasks: int = 64


def make(config: Config) -> ArrayEnv:
    """Environment in which every agent reads the task's prompt and all act at the same time. The reward of all agents
    is the share of even tokens.
    """
    roles = tuple(f"agent{i}" for i in range(config.agents))
    n = len(roles)

    def observe(state: Any) -> Observation:
        tokens = jnp.broadcast_to(state, (n, config.prompt))
        return Observation(jnp.arange(n), tokens, jnp.full(n, config.prompt), jnp.full(n, True))

    def step(key: jax.Array, state: Any, tokens: jax.Array, length: jax.Array) -> Any:
        return state, {"pay": jnp.full(n, jnp.mean(tokens % 2 == 0))}, jnp.bool_(True)

    reset = lambda key, task: jnp.asarray(task["prompt"], jnp.int32)
    return ArrayEnv("bench", roles, n, 1, ("pay",), (tuple(range(n)),), reset, observe, step)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    shape = (config.tasks if n is None else n, config.prompt)
    return {"prompt": np.random.default_rng([seed or 0, held_out]).integers(0, config.vocab, shape).astype(np.int32)}


def entry_length(config: Config) -> int:
    return config.prompt


@dataclass(frozen=True)
class Here(EnvConfig):
    """The environment of this module."""

    eval_tasks: int = 1

    @property
    def module(self) -> Any:
        import experiments.bench.step as here

        return here


# ----------------------------------------------------------------------------------------------------------------- ours


def recipe(
    shape: decoder_config.Config, agents: int, group: int, prompt: int, response: int, batch_models: bool = False
) -> phases.Recipe:
    """GRPO of one agent, or MAGRPO of several, with one task in a step. All models have the same ``shape``."""
    kind = grpo if agents == 1 else magrpo
    optimizer = dataclasses.replace(update.OPTIMIZER, max_grad_norm=1.0 if agents == 1 else 0.0)
    env = Here("bench", {"agents": agents, "prompt": prompt, "vocab": shape.vocab_size})
    cfg: Any = kind.Config(steps=1_000_000, batch=1, group=group, env=env, reward={"pay": 1.0}, optimizer=optimizer)
    env_runner = make_env_runner(cfg.env)
    policy, tokenizer = decoder.make_policy(shape, remat=False), Endless(shape.vocab_size)
    names = env_runner.env.roles
    models = tuple(Model(name, policy, tokenizer) for name in names)
    team = Team(tuple(Role(name, name, response) for name in names), models, batch_models=batch_models)
    learners = {name: make_learner(policy, cfg.loss, cfg.optimizer, cfg.sampling) for name in names}
    step = TrainStep(cfg, team, env_runner, kind.make_plan(cfg), learners, kind.algorithm(cfg))

    def metrics(done: StepResult) -> dict[str, float]:
        return diagnose(cfg, team, env_runner, done.played, done.credited, np.asarray(done.selected), done.updated)

    phase = phases.Phase(cfg.steps, learners, step, metrics)
    return phases.make_phases(cfg, team, env_runner, [phase], evaluate=lambda state: {})


def stepper(
    shape: decoder_config.Config, agents: int, group: int, prompt: int, response: int, batch_models: bool = False
) -> Callable[[], None]:
    """Function that runs one step of the recipe, as `runs.loop.fit` does."""
    made = recipe(shape, agents, group, prompt, response, batch_models)
    logger = Logger(".", resume_step=None, total_steps=0, primary=False)
    held = [made.init(0)]
    asked = agents * group * response, agents * (prompt + group * (response - 1))

    def run() -> None:
        state, metrics = made.step(held[0], logger)
        if asked != (metrics["count/completion_tokens"], metrics["count/trunk_tokens"]) or metrics["bad"]:
            raise RuntimeError(f"expected {asked[0]} tokens and a finite update of all of them: {metrics}")
        held[0] = jax.block_until_ready(state)

    return run


def run(suite: Suite) -> Iterator[Row]:
    return (case(suite, *given) for given in CASES[suite.name])


def case(
    suite: Suite,
    name: str,
    agents: int,
    group: int,
    p: int,
    r: int,
    others: tuple[str, ...],
    targets: dict[str, float],
) -> Row:
    shape = dataclasses.replace(SHAPES[name], dtype=suite.dtype)
    spec = {"hf": shape.to_hf(), "agents": agents, "group": group, "prompt": p, "response": r}
    spec |= {"what": "learn", "micro_batches": 4}
    algorithm = "GRPO" if agents == 1 else f"MAGRPO, {agents} agents"
    facts: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        forms = {"ours": stack.enter_context(apart(suite, stepper, shape, agents, group, p, r))}
        if agents > 1:
            forms[STACKED] = stack.enter_context(apart(suite, stepper, shape, agents, group, p, r, True))
        for other in others:
            if other in SIMPLE:
                if other == SIMPLE[0] or torch_forms.available():
                    forms[other] = simple(other, shape, suite.device, group, p, r)
                continue
            peer = stack.enter_context(peers.start(other, suite.peers, spec))
            forms[other] = peer.step
            facts[f"versions of {other}"] = ", ".join(f"{k} {v}" for k, v in peer.versions.items())
        limits = dict.fromkeys(others, trunk_ratio(group, p, r))
        title = f"{algorithm}, {name}, G={group}, P={p}, R={r}"
        return measure("step", title, forms, suite.repeats, targets=targets, limits=limits, facts=facts)


def simple(other: str, shape: decoder_config.Config, device: str, group: int, p: int, r: int) -> Callable[[], None]:
    """Function of a generation and an update on random completions: the main work of a step without sharing."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, shape.vocab_size, (1, p)).astype(np.int32)
    said = rng.integers(0, shape.vocab_size, (1, group, r)).astype(np.int32)
    gain = rng.normal(size=(1, group)).astype(np.float32)
    if other == SIMPLE[0]:
        parts = [sampler(shape, tokens, 1, r, repeat=group), update.naive(shape, tokens, said, gain, 1)]
    else:
        net = torch_forms.model(shape, device)
        parts = [torch_forms.sampler(net, tokens, group, r), torch_forms.updater(net, tokens, said, gain, 1)]

    def run() -> None:
        for part in parts:
            part()

    return run
