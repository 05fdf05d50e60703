"""What a role saw, in Chromium: messages with their speakers, what the role did not see, and entries of its memory."""

from __future__ import annotations

import pytest

from experiments.viewer.browser import found
from experiments.viewer.samples import HOSTILE, completion, written
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer.data import open_run
from jaxmarl_llm.viewer.page import write_page

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="Chromium was not found: `make browser` installs it"),
]
ROLES = ("planner", "critic")
PAID = {"pay": (1.0, 1.0), "form": (0.0, 0.0)}
LAST = "run=0&step=31&task=0&node=3&sample=4"
SAW = """[...document.querySelectorAll('#saw li')].map((li) =>
    [li.dataset.speaker, li.querySelector('.who').innerText, li.querySelector('pre').textContent])"""
QUOTED = "[...document.querySelectorAll('#saw b')].map((b) => [b.textContent, b.title])"
BEFORE = """[...document.querySelectorAll('#before li')].map((li) => [+li.dataset.sample, li.className,
    li.querySelector('.who').innerText, getComputedStyle(li.querySelector('pre')).color])"""
COLOUR = "getComputedStyle(document.querySelector('%s')).%s"


SAY = ("user", "", "say no. nothing")  # a word that begins with a quotation is none


def rows():
    """Turns: a planner, a critic and a planner at once, and a planner who is not told what the first planner wrote."""
    nodes = [
        (0, "planner", -1, (("system", "", "Plan."),), 0, ()),
        (1, "critic", 0, (("user", "", "Plan: go left"),), 0, ()),
        (1, "planner", 0, (("system", "", "Plan."), ("assistant", "planner", "go left")), 0, ()),
        (2, "planner", 1, (("tool", "", "stay: 7 no, 17 no"), ("user", "", HOSTILE[0]), SAY), 5, (3, 0)),
    ]
    out = [rollouts.Task(0, 70)]
    for n, (turn, role, parent, messages, cut, unseen) in enumerate(nodes):
        out.append(
            rollouts.Node(n, 0, turn, role, "m", parent, (1, 2), "whole prompt", (3,) * (n == 3), (0.5,) * (n == 3))
        )
        out[-1] = out[-1]._replace(messages=messages, cut_tokens=cut, unseen=unseen)
        out.append(rollouts.Group(n, 0, role, turn, 1, 1.0, 0.0, 1.0, 1.0, True))
    texts = ("go left", "no", "", "stay", "on")  # of completions 1 and 2, the critic's, one is not in the line of play
    out += [completion(s, n, text, 1.0, 1.0) for s, (n, text) in enumerate(zip((0, 1, 1, 2, 3), texts))]
    moves = [(0, -1, (0, -1)), (1, 0, (3, 1)), (2, 1, (4, -1))]
    out += [rollouts.Transition(j, 0, j, parent, steps, PAID, j == 2, True) for j, parent, steps in moves]
    out += [
        rollouts.MemoryEvent("read", "planner", 3, 3, 0.5, "an old entry", 1.0, 0.2),
        rollouts.MemoryEvent("written", "planner", 1, -1, None, "a new text", 1.0, 0.7, 4),
        rollouts.MemoryEvent("refreshed", "planner", 2, -1, None, "a better text", 1.0, 0.7, 4),
        rollouts.MemoryEvent("written", "planner", 4, -1, None, "of another", 1.0, 0.7),
    ]
    return out


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = written(tmp_path_factory.mktemp("run"), rows(), roles=ROLES)
    write_page([open_run(folder)], folder / "view.html", 8)
    return folder / "view.html"


