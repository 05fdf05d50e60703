"""What an environment has to provide, and the errors for one that does not.

An environment reaches a run in one of three ways, and each ends in an `ArrayTask` or a `HostTask`:

- an object: ``make_recipe(cfg, env=ArrayTask(...))``,
- a function of a user's own, named in a configuration: ``env.name = "package.module:function"``; it gets ``env.args``
  as keyword arguments and returns an `ArrayTask` or a `HostTask`,
- a module, named ``env.name = "package.module"`` or by the name of one of ours: see `ArrayModule` and `HostModule`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.envs import trials
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.envs.chat import quotes, with_memory
from jaxmarl_llm.envs.splits import shared
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Prompt
from jaxmarl_llm.types import PyTree

Samples = Mapping[str, Mapping[str, np.ndarray]]  # role -> tokens [n P], length [n], completion [n R], its length [n]


def plain_strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """Memory entry of a host environment that does not write its own: the completion itself.

    Args:
        role: The role that wrote the completion; not read.
        prompt: The prompt it answered; not read.
        action: The completion.
        rewards: Rewards of the role by component; not read.

    Returns:
        The text of ``action``.
    """
    return action.text


@dataclass(frozen=True, eq=False)
class ArrayTask:
    """An array environment and its tasks.

    Attributes:
        env: The environment, in JAX.
        tasks: Training tasks: a pytree of arrays whose leading axis counts tasks.
        held_out: Evaluation tasks, alike. No training task may be among them.
        same_tasks: All tasks are one game, and held-out tasks are those of training.
        parts: Name -> which held-out tasks [n] bool are also evaluated apart. Tasks of a part named ``seen`` may be
            training tasks.
        demonstrations: (seed, n, context) -> at most n supervised samples for each role, with up to ``context`` memory
            entries in the prompt. None: there are none, and ``sft.steps`` has to be 0.
        entry_length: Tokens of one memory entry.
    """

    env: ArrayEnv
    tasks: PyTree
    held_out: PyTree
    demonstrations: Callable[[int, int, int], Samples] | None = None
    entry_length: int = 64
    same_tasks: bool = False
    parts: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class HostTask:
    """A Python environment over text, and its tasks.

    Attributes:
        make: Builds the environment; called in every worker process, so it has to be picklable unless
            ``env.workers`` is 0.
        tasks: Training tasks, each anything that ``HostEnv.reset`` takes.
        held_out: Evaluation tasks. No training task may be among them.
        same_tasks: All tasks are one game, and held-out tasks are those of training.
        demonstrations: tasks -> (role, prompt, completion) triples; None: there are none.
        with_memory: (prompt, memory entries) -> prompt with the entries in it.
        strategy: (role, prompt, action, rewards by component) -> text of a memory entry.
        episode_metrics: [(task, {role: text})] of every joint action -> {name: value} for the log.
        ask: text of a person -> a task without an answer, which ``reset`` takes. ``step`` pays nothing for such a task,
            or a number that nobody shows. None: the environment takes no free text (`jaxmarl-llm chat`).
        hears: (reader, its prompt, speaker, text) -> whether the prompt tells the reader what the speaker wrote.
    """

    make: Callable[[], HostEnv]
    tasks: Sequence[Any]
    held_out: Sequence[Any]
    demonstrations: Callable[[Sequence[Any]], Iterable[tuple[str, Prompt, str]]] | None = None
    with_memory: Callable[[Prompt, Sequence[str]], Prompt] = with_memory
    strategy: Callable[[str, Prompt, Action, Mapping[str, float]], str] = plain_strategy
    episode_metrics: Callable[[Sequence[tuple[Any, Mapping[str, str]]]], Mapping[str, float]] | None = None
    same_tasks: bool = False
    ask: Callable[[str], Any] | None = None
    hears: Callable[[str, Prompt, str, str], bool] = quotes


Environment = ArrayTask | HostTask


def roles_of(task: Environment) -> tuple[str, ...]:
    """Names of the roles of an environment. ``task``: the environment; that of a `HostTask` is built for this."""
    return task.env.roles if isinstance(task, ArrayTask) else task.make().roles


def need_roles(key: str, name: str, roles: Sequence[str], needed: Sequence[str]) -> None:
    """Raise ConfigError where an environment lacks a role that a recipe needs.

    Args:
        key: Of the environment in the configuration, for the message.
        name: Of the environment.
        roles: That the environment has.
        needed: Roles that the recipe needs.
    """
    for role in needed:
        if role not in roles:
            raise ConfigError(f"{key}: no role {role!r} in environment {name!r}, whose roles are {', '.join(roles)}")


class ArrayModule(Protocol):
    """A module of an array environment.

    ``Config`` is a frozen dataclass with a field ``seed``; ``env.args`` are its fields. Optional members:
    ``demonstrations(config, seed, n, *, context)``, ``entry_length(config)``, ``same_tasks(config)`` and
    ``parts(config, held_out)``, see `ArrayTask`.
    """

    Config: type

    def make(self, config: Any, /) -> ArrayEnv: ...

    def make_tasks(
        self, config: Any, seed: int | None = None, n: int | None = None, /, *, held_out: bool = False
    ) -> PyTree:
        """``n`` tasks drawn by ``seed``; without them those of ``config``. No held-out task is a training task."""


class HostModule(Protocol):
    """A module of a host environment.

    ``Config`` is a frozen dataclass with fields ``split`` and ``count``: held-out tasks are those of split ``test``.
    Optional members: ``demonstrations(config, tasks)``, ``ask(config, text)``, ``hears``, ``with_memory``,
    ``strategy``, ``episode_metrics`` and ``same_tasks(config)``, see `HostTask`. ``stand_in(args)`` returns arguments
    that need no files, for plans.
    """

    Config: type

    def make(self, config: Any, /) -> HostEnv: ...

    def tasks(self, config: Any, /) -> Sequence[Any]: ...


def _name(module: Any) -> str:
    """How messages call the environment of ``module``."""
    return f"environment {getattr(module, '__name__', repr(module))}"


def made_by(module: Any, config: Any) -> ArrayEnv | HostEnv:
    """Make the environment of a module, without its tasks.

    Args:
        module: An `ArrayModule` or a `HostModule`.
        config: Its ``Config``, checked.

    Raises:
        ConfigError: The module has no ``make``, or ``make`` returns something else.
    """
    what = _name(module)
    need(module, "make", what, "make(config) -> ArrayEnv or HostEnv")
    made = trials.called(what, "make", lambda: module.make(config))
    if not isinstance(made, (ArrayEnv, HostEnv)):
        raise ConfigError(f"{what}: make(config) returned {type(made).__name__}, not an ArrayEnv or HostEnv")
    return made


def of_module(module: Any, config: Any, eval_tasks: int) -> Environment:
    """The environment of a module.

    Args:
        module: An `ArrayModule` or a `HostModule`.
        config: Its ``Config``, checked.
        eval_tasks: Held-out tasks, at most.

    Raises:
        ConfigError: The module lacks a member.
    """
    what, made = _name(module), made_by(module, config)
    if isinstance(made, ArrayEnv):
        return _of_array_module(module, config, eval_tasks, made, what)
    need(module, "tasks", what, "tasks(config) -> sequence of tasks")
    named = ("with_memory", "strategy", "episode_metrics", "hears")
    optional: dict[str, Any] = {name: getattr(module, name) for name in named if hasattr(module, name)}
    if hasattr(module, "ask"):
        optional["ask"] = functools.partial(module.ask, config)
    if hasattr(module, "same_tasks"):
        optional["same_tasks"] = trials.called(what, "same_tasks", lambda: module.same_tasks(config))
    missing = {"split", "count"} - {f.name for f in dataclasses.fields(config)}
    if missing:
        raise ConfigError(f"{what}: Config has no field {min(missing)!r}; expected fields split and count")
    # All usable test tasks, in the order fixed by the seed; loaded now, so that bad data shows before any step.
    whole = dataclasses.replace(config, split="test", count=0)
    test, train = (trials.called(what, "tasks", functools.partial(module.tasks, c)) for c in (whole, config))
    if not isinstance(test, Sequence):
        raise ConfigError(f"{what}: tasks(config) returned {type(test).__name__}, expected a sequence of tasks")
    taught = functools.partial(module.demonstrations, config) if hasattr(module, "demonstrations") else None
    return HostTask(_Maker(module.make, config), train, test[:eval_tasks], taught, **optional)


def _of_array_module(module: Any, config: Any, eval_tasks: int, env: ArrayEnv, what: str) -> ArrayTask:
    """The bundle of an array environment's module; ``env`` is what its ``make`` returned."""
    expected = "make_tasks(config, seed, n, *, held_out) -> tasks"
    need(module, "make_tasks", what, expected)

    def samples(seed: int, n: int, context: int) -> Samples:
        return module.demonstrations(config, seed, n, context=context)

    teaches = samples if hasattr(module, "demonstrations") else None
    try:
        inspect.signature(module.make_tasks).bind(config, None, eval_tasks, held_out=True)
    except TypeError as error:
        raise ConfigError(f"{what}: make_tasks: {error}; expected {expected}") from None
    draw = functools.partial(trials.called, what, "make_tasks")
    held_out = draw(lambda: module.make_tasks(config, None, eval_tasks, held_out=True))
    more: dict[str, Any] = {
        k: trials.called(what, k, functools.partial(getattr(module, k), config))
        for k in ("entry_length", "same_tasks")
        if hasattr(module, k)
    }
    if hasattr(module, "parts"):
        more["parts"] = trials.called(what, "parts", lambda: module.parts(config, held_out))
    return ArrayTask(env, draw(lambda: module.make_tasks(config)), held_out, teaches, **more)


