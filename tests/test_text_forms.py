"""Array environments through text: a step of a recipe over each, and the engine's rewards against the array game's."""

import dataclasses
import importlib
import json
import math
import pickle

import jax
import numpy as np
import pytest

from jaxmarl_llm import arena, loop
from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs import chain, chain_text, dilemma, dilemma_text
from jaxmarl_llm.envs.arrays import pack
from jaxmarl_llm.plans import flat
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.text import ConfigError

KEY = jax.random.key(0)
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
BOARDS = {"chain_text": chain, "dilemma_text": dilemma}
RUNS = {
    "rema": ("chain_text", {"protocol": "meta"}, 5),
    "dr_mas": ("chain_text", {"protocol": "verify"}, 2),
    "advantage_alignment": ("dilemma_text", {"rounds": 3}, 2),
}


def config(recipe, **changes):
    env, args, max_new = RUNS[recipe]
    small = {
        "steps": 1,
        "batch": 4,
        "group": 4,
        "team": {"share": "shared", "max_new": max_new, "remat": False, "backbone": SHAPE},
        "env": {"name": env, "args": {"tasks": 32, **args}, "workers": 0, "max_prompt": 320, "eval_tasks": 4},
        # Enough of stage 0 that replies are in form and rewards differ.
        "sft": {"steps": 30, "batch": 8, "samples": 32, "optimizer": {"learning_rate": 0.02}},
        "run": {"checkpoint_every": 100, "eval_every": 0, "log_every": 100, "tensorboard": False},
    }
    module = importlib.import_module(f"jaxmarl_llm.recipes.{recipe}")
    return from_dict(module.Config, {**small, **changes}), module


@pytest.fixture(scope="module", params=RUNS)
def trained(request, tmp_path_factory):
    """A recipe of one RL step after stage 0, its final state, its log."""
    cfg, module = config(request.param)
    workdir = tmp_path_factory.mktemp(request.param)
    recipe = module.make(cfg)
    state = loop.fit(cfg, recipe, workdir)
    yield cfg, recipe, state, [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    recipe.arena.close()


def test_a_recipe_trains_a_team_through_text(trained):
    cfg, recipe, state, rows = trained
    last = rows[-1]
    assert [r["step"] for r in rows] == list(range(1, cfg.sft.steps + 2)) and int(state.counters["skipped"]) == 0
    assert last["count/invalid"] == 0 and last["logprob_gap"] <= 1e-4
    norms = [v for k, v in last.items() if k.startswith("grad_norm")]
    assert norms and all(math.isfinite(v) for v in norms)
    before, after = (jax.tree.leaves(s.params["agents"]) for s in (recipe.init(0), state))
    assert any(not np.array_equal(a, b) for a, b in zip(before, after))


def replayed(arena, played, tasks):
    """(transition, rewards, done) of every recorded joint action, played again in the array environment."""
    text = importlib.import_module(f"jaxmarl_llm.envs.{arena.cfg.name}")
    board = getattr(arena.config, "board", arena.config)
    env = BOARDS[arena.cfg.name].make(board)
    reset, step, width = jax.jit(env.reset), jax.jit(env.step), board.max_new
    moves, after = played.tree.transitions, {}
    for j in np.flatnonzero(moves.played):
        state = after[int(moves.parent[j])] if moves.parent[j] >= 0 else reset(KEY, tasks[moves.task[j]])
        actions = [played.records.records[s].action for s in moves.steps[j] if s >= 0]
        if text is chain_text:
            said = [chain_text.said(a)[:width] for a in actions]
        else:
            said = [dilemma_text.MOVES[dilemma_text.move_of("ipd", a.text)].encode() for a in actions]
        after[int(j)], rewards, done = step(KEY, state, *pack(said, width))
        yield j, {c: np.asarray(v) for c, v in rewards.items()}, bool(done)


def test_the_host_engine_pays_what_the_array_game_pays(trained):
    cfg, recipe, state, _ = trained
    got = recipe.arena.play(recipe.team, state.params, {}, range(8), flat(4), KEY, Sampling(), None, held_out=False)
    moves, seen = got.tree.transitions, 0
    assert not got.failures
    for j, rewards, done in replayed(recipe.arena, got, recipe.arena.tasks):
        assert done == moves.done[j] and moves.valid[j]
        assert set(rewards) == set(moves.rewards)
        for component, values in rewards.items():
            np.testing.assert_array_equal(moves.rewards[component][j], values, err_msg=component)
        seen += 1
    earned = moves.rewards[next(iter(cfg.reward))][moves.played]
    assert seen == moves.played.sum() >= 32 and (earned > 0).any() and np.ptp(earned) > 0


def test_states_and_factories_go_to_workers_and_back(trained):
    cfg, recipe, _, _ = trained
    play, env = pickle.loads(pickle.dumps(arena.make_arena(cfg.env).module.make)), recipe.arena.env
    state = env.reset(3, recipe.arena.tasks[0])
    again = pickle.loads(pickle.dumps(state))
    assert env.observe(state) == env.observe(again) == play(cfg.env.build()).observe(again)


def test_a_memory_entry_has_the_score_of_the_player_itself(trained):
    cfg, recipe, state, _ = trained
    got = recipe.arena.play(recipe.team, state.params, {}, range(4), flat(2), KEY, Sampling(), None)
    rows = np.flatnonzero(got.tree.steps.valid)
    _, _, texts = recipe.arena.lessons(recipe.team, got, rows)
    if cfg.env.name != "dilemma_text":
        assert all(text.startswith(got.records.records[row].role) for row, text in zip(rows, texts))
        return
    tree, final = got.tree, arena._final_move(got.tree)
    seats = tree.nodes.role[tree.steps.node[rows]]
    own = tree.transitions.rewards["payoff"][final[rows], seats]
    assert all(f"({paid:.1f})" in text for paid, text in zip(own, texts)) and set(seats) == {0, 1}


# Bad input


@pytest.mark.parametrize(
    "recipe, changes, message",
    [
        ("rema", {"env": {"name": "chain_text", "args": {"protocol": "verify"}}}, "roles meta, reasoner"),
        ("rema", {"env": {"name": "chain_txt"}}, "did you mean 'chain_text'"),
        ("dr_mas", {"reward": {"payoff": 1.0}}, "environment 'chain_text' pays no 'payoff'"),
        ("advantage_alignment", {"team": {"max_new": 1, "backbone": SHAPE}}, "max_new: none of the 32 demonstrations"),
        ("advantage_alignment", {"reward": {"accuracy": 1.0}}, "environment 'dilemma_text' pays no 'accuracy'"),
    ],
)
def test_a_team_that_does_not_fit_is_told_why(recipe, changes, message):
    with pytest.raises(ConfigError) as error:
        cfg, module = config(recipe, **changes)
        module.make(cfg)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", BOARDS)
def test_the_test_split_is_that_of_the_array_form(name):
    text = importlib.import_module(f"jaxmarl_llm.envs.{name}")
    cfg = dataclasses.replace(EnvConfig(name).build(), **({"game": "split"} if name == "dilemma_text" else {}))
    held = BOARDS[name].make_tasks(cfg, cfg.seed + arena.HELD_OUT, 5)
    for i, task in enumerate(text.tasks(dataclasses.replace(cfg, split="test", count=5))):
        assert all(np.array_equal(task[k], held[k][i]) for k in held)
