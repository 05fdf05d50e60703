"""Reward functions in TRL's form, as the reward of a `TextTask`.

    from jaxmarl_llm.envs import TextTask
    from jaxmarl_llm.envs.adapters.trl import TRLRewards

    def accuracy(prompts, completions, answer, **kwargs):
        return [float(a == c) for a, c in zip(answer, completions)]

    def make(path):
        return TextTask(path, {"solver": "{prompt}"}, TRLRewards([accuracy], prompt="{prompt}"))

TRL itself is not needed. A reward model in place of a function is not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs.text_values import Template, Texts, number, render
from jaxmarl_llm.errors import ConfigError

RewardFunction = Callable[..., Sequence[float | None]]


@dataclass(frozen=True)
class TRLRewards:
    """A reward of a `TextTask` made of reward functions ``f(prompts, completions, **columns) -> list[float]``.

    Each function is called with lists of one entry, and is a component of its name. The columns are the fields of the
    task. A value of None means that the function does not apply, as in TRL, and leaves its component out.

    Attributes:
        functions: The reward functions; their names differ.
        prompt: The prompt that they are given: a template or a function of the task.
        role: The role whose text is the completion; None: the last one. The reward is paid to all roles.
        chat: Prompts and completions are lists of messages, ``[{"role": ..., "content": ...}]``.
    """

    functions: Sequence[RewardFunction]
    prompt: Template = "{prompt}"
    role: str | None = None
    chat: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.functions, Sequence) or not all(map(callable, self.functions)):
            raise ConfigError(f"TRLRewards: expected a list of functions, got {self.functions!r:.60}")
        names = self.components
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"TRLRewards: expected functions of different names, got {', '.join(names) or 'none'}")

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the functions, for ``TextTask(components=...)`` where some of them may not apply."""
        return tuple(getattr(f, "__name__", type(f).__name__) for f in self.functions)

    def __call__(self, task: Mapping[str, Any], texts: Texts) -> dict[str, float | None]:
        """The reward of one episode, by component."""
        completion: Any = texts[self.role] if self.role is not None else list(texts.values())[-1]
        prompt: Any = render("TRLRewards.prompt", self.prompt, task, texts)
        if self.chat:
            prompt = [{"role": "user", "content": prompt}]
            completion = [{"role": "assistant", "content": completion}]
        columns = {name: [value] for name, value in task.items() if name not in ("prompt", "prompts", "completions")}
        paid: dict[str, float | None] = {}
        for name, function in zip(self.components, self.functions, strict=True):
            values = function(prompts=[prompt], completions=[completion], **columns)
            if isinstance(values, (str, Mapping)) or not hasattr(values, "__len__") or len(values) != 1:
                raise ConfigError(f"reward {name!r}: returned {values!r:.60}, expected a list of one number")
            if values[0] is not None:
                paid[name] = number(name, values[0])
        return paid
