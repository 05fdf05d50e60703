"""What the roles of the assistant environment read: settings, instructions, a specialist's first message, memory.

Texts are short on purpose: a small model on a CPU reads them many times.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import bm25, prompts, retail
from jaxmarl_llm.text import Action, ConfigError, Prompt

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
SHOWN_TOOLS = tuple(s for s in retail.SCHEMAS if s["name"] in retail.WRITES or s["name"].startswith("get_"))


@dataclass(frozen=True)
class Config:
    """``mixture``: weights of ``domains``, used when ``count`` (tasks in all; 0: all there are) is set. ``*_chars``
    are lengths in characters beyond which a text is cut, with a marker.
    """

    domains: tuple[str, ...] = DOMAINS
    mixture: tuple[float, ...] = ()  # empty: equal
    data_dir: str | None = None  # None: the samples in the package
    split: str = "train"
    count: int = 0
    seed: int = 0
    max_turns: int = 8  # M
    max_specialist_turns: int = 6  # of one delegation
    passages: int = 2  # shown to qa without a search
    passage_chars: int = 240
    observation_chars: int = 500
    context_chars: int = 1200  # a sub-task; a specialist's whole first message may have twice as many
    report_chars: int = 200
    format_reward: float = 0.5
    efficiency_cost: float = 0.3

    def __post_init__(self) -> None:
        if not self.domains or len(set(self.domains)) < len(self.domains) or set(self.domains) - set(DOMAINS):
            raise ConfigError(f"domains {self.domains}: expected distinct names among {', '.join(DOMAINS)}")
        if self.mixture and (len(self.mixture) != len(self.domains) or min(self.mixture) < 0 or not sum(self.mixture)):
            raise ConfigError(f"mixture {self.mixture}: expected a weight >= 0 for each of {len(self.domains)} domains")
        for key in ("max_turns", "max_specialist_turns", "passage_chars", "observation_chars", "context_chars"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.count < 0:
            raise ConfigError(f"count must not be negative: {self.count}")


@lru_cache(maxsize=4)
def database(data_dir: str | None) -> dict[str, dict]:
    """The shop's database: read once a process, never changed, and kept out of the states."""
    return loaders.load_retail_db(data_dir)[0]


def cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + " [cut]"


def own(task: Mapping[str, Any], domain: str, field: str) -> Any:
    """A field that only tasks of this domain have; empty when the wrong specialist asks."""
    return task[field] if task["domain"] == domain else ()


def search(config: Config, task: Mapping[str, Any], query: str) -> str:
    """The best passage for the query."""
    passages = [f"{title}: {text}" for title, text in own(task, "qa", "passages")]
    best = bm25.top(query, passages, 1)
    return cut(passages[best[0]], config.observation_chars) if best else "nothing found"


def context(config: Config, task: Mapping[str, Any], role: str, subtask: str) -> str:
    """A specialist's first message."""
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
        return f"{who}Task: {subtask}\nTools: {', '.join(tools)}. ADDRESS: {', '.join(retail.ADDRESS)}"
    return subtask


def _signature(tool: Mapping[str, Any]) -> str:
    """A shop tool and its arguments; every one is required. The six parts of an address are named once for all."""
    names = list(tool["parameters"]["properties"])
    if set(retail.ADDRESS) <= set(names):
        names = [n for n in names if n not in retail.ADDRESS] + ["ADDRESS"]
    return f"{tool['name']}({', '.join(names)})"


def _schema(function: Mapping[str, Any]) -> str:
    """A function's JSON schema in few tokens: types and short descriptions; a ``?`` marks what may be left out."""
    parameters = function["parameters"]
    required = parameters.get("required", ())
    shown = {}
    for key, value in parameters.get("properties", {}).items():
        kind = "|".join(map(str, value["enum"])) if "enum" in value else value.get("type", "any")
        shown[key if key in required else key + "?"] = f"{kind}: {cut(value.get('description', ''), 60)}"
    text = {"name": function["name"], "description": cut(function.get("description", ""), 100), "parameters": shown}
    return json.dumps(text, ensure_ascii=False)


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """What a successful sample leaves in memory: what was asked and what was written.

    ``rewards`` are the role's components, which belong to the caller's decision to keep the text, and its score here.
    """
    return prompts.entry(role, rewards.get("accuracy", 0.0), prompts.asked(prompt), action)
