"""Readers of data sets, and small samples with their licences that the package contains.

The readers also read larger folders of the same form.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.data.code_tasks import load_code
    from jaxmarl_llm.data.loaders import content, load, load_retail_db, writing_row
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "content": f"{__name__}.loaders",
            "load": f"{__name__}.loaders",
            "load_code": f"{__name__}.code_tasks",
            "load_retail_db": f"{__name__}.loaders",
            "writing_row": f"{__name__}.loaders",
        },
        modules={},
    )

__all__ = ["content", "load", "load_code", "load_retail_db", "writing_row"]
