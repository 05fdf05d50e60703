"""Tabular policies: sampling, scoring and gradients against softmax formulas written down again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.generate import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import tabular
from jaxmarl_llm.training.learner import Batch, make_learner
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer

PROMPTS, MOVES = ((5, 6), (5,), (5, 6, 7), (6, 5)), (3, 9, 4)
POLICY = tabular.make_policy(tabular.Config(PROMPTS, MOVES, 12))
LOGITS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
OWN = {"params": {"logits": jnp.asarray(LOGITS)}}


def prompts(rows, width):
    """Prompts of these rows, right-padded with an id that other prompts begin with."""
    tokens = np.full((len(rows), width), 5, np.int32)
    for out, row in zip(tokens, rows):
        out[: len(PROMPTS[row])] = PROMPTS[row]
    return tokens, np.array([len(PROMPTS[row]) for row in rows], np.int32)


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_a_prompt_finds_its_row_and_nothing_but_moves_is_said():
    assert POLICY.init(jax.random.key(0))["logits"].shape == (4, 3)
    rows = [0, 1, 2, 3, 1]
    tokens, length = prompts(rows, 5)
    keys = jax.random.split(jax.random.key(1), (5, 4000))
    said = generate(
        POLICY,
        OWN,
        tokens,
        length,
        keys,
        np.ones(5, bool),
        max_new_tokens=1,
        stop_ids=(),
        pad_id=0,
        sampling=Sampling(),
    )
    expected = softmax(LOGITS)[rows]
    share = np.stack([(said.tokens[:, :, 0] == m).mean(1) for m in MOVES], 1)
    assert np.isin(said.tokens, MOVES).all()
    assert (np.abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / 4000)).all()
    columns = np.argmax(np.asarray(said.tokens[..., 0])[..., None] == np.array(MOVES), -1)
    np.testing.assert_allclose(said.logprobs[..., 0], np.log(np.take_along_axis(expected, columns, 1)), atol=1e-5)


def test_the_learner_has_the_softmax_gradient():
    tokens, length = prompts([2, 0, 2], 3)
    completions = np.array([[[9], [4]], [[3], [3]], [[4], [9]]], np.int32)
    rng = np.random.default_rng(1)
    advantages, weights = rng.normal(size=(2, 3, 2, 1)).astype(np.float32)
    weights = np.abs(weights)
    batch = Batch(tokens, length, completions, weights, advantages, np.zeros_like(weights))
    learner = make_learner(POLICY, Loss(clip_low=None, aggregation="sum"), Optimizer(), Sampling())
    gradient, metrics, _ = learner.accumulate(OWN, None, batch, None)
    pi, by_hand = softmax(LOGITS), np.zeros((4, 3))
    for n, row in enumerate([2, 0, 2]):
        for g in range(2):
            column = MOVES.index(completions[n, g, 0])
            by_hand[row] -= weights[n, g, 0] * advantages[n, g, 0] * (np.eye(3)[column] - pi[row])
    np.testing.assert_allclose(gradient["params"]["logits"], by_hand, atol=1e-6)
    logged = learner.score(OWN, None, batch)[..., 0]
    expected = [[np.log(pi[r, MOVES.index(c[0])]) for c in cs] for r, cs in zip([2, 0, 2], completions)]
    np.testing.assert_allclose(logged, expected, atol=1e-5)


def test_what_it_does_not_know_is_not_hidden():
    hidden, _ = POLICY.prefill(OWN, np.array([[7, 5], [5, 6]], np.int32), np.array([2, 2]))
    assert np.isnan(hidden[0]).all() and np.isfinite(hidden[1]).all()
    (second,), _ = POLICY.decode(OWN, (np.array([[3]]),), ((),), (np.array([1]),), ((),), 0)
    assert np.isnan(second).all()
    with pytest.raises(ValueError, match="samples one token, not 2"):
        POLICY.hidden(OWN, np.array([[5]]), np.array([1]), np.zeros((1, 1, 2), np.int32))
    for wrong, key in (((), "prompts"), (((5,), (5,)), "prompts")):
        with pytest.raises(ConfigError, match=key):
            tabular.Config(wrong, MOVES, 12)
    with pytest.raises(ConfigError, match="ids below vocab_size=4"):
        tabular.Config(PROMPTS, MOVES, 4)
