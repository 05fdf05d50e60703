"""Agents: a team from a configuration, the adaptive memory of each role, and snapshots of past policies.

A team states which model plays which role.
"""

from typing import TYPE_CHECKING

from jaxmarl_llm._lazy import lazy_exports

if TYPE_CHECKING:
    from jaxmarl_llm.agents import memory, snapshots
    from jaxmarl_llm.agents.memory import Memory, MemoryConfig
    from jaxmarl_llm.agents.snapshots import Past
    from jaxmarl_llm.agents.team import Backbone, TeamConfig, init_params, load_tokenizer, make_team, with_partner
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        objects={
            "Backbone": f"{__name__}.team",
            "Memory": f"{__name__}.memory",
            "MemoryConfig": f"{__name__}.memory",
            "Past": f"{__name__}.snapshots",
            "TeamConfig": f"{__name__}.team",
            "init_params": f"{__name__}.team",
            "load_tokenizer": f"{__name__}.team",
            "make_team": f"{__name__}.team",
            "with_partner": f"{__name__}.team",
        },
        modules={"memory": f"{__name__}.memory", "snapshots": f"{__name__}.snapshots"},
    )

__all__ = [
    "Backbone",
    "Memory",
    "MemoryConfig",
    "Past",
    "TeamConfig",
    "init_params",
    "load_tokenizer",
    "make_team",
    "memory",
    "snapshots",
    "with_partner",
]
