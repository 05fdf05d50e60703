"""Imitation of experts beside a policy gradient: golden numbers, and no gradient of one term in the other."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.training.imitation import Imitation
from jaxmarl_llm.training.learner import Batch, make_learner, trunk_tokens
from jaxmarl_llm.training.losses import Loss, RowData, row_loss
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.packing import pack
from jaxmarl_llm.types import (
    EXPERT,
    POLICY,
    Counts,
    Nodes,
    Retrieval,
    Steps,
    Transitions,
    Tree,
)
from tests import toys

NAN = np.nan


def test_golden_values_and_gradients():
    """-.5 * 2 * 1.2 (clipped: no gradient) + .25 * 3 of the likelihood, whatever ratio, advantage and KL are."""
    logprobs, entropy = jnp.array([-1.0, -3.0]), jnp.array([0.5, NAN])
    old = jnp.array([-1.5, 40.0])
    data = RowData(jnp.array([0.5, 0.0]), jnp.array([2.0, NAN]), old, old, old, jnp.array([0.0, 0.25]))
    loss = Loss(clip_low=0.2, clip_high=0.2)
    value, metrics = row_loss(loss, logprobs, entropy, data)
    np.testing.assert_allclose([value, metrics["imitation"]], [-1.2 + 0.75, 0.75], rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: row_loss(loss, x, entropy, data)[0])(logprobs), [0.0, -0.25])
    with_terms = dataclasses.replace(loss, kl_coef=0.3, entropy_coef=0.2)
    gradient = jax.grad(lambda x: row_loss(with_terms, x, entropy, data)[0])(logprobs)
    np.testing.assert_allclose(gradient[1], -0.25)
    assert "imitation" not in row_loss(loss, logprobs, entropy, data._replace(imitation=None))[1]


def tree(rng, nodes=3, group=3, response=3):
    """Nodes of ``group`` completions. The last completion of a node is an expert's; the one of node 0 is silent."""
    c = nodes * group
    ints = lambda *shape: rng.integers(65, 91, shape).astype(np.int32)
    zero = np.zeros(nodes, np.int32)
    of = Nodes(ints(nodes, 4), zero + 4, zero, zero, zero, zero, zero - 1, Retrieval.empty(nodes), zero == 0)
    expert = np.arange(c) % group == group - 1
    length = np.where(np.arange(c) == group - 1, 0, rng.integers(1, response + 1, c)).astype(np.int32)
    mask = (np.arange(response) < length[:, None]) & ~expert[:, None]
    said, logprobs = ints(c, response), np.where(mask, -2.0, 0.0).astype(np.float32)
    source, none = np.where(expert, EXPERT, POLICY), np.zeros(c, np.int32)
    steps = Steps(np.arange(c) // group, said, length, mask, logprobs, none > 0, source, none, length > 0)
    moves = Transitions(np.arange(c)[:, None], none - 1, none, none, {}, none == 0, none == 0, length > 0)
    return Tree(of, steps, moves, Counts(*[0] * 7))


@functools.cache
def learner(loss):
    policy = toys.policy()
    return make_learner(policy, loss, Optimizer(), Sampling()), {"params": policy.init(jax.random.key(0))}


LOSS = Loss(entropy_coef=0.1)


def vector(gradient):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(gradient)])


def packed(of, imitate):
    """Micro-batches of a tree."""
    advantage = np.linspace(-1, 1, len(of.steps.node)).astype(np.float32)
    weights = None if imitate is None else np.asarray(imitate(jax.random.key(0), of, LOSS))
    trained = of.steps.source != EXPERT
    return pack(of, 0, advantage, trained, LOSS, micro_tokens=1000, smallest=(4, 3), imitation=weights)


def gradient(of, coef, policy=True):
    """Gradient of a tree whose nodes are one batch of one shape. ``policy``: with the term of the policy gradient."""
    steps, nodes = of.steps, len(of.nodes.role)
    grid = lambda x: np.asarray(x, np.float32).reshape(nodes, -1, steps.tokens.shape[1])
    weights = np.asarray(Imitation(coef)(jax.random.key(0), of, LOSS))
    mask = grid(steps.loss_mask) * policy
    advantage = np.broadcast_to(np.linspace(-1, 1, mask.shape[1])[:, None], mask.shape).astype(np.float32)
    said = steps.tokens.reshape(mask.shape)
    batch = Batch(of.nodes.tokens, of.nodes.length, said, mask / 9, advantage, mask * -2, imitation=grid(weights))
    functions, own = learner(LOSS)
    return vector(functions.accumulate(own, None, batch, None)[0])


