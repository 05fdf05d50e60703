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

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.call_team import calls
from jaxmarl_llm.envs.call_team.prompts import MASTER, ROLES, hears, offered, prompt, strategy
from jaxmarl_llm.envs.call_team.specialists import SPECIALISTS
from jaxmarl_llm.envs.call_team.tasks import Config, tasks
from jaxmarl_llm.envs.chat import action_of, with_memory
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Prompt, Rewards

__all__ = [
    "COMPONENTS", "Config", "State", "demonstrations", "gold", "hears", "make", "observe", "reset", "step", "strategy",
    "tasks", "verify", "with_memory",
]  # fmt: skip

COMPONENTS = (
    *("call", "exact", "routed", "function", "malformed"),
    *("unseen_function", "exact_unseen", "convention", "convention_met"),
)


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
    task, call = state.task, calls.read(text)
    unread = state.role == MASTER or isinstance(call, str)
    owned = {function["name"] for function in offered(task, state.role)}
    if isinstance(call, str) or state.role == MASTER or call[0] not in owned:
        graded = calls.Grade(0.0, False, not task["governed"])
    else:
        schema = next(f for f in task["functions"] if f["name"] == task["name"])
        graded = calls.grade(call, task["name"], task["answers"], schema, task["governed"])
    exact, unseen, governed = float(graded.exact), float(task["unseen_function"]), float(bool(task["governed"]))
    return {
        "call": graded.score,
        "exact": exact,
        "routed": float(state.role == task["specialist"]),
        "function": float(graded.function),
        "malformed": float(unread),
        "unseen_function": unseen,
        "exact_unseen": exact * unseen,
        "convention": governed,
        "convention_met": governed * graded.met,
    }


def verify(state: State) -> Rewards:
    """A local verdict on a route: 1 as ``call`` for the owner of the gold function."""
    return {role: {"call": float(state.role == state.task["specialist"])} for role in ROLES}


def gold(task: Mapping[str, Any]) -> tuple[tuple[str, str], tuple[str, str]]:
    """The replies of a perfect team on ``task``: (role, reply) of both turns."""
    schema = next(f for f in task["functions"] if f["name"] == task["name"])
    arguments = calls.gold_arguments(task["answers"], schema["required"])
    return (MASTER, task["specialist"]), (task["specialist"], calls.write(task["name"], arguments))


def demonstrations(config: Config, tasks: Iterable[Mapping[str, Any]]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) of perfect teams, on the first ``config.demonstrated`` of the ``tasks``.

    No call has an argument under a convention: of a task with such an argument only the route is shown.

    Raises:
        ConfigError: Each of the tasks has an argument under a convention.
    """
    chosen = list(tasks)[: config.demonstrated or None]
    samples = [
        (role, prompt(task, role), reply)
        for task in chosen
        for role, reply in gold(task)
        if role == MASTER or not task["governed"]
    ]
    if len(samples) == len(chosen):
        found = f"each of {len(chosen)} tasks has an argument under a convention"
        raise ConfigError(f"{checks.ARGS}.demonstrated: expected tasks that show a call, but {found}")
    return samples
