"""From a rollout to a data set: completions that are kept, as tables on disk and as demonstrations of another update.

`harvest` takes whole paths of a tree. A path becomes one demonstration, for the same team or for another one.
`role_tables` takes single completions. It keeps their nodes, so siblings can still be compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmarl_llm.credit.assign import Credited, assign
from jaxmarl_llm.credit.rules import CreditRule, Sizes
from jaxmarl_llm.distributed.sharding import to_host
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.env_runner import Demonstrations, EnvRunner, RolloutResult
from jaxmarl_llm.rollout.keys import TASKS, stream
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.storage.dataset import Tables
from jaxmarl_llm.training.algorithm import StepParts, StepResult
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.types import Array, Team, TrainState, Tree


class Said(NamedTuple):
    """One completion of a path.

    Attributes:
        role: Index of the role in ``Team.roles``.
        prompt: Token ids that the role read [P], without padding.
        completion: Token ids that the role wrote [R], without padding; a stop id is included.
    """

    role: int
    prompt: np.ndarray
    completion: np.ndarray


Ids = Sequence[int] | np.ndarray
Tell = Callable[[Sequence[Said]], tuple[Ids, Ids] | tuple[Ids, Ids, Sequence[bool] | np.ndarray]]


def paths(tree: Tree, keep: Array) -> Iterator[list[Said]]:
    """The completions of each kept path, from the root on; those of one joint action in the order of the seats.

    Args:
        tree: The rollout, on the host.
        keep: [J] bool: the transitions that end a kept path.
    """
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    for end in np.flatnonzero(keep):
        way = [int(end)]
        while moves.parent[way[-1]] >= 0:
            way.append(int(moves.parent[way[-1]]))
        rows = [int(row) for move in reversed(way) for row in moves.steps[move] if row >= 0]
        yield [_said(nodes, steps, row) for row in rows]


def _said(nodes: Any, steps: Any, row: int) -> Said:
    """The completion ``row`` of the tables ``steps`` and ``nodes``."""
    node = int(steps.node[row])
    prompt = np.asarray(nodes.tokens[node][: int(nodes.length[node])])
    return Said(int(nodes.role[node]), prompt, np.asarray(steps.tokens[row][: int(steps.length[row])]))


def harvest(tree: Tree, keep: Array, tell: Tell) -> Demonstrations:
    """Demonstrations from the kept paths of a rollout, one for each path.

    Args:
        tree: The rollout, on the host.
        keep: [J] bool: the transitions that end a kept path, for instance those of right answers.
        tell: Function of the completions of a path. It returns the token ids of a prompt and those of a completion.
            It may also return which tokens of the completion are learned, for every path; without it all are.

    Raises:
        ConfigError: No path is kept, or ``tell`` returns an empty prompt or completion.
    """
    told = [tuple(np.asarray(ids, np.int32) for ids in tell(path)) for path in paths(tree, keep)]
    if not told:
        raise ConfigError("harvest: no path of the rollout is kept: nothing can be learned from it")
    for number, (prompt, completion, *_) in enumerate(told):
        if not len(prompt) or not len(completion):
            what = "prompt" if not len(prompt) else "completion"
            raise ConfigError(f"harvest: `tell` returned an empty {what} for kept path {number}")
    prompts, completions, *learned = zip(*told, strict=True)
    mask = _padded(learned[0])[0].astype(bool) if learned else None
    return Demonstrations(*_padded(prompts), *_padded(completions), mask)


def as_sequence(path: Sequence[Said], begin: Ids) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tell a path of roles who read all that was said before them as one sequence.

    Only what a role wrote is learned, so observations carry no loss.

    Args:
        path: The completions of a path. The first tokens of each prompt are the role's own. The tokens behind them
            begin each later prompt too, with the completions at their places.
        begin: Token ids in place of the role's own ones, as many of them.

    Returns:
        The first prompt, all that follows it, and which of these tokens a role wrote.

    Raises:
        ConfigError: A prompt does not show what was read or written before it.
    """
    own = len(begin)
    whole = np.concatenate([np.asarray(begin, np.int32), path[-1].prompt[own:], path[-1].completion])
    written = np.zeros(len(whole), bool)
    for said in path:
        seen = np.concatenate([said.prompt[own:], said.completion])
        if not np.array_equal(seen, whole[own : own + len(seen)]):
            raise ConfigError("harvest: a prompt of the path does not show what was read and written before it")
        written[len(said.prompt) : len(said.prompt) + len(said.completion)] = True
    first = len(path[0].prompt)
    return whole[:first], whole[first:], written[first:]


