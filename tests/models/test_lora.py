"""Adapters: fresh ones change nothing, merged equals unmerged, gradients reach them alone, a role's is its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling, score
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.lora import TARGETS, init_lora, merge_lora
from jaxmarl_llm.types import Model
from tests.generation.test_generate import (
    ENDS,
    EVERY,
    QWEN2,
    G,
    N,
    P,
    R,
    V,
    forced,
    grade,
    play,
    prompts,
    random_params,
    sample_keys,
)
from tests.generation.test_generate import sampled as sampled_tokens

SCALE = QWEN2.lora_scale
RANK = 3
MODULES = {("self_attn", t) for t in TARGETS[:4]} | {("mlp", t) for t in TARGETS[4:]}


@pytest.fixture(scope="module")
def policy():
    return make_policy(QWEN2, remat=False)


@pytest.fixture(scope="module")
def params(policy):
    return random_params(policy)


def trained(params, seed, targets=TARGETS):
    """An adapter whose B is no longer zero."""
    rng = np.random.default_rng(seed)
    grow = lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), jnp.float32)
    return jax.tree.map(grow, init_lora(jax.random.key(seed), params, RANK, targets))


def modules(tree):
    return {(block, name) for block, inside in tree.items() for name in inside}


def completions(seed=0):
    return np.random.default_rng(seed).integers(0, V, (N, G, R)).astype(np.int32)


def logits(policy, variables):
    return np.asarray(forced(policy, variables, *prompts(N, P), completions()))


def run(policy, variables):
    return play((policy, variables), *prompts(N, P), sample_keys(N, G), **ENDS)


def assert_same_run(got, want, gap=1e-5):
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_array_equal(got.length, want.length)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=gap, rtol=0)


# --------------------------------------------------------------------------------------------------- the tree


def test_a_fresh_adapter(params):
    big = {"layers": {"mlp": {"up_proj": {"kernel": jax.ShapeDtypeStruct((4, 256, 32), jnp.bfloat16)}}}}
    ab = init_lora(jax.random.key(0), big, 16)["mlp"]["up_proj"]  # shapes suffice
    assert ab["a"].shape == (4, 256, 16) and ab["b"].shape == (4, 16, 32)
    assert ab["a"].dtype == ab["b"].dtype == jnp.float32 and not ab["b"].any()
    assert float(ab["a"].var()) == pytest.approx(1 / 256, rel=0.1)
    lora = init_lora(jax.random.key(0), params, RANK)
    assert modules(lora) == MODULES
    a = [np.asarray(lora[block][name]["a"][layer]) for block, name in sorted(MODULES) for layer in (0, 1)]
    assert len({x.tobytes() for x in a}) == 14  # no module or layer repeats another's numbers
    assert modules(init_lora(jax.random.key(0), params, 1, ("q_proj", "up_proj"))) == {
        ("self_attn", "q_proj"),
        ("mlp", "up_proj"),
    }


@pytest.mark.parametrize("rank", [0, -2])
def test_rank_must_be_positive(params, rank):
    with pytest.raises(ConfigError, match=rf"^lora rank: expected >= 1, got {rank}$"):
        init_lora(jax.random.key(0), params, rank)


def test_unknown_targets(params):
    with pytest.raises(ConfigError) as error:
        init_lora(jax.random.key(0), params, 2, ("q_proj", "lm_head", "gate"))
    assert str(error.value) == f"lora targets: unknown gate, lm_head; known: {', '.join(TARGETS)}"


# -------------------------------------------------------------------------------------------------- the values


def test_a_fresh_adapter_changes_nothing(policy, params):
    fresh = {"params": params, "lora": init_lora(jax.random.key(1), params, RANK)}
    np.testing.assert_array_equal(logits(policy, fresh), logits(policy, {"params": params}))
    assert_same_run(run(policy, fresh), run(policy, {"params": params}), 2e-6)


def test_merged_equals_unmerged(policy, params):
    lora = trained(params, 2)
    adapted, merged = {"params": params, "lora": lora}, {"params": merge_lora(params, lora, SCALE)}
    got = logits(policy, adapted)
    np.testing.assert_allclose(got, logits(policy, merged), atol=1e-5, rtol=1e-5)
    assert np.abs(got - logits(policy, {"params": params})).max() > 0.3
    assert_same_run(run(policy, adapted), run(policy, merged))


def test_decode_with_an_adapter_equals_forward_with_it(policy, params):
    """`unstack` hands the adapter on to `decode`."""
    variables = {"params": params, "lora": trained(params, 2)}
    out = run(policy, variables)
    score_of = lambda v: np.asarray(grade(forced(policy, v, *prompts(N, P), out.tokens), out.tokens, EVERY)[0])
    mask = sampled_tokens(out)
    np.testing.assert_allclose(out.logprobs[mask], score_of(variables)[mask], atol=1e-5, rtol=0)
    assert np.abs(out.logprobs - score_of({"params": params}))[mask].max() > 0.3


@pytest.mark.parametrize("target", TARGETS)
def test_each_target_is_adapted(policy, params, target):
    """W + scale A B at that kernel of every layer, by numpy, and every other leaf as it was."""
    lora = trained(params, 3, (target,))
    ((block, _),) = modules(lora)
    merged = merge_lora(params, lora, 0.7)
    ab = jax.tree.map(lambda x: np.asarray(x, np.float64), lora[block][target])
    want = np.asarray(params["layers"][block][target]["kernel"]) + 0.7 * ab["a"] @ ab["b"]
    np.testing.assert_allclose(merged["layers"][block][target]["kernel"], want, atol=1e-6)
    same = jax.tree_util.tree_map_with_path(lambda _, x, y: bool((x == y).all()), params, merged)
    changed = {jax.tree_util.keystr(k, simple=True, separator=".") for k, v in jax.tree.leaves_with_path(same) if not v}
    assert changed == {f"layers.{block}.{target}.kernel"}


def test_merging_keeps_the_dtype_of_the_backbone(params):
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    merged = merge_lora(low, trained(params, 2), SCALE)
    assert {x.dtype.name for x in jax.tree.leaves(merged)} == {"bfloat16"}


# ----------------------------------------------------------------------------------------------- the gradients


def test_gradients_reach_the_adapter_of_the_role_alone(policy, params):
    """Both matrices of every module, by central differences along the gradient; nothing reaches the other role."""
    own = trained(params, 4)
    tree = {"shared": {"base": params}, "agents": {"one": {"lora": own}, "two": {"lora": trained(params, 5)}}}
    model = Model("one", policy, None, base="base")
    said = jnp.asarray(completions())

    def loss(agents):
        variables = model.variables({**tree, "agents": agents})
        hidden = policy.hidden(variables, *prompts(N, P), said)
        return score(policy.unembed(variables, hidden), said, Sampling())[0].mean()

    gradient = jax.jit(jax.grad(loss))(tree["agents"])
    assert not any(x.any() for x in jax.tree.leaves(gradient["two"]))
    found = gradient["one"]["lora"]
    assert modules(found) == MODULES

    def value(lora):
        log = grade(forced(policy, {"params": params, "lora": lora}, *prompts(N, P), said), said, Sampling())[0]
        return np.asarray(log, np.float64).mean()

    for block, name in sorted(MODULES):
        for leaf in "ab":
            g = np.asarray(found[block][name][leaf])
            norm = np.linalg.norm(g)
            assert norm > 1e-3 and all(layer.any() for layer in g)
            moved = []
            for step in (0.03, -0.03):
                lora = jax.tree.map(lambda x: x, own)
                lora[block][name][leaf] = lora[block][name][leaf] + step * g / norm
                moved.append(value(lora))
            assert (moved[0] - moved[1]) / 0.06 == pytest.approx(norm, rel=0.01), (block, name, leaf)


# ------------------------------------------------------------------------------------- an adapter for each role


def test_one_backbone_with_adapters_equals_separate_copies(policy, params):
    loras = {"master": trained(params, 6), "expert": trained(params, 7)}
    shared = {"shared": {"base": params}, "agents": {name: {"lora": lora} for name, lora in loras.items()}}
    copies = {"agents": {name: {"params": merge_lora(params, lora, SCALE)} for name, lora in loras.items()}}
    outs = {}
    for name in loras:
        light = Model(name, policy, None, base="base").variables(shared)
        full = Model(name, policy, None).variables(copies)
        assert light["params"] is params
        np.testing.assert_allclose(logits(policy, light), logits(policy, full), atol=1e-5, rtol=1e-5)
        outs[name] = run(policy, light)
        assert_same_run(outs[name], run(policy, full))
    assert (outs["master"].tokens != outs["expert"].tokens).mean() > 0.1
