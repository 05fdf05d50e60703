"""Environments: a folder a task, with `array.py` (pure JAX), `text.py` or `env.py` (Python over text), `solo.py`.

The registry finds them. An environment of a user's own is a `TextTask`, or is named by its dotted module.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.envs.text_task import TextTask
else:
    __getattr__, __dir__ = lazy_exports(__name__, objects={"TextTask": "jaxmarl_llm.envs.text_task"}, modules={})

__all__ = ["TextTask"]
