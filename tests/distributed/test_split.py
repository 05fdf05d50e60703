"""Models on devices of their own: the same run as on one device, every model on its part, all at once."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.distributed import sharding
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.rollout import launches
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.training import learner as train
from tests import toys

BACKBONE = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
TEAM = {
    "backbone": BACKBONE,
    "overrides": {"second": {**BACKBONE, "hidden_size": 64}},
    "max_new_tokens": 6,
    "remat": False,
}
SPLIT = {"data": 2, "fsdp": 2, "tensor": 1, "models": "split"}


def config(**changes):
    """Two players of different architectures through text; a supervised step and one of RL, SGD."""
    base = {
        "steps": 1,
        "batch": 4,
        "group": 2,
        "team": TEAM,
        "env": {"name": "dilemma_text", "args": {"game": "split"}, "eval_tasks": 4, "workers": 0, "max_prompt": 512},
        "reward": {"payoff": 1.0},
        "optimizer": {"name": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0},
        "sft": {"steps": 1, "batch": 4, "samples": 16, "optimizer": {"name": "sgd"}},
        "run": {"eval_every": 0, "eval_greedy": False, "log_every": 100, "tensorboard": False, "checkpoint_every": 1},
    }
    return from_dict(magrpo.Config, {**base, **changes})


def paid(recipe):
    """``recipe`` with rewards that differ, and the agents that its steps of RL begin with, as they come."""
    original, agents = recipe.env_runner.play, []

    def play(team, params, *args, held_out=False, **more):
        if held_out:
            return original(team, params, *args, held_out=held_out, **more)
        agents.append(jax.device_get(params["agents"]))
        played = original(team, params, *args, **more)
        return played._replace(tree=toys.paid(played.tree))

    recipe.env_runner.play = play
    return recipe, agents


def distance(a, b):
    apart = jax.tree.map(lambda x, y: float(np.abs(np.asarray(x) - np.asarray(y)).max()), a, b)
    return max(jax.tree.leaves(apart))


@pytest.fixture
def met(monkeypatch):
    """Where a model's thread meets the other's: what ran alone would wait there until the barrier breaks."""
    barrier, found = threading.Barrier(2, timeout=120), []

    def both(owner, name):
        original = getattr(owner, name)

        def call(*args, **kwargs):
            mesh = sharding.current()
            found.append((name, tuple(d.id for d in mesh.devices.flat)))
            barrier.wait()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    both(launches, "generate_launch")
    both(train, "update")
    return found


def test_a_split_team_runs_as_on_one_device_and_at_once(tmp_path, met, request):
    recipe, taught = paid(magrpo.make(config(mesh=SPLIT)))
    split = fit(config(mesh=SPLIT), recipe, tmp_path / "split")
    recipe.env_runner.close()
    parts = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert {name for name, _ in met} == {"generate_launch", "update"} and {devices for _, devices in met} == set(parts)
    assert [met.count(("update", devices)) for devices in parts] == [2, 2]  # a supervised step and one of RL
    for trees in (split.params["agents"], split.opt_state):
        for name, first in zip([m.name for m in recipe.team.models], (0, 4)):
            leaves = jax.tree.leaves(trees[name])
            assert {d.id for x in leaves for d in x.devices()} <= set(range(first, first + 4))
    request.getfixturevalue("monkeypatch").undo()
    recipe, _ = paid(magrpo.make(config()))
    one = fit(config(), recipe, tmp_path / "one")
    recipe.env_runner.close()
    for name, before in taught[0].items():
        assert distance(split.params["agents"][name], before) > 1e-3, name  # or there is nothing to compare
    assert distance(split.params["agents"], one.params["agents"]) < 2e-5
    # What was saved of one device goes on on two parts.
    longer = config(steps=2, mesh=SPLIT)
    recipe = magrpo.make(longer)
    state = fit(longer, recipe, tmp_path / "one")
    recipe.env_runner.close()
    assert len({frozenset(d.id for d in x.devices()) for x in jax.tree.leaves(state.params["agents"])}) > 1


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            {"team": {**TEAM, "overrides": {}, "parameter_sharing": "lora"}},
            r"mesh\.models: expected 'all' where models share a back",
        ),
        ({"env": {"name": "matrix", "eval_tasks": 4}}, r"mesh\.models: expected 'all' with config\.env\.name"),
        ({"mesh": {**SPLIT, "models": "parts"}}, r"config\.mesh\.models: unknown value 'parts'"),
        ({"mesh": {**SPLIT, "data": 4}}, r"config\.mesh: 4 devices cannot be data=4 x fsdp=2 x tensor=1"),
    ],
)
def test_what_cannot_be_split_says_so(changes, message):
    with pytest.raises(ConfigError, match=message):
        magrpo.make(config(**{"mesh": SPLIT, **changes}))


def test_a_stacked_team_plays_the_same_in_one_launch_a_turn():
    trees = []
    for stacked in (False, True):
        team = {**TEAM, "overrides": {}, "parameter_sharing": "lora", "batch_models": stacked, "max_new_tokens": 1}
        recipe = magrpo.make(config(team=team, env={"name": "matrix", "eval_tasks": 4}, sft={"steps": 0}))
        params = recipe.init(0).params
        lora = params["agents"]["second"]["lora"]
        params["agents"]["second"]["lora"] = jax.tree.map(lambda x: x + 0.3, lora)  # adapters begin alike
        args = range(4), flat(2), jax.random.key(3), Sampling(), None
        trees.append(recipe.env_runner.play(recipe.team, params, {}, *args).tree)
    alone, together = trees
    np.testing.assert_array_equal(alone.steps.tokens, together.steps.tokens)
    assert (int(alone.counts.launches), int(together.counts.launches)) == (2, 1)
    with pytest.raises(ConfigError, match=r"config\.team\.batch_models: expected false with the host environment"):
        magrpo.make(config(team={**TEAM, "batch_models": True}))
