"""Exact solutions of Kuhn poker: values, best responses and exploitability of any policy, for the game of `games`.

A policy is its probability of a bet at the 12 information sets, ``bet`` [2 players, 3 cards (J Q K), 2 histories]. The
first player acts at the start and after pass-bet, the second after a pass and after a bet. The value of a deal and its
line of play comes from the game itself (`payoffs`). Of the rules only the order of the players is written here.

A player's information sets of different cards never meet in one game. So a best response is found card by card, among
the four pure choices at the card's two sets.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmarl_llm.envs.array_env import pack
from jaxmarl_llm.envs.games import array as games
from jaxmarl_llm.envs.prompt_grammar import prompt_text

HISTORIES = (("", "pb"), ("p", "b"))  # of each player's two information sets a card
LINES = ("pp", "pbp", "pbb", "bp", "bb")
VALUE = -1 / 18  # of the game to the first player at every equilibrium


def information_sets() -> tuple[Int[np.ndarray, "12 P"], Int[np.ndarray, "12"]]:
    """Prompts and lengths as the environment shows them, in the order of a policy's entries."""
    texts = [prompt_text("12"[p], card + h) for p in range(2) for card in games.CARDS for h in HISTORIES[p]]
    return pack([[*t.encode()] for t in texts], games.prompt_length(games.Config()))


@functools.cache
def payoffs() -> Float[np.ndarray, "3 3 5"]:
    """The first player's wins, by its card, the other's card and the line of play; NaN where both cards are equal."""
    (game,) = games.rules(games.Config())
    start = jax.vmap(game.start)(jax.random.split(jax.random.key(0), 128))
    play = jax.jit(jax.vmap(game.play, in_axes=(None, 0, None)))
    shown = lambda state: np.asarray(jax.vmap(game.show)(state)[:, 0])
    cards, table = [shown(start)], np.full((3, 3, len(LINES)), np.nan)
    action = {name: jnp.int32(i) for i, name in enumerate(game.letters)}
    for column, line in enumerate(LINES):
        state = start
        for at, move in enumerate(line):
            state, paid, over = play(jax.random.key(0), state, action[move])
            if at == 0 and len(cards) == 1:
                cards.append(shown(state))
            assert bool(np.all(over == (at + 1 == len(line)))), f"{line}: the game does not end where Kuhn poker does"
        one, two = (np.array([games.CARDS.index(chr(c)) for c in held]) for held in cards)
        table[one, two, column] = paid[:, 0]
    assert np.isnan(table).sum() == 3 * len(LINES), "not every deal came up"
    return table


def reaches(bet: Float[np.ndarray, "2 3 2"]) -> Float[np.ndarray, "3 3 5"]:
    """The probability of each line of play under the policy ``bet``, given the deal."""
    (start, again), (passed, facing) = (bet[0].T[:, :, None], bet[1].T[:, None, :])
    lines = (
        (1 - start) * (1 - passed),
        (1 - start) * passed * (1 - again),
        (1 - start) * passed * again,
        start * (1 - facing),
        start * facing,
    )
    return np.stack(np.broadcast_arrays(*lines), -1)


def by_deal(bet: Float[np.ndarray, "2 3 2"]) -> Float[np.ndarray, "3 3"]:
    """The first player's expected win at each deal under the policy ``bet``; 0 where there is no such deal."""
    return np.nan_to_num((reaches(bet) * payoffs()).sum(-1))


def value(bet: Float[np.ndarray, "2 3 2"]) -> float:
    """The first player's expected win under the policy ``bet``; the second's is its negative."""
    return float(by_deal(np.asarray(bet, float)).sum() / 6)


def best_responses(bet: Float[np.ndarray, "2 3 2"]) -> tuple[float, float]:
    """The expected wins of best responses: the first player's to ``bet[1]``, and the second player's to ``bet[0]``."""
    bet = np.asarray(bet, float)
    pure = np.array(list(itertools.product((0.0, 1.0), repeat=2)))
    won = []
    for player in range(2):
        sign, axis, options = (1, -1)[player], (1, 0)[player], []
        for choice in pure:
            tried = bet.copy()
            tried[player] = choice
            options.append(sign * by_deal(tried).sum(axis))
        won.append(float(np.max(options, axis=0).sum() / 6))
    return won[0], won[1]


def exploitability(bet: Float[np.ndarray, "2 3 2"]) -> float:
    """NashConv: the gain of both players together by best responses to ``bet``, in chips a game.

    It is 0 at an equilibrium alone. It is the sum over players, not its half: 11/12 = 0.9167 for players that bet and
    pass with equal probability.
    """
    return sum(best_responses(bet))


def equilibrium(alpha: float = 0.0) -> Float[np.ndarray, "2 3 2"]:
    """Kuhn's equilibria (1950): the first player bets a jack with ``alpha`` in [0, 1/3] and a king with 3 alpha."""
    if not 0 <= alpha <= 1 / 3:
        raise ValueError(f"alpha is in [0, 1/3], not {alpha}")
    first = [[alpha, 0.0], [0.0, alpha + 1 / 3], [3 * alpha, 1.0]]
    second = [[1 / 3, 0.0], [0.0, 1 / 3], [1.0, 1.0]]
    return np.array([first, second])
