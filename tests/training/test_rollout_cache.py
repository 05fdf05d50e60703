"""Rollouts with quantized caches: their samples, what the update makes of them, and what stays as it was."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.kernels.quantized import VALUES
from jaxmarl_llm.models import rollout_cache
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.training.losses import Loss
from tests.kernels.test_quantized import forms
from tests.models.test_rollout_cache import rounding
from tests.training.relay import steps
from tests.training.test_rollout_weights import LORA, SHARED, array_run, team, text_run


def quantized(form):
    """Settings of a run whose rollouts cache keys and values in a form."""
    return {"rollout_cache": form, "loss": Loss(tis_clip=2.0)}


@functools.cache
def generating_with_rounded(policy, form):
    """A policy that generates with plain caches of keys and values which a test rounds. Training does not."""
    return rounding(policy, form)._replace(hidden=policy.hidden)


RUNS = {
    "array, separate": (array_run, {}),
    "array, adapters": (array_run, {"team": LORA}),
    "array, models in one launch": (array_run, {"team": team(batch_models=True)}),
    "text, shared": (text_run, {"team": SHARED}),
    "text, lanes": (text_run, {"env": EnvConfig("text", workers=0, max_prompt=64, eval_tasks=2, lanes=4)}),
    "text, one step behind": (text_run, {"staleness": 1}),
    "text, int8 weights too": (text_run, {"rollout_weights": "int8"}),
}
CASES = [*((name, "int8") for name in RUNS), ("array, separate", "fp8"), ("text, int8 weights too", "fp8")]


@pytest.mark.parametrize("name, form", CASES)
def test_a_run_samples_with_rounded_keys_and_values_and_learns_from_whole_ones(name, form, tmp_path):
    make, changes = RUNS[name]
    state, results, metrics = steps(make(**quantized(form), **changes), tmp_path / form, 2)
    recipe = make(loss=Loss(tis_clip=2.0), **changes)
    recipe.env_runner.cache_form = functools.partial(generating_with_rounded, form=form)
    other, witness, _ = steps(recipe, tmp_path / "witness", 2)
    for result, right in zip(results, witness, strict=True):
        got, right = result.tree.steps, right.tree.steps
        np.testing.assert_array_equal(got.tokens, right.tokens)
        off = np.abs(got.logprobs - right.logprobs)
        # A number between two steps may be rounded otherwise by a sum in another order.
        assert np.median(off) < 1e-5 and off.max() < 5e-3
    for a, b in zip(*map(jax.tree.leaves, (state.params, other.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert min(seen["logprob_diff"] for seen in metrics) > 1e-5  # training and rollouts differ, and that is measured


def test_old_log_probs_are_the_learners_and_each_token_has_its_weight(tmp_path):
    """The mean weight is that of an own scoring by the plain policy; without a form it is 1."""
    cap, found = 1.0005, {}
    for form in rollout_cache.FORMS:
        recipe = text_run(rollout_cache=form, loss=Loss(tis_clip=cap), team=SHARED)
        first = recipe.init(0)
        policy, params = recipe.team.models[0].policy, jax.tree.map(jnp.copy, first.params["agents"]["team"])
        _, (result,), (seen,) = steps(recipe, tmp_path / form, 1, first)
        tree, rows = result.tree, np.flatnonzero(result.trained)
        nodes, r = tree.steps.node[rows], tree.steps.tokens.shape[1]
        hidden = policy.hidden(
            params, tree.nodes.tokens[nodes], tree.nodes.length[nodes], tree.steps.tokens[rows][:, None]
        )
        every = jax.nn.log_softmax(policy.unembed(params, hidden[:, 0]))
        own = np.take_along_axis(np.asarray(every), tree.steps.tokens[rows][..., None], -1)[..., 0]
        said = np.arange(r) < tree.steps.length[rows][:, None]
        gap = np.where(said, own - tree.steps.logprobs[rows], 0)
        found[form] = np.abs(gap).max()
        role = f"agent/{recipe.team.roles[0].name}"
        assert seen["logprob_diff"] == pytest.approx(found[form], abs=2e-5)
        weight = np.minimum(np.exp(gap[said]), cap).mean()
        assert seen[f"{role}/importance_weight"] == pytest.approx(weight, abs=1e-5)
        assert seen[f"{role}/ratio"] == pytest.approx(1, abs=1e-6)  # old is the learner's
        assert form == "same" or seen[f"{role}/tis_clipped"] > 0
    assert min(found[form] for form in VALUES) > 3e-4 > 3e-5 > found["same"]


@forms
def test_evaluations_and_runs_without_the_setting_have_the_models_themselves(tmp_path, form):
    plain, one = array_run(loss=Loss(tis_clip=2.0)), array_run(**quantized(form))
    assert plain.env_runner.cache_form is None and plain.env_runner.playing(plain.team, held_out=False) is plain.team
    assert one.env_runner.playing(one.team, held_out=True) is one.team
    assert one.env_runner.playing(one.team, held_out=False) is not one.team
    assert one.evaluate(one.init(0)) == plain.evaluate(plain.init(0))
    text, plain_text = text_run(**quantized(form)), text_run(loss=Loss(tis_clip=2.0))
    assert text.evaluate(text.init(0)) == plain_text.evaluate(plain_text.init(0))


@forms
def test_a_run_trains_from_end_to_end_and_its_checkpoints_are_floats(tmp_path, form):
    recipe = array_run(**quantized(form), steps=2)
    state = fit(recipe.cfg, recipe, tmp_path)
    assert int(state.step) == 2
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"float32"}


@forms
def test_a_model_without_a_form_is_refused_before_a_run(monkeypatch, form):
    monkeypatch.setattr(rollout_cache, "PREFILLS", ())
    rollout_cache.quantized.cache_clear()
    rollout_cache.with_caches.cache_clear()
    with pytest.raises(ConfigError, match=r"config\.rollout_cache: expected 'same' for a model that is no decoder"):
        array_run(**quantized(form))