@dataclass(frozen=True)
class _Maker:
    """A picklable call of ``make(config)``."""

    make: Callable[[Any], HostEnv]
    config: Any

    def __call__(self) -> HostEnv:
        return self.make(self.config)


def need(thing: Any, member: str, what: str, expected: str) -> None:
    """Raise ConfigError where a module or object lacks a function.

    Args:
        thing: The module or object.
        member: Name of the function.
        what: How messages call ``thing``.
        expected: The function's signature, for the message.
    """
    if not callable(getattr(thing, member, None)):
        raise ConfigError(f"{what}: has no function {member!r}; expected {expected}")


def check(task: Environment, name: str, *, ours: bool = False) -> None:
    """Try an environment on its first task, and say what is wrong with it in one line.

    Args:
        task: The environment.
        name: How messages call it.
        ours: It is one of this package, whose tests play it: it is not played here, which would compile programs.

    Raises:
        ConfigError: It has no tasks, lacks a function, or a function returns something of another type.
    """
    what = f"environment {name!r}"
    if isinstance(task, ArrayTask):
        _check_array(task, what)
        if not ours:
            trials.check_first_seats(what, task.env, _first(task))
    elif isinstance(task, HostTask):
        env = _check_host(task, what)
        taught = task.demonstrations
        if not ours:
            trials.try_host(what, env, task.tasks[0], None if taught is None else lambda: taught(task.tasks[:1]))
    else:
        raise ConfigError(f"environment {name!r}: expected an ArrayTask or a HostTask, got {type(task).__name__}")


