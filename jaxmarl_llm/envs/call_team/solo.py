"""The calls of `call_team` for one agent alone, which reads all offered functions: what routing brings or costs a team.

    turn  role  reads                                writes
    1     solo  the query, and all offered functions  one call, see `calls`

Tasks, conventions, judgement and memory entries are those of `call_team`. There is no route, so the component
``routed`` is missing. The call may have any offered function, and only the gold one earns anything. Of a task with an
argument under a convention there is no demonstration.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxmarl_llm.envs.call_team.judge import COMPONENTS, gold_call, judged
from jaxmarl_llm.envs.call_team.prompts import call_prompt, strategy
from jaxmarl_llm.envs.call_team.tasks import Config, tasks, taught
from jaxmarl_llm.envs.chat import action_of, with_memory
from jaxmarl_llm.messages import Action, HostEnv, Prompt, Rewards

__all__ = ["Config", "State", "demonstrations", "make", "prompt", "strategy", "tasks", "with_memory"]

ROLE = "solo"


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    done: bool = False


def make(config: Config) -> HostEnv:
    """The environment of ``config``: one role, one turn."""
    return HostEnv("call_team_solo", (ROLE,), 1, COMPONENTS, reset, observe, step)


def reset(seed: int, task: Mapping[str, Any]) -> State:
    """The first state of an episode. Nothing is drawn, so ``seed`` has no effect."""
    return State(task)


def observe(state: State) -> dict[str, Prompt]:
    """The prompt of the agent."""
    return {ROLE: prompt(state.task)}


def prompt(task: Mapping[str, Any]) -> Prompt:
    """The prompt of the agent on ``task``: all offered functions, and the query."""
    return call_prompt(task, task["functions"])


def step(seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after the call, its rewards, and True: the episode has finished.

    ``seed`` has no effect. ``actions``: the text of the agent.
    """
    text = action_of(ROLE, actions, state.done).text
    offered = {function["name"] for function in state.task["functions"]}
    return replace(state, done=True), {ROLE: judged(state.task, text, offered)}, True


def demonstrations(config: Config, tasks: Iterable[Mapping[str, Any]]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion): the perfect calls of those `taught` tasks that no convention governs."""
    return [(ROLE, prompt(task), gold_call(task)) for task in taught(config, tasks) if not task["governed"]]
