"""Reader of single function calls: BFCL's tasks with one call, and the API calls of API-Bank's dialogues.

A directory holds the upstream files; the package has samples of both:

    bfcl/BFCL_v4_{simple_python,multiple,live_simple}.json + possible_answer/   Apache-2.0  ShishirPatil/gorilla
    apibank/lv1-lv2-samples/<level>/<dialogue>.jsonl                    Apache-2.0  AlibabaResearch/DAMO-ConvAI

A row is ``{id, source, group, query, functions, name, answers}``. ``answers`` are the allowed values of each argument
of the gold call ``name``, as in BFCL: "" among them means that the argument may be absent. ``functions`` are those that
are offered, with JSON schemas. Rows of one ``group`` share words, so they belong on one side of a split.

Of a dialogue the query is what the user has said before the call. A schema of API-Bank has the arguments that calls of
all dialogues have, with the types of their values. Upstream's list of APIs names other arguments, and is not read. Left
out are the argument ``token`` (a host knows its session), and the calls of ``ToolSearcher`` (they look up APIs).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxmarl_llm.data.loaders import Task, _bfcl, _jsonl, _need, base_folder, content
from jaxmarl_llm.errors import ConfigError

FOLDERS = ("bfcl", "apibank", "taubench_retail")  # of a data directory, for messages
CATEGORIES = ("simple_python", "multiple", "live_simple")  # of BFCL: one call each
_HIDDEN = "token"  # argument of API-Bank that no row has
_SEARCH = "ToolSearcher"  # API of API-Bank that no row calls
_KINDS = {bool: "boolean", int: "integer", float: "float", str: "string", list: "array", dict: "dict"}


def need_folders(data_dir: str | Path | None, key: str) -> Path:
    """The folder of the data sets on this machine.

    Args:
        data_dir: Folder or URL; None: the samples in the package.
        key: Name of the setting, for the message.

    Raises:
        ConfigError: It lacks one of `FOLDERS`.
    """
    base = base_folder(data_dir)
    missing = [name for name in FOLDERS if not (base / name).is_dir()]
    if missing:
        raise ConfigError(
            f"{key}: {base} has no folder {missing[0]!r}; give a folder that holds {', '.join(FOLDERS)} with "
            f"--{key}=DIR, or leave it out for the samples in the package"
        )
    return base


def bfcl_calls(base: Path) -> list[Task]:
    """Rows of BFCL's tasks that have one gold call. ``base``: folder of the data sets. Raises ConfigError."""
    rows, _ = _bfcl(base / "bfcl", "", CATEGORIES)
    found = []
    for where, row in rows:
        if len(row["answers"]) == 1:
            gold = row["answers"][0]
            if not isinstance(gold, Mapping) or len(gold) != 1 or not isinstance(next(iter(gold.values())), Mapping):
                raise ConfigError(f"{where}: a call of field 'ground_truth' must be {{name: {{argument: values}}}}")
            (name, answers), query = next(iter(gold.items())), row["question"]
            own = {"id": row["id"], "source": "bfcl", "group": content(query), "query": query}
            found.append(own | {"functions": row["functions"], "name": name, "answers": dict(answers)})
    return found


def apibank_calls(base: Path) -> list[Task]:
    """Rows of the API calls in API-Bank's dialogues. Files without a byte hold no dialogue.

    Args:
        base: Folder of the data sets.

    Raises:
        ConfigError: There is no dialogue, or one has another form.
    """
    root = base / "apibank" / "lv1-lv2-samples"
    files = [path for path in sorted(root.glob("*/*.jsonl")) if path.stat().st_size]
    if not files:
        raise ConfigError(f"{root}: no dialogue <level>/<name>.jsonl")
    dialogues = {f"{path.parent.name}/{path.stem}": _dialogue(path) for path in files}
    schemas = _schemas(calls for _, calls in dialogues.values())
    rows: list[Task] = []
    for name, (texts, calls) in dialogues.items():
        offered = [schemas[api] for api in dict.fromkeys(api for api, _, _ in calls)]
        for number, (api, arguments, heard) in enumerate(calls):
            query = "\n".join(texts[:heard])
            if query:
                own = {"id": f"apibank-{name}-{number}", "source": "apibank", "group": f"apibank {name}"}
                answers = {key: [value] for key, value in arguments.items()}
                rows.append(own | {"query": query, "functions": offered, "name": api, "answers": answers})
    return rows


_Call = tuple[str, dict[str, Any], int]  # API, arguments, number of the user's texts before it


def _dialogue(path: Path) -> tuple[list[str], list[_Call]]:
    """The user's texts, and the calls, of one file. Raises ConfigError."""
    texts: list[str] = []
    calls: list[_Call] = []
    for where, turn in _jsonl(path):
        match _need(turn, "role", str, where):
            case "User":
                texts.append(_need(turn, "text", str, where))
            case "API" if (api := _need(turn, "api_name", str, where)) != _SEARCH:
                given = _need(turn, "param_dict", dict, where)
                calls.append((api, {k: v for k, v in given.items() if k != _HIDDEN}, len(texts)))
    return texts, calls


def _schemas(dialogues: Iterable[list[_Call]]) -> dict[str, Task]:
    """Name of an API -> its schema, from all calls. An argument that every call has is required."""
    made: dict[str, list[dict[str, Any]]] = {}
    for calls in dialogues:
        for api, arguments, _ in calls:
            made.setdefault(api, []).append(arguments)
    schemas: dict[str, Task] = {}
    for api, every in made.items():
        kinds: dict[str, set[str]] = {}
        for arguments in every:
            for key, value in arguments.items():
                kinds.setdefault(key, set()).add(_KINDS.get(type(value), "any"))
        properties = {key: {"type": kind.pop() if len(kind) == 1 else "any"} for key, kind in kinds.items()}
        required = [key for key in properties if all(key in arguments for arguments in every)]
        parameters = {"type": "dict", "properties": properties, "required": required}
        schemas[api] = {"name": api, "description": "", "parameters": parameters}
    return schemas
