"""Losses against slow twins: values, gradients by finite differences, golden numbers, laws of masks and sums."""

from __future__ import annotations

import dataclasses
import math
import sys
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.training import losses
from tests import reference

KINDS = {"token": {}, "sequence": {}, "sum": {}, "constant": {"loss_length": 7.0}}
VARIANTS = {
    "reinforce": {"clip": None},
    "ppo": {"clip": (0.2, 0.28)},
    "dual": {"clip": (0.2, 0.2), "dual_clip": 1.3},
    "gspo": {"clip": (0.1, 0.2), "level": "sequence"},
    "capped": {"clip": (0.1, 0.1), "dual_clip": 1.3, "level": "sequence", "max_log_ratio": 0.15},
    "tis": {"clip": (0.2, 0.2), "behaviour_logprobs": ..., "importance_cap": 1.1},
    "kl": {"clip": (0.2, 0.2), "ref_logprobs": ..., "kl_coef": 0.3, "kl_kind": "k2"},
    "all": {
        "clip": (0.2, 0.2),
        "behaviour_logprobs": ...,
        "importance_cap": math.inf,
        "ref_logprobs": ...,
        "kl_coef": 0.1,
        "entropy_coef": 0.05,
        "level": "sequence",
    },
}


def policy_loss(
    logprobs,
    *,
    old_logprobs,
    advantages,
    weights,
    clip,
    entropy=None,
    behaviour_logprobs=None,
    ref_logprobs=None,
    max_log_ratio=losses.MAX_LOG_RATIO,
    **of,
):
    """`losses.policy_loss` with the arguments of its slow twin."""
    low, high = clip or (None, 0.0)
    if advantages.ndim < logprobs.ndim:
        advantages = jnp.broadcast_to(advantages[..., None], logprobs.shape)
    sampler = jnp.zeros_like(logprobs) if behaviour_logprobs is None else behaviour_logprobs
    data = losses.RowData(weights, advantages, sampler, old_logprobs, ref_logprobs)
    entropy = jnp.zeros_like(logprobs) if entropy is None else entropy
    of = {{"level": "ratio_level", "importance_cap": "tis_clip"}.get(k, k): v for k, v in of.items()}
    loss = losses.Loss(clip_low=low, clip_high=high, **of)
    return losses.policy_loss(loss, logprobs, entropy, data, max_log_ratio=max_log_ratio)


def dpo(logprobs, *, ref_logprobs, advantages, weights, beta):
    """`losses.dpo` with the arguments of its slow twin."""
    data = losses.RowData(weights, advantages, jnp.zeros_like(logprobs), None, ref_logprobs)
    return losses.dpo(losses.Loss(beta=beta), logprobs, jnp.zeros_like(logprobs), data)


