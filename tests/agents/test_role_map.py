"""Which model plays which role: some roles share a model, others do not; several models may learn one role."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig, init_params, make_team
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import POLICY

SMALL = Backbone(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
ROLES = ("planner", "coder", "tester")


def team(**changes):
    return TeamConfig(backbone=SMALL, max_new_tokens=1, remat=False, **changes)


def models_of(made):
    return {r.name: [made.models[m].name for m in made.players(i)] for i, r in enumerate(made.roles)}


def test_two_roles_share_a_model_and_the_third_has_its_own():
    for models in ({"tester": "coder"}, {"coder": "both", "tester": "both"}):
        cfg = team(models=models)
        made = make_team(cfg, ROLES)
        shared = next(iter(models.values()))
        assert models_of(made) == {"planner": ["planner"], "coder": [shared], "tester": [shared]}
        assert set(init_params(cfg, made, jax.random.key(0))["agents"]) == {"planner", shared}


def test_overrides_are_of_roles_or_models():
    large = dataclasses.replace(SMALL, hidden_size=32)
    for key in ("both", "coder"):
        cfg = team(models={"coder": "both", "tester": "both"}, overrides={key: large})
        made = make_team(cfg, ROLES)
        sizes = {m.name: m.policy.config.hidden_size for m in made.models}
        assert sizes == {"planner": 16, "both": 32}
        own = init_params(cfg, made, jax.random.key(0))["agents"]
        assert {n: jax.tree.leaves(p)[0].shape for n, p in own.items()}["both"] != jax.tree.leaves(own["planner"])[
            0
        ].shape


BAD = [
    (
        {"models": {"critic": "coder"}},
        r"config\.team\.models: unknown role 'critic'; the roles are planner, coder, tester",
    ),
    (
        {"models": {"coder": "codre"}},
        r"config\.team\.models\.coder: unknown model 'codre'; expected the name of a role",
    ),
    ({"models": {"coder": ()}}, r"config\.team\.models\.coder: expected the name of a model"),
    ({"overrides": {"boss": SMALL}}, r"config\.team\.overrides: unknown role 'boss'"),
    (
        {
            "models": {"coder": "both", "tester": "both"},
            "overrides": {"coder": SMALL, "tester": dataclasses.replace(SMALL, num_layers=2)},
        },
        r"config\.team\.overrides: coder, tester share the model 'both': expected one backbone",
    ),
    ({"models": {"coder": ("coder", "tester")}, "critic": "head"}, r"config\.team\.critic: expected 'none'"),
]


@pytest.mark.parametrize("changes, message", BAD)
def test_bad_maps_end_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        make_team(team(**changes), ROLES)
    assert "\n" not in str(error.value)


def recipe(**changes):
    cfg = magrpo.Config(
        steps=3,
        batch=8,
        team=team(**changes),
        env=EnvConfig("matrix", {"rounds": 2}, eval_tasks=4),
        reward={"payoff": 1.0},
        optimizer=Optimizer(name="sgd", learning_rate=0.3),
        sft=SFT(6, 16, Optimizer(name="sgd", learning_rate=1.0), samples=64),
    )
    cfg.check("config")
    return magrpo.make(cfg)


def test_several_models_of_a_role_all_learn_from_what_they_play(tmp_path):
    """Each plays some of the tasks, by the same draw in both drivers."""
    made = recipe(models={"first": ("first", "second")})
    names = [m.name for m in made.team.models]
    state, played = made.init(0), []
    step = made.phases[-1].step
    with Logger(tmp_path, resume_step=None, total_steps=3, primary=False) as logger:
        for i in range(made.total_steps):
            if i >= 6:
                played.append(np.asarray(step.co_players(jax.random.fold_in(state.key, state.step))))
            if i == 6:
                start = {name: digests(own) for name, own in state.params["agents"].items()}
            state, _ = made.step(state, logger)
    assert names == ["first", "second"] and {0, 1} == set(np.concatenate(played)[:, 0].tolist())
    assert not np.concatenate(played)[:, 1].any(), "the second role has one model"
    assert all(digests(own) != start[name] for name, own in state.params["agents"].items())
    whole, _ = jax.jit(make_program(made).run)(jnp.int32(made.cfg.seed))
    for a, b in zip(jax.tree.leaves(state.params["agents"]), jax.tree.leaves(whole.params["agents"]), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_stage_0_teaches_every_model_of_a_role(tmp_path):
    """Also one that is nobody's first model."""
    made = recipe(models={"first": ("first", "reserve"), "second": ("second", "reserve")})
    state = made.init(0)
    start = {name: digests(own) for name, own in state.params["agents"].items()}
    with Logger(tmp_path, resume_step=None, total_steps=3, primary=False) as logger:
        state, seen = made.step(state, logger)
    assert set(start) == {"first", "reserve", "second"}
    assert all(digests(own) != start[name] for name, own in state.params["agents"].items())
    assert {f"sft/{name}/nll" for name in start} <= set(seen)


def test_what_a_second_model_plays_is_trained():
    made = recipe(models={"first": ("first", "second")})
    state, step = made.init(0), made.phases[-1].step
    assignment = jnp.array([[0, 0], [1, 0]] * 4)
    tree = made.env_runner.play(
        step.players,
        state.params,
        {},
        range(8),
        step.plan,
        jax.random.key(0),
        made.cfg.sampling,
        None,
        assignment=assignment,
    ).tree
    assert (tree.steps.source == POLICY).all()
    first = tree.nodes.role == 0
    np.testing.assert_array_equal(tree.nodes.model[first], tree.nodes.task[first] % 2)