def _check_array(task: ArrayTask, what: str) -> None:
    env = task.env
    if not isinstance(env, ArrayEnv):
        raise ConfigError(f"{what}: env: expected an ArrayEnv, got {type(env).__name__}")
    trials.check_fields(what, env)
    for part in ("tasks", "held_out"):
        leaves = jax.tree.leaves(getattr(task, part))
        sizes = {np.shape(x)[0] if np.ndim(x) else None for x in leaves}
        if len(sizes) != 1 or sizes & {None, 0}:
            raise ConfigError(f"{what}: {part}: expected arrays with one leading axis of tasks, at least one of them")
    _check_parts(task, what, len(leaves[0]))
    trials.check_actors(what, env)
    key = jax.random.key(0)
    state = trials.called(what, "reset", lambda: jax.eval_shape(env.reset, key, _first(task)))
    seen = trials.called(what, "observe", lambda: jax.eval_shape(env.observe, state))
    trials.check_observation(what, env, seen)


def _first(task: ArrayTask) -> PyTree:
    """The first training task."""
    return jax.tree.map(lambda x: jnp.asarray(x)[0], task.tasks)


def _check_parts(task: ArrayTask, what: str, size: int) -> None:
    """Raise ConfigError where parts mark no tasks, or held-out tasks beyond the part ``seen`` are training tasks."""
    for part, marks in task.parts.items():
        if np.shape(marks) != (size,) or np.asarray(marks).dtype != bool:
            raise ConfigError(f"{what}: parts: {part}: expected one bool for each of {size} held-out tasks")
    seen = np.asarray(task.parts.get("seen", np.zeros(size, bool)))
    if seen.all():
        raise ConfigError(
            f"{what}: held_out: all {size} held-out tasks are in the part 'seen', which training knows; expected "
            "settings with some unseen tasks"
        )
    if not task.same_tasks:
        _refuse_overlap(what, shared(_rows(task.tasks), _rows(task.held_out)) & ~seen)


