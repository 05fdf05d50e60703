"""Values of the page against the file, the credit rule of a real run, and figures worked out by hand."""

from __future__ import annotations

import gzip
import json

import jax
import numpy as np
import pytest

from experiments.viewer.samples import hostile_rows, tree_rows, written
from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer import data
from jaxmarl_llm.viewer.data import curves, index, open_run, step_data
from tests.telemetry.test_rollouts import GOLDEN, made, straight, without_a_figure  # noqa: F401 fixtures


def test_a_real_run_is_in_the_page_whole_and_its_advantages_are_those_of_the_credit_rule(straight):  # noqa: F811
    workdir, _, calls = straight
    run = open_run(workdir)
    trained = [number for number in run.files() if isinstance(number, int)]
    for number, (step, _, rl_step, _, _, result) in zip(trained, calls, strict=True):
        shown = json.loads(gzip.decompress(data.read_step(run, number)))
        rollout = rollouts.read_file(run.files()[number])
        steps, nodes = shown["tables"]["step"], shown["tables"]["node"]
        assert sorted(steps["step"]) == np.flatnonzero(result.tree.steps.valid).tolist()  # every completion once
        assert steps["text"] == [row.text for row in rollout.steps]
        assert steps["token_ids"] == [list(row.token_ids) for row in rollout.steps]
        assert nodes["prompt"] == [row.prompt for row in rollout.nodes] and "prompt_ids" not in nodes
        assert nodes["prompt_tokens"] == [len(row.prompt_ids) for row in rollout.nodes]
        weights = {"payoff": 1.0 + rl_step, "social": 0.1}
        credited = jax.device_get(
            assign(step.algorithm.credit, result.tree, weights=weights, sizes=step.sizes(step.cfg.batch))
        )
        assert np.nansum(np.float64(steps["advantage"])) == pytest.approx(
            np.float64(credited.advantage[credited.valid]).sum(), abs=1e-4
        )
        task_of = dict(zip(nodes["node"], nodes["task"], strict=True))
        for row in shown["tasks"]:
            own = [i for i, node in enumerate(steps["node"]) if task_of[node] == row["task"]]
            known = [steps["advantage"][i] for i in own if steps["advantage"][i] is not None]
            assert row["completions"] == len(own) > 0
            assert row["advantage"] == pytest.approx(np.abs(known).mean(), abs=1e-9)
            assert row["trained"] == sum(steps["trained"][i] for i in own)
        assert sum(row["completions"] for row in shown["tasks"]) == len(rollout.steps)


def test_figures_of_a_task_worked_out_by_hand(tmp_path):
    rollout = rollouts.read_file(written(tmp_path, hostile_rows()) / "rollouts" / "step-00000031.jsonl.zst")
    first, second = data.task_rows(rollout)
    # 16 joint actions: pay is j for the first role and 1 for the second, form is 1 and 0 with weight 0.5.
    assert first["reward"] == pytest.approx(np.mean([(j + 0.5 + 1.0) / 2 for j in range(16)]))
    assert second["reward"] == pytest.approx(np.mean([(j + 0.5 + 1.0) / 2 for j in (16, 17, 18)]))  # 19 is invalid
    assert (first["invalid"], second["invalid"]) == (0, 1)
    assert first["advantage"] == pytest.approx(1.0) and second["advantage"] == pytest.approx((1.5 + 0.5 + 0.5) / 3)
    assert (first["groups"], first["equal"], first["variance"]) == (2, 0, 1.25)
    assert (first["cut"], second["cut"], first["longest"], first["nodes"]) == (3, 1, 2, 2)


def test_the_reward_of_an_episode_is_a_mean_over_what_was_played_behind(tmp_path):
    path = written(tmp_path, tree_rows(21, group=2, turns=3))
    rollout = rollouts.read_file(path / "rollouts" / "step-00000031.jsonl.zst")
    children: dict[int, list] = {}
    for move in rollout.transitions:
        children.setdefault(move.parent, []).append(move)

    def value(parent: int) -> float:
        below = children.get(parent, [])
        return float(np.mean([m.rewards["pay"][0] + value(m.transition) for m in below])) if below else 0.0

    assert data.episode_reward(rollout, rollout.transitions) == pytest.approx(value(-1))


def test_curves_are_by_role_and_short(tmp_path):
    rows = [
        {"step": s, "agent/a/reward": float(s % 2), "agent/b/reward": None, "time/step": 1.0} for s in range(1, 1001)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 10')
    (panel,) = curves(tmp_path)
    assert panel["title"] == "Reward by role" and list(panel["lines"]) == ["a"]
    steps, values = panel["lines"]["a"]
    assert len(steps) == len(values) == 334 and steps == sorted(steps)
    assert values[0] == pytest.approx(2 / 3, abs=1e-5) and values[1] == pytest.approx(1 / 3, abs=1e-5)


def test_a_run_is_a_workdir_its_folder_or_one_file(tmp_path):
    run = written(tmp_path / "name", tree_rows(5), 3, 7)
    for given in (run, run / "rollouts"):
        found = open_run(given)
        assert (found.name, found.folder.resolve(), list(found.files())) == ("name", run.resolve(), [3, 7])
    file = open_run(run / "rollouts" / "step-00000007.jsonl.zst")
    assert list(file.files()) == [7] and file.workdir is None
    shown = index([open_run(run), file], [[7], [7]])
    assert [(r["steps"], r["left_out"]) for r in shown["runs"]] == [([7], [3]), ([7], [])]
    with pytest.raises(ConfigError, match="step 5 was not written"):
        data.read_step(open_run(run), 5)


def test_equal_rows_give_equal_bytes_and_log_probs_are_rounded(tmp_path):
    run = open_run(written(tmp_path, hostile_rows()))
    assert data.read_step(run, 31) == data.read_step(run, 31)
    rollout = rollouts.read_file(run.files()[31])
    close = rollout.steps[0]._replace(logprobs=(-0.123456789, None))
    shown = step_data(rollout._replace(steps=[close, *rollout.steps[1:]]))
    assert shown["tables"]["step"]["logprobs"][0] == [-0.1235, None]


def test_the_page_has_differences_to_the_sampler_in_place_of_the_learners_log_probs(tmp_path):
    said = {"logprobs": (-1.0, None, -2.0, -0.5), "token_ids": (1, 2, 3, 4)}
    rows = tree_rows(2, group=2, turns=2)
    (at,) = (i for i, row in enumerate(rows) if isinstance(row, rollouts.Completion) and row.step == 0)
    rows[at] = rows[at]._replace(**said, learner_logprobs=(-1.0000012, -1.0, None, 0.0123456))
    shown = step_data(rollouts.read_file(written(tmp_path, rows) / "rollouts" / "step-00000031.jsonl.zst"))
    assert shown["tables"]["step"]["gaps"] == [[-1.2e-6, None, None, 0.512], [], [], []]
    assert "learner_logprobs" not in shown["tables"]["step"]


def test_a_run_of_the_first_schema_is_shown_without_differences():
    run = open_run(GOLDEN)
    shown = json.loads(gzip.decompress(data.read_step(run, 41)))
    assert len(shown["tables"]["step"]["step"]) == 72 and not any(shown["tables"]["step"]["gaps"])
