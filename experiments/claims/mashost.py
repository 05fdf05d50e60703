"""MasHost on `build`: the learned graphs against the best fixed one, their sizes, and the rewards of actions.

Arms begin with the same parameters, those after stage 0 (``imitated``).

- ``trained``: HRPO, with rewards of actions.
- ``trajectory``: the same queries and keys, with the advantage of whole constructions alone.

Worth is the probability that the graph's answer is right, minus the cost of its nodes. The probability has no sampling
error of workers. Builders act by sampling, as in training. All figures are means over held-out queries.

`experiments.studies.build_bounds` enumerates all graphs. The best fixed graph is a solver and its checker, of worth
.774. The best graphs by query are a solver for easy queries, and both for hard ones, of worth .815. So .041 can be won,
and .02 is less than half of it. The two graphs differ by one node, and .5 is half of it. The control is the best fixed
graph for the seed's own held-out queries, whose share of hard ones is not exactly a half.

The demonstrator of stage 0 exits earlier on easy queries (.5) than on hard ones (.3). So the imitated builder already
makes larger graphs for hard queries. Its sizes are shown beside those of the claim.

Calibrated on seeds 100, 101, 102. Figures are in this order.

- A demonstrator that does not look at the query, additions at random, 400 x 64 supervised, RL at 2e-3 with 32 queries.
  Worth after 0, 50, 150 steps: .622 .605 .621, .647 .649 .647, .647 .648 .647. Every graph became one solver.
- The same with six of ten additions to a chain, rate 7e-4, entropy bonus .01. After 0 and 40 steps .662 .642 .655, then
  .653 .649 .653, with 1.0 nodes for either type. A builder that cannot tell types apart gives up checkers. On easy
  queries a smaller graph has as large a standardised advantage as a right answer on hard ones.
- The demonstrator with exits at .5 and .3, rate 1e-3, entropy bonus .01. Worth after 0, 40, 80 steps: .662 .671 .690,
  .711 .804 .808, .806 .811 .816. Nodes of easy queries 1.5 1.5 1.5, then 1.0 1.0 1.0. Nodes of hard ones 1.8 2.1 2.2,
  then 1.9 2.0 2.0. This is ``mashost:tiny``, with 80 steps.
- There the share of impossible actions is .158 .148 .156, then .102 .379 .333, then .074 .152 .164. Without rewards of
  actions it is .514 .512 .738 after 80 steps, and worth is .731 .812 .813.
- So the effects were .031 .036 .041 of worth, .94 .97 .99 nodes, and .44 .36 .57 of impossible actions.

    python -m experiments.claims.mashost       the calibration seeds, 100 to 102, in 8 minutes on one core
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import CALIBRATION, Claim, Finding, arms, minus
from experiments.configs.mashost import tiny, trajectory
from experiments.studies.build_bounds import best
from experiments.studies.phase_runs import after_stage_0, stage
from jaxmarl_llm.envs.build.array import Config as Build
from jaxmarl_llm.recipes.mashost import Config, make
from jaxmarl_llm.runs.compiled import make_evaluation
from jaxmarl_llm.training.drivers import RunData
from jaxmarl_llm.types import Params

GOLDEN = "tests/recipes/test_mashost.py"
STATUS = "mechanism implemented"  # the weights of the rewards of actions are inferred
SEEDS = 5
BUDGET = f"{tiny().sft.steps} supervised steps; {tiny().steps} RL steps of {tiny().batch} queries, groups of 8"
CLAIMS = {
    "worth": Claim(
        "L",
        "accuracy minus cost on held-out queries is above that of the best fixed graph by at least 0.02",
        "held-out accuracy minus cost, trained minus best fixed graph",
        0.02,
        control="the best fixed graph, found by enumeration",
        budget=BUDGET,
    ),
    "size": Claim(
        "L",
        "graphs of hard queries are larger than those of easy ones by at least 0.5 nodes",
        "mean nodes of held-out queries, hard minus easy",
        0.5,
        control="the trained builder's graphs of easy queries",
        budget=BUDGET,
    ),
    "impossible": Claim(
        "X",
        "without rewards of actions more actions are impossible",
        "share of actions that are impossible, without rewards of actions minus with",
        0.02,
        control="the advantage of whole constructions alone, from the same parameters",
        budget=f"{BUDGET}, in each arm",
    ),
}
SHOWN = ("worth", "accuracy", "nodes, easy", "nodes, hard", "impossible", "unanswered")


def trained(cfg: Config, control: Config, seeds: list[int]) -> tuple[dict[str, Params], RunData]:
    """Train both arms on every seed after one stage 0: parameters of the arms, and the data of the seeds.

    Args:
        cfg: The configuration of ``trained``.
        control: The configuration of ``trajectory``.
        seeds: Lanes of one program.
    """
    recipe, which = make(cfg), jnp.array(seeds)
    begun, data = after_stage_0(recipe, seeds)
    out = {"imitated": begun.params}
    for name, arm in {"trained": recipe, "trajectory": make(control)}.items():
        out[name] = stage(arm, arm.phases[-1])(which, data, begun, jnp.arange(arm.cfg.steps)).params
    return out, data


def measured(evaluate: Callable[..., dict], params: Params, which: jax.Array, data: RunData) -> dict[str, np.ndarray]:
    """Figures of held-out queries by seed.

    Args:
        evaluate: What `make_evaluation` returns, over seeds.
        params: Parameters of the seeds.
        which: The seeds.
        data: Their tasks.
    """
    hard = np.asarray(data.held_out["hard"]) == 1
    easy, difficult = (
        {k: np.asarray(v, np.float64) for k, v in evaluate(params, which, data.held_out, None, of).items()}
        for of in (~hard, hard)
    )
    share = hard.mean(1)
    every = {k: (1 - share) * easy[k] + share * difficult[k] for k in easy}  # both are means over the same episodes
    return {
        "worth": every["chance"] + every["cost"],
        "accuracy": every["accuracy"],
        "nodes, easy": easy["nodes"],
        "nodes, hard": difficult["nodes"],
        "impossible": every["impossible"] / every["actions"],
        "unanswered": every["unanswered"],
    }


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    cfg, without = tiny(), trajectory()
    for one in (cfg, without):
        one.check("config")
    params, data = trained(cfg, without, seeds)
    evaluate = jax.jit(jax.vmap(make_evaluation(cfg)))
    got: dict[str, dict[str, np.ndarray]] = {}
    for name, of_arm in params.items():
        got[name] = measured(evaluate, of_arm, jnp.array(seeds), data)
        say(f"mashost, {name}: " + "; ".join(f"{k} {np.round(got[name][k], 3).tolist()}" for k in SHOWN))
    shares = np.mean(data.held_out["hard"], axis=1)
    fixed = np.array([best(Build(**cfg.env.args, hard_share=float(share))).fixed_worth for share in shares])
    shown = lambda figure, *names: arms(figure, {name: got[name][figure] for name in names})
    ours, control, start = (got[name] for name in ("trained", "trajectory", "imitated"))
    every = ("imitated", "trained", "trajectory")
    sizes = shown("nodes, easy", *every) | shown("nodes, hard", *every)
    gap = {"hard minus easy, imitated": minus(start["nodes, hard"], start["nodes, easy"])}
    return [
        Finding("worth", minus(ours["worth"], fixed), {"best fixed graph": fixed.tolist()} | shown("worth", *every)),
        Finding("size", minus(ours["nodes, hard"], ours["nodes, easy"]), sizes | gap),
        Finding("impossible", minus(control["impossible"], ours["impossible"]), shown("impossible", *every)),
    ]


def main() -> None:
    """Print the arms of the calibration seeds."""
    for finding in run(CALIBRATION, lambda line: print(line, flush=True)):
        print(finding.claim, np.round(finding.effect, 3).tolist())


if __name__ == "__main__":
    main()
