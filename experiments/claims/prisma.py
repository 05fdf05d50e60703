"""PRISMA on `facts` (a planner, a solver and an inspector): what stage II brings, and what the trace brings in it.

Arms are ``trace``, where the inspector reads queries, facts and answer, and ``blind``, where it reads the question
alone. Planner and solver have the same demonstrations and keys in both arms. Their stage I ends with the same
parameters, up to the order of sums.

EM of stage I is that of the first answers: what a team reaches whose inspector passes everything. Held-out episodes are
sampled as in training, with the same keys before and after stage II. As planner and solver stay, so do the first
answers. An answer is a right trace where it is the gold one. The share of right traces that pass is over the first
inspections of held-out episodes.

Calibrated on seeds 100 to 102: the length of stage I alone. The deltas are those of the plan of this system, made
before any run. A team that is nearly always right leaves an inspector little to win. Figures are held-out, by seed:

    stage I, stage II   first answers after stage I   EM after stage II   right first answers that pass
    10 steps, 60 steps  .891 .854 .787                .891 .916 .842      1.00 .995 1.00
    5 steps, 60 steps   .752 .723 .695                .836 .812 .764      .99 .99 1.00

The inspector that reads the question alone passes everything after 60 steps: its EM is that of the first answers. After
stage 0 first answers had .488 .492 .490 in both runs. The first run was stopped behind the arm with the trace. An
earlier run of seed 100 with 2,000 supervised steps had .49 before RL, .89 after 15 steps of stage I and .97 after 30.
Both arms of three seeds take 40 minutes on one core.

    python -m experiments.claims.prisma          the calibration seeds, 100 to 102
    python -m experiments.systems --run=prisma   the claims
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, calibrate, minus
from experiments.configs.prisma import blind, tiny
from experiments.studies.phase_runs import after_stage_0, stage
from jaxmarl_llm.recipes.prisma import INSPECTOR, ROLES, Config, make
from jaxmarl_llm.runs.compiled import make_evaluation
from jaxmarl_llm.types import TrainState

GOLDEN = "tests/recipes/test_prisma.py"
STATUS = "mechanism implemented"  # the inspector's reward is inferred
SEEDS = 5
BUDGET = (
    f"{tiny().sft.steps:,} supervised steps; {tiny().stage_one} RL steps of {tiny().batch} tasks in stage I, "
    f"{tiny().steps - tiny().stage_one} in stage II"
)
CLAIMS = {
    "stage_two": Claim(
        "L",
        "stage II raises held-out EM over stage I by at least 0.05",
        "held-out EM, after stage II minus of the first answers after stage I",
        0.05,
        control="the same team after stage I, whose answers all pass",
        budget=BUDGET,
    ),
    "frozen": Claim(
        "U",
        "planner and solver are byte-identical after stage II, optimizer states included",
        "1 where they are",
        1.0,
        control="none: an exact comparison with the state after stage I",
        budget=BUDGET,
    ),
    "passes": Claim(
        "L",
        "after stage II the inspector passes at least 80 % of right traces",
        "share of held-out first answers that pass, among the right ones",
        0.8,
        control="the fixed share 0.8",
        budget=BUDGET,
    ),
    "trace": Claim(
        "X",
        "an inspector that reads the trace reaches more EM than one that reads the question alone",
        "held-out EM after stage II, with trace minus without",
        0.03,
        control="an inspector that reads the question alone, in stage 0 and in both stages",
        budget=BUDGET,
    ),
}


class Arm(NamedTuple):
    """Figures of one arm, one value a seed.

    Attributes:
        first: EM of the first answers after stage I.
        last: EM after stage II.
        passed: Share of right first answers that pass after stage II; 0 where none is right.
        interventions: Of an episode after stage II.
        frozen: 1 where stage II left planner and solver as they were, else 0.
    """

    first: np.ndarray
    last: np.ndarray
    passed: np.ndarray
    interventions: np.ndarray
    frozen: np.ndarray


def same_bits(before: TrainState, after: TrainState) -> np.ndarray:
    """Whether planner and solver have the same bytes in two states of several seeds, optimizer included [seeds]."""
    own = lambda state: [(state.params["agents"][r], state.opt_state[r]) for r in ROLES if r != ROLES[INSPECTOR]]
    pairs = zip(*(map(np.asarray, jax.tree.leaves(own(state))) for state in (before, after)), strict=True)
    return np.all([[x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)] for a, b in pairs], axis=0)


def train(cfg: Config, seeds: list[int], name: str, say: Callable[[str], None]) -> Arm:
    """Both stages of one arm. The seeds are one program.

    Args:
        cfg: Configuration of the arm.
        seeds: Seeds of the runs.
        name: Name of the arm.
        say: Prints a line.
    """
    cfg.check("config")
    recipe, which = make(cfg), jnp.array(seeds)
    start, data = after_stage_0(recipe, seeds)
    advance, evaluate = stage(recipe, recipe.phases[-1]), jax.jit(jax.vmap(make_evaluation(cfg)))

    def seen(of: str, state: TrainState) -> dict[str, Any]:
        got = {k: np.asarray(v, np.float64) for k, v in evaluate(state.params, which, data.held_out).items()}
        shown = ("before", "em", "passed_right", "interventions/inspector", "evidence/planner", "format")
        say(f"prisma, {name}, {of}: held-out " + ", ".join(f"{k} {np.round(got[k], 3).tolist()}" for k in shown))
        return got

    seen("after stage 0", start)
    middle = advance(which, data, start, jnp.arange(cfg.stage_one))
    end = advance(which, data, middle, jnp.arange(cfg.stage_one, cfg.steps))
    one, two = seen("after stage I", middle), seen("after stage II", end)
    passed = two["passed_right"] / np.maximum(two["before"], 1e-12)
    return Arm(one["before"], two["em"], passed, two["interventions/inspector"], 1.0 * same_bits(middle, end))


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    own, other = (train(cfg, seeds, name, say) for name, cfg in (("trace", tiny()), ("blind", blind())))
    em = arms("held-out EM", {"stage I": own.first, "stage II": own.last, "stage II, blind": other.last})
    share = arms("share of right traces that pass", {"trace": own.passed, "blind": other.passed})
    asked = arms("interventions", {"trace": own.interventions, "blind": other.interventions})
    return [
        Finding("stage_two", minus(own.last, own.first), em),
        Finding("frozen", own.frozen.tolist(), arms("frozen", {"trace": own.frozen, "blind": other.frozen})),
        Finding("passes", own.passed.tolist(), share | asked),
        Finding("trace", minus(own.last, other.last), em),
    ]


if __name__ == "__main__":
    calibrate(run)
