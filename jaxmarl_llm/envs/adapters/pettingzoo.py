"""PettingZoo parallel environments, with text or token observations, as host environments.

    from jaxmarl_llm.envs.adapters.pettingzoo import pettingzoo_task

    def make():
        return pettingzoo_task(my_game.parallel_env, max_turns=20)

Any object with PettingZoo's parallel interface will do. An episode is a seed. States are snapshots: see
`adapters.snapshots`. A step costs one pickling and one loading of the environment.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm.envs.adapters.snapshots import freeze, thaw
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

COMPONENTS = ("reward", "illegal")
Show = Callable[[str, Any], "str | Prompt"]
Read = Callable[[str, Action, Any], Any]


def pettingzoo_task(
    make_env: Callable[[], Any],
    *,
    max_turns: int,
    show: Show | None = None,
    read: Read | None = None,
    seeds: Sequence[int] = range(256),
    held_out: Sequence[int] = range(1_000_000, 1_000_064),
    name: str = "pettingzoo",
) -> HostTask:
    """A parallel environment and its seeds.

    The reward has two components: ``reward``, of the environment, and ``illegal``, 1 where a completion was no action.
    Then the first legal action is played.

    Args:
        make_env: Builds the environment; a module-level function where ``env.workers`` is above 0.
        max_turns: Turns after which an episode ends, if not before.
        show: (agent, observation) -> the prompt: text, or a tuple of `Message`; None: `show_observation`.
        read: (agent, completion, action space) -> the action, or None where there is none; None: `read_action`.
        seeds: Seeds of training episodes.
        held_out: Seeds of evaluation episodes.
        name: How messages call the environment.

    Raises:
        ConfigError: The environment has another interface, or cannot be pickled.
    """
    env = make_env()
    for member in ("possible_agents", "reset", "step", "action_space"):
        if not hasattr(env, member):
            raise ConfigError(f"{name}: has no {member!r}; expected a PettingZoo parallel environment")
    agents = tuple(env.possible_agents)
    play = _Play(name, make_env, agents, max_turns, show or show_observation, read or read_action)
    freeze(env, name)
    training, tests = ([{"seed": int(seed)} for seed in side] for side in (seeds, held_out))
    return HostTask(play.environment, training, tests)


class _State(NamedTuple):
    """An episode so far: the snapshot, what each agent that acts now sees, and the turns played."""

    env: bytes
    seen: Mapping[str, Any]
    turn: int = 0


@dataclass(frozen=True)
class _Play:
    name: str
    make_env: Callable[[], Any]
    agents: tuple[str, ...]
    max_turns: int
    show: Show
    read: Read

    def environment(self) -> HostEnv:
        return HostEnv(self.name, self.agents, self.max_turns, COMPONENTS, self.reset, self.observe, self.step)

    def reset(self, seed: int, task: Mapping[str, int]) -> _State:
        env = self.make_env()
        seen, _ = env.reset(seed=task["seed"])
        return self._state(env, seen, 0)

    def observe(self, state: _State) -> dict[str, Prompt]:
        shown = {agent: self.show(agent, observation) for agent, observation in state.seen.items()}
        return {agent: (Message("user", p),) if isinstance(p, str) else p for agent, p in shown.items()}

    def step(self, seed: int, state: _State, actions: Mapping[str, Action]) -> tuple[_State, Rewards, bool]:
        env = thaw(state.env)
        chosen, illegal = {}, {}
        for agent, completion in actions.items():
            space = env.action_space(agent)
            move = self.read(agent, completion, space)
            illegal[agent] = float(move is None or not _allowed(move, space, state.seen[agent]))
            chosen[agent] = _first_legal(space, state.seen[agent]) if illegal[agent] else move
        seen, rewards, *_ = env.step(chosen)
        after = self._state(env, seen, state.turn + 1)
        paid = {agent: {"reward": float(r), "illegal": illegal.get(agent, 0.0)} for agent, r in rewards.items()}
        return after, paid, not after.seen or after.turn >= self.max_turns

    def _state(self, env: Any, seen: Mapping[str, Any], turn: int) -> _State:
        return _State(freeze(env, self.name), {agent: seen[agent] for agent in env.agents}, turn)


def show_observation(agent: str, observation: Any) -> str:
    """The text of what ``agent`` observes: text as it is, numbers with spaces between.

    Of a mapping ``observation`` the value of its key ``observation`` is shown.
    """
    if isinstance(observation, Mapping) and "observation" in observation:
        observation = observation["observation"]
    return observation if isinstance(observation, str) else " ".join(map(str, np.asarray(observation).ravel().tolist()))


def show_tokens(agent: str, observation: Any) -> Prompt:
    """The token ids that ``agent`` observes as a prompt without a template; ``observation`` is an array of ids."""
    return (Message("raw", "", tuple(int(token) for token in np.asarray(observation).ravel())),)


def read_action(agent: str, completion: Action, space: Any) -> Any:
    """The action of ``agent`` in a completion: the last integer in a Discrete space, the text in a Text space."""
    if hasattr(space, "n"):
        found = re.findall(r"-?\d+", completion.text)
        return int(found[-1]) if found else None
    if hasattr(space, "charset") or hasattr(space, "character_set"):
        return completion.text
    raise ConfigError(f"action space of {agent!r}: {type(space).__name__} has no default form; give read=")


def _mask(observation: Any) -> np.ndarray | None:
    has = isinstance(observation, Mapping) and "action_mask" in observation
    return np.asarray(observation["action_mask"]) if has else None


def _allowed(move: Any, space: Any, observation: Any) -> bool:
    mask = _mask(observation)
    if not space.contains(move):
        return False
    return mask is None or bool(mask[int(move) - int(getattr(space, "start", 0))])


def _first_legal(space: Any, observation: Any) -> Any:
    """The first action that the space and the mask allow; the same for every sample."""
    mask = _mask(observation)
    if hasattr(space, "n"):
        return int(getattr(space, "start", 0)) + (int(np.argmax(mask)) if mask is not None and mask.any() else 0)
    return "" if hasattr(space, "charset") or hasattr(space, "character_set") else np.zeros(space.shape, space.dtype)