def batch(seed, sequences=5, tokens=6, kind="sequence"):
    """Ragged masks with holes, as tool tokens leave them; the last sequence is left out."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(tokens) < rng.integers(1, tokens + 1, (sequences, 1))) & (rng.random((sequences, tokens)) < 0.8)
    mask[:, 0] = True
    use = np.ones(sequences)
    use[-1] = 0.0
    old = rng.normal(-1.5, 0.6, mask.shape)
    return {
        "logprobs": old + rng.normal(0, 0.3, mask.shape),
        "old_logprobs": old,
        "advantages": rng.normal(size=sequences),
        "weights": reference.aggregation_weights(mask, use, kind, **KINDS[kind]),
        "behaviour_logprobs": old + rng.normal(0, 0.2, mask.shape),
        "ref_logprobs": old + rng.normal(0, 0.4, mask.shape),
        "entropy": rng.random(mask.shape),
    }


def split(data, variant):
    """The arrays that a variant uses, and its options."""
    options = VARIANTS[variant]
    names = ["logprobs", "old_logprobs", "advantages", "weights", "entropy"] + [
        n for n, v in options.items() if v is ...
    ]
    return {n: data[n] for n in names}, {n: v for n, v in options.items() if v is not ...}


@partial(jax.jit, static_argnames="variant")
def loss_and_grad(arrays, variant):
    _, options = split(arrays, variant)
    rest = {n: a for n, a in arrays.items() if n != "logprobs"}
    function = jax.value_and_grad(lambda x: policy_loss(x, **rest, **options), has_aux=True)
    (loss, metrics), gradient = function(arrays["logprobs"])
    return loss, metrics, gradient


def run(arrays, variant):
    return loss_and_grad({n: jnp.asarray(a, jnp.float32) for n, a in arrays.items()}, variant)


# Twins


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None, database=None)
@given(rng=st.integers(0, 2**32 - 1).map(np.random.default_rng))
def test_aggregation_weights_equal_the_loop(kind, rng):
    mask = rng.random((4, 5)) < rng.random()
    use = rng.choice([0.0, 1.0, 2.5], 4)
    weights = losses.aggregation_weights(jnp.asarray(mask), jnp.asarray(use, jnp.float32), kind, **KINDS[kind])
    np.testing.assert_allclose(weights, reference.aggregation_weights(mask, use, kind, **KINDS[kind]), rtol=1e-5)
    assert weights.dtype == jnp.float32


def test_aggregation_by_hand():
    mask = jnp.array([[True, True, False, True], [True, False, False, False], [True, True, True, True]])
    use = jnp.array([1.0, 1.0, 0.0])
    expected = {
        "token": [[1 / 4, 1 / 4, 0, 1 / 4], [1 / 4, 0, 0, 0]],
        "sequence": [[1 / 6, 1 / 6, 0, 1 / 6], [1 / 2, 0, 0, 0]],
        "sum": [[1 / 2, 1 / 2, 0, 1 / 2], [1 / 2, 0, 0, 0]],
        "constant": [[1 / 14, 1 / 14, 0, 1 / 14], [1 / 14, 0, 0, 0]],
    }
    for kind, rows in expected.items():
        weights = losses.aggregation_weights(mask, use, kind, **KINDS[kind])
        np.testing.assert_allclose(weights, rows + [[0.0] * 4], rtol=1e-6, err_msg=kind)
        nobody = losses.aggregation_weights(mask, jnp.zeros(3), kind, **KINDS[kind])
        assert not np.any(nobody), kind
        assert not np.any(losses.aggregation_weights(jnp.zeros((3, 4), bool), use, kind, **KINDS[kind])), kind


@pytest.mark.parametrize("kind", ("k1", "k2", "k3"))
def test_kl_equals_the_loop(kind):
    rng = np.random.default_rng(0)
    logp, ref = rng.normal(-1, 1, 20), rng.normal(-1, 1, 20)
    estimate = losses.kl(jnp.asarray(logp, jnp.float32), jnp.asarray(ref, jnp.float32), kind)
    np.testing.assert_allclose(
        estimate, [reference.kl(p, q, kind) for p, q in zip(logp, ref, strict=True)], rtol=1e-5, atol=1e-6
    )


def test_kl_biases_and_gradients():
    """Expectations over a whole vocabulary: which estimator is unbiased, and whose gradient each one has."""
    rng = np.random.default_rng(1)
    logits, ref = (jnp.asarray(x, jnp.float32) for x in rng.normal(0, 2, size=(2, 8)))
    ref = jax.nn.log_softmax(ref)

    def forward(x):
        p = jax.nn.log_softmax(x)
        return jnp.sum(jnp.exp(p) * (p - ref))

    def backward(x):
        return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(x)))

    def expected(kind, x, sampler):
        return jnp.sum(jnp.exp(jax.nn.log_softmax(sampler)) * losses.kl(jax.nn.log_softmax(x), ref, kind))

    for kind in ("k1", "k3"):
        np.testing.assert_allclose(expected(kind, logits, logits), forward(logits), rtol=1e-5)
    assert abs(expected("k2", logits, logits) - forward(logits)) > 0.05
    for kind, gradient in (
        ("k1", jnp.zeros(8)),
        ("k2", jax.grad(forward)(logits)),
        ("k3", jax.grad(backward)(logits)),
    ):
        np.testing.assert_allclose(jax.grad(expected, 1)(kind, logits, logits), gradient, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_policy_loss_equals_the_loop_and_its_differences(variant):
    for seed, kind in enumerate(KINDS):
        arrays, options = split(batch(seed, kind=kind), variant)
        loss, metrics, gradient = run(arrays, variant)
        expected, expected_metrics = reference.policy_loss(**arrays, **options)
        np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
        assert metrics.keys() == expected_metrics.keys()
        for name, value in expected_metrics.items():
            np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    differences = np.zeros_like(arrays["logprobs"])
    for place in np.ndindex(differences.shape):
        bump = np.zeros_like(differences)
        bump[place] = 1e-6
        up, _ = reference.policy_loss(**(arrays | {"logprobs": arrays["logprobs"] + bump}), **options)
        down, _ = reference.policy_loss(**(arrays | {"logprobs": arrays["logprobs"] - bump}), **options)
        differences[place] = (up - down) / 2e-6
    np.testing.assert_allclose(gradient, differences, rtol=1e-3, atol=1e-5)


def test_the_clips_are_exercised():
    """The variants above would prove little if no ratio left the clip range."""
    assert run(split(batch(3, kind="constant"), "ppo")[0], "ppo")[1]["clip_fraction"] > 0
    assert run(split(batch(3), "tis")[0], "tis")[1]["tis_clipped"] > 0
    dual, ppo = (run(split(batch(3), v)[0], v)[0] for v in ("dual", "ppo"))
    assert dual != ppo


# Golden numbers


def test_rema_sequence_ratio():
    """ReMA's four tokens in two turns: the geometric mean over the sequence is .90133 (their product is .66)."""
    old, new = jnp.log(jnp.array([[0.5, 0.4, 0.9, 0.2]])), jnp.log(jnp.array([[0.6, 0.44, 0.9, 0.1]]))
    call = partial(policy_loss, advantages=jnp.ones(1), weights=jnp.full((1, 4), 0.25), clip=None)
    loss, metrics = call(new, old_logprobs=old, level="sequence")
    np.testing.assert_allclose([-loss, metrics["ratio"]], [0.90133, 0.90133], atol=1e-5)
    for turn, ratio in (((0, 2), 1.14891), ((2, 4), 0.70711)):
        weights = jnp.zeros((1, 4)).at[:, slice(*turn)].set(0.5)
        _, metrics = policy_loss(
            new, old_logprobs=old, advantages=jnp.ones(1), weights=weights, clip=None, level="sequence"
        )
        np.testing.assert_allclose(metrics["ratio"], ratio, atol=1e-5)


