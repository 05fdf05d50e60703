"""CISPO, Clip-Cov and KL-Cov against loops in float64: values, gradients by differences, golden numbers, laws."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.training import objectives
from jaxmarl_llm.training.losses import Loss, RowData, find_loss, policy_loss
from tests import reference

NAMES = {"cispo": Loss(clip_low=1.0, clip_high=0.2), "clip_cov": Loss(clip_high=0.28), "kl_cov": Loss(clip_low=None)}
OWN = {"clip_cov": objectives.ClipCov(0.2, 0.02, 1.0), "kl_cov": objectives.KlCov(0.2, 0.7), "cispo": objectives.cispo}


def batch(seed, groups=3, size=4, tokens=5):
    """Groups of completions of ragged lengths; a masked token holds NaN."""
    rng = np.random.default_rng(seed)
    shape = groups, size, tokens
    mask = np.arange(tokens) < rng.integers(1, tokens + 1, (groups, size, 1))
    old = rng.normal(-1.5, 0.8, shape)
    rows = {
        "logprobs": old + rng.normal(0, 0.3, shape),
        "entropy": rng.random(shape),
        "weights": mask * rng.uniform(0.5, 1.5, (groups, size, 1)),
        "advantages": np.repeat(rng.normal(size=(groups, size, 1)), tokens, -1),
        "sampler_logprobs": old + rng.normal(0, 0.2, shape),
        "old": old,
        "reference": old + rng.normal(0, 0.2, shape),
    }
    return {k: x if k == "weights" else np.where(mask, x, np.nan) for k, x in rows.items()}


@partial(jax.jit, static_argnames=("function", "loss"))
def _run(function, loss, logprobs, entropy, data):
    return jax.value_and_grad(lambda x: function(loss, x, entropy, data), has_aux=True)(logprobs)


def run(function, loss, rows):
    rows = {k: None if x is None else jnp.asarray(x, jnp.float32) for k, x in rows.items()}
    (value, metrics), gradient = _run(function, loss, rows.pop("logprobs"), rows.pop("entropy"), RowData(**rows))
    return float(value), metrics, np.asarray(gradient)


def tokens_of(rows):
    """Places of the tokens of each group."""
    counts = rows["weights"] > 0
    return [[(g, *place) for place in zip(*np.nonzero(counts[g]), strict=True)] for g in range(len(counts))]


def covariances(rows, places):
    logp, advantage = (np.array([rows[k][p] for p in places]) for k in ("logprobs", "advantages"))
    return (logp - logp.mean()) * (advantage - advantage.mean())


def twin(name, loss, rows, fixed, chosen=()):
    """The loss as a loop in float64. ``fixed``: rows whose log-probs make the parts without a gradient."""
    total = 0.0
    for place in (p for group in tokens_of(rows) for p in group):
        logp, old, a, w = (rows[k][place] for k in ("logprobs", "old", "advantages", "weights"))
        rho = np.exp(logp - old)
        low, high = (-np.inf, np.inf) if loss.clip is None else (1 - loss.clip[0], 1 + loss.clip[1])
        if name == "cispo":
            total -= w * np.clip(np.exp(fixed["logprobs"][place] - old), low, high) * a * logp
        else:
            objective = min(rho * a, np.clip(rho, low, high) * a)
            total -= w * objective * (0.0 if name == "clip_cov" and place in chosen else 1.0)
            total += w * OWN["kl_cov"].coef * abs(logp - old) * (name == "kl_cov" and place in chosen)
        total += w * loss.kl_coef * reference.kl(logp, rows["reference"][place], loss.kl_kind)
        total -= w * loss.entropy_coef * rows["entropy"][place]
    return total


def chosen_by_rank(rows):
    """KL-Cov's tokens: the largest covariances of each group, max(1, floor(0.2 N)) of them."""
    out = set()
    for places in tokens_of(rows):
        order = np.argsort(-covariances(rows, places), kind="stable")
        out |= {places[i] for i in order[: max(1, int(0.2 * len(places)))]}
    return out


