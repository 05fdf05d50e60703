"""The commands of `jaxmarl-llm`: train, evaluate, export, plan, and the reading of configuration flags.

Wrong input ends with one line and exit code 2.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

# Modules with flags of their own, such as `evaluate`, are not exported: an import defines flags for the whole process.
if TYPE_CHECKING:
    from jaxmarl_llm.cli.config_flags import load, recipe_module, run
    from jaxmarl_llm.cli.partners import OpenRun, evaluate_arms, figures
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "OpenRun": f"{__name__}.partners",
            "evaluate_arms": f"{__name__}.partners",
            "figures": f"{__name__}.partners",
            "load": f"{__name__}.config_flags",
            "recipe_module": f"{__name__}.config_flags",
            "run": f"{__name__}.config_flags",
        },
        modules={},
    )

__all__ = ["OpenRun", "evaluate_arms", "figures", "load", "recipe_module", "run"]
