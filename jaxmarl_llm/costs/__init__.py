"""Costs of a plan before it runs: counts of samples and tokens, memory and time of models, and analysis of HLO.

Tests compare the counts with those that real rollouts record.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.costs import counts, hlo, model
    from jaxmarl_llm.costs.chips import Chip
    from jaxmarl_llm.costs.counts import Workload
    from jaxmarl_llm.costs.known_shapes import architecture, shape_only
    from jaxmarl_llm.costs.model import calibrate, memory, roofline, update_size
    from jaxmarl_llm.costs.workload import GivenLengths, workload_of
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Chip": f"{__name__}.chips",
            "GivenLengths": f"{__name__}.workload",
            "Workload": f"{__name__}.counts",
            "architecture": f"{__name__}.known_shapes",
            "calibrate": f"{__name__}.model",
            "memory": f"{__name__}.model",
            "roofline": f"{__name__}.model",
            "shape_only": f"{__name__}.known_shapes",
            "update_size": f"{__name__}.model",
            "workload_of": f"{__name__}.workload",
        },
        modules={"counts": f"{__name__}.counts", "hlo": f"{__name__}.hlo", "model": f"{__name__}.model"},
    )

__all__ = [
    "Chip",
    "GivenLengths",
    "Workload",
    "architecture",
    "calibrate",
    "counts",
    "hlo",
    "memory",
    "model",
    "roofline",
    "shape_only",
    "update_size",
    "workload_of",
]
