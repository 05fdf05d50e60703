"""Rollouts: plans of sampling, array rollouts as one program, host rollouts over text, and the environment runner.

Both engines fold the same keys along the same paths and write the same tables.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.rollout import choices, plans
    from jaxmarl_llm.rollout.array import make_rollout
    from jaxmarl_llm.rollout.env_pool import EnvPool
    from jaxmarl_llm.rollout.env_runner import RolloutResult
    from jaxmarl_llm.rollout.host import HostSettings, play
    from jaxmarl_llm.rollout.make_runner import make_env_runner
    from jaxmarl_llm.rollout.plans import Branch, Plan, flat, grow, handoff, node_wise, product, single
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Branch": f"{__name__}.plans",
            "EnvPool": f"{__name__}.env_pool",
            "HostSettings": f"{__name__}.host",
            "Plan": f"{__name__}.plans",
            "RolloutResult": f"{__name__}.env_runner",
            "flat": f"{__name__}.plans",
            "grow": f"{__name__}.plans",
            "handoff": f"{__name__}.plans",
            "make_env_runner": f"{__name__}.make_runner",
            "make_rollout": f"{__name__}.array",
            "node_wise": f"{__name__}.plans",
            "play": f"{__name__}.host",
            "product": f"{__name__}.plans",
            "single": f"{__name__}.plans",
        },
        modules={"choices": f"{__name__}.choices", "plans": f"{__name__}.plans"},
    )

__all__ = [
    "Branch",
    "EnvPool",
    "HostSettings",
    "Plan",
    "RolloutResult",
    "choices",
    "flat",
    "grow",
    "handoff",
    "make_env_runner",
    "make_rollout",
    "node_wise",
    "plans",
    "play",
    "product",
    "single",
]
