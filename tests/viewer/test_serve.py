"""The server: it answers on loopback alone, reads what it is asked for, and sees steps that are added."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import threading

import pytest

from experiments.viewer.samples import hostile_rows, tree_rows, written
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.viewer import data, serve
from jaxmarl_llm.viewer.data import open_run
from jaxmarl_llm.viewer.serve import Server


@contextlib.contextmanager
def serving(*folders):
    with Server([open_run(folder) for folder in folders]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
            assert not thread.is_alive()


def ask(server, path, host=None, method="GET"):
    """(status, body) of one request."""
    link = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        link.request(method, path, headers={"Host": host} if host else {})
        answer = link.getresponse()
        body = answer.read()
        return answer.status, gzip.decompress(body) if answer.headers.get("Content-Encoding") == "gzip" else body
    finally:
        link.close()


def test_the_page_its_index_and_a_step(tmp_path):
    run, other = written(tmp_path / "run", hostile_rows(), 3, 5), written(tmp_path / "other", tree_rows(4))
    with serving(run, other) as server:
        assert server.server_address[0] == "127.0.0.1" and server.url == f"http://127.0.0.1:{server.server_port}/"
        status, body = ask(server, "/")
        assert status == 200 and body.startswith(b"<!DOCTYPE html>") and b"</script><b>" not in body
        shown = json.loads(ask(server, "/index")[1])
        assert shown["live"] and [r["steps"] for r in shown["runs"]] == [[3, 5], [31]]
        step = json.loads(ask(server, "/step?run=0&step=5")[1])
        assert step["header"]["step"] == 5 and step == json.loads(gzip.decompress(data.read_step(open_run(run), 5)))
        written(run, hostile_rows(), 9)  # the run goes on
        assert json.loads(ask(server, "/index")[1])["runs"][0]["steps"] == [3, 5, 9]
        (run / "rollouts" / "step-00000005.jsonl.zst").unlink()  # and is resumed from an earlier step
        assert json.loads(ask(server, "/index")[1])["runs"][0]["steps"] == [3, 9]
        status, body = ask(server, "/step?run=0&step=5")
        assert status == 409 and b"step 5 was not written" in body


WRONG = {
    "/step?run=2&step=3": 409, "/step?run=-1&step=3": 409, "/step?run=0": 400, "/step?run=a&step=3": 400,
    "/step?run=0&step=99999999999999999999": 409, "/etc/passwd": 404, "/../../etc/passwd": 404, "/step/../x": 404,
}  # fmt: skip


def test_wrong_requests_are_answered_and_the_server_lives(tmp_path):
    with serving(written(tmp_path, hostile_rows(), 3)) as server:
        for path, status in WRONG.items():
            assert ask(server, path)[0] == status, path
        assert ask(server, "/index", host="evil.example")[0] == 403
        assert ask(server, "/", method="POST")[0] == 501
        (tmp_path / "rollouts" / "step-00000004.jsonl.zst").write_bytes(b"no zstd")
        status, body = ask(server, "/step?run=0&step=4")
        assert status == 409 and b"damaged" in body
        assert ask(server, "/step?run=0&step=3")[0] == 200


def test_few_steps_are_kept_and_a_step_that_is_written_again_is_read_again(tmp_path):
    run = written(tmp_path, tree_rows(4), *range(1, 15))
    with serving(run) as server:
        for step in range(1, 15):
            assert ask(server, f"/step?run=0&step={step}")[0] == 200
        assert len(server._steps) == serve.KEPT
        written(run, hostile_rows(), 14)
        assert len(json.loads(ask(server, "/step?run=0&step=14")[1])["tasks"]) == 2


def test_a_port_in_use_is_one_line(tmp_path):
    run = written(tmp_path, tree_rows(4))
    with serving(run) as server, pytest.raises(ConfigError, match=f"--port={server.server_port}: cannot listen"):
        Server([open_run(run)], server.server_port)
