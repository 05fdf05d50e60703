"""Array environments through text: a step of a recipe over each, and the engine's rewards against the array game's."""

import dataclasses
import importlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.array_env import pack
from jaxmarl_llm.envs.chain import array as chain
from jaxmarl_llm.envs.consult import array as consult
from jaxmarl_llm.envs.dilemma import array as dilemma
from jaxmarl_llm.envs.dilemma import text as dilemma_text
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.safety import array as safety
from jaxmarl_llm.envs.text_adapter import by_last_line, last_line
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message
from jaxmarl_llm.rollout.host_runner import _final_move
from jaxmarl_llm.rollout.keys import TASKS, stream
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.order import shuffled
from tests import toys

KEY = jax.random.key(0)
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "tie_embeddings": False,
}
BOARDS = {"chain_text": chain, "consult_text": consult, "dilemma_text": dilemma, "safety_text": safety}
SFT_STEPS = 30  # enough for completions in form, so that rewards differ
RUNS = {  # recipe -> environment, its arguments, max_new_tokens, joint actions, what else is set
    "rema": (
        "chain_text",
        {"protocol": "meta", "rounds": 1, "terms": 2, "modulus": 2, "shaping": 0.25},
        *(5, 32, {}),
    ),
    "advantage_alignment": ("dilemma_text", {"rounds": 2}, 2, 32, {}),
    "waltzrl": ("safety_text", {"length": 4}, 4, None, {"stage_one": 0}),
}


def config(recipe, **changes):
    env, args, max_new_tokens, *_, own = RUNS[recipe]
    share = "separate" if recipe == "waltzrl" else "shared"
    small = {
        "steps": 1,
        "batch": 4,
        "group": 4,
        "team": {"parameter_sharing": share, "max_new_tokens": max_new_tokens, "remat": False, "backbone": SHAPE},
        "env": {"name": env, "args": {"tasks": 32, **args}, "workers": 0, "max_prompt": 512, "eval_tasks": 4},
        "sft": {"steps": SFT_STEPS, "batch": 8, "samples": 32, "optimizer": {"learning_rate": 3e-2}},
        "run": {"checkpoint_every": 100, "eval_every": 0, "eval_greedy": False, "log_every": 100, "tensorboard": False},
    }
    module = importlib.import_module(f"jaxmarl_llm.recipes.{recipe}")
    return from_dict(module.Config, {**small, **own, **changes}), module


@pytest.fixture(scope="module", params=[pytest.param("rema", marks=pytest.mark.slow), "advantage_alignment", "waltzrl"])
def trained(request, tmp_path_factory):
    """A recipe's configuration, the recipe, its states (at first, after stage 0, after one RL step), what was played,
    the metrics of the RL step.
    """
    cfg, module = config(request.param)
    recipe = module.make(cfg)
    play, played = recipe.env_runner.play, []
    recipe.env_runner.play = lambda *args, **kwargs: played.append(play(*args, **kwargs)) or played[-1]
    with Logger(
        tmp_path_factory.mktemp(request.param), resume_step=None, total_steps=SFT_STEPS + 1, tensorboard=False
    ) as log:
        first = recipe.init(0)
        taught = jax.tree.map(jnp.copy, first)
        for _ in range(cfg.sft.steps):
            taught, _ = recipe.step(taught, log)
        copied = jax.tree.map(jnp.copy, taught)
        after, metrics = recipe.step(taught, log)
    yield cfg, recipe, (first, copied, after), played[0], metrics
    recipe.env_runner.close()


def test_a_recipe_trains_a_team_through_text(trained):
    cfg, _, (first, taught, after), _, metrics = trained
    assert int(after.counters["skipped"]) == 0 and metrics["count/invalid"] == 0
    assert metrics["logprob_diff"] <= 1e-4 and any(0 < v < np.inf for k, v in metrics.items() if "grad_norm" in k)
    for old, new in ((first, taught), (taught, after)):
        leaves = (jax.tree.leaves(s.params["agents"]) for s in (old, new))
        assert any(not np.array_equal(a, b) for a, b in zip(*leaves))


