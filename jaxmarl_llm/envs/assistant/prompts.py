"""The settings and prompts of the assistant environment: instructions, a specialist's first message, memory entries.

Texts are short on purpose: a small model on a CPU reads them many times.

Shared argument: ``config`` has the settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import bm25, checks
from jaxmarl_llm.envs.assistant import shop
from jaxmarl_llm.envs.chat import cut
from jaxmarl_llm.messages import Prompt

DOMAINS = ("qa", "function", "shop", "math")
ROLES = ("master", *DOMAINS)

SYSTEM = {
    "master": (
        "You lead four specialists: qa (facts), function (function calls), shop (store orders), math (word problems). "
        "Write 'Delegate: <role>: <sub-task>' ({query} copies the query) or 'Final: <answer>'."
    ),
    "qa": "Answer briefly from the passages. Write 'Action: Search[words]' or 'Answer: <answer>'.",
    "function": (
        'Call the offered functions. Write \'Action: {"name": ..., "arguments": {...}}\' for each call, '
        "then 'Answer: done'."
    ),
    "shop": (
        'Serve the store\'s customer. Write \'Action: {"name": ..., "arguments": {...}}\' to use a tool, '
        "then 'Answer: <result>'."
    ),
    "math": "Solve the problem in short steps, then write 'Answer: <number>'.",
}
# The customer is identified by the environment, so the tools that find a user are callable but not advertised.
SHOWN_TOOLS = tuple(s for s in shop.SCHEMAS if s["name"] in shop.WRITES or s["name"].startswith("get_"))


@dataclass(frozen=True)
class Config:
    """The settings of tasks, turns, prompts and rewards.

    ``mixture`` holds weights of ``domains``, used when ``count`` (tasks in all; 0: all there are) is set. ``*_chars``
    are lengths in characters beyond which a text is cut, with a marker. ``reward`` says what format and efficiency are
    paid for (`env`): ``gated``, only in proportion to accuracy; ``sum``, always, as in the paper.
    """

    domains: tuple[str, ...] = DOMAINS  # kinds of queries
    mixture: tuple[float, ...] = ()  # empty: equal
    data_dir: str | None = None  # folder of the data sets, or its URL; None: the samples in the package
    split: str = "train"  # train or test
    count: int = 0  # tasks in all; 0: all there are
    seed: int = 0  # of the order of tasks
    max_turns: int = 8  # M
    max_specialist_turns: int = 6  # of one delegation
    passages: int = 2  # shown to qa without a search
    passage_chars: int = 240  # characters of a passage; longer ones are cut
    observation_chars: int = 500  # characters of a tool's result; longer ones are cut
    context_chars: int = 1200  # a sub-task; a specialist's whole first message may have twice as many
    report_chars: int = 200  # characters of a specialist's report; longer ones are cut
    reward: Literal["gated", "sum"] = "gated"  # gated: form and efficiency in proportion to accuracy; sum: always
    format_reward: float = 0.5  # reward of well-formed messages
    efficiency_cost: float = 0.3  # cost of late and cut episodes

    def check(self, path: str) -> None:
        if not self.domains or len(set(self.domains)) < len(self.domains) or set(self.domains) - set(DOMAINS):
            checks.refuse(path, "domains", f"distinct names among {', '.join(DOMAINS)}", self.domains)
        if self.mixture:
            checks.weights(path, self, "mixture", self.domains)
        checks.in_range(path, self, 0, checks.MOST_TASKS, "count")
        checks.in_range(path, self, 1, checks.MOST_ROUNDS, "max_turns", "max_specialist_turns")
        checks.at_least(path, self, 0, "passages")
        checks.at_least(path, self, 1, "passage_chars", "observation_chars", "context_chars", "report_chars")
        checks.finite(path, self, "format_reward", "efficiency_cost")


@lru_cache(maxsize=4)
def database(data_dir: str | None) -> dict[str, dict]:
    """The shop's database in ``data_dir`` (None: the sample), read once a process. States do not contain it."""
    return loaders.load_retail_db(data_dir)[0]


def own(task: Mapping[str, Any], domain: str, field: str) -> Any:
    """The ``field`` of a task of this ``domain``; empty for a task of another domain."""
    return task[field] if task["domain"] == domain else ()


def search(config: Config, task: Mapping[str, Any], query: str) -> str:
    """The passage of ``task`` that fits ``query`` best."""
    passages = [f"{title}: {text}" for title, text in own(task, "qa", "passages")]
    best = bm25.top(query, passages, 1)
    return cut(passages[best[0]], config.observation_chars) if best else "nothing found"


def context(config: Config, task: Mapping[str, Any], role: str, subtask: str) -> str:
    """The first message to the specialist ``role``, whose sub-task is ``subtask``."""
    if role == "qa":
        passages = [f"{title}: {text}" for title, text in own(task, "qa", "passages")]
        shown = [cut(passages[i], config.passage_chars) for i in bm25.top(subtask, passages, config.passages)]
        return "\n".join([f"Question: {subtask}", "Passages:", *(shown or ["none"])])
    if role == "function":
        shown = [_schema(f) for f in own(task, "function", "functions")]
        return "\n".join([f"Task: {subtask}", "Functions:", *(shown or ["none"])])
    if role == "shop":
        tools = [_signature(s) for s in SHOWN_TOOLS]
        who = f"Customer {task['user_id']}: {task['query']}\n" if task["domain"] == "shop" else ""
        return f"{who}Task: {subtask}\nTools: {', '.join(tools)}. ADDRESS: {', '.join(shop.ADDRESS)}"
    return subtask


def ask(config: Config, text: str) -> dict[str, Any]:
    """The task of a person's query ``text``. It has no passages and no functions; the store's tools work."""
    return {"id": "asked", "asked": True, "domain": "none", "query": text}


def hears(reader: str, prompt: Prompt, speaker: str, text: str) -> bool:
    """Whether a message reaches a role: the sub-task of a delegation its specialist, an answer the master.

    Args:
        reader: The role that acts after the message.
        prompt: The prompt of ``reader``.
        speaker: The role that wrote the message.
        text: The message.
    """
    if speaker == "master":
        found = re.search(r"^[ \t]*(Delegate|Final):[ \t]*(\w+)", text, re.M)
        return found is not None and found.group(1, 2) == ("Delegate", reader)
    found = re.search(r"\b(Action|Answer):[ \t]*(\S)", text)
    told = any(message.text.startswith(f"Report from {speaker}: ") for message in prompt)
    return found is not None and found[1] == "Answer" and told


def _signature(tool: Mapping[str, Any]) -> str:
    """A shop tool and its arguments, all of which are required. ADDRESS stands for the six parts of an address."""
    names = list(tool["parameters"]["properties"])
    if set(shop.ADDRESS) <= set(names):
        names = [n for n in names if n not in shop.ADDRESS] + ["ADDRESS"]
    return f"{tool['name']}({', '.join(names)})"


def _schema(function: Mapping[str, Any]) -> str:
    """A function's JSON schema in few tokens: types and short descriptions; ``?`` marks an optional argument."""
    parameters = function["parameters"]
    required = parameters.get("required", ())
    shown = {}
    for key, value in parameters.get("properties", {}).items():
        kind = "|".join(map(str, value["enum"])) if "enum" in value else value.get("type", "any")
        shown[key if key in required else key + "?"] = f"{kind}: {cut(value.get('description', ''), 60)}"
    text = {"name": function["name"], "description": cut(function.get("description", ""), 100), "parameters": shown}
    return json.dumps(text, ensure_ascii=False)
