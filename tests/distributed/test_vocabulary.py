"""The output head on a mesh: losses, log-probs and gradients are those of one device."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh, use_mesh
from jaxmarl_llm.distributed.vocabulary import by_vocabulary, divides
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.generation.scoring import score_hidden
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.head.loss import head_logprob, head_loss
from tests import toys

ROWS, TOKENS, DIM, VOCAB, USED = 8, 6, 16, 64, 59
MESHES = {
    "data and fsdp": MeshConfig(4, 2, 1),
    "all": MeshConfig(2, 2, 2),
    "fsdp and tensor": MeshConfig(1, 2, 4),
    "tensor": MeshConfig(1, 1, 8),
}


def drawn():
    keys = jax.random.split(jax.random.key(3), 4)
    hidden = jax.random.normal(keys[0], (ROWS, TOKENS, DIM))
    weight = 0.3 * jax.random.normal(keys[1], (VOCAB, DIM))
    targets = jax.random.randint(keys[2], (ROWS, TOKENS), 0, USED)
    return hidden, weight, targets, jax.random.normal(keys[3], (ROWS, TOKENS))


def row_loss(logprob, entropy, c):
    return (logprob * c + entropy * c * c).sum(), {"c": c.sum()}


def through(form, by_row):
    """(hidden, weight) -> loss, and (sums, log-probs, entropies)."""
    _, _, targets, c = drawn()

    def one_pass(axis, head, hidden, targets, c):
        out = head_loss(hidden, head, targets, c, row_loss, temperature=0.7, chunk=12, axis_name=axis)
        return (out.loss, out.sums), (out.logprob, out.entropy)

    def two_passes(axis, head, hidden, targets, c):
        logprob, entropy = head_logprob(hidden, head, targets, temperature=0.7, chunk=5, axis_name=axis)
        return row_loss(logprob, entropy, c), (logprob, entropy)

    def loss(hidden, weight):
        head = Head(weight if by_row else weight.T, rows=by_row, used=USED)
        function = one_pass if form == "one pass" else two_passes
        (value, sums), rows = by_vocabulary(function, head, hidden, targets, c)
        return value, (sums, rows)

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))


@pytest.mark.parametrize("by_row", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("form", ["one pass", "two passes"])
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_and_gradients_are_those_of_one_device(mesh, form, by_row):
    hidden, weight, *_ = drawn()
    want = through(form, by_row)(hidden, weight)
    over = make_mesh(MESHES[mesh])
    with use_mesh(over):
        rows = NamedSharding(over, PartitionSpec(("data", "fsdp")))
        ids = NamedSharding(over, PartitionSpec("tensor", None))
        got = through(form, by_row)(jax.device_put(hidden, rows), jax.device_put(weight, ids))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=2e-5)


def test_which_rows_it_takes():
    assert divides(3)
    with use_mesh(make_mesh(MESHES["all"])):
        assert divides(8) and not divides(6)
    with use_mesh(make_mesh(MeshConfig(2, 1, 2, context=2))):
        assert not divides(8)


def test_completions_are_scored_by_the_kernels_on_a_mesh():
    """Rows that do not divide are scored from logits, and agree too."""
    policy = toys.policy()
    params, sampling = policy.init(jax.random.key(0)), Sampling(0.8)
    variables = {"params": params}
    hidden = jax.random.normal(jax.random.key(1), (6, 2, 5, params["embed"]["embedding"].shape[-1]))
    ids = jax.random.randint(jax.random.key(2), (6, 2, 5), 0, 9)
    score = lambda variables, hidden, ids: score_hidden(policy, variables, hidden, ids, sampling)
    want = jax.jit(score)(variables, hidden, ids)
    for n, fused in ((4, True), (6, False)):
        with use_mesh(make_mesh(MESHES["all"])):
            program = jax.jit(score)
            assert ("shard_map" in str(jax.make_jaxpr(program)(variables, hidden[:n], ids[:n]))) == fused
            got = program(variables, hidden[:n], ids[:n])
        for ours, theirs in zip(got, want, strict=True):
            np.testing.assert_allclose(ours, theirs[:n], rtol=1e-5, atol=1e-5)
