"""ReMA on `chain` (a meta-thinker and a reasoner, two turns each): what alternating training brings, and its ratio.

Arms, from the same parameters on the same tasks and keys: ``untrained`` (after stage 0), ``alternating`` with the
paper's turn-level ratio, the same with token-level ratios, and the meta-thinker frozen while the reasoner learns at
every step. Two epochs a batch, 80 RL steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, minus
from experiments.configs.rema import tiny
from jaxmarl_llm.recipes.rema import ROLES, Config, make
from jaxmarl_llm.runs.compiled import make_evaluation, make_program, task_data

GOLDEN = "tests/recipes/test_rema.py"
STATUS = "reproduced"
SEEDS = 5
BUDGET = "800 supervised and 80 RL steps of 8 tasks, two epochs, all arms; the untrained arm: the former alone"
CLAIMS = {
    "learns": Claim(
        "L",
        "alternating training raises held-out accuracy over the untrained team by at least 0.1",
        "held-out accuracy, alternating minus untrained",
        0.1,
        control="the team after stage 0",
        budget=BUDGET,
    ),
    "ratio": Claim(
        "X",
        "turn-level ratios bring more held-out accuracy than token-level ones after equal steps",
        "held-out accuracy, turn-level minus token-level",
        0.02,
        control="token-level ratios, from the same parameters",
        budget=BUDGET,
    ),
    "both": Claim(
        "X",
        "training both roles in alternation brings more than training the reasoner alone beside a frozen meta-thinker",
        "held-out accuracy, alternating minus frozen meta-thinker",
        0.05,
        control="the meta-thinker frozen, from the same parameters",
        budget=BUDGET,
    ),
}


def configs() -> dict[str, Config]:
    base = tiny()
    return {
        "untrained": replace(base, steps=0),
        "alternating": base,
        "token ratio": replace(base, loss=replace(base.loss, ratio_level="token")),
        "frozen meta": replace(base, learner="reasoner"),
    }


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    which, accuracy, clipped = jnp.array(seeds), {}, {}
    evaluate = jax.jit(jax.vmap(make_evaluation(tiny())))
    for name, cfg in configs().items():
        cfg.check("config")
        recipe = make(cfg)
        data = task_data(recipe, seeds)
        state, seen = jax.jit(jax.vmap(make_program(recipe).run))(which, data)
        accuracy[name] = np.asarray(evaluate(state.params, which, data.held_out)["accuracy"])
        say(f"rema, {name}: held-out accuracy {np.round(accuracy[name], 3).tolist()}")
        if not cfg.steps:
            continue
        shares = np.stack([seen[f"clip_fraction/{role}"] for role in ROLES])
        clipped[name] = shares.max(0).std(1)  # of the role that learns; the other's is 0
        mean, std = np.round(shares.max(0).mean(1), 4).tolist(), np.round(clipped[name], 4).tolist()
        say(f"rema, {name}: share of clipped tokens {mean}, its std over steps {std}")
    spread = arms("clip fraction's std over steps", {n: clipped[n] for n in ("alternating", "token ratio")})

    def against(claim: str, control: str, more: dict[str, list[float]]) -> Finding:
        shown = arms("held-out accuracy", {n: accuracy[n] for n in (control, "alternating")})
        return Finding(claim, minus(accuracy["alternating"], accuracy[control]), shown | more)

    return [
        against("learns", "untrained", {}),
        against("ratio", "token ratio", spread),
        against("both", "frozen meta", {}),
    ]
