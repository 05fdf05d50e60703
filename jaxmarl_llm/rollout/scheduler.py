"""Host rollouts whose states do not wait for each other (`EnvConfig.lanes`).

`host.play` plays turn by turn: a state waits until the slowest completion and the slowest environment of its turn are
over. Here a state goes on as soon as its own are. `slot_sampler` decodes nodes of all turns in one loop, and
environments step meanwhile.

Keys are by path, so tokens and rewards are those of `host.play`. The tables are, too: what was sampled and what the
environment returned is written down (`Record`), and a frontier reads it turn by turn.
"""

from __future__ import annotations

import collections
import concurrent.futures
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jaxmarl_llm.distributed import processes
from jaxmarl_llm.distributed.meshes import Layout
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv
from jaxmarl_llm.rollout import host
from jaxmarl_llm.rollout.env_pool import Call, EnvPool, Failure
from jaxmarl_llm.rollout.host import HostFrontier, HostRollout, HostSettings, TurnActions, TurnRequests
from jaxmarl_llm.rollout.host_states import LiveState
from jaxmarl_llm.rollout.launches import GenerationRequest, SampledCompletion
from jaxmarl_llm.rollout.slot_sampler import SlotSampler
from jaxmarl_llm.rollout.tables import checked, replace_rewards
from jaxmarl_llm.types import Params, Team

# How long more requests are waited for, to decode them together: in seconds of the last decoding. Two decodings take
# one more. A wait while nodes are decoded delays these, too.
PATIENCE, WHILE_DECODING = 1.0, 0.25


def play(
    team: Team,
    params: Params,
    pool: EnvPool,
    tasks: Sequence[Any],
    key: jax.Array,
    settings: HostSettings,
    lanes: int,
    layout: Layout | None = None,
) -> HostRollout:
    """Play all tasks to their end. The result is that of `host.play`, except for the counts of launches and of tokens.

    Args:
        team: Roles and models.
        params: Parameters of the team.
        pool: Runs the environment.
        tasks: Arguments of the environment's ``reset``, one each.
        key: Typed key; consumed by folding.
        settings: How tasks are played; ``sampler`` is not read, because this process samples.
        lanes: Samples of a model that are decoded at once, at most.
        layout: How devices are cut during generation, without blocks; None: as the mesh of the caller.

    Raises:
        ConfigError: There are several processes, or the plan needs what the environment lacks.
    """
    check_alone("config.env.lanes")
    sampler = SlotSampler(team, params, settings.sampling, lanes, None if layout is None else layout.mesh)
    record = Record(pool, sampler)

    def recorded(team: Team, params: Params, sampling: Sampling, version: int, /) -> Record:
        return record

    settings = settings._replace(sampler=recorded)
    frontier = HostFrontier(team, params, record, settings)
    frontier.reset(tasks, key)
    _Scheduler(frontier, sampler, pool, record, local=settings.plan.local).run()
    record.launches = sampler.launches
    return host.play(team, params, record, tasks, key, settings)


def check_alone(path: str) -> None:
    """Raise `ConfigError` with several processes: their clocks differ, so they would begin unequal programs.

    Args:
        path: Key of the setting.
    """
    if processes.count() > 1:
        raise ConfigError(f"{path}: expected 0 with several processes, whose states go on together")


class Record:
    """Completions and results of calls by name, as the sampler and the pool of a frontier.

    Args:
        pool: Asked for what is not written down.
        sampler: Its count of tokens is that of the record.

    ``launches``: times that a model was called.
    """

    def __init__(self, pool: EnvPool, sampler: SlotSampler):
        self._pool, self._sampler = pool, sampler
        self.launches = 0
        self.env: HostEnv = pool.env
        self.completions: dict[Hashable, list[SampledCompletion]] = {}  # by `name_of` a request
        self.results: dict[Hashable, Any] = {}  # by name of the function and seed, or identity of the state

    @property
    def prompt_tokens(self) -> int:
        """See `launches.Sampler`."""
        return self._sampler.prompt_tokens

    def sample(self, requests: Sequence[GenerationRequest], *, more: bool) -> list[list[SampledCompletion]]:
        """The completions of ``requests``, all of which are written down. ``more``: not read."""
        return [self.completions[name_of(request)] for request in requests]

    def map(self, method: str, calls: Sequence[tuple], tasks: Sequence[int] | None = None) -> list[Any]:
        """Results of calls, as of `EnvPool.map`; ``reset`` alone is called and written down here."""
        names = [call_name(method, args) for args in calls]
        if method == "reset" and not all(name in self.results for name in names):
            self.results |= zip(names, self._pool.map(method, calls, tasks), strict=True)
        return [self.results[name] for name in names]


def name_of(request: GenerationRequest) -> Hashable:
    """Name a request of a rollout by the key of its state, the role, and the samples before it.

    Args:
        request: One node.
    """
    return request.key.tobytes(), request.role, request.earlier


