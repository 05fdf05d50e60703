"""Games of two players in turn, from the libraries pgx and jaxmarl: positions as short texts, actions as letters.

    game          prompt              actions                                  payoff of (first, second)
    kuhn_poker    1K>   2Jp>  1Kpb>   p pass, b bet                            chips won, at the end
    tic_tac_toe   1x.o......>         a to i, the cells row by row             1 and -1 for a win, 0 for a draw
    hanabi        2A1B2|?1A?|01213>   a, b.. discard; play; tell colour; rank  1 to both for each card played well

A prompt starts with the role of the player to move (1 first, 2 second) and shows what that player may know. In Kuhn
poker: the card and the moves so far. In tic-tac-toe: the board, own stones as x. In mini-Hanabi: the partner's hand
(colour and rank), the hints about one's own, and the height of every firework, information tokens, lives and cards
left. The first player of a game is the one that moves first. The rules are the libraries' own.

An action is one letter, and with ``response`` above 1 the stop token behind it. Components, by player:

    payoff    as above
    format    1 for a turn whose completion is an action's name, legal or not
    illegal   1 for an action that is not legal there, or none at all; the game ends, nobody is paid

so that ``reward={"payoff": 1, "format": 0.05, "illegal": -10}`` is MARSHAL's. With several ``games`` in a batch each
has roles of its own (``kuhn_poker-first``). Whatever is kept by role is then kept by game and player.

Needs the extra: pip install jaxmarl_llm[games].

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples of a role, and ``held_out`` the side of the split.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    EOS,
    PAD,
    UNREADABLE,
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    letter_samples,
)
from jaxmarl_llm.envs.prompt_grammar import prompt_row
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.types import PyTree

SEATS = ("first", "second")
COMPONENTS = ("payoff", "format", "illegal")
GAMES = ("kuhn_poker", "tic_tac_toe", "hanabi")
MOST_COPIES, MOST_TOKENS = 10, 100  # hanabi: cards of one kind; information tokens and lives
CARDS, LETTERS = "JQK", "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Config:
    """The settings of the games."""

    seed: int = 0  # tasks differ in nothing but the game: cards are dealt by the rollout's key
    tasks: int = 64  # training tasks
    games: tuple[str, ...] = ("kuhn_poker",)  # kuhn_poker, tic_tac_toe or hanabi; one or several
    response: int = 1  # R; above 1 an action is ended by the stop token
    colours: int = 2  # hanabi: colours, and ranks of each
    hand: int = 2  # hanabi: cards of a player
    copies: tuple[int, ...] = (2, 1)  # hanabi: cards of each rank in a colour
    information: int = 2  # hanabi: tokens
    lives: int = 2  # hanabi
    turns: int = 12  # hanabi: the game ends here if not before

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        for name in self.games:
            one_of(f"{path}.games", name, GAMES)
        if not self.games or len(set(self.games)) < len(self.games):
            checks.refuse(path, "games", "one or several different games", self.games)
        checks.in_range(path, self, 1, checks.MOST_TEXT, "response")
        checks.in_range(path, self, 2, 5, "colours")
        checks.in_range(path, self, 1, 5, "hand")
        if len(self.copies) != self.colours or not all(1 <= number <= MOST_COPIES for number in self.copies):
            expected = f"for each of {self.colours} ranks (colours) a number from 1 to {MOST_COPIES}"
            checks.refuse(path, "copies", expected, self.copies)
        if 2 * self.hand > self.colours * sum(self.copies):
            checks.refuse(path, "hand", "cards that the deck can deal to both players", self.hand)
        checks.in_range(path, self, 1, MOST_TOKENS, "information", "lives")
        checks.in_range(path, self, 1, checks.MOST_ROUNDS, "turns")


class Game(NamedTuple):
    """The interface of every game to its library.

    letters: letters[i] names the library's action i
    size: the most tokens of a position
    turns: the most turns
    start: start(key) -> inner state
    show: show(inner) -> tokens [size]: what the player to move knows, PAD behind the end
    legal: legal(inner) -> [actions] bool
    play: play(key, inner, action []) -> (inner, payoff [2] of (first, second), over [])
    """

    letters: str
    size: int
    turns: int
    start: Callable[[jax.Array], PyTree]
    show: Callable[[PyTree], jax.Array]
    legal: Callable[[PyTree], jax.Array]
    play: Callable[[jax.Array, PyTree, jax.Array], tuple[PyTree, jax.Array, jax.Array]]


def library(module: str) -> Any:
    """The ``module`` of an optional library. Raises ConfigError that names the extra when it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{checks.ARGS}.games: {module} cannot be imported ({error}); pip install jaxmarl_llm[games]"
        ) from error


