"""`export --push`: the hub's library uploads to a server of the hub's HTTP interface on loopback."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import huggingface_hub.constants
import pytest

from jaxmarl_llm.cli import export
from jaxmarl_llm.errors import ConfigError
from tests.cli.tiny_runs import SHAPE, tiny_run


class Hub(BaseHTTPRequestHandler):
    """Four requests of the hub's interface. The server keeps files by repository, and who may read repositories."""

    def do_POST(self):
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        path = self.path.split("?")[0]
        if self.server.refuse in path:
            return self.answer(403, {"error": "this login may not write here"})
        if path == "/api/repos/create":
            given = json.loads(self.body)
            owner, name = given["organization"], given["name"]
            self.server.private[f"{owner}/{name}"] = given.get("private") or given.get("visibility") == "private"
            return self.answer(200, {"url": self.address(f"{owner}/{name}")})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        repository, _, what = path.removeprefix("/api/models/").rpartition("/main")[0].rpartition("/")
        if what == "preupload":
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in self.given()["files"]]
            return self.answer(200, {"files": files})
        assert what == "commit", path
        for line in self.body.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                stored = self.server.stored.setdefault(repository, {})
                stored[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        return self.answer(200, {"commitUrl": self.address(f"{repository}/commit/1"), "commitOid": "1"})

    def address(self, path):
        return f"http://127.0.0.1:{self.server.server_port}/{path}"

    def given(self):
        return json.loads(self.body)

    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """The hub: an address of loopback that `huggingface_hub` uses, with a login."""
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    hub.stored, hub.private, hub.refuse = {}, {}, "nothing"
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
    yield hub
    hub.shutdown()
    thread.join(10)
    hub.server_close()


@pytest.fixture(scope="module")
def run():
    """Configuration, recipe and state of a tiny team with an adapter for each role."""
    team = {"parameter_sharing": "lora", "lora_rank": 2, "max_new_tokens": 1, "backbone": SHAPE}
    return tiny_run("matrix", "grpo", reward={"payoff": 1.0}, team=team)


@pytest.fixture
def push(run, monkeypatch, tmp_path):
    """Export the run with other flags than the usual ones, and return the folder."""
    monkeypatch.setattr(export, "open_run", lambda workdir, **_: run)

    def export_with(**flags):
        out = tmp_path / "out"
        given = {"models": [], "export_to": str(out), "mesh": ["1"] * 3, "best": False, "adapters": False}
        export.main(None, "run", type("Flags", (), {**given, "push": "lab/team", "private": False, **flags}))
        return out

    return export_with


def test_each_model_and_the_team_have_a_repository(push, server, run, capsys):
    out = push(private=True)
    names = [role.model for role in run[1].team.roles]
    assert sorted(server.stored) == sorted(["lab/team", *(f"lab/team-{name}" for name in names)])
    assert server.private == dict.fromkeys(server.stored, True)
    for name in names:
        there = {str(f.relative_to(out / name)): f.read_bytes() for f in (out / name).rglob("*") if f.is_file()}
        assert server.stored[f"lab/team-{name}"] == there and "model.safetensors" in there
        assert f'from_pretrained("lab/team-{name}")' in there["README.md"].decode()
    assert server.stored["lab/team"] == {f: (out / f).read_bytes() for f in ("README.md", "team.json")}
    assert all(f"`lab/team-{name}`" in (out / "README.md").read_text() for name in names)
    said = capsys.readouterr().out
    assert said.count("pushed ") == len(names) + 1 and f"{huggingface_hub.constants.ENDPOINT}/lab/team\n" in said


def test_an_adapter_names_the_backbone_of_the_hub(push, server):
    push(adapters=True, models=["first"])
    assert sorted(server.stored) == ["lab/team", "lab/team-base", "lab/team-first"]
    settings = json.loads(server.stored["lab/team-first"]["adapter_config.json"])
    assert settings["base_model_name_or_path"] == "lab/team-base"
    assert not any(server.private.values())


@pytest.mark.parametrize("name", ["team", "a/b/c", "", "lab/te am"])
def test_a_wrong_name_is_one_line_before_anything_is_written(push, server, name, tmp_path):
    with pytest.raises(ConfigError, match=r"^--push: expected the name of a hub repository, OWNER/NAME, got '.*'$"):
        push(push=name)
    assert not (tmp_path / "out").exists()


def test_a_hub_that_refuses_is_one_line_with_what_to_do(push, server, tmp_path):
    server.refuse = "/api/repos/create"
    with pytest.raises(ConfigError, match=r"--push: the Hugging Face hub did not make 'lab/team' \(.*hf auth login$"):
        push()
    assert not (tmp_path / "out").exists()
    server.refuse = "/commit/"
    with pytest.raises(ConfigError, match=r"--push: \S*out/\S* is written, but .* hf upload lab/team-\S+ \S+$"):
        push()
    assert (tmp_path / "out" / "team.json").is_file()
