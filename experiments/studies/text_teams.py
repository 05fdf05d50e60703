"""Teams and arms of the study of real text, and the claim of each team.

The command, the decisions and the page are in `experiments.studies.real_text`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.claims import Claim
from jaxmarl_llm.config import replace_path
from jaxmarl_llm.training.config import BaseConfig

TEAM = "team"
SEEDS = 3


@dataclass(frozen=True)
class Arm:
    """What an arm changes in the configuration of its team.

    Attributes:
        changes: Dotted key of the configuration -> value. None of stage 0: arms of equal ``start`` share it.
        start: Dotted key -> value, what stage 0 and RL both have. It names another stage 0.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TextTeam:
    """A team that reads and writes real text.

    Attributes:
        config: The configuration of the arm ``team``.
        metric: What a held-out task brought: the primary figure. ``return``, or a component that the environment pays.
        claim: That RL is above stage 0.
        arms: Name -> arm; ``team`` is the first.
        shown: Other components, whose means are shown.
        parts: Component that is 1 for the tasks of a part -> name of the part; the primary figure is shown for each.
    """

    config: Callable[[], BaseConfig]
    metric: str
    claim: Claim
    arms: Mapping[str, Arm]
    shown: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)


def _claim(what: str, delta: float) -> Claim:
    return Claim(
        "L",
        f"RL raises {what} of the team above stage 0",
        effect=f"{what}, greedy, by held-out task and seed: after RL minus after stage 0",
        delta=delta,
        control="the same parameters before RL, on the same held-out tasks",
        budget="the steps of the shipped configuration, at most 45 minutes a run on 2 cores",
    )


TEAMS: dict[str, TextTeam] = {}


def configuration(team: TextTeam, arm: Arm, seed: int) -> BaseConfig:
    """The configuration of an arm.

    Args:
        team: The team.
        arm: What changes.
        seed: Seed of the run.
    """
    cfg = dataclasses.replace(team.config(), seed=seed)
    for path, value in {**arm.start, **arm.changes}.items():
        cfg = replace_path(cfg, path, value)
    return cfg
