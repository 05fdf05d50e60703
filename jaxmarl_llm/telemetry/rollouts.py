"""Rollouts of a run as files: ``rollouts/step-00000012.jsonl.zst`` in the workdir, one file for each recorded RL step.

``rollouts/eval-00000050.jsonl.zst`` has held-out tasks, as the evaluation after step 50 played them. The first line of
a file is a `Header`. Each other line is one row of a table: a task, a node, a completion, a transition, a group, a
memory event or a failure. docs/rollouts.md has the columns. A file is whole or absent. A number that was NaN or
infinite is null. Files hold no time stamp, so a resumed run writes the same bytes again.

Without JAX, so that a reader starts fast.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from jaxmarl_llm import json_files
from jaxmarl_llm.config import ROW_LIMIT, at_least, positive
from jaxmarl_llm.errors import ConfigError

SCHEMA = 3  # changes when a column is added, renamed or given another meaning
# Columns that a later schema than the first one added. Rows of older files have the column's default.
ADDED: Mapping[str, int] = {
    "learner_logprobs": 2,
    "messages": 3,
    "cut_tokens": 3,
    "unseen": 3,
    "token_chars": 3,
    "token_names": 3,
    "completion": 3,
    "split": 3,
    "commit": 3,
    "content": 3,
}
TRAIN, HELD_OUT = SPLITS = ("train", "held_out")
PREFIX: Mapping[str, str] = {TRAIN: "step", HELD_OUT: "eval"}  # of the name of a file, by split
FOLDER = "rollouts"
EVALUATED = "evaluate"  # of a workdir: episodes of `jaxmarl-llm evaluate`, in a folder rollouts/ of its own
FULL = "full.json"  # in the folder: the first step that found no room
NAMES = {split: re.compile(rf"{prefix}-(\d{{8,18}})\.jsonl\.zst") for split, prefix in PREFIX.items()}
LEVEL = 3  # of compression
MAX_TEXT = 2**30  # bytes of a file when it is decompressed
WINDOW = 2**23  # largest window of a file that is read, in bytes
UNREADABLE = "\ufffd"  # what a tokenizer writes for bytes that are no character
SOURCES = ("policy", "frozen", "scripted", "expert", "menu")  # as `types` numbers them
# Values of ``Completion.why``, in the order in which they are decided.
OPPONENT, EXPERT, NO_RETURN, GROUP_NOT_SELECTED = "opponent", "expert", "no_return", "group_not_selected"
ROLE_NOT_TRAINABLE, NOT_DRAWN, TRAINED = "role_not_trainable", "not_drawn", "trained"
# Of every completion of an evaluation, `HELD_OUT` is the value.


@dataclass(frozen=True)
class RolloutsConfig:
    """Rollouts that are written to the folder rollouts/ of the workdir."""

    every: int = 10  # RL steps between two that are written, from the first one on; 0: no RL step is written
    tasks: int = 4  # tasks of such a step that are written, the first ones
    eval_tasks: int = 8  # held-out tasks that are written at each evaluation, the first ones; 0: none
    max_mb: float = 64.0  # MB of the folder; when the next file does not fit, no more are written

    def check(self, path: str) -> None:
        at_least(f"{path}.every", self.every, 0)
        at_least(f"{path}.tasks", self.tasks, 1, ROW_LIMIT)
        at_least(f"{path}.eval_tasks", self.eval_tasks, 0, ROW_LIMIT)
        positive(f"{path}.max_mb", self.max_mb)


class Header(NamedTuple):
    """The first line of a file.

    Attributes:
        schema: Version of the schema.
        step: Number of the step, as in metrics.jsonl. Of an evaluation: steps that were complete.
        rl_step: Number among the RL steps, from 1. Of an evaluation: RL steps that were complete.
        fingerprint: SHA-256 of the configuration, without settings that change no result.
        recipe: Name of the recipe.
        seed: Seed of the run.
        environment: Name of the environment.
        plan: Name of the sampling plan.
        roles: Names of the roles. Rewards are in this order.
        models: Names of the models that may play.
        components: Names of the reward components.
        weights: Weight of each paid component in this step.
        updated: Models that the step updated.
        batch: Tasks of the step, or of the evaluation.
        tasks: Tasks of these that are in the file, the first ones.
        rows: Number of rows by kind.
        columns: Names of the columns by kind.
        split: ``train``, or ``held_out`` for an evaluation.
        commit: Git commit of the folder that the run was started in, as in versions.json; None: unknown.
    """

    schema: int
    step: int
    rl_step: int
    fingerprint: str
    recipe: str
    seed: int
    environment: str
    plan: str
    roles: tuple[str, ...]
    models: tuple[str, ...]
    components: tuple[str, ...]
    weights: dict[str, float | None]
    updated: tuple[str, ...]
    batch: int
    tasks: int
    rows: dict[str, int]
    columns: dict[str, tuple[str, ...]]
    split: str = TRAIN
    commit: str | None = None


class Task(NamedTuple):
    """A task: position in the batch, number among the tasks of the split, and a hash of its content."""

    task: int
    number: int
    content: str = ""


class Node(NamedTuple):
    """A decision point: one prompt of one role.

    A message is three texts: its speaker as of the chat template, the role that said it or "", and what it says.
    """

    node: int
    task: int
    turn: int
    role: str
    model: str
    parent: int
    prompt_ids: tuple[int, ...]
    prompt: str
    memory_slots: tuple[int, ...]
    memory_similarity: tuple[float | None, ...]
    messages: tuple[tuple[str, ...], ...] = ()
    cut_tokens: int = 0
    unseen: tuple[int, ...] = ()


class Completion(NamedTuple):
    """A step of the tree: one completion that was sampled at a node."""

    step: int
    node: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float | None, ...]
    truncated: bool
    source: str
    version: int
    returns: float | None
    advantage: float | None
    group: int
    valid: bool
    selected: bool
    trained: bool
    why: str
    learner_logprobs: tuple[float | None, ...] = ()
    token_chars: tuple[int, ...] = ()
    token_names: tuple[str, ...] = ()

    @property
    def pieces(self) -> tuple[str, ...]:
        """What each token adds to ``text``. Empty where the file does not tell."""
        ends = tuple(itertools.accumulate(self.token_chars))
        return tuple(self.text[end - size : end] for end, size in zip(ends, self.token_chars))

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """For each token, its piece, or its name where the piece cannot be read. Empty as of `pieces`."""
        names = iter(self.token_names)
        return tuple(piece if piece.strip(UNREADABLE) else next(names) for piece in self.pieces)


class Transition(NamedTuple):
    """A joint action and its rewards."""

    transition: int
    task: int
    turn: int
    parent: int
    steps: tuple[int, ...]
    rewards: dict[str, tuple[float | None, ...]]
    done: bool
    valid: bool


class Group(NamedTuple):
    """Completions that were compared with each other, those of other tasks included."""

    group: int
    task: int
    role: str
    turn: int
    size: int
    mean: float | None
    variance: float | None
    low: float | None
    high: float | None
    selected: bool


class MemoryEvent(NamedTuple):
    """A slot of a role's memory that a prompt read, or that the step wrote or emptied.

    ``completion`` is the one that an entry was written from.
    """

    event: str
    role: str
    slot: int
    node: int
    similarity: float | None
    text: str
    weight: float | None
    reward: float | None
    completion: int = -1


class Failure(NamedTuple):
    """A call of a host environment that gave no valid result."""

    number: int
    call: str
    turn: int
    roles: tuple[str, ...]
    message: str


Row = Task | Node | Completion | Transition | Group | MemoryEvent | Failure
# Kind of a line -> its columns. The order is that of the lines of a file.
KINDS: Mapping[str, type[Row]] = {
    "task": Task,
    "node": Node,
    "step": Completion,
    "transition": Transition,
    "group": Group,
    "memory": MemoryEvent,
    "failure": Failure,
}
KIND_OF = {cls: kind for kind, cls in KINDS.items()}
# The column that names a row of a kind.
_KEYS = {"task": "task", "node": "node", "step": "step", "transition": "transition", "group": "group"}


class Rollout(NamedTuple):
    """The rows of one file, by kind. Rows name each other by the number in their first column."""

    path: Path
    header: Header
    tasks: list[Task]
    nodes: list[Node]
    steps: list[Completion]
    transitions: list[Transition]
    groups: list[Group]
    memory: list[MemoryEvent]
    failures: list[Failure]

    @property
    def tables(self) -> dict[str, Sequence[Row]]:
        """Rows by kind, with the kinds of `KINDS`."""
        return dict(zip(KINDS, self[2:], strict=True))

    def to_numpy(self) -> dict[str, dict[str, np.ndarray]]:
        """Columns by kind: int64, float64 with NaN for null, bool, and text with dtype object.

        A column of lists is an array of arrays. Rewards are ``rewards/<component>`` [J A], with the
        roles of the header in order.
        """
        out: dict[str, dict[str, np.ndarray]] = {}
        for kind, rows in self.tables.items():
            hints = typing.get_type_hints(KINDS[kind])
            columns = {name: [getattr(row, name) for row in rows] for name in KINDS[kind]._fields}
            paid = columns.pop("rewards", [])
            out[kind] = {name: _column(values, hints[name]) for name, values in columns.items()}
            for component in self.header.components if kind == "transition" else ():
                table = np.array([row[component] for row in paid], np.float64)
                out[kind][f"rewards/{component}"] = table.reshape(len(rows), len(self.header.roles))
        return out

    def to_pandas(self) -> dict[str, Any]:
        """Data frames by kind, as `to_numpy`; rewards are columns ``rewards/<component>/<role>``.

        ConfigError where pandas is not installed.
        """
        if importlib.util.find_spec("pandas") is None:
            raise ConfigError(f"{self.path}: data frames need pandas; pip install pandas")
        import pandas

        frames = {}
        for kind, columns in self.to_numpy().items():
            flat: dict[str, Any] = {}
            for name, column in columns.items():
                if column.ndim == 2:
                    flat |= {f"{name}/{role}": column[:, i] for i, role in enumerate(self.header.roles)}
                else:
                    flat[name] = column
            frames[kind] = pandas.DataFrame(flat)
        return frames


def files(path: str | os.PathLike, split: str = TRAIN) -> dict[int, Path]:
    """Find the files of a run.

    Args:
        path: Workdir of a run, its folder rollouts/, or one file.
        split: ``train``: RL steps; ``held_out``: evaluations. One file is of its own split.

    Returns:
        Number of each step in order, and its file.

    Raises:
        ConfigError: There is no file of rollouts.
    """
    place, found = Path(path), by_split(path)
    if place.is_file():
        (found[split],) = (own for own in found.values() if own)
    if not found[split]:
        setting = {TRAIN: "every", HELD_OUT: "eval_tasks"}[split]
        wanted = f"is this the workdir of a run with config.run.rollouts.{setting} above 0?"
        told = "runs compiled as one program have metrics alone; `jaxmarl-llm train` writes rollouts"
        raise ConfigError(f"{place / FOLDER}: no files {PREFIX[split]}-N.jsonl.zst; {wanted} ({told})")
    return found[split]


def by_split(path: str | os.PathLike) -> dict[str, dict[int, Path]]:
    """Find the files of a run by split, in the order of `SPLITS`; a split may have none.

    Args:
        path: Workdir of a run, its folder rollouts/, or one file. A file of another name counts as a training step.
    """
    place = Path(path)
    if place.is_file():
        named = {split: m for split, name in NAMES.items() if (m := name.fullmatch(place.name))}
        return {
            split: {int(named[split][1]) if named else 0: place} if split in (named or (TRAIN,)) else {}
            for split in SPLITS
        }
    inside = {split: files_in(place / FOLDER, split) for split in SPLITS}
    return inside if any(inside.values()) else {split: files_in(place, split) for split in SPLITS}


def evaluated_folder(workdir: str | os.PathLike, environment: str | None = None) -> Path:
    """Folder of the episodes that `jaxmarl-llm evaluate` wrote, which holds a folder rollouts/.

    Args:
        workdir: Workdir of the run.
        environment: Name of another environment than that of the run; None: that of the run.
    """
    other = "" if environment is None else "-" + re.sub(r"[^\w.]+", ".", environment)
    return Path(workdir) / f"{EVALUATED}{other}"


def evaluated_folders(workdir: str | os.PathLike) -> list[Path]:
    """Folders as of `evaluated_folder` that hold episodes, in the order of their names. ``workdir``: of the run."""
    place = Path(workdir)
    found = place.glob(f"{EVALUATED}*") if place.is_dir() else ()
    own = (folder for folder in found if re.fullmatch(rf"{EVALUATED}(-.+)?", folder.name))
    return sorted(folder for folder in own if files_in(folder / FOLDER, HELD_OUT))


def read(path: str | os.PathLike, split: str = TRAIN) -> Iterator[Rollout]:
    """Read the rollouts of a run, one step after the other. One step is in memory at a time.

    Args:
        path: Workdir of a run, its folder rollouts/, or one file.
        split: ``train``: RL steps; ``held_out``: held-out tasks, one evaluation after the other.

    Raises:
        ConfigError: There is no file, or a file is truncated, damaged, or of a newer schema.
    """
    found = files(path, split)  # now, and not at the first step
    return map(read_file, found.values())


def read_file(path: str | os.PathLike) -> Rollout:
    """Read one file whole. ``path``: the file. Raises `ConfigError` as `read` does."""
    place = Path(path)
    try:
        with open(place, "rb") as raw:
            stream = zstandard.ZstdDecompressor(max_window_size=WINDOW).stream_reader(raw)
            return _parsed(place, json_files.lines(io.BufferedReader(stream, 2**16), str(place), MAX_TEXT))
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read ({error.strerror or 'not a file'})") from None
    except zstandard.ZstdError as error:
        raise ConfigError(f"{place}: damaged or not compressed by zstd ({json_files.reason(error)})") from None


def files_in(folder: Path, split: str = TRAIN) -> dict[int, Path]:
    """Number and path of each file of a ``split`` in ``folder``, in order; none where there is no folder."""
    if not folder.is_dir():
        return {}
    found = {int(m[1]): folder / m[0] for name in os.listdir(folder) if (m := NAMES[split].fullmatch(name))}
    return dict(sorted(found.items()))


def _parsed(path: Path, lines: Iterator[bytes]) -> Rollout:
    """The rows of the decompressed ``lines`` of a file, checked."""
    header: Header | None = None
    tables: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        if not line.endswith(b"\n"):
            raise ConfigError(f"{path}: truncated within line {number}")
        row = json_files.parse(json_files.decoded(line[:-1], str(path), number), where)
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: expected an object, found {json_files.shown(row)}")
        kind = row.get("kind")
        if header is None:
            header = _header(row, where)
            continue
        if not isinstance(kind, str) or kind not in KINDS:
            raise ConfigError(f"{where}: key 'kind': expected {', '.join(KINDS)}, found {json_files.shown(kind)}")
        if len(tables[kind]) == header.rows[kind]:
            raise ConfigError(f"{where}: more rows of kind {kind!r} than the {header.rows[kind]} of the header")
        tables[kind].append(_typed(KINDS[kind], row, where, header.schema))
        _check_row(header, tables[kind][-1], where)
    if header is None:
        raise ConfigError(f"{path}: truncated: there is no header")
    for kind, table in tables.items():
        if len(table) < header.rows[kind]:
            raise ConfigError(f"{path}: truncated: {len(table)} of {header.rows[kind]} rows of kind {kind!r}")
    rollout = Rollout(path, header, *tables.values())
    _check_references(rollout)
    return rollout


def _header(row: Mapping[str, Any], where: str) -> Header:
    if row.get("kind") != "header":
        raise ConfigError(f"{where}: expected the header of a rollout, found {json_files.shown(dict(row))}")
    schema = row.get("schema")
    if type(schema) is int and schema > SCHEMA:
        raise ConfigError(
            f"{where}: schema {json_files.shown(schema)} is newer than {SCHEMA}, which this version reads"
        )
    header = _typed(Header, row, where, max(1, schema) if type(schema) is int else SCHEMA)
    if header.schema < 1:
        raise ConfigError(f"{where}: key 'schema': expected 1 to {SCHEMA}, found {header.schema}")
    if set(header.rows) != set(KINDS) or min(header.rows.values()) < 0:
        raise ConfigError(f"{where}: key 'rows': expected a count of {', '.join(KINDS)}")
    if not header.roles or len(set(header.roles)) < len(header.roles):
        raise ConfigError(f"{where}: key 'roles': expected different names")
    if header.split not in SPLITS:
        found = json_files.shown(header.split)
        raise ConfigError(f"{where}: key 'split': expected {' or '.join(SPLITS)}, found {found}")
    return header


def _typed(cls: type, row: Mapping[str, Any], where: str, schema: int) -> Any:
    """``row`` of a file of ``schema`` as the named tuple ``cls``. ConfigError for a missing key or another type."""
    values = {}
    for name, (convert, expected) in _converters(cls).items():
        if schema < ADDED.get(name, 1):
            continue
        if name not in row:
            raise ConfigError(f"{where}: key {name!r} is missing; expected {expected}")
        try:
            values[name] = convert(row[name])
        except TypeError:
            found = json_files.shown(row[name])
            raise ConfigError(f"{where}: key {name!r}: expected {expected}, found {found}") from None
    return cls(**values)


@functools.cache
def _converters(cls: type) -> dict[str, tuple[Callable[[Any], Any], str]]:
    """For each field of a named tuple: the function that checks a value of JSON, and words for the type."""
    return {name: _converter(hint) for name, hint in typing.get_type_hints(cls).items()}


def _converter(hint: Any) -> tuple[Callable[[Any], Any], str]:
    """A function that returns a value of JSON as ``hint`` says or raises TypeError, and words for the type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        inner, words = _converter(args[0])
        return (lambda value: None if value is None else inner(value)), f"{words} or null"
    if origin is tuple:
        inner, words = _converter(args[0])
        return (lambda value: tuple(map(inner, _of(list, value)))), f"a list, each {words}"
    if origin is dict:
        inner, words = _converter(args[1])
        return (lambda value: {key: inner(v) for key, v in _of(dict, value).items()}), f"an object, each {words}"
    return {int: (_integer, "an integer"), float: (_number, "a finite number"), str: (_text, "text")}.get(
        hint, (_flag, "true or false")
    )


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise TypeError
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) < 2**1023:
        raise TypeError
    return float(value)


