"""``impl=``: which form of an operation runs, the portable one (xla) or one written for a platform (gpu, tpu)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax

PLATFORM = {"gpu": "cuda", "tpu": "tpu"}


def choose(
    impl: str,
    args: tuple,
    *,
    portable: Callable[..., Any],
    pallas: Callable[[str], Callable[..., Any]],
    refused: Callable[[str], str | None],
    pays: Collection[str] = (),
) -> Any:
    """The operation on ``args``, in the form that ``impl`` names.

    auto takes one of the forms ``pays`` where the program is lowered for that platform and the form is not refused,
    else the portable one: the platform of the program counts, not the backend of the process, so the same trace runs
    on CPU, goes to an accelerator, or is compiled ahead of time for one that is not there.

    pallas: impl -> that form. refused: impl -> why it cannot do what is asked, or None. Raises ValueError for an impl
    that is none, or refused.
    """
    if impl not in ("auto", "xla", *PLATFORM):
        raise ValueError(f"impl is auto, xla, gpu or tpu, not {impl!r}")
    if impl in PLATFORM:
        if why := refused(impl):
            raise ValueError(f"impl {impl!r} {why}; auto and xla do")
        return pallas(impl)(*args)
    forms = {PLATFORM[i]: pallas(i) for i in pays if refused(i) is None} if impl == "auto" else {}
    return jax.lax.platform_dependent(*args, default=portable, **forms) if forms else portable(*args)
