"""Sampling of completions: distributions, decoding of groups after one prefill, and a cache of prefixes.

A policy is a `types.Policy`, a bundle of functions; no module here imports a model.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.generation import generate
    from jaxmarl_llm.generation.decoding import Completions
    from jaxmarl_llm.generation.engine import EngineClient, EngineConfig
    from jaxmarl_llm.generation.engine_http import SglangClient, VllmClient
    from jaxmarl_llm.generation.generate import by_row, sample_completions
    from jaxmarl_llm.generation.prefix_cache import Prefixes
    from jaxmarl_llm.generation.sampling import Sampling, kept, sample, score
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Completions": f"{__name__}.decoding",
            "EngineClient": f"{__name__}.engine",
            "EngineConfig": f"{__name__}.engine",
            "Prefixes": f"{__name__}.prefix_cache",
            "Sampling": f"{__name__}.sampling",
            "SglangClient": f"{__name__}.engine_http",
            "VllmClient": f"{__name__}.engine_http",
            "by_row": f"{__name__}.generate",
            "kept": f"{__name__}.sampling",
            "sample": f"{__name__}.sampling",
            "sample_completions": f"{__name__}.generate",
            "score": f"{__name__}.sampling",
        },
        modules={"generate": f"{__name__}.generate"},
    )

__all__ = [
    "Completions",
    "EngineClient",
    "EngineConfig",
    "Prefixes",
    "Sampling",
    "SglangClient",
    "VllmClient",
    "by_row",
    "generate",
    "kept",
    "sample",
    "sample_completions",
    "score",
]