def _padded(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of token ids as one table padded with 0, and their lengths."""
    length = np.array([len(row) for row in rows], np.int32)
    out = np.zeros((len(rows), length.max()), np.int32)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out, length


def role_tables(team: Team, tree: Tree, keep: Array, columns: Mapping[str, Array]) -> Tables:
    """The kept completions of each role, and their nodes.

    Args:
        team: The team that played.
        tree: The rollout, on the host.
        keep: [C] bool: the completions that are kept.
        columns: Further columns by name, each [C].

    Returns:
        By role: prompt [N P], prompt_length and task [N]; node [K] into those, tokens [K R] and length [K]; and the
        further columns [K].
    """
    nodes, steps = tree.nodes, tree.steps
    out: Tables = {}
    for index, role in enumerate(team.roles):
        rows = np.flatnonzero(keep & (nodes.role[steps.node] == index))
        own, node = np.unique(steps.node[rows], return_inverse=True)
        table = {
            "prompt": nodes.tokens[own],
            "prompt_length": nodes.length[own],
            "task": nodes.task[own],
            "node": node.astype(np.int32),
            "tokens": steps.tokens[rows],
            "length": steps.length[rows],
        } | {name: values[rows] for name, values in columns.items()}
        out[role.name] = {name: np.asarray(column) for name, column in table.items()}
    return out


def of_completions(team: Team, tree: Tree, keep: Array, flags: Mapping[str, np.ndarray]) -> np.ndarray:
    """Flags of completions from flags of the rows of `role_tables`.

    Args:
        team: The team that played.
        tree: The rollout, on the host.
        keep: [C] bool: as of `role_tables`.
        flags: By role: [K] bool, a flag of each row. Tables that are joined with later ones have more rows.

    Returns:
        [C] bool; False where a completion was not kept.
    """
    out = np.zeros(len(keep), bool)
    for index, role in enumerate(team.roles):
        rows = np.flatnonzero(keep & (tree.nodes.role[tree.steps.node] == index))
        out[rows] = flags[role.name][: len(rows)]
    return out


def demonstrations(table: Mapping[str, np.ndarray], rows: np.ndarray) -> Demonstrations:
    """Demonstrations from the completions of one role.

    Args:
        table: A table of `role_tables`.
        rows: Completions [n], or [n G] where the G of a row have the same node.
    """
    node, said = table["node"][rows if rows.ndim == 1 else rows[:, 0]], table["tokens"][rows]
    return Demonstrations(table["prompt"][node], table["prompt_length"][node], said, table["length"][rows])


def as_result(step: StepParts, played: RolloutResult, credited: Credited, trained: Array) -> StepResult:
    """The first batch of `play_once` as a result that `HostDriver.record` takes; no update reads its advantages.

    Args:
        step: Parts that describe the rollout; ``cfg.batch`` is the number of its tasks.
        played: Rollout of the batch.
        credited: Its credit, on the host.
        trained: [C] bool: completions that a later update learns from.
    """
    unknown = dataclasses.replace(credited, advantage=np.full(len(credited.advantage), np.nan, np.float32))
    updated: dict[str, dict[str, Any]] = {model.name: {} for model in step.team.models}
    tasks = np.asarray(shuffled(stream(step.cfg.seed, TASKS), step.env_runner.size, 0, step.cfg.batch))
    selected = np.asarray(credited.stats.count > 0)
    return StepResult(played.tree, played, unknown, selected, updated, {}, tasks, dict(step.cfg.reward), trained)


def play_once(
    cfg: BaseConfig, env_runner: EnvRunner, team: Team, state: TrainState, plan: Plan, rule: CreditRule, count: int
) -> Iterator[tuple[RolloutResult, Credited]]:
    """Play training tasks once each, ``cfg.batch`` at a time, and credit every rollout.

    Args:
        cfg: The configuration: seed, batch, sampling and weights of the rewards.
        env_runner: The environment.
        team: Who plays.
        state: Its parameters and memory. Keys come from its key and its step.
        plan: What is sampled.
        rule: Credit rule of the values.
        count: Number of tasks, drawn without replacement.

    Yields:
        Each rollout, and its credit on the host.
    """
    tasks = shuffled(stream(cfg.seed, TASKS), env_runner.size, 0, count).tolist()
    now = int(state.step)
    for k, start in enumerate(range(0, len(tasks), cfg.batch)):
        part, key = tasks[start : start + cfg.batch], jax.random.fold_in(jax.random.fold_in(state.key, now), k)
        played = env_runner.play(team, state.params, state.memory, part, plan, key, cfg.sampling, None, version=now)
        sizes = Sizes(env_runner.env.max_turns, len(part), len(team.roles))
        yield played, to_host(assign(rule, played.tree, weights=cfg.reward, sizes=sizes))
