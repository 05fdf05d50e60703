"""The page as a file: what it holds, that no text leaves its element, what is left out, and bad input."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import itertools
import json
import random
import re
import weakref

import pytest
import zstandard

from experiments.viewer.samples import HOSTILE, ROLES, hostile_rows, tree_rows, written
from jaxmarl_llm.cli import arguments, view
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer import data, page
from jaxmarl_llm.viewer.data import open_run
from jaxmarl_llm.viewer.page import kept_steps, write_page
from tests.cli.test_cli import command


class Elements(html.parser.HTMLParser):
    """Start tags, and the text of each script."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.scripts: list[tuple[dict, str]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag):
        self.tags.append(f"/{tag}")

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)


def parts(path):
    """(index, step by run and number) as the page reads them."""
    found = Elements(path.read_text("ascii"))
    held = {
        a["data-step"]: json.loads(gzip.decompress(base64.b64decode(t))) for a, t in found.scripts if "data-step" in a
    }
    return next(json.loads(t) for a, t in found.scripts if a.get("id") == "index"), held


def test_hostile_texts_stay_data(tmp_path):
    run = written(tmp_path / "a<" / "script><b>" / "evil<!-- data -->", hostile_rows())  # the path ends a script
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "agent/<!--<script>/reward": 1.0}) + "\n")
    write_page([open_run(run)], out := tmp_path / "page.html", 8)
    harmless = written(tmp_path / "plain", tree_rows(3))
    (harmless / "metrics.jsonl").write_text(json.dumps({"step": 1, "agent/a/reward": 1.0}) + "\n")
    write_page([open_run(harmless)], other := tmp_path / "other.html", 8)
    text = out.read_text("ascii")
    assert Elements(text).tags == Elements(other.read_text("ascii")).tags  # no text became an element
    shown, held = parts(out)
    assert shown["runs"][0]["name"] == "evil<!-- data -->"
    texts = [text.replace("\ud83d", "?") for text in HOSTILE[:12]]  # the writer's form of half a surrogate pair
    assert held["0.31"]["tables"]["step"]["text"] == texts and held["0.31"]["header"]["roles"] == list(ROLES)
    digest = re.search(r"script-src 'sha256-([^']+)'", text)[1]
    scripts = [t for a, t in Elements(text).scripts if not a]
    assert len(scripts) == 1
    assert base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode() == digest


def test_the_script_never_parses_text_as_html():
    script = page.shell()
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "http://",
        "https://",
    ):
        assert name not in script.replace("http://www.w3.org/2000/svg", ""), name


@pytest.mark.parametrize("seed", range(20))
def test_texts_by_chance_come_back_as_they_were(seed, tmp_path):
    draw = random.Random(seed)
    letters = "<>/&\"'`\\!-\x00\n\r\u2028\ud800\udfff\U0001f600scriptSCRIPT= "
    text = "".join(draw.choice(letters) for _ in range(200))
    joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")  # two halves become one
    assert json.loads(page.escaped({"text": text})) == {"text": joined}
    assert not set(page.escaped(text)) & set("<>&")
    assert page.escaped(text).isascii()


def test_steps_that_do_not_fit_are_left_out_evenly_and_named(tmp_path):
    rows = tree_rows(40)
    run = open_run(written(tmp_path, rows, *range(1, 41)))
    one = len(base64.b64encode(data.read_step(run, 1)))
    (held,) = write_page([run], out := tmp_path / "view.html", 10.5 * one / 1e6)
    assert held[0] == 1 and held[-1] == 40 and 8 <= len(held) <= 10
    gaps = [b - a for a, b in itertools.pairwise(held)]
    assert max(gaps) - min(gaps) <= 1
    shown, steps = parts(out)
    assert shown["runs"][0]["steps"] == held and sorted(held + shown["runs"][0]["left_out"]) == list(range(1, 41))
    assert [f"0.{s}" for s in held] == list(steps) and sum(map(len, steps)) > 0
    (held,) = write_page([run], out, 1.2 * one / 1e6)
    assert held == [40]
    with pytest.raises(ConfigError, match=r"--max-mb: step 40 of .* needs 0\.0\d MB"):
        write_page([run], out, 0.5 * one / 1e6)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_which_steps_are_kept():
    steps = list(range(0, 100, 10))
    assert kept_steps(steps, 1) == [90] and kept_steps(steps, 2) == [0, 90] and kept_steps(steps, 4) == [0, 30, 60, 90]
    assert kept_steps(steps, 10) == kept_steps(steps, 99) == steps
    assert all(len(set(kept_steps(steps, n))) == n for n in range(1, 11))


