"""Colours in Chromium that colour-blind readers have to tell apart: advantages, roles, and trained or not trained."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from experiments.viewer.browser import found
from experiments.viewer.samples import completion, written
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer.data import open_run
from jaxmarl_llm.viewer.page import write_page
from tests.viewer.test_tokens import BLIND, lab, linear, luminance

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="Chromium was not found: `make browser` installs it"),
]
ROLES = tuple(f"role {k}" for k in range(8))  # as many as there are colours
BARS = """Object.fromEntries([...document.querySelectorAll('.treebox [data-step]')].map((g) =>
    [g.dataset.step, ['fill', 'stroke'].map((name) => getComputedStyle(g.querySelectorAll('rect')[1])[name])]))"""
LANES = "[...document.querySelectorAll('#saw .who')].map((who) => getComputedStyle(who).borderLeftColor)"
GROUND = "getComputedStyle(document.querySelector('.treebox')).backgroundColor"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A prompt with messages of eight roles. Completions are below, at and above the mean; 3 and 4 are not trained."""
    talk = tuple(("user", role, "hello") for role in ROLES)
    rows = [rollouts.Task(0, 0), rollouts.Node(0, 0, 0, ROLES[0], "m", -1, (1,), "p", (), (), talk)]
    rows.append(rollouts.Group(0, 0, ROLES[0], 0, 5, 1.0, 0.8, 0.0, 2.0, True))
    for s, value in enumerate((0.0, 1.0, 2.0, 0.0, 2.0)):
        trained = s < 3
        rows.append(completion(s, 0, f"t{s}", value, 1.0, trained=trained, why="trained" if trained else "not_drawn"))
        paid = {"pay": (value,) * 8, "form": (0.0,) * 8}
        rows.append(rollouts.Transition(s, 0, 0, -1, (s,), paid, True, True))
    folder = written(tmp_path_factory.mktemp("run"), rows, roles=ROLES)
    write_page([open_run(folder)], folder / "view.html", 8)
    return folder / "view.html"


def opened(browser, file, dark):
    browser.open(file, "run=0&step=31&task=0&node=0&sample=1")
    if browser.js("document.documentElement.classList.contains('dark')") != dark:
        browser.js("document.getElementById('theme').click()")
        browser.settle()


def nearest(colours):
    """The smallest distance of two colours in CIELAB, as readers of each kind see them. 2.3 is just noticeable."""
    distances = []
    for matrix in BLIND.values():
        seen = [lab(np.asarray(matrix) @ linear(colour)) for colour in colours]
        distances += [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
    return min(distances)


@pytest.mark.parametrize("dark", [False, True])
def test_advantages_below_at_and_above_zero(dark, browser, file):
    opened(browser, file, dark)
    bars = browser.js(BARS)
    assert nearest([bars[s][0] for s in "012"]) > 20
    assert browser.problems == []


@pytest.mark.parametrize("dark", [False, True])
def test_trained_and_not_trained(dark, browser, file):
    """A hollow bar has the colour of its advantage as a line, and the ground of its card inside."""
    opened(browser, file, dark)
    bars = browser.js(BARS)
    for trained, other in ("03", "24"):
        assert bars[trained][1] == bars[other][1] and nearest([bars[trained][0], bars[other][0]]) > 20
    assert bars["3"][0] == bars["4"][0]
    chips = browser.js("[...document.querySelectorAll('.chip')].map((c) => [c.innerText, c.className])")
    assert {text for text, kind in chips if kind == "chip yes"} == {"trained"}  # and words say it
    assert {text for text, kind in chips if kind == "chip no"} == {"not drawn"}


@pytest.mark.parametrize("dark", [False, True])
def test_roles(dark, browser, file):
    opened(browser, file, dark)
    lanes = browser.js(LANES)
    assert len(set(lanes)) == 8 and nearest(lanes) > (25 if dark else 15)
    ground = luminance(linear(browser.js(GROUND)))
    for colour in lanes:
        light, deep = sorted((luminance(linear(colour)), ground), reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= (4 if dark else 2.1)  # a mark beside a name in ink
    assert all(re.fullmatch(r"rgb\(\d+, \d+, \d+\)", colour) for colour in lanes)
