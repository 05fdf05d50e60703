"""Recorded figures of docs/results/pods.json: a regression of what programs do beside their work is a red test."""

import json
from pathlib import Path

import pytest

from experiments.tpu import report
from jaxmarl_llm.costs import hlo
from jaxmarl_llm.costs.chips import CHIPS

DOCS = Path(__file__).parents[2] / "docs"
ROWS = json.loads((DOCS / "results/pods.json").read_text())
CURRENT = [row for row in ROWS if not report.is_old(row) and "ratios" in row]
# Least useful by compiled FLOPs: a prompt's attention is computed whole, layers of an update are computed twice.
USEFUL = {"prefill": 0.9, "decode": 0.9, "accumulate": 0.6}
TOKEN_BYTES = 0.9, 1.3  # bytes of a decoded token by weights and cache, of which some stay in VMEM


def name(row):
    return f"{row['config']} {row['topology']}"


def test_rows_of_the_current_counter_are_recorded():
    assert {row["topology"].partition(":")[0] for row in CURRENT} >= {"v5e", "v6e"}


@pytest.mark.parametrize("row", CURRENT, ids=name)
def test_programs_do_little_beside_what_is_useful(row):
    for program, useful in row["ratios"]["useful"].items():
        assert USEFUL[program] <= useful <= 1, program
    low, high = TOKEN_BYTES
    assert low <= row["ratios"]["token_bytes"] / row["ratios"]["least_token_bytes"] <= high


@pytest.mark.parametrize("row", CURRENT, ids=name)
def test_recorded_seconds_follow_from_recorded_counts(row):
    chip, stage = CHIPS[row["topology"].partition(":")[0]], row["stages"]["accumulate"]
    terms = (
        stage["flops"] / chip.flops,
        stage["bytes"] / chip.bandwidth,
        sum(stage["collectives"].values()) / chip.links,
    )
    assert stage["roofline"] == pytest.approx(max(terms))
    step = row["step"]
    assert step["decode_steps"] * step["decode_step_seconds"] == pytest.approx(step["seconds"]["decode"])


def test_the_page_marks_rows_of_an_older_counter_and_shows_the_others():
    text = (DOCS / "pods.md").read_text()
    for row in ROWS:
        if row["rows"] is None:
            assert report.line(row) in text
            assert report.is_old(row) == (report.OLD in report.line(row)) and row.get("counter", 1) <= hlo.VERSION
    assert report.ratios_table(ROWS) in text
    assert any(map(report.is_old, ROWS)) == (report.OLD_NOTE in text)
