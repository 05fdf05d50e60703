"""Choice of the form of an operation (``impl=``): portable (xla), or written for a platform (gpu, tpu, mosaic)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

PLATFORM = {"gpu": "cuda", "tpu": "tpu"}
WITH_MOSAIC = {**PLATFORM, "mosaic": "cuda"}  # of operations with a form for Pallas' Mosaic GPU backend


def choose(
    impl: str,
    args: tuple,
    *,
    portable: Callable[..., Any],
    pallas: Callable[[str], Callable[..., Any]],
    refused: Callable[[str], str | None],
    pays: Collection[str] = (),
    platforms: Mapping[str, str] = PLATFORM,
) -> Any:
    """Apply an operation in the form that ``impl`` names.

    auto takes a platform's form where the program is lowered for that platform. The platform of the program counts,
    not the backend of the process. The same trace therefore runs on CPU, runs on an accelerator, or is compiled ahead
    of time for an absent one. Raises ValueError for an unknown or refused impl.

    Args:
        impl: auto, xla, or a key of ``platforms``.
        args: arguments of the operation.
        portable: the portable form.
        pallas: function of an impl that returns its form.
        refused: function of an impl that says why its form cannot be used, or returns None.
        pays: impls whose forms auto takes, unless refused; of those for one platform the last that is not refused.
        platforms: the platform of each impl that the operation has beside xla.
    """
    names = ["auto", "xla", *platforms]
    if impl not in names:
        raise ValueError(f"impl is {', '.join(names[:-1])} or {names[-1]}, not {impl!r}")
    if impl in platforms:
        if why := refused(impl):
            raise ValueError(f"impl {impl!r} {why}; auto and xla do")
        return pallas(impl)(*args)
    forms = {platforms[i]: pallas(i) for i in pays if refused(i) is None} if impl == "auto" else {}
    return jax.lax.platform_dependent(*args, default=portable, **forms) if forms else portable(*args)
