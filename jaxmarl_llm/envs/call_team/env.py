"""A master routes a query to one of five specialists, and the specialist writes one function call.

This is the setting of JoyAgents-R1 on public data, with tasks that a model of 135 million parameters can begin to
solve. An episode has two turns.

    turn  role        reads                                               writes
    1     master      the query, and the closed list of specialists       one name of the list
    2     specialist  the query, and those offered functions it owns      one call, see `calls`

A function belongs to one specialist, by the rule of `specialists`. A specialist sees only those functions of a task
that it owns. A wrong specialist therefore reads ``none``, or other functions. No call of it can be right: a function
that its writer does not own is a wrong one. A reply of the master that is not a name of the list, apart from spaces
around it, ends the episode.

The reward is one component, paid to all roles at the last turn:

    call    Share of the gold arguments that match, less one share for each extra argument, and at least 0. It is 1
            exactly for a right call, and 0 for a wrong function and for a failed route.

There is no reward for form. The other components are facts, which a configuration logs and does not pay:

    exact            1 for a right call
    routed           1 if the master named the owner of the gold function
    function         1 if the call has the gold name and its writer owns the gold function
    malformed        1 if a reply could not be read: a name outside the list, or no call
    unseen_function  1 if no training task calls the gold function
    exact_unseen     1 for a right call of such a function; exact_unseen / unseen_function is their success
    convention       1 if a convention governs an argument of the gold call (``conventions=True``)
    convention_met   1 if the call then has all those arguments as demanded

With ``conventions=True`` some arguments need a written form that no prompt states and no demonstration shows: dates,
units, places and ids (`conventions`). Of a task with such an argument demonstrations show the route alone. An entry of
a memory can show the form of a similar call.

`call_team.solo` is one agent that reads all offered functions.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxmarl_llm.envs.call_team import judge
from jaxmarl_llm.envs.call_team.judge import gold_call, judged
from jaxmarl_llm.envs.call_team.prompts import MASTER, ROLES, hears, offered, prompt, strategy
from jaxmarl_llm.envs.call_team.specialists import SPECIALISTS
from jaxmarl_llm.envs.call_team.tasks import Config, tasks, taught
from jaxmarl_llm.envs.chat import action_of, with_memory
from jaxmarl_llm.messages import Action, HostEnv, Prompt, Rewards

__all__ = [
    "COMPONENTS", "Config", "State", "demonstrations", "gold", "hears", "make", "observe", "reset", "step", "strategy",
    "tasks", "verify", "with_memory",
]  # fmt: skip

COMPONENTS = (*judge.COMPONENTS, "routed")


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    role: str = MASTER  # acts now
    done: bool = False


def make(config: Config) -> HostEnv:
    """The environment of ``config``."""
    return HostEnv("call_team", ROLES, 2, COMPONENTS, reset, observe, step, verify)


def reset(seed: int, task: Mapping[str, Any]) -> State:
    """The first state of an episode. Nothing is drawn, so ``seed`` has no effect."""
    return State(task)


def observe(state: State) -> dict[str, Prompt]:
    """The prompt of the role that acts."""
    return {state.role: prompt(state.task, state.role)}


def step(seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after a reply, the rewards of the turn, and whether the episode has finished.

    ``seed`` has no effect. ``actions``: the reply of the role that acts.
    """
    text = action_of(state.role, actions, state.done).text
    if state.role == MASTER and text.strip() in SPECIALISTS:
        return replace(state, role=text.strip()), {}, False
    paid = _paid(state, text)
    return replace(state, done=True), {role: dict(paid) for role in ROLES}, True


def _paid(state: State, text: str) -> dict[str, float]:
    """The components of an episode that ends with ``text``."""
    task, owned = state.task, {function["name"] for function in offered(state.task, state.role)}
    paid = judged(task, None if state.role == MASTER else text, owned)
    return {**paid, "routed": float(state.role == task["specialist"])}


def verify(state: State) -> Rewards:
    """A local verdict on a route: 1 as ``call`` for the owner of the gold function."""
    return {role: {"call": float(state.role == state.task["specialist"])} for role in ROLES}


def gold(task: Mapping[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """The replies of a perfect team on ``task``: (role, reply) of both turns."""
    return (MASTER, task["specialist"]), (task["specialist"], gold_call(task))


def demonstrations(config: Config, tasks: Iterable[Mapping[str, Any]]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) of perfect teams, on the `taught` ones of the ``tasks``.

    No call has an argument under a convention: of a task with such an argument only the route is shown.
    """
    return [
        (role, prompt(task, role), reply)
        for task in taught(config, tasks)
        for role, reply in gold(task)
        if role == MASTER or not task["governed"]
    ]
