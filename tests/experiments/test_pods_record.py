"""Recorded figures of docs/results/pods.json: a regression of what programs do beside their work is a red test."""

import json
from pathlib import Path

import pytest

from experiments.tpu import report
from jaxmarl_llm.costs import hlo
from jaxmarl_llm.costs.chips import CHIPS

DOCS = Path(__file__).parents[2] / "docs"
ROWS = json.loads((DOCS / "results/pods.json").read_text())
CURRENT = [row for row in ROWS if not report.is_old(row) and row["rows"] is None and "ratios" in row]
# Least useful by compiled FLOPs: nodes are padded to the parts of the rows, layers of an update are computed twice.
USEFUL = {"prefill": 0.9, "decode": 0.85, "accumulate": 0.6}
LEAST_TOKEN_BYTES = 0.9  # of a decoded token by weights and cache, of which some stay in VMEM
MOST_TOKEN_BYTES = {"v5e": 1.3, "v6e": 1.3, "v5p": 1.4}  # libtpu keeps fewer activations in the VMEM of a v5p
SECONDS = {"v5e": 20, "v6e": 12, "v5p": 6}  # of a step of the flagship, at most, on 256, 256 and 512 chips
UPDATE_GB = 110  # of memory traffic of its micro-batch on a chip of v5e
UPDATE_MFU = 0.5  # of v5e at least: useful FLOPs of all rows of its update, by the floor's time at the chip's peak


def name(row):
    return f"{row['config']} {row['topology']}"


def test_rows_of_the_current_counter_are_recorded():
    assert {row["topology"].partition(":")[0] for row in CURRENT} >= {"v5e", "v6e"}


@pytest.mark.parametrize("row", CURRENT, ids=name)
def test_programs_do_little_beside_what_is_useful(row):
    for program, useful in row["ratios"]["useful"].items():
        assert USEFUL[program] <= useful <= 1, program
    if "token_bytes" not in row["ratios"]:
        assert not row["stages"]["prefill"]["compiled"]  # the rollout does not fit
        return
    moved = row["ratios"]["token_bytes"] / row["ratios"]["least_token_bytes"]
    assert LEAST_TOKEN_BYTES <= moved <= MOST_TOKEN_BYTES[row["topology"].partition(":")[0]]


@pytest.mark.parametrize("chip", SECONDS)
def test_the_flagship_has_its_floor(chip):
    flagship = [row for row in CURRENT if row["config"] == "joyagents_r1:qwen2_5_3b" and row["topology"][:3] == chip]
    assert len(flagship) == 1 and flagship[0]["step"]["total"] <= SECONDS[chip]
    if chip == "v5e":
        stage, step = flagship[0]["stages"]["accumulate"], flagship[0]["step"]
        compute = step["micro_batches"] * stage["flops"] / CHIPS[chip].flops / step["seconds"]["update"]
        assert stage["bytes"] <= UPDATE_GB * 1e9
        assert flagship[0]["ratios"]["useful"]["accumulate"] * step["filled"] * compute >= UPDATE_MFU


@pytest.mark.parametrize("row", CURRENT, ids=name)
def test_recorded_seconds_follow_from_recorded_counts(row):
    chip, stage = CHIPS[row["topology"].partition(":")[0]], row["stages"]["accumulate"]
    terms = (
        stage["flops"] / chip.flops,
        stage["bytes"] / chip.bandwidth,
        sum(stage["collectives"].values()) / chip.links,
    )
    assert stage["roofline"] == pytest.approx(max(terms))
    assert row["fits"] == ("step" in row)
    step = row.get("step", {"decode_steps": 0, "decode_step_seconds": 0, "seconds": {"decode": 0}})
    assert step["decode_steps"] * step["decode_step_seconds"] == pytest.approx(step["seconds"]["decode"])


def test_the_page_marks_rows_of_an_older_counter_and_shows_the_others():
    text = (DOCS / "pods.md").read_text()
    for row in ROWS:
        if row["rows"] is None:
            assert report.line(row) in text
            assert report.is_old(row) == (report.OLD in report.line(row)) and row.get("counter", 1) <= hlo.VERSION
    assert report.ratios_table(ROWS) in text
    assert any(map(report.is_old, ROWS)) == (report.OLD_NOTE in text)
