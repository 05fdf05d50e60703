"""Dr. MAS on `chain` (a solver and a verifier, two attempts): gradient norms and success by agent against globally.

Both arms start from the same parameters and see the same tasks and keys; they differ in ``credit.group``. The statistic
of a run is the largest gradient norm (before clipping) over its median over all RL steps, of the role where that is
larger; its logarithm is compared, because the median of a role whose policy has become certain is near 0. The largest
norm of each arm is given beside it. 100 RL steps, calibrated on seeds 100 to 102 with 80 steps: lower by agent in 3 of
3 (26, 10784, 178 against 74, 21739, 80661).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, minus
from experiments.configs.dr_mas import task, tiny
from jaxmarl_llm.recipes.dr_mas import make
from jaxmarl_llm.runs.compiled import make_evaluation, make_program, task_data

GOLDEN = "tests/recipes/test_dr_mas.py"
STATUS = "reproduced"
SEEDS = 30  # ten seeds left the interval of the norms around delta: -0.045 ± 0.174
BUDGET = "800 supervised and 100 RL steps of 8 tasks, both arms"
CLAIMS = {
    "norms": Claim(
        "L",
        "normalising by agent lowers the spikes of the gradient norm: at least a tenth less than globally",
        "log of max/median gradient norm of the worse role, globally minus by agent",
        0.1,
        control="normalisation over all agents, from the same parameters",
        budget=BUDGET,
    ),
    "accuracy": Claim(
        "X",
        "normalising by agent brings more held-out accuracy than globally after equal steps",
        "held-out accuracy, by agent minus globally",
        0.02,
        control="normalisation over all agents, from the same parameters",
        budget=BUDGET,
    ),
}
ROLES = ("solver", "verifier")


def spikes(norms: np.ndarray) -> np.ndarray:
    """Largest over median of gradient norms [seeds, steps]."""
    return norms.max(1) / np.maximum(np.median(norms, axis=1), 1e-12)


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    which, worst, success = jnp.array(seeds), {}, {}
    largest: dict[str, np.ndarray] = {}
    for norm, cfg in {"agent": tiny(), "global": task()}.items():
        cfg.check("config")
        recipe = make(cfg)
        data = task_data(recipe, seeds)
        state, seen = jax.jit(jax.vmap(make_program(recipe).run))(which, data)
        held_out = jax.jit(jax.vmap(make_evaluation(cfg)))(state.params, which, data.held_out)
        norms = [np.asarray(seen[f"grad_norm/{role}"]) for role in ROLES]
        worst[norm] = np.max([spikes(n) for n in norms], axis=0)
        largest |= {f"{role}, {norm}": n.max(1) for role, n in zip(ROLES, norms, strict=True)}
        success[norm] = np.asarray(held_out["accuracy"])
        of = ", ".join(f"{role} {np.round(spikes(n), 1).tolist()}" for role, n in zip(ROLES, norms, strict=True))
        say(f"dr_mas, {norm}: held-out accuracy {np.round(success[norm], 3).tolist()}; max/median gradient norm {of}")
    figures = arms("max/median gradient norm", worst) | arms("largest gradient norm", largest)
    return [
        Finding("norms", minus(np.log(worst["global"]), np.log(worst["agent"])), figures),
        Finding("accuracy", minus(success["agent"], success["global"]), arms("held-out accuracy", success)),
    ]
