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

from jaxmarl_llm.envs.array_env import ArrayEnv, Observation
from jaxmarl_llm.envs.chat import with_memory
from jaxmarl_llm.envs.splits import shared
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt
from jaxmarl_llm.types import PyTree

Samples = Mapping[str, Mapping[str, np.ndarray]]  # role -> tokens [n P], length [n], completion [n R], its length [n]


def plain_strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """A memory entry of a host environment that does not write its own: the completion itself."""
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
        demonstrations: (seed, n, context) -> at most n supervised samples for each role, with up to ``context``
            memory entries in the prompt; None: there are none, and ``sft.steps`` has to be 0.
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
    """

    make: Callable[[], HostEnv]
    tasks: Sequence[Any]
    held_out: Sequence[Any]
    demonstrations: Callable[[Sequence[Any]], Iterable[tuple[str, Prompt, str]]] | None = None
    with_memory: Callable[[Prompt, Sequence[str]], Prompt] = with_memory
    strategy: Callable[[str, Prompt, Action, Mapping[str, float]], str] = plain_strategy
    episode_metrics: Callable[[Sequence[tuple[Any, Mapping[str, str]]]], Mapping[str, float]] | None = None
    same_tasks: bool = False


Environment = ArrayTask | HostTask


def roles_of(task: Environment) -> tuple[str, ...]:
    """The roles of an environment."""
    return task.env.roles if isinstance(task, ArrayTask) else task.make().roles


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
    Optional members: ``demonstrations(config, tasks)``, ``with_memory``, ``strategy``, ``episode_metrics`` and
    ``same_tasks(config)``, see `HostTask`.
    """

    Config: type

    def make(self, config: Any, /) -> HostEnv: ...

    def tasks(self, config: Any, /) -> Sequence[Any]: ...


def of_module(module: Any, config: Any, eval_tasks: int) -> Environment:
    """The environment of a module.

    Args:
        module: An `ArrayModule` or a `HostModule`.
        config: Its ``Config``, checked.
        eval_tasks: Held-out tasks, at most.

    Raises:
        ConfigError: The module lacks a member.
    """
    name = getattr(module, "__name__", repr(module))
    need(module, "make", f"environment {name}", "make(config) -> ArrayEnv or HostEnv")
    made = module.make(config)
    optional = {k: getattr(module, k) for k in ("with_memory", "strategy", "episode_metrics") if hasattr(module, k)}
    if isinstance(made, ArrayEnv):
        need(module, "make_tasks", f"environment {name}", "make_tasks(config, seed, n, *, held_out) -> tasks")

        def samples(seed: int, n: int, context: int) -> Samples:
            return module.demonstrations(config, seed, n, context=context)

        teaches = samples if hasattr(module, "demonstrations") else None
        try:
            inspect.signature(module.make_tasks).bind(config, None, eval_tasks, held_out=True)
        except TypeError as error:
            expected = "make_tasks(config, seed, n, *, held_out) -> tasks"
            raise ConfigError(f"environment {name}: make_tasks: {error}; expected {expected}") from None
        held_out = module.make_tasks(config, None, eval_tasks, held_out=True)
        more: dict[str, Any] = {
            k: getattr(module, k)(config) for k in ("entry_length", "same_tasks") if hasattr(module, k)
        }
        if hasattr(module, "parts"):
            more["parts"] = module.parts(config, held_out)
        return ArrayTask(made, module.make_tasks(config), held_out, teaches, **more)
    if not isinstance(made, HostEnv):
        raise ConfigError(
            f"environment {name}: make(config) returned {type(made).__name__}, not an ArrayEnv or HostEnv"
        )
    need(module, "tasks", f"environment {name}", "tasks(config) -> sequence of tasks")
    # All usable test tasks, in the order fixed by the seed; loaded now, so that bad data shows before any step.
    test = module.tasks(dataclasses.replace(config, split="test", count=0))[:eval_tasks]
    taught = functools.partial(module.demonstrations, config) if hasattr(module, "demonstrations") else None
    if hasattr(module, "same_tasks"):
        optional["same_tasks"] = module.same_tasks(config)
    return HostTask(_Maker(module.make, config), module.tasks(config), test, taught, **optional)


@dataclass(frozen=True)
class _Maker:
    """A picklable call of ``make(config)``."""

    make: Callable[[Any], HostEnv]
    config: Any

    def __call__(self) -> HostEnv:
        return self.make(self.config)


def need(thing: Any, member: str, what: str, expected: str) -> None:
    """Raise ConfigError where ``thing`` has no callable ``member``."""
    if not callable(getattr(thing, member, None)):
        raise ConfigError(f"{what}: has no function {member!r}; expected {expected}")


def check(task: Environment, name: str) -> None:
    """Try an environment on its first task, and say what is wrong with it in one line.

    Args:
        task: The environment.
        name: How messages call it.

    Raises:
        ConfigError: It has no tasks, lacks a function, or a function returns something of another type.
    """
    if isinstance(task, ArrayTask):
        _check_array(task, f"environment {name!r}")
    elif isinstance(task, HostTask):
        _check_host(task, f"environment {name!r}")
    else:
        raise ConfigError(f"environment {name!r}: expected an ArrayTask or a HostTask, got {type(task).__name__}")


