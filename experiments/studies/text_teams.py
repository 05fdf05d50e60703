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
from jaxmarl_llm.configs import joyagents_r1, magrpo
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
        data: Argument of the environment that names the folder of the data.
    """

    config: Callable[[], BaseConfig]
    metric: str
    claim: Claim
    arms: Mapping[str, Arm]
    shown: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    data: str = "data"


def _claim(what: str, delta: float) -> Claim:
    return Claim(
        "L",
        f"RL raises {what} of the team above stage 0",
        effect=f"{what}, greedy, by held-out task and seed: after RL minus after stage 0",
        delta=delta,
        control="the same parameters before RL, on the same held-out tasks",
        budget="the steps of the shipped configuration, at most 45 minutes a run on 2 cores",
    )


TEAMS: dict[str, TextTeam] = {
    "call_team": TextTeam(
        joyagents_r1.call_team,
        "call",
        _claim("the match of the call", 0.03),
        {
            TEAM: Arm(),
            "no memory": Arm({"use_memory": False}),
            "flat": Arm({"plan": "flat"}),
        },
        ("exact", "routed", "function", "malformed", "convention_met"),
        {"unseen_function": "unseen functions"},
        data="data_dir",
    ),
    "two_writers": TextTeam(
        magrpo.two_writers,
        "return",
        _claim("the reward", 0.01),
        {TEAM: Arm()},
        ("rougeL", "rouge1", "specific", "proposal", "words", "ended"),
    ),
    "reference_game": TextTeam(
        magrpo.reference_game,
        "chosen",
        _claim("the share of titles that are found", 0.05),
        {
            TEAM: Arm(),
            "one model that sees all": Arm({"steps": 120}, start={"env.name": "reference_game_solo"}),
            "human hint": Arm(start={"env.args.hint": "human"}),
            "no hint": Arm(start={"env.args.hint": "none"}),
        },
        ("named", "hint_words", "hint_ended"),
    ),
}


def configuration(team: TextTeam, arm: Arm, seed: int, data: str | None = None) -> BaseConfig:
    """The configuration of an arm.

    Args:
        team: The team.
        arm: What changes.
        seed: Seed of the run.
        data: Folder of the data; None: the sample in the package. A record is compared without it.
    """
    cfg = dataclasses.replace(team.config(), seed=seed)
    for path, value in {**arm.start, **arm.changes}.items():
        cfg = replace_path(cfg, path, value)
    return cfg if data is None else replace_path(cfg, f"env.args.{team.data}", data)
