"""Losses of other papers against loops over their formulas, their gradients by finite differences, and laws."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.training import losses, objectives
from tests.training.test_losses import batch


def ours(function, data, loss=losses.Loss(), logprobs=None):
    """Loss, metrics and gradient."""
    wide = np.broadcast_to(data["advantages"][:, None], data["logprobs"].shape)
    arrays = [data["weights"], wide, data["behaviour_logprobs"], data["old_logprobs"]]
    rows = losses.RowData(*[jnp.asarray(x, jnp.float32) for x in arrays], None)
    x = jnp.asarray(data["logprobs"] if logprobs is None else logprobs, jnp.float32)
    run = jax.value_and_grad(lambda x: function(loss, x, jnp.zeros_like(x), rows), has_aux=True)
    (value, metrics), gradient = jax.jit(run)(x)
    return float(value), metrics, np.asarray(gradient)


def places(data):
    """Trained tokens: (sequence, token)."""
    return [(i, t) for i, t in np.ndindex(data["weights"].shape) if data["weights"][i, t] > 0]


def cispo(data, low, high, base=None):
    """CISPO by a loop. base: log-probs of the constant importance weights; None: those of ``data``."""
    base, total = data["logprobs"] if base is None else base, 0.0
    for i, t in places(data):
        ratio = math.exp(base[i, t] - data["old_logprobs"][i, t])
        weight = min(max(ratio, 1 - low), 1 + high)
        total -= data["weights"][i, t] * weight * data["advantages"][i] * data["logprobs"][i, t]
    return total


def kl_cov(data, fraction, coef, chosen=None):
    """KL-Cov by a loop, and the selected tokens. chosen: selects these instead."""
    tokens = places(data)
    mean_logp = sum(data["logprobs"][p] for p in tokens) / len(tokens)
    mean_a = sum(data["advantages"][i] for i, _ in tokens) / len(tokens)
    covariance = {p: (data["logprobs"][p] - mean_logp) * (data["advantages"][p[0]] - mean_a) for p in tokens}
    most = sorted(tokens, key=lambda p: -covariance[p])[: max(1, int(fraction * len(tokens)))]
    chosen, total = most if chosen is None else chosen, 0.0
    for p in tokens:
        shift = data["logprobs"][p] - data["old_logprobs"][p]
        value = -math.exp(shift) * data["advantages"][p[0]] + (coef * abs(shift) if p in chosen else 0.0)
        total += data["weights"][p] * value
    return total, most


def differences(function, data):
    """Derivatives of ``function`` of ``data`` by each log-prob."""
    out = np.zeros_like(data["logprobs"])
    for place in np.ndindex(out.shape):
        bump = np.zeros_like(out)
        bump[place] = 1e-6
        up, down = (function(data | {"logprobs": data["logprobs"] + sign * bump}) for sign in (1, -1))
        out[place] = (up - down) / 2e-6
    return out


@pytest.mark.parametrize("seed", range(4))
def test_cispo_equals_the_loop_and_its_differences(seed):
    data, loss = batch(seed), losses.Loss(clip_low=1.0, clip_high=0.1)
    value, metrics, gradient = ours(objectives.cispo, data, loss)
    np.testing.assert_allclose(value, cispo(data, 1.0, 0.1), rtol=1e-5)
    expected = differences(functools.partial(cispo, low=1.0, high=0.1, base=data["logprobs"]), data)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5)
    assert metrics["clip_fraction"] > 0 and (gradient[data["weights"] > 0] != 0).all(), "a clipped token keeps gradient"


def test_cispo_without_a_clip_is_the_policy_gradient():
    """The gradient of rho A is rho A grad log pi, as that of stop_gradient(rho) A log pi."""
    loss = losses.Loss(clip_low=None)
    for with_old in (True, False):
        data = batch(1) if with_old else batch(1) | {"old_logprobs": batch(1)["logprobs"]}
        np.testing.assert_allclose(
            ours(objectives.cispo, data, loss)[2], ours(losses.policy_loss, data, loss)[2], rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("fraction", [0.001, 0.2, 0.5])
def test_kl_cov_equals_the_loop_and_its_differences(fraction):
    for seed in range(3):
        data = batch(seed)
        function = functools.partial(objectives.kl_cov, fraction=fraction, coef=0.7)
        value, metrics, gradient = ours(function, data)
        expected, chosen = kl_cov(data, fraction, 0.7)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["clip_fraction"], sum(data["weights"][p] for p in chosen), rtol=1e-5)
        slope = differences(lambda d, chosen=chosen: kl_cov(d, fraction, 0.7, chosen)[0], data)
        np.testing.assert_allclose(gradient, slope, rtol=1e-3, atol=1e-5)


def test_kl_cov_without_its_term_is_the_policy_gradient():
    data = batch(2)
    function = functools.partial(objectives.kl_cov, fraction=0.5, coef=0.0)
    got, plain = ours(function, data), ours(losses.policy_loss, data, losses.Loss(clip_low=None))
    assert got[0] == plain[0]
    np.testing.assert_array_equal(got[2], plain[2])


@pytest.mark.parametrize("name", ["cispo", "kl_cov"])
def test_masked_places_change_nothing(name):
    data, function = batch(3), getattr(objectives, name)
    value, _, gradient = ours(function, data)
    spoiled = np.where(data["weights"] > 0, data["logprobs"], np.nan)
    again = ours(function, data, logprobs=spoiled)
    assert value == again[0]
    np.testing.assert_array_equal(gradient, again[2])


@pytest.mark.parametrize("name", ["cispo", "kl_cov"])
def test_a_configuration_names_them(name):
    loss = losses.Loss(objective=f"jaxmarl_llm.training.objectives:{name}")
    loss.check("config.loss")
    assert loss.function is getattr(objectives, name)