def pgx_game(name: str, letters: str, size: int, turns: int, see: Callable[..., jax.Array]) -> Game:
    """The game ``name`` of pgx. Its players are numbered at random; here 0 is the one that moves first.

    letters, size, turns: as in `Game`
    see: see(observation of the player to move, letters played so far [turns]) -> tokens [size]
    """
    env = library("pgx").make(name)
    names = encoded(letters)

    def start(key: jax.Array) -> PyTree:
        state = env.init(key)
        return {"state": state, "first": state.current_player, "moves": jnp.full(turns, PAD, jnp.int32)}

    def show(inner: PyTree) -> jax.Array:
        state = inner["state"]
        return see(env.observe(state), inner["moves"])

    def play(key: jax.Array, inner: PyTree, action: jax.Array) -> tuple[PyTree, jax.Array, jax.Array]:
        state = env.step(inner["state"], action)
        played = (inner["moves"] != PAD).sum()
        moves = inner["moves"].at[played].set(names[action], mode="drop")
        payoff = jnp.stack([state.rewards[inner["first"]], state.rewards[1 - inner["first"]]])
        return {**inner, "state": state, "moves": moves}, payoff, state.terminated | state.truncated

    return Game(letters, size, turns, start, show, lambda inner: inner["state"].legal_action_mask, play)


def kuhn_poker(config: Config) -> Game:
    """Kuhn poker of pgx."""

    def see(observation: jax.Array, moves: jax.Array) -> jax.Array:
        card = encoded(CARDS)[jnp.argmax(observation[:3])]
        return jnp.concatenate([card[None], moves[:2]])

    return pgx_game("kuhn_poker", "bp", 3, 3, see)


def tic_tac_toe(config: Config) -> Game:
    """Tic-tac-toe of pgx."""

    def see(observation: jax.Array, moves: jax.Array) -> jax.Array:
        own, other = observation[..., 0].reshape(-1), observation[..., 1].reshape(-1)
        return jnp.where(own, ord("x"), jnp.where(other, ord("o"), ord(".")))

    return pgx_game("tic_tac_toe", LETTERS[:9], 9, 9, see)


