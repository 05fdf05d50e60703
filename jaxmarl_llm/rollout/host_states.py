"""The states that a host rollout plays next.

They are behind the joint actions that a plan follows (`Following`), or are named by a choice (`Growing`).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.messages import HostEnv
from jaxmarl_llm.rollout.growth import (
    check_unassigned,
    count_players,
    next_choice,
    nothing_grown,
    try_choice,
    wrong_choice,
)
from jaxmarl_llm.rollout.plans import Branch, Plan
from jaxmarl_llm.rollout.ranking import best_first, stops, team_value
from jaxmarl_llm.rollout.tables import TransitionRow
from jaxmarl_llm.types import Array, Team


class LiveState(NamedTuple):
    """An environment state that is still played."""

    branch: Branch
    state: Any  # of the environment
    key: np.ndarray  # key data [2]
    parent: int  # row of the transition that led here, -1 at a root
    task: int
    earlier: int = 0  # joint actions that were played from the state in earlier turns


class PlayedAction(NamedTuple):
    """A joint action that was played, and the environment state it led to."""

    place: int  # index of its state in ``HostFrontier.states``
    transition: int  # row
    state: Any  # None where the environment failed
    key: np.ndarray  # key data [2] of the state it led to


class Following:
    """Plays on behind the joint actions that ``Plan.follow`` names."""

    def __init__(self, plan: Plan, env: HostEnv, assignment: Array | None) -> None:
        """``assignment``: position in `Team.players` by task (, turn) and role [B (M) A]; None: all 0."""
        self._plan, self._env, self._assignment = plan, env, assignment

    def first(self, roots: Sequence[LiveState]) -> list[LiveState]:
        """The states of the first turn. ``roots``: the first state of each task."""
        return list(roots)

    def next(
        self, states: Sequence[LiveState], played: Sequence[PlayedAction], rows: Sequence[TransitionRow]
    ) -> list[LiveState]:
        """The states of the next turn.

        Args:
            states: States of this turn.
            played: Joint actions of this turn; those of one state stand together, in the order of ``Plan.actions``.
            rows: Transitions of the rollout so far.
        """
        reached = []
        for place, siblings in itertools.groupby(played, key=lambda action: action.place):
            live = states[place]
            for position, action in enumerate(self._ranked(list(siblings), rows)):
                branch = self._plan.follow(live.branch, position)
                if branch is not None and not rows[action.transition].done:
                    reached.append(LiveState(branch, action.state, action.key, action.transition, live.task))
        return reached

    def of_task(self, task: int) -> Following:
        """What plays one task on by itself."""
        return self

    def player(self, task: int, role: int, turn: int) -> int:
        """Position in ``Team.players(role)`` of the model that acts for the role of a task in this turn."""
        if self._assignment is None:
            return 0
        by_role = self._assignment[task] if self._assignment.ndim == 2 else self._assignment[task, turn]
        return int(by_role[role])

    def _ranked(self, siblings: list[PlayedAction], rows: Sequence[TransitionRow]) -> list[PlayedAction]:
        """The joint actions of one state in the order that ``Plan.follow`` counts; none where the plan stops."""
        plan = self._plan
        if not plan.rank and plan.stop_above is None:
            return siblings
        own = [rows[action.transition] for action in siblings]
        value, valid = _team_values(plan, self._env, own), np.array([row.valid for row in own])
        if stops(plan, value, valid):
            return []
        return [siblings[i] for i in best_first(value, valid)] if plan.rank else siblings


class _Expansion(NamedTuple):
    """An expansion of a task: where it began and who played it, its transition, and the state behind it."""

    parent: int
    player: int
    row: int  # -1: not played, because no role could observe the state
    live: LiveState | None


class Growing:
    """Plays one expansion of each task a turn, from the state that ``Plan.choose`` names (`plans.grow`).

    A state that cannot be observed is closed, like the end of an episode. A task whose first state cannot be observed
    is left out.
    """

    def __init__(self, plan: Plan, env: HostEnv, team: Team) -> None:
        """Raises ConfigError where the choice fails on small trees, see `growth.try_choice`."""
        try_choice(plan, team)
        self._plan, self._env, self._team = plan, env, team
        self._players = count_players(plan, team)
        self._roots: dict[int, LiveState] = {}
        self._made: dict[int, list[_Expansion]] = {}
        self._chosen: dict[int, tuple[int, int]] = {}  # task -> parent and player of this turn's expansion

    def first(self, roots: Sequence[LiveState]) -> list[LiveState]:
        """The states of the first turn. ``roots``: the first state of each task."""
        self._roots = {live.task: live for live in roots}
        self._made = {task: [] for task in self._roots}
        return self._choose([])

    def next(
        self, states: Sequence[LiveState], played: Sequence[PlayedAction], rows: Sequence[TransitionRow]
    ) -> list[LiveState]:
        """The states of the next turn; arguments as in `Following.next`."""
        reached = {states[action.place].task: action for action in played}
        for task, (parent, player) in self._chosen.items():
            action = reached.get(task)
            if action is not None:
                live = LiveState(states[action.place].branch, action.state, action.key, action.transition, task)
                self._made[task].append(_Expansion(parent, player, action.transition, live))
            elif parent < 0:
                del self._made[task]
            else:
                self._made[task].append(_Expansion(parent, player, -1, None))
        return self._choose(rows)

    def of_task(self, task: int) -> Growing:
        """What plays one task on by itself; other tasks do not see its expansions."""
        own = copy.copy(self)
        own._roots, own._made = {task: self._roots[task]}, {task: list(self._made[task])}
        own._chosen = {task: self._chosen[task]}
        return own

    def player(self, task: int, role: int, turn: int) -> int:
        """Position in ``Team.players(role)`` of the model that acts for every role of a task in this turn."""
        return self._chosen[task][1]

    def _choose(self, rows: Sequence[TransitionRow]) -> list[LiveState]:
        """The states that the choices name; none after the last expansion. ``rows``: transitions so far."""
        tasks, expansions = list(self._made), self._plan.turns or 0
        n = len(self._made[tasks[0]]) if tasks else expansions
        self._chosen = {}
        if n >= expansions:
            return []
        grown = nothing_grown(bucket(len(tasks), 4), expansions)
        for i, task in enumerate(tasks):
            made = self._made[task]
            grown.parents[i, :n], grown.players[i, :n] = [e.parent for e in made], [e.player for e in made]
            own = [rows[e.row] if e.row >= 0 else None for e in made]
            grown.closed[i, :n] = [row is None or row.done for row in own]
            known = [t for t, row in enumerate(own) if row is not None and row.valid]
            if known:
                grown.rewards[i, known] = _team_values(self._plan, self._env, [rows[made[t].row] for t in known])
        data = np.zeros((len(grown.parents), 2), np.uint32)
        data[: len(tasks)] = [self._roots[task].key for task in tasks]
        keys = jax.random.wrap_key_data(jnp.asarray(data))
        choice = jax.device_get(next_choice(self._plan, self._players, keys, grown, jnp.int32(n)))
        for i in np.flatnonzero(~choice.possible[: len(tasks)])[:1]:
            raise wrong_choice(self._plan, self._team, n, choice, i)
        self._chosen = {task: (int(choice.parent[i]), int(choice.player[i])) for i, task in enumerate(tasks)}
        return [self._state(task, parent, n) for task, (parent, _) in self._chosen.items()]

    def _state(self, task: int, parent: int, n: int) -> LiveState:
        """The state behind expansion ``parent`` of a task, at turn ``n``."""
        live = self._roots[task] if parent < 0 else self._made[task][parent].live
        assert live is not None  # a closed expansion is no parent
        earlier = sum(e.parent == parent and e.row >= 0 for e in self._made[task])
        return live._replace(branch=Branch(n, True), earlier=earlier)


def next_states(plan: Plan, env: HostEnv, team: Team, assignment: Array | None) -> Following | Growing:
    """Make the object that a host rollout of a plan asks for its states.

    Args:
        plan: Plan of sampling.
        env: The environment.
        team: Roles and models.
        assignment: Who plays which role, see `Following`.

    Raises:
        ConfigError: A plan that grows has an assignment, or fails on small trees.
    """
    check_unassigned(plan, assignment)
    return Following(plan, env, assignment) if plan.choose is None else Growing(plan, env, team)


def _team_values(plan: Plan, env: HostEnv, rows: Sequence[TransitionRow]) -> np.ndarray:
    """Team reward of each of ``rows``."""
    by_component = np.moveaxis(np.stack([row.rewards for row in rows]), 1, 0)
    rewards: Mapping[str, np.ndarray] = dict(zip(env.components, by_component, strict=True))
    return np.asarray(team_value(plan, rewards))