def dropped(rows, gradient):
    """Tokens without a gradient that no clip explains."""
    plain = run(policy_loss, NAMES["clip_cov"], rows)[2]
    return {p for group in tokens_of(rows) for p in group if gradient[p] == 0 and plain[p] != 0}


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_equals_the_loop_and_its_differences(name):
    loss = NAMES[name].__class__(
        clip_low=NAMES[name].clip_low, clip_high=NAMES[name].clip_high, kl_coef=0.1, entropy_coef=0.05
    )
    for seed in range(4):
        rows = batch(seed)
        value, metrics, gradient = run(OWN[name], loss, rows)
        bare = run(OWN[name], NAMES[name], rows)[2]
        chosen = dropped(rows, bare) if name == "clip_cov" else chosen_by_rank(rows)
        assert np.isclose(value, twin(name, loss, rows, rows, chosen), rtol=1e-4, atol=1e-5)
        assert np.isclose(metrics["weight"], rows["weights"].sum(), rtol=1e-5)
        if name != "cispo":
            assert np.isclose(metrics["cov_fraction"], sum(rows["weights"][p] for p in chosen), rtol=1e-5)
        for place in np.ndindex(gradient.shape):
            if rows["weights"][place] == 0:
                assert gradient[place] == 0
                continue
            up, down = (rows | {"logprobs": rows["logprobs"].copy()} for _ in range(2))
            up["logprobs"][place] += 1e-6
            down["logprobs"][place] -= 1e-6
            slope = (twin(name, loss, up, rows, chosen) - twin(name, loss, down, rows, chosen)) / 2e-6
            assert np.isclose(gradient[place], slope, rtol=1e-3, atol=1e-4), (seed, place)


def test_cispo_by_hand():
    """Ratios 2, 1 and 1/2 with bounds [0, 1.5]: weights 1.5, 1 and 0.5. PPO's clip drops the first token."""
    old = jnp.log(jnp.array([[0.2, 0.5, 0.6]]))
    new = old + jnp.log(jnp.array([[2.0, 1.0, 0.5]]))
    loss, data = Loss(clip_low=1.0, clip_high=0.5), RowData(jnp.ones((1, 3)), jnp.full((1, 3), 2.0), old, old, None)
    (value, metrics), gradient = _run(objectives.cispo, loss, new, new * 0, data)
    np.testing.assert_allclose(gradient, [[-3.0, -2.0, -1.0]], rtol=1e-5)
    np.testing.assert_allclose(value, -2 * np.dot([1.5, 1.0, 0.5], np.log([0.4, 0.5, 0.3])), rtol=1e-5)
    assert metrics["clip_fraction"] == 1.0
    np.testing.assert_allclose(_run(policy_loss, loss, new, new * 0, data)[1], [[0, -2.0, -1.0]], rtol=1e-5)


def test_cispo_without_bounds_has_the_gradient_of_reinforce_with_importance_weights():
    rows, loss = batch(0), Loss(clip_low=None, tis_clip=1.1, ratio_level="token")
    gradient = run(objectives.cispo, loss, rows)[2]
    np.testing.assert_allclose(gradient, run(policy_loss, loss, rows)[2], rtol=1e-4, atol=1e-6)  # rho A grad log pi
    once = rows | {"old": None}
    for clip in (None, 0.1):
        gradient = run(objectives.cispo, Loss(clip_low=clip, clip_high=0.1), once)[2]
        expected = np.where(rows["weights"] > 0, -rows["weights"] * rows["advantages"], 0)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_covariance_by_hand():
    """Log-probs -1, -2, -3 and advantages 1, 0, -4: centred 1, 0, -1 and 2, 1, -3; the masked token is not counted."""
    logp, advantage = jnp.array([[[-1.0, -2.0], [-3.0, 9.0]]]), jnp.array([[[1.0, 0.0], [-4.0, 7.0]]])
    mask = jnp.array([[[True, True], [True, False]]])
    np.testing.assert_allclose(objectives.token_covariance(logp, advantage, mask), [[[2, 0], [3, 0]]], atol=1e-6)


