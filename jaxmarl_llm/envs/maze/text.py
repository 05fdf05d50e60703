"""The split maze of `maze` through chat prompts, for host models; and a grader that reads any dialogue about a maze.

A reply is free text that names a direction: the one behind ``Move:``, else the first that it proposes, as
`maze.language` reads it. Partners hear its first ``message`` characters. Rules, tasks and rewards are `maze`'s.

Shared arguments: ``config`` has the settings, and ``state`` is the state of an episode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.chat import asked, entry, with_memory
from jaxmarl_llm.envs.maze import array as maze
from jaxmarl_llm.envs.maze.array import CELLS, MOVES, ROLES
from jaxmarl_llm.envs.maze.language import agrees, proposals, refuses
from jaxmarl_llm.envs.text_adapter import board, task_rows
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = ["Config", "Graded", "demonstrations", "grade", "make", "prompt", "strategy", "tasks", "with_memory"]
NAMES = dict(zip(MOVES, ("up", "down", "left", "right"), strict=True))
RULES = (
    "You walk through a maze{company}, one step at a time, from where you are (@) to the goal (G). The map shows free "
    "cells as . and walls as #{unseen}. Cells are (row, column), from (1, 1) at the top left. {agree}Say what helps, "
    "briefly, and end with a line 'Move: up', 'Move: down', 'Move: left' or 'Move: right'."
)
AGREE = "You move only where all of you name the same direction in the same turn. "
UNSEEN = "; cells that you do not see, but a partner does, as ?"
CAME = (  # as maze.OUTCOMES
    "",
    "Last turn you all named the same direction and moved.",
    "Last turn you named different directions and stayed.",
    "Last turn you all walked into a wall or the border and stayed.",
)
ALONE = ("", "Last turn you moved.", "Last turn no direction was read and you stayed.", CAME[3].replace(" all", ""))


@dataclass(frozen=True)
class Config(maze.Config):
    """The settings of `maze`, and which of its tasks are played."""

    message: int = 500  # characters of a reply that partners hear
    split: str = "train"  # train or test: other mazes
    count: int = 0  # 0: as many as ``tasks``

    def check(self, path: str) -> None:
        super().check(path)
        checks.split_and_count(path, self)

    @property
    def max_new_tokens(self) -> int:
        """1: replies are of any length, and the part of them that partners hear is cut."""
        return 1

    @property
    def board(self) -> maze.Config:
        """The array environment's configuration: directions are played there, words are kept here."""
        names = maze.Config.__dataclass_fields__
        return maze.Config(**{name: getattr(self, name) for name in names} | {"message": 0})


class State(NamedTuple):
    """An episode so far."""

    inner: maze.State
    words: tuple[str, ...] = ()  # last replies as partners hear them


def prompt(config: maze.Config, seat: int, state: maze.State, words: Sequence[str]) -> Prompt:
    """The chat prompt of the agent in ``seat``. ``words`` are all agents' last replies, none before the first."""
    n, task = config.size, state.task
    seen = (np.asarray(task["owner"]) == seat) | (config.view == "full")
    cells = np.array(list(CELLS))[np.where(seen, task["walls"], 2)]
    cells[int(task["goal"])], cells[int(state.cell)] = "G", "@"
    at = lambda cell: f"({int(cell) // n + 1}, {int(cell) % n + 1})"
    lines = ["Map:", "   " + " ".join(f"{c + 1:2}" for c in range(n))]
    lines += [f"{r + 1:2}  " + "  ".join(row) for r, row in enumerate(cells.reshape(n, n))]
    lines.append(f"You are at {at(state.cell)}, the goal is at {at(task['goal'])}.")
    if words:
        lines.append((ALONE if config.agents == 1 else CAME)[int(state.outcome)])
        lines.append(f"You said: {words[seat]}")
        for who in np.asarray(state.partners)[min(int(state.turn), config.moves - 1), seat]:
            lines.append(f"Agent {ROLES[who]} said: {words[who]}")
    alone, split = config.agents == 1, config.agents > 1 and config.view == "split"
    company = "" if alone else f" with {'a partner' if config.agents == 2 else f'{config.agents - 1} partners'}"
    rules = RULES.format(company=company, unseen=UNSEEN * split, agree="" if alone else AGREE)
    who = "" if alone else f"You are agent {ROLES[seat]}. "
    return Message("system", who + rules), Message("user", "\n".join(lines))


def said_move(config: maze.Config, state: maze.State, text: str) -> str:
    """The direction that the reply ``text`` names, as one of MOVES; ? for none."""
    return (proposals(text, int(state.cell), config.size) or ["?"])[0]


