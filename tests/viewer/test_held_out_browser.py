"""Held-out tasks in Chromium: their tree and transcript, and the pairs that the comparison begins with."""

from __future__ import annotations

import pytest

from experiments.viewer.browser import found
from jaxmarl_llm.viewer.data import open_run, open_runs
from jaxmarl_llm.viewer.page import write_page
from tests.viewer.test_browser import BARS, SHOWN, WIDE
from tests.viewer.test_held_out import run_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="Chromium was not found: `make browser` installs it"),
]
PAIR = """[...document.querySelectorAll('.pair > div')].map((side) =>
    [...side.querySelectorAll('select')].map((s) => s.selectedOptions[0].textContent).join(', '))"""
TREES = """[...document.querySelectorAll('.pair .treebox')].map((box) =>
    [...box.querySelectorAll('[data-node] > text:last-of-type')].map((t) => t.textContent).join(' | '))"""
SAME = "(document.getElementById('same') || {innerText: ''}).innerText"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of one run, and of two runs whose first held-out tasks differ."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = run_of(folder / "one", "aa", "bb"), run_of(folder / "two", "cc", "bb", "aa", evaluations=(0, 70))
    three = run_of(folder / "three", "dd", steps=(), evaluations=(5,))
    for name, runs in {"one": [one], "two": [one, two], "three": [one, three]}.items():
        write_page([open_run(run) for run in runs], folder / f"{name}.html", 8)
    four = run_of(folder / "four", "aa", "bb")
    run_of(four / "evaluate", "aa", steps=(), evaluations=(100,))
    write_page(open_runs([str(four)]), folder / "four.html", 8)
    return lambda name: folder / f"{name}.html"


@pytest.fixture(autouse=True)
def without_problems(browser):
    browser.problems.clear()
    browser.resize(1400, 900)
    yield
    assert browser.problems == []


def test_a_held_out_task_has_its_tree_and_its_transcript(browser, pages):
    browser.open(pages("one"), "run=0&step=eval-50")
    assert "Evaluation after step 50" in browser.js(SHOWN) and "2 of 4 held-out tasks" in browser.js(SHOWN)
    assert "Variance of groups" not in browser.js(SHOWN)
    browser.key("ArrowDown")
    browser.key("ArrowDown")
    browser.key("Enter")
    assert browser.js("location.hash") == "#run=0&step=eval-50&task=1"
    assert browser.js(BARS) == [[2, ""], [3, ""]] and "held-out task no. 1" in browser.js(SHOWN)
    assert (
        browser.js("document.querySelectorAll('.treebox [data-step] path').length") == 0
    )  # no cross: returns are known
    browser.to("run=0&step=eval-50&task=1&node=3&sample=3")
    assert browser.js("document.getElementById('wrote').textContent") == "after 50 3"
    assert browser.js("document.getElementById('sum').innerText").startswith("return 2")
    assert "trains nobody" in browser.js("document.getElementById('sum').innerText")
    assert "after 50 2" in browser.js("document.querySelector('.turns').innerText")
    assert "evaluation after step 50" in browser.js("document.getElementById('crumbs').innerText")


def test_keys_and_buttons_go_from_one_evaluation_to_the_next(browser, pages):
    browser.open(pages("one"), "run=0&step=eval-0")
    browser.key("ArrowRight")
    assert browser.js("location.hash") == "#run=0&step=eval-50"
    browser.js("[...document.querySelectorAll('button')].find((b) => b.innerText.includes('newest')).click()")
    browser.settle()
    assert browser.js("location.hash").startswith("#run=0&step=eval-100")
    browser.key("ArrowRight")
    assert browser.js("location.hash").startswith("#run=0&step=eval-100")
    browser.to("")
    assert browser.js("[...document.querySelectorAll('a[data-to^=eval]')].map((a) => a.innerText)") == [
        "100", "50", "0"
    ]  # fmt: skip
    browser.js("document.querySelector('a[data-to=eval-50]').click()")
    browser.settle()
    assert browser.js("location.hash") == "#run=0&step=eval-50"


def test_the_first_pair_is_a_held_out_task_at_the_first_and_the_newest_evaluation(browser, pages):
    browser.open(pages("one"), "")
    browser.js("document.getElementById('compare0').click()")
    browser.wait("document.querySelectorAll('.pair .treebox [data-step]').length === 4")
    assert browser.js(SAME) == "Same held-out task no. 0"
    assert browser.js(PAIR) == [
        "one, evaluation after step 0, task 0 (no. 0)",
        "one, evaluation after step 100, task 0 (no. 0)",
    ]
    assert browser.js(TREES) == ["after 0 0 | after 0 1", "after 100 0 | after 100 1"]
    pick = "(() => { const s = document.querySelectorAll('.pair > div:last-child select')[%d]; s.selectedIndex = %d; "
    browser.js(pick % (1, 3) + "s.dispatchEvent(new Event('change')); })()")
    browser.wait("location.hash.includes('step2=eval-50')")
    browser.settle()
    assert browser.js(SAME) == "Same held-out task no. 0"
    browser.js(pick % (1, 0) + "s.dispatchEvent(new Event('change')); })()")
    browser.wait("location.hash.includes('step2=1&')")
    browser.settle()
    assert "Different tasks" in browser.js(SHOWN)  # task no. 0 of training has another content


def test_what_evaluate_wrote_of_a_run_is_no_other_run_to_compare_with(browser, pages):
    browser.open(pages("four"), "view=compare&run=0")
    assert browser.js(PAIR) == [
        "four, evaluation after step 0, task 0 (no. 0)",
        "four, evaluation after step 100, task 0 (no. 0)",
    ]
    browser.open(pages("four"), "view=compare&run=0&run2=1")
    assert browser.js(PAIR)[1] == "four/evaluate, evaluation after step 100, task 0 (no. 0)"


def test_two_runs_begin_with_a_task_that_both_have(browser, pages):
    browser.open(pages("two"), "view=compare&run=0")
    assert browser.js(PAIR) == [
        "one, evaluation after step 100, task 0 (no. 0)",
        "two, evaluation after step 70, task 2 (no. 2)",
    ]
    assert browser.js(SAME) == "Same held-out task no. 0"  # of one content, wherever the runs have it
    browser.open(pages("two"), "view=compare&run=0&step=eval-0&task=1&run2=1&step2=eval-0")
    assert browser.js(PAIR)[1] == "two, evaluation after step 0, task 1 (no. 1)"
    browser.open(pages("three"), "view=compare&run=0")
    assert "Different tasks" in browser.js(SHOWN) and browser.js(PAIR)[1].startswith("three, evaluation after step 5")


@pytest.mark.parametrize("place", ["run=0&step=eval-50", "run=0&step=eval-50&task=0&node=0&sample=0", "view=compare"])
def test_held_out_views_on_a_phone(place, browser, pages):
    browser.resize(390, 800)
    browser.open(pages("two"), place)
    assert browser.js(WIDE) and len(browser.js(SHOWN)) > 40


def test_search_finds_what_an_evaluation_wrote(browser, pages):
    browser.open(pages("one"), "view=search&q=after 50 3")
    browser.wait("document.getElementById('found').innerText.startsWith('1 place in 5')")
    browser.js("document.querySelector('main a').click()")
    browser.wait("document.getElementById('wrote') && document.getElementById('wrote').textContent === 'after 50 3'")
