"""The rows that `telemetry.rollouts` writes of one training step, from the tables that the step has at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxmarl_llm.agents.memory import decode_text
from jaxmarl_llm.models.token_pieces import pieces
from jaxmarl_llm.rollout.failures import one_line
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.telemetry.rollouts_writer import shortest
from jaxmarl_llm.training.algorithm import StepParts, StepResult
from jaxmarl_llm.training.rollout_prompts import PromptReader
from jaxmarl_llm.training.rollout_sources import sources
from jaxmarl_llm.types import EXPERT, FROZEN, PyTree, Team


def header(step: StepParts, result: StepResult, number: int, rl_step: int, tasks: int) -> rollouts.Header:
    """Header of the file of a step; its fingerprint is empty, and its counts of rows are set by the writer.

    Args:
        step: Parts of the training step.
        result: Result of the step, on the host.
        number: Number of the step, as in metrics.jsonl.
        rl_step: Number among the RL steps, from 0.
        tasks: Tasks that are kept, at most.
    """
    cfg, env = step.cfg, step.env_runner.env
    return rollouts.Header(
        schema=rollouts.SCHEMA,
        step=number,
        rl_step=rl_step + 1,
        fingerprint="",
        recipe=cfg.recipe,
        seed=cfg.seed,
        environment=env.name,
        plan=step.plan.name,
        roles=tuple(role.name for role in step.team.roles),
        models=tuple(model.name for model in step.players.models),
        components=tuple(env.components),
        weights=dict(zip(result.weights, shortest([float(w) for w in result.weights.values()]))),
        updated=tuple(result.updated),
        batch=cfg.batch,
        tasks=min(tasks, cfg.batch),
        rows={},
        columns={},
    )


def rows(
    step: StepParts,
    result: StepResult,
    rl_step: int,
    tasks: int,
    before: PyTree,
    after: PyTree,
    logprobs: Mapping[int, np.ndarray],
) -> Iterator[rollouts.Row]:
    """Yield the rows of the first tasks of a step, and of all that the step wrote into memories.

    Args:
        step: Parts of the training step.
        result: Result of the step, on the host.
        rl_step: Number among the RL steps, from 0.
        tasks: Tasks that are kept, at most.
        before: Memory of each role before the step, on the host.
        after: Memory of each role after it.
        logprobs: Row of a completion -> log-probs of its tokens that the update computed, see `LearnerLogprobs.by_row`.
    """
    tree = result.tree
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    kept_nodes = np.flatnonzero(nodes.valid & (nodes.task < tasks))
    kept_steps = np.flatnonzero(steps.valid & np.isin(steps.node, kept_nodes))
    kept_moves = np.flatnonzero(moves.played & (moves.task < tasks))
    indices = [int(index) for index in result.tasks[:tasks]]
    yield from (rollouts.Task(task, index) for task, index in enumerate(indices))
    yield from _nodes(step, result, kept_nodes)
    yield from _completions(step, result, rl_step, kept_steps, logprobs)
    yield from _transitions(result, kept_moves)
    yield from _groups(step.team, result, kept_steps)
    yield from _memory(step, result, kept_nodes, kept_steps, before, after)
    for failure in result.played.failures:
        if failure.task in indices:
            message = one_line(failure.message)
            yield rollouts.Failure(failure.task, failure.call, failure.turn, tuple(failure.roles), message)


def _nodes(step: StepParts, result: StepResult, kept: np.ndarray) -> Iterator[rollouts.Node]:
    nodes, team, reader = result.tree.nodes, step.players, PromptReader(step, result)
    for n in kept:
        model, ids = team.models[nodes.model[n]], nodes.tokens[n, : nodes.length[n]].tolist()
        there = nodes.retrieved.slots[n] >= 0
        yield rollouts.Node(
            node=int(n),
            task=int(nodes.task[n]),
            turn=int(nodes.turn[n]),
            role=team.roles[nodes.role[n]].name,
            model=model.name,
            parent=int(nodes.parent[n]),
            prompt_ids=tuple(ids),
            prompt=model.tokenizer.decode(ids),
            memory_slots=tuple(nodes.retrieved.slots[n][there].tolist()),
            memory_similarity=shortest(nodes.retrieved.similarity[n][there]),
            messages=reader.messages(int(n)),
            cut_tokens=reader.cut_tokens(int(n)),
            unseen=reader.unseen(int(n)),
        )


def _completions(
    step: StepParts, result: StepResult, rl_step: int, kept: np.ndarray, logprobs: Mapping[int, np.ndarray]
) -> Iterator[rollouts.Completion]:
    nodes, steps, credited = result.tree.nodes, result.tree.steps, result.credited
    selected = np.asarray(credited.valid & result.selected[credited.group])
    learns = np.ones(len(step.team.roles), bool)
    if step.algorithm.trainable_roles is not None:
        learns = np.asarray(step.algorithm.trainable_roles(rl_step))
    returns, advantage = shortest(credited.returns[kept]), shortest(credited.advantage[kept])
    for k, s in enumerate(kept.tolist()):
        n, length, valid = steps.node[s], steps.length[s], bool(credited.valid[s])
        ids = steps.tokens[s, :length].tolist()
        tokenizer = step.players.models[nodes.model[n]].tokenizer
        cut = pieces(tokenizer, ids)
        why = _why(int(steps.source[s]), valid, bool(selected[s]), bool(learns[nodes.role[n]]), bool(result.trained[s]))
        yield rollouts.Completion(
            step=int(s),
            node=int(n),
            token_ids=tuple(ids),
            text=tokenizer.decode(ids),
            logprobs=shortest(steps.logprobs[s, :length]),
            truncated=bool(steps.truncated[s]),
            source=rollouts.SOURCES[steps.source[s]],
            version=int(steps.version[s]),
            returns=returns[k] if valid else None,
            advantage=advantage[k] if valid else None,
            group=int(credited.group[s]) if valid else -1,
            valid=valid,
            selected=bool(selected[s]),
            trained=why == rollouts.TRAINED,
            why=why,
            learner_logprobs=shortest(logprobs[s][:length]) if s in logprobs else (),
            token_chars=cut.chars,
            token_names=cut.names,
        )


def _why(source: int, valid: bool, selected: bool, learns: bool, trained: bool) -> str:
    """Why a completion was trained or not: the first reason in the order of the training step."""
    if source == FROZEN:
        return rollouts.OPPONENT
    if source == EXPERT:
        return rollouts.EXPERT
    if not valid:
        return rollouts.NO_RETURN
    if not selected:
        return rollouts.GROUP_NOT_SELECTED
    if not learns:
        return rollouts.ROLE_NOT_TRAINABLE
    return rollouts.TRAINED if trained else rollouts.NOT_DRAWN


def _transitions(result: StepResult, kept: np.ndarray) -> Iterator[rollouts.Transition]:
    moves = result.tree.transitions
    for j in kept:
        valid = bool(moves.valid[j])
        unknown = (None,) * len(next(iter(moves.rewards.values()))[j])  # what could not be computed is not zero
        yield rollouts.Transition(
            transition=int(j),
            task=int(moves.task[j]),
            turn=int(moves.turn[j]),
            parent=int(moves.parent[j]),
            steps=tuple(moves.steps[j].tolist()),
            rewards={name: shortest(paid[j]) if valid else unknown for name, paid in moves.rewards.items()},
            done=bool(moves.done[j]),
            valid=valid,
        )


def _groups(team: Team, result: StepResult, kept: np.ndarray) -> Iterator[rollouts.Group]:
    """Groups that have a kept completion."""
    credited = result.credited
    groups = np.unique(credited.group[kept[credited.valid[kept]]])
    stats = credited.stats
    columns = [shortest(x[groups]) for x in (stats.mean, stats.variance, stats.low, stats.high)]
    for group, mean, variance, low, high in zip(groups, *columns, strict=True):
        yield rollouts.Group(
            group=int(group),
            task=int(credited.group_task[group]),
            role=team.roles[credited.group_role[group]].name,
            turn=int(credited.group_turn[group]),
            size=int(stats.count[group]),
            mean=mean,
            variance=variance,
            low=low,
            high=high,
            selected=bool(result.selected[group]),
        )


def _memory(
    step: StepParts,
    result: StepResult,
    kept_nodes: np.ndarray,
    kept_steps: np.ndarray,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> Iterator[rollouts.MemoryEvent]:
    """What the kept prompts read, and what the whole step wrote."""
    nodes, team = result.tree.nodes, step.team
    decoders = {role.name: team.model_of(i).tokenizer.decode for i, role in enumerate(team.roles)}
    for n in kept_nodes:
        role = team.roles[nodes.role[n]].name
        near = nodes.retrieved
        for slot, similarity in zip(near.slots[n], shortest(near.similarity[n])):
            if slot >= 0 and role in before:
                read = _event("read", role, before[role], int(slot), decoders[role])
                yield read._replace(node=int(n), similarity=similarity)
    for index, (role, decode) in enumerate(decoders.items()):
        if role not in after:
            continue
        old, new = before[role], after[role]
        same = [(x == y).reshape(len(x), -1).all(1) for x, y in _contents(old, new)]
        written = np.flatnonzero(new.used & ~(old.used & np.logical_and.reduce(same)))
        of = sources(step, result, index, new, written)
        for slot in written.tolist():
            event = "refreshed" if _alike(step, old, new, slot) else "written"
            completion = of.get(slot, -1)
            kept = completion if completion in kept_steps else -1
            yield _event(event, role, new, slot, decode)._replace(completion=kept)
        for slot in np.flatnonzero(old.used & ~new.used):
            yield _event("removed", role, old, int(slot), decode)


def _contents(old: Any, new: Any) -> Sequence[tuple[np.ndarray, np.ndarray]]:
    """The columns that hold the content of a memory's entries, before and after."""
    return [(getattr(old, name), getattr(new, name)) for name in ("key", "ids", "length", "text")]


def _alike(step: StepParts, old: Any, new: Any, slot: int) -> bool:
    """Whether the prompt of the new entry of a slot is so near to that of the old one that it refreshed the entry."""
    config = step.algorithm.memory
    return config is not None and bool(old.used[slot] and old.key[slot] @ new.key[slot] >= config.refresh_similarity)


def _event(
    event: str, role: str, store: Any, slot: int, decode: Callable[[Sequence[int]], str]
) -> rollouts.MemoryEvent:
    """An event of one slot without a prompt; the entry is as ``store`` has it."""
    text = decode_text(store.text[slot]) or decode(store.ids[slot, : store.length[slot]].tolist())
    (weight,), (reward,) = shortest(store.weight[slot : slot + 1]), shortest(store.reward[slot : slot + 1])
    return rollouts.MemoryEvent(event, role, slot, -1, None, text, weight, reward)
