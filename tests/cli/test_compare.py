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
from jaxmarl_llm.telemetry import comparison, task_pairs
from jaxmarl_llm.telemetry.evaluations_file import EvaluationsFile

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


# ------------------------------------------------------------------------------------------------ over held-out tasks


def with_tasks(folder, tasks, seed=0, group=4, step=150, **values):
    """A workdir whose newest evaluation brought these values of each task."""
    write(folder, seed=seed, group=group, last=float(np.nanmean(np.float64(next(iter(values.values()))))))
    file = EvaluationsFile(folder, tasks, None)
    file.write(0, {name: [0.25] * len(tasks) for name in values})
    file.write(step, values)
    return comparison.open_run(folder)


def test_tasks_that_are_solved_or_not_have_the_exact_sign_test(tmp_path):
    """By hand: of 9 shared tasks 6 are solved by the second run alone and 1 by the first: p = 2 (1 + 7) / 2^7."""
    one = with_tasks(tmp_path / "a", ["x", *"abcdefghi"], success=[1, 0, 0, 0, 0, 0, 0, 1, 1, 0])
    two = with_tasks(tmp_path / "b", [*"ihgfedcba", "y"], group=8, success=[0, 1, 0, 1, 1, 1, 1, 1, 1, 0])
    lines = compare.report([one, two], "success")
    assert lines[-2] == "over the held-out tasks of two runs, which says nothing of other seeds"
    assert lines[-1] == (
        "  group=8 minus group=4, seed 0: +0.556 over 9 of 10 tasks: 6 solved by the second run alone, 1 by the first "
        "alone, exact sign test p = 0.12: not decided"
    )
    assert "one seed in common, so nothing is decided" in lines[-3]  # what one seed says stays as it was
    assert task_pairs.effect_of(task_pairs.pair_tasks(one.evaluations, two.evaluations, "success")).p == 2 * 8 / 2**7
    assert "below 0" not in compare.report([two, one], "success")[-1]


@pytest.mark.parametrize("wins, losses, verdict", [(9, 1, "above 0"), (1, 9, "below 0"), (0, 0, "not decided")])
def test_the_sign_test_is_that_of_scipy(wins, losses, verdict, tmp_path):
    first, second = [0] * wins + [1] * losses + [1, 0], [1] * wins + [0] * losses + [1, 0]
    tasks = [str(k) for k in range(wins + losses + 2)]
    one = with_tasks(tmp_path / "a", tasks, success=first)
    two = with_tasks(tmp_path / "b", tasks, group=8, success=second)
    effect = task_pairs.effect_of(task_pairs.pair_tasks(one.evaluations, two.evaluations, "success"))
    expected = stats.binomtest(wins, wins + losses, 0.5).pvalue if wins + losses else 1.0
    assert (effect.wins, effect.losses, effect.p) == (wins, losses, pytest.approx(expected))
    assert compare.report([one, two], "success")[-1].endswith(f": {verdict}")


def test_other_values_have_the_paired_interval_of_scipy(tmp_path):
    rng = np.random.default_rng(5)
    first = rng.uniform(0, 1, 40)
    second = first + rng.normal(0.1, 0.2, 40)
    tasks, order = [f"{k:x}" for k in range(40)], rng.permutation(40)
    one = with_tasks(tmp_path / "a", tasks, **{"return": first.tolist()})
    values = second[order].tolist()
    two = with_tasks(tmp_path / "b", [tasks[k] for k in order], group=8, step=120, **{"return": values})
    effect = task_pairs.effect_of(task_pairs.pair_tasks(one.evaluations, two.evaluations, "return"))
    expected = stats.ttest_rel(second, first).confidence_interval(0.95)
    np.testing.assert_allclose([effect.mean - effect.half, effect.mean + effect.half], [expected.low, expected.high])
    for run in (one, two):
        run.rows[-1]["final/return"] = 0.5
    line = compare.report([one, two], "return")[-1]
    numbers = f"{effect.mean:+.3f} ± {effect.half:.3f} over 40 of 40 tasks: above 0"
    assert line == f"  group=8 minus group=4, seed 0, after steps 150 and 120: {numbers}"


def test_which_tasks_are_pairs(tmp_path):
    """Of equal content; unknown contents never; the k-th of several with the k-th; unknown values are counted."""
    one = with_tasks(tmp_path / "a", ["a", "a", "", "b", "c"], success=[0.5, 0.25, 1.0, None, 1.0])
    two = with_tasks(tmp_path / "b", ["", "a", "b", "a", "a"], group=8, success=[0.0, 0.75, 1.0, 0.5, 0.125])
    pairs = task_pairs.pair_tasks(one.evaluations, two.evaluations, "success")
    assert (pairs.first, pairs.second, pairs.shared, pairs.counts) == ([0.5, 0.25], [0.75, 0.5], 3, (5, 5))
    assert compare.report([one, two], "success")[-1].endswith(
        "seed 0: +0.250 ± 0.000 over 2 of 5 tasks (1 without a value): above 0"
    )
    single = with_tasks(tmp_path / "single", ["c"], group=2, success=[0.75])
    assert compare.report([one, single], "success")[-1].endswith(
        "-0.250 over 1 of 5 and 1 tasks, so nothing is decided"
    )
    other = with_tasks(tmp_path / "c", ["d", "e"], group=8, seed=3, success=[0.5, 0.5])
    line = compare.report([one, other], "success")[-1]
    assert line.endswith("seeds 0 and 3: none of 5 and 2 tasks is the same in both")
    assert task_pairs.pair_tasks(one.evaluations, two.evaluations, "pass@1") is None


def test_runs_of_one_seed_are_paired_and_others_have_no_line(tmp_path):
    arms = [
        with_tasks(tmp_path / f"{group}_{seed}", ["a", "b"], seed=seed, group=group, success=[0.5, seed / 4])
        for group in (4, 8)
        for seed in (0, 1, 2 + group)
    ]
    lines = compare.report(arms, "success")
    assert ["seed 0:" in lines[-2], "seed 1:" in lines[-1], "which says nothing of other seeds" in lines[-3]] == [
        True
    ] * 3
    bare = [comparison.open_run(write(tmp_path / f"bare{g}", group=g)) for g in (4, 8)]
    assert "nothing of other seeds" not in "".join(compare.report(bare, "success"))


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
