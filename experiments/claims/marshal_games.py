"""MARSHAL on tic-tac-toe and mini-Hanabi: the same self-play where opponents differ and where there is a partner.

Games against a player who takes any legal action, evenly, as first and as second player; an illegal action is a loss.
Hanabi is played by the model with itself. 1024 games each, sampled as in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.claims import Claim, Finding, minus

GOLDEN = "tests/envs/test_games.py"
STATUS = "mechanism implemented"
GAMES = 1024
SEEDS = 5
BUDGET = "1500 supervised and 1500 RL steps of 128 games; mini-Hanabi: 500 RL steps"
CLAIMS = {
    "tic_tac_toe": Claim(
        "L",
        "tic-tac-toe: at least 0.9 of games against a random player are not lost",
        "share of games not lost, mean of both seats, minus 0.9",
        0.0,
        control="the fixed share 0.9",
        budget=BUDGET,
    ),
    "hanabi": Claim(
        "L",
        "mini-Hanabi: self-play raises the score by at least 0.2 fireworks over stage 0",
        "score after minus before",
        0.2,
        control="the model after stage 0",
        budget=BUDGET,
    ),
}


def play(cfg: Any, params: Any, models: tuple[bool, bool], key: Any) -> tuple[Any, Any]:
    """Payoffs [GAMES, 2] and illegal actions [GAMES] of one game each; a seat is the model's or a random player's."""
    import jax
    import jax.numpy as jnp

    from jaxmarl_llm.agents.team import make_team
    from jaxmarl_llm.envs.games import array as games

    config = cfg.env.build()
    env, legal = games.make(config), games.legal_actions(config)
    model = make_team(cfg.team, env.roles).models[0]
    variables, letters = model.variables(params), jnp.array([*games.LETTERS.encode()], jnp.int32)
    turn_of = jnp.array(models)
    dealt, played = jax.random.split(key)
    state = jax.vmap(env.reset)(jax.random.split(dealt, GAMES), {"game": jnp.zeros(GAMES, jnp.int32)})

    def turn(carry: tuple, t: Any) -> tuple[tuple, None]:
        state, won, illegal = carry
        seen = jax.vmap(env.observe)(state)
        hidden, _ = model.policy.prefill(variables, seen.tokens[:, 0], seen.length[:, 0])
        says, draws = jax.random.split(jax.random.fold_in(played, t))
        own = jax.random.categorical(says, model.policy.unembed(variables, hidden))
        any_legal = letters[jax.random.categorical(draws, jnp.where(jax.vmap(legal)(state), 0.0, -jnp.inf))]
        move = jnp.where(turn_of[t % 2], own, any_legal)[:, None, None]
        step = jax.vmap(env.step, in_axes=(None, 0, 0, 0))  # nothing is random after the deal
        state, paid, _ = step(played, state, move, jnp.ones((GAMES, 1), jnp.int32))
        return (state, won + paid["payoff"], illegal + paid["illegal"].sum(-1)), None

    start = state, jnp.zeros((GAMES, 2)), jnp.zeros(GAMES)
    (_, won, illegal), _ = jax.lax.scan(turn, start, jnp.arange(env.max_turns))
    return won, illegal


def train(cfg: Any, seeds: list[int], seats: tuple[tuple[bool, bool], ...]) -> list[dict[str, np.ndarray]]:
    """Payoffs [seeds, GAMES, 2] and illegal actions [seeds, GAMES] of each of ``seats``, before and after self-play."""
    import jax
    import jax.numpy as jnp

    from jaxmarl_llm.recipes import marshal
    from jaxmarl_llm.runs.compiled import make_program, task_data

    cfg.check("config")
    recipe = marshal.make(cfg)
    program = make_program(recipe)

    def one(seed: Any, data: Any) -> list:
        params = program.run(seed, data)[0].params
        out = []
        for own in ({**params, "agents": params["reference"]}, params):
            out.append([play(cfg, own, models, jax.random.fold_in(jax.random.key(seed), 7)) for models in seats])
        return out

    both = jax.device_get(jax.jit(jax.vmap(one))(jnp.array(seeds), task_data(recipe, seeds)))
    return [{"won": np.stack([w for w, _ in s], 1), "illegal": np.stack([i for _, i in s], 1)} for s in both]


def not_lost(seen: dict[str, np.ndarray]) -> np.ndarray:
    """Share of games [seeds, 2] that the model did not lose, as first and as second player."""
    own = np.stack([seen["won"][:, 0, :, 0], seen["won"][:, 1, :, 1]], 1)
    return ((own >= 0) & (seen["illegal"] == 0)).mean(-1)


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    from experiments.configs.marshal import hanabi, tic_tac_toe

    before, after = (not_lost(seen) for seen in train(tic_tac_toe(), seeds, ((True, False), (False, True))))
    say(f"tic-tac-toe, not lost to a random player, as first and second: {before.round(3)} -> {after.round(3)}")
    score = [seen["won"][:, 0, :, 0].mean(-1) for seen in train(hanabi(), seeds, ((True, True),))]
    say(f"mini-Hanabi score: {score[0].round(3)} -> {score[1].round(3)}")
    shown = {
        "before": before.mean(1).tolist(),
        "after": after.mean(1).tolist(),
        "after, first player": after[:, 0].tolist(),
        "after, second player": after[:, 1].tolist(),
    }
    return [
        Finding("tic_tac_toe", (after.mean(1) - 0.9).tolist(), shown),
        Finding("hanabi", minus(score[1], score[0]), {"before": score[0].tolist(), "after": score[1].tolist()}),
    ]
