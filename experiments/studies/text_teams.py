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

# Tokens that a team samples in a step of RL, for each one that one model samples there. An arm of one model has so many
# times as many steps. Counts are means of demonstrations of the full data with the stop token of SmolLM2 (2026-11-28).
# A node-wise task of G = 4 has 4 routes of 2.2 tokens and 7 calls of 23.2, one model 4 calls.
CALL_TOKENS = 1.84
# A proposal has 20.7 tokens, a summary 16.1, and one model writes the summary alone.
WRITER_TOKENS = 2.29
# A hint has 6.3 tokens, an answer 6.6, and one model writes the answer alone.
GAME_TOKENS = 1.96


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
        shown: Other components, whose means are shown where the environment of an arm pays them. The one of the arm
            ``team`` pays all of them.
        parts: Component that is 1 for the tasks of a part -> name of the part; the primary figure is shown for each.
        data: Argument of the environment that names the folder of the data.
        crossed: The two roles that `experiments.studies.cross_play` takes from runs of different seeds; None: it has
            nothing to cross.
    """

    config: Callable[[], BaseConfig]
    metric: str
    claim: Claim
    arms: Mapping[str, Arm]
    shown: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    data: str = "data"
    crossed: tuple[str, str] | None = None


def _alone(config: Callable[[], BaseConfig], name: str, tokens: float) -> Arm:
    """One model in place of the team, which samples as many tokens in RL.

    Args:
        config: The configuration of the team.
        name: Environment of one role.
        tokens: Tokens of a team's step for each token of a step of one model.
    """
    return Arm({"steps": round(tokens * config().steps)}, start={"env.name": name})


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
            "one model": _alone(joyagents_r1.call_team, "call_team_solo", CALL_TOKENS),
        },
        ("exact", "routed", "function", "malformed", "convention_met"),
        {"unseen_function": "unseen functions"},
        data="data_dir",
    ),
    "two_writers": TextTeam(
        magrpo.two_writers,
        "return",
        _claim("the reward", 0.01),
        {TEAM: Arm(), "one model": _alone(magrpo.two_writers, "two_writers_solo", WRITER_TOKENS)},
        ("rougeL", "rouge1", "specific", "proposal", "words", "ended"),
    ),
    "reference_game": TextTeam(
        magrpo.reference_game,
        "chosen",
        _claim("the share of titles that are found", 0.05),
        {
            TEAM: Arm(),
            "one model that sees all": _alone(magrpo.reference_game, "reference_game_solo", GAME_TOKENS),
            "frozen listener": Arm({"trained_roles": ("speaker",)}),
            "frozen speaker": Arm({"trained_roles": ("listener",)}),
            "human hint": Arm(start={"env.args.hint": "human"}),
            "no hint": Arm(start={"env.args.hint": "none"}),
        },
        ("named", "hint_words", "hint_ended"),
        crossed=("speaker", "listener"),
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
