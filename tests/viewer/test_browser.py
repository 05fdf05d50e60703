"""The page in Chromium: every completion once, sums of advantages, places, keys, width of a phone, hostile texts."""

from __future__ import annotations

import json
import threading
from xml.etree import ElementTree

import pytest

from experiments.viewer.browser import found
from experiments.viewer.samples import HOSTILE, aligned_rows, hostile_rows, tree_rows, written
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer.data import open_run
from jaxmarl_llm.viewer.page import write_page
from jaxmarl_llm.viewer.serve import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="Chromium was not found: `make browser` installs it"),
]
BARS = "[...document.querySelectorAll('.treebox [data-step]')].map((g) => [+g.dataset.step, g.dataset.advantage])"
WIDE = "document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
SHOWN = "document.querySelector('main').innerText"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two recorded steps: hostile texts, and a tree of three tasks with metrics."""
    run = written(tmp_path_factory.mktemp("run"), hostile_rows(), 5)
    written(run, tree_rows(60, tasks=3), 9)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "agent/a/reward": s / 9}) + "\n" for s in range(1, 10))
    )
    return run


@pytest.fixture(scope="module")
def file(run):
    write_page([open_run(run), open_run(run)], run / "view.html", 8)
    return run / "view.html"


@pytest.fixture(autouse=True)
def without_problems(browser):
    browser.problems.clear()
    browser.resize(1400, 900)
    yield
    assert browser.problems == []


@pytest.mark.parametrize("number", [5, 9])
def test_every_completion_is_drawn_once_and_advantages_are_those_of_the_file(number, browser, file, run):
    rollout = rollouts.read_file(run / "rollouts" / f"step-{number:08}.jsonl.zst")
    browser.resize(2400, 6000)
    drawn = []
    for task in rollout.tasks:
        browser.open(file, f"run=0&step={number}&task={task.task}")
        drawn += browser.js(BARS)
    assert sorted(step for step, _ in drawn) == [row.step for row in rollout.steps]
    known = [row.advantage for row in rollout.steps if row.advantage is not None]
    assert sum(float(a) for _, a in drawn if a) == pytest.approx(sum(known), abs=1e-9)
    assert sum(not a for _, a in drawn) == len(rollout.steps) - len(known)


def test_a_link_opens_its_completion_and_keys_lead_on(browser, file):
    browser.open(file, "run=0&step=9&task=1&node=1&sample=5")
    assert browser.js("document.querySelector('tr.here').dataset.row") == "5"
    assert browser.js("document.getElementById('wrote').textContent") == "answer 5"
    assert browser.js("document.getElementById('saw').textContent") == "prompt 1 of turn 0"
    where = "location.hash"
    browser.key("]")
    assert browser.js(where) == "#run=0&step=9&task=1&node=1&sample=6"
    browser.key("[")
    browser.key("Escape")
    assert browser.js(where) == "#run=0&step=9&task=1&node=1"
    browser.js("document.querySelector('.treebox').focus()")
    browser.key("ArrowRight")
    child = browser.js("new URLSearchParams(location.hash.slice(1)).get('node')")
    assert child != "1" and browser.js("document.getElementById('status').textContent").startswith(
        "</script><b>, turn 1"
    )
    browser.key("ArrowLeft")
    assert browser.js(where) == "#run=0&step=9&task=1&node=1"
    browser.key("Enter")
    assert browser.js(where) == "#run=0&step=9&task=1&node=1&sample=4"
    for _ in range(3):
        browser.key("Escape")
    assert browser.js(where) == "#run=0&step=9"
    browser.key("ArrowDown")
    browser.key("ArrowDown")
    assert browser.js("document.activeElement.dataset.task") == "1"
    browser.key("Enter")
    assert browser.js(where) == "#run=0&step=9&task=1"


def test_the_arithmetic_of_an_advantage(browser, file, run):
    rollout = rollouts.read_file(run / "rollouts" / "step-00000009.jsonl.zst")
    row = next(s for s in rollout.steps if s.step == 5)
    mean = next(g.mean for g in rollout.groups if g.group == row.group)
    browser.open(file, "run=0&step=9&task=1&node=1&sample=5")
    text = browser.js("document.getElementById('sum').innerText").replace("\u2212", "-")
    numbers = [float(word) for word in text.replace("=", " ").split() if word.lstrip("+-").replace(".", "").isdigit()]
    assert numbers[:3] == pytest.approx([row.returns, mean, row.returns - mean], rel=1e-3)
    assert "The advantage is this difference." in text and numbers[3] == pytest.approx(row.advantage, rel=1e-3)


PLACES = (
    "",
    "run=0&step=5",
    "run=0&step=5&task=0",
    "run=0&step=5&task=0&node=0&sample=2",
    "run=0&step=5&task=1&sample=11",
    "run=0&view=memory",
    "view=compare&run=0&step=5&task=0&run2=1&step2=9&task2=1",
    "view=search&q=script",
)


@pytest.mark.parametrize("place", PLACES)
def test_every_view_on_a_phone_and_with_hostile_texts(place, browser, file):
    browser.resize(390, 800)
    browser.open(file, place)
    assert browser.js(WIDE), browser.js("[document.documentElement.scrollWidth, innerWidth]")
    assert len(browser.js(SHOWN)) > 40 and "broken" not in browser.js("document.title")
    assert browser.js("document.querySelectorAll('script:not([data-step]):not([id])').length") == 1
    assert browser.js("document.images.length") == 0
    browser.js("document.getElementById('theme').click()")
    browser.settle()
    assert browser.js("document.documentElement.classList.contains('dark')") and len(browser.js(SHOWN)) > 40


def test_pairs_of_seats_that_act_at_once_are_a_square_of_cells(browser, file):
    browser.open(file, "run=0&step=5&task=0")
    assert browser.js("document.querySelectorAll('[data-pick]').length") == 16


def test_seats_whose_completions_are_paired_are_tied_across_lanes(browser, tmp_path):
    write_page([open_run(written(tmp_path, aligned_rows()))], tmp_path / "aligned.html", 8)
    browser.open(tmp_path / "aligned.html", "run=0&step=31&task=0")
    ties = browser.js("[...document.querySelectorAll('.edges title')].map((t) => t.textContent)")
    assert ties == [f"joint action {k}: reward {k}" for k in range(4)]
    assert browser.js("document.querySelectorAll('[data-pick]').length") == 0


def test_a_table_is_sorted_and_search_finds_texts(browser, file):
    browser.open(file, "run=0&step=9")
    browser.js("document.querySelector('th button[data-key=reward]').click()")
    order = browser.js("[...document.querySelectorAll('#tasks tbody tr')].map((r) => +r.children[2].innerText)")
    assert order == sorted(order, reverse=True) and len(order) == 3
    browser.js("document.getElementById('query').value = 'answer 77'")
    browser.js("document.getElementById('find').requestSubmit()")
    browser.wait("document.querySelector('main a')")
    browser.wait("document.getElementById('found').innerText.startsWith('2 places in 4')")  # the run is there twice
    browser.js("document.querySelector('main a').click()")
    browser.wait("document.getElementById('wrote') && document.getElementById('wrote').textContent === 'answer 77'")


def test_a_place_that_is_not_there_is_one_line(browser, file):
    for place, said in (("run=7&step=1", "There is no step 1 of run 7."), ("run=0&step=5&task=9", "has no task 9")):
        browser.open(file, place)
        assert said in browser.js(SHOWN)


def test_a_tree_as_svg_has_every_completion(browser, file):
    browser.open(file, "run=0&step=5&task=0")
    browser.js("URL.createObjectURL = (blob) => { window.kept = blob; return '#'; }")
    browser.js("document.getElementById('svg').click()")
    text = browser.js("window.kept.text()")
    root = ElementTree.fromstring(text)
    assert sorted(int(g.get("data-step")) for g in root.iter() if g.get("data-step")) == list(range(8))
    assert HOSTILE[0][:9] in "".join(root.itertext())


def test_a_large_tree_is_drawn_in_part_and_scrolls(browser, tmp_path):
    write_page([open_run(written(tmp_path, tree_rows(10_000)))], tmp_path / "large.html", 32)
    browser.open(tmp_path / "large.html", "run=0&step=31&task=0")
    assert 4 <= len(browser.js(BARS)) < 800
    first = browser.js("document.querySelector('.treebox [data-step]').dataset.step")
    browser.js("document.querySelector('.treebox').scrollTo(0, 400000)")
    browser.settle()
    assert 4 <= len(browser.js(BARS)) < 800
    assert browser.js("document.querySelector('.treebox [data-step]').dataset.step") != first


def test_a_served_page_shows_steps_that_are_added(browser, tmp_path):
    run = written(tmp_path, tree_rows(5), 3)
    with Server([open_run(run)]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            browser.open(server.url, "run=0&step=3&task=0")
            assert len(browser.js(BARS)) > 4
            browser.to("")
            written(run, tree_rows(5), 4)
            browser.wait("document.getElementById('newest0').innerText.endsWith('4')")
            browser.to("run=0&step=4")
            browser.wait("document.querySelector('#tasks')")
        finally:
            browser.call("Page.navigate", url="about:blank")
            server.shutdown()
            thread.join(10)
