"""A range of steps in Chromium: dragged, made with keys, opened by a link, cleared; and what it leaves of the page."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.viewer.browser import found
from experiments.viewer.samples import tree_rows, written
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer.data import open_run, task_rows
from jaxmarl_llm.viewer.page import write_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="Chromium was not found: `make browser` installs it"),
]
STEPS = (10, 20, 30, 40, 50)
TASKS = "[...document.querySelectorAll('#tasks0 tbody tr')].map((r) => [+r.dataset.of, +r.dataset.task])"
LINKS = "[...document.querySelectorAll('.steps a')].map((a) => +a.innerText)"
WHERE = "location.hash"
CURVE = "document.querySelector('svg[data-panel=\"0.0\"]')"


@pytest.fixture(autouse=True)
def without_problems(browser):
    browser.problems.clear()
    browser.resize(1400, 900)
    yield
    assert browser.problems == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Five recorded steps with trees of their own, and metrics of 60 steps whose value is the number of the step."""
    folder = tmp_path_factory.mktemp("run")
    for step in STEPS:
        written(folder, tree_rows(step, tasks=2), step)
    rows = [{"step": s, "agent/a/reward": float(s)} for s in range(1, 61)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def file(run):
    write_page([open_run(run)], run / "view.html", 8)
    return run / "view.html"


def pixel(browser, step):
    """Place of a step in the first curve, whose axis has steps 1 to 60, on the page."""
    box = browser.js(f"(({{x, y, width, height}}) => [x, y, width, height])({CURVE}.getBoundingClientRect())")
    left, right, wide = 42, 8, 360  # of the curve's own units
    return box[0] + (left + (step - 1) / 59 * (wide - left - right)) * box[2] / wide, box[1] + box[3] / 2


def legend(browser):
    return browser.js("document.querySelector('.cell .legend').innerText").replace("\u2212", "-")


def test_a_link_with_a_range_restricts_steps_tasks_and_figures(browser, file, run):
    browser.open(file, "from=15&to=40")
    browser.wait("document.getElementById('tasks0')")
    assert browser.js(LINKS) == [40, 30, 20]
    assert browser.js(TASKS) == [[step, task] for step in (20, 30, 40) for task in (0, 1)]
    assert "mean 27.5 (15 to 40)" in legend(browser)
    rows = [
        row
        for step in (20, 30, 40)
        for row in task_rows(rollouts.read_file(run / "rollouts" / f"step-{step:08}.jsonl.zst"))
    ]
    foot = browser.js("[...document.querySelectorAll('#tasks0 tfoot td')].map((c) => c.innerText)")
    assert foot[1] == "6 tasks" and foot[-1] == str(sum(row["nodes"] for row in rows))
    assert float(foot[3].removeprefix("mean ")) == pytest.approx(np.mean([row["reward"] for row in rows]), rel=5e-3)
    trained, every = (sum(row[key] for row in rows) for key in ("trained", "completions"))
    assert foot[8] == f"{trained} of {every}"
    browser.js("document.querySelector('th button[data-key=nodes]').click()")
    nodes = browser.js("[...document.querySelectorAll('#tasks0 tbody tr')].map((r) => +r.lastChild.innerText)")
    assert nodes == sorted((row["nodes"] for row in rows), reverse=True)
    browser.js("document.querySelector('#tasks0 tbody tr').click()")
    browser.wait("location.hash.startsWith('#run=0&step=40&task=')")


@pytest.mark.parametrize("place", ["from=x&to=30", "from=20", "to=-3&from=1", "from=1e9&to=2"])
def test_a_range_that_is_none_is_left_out(place, browser, file):
    browser.open(file, place)
    assert browser.js(LINKS) == list(reversed(STEPS)) and browser.js("document.getElementById('chosen')") is None
    assert "60" in legend(browser) and "mean" not in legend(browser)


def test_a_range_is_dragged_over_a_curve_and_cleared_by_escape(browser, file):
    browser.open(file)
    everything = (browser.js(LINKS), legend(browser))
    assert everything[0] == list(reversed(STEPS)) and browser.js("document.getElementById('tasks0')") is None
    for start, end in ((12, 33), (33, 12)):  # to the right, and to the left
        browser.drag(pixel(browser, start), pixel(browser, end))
        browser.wait("document.getElementById('tasks0')")
        assert browser.js(WHERE) == "#from=12&to=33" and browser.js(LINKS) == [30, 20]
        assert browser.js(TASKS) == [[20, 0], [20, 1], [30, 0], [30, 1]]
        assert "mean 22.5 (12 to 33)" in legend(browser)
        browser.key("Escape")
        browser.wait("!document.getElementById('tasks0')")
        assert browser.js(WHERE) in ("", "#") and (browser.js(LINKS), legend(browser)) == everything
    browser.drag(pixel(browser, 2), pixel(browser, 8))
    browser.wait("document.querySelector('main').innerText.includes('No step of this range is recorded.')")
    assert browser.js(LINKS) == []
    browser.drag(pixel(browser, 29), pixel(browser, 29))
    browser.wait("location.hash === '#run=0&step=30'")  # a click opens a step


def test_a_range_is_made_with_keys(browser, file):
    browser.open(file)
    browser.js(f"{CURVE}.focus()")
    browser.key("ArrowLeft")  # from the newest step to the one before
    assert browser.js(WHERE) in ("", "#")
    for hash, links in (("#from=30&to=40", [40, 30]), ("#from=20&to=40", [40, 30, 20])):
        browser.key("ArrowLeft", shift=True)
        browser.wait("document.getElementById('tasks0')")
        assert browser.js(WHERE) == hash and browser.js(LINKS) == links
        assert browser.js(f"document.activeElement === {CURVE}")
    browser.key("ArrowRight", shift=True)
    assert browser.js(WHERE) == "#from=30&to=40"
    assert browser.js("document.getElementById('status').textContent") == "Steps 30 to 40"
    browser.key("Escape")
    assert browser.js(WHERE) in ("", "#") and browser.js(LINKS) == list(reversed(STEPS))
    browser.js(f"{CURVE}.focus()")
    browser.key("Enter")
    browser.wait("location.hash === '#run=0&step=30'")


def test_a_range_on_a_phone_and_in_the_dark(browser, file):
    browser.resize(390, 800)
    browser.open(file, "from=40&to=15")  # the order of the two does not matter
    browser.wait("document.getElementById('tasks0')")
    browser.js("document.getElementById('theme').click()")
    browser.wait("document.getElementById('tasks0')")
    assert browser.js(LINKS) == [40, 30, 20]
    assert browser.js("document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth")
