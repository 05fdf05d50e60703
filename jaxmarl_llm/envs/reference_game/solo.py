"""The reference game for one agent alone, which reads the abstract and the titles: what a hint costs a team.

Tasks, titles and the reading of answers are those of `reference_game`. ``hint`` and ``hint_words`` have no effect.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from jaxmarl_llm.envs.chat import action_of, with_memory
from jaxmarl_llm.envs.reference_game import env as game
from jaxmarl_llm.envs.reference_game.env import Config, State, Task, stand_in, strategy, tasks
from jaxmarl_llm.envs.reference_game.groups import first_words, named
from jaxmarl_llm.envs.scitldr import opening
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = ["Config", "State", "Task", "demonstrations", "make", "stand_in", "strategy", "tasks", "with_memory"]

ROLE = "solo"
COMPONENTS = ("chosen", "named")
SYSTEM = "The text is of one of the titles. Copy the first words of that title, nothing else."


def make(config: Config) -> HostEnv:
    """The environment of ``config``: one role, one turn."""
    return HostEnv("reference_game_solo", (ROLE,), 1, COMPONENTS, reset, partial(observe, config), step)


def reset(seed: int, task: Task) -> State:
    """The first state of an episode. Nothing is drawn, so ``seed`` has no effect."""
    return State(task)


def observe(config: Config, state: State) -> dict[str, Prompt]:
    """The prompt of the agent: the beginning of the abstract, and the titles."""
    return {ROLE: prompt(config, state.task)}


def prompt(config: Config, task: Mapping[str, Any]) -> Prompt:
    """The prompt of the agent on ``task``."""
    listed = "\n".join(f"- {title}" for title in task["titles"])
    shown = f"Text: {opening(task['text'], config.abstract_words)}\nTitles:\n{listed}"
    return Message("system", SYSTEM), Message("user", shown)


def step(seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after the answer, its reward, and True: the episode has finished.

    ``seed`` has no effect. ``actions``: the text of the agent.
    """
    action = action_of(ROLE, actions, state.done)
    place = named(action.text, state.task["titles"], action.truncated)
    paid = {"chosen": float(place == state.task["answer"]), "named": float(place is not None)}
    return State(state.task, done=True), {ROLE: paid}, True


def demonstrations(config: Config, tasks: Iterable[Task]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) of ``tasks``: the first words of the right title."""
    return [(ROLE, prompt(config, task), first_words(task["titles"], task["answer"], game.ANSWER)) for task in tasks]
