"""Host rollouts: the same plans, keys and tables as `rollout`, over Python environments and text.

The frontier is a list of live states. At each turn every node's prompt is rendered by its role's tokenizer, the models
that are asked generate (`speakers`), and the environments step in worker processes. Tables come back padded to buckets,
so that what follows does not recompile either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.generate import bucket
from jaxmarl_llm.host_tables import checked, make_tables, replace_rewards, reward_row
from jaxmarl_llm.plans import ROOT, Branch, Plan
from jaxmarl_llm.rollout import CHILD, ENV, RESET, fold
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.speakers import Asked, Speakers, pad
from jaxmarl_llm.text import Action, Prompt
from jaxmarl_llm.types import FROZEN, POLICY, Params, Retrieval, Team, Tree
from jaxmarl_llm.workers import EnvPool, Failure


class Record(NamedTuple):
    """One step in words: row i of ``HostRollout.records`` is row i of the steps table."""

    role: str
    prompt: Prompt
    action: Action


class HostRollout(NamedTuple):
    tree: Tree  # numpy arrays
    records: list[Record]
    failures: list[str]  # what environments failed with, one line each
    cut_tokens: int  # prompt tokens left out because a prompt was too long


# (roles [N], prompts [N]) -> (prompts with what memory adds, Retrieval of N rows)
Recall = Callable[[Sequence[int], Sequence[Prompt]], tuple[list[Prompt], Retrieval]]


class _Live(NamedTuple):
    branch: Branch
    state: Any
    key: np.ndarray  # key data
    parent: int
    task: int


@functools.partial(jax.jit, static_argnames=("group",))
def _branch_keys(data: jax.Array, *, group: int) -> tuple[jax.Array, jax.Array]:
    """Key data [N, G, 2] of each joint action's environment step and of the state behind it."""
    keys = jnp.repeat(jax.random.wrap_key_data(data)[:, None], group, 1)
    order = jnp.broadcast_to(jnp.arange(group), keys.shape)
    return jax.random.key_data(fold(keys, ENV, order)), jax.random.key_data(fold(keys, CHILD, order))


@jax.jit
def _root_keys(key: jax.Array, tasks: jax.Array) -> tuple[jax.Array, jax.Array]:
    roots = fold(jnp.broadcast_to(key, tasks.shape), tasks)
    return jax.random.key_data(roots), jax.random.key_data(fold(roots, RESET))


def seed_of(data: np.ndarray) -> int:
    """The integer seed a host environment gets: the 64 bits of a key."""
    return int(data[0]) << 32 | int(data[1])


