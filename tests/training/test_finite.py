"""`run.debug`: the first value that is not finite ends a run with step, role or model, and part."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training import finite
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.drivers import HostDriver

SMALL = Backbone(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
TASKS, GROUP, STEPS = 4, 2, 2


def recipe(debug: bool = True, reward=None, sft: int = 0, **changes) -> phases.Recipe:
    """Two roles with a model each, which act at once in a game of one round. ``reward``: a `RewardSchedule`."""
    made = grpo.make(
        grpo.Config(
            env=EnvConfig("matrix", {"rounds": 1}, eval_tasks=4),
            reward={"payoff": 1.0},
            team=TeamConfig(backbone=SMALL, max_new_tokens=1, remat=False),
            batch=TASKS,
            group=GROUP,
            steps=STEPS,
            sft=SFT(steps=sft, batch=8, samples=32),
            run=RunConfig(debug=debug),
            **changes,
        )
    )
    if reward is None:
        return made
    step = made.phases[-1].step
    return phases.with_algorithm(made, dataclasses.replace(step.algorithm, reward=reward))


def steps(made: phases.Recipe, state=None):
    """The state after the steps that `fit` takes."""
    state = made.init(0) if state is None else state
    logger = Logger(".", resume_step=None, total_steps=STEPS, primary=False)
    for _ in range(made.total_steps):
        state, _ = made.step(state, logger)
    return state


def spoilt(made: phases.Recipe, model: str):
    """A first state in which one parameter of a model is NaN."""
    state = made.init(0)
    agents = dict(state.params["agents"])
    leaves, tree = jax.tree.flatten(agents[model])
    agents[model] = jax.tree.unflatten(tree, [leaves[0].at[..., 0].set(jnp.nan), *leaves[1:]])
    return state.replace(params={**state.params, "agents": agents})


def weights_of(rl_step):
    """Weights of a schedule that divides by zero in its second step."""
    return {"payoff": jnp.where(rl_step == 1, jnp.nan, 1.0)}


def test_a_reward_schedule_that_gives_nan_is_named_with_its_step():
    with pytest.raises(FloatingPointError) as caught:
        steps(recipe(reward=weights_of))
    first = recipe().team.roles[0].name
    assert str(caught.value) == f"step 2: role {first!r}: weighted rewards are not finite (8 of 8)"


@pytest.mark.parametrize("index", [0, 1])
def test_a_parameter_that_is_nan_is_named_by_the_role_that_samples_with_it(index):
    made = recipe()
    role = made.team.roles[index]
    with pytest.raises(FloatingPointError) as caught:
        steps(made, spoilt(made, role.model))
    assert str(caught.value).startswith(f"step 1: role {role.name!r}: sampler log-probabilities are not finite (")


def test_a_supervised_step_names_the_model():
    made = recipe(sft=1)
    model = made.team.models[1].name
    with pytest.raises(
        FloatingPointError, match=rf"^step 1: model '{model}': differences between log-prob.* are not finite \("
    ):
        steps(made, spoilt(made, model))


def blow_up(step, driver, state, batches):
    """An update that leaves one parameter infinite."""
    state, metrics = driver.optimize(step.team.models, step.learners, step.cfg.loss, state, batches)
    name = step.team.models[1].name
    agents = dict(state.params["agents"])
    agents[name] = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(jnp.inf), agents[name])
    return state.replace(params={**state.params, "agents": agents}), metrics


def test_an_update_that_leaves_infinite_parameters_is_named_by_model_and_leaf():
    made = recipe(update=f"{__name__}:blow_up")
    model = made.team.models[1].name
    with pytest.raises(FloatingPointError, match=rf"^step 1: model '{model}': updated parameters .+ \(1 of \d+\)$"):
        steps(made)


def not_a_number(tree, signal):
    """A credit rule whose advantages are NaN for role 1."""
    role = tree.nodes.role[tree.steps.node]
    value = jnp.where(role == 1, jnp.nan, 0.0)
    return signal.replace(value=value, advantage=value, valid=tree.steps.valid)


def test_advantages_of_a_rule_of_ones_own_are_named():
    made = recipe(credit=dataclasses.replace(grpo.Config().credit, rule=f"{__name__}:not_a_number"))
    second = made.team.roles[1].name
    with pytest.raises(FloatingPointError) as caught:
        steps(made)
    assert str(caught.value) == f"step 1: role {second!r}: advantages are not finite (8 of 8)"


def test_rewards_that_could_not_be_computed_are_no_fault():
    """Rows that are not valid may hold NaN; the same rows are found where they are valid."""
    made = recipe()
    step, state, team = made.phases[-1].step, made.init(0), made.team
    driver = HostDriver(0, Logger(".", resume_step=None, total_steps=STEPS, primary=False))
    tree, _ = driver.play(step, state, state.params, np.arange(TASKS), jax.random.key(0), None)
    rows, moves = tree.steps, tree.transitions
    spoil = lambda x: np.where(np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 1, np.nan, x).astype(x.dtype)
    rows = rows.replace(logprobs=spoil(rows.logprobs))
    moves = moves.replace(rewards={name: spoil(x) for name, x in moves.rewards.items()})
    advantage = spoil(np.zeros(len(rows.valid), np.float32))
    hide = lambda valid: valid & (np.arange(len(valid)) != 1)

    def check(rows, moves):
        spoilt = tree.replace(steps=rows, transitions=moves)
        return {
            "sampler log-probabilities": lambda: finite.check_rollout(team, spoilt, 1),
            "weighted rewards": lambda: finite.check_rewards(team, spoilt, {"payoff": 1.0}, 1),
            "advantages": lambda: finite.check_advantages(team, spoilt, advantage, rows.valid, 1),
        }

    for part, found in check(rows, moves).items():
        with pytest.raises(FloatingPointError, match=part):
            found()
    for passes in check(rows.replace(valid=hide(rows.valid)), moves.replace(valid=hide(moves.valid))).values():
        passes()


def test_the_flag_leaves_the_run_as_it_is_and_without_it_nothing_is_checked(monkeypatch):
    checked = []
    real = finite.require_finite
    monkeypatch.setattr(finite, "require_finite", lambda *args: (checked.append(args[1:3]), real(*args))[1])
    with_checks, roles = steps(recipe(sft=1)), [role.name for role in recipe().team.roles]
    parts = {part for _, part in checked}
    assert {"sampler log-probabilities", "weighted rewards", "advantages"} <= parts
    assert any("gradients of" in part for part in parts) and any("updated parameters" in part for part in parts)
    assert {f"role {name!r}" for name in roles} <= {who for who, _ in checked}
    checked.clear()
    assert digests(steps(recipe(debug=False, sft=1))) == digests(with_checks)
    jax.make_jaxpr(make_program(recipe(debug=False, sft=1)).run)(jnp.int32(0))
    assert not checked


PARTS = ("sampler log-probabilities", "weighted rewards", "advantages", "gradients of", "updated parameters")


def test_a_compiled_run_names_the_same_step_role_and_part(monkeypatch):
    checked = []
    real = finite.require_finite
    monkeypatch.setattr(finite, "require_finite", lambda *args: (checked.append(args[2]), real(*args))[1])
    run = jax.jit(make_program(recipe(reward=weights_of)).run)
    with pytest.raises(RuntimeError, match="chexify"):
        run(jnp.int32(0))
    first = recipe().team.roles[0].name
    with pytest.raises(AssertionError, match=rf"step 2: role '{first}': weighted rewards are not finite \(8 of 8\)"):
        chex.chexify(run, async_check=False)(jnp.int32(0))
    assert all(any(part.startswith(name) for part in checked) for name in PARTS)


@pytest.mark.parametrize("xp", [np, jnp])
def test_only_what_counts_is_checked(xp):
    values = xp.array([[1.0, np.nan], [np.inf, 2.0]])
    finite.require_finite(1, "role 'a'", "values", values, xp.array([[True, False], [False, True]]))
    with pytest.raises(FloatingPointError, match=r"^step 3: role 'a': values are not finite \(1 of 2\)$"):
        finite.require_finite(xp.int32(3), "role 'a'", "values", values, xp.array([True, False])[:, None])


def test_braces_in_a_name_are_no_format():
    check = lambda x: (finite.require_finite(4, "role '{x}'", "values", x), x)[1]
    with pytest.raises(AssertionError, match=r"step 4: role '\{x\}': values are not finite \(1 of 2\)"):
        chex.chexify(jax.jit(check), async_check=False)(jnp.array([np.nan, 0.0]))
