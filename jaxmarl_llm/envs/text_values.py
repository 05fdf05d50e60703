"""What a user's templates and reward functions give, checked: text of a template, rewards by role and component."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxmarl_llm.config import nearest
from jaxmarl_llm.errors import ConfigError

Texts = Mapping[str, str]  # role -> what it wrote last; empty before it wrote
Template = str | Callable[..., Any]  # fields in braces, or a function of (task) or (task, texts)
PAID = "a number, {role: number}, {component: number} or {role: {component: number}}"


def takes(function: Callable[..., Any], count: int) -> bool:
    """Whether a function can be called with ``count`` positional arguments."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def check_arity(what: str, function: Any, counts: Sequence[int], expected: str) -> None:
    """Raise ConfigError unless a function takes one of several numbers of positional arguments.

    Args:
        what: Name of the function in the message.
        function: The user's function.
        counts: Numbers of arguments.
        expected: The arguments in words, for the message.
    """
    if not callable(function):
        raise ConfigError(f"{what}: expected a function of {expected}, got {type(function).__name__}")
    if not any(takes(function, count) for count in counts):
        raise ConfigError(f"{what}: takes {inspect.signature(function)}, expected {expected}")


def render(what: str, template: Template, task: Mapping[str, Any], texts: Texts) -> Any:
    """The text of a template or of a function for one task.

    Args:
        what: Name of the template in messages.
        template: A template or a function.
        task: Fields of the task.
        texts: Texts of the roles that acted.

    Raises:
        ConfigError: The task lacks a field, or the function raises.
    """
    try:
        if not isinstance(template, str):
            return template(task, texts) if takes(template, 2) else template(task)
        return template.format_map({**texts, **task})
    except KeyError as error:
        raise ConfigError(f"{what}: no field {error}; {nearest(str(error.args[0]), [*task, *texts])}") from None
    except Exception as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}") from error


def paid(result: Any, roles: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The result of a reward function by role and component.

    Args:
        result: What the function returned. A number that is None or not finite makes the joint action invalid.
        roles: All roles.

    Raises:
        ConfigError: It is of no form that a reward may have.
    """
    if not isinstance(result, Mapping):
        return {role: {"reward": number("reward", result)} for role in roles}
    named = [key for key in result if key in roles]
    if named and len(named) < len(result):
        others = ", ".join(repr(key) for key in result if key not in roles)
        raise ConfigError(f"reward: returned the role {named[0]!r} beside {others}; expected {PAID}")
    if not named:
        joint = {str(name): number(name, value) for name, value in result.items()}
        return {role: dict(joint) for role in roles}
    return {
        role: {str(c): number(c, v) for c, v in value.items()}
        if isinstance(value, Mapping)
        else {"reward": number(role, value)}
        for role, value in result.items()
    }


def number(name: Any, value: Any) -> float | None:
    """``value`` as a float; None stays None. Raises ConfigError with ``name`` for anything that is no number."""
    if value is None:
        return None
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"reward: {name!r} is {value!r:.60} ({type(value).__name__}); expected {PAID}") from None
