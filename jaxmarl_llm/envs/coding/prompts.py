"""What helper and main read: their instructions, the problem, and the feedback of a turn.

The wording is ours. What is asked for follows MAGRPO's prompts and its three ways of feedback. The answers are code
only: a helper ``aux``, and a main function that may call it and must not define it again. Feedback is part of the next
prompt, a message of the environment, so no gradient flows through it.

Shared argument: ``task`` is a row of the environment's tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmarl_llm.envs import chat
from jaxmarl_llm.envs.coding.analysis import syntax as code_ast
from jaxmarl_llm.envs.coding.rewards import AUX, Graded
from jaxmarl_llm.messages import Action, Message, Prompt
from jaxmarl_llm.sandbox.judge import Test, Verdict

ROLES = ("helper", "main")
SYSTEM = {
    "helper": (
        "You write a helper function in Python. Another programmer writes the main function and may call yours. "
        "Answer with the code of the function aux only, no explanation."
    ),
    "main": (
        "You write the main function in Python. Another programmer writes a helper function aux, which you may call. "
        "Answer with the code of the main function only, no explanation."
    ),
}
MAX_SHOWN = 300  # characters of one assert or message in feedback


def opening(task: Mapping[str, Any]) -> dict[str, Prompt]:
    """The first prompt of each role."""
    entry, problem = task["entry_point"], task["prompt"].rstrip()
    asked = {
        "helper": f"Write def {AUX}(...) that returns data useful to solve this with {entry}:\n\n{problem}\n\n"
        f"Do not write {entry}. Code only.",
        "main": f"Solve this:\n\n{problem}\n\n"
        f"Write only {entry}. You may call {AUX}(...), which returns data useful here; do not define it. Code only.",
    }
    return {role: (Message("system", SYSTEM[role]), Message("user", asked[role])) for role in ROLES}


def plain(task: Mapping[str, Any]) -> dict[str, str]:
    """Feedback without a diagnosis, by role."""
    return {"helper": f"Revise your {AUX}. Code only.", "main": f"Revise your {task['entry_point']}. Code only."}


def level(task: Mapping[str, Any], texts: Mapping[str, str], graded: Graded, shown: int) -> dict[str, str]:
    """Definition, syntax and test diagnostics for both roles. Main also reads how it uses aux.

    ``texts``: completions by role. ``graded``: rewards of the turn. Only the first ``shown`` tests (0: all) are spoken
    of, results included, as upstream does by default with 1.
    """
    entry = task["entry_point"]
    codes = {role: code_ast.code_of(texts[role]) for role in ROLES}
    has = {"helper": code_ast.defined(codes["helper"], AUX), "main": code_ast.defined(codes["main"], entry)}
    lines = [
        f"- {AUX}: {'defined' if has['helper'] else 'missing, or it returns nothing'}",
        f"- {entry}: {'defined' if has['main'] else 'missing, or it returns nothing'}",
        f"- syntax: {_syntax(codes)}",
        *of_tests(graded, shown),
    ]
    usage = [f"- use of {AUX}: {_usage(graded)}"] if has["main"] else []
    asked = plain(task)
    return {
        "helper": "\n".join(["Diagnostics:", *lines, asked["helper"]]),
        "main": "\n".join(["Diagnostics:", *lines, *usage, asked["main"]]),
    }


def of_tests(graded: Graded, shown: int) -> list[str]:
    """The verdicts on the first ``shown`` tests (0: all) of a turn, as lines. ``graded``: rewards of the turn."""
    report = graded.report
    if report is None:
        return ["- tests: not run"]
    loading = f"- loading: {report.load.value}: {_cut(report.load_detail)}"
    part = slice(0, shown or None)
    verdicts = report.tests[part]
    lines = [] if report.load is Verdict.PASS else [loading]
    lines.append(f"- tests: {verdicts.count(Verdict.PASS)} of {len(verdicts)} shown pass")
    for test, verdict, detail in zip(graded.tests[part], verdicts, report.details[part]):
        if verdict is not Verdict.PASS:
            lines.append(f"  {verdict.value}: {_cut(asserted(test))} ({_cut(detail) or 'no message'})")
    return lines


def suggestions(task: Mapping[str, Any], edits: Mapping[str, str]) -> dict[str, str]:
    """An expert's ``edits``, each to the role whose function it is."""
    out = {}
    for role, key in zip(ROLES, ("aux", "main")):
        said = f"An expert suggests:\n\n{edits[key]}" if edits[key] else "An expert suggests no change."
        out[role] = f"{said}\n\n{plain(task)[role]}"
    return out


def _syntax(codes: Mapping[str, str]) -> str:
    faults = {name: code_ast.fault(codes[role]) for role, name in zip(ROLES, (AUX, "main"))}
    return "; ".join(f"{name}: {_cut(why)}" for name, why in faults.items() if why) or "fine"


def _usage(graded: Graded) -> str:
    found = graded.flow
    if found is None:
        return "unknown"  # the parity reward does not look at it
    if not found.called:
        return "main does not call it"
    if not found.used:
        return "called, but its value is not used"
    if found.wrapper:
        return "main only passes its value on; add work of your own"
    return "called and used" + (", but some of its values are thrown away" if found.ignored else "")


def asserted(test: Test) -> str:
    """The assert of ``test`` itself, without what comes before it."""
    return test.code.rstrip().split("\n")[-1].strip() if "\n    " not in test.code else test.code.strip()


def _cut(text: str) -> str:
    text = " ".join(text.split()).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + " [cut]"


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample: the problem from its function on, in brief, and the code.

    ``role``: its role. ``prompt``: text that the role read. ``action``: the completion. ``rewards``: components;
    accuracy is the score.
    """
    return chat.entry(role, rewards.get("accuracy", 0.0), chat.asked(prompt).split("def ")[-1], action)
