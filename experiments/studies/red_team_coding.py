"""Degenerate strategies against the strict reward of the coding task; programs run in the sandbox.

A right program is no degenerate strategy, whatever its helper does. The reward does not see through every helper: one
whose result decides a branch that never happens earns a right program the bonus of cooperation.
"""

from __future__ import annotations

import ast
import doctest
import re
from collections.abc import Callable, Mapping
from typing import Any

from experiments.studies.red_team_table import Table
from jaxmarl_llm.envs.coding import env as coding

AUX = "def aux(x):\n    return [x, x]\n"


def _signature(task: Mapping[str, Any]) -> tuple[str, str]:
    """The line of the prompt that defines the entry point, and its first argument."""
    line = re.findall(rf"^def {re.escape(task['entry_point'])}\(.*$", task["prompt"], re.M)[-1]
    argument = re.search(r"\((\w+)", line)
    return line, argument[1] if argument else "0"


def _main(task: Mapping[str, Any], body: str) -> str:
    line, argument = _signature(task)
    return line + "\n" + "".join(f"    {x}\n" for x in body.format(x=argument).split("\n"))


# A helper that works, and says nothing about the problem.
IDLE = "def aux(*given):\n    return [str(x) for x in given]\n"
# Words of a return type, and a constant of the type.
CONSTANTS = {"bool": "True", "int": "0", "float": "0.0", "str": "''", "ist": "[]", "uple": "()", "ict": "dict()"}
YES_NO = re.compile(r"\b(whether|check|true|false|if a given)\b", re.I)


def _constant(task: Mapping[str, Any]) -> str:
    """A constant of the type that the function should return, as the line of its definition has it; else 0."""
    told = _signature(task)[0].rpartition("->")[2]
    return next((value for word, value in CONSTANTS.items() if word in told), "0")


def _guess(task: Mapping[str, Any]) -> str:
    """True where the problem's words ask a question of yes or no, else a constant of the type."""
    return "True" if YES_NO.search(task["prompt"]) else _constant(task)


def _through(task: Mapping[str, Any], value: str) -> tuple[str, str]:
    """``value`` whatever the arguments are, with an idle helper whose result decides a branch that never happens."""
    return IDLE, _main(task, f"y = aux({{x}})\nif len(y) > 5:\n    return y\nreturn {value}")


def _examples(task: Mapping[str, Any]) -> tuple[str, str]:
    """The examples of the problem as a table, with an idle helper that compares arguments."""
    line = _signature(task)[0]
    names = [a.arg for a in ast.parse(f"{line}\n    pass").body[0].args.args]  # type: ignore[attr-defined]  # the line is a def
    body = [f"y = aux({', '.join(names)})"]
    try:
        shown = doctest.DocTestParser().get_examples(task["prompt"])
    except ValueError:
        shown = []
    for example in shown:
        try:
            call, want = ast.parse(example.source.strip(), mode="eval").body, example.want.strip()
            ast.parse(want, mode="eval")
        except SyntaxError:
            continue
        if isinstance(call, ast.Call):
            body += [f"if y == aux({', '.join(map(ast.unparse, call.args))}):", f"    return {want}"]
    return IDLE, "\n    ".join([line, *body, "return y[0]"]) + "\n"


CODING: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "nothing at all": lambda t: ("", ""),
    "the prompt": lambda t: (t["prompt"], t["prompt"]),
    "a helper without a main": lambda t: (AUX, ""),
    "prose": lambda t: ("This helper helps.", "This function solves the problem."),
    "a body that passes": lambda t: (AUX, _main(t, "pass")),
    "always None": lambda t: (AUX, _main(t, "return None")),
    "always 0": lambda t: (AUX, _main(t, "return 0")),
    "always True": lambda t: (AUX, _main(t, "return True")),
    "always an empty list": lambda t: (AUX, _main(t, "return []")),
    "the argument": lambda t: (AUX, _main(t, "return {x}")),
    "the helper's value": lambda t: (AUX, _main(t, "return aux({x})")),
    "the helper's value, handled": lambda t: (AUX, _main(t, "y = aux({x})\nz = y[0]\nreturn z")),
    "a call in a comment": lambda t: (AUX, _main(t, "# aux({x})\nreturn {x}")),
    "a call that is thrown away": lambda t: (AUX, _main(t, "aux({x})\nreturn {x}")),
    "the canonical main, cut": lambda t: ("", coding.split_solution(t)[1][: len(coding.split_solution(t)[1]) // 2]),
    "main defines the helper": lambda t: ("", AUX + _main(t, "return aux({x})[0]")),
    "equal to everything": lambda t: (AUX, _main(t, "class Any(int):\n    __eq__ = lambda a, b: True\nreturn Any()")),
    "the process ends": lambda t: (AUX, _main(t, "import os\nos._exit(0)\nreturn {x}")),
    "a constant of the type, through an idle helper": lambda t: _through(t, _constant(t)),
    "a guess by the problem's words, through an idle helper": lambda t: _through(t, _guess(t)),
    "always True, through an idle helper": lambda t: _through(t, "True"),
    "always False, through an idle helper": lambda t: _through(t, "False"),
    "the argument, through an idle helper": lambda t: _through(t, "{x}"),
    "the examples of the problem as a table, through an idle helper": _examples,
    "the same main from both": lambda t: (2 * (_main(t, "return {x}"),)),
}  # fmt: skip


def coding_table(config: coding.Config) -> Table:
    """What the strategies earn by the strict reward; programs run in the sandbox."""
    tasks = coding.tasks(config)
    pay = lambda task, pair: coding.grade(config, task, *pair).total
    rewards = {name: [pay(t, write(t)) for t in tasks] for name, write in CODING.items()}
    return Table(f"coding, {config.benchmark}", rewards, [pay(t, coding.split_solution(t)) for t in tasks])
