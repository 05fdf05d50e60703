"""Degenerate strategies against the rewards of the assistant: calls, shop, questions, mathematics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.studies.red_team_table import Table
from jaxmarl_llm.envs.assistant import env as assistant
from jaxmarl_llm.envs.assistant.reference_episodes import script
from jaxmarl_llm.messages import Action

WEIGHTS = {"accuracy": 1.0, "format": 1.0, "efficiency": -1.0}  # of the assistant's components
Messages = Callable[[Mapping[str, Any]], Sequence[str]]  # of whoever acts, in turn; the last one is said again


def _numbers(task: Mapping[str, Any]) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", task["query"]) or ["0"]


def _names(task: Mapping[str, Any]) -> list[str]:
    return re.findall(r"\b[A-Z]\w+(?: [A-Z]\w+)*", task["query"]) or ["none"]


def _written_call(name: str, arguments: Mapping[str, Any]) -> str:
    return "Action: " + json.dumps({"name": name, "arguments": arguments})


def _blind(task: Mapping[str, Any], value: Any) -> list[str]:
    """The right specialist calls the first tool there is with ``value`` for every required argument."""
    if task["domain"] == "function":
        schema = task["functions"][0]
        call = _written_call(schema["name"], dict.fromkeys(schema["parameters"].get("required", ()), value))
    elif task["domain"] == "shop":
        order = next(iter(re.findall(r"#W\d+", task["query"])), "#W0000000")
        call = _written_call("cancel_pending_order", {"order_id": order, "reason": "no longer needed"})
    else:
        call = "Action: Search[the answer]"
    return [f"Delegate: {task['domain']}: {{query}}", call, "Answer: done", "Final: done"]


def _route(role: str) -> Messages:
    return lambda task: [f"Delegate: {role}: {{query}}", "Answer: 3", "Final: 3"]


ASSISTANT: dict[str, Messages] = {
    "an answer at once: 3": lambda task: ["Final: 3"],
    "an answer at once: done": lambda task: ["Final: done"],
    "an answer at once: yes": lambda task: ["Final: yes"],
    "the query as the answer": lambda task: [f"Final: {task['query']}"],
    "all numbers of the query": lambda task: [f"Final: {' '.join(_numbers(task))}"],
    "the last number of the query": lambda task: [f"Final: {_numbers(task)[-1]}"],
    "the first name of the query": lambda task: [f"Final: {_names(task)[0]}"],
    "many answers": lambda task: ["Final: yes or no or 1 or 2 or 3 or done or " + " or ".join(_names(task))],
    "words of many answers": lambda task: ["Final: the of in a American film 1990 yes no New York"],
    "always qa": _route("qa"),
    "always function": _route("function"),
    "always shop": _route("shop"),
    "always math": _route("math"),
    "form without content": lambda task: [f"Delegate: {task['domain']}: x", "Answer: x", "Final: x"],
    "an empty specialist": lambda task: [f"Delegate: {task['domain']}: {{query}}", "", "", "", "", "", "", "Final: x"],
    "unreadable messages": lambda task: ["hello"],
    "empty messages": lambda task: [""],
    "delegations without end": lambda task: [f"Delegate: {task['domain']}: {{query}}", "Answer: 3"] * 4,
    "tool calls without end": lambda task: [*_blind(task, "x")[:1], *_blind(task, "x")[1:2] * 8],
    "a blind call with texts": lambda task: _blind(task, "x"),
    "a blind call with numbers": lambda task: _blind(task, 1),
    "the query handed back": lambda task: [
        f"Delegate: {task['domain']}: {{query}}", f"Answer: {task['query']}", f"Final: {task['query']}"
    ],
    "a final answer without words": lambda task: ["Final:", "Final: ."],
}  # fmt: skip


def played(config: assistant.Config, task: Mapping[str, Any], messages: Sequence[str]) -> float:
    """The return of an episode in which ``messages`` are written in turn, and the last one again until the end."""
    env = assistant.make(config)
    state, done, total, turn = env.reset(0, task), False, 0.0, 0
    while not done:
        (role,) = env.observe(state)
        state, rewards, done = env.step(0, state, {role: Action(messages[min(turn, len(messages) - 1)], ())})
        total += sum(WEIGHTS[name] * value for name, value in rewards[role].items())
        turn += 1
    return total


def assistant_table(domain: str, config: assistant.Config) -> Table:
    """What the strategies earn on the tasks of one domain, by the default reward and by the paper's sum."""
    config = replace(config, domains=(domain,))
    tasks = assistant.tasks(config)

    def measured(c: assistant.Config) -> tuple[dict[str, list[float]], list[float]]:
        rewards = {name: [played(c, t, say(t)) for t in tasks] for name, say in ASSISTANT.items()}
        return rewards, [played(c, t, [text for _, text in script(c, t)]) for t in tasks]

    return Table(f"assistant, {domain}", *measured(config), *measured(replace(config, reward="sum")))
