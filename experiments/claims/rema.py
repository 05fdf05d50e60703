"""ReMA on `chain` (a meta-thinker and a reasoner, two turns each): what alternating training brings, and its ratio.

Arms, from the same parameters on the same tasks and keys: ``untrained`` (after stage 0), ``alternating`` with the
paper's turn-level ratio, the same with token-level ratios, and the meta-thinker frozen while the reasoner learns at
every step. Two epochs a batch, 80 RL steps. The threshold was set before anything ran; seeds 0 to 4 were the first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Finding
from experiments.configs.rema import tiny
from jaxmarl_llm.compiled import make_evaluation, make_program
from jaxmarl_llm.plans import flat
from jaxmarl_llm.recipes.rema import ROLES, Config, learns

GOLDEN = "tests/test_rema.py"
STATUS = "mechanism implemented"  # the cap of a turn's mean log-ratio is inferred
GAIN = 0.1  # of held-out accuracy over the untrained team


def arms() -> dict[str, Config]:
    base = tiny()
    return {
        "untrained": replace(base, steps=0),
        "alternating": base,
        "token ratio": replace(base, loss=replace(base.loss, level="token")),
        "frozen meta": replace(base, learner="reasoner"),
    }


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    which, accuracy, clipped = jnp.array(seeds), {}, {}
    evaluate = jax.jit(jax.vmap(make_evaluation(tiny())))
    for name, cfg in arms().items():
        cfg.check("config")
        params, seen = jax.jit(jax.vmap(make_program(cfg, flat(cfg.group), learns(cfg)).run))(which)
        accuracy[name] = np.asarray(evaluate(params, which)["accuracy"])
        shares = np.stack([seen[f"clip_fraction/{role}"] for role in ROLES])
        clipped[name] = shares.max(0).std(1)  # of the role that learns; the other's is 0
        say(
            f"rema, {name}: held-out accuracy {np.round(accuracy[name], 3).tolist()}; clip fraction "
            f"{np.round(shares.max(0).mean(1), 4).tolist()} +- {np.round(clipped[name], 4).tolist()}"
        )
    gain = float(np.median(accuracy["alternating"] - accuracy["untrained"]))
    ahead = float(np.median(accuracy["alternating"] - accuracy["token ratio"]))
    both = float(np.median(accuracy["alternating"] - accuracy["frozen meta"]))
    of = lambda *names: {f"held-out accuracy, {name}": accuracy[name].tolist() for name in names}
    spread = {f"clip fraction's std over steps, {n}": clipped[n].tolist() for n in ("alternating", "token ratio")}
    return [
        Finding(
            "L",
            f"alternating training raises held-out accuracy over the untrained team by >= {GAIN} (median over seeds)",
            of("untrained", "alternating"),
            gain >= GAIN,
        ),
        Finding(
            "X",
            "held-out accuracy after equal steps: the median of turn-level minus token-level ratios is above 0",
            of("alternating", "token ratio") | spread,
            ahead > 0,
        ),
        Finding(
            "X",
            "held-out accuracy after equal steps: the median of alternating minus a frozen meta-thinker is above 0",
            of("alternating", "frozen meta"),
            both > 0,
        ),
    ]