def replayed(env_runner, played, tasks):
    """(transition, rewards, done) of every recorded joint action, played again in the array environment."""
    text = env_runner.cfg.module
    built = env_runner.cfg.build()
    board = getattr(built, "board", built)
    env = BOARDS[env_runner.cfg.name].make(board)
    reset, step, width = jax.jit(env.reset), jax.jit(env.step), board.max_new_tokens
    moves, after = played.tree.transitions, {}
    for j in np.flatnonzero(moves.played):
        state = after[int(moves.parent[j])] if moves.parent[j] >= 0 else reset(KEY, tasks[moves.task[j]])
        actions = [played.records.records[s].action for s in moves.steps[j] if s >= 0]
        if text is not dilemma_text:
            said = [last_line(a)[:width] for a in actions]
        else:
            said = [dilemma_text.MOVES[dilemma_text.move_of("ipd", a.text)].encode() for a in actions]
        after[int(j)], rewards, done = step(KEY, state, *pack(said, width))
        yield j, {c: np.asarray(v) for c, v in rewards.items()}, bool(done)


def test_the_host_engine_pays_what_the_array_game_pays(trained):
    cfg, recipe, _, got, _ = trained
    moves, seen = got.tree.transitions, 0
    assert not got.failures
    tasks = [
        recipe.env_runner.tasks[i]
        for i in shuffled(stream(cfg.seed, TASKS), recipe.env_runner.size, 0, cfg.batch).tolist()
    ]
    for j, rewards, done in replayed(recipe.env_runner, got, tasks):
        assert done == moves.done[j] and moves.valid[j]
        assert set(rewards) == set(moves.rewards)
        for component, values in rewards.items():
            np.testing.assert_array_equal(moves.rewards[component][j], values, err_msg=component)
        seen += 1
    assert seen == moves.played.sum() == (RUNS[cfg.recipe][3] or seen)
    assert any(np.ptp(moves.rewards[c][moves.played]) > 0 for c in cfg.reward)  # it was no empty comparison


def test_states_and_factories_go_to_workers_and_back(trained):
    cfg, recipe, *_ = trained
    play, env = pickle.loads(pickle.dumps(recipe.env_runner.task.make)), recipe.env_runner.env
    state = env.reset(3, recipe.env_runner.tasks[0])
    again = pickle.loads(pickle.dumps(state))
    assert env.observe(state) == env.observe(again) == play().observe(again)


def test_a_memory_entry_has_the_score_of_the_player_itself(trained):
    cfg, recipe, _, got, _ = trained
    rows = np.flatnonzero(got.tree.steps.valid)
    _, _, texts = recipe.env_runner.lessons(recipe.team, got, rows)
    if cfg.env.name != "dilemma_text":
        assert all(text.startswith(got.records.records[row].role) for row, text in zip(rows, texts))
        return
    tree, final = got.tree, _final_move(got.tree)
    seats = tree.nodes.role[tree.steps.node[rows]]
    own = tree.transitions.rewards["payoff"][final[rows], seats]
    assert all(f"({paid:.1f})" in text for paid, text in zip(own, texts)) and set(seats) == {0, 1}


# Bad input


@pytest.mark.parametrize(
    "recipe, changes, message",
    [
        ("rema", {"env": {"name": "chain_text", "args": {"protocol": "verify"}}}, "roles meta, reasoner"),
        ("rema", {"env": {"name": "chain_txt"}}, "did you mean 'chain_text'"),
        ("rema", {"reward": {"payoff": 1.0}}, "environment 'chain_text' pays no 'payoff'"),
        (
            "advantage_alignment",
            {"team": {"max_new_tokens": 1, "backbone": SHAPE}},
            "max_new_tokens: 32 of 32 demonstrations of role 'first' are longer than 1 tokens",
        ),
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
    text = EnvConfig(name).module
    cfg = dataclasses.replace(EnvConfig(name).build(), **({"game": "split"} if name == "dilemma_text" else {}))
    held = BOARDS[name].make_tasks(cfg, None, 5, held_out=True)
    for i, task in enumerate(text.tasks(dataclasses.replace(cfg, split="test", count=5))):
        assert all(np.array_equal(task[k], held[k][i]) for k in held)


def test_what_a_step_draws_is_determined_by_its_seed():
    """An environment whose step pays a random number."""
    pays = lambda key, state, tokens, length: (state, {"accuracy": jnp.full(2, jax.random.uniform(key))}, True)
    played = by_last_line("relay", toys.relay()._replace(step=pays), 4, lambda role, shown: (Message("user", shown),))
    state = played.reset(0, {"start": np.int32(65)})
    assert played.observe(state) == {"a": (Message("user", "AA>"),)}
    drawn = [played.step(seed, state, {"a": Action("x", (120,))})[1]["a"]["accuracy"] for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
