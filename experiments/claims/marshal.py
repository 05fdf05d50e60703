"""MARSHAL on Kuhn poker: what self-play comes to, measured exactly, against a fixed opponent and a shared baseline.

A random model of 13 thousand parameters is taught legal play (bet and pass with even chances: exploitability 0.92) and
then plays itself. Exploitability (NashConv, `envs/kuhn.py`) is computed from its probabilities at all 12 information
sets, renormalised over the two legal actions; what it leaves to illegal ones is a figure of its own. Calibrated on
seeds 100 to 107: 0.132 to 0.206.

    python -c "from experiments.claims import marshal; print(marshal.run([0, 1, 2], print))"
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.claims import Claim, Finding, minus

GOLDEN = "tests/recipes/test_marshal.py"
STATUS = "reproduced"
SEEDS = 10
BUDGET = "150 supervised and 1000 RL steps of 64 games, both arms"
CLAIMS = {
    "learns": Claim(
        "L",
        "self-play takes Kuhn poker to an exploitability of at most 0.25 (0.92 for even chances)",
        "0.25 minus the exploitability",
        0.0,
        control="the fixed exploitability 0.25",
        budget=BUDGET,
    ),
    "self-play": Claim(
        "X",
        "trained on a fixed random opponent instead of itself, the first player loses more to a best response",
        "win of a best response, against a player of a fixed opponent minus of self-play",
        0.1,
        control="a fixed random second player, from the same parameters",
        budget=BUDGET,
    ),
    "baseline": Claim(
        "X",
        "one baseline for both players instead of one a role leaves a higher exploitability",
        "exploitability, shared baseline minus by role",
        0.02,
        control="one baseline for both players, from the same parameters",
        budget=BUDGET,
    ),
}


def get_config(**changes: Any) -> Any:
    from experiments.configs.marshal import tiny

    return dataclasses.replace(tiny(), **changes)


def bets(team: Any, params: Any) -> tuple[Any, Any]:
    """Probability of a bet at each information set [2, 3, 2], and the mean probability of no legal action []."""
    import jax
    import jax.numpy as jnp

    from jaxmarl_llm.envs.games import kuhn

    tokens, length = kuhn.information_sets()
    rows = []
    for player in range(2):
        model = team.model_of(player)
        mine = slice(6 * player, 6 * player + 6)
        variables = model.variables(params)
        hidden, _ = model.policy.prefill(variables, jnp.asarray(tokens[mine]), jnp.asarray(length[mine]))
        rows.append(jax.nn.softmax(model.policy.unembed(variables, hidden))[:, jnp.array([ord("b"), ord("p")])])
    both = jnp.concatenate(rows).reshape(2, 3, 2, 2)
    return both[..., 0] / both.sum(-1), 1 - both.sum(-1).mean()


def play(cfg: Any, seeds: list[int], learns: Any = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Policies [seeds, 2, 3, 2] before and after self-play, and illegal shares [seeds] after; one program."""
    import jax
    import jax.numpy as jnp

    from jaxmarl_llm.agents.team import make_team
    from jaxmarl_llm.envs.games.array import SEATS
    from jaxmarl_llm.recipes import marshal
    from jaxmarl_llm.runs import phases
    from jaxmarl_llm.runs.compiled import make_program, task_data

    cfg.check("config")
    team = make_team(cfg.team, SEATS)
    algorithm = dataclasses.replace(marshal.algorithm(cfg), trainable_roles=learns)
    recipe = phases.make_recipe(cfg, marshal.make_plan(cfg), algorithm)
    program = make_program(recipe)

    def one(seed, data):
        params = program.run(seed, data)[0].params
        after, illegal = bets(team, params)
        return bets(team, {**params, "agents": params["reference"]})[0], after, illegal

    before, after, illegal = jax.jit(jax.vmap(one))(jnp.array(seeds), task_data(recipe, seeds))
    return np.asarray(before, float), np.asarray(after, float), np.asarray(illegal, float)


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    from jaxmarl_llm.credit.assign import Credit
    from jaxmarl_llm.envs.games import kuhn

    score = lambda policies: [float(kuhn.exploitability(p)) for p in policies]
    second = lambda policies: [float(kuhn.best_responses(p)[1]) for p in policies]
    shown = lambda values: " ".join(f"{v:.3f}" for v in values)
    taught, ours, illegal = play(get_config(), seeds)
    say(f"exploitability {shown(score(taught))} -> {shown(score(ours))}; illegal {shown(illegal)}")
    apart = dataclasses.replace(get_config().team, parameter_sharing="separate")
    _, fixed, _ = play(get_config(team=apart), seeds, lambda step: np.array([True, False]))
    say(f"a best response wins {shown(second(fixed))} from a first player trained on a fixed opponent")
    _, shared, _ = play(get_config(credit=Credit(group="batch", normalise="none")), seeds)
    _, code, _ = play(get_config(form="code"), seeds)
    say(f"exploitability with one baseline for both {shown(score(shared))}, in the code's form {shown(score(code))}")
    figures = {
        "exploitability before": score(taught),
        "exploitability after": score(ours),
        "code's form": score(code),
        "illegal": illegal.tolist(),
    }
    won = {"self-play": second(ours), "fixed opponent": second(fixed)}
    return [
        Finding("learns", [0.25 - x for x in score(ours)], figures),
        Finding("self-play", minus(won["fixed opponent"], won["self-play"]), won),
        Finding("baseline", minus(score(shared), score(ours)), {"by role": score(ours), "shared": score(shared)}),
    ]
