"""The page that shows the rollouts of runs: curves, tables of tasks, trees with credit, transcripts, memories.

Reads the files of `telemetry.rollouts` a step at a time, and imports no JAX.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.viewer.data import Run, curves, index, open_run, open_runs, step_data, task_rows
    from jaxmarl_llm.viewer.page import kept_steps, write_page
    from jaxmarl_llm.viewer.serve import Server
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Run": f"{__name__}.data",
            "Server": f"{__name__}.serve",
            "curves": f"{__name__}.data",
            "index": f"{__name__}.data",
            "kept_steps": f"{__name__}.page",
            "open_run": f"{__name__}.data",
            "open_runs": f"{__name__}.data",
            "step_data": f"{__name__}.data",
            "task_rows": f"{__name__}.data",
            "write_page": f"{__name__}.page",
        },
        modules={},
    )

__all__ = [
    "Run",
    "Server",
    "curves",
    "index",
    "kept_steps",
    "open_run",
    "open_runs",
    "step_data",
    "task_rows",
    "write_page",
]
