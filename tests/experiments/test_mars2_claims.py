"""The claims of MARS^2: what the arms differ in, how a first and a best attempt are counted, a run in miniature."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import mars2 as claims
from experiments.studies.phase_runs import after_stage_0, begun_as
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.recipes.mars2 import make
from jaxmarl_llm.runs.compiled import make_evaluation
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
ARMS = ("tiny", "alone", "flat", "unshaped", "uniform", "chain")


def small(cfg):
    env = dataclasses.replace(cfg.env, args={**cfg.env.args, "tasks": 64, "attempts": 3}, eval_tasks=32)
    team = dataclasses.replace(cfg.team, backbone=SMALL, overrides={name: SMALL for name in cfg.team.overrides})
    sft = SFT(40, 32, Optimizer(learning_rate=2e-2), samples=256)
    arm = dataclasses.replace(cfg, steps=2, batch=4, expansions=3, env=env, team=team, sft=sft)
    return dataclasses.replace(arm, optimizer=Optimizer(learning_rate=1e-2))


def test_arms_differ_in_what_the_claims_say():
    pair, alone, flat, unshaped, uniform, chain = (getattr(claims, name)() for name in ARMS)
    assert dataclasses.replace(alone, team=pair.team) == pair and not alone.team.models
    assert dataclasses.replace(flat, choose="thompson", strength=0.5) == alone
    assert (flat.choose, flat.strength) == ("root", 0.0)
    assert dataclasses.replace(unshaped, strength=0.5) == pair and unshaped.strength == 0
    assert dataclasses.replace(uniform, choose="thompson") == dataclasses.replace(chain, choose="thompson") == pair
    assert (uniform.choose, chain.choose, pair.choose) == ("uniform", "last", "thompson")
    assert [*claims.AGAINST] == [*claims.CLAIMS] and {claim.delta for claim in claims.CLAIMS.values()} == {0.02}


@pytest.fixture(scope="module")
def begun():
    recipe = make(small(claims.tiny()))
    return recipe, *after_stage_0(recipe, [3, 4])


@pytest.mark.slow
def test_a_first_attempt_is_the_first_turn_of_an_episode(begun):
    """The pair's first player, with one turn, writes what the model alone does; the second one has other parameters."""
    recipe, state, data = begun
    once = claims.first_attempt(small(claims.alone()))
    got = [once(model, jnp.array([3, 4]), data.held_out) for model in state.params["agents"].values()]
    cfg = dataclasses.replace(recipe.cfg, env=dataclasses.replace(recipe.cfg.env, args={**recipe.cfg.env.args,
                                                                                        "attempts": 1}))  # fmt: skip
    wanted = jax.vmap(make_evaluation(cfg))(state.params, jnp.array([3, 4]), data.held_out)["tests"]
    np.testing.assert_allclose(got[0], wanted, atol=1e-6)
    assert (got[0] != got[1]).any()


@pytest.mark.slow
def test_a_start_keeps_parameters_and_nothing_else_of_another_team(begun):
    """With its own parameters a recipe begins as after its stage 0. One model begins with those of one of the pair."""
    recipe, state, _ = begun
    again = begun_as(recipe, state, state.params["agents"])
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.map(np.asarray, s.replace(key=0)) for s in (state, again)))
    partner = state.params["agents"]["partner"]
    alone = begun_as(make(small(claims.alone())), state, {"coder": partner})
    for kept in (alone.params["agents"], alone.params["reference"]):
        jax.tree.map(np.testing.assert_array_equal, kept, {"coder": partner})
    assert set(alone.opt_state) == {"coder"} and (alone.step == state.step).all()


@pytest.mark.slow
def test_claims_of_a_run_in_miniature(monkeypatch):
    """A finding for each claim, by the better model of each arm; all arms begin with one stage 0."""
    for name in ARMS:
        monkeypatch.setattr(claims, name, lambda cfg=small(getattr(claims, name)()): cfg)
    lines = []
    found = {finding.claim: finding for finding in claims.run([3, 4], lines.append)}
    assert [*found] == [*claims.CLAIMS] and len(lines) == 1 + len(ARMS)
    for name, (one, other) in claims.AGAINST.items():
        figures = found[name].figures
        wanted = np.subtract(figures[f"pass@1, {one}"], figures[f"pass@1, {other}"])
        np.testing.assert_allclose(found[name].effect, wanted)
        assert all(0 <= value <= 1 for values in figures.values() for value in values)
    shown = {key: value for finding in found.values() for key, value in finding.figures.items()}
    starts = [key for key in shown if key.startswith("pass@1") and shown[key] != shown["pass@1, taught"]]
    assert starts, "RL trained nothing"
