"""MALT: a generator, a verifier and a refiner, trained offline on a tree of their own samples (arXiv 2412.01928).

After stage 0 the team plays every task once as a full tree: n answers, n verdicts on each, n refinements of each of
those (n + n^2 + n^3 samples, n = 3). The value of a step is the mean of its children's, that of a refinement 1 when it
is right; so V of a step is the share of right leaves behind it. A step of V above 0.5 is labelled positive. Then

    1. every role is fine-tuned on its positive steps (``imitation``)
    2. verifier and refiner learn by DPO from pairs of siblings, one positive and one not (``steps``); the policy that
       the first part ends with is the reference, and the generator's model stays as it is, optimizer state included

The labelled tree is a data set on disk (``data``), written once and verified when it is read; a run that is resumed
uses the one that is there, and so does another run of the same sampling configuration. At inference the answer is the
most frequent of three episodes' (``votes``): ``eval/accuracy_majority@3``, beside the accuracy of one.

Kept: the above. Chosen where the paper is silent: every pair of siblings with different labels is used, each alike;
roles take equal numbers of samples in a step. ``labels="random"`` is the control: the same number of positive labels a
role, on steps drawn at random.

Expected: on `chain`, that the trained team passes the untrained one and that one a single agent, on held-out questions;
measured by experiments/claims/malt.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm import offline, phases, processes
from jaxmarl_llm.arena import Demonstrations, EnvConfig, Played
from jaxmarl_llm.config import one_of, to_dict
from jaxmarl_llm.credit import Credited
from jaxmarl_llm.diagnose import episodes_of, evaluate, majority
from jaxmarl_llm.losses import Loss
from jaxmarl_llm.metrics import Logger
from jaxmarl_llm.plans import Plan, product
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.selection import same_parent_pairs
from jaxmarl_llm.stages import SFT_LOSS, BaseConfig, Offline, credit, offline_step
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import make_learner, task_order
from jaxmarl_llm.types import Team, TrainState

ROLES = ("generator", "verifier", "refiner")
PREFER = ROLES[1:]  # learn by DPO
# What the data set depends on; of `env` all but its worker processes.
SOURCES = (
    "seed",
    "batch",
    "team",
    "env",
    "sampling",
    "reward",
    "credit",
    "sft",
    "group",
    "tasks",
    "threshold",
    "labels",
)


@dataclass(frozen=True)
class Config(BaseConfig):
    recipe: str = "malt"
    group: int = 3  # n samples at every node
    tasks: int | None = None  # training tasks played; None: all
    threshold: float = 0.5  # a step of a value above it is positive
    labels: str = "value"  # or random
    imitation: Offline = Offline(steps=200)
    pairs: int = 32  # of each role in a step of DPO
    votes: int = 3  # episodes whose most frequent answer counts
    data: str | None = None  # folder of the data set; None: data/ in the run's
    env: EnvConfig = EnvConfig("chain", {"protocol": "refine"})
    reward: dict[str, float] = field(default_factory=lambda: {"accuracy": 1.0})
    loss: Loss = Loss(objective="dpo", aggregate="sum")

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (siblings are compared), got {self.group}")
        if self.pairs < 1 or self.votes < 1 or (self.tasks is not None and self.tasks < 1):
            raise ConfigError(f"{path}: expected pairs, votes and tasks >= 1")
        one_of(f"{path}.labels", self.labels, ("value", "random"))
        if self.loss.objective != "dpo":
            raise ConfigError(f"{path}.loss.objective: expected 'dpo', got {self.loss.objective!r}")
        if self.past.size or self.team.critic != "none":
            raise ConfigError(f"{path}: expected no past policies and no critic: nothing is played while they learn")


def gather(team: Team, played: Played, credited: Credited) -> offline.Tables:
    """By role, its nodes and its steps of known value: prompt [N P], prompt_length and task [N], node [C] into those,
    tokens [C R], length and value [C].
    """
    nodes, steps = played.tree.nodes, played.tree.steps
    out: offline.Tables = {}
    for index, role in enumerate(team.roles):
        rows = np.flatnonzero(credited.valid & (nodes.role[steps.node] == index))
        own, node = np.unique(steps.node[rows], return_inverse=True)
        table = {
            "prompt": nodes.tokens[own],
            "prompt_length": nodes.length[own],
            "task": nodes.task[own],
            "node": node.astype(np.int32),
            "tokens": steps.tokens[rows],
            "length": steps.length[rows],
            "value": credited.returns[rows],
        }
        out[role.name] = {name: np.asarray(column) for name, column in table.items()}
    return out


def joined(parts: list[dict[str, np.ndarray]], tasks: int) -> dict[str, np.ndarray]:
    """One table of several batches of ``tasks`` tasks; rows of tokens as wide as the widest."""
    nodes = np.cumsum([0, *(len(p["task"]) for p in parts)])
    parts = [{**p, "node": p["node"] + nodes[k], "task": p["task"] + k * tasks} for k, p in enumerate(parts)]

    def column(name: str) -> np.ndarray:
        arrays = [p[name] for p in parts]
        width = max(x.shape[-1] for x in arrays) if arrays[0].ndim > 1 else None
        wide = lambda x: x if width is None else np.pad(x, ((0, 0), (0, width - x.shape[-1])))
        return np.concatenate([wide(x) for x in arrays])

    return {name: column(name) for name in parts[0]}


def labelled(cfg: Config, tables: offline.Tables) -> offline.Tables:
    """The tables with ``label`` [C] (value above the threshold) and ``pairs`` [K 2], siblings (positive, negative)."""
    out = {}
    for index, (role, table) in enumerate(tables.items()):
        label = table["value"] > cfg.threshold
        if cfg.labels == "random":
            label = np.random.default_rng([cfg.seed, 11, index]).permutation(label)
        pairs = same_parent_pairs(table["node"], label, np.ones(len(label), bool))
        out[role] = {**table, "label": label, "pairs": pairs.astype(np.int32)}
    return out


def samples(table: Mapping[str, np.ndarray], rows: np.ndarray) -> Demonstrations:
    """``rows`` of a table's steps: [n], or [n G] where the G of a row share a prompt."""
    node, said = table["node"][rows if rows.ndim == 1 else rows[:, 0]], table["tokens"][rows]
    return Demonstrations(table["prompt"][node], table["prompt_length"][node], said, table["length"][rows])


