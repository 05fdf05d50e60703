"""The output head on a mesh: each device computes with its own rows and its own ids of the vocabulary.

XLA would compute the logits of whole rows, and sum the gradient of the head after every chunk of tokens. Here the
kernels of `kernels.head.loss` run on each device, and the gradient is summed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxmarl_llm.distributed.sharding import attention_rows, context_parts, meshed, row_parts
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.types import PyTree

VOCABULARY = "tensor"  # the mesh axis that ids are split over in training


def divides(rows: int) -> bool:
    """Whether `by_vocabulary` can take tables of ``rows`` rows: they divide, and no row is cut over devices."""
    return not rows % row_parts() and context_parts() == 1


def by_vocabulary(function: Callable[..., tuple[PyTree, PyTree]], head: Head, *tables: PyTree) -> tuple[PyTree, PyTree]:
    """Run ``function`` on each device with its own rows and its own part of the vocabulary, inside a compiled function.

    Its code sees no mesh. It can be differentiated with respect to the head and the tables. The gradient of the head is
    summed over the parts of the rows once. Without a mesh, the function is called as it is.

    Args:
        function: (axis of the vocabulary or None, head, tables) -> (sums over rows, arrays of rows). Its head is one
            shard of the vocabulary. What it returns has been summed over that axis.
        head: the linear map to logits, not split along fsdp. Its ids divide into the parts of the axis.
        tables: arrays with one row each, whose number `divides`. Each may be a tree of such arrays.

    Returns:
        The sums over all rows, and the arrays of all rows.
    """
    if not meshed():
        return function(None, head, *tables)
    own = attention_rows()

    def on_device(head: Head, *tables: Any) -> tuple[PyTree, PyTree]:
        # The transpose of this cast sums the gradient over rows.
        weight = jax.lax.pcast(head.weight, own, to="varying")
        sums, rows = function(VOCABULARY, Head(weight, head.rows, head.used), *tables)
        return jax.lax.psum(sums, own), rows

    ids = PartitionSpec(VOCABULARY, None) if head.rows else PartitionSpec(None, VOCABULARY)
    specs = Head(ids, head.rows, head.used), *(PartitionSpec(own) for _ in tables)  # type: ignore[arg-type]  # a place, not an array
    return jax.shard_map(on_device, in_specs=specs, out_specs=(PartitionSpec(), PartitionSpec(own)))(head, *tables)
