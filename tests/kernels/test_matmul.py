"""`matmul` against autodiff of the same sum in float64, and what it and the gated activation are there for."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.kernels.matmul import matmul
from jaxmarl_llm.models import decoder_config, layers
from jaxmarl_llm.types import PyTree

# x [*T K], w [*B K N] and the sum, in letters
CASES = {
    "wide out": ((7, 3), (3, 5), "tk,kn->tn"),
    "wide in": ((7, 5), (5, 3), "tk,kn->tn"),
    "square, rows along two axes": ((2, 4, 5), (5, 5), "stk,kn->stn"),
    "one row": ((6,), (6, 4), "k,kn->n"),
    "a batch": ((2, 3, 4, 6, 5), (2, 3, 5, 7), "abstk,abkn->abstn"),
    "a batch, wide in": ((3, 4, 6), (3, 6, 2), "btk,bkn->btn"),
    "no rows": ((0, 5), (5, 3), "tk,kn->tn"),
}


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


def draw(case, dtype):
    shape, weight, letters = CASES[case]
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=size).astype(np.float32) for size in (shape, weight))
    g = rng.normal(size=(*shape[:-1], weight[-1])).astype(np.float32)
    return (*(jnp.asarray(a, dtype) for a in (x, w, g)), letters)


@pytest.mark.parametrize(
    "dtype, added, gap", [("float32", None, 3e-7), ("bfloat16", None, 1e-2), ("bfloat16", "float32", 1e-2)]
)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_sum(case, dtype, added, gap):
    x, w, g, letters = draw(case, dtype)
    y, back = jax.vjp(lambda x, w: matmul(x, w, added), x, w)
    assert y.dtype == (added or dtype)
    dx, dw = back(g.astype(y.dtype))
    assert (dx.dtype, dw.dtype) == (x.dtype, w.dtype)
    x, w, g = (np.asarray(a, np.float64) for a in (x, w, g))
    operands, out = letters.split("->")
    of_x, of_w = operands.split(",")
    asked = {
        "value": (y, np.einsum(letters, x, w)),
        "gradient of x": (dx, np.einsum(f"{out},{of_w}->{of_x}", g, w)),
        "gradient of w": (dw, np.einsum(f"{of_x},{out}->{of_w}", x, g)),
    }
    for name, (got, true) in asked.items():
        assert got.shape == true.shape, name
        np.testing.assert_allclose(
            np.asarray(got, np.float64), true, atol=gap * max(1, abs(true).max(initial=0)), err_msg=name
        )


def test_batched_and_recomputed():
    x, w, g, _ = draw("a batch", "float32")
    loss = lambda form: lambda x, w: (jnp.sin(form(x, w)) * g).sum()
    want = jax.grad(loss(lambda x, w: jnp.einsum("abstk,abkn->abstn", x, w)), (0, 1))(x, w)
    twice = jax.vmap(jax.vmap(matmul))
    for form in (twice, jax.checkpoint(matmul), jax.jit(matmul)):
        for a, b in zip(jax.grad(loss(form), (0, 1))(x, w), want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("trained, products", [((0,), 1), ((1,), 1), ((0, 1), 2)])
def test_what_is_not_differentiated_costs_no_product_and_keeps_nothing(trained, products):
    x, w, _, _ = draw("wide out", "float32")
    fixed = lambda *free: matmul(*(free[trained.index(i)] if i in trained else (x, w)[i] for i in (0, 1)))
    back = jax.vjp(fixed, *((x, w)[i] for i in trained))[1]
    y = jnp.ones((len(x), w.shape[1]))
    assert str(jax.make_jaxpr(back)(y)).count("dot_general") == products
    assert len(jax.tree.leaves(back)) == products


def test_operands_of_two_dtypes_are_refused():
    with pytest.raises(TypeError, match="x and w are of one dtype, not float32 and bfloat16"):
        matmul(jnp.ones((2, 3)), jnp.ones((3, 4), jnp.bfloat16))


TINY = decoder_config.Config(
    vocab_size=32, hidden_size=16, intermediate_size=40, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8
)
TOKENS = 24


def mlp() -> tuple[layers.MLP, PyTree, jax.Array]:
    x = jax.random.normal(jax.random.key(0), (1, TOKENS, TINY.hidden_size))
    module = layers.MLP(TINY)
    return module, module.init(jax.random.key(1), x), x


def test_the_backward_pass_of_an_mlp_keeps_three_vectors_a_token():
    module, variables, x = mlp()
    kept = jax.tree.leaves(jax.vjp(module.apply, variables, x)[1])
    assert sum(leaf.shape == (1, TOKENS, TINY.intermediate_size) for leaf in kept) == 3


def test_gradients_of_an_mlp_are_those_of_its_formula():
    module, variables, x = mlp()
    weight = lambda v, name: v["params"][name]["kernel"]
    plain = lambda v, x: (jax.nn.silu(x @ weight(v, "gate_proj")) * (x @ weight(v, "up_proj"))) @ weight(v, "down_proj")
    loss = lambda form: lambda v, x: jnp.cos(form(v, x)).sum()
    got, want = (jax.grad(loss(form), (0, 1))(variables, x) for form in (module.apply, plain))
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize("wide", ["in", "out"])
def test_the_first_operand_of_a_gradient_is_the_narrow_one(wide):
    """The one that XLA's CPU compiler lays out by columns (docs/log.md)."""
    x, w = jnp.zeros((TOKENS, 40 if wide == "in" else 16)), jnp.zeros((40, 16) if wide == "in" else (16, 40))
    gradient = jax.make_jaxpr(jax.grad(lambda w: jnp.sin(matmul(x, w)).sum()))(w)
    dots = [e for e in gradient.eqns if e.primitive is jax.lax.dot_general_p]
    assert dots[-1].invars[0].aval.shape == (TOKENS, 16)