@settings(max_examples=5)
@given(seed=st.integers(0, 10**6), coef=st.sampled_from([0.5, 2.0]))
def test_what_experts_write_changes_no_gradient_of_the_policy_term(seed, coef):
    rng = np.random.default_rng(seed)
    one = tree(rng)
    steps, expert = one.steps, one.steps.source == EXPERT
    tokens = np.where(expert[:, None], rng.integers(65, 91, steps.tokens.shape), steps.tokens).astype(np.int32)
    other = one.replace(steps=steps.replace(tokens=tokens))
    policy = gradient(one, 0)
    np.testing.assert_allclose(gradient(other, 0), policy, atol=1e-7)
    for some in (one, other):
        alone = gradient(some, coef, policy=False)
        np.testing.assert_allclose(gradient(some, coef) - alone, policy, atol=2e-6)
        assert np.abs(alone).max() > 1e-3


def test_the_term_is_the_likelihood_of_what_was_written():
    """Its gradient is that of the mean log-prob over the tokens of answers, by autodiff of the policy."""
    one = tree(np.random.default_rng(3))
    rows = np.flatnonzero((one.steps.source == EXPERT) & one.steps.valid)
    policy, (_, own) = toys.policy(), learner(LOSS)
    said = one.steps.tokens[rows]
    mask = np.arange(said.shape[1]) < one.steps.length[rows][:, None]

    def nll(own):
        node = one.steps.node[rows]
        hidden = policy.hidden(own, one.nodes.tokens[node], one.nodes.length[node], said[:, None])[:, 0]
        logp = jax.nn.log_softmax(policy.unembed(own, hidden))
        taken = jnp.take_along_axis(logp, said[..., None], 2)[..., 0]
        return -jnp.where(mask, taken, 0).sum() / mask.sum()

    want = vector(jax.jit(jax.grad(nll))(own))
    np.testing.assert_allclose(gradient(one, 3.0, policy=False), 3 * want, atol=1e-5)


def test_packed_batches_have_both_kinds_and_no_token_in_two_terms():
    one = tree(np.random.default_rng(5))
    batches, imitate = packed(one, Imitation(3.0)), Imitation(3.0)(jax.random.key(0), one, LOSS)
    for batch in batches:
        assert not ((batch.weights > 0) & (batch.imitation > 0)).any()
        assert (batch.completions[batch.imitation > 0] >= 65).all()
    for name, want in (("weights", 1.0), ("imitation", 3.0)):
        np.testing.assert_allclose(sum(getattr(batch, name).sum() for batch in batches), want, rtol=1e-6)
    rows = np.concatenate([batch.rows[batch.imitation.any(-1)] for batch in batches])
    assert sorted(rows) == np.flatnonzero(np.asarray(imitate).any(1)).tolist()
    masked = one.replace(steps=one.steps.replace(loss_mask=one.steps.loss_mask & False))
    batches = packed(masked, Imitation(3.0))
    assert sum(map(trunk_tokens, batches)) == sum(4 + one.steps.length[r] - 1 for r in rows)


def test_weights_are_a_mean_over_what_is_imitated():
    one = tree(np.random.default_rng(4))
    rows = np.flatnonzero((one.steps.source == EXPERT) & one.steps.valid)
    weights = np.asarray(Imitation(2.0)(jax.random.key(0), one, LOSS))
    assert set(np.flatnonzero(weights.any(1))) == set(rows) and len(rows) == 2
    np.testing.assert_allclose(weights[weights > 0], 2 / one.steps.length[rows].sum(), rtol=1e-6)
    chosen = lambda key, tree: np.arange(len(tree.steps.node)) == rows[0]
    weights = np.asarray(Imitation(2.0, chosen)(jax.random.key(0), one, dataclasses.replace(LOSS, aggregation="sum")))
    assert set(np.flatnonzero(weights.any(1))) == {rows[0]} and (weights[weights > 0] == 2.0).all()
    assert not np.asarray(Imitation(2.0, lambda key, tree: 0.0)(jax.random.key(0), one, LOSS)).any()
    with pytest.raises(ConfigError, match=r"^Imitation\.coef: expected >= 0, got -1$"):
        Imitation(-1)


def test_batches_without_imitation_are_as_before():
    assert all(batch.imitation is None for batch in packed(tree(np.random.default_rng(5)), None))
