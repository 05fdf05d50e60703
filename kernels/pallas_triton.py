"""Pallas' Triton backend. JAX deprecates it from 0.11 on; in a JAX without it, forms for GPU are refused."""

from __future__ import annotations

from typing import Any

try:
    from jax.experimental.pallas import triton
except ImportError:
    triton: Any = None  # type: ignore[no-redef]  # a module above


def lacking(impl: str) -> str | None:
    """Say that this JAX has no Triton backend, where ``impl`` needs it, or return None.

    Args:
        impl: gpu or tpu.
    """
    return "needs a JAX with Pallas' Triton backend" if impl == "gpu" and triton is None else None
