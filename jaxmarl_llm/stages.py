"""The stages of a step, as functions that recipes compose: supervised fine-tuning, crediting a tree, learning from it,
remembering; and the base configuration they read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxmarl_llm import memory
from jaxmarl_llm.arena import Arena, Demonstrations, EnvConfig, Played
from jaxmarl_llm.credit import Credit, Credited, assign
from jaxmarl_llm.generate import bucket
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.team import TeamConfig
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import Batch, Learner, Loss, Optimizer, pack, task_order, token_weights, update_models
from jaxmarl_llm.types import Team, TrainState


@dataclass(frozen=True)
class SFT:
    """Stage 0: supervised fine-tuning of every role on its own demonstrations."""

    steps: int = 0
    batch: int = 32  # samples of each role in a step
    samples: int = 2048  # demonstrations of each role to draw from
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)


@dataclass(frozen=True)
class RunConfig:
    checkpoint_every: int = 50  # steps; the last step is always saved
    keep: int = 2  # checkpoints
    eval_every: int = 50  # steps; 0: only before and after RL
    log_every: int = 10  # steps between console lines; metrics.jsonl has every step
    tensorboard: bool = True
    wandb_project: str | None = None
    max_bad_steps: int = 10  # in a row, whose loss or gradient was not finite, before the run stops
    max_logprob_gap: float = 0.05  # |sampler - learner| log-prob above which the run stops; 0 does not check
    episodes: int = 6  # written to episodes.md at the end

    def check(self, path: str) -> None:
        if self.checkpoint_every < 1 or self.keep < 1 or self.log_every < 1 or self.max_bad_steps < 1:
            raise ConfigError(f"{path}: checkpoint_every, keep, log_every and max_bad_steps must be >= 1")


@dataclass(frozen=True)
class BaseConfig:
    """Fields of every recipe. A recipe's Config adds its own and sets its defaults."""

    recipe: str
    seed: int = 0
    steps: int = 200  # of RL, after sft.steps of stage 0
    batch: int = 32  # tasks in a step
    team: TeamConfig = TeamConfig()
    env: EnvConfig = EnvConfig()
    sampling: Sampling = Sampling()
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0, "format": 1.0, "efficiency": -1.0})
    credit: Credit = Credit()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    micro_tokens: int = 16_384  # trunk tokens P + G R of one micro-batch
    sft: SFT = SFT()
    run: RunConfig = RunConfig()

    def check(self, path: str) -> None:
        if self.steps < 0 or self.batch < 1 or self.micro_tokens < 1:
            raise ConfigError(f"{path}: expected steps >= 0, batch >= 1 and micro_tokens >= 1")
        if self.sampling.temperature == 0:
            raise ConfigError(f"{path}.sampling.temperature: expected > 0 for training, got 0")


def sft_step(
    team: Team,
    learners: Mapping[str, Learner],
    data: Mapping[str, Demonstrations],
    cfg: SFT,
    seed: int,
    state: TrainState,
) -> tuple[TrainState, dict[str, float]]:
    """One step of maximum likelihood for every role on its own samples: the policy update with advantage 1."""
    step = int(state.step)
    batches: dict[str, list[Batch]] = {}
    for index, role in enumerate(team.roles):
        if role.name not in data or not len(data[role.name].length):
            continue
        d = data[role.name]
        rows = np.array(list(task_order(seed, len(d.length), step * cfg.batch, cfg.batch)))
        size = d.completion_length[rows]
        p = min(bucket(int(d.length[rows].max()), 64), d.tokens.shape[1])
        mask = np.arange(d.completions.shape[1]) < size[:, None]
        weights = np.asarray(token_weights(mask, np.ones(len(rows), np.float32), "token"))[:, None]
        zeros = np.zeros_like(weights)
        batch = Batch(d.tokens[rows, :p], d.length[rows], d.completions[rows][:, None], weights, zeros + 1, zeros)
        batches.setdefault(team.roles[index].model, []).append(batch)
    params, opt_state, metrics = update_models(team.models, learners, SFT_LOSS, state.params, state.opt_state, batches)
    out = {f"sft/{name}/nll": m["nll"] for name, m in metrics.items()}
    out["sft/nll"] = float(np.mean([m["nll"] for m in metrics.values()]))
    out["bad"] = float(any(not m["ok"] for m in metrics.values()))
    return state.replace(params=params, opt_state=opt_state), out


