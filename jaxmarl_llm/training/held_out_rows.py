"""The rows that `telemetry.rollouts` writes of an evaluation: those of `rollout_rows`, without any comparison."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm.credit.advantages import GroupStats
from jaxmarl_llm.credit.assign import Credited, standard_rule
from jaxmarl_llm.rollout.env_runner import EnvRunner, RolloutResult
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.training import rollout_rows
from jaxmarl_llm.training.algorithm import Algorithm, StepParts, StepResult
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.types import PyTree, Team, Transitions


class Sizes(NamedTuple):
    """Numbers of rows of each table of the batches before, which shift the names of the rows of a batch."""

    tasks: int = 0
    nodes: int = 0
    steps: int = 0
    transitions: int = 0

    def after(self, played: RolloutResult, tasks: int) -> Sizes:
        """Sizes after one more batch.

        Args:
            played: Rollout of the batch.
            tasks: Tasks of the batch.
        """
        tree = played.tree
        more = (tasks, len(tree.nodes.task), len(tree.steps.node), len(tree.transitions.task))
        return Sizes(*(a + b for a, b in zip(self, more)))


def header(cfg: BaseConfig, team: Team, env_runner: EnvRunner, step: int, tasks: int) -> rollouts.Header:
    """Header of the file of an evaluation; its fingerprint is empty, and its counts of rows are set by the writer.

    Args:
        cfg: Configuration of the run.
        team: Roles and models.
        env_runner: Runner of the environment.
        step: Completed steps.
        tasks: Tasks that are kept, at most.
    """
    count = env_runner.held_out_size
    made = rollout_rows.header(_step(cfg, team, env_runner), _result(cfg, None, ()), step, 0, tasks)
    return made._replace(
        rl_step=max(0, step - cfg.sft.steps), batch=count, tasks=min(tasks, count), split=rollouts.HELD_OUT
    )


def rows(
    cfg: BaseConfig,
    team: Team,
    env_runner: EnvRunner,
    played: RolloutResult,
    numbers: Sequence[int],
    memory: PyTree,
    before: Sizes = Sizes(),
) -> Iterator[rollouts.Row]:
    """Yield the rows of the first tasks of a batch of held-out tasks.

    Args:
        cfg: Configuration of the run.
        team: Roles and models.
        env_runner: Runner of the environment.
        played: Rollout of the batch, with one episode of each task.
        numbers: Number of each kept task among the held-out tasks [n].
        memory: Memory of each role that the prompts read, on the host.
        before: Sizes of the batches before.
    """
    step, result = _step(cfg, team, env_runner), _result(cfg, played, numbers)
    nodes, steps, moves = played.tree.nodes, played.tree.steps, played.tree.transitions
    paid = sum(
        (weight * np.asarray(moves.rewards[name], np.float64) for name, weight in cfg.reward.items()),
        np.zeros((len(moves.task), len(team.roles))),
    )
    returns = returns_to_go(moves, paid)
    of_step = {int(s): (j, nodes.role[steps.node[s]]) for j in np.flatnonzero(moves.played) for s in moves.steps[j]}
    for row in rollout_rows.rows(step, result, 0, len(numbers), memory, memory, {}):
        if isinstance(row, rollouts.Group):
            continue
        if isinstance(row, rollouts.Completion):
            (value,) = rollout_rows.shortest(returns[of_step[row.step]][None]) if row.step in of_step else (None,)
            row = row._replace(returns=value, advantage=None, group=-1, valid=value is not None, why=rollouts.HELD_OUT)
        yield _shifted(row, before)


def with_contents(rows: Iterable[rollouts.Row], contents: Sequence[str]) -> Iterator[rollouts.Row]:
    """Yield rows whose tasks have the hash of their content.

    Args:
        rows: Rows of any kinds.
        contents: Hash of each task, in the order of their positions [n].
    """
    for row in rows:
        yield row._replace(content=contents[row.task]) if isinstance(row, rollouts.Task) else row


def returns_to_go(moves: Transitions, paid: np.ndarray) -> np.ndarray:
    """Undiscounted sum of rewards from each transition of a chain on [J A]; NaN where a reward of the sum is unknown.

    Args:
        moves: Transitions of a rollout with one episode of each task, J rows.
        paid: Reward of each transition and role [J A].
    """
    out, after = np.full(paid.shape, np.nan), {int(moves.parent[j]): int(j) for j in np.flatnonzero(moves.played)}
    for j in np.argsort(-moves.turn, kind="stable"):
        if moves.played[j] and moves.valid[j]:
            out[j] = paid[j] + (out[after[j]] if j in after else 0.0)
    return out


def _step(cfg: BaseConfig, team: Team, env_runner: EnvRunner) -> StepParts:
    """The parts that `rollout_rows` reads: an evaluation trains nobody."""
    return StepParts(cfg, team, env_runner, single(), {}, Algorithm(standard_rule(cfg.credit), cfg.reward))


def _result(cfg: BaseConfig, played: RolloutResult | None, numbers: Sequence[int]) -> StepResult:
    """The result that `rollout_rows` reads: nobody was compared, and no group was selected."""
    tree: Any = None if played is None else played.tree
    count = 0 if tree is None else len(tree.steps.node)
    none, one, flags = np.zeros(count, np.float32), np.zeros(1, np.int32), np.zeros(count, bool)
    stats = GroupStats(*(np.zeros(1, np.float32) for _ in range(5)))
    credited = Credited(none, none, flags, np.zeros(count, np.int32), stats, one, one, one)
    unselected = np.zeros(1, bool)
    return StepResult(
        tree, played, credited, unselected, {}, {}, np.asarray(numbers, np.int32), dict(cfg.reward), flags
    )  # fmt: skip


def _shifted(row: rollouts.Row, by: Sizes) -> rollouts.Row:
    """A row with the numbers of its tables shifted; -1 stays."""

    def moved(number: int, shift: int) -> int:
        return number + shift if number >= 0 else number

    if isinstance(row, rollouts.Task):
        return row._replace(task=row.task + by.tasks)
    if isinstance(row, rollouts.Node):
        parent = moved(row.parent, by.transitions)
        return row._replace(node=row.node + by.nodes, task=row.task + by.tasks, parent=parent)
    if isinstance(row, rollouts.Completion):
        return row._replace(step=row.step + by.steps, node=row.node + by.nodes)
    if isinstance(row, rollouts.Transition):
        return row._replace(
            transition=row.transition + by.transitions,
            task=row.task + by.tasks,
            parent=moved(row.parent, by.transitions),
            steps=tuple(moved(s, by.steps) for s in row.steps),
        )
    return row._replace(node=moved(row.node, by.nodes)) if isinstance(row, rollouts.MemoryEvent) else row