def source(cfg: Config) -> dict[str, Any]:
    """The part of a configuration that its data set depends on."""
    whole = to_dict(cfg)
    kept = {key: whole[key] for key in SOURCES}
    return kept | {"env": {k: v for k, v in whole["env"].items() if k not in ("workers", "timeout", "eval_tasks")}}


class Data(NamedTuple):
    """What the roles learn from, and its figures."""

    positive: dict[str, Demonstrations]
    pairs: dict[str, Demonstrations]
    counts: dict[str, float]


def from_tables(tables: offline.Tables) -> Data:
    counts: dict[str, float] = {}
    for role, t in tables.items():
        rows = {
            "nodes": len(t["task"]),
            "steps": len(t["node"]),
            "positive": t["label"].sum(),
            "pairs": len(t["pairs"]),
        }
        counts |= {f"data/{role}/{key}": float(value) for key, value in rows.items()}
    positive = {role: samples(t, np.flatnonzero(t["label"])) for role, t in tables.items()}
    return Data(positive, {role: samples(tables[role], tables[role]["pairs"]) for role in PREFER}, counts)


def make_plan(cfg: Config) -> Plan:
    return product(cfg.group)


def make(cfg: Config) -> phases.Recipe:
    arena, team = phases.open_arena(cfg)
    missing = [role for role in ROLES if role not in arena.env.roles]
    if missing:
        raise ConfigError(
            f"config.env: environment {arena.env.name!r} has no role {missing[0]!r}; MALT needs {', '.join(ROLES)}"
        )
    if "accuracy" not in arena.env.components:
        raise ConfigError(f"config.env: environment {arena.env.name!r} pays no 'accuracy', which the vote is scored by")
    plan = make_plan(cfg)
    learners_of = lambda loss, optimizer: {
        m.name: make_learner(m.policy, loss, optimizer, Sampling()) for m in team.models
    }
    tutors, learners = learners_of(SFT_LOSS, cfg.imitation.optimizer), learners_of(cfg.loss, cfg.optimizer)
    latest: dict[str, Any] = {}
    held: dict[Path, Data] = {}

    def sample(state: TrainState) -> offline.Tables:
        """The whole tree of every task, labelled."""
        tasks = list(task_order(cfg.seed, arena.size, 0, cfg.tasks or arena.size))
        now, parts = int(state.step), []
        for k, start in enumerate(range(0, len(tasks), cfg.batch)):
            part, key = tasks[start : start + cfg.batch], jax.random.fold_in(jax.random.fold_in(state.key, now), k)
            played = arena.play(team, state.params, state.memory, part, plan, key, cfg.sampling, None, version=now)
            credited = credit(cfg, team, arena, played, len(part), cfg.reward)
            latest.update(played=played, credited=credited, selected=credited.stats.count > 0)
            parts.append(gather(team, played, credited))
        return labelled(cfg, {role.name: joined([p[role.name] for p in parts], cfg.batch) for role in team.roles})

    def dataset(state: TrainState, logger: Logger) -> Data:
        """What is held or on disk; sampled by the policy that stage 0 ends with, and by no other."""
        folder = Path(cfg.data or logger.workdir / "data")
        if folder not in held:
            if int(state.step) == cfg.sft.steps and not processes.first(folder.exists):
                with logger.first(f"rollout {plan.name}"), logger.stage("rollout"):
                    tables = sample(state)
                    processes.first(lambda: offline.save(folder, source(cfg), tables))
            held.clear()
            held[folder] = from_tables(offline.load(folder, source(cfg)))
        return held[folder]

    def imitate(state: TrainState, i: int, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        data = dataset(state, logger)
        with logger.first("imitation"), logger.stage("update"):
            state, out = offline_step(
                team, tutors, SFT_LOSS, data.positive, cfg.imitation, cfg.seed, state, i, name="imitation"
            )
        return state, (data.counts if i == 0 else {}) | out

    def prefer(state: TrainState, i: int, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        data, size = dataset(state, logger), Offline(batch=cfg.pairs)
        with logger.first("preferences"), logger.stage("update"):
            state, out = offline_step(
                team, learners, cfg.loss, data.pairs, size, cfg.seed, state, i, name="dpo", advantages=(1.0, -1.0)
            )
        return state, (data.counts if i == 0 else {}) | out

    reference = lambda agents: {"reference": jax.tree.map(jnp.copy, agents)}
    return phases.make_phases(
        cfg,
        team,
        arena,
        [phases.Phase(cfg.imitation.steps, tutors, imitate), phases.Phase(cfg.steps, learners, prefer, reference)],
        evaluate=lambda state: evaluate(cfg, team, arena, state, None) | majority(cfg, team, arena, state, cfg.votes),
        episodes=lambda: episodes_of(team, **latest, count=cfg.run.episodes) if latest else [],
    )
