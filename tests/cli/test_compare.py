"""`jaxmarl-llm compare` on runs whose results are known, beside scipy's paired t test."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from jaxmarl_llm.cli import compare
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import comparison

BEFORE, STEPS = 0.25, (50, 100)


def write(folder, *, seed=0, group=4, last=0.5, workers=1, metric="success"):
    """A workdir: an evaluation before the step after each of STEPS, and one after the last step."""
    folder.mkdir(parents=True)
    config = {"recipe": "grpo", "seed": seed, "group": group, "env": {"name": "chain", "workers": workers}}
    (folder / "config.json").write_text(json.dumps(config))
    rows = [{"step": step + 1, f"eval/{metric}": BEFORE, "reward/total": 0.1} for step in STEPS]
    rows.append({"step": 150, f"final/{metric}": last, "time/step": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def two_arms(tmp_path):
    rng = np.random.default_rng(3)
    small = rng.uniform(0.3, 0.6, 5)
    large = small + rng.normal(0.1, 0.02, 5)
    runs = [write(tmp_path / f"g4_{s}", seed=s, group=4, last=small[s]) for s in range(5)]
    runs += [write(tmp_path / f"g8_{s}", seed=s, group=8, last=large[s], workers=3) for s in reversed(range(5))]
    return [comparison.open_run(run) for run in runs], small, large


def test_pairs_are_of_one_seed_and_the_interval_is_that_of_scipy(two_arms):
    runs, small, large = two_arms
    first, second = comparison.arms(runs)
    assert (first.name, second.name, len(first.runs), len(second.runs)) == ("group=4", "group=8", 5, 5)
    effect = comparison.paired(first, second, "success")
    np.testing.assert_allclose(sorted(effect), sorted(large - small))
    mean, half = comparison.interval(effect)
    expected = stats.ttest_rel(large, small).confidence_interval(0.95)
    np.testing.assert_allclose([mean - half, mean + half], [expected.low, expected.high])
    lines = compare.report(runs, "success")
    assert "  config.group: 4, 8" in lines and "  config.seed: 0, 1, 2, 3, 4" in lines
    assert not any("workers" in line for line in lines)
    assert lines[-1] == f"  group=8 minus group=4: {mean:+.3f} ± {half:.3f} over 5 seeds: above 0"
    assert compare.report(runs[::-1], "success")[-1].endswith("below 0")


def test_what_one_seed_cannot_decide_is_said(tmp_path):
    runs = [comparison.open_run(write(tmp_path / str(g), group=g, last=g / 10)) for g in (4, 8)]
    assert compare.report(runs, "success")[-1].endswith("+0.400; one seed in common, so nothing is decided")
    other = [runs[0], comparison.open_run(write(tmp_path / "other", seed=7, group=8))]
    assert compare.report(other, "success")[-1].endswith("no seed in common, so nothing is decided")
    same = [
        comparison.open_run(write(tmp_path / f"s{s}_{g}", seed=s, group=g, last=0.4)) for s in (0, 1) for g in (2, 3)
    ]
    assert compare.report(same, "success")[-1].endswith("+0.000 ± 0.000 over 2 seeds: not decided")


def test_a_curve_has_the_steps_that_were_complete_when_it_was_measured(tmp_path):
    run = comparison.open_run(write(tmp_path / "a", last=0.75))
    assert run.curve("success") == ([50, 100, 150], [BEFORE, BEFORE, 0.75])
    assert run.last("success") == 0.75 and run.last("return") is None


def test_curves_are_drawn_with_their_interval(two_arms, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    runs, small, _ = two_arms
    comparison.draw(comparison.arms(runs), "success", tmp_path / "x.png")
    (axis,) = drawn[0].axes
    first, band = axis.lines[0], axis.collections[0]
    np.testing.assert_allclose(first.get_xydata(), [[50, BEFORE], [100, BEFORE], [150, small.mean()]])
    assert [text.get_text() for text in axis.get_legend().texts] == ["group=4 (5 seeds)", "group=8 (5 seeds)"]
    low, high = stats.t.interval(0.95, 4, small.mean(), stats.sem(small))
    heights = band.get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([heights.min(), heights.max()], [min(low, BEFORE), max(high, BEFORE)])


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda p: [write(p / "a"), write(p / "b")], "the same configuration and seed 0"),
        (lambda p: [write(p / "a"), write(p / "b", group=8, metric="pass@1")], "no evaluation that all runs have"),
        (lambda p: [p], "no such file; is this the workdir of a run?"),
    ],
)
def test_bad_input_is_one_line(make, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        compare.main(compare_arguments(make(tmp_path)))


@pytest.mark.parametrize("out, says", [("a.xyz", "such as compare.png"), ("no/a.png", "cannot be written .No such fi")])
def test_an_image_that_cannot_be_written_is_one_line(out, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        compare.main(compare_arguments([write(tmp_path / "a")], out=tmp_path / out))


def test_a_metric_that_a_run_lacks_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"a: no evaluation 'pass@1'; --metric names another one"):
        compare.main(compare_arguments([write(tmp_path / "a")], metric="pass@1"))


def compare_arguments(runs, metric=None, out=None):
    import argparse

    return argparse.Namespace(run=[str(run) for run in runs], metric=metric, out=out)


def test_the_command_prints_and_draws(tmp_path):
    runs = [str(write(tmp_path / f"{g}_{s}", group=g, seed=s, last=(g + s) / 20)) for g in (2, 4) for s in (0, 1, 2)]
    picture = tmp_path / "compare.png"
    command = [sys.executable, "-m", "jaxmarl_llm", "compare", *runs, f"--out={picture}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "group=4 minus group=2: +0.100 ± 0.000 over 3 seeds: above 0" in done.stdout
    assert picture.read_bytes()[:4] == b"\x89PNG"