SFT_LOSS = Loss(clip_low=None)


def learn(
    team: Team,
    learners: Mapping[str, Learner],
    cfg: BaseConfig,
    state: TrainState,
    played: Played,
    advantages: np.ndarray,
    trained: np.ndarray,
) -> tuple[TrainState, dict[str, dict[str, float]]]:
    """Update the models that own trained steps; the others stay the same arrays."""
    # The prompts of array environments are all short: one shape. Others come in buckets.
    tables = played.tree.nodes.tokens.shape[1], played.tree.steps.tokens.shape[1]
    smallest = tables if played.records is None else (64, 16)
    batches = {
        m.name: pack(played.tree, i, advantages, trained, cfg.loss, micro_tokens=cfg.micro_tokens, smallest=smallest)
        for i, m in enumerate(team.models)
    }
    params, opt_state, metrics = update_models(
        team.models, learners, cfg.loss, state.params, state.opt_state, batches, state.params.get("reference")
    )
    return state.replace(params=params, opt_state=opt_state), metrics


_update_memory = jax.jit(memory.update, static_argnames=("config",))


def remember(
    team: Team,
    arena: Arena,
    config: memory.MemoryConfig,
    state: TrainState,
    played: Played,
    signal: np.ndarray,
    valid: np.ndarray,
) -> tuple[TrainState, dict[str, float]]:
    """Every role's memory learns from its own steps and their ``signal`` [C] (JoyAgents-R1: R_A + R_F)."""
    tree, stores = played.tree, dict(state.memory)
    metrics: dict[str, float] = {}
    role_of = tree.nodes.role[tree.steps.node]
    for index, role in enumerate(team.roles):
        rows = np.flatnonzero(valid & (role_of == index))
        store = stores[role.name]
        if len(rows):
            ids, length, texts = arena.lessons(team, played, rows)
            nodes, size = tree.steps.node[rows], bucket(len(rows), 32)
            read = tree.nodes.retrieved
            text = np.stack([memory.encode_text(t, store.text.shape[1]) for t in texts])
            grow = lambda x: np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])
            samples = memory.Samples(
                keys=grow(read.query[nodes][:, : store.key.shape[1]]),
                ids=grow(ids),
                length=grow(length),
                text=grow(text),
                reward=grow(signal[rows].astype(np.float32)),
                retrieved=grow(read.slots[nodes]),
                similarity=grow(read.similarity[nodes]),
                valid=grow(np.ones(len(rows), bool)),
            )
            stores[role.name], seen = _update_memory(config, store, samples, state.step)
            metrics |= {f"memory/{role.name}/{k}": float(v) for k, v in seen.items()}
            metrics[f"agent/{role.name}/memory_hit"] = float(seen["hit"])
        metrics[f"agent/{role.name}/memory_size"] = float(memory.size(stores[role.name]))
    return state.replace(memory=stores), metrics


def credit(
    cfg: BaseConfig,
    team: Team,
    arena: Arena,
    played: Played,
    tasks: int,
    weights: Mapping[str, float],
    discount: float | None = None,
) -> Credited:
    """Credit the tree under reward ``weights``; numpy arrays."""
    rule = cfg.credit if discount is None else dataclasses.replace(cfg.credit, discount=discount)
    return jax.device_get(
        assign(
            rule,
            played.tree,
            weights=tuple(sorted(weights.items())),
            max_turns=arena.env.max_turns,
            num_tasks=tasks,
            num_roles=len(team.roles),
        )
    )
