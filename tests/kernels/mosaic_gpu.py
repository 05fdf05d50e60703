"""JAX's interpreter for Pallas' Mosaic GPU backend, for tests. It is private, and lacks two things the kernels use.

A transposed operand of a product is read as it lies and then turned. A cast of a layout changes no number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import utils
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, params
from jax._src.state.types import TransposeTransform
from jax.interpreters import mlir

mlir.register_lowering(core.layout_cast_p, lambda ctx, x, **_: [x], platform="cpu")


def product(
    *,
    token: jax.Array,
    device_id: jax.Array,
    thread_id: jax.Array,
    acc_allocation_key_as_array: jax.Array,
    acc_dtype: Any,
    a_allocation_key_as_array: jax.Array,
    a_transforms: tuple,
    b_allocation_key_as_array: jax.Array,
    b_transforms: tuple,
    **_: Any,
) -> jax.Array:
    """Add a product to the running sums of a thread."""
    memory = gpu_callbacks._get_shared_memory()
    thread, key = (
        memory.get_global_thread_id(int(device_id), int(thread_id)),
        gpu_callbacks.HostAllocationKey.from_array,
    )

    def read(at: jax.Array, transforms: tuple) -> np.ndarray:
        turned = [t for t in transforms if isinstance(t, TransposeTransform)]
        rest = [t for t in transforms if not isinstance(t, (TransposeTransform, *gpu_callbacks.NOOP_TRANSFORMS))]
        x = memory.get_buffer_content(key(at), utils.to_range(jax.tree.map(int, rest)), thread)[0]
        return x.T if turned else x

    at = key(acc_allocation_key_as_array)
    a, b = read(a_allocation_key_as_array, a_transforms), read(b_allocation_key_as_array, b_transforms)
    total = memory.get_buffer_content(at, (), thread)[0] + np.matmul(a, b, dtype=acc_dtype)
    memory.store_buffer_content(at, (), total, thread)
    return token


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Interpret kernels that are traced inside. Memory is NaN until it is written. A read beyond an array fails."""
    with (
        params.force_gpu_interpret_mode(params.InterpretGPUParams()),
        mock.patch.object(gpu_callbacks, "wgmma", product),
    ):
        try:
            yield
        except Exception:
            gpu_callbacks.reset_gpu_interpret_mode_state()  # or no later kernel is interpreted
            raise