def test_one_step_is_in_memory_at_a_time(tmp_path, monkeypatch):
    """The rows of a step are dead before the next one is read."""
    alive: list = []
    read = rollouts.read_file

    class Weak(dict):
        pass

    def watched(path):
        assert not [ref for ref in alive if ref() is not None]
        return read(path)

    made = data.step_data
    monkeypatch.setattr(rollouts, "read_file", watched)

    def step_data(rollout):
        out = Weak(made(rollout))
        alive.append(weakref.ref(out))
        return out

    monkeypatch.setattr(data, "step_data", step_data)
    write_page([open_run(written(tmp_path, tree_rows(9), 1, 2, 3))], tmp_path / "view.html", 8)
    assert len(alive) == 3


def test_the_command(tmp_path):
    run, other = written(tmp_path / "run", hostile_rows(), 5, 9), written(tmp_path / "other", tree_rows(4))
    done = command("jaxmarl_llm", "view", "run", "other", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout == "run/view.html\n"
    shown, held = parts(run / "view.html")
    assert [r["name"] for r in shown["runs"]] == ["run", "other"] and set(held) == {"0.5", "0.9", "1.31"}
    assert not (other / "view.html").exists()


BAD = {
    "no run": (["none"], "is this the workdir of a run"),
    "truncated": (["cut"], "step-00000031.jsonl.zst: "),
    "newer": (["newer"], "newer than 3"),
    "small": (["run", "--max-mb=0.0001"], "--max-mb: step 31 of run needs"),
    "no size": (["run", "--max-mb=0"], "--max-mb: expected a number above 0"),
    "out": (["run", "--out=none/there.html"], "none/there.html: cannot be written (No such file or directory)"),
    "two texts": (["run", "run", "--text"], "--text: expected one run, got 2"),
    "port": (["run", "--port=80"], "--port belongs to --serve"),
    "large port": (["run", "--serve", "--port=65536"], "--port=65536: cannot listen on 127.0.0.1"),
    "step": (["run", "--step=31"], "--sample and --held-out belong to --text"),
    "both": (["run", "--serve", "--text"], "--text and --serve cannot be given together"),
    "metrics": (["metrics"], "metrics.jsonl:1"),
}


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    file = written(folder / "run", hostile_rows()) / "rollouts" / "step-00000031.jsonl.zst"
    (folder / "cut" / "rollouts").mkdir(parents=True)
    (folder / "cut" / "rollouts" / file.name).write_bytes(file.read_bytes()[:-200])
    newer = written(folder / "newer", hostile_rows()) / "rollouts" / file.name
    raw = zstandard.ZstdDecompressor().decompressobj().decompress(newer.read_bytes())
    newer.write_bytes(zstandard.compress(raw.replace(b'"schema":3', b'"schema":4')))
    (written(folder / "metrics", hostile_rows()) / "metrics.jsonl").write_text("[]\n")
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case, bad, capsys, monkeypatch):
    given, said = BAD[case]
    monkeypatch.chdir(bad)
    with pytest.raises(SystemExit) as stopped:
        arguments.run(view.parser(), view.main, given)
    told = capsys.readouterr()
    assert stopped.value.code == 2 and told.out == ""
    assert told.err.startswith("error: ") and told.err.count("\n") == 1 and said in told.err, told.err
