"""Reader of task files. It returns tasks as plain dicts, from a given directory or from the samples in the package.

`load` returns ``(tasks, source)``. ``source`` names the files that were read, for the log of a run. A directory has one
folder for each data set, with the upstream file names:

    gsm8k/{train,test}.jsonl                        MIT             openai/grade-school-math
    bfcl/BFCL_v4_<category>.json + possible_answer/ Apache-2.0      ShishirPatil/gorilla
    hotpotqa/dev_distractor_slice.json              CC-BY-SA-4.0    hotpotqa.github.io, distractor setting
    taubench_retail/{users,orders,products,tasks_<split>}.json  MIT sierra-research/tau-bench
    scitldr/SciTLDR-A/{train,dev,test}.jsonl        Apache-2.0      allenai/scitldr, abstracts only

A name with a slash, such as ``openai/gsm8k``, is an id on the Hugging Face hub (`data.hub_sets`). Wrong data
raises ConfigError with one line that names file, line and field. No row is skipped silently. Data sets without an
upstream train split (BFCL, HotpotQA) are split 80/20 by a hash of the question. So a question never changes its split,
and is in one split alone. Upstream splits keep their rows, except rows of train or dev whose text is also in test.
``source`` counts such rows.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxmarl_llm import json_files
from jaxmarl_llm.data import hub_sets, remote
from jaxmarl_llm.errors import ConfigError

Task = dict[str, Any]
Row = tuple[str, Mapping[str, Any]]  # position ("file, line 3") and the row
Tasks = list[tuple[str, Task]]

FIXTURES = Path(__file__).parent / "fixtures"
CATEGORIES = ("simple_python", "multiple", "parallel", "parallel_multiple")  # of BFCL files, if present


def load(
    name: str, *, data_dir: str | Path | None = None, split: str, limit: int | None = None, seed: int = 0
) -> tuple[list[Task], str]:
    """Tasks of one data set, in an order shuffled by ``seed``, and the source.

    name: data set, or id on the Hugging Face hub. data_dir: directory with the files; None reads the samples in the
    package. split: upstream name of the split. limit: number of tasks (None: all).

    Fields by data set, besides ``id``: gsm8k ``question solution answer``; bfcl ``question functions answers
    category``; hotpotqa ``question answer passages supporting`` (passages are ``[title, text]``); taubench_retail
    ``user_id instruction actions outputs``; scitldr, trl-lib/tldr and OpenMLRL/arXiv_abstract as in `writing_row`.
    Other hub data sets: unchanged rows. Raises ConfigError.
    """
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1, not {limit}")
    if "/" in name:
        pairs, source = _from_hub(name, split)
    elif name in _READERS:
        root = _folder(name, data_dir)
        pairs, files = _READERS[name](root, split)
        source = f"{root} ({', '.join(f.name for f in files)})"
    else:
        raise ConfigError(f"dataset {name!r}: expected one of {', '.join(_READERS)} or a hub id org/name")
    if not pairs:
        raise ConfigError(f"{source}: no tasks in split {split}")
    seen: dict[str, str] = {}
    for where, task in pairs:
        if task["id"] in seen:
            raise ConfigError(f"{where}: field 'id': {task['id']!r:.80} is a duplicate of {seen[task['id']]}")
        seen[task["id"]] = where
    note = ""
    if name in _UNSPLIT:
        pairs = _hashed(pairs, split, source, _CONTENT[name])
    elif name in _READERS and split != "test":
        pairs, note = _without_test(name, root, pairs)
    tasks = [task for _, task in pairs]
    random.Random(f"{name} {split} {seed}").shuffle(tasks)
    return tasks[:limit], f"{source}, split {split}, {min(len(tasks), limit or len(tasks))} of {len(tasks)}{note}"


def load_retail_db(data_dir: str | Path | None = None) -> tuple[dict[str, dict], str]:
    """Database ``{"users", "orders", "products"}`` of the shop, and its source.

    data_dir: directory with the files; None reads the sample in the package. Raises ConfigError.
    """
    root = _folder("taubench_retail", data_dir)
    db = {}
    for table in ("users", "orders", "products"):
        db[table] = _json(root / f"{table}.json")
        if not isinstance(db[table], dict) or not db[table]:
            raise ConfigError(f"{root / table}.json: expected a filled object of records by id")
    for table, records in db.items():
        for key, record in records.items():
            if not isinstance(record, dict):
                found = json_files.shown(record)
                raise ConfigError(f"{root / table}.json: record {key!r:.80}: expected an object, found {found}")
    for key, order in db["orders"].items():
        for field in ("user_id", "status", "items", "payment_history", "address"):
            _need(order, field, object, f"{root / 'orders.json'}, order {key!r:.80}")
        if not isinstance(order["user_id"], str) or order["user_id"] not in db["users"]:
            raise ConfigError(f"{root / 'orders.json'}, order {key!r:.80}: field 'user_id' names no user in users.json")
    return db, str(root)


# -- files -------------------------------------------------------------------------------------------------------------


def base_folder(data_dir: str | Path | None) -> Path:
    """Folder of data sets on this machine.

    data_dir: folder, or URL of a folder in a store, which is copied here (`remote`); None for the package's samples.
    """
    if data_dir is None:
        return FIXTURES
    return remote.local(str(data_dir), "data_dir") if remote.is_url(str(data_dir)) else Path(data_dir)


def _folder(name: str, data_dir: str | Path | None) -> Path:
    """Folder of the data set ``name`` in ``data_dir``, or in the package."""
    base = base_folder(data_dir)
    # An upstream folder of SciTLDR is recognised by its subfolder.
    root = base if name == "scitldr" and (base / "SciTLDR-A").is_dir() else base / name
    if not root.is_dir():
        raise ConfigError(f"{root}: no such folder (data_dir must hold a folder {name!r})")
    return root


def _json(path: Path) -> Any:
    """Value of a JSON file. Raises ConfigError."""
    return json_files.parse(json_files.read_text(path, limit=None), str(path))


def _jsonl(path: Path) -> Iterator[Row]:
    """Rows of a file with one JSON value on each line. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            yield from _rows(file, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None


def _rows(file: BinaryIO, path: Path, most: int | None = None) -> Iterator[Row]:
    """Rows of an open file with one JSON value on each line. ``path``, ``most``: as for `json_files.lines`."""
    empty = True
    for number, line in enumerate(json_files.lines(file, str(path), most), 1):
        if line.strip():
            where, empty = f"{path}, line {number}", False
            yield where, json_files.parse(json_files.decoded(line.rstrip(), str(path), number), where)
    if empty:
        raise ConfigError(f"{path}: empty")


def _json_list(path: Path) -> Iterator[Row]:
    """Rows of a JSON file that holds one list. Raises ConfigError."""
    rows = _json(path)
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"{path}: expected a filled list")
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def _need(row: Any, field: str, kind: type, where: str) -> Any:
    """Value of ``row[field]``. Raises ConfigError if it is missing, of another type, or empty text."""
    if not isinstance(row, dict) or field not in row:
        raise ConfigError(f"{where}: field {field!r} is missing")
    if not isinstance(row[field], kind) or row[field] == "" or (kind is int and type(row[field]) is bool):
        raise ConfigError(f"{where}: field {field!r} must be a filled {kind.__name__}")
    return row[field]


