"""The stages of a step, as functions that recipes compose: supervised fine-tuning, crediting a tree, learning from it,
remembering; and the base configuration they read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from jaxmarl_llm import memory, meshes, sharding
from jaxmarl_llm.advantages import generalised_advantage, scalarise, step_returns
from jaxmarl_llm.arena import Arena, Demonstrations, EnvConfig, Played
from jaxmarl_llm.credit import Credit, Credited, Weights, assign
from jaxmarl_llm.deadlines import Deadlines
from jaxmarl_llm.generate import bucket
from jaxmarl_llm.losses import Loss
from jaxmarl_llm.meshes import MeshConfig
from jaxmarl_llm.optimizers import Optimizer
from jaxmarl_llm.packing import pack
from jaxmarl_llm.past import Past
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.team import TeamConfig
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import Batch, Learner, NodeTargets, task_order, token_weights, update_models
from jaxmarl_llm.types import Team, TrainState
from jaxmarl_llm.value import Reading, critic_batches, estimate, node_targets, reading, state_values


class Run(NamedTuple):
    """What a recipe's own code works with."""

    team: Team
    arena: Arena
    learners: Mapping[str, Learner]  # by model


@dataclass(frozen=True)
class Offline:
    """Steps on samples that are there before the first of them."""

    steps: int = 0
    batch: int = 32  # samples of each role in a step
    optimizer: Optimizer = Optimizer(learning_rate=3e-3)


@dataclass(frozen=True)
class SFT(Offline):
    """Stage 0: supervised fine-tuning of every role on its own demonstrations."""

    samples: int = 2048  # demonstrations of each role to draw from


@dataclass(frozen=True)
class RunConfig:
    checkpoint_every: int = 50  # steps; the last step is always saved
    keep: int = 2  # checkpoints
    eval_every: int = 50  # steps; 0: only before and after RL
    log_every: int = 10  # steps between console lines; metrics.jsonl has every step
    tensorboard: bool = True
    wandb_project: str | None = None
    max_bad_steps: int = 10  # in a row, whose loss or gradient was not finite, before the run stops
    deadlines: Deadlines = Deadlines()  # of the stages of a step
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
    micro_tokens: int = 16_384  # trunk tokens P + G R of one micro-batch, on each device that holds rows
    sft: SFT = SFT()
    past: Past = Past()  # earlier policies as opponents
    mesh: MeshConfig = MeshConfig(data=1)  # devices of the run: one; data=-1 takes all
    run: RunConfig = RunConfig()

    def check(self, path: str) -> None:
        if self.steps < 0 or self.batch < 1 or self.micro_tokens < 1:
            raise ConfigError(f"{path}: expected steps >= 0, batch >= 1 and micro_tokens >= 1")
        if self.sampling.temperature == 0:
            raise ConfigError(f"{path}.sampling.temperature: expected > 0 for training, got 0")
        if self.past.size and self.team.critic != "none":
            raise ConfigError(f"{path}.past.size: expected 0 with team.critic={self.team.critic!r}")


@dataclass(frozen=True)
class ActorCritic(BaseConfig):
    """Fields of recipes whose advantages come from critics (``team.critic``)."""

    group: int = 1  # episodes of each task
    decay: float = 0.0  # lambda of GAE: 0 TD(0), 1 Monte Carlo
    whiten: bool = True  # advantages: mean 0 and std 1 over the batch, by model
    credit: Credit = Credit(discount=0.9, group="task_role_turn", scale="none")  # the group is for the metrics alone
    loss: Loss = Loss(clip_low=None, aggregate="sum", value_coef=0.6)
    optimizer: Optimizer = Optimizer(learning_rate=1e-4, max_grad_norm=0.5)
    critic_optimizer: Optimizer = Optimizer(learning_rate=1e-4, max_grad_norm=0.5)  # of critics that are no policies

    def check_critic(self, path: str, critics: tuple[str, ...]) -> None:
        if self.team.critic not in critics:
            raise ConfigError(f"{path}.team.critic: expected {' or '.join(critics)}, got {self.team.critic!r}")
        if self.group < 1 or not 0 <= self.decay <= 1:
            raise ConfigError(f"{path}: expected group >= 1 and decay in [0, 1]")
        if not self.loss.value_coef:
            raise ConfigError(f"{path}.loss.value_coef: expected above 0: nothing would train the critic")