def test_magrpo_loss_by_hand():
    """Mean over samples of -A times the summed log-probs; the old log-probs are the current ones."""
    mask, advantage = jnp.array([[True, True, True], [True, False, False]]), jnp.array([2.0, -1.0])
    weights = losses.aggregation_weights(mask, jnp.ones(2), "sum")
    gradient = jax.grad(
        lambda x: policy_loss(x, old_logprobs=None, advantages=advantage, weights=weights, clip=None)[0]
    )(jnp.log(jnp.full((2, 3), 0.3)))
    np.testing.assert_allclose(gradient, [[-1, -1, -1], [0.5, 0, 0]], rtol=1e-6)


# Laws


@pytest.mark.parametrize("variant", ("reinforce", "ppo", "dual", "gspo"))
def test_ratio_one_gives_the_reinforce_gradient(variant):
    """-sum w A grad log pi: clips do nothing at ratio 1. With the sequence ratio: for weights even in a sequence."""
    data = batch(0)
    data["logprobs"] = data["old_logprobs"]
    arrays, _ = split(data, variant)
    _, metrics, gradient = run(arrays, variant)
    expected = -data["weights"] * data["advantages"][:, None]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)
    assert metrics["clip_fraction"] == 0 and metrics["approx_kl"] == 0
    np.testing.assert_allclose([metrics["weight"], metrics["ratio"]], [1, 1], rtol=1e-6)


