"""The expert: functions, and an endpoint on the loopback that misbehaves in every way it can."""

import contextlib
import http.server
import json
import threading
import time

import pytest

from jaxmarl_llm.envs.coding.expert import MAX_ANSWER, MAX_EDIT, ExpertError, consult, resolve
from jaxmarl_llm.errors import ConfigError
from tests.programs import AUX, TASK, WRAPPER


def advise(task, helper, main):
    return {"aux": f"# {task['entry_point']}\n{helper}", "main": main}


def test_a_function_by_name():
    expert = resolve(f"{__name__}:advise")
    assert consult(expert, TASK, AUX, WRAPPER) == {"aux": f"# sq\n{AUX}".strip(), "main": WRAPPER.strip()}
    assert consult(advise, TASK, AUX, WRAPPER) == consult(expert, TASK, AUX, WRAPPER)


@pytest.mark.parametrize(
    "expert, message",
    [("", "module:function"), (3, "module:function"), ("nowhere:f", "nowhere"),
     (f"{__name__}:no_such", "no_such"), (__name__, "module:function"), (":", "module:function"),
     ("tests.programs:AUX", "not a function"), ("http://127.0.0.1:1/v1", "expert_model")],
)  # fmt: skip
def test_bad_experts_are_refused(expert, message):
    with pytest.raises(ConfigError) as error:
        resolve(expert)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("limits", [{"timeout": 0.0}, {"retries": -1}])
def test_bad_limits_are_refused(limits):
    with pytest.raises(ConfigError, match=r"config\.env\.args\.expert_(timeout|retries): expected"):
        resolve("http://127.0.0.1:1/v1", model="m", **limits)


ANSWERS = {
    '{"aux": "a", "main": "m"}': {"aux": "a", "main": "m"},
    'Sure:\n```json\n{"aux": "a"}\n```\n': {"aux": "a", "main": ""},
    '{"aux": null, "main": "line\nline"}': {"aux": "", "main": "line\nline"},
    '{"main": "\\ud800"}': {"aux": "", "main": "?"},
    '{"main": "' + "x" * 9999 + '"}': {"aux": "", "main": "x" * MAX_EDIT + " [cut]"},
}


@pytest.mark.parametrize("answer", ANSWERS, ids=range(len(ANSWERS)))
def test_answers_are_read(answer):
    assert consult(lambda *_: answer, TASK, "", "") == ANSWERS[answer]


@pytest.mark.parametrize(
    "answer", ["", "no", "{", "[]", '{"other": 1}', '{"aux": 3}', None, 7, {}, '{"aux": ' + "[" * 10**5]
)
def test_other_answers_are_errors(answer):
    with pytest.raises(ExpertError) as error:
        consult(lambda *_: answer, TASK, "", "")
    assert "\n" not in str(error.value)


def test_what_it_raises_is_named():
    def broken(*_):
        raise KeyError("who")

    with pytest.raises(ExpertError, match="KeyError: 'who'"):
        consult(broken, TASK, "", "")


# -- the endpoint ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def endpoint(*replies):
    """A server that gives these replies in turn, the last again and again; yields its URL and what it was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.body = body
            asked.append((self.path, body, dict(self.headers)))
            with contextlib.suppress(OSError):
                replies[min(len(asked), len(replies)) - 1](self)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(raw, status=200):
    def send(handler):
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return send


def chat(text):
    return reply(json.dumps({"choices": [{"message": {"content": text}}]}).encode())


def silent(handler):
    time.sleep(1.5)


def dripping(handler):
    """A byte now and then: every read succeeds, the answer never comes."""
    handler.send_response(200)
    handler.end_headers()
    for _ in range(60):
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def ask(url, timeout=0.5, retries=1, helper=AUX):
    expert = resolve(url, model="tiny", key_env="EXPERT_TEST_KEY", timeout=timeout, retries=retries)
    return consult(type(expert)(**{**vars(expert), "pause": 0.01}), TASK, helper, WRAPPER)


GOOD = chat('{"aux": "def aux(n):\\n    return n", "main": ""}')


def test_a_chat(monkeypatch):
    monkeypatch.setenv("EXPERT_TEST_KEY", "s3cret")
    with endpoint(GOOD) as (url, asked):
        assert ask(url, helper="\ud800") == {"aux": "def aux(n):\n    return n", "main": ""}
    ((path, body, headers),) = asked
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer s3cret"
    assert (
        body["model"] == "tiny" and "sq" in body["messages"][0]["content"] and WRAPPER in body["messages"][1]["content"]
    )


def test_no_key_no_header(monkeypatch):
    monkeypatch.delenv("EXPERT_TEST_KEY", raising=False)
    with endpoint(GOOD) as (url, asked):
        ask(url + "/")
    assert asked[0][0] == "/v1/chat/completions" and "Authorization" not in asked[0][2]


@pytest.mark.parametrize("first", [reply(b"busy", 503), reply(b"slow down", 429), silent], ids=["503", "429", "silent"])
def test_a_passing_fault_is_tried_again(first):
    with endpoint(first, GOOD) as (url, asked):
        assert ask(url)["aux"] and len(asked) == 2


FAULTS = {
    "busy": (reply(b"", 503), "HTTP 503", 2),
    "unauthorised": (reply(b"", 401), "HTTP 401", 1),
    "moved away": (reply(b"", 404), "HTTP 404", 1),
    "silent": (silent, "no answer within 0.5 s", 2),
    "dripping": (dripping, "no answer within 0.5 s", 2),
    "not JSON": (reply(b"hello"), "no chat completion", 1),
    "not a chat": (reply(b'{"choices": []}'), "no chat completion", 1),
    "no text": (chat(None), "no text", 1),
    "not UTF-8": (reply(b"\xff\xfe\xff"), "no chat completion", 1),
    "no JSON in it": (chat("I would not change a thing."), "keys aux and main", 1),
    "too long": (reply(b" " * (MAX_ANSWER + 9)), "more than", 1),
    "cut off": (lambda h: (h.send_response(200), h.send_header("Content-Length", "99"), h.end_headers()), "cut off", 2),
    "hangs up": (lambda h: h.connection.close(), "", 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_end_in_time_with_one_line(name, monkeypatch):
    monkeypatch.setenv("EXPERT_TEST_KEY", "s3cret")
    answer, message, attempts = FAULTS[name]
    with endpoint(answer) as (url, asked):
        start = time.monotonic()
        with pytest.raises(ExpertError) as error:
            ask(url)
        assert time.monotonic() - start < 5.0
    assert message in str(error.value) and "\n" not in str(error.value) and "s3cret" not in str(error.value)
    assert len(asked) == attempts


def test_nobody_listens():
    with endpoint(GOOD) as (url, _):
        pass
    with pytest.raises(ExpertError, match="2 attempts"):
        ask(url)
