"""JoyAgents-R1 on `dispatch` (a master and four specialists): what RL brings on unseen queries, and what memory brings.

The configuration of the demo (`joyagents_r1.py:tiny`), with and without memory. Figures are of two parts of the
held-out tasks: ``unseen`` queries, and lookups. The 26 lookups ask for a secret table, so every one is also a
training task. Selection is no part of these claims: K = 5 of 3 groups a task selects all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, minus
from experiments.configs.joyagents_r1 import tiny
from jaxmarl_llm.envs.dispatch.array import LOOKUP
from jaxmarl_llm.recipes.joyagents_r1 import make
from jaxmarl_llm.runs.compiled import make_evaluation, make_program, task_data

GOLDEN = "tests/agents/test_memory.py"
STATUS = "mechanism implemented"
SEEDS = 5
BUDGET = "300 supervised and 250 RL steps of 32 tasks; the untrained arm: the former alone"
CLAIMS = {
    "learns": Claim(
        "L",
        "RL raises the success on unseen queries over stage 0 by at least 0.1",
        "held-out success on unseen queries, trained minus untrained",
        0.1,
        control="the team after stage 0",
        budget=BUDGET,
    ),
    "memory, unseen": Claim(
        "X",
        "memory costs no success on unseen queries",
        "held-out success on unseen queries, with memory minus without",
        -0.02,
        control="no memory in training and evaluation, from the same parameters",
        budget=BUDGET,
    ),
    "memory, lookups": Claim(
        "X",
        "memory brings at least 0.1 of success on lookups, which only trial or memory can answer",
        "success on lookups, with memory minus without",
        0.1,
        control="no memory in training and evaluation, from the same parameters",
        budget=BUDGET,
    ),
}


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    which = jnp.array(seeds)
    unseen: dict[str, np.ndarray] = {}
    lookups: dict[str, np.ndarray] = {}
    for name, cfg in {
        "untrained": replace(tiny(), steps=0),
        "trained": tiny(),
        "without memory": replace(tiny(), use_memory=False),
    }.items():
        cfg.check("config")
        recipe = make(cfg)
        data = task_data(recipe, seeds)
        state, _ = jax.jit(jax.vmap(make_program(recipe).run))(which, data)
        evaluate = jax.jit(jax.vmap(make_evaluation(cfg, memory=cfg.memory if cfg.use_memory else None)))
        seen = data.held_out["kind"] == LOOKUP
        for figures, part in ((unseen, ~seen), (lookups, seen)):
            got = evaluate(state.params, which, data.held_out, state.memory, part)
            figures[name] = np.asarray(got["accuracy"])
        say(f"joyagents_r1, {name}: unseen {np.round(unseen[name], 3)}, lookups {np.round(lookups[name], 3)}")
    shown, known = arms("success on unseen queries", unseen), arms("success on lookups", lookups)
    return [
        Finding("learns", minus(unseen["trained"], unseen["untrained"]), shown),
        Finding("memory, unseen", minus(unseen["trained"], unseen["without memory"]), shown),
        Finding("memory, lookups", minus(lookups["trained"], lookups["without memory"]), known),
    ]