def _check_array(task: ArrayTask, what: str) -> None:
    env = task.env
    if not isinstance(env, ArrayEnv):
        raise ConfigError(f"{what}: env: expected an ArrayEnv, got {type(env).__name__}")
    for part in ("tasks", "held_out"):
        leaves = jax.tree.leaves(getattr(task, part))
        sizes = {np.shape(x)[0] if np.ndim(x) else None for x in leaves}
        if len(sizes) != 1 or sizes & {None, 0}:
            raise ConfigError(f"{what}: {part}: expected arrays with one leading axis of tasks, at least one of them")
    if not task.same_tasks:
        apart = ~np.asarray(task.parts.get("seen", np.zeros(np.shape(leaves[0])[0], bool)))
        _refuse_overlap(what, shared(_rows(task.tasks), _rows(task.held_out)) & apart)
    if len(env.actors) != env.max_turns:
        raise ConfigError(
            f"{what}: actors: expected one entry for each of {env.max_turns} turns, got {len(env.actors)}"
        )
    key = jax.random.key(0)
    first = jax.tree.map(lambda x: jnp.asarray(x)[0], task.tasks)
    state = _call(what, "reset", lambda: jax.eval_shape(env.reset, key, first))
    seen = _call(what, "observe", lambda: jax.eval_shape(env.observe, state))
    if not isinstance(seen, Observation):
        raise ConfigError(f"{what}: observe(state) returned {type(seen).__name__}, expected an Observation")
    for field in ("role", "length", "active"):
        if getattr(seen, field).shape != (env.seats,):
            got = getattr(seen, field).shape
            raise ConfigError(f"{what}: observe(state).{field} has shape {got}, expected [seats] = ({env.seats},)")
    if len(seen.tokens.shape) != 2 or seen.tokens.shape[0] != env.seats:
        raise ConfigError(f"{what}: observe(state).tokens has shape {seen.tokens.shape}, expected [seats, tokens]")


def check_step(task: ArrayTask, name: str, response: int) -> None:
    """Try the step of an array environment on its first task, in shapes alone.

    Args:
        task: The environment and its tasks.
        name: How messages call it.
        response: Tokens of the longest completion.

    Raises:
        ConfigError: The step raises, or returns something of another type or shape.
    """
    env, what, key = task.env, f"environment {name!r}", jax.random.key(0)
    first = jax.tree.map(lambda x: jnp.asarray(x)[0], task.tasks)
    state = jax.eval_shape(env.reset, key, first)
    tokens, size = jnp.zeros((env.seats, response), jnp.int32), jnp.ones((env.seats,), jnp.int32)
    out = _call(what, "step", lambda: jax.eval_shape(env.step, key, state, tokens, size))
    if not (isinstance(out, tuple) and len(out) == 3 and isinstance(out[1], Mapping)):
        raise ConfigError(f"{what}: step returned {type(out).__name__}, expected (state, {{component: [roles]}}, done)")
    after, rewards, done = out
    if str(jax.tree.structure(after)) != str(jax.tree.structure(state)):
        raise ConfigError(f"{what}: step returned a state of another structure than reset did")
    if set(rewards) != set(env.components):
        raise ConfigError(f"{what}: step pays {sorted(rewards)}, but components are {sorted(env.components)}")
    for component, values in rewards.items():
        if values.shape != (len(env.roles),):
            raise ConfigError(
                f"{what}: reward {component!r} has shape {values.shape}, expected one value a role: ({len(env.roles)},)"
            )
    if done.shape != () or done.dtype != bool:
        raise ConfigError(f"{what}: step returned done of {done.dtype} {done.shape}, expected one bool")


def _check_host(task: HostTask, what: str) -> None:
    if not len(task.tasks):
        raise ConfigError(f"{what}: no training tasks")
    if not len(task.held_out):
        raise ConfigError(f"{what}: no held-out tasks; expected at least one")
    if not task.same_tasks:
        _refuse_overlap(what, shared(task.tasks, task.held_out))
    env = _call(what, "make", task.make)
    if not isinstance(env, HostEnv):
        raise ConfigError(f"{what}: make() returned {type(env).__name__}, expected a HostEnv")
    state = _call(what, "reset", lambda: env.reset(0, task.tasks[0]))
    prompts = _call(what, "observe", lambda: env.observe(state))
    if not isinstance(prompts, Mapping) or not prompts:
        raise ConfigError(f"{what}: observe(state) returned {type(prompts).__name__}, expected {{role: prompt}}")
    for role, prompt in prompts.items():
        if role not in env.roles:
            raise ConfigError(f"{what}: observe(state) has the role {role!r}; the roles are {', '.join(env.roles)}")
        if not isinstance(prompt, tuple) or not all(isinstance(m, Message) for m in prompt):
            raise ConfigError(f"{what}: the prompt of {role!r} is not a tuple of Message")


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


def _call(what: str, name: str, function: Callable[[], Any]) -> Any:
    """The result of a user's function; its own error in one line."""
    try:
        return function()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{what}: {name} raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ) from error
