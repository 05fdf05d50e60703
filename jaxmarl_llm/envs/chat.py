"""Prompts and memory entries of host environments: what several of them share."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from jaxmarl_llm.messages import Action, Message, Prompt

MAX_ENTRY = 200  # characters of a memory entry


def with_memory(prompt: Prompt, entries: Sequence[str]) -> Prompt:
    """``prompt`` with the memory ``entries`` in its system message.

    Raises ValueError when the prompt does not start with a system message.
    """
    if not entries:
        return prompt
    if not prompt or prompt[0].speaker != "system":
        raise ValueError("with_memory: the prompt does not start with a system message")
    lines = "\n".join(f"- {' '.join(entry.split())}" for entry in entries)
    return (prompt[0]._replace(text=f"{prompt[0].text}\nStrategies that worked before:\n{lines}"), *prompt[1:])


def cut(text: str, limit: int) -> str:
    """``text``, cut behind ``limit`` characters with a marker."""
    return text if len(text) <= limit else text[:limit] + " [cut]"


def reply_message(role: str, action: Action) -> Message:
    """The message of ``role`` for its ``action``: the sampled ids, or the text of a scripted action without ids."""
    return action.message(role) if action.ids else Message("assistant", action.text)


def action_of(role: str, actions: Mapping[str, Action], done: bool) -> Action:
    """The action of the one role that acts.

    Args:
        role: The role that acts.
        actions: What a step was given.
        done: Whether the episode has finished.

    Raises:
        ValueError: The episode has finished, or the step was given other actions.
    """
    if done or set(actions) != {role}:
        raise ValueError(f"expected one action of {role!r} in an unfinished episode, got {sorted(actions)}")
    return actions[role]


def quotes(reader: str, prompt: Prompt, speaker: str, text: str) -> bool:
    """Whether a prompt quotes a message: it has the speaker's own turn, or its text between ends of words.

    A very short text may stand in a prompt by chance.

    Args:
        reader: The role that reads the prompt; not read.
        prompt: The prompt.
        speaker: The role that wrote the message.
        text: The message.
    """
    if not (said := text.strip()):
        return False
    pattern = re.compile(rf"(?<!\w){re.escape(said)}(?!\w)")
    return any((m.owner == speaker and m.text == text) or pattern.search(m.text) for m in prompt)


def asked(prompt: Prompt) -> str:
    """The text of the first user message of ``prompt``; empty when there is none."""
    return next((m.text for m in prompt if m.speaker == "user"), "")


def entry(role: str, score: float, about: str, action: Action, *, shown: int = 80) -> str:
    """The memory entry of a sample, on one line.

    Args:
        role: name of the role
        score: number that is shown
        about: the text of the query; only its first ``shown`` characters are kept
        action: the sample
        shown: characters of the query
    """
    about, wrote = " ".join(about.split()), " ".join(action.text.split())
    return f"{role} ({score:.1f}) on '{about[:shown]}': {wrote}"[:MAX_ENTRY]


def strategy_by_accuracy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample of ``role``: the query in its ``prompt``, the text of its ``action``, its accuracy.

    ``rewards`` are the role's components; without an accuracy the score is 0.
    """
    return entry(role, rewards.get("accuracy", 0.0), asked(prompt), action)
