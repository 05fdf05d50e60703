"""Environments of OpenEnv as host environments, through a client with ``reset`` and ``step``.

    from echo_env import EchoAction, EchoEnv

    from jaxmarl_llm.envs.adapters.openenv import openenv_task

    def client():
        return EchoEnv(base_url="http://localhost:8000")

    def make():
        return openenv_task(client, lambda text: EchoAction(message=text), max_turns=4)

The one role is ``solver``, and an episode is a seed. The server holds the state of an episode, and cannot be asked for
a copy. So a decision is sampled again by a new ``reset`` with the same seed and the same actions. An environment that
does not repeat itself is refused: the message shows both observations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxmarl_llm.envs.adapters.asynchronous import complete
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

ROLE = "solver"
HIDDEN = ("reward", "done", "metadata")  # fields of an observation that are not for the role


def openenv_task(
    make_client: Callable[[], Any],
    act: Callable[[str], Any],
    *,
    max_turns: int,
    show: Callable[[Any], str] | None = None,
    seeds: Sequence[int] = range(256),
    held_out: Sequence[int] = range(1_000_000, 1_000_064),
    seconds: float = 10.0,
    name: str = "openenv",
) -> HostTask:
    """An environment behind a client, and its seeds. The reward has the component ``reward``.

    Args:
        make_client: Returns a client, or an awaitable of one such as ``EchoEnv.from_docker_image(...)``. A
            module-level function where ``env.workers`` is above 0: each worker has a client, and so a session.
        act: Completion -> the action of the environment.
        max_turns: Turns after which an episode ends, if not before.
        show: Observation -> text; None: `show_observation`.
        seeds: Seeds of training episodes, for ``reset(seed=...)``.
        held_out: Seeds of evaluation episodes.
        seconds: Time limit of one reset or step, with the steps that are repeated. ``env.timeout`` has to be longer.
        name: How messages call the environment.

    Raises:
        ConfigError: The client has another interface, or two resets with one seed differ.
    """
    session = _Session(make_client, act, show or show_observation, name)
    play = _Play(name, session, max_turns, seconds)
    first = {"seed": int(seeds[0])}
    a, b = (play.reset(0, first).seen for _ in range(2))
    if a != b:
        raise ConfigError(_differ(name, a, b))
    training, tests = ([{"seed": int(seed)} for seed in side] for side in (seeds, held_out))
    return HostTask(play.environment, training, tests)


class _State(NamedTuple):
    """An episode so far: its seed, the completions, and what the last observation shows."""

    seed: int
    texts: tuple[str, ...]
    seen: str
    talk: Prompt = ()


class _Session:
    """The client of this process and the episode that its server is in; travels without them."""

    def __init__(self, make_client: Any, act: Any, show: Any, name: str) -> None:
        self.make_client, self.act, self.show, self.name = make_client, act, show, name
        self._client: Any = None
        self._at: tuple[int, tuple[str, ...]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_client": None, "_at": None}

    def forget(self, seconds: float) -> None:
        """After a failure: close the client as far as that works, and connect anew at the next call."""
        client, self._client, self._at = self._client, None, None
        if hasattr(client, "close"):
            with contextlib.suppress(Exception):  # the failure itself is what is reported
                complete(_awaited(client.close()), seconds, self.name)

    async def reset(self, seed: int) -> Any:
        """The result of a new episode."""
        if self._client is None:
            client = await _awaited(self.make_client())
            for member in ("reset", "step"):
                if not callable(getattr(client, member, None)):
                    raise ConfigError(f"{self.name}: has no {member!r}; expected a client of OpenEnv")
            self._client = client
        self._at = None
        result = await _awaited(self._client.reset(seed=seed))
        self._at = seed, ()
        return result

    async def step(self, state: _State, text: str) -> Any:
        """The result of a completion at ``state``, which is reached again if the server is elsewhere."""
        if self._at != (state.seed, state.texts):
            result = await self.reset(state.seed)
            for earlier in state.texts:
                result = await _awaited(self._client.step(self.act(earlier)))
            if (seen := self.show(result.observation)) != state.seen:
                raise ConfigError(_differ(self.name, state.seen, seen))
        self._at = None
        result = await _awaited(self._client.step(self.act(text)))
        self._at = state.seed, (*state.texts, text)
        return result


@dataclass(frozen=True)
class _Play:
    name: str
    session: _Session
    max_turns: int
    seconds: float

    def environment(self) -> HostEnv:
        functions = self.reset, self.observe, self.step
        return HostEnv(self.name, (ROLE,), self.max_turns, ("reward",), *functions, seconds=self.seconds)

    def reset(self, seed: int, task: Mapping[str, int]) -> _State:
        result = self._complete(self.session.reset(task["seed"]))
        return _State(task["seed"], (), self.session.show(result.observation))

    def observe(self, state: _State) -> dict[str, Prompt]:
        return {ROLE: (*state.talk, Message("user", state.seen))}

    def step(self, seed: int, state: _State, actions: Mapping[str, Action]) -> tuple[_State, Rewards, bool]:
        action = actions[ROLE]
        result = self._complete(self.session.step(state, action.text))
        talk = (*self.observe(state)[ROLE], action.message(ROLE))
        after = _State(state.seed, (*state.texts, action.text), self.session.show(result.observation), talk)
        paid = {} if result.reward is None else {ROLE: {"reward": float(result.reward)}}
        return after, paid, bool(result.done) or len(after.texts) >= self.max_turns

    def _complete(self, coroutine: Any) -> Any:
        try:
            return complete(coroutine, self.seconds, self.name)
        except Exception:  # of any kind: the session is then in an unknown state; the error goes on
            self.session.forget(self.seconds)
            raise


def show_observation(observation: Any) -> str:
    """The text of an observation: text as it is, else a line ``name: value`` for each field.

    The fields ``reward``, ``done`` and ``metadata`` of an ``observation`` are left out.
    """
    if isinstance(observation, str):
        return observation
    if hasattr(observation, "model_dump"):
        observation = observation.model_dump(mode="json")
    elif dataclasses.is_dataclass(observation) and not isinstance(observation, type):
        observation = dataclasses.asdict(observation)
    if not isinstance(observation, Mapping):
        raise ConfigError(f"observation: {type(observation).__name__} has no default form; give show=")
    fields = {key: value for key, value in observation.items() if key not in HIDDEN}
    text = lambda value: value if isinstance(value, str) else json.dumps(value, default=str)
    return "\n".join(f"{key}: {text(value)}" for key, value in fields.items())


def _differ(name: str, first: str, second: str) -> str:
    return (
        f"{name}: one seed and the same actions show {first[:80]!r} and then {second[:80]!r}; expected an environment "
        "that repeats itself, since every decision is sampled several times"
    )


async def _awaited(value: Any) -> Any:
    """``value``, or its result where it is awaitable."""
    return await value if inspect.isawaitable(value) else value