def make(config: Config) -> HostEnv:
    """The environment of ``config``."""
    env = maze.make(config.board)
    play = board(env, 1)

    def reset(seed: int, task: Mapping[str, Any]) -> State:
        return State(play.reset(seed, task))

    def observe(state: State) -> dict[str, Prompt]:
        return {role: prompt(config, ROLES.index(role), *state) for role in play.look(state.inner)}

    def step(seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
        texts = [actions[role].text for role in env.roles]
        moves = [said_move(config, state.inner, text) for text in texts]
        inner, rewards, done = play.step(state.inner, [move.encode() for move in moves])
        return State(inner, tuple(text[: config.message] for text in texts)), rewards, done

    return HostEnv("maze_text", env.roles, env.max_turns, env.components, reset, observe, step)


def tasks(config: Config) -> list[dict[str, Any]]:
    """The tasks of the configured split, as rows of `maze`'s tasks."""
    return task_rows(maze.make_tasks, config)


def demonstrations(config: Config, tasks: Sequence) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion): those of `maze`, as many for each role as there are tasks."""
    out, told = [], {ord(letter): f"Move: {name}" for letter, name in NAMES.items()}
    for seat in range(config.agents):
        states, plans = maze.scenes(config.board, config.seed, len(tasks), seat)
        rows = jax.tree.map(np.asarray, states)
        for i, plan in enumerate(plans):
            state = jax.tree.map(lambda x, i=i: x[i], rows)
            words = [told[int(first)] for first in state.replies[:, 0]] if state.outcome else []
            reply = f"Move: {NAMES[plan[0]]}"
            out.append((ROLES[seat], prompt(config, seat, state, words), reply))
    return out


def strategy(role: str, shown: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample: the prompt ``shown`` to the role, its ``action``, its accuracy and progress.

    ``rewards``: the components of the sample.
    """
    return entry(role, rewards["accuracy"] + rewards.get("progress", 0.0), asked(shown), action)


class Graded(NamedTuple):
    """The result of a dialogue."""

    success: bool
    progress: float  # share of the shortest path covered where it ends, in [0, 1]
    moves: str  # agreed and made
    blocked: int  # agreed, but into a wall or the border


def grade(task: Mapping[str, Any], transcript: Any, *, agents: int = 2, most: int = 20) -> Graded:
    """The agreed path in free text, graded. No ``transcript`` whatever raises.

    task: a maze, as a row of `maze`'s tasks
    transcript: (speaker, text) pairs in order, or one text with lines ``speaker: text``; anything else is skipped
    agents: the number of agents; the first speakers are these agents
    most: the most moves of the path

    Each agent has a plan: the moves of its last message that proposes any (words, arrows, neighbouring cells). An agent
    that only agrees takes over the plan that another one proposed last. An agent that only refuses drops its own. Where
    all plans begin alike, these moves are made. An agreed move into a wall ends all plans.
    """
    walls, distance = np.asarray(task["walls"]), np.asarray(task["distance"])
    n, cell, goal = int(len(walls) ** 0.5), int(task["start"]), int(task["goal"])
    plans: dict[Any, list[str]] = {}
    latest: list[Any] = []  # speakers, by when they proposed something
    made, blocked = "", 0
    for speaker, text in _pairs(transcript):
        if speaker not in plans and len(plans) == agents:
            continue
        plans.setdefault(speaker, [])
        moves = proposals(text, cell, n)
        others = [who for who in latest if who != speaker and plans[who]]
        if not moves and others and agrees(text):
            moves = list(plans[others[-1]])
        if moves:
            plans[speaker] = moves
            latest = [who for who in latest if who != speaker] + [speaker]
        elif refuses(text):
            plans[speaker] = []
        while len(plans) == agents and len({plan[0] if plan else "" for plan in plans.values()} - {""}) == 1:
            if not all(plans.values()) or cell == goal or len(made) + blocked >= most:
                break
            move = plans[speaker][0]
            plans = {who: plan[1:] for who, plan in plans.items()}
            row, column = np.array(divmod(cell, n)) + maze.DELTA[MOVES.index(move)]
            if 0 <= row < n and 0 <= column < n and not walls[row * n + column]:
                made, cell = made + move, int(row * n + column)
            else:
                blocked, plans = blocked + 1, {who: [] for who in plans}
    covered = max(0.0, 1.0 - float(distance[cell]) / float(distance[int(task["start"])]))
    return Graded(cell == goal, covered, made, blocked)


LINE = re.compile(r"[ *_#-]{0,4}(?:agent |player |speaker )?(\w{1,20})[ *_]{0,3}:(.*)", re.IGNORECASE | re.DOTALL)


def _pairs(transcript: Any) -> list[tuple[str, str]]:
    """The messages of a transcript that are a speaker's name and a text."""
    if isinstance(transcript, str):
        found: list[tuple[str, str]] = []
        for line in transcript.split("\n"):
            match = LINE.fullmatch(line)
            if match and match[1].lower() not in ("move", "moves"):
                found.append((match[1].lower(), match[2]))
            elif found:
                found[-1] = (found[-1][0], f"{found[-1][1]}\n{line}")
        return found
    if not isinstance(transcript, Sequence) or isinstance(transcript, bytes):
        return []
    whole = [m for m in transcript if isinstance(m, tuple | list) and len(m) == 2]
    return [(m[0], m[1]) for m in whole if isinstance(m[0], str) and isinstance(m[1], str)]
