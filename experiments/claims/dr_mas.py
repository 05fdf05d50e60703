"""Dr. MAS on `chain` (a solver and a verifier, two attempts): gradient norms and success by agent against globally.

Both arms start from the same parameters and see the same tasks and keys; they differ in ``credit.group``. The statistic
of a run is the largest gradient norm (before clipping) over its median over all RL steps, of the role where that is
larger. The median of a role whose policy has become certain is near 0, so figures can be large; the largest norm of
each arm is given beside it. 100 RL steps, calibrated on seeds 100 to 102 with 80 steps: lower by agent in 3 of 3 (26,
10784, 178 against 74, 21739, 80661).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Finding
from experiments.configs.dr_mas import task, tiny
from jaxmarl_llm.compiled import make_evaluation, make_program
from jaxmarl_llm.plans import flat

GOLDEN = "tests/test_dr_mas.py"
STATUS = "reproduced"
SHARE = 0.8  # of the seeds
ROLES = ("solver", "verifier")


def spikes(norms: np.ndarray) -> np.ndarray:
    """Largest over median of gradient norms [seeds, steps]."""
    return norms.max(1) / np.maximum(np.median(norms, axis=1), 1e-12)


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    which, worst, largest, success = jnp.array(seeds), {}, {}, {}
    for norm, cfg in {"agent": tiny(), "global": task()}.items():
        cfg.check("config")
        params, seen = jax.jit(jax.vmap(make_program(cfg, flat(cfg.group)).run))(which)
        held_out = jax.jit(jax.vmap(make_evaluation(cfg)))(params, which)
        norms = [np.asarray(seen[f"grad_norm/{role}"]) for role in ROLES]
        worst[norm] = np.max([spikes(n) for n in norms], axis=0)
        largest[norm] = {role: n.max(1) for role, n in zip(ROLES, norms, strict=True)}
        success[norm] = np.asarray(held_out["accuracy"])
        of = ", ".join(f"{role} {np.round(spikes(n), 1).tolist()}" for role, n in zip(ROLES, norms, strict=True))
        say(f"dr_mas, {norm}: held-out accuracy {np.round(success[norm], 3).tolist()}; max/median gradient norm {of}")
    lower = float(np.mean(worst["agent"] < worst["global"]))
    figures = {f"max/median gradient norm, {norm}": worst[norm].tolist() for norm in worst}
    for norm in worst:
        figures |= {f"largest gradient norm, {role}, {norm}": x.tolist() for role, x in largest[norm].items()}
    better = float(np.median(success["agent"] - success["global"]))
    return [
        Finding(
            "L",
            f"max/median gradient norm of the worse role is lower by agent than globally in >= {SHARE:.0%} of seeds",
            figures,
            lower >= SHARE,
        ),
        Finding(
            "X",
            "held-out accuracy after equal steps: the median over seeds of agent minus global is above 0",
            {f"held-out accuracy, {norm}": success[norm].tolist() for norm in worst},
            better > 0,
        ),
    ]