def content(text: str) -> str:
    """Content that two copies of ``text`` share: its words, without case, punctuation and spacing."""
    return " ".join(re.findall(r"\w+", text.casefold())) or text.strip()


def _without_test(name: str, root: Path, pairs: Tasks) -> tuple[Tasks, str]:
    """Tasks whose content no task of split ``test`` has, and a note that counts the others."""
    try:
        held_out = {content(task[_CONTENT[name]]) for _, task in _READERS[name](root, "test")[0]}
    except ConfigError:  # a folder without the split, or with a damaged one: reading that split says so
        return pairs, ""
    kept = [(where, task) for where, task in pairs if content(task[_CONTENT[name]]) not in held_out]
    gone = len(pairs) - len(kept)
    return kept, f", without {gone} that are also in test" if gone else ""


def _hashed(pairs: Tasks, split: str, source: str, field: str) -> Tasks:
    """Tasks of one split, where a hash of the content of ``field`` decides: 80 % train, 20 % test."""
    if split not in ("train", "test"):
        raise ConfigError(f"{source}: split {split!r}: expected train or test")
    chosen = []
    for where, task in pairs:
        held_out = int(hashlib.sha256(content(task[field]).encode()).hexdigest(), 16) % 5 == 0
        if held_out == (split == "test"):
            chosen.append((where, task))
    if not chosen:
        raise ConfigError(f"{source}: no tasks in split {split}")
    return chosen


