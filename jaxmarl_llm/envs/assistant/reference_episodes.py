"""Reference episodes of the assistant environment: what a perfect team would write, built from the gold answers.

They give the least number of turns of a task, the samples for supervised fine-tuning, and a test of the environment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxmarl_llm.envs.assistant import function_calls
from jaxmarl_llm.envs.assistant.prompts import Config, context, database, search

Script = tuple[tuple[str, str], ...]  # (role, completion)


def script(config: Config, task: Mapping[str, Any]) -> Script:
    """A perfect team's messages on ``task``, built from the gold answer, without detours. ``config``: the settings."""
    domain = task["domain"]
    ask = "serve the customer" if domain == "shop" else "{query}"
    inner, final = _SOLVERS[domain](config, task)
    return (
        ("master", f"Delegate: {domain}: {ask}"),
        *((domain, text) for text in inner),
        ("master", f"Final: {final}"),
    )


def _solve_qa(config: Config, task: Mapping[str, Any]) -> tuple[list[str], str]:
    """Searches for the supporting passages that are not shown yet, unless the answer can be read already."""
    gold = task["gold"]
    shown = context(config, task, "qa", task["query"]).split("Passages:\n", 1)[1]
    searches = []
    for title in task["supporting"][: config.max_specialist_turns - 1]:
        if (gold in ("yes", "no") or gold not in shown) and f"{title}: " not in shown:
            searches.append(f"Action: Search[{title}]")
            shown += "\n" + search(config, task, title)
    return [*searches, f"Answer: {gold}"], gold


def _solve_function(config: Config, task: Mapping[str, Any]) -> tuple[list[str], str]:
    return [*map(_written, function_calls.gold_calls(task["functions"], task["gold"])), "Answer: done"], "done"


def _solve_shop(config: Config, task: Mapping[str, Any]) -> tuple[list[str], str]:
    """The gold calls, each after the look-ups that its item ids come from."""
    db = database(config.data_dir)
    done: list[function_calls.Call] = []
    for call in task["gold"]:
        kwargs = call["kwargs"]
        if "item_ids" in kwargs:
            order = ("get_order_details", {"order_id": kwargs["order_id"]})
            done += [order] if order not in done else []
        for new in kwargs.get("new_item_ids", ()):
            product = next(key for key, p in db["products"].items() if new in p["variants"])
            look = ("get_product_details", {"product_id": product})
            done += [look] if look not in done else []
        done.append((call["name"], kwargs))
    final = ", ".join(task["outputs"]) or "done"
    return [*map(_written, done), f"Answer: {final}"], final


def _solve_math(config: Config, task: Mapping[str, Any]) -> tuple[list[str], str]:
    steps = re.sub(r"<<.*?>>", "", task["solution"]).rsplit("####", 1)[0].strip()
    return [f"{steps}\nAnswer: {task['gold']}"], task["gold"]


_SOLVERS = {"qa": _solve_qa, "function": _solve_function, "shop": _solve_shop, "math": _solve_math}


def _written(call: function_calls.Call) -> str:
    return "Action: " + json.dumps({"name": call[0], "arguments": call[1]}, ensure_ascii=False)
