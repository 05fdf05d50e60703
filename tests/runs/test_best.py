"""The best step by a metric of the evaluation: kept beside the newest, resumed, and a reason to end early."""

from __future__ import annotations

import dataclasses

import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.runs import loop
from jaxmarl_llm.runs.best import BestStep
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.metrics_file import read_metrics

RUN = {"checkpoint_every": 2, "keep": 3, "eval_every": 1, "eval_greedy": False, "log_every": 100, "tensorboard": False}
CONFIG = {
    "steps": 6,
    "batch": 4,
    "group": 2,
    "env": {"name": "matrix", "eval_tasks": 4},
    "reward": {"payoff": 1.0},
    "team": {"max_new_tokens": 1, "remat": False, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
    "sft": {"steps": 0},
}
VALUES = (0.1, 0.3, 0.2, 0.25, 0.4, 0.1, 0.05)  # of the state after each number of steps


@pytest.fixture(scope="module")
def shared():
    """One recipe, whose programs are compiled once."""
    return magrpo.make(from_dict(magrpo.Config, {**CONFIG, "run": RUN}))


@pytest.fixture(autouse=True)
def without_a_figure(monkeypatch):
    monkeypatch.setattr(loop, "report", lambda workdir: None)


def fit(shared, workdir, killed_at=None, values=VALUES, **run):
    """A run whose evaluation gives ``values``, killed at the one after ``killed_at`` steps."""

    def evaluate(state):
        if int(state.step) == killed_at:
            raise InterruptedError
        return {"eval/return": values[int(state.step)]}

    cfg = from_dict(magrpo.Config, {**CONFIG, "run": {**RUN, "best": "eval/return", **run}})
    return loop.fit(cfg, dataclasses.replace(shared, cfg=cfg, evaluator=evaluate), workdir)


def kept(workdir, name="best"):
    """Step -> (record of the best step, digests of the state)."""
    saver = Checkpointer(workdir, read_only=True, name=name)
    metas = {step: saver.read_meta(step) for step in saver.steps()}
    saver.close()
    return {step: (meta["best"], meta["sha256"]) for step, meta in metas.items()}


def test_the_best_step_is_kept_and_a_killed_run_goes_on_with_it(shared, tmp_path):
    """Killed after the best step was kept, and before a checkpoint knows of it."""
    fit(shared, tmp_path / "straight")
    with pytest.raises(InterruptedError):
        fit(shared, tmp_path / "killed", killed_at=5)
    newest = kept(tmp_path / "killed", "checkpoints")
    assert list(newest) == [2, 4] and list(kept(tmp_path / "killed")) == [4]
    assert newest[4][0] == {"metric": "eval/return", "value": 0.3, "step": 1, "waited": 2}
    fit(shared, tmp_path / "killed")
    best = {"metric": "eval/return", "value": 0.4, "step": 4, "waited": 0}
    for run in ("straight", "killed"):
        assert list(kept(tmp_path / run)) == [4] and kept(tmp_path / run)[4][0] == best
        newest = kept(tmp_path / run, "checkpoints")
        assert newest[6][0] == {**best, "waited": 1} and kept(tmp_path / run)[4][1] == newest[4][1]
    assert kept(tmp_path / "straight") == kept(tmp_path / "killed")


def test_a_run_without_improvement_ends_early_and_stays_ended(shared, tmp_path, capsys):
    state = fit(shared, tmp_path, patience=2)
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3, 4] == list(range(1, int(state.step) + 1))
    assert rows[-1]["eval/return"] == 0.25 and rows[-1]["final/return"] == 0.4
    said = capsys.readouterr().out
    assert "ended after step 4: no better eval/return in 2 evaluations" in said
    assert "eval/return was best after step 4 (0.4), which is in best/" in said and list(kept(tmp_path)) == [4]
    again = fit(shared, tmp_path, patience=2)
    assert digests(again.params) == digests(state.params) and len(read_metrics(tmp_path)) == 4
    fit(shared, tmp_path, patience=3)  # more patience: it goes on
    assert len(read_metrics(tmp_path)) == 6


def test_a_metric_that_no_evaluation_gives_is_named(shared, tmp_path):
    with pytest.raises(ConfigError, match=r"config.run.best: .* has no 'eval/retrun'; did you mean 'eval/return'"):
        fit(shared, tmp_path, best="eval/retrun")


def seen(best, *values):
    saved = []
    for step, value in enumerate(values):
        best.see({"eval/loss": value}, step, lambda step=step: saved.append(step))
    return saved


def test_less_may_be_better_and_what_is_not_finite_never_is():
    best = BestStep("-eval/loss", 2)
    assert seen(best, float("nan"), 3.0, 4.0, 2.0, 2.0, float("-inf")) == [1, 3]
    assert (best.value, best.step, best.waited) == (2.0, 3, 2) and best.exhausted
    assert not BestStep("-eval/loss", 3, best.record()).exhausted and BestStep("-eval/loss", 2, best.record()).exhausted
    assert BestStep("eval/return", 1, best.record()).value is None  # of another metric
    assert seen(BestStep(None, 0), 1.0) == [] and BestStep(None, 0).record() is None


@pytest.mark.parametrize(
    "run, key",
    [
        ({"best": "reward/total"}, "best"),
        ({"best": "eval/return_greedy", "eval_greedy": False}, "best"),
        ({"patience": 3}, "patience"),
        ({"best": "eval/return", "patience": 3, "eval_every": 0}, "patience"),
        ({"max_invalid": 1.5}, "max_invalid"),
    ],
)
def test_settings_that_cannot_work_name_their_key(run, key):
    with pytest.raises(ConfigError, match=f"^config.run.{key}: expected "):
        from_dict(magrpo.Config, {**CONFIG, "run": {**RUN, **run}})


@pytest.mark.parametrize(
    "path, best, every, metric",
    [
        ("DIR", None, 10, "eval/return"),
        ("DIR", None, 0, None),
        ("DIR", "none", 10, None),
        ("DIR", "-eval/length", 0, "-eval/length"),
        (None, None, 10, None),
        (None, "eval/success", 10, "eval/success"),
    ],
)
def test_pretrained_models_that_are_evaluated_keep_their_best_step(path, best, every, metric):
    given = {**CONFIG, "team": {"backbone": {"path": path}}, "run": {"best": best, "eval_every": every}}
    cfg = from_dict(magrpo.Config, given)
    cfg.check("config")
    assert cfg.best_metric == metric
    other = from_dict(magrpo.Config, {**given, "team": {"overrides": {"row": {"path": path}}}})
    assert other.best_metric == metric


def test_a_best_metric_that_is_none_of_an_evaluation_is_refused():
    for run, message in (
        ({"best": "success"}, r"^config\.run\.best: expected .*, or none, got 'success'$"),
        ({"best": "none", "patience": 2}, r"^config\.run\.patience: expected 0 without config\.run\.best"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_dict(magrpo.Config, {**CONFIG, "run": run}).check("config")