def test_no_old_logprobs_is_ratio_one():
    arrays, _ = split(batch(0), "ppo")
    arrays = {n: jnp.asarray(a, jnp.float32) for n, a in arrays.items()}
    same = arrays | {"old_logprobs": arrays["logprobs"]}
    one, two = loss_and_grad(same, "ppo"), loss_and_grad(arrays | {"old_logprobs": None}, "ppo")
    chex.assert_trees_all_equal(one, two)
    assert np.any(two[2])


@pytest.mark.parametrize("variant", VARIANTS)
def test_masked_places_change_nothing(variant):
    """Bit for bit, whatever stands there, and their gradient is exactly 0."""
    arrays, _ = split(batch(2), variant)
    arrays["advantages"] = np.repeat(arrays["advantages"][:, None], arrays["logprobs"].shape[1], 1)
    out = arrays["weights"] == 0
    assert out.any()
    clean = run(arrays, variant)
    for garbage in (np.nan, np.inf, -np.inf, 1e30):
        dirty = run({n: a if n == "weights" else np.where(out, garbage, a) for n, a in arrays.items()}, variant)
        chex.assert_trees_all_equal(clean, dirty)
        assert not np.any(dirty[2][out])


@pytest.mark.parametrize("variant", VARIANTS)
def test_micro_batches_add_up(variant):
    arrays, _ = split(batch(4, sequences=6, kind="token"), variant)
    whole = run(arrays, variant)
    for cuts in ((2, 4), (3,)):
        parts = [run(p, variant) for p in zip_split(arrays, cuts)]
        for name in whole[1]:
            np.testing.assert_allclose(sum(p[1][name] for p in parts), whole[1][name], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sum(p[0] for p in parts), whole[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(np.concatenate([p[2] for p in parts]), whole[2], rtol=1e-5, atol=1e-7)


def zip_split(arrays, cuts):
    pieces = {n: np.split(a, cuts) for n, a in arrays.items()}
    return [{n: p[i] for n, p in pieces.items()} for i in range(len(cuts) + 1)]


def test_zero_advantages_give_exactly_no_gradient():
    for variant in ("reinforce", "ppo", "dual", "gspo", "tis"):
        arrays, _ = split(batch(0) | {"advantages": np.zeros(5)}, variant)
        loss, _, gradient = run(arrays, variant)
        assert loss == 0 and not np.any(gradient), variant


@pytest.mark.parametrize("variant", ("reinforce", "ppo", "gspo", "tis"))
def test_extreme_ratios_stay_finite(variant):
    """exp(200) overflows; the selected branch of a minimum would still hand back 0 * inf = NaN."""
    data = batch(0)
    for shift in (200.0, -200.0):
        arrays, _ = split(data | {"logprobs": data["old_logprobs"] + shift}, variant)
        arrays = {n: a - shift if n == "behaviour_logprobs" else a for n, a in arrays.items()}
        loss, _, gradient = run(arrays, variant)
        assert np.isfinite(loss) and np.isfinite(gradient).all()


def test_half_precision_is_reduced_in_float32():
    arrays, _ = split(batch(0), "all")
    half = {n: jnp.asarray(a, jnp.float32 if n == "weights" else jnp.bfloat16) for n, a in arrays.items()}
    loss, metrics, gradient = loss_and_grad(half, "all")
    assert loss.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    expected, expected_metrics, _ = run(half, "all")
    np.testing.assert_array_equal(loss, expected)
    for name in metrics:
        np.testing.assert_array_equal(metrics[name], expected_metrics[name], err_msg=name)


def test_only_logprobs_and_entropy_carry_gradient():
    arrays, options = split(batch(0), "all")
    arrays = {n: jnp.asarray(a, jnp.float32) for n, a in arrays.items()}
    gradients = jax.grad(lambda tree: policy_loss(**tree, **options)[0])(arrays)
    moved = {n for n, gradient in gradients.items() if np.any(gradient)}
    assert moved == {"logprobs", "entropy"}


def test_missing_inputs_are_refused():
    x, one = jnp.zeros((1, 2)), jnp.ones(1)
    call = partial(policy_loss, x, old_logprobs=x, advantages=one, weights=x, clip=None)
    for options, message in (
        ({"kl_coef": 0.1}, "needs log-probs of the reference"),
        ({"level": "word"}, "not 'word'"),
        ({"ref_logprobs": x, "kl_kind": "k4"}, "not 'k4'"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**options)
    with pytest.raises(ValueError, match="dpo needs log-probs of the reference"):
        dpo(x, ref_logprobs=None, advantages=x, weights=x, beta=0.1)
    with pytest.raises(ValueError, match="positive loss_length"):
        losses.aggregation_weights(x > 0, one, "constant")
    with pytest.raises(ValueError, match="not 'mean'"):
        losses.aggregation_weights(x > 0, one, "mean")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dual_clip": 0.5}, "dual_clip: expected a finite number > 1 or None"),
        ({"max_log_ratio": 3.0}, "max_log_ratio: removed; recipe rema caps log-ratios"),
        ({"aggregation": "trajectory"}, "aggregation: value 'trajectory' was removed; set 'jaxmarl_llm.recipes.rema:"),
        ({"aggregation": "turn"}, "aggregation: unknown value 'turn'"),
        ({"ratio_level": "word"}, "ratio_level: unknown value"),
        ({"objective": "dpo"}, "aggregation: expected 'sum'"),
        ({"objective": "dpo", "aggregation": "sum", "beta": 0.0}, "beta: expected > 0"),
        ({"objective": "ppo"}, "objective: unknown value 'ppo'"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(losses.Loss, options, "loss")


# A user's loss


MARGIN = """
import jax.numpy as jnp

def margin(loss, logprobs, entropy, data):
    # Couples the tokens of a completion: the square of its summed log-ratio to the reference, minus its entropy.
    kept = lambda x: jnp.where(data.weights > 0, x, 0.0)
    total = kept(logprobs - data.reference).sum(-1) - loss.beta
    value = (kept(data.weights).max(-1) * total**2).sum() - 0.1 * (kept(data.weights) * kept(entropy)).sum()
    return value, {"weight": kept(data.weights).sum(), "square": (total**2).sum()}

margin.unit = "sequence"
margin.needs_reference = True

plain = lambda loss, logprobs, entropy, data: margin(loss, logprobs, entropy, data)

def few(loss, logprobs):
    return 0.0

def wide(*args):
    return 0.0
wide.unit = "batch"

def longest(mask, counted, episode):
    # All weight on the longest counted sequence of each episode, evenly over its tokens.
    length = counted * mask.sum(-1)
    best = jnp.where(episode[:, None] == episode, length, 0).max(-1)
    own = mask * ((length == best) & (length > 0))[:, None]
    return own / jnp.maximum(own.sum(), 1)

def loose(mask, counted, episode):
    return jnp.ones(mask.shape)

def short(mask, counted, episode):
    return mask.sum(-1)

def vector(loss, logprobs, entropy, data):
    return logprobs.sum(-1), {"weight": data.weights.sum()}

def unweighted(loss, logprobs, entropy, data):
    return logprobs.sum(), {}

number = 3
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A package on sys.path with a module of losses, and two that cannot be imported. Its name is new each time."""
    name = f"user_losses_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "mine.py").write_text(MARGIN)
    (tmp_path / name / "broken.py").write_text("raise RuntimeError('no such\\nluck')")
    (tmp_path / name / "needy.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [m for m in sys.modules if m.split(".")[0] == name]:
        del sys.modules[module]


def test_a_user_loss_declares_what_it_needs(user_module):
    own = from_dict(losses.Loss, {"objective": f"{user_module}.mine:margin"}, "loss")
    assert own.needs_reference and own.unit == "sequence"
    plain = losses.Loss(objective=f"{user_module}.mine:plain")
    assert not plain.needs_reference and plain.unit == "group"
    assert dataclasses.replace(plain, kl_coef=0.1).needs_reference
    assert losses.Loss().unit == "token" and losses.Loss(ratio_level="sequence").unit == "sequence"
    assert losses.Loss(objective="dpo").unit == "group" and losses.Loss(objective="dpo").needs_reference
    assert not losses.Loss().needs_reference and losses.Loss(kl_coef=0.1).needs_reference


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("{}.mine:margins", "has no attribute 'margins'; did you mean 'margin'"),
        ("{}.nothing:margin", r"cannot import module '.*nothing': ModuleNotFoundError: No module named"),
        ("{}.broken:margin", "cannot import module '.*broken': RuntimeError: no such luck"),
        ("{}.needy:margin", "cannot import module '.*needy': ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("{}.mine:", "expected 'package.module:name'"),
        ("{}.mine:number", "expected a function of .loss, logprobs, entropy, data."),
        ("{}.mine:few", "expected a function of .loss, logprobs, entropy, data."),
        ("{}.mine:wide", "unit: expected token, sequence or group, got 'batch'"),
    ],
)
def test_a_bad_user_loss_ends_in_one_line(user_module, objective, message):
    objective = objective.format(user_module)
    with pytest.raises(ConfigError, match=message) as caught:
        from_dict(losses.Loss, {"objective": objective}, "config.loss")
    assert str(caught.value).startswith("config.loss.objective: ") and "\n" not in str(caught.value)


def test_a_user_aggregation_weighs_tokens(user_module):
    loss = from_dict(losses.Loss, {"aggregation": f"{user_module}.mine:longest"}, "loss")
    assert loss.reads_episodes and not losses.Loss().reads_episodes
    mask = jnp.arange(4) < jnp.array([[3], [2], [1], [4]])
    weigh = partial(losses.aggregation_weights, mask, kind=loss.aggregation)
    got = weigh(jnp.array([1.0, 1, 1, 0]), episode=jnp.array([0, 0, 2, 2]))
    np.testing.assert_allclose(got, mask * np.array([[1], [0], [1], [0]]) / 4)
    alone = weigh(jnp.ones(4))  # each sequence is an episode of its own
    np.testing.assert_allclose(alone, losses.aggregation_weights(mask, jnp.ones(4), "token"), rtol=1e-6)
    grid = losses.aggregation_weights(mask.reshape(2, 2, 4), jnp.ones((2, 2)), loss.aggregation)
    np.testing.assert_array_equal(grid.reshape(4, 4), alone)
    loose = losses.aggregation_weights(mask, jnp.array([1.0, 0, 1, 1]), f"{user_module}.mine:loose")
    np.testing.assert_array_equal(loose, mask * np.array([[1], [0], [1], [1]]))  # what is not counted is never trained
    with pytest.raises(ConfigError, match=r"config\.loss\.aggregation: .*: expected an array of the shape of the mask"):
        losses.aggregation_weights(mask, jnp.ones(4), f"{user_module}.mine:short")


@pytest.mark.parametrize(
    ("aggregation", "message"),
    [
        ("{}.mine:longer", "has no attribute 'longer'; did you mean 'longest'"),
        ("{}.mine:number", "expected a function of .mask, counted, episode."),
        ("{}.mine:few", "expected a function of .mask, counted, episode."),
    ],
)
def test_a_bad_aggregation_ends_in_one_line(user_module, aggregation, message):
    with pytest.raises(ConfigError, match=message) as caught:
        from_dict(losses.Loss, {"aggregation": aggregation.format(user_module)}, "config.loss")
    assert str(caught.value).startswith("config.loss.aggregation: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["vector", "unweighted"])
def test_the_result_of_a_user_loss_is_checked(user_module, name):
    loss, x = losses.Loss(objective=f"{user_module}.mine:{name}"), jnp.zeros((2, 3))
    with pytest.raises(ConfigError, match=r"expected the result \(scalar array, dict of scalar arrays with 'weight'\)"):
        losses.row_loss(loss, x, x, losses.RowData(x, x, x, None, None))


# Preferences


def preferences(seed, groups=4, members=3, tokens=5):
    """Groups of one prompt: some members are in no pair (advantage 0), some have no token, garbage under the mask."""
    rng = np.random.default_rng(seed)
    shape = (groups, members, tokens)
    mask = (np.arange(tokens) < rng.integers(0, tokens + 1, shape[:2])[..., None]) & (rng.random(shape) < 0.8)
    old, sides = rng.normal(-1.5, 0.6, shape), rng.choice([-1.0, 0.0, 2.0], shape[:2])
    sides[0] = [1.0, -1.0, -1.0][:members]
    mask[0] = np.arange(tokens) < 3
    flat = mask.reshape(-1, tokens)
    arrays = {
        "logprobs": old + rng.normal(0, 0.5, shape),
        "ref_logprobs": old,
        "advantages": np.broadcast_to(sides[..., None], shape).copy(),
        "weights": reference.aggregation_weights(flat, np.ones(len(flat)), "sum").reshape(shape),
    }
    for name in ("logprobs", "ref_logprobs", "advantages"):
        arrays[name][~mask] = np.nan
    return arrays


@partial(jax.jit, static_argnames="beta")
def dpo_and_grad(arrays, beta):
    rest = {n: a for n, a in arrays.items() if n != "logprobs"}
    function = jax.value_and_grad(lambda x: dpo(x, **rest, beta=beta), has_aux=True)
    return function(arrays["logprobs"])


single = lambda arrays: {n: jnp.asarray(a, jnp.float32) for n, a in arrays.items()}


@settings(max_examples=30, deadline=None, database=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0]))
def test_dpo_equals_the_slow_twin(seed, beta):
    arrays = preferences(seed)
    (loss, metrics), gradient = dpo_and_grad(single(arrays), beta)
    want, totals = reference.dpo(*arrays.values(), beta)
    assert loss == pytest.approx(want, rel=1e-4, abs=1e-6)
    for name, total in totals.items():
        assert metrics[name] == pytest.approx(total, rel=1e-4, abs=1e-5), name
    assert np.isfinite(gradient).all() and not gradient[arrays["weights"] == 0].any()


def test_dpo_gradient_by_finite_differences():
    arrays = preferences(3)
    _, gradient = dpo_and_grad(single(arrays), 0.5)
    for at in zip(*np.nonzero(arrays["weights"])):
        ends = []
        for shift in (1e-5, -1e-5):
            moved = arrays["logprobs"].copy()
            moved[at] += shift
            ends.append(reference.dpo(*(arrays | {"logprobs": moved}).values(), 0.5)[0])
        assert gradient[at] == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-6)


def test_dpo_golden_numbers():
    """log 2 where the policy is the reference; a pair of margin log 3 costs log(4/3); only sums of log-probs count."""
    one = jnp.ones((1, 2, 2))
    sides, weights = jnp.array([1.0, -1.0])[None, :, None] * one, one / 2
    loss, metrics = dpo(-one, ref_logprobs=-one, advantages=sides, weights=weights, beta=0.1)
    assert loss == pytest.approx(math.log(2)) and metrics["weight"] == 1 and metrics["accuracy"] == 0
    better = -one + jnp.array([[[0.5, 0.5], [0.0, -1.0]]]) * math.log(3)
    loss, metrics = dpo(better, ref_logprobs=-one, advantages=sides, weights=weights, beta=0.5)
    assert loss == pytest.approx(math.log(4 / 3)) and metrics["margin"] == pytest.approx(math.log(3))