_text: Callable[[Any], Any] = functools.partial(_of, str)
_flag: Callable[[Any], Any] = functools.partial(_of, bool)


def _check_row(header: Header, row: Any, where: str) -> None:
    """Raise ConfigError where a row names a role, model or component that the header lacks, or lists differ."""

    def known(key: str, value: str, names: Sequence[str]) -> None:
        if value not in names:
            shown = json_files.shown(list(names))
            raise ConfigError(f"{where}: key {key!r}: expected one of {shown}, found {json_files.shown(value)}")

    if isinstance(row, Node | Group | MemoryEvent):
        known("role", row.role, header.roles)
    if isinstance(row, Node):
        known("model", row.model, header.models)
        if len(row.memory_slots) != len(row.memory_similarity):
            raise ConfigError(f"{where}: keys 'memory_slots' and 'memory_similarity': expected lists of one length")
        if {len(message) for message in row.messages} - {3}:
            raise ConfigError(f"{where}: key 'messages': expected three texts each: speaker, role and text")
    if isinstance(row, Completion):
        if len(row.token_ids) != len(row.logprobs):
            raise ConfigError(f"{where}: keys 'token_ids' and 'logprobs': expected lists of one length")
        if row.learner_logprobs and len(row.token_ids) != len(row.learner_logprobs):
            raise ConfigError(f"{where}: key 'learner_logprobs': expected an empty list, or a number for each token")
        _check_pieces(row, where)
        known("source", row.source, SOURCES)
    if isinstance(row, Transition):
        sizes = {len(values) for values in row.rewards.values()} - {len(header.roles)}
        if set(row.rewards) != set(header.components) or sizes:
            raise ConfigError(f"{where}: key 'rewards': expected a list for each component, a number for each role")
        if row.parent >= row.transition:
            raise ConfigError(f"{where}: key 'parent': expected an earlier transition, found {row.parent}")


