"""Environments: the interfaces of array and host environments, the registry, protocols, and one folder for each task.

A folder has `array.py` (pure JAX), `text.py` or `env.py` (Python over text), or `solo.py` (one agent).
The registry finds them. An environment of a user's own is a `TextTask`, or is named by its dotted module.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.envs.array_env import ArrayEnv, Observation, all_seats, samples, text_samples
    from jaxmarl_llm.envs.contract import ArrayTask, HostTask
    from jaxmarl_llm.envs.protocols import wrap
    from jaxmarl_llm.envs.registry import EnvConfig
    from jaxmarl_llm.envs.splits import draw_task, is_held_out
    from jaxmarl_llm.envs.text_adapter import by_last_line, sample_texts
    from jaxmarl_llm.envs.text_task import TextTask
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "ArrayEnv": f"{__name__}.array_env",
            "ArrayTask": f"{__name__}.contract",
            "EnvConfig": f"{__name__}.registry",
            "HostTask": f"{__name__}.contract",
            "Observation": f"{__name__}.array_env",
            "TextTask": f"{__name__}.text_task",
            "all_seats": f"{__name__}.array_env",
            "by_last_line": f"{__name__}.text_adapter",
            "draw_task": f"{__name__}.splits",
            "is_held_out": f"{__name__}.splits",
            "sample_texts": f"{__name__}.text_adapter",
            "samples": f"{__name__}.array_env",
            "text_samples": f"{__name__}.array_env",
            "wrap": f"{__name__}.protocols",
        },
        modules={},
    )

__all__ = [
    "ArrayEnv",
    "ArrayTask",
    "EnvConfig",
    "HostTask",
    "Observation",
    "TextTask",
    "all_seats",
    "by_last_line",
    "draw_task",
    "is_held_out",
    "sample_texts",
    "samples",
    "text_samples",
    "wrap",
]
