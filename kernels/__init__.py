"""Kernels: attention, the output head and matrix products, imported as ``jaxmarl_llm.kernels``.

Each file has one operation, in forms that give the same numbers.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.kernels import matmul
    from jaxmarl_llm.kernels.attention.causal import causal_attention
    from jaxmarl_llm.kernels.attention.group import group_attention
    from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention
    from jaxmarl_llm.kernels.attention.tree import tree_attention
    from jaxmarl_llm.kernels.head.head import Head
    from jaxmarl_llm.kernels.head.loss import HeadLoss, head_logprob, head_loss
    from jaxmarl_llm.kernels.head.sample import head_sample
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Head": f"{__name__}.head.head",
            "HeadLoss": f"{__name__}.head.loss",
            "causal_attention": f"{__name__}.attention.causal",
            "group_attention": f"{__name__}.attention.group",
            "group_decode_attention": f"{__name__}.attention.group_decode",
            "head_logprob": f"{__name__}.head.loss",
            "head_loss": f"{__name__}.head.loss",
            "head_sample": f"{__name__}.head.sample",
            "tree_attention": f"{__name__}.attention.tree",
        },
        modules={"matmul": f"{__name__}.matmul"},
    )

__all__ = [
    "Head",
    "HeadLoss",
    "causal_attention",
    "group_attention",
    "group_decode_attention",
    "head_logprob",
    "head_loss",
    "head_sample",
    "matmul",
    "tree_attention",
]