def play(
    team: Team,
    params: Params,
    pool: EnvPool,
    tasks: Sequence[Any],
    plan: Plan,
    key: jax.Array,
    sampling: Sampling,
    *,
    max_prompt: int,
    version: int = 0,
    recall: Recall | None = None,
    cast: np.ndarray | None = None,
) -> HostRollout:
    """Play all tasks. Prompts longer than ``max_prompt`` tokens are cut as the tokenizer documents, and counted.
    ``cast`` is that of `rollout.make_rollout`.

    Raises ConfigError when the plan asks for what the environment lacks.
    """
    env = pool.env
    plan.check(env)
    roots, resets = (np.asarray(x)[: len(tasks)] for x in _root_keys(key, jnp.arange(bucket(len(tasks), 4))))
    started = pool.map("reset", [(seed_of(k), task) for k, task in zip(resets, tasks)], range(len(tasks)))
    failures = [f"reset: {s.message}" for s in started if isinstance(s, Failure)]
    frontier = [_Live(ROOT, s, roots[i], -1, i) for i, s in enumerate(started) if not isinstance(s, Failure)]

    nodes: list[dict] = []
    steps: list[dict] = []
    moves: list[dict] = []
    records: list[Record] = []
    found: list[Retrieval] = []
    speakers = Speakers(team, params, sampling)
    calls = cut = 0
    for turn in range(env.max_turns):
        if not frontier:
            break
        now = cast if cast is None or cast.ndim == 2 else cast[:, turn]
        part = lambda task, role, now=now: 0 if now is None else int(now[task, role])
        speaker = lambda task, role, part=part: team.players(role)[part(task, role)]
        # Decision points of this turn, all prompts fixed before anyone speaks.
        seats: list[list[tuple[str, Prompt]]] = []
        seen: list[_Live] = []
        for live in frontier:
            try:
                seats.append(sorted(env.observe(live.state).items(), key=lambda item: env.roles.index(item[0])))
                seen.append(live)
            except Exception as error:  # the move that led to a state nobody can look at is what failed
                failures.append(f"turn {turn}: observe: {type(error).__name__}: {error}")
                if live.parent >= 0:
                    moves[live.parent].update(done=True, valid=False)
        frontier = seen
        if not frontier:
            break
        flat = [(i, team.role_index(role), prompt) for i, seat in enumerate(seats) for role, prompt in seat]
        prompts = [prompt for _, _, prompt in flat]
        if recall is not None:
            prompts, retrieval = recall([r for _, r, _ in flat], prompts)
            found.append(retrieval)
        widths = [plan.width(live.branch) for live in frontier]
        ids: list[list[int]] = []
        for (_, role, _), prompt in zip(flat, prompts):
            fitted = team.model_of(role).tokenizer.fit(prompt, team.roles[role].name, max_prompt)
            ids.append(fitted.ids)
            cut += fitted.cut
        asked = [
            Asked(speaker(frontier[i].task, role), widths[i], frontier[i].task, role, frontier[i].key, ids[n])
            for n, (i, role, _) in enumerate(flat)
        ]
        said = speakers.say(asked, more=turn + 1 < env.max_turns)

        # Tables, then the joint actions.
        step_of: dict[tuple[int, int], int] = {}
        for n, (i, role, _) in enumerate(flat):
            live = frontier[i]
            nodes.append(
                {
                    "ids": ids[n],
                    "role": role,
                    "model": asked[n].model,
                    "task": live.task,
                    "turn": turn,
                    "parent": live.parent,
                }
            )
            for s, (action, logprobs) in enumerate(said[n]):
                step_of[n, s] = len(steps)
                steps.append(
                    {
                        "node": len(nodes) - 1,
                        "ids": action.ids,
                        "logprobs": logprobs,
                        "truncated": action.truncated,
                        "source": FROZEN if part(live.task, role) else POLICY,
                    }
                )
                records.append(Record(team.roles[role].name, prompts[n], action))
        first = np.cumsum([0] + [len(s) for s in seats])
        env_keys: dict[int, np.ndarray] = {}
        child_keys: dict[int, np.ndarray] = {}
        actions = [plan.actions(live.branch, len(seat)) for live, seat in zip(frontier, seats)]
        for number in sorted({len(a) for a in actions}):
            these = [i for i, a in enumerate(actions) if len(a) == number]
            data = pad(np.stack([frontier[i].key for i in these]), bucket(len(these), 4))
            for store, got in zip((env_keys, child_keys), _branch_keys(data, group=number)):
                store.update(zip(these, np.asarray(got)))
        joint = [(i, j) for i, a in enumerate(actions) for j in range(len(a))]
        results = pool.map(
            "step",
            [
                (
                    seed_of(env_keys[i][j]),
                    frontier[i].state,
                    {role: said[first[i] + w][actions[i][j][w]][0] for w, (role, _) in enumerate(seats[i])},
                )
                for i, j in joint
            ],
            [frontier[i].task for i, _ in joint],
        )
        results = [checked(r) for r in results]
        calls += len(joint)
        if plan.local:
            played = [(r[0], frontier[i].task) for r, (i, _) in zip(results, joint) if not isinstance(r, Failure)]
            judged = pool.map("verify", [(state,) for state, _ in played], [task for _, task in played])
            verdicts = iter(judged)
            results = [r if isinstance(r, Failure) else replace_rewards(r, next(verdicts)) for r in results]
        made: dict[int, list[tuple[int, int]]] = {}  # state -> its joint actions: (transition, joint index)
        after: dict[int, Any] = {}  # transition -> state behind it
        for (i, j), result in zip(joint, results):
            live = frontier[i]
            rewards, problem = reward_row(result, team, env.components)
            if problem:
                failures.append(f"turn {turn}: {problem}")
            failed = isinstance(result, Failure)
            made.setdefault(i, []).append((len(moves), j))
            after[len(moves)] = None if failed else result[0]
            moves.append(
                {
                    "steps": [step_of[int(first[i]) + w, s] for w, s in enumerate(actions[i][j])],
                    "parent": live.parent,
                    "task": live.task,
                    "turn": turn,
                    "rewards": rewards,
                    "done": failed or result[2],
                    "valid": problem is None,
                }
            )
        reached = []
        for i, behind in made.items():
            live = frontier[i]
            for place, (move, j) in enumerate(_kept(plan, env.components, moves, behind)):
                to = plan.follow(live.branch, place)
                if to is not None and not moves[move]["done"]:
                    reached.append(_Live(to, after[move], child_keys[i][j], move, live.task))
        frontier = reached
    counts = speakers.sent, calls, speakers.launches
    tree = make_tables(team, env.components, nodes, steps, moves, found, version, *counts)
    return HostRollout(tree, records, failures, cut)


def _kept(
    plan: Plan, components: tuple[str, ...], moves: list[dict], behind: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The joint actions of one state in the order ``plan.follow`` counts them; none when the plan stops here."""
    if not plan.rank and plan.stop_above is None:
        return behind
    # float32 as in array rollouts, so that both engines break ties alike
    weights = [(components.index(c), np.float32(weight)) for c, weight in plan.reward]
    value = {m: sum((w * moves[m]["rewards"][c].mean() for c, w in weights), np.float32(0)) for m, _ in behind}
    good = [value[m] for m, _ in behind if moves[m]["valid"]]
    if plan.stop_above is not None and good and np.mean(good) > plan.stop_above:
        return []
    if not plan.rank:
        return behind
    return sorted(behind, key=lambda item: (not moves[item[0]]["valid"], -value[item[0]]))
