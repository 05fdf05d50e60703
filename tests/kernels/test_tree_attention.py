"""Tree attention against dense attention over each token's own ancestors, its gradients, and what must not be seen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.kernels.attention.group import group_attention
from jaxmarl_llm.kernels.attention.tree import tree_attention

attend = jax.jit(tree_attention, static_argnames=("chunk",))


def forest(rng, size, spare=0, join=0.7):
    """(parent [T] or -1, end [T]) of random trees in depth first order; ``spare`` tokens of padding behind."""
    parent, end, path = np.full(size + spare, -1), np.zeros(size + spare, np.int32), []
    for i in range(size):
        while path and rng.random() > join:  # climb: sometimes to a new root
            end[path.pop()] = i
        parent[i] = path[-1] if path else -1
        path.append(i)
    end[path] = size
    return parent, end


def ancestors(parent, i):
    """i and all above it, from the root on."""
    return [] if i < 0 else [*ancestors(parent, parent[i]), i]


def draw(rng, parents, heads, kv, h):
    array = lambda n: rng.normal(0, 1.5, (len(parents), len(parents[0]), n, h)).astype(np.float32)
    return array(heads), array(kv), array(kv)


def dense64(q, k, v, parents):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, share = np.zeros(q.shape), q.shape[2] // k.shape[2]
    for b, i, head in np.ndindex(q.shape[:3]):
        seen = ancestors(parents[b], i)
        score = k[b, seen, head // share] @ q[b, i, head] / np.sqrt(q.shape[-1])
        weight = np.exp(score - score.max())
        out[b, i, head] = weight @ v[b, seen, head // share] / weight.sum()
    return out


def of_shape(seed, b, t, spare, heads, kv, h):
    rng = np.random.default_rng(seed)
    trees = [forest(rng, t - n, spare + n) for n in range(b)]
    parents, ends = (np.stack(x) for x in zip(*trees))
    return draw(rng, parents, heads, kv, h), parents, ends, ends > 0


@pytest.mark.parametrize("shape", [(2, 13, 0, 4, 2, 8), (1, 24, 3, 6, 1, 4), (3, 7, 2, 3, 3, 8), (1, 1, 0, 2, 1, 4)])
@pytest.mark.parametrize("chunk", [5, 128])
def test_equals_dense_attention_over_ancestors(shape, chunk):
    (q, k, v), parents, end, real = of_shape(sum(shape), *shape)
    out = np.asarray(attend(q, k, v, end, chunk=chunk))
    np.testing.assert_allclose(out[real], dense64(q, k, v, parents)[real], atol=1e-5, rtol=1e-5)
    assert out.dtype == np.float32 and np.isfinite(out).all()


@pytest.mark.parametrize("form", [{"chunk": 5}, {"impl": "tpu", "interpret": True}], ids=["xla", "tpu"])
def test_queries_may_be_those_of_the_last_tokens(form):
    """Also where no query sees the first tokens: they are of trees that have ended, or padding."""
    (q, k, v), parents, end, real = of_shape(2, 2, 40, 0, 4, 2, 8)
    end = np.where(np.arange(40) < 7, 0, end)  # of the first trees and of padding
    parents = np.where(parents < 7, -1, parents)
    out = np.asarray(tree_attention(q[:, -13:], k, v, end, **form))
    np.testing.assert_allclose(out[real[:, -13:]], dense64(q, k, v, parents)[:, -13:][real[:, -13:]], atol=2e-5)


def dense(q, k, v, see):
    share = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, share, axis=2) for x in (k, v))
    score = jnp.einsum("btqh,bsqh->bqts", q, k) / q.shape[-1] ** 0.5
    return jnp.einsum("bqts,bsqh->btqh", jax.nn.softmax(jnp.where(see[:, None], score, -jnp.inf), axis=-1), v)


def test_gradients_are_those_of_the_dense_form():
    (q, k, v), parents, end, _ = of_shape(3, 2, 17, 0, 4, 2, 8)
    see = np.zeros((2, 17, 17), bool)
    for b, i in np.ndindex(2, 17):
        see[b, i, ancestors(parents[b], i)] = True
    see |= ~see.any(-1, keepdims=True)  # padding sees anything; nothing asks for it
    real = (end > 0)[..., None, None]
    pull = np.random.default_rng(1).normal(size=q.shape)
    loss = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(jnp.where(real, f(*x) * pull, 0.0)), (0, 1, 2)))
    ours = loss(lambda q, k, v: tree_attention(q, k, v, end, chunk=4))(q, k, v)
    for got, want in zip(ours, loss(lambda q, k, v: dense(q, k, v, see))(q, k, v)):
        np.testing.assert_allclose(got, want, atol=2e-5)
    for leaf in jax.tree.leaves(ours):
        assert not np.asarray(leaf)[~(end > 0)].any()  # padding neither gives nor gets


def test_a_shared_beginning_gets_the_sum_of_its_uses_gradients():
    """A prompt of 4 with 3 samples of 3 and a fork inside one of them, against each sequence alone."""
    parent = np.array([-1, 0, 1, 2, 3, 4, 5, 3, 7, 8, 7, 10])
    end = np.array([12, 12, 12, 12, 7, 7, 7, 12, 10, 10, 12, 12], np.int32)
    q, k, v = draw(np.random.default_rng(0), parent[None], 4, 2, 8)
    leaves = [i for i in range(12) if i not in parent]
    pull = np.random.default_rng(2).normal(size=(12, 4, 8)).astype(np.float32)

    def whole(q, k, v):
        out = tree_attention(q, k, v, end[None], chunk=5)
        # Each use of a token counts: those shared by all three sequences three times.
        return sum(jnp.sum(out[0, ancestors(parent, i)] * pull[ancestors(parent, i)]) for i in leaves)

    def apart(q, k, v):
        total = 0.0
        for i in leaves:
            at = np.array(ancestors(parent, i))
            out = jax.nn.dot_product_attention(q[:, at], k[:, at], v[:, at], is_causal=True)
            total += jnp.sum(out[0] * pull[at])
        return total

    for got, want in zip(*(jax.jit(jax.grad(f, (0, 1, 2)))(q, k, v) for f in (whole, apart))):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_tree_with_one_fork_is_group_attention():
    rng = np.random.default_rng(4)
    p, g, r = 6, 3, 4
    end = np.concatenate([np.full(p, p + g * r), p + r * (1 + np.arange(g)).repeat(r)]).astype(np.int32)
    q, k, v = draw(rng, end[None], 4, 2, 8)
    out = attend(q, k, v, end[None], chunk=7)[0, p:].reshape(g, r, 4, 8)
    split = lambda x: (x[:, :p], x[:, p:].reshape(1, g, r, *x.shape[2:]))
    (pk, ok), (pv, ov) = split(k), split(v)
    want = jax.jit(group_attention)(q[:, p:].reshape(1, g, r, 4, 8), pk, pv, np.array([p]), ok, ov)[0]
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_bfloat16_is_close_and_its_softmax_float32():
    (q, k, v), parents, end, real = of_shape(9, 1, 40, 0, 4, 2, 8)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out = attend(*half, end, chunk=16)
    assert out.dtype == jnp.bfloat16
    want = dense64(*(np.asarray(x, np.float32) for x in half), parents)
    np.testing.assert_allclose(np.asarray(out, np.float32)[real], want[real], atol=0.03, rtol=0.02)
    text = str(jax.make_jaxpr(lambda *x: tree_attention(*x, end, chunk=16))(*half))
    assert "bf16[1,2,2,16,40]" in text and "exp" in text and ":f32[1,2,2,16,40] = exp" in text


def test_scores_of_one_chunk_alone_are_alive():
    t, chunk = 1024, 64
    x = jax.ShapeDtypeStruct((1, t, 4, 8), jnp.float32)
    end = np.full((1, t), t, np.int32)
    loss = lambda q, k, v: tree_attention(q, k, v, end, chunk=chunk).sum()
    used = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert used < 4 * t * t * 4 / 2  # a half of one float32 [heads T T]
