"""Learning from a tree: configuration, losses, optimizers, the learner, critics, and the steps that recipes compose.

Evaluation and the metrics of a step are here too.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.training.actor_critic import CriticAdvantage
    from jaxmarl_llm.training.algorithm import Algorithm, unequal_groups
    from jaxmarl_llm.training.config import SFT, ActorCritic, BaseConfig, Offline, RunConfig
    from jaxmarl_llm.training.curriculum import Curriculum
    from jaxmarl_llm.training.drivers import HostDriver
    from jaxmarl_llm.training.dynamic_sampling import DynamicSampling
    from jaxmarl_llm.training.evaluation import evaluate
    from jaxmarl_llm.training.learner import Learner, make_learner
    from jaxmarl_llm.training.losses import Loss, policy_loss
    from jaxmarl_llm.training.objectives import ClipCov, KlCov, cispo
    from jaxmarl_llm.training.optimizers import Optimizer
    from jaxmarl_llm.training.replay import Replay
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "ActorCritic": f"{__name__}.config",
            "Algorithm": f"{__name__}.algorithm",
            "BaseConfig": f"{__name__}.config",
            "ClipCov": f"{__name__}.objectives",
            "CriticAdvantage": f"{__name__}.actor_critic",
            "Curriculum": f"{__name__}.curriculum",
            "DynamicSampling": f"{__name__}.dynamic_sampling",
            "HostDriver": f"{__name__}.drivers",
            "KlCov": f"{__name__}.objectives",
            "Learner": f"{__name__}.learner",
            "Loss": f"{__name__}.losses",
            "Offline": f"{__name__}.config",
            "Optimizer": f"{__name__}.optimizers",
            "Replay": f"{__name__}.replay",
            "RunConfig": f"{__name__}.config",
            "SFT": f"{__name__}.config",
            "cispo": f"{__name__}.objectives",
            "evaluate": f"{__name__}.evaluation",
            "make_learner": f"{__name__}.learner",
            "policy_loss": f"{__name__}.losses",
            "unequal_groups": f"{__name__}.algorithm",
        },
        modules={},
    )

__all__ = [
    "SFT",
    "ActorCritic",
    "Algorithm",
    "BaseConfig",
    "ClipCov",
    "CriticAdvantage",
    "Curriculum",
    "DynamicSampling",
    "HostDriver",
    "KlCov",
    "Learner",
    "Loss",
    "Offline",
    "Optimizer",
    "Replay",
    "RunConfig",
    "cispo",
    "evaluate",
    "make_learner",
    "policy_loss",
    "unequal_groups",
]
