"""Log-probs, entropies and losses from hidden states against float64 by hand, and what they hold in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxmarl_llm.generation.sampling import Sampling, score
from jaxmarl_llm.kernels.head import loss as module
from jaxmarl_llm.kernels.head.head import NEG, Head, logits
from jaxmarl_llm.kernels.head.loss import chunk_tokens, head_logprob, head_loss
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.training.learner import Batch, make_learner
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from tests import toys

pytestmark = pytest.mark.usefixtures("numpy_tables")

# T, V, D, rows of the weight are ids, ids that are used, temperature, tokens of a chunk
CASES = {
    "one token": (1, 7, 4, True, None, 1.0, 4),
    "chunks and a rest": (13, 37, 8, True, None, 0.7, 4),
    "columns": (13, 37, 8, False, None, 0.7, 4),
    "padding ids": (12, 37, 8, True, 29, 1.3, 4),
    "padding ids, columns": (9, 32, 5, False, 29, 1.0, 3),
    "one chunk": (6, 48, 8, True, None, 1.0, None),
}
TILE = 16  # ids of a tile: 37 are two tiles and a rest, 48 three, 7 none


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(module, "TILE", TILE)


def draw(case, dtype=np.float32, seed=0):
    """(hidden, weight, targets, coefficients [T 3]); the last target is a padding id where there are any."""
    tokens, vocab, dim, rows, used, _, _ = case
    rng = np.random.default_rng(seed)
    hidden, weight = rng.normal(size=(tokens, dim)), rng.normal(size=(vocab, dim) if rows else (dim, vocab))
    targets = rng.integers(0, used or vocab, tokens).astype(np.int32)
    if used is not None:
        targets[-1] = used
    coefficients = rng.normal(size=(tokens, 3)).astype(np.float32)
    if used is not None:
        coefficients[-1, 2] = 0.0
    return jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), targets, coefficients


def quadratic(logprob, entropy, data):
    """Adds over tokens; its cotangents are c0 + 2 c2 logprob and c1."""
    square = jnp.where(data[..., 2] == 0, 0.0, logprob) ** 2  # that of -1e30 is infinite
    total = jnp.sum(data[..., 0] * logprob + data[..., 1] * entropy + data[..., 2] * square)
    return total, {"logprob": logprob.sum(), "count": jnp.float32(logprob.size)}


def by_hand(case, hidden, weight, targets, c):
    """logprob, entropy, loss, gradients of hidden states and weight; float64, one token after another."""
    rows, used, temperature = case[3:6]
    h, w = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    w = w if rows else w.T
    used = len(w) if used is None else used
    logprob, entropy = np.empty(len(h)), np.empty(len(h))
    dh, dw = np.zeros(h.shape), np.zeros(w.shape)
    for t, y in enumerate(targets):
        z = w[:used] @ h[t] / temperature
        log_p = z - z.max() - np.log(np.exp(z - z.max()).sum())
        p = np.exp(log_p)
        logprob[t], entropy[t] = log_p[y] if y < used else NEG / temperature, -(p * log_p).sum()
        a, b = c[t, 0] + 2 * c[t, 2] * logprob[t], c[t, 1]
        dz = a * ((np.arange(used) == y) - p) - b * p * (log_p + entropy[t])
        dh[t] = dz @ w[:used] / temperature
        dw[:used] += np.outer(dz, h[t]) / temperature
    loss = (c[:, 0] * logprob + c[:, 1] * entropy + c[:, 2] * logprob**2).sum()
    return logprob, entropy, loss, dh, dw if rows else dw.T


def one_pass(case, hidden, weight, targets, c):
    _, _, _, rows, used, temperature, chunk = case
    head = Head(weight, rows, used)
    out = head_loss(hidden, head, targets, c, quadratic, temperature=temperature, chunk=chunk)
    return out.loss, out.logprob, out.entropy


def two_passes(case, hidden, weight, targets, c):
    _, _, _, rows, used, temperature, chunk = case
    head = Head(weight, rows, used)
    logprob, entropy = head_logprob(hidden, head, targets, temperature=temperature, chunk=chunk)
    return quadratic(logprob, entropy, c)[0], logprob, entropy


FORMS = {"one pass": one_pass, "two passes": two_passes}


def value_and_gradients(form, case, hidden, weight, targets, c):
    def loss(hidden, weight):
        value, *rest = FORMS[form](case, hidden, weight, targets, c)
        return value, rest

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, weight)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64_by_hand(name, form):
    case = CASES[name]
    args = draw(case)
    (value, (logprob, entropy)), (dh, dw) = value_and_gradients(form, case, *args)
    want = by_hand(case, *args)
    assert logprob.dtype == entropy.dtype == value.dtype == jnp.float32
    for ours, theirs in zip((logprob, entropy, value, dh, dw), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * max(1, np.abs(want[3]).max()))
    used = case[4]
    if used is not None:
        assert not np.asarray(dw if case[3] else dw.T)[used:].any()


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16(form):
    """Values as of the rounded inputs in float32; gradients to the precision of the dtype they come back in."""
    case = CASES["chunks and a rest"]
    args = draw(case, jnp.bfloat16)
    (value, (logprob, entropy)), (dh, dw) = value_and_gradients(form, case, *args)
    want = by_hand(case, *args)
    assert logprob.dtype == jnp.float32 and dh.dtype == dw.dtype == jnp.bfloat16
    for ours, theirs in zip((logprob, entropy, value), want[:3], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip((dh, dw), want[3:], strict=True):
        gap = np.abs(np.asarray(ours, np.float64) - theirs)
        assert gap.max() < 0.02 * np.abs(theirs).max() and gap.mean() < 0.005 * np.abs(theirs).max()


def test_far_logits_do_not_overflow_and_entropy_does_not_cancel():
    case = CASES["one chunk"]
    hidden, weight, targets, c = draw(case)
    hidden = hidden.at[:, 0].set(1.0)
    moved = jnp.asarray(weight).at[:, 0].add(1000.0)  # the same distribution, logits around 1000
    far = head_logprob(hidden, Head(moved), targets)
    for ours, theirs in zip(far, head_logprob(hidden, Head(weight), targets), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3)  # what float32 keeps of a logit of 1000
    assert np.isfinite(head_logprob(hidden * 1e4, Head(weight), targets)).all()


def test_a_loss_of_whole_rows_whatever_the_chunk():
    """The square of a completion's summed log-prob does not add over tokens: rows stay whole, or are scored first."""
    rng = np.random.default_rng(1)
    hidden, weight = rng.normal(size=(7, 3, 4)).astype(np.float32), rng.normal(size=(11, 4)).astype(np.float32)
    targets, data = rng.integers(0, 11, (7, 3)).astype(np.int32), rng.normal(size=7).astype(np.float32)

    def squares(logprob, entropy, data):
        assert logprob.shape[1:] == (3,)
        return jnp.sum(data * (logprob.sum(-1) + 0.1 * entropy.sum(-1)) ** 2), {"rows": jnp.float32(len(logprob))}

    def run(chunk):
        def loss(h, w):
            out = head_loss(h, Head(w), targets, data, squares, chunk=chunk)
            return out.loss, (out.sums, out.logprob)

        return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, weight)

    def dense(h, w):
        z = jax.nn.log_softmax(h @ w.T)
        logprob = jnp.take_along_axis(z, targets[..., None], -1)[..., 0]
        return squares(logprob, -jnp.sum(jnp.exp(z) * z, -1), data)[0], logprob

    (want, logprob), gradients = jax.jit(jax.value_and_grad(dense, (0, 1), has_aux=True))(hidden, weight)
    for chunk in (2, 7, 100):  # less than a row; two rows and a rest; everything
        (value, (sums, seen)), ours = run(chunk)
        assert sums["rows"] == 7 and seen.shape == (7, 3)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(seen, logprob, atol=1e-5)
        for x, y in zip(ours, gradients, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_the_gradient_follows_the_loss_and_nothing_else():
    case = CASES["chunks and a rest"]
    hidden, weight, targets, c = draw(case)

    def gradient(of):
        call = lambda h, w: of(head_loss(h, Head(w), targets, c, quadratic, temperature=0.7, chunk=4))
        return jax.jit(jax.grad(call, (0, 1)))(hidden, weight)

    for once, thrice in zip(gradient(lambda out: out.loss), gradient(lambda out: 3 * out.loss), strict=True):
        np.testing.assert_allclose(3 * once, thrice, rtol=1e-5, atol=1e-6)
    for x in gradient(lambda out: out.logprob.sum() + out.entropy.sum() + out.sums["logprob"]):
        assert not np.asarray(x).any()


def test_coefficients_of_zero_give_exactly_no_gradient():
    case = CASES["chunks and a rest"]
    hidden, weight, targets, c = draw(case)
    for form in FORMS:
        _, gradients = value_and_gradients(form, case, hidden, weight, targets, 0 * c)
        assert not any(np.asarray(x).any() for x in gradients)


# ------------------------------------------------------------------------------------------- products and memory


def products(jaxpr, kinds=("dot_general",)):
    """Shapes of all matrix products of a program, those inside loops and calls once."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in kinds:
            found.append(eqn.outvars[0].aval.shape)
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += products(inner)
    return found


@pytest.mark.parametrize("form, forward, trained, frozen", [("one pass", 1, 3, 2), ("two passes", 1, 4, 3)])
def test_counts_of_products(form, forward, trained, frozen):
    """One pass needs three; neither forms the gradient of a frozen weight, nor any gradient when only evaluated."""
    case = (8, 16, 4, True, None, 1.0, 8)  # one chunk, one tile
    hidden, weight, targets, c = draw(case)
    loss = lambda h, w: FORMS[form](case, h, w, targets, c)[0]
    count = lambda f: len(products(jax.make_jaxpr(f)(hidden, weight).jaxpr))
    assert count(loss) == forward
    assert count(jax.grad(loss, (0, 1))) == trained
    assert count(jax.grad(loss, 0)) == frozen
    assert count(jax.grad(jax.jit(loss), 0)) == frozen


def batch(n=2, g=3, r=5, p=6, seed=0):
    rng = np.random.default_rng(seed)
    ids = lambda *shape: rng.integers(0, 256, shape).astype(np.int32)
    reals = lambda scale=1.0: (scale * rng.normal(size=(n, g, r))).astype(np.float32)
    weights = np.where(rng.random((n, g, r)) < 0.7, 0.1, 0.0).astype(np.float32)
    sign = np.broadcast_to(np.array([1.0, -1.0, 1.0], np.float32)[:g, None], (n, g, r))
    old = -5.5 + reals(0.2)
    return Batch(ids(n, p), np.array([p, 3], np.int32), ids(n, g, r), weights, sign, old, old=old, reference=old - 0.1)


def test_adapters_do_not_pay_for_the_gradient_of_a_frozen_head():
    policy = toys.policy()
    params = jax.eval_shape(policy.init, jax.random.key(0))
    lora = jax.eval_shape(lambda: init_lora(jax.random.key(0), params, 2))
    learner = make_learner(policy, Loss(), Optimizer(), Sampling())
    shapes = lambda *args: products(jax.make_jaxpr(learner.accumulate)(*args, batch(), None).jaxpr)
    assert not [s for s in shapes({"lora": lora}, params) if s == (264 % TILE, 16)]
    assert [s for s in shapes({"params": params}, None) if s == (264 % TILE, 16)]  # the rest of the tiles


@pytest.mark.parametrize("tied", [True, False])
def test_temporaries_are_a_small_share_of_those_of_dense_logits(tied, monkeypatch):
    monkeypatch.setattr(module, "TILE", 8192)
    tokens, vocab, dim = 4096, 151_936, 64
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    targets, c = np.zeros(tokens, np.int32), np.ones((tokens, 3), np.float32)
    case = (tokens, vocab, dim, tied, None, 1.0, None)
    weight = shape(vocab, dim) if tied else shape(dim, vocab)

    def temporaries(loss):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(shape(tokens, dim), weight).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def dense(h, w):
        scored = score(h @ (w.T if tied else w), targets, Sampling())
        return quadratic(*scored, c)[0]

    whole = temporaries(dense)
    assert whole >= 2 * 4 * tokens * vocab  # the logits, and their gradient
    for form in FORMS.values():
        assert temporaries(lambda h, w, form=form: form(case, h, w, targets, c)[0]) <= 0.03 * whole


def test_chunks_are_a_share_of_the_tokens_but_not_tiny():
    assert chunk_tokens(4096, 151_936) == 128 and chunk_tokens(1 << 17, 151_936) == 1024
    assert chunk_tokens(100, 151_936) == 128 and chunk_tokens(100, 264) == (1 << 20) // 264
    assert chunk_tokens(100, 151_936 // 4) == (1 << 24) // 37_984 and chunk_tokens(100, 151_936 // 16) == 512


# ----------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("outside", [True, False], ids=["gradient of the shards", "gradient inside"])
def test_shards_of_the_vocabulary_equal_the_whole(form, outside):
    """Eight devices with six ids each, the last ids padding: one shard has none that are used."""
    mesh = jax.make_mesh((8,), ("v",), axis_types=(jax.sharding.AxisType.Auto,))
    case = (5, 48, 4, True, 41, 0.7, 2)
    hidden, weight, targets, c = draw(case)
    c[-1] = 0.0
    everywhere, shard = PartitionSpec(), PartitionSpec("v")

    def loss(h, w):
        head = Head(w, used=41)
        if form == "one pass":
            out = head_loss(h, head, targets, c, quadratic, temperature=0.7, chunk=2, axis_name="v")
            return out.loss, (out.logprob, out.entropy)
        logprob, entropy = head_logprob(h, head, targets, temperature=0.7, chunk=2, axis_name="v")
        return quadratic(logprob, entropy, c)[0], (logprob, entropy)

    specs = {"mesh": mesh, "in_specs": (everywhere, shard)}
    values = (everywhere, (everywhere, everywhere))
    if outside:
        call = jax.value_and_grad(jax.shard_map(loss, out_specs=values, **specs), (0, 1), has_aux=True)
    else:
        inside = jax.value_and_grad(loss, (0, 1), has_aux=True)
        call = jax.shard_map(inside, out_specs=(values, (everywhere, shard)), **specs)
    (value, rest), gradients = jax.jit(call)(hidden, weight)
    want = by_hand(case, hidden, weight, targets, c)
    for ours, theirs in zip((*rest, value, *gradients), want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=3e-5)


# ------------------------------------------------------------------------------------------------- in the update


@pytest.mark.parametrize(
    "loss",
    [
        Loss(kl_coef=0.1, entropy_coef=0.05, tis_clip=2.0),
        Loss(ratio_level="sequence", aggregation="sequence"),
        Loss(objective="dpo", aggregation="sum", clip_low=None),
    ],
    ids=["tokens", "completions", "groups"],
)
def test_the_update_equals_the_one_from_logits(loss):
    """A policy whose ``unembed`` is a plain function goes through logits and autodiff."""
    policy, sampling = toys.policy(), Sampling(0.8)
    plain = policy._replace(unembed=lambda v, h: logits(h, policy.unembed.head(v)))
    own = {"params": policy.init(jax.random.key(0))}
    run = lambda p: make_learner(p, loss, Optimizer(), sampling).accumulate(own, None, batch(), None)
    (ours, metrics, scored), (theirs, want, wanted) = run(policy), run(plain)
    assert metrics.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(metrics[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(scored.gap, wanted.gap, rtol=1e-5)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


# ----------------------------------------------------------------------------------------- other machines, bad input


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("form", FORMS)
def test_lowers_for_accelerators(platform, form):
    case = CASES["chunks and a rest"]
    hidden, weight, targets, c = draw(case, jnp.bfloat16)
    step = jax.jit(jax.grad(lambda h, w: FORMS[form](case, h, w, targets, c)[0], (0, 1)))
    assert "stablehlo" in step.trace(hidden, weight).lower(lowering_platforms=(platform,)).as_text()


def test_bad_input():
    hidden, weight, targets, c = draw(CASES["one chunk"])
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature is positive"):
            head_logprob(hidden, Head(weight), targets, temperature=temperature)
    with pytest.raises(ValueError, match="hidden states of size 8 do not fit a head of 48"):
        head_loss(hidden, Head(weight, rows=False), targets, c, quadratic)
