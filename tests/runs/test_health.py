"""What a run says when its environment fails, and how it ends: rewards that raise, hang or are no numbers."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.rollout.env_runner import RolloutResult
from jaxmarl_llm.runs import loop
from jaxmarl_llm.runs.health import Health
from tests.faulty import TASKS, Make, prompt

FAULTS = ("raise", "hang", "nan", "none", "string", "few")
SAID = {
    "raise": "environment raised: KeyError: 'my reward has a bug'",
    "hang": "environment timeout: no answer within 0.5 s",
    "nan": "reward 'accuracy' of role 'solver' is nan",
    "none": "reward 'accuracy' of role 'solver' is None",
    "string": "reward 'accuracy' of role 'solver' is '1.0'",
    "few": "expected (state, rewards by role, done)",
}


def task_of(fault, share, **more):
    return HostTask(Make(fault, share), list(range(TASKS)), [TASKS, TASKS + 1], **more)


CONFIG = {
    "steps": 4,
    "batch": 25,  # every task once in 4 steps
    "group": 2,
    "reward": {"accuracy": 1.0},
    "env": {"name": "tests.faulty", "workers": 0, "timeout": 0.5, "max_prompt": 40},
    "team": {"max_new_tokens": 1, "remat": False, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
    "sft": {"steps": 0},
    "run": {
        "checkpoint_every": 100,
        "eval_every": 0,
        "eval_greedy": False,
        "log_every": 1,
        "tensorboard": False,
        "max_invalid": 0.75,
    },
}


def configured(**changes):
    return from_dict(grpo.Config, {**CONFIG, **changes})


@pytest.fixture(scope="module")
def shared():
    """One recipe for all cases, so that its programs are compiled once: a case changes the environment alone."""
    return grpo.make(configured(), env=task_of("", 0.0))


@pytest.fixture(autouse=True)
def without_a_figure(monkeypatch):
    monkeypatch.setattr(loop, "report", lambda workdir: None)  # most of the time of a run as small as these


def run(shared, workdir, fault, share, **changes):
    """(what `fit` raised or None, metrics by step, failures) of a run whose rewards fail."""
    cfg, runner = configured(**changes), shared.env_runner
    recipe = dataclasses.replace(shared, cfg=cfg)
    runner.close()
    runner.task, runner.cfg, runner._factory = task_of(fault, share), cfg.env, Make(fault, share)
    raised = None
    try:
        loop.fit(cfg, recipe, workdir)
    except RunError as error:
        raised = error
    finally:
        runner.close()
    read = lambda name: [json.loads(line) for line in (workdir / name).read_text().splitlines()]
    there = lambda name: read(name) if (workdir / name).exists() else []
    return raised, there("metrics.jsonl"), there("failures.jsonl")


HANGS = {"env": {**CONFIG["env"], "workers": 2}}


def cases(share):
    """Every fault. A worker that hangs is replaced, which takes a second each time."""
    slow = pytest.param("hang", share, id=f"hang-{share}", marks=pytest.mark.slow)
    return [slow if fault == "hang" else pytest.param(fault, share, id=f"{fault}-{share}") for fault in FAULTS]


@pytest.mark.parametrize("fault, share", [*cases(0.01), *cases(0.5)])
def test_some_rewards_fail_and_the_run_goes_on_and_says_so(shared, tmp_path, capfd, fault, share):
    raised, rows, failures = run(shared, tmp_path, fault, share, **(HANGS if fault == "hang" else {}))
    said, calls = capfd.readouterr().out, round(2 * TASKS * share)
    assert raised is None and "wrote report.png" in said
    assert len(failures) == calls == sum(row["count/invalid"] for row in rows)
    assert np.mean([row["count/invalid_share"] for row in rows]) == pytest.approx(share)
    assert {row["task"] for row in failures} == set(range(round(TASKS * (1 - share)), TASKS))
    assert all(SAID[fault] in row["message"] and row["roles"] == ["solver"] for row in failures)
    # The statistics know nothing of what failed: a reward that is not known is not 0.
    assert all(0 < row["reward/accuracy"] < 1 for row in rows)
    first = failures[0]
    assert f"failure 1: step, role solver, turn 0, task {first['task']}: " in said and SAID[fault] in said
    assert said.count("failure ") == min(calls, 3) and ("later failures are not shown" in said) == (calls >= 3)
    assert (f"{calls} calls of the environment failed; failures.jsonl has all of them" in said) == (calls > 3)
    assert "invalid share" in said
    traces = [row["traceback"] for row in failures if "traceback" in row]
    if fault == "raise":  # of the user's own program, once in the file
        assert len(traces) == 1 and "in my_reward" in traces[0] and "env_pool" not in traces[0]
        assert traces[0].rstrip() in said and len({row["trace"] for row in failures}) == 1
    else:
        assert traces == []


@pytest.mark.parametrize("fault, share", cases(1.0))
def test_rewards_that_always_fail_end_the_run_before_anything_is_compiled(shared, tmp_path, capfd, fault, share):
    raised, rows, failures = run(shared, tmp_path, fault, share, **(HANGS if fault == "hang" else {}))
    said = capfd.readouterr().out
    assert "environment 'faulty': all 3 tasks that were tried before anything was compiled failed in step: " in str(
        raised
    )
    assert SAID[fault] in str(raised) and "\n" not in str(raised)
    assert rows == [] and "compil" not in said and "report.png" not in said
    assert len(failures) == 3 and said.count("failure ") == 3
    assert not list((tmp_path / "checkpoints").iterdir()) and not (tmp_path / "run.lock").exists()


def test_a_share_above_max_invalid_ends_the_run_with_the_reason(shared, tmp_path, capfd):
    """The first task works, so that the run begins."""
    limit = {**CONFIG["run"], "max_invalid": 0.5, "checkpoint_every": 1}
    raised, rows, failures = run(shared, tmp_path, "raise", 0.9, run=limit)
    said = capfd.readouterr().out
    assert 1 < len(rows) < 4 and "report.png" not in said
    count = round(sum(row["count/invalid"] for row in rows))
    assert str(raised).startswith(f"step {len(rows)}: {count} of the {50 * len(rows)} joint actions of the last")
    assert "a share above run.max_invalid=0.5; the last reason: environment raised: KeyError: 'my reward" in str(raised)
    assert str(raised).endswith(f"the last checkpoint is that of step {len(rows) - 1}") and len(failures) == count


def test_max_invalid_of_1_ends_nothing(shared, tmp_path):
    raised, rows, _ = run(shared, tmp_path, "raise", 1.0, run={**CONFIG["run"], "max_invalid": 1.0})
    assert raised is None and [row["count/invalid_share"] for row in rows] == [1.0] * 4
    assert all(row["reward/accuracy"] is None for row in rows)


def test_cut_prompts_are_counted_and_said_once(shared, tmp_path, capfd):
    raised, rows, _ = run(shared, tmp_path, "long", 0.0)
    said = capfd.readouterr().out
    assert raised is None and said.count("prompts longer than env.max_prompt=40 tokens were cut: ") == 1
    assert "were cut: 2 of role 'solver', by " in said  # of the evaluation before the first step
    assert all(row["count/cut_prompts"] == 25 and row["count/cut_tokens"] > 25 for row in rows)


# --- when a share decides ------------------------------------------------------------


def health(folder, limit=0.5):
    said = []
    return Health(folder, limit, said.append), said


def step(it, bad, tried, last=False):
    it._step = type(it._step)(bad, tried)
    it.end_step(1, last=last, kept=lambda: "nothing is kept")


def test_one_bad_step_of_few_joint_actions_ends_nothing(tmp_path):
    it, _ = health(tmp_path)
    step(it, 8, 8)
    step(it, 0, 8)
    step(it, 4, 8)  # 12 of 24: not above
    step(it, 0, 0)  # of another phase: nothing is played
    with pytest.raises(RunError, match="13 of the 24 joint actions of the last 3 steps"):
        step(it, 9, 8)


def test_many_joint_actions_or_the_end_of_the_run_decide_at_once(tmp_path):
    it, _ = health(tmp_path)
    with pytest.raises(RunError, match="33 of the 64 joint actions of the last 1 steps"):
        step(it, 33, 64)
    it, _ = health(tmp_path)
    with pytest.raises(RunError, match="2 of the 2 "):
        step(it, 2, 2, last=True)
    it, _ = health(tmp_path)
    step(it, 32, 64)
    step(it, 0, 0, last=True)


def test_rewards_of_an_array_environment_that_are_nan_are_said_once(tmp_path):
    from types import SimpleNamespace

    it, said = health(tmp_path)
    moves = SimpleNamespace(played=np.array([True, True, False]), valid=np.array([True, False, False]))
    played = RolloutResult(SimpleNamespace(transitions=moves), str, str, [], None)
    for _ in range(2):
        it.see(played, None, held_out=False)
    assert len(said) == 1 and said[0].startswith("1 of 2 joint actions have no valid reward: it is NaN or infinite")
    assert it._step == (2, 4)
    it.see(played, None, held_out=True)
    assert it._step == (2, 4)  # an evaluation ends no run


def test_the_file_of_failures_goes_on_after_half_a_line(tmp_path):
    from jaxmarl_llm.telemetry.failures_file import FailuresFile

    (tmp_path / "failures.jsonl").write_text('{"half')
    file = FailuresFile(tmp_path)
    file.write(3, {"task": 1}, "trace")
    file.write(4, {"task": 2}, "trace")
    half, *rows = (tmp_path / "failures.jsonl").read_text().splitlines()
    first, second = map(json.loads, rows)
    assert half == '{"half' and first["traceback"] == "trace" and "traceback" not in second
    assert first["trace"] == second["trace"] and (first["step"], second["task"]) == (3, 2)


# --- demonstrations that do not fit ---------------------------------------------------


@pytest.mark.parametrize("short, least, error", [(8, 0.5, False), (4, 0.5, True), (4, 0.3, False), (0, 0.0, True)])
def test_demonstrations_that_do_not_fit_are_counted_and_too_many_are_an_error(short, least, error, caplog):
    said = [("solver", prompt("?"), "x" if i < short else "too long") for i in range(10)]
    env = task_of("", 0.0, demonstrations=lambda tasks: said)
    cfg = configured(sft={"steps": 1, "min_fitting": least}, team={**CONFIG["team"], "max_new_tokens": 2})
    if error:
        with pytest.raises(
            ConfigError, match=rf"{10 - short} of 10 demonstrations of role 'solver' are longer than 2 tok"
        ):
            grpo.make(cfg, env=env)
        return
    runner = grpo.make(cfg, env=env).env_runner
    assert runner.dropped == pytest.approx(1 - short / 10)
    assert f"{10 - short} of 10 demonstrations of role 'solver' are longer than 2 tokens" in caplog.text
