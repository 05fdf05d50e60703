"""Tries of an environment before a run: types, shapes and ranges of what its functions return. Errors are one line.

`contract.check` runs these tries, of environments that are not the library's own, in this process and without a time
limit. `runs.trial` plays a task of any host environment in the pool of a run, with its time limit. ``what`` is how
messages call the environment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from jaxmarl_llm.envs.array_env import ArrayEnv, Observation
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message
from jaxmarl_llm.types import PyTree

TRIED_TURNS = 4  # of an episode of a host environment
COLUMNS = {"tokens": 2, "length": 1, "completion": 2, "completion_length": 1}  # of demonstrations: number of axes
STEP = "(state, {role: {component: reward}}, done)"


def called(what: str, name: str, function: Callable[[], Any]) -> Any:
    """The result of a user's function ``name``; its own error in one line."""
    try:
        return function()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what}: {name} raised {in_words(error)}") from error


def in_words(error: BaseException) -> str:
    """The type and the message of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def check_fields(what: str, env: ArrayEnv | HostEnv) -> None:
    """Raise ConfigError where names, counts or functions of the environment ``env`` have another type."""
    for field in ("roles", "components"):
        names = getattr(env, field)
        well = isinstance(names, tuple) and names and all(isinstance(name, str) for name in names)
        if not well or len(set(names)) < len(names):
            raise ConfigError(f"{what}: {field}: expected a tuple of different names, got {names!r}")
    for field in ("seats", "max_turns"):
        count = getattr(env, field, 1)
        if not isinstance(count, int) or count < 1:
            raise ConfigError(f"{what}: {field}: expected a number >= 1, got {count!r}")
    for field in ("reset", "observe", "step"):
        if not callable(getattr(env, field)):
            raise ConfigError(f"{what}: {field}: expected a function, got {type(getattr(env, field)).__name__}")


# -- array environments ------------------------------------------------------------------------------------------------


def check_actors(what: str, env: ArrayEnv) -> None:
    """Raise ConfigError unless ``actors`` of ``env`` has the roles of every turn, as indices of roles."""
    if len(env.actors) != env.max_turns:
        raise ConfigError(
            f"{what}: actors: expected one entry for each of {env.max_turns} turns, got {len(env.actors)}"
        )
    for turn, actors in enumerate(env.actors):
        known = isinstance(actors, Sequence) and all(role in range(len(env.roles)) for role in actors)
        if not known or not actors:
            raise ConfigError(
                f"{what}: actors[{turn}]: expected indices of roles, 0 to {len(env.roles) - 1}, got {actors!r}"
            )


def check_observation(what: str, env: ArrayEnv, seen: Any) -> None:
    """Raise ConfigError for an observation of ``env`` of another type, shape or dtype.

    ``seen`` may hold shapes alone.
    """
    if not isinstance(seen, Observation):
        raise ConfigError(f"{what}: observe(state) returned {type(seen).__name__}, expected an Observation")
    for field in ("role", "length", "active"):
        shape = getattr(getattr(seen, field), "shape", None)
        if shape != (env.seats,):
            raise ConfigError(f"{what}: observe(state).{field} has shape {shape}, expected [seats] = ({env.seats},)")
    size: Any = getattr(seen.tokens, "shape", ())
    if len(size) != 2 or size[0] != env.seats:
        raise ConfigError(f"{what}: observe(state).tokens has shape {size}, expected [seats, tokens]")
    for field, kind in {"role": jnp.integer, "tokens": jnp.integer, "length": jnp.integer, "active": jnp.bool_}.items():
        dtype = getattr(seen, field).dtype
        if not jnp.issubdtype(dtype, kind):
            raise ConfigError(f"{what}: observe(state).{field} has dtype {dtype}, expected {_name_of(kind)}")


def _name_of(kind: Any) -> str:
    return "bool" if kind is jnp.bool_ else "an integer type"


def check_first_seats(what: str, env: ArrayEnv, task: PyTree) -> None:
    """Raise ConfigError where the first observation of ``task`` in ``env`` has roles or lengths out of range."""
    seen = called(what, "observe", lambda: jax.device_get(jax.jit(lambda t: _first(env, t))(task)))
    actors, size = env.actors[0], seen.tokens.shape[1]
    for seat in np.flatnonzero(seen.active):
        may = actors[seat : seat + 1] if len(actors) == env.seats else actors
        if int(seen.role[seat]) not in may:
            raise ConfigError(
                f"{what}: observe(state).role is {seen.role[seat]} in seat {seat} at turn 0, expected "
                f"{' or '.join(map(str, may))}, as actors[0] = {actors!r} says"
            )
        if not 0 <= seen.length[seat] <= size:
            raise ConfigError(
                f"{what}: observe(state).length is {seen.length[seat]} in seat {seat}, expected 0 to {size} tokens"
            )


def _first(env: ArrayEnv, task: PyTree) -> Observation:
    return env.observe(env.reset(jax.random.key(0), task))


def check_array_step(what: str, env: ArrayEnv, before: PyTree, out: Any) -> None:
    """Raise ConfigError for a result of ``step`` of another type or shape.

    Args:
        what: How messages call the environment.
        env: The environment.
        before: The state before the step, in shapes alone.
        out: The result, in shapes alone.
    """
    if not (isinstance(out, tuple) and len(out) == 3 and isinstance(out[1], Mapping)):
        raise ConfigError(f"{what}: step returned {type(out).__name__}, expected (state, {{component: [roles]}}, done)")
    after, rewards, done = out
    if str(jax.tree.structure(after)) != str(jax.tree.structure(before)):
        raise ConfigError(f"{what}: step returned a state of another structure than reset did")
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if env.max_turns > 1 and (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ConfigError(
                f"{what}: step returned a state with an array {new.dtype}{list(new.shape)}, expected "
                f"{old.dtype}{list(old.shape)} as reset returned"
            )
    if set(rewards) != set(env.components):
        raise ConfigError(f"{what}: step pays {sorted(rewards)}, but components are {sorted(env.components)}")
    for component, values in rewards.items():
        shape = getattr(values, "shape", None)
        if shape != (len(env.roles),):
            raise ConfigError(
                f"{what}: reward {component!r} has shape {shape}, expected one value a role: ({len(env.roles)},)"
            )
    if getattr(done, "shape", None) != () or done.dtype != bool:
        raise ConfigError(f"{what}: step returned done of {_kind(done)}, expected one bool")


def _kind(x: Any) -> str:
    return f"{x.dtype} {x.shape}" if hasattr(x, "dtype") else type(x).__name__


def check_samples(what: str, rows: Any, roles: Sequence[str]) -> None:
    """Raise ConfigError for demonstrations of an array environment of another form.

    Args:
        what: How messages call the environment.
        rows: Role -> arrays named as in COLUMNS.
        roles: Of the environment.
    """
    if not isinstance(rows, Mapping):
        raise ConfigError(f"{what}: demonstrations returned {type(rows).__name__}, expected {{role: samples}}")
    for role, columns in rows.items():
        _check_role(what, role, roles)
        where = f"{what}: demonstrations of role {role!r}"
        if not isinstance(columns, Mapping) or set(columns) != set(COLUMNS):
            got = sorted(map(str, columns)) if isinstance(columns, Mapping) else type(columns).__name__
            raise ConfigError(f"{where}: expected arrays {', '.join(COLUMNS)}, got {got}")
        shapes = {name: np.shape(x) for name, x in columns.items()}
        for name, axes in COLUMNS.items():
            if len(shapes[name]) != axes or shapes[name][0] != shapes["length"][0]:
                raise ConfigError(
                    f"{where}: {name} has shape {shapes[name]}, expected {axes} axes, the first of which counts samples"
                )
            if not np.issubdtype(np.asarray(columns[name]).dtype, np.integer):
                raise ConfigError(f"{where}: {name} has dtype {np.asarray(columns[name]).dtype}, expected integers")
        for name, padded in {"length": "tokens", "completion_length": "completion"}.items():
            size, values = shapes[padded][1], np.asarray(columns[name])
            if ((values < 0) | (values > size)).any():
                raise ConfigError(f"{where}: {name} holds {values.max()}, expected 0 to {size}, the width of {padded}")


# -- host environments -------------------------------------------------------------------------------------------------


def try_host(
    what: str, env: HostEnv, task: Any, demonstrations: Callable[[], Iterable[tuple[str, Any, str]]] | None
) -> None:
    """Play the first turns of ``task`` with empty texts, and check what ``observe`` and ``step`` return.

    A step that raises makes a reward invalid, and is a warning. It is an error where texts of other kinds raise too.

    Args:
        what: How messages call the environment.
        env: The environment.
        task: Its first training task.
        demonstrations: () -> samples of that task; None: there are none.

    Raises:
        ConfigError: A result has another type, or every try raised.
    """

    def taught() -> dict[str, str]:
        try:
            return {role: said for role, _, said in demonstrations() if isinstance(said, str)} if demonstrations else {}
        except Exception:  # stage 0 reports it, where there is one
            return {}

    errors: list[BaseException] = []
    for texts in (dict, taught, lambda: dict.fromkeys(env.roles, "1")):
        error = _play(what, env, task, texts())
        if error is None:
            break
        errors.append(error)
    else:
        raise ConfigError(
            f"{what}: step raised {in_words(errors[0])}, for empty and for other texts; expected {STEP} for any text"
        ) from errors[0]
    if errors:
        _warn(f"{what}: step raised {in_words(errors[0])} for an empty text; such joint actions are invalid")


@functools.cache
def _warn(line: str) -> None:
    """A warning, once a process: an environment is tried whenever it is made."""
    logging.warning("%s", line)


def _play(what: str, env: HostEnv, task: Any, texts: Mapping[str, str]) -> BaseException | None:
    """What a step raised in an episode of these ``texts`` by role (absent: empty); None where none raised."""
    state = called(what, "reset", lambda: env.reset(0, task))
    for turn in range(min(env.max_turns, TRIED_TURNS)):
        try:
            see = functools.partial(env.observe, state)
            prompts = see() if turn else called(what, "observe", see)
            if turn and not prompts:
                return None
            check_prompts(what, env, prompts)
            result = env.step(0, state, {role: Action(texts.get(role, ""), ()) for role in prompts})
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            return error
        check_host_step(what, env, result)
        state, _, done = result
        if done:
            return None
    return None


def check_prompts(what: str, env: HostEnv, prompts: Any) -> None:
    """Raise ConfigError unless ``prompts`` are messages by role of ``env``."""
    if not isinstance(prompts, Mapping) or not prompts:
        raise ConfigError(f"{what}: observe(state) returned {type(prompts).__name__}, expected {{role: prompt}}")
    for role, prompt in prompts.items():
        if role not in env.roles:
            raise ConfigError(f"{what}: observe(state) has the role {role!r}; the roles are {', '.join(env.roles)}")
        if not is_prompt(prompt):
            raise ConfigError(f"{what}: the prompt of {role!r} is not a tuple of Message")


def is_prompt(prompt: Any) -> bool:
    """Whether ``prompt`` is a tuple of `Message` with texts."""
    return isinstance(prompt, tuple) and all(isinstance(m, Message) and isinstance(m.text, str) for m in prompt)


def is_flag(value: Any) -> bool:
    """Whether ``value`` is one bool, of Python or of an array library."""
    return isinstance(value, bool) or (getattr(value, "dtype", None) == np.bool_ and np.shape(value) == ())


def check_host_step(what: str, env: HostEnv, result: Any) -> None:
    """Raise ConfigError for a result of ``env.step`` of another type, or rewards of unknown roles or components.

    A reward that is None or not finite is none of these: it makes the joint action invalid.
    """
    if not (isinstance(result, tuple) and len(result) == 3):
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise ConfigError(f"{what}: step returned {got}, expected {STEP}")
    _, rewards, done = result
    if not is_flag(done):
        raise ConfigError(f"{what}: step returned done={done!r}, expected True or False")
    if not isinstance(rewards, Mapping) or not all(isinstance(own, Mapping) for own in rewards.values()):
        raise ConfigError(f"{what}: step returned rewards {rewards!r}, expected {{role: {{component: reward}}}}")
    for role, own in rewards.items():
        if role not in env.roles:
            raise ConfigError(f"{what}: step pays the role {role!r}; the roles are {', '.join(env.roles)}")
        for component, value in own.items():
            if component not in env.components:
                raise ConfigError(f"{what}: step pays {component!r}; the components are {', '.join(env.components)}")
            number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
            if value is not None and not number:
                raise ConfigError(f"{what}: reward {component!r} of role {role!r} is {value!r}, expected a number")


def check_triples(what: str, rows: Any, roles: Sequence[str]) -> list[tuple[str, Any, str]]:
    """Demonstrations of a host environment as a list; ConfigError where one is no (role, prompt, completion).

    Args:
        what: How messages call the environment.
        rows: What ``demonstrations`` returned.
        roles: Of the environment.
    """
    if not isinstance(rows, Iterable) or isinstance(rows, (str, Mapping)):
        raise ConfigError(
            f"{what}: demonstrations returned {type(rows).__name__}, expected (role, prompt, completion) triples"
        )
    triples = called(what, "demonstrations", lambda: list(rows))
    for number, row in enumerate(triples):
        where = f"{what}: demonstration {number}"
        if not isinstance(row, (tuple, list)) or len(row) != 3:
            raise ConfigError(f"{where}: expected (role, prompt, completion), got {type(row).__name__}")
        _check_role(what, row[0], roles)
        if not is_prompt(row[1]):
            raise ConfigError(f"{where}: the prompt is not a tuple of Message")
        if not isinstance(row[2], str):
            raise ConfigError(f"{where}: the completion is of type {type(row[2]).__name__}, expected str")
    return triples


def _check_role(what: str, role: Any, roles: Sequence[str]) -> None:
    if role not in roles:
        raise ConfigError(f"{what}: demonstrations has the role {role!r}; the roles are {', '.join(roles)}")
