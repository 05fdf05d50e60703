"""Pay by change: what is scored and paid, the best parameters put back, idle steps, resumption, bad input."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.recipes import cpmobius
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.runs.phases import with_algorithm
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.keys import is_documented
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.evaluation import by_task
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.pay_by_change import PayByChange, scaled

SMALL = Backbone(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
RUN = RunConfig(checkpoint_every=2, eval_every=0, eval_greedy=False, tensorboard=False, max_logprob_diff=0)
CONFIG = cpmobius.Config(
    steps=6,
    batch=6,
    answers=6,
    outcomes=3,
    extra_plays=1,
    patience=2,
    team=TeamConfig(backbone=SMALL, max_new_tokens=1, remat=False),
    env=EnvConfig("tests.training.coaching", eval_tasks=16),
    optimizer=Optimizer(learning_rate=0.03),
    sft=SFT(0),
    run=RUN,
)


def scripted(scores, **changes):
    """A recipe whose scores are ``scores``."""
    recipe = cpmobius.make(dataclasses.replace(CONFIG, **changes))
    algorithm = recipe.phases[-1].step.algorithm
    calls = iter(scores)
    update = dataclasses.replace(algorithm.update)
    object.__setattr__(update, "score", lambda step, state: jnp.float32(next(calls)))
    return with_algorithm(recipe, dataclasses.replace(algorithm, update=update))


def steps(recipe, folder, count, state=None):
    """Copies of the state after each of some steps, the first one before them, and the metrics of each step."""
    copy = lambda state: jax.tree.map(jnp.copy, state)
    state = recipe.init(0) if state is None else state
    states, metrics = [copy(state)], []
    with Logger(folder, resume_step=None, total_steps=count, primary=False) as logger:
        for _ in range(count):
            state, seen = recipe.step(state, logger)
            states.append(copy(state))
            metrics.append(seen)
    return states, metrics


def own(state, model):
    return digests(state.params["agents"][model])


def test_the_score_is_that_of_the_part_and_the_change_its_difference(tmp_path):
    recipe = cpmobius.make(CONFIG)
    states, metrics = steps(recipe, tmp_path, 3)
    task = recipe.env_runner.task
    scores = []
    for state in states:
        rows = by_task(recipe.cfg, recipe.team, recipe.env_runner, state)["accuracy"]
        only = by_task(recipe.cfg, recipe.team, recipe.env_runner, state, numbers=np.arange(16)[::2])["accuracy"]
        np.testing.assert_array_equal(task.held_out["question"] % 2 == 0, task.parts["validation"])
        assert len(rows) == 16 and len(only) == 8
        scores.append(float(only.mean()))
    for before, after, seen in zip(scores, scores[1:], metrics):
        assert seen["change/score"] == pytest.approx(after) and seen["change/change"] == pytest.approx(after - before)
    assert metrics[-1]["change/best"] == pytest.approx(max(scores))
    assert all(is_documented(key) or key in ("bad", "idle") for seen in metrics for key in seen)


def test_best_parameters_are_put_back_after_changes_below_0(tmp_path):
    """Scores .5 .6 .5 .4: two negative changes after the best step. Then .7 from there."""
    recipe = scripted([0.5, 0.6, 0.5, 0.4, 0.7])
    states, metrics = steps(recipe, tmp_path, 4)
    start, best, worse, back, on = states
    assert own(start, "player") != own(best, "player") != own(worse, "player")
    assert own(back, "player") == own(best, "player")
    assert own(back, "coach") != own(worse, "coach") != own(best, "coach")
    fresh = recipe.phases[-1].step.learners["player"].init(back.params["agents"]["player"])
    assert digests(back.opt_state["player"]) == digests(fresh) != digests(best.opt_state["player"])
    seen = [(m["change/score"], m["change/best"], m["change/returns"]) for m in metrics]
    np.testing.assert_allclose(seen, [(0.6, 0.6, 0), (0.5, 0.6, 0), (0.6, 0.6, 1), (0.7, 0.7, 1)], rtol=1e-6)
    assert own(on, "player") != own(best, "player") and digests(on.kept["change"].best) == own(on, "player")
    np.testing.assert_allclose([m["change/change"] for m in metrics], [0.1, -0.1, 0.0, 0.1], atol=1e-6)


def test_the_score_before_the_first_update_can_be_the_best(tmp_path):
    states, _ = steps(scripted([0.5, 0.4, 0.3]), tmp_path, 2)
    assert own(states[2], "player") == own(states[0], "player") != own(states[1], "player")


def test_without_a_change_the_paid_role_is_byte_equal(tmp_path):
    states, metrics = steps(scripted([0.5, 0.5]), tmp_path, 1)
    assert own(states[1], "coach") == own(states[0], "coach")
    assert digests(states[1].opt_state["coach"]) == digests(states[0].opt_state["coach"])
    assert own(states[1], "player") != own(states[0], "player") and metrics[0]["agent/coach/updated"] == 0


def test_the_payment_is_a_function_handed_in(tmp_path):
    """Twice the change pays twice as much: with SGD the paid role moves twice as far, the learner alike."""
    sgd = Optimizer(name="sgd", learning_rate=0.5, max_grad_norm=0.0)
    moved = {}
    for change in (0.25, 0.5):
        recipe = scripted([0.25, 0.25 + change], optimizer=sgd, malformed=0.0)
        states, _ = steps(recipe, tmp_path, 1)
        agents = [state.params["agents"] for state in states]
        moved[change] = jax.tree.map(lambda a, b: np.asarray(b - a, np.float64), *agents)
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7, rtol=1e-3)
    jax.tree.map(close, jax.tree.map(lambda x: 2 * x, moved[0.25]["coach"]), moved[0.5]["coach"])
    jax.tree.map(close, moved[0.25]["player"], moved[0.5]["player"])
    assert max(np.abs(x).max() for x in jax.tree.leaves(moved[0.5]["coach"])) > 1e-3
    assert scaled(0.02, np.array([0.25])) == 0.005


def test_idle_steps_train_nobody_are_counted_and_end_the_run(tmp_path):
    """All questions are malformed. Then all are outside the band."""
    mute = dataclasses.replace(CONFIG.env, args={"mute": True})
    for change in ({"env": mute}, {"band": (0.0, 0.0)}):
        cfg = dataclasses.replace(CONFIG, **change)
        states, metrics = steps(cpmobius.make(cfg), tmp_path, 2)
        assert [m["count/idle"] for m in metrics] == [1, 2] and all(m["idle"] for m in metrics)
        assert digests(states[2].params) == digests(states[0].params)
        assert digests(states[2].opt_state) == digests(states[0].opt_state)
    cfg = dataclasses.replace(cfg, env=mute, run=dataclasses.replace(RUN, max_bad_steps=3))
    with pytest.raises(RunError, match=r"^step 3: 3 steps in a row trained nobody: .*; the last checkpoint is .* 2$"):
        fit(cfg, cpmobius.make(cfg), tmp_path / "run")
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["count/idle"] == 3 and "idle" not in last


@pytest.mark.slow
def test_a_resumed_run_is_equal_to_the_bit(tmp_path):
    """Score, history and best parameters go on from the checkpoint of step 4, after the best ones were put back."""
    cfg = dataclasses.replace(CONFIG, patience=1)
    whole = fit(cfg, cpmobius.make(cfg), tmp_path / "whole")
    part = dataclasses.replace(cfg, steps=4)
    fit(part, cpmobius.make(part), tmp_path / "parts")
    resumed = fit(cfg, cpmobius.make(cfg), tmp_path / "parts", allow_config_change=["steps"])
    assert digests(whole) == digests(resumed)
    assert int(whole.kept["change"].returns) > 0 and int(whole.kept["change"].updates) > 4


BAD = [
    (
        {"team": dataclasses.replace(CONFIG.team, parameter_sharing="shared")},
        None,
        r"^config\.team: expected a model of its own for role 'coach', which is paid for changes of role 'player'; ",
    ),
    ({}, {"part": "dev"}, r"has no held-out tasks of part 'dev'; its parts are validation, test$"),
    ({}, {"component": "f1"}, r"pays no 'f1'; it pays accuracy, answer, malformed$"),
]


@pytest.mark.parametrize("change, update, message", BAD, ids=[m for *_, m in BAD])
def test_bad_input(change, update, message):
    recipe = cpmobius.make(dataclasses.replace(CONFIG, **change))
    if update:
        algorithm = recipe.phases[-1].step.algorithm
        own = dataclasses.replace(algorithm.update, **update)
        recipe = with_algorithm(recipe, dataclasses.replace(algorithm, update=own))
    with pytest.raises(ConfigError, match=message) as error:
        recipe.init(0)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"^PayByChange\.patience: expected >= 1, got 0$"):
        PayByChange("player", "coach", patience=0)


def test_a_compiled_run_refuses_in_one_line():
    recipe = cpmobius.make(CONFIG)
    with pytest.raises(ConfigError, match=r"^config\.recipe: cpmobius: dynamic sampling .*; use fit$"):
        make_program(recipe)
    alone = with_algorithm(recipe, dataclasses.replace(recipe.phases[-1].step.algorithm, play=None))
    assert alone.phases[-1].step.on_host == PayByChange.on_host
