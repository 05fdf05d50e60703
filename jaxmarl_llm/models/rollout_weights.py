"""Forms of the weights that a training rollout reads: ``config.rollout_weights``.

A form is a pure function from the parameters of a model to parameters that the same policy takes. It is applied once
in a rollout. Training, evaluations and checkpoints keep the parameters of before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxmarl_llm.distributed.sharding import names_of
from jaxmarl_llm.kernels.quantized import VALUES, quantize
from jaxmarl_llm.models.lora import TARGETS
from jaxmarl_llm.types import Params

SAME = "same"

_quantized = jax.jit(quantize, static_argnums=1)  # one program for each shape, whichever model has it


def is_matrix(path: tuple[Any, ...]) -> bool:
    """Whether a leaf is a weight matrix of a layer: a projection of attention or of the feed-forward layer.

    Args:
        path: path of the leaf in parameters, as of ``jax.tree_util``.
    """
    names = names_of(path)
    return len(names) > 1 and names[-1] == "kernel" and names[-2] in TARGETS


def quantized(params: Params, form: str) -> Params:
    """Replace each weight matrix of a layer by a `ScaledMatrix`. All other leaves stay the same arrays.

    Those are embeddings, the output head, norms, biases, adapters and value heads.

    Args:
        params: parameters of a model, of a frozen backbone or of an adapter, with kernels [L in out]; may be traced.
        form: one of `kernels.quantized.VALUES`.
    """
    of = lambda path, x: _quantized(x, VALUES[form]) if is_matrix(path) else x
    return jax.tree_util.tree_map_with_path(of, params)


# Name of a form -> the function; None: the parameters of training themselves.
FORMS: dict[str, Callable[[Params], Params] | None] = {
    SAME: None,
    **{form: functools.partial(quantized, form=form) for form in VALUES},
}
