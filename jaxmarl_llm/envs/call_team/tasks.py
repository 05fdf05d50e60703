"""The tasks of `call_team`: which calls are used, who owns them, and which are held out.

Sources are BFCL (``simple_python``, ``multiple``, ``live_simple``), API-Bank, and the first gold call of each task of
tau-bench retail. A task of tau-bench offers three tools: the gold one and two that a hash of the task chooses. The
query of such a task is the instruction up to the last sentence that fits into ``query_chars``.

Left out, and counted in the log, ``many`` in the split alone and the others in both:

    long      a query longer than ``query_chars`` characters, or a perfect call longer than ``call_chars``
    plain     a call without an argument that has to be there: there is nothing to match
    nested    an argument that is an object or has one
    unstated  a call of tau-bench with a value that the query does not have: it stands in a database
    wrong     a call that BFCL's rules refuse, or one of a function that is not offered
    repeated  the same function and query as an earlier task
    many      more than ``per_function`` calls of a function in one split; those of the least hashes stay

The split is by content, and the same for every seed. First, `UNSEEN_SHARE` of all functions, by a hash of the name, are
held out with every task that calls them. Then, of functions with several queries, `HELD_OUT_SHARE` of the queries are
held out, by a hash. All queries of a dialogue, and equal queries, are on one side. Tasks of tau-bench's own split
``test`` are held out, too. No training task offers a function that only held-out tasks call.

A task has ``unseen_function``: whether no training task calls its function. The first held-out tasks are half of this
kind, in turn, while both kinds last.

Shared argument: ``config`` has the settings.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.data import call_sets, loaders
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.assistant import shop
from jaxmarl_llm.envs.assistant.function_calls import standardize
from jaxmarl_llm.envs.call_team import calls, conventions
from jaxmarl_llm.envs.call_team.specialists import owner
from jaxmarl_llm.errors import ConfigError

UNSEEN_SHARE = 0.12  # of all functions
HELD_OUT_SHARE = 0.3  # of the queries of a function with several
MAX_TEXT = 10_000  # characters of a value
Task = dict[str, Any]


@dataclass(frozen=True)
class Config:
    """The settings of data, limits and conventions."""

    data_dir: str | None = None  # folder of bfcl, apibank and taubench_retail, or its URL; None: the package's samples
    split: str = "train"  # train or test
    count: int = 0  # tasks; 0: all there are
    seed: int = 0  # of the order of tasks
    conventions: bool = False  # demand the written forms of `conventions`
    demonstrated: int = 0  # training tasks that demonstrations are made of, the first ones; 0: all
    query_chars: int = 320  # characters of a query; tasks with longer ones are left out
    call_chars: int = 120  # characters of a perfect call; tasks with longer ones are left out
    per_function: int = 16  # tasks of a split that call one function, at most

    def check(self, path: str) -> None:
        checks.split_and_count(path, self)
        checks.at_least(path, self, 0, "seed")
        checks.in_range(path, self, 0, checks.MOST_TASKS, "demonstrated")
        checks.in_range(path, self, 1, checks.MOST_TEXT, "query_chars", "call_chars", "per_function")


def _position(text: str) -> float:
    """The hash of ``text``, evenly in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


# -- rows --------------------------------------------------------------------------------------------------------------


def _retail(config: Config) -> list[Task]:
    """The first gold calls of tau-bench retail."""
    schemas = {schema["name"]: schema for schema in shop.SCHEMAS}
    made = []
    for split in ("train", "dev", "test"):
        rows, _ = loaders.load("taubench_retail", data_dir=config.data_dir, split=split)
        for row in rows:
            if not row["actions"] or row["actions"][0]["name"] not in schemas:
                continue
            call = row["actions"][0]
            others = sorted(schemas.keys() - {call["name"]}, key=lambda name: _position(f"{row['id']} {name}"))
            offered = sorted([call["name"], *others[:2]], key=lambda name: _position(f"{name} {row['id']}"))
            own = {"id": row["id"], "source": "retail", "group": loaders.content(row["instruction"])}
            made.append(
                own
                | {"query": _beginning(row["instruction"], config.query_chars), "name": call["name"]}
                | {"functions": [schemas[name] for name in offered], "upstream_test": split == "test"}
                | {"answers": {key: [value] for key, value in call["kwargs"].items()}}
            )
    return made


def _beginning(text: str, limit: int) -> str:
    """The whole sentences of ``text`` that fit into ``limit`` characters."""
    text = " ".join(text.split())
    if len(text) <= limit:
        return text
    return text[: max(text.rfind(mark, 0, limit) for mark in (". ", "; ", "? ", "! ")) + 1]


def _reason(config: Config, row: Mapping[str, Any]) -> str | None:
    """Why a row is left out, as in the list above; None where it is a task."""
    schema = next((f for f in row["functions"] if f["name"] == row["name"]), None)
    if schema is None:
        return "wrong"
    required = schema["parameters"].get("required", ())
    if any(_nested(value) for allowed in row["answers"].values() for value in allowed):
        return "nested"
    arguments = calls.gold_arguments(row["answers"], required)
    if not arguments:
        return "plain"
    if len(row["query"]) > config.query_chars or len(calls.write(row["name"], arguments)) > config.call_chars:
        return "long"
    if row["source"] == "retail" and not _stated(row["query"], arguments.values()):
        return "unstated"
    if calls.grade((row["name"], arguments), row["name"], row["answers"], schema["parameters"]).exact:
        return None
    return "wrong"


