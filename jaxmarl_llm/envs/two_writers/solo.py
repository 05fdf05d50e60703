"""The summaries of `two_writers` by one agent alone, which reads the abstract: what a second writer brings a team.

Tasks, the judge and memory entries are those of `two_writers`. There is no proposal, so the component ``proposal`` is
missing. Demonstrations show the same summaries as the editor's, behind the abstract. ``editor_reads`` has no effect.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jaxmarl_llm.envs.chat import action_of, with_memory
from jaxmarl_llm.envs.scitldr import opening, stand_in
from jaxmarl_llm.envs.two_writers.env import JUDGED, Config, Task, judge, shown_texts, strategy, tasks
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = ["Config", "State", "Task", "demonstrations", "make", "stand_in", "strategy", "tasks", "with_memory"]

ROLE = "solo"
SYSTEM = "Write one short sentence that says what is new in the text. Use its own words, and end with a full stop."


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    done: bool = False


def make(config: Config) -> HostEnv:
    """The environment of ``config``: one role, one turn."""
    return HostEnv("two_writers_solo", (ROLE,), 1, JUDGED, reset, partial(observe, config), partial(step, config))


def reset(seed: int, task: Task) -> State:
    """The first state of an episode. Nothing is drawn, so ``seed`` has no effect."""
    return State(task)


def observe(config: Config, state: State) -> dict[str, Prompt]:
    """The prompt of the agent."""
    return {ROLE: prompt(config, state.task)}


def prompt(config: Config, task: Mapping[str, Any]) -> Prompt:
    """The prompt of the agent on ``task``: the beginning of the abstract."""
    return Message("system", SYSTEM), Message("user", opening(task["text"], config.abstract_words))


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after the summary, its rewards, and True: the episode has finished.

    ``seed`` has no effect. ``actions``: the text of the agent.
    """
    action = action_of(ROLE, actions, state.done)
    paid = judge(config, state.task, action.text, truncated=action.truncated)
    return replace(state, done=True), {ROLE: paid}, True


def demonstrations(config: Config, tasks: Iterable[Task]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) of ``tasks``: the summaries that the editor is shown, where there is one."""
    texts = ((task, shown_texts(config, task)[1]) for task in tasks)
    return [(ROLE, prompt(config, task), summary) for task, summary in texts if summary]
