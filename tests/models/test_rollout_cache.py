"""Policies with quantized caches, against policies that compute with keys and values which the test rounds itself."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.generate import by_row, fill, generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.kernels.quantized import VALUES, ScaledVectors
from jaxmarl_llm.models import layers, scripted, tabular
from jaxmarl_llm.models.batch_invariant import invariant
from jaxmarl_llm.models.rollout_cache import FORMS, with_caches
from jaxmarl_llm.types import Model, Role, Team
from tests import toys
from tests.generation import test_slots
from tests.kernels.test_quantized import TABLES, forms

ENDS = {"stop_ids": (1,), "pad_id": 0}
is_quantized = lambda x: isinstance(x, ScaledVectors)


def policy_of(layers=2, **extra):
    policy = toys.policy(hidden=32, layers=layers, **extra)
    return policy, {"params": policy.init(jax.random.key(0))}


def rows(n=5, g=3, p=9, seed=0):
    rng = np.random.default_rng(seed)
    keys = jax.random.split(jax.random.key(seed + 1), (n, g))
    return rng.integers(0, 256, (n, p)), rng.integers(1, p + 1, n), keys, np.ones(n, bool)


def said(policy, variables, given, response=6, temperature=1.0, **more):
    sampling = Sampling(temperature=temperature)
    return generate(policy, variables, *given, max_new_tokens=response, sampling=sampling, **ENDS, **more)


def rounded(x, form):
    """Vectors that are multiples of a scale, as floats: what the values of a form stand for."""
    table = jnp.asarray(TABLES[form], jnp.float32)
    scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True) / table[-1], 1e-30)
    return table[jnp.searchsorted((table[1:] + table[:-1]) / 2, x / scale)] * scale


@functools.cache
def rounding(policy, form):
    """A policy whose decoder rounds keys and values to floats where it makes them."""

    def inside(function):
        def call(*args, **more):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layers, "lay_heads", functools.partial(rounded, form=form))
                return function(*args, **more)

        return call

    names = ("prefill", "extend", "decode", "decode_slots", "hidden")
    return policy._replace(**{name: inside(getattr(policy, name)) for name in names})


def close(got, right):
    """Equal tokens and log-probs. A number between two steps may be rounded otherwise by a sum in another order."""
    np.testing.assert_array_equal(got.tokens, right.tokens)
    off = np.abs(np.asarray(got.logprobs) - np.asarray(right.logprobs))
    assert np.median(off) < 2e-6 and off.max() < 5e-3, off.max()


@forms
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("response", [6, 40])
def test_tokens_are_those_of_rounded_keys_and_values(response, family, form):
    policy, variables = policy_of(family=family)
    given = rows()
    for temperature in (0.0, 1.0):
        got = said(FORMS[form](policy), variables, given, response, temperature)
        close(got, said(rounding(policy, form), variables, given, response, temperature))


@forms
def test_log_probs_are_those_of_whole_sequences_with_rounded_keys_and_values(form):
    policy, variables = policy_of()
    tokens, length, *_ = given = rows()
    got = said(FORMS[form](policy), variables, given)
    hidden = rounding(policy, form).hidden(variables, jnp.asarray(tokens), jnp.asarray(length), got.tokens)
    every = jax.nn.log_softmax(policy.unembed(variables, hidden))
    own = np.take_along_axis(np.asarray(every), np.asarray(got.tokens)[..., None], -1)[..., 0]
    there = np.arange(6) < np.asarray(got.length)[..., None]
    off = np.abs(own - got.logprobs)[there]
    assert np.median(off) < 2e-6 and off.max() < 5e-3


@forms
def test_log_probs_are_near_those_of_training(form):
    policy, variables = policy_of()
    tokens, length, *_ = given = rows(n=8, p=30)
    got = said(FORMS[form](policy), variables, given)
    hidden = policy.hidden(variables, jnp.asarray(tokens), jnp.asarray(length), got.tokens)
    every = jax.nn.log_softmax(policy.unembed(variables, hidden))
    own = np.take_along_axis(np.asarray(every), np.asarray(got.tokens)[..., None], -1)[..., 0]
    there = np.arange(6) < np.asarray(got.length)[..., None]
    off = np.abs(own - got.logprobs)[there]
    assert 1e-4 < off.max() < 0.3 and off.mean() < 0.05


@forms
def test_keys_and_values_that_are_multiples_of_a_scale_give_the_tokens_of_a_plain_cache(form):
    """A cache that values can hold loses nothing: both forms of the same policy say the same."""
    policy, variables = policy_of()
    given = rows(seed=3)
    close(said(rounding(FORMS[form](policy), form), variables, given), said(rounding(policy, form), variables, given))


@forms
def test_the_invariant_form_has_the_tokens_of_the_portable_one(form):
    policy, variables = policy_of()
    given = rows()
    got = said(FORMS[form](invariant(policy)), variables, given)
    close(got, said(FORMS[form](policy), variables, given))
    alone = [x[:1] for x in given]
    one = said(FORMS[form](invariant(policy)), variables, alone)
    np.testing.assert_array_equal(one.logprobs[0], got.logprobs[0])  # to the bit, in another batch


@forms
@pytest.mark.parametrize("made", [lambda policy: policy, invariant], ids=["plain", "invariant"])
def test_prompts_that_continue_a_cache_are_prompts_that_were_read_at_once(made, form):
    """All tokens read rounded keys, so it does not matter which launch read a part of a prompt."""
    policy, variables = policy_of()
    policy = FORMS[form](made(policy))
    tokens, _, keys, active = rows(p=150)  # more new tokens than attend at once
    whole = said(policy, variables, (tokens, np.full(5, 150), keys, active), keep=True)
    first = np.array([3, 12, 9, 15, 8])
    cached = fill(policy, variables, jnp.asarray(tokens[:, :15]), jnp.asarray(first))[1]
    cached = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 135), (0, 0), (0, 0))), cached)
    rest = np.stack([np.roll(row, -n) for row, n in zip(tokens, first)])
    parts = said(policy, variables, (rest, 150 - first, keys, active), prefix=cached, start=first, keep=True)
    close(parts[0], whole[0])
    for (a, b), (c, d) in zip(parts[1], whole[1], strict=True):
        for x, y in ((a, c), (b, d)):
            assert is_quantized(x) and x.values.dtype == VALUES[form]
            assert (np.asarray(x.values) != np.asarray(y.values)).mean() < 1e-3  # one step apart, where a sum differs
            np.testing.assert_allclose(x.scales, y.scales, rtol=1e-3)


@forms
def test_caches_have_values_with_a_scale_for_each_token_and_head(form):
    policy, variables = policy_of()
    _, prefix, suffix = said(FORMS[form](policy), variables, rows(), keep=True)
    for cache, shape in ((prefix, (5, 9, 2, 8)), (suffix, (5, 3, 5, 2, 8))):
        leaves = jax.tree.leaves(cache, is_leaf=is_quantized)
        assert len(leaves) == 4 and all(map(is_quantized, leaves))
        assert {(x.values.dtype.name, x.values.shape) for x in leaves} == {(jnp.dtype(VALUES[form]).name, shape)}
        assert {(x.scales.dtype.name, x.scales.shape) for x in leaves} == {("float32", (*shape[:-1], 1))}


@forms
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0)])
def test_nodes_of_a_loop_have_the_tokens_of_launches(sampling, form):
    """``env.lanes``: rings, tables that grow and shrink, and slots that are taken again."""
    policy, variables = policy_of()
    nodes = test_slots.nodes_of((2, 1), (8, 5))
    got, _ = test_slots.flown(FORMS[form](policy), variables, nodes, sampling, lanes=4)
    right = test_slots.launched(FORMS[form](policy), variables, nodes, sampling)
    assert sorted(got) == sorted(right)
    for i, (out, *_) in right.items():
        close(got[i][0], out)


@forms
def test_rows_with_parameters_of_their_own(form):
    policy, variables = policy_of()
    given, cached = rows(), FORMS[form](policy)
    own = [policy.init(jax.random.key(k)) for k in range(5)]
    stacked = {"params": jax.tree.map(lambda *x: jnp.stack(x), *own)}
    got = said(by_row(cached, ("params",)), stacked, given)
    for n, params in enumerate(own):
        one = said(cached, {"params": params}, [x[n : n + 1] for x in given])
        close(jax.tree.map(lambda x, n=n: x[n : n + 1], got), one)


@forms
def test_functions_of_training_stay(form):
    policy, _ = policy_of()
    cached = FORMS[form](policy)
    kept = set(policy._fields) - {"prefill"}
    assert all(getattr(cached, name) is getattr(policy, name) for name in kept)
    assert cached is FORMS[form](policy)  # models of one architecture share programs
    assert cached.prefill is not policy.prefill and FORMS["same"] is None


@forms
def test_a_team_has_one_team_with_caches_and_scripted_models_stay(form):
    policy, _ = policy_of()
    models = tuple(Model(n, policy, toys.TOKENIZER) for n in "ab")
    script = scripted.make_model("c", lambda prompt, length: jnp.array([65, 256]), 2, toys.TOKENIZER)
    team = Team(tuple(Role(n, n, 3) for n in "abc"), (*models, script))
    found = with_caches(team, FORMS[form])
    assert found is with_caches(team, FORMS[form]) and found.roles == team.roles
    assert [m.policy for m in found.models] == [FORMS[form](policy), FORMS[form](policy), script.policy]


@forms
def test_another_policy_is_refused_in_one_line(form):
    table = tabular.make_policy(tabular.Config(((1, 2),), (3, 4), 8))
    expected = rf"config\.rollout_cache: expected 'same' for a model that is no decoder.*, got '{form}'$"
    with pytest.raises(ConfigError, match=expected) as e:
        FORMS[form](table)
    assert "\n" not in str(e.value)
