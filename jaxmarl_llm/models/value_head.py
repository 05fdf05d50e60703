"""A value head on hidden states."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def init_head(key: jax.Array, dim: int, hidden: int = 0) -> dict[str, Array]:
    """Draw the parameters of a value head: normal with standard deviation 0.02, biases 0.

    Args:
        key: typed random key.
        dim: size of the hidden states.
        hidden: tanh units of a layer before the linear one; 0 is a linear head.
    """
    first, last = jax.random.split(key)
    head = {"kernel": 0.02 * jax.random.normal(last, (hidden or dim,)), "bias": jnp.zeros(())}
    if hidden:
        head |= {"inner": 0.02 * jax.random.normal(first, (dim, hidden)), "inner_bias": jnp.zeros(hidden)}
    return head


def head_value(head: dict[str, Array], x: Float[Array, "*batch D"]) -> Float[Array, "*batch"]:
    """Compute values from hidden states, in float32.

    Args:
        head: parameters of `init_head`.
        x: hidden states.
    """
    x = x.astype(jnp.float32)
    if "inner" in head:
        x = jnp.tanh(x @ head["inner"] + head["inner_bias"])
    return x @ head["kernel"] + head["bias"]
