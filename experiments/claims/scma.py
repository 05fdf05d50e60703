"""SCMA on `segments`: length and accuracy of the reasoner against GRPO on accuracy, and against a uniform penalty.

Arms go on from the same stage 0. They differ in what the reasoner is paid beside `malformed`:

- ``accuracy``: accuracy alone.
- ``scma``: accuracy minus alpha times the importance-weighted length penalty.
- ``uniform``: accuracy minus a constant for each token.

Every arm plays equally many episodes. Segmenter and scorer learn in all of them, from the same rewards. Figures are
those of the reasoner alone on held-out questions, sampled as in training.

Calibrated on seeds 100 to 102: held-out accuracy, then tokens of a text.

- After stage 0: .53 .62 .53, 16.1 16.0 16.3.
- ``accuracy``: .74 .72 .72, 16.6 15.8 14.4.
- ``scma`` with alpha .5: .61 .75 .67, 11.9 9.3 9.5.
- ``uniform`` with .008 a token: .70 .73 .75, 8.9 9.0 9.0. With .013: .67 .75 .75, 9.0 9.1 9.0.

The shortest derivation has 9 tokens (`experiments.studies.segment_bounds`). A uniform penalty of .008 reaches it. So
the control of the third claim has fewer tokens than ``scma``, and has to be right with them. The calibration speaks
against the claim, which stands as it was planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import CALIBRATION, Claim, Finding, arms, minus
from experiments.configs.scma import accuracy, tiny, uniform
from experiments.studies.phase_runs import after_stage_0, stage
from jaxmarl_llm.recipes.scma import Config, make
from jaxmarl_llm.runs.compiled import make_evaluation
from jaxmarl_llm.training.drivers import RunData
from jaxmarl_llm.types import Params

GOLDEN = "tests/recipes/test_scma.py"
STATUS = "mechanism implemented"  # rewards of segmenter and scorer, the limit of weights and alpha are inferred
SEEDS = 5
BUDGET = "600 supervised steps; 40 RL steps of 16 questions, groups of 8, in each arm"
CLAIMS = {
    "length": Claim(
        "L",
        "the importance-weighted penalty makes the reasoner's texts at least 30 % shorter than GRPO on accuracy alone",
        "1 minus mean held-out length with the penalty / without",
        0.3,
        control="accuracy alone, from the same parameters",
        budget=BUDGET,
    ),
    "accuracy": Claim(
        "L",
        "the shorter texts are right about as often",
        "held-out accuracy, with the penalty minus without",
        -0.02,
        control="accuracy alone, from the same parameters",
        budget=BUDGET,
    ),
    "uniform": Claim(
        "X",
        "a uniform penalty whose texts are at least as short leaves at least 0.02 less accuracy",
        "held-out accuracy, importance-weighted minus uniform penalty",
        0.02,
        control="a uniform penalty of 0.008 a token, from the same parameters",
        budget=BUDGET,
    ),
}
ARMS = {"accuracy": accuracy(), "scma": tiny(), "uniform": uniform()}


def trained(configs: Mapping[str, Config], seeds: list[int]) -> tuple[dict[str, Params], RunData]:
    """Parameters of each arm and of stage 0 (``imitated``), and the data of the seeds.

    Args:
        configs: Configuration of each arm. They differ in the rewards.
        seeds: Lanes of one program.
    """
    begun, data = after_stage_0(make(next(iter(configs.values()))), seeds)
    out = {"imitated": begun.params}
    for name, own in configs.items():
        arm = make(own)
        out[name] = stage(arm, arm.phases[-1])(jnp.array(seeds), data, begun, jnp.arange(own.steps)).params
    return out, data


def measured(configs: Mapping[str, Config], seeds: list[int]) -> dict[str, dict[str, np.ndarray]]:
    """Figures of the reasoner alone on held-out questions: arm -> figure -> one value a seed.

    Args:
        configs: Configuration of each arm.
        seeds: Lanes of one program.
    """
    params, data = trained(configs, seeds)
    cfg = next(iter(configs.values()))
    alone = replace(cfg, env=replace(cfg.env, args={**cfg.env.args, "alone": True}))
    evaluate = jax.jit(jax.vmap(make_evaluation(alone)))
    seen = {name: evaluate(of_arm, jnp.array(seeds), data.held_out) for name, of_arm in params.items()}
    return {
        name: {figure: np.asarray(of[figure], np.float64) for figure in ("accuracy", "length", "fillers", "steps")}
        for name, of in seen.items()
    }


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    for cfg in ARMS.values():
        cfg.check("config")
    got = measured(ARMS, seeds)
    for name, figures in got.items():
        say(f"scma, {name}: " + "; ".join(f"{k} {np.round(v, 3).tolist()}" for k, v in figures.items()))
    of = lambda figure, *names: arms(figure, {name: got[name][figure] for name in names})
    shorter = 1 - got["scma"]["length"] / got["accuracy"]["length"]
    ahead = lambda control: minus(got["scma"]["accuracy"], got[control]["accuracy"])
    return [
        Finding("length", shorter.tolist(), of("length", *got) | of("fillers", *got) | of("steps", *got)),
        Finding("accuracy", ahead("accuracy"), of("accuracy", "imitated", "accuracy", "scma")),
        Finding("uniform", ahead("uniform"), of("accuracy", "scma", "uniform") | of("length", "scma", "uniform")),
    ]


def main() -> None:
    """Print figures of the calibration seeds, for several uniform penalties."""
    configs = {"accuracy": accuracy(), "scma": tiny()}
    for weight in (0.008, 0.013):
        paid = {"accuracy": 1.0, "length": -weight}
        configs[f"uniform {weight}"] = replace(uniform(), role_reward=uniform().role_reward | {"reasoner": paid})
    for name, figures in measured(configs, CALIBRATION).items():
        print(name, {figure: np.round(values, 3).tolist() for figure, values in figures.items()}, flush=True)


if __name__ == "__main__":
    main()
