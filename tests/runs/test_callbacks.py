"""Functions of a user's own that `fit` calls after every step."""

import json

import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.runs import loop
from tests.runs.test_ahead import CONFIG


def run(folder, *callbacks):
    cfg = from_dict(grpo.Config, CONFIG)
    return loop.fit(cfg, grpo.make(cfg), folder, callbacks=callbacks)


def test_callbacks_see_every_step_and_its_metrics(tmp_path):
    seen, order = [], []

    def first(step, state, metrics):
        seen.append((step, int(state.step), dict(metrics)))
        order.append(1)

    run(tmp_path, first, lambda *_: order.append(2))
    assert order == [1, 2] * 3
    assert [(step, at) for step, at, _ in seen] == [(1, 1), (2, 2), (3, 3)]
    assert "sft/nll" in seen[0][2] and "reward/payoff" in seen[2][2] and "final/return" in seen[2][2]


def test_an_exception_ends_the_run_after_the_step_is_saved(tmp_path):
    def fail(step, state, metrics):
        if step == 2:
            raise RuntimeError("my callback has a bug")

    with pytest.raises(RuntimeError, match="my callback has a bug"):
        run(tmp_path, fail)
    steps = []
    run(tmp_path, lambda step, *_: steps.append(step))
    assert steps == [3], "the run goes on behind the saved step"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
