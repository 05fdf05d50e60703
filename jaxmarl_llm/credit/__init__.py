"""Credit assignment: returns, group-relative advantages and selection, one number for each completion.

Pure functions over flat, padded tables. Nothing here depends on a model or an environment. The modules and `Credit` are
imported when they are first used.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.credit import advantages, assign, returns, rules, selection, shaping
    from jaxmarl_llm.credit.assign import Credit
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={"Credit": f"{__name__}.assign"},
        modules={
            name: f"{__name__}.{name}" for name in ("advantages", "assign", "returns", "rules", "selection", "shaping")
        },
    )

__all__ = ["Credit", "advantages", "assign", "returns", "rules", "selection", "shaping"]