# -- datasets ----------------------------------------------------------------------------------------------------------


def _gsm8k_row(where: str, row: Mapping[str, Any], id: str) -> Task:
    question, solution = _need(row, "question", str, where), _need(row, "answer", str, where)
    if "####" not in solution:
        raise ConfigError(f"{where}: field 'answer' has no final answer after ####")
    return {"id": id, "question": question, "solution": solution, "answer": solution.rsplit("####", 1)[1].strip()}


def _gsm8k(root: Path, split: str) -> tuple[Tasks, list[Path]]:
    path = root / f"{split}.jsonl"
    return [(w, _gsm8k_row(w, r, f"gsm8k-{split}-{i}")) for i, (w, r) in enumerate(_jsonl(path))], [path]


def _hotpotqa_row(where: str, row: Mapping[str, Any], id: str) -> Task:
    context, facts = _need(row, "context", dict, where), _need(row, "supporting_facts", dict, where)
    titles, sentences = _need(context, "title", list, where), _need(context, "sentences", list, where)
    texts = lambda values: all(isinstance(v, str) for v in values)
    if not texts(titles) or not all(isinstance(s, list) and texts(s) for s in sentences):
        raise ConfigError(f"{where}: field 'context' needs titles that are str and lists of sentences that are str")
    if not texts(_need(facts, "title", list, where)):
        raise ConfigError(f"{where}: field 'supporting_facts' needs titles that are str")
    if len(titles) != len(sentences) or not titles:
        raise ConfigError(f"{where}: field 'context' needs as many titles as sentence lists, at least one")
    if not facts["title"] or not set(facts["title"]) <= set(titles):
        raise ConfigError(f"{where}: field 'supporting_facts' needs titles that field 'context' has, at least one")
    return {
        "id": id,
        "question": _need(row, "question", str, where),
        "answer": _need(row, "answer", str, where),
        "passages": [[t, "".join(s).strip()] for t, s in zip(titles, sentences)],
        "supporting": list(dict.fromkeys(_need(facts, "title", list, where))),
    }


def _hotpotqa(root: Path, split: str) -> tuple[Tasks, list[Path]]:
    path = root / "dev_distractor_slice.json"
    tasks = []
    for where, row in _json_list(path):
        question = _need(row, "question", str, where)
        id = "hotpotqa-" + hashlib.sha256(question.encode()).hexdigest()[:12]
        tasks.append((where, _hotpotqa_row(where, row, id)))
    return tasks, [path]


def _bfcl(root: Path, split: str, categories: tuple[str, ...] = CATEGORIES) -> tuple[Tasks, list[Path]]:
    files = [p for c in categories if (p := root / f"BFCL_v4_{c}.json").exists()]
    if not files:
        raise ConfigError(f"{root}: none of the files BFCL_v4_<category>.json, category in {', '.join(categories)}")
    tasks = []
    for path in files:
        answers = {}
        for where, row in _jsonl(path.parent / "possible_answer" / path.name):
            answers[_need(row, "id", str, where)] = _need(row, "ground_truth", list, where)
        for where, row in _jsonl(path):
            id, turns = _need(row, "id", str, where), _need(row, "question", list, where)
            if id not in answers:
                raise ConfigError(f"{where}: field 'id' {id!r:.80} has no row in possible_answer/{path.name}")
            for function in _need(row, "function", list, where):
                _need(function, "name", str, where)
                _need(function, "parameters", dict, where)
            if not turns or not isinstance(turns[0], list) or not all(isinstance(m, dict) for m in turns[0]):
                raise ConfigError(f"{where}: field 'question' must be a list of turns, each a list of messages")
            if not answers[id]:
                raise ConfigError(f"{where}: field 'ground_truth' in possible_answer/{path.name} is empty")
            task = {
                "id": id,
                "question": "\n".join(_need(m, "content", str, where) for m in turns[0] if m.get("role") == "user"),
                "functions": row["function"],
                "answers": answers[id],
                "category": path.stem.removeprefix("BFCL_v4_"),
            }
            tasks.append((where, task))
    return tasks, files


