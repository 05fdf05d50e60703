"""The judgement of one written call: what every form of `call_team` is paid by, and the perfect call.

Shared argument: ``task`` is a row of `tasks`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxmarl_llm.envs.call_team import calls

COMPONENTS = (
    *("call", "exact", "function", "malformed"),
    *("unseen_function", "exact_unseen", "convention", "convention_met"),
)


def judged(task: Mapping[str, Any], text: str | None, allowed: Collection[str]) -> dict[str, float]:
    """The `COMPONENTS` of a call.

    Args:
        task: The task.
        text: What the writer of the call wrote; None: nobody wrote a call, which counts as malformed.
        allowed: Names of the functions that the writer may call. A call of any other function is a wrong one.
    """
    call = "nobody wrote a call" if text is None else calls.read(text)
    if isinstance(call, str) or call[0] not in allowed:
        graded = calls.Grade(0.0, False, not task["governed"])
    else:
        graded = calls.grade(call, task["name"], task["answers"], _schema(task), task["governed"])
    exact, unseen, governed = float(graded.exact), float(task["unseen_function"]), float(bool(task["governed"]))
    return {
        "call": graded.score,
        "exact": exact,
        "function": float(graded.function),
        "malformed": float(isinstance(call, str)),
        "unseen_function": unseen,
        "exact_unseen": exact * unseen,
        "convention": governed,
        "convention_met": governed * graded.met,
    }


def gold_call(task: Mapping[str, Any]) -> str:
    """The perfect call of ``task`` as text."""
    return calls.write(task["name"], calls.gold_arguments(task["answers"], _schema(task)["required"]))


def _schema(task: Mapping[str, Any]) -> Mapping[str, Any]:
    """The gold function."""
    return next(f for f in task["functions"] if f["name"] == task["name"])
