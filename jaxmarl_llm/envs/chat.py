"""What prompts and memory entries of host environments have in common."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmarl_llm.text import Action, Prompt

MAX_ENTRY = 200  # characters of a memory entry


def with_memory(prompt: Prompt, entries: Sequence[str]) -> Prompt:
    """The prompt with remembered strategies in its system message; ValueError when it does not start with one."""
    if not entries:
        return prompt
    if not prompt or prompt[0].speaker != "system":
        raise ValueError("with_memory: the prompt does not start with a system message")
    lines = "\n".join(f"- {' '.join(entry.split())}" for entry in entries)
    return (prompt[0]._replace(text=f"{prompt[0].text}\nStrategies that worked before:\n{lines}"), *prompt[1:])


def asked(prompt: Prompt) -> str:
    """The text of the first user message; empty when there is none."""
    return next((m.text for m in prompt if m.speaker == "user"), "")


def entry(role: str, score: float, about: str, action: Action, *, shown: int = 80) -> str:
    """What a sample leaves in memory, on one line: role, score, ``shown`` characters of what it was about, its text."""
    about, wrote = " ".join(about.split()), " ".join(action.text.split())
    return f"{role} ({score:.1f}) on '{about[:shown]}': {wrote}"[:MAX_ENTRY]