def _check_pieces(row: Completion, where: str) -> None:
    """Raise ConfigError where the pieces of the tokens are not those of the text."""
    if not row.token_chars and not row.token_names:
        return
    if len(row.token_chars) != len(row.token_ids) or min(row.token_chars) < 0 or sum(row.token_chars) != len(row.text):
        raise ConfigError(f"{where}: key 'token_chars': expected the characters of 'text' that each token adds")
    if len(row.token_names) != sum(not piece.strip(UNREADABLE) for piece in row.pieces):
        raise ConfigError(f"{where}: key 'token_names': expected a name for each token without readable characters")


def _check_references(rollout: Rollout) -> None:
    """Raise ConfigError where a row is there twice, or names a row that is not there."""
    names: dict[str, set[int]] = {}
    for kind, key in _KEYS.items():
        numbers = [getattr(row, key) for row in rollout.tables[kind]]
        names[kind] = set(numbers)
        if len(names[kind]) < len(numbers):
            raise ConfigError(f"{rollout.path}: two rows of kind {kind!r} have one number")

    def need(kind: str, number: int, row: Row, none: bool = False) -> None:
        if number not in names[kind] and not (none and number == -1):
            raise ConfigError(f"{rollout.path}: {KIND_OF[type(row)]} {row[0]}: there is no {kind} {number}")

    for node in rollout.nodes:
        need("task", node.task, node)
        need("transition", node.parent, node, none=True)
        for number in node.unseen:
            need("step", number, node)
    for step in rollout.steps:
        need("node", step.node, step)
        need("group", step.group, step, none=True)
    for move in rollout.transitions:
        need("task", move.task, move)
        need("transition", move.parent, move, none=True)
        for number in move.steps:
            need("step", number, move, none=True)
    for event in rollout.memory:
        need("node", event.node, event, none=True)
        need("step", event.completion, event, none=True)


def _column(values: Sequence[Any], hint: Any) -> np.ndarray:
    """A column of numpy. ``hint``: type of the field."""
    if typing.get_origin(hint) is tuple:
        kind = _dtype(typing.get_args(hint)[0])
        column = np.empty((len(values),), object)
        for i, value in enumerate(values):
            column[i] = np.array(value, kind)
        return column
    return np.array(values, _dtype(hint))


def _dtype(hint: Any) -> Any:
    """The dtype of values of type ``hint``: null is NaN."""
    if typing.get_origin(hint) is tuple:
        return np.object_
    return {int: np.int64, bool: np.bool_, str: np.object_}.get(hint, np.float64)
