"""Rollouts that read quantized weights: their samples, what the update makes of them, and what stays as it was."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import LATER, fingerprint, from_dict
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.text_task import TextTask
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.generate import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.kernels.quantized import VALUES, ScaledMatrix
from jaxmarl_llm.models.batch_invariant import invariant
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.models.rollout_weights import FORMS
from jaxmarl_llm.recipes import grpo, malt
from jaxmarl_llm.rollout.env_runner import EnvRunner
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.telemetry.keys import is_documented
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from tests import toys
from tests.kernels.test_quantized import forms, twin
from tests.training import relay
from tests.training.relay import RUN, SMALL, steps

FAST = Optimizer(name="sgd", learning_rate=2.0, max_grad_norm=0.0)
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def team(**changes):
    return TeamConfig(**{"backbone": SMALL, "max_new_tokens": 4, "remat": False, **changes})


SHARED, LORA = team(parameter_sharing="shared"), team(parameter_sharing="lora", lora_rank=2)


def text_run(**changes):
    """GRPO on a game of text of two roles, in worker processes' place."""
    env = EnvConfig("text", workers=0, max_prompt=64, eval_tasks=2)
    base = {"steps": 2, "batch": 4, "group": 2, "team": team(), "sft": relay.SFT(steps=0), "run": RUN, "env": env}
    cfg = grpo.Config(**{**base, "reward": {"reward": 1.0}, "optimizer": FAST, **changes})
    reward = lambda task, texts: {"reward": float(sum(map(len, texts.values())) % 2)}
    return grpo.make(cfg, env=TextTask([{"n": n} for n in range(40)], {"a": "{n}", "b": "{n}?"}, reward))


def quantized(form):
    """Settings of a run whose rollouts read weights in a form."""
    return {"rollout_weights": form, "loss": Loss(tis_clip=2.0)}


def array_run(**changes):
    return relay.make(**{"optimizer": FAST, **changes})


def dequantized(params, form):
    """Parameters whose matrices are rounded by numpy, in float32: what weights in a form stand for."""

    def rounded(path, w):
        if not (path[-1].key == "kernel" and path[-2].key in MATRICES):
            return w
        values, scales = twin(np.asarray(w), form)
        return jnp.asarray(values * scales[..., None, :], jnp.float32)

    return jax.tree_util.tree_map_with_path(rounded, params)


# The form


@forms
def test_matrices_of_layers_change_and_nothing_else_does(form):
    params = toys.policy("qwen3", layers=2, tie_embeddings=False).init(jax.random.key(0))
    model = {"params": params, "lora": init_lora(jax.random.key(1), params, 2), "value": {"kernel": jnp.ones((16, 1))}}
    formed = FORMS[form](model)
    is_matrix = lambda x: isinstance(x, ScaledMatrix)
    before = dict(jax.tree_util.tree_leaves_with_path(model))
    after = dict(jax.tree_util.tree_leaves_with_path(formed, is_leaf=is_matrix))
    changed = {path for path, x in after.items() if is_matrix(x)}
    assert {path[-2].key for path in changed} == set(MATRICES) and len(changed) == 7
    assert all(after[path] is before[path] for path in before if path not in changed)
    assert {str(after[path].values.shape) for path in changed} == {str(before[path].shape) for path in changed}


@forms
@pytest.mark.parametrize("made", ["plain", "invariant"])
@pytest.mark.parametrize("response", [6, 40])  # stacked layers, and layers that are cut before the loop
def test_tokens_are_those_of_weights_that_numpy_rounded_before(response, made, form):
    policy = toys.policy(hidden=32, layers=2)
    params = {"params": policy.init(jax.random.key(0))}
    policy = invariant(policy) if made == "invariant" else policy
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (5, 9)), rng.integers(1, 10, 5), jax.random.split(jax.random.key(1), (5, 3))

    def said(params, temperature):
        more = {"max_new_tokens": response, "stop_ids": (1,), "pad_id": 0}
        return generate(policy, params, *rows, np.ones(5, bool), sampling=Sampling(temperature=temperature), **more)

    for temperature in (0.0, 1.0):
        got, right = said(FORMS[form](params), temperature), said(dequantized(params, form), temperature)
        np.testing.assert_array_equal(got.tokens, right.tokens)
        np.testing.assert_allclose(got.logprobs, right.logprobs, rtol=0, atol=2e-5)
    assert np.abs(got.logprobs - said(params, 1.0).logprobs).max() > 1e-3  # other numbers than those of training


