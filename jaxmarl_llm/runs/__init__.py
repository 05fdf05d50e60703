"""Whole runs: phases of a recipe, the training loop with checkpoints and resuming, and runs compiled as one program.

The memory check before a run and the settings of the C allocator are here too.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.runs import phases
    from jaxmarl_llm.runs.compiled import Program, make_evaluation, make_program, task_data
    from jaxmarl_llm.runs.loop import fit
    from jaxmarl_llm.runs.phases import Phase, Recipe, credit_rule, make_phases, make_recipe, open_env_runner
    from jaxmarl_llm.runs.preflight import check_memory
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Phase": f"{__name__}.phases",
            "Program": f"{__name__}.compiled",
            "Recipe": f"{__name__}.phases",
            "check_memory": f"{__name__}.preflight",
            "credit_rule": f"{__name__}.phases",
            "fit": f"{__name__}.loop",
            "make_evaluation": f"{__name__}.compiled",
            "make_phases": f"{__name__}.phases",
            "make_program": f"{__name__}.compiled",
            "make_recipe": f"{__name__}.phases",
            "open_env_runner": f"{__name__}.phases",
            "task_data": f"{__name__}.compiled",
        },
        modules={"phases": f"{__name__}.phases"},
    )

__all__ = [
    "Phase",
    "Program",
    "Recipe",
    "check_memory",
    "credit_rule",
    "fit",
    "make_evaluation",
    "make_phases",
    "make_program",
    "make_recipe",
    "open_env_runner",
    "phases",
    "task_data",
]
