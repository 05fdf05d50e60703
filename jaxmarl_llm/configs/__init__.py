"""Shipped configurations, one module for each recipe: `--config=NAME:variant` finds them in any folder.

A module has `VARIANTS`, the names of its configurations, and `get_config(variant)`. Its docstring describes each.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.configs import (
        advantage_alignment,
        afm,
        comam,
        core_code,
        cpmobius,
        doctor_agent,
        dr_mas,
        grpo,
        hila,
        joyagents_r1,
        magrpo,
        malt,
        mars2,
        marshal,
        mashost,
        mmoa_rag,
        optagent,
        prisma,
        rema,
        scma,
        search_r2,
        unitymas_o,
        waltzrl,
    )

__all__ = [
    "advantage_alignment",
    "afm",
    "comam",
    "core_code",
    "cpmobius",
    "doctor_agent",
    "dr_mas",
    "grpo",
    "hila",
    "joyagents_r1",
    "magrpo",
    "malt",
    "mars2",
    "marshal",
    "mashost",
    "mmoa_rag",
    "optagent",
    "prisma",
    "rema",
    "scma",
    "search_r2",
    "unitymas_o",
    "waltzrl",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, objects={}, modules={name: f"{__name__}.{name}" for name in __all__})
