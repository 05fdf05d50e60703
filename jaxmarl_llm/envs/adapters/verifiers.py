"""Environments of `verifiers` as host environments: `SingleTurnEnv` and `MultiTurnEnv` with a dataset and a rubric.

    import verifiers as vf

    from jaxmarl_llm.envs.adapters.verifiers import verifiers_task

    def make():
        return verifiers_task(functools.partial(vf.load_environment, "my-environment"), seconds=15.0)

The interface is that of verifiers 0.1.14 to 0.3. The one role is ``solver``. The reward has the component ``reward``,
which is the weighted sum of the rubric, and one component for each function of the rubric. A rubric of verifiers pays 0
where a function raises. Here the joint action is invalid, and the error is shown. States are snapshots of the
library's state: see `adapters.snapshots`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxmarl_llm.envs.adapters.asynchronous import complete
from jaxmarl_llm.envs.adapters.snapshots import freeze, thaw
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.envs.splits import fingerprint, split_contents
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

ROLE = "solver"
NEEDED = ("get_dataset", "rubric", "init_state", "get_prompt_messages", "add_model_response", "is_completed")
UNSAVED = ("client", "usage", "usage_tracker")  # of the library's client, which has no model here; not to be pickled
_RAISED: ContextVar[list[Exception]] = ContextVar("raised")


def verifiers_task(
    make_env: Callable[[], Any],
    *,
    max_turns: int | None = None,
    count: int = -1,
    seconds: float = 10.0,
    name: str = "verifiers",
) -> HostTask:
    """An environment of verifiers, and the rows of its datasets.

    Held-out tasks are the rows of its evaluation dataset. Without one a quarter of the rows is held out, by a hash of
    their content.

    Args:
        make_env: Builds the environment; a module-level function where ``env.workers`` is above 0. Each worker builds
            one.
        max_turns: Completions of an episode at most; None: as the environment says.
        count: Rows of each dataset, at most; -1: all.
        seconds: Time limit of one call of the environment, with its rubric. ``env.timeout`` has to be longer.
        name: How messages call the environment.

    Raises:
        ConfigError: The environment has another interface, has tools, compares a group of completions, has no end, or
            its state cannot be pickled.
    """
    source = _Source(make_env, max_turns, name)
    env = source.env
    if env.max_turns < 1:
        raise ConfigError(
            f"{name}: max_turns: expected at least 1, got {env.max_turns}; give verifiers_task(max_turns=)"
        )
    try:
        train = [dict(row) for row in env.get_dataset(n=count)]
    except ValueError as error:  # the library's own word for an environment without training rows
        raise ConfigError(f"{name}: {error}; expected a dataset of training rows") from None
    test = None if env.build_eval_dataset() is None else [dict(row) for row in env.get_eval_dataset(n=count)]
    tasks, held_out = _split(name, train, test)
    functions = [getattr(f, "__name__", repr(f)) for rubric in _leaves(env.rubric) for f in rubric.funcs]
    play = _Play(name, source, int(env.max_turns), ("reward", *dict.fromkeys(functions)), seconds)
    play.reset(0, tasks[0])
    return HostTask(play.environment, tasks, held_out)


class _Source:
    """The environment of this process, built when it is first needed; travels without it."""

    def __init__(self, make_env: Callable[[], Any], max_turns: int | None, name: str) -> None:
        self.make_env, self.max_turns, self.name = make_env, max_turns, name
        self._env: Any = None
        self.client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_env": None, "client": None}

    @property
    def env(self) -> Any:
        """The environment, checked, with a rubric whose errors are kept.

        The library sets signals while it builds one, which only the main thread may do.
        """
        if self._env is None:
            with _signals_kept():  # the library exits at SIGTERM, where a run saves
                env = self.make_env()
            for member in NEEDED:
                if not hasattr(env, member):
                    expected = "expected a SingleTurnEnv or MultiTurnEnv of verifiers before 0.4"
                    raise ConfigError(f"{self.name}: has no {member!r}; {expected}")
            if getattr(env, "tool_defs", None):
                raise ConfigError(f"{self.name}: has tools; expected an environment whose completions are text")
            if env.rubric.has_group_rewards:
                raise ConfigError(f"{self.name}: its rubric compares a group; expected functions of one completion")
            if self.max_turns is not None:
                env.max_turns = self.max_turns
            for rubric in _leaves(env.rubric):
                rubric.funcs = [_watched(function) for function in rubric.funcs]
            self._env, self.client = env, _silent_client()
        return self._env


class _State(NamedTuple):
    """An episode so far: the library's state and messages, what the role reads, and its completions."""

    rollout: bytes
    seen: Prompt
    said: tuple[Action, ...] = ()