def test_clip_cov_drops_the_right_number_of_the_right_tokens():
    rule, seen, largest = OWN["clip_cov"], 0, 0
    for seed in range(20):
        rows = batch(seed, groups=2, size=5, tokens=6)
        rows["old"] = rows["logprobs"]  # no token is clipped
        gone = dropped(rows, run(rule, NAMES["clip_cov"], rows)[2])
        for g, places in enumerate(tokens_of(rows)):
            cov = dict(zip(places, covariances(rows, places), strict=True))
            inside = {p for p, c in cov.items() if rule.low < c < rule.high}
            mine = {p for p in gone if p[0] == g}
            assert mine <= inside and len(mine) == min(len(inside), max(1, int(0.2 * len(places))))
            chance = len(inside) > len(mine) > 0
            seen += chance
            largest += chance and max(inside, key=cov.get) in mine
    assert seen > 10 and 0 < largest < seen  # a random choice, not that of the largest covariances


def test_the_order_of_clip_cov_has_no_relation_to_the_size_of_a_log_prob():
    """Of 4096 tokens that are all candidates, half are dropped: evenly over places and log-probs."""
    x = jnp.asarray(np.random.default_rng(0).normal(-2, 1, (1, 8, 512)), jnp.float32)
    order = np.asarray(objectives._hash(x), np.float64).ravel()
    for other in (np.asarray(x, np.float64).ravel(), np.arange(order.size)):
        assert abs(np.corrcoef(order, other)[0, 1]) < 5 / np.sqrt(order.size)
    assert len(np.unique(order)) > 4090 and abs(order.mean() / 2**32 - 0.5) < 0.025


@pytest.mark.parametrize("rule", (objectives.ClipCov(0.0), objectives.KlCov(0.0), objectives.KlCov(0.5, 0.0)))
def test_no_fraction_or_no_coefficient_is_the_plain_loss(rule):
    rows, loss = batch(1), Loss()
    ours, plain = run(rule, loss, rows), run(policy_loss, loss, rows)
    ours[1].pop("cov_fraction")
    chex.assert_trees_all_equal(ours, plain)


@pytest.mark.parametrize("name", NAMES)
def test_groups_add_up(name):
    rows = batch(2)
    whole = run(OWN[name], NAMES[name], rows)
    parts = [run(OWN[name], NAMES[name], {k: x[g : g + 1] for k, x in rows.items()}) for g in range(3)]
    np.testing.assert_allclose(sum(p[0] for p in parts), whole[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([p[2] for p in parts]), whole[2], rtol=1e-5, atol=1e-7)
    for key, value in whole[1].items():
        np.testing.assert_allclose(sum(p[1][key] for p in parts), value, rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_names_the_loss(name):
    loss = Loss(objective=f"jaxmarl_llm.training.objectives:{name}")
    loss.check("config.loss")
    assert loss.unit == ("token" if name == "cispo" else "group")
    assert find_loss(loss.objective) is getattr(objectives, name)


@pytest.mark.parametrize(
    "make, message",
    (
        (lambda: objectives.ClipCov(1.5), r"^ClipCov.fraction: expected .*1.5"),
        (lambda: objectives.ClipCov(low=2.0, high=1.0), r"^ClipCov.low: expected a number below high=1.0, got 2.0"),
        (lambda: objectives.KlCov(coef=-1.0), r"^KlCov.coef: expected .*-1.0"),
    ),
)
def test_a_bad_setting_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_small_group_has_one_chosen_token():
    """floor(0.2 N) is 0 for groups of three tokens; one is chosen, as the authors' code does."""
    rows = batch(0, groups=4, size=3, tokens=1)
    assert all(len(places) == 3 for places in tokens_of(rows))
    _, metrics, _ = run(OWN["kl_cov"], NAMES["kl_cov"], rows)
    assert np.isclose(metrics["cov_fraction"], sum(rows["weights"][p] for p in chosen_by_rank(rows)), rtol=1e-5)
