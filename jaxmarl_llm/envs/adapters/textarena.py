"""Games of TextArena as host environments.

    from jaxmarl_llm.envs.adapters.textarena import textarena_task

    def make():
        return textarena_task("TicTacToe-v0", players=2, max_turns=9)

Players act in turn, one at a time. An episode is a seed. States are snapshots: see `adapters.snapshots`. A player is
paid once, at the end of the game. ``reward`` is as the game says, and ``illegal`` is 1 for an invalid move that lost
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jaxmarl_llm.envs.adapters.snapshots import freeze, thaw
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

COMPONENTS = ("reward", "illegal")


def textarena_task(
    game: str,
    *,
    players: int,
    max_turns: int,
    make_env: Callable[[], Any] | None = None,
    seeds: Sequence[int] = range(256),
    held_out: Sequence[int] = range(1_000_000, 1_000_064),
) -> HostTask:
    """A game and its seeds. The roles are ``player_0``, ``player_1`` and so on.

    Args:
        game: Name of the game, as ``textarena.make`` takes it.
        players: Number of players.
        max_turns: Moves of all players, after which an episode ends without a reward, if not before.
        make_env: Builds the game; None: ``textarena.make(game)``.
        seeds: Seeds of training episodes.
        held_out: Seeds of evaluation episodes.

    Raises:
        ConfigError: TextArena is not installed, has no such game, or the game cannot be pickled.
    """
    play = _Play(game, players, max_turns, make_env or partial(_make, game))
    play.reset(0, {"seed": int(seeds[0])})
    training, tests = ([{"seed": int(seed)} for seed in side] for side in (seeds, held_out))
    return HostTask(play.environment, training, tests)


def _make(game: str) -> Any:
    try:
        import textarena
    except ImportError as error:
        raise ConfigError(f"textarena: cannot be imported ({error}); pip install textarena") from None
    try:
        return textarena.make(game)
    except Exception as error:  # whatever the registry of the library raises
        raise ConfigError(f"textarena: no game {game!r}: {' '.join(str(error).split())[:200]}") from None


def _layers(env: Any) -> tuple[list[tuple[type, dict[str, Any]]], Any]:
    """The wrappers of a game from the outside in, and the game itself: TextArena's wrappers cannot be unpickled."""
    layers = []
    while "env" in vars(env):
        layers.append((type(env), {name: value for name, value in vars(env).items() if name != "env"}))
        env = vars(env)["env"]
    return layers, env


def _wrapped(layers: Sequence[tuple[type, dict[str, Any]]], env: Any) -> Any:
    """The game in its wrappers again."""
    for cls, fields in reversed(layers):
        outer = object.__new__(cls)
        vars(outer).update(fields, env=env)
        env = outer
    return env


class _State(NamedTuple):
    """An episode so far: the snapshot, the player to move, what that player sees, and the moves made."""

    env: bytes
    player: int
    seen: str
    turn: int = 0


@dataclass(frozen=True)
class _Play:
    game: str
    players: int
    max_turns: int
    make_env: Callable[[], Any]

    def environment(self) -> HostEnv:
        roles = tuple(f"player_{i}" for i in range(self.players))
        return HostEnv(self.game, roles, self.max_turns, COMPONENTS, self.reset, self.observe, self.step)

    def reset(self, seed: int, task: Mapping[str, int]) -> _State:
        env = self.make_env()
        env.reset(num_players=self.players, seed=task["seed"])
        return self._state(env, 0)

    def observe(self, state: _State) -> dict[str, Prompt]:
        return {f"player_{state.player}": (Message("user", state.seen),)}

    def step(self, seed: int, state: _State, actions: Mapping[str, Action]) -> tuple[_State, Rewards, bool]:
        (action,) = actions.values()
        env = _wrapped(*thaw(state.env))
        env.get_observation()  # TextArena hands out observations once, and expects this call before a step
        done, _ = env.step(action=action.text)
        if not done:
            after = self._state(env, state.turn + 1)
            return after, {}, after.turn >= self.max_turns
        rewards, info = env.close()
        lost = lambda player: float(bool((info.get(player) or {}).get("invalid_move", False)))
        paid = {f"player_{p}": {"reward": float(r), "illegal": lost(p)} for p, r in (rewards or {}).items()}
        return state._replace(turn=state.turn + 1), paid, True

    def _state(self, env: Any, turn: int) -> _State:
        snapshot = freeze(_layers(env), f"textarena {self.game}")  # before the observation, which is handed out once
        player, seen = env.get_observation()
        return _State(snapshot, int(player), seen if isinstance(seen, str) else str(seen), turn)
