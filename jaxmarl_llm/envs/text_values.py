"""What a user's templates and reward functions give, checked: text of a template, rewards by role and component."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxmarl_llm.config import nearest
from jaxmarl_llm.data.rows import Row
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


class Asked(dict[str, Any]):
    """Fields of a task that a person asked. It has no answer, so it is not paid."""


def ask_function(
    prompts: Mapping[str, Template], ask: str | Callable[[str], Mapping[str, Any]] | None, row: Row
) -> Callable[[str], Asked] | None:
    """A function from the text of a person to its task; None where the prompts do not say which field the text is.

    Args:
        prompts: Role -> its prompt.
        ask: The field of the text, or a function from the text to the fields; None: the one field of all templates.
        row: A row of the data, which has the field.

    Raises:
        ConfigError: ``ask`` is something else, or the row has no such field.
    """
    if callable(ask):
        check_arity("ask", ask, (1,), "(text)")
        return partial(_asked, ask)
    if ask is None:
        templates = [prompt for prompt in prompts.values() if isinstance(prompt, str)]
        fields = set().union(*map(_fields, templates)) - set(prompts)
        if len(templates) < len(prompts) or len(fields) != 1:
            return None
        (ask,) = fields
    elif not isinstance(ask, str):
        raise ConfigError(f"ask: expected the name of a field or a function, got {type(ask).__name__}")
    if ask not in row.fields:
        raise ConfigError(f"{row.where}: ask: no field {ask!r}; {nearest(ask, row.fields)}")
    return partial(_asked, partial(_one_field, ask))


def _fields(template: str) -> set[str]:
    """Names that a template reads: fields of the task, and roles."""
    named = (name for _, name, _, _ in string.Formatter().parse(template) if name)
    return {name.replace("[", ".").partition(".")[0] for name in named}


def _one_field(field: str, text: str) -> dict[str, str]:
    return {field: text}


def _asked(make: Callable[[str], Mapping[str, Any]], text: str) -> Asked:
    """The task that ``make`` makes of a text, checked."""
    fields = make(text)
    if not isinstance(fields, Mapping) or not all(isinstance(key, str) for key in fields):
        raise ConfigError(f"ask: returned {fields!r:.80}, expected a mapping with names as keys")
    return Asked(fields)


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
