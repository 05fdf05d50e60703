"""Host rollouts: episodes of a Python environment, with the plans, random keys and tables of array rollouts.

`HostFrontier` holds the states that are still played. In each turn the environment observes every state, and the
tokenizer of a role encodes its prompt. The models generate (`launches`), and the environment steps in worker processes.
The tables are padded to bucket sizes, so that programs which read them are compiled for few shapes.
"""

from __future__ import annotations

import collections
import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import Action, HostEnv, Prompt
from jaxmarl_llm.rollout.env_pool import Failure, raised
from jaxmarl_llm.rollout.failures import RolloutFailure
from jaxmarl_llm.rollout.host_keys import action_keys, root_keys, seed_of
from jaxmarl_llm.rollout.host_states import LiveState, PlayedAction, next_states
from jaxmarl_llm.rollout.launches import GenerationRequest, SampledCompletion, SamplerFactory, here
from jaxmarl_llm.rollout.plans import ROOT, Plan
from jaxmarl_llm.rollout.tables import (
    Costs,
    NodeRow,
    Rows,
    StepRow,
    TransitionRow,
    checked,
    make_tables,
    replace_rewards,
    reward_row,
)
from jaxmarl_llm.types import Params, Retrieval, Team, Tree


class Record(NamedTuple):
    """One step as text: row i of ``HostRollout.records`` is row i of the steps table."""

    role: str
    prompt: Prompt
    action: Action


class HostRollout(NamedTuple):
    """The result of a host rollout."""

    tree: Tree  # numpy arrays
    records: list[Record]
    failures: list[RolloutFailure]
    cut_tokens: int  # prompt tokens left out because a prompt was too long
    cut_prompts: Mapping[str, int]  # by role, prompts from which tokens were left out
    unplayed: int  # tasks without a first prompt, because ``reset`` or ``observe`` failed


class Calls(Protocol):
    """The functions of `EnvPool` that a frontier calls."""

    env: HostEnv

    def map(self, method: str, calls: Sequence[tuple], tasks: Sequence[int] | None = None) -> list[Any]:
        """Results of calls, as of `EnvPool.map`.

        Args:
            method: Name of the function.
            calls: Arguments of each call.
            tasks: Task number of each call.
        """
        ...


# (roles [N], prompts [N]) -> (prompts with retrieved memory entries, Retrieval of N rows)
Recall = Callable[[Sequence[int], Sequence[Prompt]], tuple[list[Prompt], Retrieval]]


class HostSettings(NamedTuple):
    """Settings of `play`: the plan, the distribution of tokens, the longest prompt, memory, and who plays."""

    plan: Plan
    sampling: Sampling
    max_prompt: int  # tokens; longer prompts are cut as the tokenizer documents, and the cut tokens are counted
    version: int = 0  # optimizer steps of the parameters, written into the steps table
    recall: Recall | None = None  # adds memory entries to prompts; None: no memory
    assignment: np.ndarray | None = None  # position in `Team.players` by task (, turn) and role [B (M) A]; None: all 0
    sampler: SamplerFactory = here  # what samples completions


class Seat(NamedTuple):
    """A role that acts in a state: its index in ``Team.roles`` and its prompt."""

    role: int
    prompt: Prompt


class TurnRequests(NamedTuple):
    """The requests of a turn: one for each seat of every state, in the order of the states."""

    seats: list[list[Seat]]  # of every state
    prompts: list[Prompt]  # with memory entries
    requests: list[GenerationRequest]
    retrieval: Retrieval | None  # None: no memory


class TurnActions(NamedTuple):
    """The joint actions that a turn plays in every state, and the calls of ``step`` that play them."""

    samples: list[list[SeatSamples]]
    chosen: list[tuple[tuple[int, ...], ...]]  # of every state: the completion of each seat in each joint action
    joint: list[tuple[int, int]]  # of every call: the state, and the joint action among those of the state
    calls: list[tuple]
    child_keys: dict[int, np.ndarray]  # by state, key data [G 2]


class SeatSamples(NamedTuple):
    """The completions that were sampled for one `Seat`: ``first_step`` is the row of the first in the steps table."""

    role: str
    completions: list[SampledCompletion]
    first_step: int


def play(
    team: Team, params: Params, pool: Calls, tasks: Sequence[Any], key: jax.Array, settings: HostSettings
) -> HostRollout:
    """Play all tasks to their end.

    Args:
        team: Roles and models.
        params: Parameters of the team (`Model.variables`).
        pool: Runs the environment.
        tasks: Arguments of the environment's ``reset``, one each.
        key: Typed key; consumed by folding.
        settings: How tasks are played.

    Raises:
        ConfigError: The plan needs something that the environment lacks.
    """
    frontier = HostFrontier(team, params, pool, settings)
    frontier.reset(tasks, key)
    while frontier.states and frontier.turn < pool.env.max_turns:
        frontier.play_turn()
    return frontier.result()