def hanabi(config: Config) -> Game:
    """A small Hanabi of jaxmarl. Without lives the score is lost, by its own rule."""
    c, h = config.colours, config.hand
    env = library("jaxmarl.environments.hanabi.hanabi").HanabiEnv(
        num_agents=2,
        num_colors=c,
        num_ranks=c,
        hand_size=h,
        max_info_tokens=config.information,
        max_life_tokens=config.lives,
        num_cards_of_rank=np.array(config.copies),
    )
    letters = LETTERS[: 2 * h + 2 * c]

    def mover(state: Any) -> jax.Array:
        return jnp.argmax(state.cur_player_idx)

    def marks(known: jax.Array, base: str) -> jax.Array:
        """The letter of each row's one-hot entry, ``?`` for a row of zeros."""
        return jnp.where(known.any(-1), ord(base) + jnp.argmax(known, -1), UNREADABLE)

    def show(state: Any) -> jax.Array:
        me = mover(state)
        cards = state.player_hands[1 - me]  # [hand, colour, rank]
        theirs = jnp.stack([marks(cards.any(2), "A"), marks(cards.any(1), "1")], 1).reshape(-1)
        told = jnp.stack([marks(state.colors_revealed[me], "A"), marks(state.ranks_revealed[me], "1")], 1).reshape(-1)
        left = state.deck.any((1, 2)).sum()
        digits = jnp.concatenate(
            [state.fireworks.sum(1), jnp.stack([state.info_tokens.sum(), state.life_tokens.sum(), left])]
        )
        bar = encoded("|")
        row = jnp.concatenate([theirs, bar, told, bar, ord("0") + jnp.minimum(digits, 9)])
        return row.astype(jnp.int32)

    def legal(state: Any) -> jax.Array:
        moves = env.get_legal_moves(state)
        return jnp.stack([moves[a] for a in env.agents])[mover(state)][:-1] > 0

    def play(key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        _, after, rewards, dones, _ = env.step_env(key, state, dict.fromkeys(env.agents, action))
        after = jax.tree.map(lambda new, old: jnp.asarray(new, jnp.asarray(old).dtype), after, state)
        return after, jnp.stack([rewards[a] for a in env.agents]).astype(jnp.float32), dones["__all__"]

    start = lambda key: jax.tree.map(jnp.asarray, env.reset(key)[1])
    return Game(letters, 4 * h + 2 + c + 3, config.turns, start, show, legal, play)


@functools.cache
def rules(config: Config) -> tuple[Game, ...]:
    """The games of a configuration, in its order."""
    makers = {"kuhn_poker": kuhn_poker, "tic_tac_toe": tic_tac_toe, "hanabi": hanabi}
    return tuple(makers[name](config) for name in config.games)


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 2 + max(game.size for game in rules(config))


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion, sep."""
    return prompt_length(config) + config.response + 1


def roles_of(config: Config) -> tuple[str, ...]:
    """The roles: first and second, and with several games those of each game."""
    if len(config.games) == 1:
        return SEATS
    return tuple(f"{game}-{seat}" for game in config.games for seat in SEATS)


@struct.dataclass
class State:
    """An episode so far."""

    inner: tuple  # the state of every game; one of them is played
    game: Int[Array, ""]
    turn: Int[Array, ""]
    over: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Keys deal the cards at reset; nothing is random after that."""
    games, roles = rules(config), roles_of(config)
    most = max(game.turns for game in games)
    return ArrayEnv(
        name="games",
        roles=roles,
        seats=1,
        max_turns=most,
        components=COMPONENTS,
        actors=tuple(tuple(range(t % 2, len(roles), 2)) for t in range(most)),
        reset=functools.partial(reset, games),
        observe=functools.partial(observe, games, prompt_length(config)),
        step=functools.partial(step, games, config.response),
    )


def reset(games: Sequence[Game], key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode of one of ``games``, by the ``task``; ``key`` deals the cards."""
    inner = tuple(game.start(jax.random.fold_in(key, i)) for i, game in enumerate(games))
    return State(inner, jnp.asarray(task["game"], jnp.int32), jnp.int32(0), jnp.bool_(False))


def observe(games: Sequence[Game], size: int, state: State) -> Observation:
    """The prompt of the player to move, padded to P = ``size`` tokens."""
    seat = state.turn % 2
    rows = [game.show(inner) for game, inner in zip(games, state.inner, strict=True)]
    shown = jnp.stack([jnp.pad(row, (0, size - 2 - len(row)), constant_values=PAD) for row in rows])[state.game]
    tokens, length = prompt_row(ord("1") + seat, [(shown, jnp.sum(shown != PAD))], (), size)
    role = (2 * state.game + seat).astype(jnp.int32)
    return Observation(role[None], tokens[None], length[None].astype(jnp.int32), ~state.over[None])


def step(
    games: Sequence[Game], response: int, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after an action, its rewards, and whether the episode has finished. ``response`` is R."""
    ended, size = completion_end(tokens[0], length[0])
    well_formed = jnp.bool_(True) if response == 1 else ended & (size == 1) & (length[0] == 2)
    roles = 2 * len(games)
    mover = jnp.arange(roles) == 2 * state.game + state.turn % 2
    inner, payoff, over, named, allowed = [], jnp.zeros(roles), [], [], []
    for i, (game, before) in enumerate(zip(games, state.inner, strict=True)):
        match = encoded(game.letters) == tokens[0, 0]
        action = jnp.argmax(match)
        name = match.any() & well_formed & (length[0] > 0)
        fine = name & game.legal(before)[action]
        # An illegal action is not given to the library, whose own treatment of it does not matter.
        after, paid, done = game.play(key, before, jnp.where(fine, action, jnp.argmax(game.legal(before))))
        mine = (state.game == i) & ~state.over & fine
        inner.append(jax.tree.map(functools.partial(jnp.where, mine), after, before))
        payoff = payoff.at[2 * i : 2 * i + 2].set(jnp.where(mine, paid, 0.0))
        over.append(done | ~fine)
        named.append(name)
        allowed.append(fine)
    pick = lambda x: jnp.stack(x)[state.game]
    most = jnp.array([game.turns for game in games])[state.game]
    turn = jnp.minimum(state.turn + 1, most)
    ends = state.over | pick(over) | (turn >= most)
    live = mover & ~state.over
    rewards = {"payoff": payoff, "format": live & pick(named), "illegal": live & ~pick(allowed)}
    new = State(tuple(inner), state.game, jnp.where(state.over, state.turn, turn), ends)
    return new, {c: r.astype(jnp.float32) for c, r in rewards.items()}, ends


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``), the games one after the other: game [n]. Of any ``seed`` and side."""
    return {"game": np.arange(config.tasks if n is None else n, dtype=np.int32) % len(config.games)}


def same_tasks(config: Config) -> bool:
    """Whether held-out tasks are those of training: the game is the task, and the rollout's key draws the rest."""
    return True


def legal_actions(config: Config) -> Callable[[State], jax.Array]:
    """A function state -> [26] bool of the legal letters, for players that are not models."""
    games = rules(config)

    def legal(state: State) -> jax.Array:
        rows = []
        for game, inner in zip(games, state.inner, strict=True):
            index = jnp.array([LETTERS.index(x) for x in game.letters])
            rows.append(jnp.zeros(26, bool).at[index].set(game.legal(inner)))
        return jnp.stack(rows)[state.game]

    return legal


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Random players: positions of games played by legal actions drawn evenly, and such an action. Rules, no skill.

    At most ``n`` samples of each role, as in `array_env.samples`. ``context`` is not used.
    """
    env, legal = make(config), legal_actions(config)
    count = max(n, 64) * len(config.games)
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(seed), count), make_tasks(config, n=count))
    names = encoded(LETTERS)

    def turn(state: State, key: jax.Array):
        seen = env.observe(state)
        letter = names[jax.random.categorical(key, jnp.where(legal(state), 0.0, -jnp.inf))]
        row = jnp.full(config.response, EOS).at[0].set(letter).astype(jnp.int32)
        after, _, _ = env.step(key, state, row[None], jnp.array([min(2, config.response)]))
        return after, (seen.role[0], seen.tokens[0], seen.length[0], seen.active[0], letter)

    play, rows = jax.jit(jax.vmap(turn)), []
    for t in range(env.max_turns):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed + 1), t), count)
        state, seen = play(state, keys)
        rows.append(jax.device_get(seen))
    role, tokens, length, active, letter = (np.concatenate(x) for x in zip(*rows, strict=True))
    out, rng = {}, np.random.default_rng([seed, 3])
    for index, name in enumerate(env.roles):
        mine = rng.permutation(np.flatnonzero(active & (role == index)))[:n]
        out[name] = letter_samples(tokens[mine], length[mine], letter[mine], config.response)
    return out
