"""The prompts of `call_team`, its memory entries, and who hears whom. Texts are short: small models read them often.

Shared arguments: ``role`` is the role that reads or writes. ``task`` is a row of `tasks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmarl_llm.envs.call_team.specialists import SPECIALISTS
from jaxmarl_llm.messages import Action, Message, Prompt

MASTER = "master"
ROLES = (MASTER, *SPECIALISTS)
QUERY = "Query: "
ROUTE = "Name the specialist for the query:\n" + "\n".join(f"{name}: {what}" for name, what in SPECIALISTS.items())
CALL = 'Answer the query with one call, such as name(text="a", number=3). A question mark: may be left out.'
NONE = "none"
_SHOWN = 80  # characters of a query in a memory entry
_MAX_ENTRY = 240  # characters of a memory entry


def offered(task: Mapping[str, Any], role: str) -> list[Mapping[str, Any]]:
    """The functions of a task that a specialist has: those that ``role`` owns."""
    return [function for function in task["functions"] if function["owner"] == role]


def signature(function: Mapping[str, Any]) -> str:
    """A function in few tokens: its name, and its arguments with types. ``?`` marks those that may be left out.

    Args:
        function: One of a task's ``functions``.
    """
    shown = (
        f"{key}{'' if key in function['required'] else '?'}: {kind['type']}"
        for key, kind in function["properties"].items()
    )
    return f"{function['name']}({', '.join(shown)})"


def prompt(task: Mapping[str, Any], role: str) -> Prompt:
    """The prompt of a role. The master reads the query alone, and a specialist also the functions that it owns."""
    if role == MASTER:
        return Message("system", ROUTE), Message("user", f"{QUERY}{task['query']}")
    return call_prompt(task, offered(task, role))


def call_prompt(task: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> Prompt:
    """The prompt of a role that writes a call: the signatures of the ``functions`` that it has, and the query."""
    listed = [signature(function) for function in functions] or [NONE]
    return Message("system", CALL), Message("user", "\n".join(["Functions:", *listed, f"{QUERY}{task['query']}"]))


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample: the first words of its query, and what ``role`` wrote.

    Args:
        role: Name of the role; not shown, because each role has a memory of its own.
        prompt: The prompt that the sample answers.
        action: The sample.
        rewards: Of the role by component; not read.
    """
    read = next((m.text for m in prompt if m.speaker == "user"), "")
    about = " ".join(read.rpartition(QUERY)[2].split())
    return f"{about[:_SHOWN]} -> {' '.join(action.text.split())}"[:_MAX_ENTRY]


def hears(reader: str, prompt: Prompt, speaker: str, text: str) -> bool:
    """Whether a message decides who acts: the master's names the reader.

    Args:
        reader: The role that acts after the message.
        prompt: The prompt of ``reader``; not read.
        speaker: The role that wrote the message.
        text: The message.
    """
    return speaker == MASTER and text.strip() == reader
