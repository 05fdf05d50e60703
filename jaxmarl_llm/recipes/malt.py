"""MALT: a generator, a verifier and a refiner, trained offline on a tree of their own samples (arXiv 2412.01928).

After stage 0 the team plays every task once as a full tree. The tree has n answers, n verdicts on each, n refinements
of each of those (n + n^2 + n^3 samples, n = 3). The value of a step is the mean of its children's values. The value of
a refinement is 1 when it is right, else 0. A step of a value above 0.5 is labelled positive. Then

    1. every role is fine-tuned on its positive steps (``imitation``)
    2. verifier and refiner learn by DPO from pairs of siblings, one positive and one not (``steps``). The reference
       is the policy that the first part ends with. The generator's model and optimizer state stay.

The labelled tree is a data set on disk (``data``), written once and verified when it is read. A resumed run uses it, as
does another run of the same sampling configuration. The first tasks of the tree are written as rollouts.
``eval/accuracy_majority@3`` votes over three episodes (``votes``).

Kept: the above. Chosen where the paper is silent: every pair of siblings with different labels is used, each alike.
Roles take equal numbers of samples in a step. ``labels="random"`` is the control: the same number of positive labels a
role, on steps drawn at random.
Measured by experiments/claims/malt.py: on `chain`, training did not raise accuracy on unseen questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.config import at_least, from_dict, one_of, to_dict
from jaxmarl_llm.credit.assign import Credited
from jaxmarl_llm.credit.selection import same_parent_pairs
from jaxmarl_llm.distributed import processes
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.env_runner import Demonstrations, RolloutResult
from jaxmarl_llm.rollout.plans import Plan, product
from jaxmarl_llm.runs import phases
from jaxmarl_llm.storage import dataset as offline
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.telemetry.report import episodes_markdown
from jaxmarl_llm.training import harvest
from jaxmarl_llm.training.algorithm import Algorithm, Driver, StepParts
from jaxmarl_llm.training.config import BaseConfig, Offline
from jaxmarl_llm.training.drivers import HostDriver
from jaxmarl_llm.training.evaluation import episodes_of, evaluate, majority
from jaxmarl_llm.training.learner import make_learner
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.supervised import Supervised, make_imitation
from jaxmarl_llm.types import TrainState

ROLES = ("generator", "verifier", "refiner")
PREFER = ROLES[1:]  # learn by DPO
# What the data set depends on; of `env` all but its worker processes.
SOURCES: tuple[str, ...] = ("seed", "batch", "team", "env", "sampling", "reward", "credit", "sft", "group")
SOURCES += ("tasks", "threshold", "labels")


@dataclass(frozen=True)
class Config(BaseConfig):
    """Configuration of MALT."""

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
    loss: Loss = Loss(objective="dpo", aggregation="sum")

    def check(self, path: str) -> None:
        super().check(path)
        if self.group < 2:
            raise ConfigError(f"{path}.group: expected >= 2 (siblings are compared), got {self.group}")
        for name in ("pairs", "votes", "tasks"):
            if getattr(self, name) is not None:
                at_least(f"{path}.{name}", getattr(self, name), 1)
        one_of(f"{path}.labels", self.labels, ("value", "random"))
        if self.loss.objective != "dpo":
            raise ConfigError(f"{path}.loss.objective: expected 'dpo', got {self.loss.objective!r}")
        if self.past.size or self.team.critic != "none":
            raise ConfigError(f"{path}: expected no past policies and no critic: nothing is played while they learn")


def labelled(cfg: Config, tables: offline.Tables) -> offline.Tables:
    """Add to ``tables`` ``label`` [C], value above ``cfg.threshold``, and ``pairs`` [K 2] (positive, negative)."""
    out = {}
    for index, (role, table) in enumerate(tables.items()):
        label = table["value"] > cfg.threshold
        if cfg.labels == "random":
            label = np.random.default_rng([cfg.seed, 11, index]).permutation(label)
        pairs = same_parent_pairs(table["node"], label, np.ones(len(label), bool))
        out[role] = {**table, "label": label, "pairs": pairs.astype(np.int32)}
    return out


def source(cfg: Config) -> dict[str, Any]:
    """Part of ``cfg`` that the data set depends on."""
    whole = to_dict(cfg)
    kept = {key: whole[key] for key in SOURCES}
    return kept | {"env": {k: v for k, v in whole["env"].items() if k not in ("workers", "timeout", "eval_tasks")}}


def stored_source(stored: Mapping[str, Any]) -> dict[str, Any]:
    """`source` with the names that keys have now. ``stored``: `source` of the version that wrote a data set."""
    return source(from_dict(Config, stored))


def learned(tables: offline.Tables) -> dict[str, np.ndarray]:
    """By role, the rows of `labelled` ``tables`` that an update learns from: positive ones, and both of each pair."""
    out = {}
    for role, table in tables.items():
        paired = table["pairs"].reshape(-1) if role in PREFER else ()
        out[role] = table["label"] | np.isin(np.arange(len(table["label"])), paired)
    return out


class Data(NamedTuple):
    """Samples that the roles learn from, and figures of the samples."""

    positive: dict[str, Demonstrations]
    pairs: dict[str, Demonstrations]
    counts: dict[str, float]


def from_tables(tables: offline.Tables) -> Data:
    """Make the samples of imitation and of preferences from labelled ``tables``."""
    counts: dict[str, float] = {}
    for role, t in tables.items():
        sizes = len(t["task"]), len(t["node"]), t["label"].sum(), len(t["pairs"])
        rows = dict(zip(("nodes", "steps", "positive", "pairs"), sizes, strict=True))
        counts |= {f"data/{role}/{key}": float(value) for key, value in rows.items()}
    positive = {role: harvest.demonstrations(t, np.flatnonzero(t["label"])) for role, t in tables.items()}
    pairs = {role: harvest.demonstrations(tables[role], tables[role]["pairs"]) for role in PREFER}
    return Data(positive, pairs, counts)


def make_plan(cfg: Config) -> Plan:
    """Plan: ``cfg.group`` samples at every node."""
    return product(cfg.group)


ON_HOST = "its data set is sampled once and kept on disk"


def check_environment(env: Any) -> None:
    """Raise ConfigError where ``env`` lacks a role of MALT, or pays no accuracy."""
    for role in [r for r in ROLES if r not in env.roles]:
        raise ConfigError(f"config.env: environment {env.name!r} has no role {role!r}; MALT needs {', '.join(ROLES)}")
    if "accuracy" not in env.components:
        raise ConfigError(f"config.env: environment {env.name!r} pays no 'accuracy', which the vote is scored by")


def make(cfg: Config, env: Environment | None = None) -> phases.Recipe:
    """Recipe of ``cfg``. ``env``: an environment in place of the one that ``cfg.env`` names."""
    env_runner, team = phases.open_env_runner(cfg, env)
    cfg = phases.with_weights(cfg, env_runner)
    check_environment(env_runner.env)
    plan = make_plan(cfg)
    rule = phases.tried_rule(cfg, env_runner, plan)
    imitation = make_imitation(team, cfg.imitation)
    learners = {m.name: make_learner(m.policy, cfg.loss, cfg.optimizer, Sampling()) for m in team.models}
    preferences = Supervised(team, learners, cfg.pairs, cfg.loss, advantages=(1.0, -1.0))
    latest: dict[str, Any] = {}
    first: list[tuple[RolloutResult, Credited]] = []
    held: dict[Path, Data] = {}
    place = lambda logger: Path(cfg.data or logger.workdir / "data")
    count = cfg.tasks or env_runner.size
    batch, algorithm = min(count, cfg.batch), Algorithm(rule, cfg.reward)
    recorded = StepParts(replace(cfg, batch=batch), team, env_runner, plan, {}, algorithm)
    episodes = lambda: episodes_of(team, **latest, tasks=range(cfg.run.episodes)) if latest else []

    def sample(state: TrainState) -> offline.Tables:
        """The whole tree of every task, labelled."""
        parts: list[offline.Tables] = []
        for played, credited in harvest.play_once(cfg, env_runner, team, state, plan, rule, count):
            first.extend([(played, credited)] if not parts else [])
            latest.update(played=played, credited=credited, selected=credited.stats.count > 0)
            parts.append(harvest.role_tables(team, played.tree, credited.valid, {"value": credited.returns}))
        return labelled(cfg, {role: offline.joined([p[role] for p in parts], cfg.batch) for role in parts[0]})

    def record(driver: HostDriver, state: TrainState) -> None:
        """Hand the first batch over. It is played again where it is not there, as in a process that resumed the run."""
        if driver.record is not None:
            played, credited = next(iter(first or harvest.play_once(cfg, env_runner, team, state, plan, rule, batch)))
            rows = learned(offline.load(place(driver.logger), source(cfg), stored_source))
            trained = harvest.of_completions(team, played.tree, credited.valid, rows)
            driver.record(recorded, harvest.as_result(recorded, played, credited, trained))
        first.clear()

    def dataset(state: TrainState, logger: Logger) -> Data:
        """The data set in memory or on disk; sampled by the policy that stage 0 ends with, and by no other."""
        folder = place(logger)
        if folder not in held:
            if int(state.step) == cfg.sft.steps and not processes.broadcast_from_0(folder.exists):
                with logger.first(f"rollout {plan.name}"), logger.stage("rollout"):
                    tables = sample(state)
                    if processes.index() == 0:  # now: a resumed run samples nothing
                        episodes_markdown(episodes(), logger.workdir / "episodes.md")
                    processes.broadcast_from_0(lambda: offline.save(folder, source(cfg), tables))
            held.clear()
            held[folder] = from_tables(offline.load(folder, source(cfg), stored_source))
        return held[folder]

    def phase(name: str, steps: int, learning: Supervised, pairs: bool) -> phases.Phase:
        def step(driver: Driver, state: TrainState, i: int) -> tuple[TrainState, Any]:
            assert isinstance(driver, HostDriver)
            data = dataset(state, driver.logger)
            if int(state.step) == cfg.sft.steps:
                record(driver, state)
            with driver.stage("update", name):
                state, seen = learning.step(driver, state, i, data.pairs if pairs else data.positive)
            return state, (seen, data.counts if i == 0 else {})

        def metrics(result: Any) -> dict[str, float]:
            return {**result[1], **learning.metrics(name, result[0])}

        begin = (lambda agents: {"reference": jax.tree.map(jnp.copy, agents)}) if pairs else (lambda agents: {})
        return phases.Phase(steps, learning.learners, step, metrics, begin, ON_HOST, name)

    return phases.make_phases(
        cfg,
        team,
        env_runner,
        [
            phase("imitation", cfg.imitation.steps, imitation, pairs=False),
            phase("dpo", cfg.steps, preferences, pairs=True),
        ],
        evaluate=lambda state: (
            evaluate(cfg, team, env_runner, state, None) | majority(cfg, team, env_runner, state, cfg.votes)
        ),
        episodes=episodes,
    )