def _taubench_retail(root: Path, split: str) -> tuple[Tasks, list[Path]]:
    path = root / f"tasks_{split}.json"
    tasks = []
    for i, (where, row) in enumerate(_json_list(path)):
        for action in _need(row, "actions", list, where):
            _need(action, "name", str, where)
            _need(action, "kwargs", dict, where)
        fields = {"user_id": str, "instruction": str, "actions": list, "outputs": list}
        task = {"id": f"retail-{split}-{i}"} | {f: _need(row, f, kind, where) for f, kind in fields.items()}
        tasks.append((where, task))
    return tasks, [path]


def writing_row(where: str, row: Mapping[str, Any], id: str) -> Task:
    """Task ``{id, title, text, targets}`` of a text and its summaries. The columns of the row decide its format.

    where: position for messages. row: one of three formats. SciTLDR has ``source target title`` (lists of sentences and
    of summaries). trl-lib/tldr has ``prompt completion``, and the prompt ends with ``TL;DR:``. Other data has only
    ``abstract_text``, whose sentences may be marked ``<S> ... </S>``. id: id of the task. Raises ConfigError.
    """
    if "abstract_text" in row:
        text = re.sub(r"</?S>", " ", _need(row, "abstract_text", str, where))
        title, targets = "", []
    elif "prompt" in row:
        text = _need(row, "prompt", str, where).rstrip().removesuffix("TL;DR:")
        title, targets = "", [_need(row, "completion", str, where)]
    else:
        text = " ".join(_strings(row, "source", where))
        title, targets = _need(row, "title", str, where), _strings(row, "target", where)
    texts = [" ".join(t.split()) for t in (text, *targets)]
    if not all(texts):
        raise ConfigError(f"{where}: the text and its summaries must not be blank")
    return {"id": id, "title": title, "text": texts[0], "targets": texts[1:]}


def _strings(row: Mapping[str, Any], field: str, where: str) -> list[str]:
    """Value of ``row[field]``, a list of at least one str. Raises ConfigError."""
    values = _need(row, field, list, where)
    if not values or not all(isinstance(v, str) for v in values):
        raise ConfigError(f"{where}: field {field!r} must be a filled list of str")
    return values


def _scitldr(root: Path, split: str) -> tuple[Tasks, list[Path]]:
    path = root / "SciTLDR-A" / f"{split}.jsonl"
    return [(w, writing_row(w, r, _need(r, "paper_id", str, w))) for w, r in _jsonl(path)], [path]


_READERS: dict[str, Callable[[Path, str], tuple[Tasks, list[Path]]]] = {
    "gsm8k": _gsm8k,
    "bfcl": _bfcl,
    "hotpotqa": _hotpotqa,
    "taubench_retail": _taubench_retail,
    "scitldr": _scitldr,
}
_UNSPLIT = ("bfcl", "hotpotqa")  # no train split upstream
_CONTENT = {  # the field that makes a task itself
    "gsm8k": "question",
    "bfcl": "question",
    "hotpotqa": "question",
    "taubench_retail": "instruction",
    "scitldr": "text",
}


def _from_hub(name: str, split: str) -> tuple[Tasks, str]:
    """Tasks of a data set on the Hugging Face hub, and the source. Raises ConfigError."""
    of = hub_sets.parse(name)
    if of is None or of.split is not None:
        raise ConfigError(f"dataset {name!r}: expected a hub id OWNER/NAME or OWNER/NAME:CONFIG")
    rows, source = hub_sets.rows(of, split)
    parse = _HUB_ROWS.get(of.repo)
    tasks = []
    for i, (where, row) in enumerate(rows):
        id = str(row.get("id") or f"{of.repo}-{split}-{i}")
        tasks.append((where, parse(where, row, id) if parse else dict(row) | {"id": id}))
    return tasks, source


_HUB_ROWS: dict[str, Callable[[str, Mapping[str, Any], str], Task]] = {
    "openai/gsm8k": _gsm8k_row,
    "hotpotqa/hotpot_qa": _hotpotqa_row,
    "trl-lib/tldr": writing_row,
    "OpenMLRL/arXiv_abstract": writing_row,
}
