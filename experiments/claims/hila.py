"""HILA on `defer`: the learned choices against the best fixed one. The inner loop alone (``hila:tiny``).

The accuracy of creating is planted. All figures are of held-out questions, and choices are the most probable ones. The
inner loop weighs all choices of a menu alike. With its KL to random choices, it leaves some probability to every choice
of positive advantage. The worth of sampled choices is shown beside that of chosen ones.

`experiments.studies.defer_bounds` enumerates all choices. The best fixed choice is to defer, of worth .70. The oracle
takes peer 1, peer 2, create and defer by type, of worth .85. So .15 can be won, and .07 is less than half of it. The
control is the best fixed choice for the seed's own held-out questions. Worth is the mean return of the choices under
the planted accuracies, so it has no sampling error of peers. The choice of a type is that of most of its questions.

Calibrated on seeds 100, 101, 102, whose figures are in this order: 100 x 64 supervised at 3e-3, then 100 RL steps of 64
questions at 1e-3. The oracle's choice is that of at least .99 .98 .94 of the questions of each type. Worth of chosen
choices is above .70 by .150 .153 .134. Return of sampled episodes is above .70 by .09 .07 .05: on the third type create
has probability .57 .59 .56, and defer .39 .38 .39.

Nothing is claimed of the outer loop (``hila:outer`` against ``hila:inner``). Its rate and its number of steps are not
calibrated. From the start, with 250 steps at 2e-3, the last type was created instead of deferred in two seeds of three.

    python -m experiments.claims.hila       the calibration seeds, 100 to 102
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import CALIBRATION, Claim, Finding, arms, minus
from experiments.configs.hila import tiny
from experiments.studies.defer_bounds import best, worth
from experiments.studies.phase_runs import after_stage_0, stage
from jaxmarl_llm.credit.menus import completion_logprobs
from jaxmarl_llm.envs.defer import array
from jaxmarl_llm.envs.defer.array import CHOICES, TYPES
from jaxmarl_llm.envs.defer.array import Config as Defer
from jaxmarl_llm.recipes.hila import Config, make, make_plan
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.training.drivers import RunData
from jaxmarl_llm.types import Params

GOLDEN = "tests/recipes/test_hila.py"
STATUS = "mechanism implemented"  # peers, expert and questions are planted
SEEDS = 5
BUDGET = f"{tiny().sft.steps} supervised steps; {tiny().steps} RL steps of {tiny().batch} questions"
CLAIMS = {
    "oracle": Claim(
        "U",
        "the choice is that of the cost-aware oracle on all four types",
        "types on which it is",
        float(len(TYPES)),
        control="none: a count",
        budget=BUDGET,
    ),
    "worth": Claim(
        "L",
        "accuracy minus costs is above that of the best fixed choice by at least 0.07",
        "mean return of the choices on held-out questions, minus that of the best fixed choice",
        0.07,
        control="the best fixed choice, found by enumeration",
        budget=BUDGET,
    ),
}


def choices_of(cfg: Config, params: Params, data: RunData) -> np.ndarray:
    """Probability of each choice at each held-out question [seeds, questions, choices].

    Args:
        cfg: The configuration.
        params: Parameters of the seeds.
        data: Their tasks.
    """
    rollout = make_rollout(make(cfg).team, array.make(Defer(**cfg.env.args)), make_plan(cfg), cfg.sampling)

    def one(params: Params, tasks: dict) -> jax.Array:
        tree = rollout(params, {}, tasks, jax.random.key(0), jnp.int32(0))
        count = len(tasks["type"]) * len(CHOICES)  # the first rows are those of the menus
        return jnp.exp(completion_logprobs(tree))[:count].reshape(-1, len(CHOICES))

    return np.asarray(jax.jit(jax.vmap(one))(params, data.held_out), float)


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    cfg = tiny()
    cfg.check("config")
    recipe, environment = make(cfg), Defer(**cfg.env.args)
    state, data = after_stage_0(recipe, seeds)
    state = stage(recipe, recipe.phases[-1])(jnp.array(seeds), data, state, jnp.arange(cfg.steps))
    chance, types = choices_of(cfg, state.params, data), np.asarray(data.held_out["type"])
    table, oracle = worth(environment, cfg.reward), best(environment, cfg.reward).of_type
    chosen = chance.argmax(2)
    earned = np.array([table[t, c].mean() for t, c in zip(types, chosen, strict=True)])
    sampled = np.array([(p * table[t]).sum(1).mean() for t, p in zip(types, chance, strict=True)])
    shares = [np.bincount(t, minlength=len(TYPES)) / len(t) for t in types]
    fixed = np.array([best(environment, cfg.reward, share.tolist()).fixed_worth for share in shares])
    taken = np.array(
        [
            [np.bincount(c[t == of], minlength=len(CHOICES)) / (t == of).sum() for of in range(len(TYPES))]
            for t, c in zip(types, chosen, strict=True)
        ]
    )
    for seed, rows in zip(seeds, taken.round(3).tolist(), strict=True):
        say(f"hila, seed {seed}: {rows}")
    own = [CHOICES.index(choice) for choice in oracle]
    right = [float((rows.argmax(1) == own).sum()) for rows in taken]
    share = taken[:, np.arange(len(TYPES)), own].min(1)
    figures = arms("worth", {"chosen": earned, "sampled": sampled, "best fixed choice": fixed})
    return [
        Finding("oracle", right, {"smallest share of a type": share.tolist()}),
        Finding("worth", minus(earned, fixed), figures),
    ]


def main() -> None:
    """Print the arms of the calibration seeds."""
    for finding in run(CALIBRATION, lambda line: print(line, flush=True)):
        print(finding.claim, np.round(finding.effect, 3).tolist())


if __name__ == "__main__":
    main()