def test_messages_stand_with_their_speakers_in_the_colour_of_their_role(browser, file):
    browser.open(file, "run=0&step=31&task=0&node=2&sample=3")
    assert browser.js(SAW) == [["system", "system", "Plan."], ["planner", "planner\nassistant", "go left"]]
    mark = lambda place: browser.js(COLOUR % (place, "borderLeftColor"))
    own = mark("#saw li:nth-child(2) .who")
    assert own == mark("#before .who") != mark("#saw .who")
    assert browser.js("document.getElementById('cut')") is None
    browser.open(file, "run=0&step=31&task=0&node=1&sample=1")
    assert browser.js(QUOTED) == [["go left", "planner wrote this: completion 0"]]
    assert browser.js(COLOUR % ("#saw b", "borderBottomColor")) == own
    assert browser.problems == []


def test_what_a_role_did_not_see_is_grey_and_named(browser, file):
    browser.open(file, LAST)
    shown = browser.js(BEFORE)
    assert [(step, kind) for step, kind, *_ in shown] == [(0, "notseen"), (3, "notseen"), (1, "")]
    assert [who.split("\n")[1:] for *_, who, _ in shown] == [["not seen by planner"]] * 2 + [[]]
    assert shown[0][3] == shown[1][3] != shown[2][3]
    sizes = browser.js("[...document.querySelectorAll('#before pre')].map((p) => p.getBoundingClientRect().width)")
    assert min(sizes) > 100  # grey, and not hidden
    assert "2 of 3 not seen by planner" in browser.js("document.querySelector('main').innerText")
    assert browser.js(QUOTED) == [["no", "critic wrote this: completion 1"]] * 2
    assert browser.js("document.querySelector('#saw pre b').previousSibling.textContent") == "stay: 7 no, 17 "
    assert browser.js("document.querySelectorAll('#saw pre b')[1].previousSibling.textContent") == "say "
    assert "5 tokens in the middle were cut" in browser.js("document.getElementById('cut').innerText")
    assert browser.js("document.querySelectorAll('#saw script').length") == 0
    assert browser.js(SAW)[1][2] == HOSTILE[0]
    assert browser.problems == []


def test_entries_that_were_read_and_that_a_completion_wrote(browser, file):
    browser.open(file, LAST)
    shown = """[...document.querySelectorAll('.entry')].map((e) => [e.dataset.event, e.querySelector('pre').textContent,
        e.querySelector('.small').innerText])"""
    read, new, refreshed = browser.js(shown)
    assert read[:2] == ["read", "an old entry"] and "similarity 0.5" in read[2]
    assert new[:2] == ["written", "a new text"] and "slot 1 \u00b7 a new entry" in new[2]
    assert refreshed[:2] == ["refreshed", "a better text"] and "slot 2 \u00b7 refreshed" in refreshed[2]
    browser.open(file, "run=0&step=31&task=0&node=1&sample=1")
    assert browser.js(shown) == []
    browser.open(file, "run=0&view=memory")
    shapes = """[...document.querySelectorAll('.scroll svg g')].map((g) => [g.querySelector('title').textContent,
        g.firstChild.tagName, g.firstChild.hasAttribute('fill')])"""
    marks = browser.js(shapes)
    assert len(marks) == 4
    found = {title.split(", ")[2].split(":")[0]: shape for title, *shape in marks}
    assert found == {"read": ["circle", True], "written": ["rect", True], "refreshed": ["path", True]}
    assert browser.problems == []


def test_without_messages_the_prompt_is_one_text(browser, tmp_path):
    plain = [row._replace(messages=(), unseen=()) if isinstance(row, rollouts.Node) else row for row in rows()]
    folder = written(tmp_path, plain, roles=ROLES)
    write_page([open_run(folder)], folder / "view.html", 8)
    browser.open(folder / "view.html", LAST)
    assert browser.js("[document.getElementById('saw').tagName, document.getElementById('saw').textContent]") == [
        "PRE",
        "whole prompt",
    ]
    assert "knows of it only what its prompt shows" in browser.js("document.querySelector('main').innerText")
    assert browser.js("document.querySelectorAll('.notseen').length") == 0
    assert browser.problems == []