# Runs


RUNS = {
    "array, separate": (array_run, {}),
    "array, adapters": (array_run, {"team": LORA}),
    "array, models in one launch": (array_run, {"team": team(batch_models=True)}),
    "text, shared": (text_run, {"team": SHARED}),
    "text, adapters": (text_run, {"team": LORA}),
    "text, lanes": (text_run, {"env": EnvConfig("text", workers=0, max_prompt=64, eval_tasks=2, lanes=4)}),
    "text, one step behind": (text_run, {"staleness": 1}),
}
CASES = [*((name, "int8") for name in RUNS), ("array, adapters", "fp8"), ("text, lanes", "fp8")]


@pytest.mark.parametrize("name, form", CASES)
def test_a_run_samples_from_rounded_weights_and_learns_whole_ones(name, form, tmp_path, monkeypatch):
    """Its samples are those of a rollout that reads weights which numpy rounded. Rounding changes no trained weight."""
    make, changes = RUNS[name]
    state, results, metrics = steps(make(**quantized(form), **changes), tmp_path / form, 2)
    monkeypatch.setattr(EnvRunner, "formed", lambda self, params, held_out, mesh=None: dequantized(params, form))
    other, witness, _ = steps(make(**quantized(form), **changes), tmp_path / "witness", 2)
    for result, right in zip(results, witness, strict=True):
        got, right = result.tree.steps, right.tree.steps
        np.testing.assert_array_equal(got.tokens, right.tokens)
        np.testing.assert_allclose(got.logprobs, right.logprobs, rtol=0, atol=1e-4)
    for a, b in zip(*map(jax.tree.leaves, (state.params, other.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4)  # an update that reads rounded weights would be far off
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert min(seen["logprob_diff"] for seen in metrics) > 1e-4  # training and rollouts differ, and that is measured


def test_old_log_probs_are_the_learners_and_each_token_has_its_weight(tmp_path):
    """The mean weight is that of an own scoring by the parameters of training; without a form it is 1."""
    cap, found = 1.001, {}
    for form in FORMS:
        recipe = text_run(rollout_weights=form, loss=Loss(tis_clip=cap), team=SHARED)
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
        assert seen["logprob_diff"] == pytest.approx(found[form], abs=2e-5)
        full, weight = np.exp(gap[said]), seen[f"agent/{recipe.team.roles[0].name}/importance_weight"]
        assert weight == pytest.approx(np.minimum(full, cap).mean(), abs=1e-5)
        if form != "same":
            assert abs(weight - 1) > 1e-4 and seen[f"agent/{recipe.team.roles[0].name}/tis_clipped"] > 0
        assert seen[f"agent/{recipe.team.roles[0].name}/ratio"] == pytest.approx(1, abs=1e-6)  # old is the learner's
    assert min(found[form] for form in VALUES) > 1e-3 > 1e-4 > found["same"]
    assert is_documented("agent/a/importance_weight") and is_documented("logprob_diff")


@forms
def test_without_the_setting_a_run_is_what_it_was(tmp_path, form):
    """The parameters of training themselves go to the sampler, and an evaluation always has them."""
    runner = array_run().env_runner
    params = {"shared": {}, "agents": {"a": {"params": {"layers": {"q_proj": {"kernel": jnp.ones((1, 4, 4))}}}}}}
    kernel = lambda tree: tree["agents"]["a"]["params"]["layers"]["q_proj"]["kernel"]
    assert runner.form is None and runner.formed(params, held_out=False) is params
    runner.form = FORMS[form]
    assert runner.formed(params, held_out=True) is params
    assert isinstance(kernel(runner.formed(params, held_out=False)), ScaledMatrix)
    weighed = Loss(tis_clip=2.0)
    one = array_run(**quantized(form))
    assert one.evaluate(one.init(0)) == array_run(loss=weighed).evaluate(one.init(0))


@forms
def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path, form):
    def run(folder, count):
        recipe = array_run(**quantized(form), steps=count)
        fit(recipe.cfg, recipe, folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        same = ("agent/", "reward/", "logprob_diff", "step")
        return [{k: v for k, v in row.items() if k.startswith(same)} for row in rows]

    rows = run(tmp_path / "whole", 3)
    assert run(tmp_path / "parts", 1) == rows[:1]
    assert run(tmp_path / "parts", 3) == rows and len(rows) == 3


# Both forms of a rollout: of the weights that it reads, and of the keys and values that it caches

FORMED = ("rollout_weights", "rollout_cache")


@forms
@pytest.mark.parametrize("setting", FORMED)
def test_a_compiled_run_takes_the_steps_of_fit(setting, tmp_path, form):
    sgd = Optimizer(name="sgd", learning_rate=0.3, max_grad_norm=0.0)
    recipe = relay.make(**{setting: form}, loss=Loss(tis_clip=2.0), optimizer=sgd, steps=2)
    state, _, metrics = steps(recipe, tmp_path, 2)
    compiled, _ = jax.jit(make_program(recipe).run)(jnp.int32(recipe.cfg.seed))
    for a, b in zip(*map(jax.tree.leaves, (state.params["agents"], compiled.params["agents"])), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=3e-4)
    assert metrics[-1]["logprob_diff"] > 1e-5


@forms
@pytest.mark.parametrize("setting", FORMED)
def test_fingerprints_of_before_the_setting_hold(setting, form):
    cfg = grpo.Config(recipe="jaxmarl_llm.recipes.grpo")
    assert setting in {f.name for f in dataclasses.fields(cfg) if f.metadata.get(LATER)}
    assert fingerprint(dataclasses.replace(cfg, **{setting: "same"})) == fingerprint(cfg)
    plain = dataclasses.replace(cfg, loss=Loss(tis_clip=2.0))
    assert fingerprint(dataclasses.replace(plain, **{setting: form})) != fingerprint(plain)


@forms
@pytest.mark.parametrize("setting", FORMED)
@pytest.mark.parametrize(
    "changes, message",
    [
        ({"SETTING": "int7"}, r"config\.SETTING: .*int7.*int8"),
        (
            {"loss": {"tis_clip": None}},
            r"config\.loss\.tis_clip: expected a cap .*with config\.SETTING='FORM', got None",
        ),
        (
            {"engine": {"urls": {"team": "http://x"}, "weights": "/w"}},
            r"config\.SETTING: expected 'same' with config\.engine\.urls",
        ),
        ({"mesh": {"context": 2}}, r"config\.SETTING: expected 'same' with config\.mesh\.context=2"),
        (
            {"loss": {"objective": "dpo", "aggregation": "sum"}},
            r"config\.SETTING: expected 'same' with config\.loss\.objective='dpo'",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_line(setting, changes, message, form):
    base = {"recipe": "jaxmarl_llm.recipes.grpo", setting: form, "loss": {"tis_clip": 2.0}}
    with pytest.raises(ConfigError, match=message.replace("SETTING", setting).replace("FORM", form)) as error:
        from_dict(grpo.Config, base | {key.replace("SETTING", setting): value for key, value in changes.items()})
    assert "\n" not in str(error.value)


@forms
@pytest.mark.parametrize("setting", FORMED)
def test_a_recipe_that_samples_in_phases_of_its_own_is_refused(setting, form):
    cfg = malt.Config(recipe="jaxmarl_llm.recipes.malt")
    cfg = dataclasses.replace(cfg, **{setting: form}, loss=Loss(tis_clip=2.0))
    with pytest.raises(ConfigError, match=rf"config\.{setting}: expected 'same': recipe .*phases of its own"):
        malt.make(cfg)
