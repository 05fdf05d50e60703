"""The papers' configurations: published values, samples that are refused, and two steps of each with tiny models."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from experiments.studies import paper_tables
from experiments.studies.paper_meshes import RUNS
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import replace_path
from jaxmarl_llm.configs.magrpo import PAPER_RUNS
from jaxmarl_llm.data import code_tasks
from jaxmarl_llm.distributed.meshes import MeshConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs import loop, preflight
from tests.envs.test_coding_rewards import needs_sandbox

# The authors' configurations: model, training tasks, epochs, learning rate, temperature, top-p, turns.
CODER, WRITER = "Qwen/Qwen2.5-Coder-3B", "Qwen/Qwen3-1.7B"
AUTHORS = {
    "tldr": (WRITER, 1000, 1, 5e-6, 0.7, 0.9, 1),
    "arxiv": (WRITER, 1000, 1, 5e-6, 0.7, 0.9, 1),
    "humaneval": (CODER, 100, 10, 1e-5, 0.7, 0.9, 1),
    "coophumaneval": (CODER, 50, 20, 1e-5, 0.8, 0.95, 1),
    "mbpp": (CODER, 50, 8, 3e-5, 0.8, 0.95, 1),
    "humaneval_two_turns": (CODER, 100, 7, 1e-5, 0.7, 0.9, 2),
    "coophumaneval_two_turns": (CODER, 50, 10, 1e-5, 0.8, 0.95, 2),
    "mbpp_two_turns": (CODER, 50, 8, 3e-5, 0.8, 0.95, 2),
}
AUTHORS |= {name.replace("two_turns", "expert"): row for name, row in AUTHORS.items() if "two" in name}


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_a_run_of_magrpo_has_the_authors_values(name):
    cfg = config_flags.load(f"magrpo:{name}")
    model, tasks, epochs, rate, temperature, top_p, turns = AUTHORS[name]
    assert cfg.team.backbone.path == model and cfg.team.parameter_sharing == "separate"
    assert (cfg.steps * cfg.batch, cfg.batch, cfg.group, cfg.team.max_new_tokens) == (tasks * epochs, 1, 4, 256)
    assert (cfg.optimizer.name, cfg.optimizer.learning_rate, cfg.optimizer.max_grad_norm) == ("adamw", rate, 0)
    assert (cfg.sampling.temperature, cfg.sampling.top_p, cfg.sampling.top_k) == (temperature, top_p, 50)
    assert cfg.env.build().max_turns == turns and cfg.env.build().reward == "parity"
    assert (cfg.loss.clip_low, cfg.loss.kl_coef, cfg.loss.aggregation) == (None, 0, "sum")
    assert (cfg.credit.normalise, cfg.credit.baseline, cfg.credit.discount) == ("none", "mean", 1)
    assert (cfg.tree_mode, cfg.joint, cfg.stop_above is None) == ("flat", "aligned", turns == 1)
    assert f"play each one {epochs} times" in preflight.epochs(cfg, tasks)
    if model == CODER:
        benchmark = name.removesuffix("_two_turns").removesuffix("_expert")
        first, last = code_tasks.SPLITS[benchmark]["train"]
        assert benchmark == "mbpp" or last - first + 1 == tasks


def test_samples_are_refused_unless_told():
    cfg = config_flags.load("magrpo:tldr", [("env.args.data", "None")])
    with pytest.raises(ConfigError, match=r"^config\.env\.args\.count: expected at most \d+, .* got 1000$"):
        cfg.env.environment(0)
    cfg = config_flags.load("magrpo:coophumaneval")
    with pytest.raises(ConfigError, match=r"coophumaneval: not in the package .* give the directory that holds"):
        cfg.env.environment(0)
    for name, sample in (("humaneval", 14), ("humaneval_two_turns", 14), ("mbpp", 8), ("mbpp_expert", 8)):
        cfg = config_flags.load(f"magrpo:{name}")
        with pytest.raises(ConfigError, match=rf"max_epochs=\d+: {sample} training tasks; .* give all of the data"):
            preflight.epochs(cfg, sample)
        assert str(sample) in preflight.epochs(replace_path(cfg, "run.max_epochs", 0.0), sample)


# ---- two tiny steps -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory):
    """A folder with problems of HumanEval in the format and with the numbers of CoopHumanEval."""
    tasks, _ = code_tasks.load_code("humaneval", split="all")
    rows = [
        {"task_id": f"CoopHumanEval/{number}", **{k: task[k] for k in ("prompt", "entry_point", "test")}}
        for number, task in zip((0, 1, 4, 66, 67), tasks)
    ]
    folder = tmp_path_factory.mktemp("data") / "coophumaneval"
    folder.mkdir()
    (folder / "che_raw.json").write_text(json.dumps(rows))
    return str(folder.parent)


ASKED = []


def expert(task, helper, main):
    """An expert that writes down what it is asked."""
    ASKED.append(task["id"])
    return {"aux": "def aux(n):\n    return n\n", "main": ""}


def tiny(spec, data):
    """A paper's configuration with a model of some thousand parameters, 4 new tokens and the package's samples."""
    cfg = config_flags.load(spec)
    small = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    team = dataclasses.replace(cfg.team, backbone=dataclasses.replace(small, dtype="bfloat16"), max_new_tokens=4)
    args = {k: v for k, v in cfg.env.args.items() if k not in ("data", "count")}
    args |= {"data": data} if args.get("benchmark") == "coophumaneval" else {}
    args |= {"expert": f"{__name__}:expert", "expert_model": ""} if args.get("feedback") == "expert" else {}
    args |= {"max_turns": 5} if cfg.env.name == "assistant" else {}  # fewer leave no task that can be solved
    env = dataclasses.replace(
        cfg.env, args=args, workers=0, max_prompt=1024 if cfg.recipe != "magrpo" else 256, eval_tasks=2
    )
    run = dataclasses.replace(
        cfg.run,
        max_epochs=0.0,
        eval_every=0,
        eval_greedy=False,
        checkpoint_every=2,
        tensorboard=False,
        episodes=1,
        max_logprob_diff=0.0,
    )
    mesh = MeshConfig(data=1, fsdp=1, tensor=1)
    cfg = dataclasses.replace(cfg, steps=2, batch=1, team=team, env=env, run=run, mesh=mesh)
    if cfg.env.name == "assistant":  # no demonstration fits in 4 tokens; a node of 8 samples compiles for minutes
        cfg = dataclasses.replace(cfg, sft=dataclasses.replace(cfg.sft, steps=0), group=2)
    return cfg


@needs_sandbox
@pytest.mark.parametrize("spec", RUNS)
def test_two_steps_of_a_tiny_form(spec, stand_in, tmp_path, capfd):
    cfg = tiny(spec, stand_in)
    recipe = config_flags.recipe_module(cfg.recipe).make(cfg)
    before = recipe.init(cfg.seed).params["agents"]
    ASKED.clear()
    state = loop.fit(cfg, recipe, tmp_path)
    recipe.env_runner.close()
    printed = capfd.readouterr().out
    assert printed.index(f"training tasks; 2 steps of {cfg.batch} tasks play each one") < printed.index("step 2/2")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "count/sequences" in row]
    turns = cfg.env.build().max_turns
    assert int(state.step) == 2 and len(steps) == 2
    assert all(np.isfinite(row["reward/total"]) and row["count/invalid"] == 0 for row in steps)
    assert jax.tree.structure(before) == jax.tree.structure(state.params["agents"])
    if cfg.recipe == "magrpo":
        assert all(row["count/sequences"] == 2 * cfg.group * turns for row in steps)  # of two roles
        assert len(ASKED) >= 2 * cfg.group * spec.endswith("expert")
    if spec in ("magrpo:tldr", "magrpo:humaneval_two_turns"):
        record = paper_tables.record_of(str(tmp_path), 3, ("1", "1", "1"), False)
        assert record["run"] == spec.partition(":")[2] and record["step"] == 2
        assert [len(task["structure" if "eval" in spec else "words"]) for task in record["tasks"]] == [3, 3]