class HostFrontier:
    """The states of a host rollout that are still played, and the table rows collected so far.

    ``reset`` makes the first states. A turn is ``observe``, ``request_completions``, ``step`` and ``advance``.
    """

    def __init__(self, team: Team, params: Params, pool: Calls, settings: HostSettings) -> None:
        """Arguments as in `play`."""
        settings.plan.check(pool.env)
        self.turn = 0
        self.states: list[LiveState] = []
        self.rows = Rows()
        self.records: list[Record] = []
        self.failures: list[RolloutFailure] = []
        self.cut_tokens = self.env_calls = self.unplayed = 0
        self.cut_prompts: collections.Counter[str] = collections.Counter()
        self._team, self._pool, self._env, self._settings = team, pool, pool.env, settings
        self._next = next_states(settings.plan, pool.env, team, settings.assignment)
        self._sampler = settings.sampler(team, params, settings.sampling, settings.version)

    def reset(self, tasks: Sequence[Any], key: jax.Array) -> None:
        """The first state of each task; a task whose ``reset`` fails is left out."""
        roots, resets = (np.asarray(x)[: len(tasks)] for x in root_keys(key, jnp.arange(bucket(len(tasks), 4))))
        calls = [(seed_of(k), task) for k, task in zip(resets, tasks)]
        for i, state in enumerate(self._pool.map("reset", calls, range(len(tasks)))):
            if isinstance(state, Failure):
                self.failures.append(RolloutFailure("reset", 0, (), i, f"{state.kind}: {state.message}", state.trace))
                self.unplayed += 1
            else:
                self.states.append(LiveState(ROOT, state, roots[i], -1, i))
        self.states = self._next.first(self.states)

    def alone(self, live: LiveState) -> HostFrontier:
        """A frontier with one of the states of this turn, and with empty tables.

        Args:
            live: The state.
        """
        own = copy.copy(self)
        own.states, own.rows, own.records, own.failures = [live._replace(parent=-1)], Rows(), [], []
        own.cut_tokens = own.env_calls = own.unplayed = 0
        own.cut_prompts = collections.Counter()
        own._next = self._next.of_task(live.task)
        return own

    def play_turn(self) -> None:
        """One turn of every state."""
        seats = self.observe()
        self.advance(self.step(self.request_completions(seats)) if self.states else [])

    def observe(self) -> list[list[Seat]]:
        """The seats of every state, in the order of the environment's roles.

        A state whose observation raises is removed, and the transition that led to it becomes invalid and final.
        """
        seats, states = [], []
        order = self._env.roles.index
        for live in self.states:
            try:
                prompts = sorted(self._env.observe(live.state).items(), key=lambda item: order(item[0]))
            except Exception as error:  # the joint action that led to this state is at fault
                told = raised(error)
                roles, line = self._acted(live.parent), f"{told.kind}: {told.message}"
                self.failures.append(RolloutFailure("observe", self.turn, roles, live.task, line, told.trace))
                if live.parent < 0:
                    self.unplayed += 1
                else:
                    before = self.rows.transitions[live.parent]
                    self.rows.transitions[live.parent] = before._replace(done=True, valid=False)
                continue
            seats.append([Seat(self._team.role_index(role), prompt) for role, prompt in prompts])
            states.append(live)
        self.states = states
        return seats

    def request_completions(self, seats: Sequence[Sequence[Seat]]) -> list[list[SeatSamples]]:
        """Sample completions for the seats of every state, and add nodes and steps to the tables.

        All prompts of a turn are fixed before any model generates.
        """
        asked = self.requests(seats)
        if not asked.requests:
            return [[] for _ in seats]
        return self.add_completions(asked, self._sampler.sample(asked.requests, more=self.more))

    @property
    def more(self) -> bool:
        """Whether a turn may follow this one."""
        return self.turn + 1 < self._env.max_turns

    def requests(self, seats: Sequence[Sequence[Seat]]) -> TurnRequests:
        """The requests of a turn for ``seats``, those of every state."""
        flat = [(live, seat) for live, own in zip(self.states, seats, strict=True) for seat in own]
        prompts, retrieval = [seat.prompt for _, seat in flat], None
        if self._settings.recall is not None and flat:
            prompts, retrieval = self._settings.recall([seat.role for _, seat in flat], prompts)
        requests = [self._request(live, seat.role, prompt) for (live, seat), prompt in zip(flat, prompts)]
        return TurnRequests([list(own) for own in seats], prompts, requests, retrieval)

    def add_completions(
        self, asked: TurnRequests, sampled: Sequence[Sequence[SampledCompletion]]
    ) -> list[list[SeatSamples]]:
        """Add nodes and steps to the tables.

        Args:
            asked: What the turn asked for.
            sampled: Completions of each request.
        """
        if asked.retrieval is not None:
            self.rows.retrievals.append(asked.retrieval)
        flat = [(live, seat) for live, own in zip(self.states, asked.seats, strict=True) for seat in own]
        samples = []
        for (live, seat), prompt, request, completions in zip(
            flat, asked.prompts, asked.requests, sampled, strict=True
        ):
            role, first, node = self._team.roles[seat.role].name, len(self.rows.steps), len(self.rows.nodes)
            ids = request.prompt_ids
            self.rows.nodes.append(NodeRow(ids, seat.role, request.model, live.task, self.turn, live.parent))
            learns = self._next.player(live.task, seat.role, self.turn) < self._team.roles[seat.role].learning
            source = self._team.sources(frozen=not learns)[request.model]
            for action, logprobs in completions:
                self.rows.steps.append(StepRow(node, action.ids, logprobs, action.truncated, source))
                self.records.append(Record(role, prompt, action))
            samples.append(SeatSamples(role, list(completions), first))
        rest = iter(samples)
        return [list(itertools.islice(rest, len(own))) for own in asked.seats]

    def step(self, samples: Sequence[Sequence[SeatSamples]]) -> list[PlayedAction]:
        """Play the joint actions of every state, and add them to the transitions table."""
        actions = self.actions(samples)
        return self.add_transitions(actions, self._step_environments(actions))

    def actions(self, samples: Sequence[Sequence[SeatSamples]]) -> TurnActions:
        """The joint actions of the plan. ``samples``: those of every state."""
        plan = self._settings.plan
        chosen = [plan.actions(live.branch, len(own)) for live, own in zip(self.states, samples, strict=True)]
        env_keys, child_keys = action_keys(self.states, [len(a) for a in chosen])
        joint = [(i, j) for i, actions in enumerate(chosen) for j in range(len(actions))]
        calls = []
        for i, j in joint:
            actions = {seat.role: seat.completions[g].action for seat, g in zip(samples[i], chosen[i][j])}
            calls.append((seed_of(env_keys[i][j]), self.states[i].state, actions))
        return TurnActions([list(own) for own in samples], chosen, joint, calls, child_keys)

    def add_transitions(self, actions: TurnActions, results: Sequence[Any]) -> list[PlayedAction]:
        """Add the joint actions of a turn to the transitions table.

        Args:
            actions: The joint actions.
            results: Of each call, (state, rewards by role, done) or a `Failure`; see `EnvPool` and `checked`.
        """
        samples, played = actions.samples, []
        for (i, j), result in zip(actions.joint, results, strict=True):
            live, failed = self.states[i], isinstance(result, Failure)
            rewards, problem = reward_row(result, self._team, self._env.components)
            if problem:
                roles, trace = tuple(seat.role for seat in samples[i]), result.trace if failed else ""
                self.failures.append(RolloutFailure("step", self.turn, roles, live.task, problem, trace))
            key = actions.child_keys[i][j]
            played.append(PlayedAction(i, len(self.rows.transitions), None if failed else result[0], key))
            self.rows.transitions.append(
                TransitionRow(
                    steps=[seat.first_step + g for seat, g in zip(samples[i], actions.chosen[i][j])],
                    parent=live.parent,
                    task=live.task,
                    turn=self.turn,
                    rewards=rewards,
                    done=failed or result[2],
                    valid=problem is None,
                )
            )
        return played

    def advance(self, played: Sequence[PlayedAction]) -> None:
        """Replace the states by those that are played next, and begin the next turn.

        ``played``: joint actions of one state stand together, in the order of ``Plan.actions``.
        """
        self.states = self._next.next(self.states, played, self.rows.transitions)
        self.turn += 1

    def result(self) -> HostRollout:
        """The tables and texts of everything played so far."""
        costs = Costs(self._sampler.prompt_tokens, self.env_calls, self._sampler.launches)
        tree = make_tables(self._team, self._env.components, self.rows, self._settings.version, costs)
        cut = dict(self.cut_prompts)
        return HostRollout(tree, self.records, self.failures, self.cut_tokens, cut, self.unplayed)

    def _acted(self, transition: int) -> tuple[str, ...]:
        """Roles of the joint action in row ``transition``; none for -1."""
        steps = self.rows.transitions[transition].steps if transition >= 0 else ()
        return tuple(self.records[step].role for step in steps)

    def _request(self, live: LiveState, role: int, prompt: Prompt) -> GenerationRequest:
        """The request for one seat of a state; counts the tokens cut from its prompt."""
        name, tokenizer = self._team.roles[role].name, self._team.model_of(role).tokenizer
        fitted = tokenizer.fit(prompt, name, self._settings.max_prompt)
        self.cut_tokens += fitted.cut
        if fitted.cut:
            self.cut_prompts[name] += 1
        model = self._team.players(role)[self._next.player(live.task, role, self.turn)]
        width = self._settings.plan.width(live.branch)
        return GenerationRequest(model, width, live.task, role, live.key, fitted.ids, live.earlier)

    def _step_environments(self, actions: TurnActions) -> list[Any]:
        """(state, rewards by role, done) or a `Failure` of each call; the verifier's rewards if local."""
        calls, tasks = actions.calls, [self.states[i].task for i, _ in actions.joint]
        self.env_calls += len(calls)
        results = [checked(result) for result in self._pool.map("step", calls, tasks)]
        if not self._settings.plan.local:
            return results
        fine = [i for i, result in enumerate(results) if not isinstance(result, Failure)]
        verdicts = self._pool.map("verify", [(results[i][0],) for i in fine], [tasks[i] for i in fine])
        for i, verdict in zip(fine, verdicts, strict=True):
            results[i] = replace_rewards(results[i], verdict)
        return results
