"""Weights and data at a URL: a store that is a folder here, a web server of this machine, and one line for the rest."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import threading

import pytest
from etils import epath

from jaxmarl_llm.agents import team
from jaxmarl_llm.data import loaders, remote
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import hub

KEY = "config.team.backbone.path"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxmarl_llm"


def write_model(folder, shards=SHARDS):
    """Files of a model with the names that exports have; the contents are their names."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", *shards):
        (folder / name).write_text(name)
    if len(shards) > 1:
        index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(shards)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "optimizer.bin").write_text("not wanted")


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != remote.LISTING)


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder in place of gs://bucket; notes which files are copied."""
    copied = []
    original = remote._from_store

    def noted(item):
        return lambda path: copied.append(path.name) or original(item)(path)

    monkeypatch.setattr(remote, "_open", lambda url: epath.Path(tmp_path / "bucket" / url.removeprefix("gs://bucket/")))
    monkeypatch.setattr(remote, "_from_store", noted)
    return tmp_path / "bucket", copied


def test_a_model_in_a_store_is_copied_once_and_again_when_it_changes(store, cache):
    bucket, copied = store
    write_model(bucket / "qwen")
    wanted = ["config.json", *SHARDS, "model.safetensors.index.json", "tokenizer.json"]
    folder = hub.folder("gs://bucket/qwen", KEY)
    assert folder.parent == cache and names(folder) == sorted(wanted)
    assert all((folder / name).read_bytes() == (bucket / "qwen" / name).read_bytes() for name in wanted)
    assert hub.folder("gs://bucket/qwen", KEY) == folder and sorted(copied) == sorted(wanted)
    (bucket / "qwen" / "config.json").write_text("another")
    assert (hub.folder("gs://bucket/qwen", KEY) / "config.json").read_text() == "another"
    assert sorted(copied) == sorted([*wanted, *wanted]) and names(cache) == [folder.name]
    small = hub.folder("gs://bucket/qwen", KEY, weights=False)
    assert small != folder and names(small) == ["config.json", "model.safetensors.index.json", "tokenizer.json"]


def test_a_copy_that_was_broken_off_is_no_copy(store, cache, monkeypatch):
    bucket, _ = store
    write_model(bucket / "qwen")
    original = remote._from_store

    def full(item):
        def write(path):
            raise OSError(28, "No space left on device")

        return write if item.name == SHARDS[1] else original(item)

    monkeypatch.setattr(remote, "_from_store", full)
    with pytest.raises(ConfigError, match=rf"{KEY}: gs://bucket/qwen: cannot be copied to .*No space left") as error:
        hub.folder("gs://bucket/qwen", KEY)
    assert "\n" not in str(error.value) and not names(cache)
    monkeypatch.setattr(remote, "_from_store", original)
    assert SHARDS[1] in names(hub.folder("gs://bucket/qwen", KEY))


def test_data_in_a_store_has_the_tasks_of_the_folder(store):
    bucket, _ = store
    shutil.copytree(loaders.FIXTURES / "gsm8k", bucket / "data" / "gsm8k")
    tasks, source = loaders.load("gsm8k", data_dir="gs://bucket/data", split="test")
    assert tasks == loaders.load("gsm8k", split="test")[0] and "jaxmarl_llm/data-" in source


def test_what_is_not_in_a_store_is_one_line(store):
    bucket, _ = store
    with pytest.raises(ConfigError, match=f"^{KEY}: gs://bucket/none: there is no such file or folder$"):
        hub.folder("gs://bucket/none", KEY)
    (bucket / "empty").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no file is there that is called"):
        hub.folder("gs://bucket/empty", KEY)


@pytest.mark.parametrize("scheme,extra", [("gs", "gcs"), ("s3", "s3")])
def test_a_missing_client_names_the_extra(scheme, extra, monkeypatch):
    def missing(url):
        raise ImportError("Please install its client")

    monkeypatch.setattr(remote, "_open", missing)
    with pytest.raises(ConfigError) as error:
        hub.folder(f"{scheme}://bucket/qwen", KEY)
    assert f"{scheme}:// needs pip install 'jaxmarl_llm[{extra}]' (Please install" in str(error.value)
    with pytest.raises(ConfigError, match=r"expected a URL with gs://, s3://, https://, got 'ftp://host/x'"):
        hub.folder("ftp://host/x", KEY)


@pytest.fixture
def server(tmp_path):
    """(folder, URL, requests) of a web server that lists no folder."""
    folder, asked = tmp_path / "www", []
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=os.fspath(folder))

        def log_message(self, *_):
            asked.append(self.path)

        def list_directory(self, path):
            self.send_error(404)

        def do_GET(self):
            if not self.path.endswith("short.gguf"):
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", "99")
            self.end_headers()
            self.wfile.write(b"GGUF")  # and the connection ends

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{made.server_port}", asked
        made.shutdown()
        thread.join()


@pytest.mark.parametrize("shards", [SHARDS, ("model.safetensors",)])
def test_a_model_behind_a_web_server(server, shards):
    www, url, asked = server
    write_model(www / "qwen", shards)
    folder = hub.folder(f"{url}/qwen", KEY)
    index = ["model.safetensors.index.json"] * (len(shards) > 1)
    assert names(folder) == sorted(["config.json", "tokenizer.json", *shards, *index])
    assert all((folder / name).read_text() == name for name in shards)
    count = len(asked)
    assert hub.folder(f"{url}/qwen", KEY) == folder and len(asked) == count


def test_what_a_web_server_does_not_have_is_one_line(server, cache):
    www, url, _ = server
    write_model(www / "qwen")
    (www / "qwen" / SHARDS[0]).unlink()
    with pytest.raises(ConfigError, match=rf"{KEY}: http.*qwen: cannot be copied to .*{SHARDS[0]}: HTTP 404$"):
        hub.folder(f"{url}/qwen", KEY)
    write_model(www / "up")
    (www / "up" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../x.safetensors"}}')
    with pytest.raises(ConfigError, match=r"expected names of files, found '../../x.safetensors'"):
        hub.folder(f"{url}/up", KEY)
    with pytest.raises(ConfigError, match="a web server lists no folder"):
        loaders.load("gsm8k", data_dir=f"{url}/data", split="test")
    with pytest.raises(ConfigError, match=r"cannot be copied to .*short.gguf: 4 of 99 bytes came$"):
        hub.folder(f"{url}/short.gguf", KEY)
    assert not cache.exists() or not names(cache)


def test_a_team_reads_its_shape_and_tokenizer_from_a_url(server, request):
    """Configuration and tokenizer of the real small model, behind a web server, are those of its folder."""
    www, url, _ = server
    home = request.config.rootpath / "weights" / "smollm2"
    if not (home / "config.json").is_file():
        pytest.skip("needs weights/smollm2 (make weights)")
    write_model(www / "smollm2", ["model.safetensors"])  # which nobody reads here
    for path in (*home.glob("*.json"), *home.glob("*.jinja")):
        shutil.copy(path, www / "smollm2")
    here, there = team.Backbone(path=str(home)), team.Backbone(path=f"{url}/smollm2")
    assert team.shape_of(there, 0) == team.shape_of(here, 0)
    text = "Two agents share 7 apples."
    assert team.load_tokenizer(there).encode(text) == team.load_tokenizer(here).encode(text)
