"""Scaling of rotary embeddings without torch: YaRN's formula, and the limit of dynamic scaling in every function."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models import decoder, decoder_config, rope
from jaxmarl_llm.models.batch_invariant import invariant

PLAIN = decoder_config.Config(
    vocab_size=50, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
    max_position=16,
)  # fmt: skip


def scaled(**scaling):
    return dataclasses.replace(PLAIN, rope_scaling=tuple(sorted(scaling.items())))


YARN = scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=4096)
DYNAMIC = scaled(rope_type="dynamic", factor=2.0)


def test_yarn_keeps_fast_frequencies_and_divides_slow_ones():
    plain, yarn = rope.frequencies(PLAIN), rope.frequencies(YARN)
    turns = 4096 * plain / (2 * math.pi)
    assert (yarn[turns > 64] == plain[turns > 64]).all() and (turns > 64).any()
    np.testing.assert_allclose(yarn[turns < 0.7], plain[turns < 0.7] / 4, rtol=1e-6)
    assert (turns < 0.7).any() and ((yarn < plain) & (yarn > plain / 4)).any()


def test_magnitude_of_yarn():
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)
    assert rope.magnitude(PLAIN) == rope.magnitude(DYNAMIC) == 1.0
    assert rope.magnitude(scaled(**yarn)) == 0.1 * math.log(4) + 1
    assert rope.magnitude(scaled(**yarn, attention_factor=1.5)) == 1.5
    ratio = (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    np.testing.assert_allclose(rope.magnitude(scaled(**yarn, mscale=0.7, mscale_all_dim=0.5)), ratio)
    assert rope.magnitude(scaled(**yarn, mscale=0.7, mscale_all_dim=0.0)) == 0.1 * math.log(4) + 1


@pytest.mark.parametrize("cfg", [PLAIN, YARN, DYNAMIC], ids=["plain", "yarn", "dynamic"])
def test_batch_invariant_generation_scales_alike(cfg):
    policy = decoder.make_policy(cfg)
    variables = {"params": policy.init(jax.random.key(0))}
    tokens = jnp.arange(8)[None] * 5
    want, _ = policy.prefill(variables, tokens, jnp.array([8]))
    out, _ = invariant(policy).prefill(variables, tokens, jnp.array([8]))
    np.testing.assert_allclose(out, want, atol=1e-5)


def calls(cfg, count):
    """Every function of both forms of the policy that takes positions, with rows of ``count`` tokens."""
    plain, ints = decoder.make_policy(cfg), lambda *shape: jnp.ones(shape, jnp.int32)
    variables = {"params": plain.init(jax.random.key(0))}
    layers = plain.unstack(variables)
    cache = lambda *shape: tuple((jnp.zeros((*shape, 1, 16)),) * 2 for _ in range(cfg.num_layers))
    for name, policy in (("", plain), ("invariant ", invariant(plain))):
        yield f"{name}prefill", lambda p=policy: p.prefill(variables, ints(1, count), ints(1))
        yield f"{name}extend", lambda p=policy: p.extend(variables, ints(1, 2), ints(1), ints(1), cache(1, count))
        yield (
            f"{name}decode",
            lambda p=policy: p.decode(
                layers, (ints(1, 2),), (cache(1, count - 3),), (ints(1),), (cache(1, 2, 3),), jnp.int32(0)
            ),
        )
    yield "hidden", lambda: plain.hidden(variables, ints(1, count - 3), ints(1), ints(1, 2, 3))
    yield "hidden_tree", lambda: plain.hidden_tree(variables, ints(1, count), ints(1, count), ints(1, count))


def test_dynamic_scaling_is_none_up_to_the_limit_and_refused_beyond():
    np.testing.assert_array_equal(rope.frequencies(DYNAMIC), rope.frequencies(PLAIN))
    for _, call in [*calls(DYNAMIC, 16), *calls(YARN, 17), *calls(PLAIN, 17)]:
        jax.eval_shape(call)
    for name, call in calls(DYNAMIC, 17):
        with pytest.raises(ConfigError, match=r"dynamic: rows of 17 tokens .with padding., but max_position"):
            jax.eval_shape(call)
            pytest.fail(name)
