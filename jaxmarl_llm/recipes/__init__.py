"""Recipes: one published system in each module, composed of functions of the other rooms.

A recipe has a `Config` and a function ``make(config)``. It imports no other recipe. ``recipes.grpo`` and the other
modules are imported when they are first used.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.recipes import (
        advantage_alignment,
        afm,
        comam,
        core_code,
        cpmobius,
        doctor_agent,
        dr_mas,
        grpo,
        hila,
        iac,
        joyagents_r1,
        maac,
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
    "iac",
    "joyagents_r1",
    "maac",
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
