"""The portable form of every kernel, with and without jit, against the slow reference of its own test file.

The other files call most forms compiled. Without jit, every operation runs by itself, on arrays whose values are known.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.kernels.attention.causal import causal_attention
from jaxmarl_llm.kernels.attention.group import group_attention
from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention
from jaxmarl_llm.kernels.attention.tree import tree_attention
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.head.loss import head_logprob, head_loss
from jaxmarl_llm.kernels.head.sample import head_sample
from jaxmarl_llm.kernels.matmul import matmul
from tests.kernels import test_group_attention as of_groups
from tests.kernels import test_head_loss as of_losses
from tests.kernels import test_head_sample as of_samples
from tests.kernels import test_tree_attention as of_trees

HEAD = (9, 37, 8, True, 29, 0.7, 4)  # a case of `test_head_loss`
both = chex.variants(with_jit=True, without_jit=True)
close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-5)


class PortableForms(chex.TestCase):
    """Each test runs twice: ``self.variant`` is `jax.jit`, or leaves the function as it is."""

    @both
    def test_group_attention(self):
        args = of_groups.draw(of_groups.SHAPES["training"])
        close(self.variant(lambda *args: group_attention(*args, impl="xla"))(*args), of_groups.dense64(*args))

    @both
    def test_group_decode_attention(self):
        args = of_groups.draw(of_groups.SHAPES["decoding, middle"])
        close(self.variant(lambda *args: group_decode_attention(*args, impl="xla"))(*args), of_groups.dense64(*args))

    @both
    def test_tree_attention(self):
        args, parents, ends, used = of_trees.of_shape(0, 2, 13, 2, 4, 2, 8)
        got = self.variant(lambda *args: tree_attention(*args, chunk=5, impl="xla"))(*args, ends)
        close(np.asarray(got)[used], of_trees.dense64(*args, parents)[used])

    @both
    def test_causal_attention(self):
        rng = np.random.default_rng(0)
        chain = np.stack([np.arange(11) - 1] * 2)  # a token's parent is the token before it
        args = of_trees.draw(rng, chain, 4, 2, 8)
        got = self.variant(lambda *args: causal_attention(*args, impl="xla"))(*args)
        close(got, of_trees.dense64(*args, chain))

    @both
    def test_head_logprob(self):
        hidden, weight, targets, c = of_losses.draw(HEAD)
        call = lambda h, w, y: head_logprob(h, Head(w, True, HEAD[4]), y, temperature=HEAD[5], chunk=HEAD[6])
        logprob, entropy = self.variant(call)(hidden, weight, targets)
        want = of_losses.by_hand(HEAD, hidden, weight, targets, c)
        close(np.asarray(logprob)[:-1], want[0][:-1])  # the last target is a padding id
        close(entropy, want[1])

    @both
    def test_head_loss_and_its_gradients(self):
        hidden, weight, targets, c = of_losses.draw(HEAD)
        c[-1] = 0.0  # the last target is a padding id

        def call(h, w, y, c):
            head = Head(w, True, HEAD[4])
            return head_loss(h, head, y, c, of_losses.quadratic, temperature=HEAD[5], chunk=HEAD[6]).loss

        got = self.variant(jax.value_and_grad(call, (0, 1)))(hidden, weight, targets, c)
        _, _, loss, dh, dw = of_losses.by_hand(HEAD, hidden, weight, targets, c)
        np.testing.assert_allclose(got[0], loss, rtol=1e-5)
        close(got[1][0], dh)
        close(got[1][1], dw)

    @both
    def test_head_sample(self):
        rng = np.random.default_rng(0)
        z, u = rng.normal(0, 3, (16, 63)).astype(np.float32), rng.random(16, dtype=np.float32)
        hidden, head = of_samples.as_head(z)
        call = lambda h, w, u: head_sample(h, Head(w, True), u, temperature=0.8, impl="xla")
        token, logprob = self.variant(call)(hidden, head.weight, u)
        cdf = of_samples.cdf64(z, 0.8)
        assert np.abs(cdf - u[:, None]).min() > 3e-6, "a draw stands on a boundary: take another seed"
        np.testing.assert_array_equal(token, (cdf <= u[:, None]).sum(-1))
        prob = np.diff(cdf, axis=-1, prepend=0.0)[np.arange(16), np.asarray(token)]
        close(logprob, np.log(prob))

    @both
    def test_matmul_and_its_gradients(self):
        rng = np.random.default_rng(0)
        x, w, g = (rng.normal(size=size).astype(np.float32) for size in ((7, 3), (3, 5), (7, 5)))

        def call(x, w, g):
            y, back = jax.vjp(matmul, x, w)
            return y, *back(g)

        with jax.default_matmul_precision("highest"):
            got = self.variant(call)(jnp.asarray(x), jnp.asarray(w), jnp.asarray(g))
        x, w, g = (a.astype(np.float64) for a in (x, w, g))
        for one, want in zip(got, (x @ w, g @ w.T, x.T @ g), strict=True):
            close(one, want)
