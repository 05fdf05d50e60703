"""Games of a team trained by MARSHAL, with itself or with a player who takes any legal action, evenly.

Games are sampled as in training. An illegal action is a loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

GAMES = 1024  # of each seed and each pair of players
STATES = Path("runs/board_games")  # of training runs


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


def train(
    cfg: Any, seeds: list[int], seats: tuple[tuple[bool, bool], ...], folder: Path = STATES
) -> list[dict[str, np.ndarray]]:
    """Payoffs [seeds, GAMES, 2] and illegal actions [seeds, GAMES] of each of ``seats``, before and after self-play.

    Training takes more than an hour. A second call goes on from the states in ``folder`` (`played_in_parts`).
    """
    import jax
    import jax.numpy as jnp

    from experiments.studies.phase_runs import played_in_parts
    from jaxmarl_llm.recipes import marshal
    from jaxmarl_llm.runs.compiled import task_data

    cfg.check("config")
    recipe = marshal.make(cfg)

    @jax.jit
    @jax.vmap
    def played(seed: Any, params: Any) -> list:
        return [play(cfg, params, models, jax.random.fold_in(jax.random.key(seed), 7)) for models in seats]

    out = []
    for state in played_in_parts(recipe, seeds, task_data(recipe, seeds), folder):
        seen = jax.device_get(played(jnp.array(seeds), state.params))
        out.append({"won": np.stack([w for w, _ in seen], 1), "illegal": np.stack([i for _, i in seen], 1)})
    return out


def not_lost(seen: dict[str, np.ndarray]) -> np.ndarray:
    """Share of games [seeds, 2] that the model did not lose, as first and as second player."""
    own = np.stack([seen["won"][:, 0, :, 0], seen["won"][:, 1, :, 1]], 1)
    return ((own >= 0) & (seen["illegal"] == 0)).mean(-1)
