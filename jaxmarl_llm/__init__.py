"""Multi-agent reinforcement learning of language-model teams, in JAX.

The package exports the names that a notebook needs, such as ``jaxmarl_llm.fit`` and ``jaxmarl_llm.recipes.grpo``. Each
room, such as ``jaxmarl_llm.training``, exports the names that its users need. All other names are in their modules. An
exported name is imported when it is first used. So ``import jaxmarl_llm`` alone does not import JAX, which worker
processes of environments do not need.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports
from jaxmarl_llm._version import __version__

if TYPE_CHECKING:
    from jaxmarl_llm import credit, recipes
    from jaxmarl_llm.agents.team import Backbone, TeamConfig
    from jaxmarl_llm.envs.registry import EnvConfig
    from jaxmarl_llm.envs.text_task import TextTask
    from jaxmarl_llm.generation.sampling import Sampling
    from jaxmarl_llm.rollout import plans
    from jaxmarl_llm.rollout.make_runner import make_env_runner
    from jaxmarl_llm.runs.loop import fit
    from jaxmarl_llm.telemetry.metrics_file import read_metrics
    from jaxmarl_llm.training.config import SFT
    from jaxmarl_llm.training.losses import Loss
    from jaxmarl_llm.training.optimizers import Optimizer
    from jaxmarl_llm.types import Team, Tree
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Backbone": "jaxmarl_llm.agents.team",
            "EnvConfig": "jaxmarl_llm.envs.registry",
            "Loss": "jaxmarl_llm.training.losses",
            "Optimizer": "jaxmarl_llm.training.optimizers",
            "SFT": "jaxmarl_llm.training.config",
            "Sampling": "jaxmarl_llm.generation.sampling",
            "Team": "jaxmarl_llm.types",
            "TeamConfig": "jaxmarl_llm.agents.team",
            "TextTask": "jaxmarl_llm.envs.text_task",
            "Tree": "jaxmarl_llm.types",
            "fit": "jaxmarl_llm.runs.loop",
            "make_env_runner": "jaxmarl_llm.rollout.make_runner",
            "read_metrics": "jaxmarl_llm.telemetry.metrics_file",
        },
        modules={
            "credit": "jaxmarl_llm.credit",
            "plans": "jaxmarl_llm.rollout.plans",
            "recipes": "jaxmarl_llm.recipes",
        },
    )

__all__ = [
    "SFT",
    "Backbone",
    "EnvConfig",
    "Loss",
    "Optimizer",
    "Sampling",
    "Team",
    "TeamConfig",
    "TextTask",
    "Tree",
    "__version__",
    "credit",
    "fit",
    "make_env_runner",
    "plans",
    "read_metrics",
    "recipes",
]