def call_name(method: str, args: tuple) -> Hashable:
    """Name a call of a rollout by its seed, or by the state that ``verify`` is given.

    Args:
        method: Name of the function.
        args: Its arguments.
    """
    return method, id(args[0]) if method == "verify" else args[0]


class _Turn:
    """A turn of one state: what it waits for."""

    def __init__(self, frontier: HostFrontier, asked: TurnRequests):
        self.frontier, self.asked = frontier, asked
        self.sampled: dict[int, list[SampledCompletion]] = {}  # by request
        self.actions: TurnActions | None = None
        self.stepped: dict[int, tuple] = {}  # results whose rewards the local verifier still judges, by call
        self.results: dict[int, Any] = {}  # by call


class _Scheduler:
    """Plays the states of a frontier on, each as soon as it can, and writes down what happens."""

    def __init__(self, frontier: HostFrontier, sampler: SlotSampler, pool: EnvPool, record: Record, *, local: bool):
        self._sampler, self._pool, self._record, self._local = sampler, pool, record, local
        self._ready = collections.deque(frontier.alone(live) for live in frontier.states)
        self._calls: dict[Call, tuple[_Turn, int, str, tuple]] = {}  # turn, number of the call, function, arguments
        self._decoding = 0.0  # seconds of the last one

    def run(self) -> None:
        """Play to the end."""
        while True:
            while self._ready:
                self._begin(self._ready.popleft())
            if self._calls:
                # Without requests there is nothing else to do. With some, a few more may come at once.
                share = WHILE_DECODING if self._sampler.decoding else PATIENCE
                patience = self._decoding * share if self._sampler.room else 0.0
                if self._collect(timeout=patience if self._sampler.busy else None):
                    continue  # also without a state that is ready: the other calls of its turn may be over as soon
            if self._sampler.busy:
                began = time.monotonic()
                finished = self._sampler.work()
                self._decoding = time.monotonic() - began
                for (turn, number), completions in finished:
                    self._heard(turn, number, completions)
            elif not self._calls:
                return

    def _begin(self, frontier: HostFrontier) -> None:
        """Observe the state of a frontier and ask the models."""
        if frontier.turn >= self._pool.env.max_turns:
            return
        seats = frontier.observe()
        if not frontier.states:  # its observation has failed
            self._go_on(frontier, [])
            return
        turn = _Turn(frontier, frontier.requests(seats))
        for number, request in enumerate(turn.asked.requests):
            self._sampler.submit((turn, number), request, more=frontier.more)
        if not turn.asked.requests:
            self._act(turn)

    def _heard(self, turn: _Turn, number: int, completions: list[SampledCompletion]) -> None:
        """Take the completions of a request; the last one of a turn lets the environment step."""
        self._record.completions[name_of(turn.asked.requests[number])] = completions
        turn.sampled[number] = completions
        if len(turn.sampled) == len(turn.asked.requests):
            self._act(turn)

    def _act(self, turn: _Turn) -> None:
        """Let the environment play the joint actions of a turn."""
        sampled = [turn.sampled[number] for number in range(len(turn.asked.requests))]
        turn.actions = turn.frontier.actions(turn.frontier.add_completions(turn.asked, sampled))
        for number, args in enumerate(turn.actions.calls):
            self._call(turn, number, "step", args)

    def _call(self, turn: _Turn, number: int, method: str, args: tuple) -> None:
        self._calls[self._pool.submit(method, args)] = turn, number, method, args

    def _collect(self, timeout: float | None) -> bool:
        """Take the results of calls that are over, and return whether there were any.

        ``timeout``: seconds to wait for one; None: until there is one.
        """
        if not any(call.done for call in self._calls):
            waits = [call.future for call in self._calls]
            concurrent.futures.wait(waits, timeout, concurrent.futures.FIRST_COMPLETED)
        over = [call for call in self._calls if call.done]
        for call in over:
            turn, number, method, args = self._calls.pop(call)
            self._record.results[call_name(method, args)] = result = call.result()
            if method == "verify":
                result = replace_rewards(turn.stepped.pop(number), result)
            else:
                result = checked(result)
                if self._local and not isinstance(result, Failure):
                    turn.stepped[number] = result
                    self._call(turn, number, "verify", (result[0],))
                    continue
            turn.results[number] = result
            self._played(turn)
        return bool(over)

    def _played(self, turn: _Turn) -> None:
        """Go on behind the joint actions of a turn, once the environment has played all of them."""
        assert turn.actions is not None
        if len(turn.results) < len(turn.actions.calls):
            return
        results = [turn.results[number] for number in range(len(turn.actions.calls))]
        self._go_on(turn.frontier, turn.frontier.add_transitions(turn.actions, results))

    def _go_on(self, frontier: HostFrontier, played: Sequence[Any]) -> None:
        """Make the states behind ``played`` ready."""
        frontier.advance(played)
        states: list[LiveState] = frontier.states
        self._ready.extend([frontier] if len(states) == 1 else [frontier.alone(live) for live in states])
