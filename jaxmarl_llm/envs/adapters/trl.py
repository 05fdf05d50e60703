"""Reward functions in TRL's form, as the reward of a `TextTask`.

    from jaxmarl_llm.envs import TextTask
    from jaxmarl_llm.envs.adapters.trl import TRLRewards

    def accuracy(prompts, completions, answer, **kwargs):
        return [float(a == c) for a, c in zip(answer, completions)]

    def make(path):
        return TextTask(path, {"solver": "{prompt}"}, TRLRewards([accuracy], prompt="{prompt}"))

A batch is one completion: functions that compare the completions of a batch see nothing to compare. Functions may be
asynchronous. TRL itself is not needed. A reward model in place of a function is not supported.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxmarl_llm.envs.adapters.asynchronous import complete
from jaxmarl_llm.envs.text_values import Template, Texts, number, render
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Message, Prompt

RewardFunction = Callable[..., Any]  # of (prompts, completions, **columns) -> numbers, or a coroutine of them
ABSENT = ("completion_ids", "trainer_state")  # TRL's arguments that a reward of texts does not have
LOGS = ("log_extra", "log_metric")  # TRL's functions that log values
FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class TRLRewards:
    """A reward of a `TextTask` made of reward functions ``f(prompts, completions, **columns) -> list[float]``.

    Each function is called with lists of one entry, and is a component of its name. The columns are the fields of the
    task. A value of None means that the function does not apply, as in TRL, and leaves its component out. A function
    that requires ``log_extra`` or ``log_metric`` gets one that keeps nothing.

    Attributes:
        functions: The reward functions; their names differ. They may be coroutine functions.
        prompt: The prompt that they are given: a template or a function of the task. A list of messages stays one.
        role: The role whose text is the completion; None: the last one. The reward is paid to all roles.
        chat: Prompts and completions are lists of messages, ``[{"role": ..., "content": ...}]``. Where the prompt is a
            list, they are in any case.
        seconds: Time limit of an asynchronous function. ``env.timeout`` has to be longer.
    """

    functions: Sequence[RewardFunction]
    prompt: Template = "{prompt}"
    role: str | None = None
    chat: bool = False
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if not isinstance(self.functions, Sequence) or not all(map(callable, self.functions)):
            raise ConfigError(f"TRLRewards: expected a list of functions, got {self.functions!r:.60}")
        names = self.components
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"TRLRewards: expected functions of different names, got {', '.join(names) or 'none'}")
        for name, function in zip(names, self.functions, strict=True):
            if absent := [argument for argument in ABSENT if argument in _required(function)]:
                raise ConfigError(
                    f"TRLRewards: {name!r} requires {absent[0]!r}, which a reward of texts does not have; expected a "
                    f"default, as {absent[0]}=None"
                )

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the functions, for ``TextTask(components=...)`` where some of them may not apply."""
        return tuple(getattr(f, "__name__", type(f).__name__) for f in self.functions)

    def __call__(self, task: Mapping[str, Any], texts: Texts) -> dict[str, float | None]:
        """The reward of one episode, by component."""
        completion: Any = texts[self.role] if self.role is not None else list(texts.values())[-1]
        prompt = self._prompt(task, texts)
        if self.chat or isinstance(prompt, list):
            prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        columns = {name: [value] for name, value in task.items() if name not in ("prompt", "prompts", "completions")}
        paid: dict[str, float | None] = {}
        for name, function in zip(self.components, self.functions, strict=True):
            logs = dict.fromkeys({*LOGS} & _required(function), _unkept)
            values = function(prompts=[prompt], completions=[completion], **columns, **logs)
            if inspect.iscoroutine(values):
                values = complete(values, self.seconds, f"reward {name!r}")
            if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__") or len(values) != 1:
                raise ConfigError(f"reward {name!r}: returned {values!r:.60}, expected a list of one number")
            if values[0] is not None:
                paid[name] = number(name, values[0])
        return paid

    def _prompt(self, task: Mapping[str, Any], texts: Texts) -> Any:
        """The prompt of a task: text, or a list of messages."""
        field = FIELD.fullmatch(self.prompt) if isinstance(self.prompt, str) else None
        if field is not None and isinstance(task.get(field[1]), list):
            return task[field[1]]
        return render("TRLRewards.prompt", self.prompt, task, texts)


def conversation(field: str = "prompt") -> Callable[[Mapping[str, Any]], Prompt]:
    """A prompt of a `TextTask` from a column of messages, ``[{"role": ..., "content": ...}]``.

    Args:
        field: Name of the column.
    """
    return partial(_messages, field)


def _messages(field: str, task: Mapping[str, Any]) -> Prompt:
    """The messages of a column of a task."""
    given = task[field]
    texts = lambda message: (
        isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))
    )
    if not isinstance(given, list) or not all(map(texts, given)):
        raise ConfigError(f"column {field!r}: expected a list of {{'role': text, 'content': text}}, got {given!r:.80}")
    return tuple(Message(message["role"], message["content"]) for message in given)


def _required(function: RewardFunction) -> set[str]:
    """Names of the arguments of a function that have no default."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        arguments = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature
        return set()
    return {a.name for a in arguments if a.kind in named and a.default is inspect.Parameter.empty}


def _unkept(*values: Any, **named: Any) -> None:
    """Take what a reward function logs, and keep nothing."""
