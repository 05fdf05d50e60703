"""team.json of an export: the model and the memory of each role, written by `cli.export` and read here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmarl_llm import json_files
from jaxmarl_llm.errors import ConfigError

ROLE = {"model": str, "max_new_tokens": int}
ENTRY = {"slot": int, "text": str, "weight": float, "reward": float, "uses": float, "last_used": float}


class TeamFile(NamedTuple):
    """Contents of team.json."""

    roles: Mapping[str, Mapping[str, Any]]  # by role: model, max_new_tokens
    memory: Mapping[str, Sequence[Mapping[str, Any]]]  # by role: entries as of `agents.memory.entries`
    step: int


def write(folder: Path, team: TeamFile) -> Path:
    """Write team.json and return its path.

    Args:
        folder: folder of the export.
        team: the contents.
    """
    file = folder / "team.json"
    file.write_text(json.dumps(team._asdict(), indent=1, ensure_ascii=False))
    return file


def read(folder: Path) -> TeamFile:
    """Read team.json.

    Args:
        folder: folder of the export.
    """
    file = folder / "team.json"
    values = json_files.read_object(file)
    json_files.check(values, {"roles": dict, "memory": dict, "step": int}, str(file))
    if not values["roles"] or values["step"] < 0:
        raise ConfigError(f"{file}: expected a role in 'roles' and a 'step' of at least 0")
    for name, role in values["roles"].items():
        where = f"{file}: roles: {name!r:.80}"
        _check_object(role, ROLE, where)
        if role["max_new_tokens"] < 1 or Path(role["model"]).name != role["model"]:
            raise ConfigError(f"{where}: expected max_new_tokens of at least 1, and a model that is a folder's name")
    for name, entries in values["memory"].items():
        if name not in values["roles"]:
            raise ConfigError(f"{file}: memory: {name!r:.80} is no role")
        if not isinstance(entries, list):
            raise ConfigError(f"{file}: memory: {name!r:.80}: expected a list, found {json_files.shown(entries)}")
        for number, entry in enumerate(entries):
            _check_object(entry, ENTRY, f"{file}: memory: {name!r:.80}, entry {number}")
    return TeamFile(values["roles"], values["memory"], values["step"])


def _check_object(value: Any, form: Mapping[str, Any], where: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: expected an object, found {json_files.shown(value)}")
    json_files.check(value, form, where)