def offline_step(
    team: Team,
    learners: Mapping[str, Learner],
    loss: Loss,
    data: Mapping[str, Demonstrations],
    cfg: Offline,
    seed: int,
    state: TrainState,
    step: int,
    *,
    name: str,
    advantages: tuple[float, ...] = (1.0,),
) -> tuple[TrainState, dict[str, float]]:
    """The ``step``-th step of every role on its own samples: the policy update on given completions.

    Completions of a sample share its prompt: one with advantage 1 is maximum likelihood, two with advantages 1 and -1
    are a preference (loss dpo). ``state`` has the optimizers of ``learners``. Metrics are under ``name``; a role
    without samples is left out.
    """
    batches: dict[str, list[Batch]] = {}
    for role in team.roles:
        if role.name not in data or not len(data[role.name].length):
            continue
        d = data[role.name]
        rows = np.array(list(task_order(seed, len(d.length), step * cfg.batch, cfg.batch)))
        # One shape a role where its prompts are all short, buckets of the batch where some are long.
        p = min(bucket(int(d.length[rows].max()), 64), bucket(int(d.length.max()), 8), d.tokens.shape[1])
        completions = d.completions[rows].reshape(len(rows), len(advantages), -1)
        size = d.completion_length[rows].reshape(len(rows), len(advantages), 1)
        mask = np.arange(completions.shape[2]) < size
        weights = np.asarray(token_weights(mask, np.ones(mask.shape[:2], np.float32), loss.aggregate))
        gain = np.broadcast_to(np.array(advantages, np.float32)[:, None], weights.shape)
        batch = Batch(d.tokens[rows, :p], d.length[rows], completions, weights, gain, np.zeros_like(weights))
        batches.setdefault(role.model, []).append(batch)
    params, opt_state, metrics = update_models(
        team.models, learners, loss, state.params, state.opt_state, batches, state.params.get("reference")
    )
    shown = ("nll",) if loss.objective == "policy" else ("loss", "accuracy", "margin")
    out = {f"{name}/{model}/{k}": m[k] for model, m in metrics.items() for k in shown}
    if metrics:
        out |= {f"{name}/{k}": float(np.mean([m[k] for m in metrics.values()])) for k in shown}
    out["bad"] = float(any(not m["ok"] for m in metrics.values()))
    return state.replace(params=params, opt_state=opt_state), out


SFT_LOSS = Loss(clip_low=None)
PAST, PICK = 2**30, 2**30 + 1  # streams of a step's key beside its rollout's, which folds in task numbers


def learn(
    team: Team,
    learners: Mapping[str, Learner],
    cfg: BaseConfig,
    state: TrainState,
    played: Played,
    advantages: np.ndarray,
    trained: np.ndarray,
    appraisals: Mapping[str, Appraisal] | None = None,
) -> tuple[TrainState, dict[str, dict[str, float]]]:
    """Update the models that own trained steps, and the critics in ``appraisals``; the others stay the same arrays."""
    # The prompts of array environments are all short: one shape. Others come in buckets.
    tables = played.tree.nodes.tokens.shape[1], played.tree.steps.tokens.shape[1]
    smallest = tables if played.records is None else (64, 16)
    batches: dict[str, list[Batch]] = {}
    for i, m in enumerate(team.models):
        a = (appraisals or {}).get(m.name)
        plays = any(role.model == m.name for role in team.roles)
        if a is not None and not plays:
            batches[m.name] = critic_batches(a.read, a.of_prompts(), micro_tokens=cfg.micro_tokens)
            continue
        values = None if a is None else a.of_nodes()
        with meshes.home(m.name):
            batches[m.name] = pack(
                played.tree,
                i,
                advantages,
                trained,
                cfg.loss,
                micro_tokens=cfg.micro_tokens,
                smallest=smallest,
                values=values,
                trees=played.records is not None and m.policy.hidden_tree is not None and not sharding.meshed(),
                parts=sharding.row_parts(),
            )
    params, opt_state, metrics = update_models(
        team.models, learners, cfg.loss, state.params, state.opt_state, batches, state.params.get("reference")
    )
    return state.replace(params=params, opt_state=opt_state), metrics


