"""MAGRPO: two writers who share one return (`duet`), and chicken with a joint return against individual ones.

`duet` with the paper's flat plan and a team of two random models: the return of held-out topics after stage 0 and after
RL. Chicken, played once by two models: mutual yielding pays most together and is no equilibrium of the game with
individual rewards; the sum of both payoffs is 10 there and at most 8 where one dares.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, minus
from experiments.configs.magrpo import paper, tree
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.recipes.magrpo import Config, make
from jaxmarl_llm.runs.compiled import make_evaluation, make_program, task_data

GOLDEN = "tests/recipes/test_magrpo.py"
STATUS = "reproduced"
SEEDS = 5
LATE = 10  # last steps whose payoffs are averaged
DUET = "150 supervised and 300 RL steps of 16 topics; the untrained arm: the former alone"
CHICKEN = "60 supervised and 100 RL steps of 8 games, both arms"
CLAIMS = {
    "learns": Claim(
        "L",
        "RL raises the joint return on held-out topics over stage 0 by at least 0.5 of 4",
        "held-out return, trained minus untrained",
        0.5,
        control="the team after stage 0",
        budget=DUET,
    ),
    "joint": Claim(
        "X",
        "with the joint return instead of individual ones, players of chicken earn at least 1 more together",
        "sum of payoffs in the last steps, joint minus individual rewards",
        1.0,
        control="individual rewards, from the same parameters",
        budget=CHICKEN,
    ),
}


def chicken(rewards: str) -> Config:
    env = EnvConfig("matrix", {"game": "chicken", "rewards": rewards})
    return dataclasses.replace(tree(), tree_mode="flat", joint="aligned", group=8, env=env, credit=paper().credit)


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    which, returns, together = jnp.array(seeds), {}, {}
    for name, cfg in {"untrained": dataclasses.replace(paper(), steps=0), "trained": paper()}.items():
        cfg.check("config")
        recipe = make(cfg)
        data = task_data(recipe, seeds)
        state, _ = jax.jit(jax.vmap(make_program(recipe).run))(which, data)
        got = jax.jit(jax.vmap(make_evaluation(cfg)))(state.params, which, data.held_out)
        returns[name] = np.asarray(sum(w * got[component] for component, w in cfg.reward.items()))
        say(f"magrpo, duet, {name}: return {np.round(returns[name], 3)}")
    for name in ("joint", "individual"):
        cfg = chicken(name)
        cfg.check("config")
        recipe = make(cfg)
        _, figures = jax.jit(jax.vmap(make_program(recipe).run))(which, task_data(recipe, seeds))
        together[name] = np.asarray(figures["social"][:, -LATE:].mean(1))
        say(f"magrpo, chicken, {name} rewards: sum of payoffs {np.round(together[name], 2)}")
    return [
        Finding("learns", minus(returns["trained"], returns["untrained"]), arms("held-out return", returns)),
        Finding("joint", minus(together["joint"], together["individual"]), arms("sum of payoffs", together)),
    ]
