"""Tokens in Chromium: pieces of text, the switch of tints, the legend, and tints that every reader can tell apart."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from experiments.viewer.browser import found
from experiments.viewer.samples import tree_rows, written
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer.data import open_run
from jaxmarl_llm.viewer.page import write_page
from tests.telemetry.test_rollouts import GOLDEN

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="Chromium was not found: `make browser` installs it"),
]
GAPS = (-0.3, -1e-3, -1e-6, 0.0, 1e-6, 1e-3, 0.1, None)
TOKENS = """[...document.querySelectorAll('#tokens span')].map((s) =>
    [getComputedStyle(s).backgroundColor, getComputedStyle(s).color, s.title, s.classList.contains('most')])"""
# Pieces of a text: characters that are cut across tokens, white space, markup, and a token that the text leaves out.
PIECES = ("the", " ", "", "\U0001f600", "\n", "\t<b>", "", "\u20ac\u202e", "", "\ufffd")
NAMES = ("\\xf0\\x9f", "\\xe2", "<eos>", "\\xc3")
PRESSED = "[...document.querySelectorAll('[data-tint]')].map((b) => [b.dataset.tint, b.ariaPressed, b.disabled])"
# Machado, Oliveira and Fernandes (2009), severity 1: matrices on linear RGB.
BLIND = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Completion 0 was trained and has differences, 1 was not trained, 2 was trained and the file has none.

    Completion 3 has pieces of text, and the others have ids alone.
    """
    rows = tree_rows(1)
    for at, row in enumerate(rows):
        if isinstance(row, rollouts.Completion):
            logprobs = (-0.5,) * len(GAPS)
            row = row._replace(token_ids=tuple(range(len(GAPS))), logprobs=logprobs)
            if row.step == 0:
                row = row._replace(learner_logprobs=tuple(None if g is None else g - 0.5 for g in GAPS))
            if row.step == 1:
                row = row._replace(trained=False, why="not_drawn")
            if row.step == 3:
                ids, logprobs = tuple(range(100, 100 + len(PIECES))), tuple(-0.5 * k for k in range(len(PIECES)))
                row = row._replace(text="".join(PIECES), token_ids=ids, logprobs=logprobs)
                row = row._replace(token_chars=tuple(map(len, PIECES)), token_names=NAMES)
                assert row.pieces == PIECES
            rows[at] = row
    folder = written(tmp_path_factory.mktemp("run"), rows)
    write_page([open_run(folder)], folder / "view.html", 8)
    return folder / "view.html"