def _nested(value: Any) -> bool:
    return any(map(_nested, value)) if isinstance(value, list) else isinstance(value, dict)


def _stated(query: str, values: Iterable[Any]) -> bool:
    """Whether every text of ``values`` stands in the query, after BFCL's normalisation."""
    said = standardize(query)
    texts = [text for value in values for text in (value if isinstance(value, list) else [value])]
    return all(str(standardize(text)) in said for text in texts)


def _task(config: Config, row: Mapping[str, Any]) -> Task:
    """The task of a row, without its side of the split."""
    functions = []
    for schema in row["functions"]:
        parameters = schema["parameters"]
        properties = {key: {"type": _kind(value)} for key, value in parameters.get("properties", {}).items()}
        own = owner(schema["name"], str(schema.get("description", "")), row["source"])
        required = list(parameters.get("required", ()))
        functions.append({"name": schema["name"], "owner": own, "properties": properties, "required": required})
    gold = next(f for f in functions if f["name"] == row["name"])
    answers, governed = conventions.apply(row["answers"]) if config.conventions else (row["answers"], ())
    return {key: row[key] for key in ("id", "source", "query", "name")} | {
        "functions": functions,
        "specialist": gold["owner"],
        "answers": answers,
        "governed": list(governed),
    }


def _kind(schema: Any) -> str:
    """The type that the ``schema`` of an argument states."""
    return str(schema.get("type", "any")) if isinstance(schema, Mapping) else "any"


def _usable(config: Config) -> tuple[list[Task], Counter[str]]:
    """All rows that are tasks, and how many are left out by reason."""
    base = call_sets.need_folders(config.data_dir, f"{checks.ARGS}.data_dir")
    rows = [*call_sets.bfcl_calls(base), *call_sets.apibank_calls(base), *_retail(config)]
    kept, out, seen = [], Counter[str](), set[tuple[str, str]]()
    for row in rows:
        why, key = _reason(config, row), (row["name"], loaders.content(row["query"]))
        why = why or ("repeated" if key in seen else None)
        if why:
            out[why] += 1
        else:
            seen.add(key)
            kept.append(row)
    return kept, out


# -- the split ---------------------------------------------------------------------------------------------------------


def _held_out(rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Whether each row is held out, by the rule above."""
    several = Counter(name for name, _ in {(row["name"], row["group"]) for row in rows})
    unseen = {name for name in several if _position(f"function {name}") < UNSEEN_SHARE}
    groups, queries = set[str](), set[str]()
    for row in rows:
        hashed = several[row["name"]] > 1 and _position(f"query {row['group']}") < HELD_OUT_SHARE
        if row["name"] in unseen or row.get("upstream_test") or hashed:
            groups.add(row["group"])
            queries.add(loaders.content(row["query"]))
    return [row["group"] in groups or loaders.content(row["query"]) in queries for row in rows]


def tasks(config: Config) -> list[Task]:
    """The tasks of the configured split, in an order that the seed determines.

    A task is ``{id, source, query, name, functions, specialist, answers, governed, unseen_function}``. ``functions``
    are the offered ones with ``name``, ``owner``, ``properties`` and ``required``. ``governed`` are the arguments under
    a convention.

    Raises:
        ConfigError: A folder is absent or its files cannot be read, or the split has fewer than ``config.count`` tasks.
    """
    rows, out = _usable(config)
    held_out = _held_out(rows)
    trained = {row["name"] for row, held in zip(rows, held_out, strict=True) if not held}
    mine = [row for row, held in zip(rows, held_out, strict=True) if held == (config.split == "test")]
    chosen, used = [], Counter[str]()
    for row in sorted(mine, key=lambda row: _position(f"order {row['id']}")):
        if used[row["name"]] == config.per_function:
            out["many"] += 1
            continue
        used[row["name"]] += 1
        task = _task(config, row)
        if config.split == "train":
            task["functions"] = [f for f in task["functions"] if f["name"] in trained]
        chosen.append(task | {"unseen_function": row["name"] not in trained})
    told = ", ".join(f"{count} {why}" for why, count in sorted(out.items())) or "none"
    logging.getLogger(__name__).info("call_team: split %s: %d tasks; left out: %s", config.split, len(chosen), told)
    if not chosen or config.count > len(chosen):
        checks.refuse(checks.ARGS, "count", f"at most {len(chosen)}, the tasks of split {config.split}", config.count)
    random.Random(config.seed).shuffle(chosen)
    if config.split == "test":
        chosen = _in_turn(chosen)
    return chosen[: config.count or None]


def _in_turn(chosen: Sequence[Task]) -> list[Task]:
    """Tasks with an unseen function and others in turn, as long as both last."""
    sides = [[task for task in chosen if task["unseen_function"] == unseen] for unseen in (False, True)]
    pairs = itertools.zip_longest(*sides)
    return [task for pair in pairs for task in pair if task is not None]


def taught(config: Config, tasks: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The ``tasks`` that demonstrations are made of: the first ``config.demonstrated``.

    Raises:
        ConfigError: Each of them has an argument under a convention, so no demonstration could show a call.
    """
    chosen = list(tasks)[: config.demonstrated or None]
    if all(task["governed"] for task in chosen):
        found = f"each of {len(chosen)} tasks has an argument under a convention"
        raise ConfigError(f"{checks.ARGS}.demonstrated: expected tasks that show a call, but {found}")
    return chosen