class Appraisal(NamedTuple):
    """What one critic read and should have said: prompts, values, targets and weights [M]."""

    read: Reading
    value: np.ndarray
    target: np.ndarray
    weight: np.ndarray  # 1 / number of targets, 0 where there is none

    def of_prompts(self) -> NodeTargets:
        return NodeTargets(self.target, self.weight, self.value)

    def of_nodes(self) -> NodeTargets:
        """The same by node of the tree [N]."""
        row, none = np.maximum(self.read.of_node, 0), self.read.of_node < 0
        return NodeTargets(self.target[row], np.where(none, 0.0, self.weight[row]).astype(np.float32), self.value[row])


def appraise(
    cfg: ActorCritic, run: Run, state: TrainState, played: Played
) -> tuple[np.ndarray, np.ndarray, dict[str, Appraisal], dict[str, float]]:
    """Advantages [C] by the team's critics, which steps have one, what the critics learn, and metrics."""
    team, tree = run.team, played.tree
    nodes, moves = tree.nodes, tree.transitions
    value = np.zeros(len(nodes.role), np.float32)
    reads: dict[str, tuple[Reading, np.ndarray]] = {}
    for i, model in enumerate(team.models):
        if model.name in team.critics:
            read = reading(team, tree, i)
            said = estimate(run.learners[model.name], model, state.params, read, micro_tokens=cfg.micro_tokens)
            reads[model.name] = read, said
            value = np.where(read.of_node >= 0, said[np.maximum(read.of_node, 0)], value)
    values, acts = state_values(tree, value, len(team.roles))
    advantage, target = _generalised(
        scalarise(moves.rewards, cfg.reward),
        values,
        acts,
        moves.parent,
        moves.turn,
        moves.played,
        moves.valid,
        max_turns=run.arena.env.max_turns,
        discount=cfg.credit.discount,
        decay=cfg.decay,
    )
    role = nodes.role[tree.steps.node]
    gain, has = sharding.to_host(_step_returns(moves.steps, role, advantage, moves.valid, num_steps=len(role)))
    gain, has = np.array(gain), has & tree.steps.valid
    aim, known = node_targets(tree, sharding.to_host(target), moves.valid)
    out, metrics = {}, {}
    for name, (read, said) in reads.items():
        mine = known & (read.of_node >= 0)
        total = np.bincount(read.of_node[mine], aim[mine], len(said))
        count = np.bincount(read.of_node[mine], minlength=len(said))
        goal = (total / np.maximum(count, 1)).astype(np.float32)
        there = count > 0
        out[name] = Appraisal(read, said, goal, (there / max(there.sum(), 1)).astype(np.float32))
        spread = float(np.var(goal[there])) if there.any() else 0.0
        metrics[f"critic/{name}/value"] = float(said[there].mean()) if there.any() else 0.0
        if spread > 0:
            metrics[f"critic/{name}/explained_variance"] = 1.0 - float(np.var(goal[there] - said[there])) / spread
    if cfg.whiten:
        for m in range(len(team.models)):
            mine = has & (nodes.model[tree.steps.node] == m)
            if mine.any():
                gain[mine] = (gain[mine] - gain[mine].mean()) / max(float(gain[mine].std()), 1e-6)
    return gain, has, out, metrics


_generalised = jax.jit(generalised_advantage, static_argnames=("max_turns", "discount", "decay"))
_step_returns = jax.jit(step_returns, static_argnames=("num_steps", "reduce"))
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
    weights: Weights,
    discount: float | None = None,
) -> Credited:
    """Credit the tree under reward ``weights``; numpy arrays."""
    rule = cfg.credit if discount is None else dataclasses.replace(cfg.credit, discount=discount)
    return sharding.to_host(
        assign(
            rule,
            played.tree,
            weights=weights,
            max_turns=arena.env.max_turns,
            num_tasks=tasks,
            num_roles=len(team.roles),
        )
    )
