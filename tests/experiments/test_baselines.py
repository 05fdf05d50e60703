"""The baselines command: intervals, votes, protocols at equal tokens, the table."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.studies import baseline_protocols
from experiments.studies import common as budget
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.training import evaluation as diagnose

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "experiments/configs/magrpo.py")
SMALL = {
    "steps": "2",
    "batch": "2",
    "group": "2",
    "sft.steps": "2",
    "sft.samples": "32",
    "sft.batch": "4",
    "env.eval_tasks": "8",
    "team.backbone.hidden_size": "16",
    "team.backbone.intermediate_size": "32",
    "team.backbone.num_layers": "1",
    "team.backbone.head_dim": "4",
}


def small(variant="tiny", **changes):
    cfg = config_flags.load(f"{CONFIG}:{variant}", list(SMALL.items()))
    return dataclasses.replace(cfg, **changes)


def test_bootstrap_covers_seeds_and_tasks():
    values = np.array([[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0], [2.0, 3.0, np.nan, 5.0]])
    mean, low, high = budget.bootstrap(values)
    assert mean == pytest.approx(np.nanmean(values)) and low < mean < high
    same = budget.bootstrap(np.full((3, 5), 0.7))
    assert same == pytest.approx((0.7, 0.7, 0.7))
    # seeds that differ widen it, though every seed's tasks agree
    _, low, high = budget.bootstrap(np.repeat([[0.0], [1.0]], 100, 1))
    assert (low, high) == (0.0, 1.0)


def test_most_frequent_and_ties_to_the_first():
    assert diagnose.most_frequent(["a", "b", "b", "a", "c"]) == 0
    assert diagnose.most_frequent(["c", "b", "b"]) == 1
    assert diagnose.most_frequent(["x"]) == 0


def test_one_model_alone_has_the_teams_budget_and_its_own_algorithm():
    cfg = small()
    single = baseline_protocols.alone(cfg)
    single.check("config")
    assert single.recipe == "grpo" and single.credit.normalise == "std" and single.loss.clip is not None
    assert single.env.args["protocol"] == "solo" and single.team.max_new_tokens == 2 * cfg.team.max_new_tokens
    for name in ("batch", "group", "optimizer", "sft", "reward", "seed", "sampling"):
        assert getattr(single, name) == getattr(cfg, name)
    host = dataclasses.replace(cfg, env=EnvConfig("writing"))
    assert baseline_protocols.under(host, "solo").env.protocol == "solo"


def test_the_vote_takes_each_writers_most_frequent_text():
    """Against a count by hand over the same samples, scored by the environment."""
    cfg = small()
    got = budget.train(cfg, None, None, 0)
    recipe, state = got["recipe"], got["state"]
    returns, tokens = baseline_protocols.vote(cfg, recipe, state, 3)
    _, spent, played = budget.task_returns(cfg, recipe, state, flat(3))
    assert tokens == spent and len(returns) == 8
    tree, env = played.tree, recipe.env_runner.env
    for task in range(8):
        rows = tree.transitions.steps[tree.transitions.task == task]
        said = []
        for seat in rows.T:
            texts = [tree.steps.tokens[s, : tree.steps.length[s]].tolist() for s in seat]
            best = max(texts, key=lambda t: (texts.count(t), -texts.index(t)))
            said.append(next(s for s, t in zip(seat, texts) if t == best))
        start = env.reset(jax.random.key(0), jax.tree.map(lambda x, task=task: x[task], recipe.env_runner.held_out))
        paid = env.step(jax.random.key(0), start, tree.steps.tokens[said], tree.steps.length[said])[1]
        assert returns[task] == pytest.approx(sum(float(v[0]) for v in paid.values()), abs=1e-6)


@pytest.mark.slow
def test_the_command_prints_one_row_a_system_and_resumes(tmp_path):
    command = [
        sys.executable,
        "-m",
        "experiments.studies.baselines",
        f"--config={CONFIG}:tiny",
        f"--out={tmp_path}/b.json",
    ]
    command += [f"--config.{k}={v}" for k, v in SMALL.items()] + ["--votes=3", f"--plot={tmp_path}/b.png"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    first = subprocess.run(
        [*command, "--seeds=1"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert first.returncode == 0, first.stderr[-2000:]
    rows = [line.split("|")[1].strip() for line in first.stdout.splitlines() if line.startswith("| ")][1:]
    assert rows == [
        "---", "sequential pipeline", "one-round discussion", "naive concatenation", "majority vote of 3",
        "one model alone", "one model alone, GRPO", "MAGRPO",
    ]  # fmt: skip
    results = json.loads((tmp_path / "b.json").read_text())["results"]
    ours, alone = results["MAGRPO"][0]["trained"], results["one model alone, GRPO"][0]["trained"]
    assert ours <= alone <= 2 * ours + 200 and (tmp_path / "b.png").is_file()
    again = subprocess.run(
        [*command, "--seeds=1"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert again.returncode == 0 and "seed 0" not in again.stdout  # nothing was run again
    assert again.stdout.splitlines()[0] == first.stdout.splitlines()[len(rows) - 1]