def linear(colour):
    """Linear RGB of a colour of CSS."""
    rgb = np.array([float(v) for v in re.findall(r"[\d.]+", colour)[:3]]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def luminance(rgb):
    return float(np.dot([0.2126, 0.7152, 0.0722], np.clip(rgb, 0, 1)))


def lab(rgb):
    """CIELAB of linear sRGB, under D65."""
    xyz = np.clip(rgb, 0, 1) @ np.array(
        [[0.4124564, 0.2126729, 0.0193339], [0.3575761, 0.7151522, 0.119192], [0.1804375, 0.072175, 0.9503041]]
    )
    f = np.cbrt(xyz / np.array([0.95047, 1.0, 1.08883]))  # no colour here is dark enough for the linear part
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_the_switch_tints_tokens_by_the_difference_to_the_sampler(browser, file):
    place = "run=0&step=31&task=0&node=0&sample=0"
    browser.open(file, place)
    assert browser.js(PRESSED) == [["logprob", "true", False], ["gap", "false", False]]
    plain = browser.js(TOKENS)
    assert len({colour for colour, *_ in plain}) == 1 and not any(most for *_, most in plain)
    assert "5 and less" in browser.js("document.querySelector('#tokens + .legend').innerText")
    browser.js("document.querySelector('[data-tint=gap]').click()")
    browser.settle()
    assert browser.js("location.hash") == f"#{place}&tint=gap"
    assert browser.js(PRESSED) == [["logprob", "false", False], ["gap", "true", False]]
    assert browser.js("document.activeElement.dataset.tint") == "gap"
    tinted = browser.js(TOKENS)
    colours = [colour for colour, *_ in tinted]
    assert colours[2] == colours[3] == colours[4] and len(set(colours)) == 6  # 1e-6 and 0 are pale
    assert [most for *_, most in tinted] == [True] + [False] * 7
    assert tinted[0][2].replace("\u2212", "-").endswith("update - sampler -0.3")
    said = browser.js("document.getElementById('tokensum').innerText").replace("\u2212", "-")
    assert "largest 0.3" in said and f"mean {np.mean(GAPS[:-1]):.3g}" in said
    words = browser.js("document.querySelector('#tokens + .legend').innerText").replace("\u2212", "-")
    for part in ("-0.1 and less", "+0.1 and more", "factor of 10", "border: the largest", "unknown"):
        assert part in words
    browser.key("]")
    assert browser.js("location.hash").endswith("sample=1&tint=gap")
    assert browser.js(PRESSED) == [["logprob", "true", False], ["gap", "false", True]]
    assert "not trained" in browser.js("document.getElementById('nogap').innerText")
    browser.key("]")
    assert "The file has no log-probs" in browser.js("document.getElementById('nogap').innerText")
    assert browser.problems == []


def test_a_run_of_the_first_schema_is_opened(browser, tmp_path):
    write_page([open_run(GOLDEN)], page := tmp_path / "view.html", 8)
    rollout = rollouts.read_file(GOLDEN / "rollouts" / "step-00000041.jsonl.zst")
    one = next(row for row in rollout.steps if row.trained)
    task = rollout.nodes[one.node].task
    browser.open(page, f"run=0&step=41&task={task}&node={one.node}&sample={one.step}&tint=gap")
    assert browser.js(PRESSED) == [["logprob", "true", False], ["gap", "false", True]]
    assert "The file has no log-probs" in browser.js("document.getElementById('nogap').innerText")
    ids = browser.js("[...document.querySelectorAll('#tokens span')].map((s) => +s.textContent)")
    assert ids == list(one.token_ids) and "ids are shown" in browser.js("document.getElementById('nopieces').innerText")
    assert browser.problems == []


def test_pieces_of_the_text_are_tinted_and_ids_are_in_the_titles(browser, file):
    browser.open(file, "run=0&step=31&task=0&node=0&sample=3")
    shown = browser.js("[...document.querySelectorAll('#tokens span')].map((s) => [s.textContent, s.className])")
    assert [text for text, _ in shown] == [
        "the", "\u00b7", "\\xf0\\x9f", "\U0001f600", "\u21b5\n",
        "\u21e5<b>", "\\xe2", "\u20ac\\u202e", "<eos>", "\\xc3",
    ]  # fmt: skip
    assert [name == "name" for _, name in shown] == [not piece.strip("\ufffd") for piece in PIECES]
    tokens = browser.js(TOKENS)
    for k, (_, _, title, _) in enumerate(tokens):
        assert f"id {100 + k}," in title and title.startswith(f"token {k}: ")
    assert len({colour for colour, *_ in tokens}) == len(PIECES)
    assert '"\\n"' in tokens[4][2] and "\\xe2" in tokens[6][2]
    legend = browser.js("document.querySelector('#tokens + .legend').innerText")
    assert "\u00b7 space" in legend and "bytes of a character" in legend
    assert browser.js("document.getElementById('nopieces')") is None
    assert browser.js("document.querySelectorAll('#tokens b').length") == 0
    browser.key("[")
    assert [
        text for text, *_ in browser.js("[...document.querySelectorAll('#tokens span')].map((s) => [s.textContent])")
    ] == [str(k) for k in range(len(GAPS))]
    assert "ids are shown" in browser.js("document.getElementById('nopieces').innerText")
    assert "space" not in browser.js("document.querySelector('#tokens + .legend').innerText")
    assert browser.problems == []


def test_long_completions_show_more_pieces_on_demand(browser, tmp_path):
    rows = tree_rows(1)
    words = tuple(f"w{k} " for k in range(900))
    for at, row in enumerate(rows):
        if isinstance(row, rollouts.Completion):
            rows[at] = row._replace(
                text="".join(words), token_ids=(7,) * 900, logprobs=(-1.0,) * 900, token_chars=tuple(map(len, words))
            )
    write_page([open_run(written(tmp_path, rows))], tmp_path / "view.html", 8)
    browser.open(tmp_path / "view.html", "run=0&step=31&task=0&node=0&sample=0")
    texts = "[...document.querySelectorAll('#tokens span')].map((s) => s.textContent.replace('\u00b7', ' '))"
    assert browser.js(texts) == list(words[:400])
    for _ in range(2):
        browser.js("document.querySelector('#tokens button').click()")
    assert browser.js(texts) == list(words) and browser.js("document.querySelector('#tokens button')") is None


@pytest.mark.parametrize("dark", [False, True])
def test_tints_can_be_told_apart_and_read(dark, browser, file):
    browser.open(file, "run=0&step=31&task=0&node=0&sample=0&tint=gap")
    if dark:
        browser.js("document.getElementById('theme').click()")
        browser.settle()
    assert browser.js("document.documentElement.classList.contains('dark')") == dark
    tokens = browser.js(TOKENS)
    for background, ink, *_ in tokens:
        light, deep = sorted((luminance(linear(background)), luminance(linear(ink))), reverse=True)
        assert (light + 0.05) / (deep + 0.05) >= 4.5  # WCAG AA for text
    lower, middle, higher = (linear(tokens[i][0]) for i in (0, 3, 6))
    for kind, matrix in BLIND.items():
        seen = [lab(np.asarray(matrix) @ colour) for colour in (lower, middle, higher)]
        for a, b in itertools.combinations(seen, 2):
            assert np.linalg.norm(a - b) > 20, kind  # 2.3 is just noticeable
