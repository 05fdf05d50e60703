"""Names of hub models: a folder, the local cache, the hub, or one line that says how to fetch them."""

import huggingface_hub
import pytest

from jaxmarl_llm.agents import team
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import hub

NAME, KEY = "Qwen/Qwen2.5-0.5B-Instruct", "config.team.backbone.path"


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The hub in a folder: the cache holds what ``cached`` names, the hub holds the rest unless it is offline."""
    state = {"cached": (), "online": True, "calls": []}

    def download(name, *, allow_patterns, local_files_only=False):
        state["calls"].append((local_files_only, tuple(allow_patterns)))
        if local_files_only and not state["cached"]:
            raise FileNotFoundError("not cached")
        if not local_files_only and not state["online"]:
            raise OSError("ConnectError:\n no route")
        files = state["cached"] if local_files_only else ("config.json", "model.safetensors")
        for file in files:
            (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return state


def test_a_folder_is_taken_as_it_is(tmp_path, calls, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "mine").mkdir(parents=True)
    assert hub.folder("Qwen/mine", KEY).is_dir()
    for path in ("Qwen/other", "nowhere", "a/b/c", "a/model.gguf", "./a/b"):  # whoever reads it says what is missing
        assert str(hub.folder(path, KEY)) == path.removeprefix("./")
    assert not calls["calls"]


def test_the_cache_comes_first_and_an_incomplete_one_is_completed(calls, tmp_path):
    calls["cached"] = ("config.json", "tokenizer.json")
    assert hub.folder(NAME, KEY, weights=False) == tmp_path
    assert [offline for offline, _ in calls["calls"]] == [True]
    assert hub.folder(NAME, KEY) == tmp_path
    assert [offline for offline, _ in calls["calls"]] == [True, True, False]
    assert "*.safetensors" in calls["calls"][-1][1] and "*.safetensors" not in calls["calls"][0][1]


def test_without_a_network_one_line_has_the_command(calls):
    calls["online"] = False
    for build in (lambda: team.load_tokenizer(team.Backbone(path=NAME)), lambda: team.shape_of(team.Backbone(NAME), 9)):
        with pytest.raises(ConfigError) as error:
            build()
        text = str(error.value)
        assert text.startswith(
            f"{KEY}: no folder '{NAME}', and the Hugging Face hub did not give it (ConnectError: no r"
        )
        assert text.endswith(
            f"hf download {NAME} --local-dir weights/Qwen2.5-0.5B-Instruct, then --{KEY}=weights/Qwen2.5-0.5B-Instruct"
        )


def test_what_a_command_of_ours_makes_is_not_asked_for(calls, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="make it with: jaxmarl-llm fetch_weights --out=weights/smollm2"):
        hub.folder("weights/smollm2", KEY)
    assert not calls["calls"]
