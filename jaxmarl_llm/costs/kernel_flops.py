"""FLOPs of this project's Pallas kernels for TPU, closed forms for `costs.hlo.count`.

The text of a compiled program does not show what a kernel computes. Each form counts the matrix products that the
kernel runs for the shapes of its operands, 2 FLOPs for each multiply-add. Where lengths decide at run time, it counts
the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from jaxmarl_llm.costs.hlo import Kernel
from jaxmarl_llm.costs.hlo_text import Array
from jaxmarl_llm.kernels.attention.causal import splash_block


def floats(kernel: Kernel) -> list[Array]:
    """Operands of a kernel that are floating-point, in order."""
    return [a for a in kernel.operands if a.dtype in ("f32", "bf16", "f16")]


def splash(products: int) -> Callable[[Kernel], float]:
    """Causal splash attention: blocks on the diagonal count in full, those above it are skipped.

    products: matrix products for each block, 2 forward. Its first floating-point operand is q [..., T, H].
    """

    def flops(kernel: Kernel) -> float:
        *heads, tokens, size = floats(kernel)[0].dims
        block = splash_block(tokens)
        blocks = tokens // block
        return float(products * math.prod(heads) * blocks * (blocks + 1) * block**2 * size)

    return flops


def group_decode(kernel: Kernel) -> float:
    """FLOPs of a ``kernel`` for one token of each sample and all keys of its prompt.

    Its operands are q [E M H], k and v [E H keys].
    """
    q, k, _ = floats(kernel)[:3]
    return 4.0 * q.elements * k.dims[-1]


def head_block_stats(kernel: Kernel) -> float:
    """FLOPs of a ``kernel`` for logits of hidden [N D] over a weight [V D] or [D V]."""
    hidden, weight = floats(kernel)[:2]
    return 2.0 * hidden.dims[0] * weight.elements


def tree_attention(kernel: Kernel) -> float:
    """FLOPs of a ``kernel`` for attention on a tree.

    Its operands are q [B Q H S] and k [B K H T]; the last S of T tokens ask. Forks see fewer keys than the path that is
    counted. The results tell the pass: out and norm, dq, or dk and dv.
    """
    q, k = floats(kernel)[:2]
    batch, heads, size, asking = q.dims
    pairs = asking * (k.dims[3] - asking) + asking * (asking + 1) // 2
    products = 3 if len(kernel.results) == 1 else 2 if kernel.results[1].dims[2] == 1 else 4
    return 2.0 * products * batch * heads * pairs * size


TPU: dict[str, Callable[[Kernel], float]] = {
    "splash_mha_fwd_no_residuals": splash(2),
    "splash_mha_fwd_residuals": splash(2),
    "splash_mha_dq_no_residuals": splash(3),
    "splash_mha_dkv_no_residuals": splash(4),
    "group_decode": group_decode,
    "head_block_stats": head_block_stats,
    "tree_attention": tree_attention,
}
