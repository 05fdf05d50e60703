"""One training step: play, assign credit, select, update, remember. Pure, and written once.

Two drivers run it. `runs.phases` calls it from the host, step by step, for `fit`; `runs.compiled` scans it inside one
program. A driver only says how to play a batch, how to lay an update out and how to write memories
(`algorithm.Driver`). The order of things, the random keys and the rules are those of this file. What distinguishes one
algorithm from another is an `algorithm.Algorithm`: functions that a recipe hands in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool

from jaxmarl_llm.agents import snapshots
from jaxmarl_llm.credit.assign import Credited
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.keys import IMITATION, OPPONENTS, STEP_SELECTION, TASKS, stream
from jaxmarl_llm.training import finite, stale
from jaxmarl_llm.training.algorithm import Driver, Keeper, Played, Step, StepParts, StepResult, Updates
from jaxmarl_llm.training.learner import Batch
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.types import EXPERT, Array, Params, TrainState, Tree


@dataclass(frozen=True, eq=False)
class TrainStep(StepParts):
    """A training step: its parts, and the order in which they are called."""

    def __call__(self, driver: Driver, state: TrainState, rl_step: Step) -> tuple[TrainState, StepResult]:
        """Take the state one step on.

        Args:
            driver: Runs the parts.
            state: ``state.step`` counts all steps of the run.
            rl_step: Counts those of this phase.
        """
        cfg, algorithm = self.cfg, self.algorithm
        with driver.stage("rollout", f"rollout {self.plan.name}"):
            played = driver.take(state, lambda: self.play(driver, state, rl_step))
            tree, metrics = played.tree, dict(played.metrics)
            if driver.debug:
                finite.check_rollout(self.team, tree, finite.number_of(state))
        if cfg.staleness:
            metrics["staleness"] = driver.host(jnp.mean(state.step - tree.steps.version))
            state = stale.push(state, cfg.staleness)
            after = state.replace(step=state.step + 1)
            if algorithm.play is None:  # another one may read what this step leaves
                driver.begin(after, lambda: self.play(driver, after, rl_step + 1))
        key = jax.random.fold_in(state.key, state.step)
        with driver.stage("reward"):
            weights = algorithm.reward(rl_step) if callable(algorithm.reward) else algorithm.reward
            if driver.debug:
                finite.check_rewards(self.team, tree, weights, finite.number_of(state))
            credited = driver.host(self.assign(tree, weights))
            targets: Mapping[str, Any] = {}
            if algorithm.critic is not None:
                advantage, valid, targets, seen = algorithm.critic(self, driver, state, tree)
                credited = credited.replace(advantage=advantage, valid=valid)
                metrics |= seen
            if driver.debug:
                finite.check_advantages(self.team, tree, credited.advantage, credited.valid, finite.number_of(state))
            selected = driver.host(algorithm.select(credited, cfg.batch))
            trained = self.trained(driver, credited, selected, tree, key, rl_step)
        with driver.stage("update", "update"):
            imitation = self.imitation(driver, tree, key, rl_step)
            batches = driver.lay_out(self, tree, played.played, credited.advantage, trained, targets, imitation)
            state, updated = self.updated(driver, state, batches)
        metrics |= {f"critic/{name}/loss": m["value_loss"] for name, m in updated.items() if "value_loss" in m}
        if algorithm.memory is not None:
            with driver.stage("memory", "memory"):
                learnt = driver.host(self.assign(tree, algorithm.memory_reward))
                state, seen = driver.remember(self, state, tree, played.played, learnt.returns, learnt.valid)
                metrics |= seen
        if cfg.past.size:
            state = driver.when((rl_step + 1) % cfg.past.every == 0, _push_snapshot, state)
        result = StepResult(
            tree, played.played, credited, selected, updated, metrics, played.tasks, dict(weights), trained
        )
        return self.kept(driver, state, result)

    def play(self, driver: Driver, state: TrainState, rl_step: Step) -> Played:
        """Play the tasks of a step. The state is only read.

        Args:
            driver: Runs the parts.
            state: State before the step.
            rl_step: Number of the step in its phase.
        """
        cfg = self.cfg
        key = jax.random.fold_in(state.key, state.step)
        numbers = shuffled(stream(driver.seed, TASKS), self.env_runner.size, rl_step * cfg.batch, cfg.batch)
        players = stale.acting(state, cfg.staleness, rl_step) if cfg.staleness else state
        params, assignment = self.opponents(players, key)
        tasks = driver.host(numbers)
        once = lambda tasks, key: driver.play(self, players, params, driver.host(tasks), key, assignment)
        if self.algorithm.play is None:
            return Played(*once(tasks, key), tasks, {})
        tree, played, tasks, seen = self.algorithm.play(self, once, tasks, key, rl_step, state)
        tasks, metrics = driver.host((tasks, dict(seen)))
        return Played(tree, played, tasks, metrics)

    @property
    def on_host(self) -> str | None:
        """Why the step runs from the host alone; None: it also runs inside a compiled program."""
        functions = (self.algorithm.play, self.algorithm.update)
        return next((why for f in functions if (why := getattr(f, "on_host", None))), None)

    @property
    def keepers(self) -> tuple[Keeper, ...]:
        """Functions of the algorithm that keep arrays of earlier steps."""
        functions: tuple[Any, ...] = (self.algorithm.play, self.algorithm.update)
        return tuple(function for function in functions if isinstance(function, Keeper))

    def kept(self, driver: Driver, state: TrainState, result: StepResult) -> tuple[TrainState, StepResult]:
        """State and result after every keeper has seen the step."""
        kept, metrics = dict(state.kept), dict(result.metrics)
        for keeper in self.keepers:
            kept[keeper.name], seen = keeper.keep(self, kept[keeper.name], result)
            metrics |= driver.host(dict(seen))
        return state.with_kept(kept), result._replace(metrics=metrics)

    def updated(self, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]]) -> Updates:
        """The state and metrics that the algorithm's update makes; ConfigError where they have another type."""
        update = self.algorithm.update or policy_update
        result = update(self, driver, state, batches)
        well = isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], TrainState)
        if not well or not isinstance(result[1], Mapping) or not set(result[1]) <= set(self.learners):
            got = type(result).__name__ if not well else f"metrics of {result[1]!r}"
            name = self.cfg.update or update
            raise ConfigError(
                f"config.update: {name}: expected (state, {{model: metrics}}), but it returned {got[:200]}"
            )
        return result

    def opponents(self, state: TrainState, key: jax.Array) -> tuple[Params, Array | None]:
        """Parameters of the rollout, and which player takes which role: past policies among them."""
        past = self.cfg.past
        if not past.size:
            return state.params, self.co_players(key)
        own, seats = jax.random.split(jax.random.fold_in(key, OPPONENTS))
        agents = snapshots.draw(state.params["past"], state.params["agents"], own)
        assignment = snapshots.assignment(seats, self.cfg.batch, len(self.team.roles), past.fraction)
        return {**state.params, "agents": agents}, assignment

    def co_players(self, key: Array) -> Array | None:
        """Which of several models that learn a role plays it, for each task [B A].

        None: each role has one model, or the plan chooses who plays.
        """
        counts = jnp.array([role.learning for role in self.team.roles])
        if self.plan.choose is not None or max(role.learning for role in self.team.roles) == 1:
            return None
        share = jax.random.uniform(jax.random.fold_in(key, OPPONENTS), (self.cfg.batch, len(self.team.roles)))
        return jnp.floor(share * counts).astype(jnp.int32)

    def trained(
        self, driver: Driver, credited: Credited, selected: Array, tree: Tree, key: jax.Array, rl_step: Step
    ) -> Bool[Array, " C"]:
        """The completions to train on."""
        algorithm = self.algorithm
        trained = credited.valid & selected[credited.group] & (tree.steps.source != EXPERT)
        if algorithm.select_steps is not None:
            own = jax.random.fold_in(key, STEP_SELECTION)
            trained = trained & driver.host(algorithm.select_steps(own, tree, trained))
        if algorithm.trainable_roles is not None:
            learns = driver.host(algorithm.trainable_roles(rl_step))
            trained = trained & learns[tree.nodes.role[tree.steps.node]]
        return trained

    def imitation(self, driver: Driver, tree: Tree, key: jax.Array, rl_step: Step) -> Array | None:
        """Weight of each token that an expert wrote [C R]; None where nothing is imitated."""
        algorithm = self.algorithm
        if algorithm.imitate is None:
            return None
        weights = algorithm.imitate(jax.random.fold_in(key, IMITATION), tree, self.cfg.loss)
        if algorithm.trainable_roles is not None:
            learns = jnp.asarray(algorithm.trainable_roles(rl_step))
            weights = jnp.where(learns[tree.nodes.role[tree.steps.node]][:, None], weights, 0.0)
        return driver.host(weights)


def policy_update(step: StepParts, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]]) -> Updates:
    """Minimise the configured loss of every model on its micro-batches.

    Args:
        step: Parts of the training step.
        driver: Driver that runs the step.
        state: State before the update.
        batches: Micro-batches by model.
    """
    return driver.optimize(step.team.models, step.learners, step.cfg.loss, state, batches)


def _push_snapshot(state: TrainState) -> TrainState:
    params = state.params
    ring = snapshots.push(params["past"], {name: params["agents"][name] for name in params["past"]["ring"]})
    return state.replace(params={**params, "past": ring})
