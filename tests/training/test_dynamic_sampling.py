"""Dynamic sampling: rollouts are merged without a change of what was said and paid, and steps are deterministic."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.envs.contract import ArrayTask
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.text_task import TextTask
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.rollout.merge import merge_tasks
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.keys import is_documented
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.dynamic_sampling import DynamicSampling
from tests import toys

BATCH, GROUP = 4, 2
SMALL = Backbone(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
TEAM = TeamConfig(backbone=SMALL, max_new_tokens=2, remat=False)


def reward(task, texts):
    """Differs between samples for about half of the tasks, and is invalid for a few of them."""
    text = texts["a"] + texts["b"]
    if task["n"] % 7 == 3 and len(text) % 2:
        raise ValueError("no reward")
    return {"reward": float(len(text.encode()) % 3 if task["n"] % 2 else 1)}


def text_env():
    tasks = [{"n": n, "pad": "x" * (n % 5)} for n in range(40)]
    return TextTask(tasks, {"a": "{n} {pad}", "b": "{n}"}, reward)


def relay():
    """Each role is paid for the parity of its first token, so some groups differ and some do not."""
    tasks = {"start": jnp.arange(65, 100)}
    return ArrayTask(toys.relay(2), tasks, {"start": jnp.arange(100, 104)})


def config(kind, **changes):
    base = {"steps": 4, "batch": BATCH, "group": GROUP, "team": TEAM, "sft": SFT(steps=0)}
    base["run"] = RunConfig(
        checkpoint_every=1, eval_every=0, eval_greedy=False, tensorboard=False, max_logprob_diff=0, max_invalid=1.0
    )
    if kind == "array":
        env = {"env": EnvConfig("matrix"), "reward": {"accuracy": 1.0}}
    else:
        env = {"env": EnvConfig("text", workers=0), "reward": {"reward": 1.0}}
    return grpo.Config(**{**base, **env, **changes})


def make(cfg, play=None):
    algorithm = dataclasses.replace(grpo.algorithm(cfg), play=play)
    env = relay() if cfg.env.name == "matrix" else text_env()
    return phases.make_recipe(cfg, grpo.make_plan(cfg), algorithm, env=env)


def plays(recipe, count):
    """Rollouts of other tasks with other keys."""
    state, step = recipe.init(0), recipe.phases[1].step
    for k in range(count):
        tasks = (np.arange(BATCH) + BATCH * k) % recipe.env_runner.size
        yield step.env_runner.play(
            step.players, state.params, {}, tasks.tolist(), step.plan, jax.random.key(k), step.cfg.sampling, None
        )


def story(play, task):
    """What was said and paid at a task, by joint action in order: texts, tokens, turns, rewards, and the parent."""
    tree = play.tree
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    rows = [j for j in range(len(moves.task)) if moves.played[j] and moves.task[j] == task]
    out = []
    for j in rows:
        said = []
        for c in (c for c in moves.steps[j] if c >= 0):
            n = steps.node[c]
            assert steps.valid[c] and nodes.valid[n] and nodes.task[n] == task
            mates = int(np.sum(steps.valid & (steps.node == n)))
            led = rows.index(nodes.parent[n]) if nodes.parent[n] >= 0 else -1
            tokens = tuple(steps.tokens[c, : steps.length[c]]), tuple(nodes.tokens[n, : nodes.length[n]])
            place = int(nodes.role[n]), int(nodes.model[n]), int(nodes.turn[n]), led, mates
            logprobs = tuple(steps.logprobs[c, : steps.length[c]])
            said.append((play.prompt_text(c), play.completion_text(c), tokens, place, logprobs))
        parent = rows.index(moves.parent[j]) if moves.parent[j] >= 0 else -1
        paid = tuple(tuple(x[j]) for x in moves.rewards.values())
        out.append((said, parent, paid, bool(moves.valid[j]), bool(moves.done[j]), int(moves.turn[j])))
    return out


@pytest.mark.parametrize("kind", ("array", "text"))
def test_a_merged_rollout_tells_the_same_stories(kind):
    recipe = make(config(kind))
    first, second, third = plays(recipe, 3)
    chosen = [(0, 1), (0, 3), (2, 0), (2, 2)]
    merged = merge_tasks([first, second, third], chosen)
    for new, (number, old) in enumerate(chosen):
        told = story(merged, new)
        assert told == story((first, second, third)[number], old) and told
    assert not np.any(merged.tree.nodes.task[merged.tree.nodes.valid] >= len(chosen))
    for name in ("nodes", "steps", "transitions"):
        table = getattr(merged.tree, name)
        assert len(table.valid) == max(len(getattr(p.tree, name).valid) for p in (first, second, third))
    costs = [p.tree.counts.sequences for p in (first, second, third)]
    assert merged.tree.counts.sequences == sum(costs)
    assert (merged.records is None) == (kind == "array")
    if kind == "text":
        rows = np.flatnonzero(merged.tree.steps.valid)
        texts = [record.action.text for record in merged.records.records]
        assert texts == [merged.completion_text(row) for row in rows] and len(set(texts)) > 1
        assert len(merged.failures) == sum(len(p.failures) for p in (first, second, third))


def one_step(recipe, folder, state=None):
    """One RL step: the state after it, its result, and its metrics."""
    seen = []
    recipe.recorder = lambda *of: seen.append(of[-1])
    with Logger(folder, resume_step=None, total_steps=1, primary=False) as logger:
        state, metrics = recipe.step(recipe.init(0) if state is None else state, logger)
    return state, seen[-1], metrics


@pytest.mark.parametrize("kind", ("array", "text"))
def test_a_step_is_full_of_groups_that_differ(kind, tmp_path):
    recipe = make(config(kind), DynamicSampling(extra_plays=6))
    _, result, metrics = one_step(recipe, tmp_path)
    assert metrics["sampling/plays"] > 1 and metrics["sampling/kept"] >= BATCH
    assert metrics["sampling/played"] == BATCH * metrics["sampling/plays"]
    assert all(is_documented(name) for name in metrics if name.startswith("sampling/"))
    groups = np.unique(np.asarray(result.credited.group_task)[np.asarray(result.selected)])
    np.testing.assert_array_equal(groups, np.arange(BATCH))
    assert result.trained.any() and len(result.tasks) == BATCH
    if kind == "text":  # the texts belong to the tasks whose numbers are told
        rows = np.flatnonzero(result.tree.steps.valid)
        for row in rows:
            task = result.tasks[result.tree.nodes.task[result.tree.steps.node[row]]]
            assert f"] {recipe.env_runner.tasks[int(task)]['n']}" in result.played.prompt_text(row)
    _, plain, _ = one_step(make(config(kind)), tmp_path)
    differ = np.unique(np.asarray(plain.credited.group_task)[np.asarray(plain.selected)])
    assert len(differ) < BATCH
    np.testing.assert_array_equal(result.tasks[: len(differ)], plain.tasks[differ])  # kept ones stay, in their order


@pytest.mark.parametrize("enough", (True, False))
def test_a_step_without_an_extra_play_is_the_plain_step(enough, tmp_path):
    """To the bit: the first play is full, or no other one is allowed."""
    cfg = config("array", group=16 if enough else GROUP)
    state, result, metrics = one_step(make(cfg, DynamicSampling(6 if enough else 0)), tmp_path)
    assert metrics["sampling/plays"] == 1 and (metrics["sampling/kept"] == BATCH) == enough
    plain, other, _ = one_step(make(cfg), tmp_path)
    assert digests(state.params["agents"]) == digests(plain.params["agents"])
    np.testing.assert_array_equal(result.tasks, other.tasks)


def test_the_bound_of_plays_fills_the_batch_with_tasks_that_are_not_trained(tmp_path):
    """Equal rewards in every group: all plays are made, nothing is learnt, the parameters stay as they are."""
    cfg = config("array", reward={"accuracy": 0.0})
    recipe = make(cfg, DynamicSampling(2))
    before = digests(recipe.init(0).params["agents"])
    state, result, metrics = one_step(recipe, tmp_path)
    assert metrics["sampling/plays"] == 3 and metrics["sampling/kept"] == 0
    assert not result.trained.any() and digests(state.params["agents"]) == before
    assert result.tree.transitions.played.any() and len(result.tasks) == BATCH


@pytest.mark.slow
def test_a_resumed_run_is_equal_to_the_bit(tmp_path):
    play = DynamicSampling(3)
    run = lambda steps, folder: fit(config("array", steps=steps), make(config("array", steps=steps), play), folder)
    straight = run(4, tmp_path / "straight")
    run(2, tmp_path / "twice")
    assert digests(straight) == digests(run(4, tmp_path / "twice"))
    lines = [json.loads(line) for line in (tmp_path / "twice/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and any(line["sampling/plays"] > 1 for line in lines)


def test_a_compiled_run_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^config.recipe: grpo: dynamic sampling plays .*; use fit$"):
        make_program(make(config("array"), DynamicSampling()))


def test_a_bad_bound_is_refused():
    with pytest.raises(ConfigError, match=r"^DynamicSampling.extra_plays: expected .*-1"):
        DynamicSampling(-1)
