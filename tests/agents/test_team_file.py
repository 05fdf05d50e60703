"""team.json of an export: what is written is read back; anything else ends in one line."""

from __future__ import annotations

import json

import pytest

from jaxmarl_llm.agents import team_file
from jaxmarl_llm.errors import ConfigError

ENTRY = {"slot": 0, "text": "é", "weight": 1.0, "reward": 0.5, "uses": 2, "last_used": 7}
TEAM = team_file.TeamFile({"a": {"model": "m", "max_new_tokens": 4}}, {"a": [ENTRY]}, 3)


def test_round_trip(tmp_path):
    assert team_file.read(team_file.write(tmp_path, TEAM).parent) == TEAM


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": True}, "key 'step': expected an integer, found true"),
        ({"step": -1}, "'step' of at least 0"),
        ({"roles": {}}, "expected a role"),
        ({"roles": {"a": {"model": "../m", "max_new_tokens": 4}}}, "a model that is a folder's name"),
        ({"roles": {"a": {"model": "m", "max_new_tokens": "4"}}}, "roles: 'a': key 'max_new_tokens'"),
        ({"memory": {"b": []}}, "memory: 'b' is no role"),
        ({"memory": {"a": [{**ENTRY, "weight": "1"}]}}, "memory: 'a', entry 0: key 'weight'"),
    ],
)
def test_refused_in_one_line(change, message, tmp_path):
    (tmp_path / "team.json").write_text(json.dumps({**TEAM._asdict(), **change}))
    with pytest.raises(ConfigError, match=message) as error:
        team_file.read(tmp_path)
    assert str(tmp_path / "team.json") in str(error.value)
