"""CoMAM on `facts` (an extractor, a profiler and a retriever): what the weighted reward of the answer brings.

Arms begin with the same parameters, those after stage 0 (``taught``), and have the same tasks and keys.

- ``ranks``: local rewards plus the reward of the answer, weighted by rank agreement.
- ``local``: local rewards alone.
- ``uniform``: the reward of the answer has weight 1/3 for each agent.

Accuracy is the share of held-out episodes with a right answer. Agents act by sampling, as in training.

Little is expected of the weights. Over random orders of eight different rewards, v is .80 +- .09, and never below .607.
So no weight of a task is more than 1.5 times another, and advantages are divided by the standard deviation of their
group. Where the interval of ``uniform`` contains 0, its claim is not decided. That is a finding about the method.

Stage 0 was calibrated on seeds 100 to 102. With norms of queries and keys (qwen3), 6 entities, 4 relations and 4,000
supervised steps, accuracy after stage 0 was .020 .035 .162. Without norms (llama), with 12 entities and 6 relations,
accuracy was .102 .039 .041 after 4,000 steps. With 8,000 steps, as now, it is as below. RL has 80 steps, as before.
Held-out figures by seed:

                    accuracy         right profiles   recall of the retriever
    after stage 0   .197 .168 .070   .305 .125 .021   .271 .238 .124
    ranks           .488 .297 .191   .191 .045 .016   .589 .416 .302
    local           .486 .225 .094   .199 .068 .002   .565 .353 .162
    uniform         .520 .340 .191   .178 .068 .010   .602 .457 .288

Three arms of three seeds take 37 minutes on one core beside other work. The delta of ``local`` is that of the plan of
this system, made before any run.

    python -m experiments.claims.comam          the calibration seeds, 100 to 102
    python -m experiments.systems --run=comam   the claims
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, calibrate, minus
from experiments.configs.comam import local, tiny, uniform
from experiments.studies.phase_runs import after_stage_0, stage
from jaxmarl_llm.recipes.comam import Config, make
from jaxmarl_llm.runs.compiled import make_evaluation

GOLDEN = "tests/recipes/test_comam.py"
STATUS = "mechanism implemented"  # relevance from 0, and the treatment of ties, are inferred
SEEDS = 5
BUDGET = (
    f"{tiny().sft.steps:,} supervised steps; {tiny().steps} RL steps of {tiny().batch} tasks, groups of "
    f"{tiny().group}, in each arm"
)
CLAIMS = {
    "local": Claim(
        "L",
        "local rewards plus the weighted reward of the answer bring at least 0.03 more accuracy than local rewards",
        "held-out accuracy, weights by ranks minus local rewards alone",
        0.03,
        control="local rewards alone, from the same parameters",
        budget=BUDGET,
    ),
    "uniform": Claim(
        "X",
        "weights by ranks bring more accuracy than uniform weights",
        "held-out accuracy, weights by ranks minus uniform weights",
        0.0,
        control="a weight of 1/3 for each agent, from the same parameters",
        budget=BUDGET,
    ),
}
SHOWN = {
    "accuracy": "answer",
    "recall of the store": "kept_recall/extractor",
    "overlap of the store": "kept_overlap/extractor",
    "right profiles": "profile/profiler",
    "recall of the retriever": "found_recall/retriever",
    "overlap of the retriever": "found_overlap/retriever",
}


def trained(configs: Mapping[str, Config], seeds: list[int], say: Callable[[str], None]) -> dict[str, dict]:
    """Figures of held-out episodes after stage 0 and of each arm, one value a seed.

    Args:
        configs: Configuration of each arm; all have one stage 0.
        seeds: Lanes of one program.
        say: Prints a line.
    """
    recipes, which = {name: make(cfg) for name, cfg in configs.items()}, jnp.array(seeds)
    first = next(iter(recipes.values()))
    begun, data = after_stage_0(first, seeds)
    evaluate = jax.jit(jax.vmap(make_evaluation(first.cfg)))
    out: dict[str, dict] = {}
    for name in ("taught", *recipes):
        state = begun
        if name in recipes:
            recipe = recipes[name]
            state = stage(recipe, recipe.phases[-1])(which, data, begun, jnp.arange(recipe.cfg.steps))
        got = evaluate(state.params, which, data.held_out)
        out[name] = {shown: np.asarray(got[key], np.float64) for shown, key in SHOWN.items()}
        say(f"comam, {name}: " + "; ".join(f"{k} {np.round(v, 3).tolist()}" for k, v in out[name].items()))
    return out


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    configs = {"ranks": tiny(), "local": local(), "uniform": uniform()}
    for cfg in configs.values():
        cfg.check("config")
    got = trained(configs, seeds, say)
    of = lambda name: got[name]["accuracy"]
    shown = lambda figure, *names: arms(figure, {name: got[name][figure] for name in names})
    against = lambda arm: {k: v for figure in SHOWN for k, v in shown(figure, "taught", "ranks", arm).items()}
    return [Finding(arm, minus(of("ranks"), of(arm)), against(arm)) for arm in CLAIMS]


if __name__ == "__main__":
    calibrate(run)
