"""Degenerate strategies against the reward of `call_team`: routes and calls.

A strategy writes a route and a call. Most have the right route given, so that the call is judged at its strongest. A
strategy knows what its role reads, and no gold value unless its name says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.studies.call_team_baselines import Route, Say, chosen, copied, empty, found, keyword, played, right
from experiments.studies.red_team_table import Table
from jaxmarl_llm.envs.call_team import calls, env, prompts
from jaxmarl_llm.envs.call_team.specialists import SPECIALISTS

Task = Mapping[str, Any]


class Team(NamedTuple):
    """A strategy.

    Attributes:
        route: What the master writes.
        say: What the specialist writes.
    """

    route: Route
    say: Say


def name(task: Task, role: str) -> str:
    """Name of the function that a strategy calls: "f" where its role has none."""
    function = chosen(task, role)
    return "f" if function is None else function["name"]


def filled(value: Callable[[Task], Any], every: bool = False) -> Say:
    """A call with the same value for each argument that has to be there.

    Args:
        value: Task -> the value.
        every: Whether arguments that may be left out are given too.
    """

    def say(task: Task, role: str) -> str:
        function = chosen(task, role)
        if function is None:
            return ""
        keys = function["properties"] if every else function["required"]
        return calls.write(function["name"], dict.fromkeys(keys, value(task)))

    return say


def gold(task: Task, role: str) -> str:
    """The right call of ``task``, whoever writes it."""
    return env.gold(task)[1][1]


def gold_arguments(task: Task) -> dict[str, Any]:
    """The arguments of the right call."""
    schema = next(f for f in task["functions"] if f["name"] == task["name"])
    return calls.gold_arguments(task["answers"], schema["required"])


def with_extra(task: Task, role: str) -> str:
    """The right call and as many invented arguments."""
    arguments = gold_arguments(task)
    return calls.write(task["name"], arguments | {f"extra_{key}": value for key, value in arguments.items()})


def doubled(task: Task, role: str) -> str:
    """The right call in which each argument stands twice, first with another value."""
    given = [f'{key}="x", {key}={json.dumps(value)}' for key, value in gold_arguments(task).items()]
    return f"{task['name']}({', '.join(given)})"


def hedged(task: Task, role: str) -> str:
    """The right call with a list of the right value and another one for each argument."""
    return calls.write(task["name"], {key: ["x", value] for key, value in gold_arguments(task).items()})


def crossed(task: Task, role: str) -> str:
    """The right values, each under the name of the next argument; a single value under a name that nothing has."""
    keys, values = [*gold_arguments(task)], [*gold_arguments(task).values()]
    shifted = [*keys[1:], keys[0]] if len(keys) > 1 else ["value"]
    return calls.write(task["name"], dict(zip(shifted, values, strict=True)))


def in_json(task: Task, role: str) -> str:
    """The right call in JSON's form, inside another object."""
    return json.dumps({"call": {"name": task["name"], "arguments": gold_arguments(task)}})


def signatures(task: Task, role: str) -> str:
    """The text that describes the functions, copied."""
    return "\n".join(map(prompts.signature, prompts.offered(task, role)))


def every_function(task: Task, role: str) -> str:
    """One call of each function that is offered, in a row."""
    made = [calls.write(f["name"], found(task, f)) for f in prompts.offered(task, role)]
    return "; ".join([*reversed(made), *made])


def guesses(task: Task, role: str) -> str:
    """A blind call, then the right one."""
    return f"{filled(lambda task: 'x')(task, role)}\n{gold(task, role)}"


def always(reply: str) -> Say:
    """A specialist that writes ``reply`` whatever it reads."""
    return lambda task, role: reply


def to(reply: str) -> Route:
    """A master that writes ``reply`` whatever it reads."""
    return lambda task: reply


CALLS: dict[str, Team] = {
    **{f"everything to {role}, right calls": Team(to(role), gold) for role in SPECIALISTS},
    "all names as the route, right calls": Team(to(", ".join(SPECIALISTS)), gold),
    "a route by the keywords of the rule, copied arguments": Team(keyword, copied),
    "the call as the route": Team(lambda task: gold(task, ""), gold),
    "empty replies": Team(to(""), always("")),
    "a constant call": Team(right, always('get_current_weather(location="New York", unit="celsius")')),
    "the name only": Team(right, name),
    "no arguments": Team(right, empty),
    "x as each argument": Team(right, filled(lambda task: "x")),
    "1 as each argument": Team(right, filled(lambda task: 1)),
    "true as each argument, optional ones too": Team(right, filled(lambda task: True, every=True)),
    "the query as each argument": Team(right, filled(lambda task: task["query"])),
    "all words of the query as each argument": Team(right, filled(lambda task: task["query"].split())),
    "copied arguments": Team(right, copied),
    "copied signatures": Team(right, signatures),
    "calls of all functions in a row": Team(right, every_function),
    "a hundred calls": Team(right, lambda task, role: " ".join([copied(task, role)] * 100)),
    "a huge text as each argument": Team(right, filled(lambda task: "x" * 100_000)),
    "words that are no call": Team(right, always("The answer is in the documents.")),
    "nested brackets": Team(right, lambda task, role: f"{name(task, role)}(a={'[' * 5000}"),
    "nested objects as each argument": Team(right, filled(lambda task: {"a": {"a": {"a": task["query"]}}})),
    "a blind call, then the right one": Team(right, guesses),
    "prose, then the right call": Team(right, lambda task, role: f"I call {gold(task, role)}"),
    "the right call in nested JSON": Team(right, in_json),
    "the right call with as many extra arguments": Team(right, with_extra),
    "the right call, each argument given twice": Team(right, doubled),
    "the right call, two values for each argument": Team(right, hedged),
    "the right values under other names": Team(right, crossed),
    "the right call of the wrong specialist": Team(
        lambda task: next(role for role in SPECIALISTS if role != task["specialist"]), gold
    ),
}


def calls_table(config: env.Config, count: int = 0) -> Table:
    """What the strategies earn on the tasks of a split.

    With conventions one more strategy writes the right call in the form that it would have without them.

    Args:
        config: Settings of the environment.
        count: Tasks, at most; 0: all.
    """
    tasks = env.tasks(config)[: count or None]
    teams = dict(CALLS)
    if config.conventions:
        tasks = [task for task in tasks if task["governed"]]
        plain = {task["id"]: task for task in env.tasks(_plain(config))}
        teams["the right call without the conventions"] = Team(right, lambda task, role: gold(plain[task["id"]], role))
    paid = lambda team: [played(task, route := team.route(task), team.say(task, route))["call"] for task in tasks]
    title = "call_team, conventions" if config.conventions else "call_team"
    return Table(title, {label: paid(team) for label, team in teams.items()}, paid(Team(right, gold)))


def _plain(config: env.Config) -> env.Config:
    """The same tasks without conventions."""
    return env.Config(**{**vars(config), "conventions": False})
