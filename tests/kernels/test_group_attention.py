"""Group attention against dense float64 attention over [prefix | own], its gradients, and what it must not see."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.kernels.attention.group import group_attention
from jaxmarl_llm.kernels.attention.group_decode import ring_decode_attention

attend = jax.jit(group_attention)

# N, G, T, P, S, query heads, key heads, H, offset. Training has T = S and offset 0; decoding T = 1 and S slots.
SHAPES = {
    "training": (3, 4, 5, 7, 5, 4, 2, 8, 0),
    "training, all heads share a key head": (2, 3, 4, 6, 4, 6, 1, 4, 0),
    "training, no sharing of heads": (2, 2, 6, 3, 6, 3, 3, 8, 0),
    "training, G = 1": (3, 1, 4, 5, 4, 4, 2, 8, 0),
    "training, one response token": (2, 3, 1, 5, 1, 4, 2, 8, 0),
    "decoding, middle": (3, 4, 1, 7, 6, 4, 2, 8, 3),
    "decoding, last slot": (2, 2, 1, 4, 6, 6, 2, 16, 5),
    "decoding, G = 1, N = 1": (1, 1, 1, 4, 5, 2, 1, 4, 2),
    "a chunk of tokens": (2, 3, 2, 4, 7, 4, 2, 8, 3),
}


def draw(shape, seed=0, spread=1.5):
    """(q, prefix k, prefix v, length, own k, own v, offset); lengths are ragged, with 1 and the full prefix."""
    n, g, t, p, s, heads, kv, h, offset = shape
    rng = np.random.default_rng(seed)
    array = lambda *dims: rng.normal(0, spread, dims).astype(np.float32)
    length = rng.integers(1, p + 1, n).astype(np.int32)
    length[0], length[-1] = 1, p
    q, pk, pv = array(n, g, t, heads, h), array(n, p, kv, h), array(n, p, kv, h)
    return q, pk, pv, length, array(n, g, s, kv, h), array(n, g, s, kv, h), np.int32(offset)


def dense64(q, pk, pv, length, ok, ov, offset):
    """One row of one head at a time, over the keys it may see and no others."""
    q, pk, pv, ok, ov = (np.asarray(x, np.float64) for x in (q, pk, pv, ok, ov))
    out = np.empty(q.shape)
    share = q.shape[3] // pk.shape[2]
    for n, g, t, head in np.ndindex(q.shape[:4]):
        kv, own = head // share, slice(0, offset + t + 1)
        keys = np.concatenate([pk[n, : length[n], kv], ok[n, g, own, kv]])
        values = np.concatenate([pv[n, : length[n], kv], ov[n, g, own, kv]])
        score = keys @ q[n, g, t, head] / np.sqrt(q.shape[-1])
        weight = np.exp(score - score.max())
        out[n, g, t, head] = weight @ values / weight.sum()
    return out


def dense(q, pk, pv, length, ok, ov, offset):
    """The same in jnp, the prefix copied to every sample and every query head, for autodiff."""
    g, t, heads = q.shape[1:4]
    share = heads // pk.shape[2]

    def joined(prefix, own):
        copied = jnp.broadcast_to(prefix[:, None], (prefix.shape[0], g, *prefix.shape[1:]))
        return jnp.repeat(jnp.concatenate([copied, own], axis=2), share, axis=3)

    k, v = joined(pk, ok), joined(pv, ov)
    p, s = pk.shape[1], ok.shape[2]
    see_prefix = jnp.broadcast_to(jnp.arange(p) < length[:, None, None], (len(length), t, p))
    see_own = jnp.broadcast_to(jnp.arange(s) <= jnp.arange(t)[:, None] + offset, (len(length), t, s))
    see = jnp.concatenate([see_prefix, see_own], axis=-1)[:, None, None]
    score = jnp.einsum("ngtqh,ngkqh->ngqtk", q, k) / q.shape[-1] ** 0.5
    weight = jax.nn.softmax(jnp.where(see, score, -jnp.inf), axis=-1)
    return jnp.einsum("ngqtk,ngkqh->ngtqh", weight, v)


def hidden_slots(args):
    """Boolean masks of prefix slots [N P] and own slots [S] that no query may see."""
    q, pk, _, length, ok, _, offset = args
    return np.arange(pk.shape[1]) >= length[:, None], np.arange(ok.shape[2]) >= q.shape[2] + offset


@pytest.mark.parametrize("name", SHAPES)
def test_equals_dense_attention_in_float64(name):
    args = draw(SHAPES[name])
    out = attend(*args)
    assert out.shape == args[0].shape and out.dtype == jnp.float32
    np.testing.assert_allclose(out, dense64(*args), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_equals_dense_attention_at_random_shapes(seed):
    rng = np.random.default_rng(100 + seed)
    n, g, s, p, kv, share, h = (int(rng.integers(1, high)) for high in (5, 6, 8, 10, 4, 4, 9))
    t = int(rng.integers(1, s + 1))
    args = draw((n, g, t, p, s, kv * share, kv, h, s - t), seed)
    np.testing.assert_allclose(attend(*args), dense64(*args), atol=1e-5, rtol=1e-5)


def test_large_scores_do_not_overflow():
    args = draw(SHAPES["training"], spread=30.0)
    np.testing.assert_allclose(attend(*args), dense64(*args), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["training", "training, G = 1", "decoding, middle"])
def test_bfloat16(name):
    low = [x.astype(jnp.bfloat16) if x.dtype == np.float32 else x for x in draw(SHAPES[name])]
    out = attend(*low)
    assert out.dtype == jnp.bfloat16
    gap = np.abs(np.asarray(out, np.float64) - dense64(*low))
    assert gap.max() < 0.03 and gap.mean() < 0.005


def test_every_step_of_decoding_equals_the_row_of_training():
    q, pk, pv, length, ok, ov, _ = draw(SHAPES["training"])
    together = attend(q, pk, pv, length, ok, ov, np.int32(0))
    for t in range(q.shape[2]):
        one = attend(q[:, :, t : t + 1], pk, pv, length, ok, ov, np.int32(t))
        np.testing.assert_allclose(one[:, :, 0], together[:, :, t], atol=1e-6)


def test_a_ring_of_own_slots_is_attention_of_each_node_by_itself():
    """Nodes that began 4, 1 and 0 tokens before time 9; their rings of 6 slots hold old keys of other nodes too."""
    q, pk, pv, length, ok, ov, _ = draw(SHAPES["decoding, middle"])
    time, begun, slots = 9, np.array([5, 8, 9]), ok.shape[2]
    got = ring_decode_attention(q, pk, pv, length, ok, ov, jnp.int32(time), begun)
    for n, first in enumerate(begun):
        own = [t % slots for t in range(first, time + 1)]
        one = [x[n : n + 1] for x in (q, pk, pv, length)] + [x[n : n + 1][:, :, own] for x in (ok, ov)]
        np.testing.assert_allclose(got[n : n + 1], dense64(*one, time - first), atol=1e-5)


@pytest.mark.parametrize("name", ["training", "decoding, middle", "a chunk of tokens"])
def test_masked_slots_are_never_read(name):
    """Bit for bit the same result, and exactly no gradient, whatever stands in prompt padding and unused slots."""
    args = draw(SHAPES[name])
    rng = np.random.default_rng(9)
    behind_prefix, behind_own = hidden_slots(args)
    assert behind_prefix.any() and (behind_own.any() or name == "training")
    target = rng.normal(size=args[0].shape).astype(np.float32)

    @jax.jit
    def both(q, pk, pv, ok, ov):
        call = lambda *x: group_attention(x[0], x[1], x[2], args[3], x[3], x[4], args[6])
        out, pull = jax.vjp(call, q, pk, pv, ok, ov)
        return out, pull(target)

    clean = [args[i] for i in (0, 1, 2, 4, 5)]
    dirty = [x.copy() for x in clean]
    for x in dirty[1:3]:
        x[behind_prefix] = rng.normal(0, 1e6, x[behind_prefix].shape)
    for x in dirty[3:]:
        x[:, :, behind_own] = rng.normal(0, 1e6, x[:, :, behind_own].shape)
    for x, y in zip(jax.tree.leaves(both(*clean)), jax.tree.leaves(both(*dirty)), strict=True):
        np.testing.assert_array_equal(x, y)
    _, (_, dpk, dpv, dok, dov) = both(*dirty)
    for gradient in (dpk, dpv):
        assert not np.asarray(gradient)[behind_prefix].any() and np.asarray(gradient)[~behind_prefix].all()
    for gradient in (dok, dov):
        assert not np.asarray(gradient)[:, :, behind_own].any() and np.asarray(gradient)[:, :, ~behind_own].any()


@pytest.mark.parametrize("name", ["training", "decoding, middle"])
def test_gradients_equal_those_of_the_dense_form(name):
    q, pk, pv, length, ok, ov, offset = draw(SHAPES[name], spread=0.8)
    target = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    def gradients(form):
        loss = lambda q, pk, pv, ok, ov: jnp.sum(form(q, pk, pv, length, ok, ov, offset) * target)
        return jax.jit(jax.grad(loss, argnums=range(5)))(q, pk, pv, ok, ov)

    for ours, theirs in zip(gradients(group_attention), gradients(dense), strict=True):
        assert np.abs(theirs).max() > 0.05
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


def test_gradient_of_the_prefix_is_the_sum_over_the_group():
    q, pk, pv, length, ok, ov, offset = draw(SHAPES["training"])
    target = np.random.default_rng(1).normal(size=q.shape).astype(np.float32)

    @jax.jit
    def gradient(pk, pv, q, ok, ov, target):
        loss = lambda pk, pv: jnp.sum(group_attention(q, pk, pv, length, ok, ov, offset) * target)
        return jax.grad(loss, argnums=(0, 1))(pk, pv)

    whole = gradient(pk, pv, q, ok, ov, target)
    one = [slice(g, g + 1) for g in range(q.shape[1])]
    parts = [gradient(pk, pv, q[:, g], ok[:, g], ov[:, g], target[:, g]) for g in one]
    for i in range(2):
        np.testing.assert_allclose(whole[i], sum(np.asarray(x[i]) for x in parts), atol=1e-5)
        assert np.abs(whole[i] - np.asarray(parts[0][i])).max() > 0.1


def test_a_decoding_loop_on_cpu_lays_out_a_prefix_once():
    """The products of a token read the prefix as it lies in memory, so no step copies or transposes it."""
    q, pk, pv, length, ok, ov, _ = draw((3, 2, 1, 48, 5, 4, 2, 8, 0))

    @jax.jit
    def loop(q, *caches):
        return jax.lax.fori_loop(0, 4, lambda t, q: ring_decode_attention(q, *caches, t, jnp.zeros(3, jnp.int32)), q)

    hlo = loop.lower(q, pk, pv, length, ok, ov).compile().as_text()
    body = re.search(r" while\(.*body=(%[\w.]+)", hlo)[1]
    computations = dict(re.findall(r"^(ENTRY|%[\w.]+) (.*?)^}", hlo, re.M | re.S))
    copies = re.compile(r"= f32\[3,2,(?:8,48|48,8)\]\S* (?:copy|transpose|fusion)\(")
    assert len(copies.findall(computations["ENTRY"])) == 2 and not copies.findall(computations[body])
