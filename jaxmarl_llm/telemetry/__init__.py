"""Telemetry of a run: metrics.jsonl, rollouts, the console panel, TensorBoard, Weights and Biases, and the report.

Nothing here changes the results of a run.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.telemetry import report, rollouts
    from jaxmarl_llm.telemetry.backends import Backend, Panel, TensorBoard, Wandb
    from jaxmarl_llm.telemetry.keys import is_documented
    from jaxmarl_llm.telemetry.logger import Logger
    from jaxmarl_llm.telemetry.metrics_file import JsonLines, read_metrics
    from jaxmarl_llm.telemetry.report import episodes_markdown
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Backend": f"{__name__}.backends",
            "JsonLines": f"{__name__}.metrics_file",
            "Logger": f"{__name__}.logger",
            "Panel": f"{__name__}.backends",
            "TensorBoard": f"{__name__}.backends",
            "Wandb": f"{__name__}.backends",
            "episodes_markdown": f"{__name__}.report",
            "is_documented": f"{__name__}.keys",
            "read_metrics": f"{__name__}.metrics_file",
        },
        modules={"report": f"{__name__}.report", "rollouts": f"{__name__}.rollouts"},
    )

__all__ = [
    "Backend",
    "JsonLines",
    "Logger",
    "Panel",
    "TensorBoard",
    "Wandb",
    "episodes_markdown",
    "is_documented",
    "read_metrics",
    "report",
    "rollouts",
]
