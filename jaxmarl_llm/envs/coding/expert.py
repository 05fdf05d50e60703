"""Suggestions of an outside expert for the next turn: a function, or a chat endpoint (`envs.outside`).

The expert gets the problem and both agents' code and answers with JSON ``{"aux": ..., "main": ...}``, the edited
functions as text. Each agent gets its own part in its next prompt, so no gradient flows through it. A function has the
signature ``expert(task, helper, main) -> answer``.

Every failure raises `ExpertError`, which makes the transition invalid and is counted. No answer is invented.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs import outside
from jaxmarl_llm.envs.checks import ARGS
from jaxmarl_llm.envs.outside import EXPECTED, MAX_ANSWER, ExpertError, check_limits

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
class Endpoint(outside.Endpoint):
    """An expert behind a chat endpoint."""

    def __call__(self, task: Mapping[str, Any], helper: str, main: str) -> Any:
        question = f"Problem:\n{task['prompt']}\n\nHelper:\n{helper}\n\nMain:\n{main}\n"
        return self.chat(INSTRUCTIONS.format(entry=task["entry_point"]), question)


def resolve(
    expert: Any,
    *,
    path: str = ARGS,
    model: str = "",
    key_env: str = "OPENAI_API_KEY",
    timeout: float = 10.0,
    retries: int = 1,
) -> Expert:
    """The expert that a configuration names. Raises ConfigError.

    expert: a callable, ``module:function`` or the base URL of an endpoint
    path: the dotted name of the Config that holds the expert, for error messages
    model, key_env: an endpoint's model, and the environment variable that holds its key
    timeout, retries: an endpoint's seconds for one attempt, and its attempts after the first
    """
    return outside.resolve(expert, Endpoint, path=path, model=model, key_env=key_env, timeout=timeout, retries=retries)


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