def check_step(task: ArrayTask, name: str, response: int) -> None:
    """Try the step of an array environment on its first task, in shapes alone.

    Args:
        task: The environment and its tasks.
        name: How messages call it.
        response: Tokens of the longest completion.

    Raises:
        ConfigError: The step raises, or returns something of another type or shape.
    """
    env, what, key, first = task.env, f"environment {name!r}", jax.random.key(0), _first(task)
    state = jax.eval_shape(env.reset, key, first)
    tokens, size = jnp.zeros((env.seats, response), jnp.int32), jnp.ones((env.seats,), jnp.int32)
    out = trials.called(what, "step", lambda: jax.eval_shape(env.step, key, state, tokens, size))
    trials.check_array_step(what, env, state, out)


def _check_host(task: HostTask, what: str) -> HostEnv:
    for part, of in {"tasks": "training tasks", "held_out": "held-out tasks"}.items():
        tasks = getattr(task, part)
        if not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")):
            raise ConfigError(f"{what}: {part}: expected a sequence of {of}, got {type(tasks).__name__}")
        if not len(tasks):
            raise ConfigError(f"{what}: {part}: no {of}; expected at least one")
    for member in ("ask", "hears"):
        if not callable(given := getattr(task, member)) and (member, given) != ("ask", None):
            raise ConfigError(f"{what}: {member}: expected a function, got {type(given).__name__}")
    if not task.same_tasks:
        _refuse_overlap(what, shared(task.tasks, task.held_out))
    env = trials.called(what, "make", task.make)
    if not isinstance(env, HostEnv):
        raise ConfigError(f"{what}: make() returned {type(env).__name__}, expected a HostEnv")
    trials.check_fields(what, env)
    state = trials.called(what, "reset", lambda: env.reset(0, task.tasks[0]))
    trials.check_prompts(what, env, trials.called(what, "observe", lambda: env.observe(state)))
    return env


def array_demonstrations(task: ArrayTask, seed: int, n: int, context: int) -> Samples:
    """The checked demonstrations of an array environment, by role.

    Args:
        task: The environment.
        seed: Draws the samples.
        n: Samples of each role, at most.
        context: Memory entries in a prompt, at most.

    Raises:
        ConfigError: There are none, or they have another form.
    """
    what, teach = f"environment {task.env.name!r}", task.demonstrations
    if teach is None:
        raise ConfigError(f"config.sft.steps: expected 0: {what} has no demonstrations")
    rows = trials.called(what, "demonstrations", lambda: teach(seed, n, context))
    trials.check_samples(what, rows, task.env.roles)
    return rows


def host_demonstrations(task: HostTask) -> list[tuple[str, Prompt, str]]:
    """The checked demonstrations of a host environment on its training tasks: triples (role, prompt, completion).

    Args:
        task: The environment, which is built for this.

    Raises:
        ConfigError: There are none, or they have another form.
    """
    env, teach = task.make(), task.demonstrations
    what = f"environment {env.name!r}"
    if teach is None:
        raise ConfigError(f"config.sft.steps: expected 0: {what} has no demonstrations")
    return trials.check_triples(what, trials.called(what, "demonstrations", lambda: teach(task.tasks)), env.roles)


def _rows(columns: PyTree) -> list[tuple[bytes, ...]]:
    """Tasks given as a pytree of arrays with one leading axis, one by one."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(columns)]
    return [tuple(leaf[i].tobytes() for leaf in leaves) for i in range(len(leaves[0]))]


def _refuse_overlap(what: str, trained: np.ndarray) -> None:
    """Raise ConfigError where some held-out tasks, marked in ``trained`` [n], are training tasks."""
    if trained.any():
        raise ConfigError(
            f"{what}: held_out: {int(trained.sum())} of {len(trained)} held-out tasks are also training tasks; "
            "expected none (envs/splits.py has a split by content), or same_tasks where all tasks are one game"
        )
