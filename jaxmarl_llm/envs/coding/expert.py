"""Suggestions of an outside expert for the next turn: a function, or a chat endpoint (`envs.outside_experts`).

The expert gets the problem and both agents' code and answers with JSON ``{"aux": ..., "main": ...}``, the edited
functions as text. Each agent gets its own part in its next prompt, so no gradient flows through it. A function has the
signature ``expert(task, helper, main) -> answer``.

Every failure raises `ExpertError`, which makes the transition invalid and is counted. No answer is invented.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs import outside_experts
from jaxmarl_llm.envs.outside_experts import EXPECTED, MAX_ANSWER, ExpertError, check_limits

__all__ = ["EXPECTED", "MAX_ANSWER", "Edits", "Endpoint", "Expert", "ExpertError", "check_limits", "consult", "resolve"]

Edits = dict[str, str]  # aux, main; a missing one is ''
Expert = Callable[[Mapping[str, Any], str, str], Any]

MAX_EDIT = 4000  # characters of one suggestion

INSTRUCTIONS = (
    "You advise two programmers. One writes a helper function aux(...), the other the main function {entry}(...), "
    "which should use aux. Answer with one JSON object with the keys aux and main, whose values are the corrected "
    "functions as Python source, and nothing else."
)


@dataclass(frozen=True)
class Endpoint(outside_experts.Endpoint):
    """An expert behind a chat endpoint."""

    def __call__(self, task: Mapping[str, Any], helper: str, main: str) -> Any:
        question = f"Problem:\n{task['prompt']}\n\nHelper:\n{helper}\n\nMain:\n{main}\n"
        return self.chat(INSTRUCTIONS.format(entry=task["entry_point"]), question)


resolve = functools.partial(outside_experts.resolve, endpoint=Endpoint)  # the expert that a configuration names


def consult(expert: Expert, task: Mapping[str, Any], helper: str, main: str) -> Edits:
    """The checked edits of ``expert`` for a ``task`` and the code of both agents, ``helper`` and ``main``.

    Raises ExpertError, whatever the expert raises or returns.
    """
    try:
        answer = expert(task, helper, main)
    except ExpertError:
        raise
    except Exception as error:
        raise ExpertError(f"expert raised {type(error).__name__}: {' '.join(str(error).split())[:120]}") from None
    if isinstance(answer, str):
        answer = _json_in(answer)
    if not isinstance(answer, Mapping) or not {"aux", "main"} & set(answer):
        raise ExpertError("expert: expected an object with the keys aux and main")
    edits = {}
    for key in ("aux", "main"):
        text = answer.get(key, "")
        if text is None:
            text = ""
        if not isinstance(text, str):
            raise ExpertError(f"expert: {key} must be text, not {type(text).__name__}")
        text = text.encode("utf-8", "replace").decode("utf-8").strip()  # JSON can spell lone surrogates
        edits[key] = text if len(text) <= MAX_EDIT else text[:MAX_EDIT] + " [cut]"
    return edits


def _json_in(text: str) -> Any:
    """The JSON object in ``text``, which may have a fence or words around it; None if there is none."""
    start, end = text.find("{"), text.rfind("}")
    try:
        return json.loads(text[start : end + 1], strict=False) if 0 <= start < end else None
    except (ValueError, RecursionError):
        return None