@dataclass(frozen=True)
class _Play:
    name: str
    source: _Source
    max_turns: int
    components: tuple[str, ...]
    seconds: float

    def environment(self) -> HostEnv:
        functions = self.reset, self.observe, self.step
        return HostEnv(self.name, (ROLE,), self.max_turns, self.components, *functions, seconds=self.seconds)

    def reset(self, seed: int, task: Mapping[str, Any]) -> _State:
        return complete(self._begin(self.source.env, task), self.seconds, self.name)

    def observe(self, state: _State) -> dict[str, Prompt]:
        return {ROLE: state.seen}

    def step(self, seed: int, state: _State, actions: Mapping[str, Action]) -> tuple[_State, Rewards, bool]:
        return complete(self._continue(self.source.env, state, actions[ROLE]), self.seconds, self.name)

    async def _begin(self, env: Any, task: Mapping[str, Any]) -> _State:
        rollout = await env.init_state(dict(task), self.source.client, "jaxmarl_llm")
        rollout = await env.setup_state(rollout) or rollout
        messages = await _next_messages(env, rollout)
        if messages is None:
            raise ConfigError(f"{self.name}: ends before the first completion")
        return self._state(rollout, messages, ())

    async def _continue(self, env: Any, state: _State, action: Action) -> tuple[_State, Rewards, bool]:
        said = (*state.said, action)
        rollout, messages = thaw(state.rollout)
        rollout["client"] = self.source.client
        await env.add_model_response(rollout, messages, _response(action))
        messages = await _next_messages(env, rollout)
        if messages is not None:
            return self._state(rollout, messages, said), {}, False
        await env.cleanup(rollout)
        _RAISED.set([])
        await env.rubric.score_rollout(rollout)
        await env.rubric.cleanup(rollout)
        if raised := _RAISED.get():
            raise raised[0]
        paid = {**rollout["metrics"], "reward": rollout["reward"]}
        return state._replace(said=said), {ROLE: {n: paid[n] for n in self.components if n in paid}}, True

    def _state(self, rollout: Any, messages: Sequence[Any], said: tuple[Action, ...]) -> _State:
        rollout |= {key: None for key in UNSAVED if key in rollout}
        return _State(freeze((rollout, messages), self.name), _prompt(self.name, messages, said), said)


async def _next_messages(env: Any, rollout: Any) -> Sequence[Any] | None:
    """What the role reads next; None at the end. The order of calls is that of ``MultiTurnEnv.rollout``."""
    while not await env.is_completed(rollout):
        messages = await env.get_prompt_messages(rollout)
        if rollout.get("final_env_response") is None:
            return messages
    return None


def _prompt(name: str, messages: Sequence[Any], said: Sequence[Action]) -> Prompt:
    """Messages of the library as a prompt; the role's own completions keep their token ids."""
    shown, own = [], list(said)
    for message in messages:
        speaker, text = _field(message, "role"), _text(name, _field(message, "content"))
        if speaker == "assistant" and own and own[0].text == text:
            shown.append(own.pop(0).message(ROLE))
        else:
            shown.append(Message(speaker, text))
    return tuple(shown)


def _field(message: Any, key: str) -> Any:
    return message.get(key) if isinstance(message, Mapping) else getattr(message, key, None)


def _text(name: str, content: Any) -> str:
    """The text of a message's content, which may come in parts."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [(_field(part, "type"), _field(part, "text")) for part in content]
    if other := next((kind for kind, _ in parts if kind != "text"), None):
        raise ConfigError(f"{name}: a message has a part of type {other!r}; expected text")
    return "".join(text for _, text in parts)


def _split(name: str, train: list[Any], test: list[Any] | None) -> tuple[list[Any], list[Any]]:
    """Training and held-out rows, with no content on both sides; ``example_id`` is not content."""
    content = lambda row: repr(fingerprint({key: value for key, value in row.items() if key != "example_id"}))
    contents = [content(row) for row in train]
    if not train:
        raise ConfigError(f"{name}: the dataset has no rows; expected at least one")
    if test is None:
        mask = split_contents(contents)
        if mask is None:
            raise ConfigError(f"{name}: all rows are alike, so none can be held out; give an eval_dataset")
        return [r for r, out in zip(train, mask) if not out], [r for r, out in zip(train, mask) if out]
    both = sum(content(row) in set(contents) for row in test)
    if both:
        raise ConfigError(f"{name}: eval_dataset: {both} of {len(test)} rows are also training rows; expected none")
    return train, test


def _leaves(rubric: Any) -> Iterator[Any]:
    """The rubrics of a group of rubrics, or the rubric itself."""
    for inner in getattr(rubric, "rubrics", ()):
        yield from _leaves(inner)
    if not hasattr(rubric, "rubrics"):
        yield rubric


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function whose errors are kept, because the rubric pays 0 for them."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> float:
        try:
            value = function(*args, **kwargs)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:
            _RAISED.get().append(error)
            raise

    return call


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Handlers of SIGINT and SIGTERM are afterwards as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _library(module: str) -> Any:
    try:
        return importlib.import_module(f"verifiers.{module}")
    except ImportError as error:
        raise ConfigError(f"verifiers: cannot be imported ({error}); pip install 'verifiers<0.4'") from None


def _silent_client() -> Any:
    """A client of the library's type, without a model: completions come from the team."""

    async def no_model(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the environment calls the client's model itself; expected completions of the team alone")

    base = _library("clients").Client
    silent = type("SilentClient", (base,), dict.fromkeys((*base.__abstractmethods__, "get_response"), no_model))
    return object.__new__(silent)


def _response(action: Action) -> Any:
    """A completion as the library's response of a model."""
    types = _library("types")
    reason = "length" if action.truncated else "stop"
    message = types.ResponseMessage(content=action.text, finish_reason=reason, is_truncated=action.truncated)
    return types.Response(id="", created=0, model="jaxmarl_llm", message=message)
