"""CPMobius on `chain_coach`: the player without labels, against its stage 0, an untrained coach, and no band.

Arms go on from the same stage 0, and differ in one setting each:

- ``trained``: coach and player learn.
- ``untrained coach``: the coach stays as stage 0 left it.
- ``no band``: questions of every solve rate are trained on.

Figures are the player's accuracy on test questions, sampled as in training. No test question is ever played in training
or validation. Validation uses labels, as in the paper: the coach is paid by the change of accuracy there.

Calibrated on seeds 100 to 102: accuracy on test questions.

- After stage 0: .66 .62 .65.
- ``trained``: .80 .82 .79. ``untrained coach``: .83 .85 .76. ``no band``: .81 .80 .80.
- With four extra plays in place of one, seed 100 alone, another program: .69 after stage 0, then .83, and .85 with an
  untrained coach.

An imitating player's accuracy can rise by about .26 (`experiments.studies.coach_bounds`). The calibration speaks
against the claims on the coach and on the band, which stand as they were planned.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, calibrate, minus
from experiments.configs.cpmobius import no_band, tiny, untrained_coach
from jaxmarl_llm.recipes import cpmobius
from jaxmarl_llm.runs.phases import Recipe
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.types import TrainState

GOLDEN = "tests/recipes/test_cpmobius.py"
STATUS = "mechanism implemented"  # questions are sums of small numbers, and stage 0 is imperfect on purpose
SEEDS = 5
ARMS = {"trained": tiny, "untrained coach": untrained_coach, "no band": no_band}
BUDGET = f"{tiny().sft.steps} supervised steps; {tiny().steps} RL steps of {tiny().batch} questions, 16 answers each"
TEST = "eval/success@test"
CLAIMS = {
    "coach": Claim(
        "U",
        "solve rates .25 .5 .75 and a change of .02 pay the coach .005 .01 .015",
        "1 where they do",
        1.0,
        control="none: an exact figure",
        budget="none",
    ),
    "learns": Claim(
        "L",
        "without a label in a gradient the player's accuracy on unseen questions rises by at least 0.10",
        "accuracy on test questions, after RL minus after stage 0",
        0.10,
        control="the player after stage 0",
        budget=BUDGET,
    ),
    "trained coach": Claim(
        "L",
        "it rises by at least 0.02 more than with an untrained coach",
        "accuracy on test questions, trained coach minus untrained coach",
        0.02,
        control="the coach that stage 0 ends with, from the same parameters",
        budget=BUDGET,
    ),
    "band": Claim(
        "X",
        "without the band the gain is smaller by at least 0.03",
        "accuracy on test questions, with the band minus without",
        0.03,
        control="all questions are trained on, from the same parameters",
        budget=BUDGET,
    ),
}


def advance(recipe: Recipe, state: TrainState, steps: int, folder: Path) -> tuple[TrainState, list[dict[str, float]]]:
    """The state after ``steps`` steps of the run, and the metrics of the steps taken."""
    seen = []
    with Logger(folder, resume_step=None, total_steps=steps, primary=False) as logger:
        while int(state.step) < steps:
            state, metrics = recipe.step(state, logger)
            seen.append(metrics)
    return state, seen


def mean(rows: list[dict[str, float]], key: str) -> float:
    """The mean of a metric over the steps that have it; NaN where none has."""
    values = [float(row[key]) for row in rows if key in row]
    return float(np.mean(values)) if values else float("nan")


def arms_of(seed: int) -> dict[str, dict[str, float]]:
    """Accuracy and metrics of every arm of a seed, from the same stage 0."""
    out: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        first = cpmobius.make(dataclasses.replace(tiny(), seed=seed))
        start, _ = advance(first, first.init(0), first.starts[1], Path(folder))
        out["stage 0"] = {"accuracy": first.evaluate(start)[TEST]}
        for name, config in ARMS.items():
            recipe = cpmobius.make(dataclasses.replace(config(), seed=seed))
            state, seen = advance(recipe, jax.tree.map(jnp.copy, start), recipe.total_steps, Path(folder))
            half = seen[len(seen) // 2 :]
            out[name] = {
                "accuracy": recipe.evaluate(state)[TEST],
                "labels that are right": mean(seen, "majority/right"),
                "majority, later": mean(half, "majority/agreement"),
                "majority of wrong labels, later": mean(half, "majority/agreement_wrong"),
                "questions kept": mean(seen, "sampling/kept"),
            }
    return out


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    accuracy: dict[str, list[float]] = {}
    for seed in seeds:
        found = arms_of(seed)
        for name, figures in found.items():
            accuracy.setdefault(name, []).append(figures["accuracy"])
            say(f"cpmobius, seed {seed}, {name}: {', '.join(f'{k} {v:.3f}' for k, v in figures.items())}")
    paid = np.asarray(cpmobius.coach_pay(0.02, np.array([0.25, 0.5, 0.75])))
    exact = float(np.allclose(paid, [0.005, 0.01, 0.015], atol=1e-12))
    of = lambda *names: arms("accuracy", {name: accuracy[name] for name in names})
    ahead = lambda control: minus(accuracy["trained"], accuracy[control])
    return [
        Finding("coach", [exact] * len(seeds), {"paid": [exact] * len(seeds)}),
        Finding("learns", ahead("stage 0"), of("stage 0", "trained")),
        Finding("trained coach", ahead("untrained coach"), of("untrained coach", "trained")),
        Finding("band", ahead("no band"), of("no band", "trained")),
    ]


if __name__ == "__main__":
    calibrate(run)
