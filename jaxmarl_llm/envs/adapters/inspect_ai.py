"""Tasks of `inspect_ai` as evaluation: its samples are the held-out tasks, its scorers say how good a team is on them.

    from jaxmarl_llm.envs.adapters.inspect_ai import inspect_task

    def make():
        return inspect_task(my_evals.capitals, train=my_evals.more_capitals)

A sample becomes a row of a `TextTask` with the fields of the sample, and ``question``, the text of its input. The role
``solver`` reads what the solvers of the task give to the model. Solvers may call the model once, without tools. Each
scorer is a component of its name: 1 for C, 0.5 for P, 0 for I and N, and numbers as they are.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs.adapters.asynchronous import complete
from jaxmarl_llm.envs.text_task import TextTask
from jaxmarl_llm.envs.text_values import Template, Texts
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Message, Prompt

WORDS = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
MODEL = "jaxmarl_llm/team"


def inspect_task(
    make_task: Callable[[], Any],
    *,
    train: Callable[[], Any] | None = None,
    prompts: Mapping[str, Template] | None = None,
    seconds: float = 10.0,
    name: str = "inspect",
    **settings: Any,
) -> TextTask:
    """A task of inspect_ai, for a role or a team.

    Args:
        make_task: Builds the `Task`; a module-level function where ``env.workers`` is above 0.
        train: Builds the task whose samples are trained on. None: they are samples of ``make_task``, of which a quarter
            is held out, by a hash of the prompt.
        prompts: Role -> its prompt, as `TextTask` takes them. The text of the last role is scored. None: the one role
            ``solver`` reads what the solvers of the task give to the model.
        seconds: Time limit of the scorers, and of the solvers. ``env.timeout`` has to be longer.
        name: How messages call the task.
        settings: ``turns``, ``instructions`` and ``count`` of `TextTask`.

    Raises:
        ConfigError: The task has no samples or scorers, or a sample cannot be shown or scored.
    """
    source = _Source(make_task, name)
    rows = _rows(source.task, name)
    sides: dict[str, Any] = {"data": rows} if train is None else {"data": _rows(train(), name), "held_out": rows}
    shown = prompts or {"solver": _Solved(source, seconds)}
    return TextTask(**sides, prompts=shown, reward=InspectScores(source, seconds), name=name, **settings)


class _Source:
    """The task of this process, built when it is first needed; travels without it."""

    def __init__(self, make_task: Callable[[], Any], name: str) -> None:
        self.make_task, self.name = make_task, name
        self._task: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_task": None}

    @property
    def task(self) -> Any:
        """The task, checked."""
        if self._task is None:
            task = self.make_task()
            for member in ("dataset", "solver", "scorer"):
                if not hasattr(task, member):
                    raise ConfigError(f"{self.name}: has no {member!r}; expected a Task of inspect_ai")
            if not task.scorer:
                raise ConfigError(f"{self.name}: scorer: expected at least one, got {task.scorer!r}")
            self._task = task
        return self._task

    @property
    def scorers(self) -> dict[str, Any]:
        """The scorers by name; a repeated name has a number."""
        scorers = self.task.scorer if isinstance(self.task.scorer, (list, tuple)) else [self.task.scorer]
        named: dict[str, Any] = {}
        for scorer in scorers:
            info = getattr(scorer, "__registry_info__", None)
            name = getattr(info, "name", getattr(scorer, "__name__", "score")).rpartition("/")[2]
            named[f"{name}_{len(named)}" if name in named else name] = scorer
        return named


@dataclass(frozen=True)
class _Solved:
    """The prompt of a sample: what the solvers of the task give to the model."""

    source: _Source
    seconds: float

    def __call__(self, row: Mapping[str, Any]) -> Prompt:
        messages = complete(_play(self.source.task, row, None), self.seconds, f"{self.source.name}: solvers")
        return tuple(Message(message.role, _text(self.source.name, message)) for message in messages)


@dataclass(frozen=True)
class InspectScores:
    """The reward of a `TextTask` whose rows are samples: scorers of inspect_ai.

    Attributes:
        source: The task with its scorers.
        seconds: Time limit.
    """

    source: _Source
    seconds: float

    def __call__(self, row: Mapping[str, Any], texts: Texts) -> dict[str, float | None]:
        """The scores of the last role's text by component. An unscored sample is None, which is invalid."""
        text = list(texts.values())[-1]
        return complete(self._scores(self.source.task, row, text), self.seconds, f"{self.source.name}: scorers")

    async def _scores(self, task: Any, row: Mapping[str, Any], text: str) -> dict[str, float | None]:
        state = await _play(task, row, text)
        target = _library("scorer").Target(row.get("target", ""))
        paid: dict[str, float | None] = {}
        for name, scorer in self.source.scorers.items():
            score = await scorer(state, target)
            value = None if score is None else score.value
            if isinstance(value, Mapping):
                paid |= {f"{name}/{key}": number(f"{name}/{key}", of) for key, of in value.items()}
            else:
                paid[name] = number(name, value)
        return paid


def number(name: str, value: Any) -> float | None:
    """The value of a score as a number.

    Args:
        name: Name of the scorer in the message.
        value: A number, a truth value, or a word of inspect_ai; None and NaN mean that there is no score.

    Raises:
        ConfigError: It is something else, which inspect_ai counts as 0 with a warning.
    """
    if isinstance(value, str):
        word = value if value in WORDS else value.lower()
        try:
            value = WORDS[word] if word in WORDS else float(word)
        except ValueError:
            value = (value,)
    if value is None or (isinstance(value, (bool, int, float)) and math.isnan(value)):
        return None
    if not isinstance(value, (bool, int, float)):
        shown = value[0] if isinstance(value, tuple) else value
        raise ConfigError(f"scorer {name!r}: the value is {shown!r:.60}; expected a number, or C, P, I or N")
    return float(value)


def _rows(task: Any, name: str) -> list[dict[str, Any]]:
    """The samples of a task as rows."""
    rows = []
    for sample in task.dataset:
        fields = sample.model_dump(mode="json", exclude_none=True)
        shown = sample.input if isinstance(sample.input, str) else _text(name, sample.input[-1])
        rows.append({**fields, "question": shown})
    if not rows:
        raise ConfigError(f"{name}: dataset: no samples; expected at least one")
    return rows


class _Asked(BaseException):
    """A solver calls the model, of which only the prompt is wanted; solvers do not catch it."""


async def _play(task: Any, row: Mapping[str, Any], text: str | None) -> Any:
    """Run the solvers on a sample.

    Args:
        task: The task.
        row: The sample.
        text: The answer of the model; None: stop there.

    Returns:
        The state at the end; without ``text`` the messages that the model is given.
    """
    model, solver = _library("model"), _library("solver")
    sample = _library("dataset").Sample.model_validate({key: row[key] for key in row if key != "question"})
    messages = sample.input if isinstance(sample.input, list) else [model.ChatMessageUser(content=sample.input)]
    state = solver.TaskState(
        model=model.ModelName(MODEL),
        sample_id=sample.id or 0,
        epoch=1,
        input=sample.input,
        messages=list(messages),
        target=_library("scorer").Target(sample.target),
        choices=sample.choices,
        metadata=sample.metadata,
    )
    calls = []

    async def generate(state: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(list(state.messages))
        if len(calls) > 1 or state.tools:
            why = "call the model twice" if len(calls) > 1 else "give it tools"
            raise ConfigError(f"the solvers {why}; expected one call without tools")
        if text is None:
            raise _Asked
        state.output = model.ModelOutput.from_content(MODEL, text)
        state.messages.append(state.output.message)
        return state

    try:
        for step in _steps(task):
            state = await step(state, generate)
            if state.completed:
                break
    except _Asked:
        return calls[0]
    if not calls:
        raise ConfigError("the solvers end without a call of the model; expected one call")
    return state


def _steps(task: Any) -> list[Any]:
    """The set-up and the solvers of a task, one by one; a chain is a sequence of solvers."""
    flat: list[Any] = []
    for part in (getattr(task, "setup", None), task.solver):
        flat += [] if part is None else list(part) if isinstance(part, Sequence) else [part]
    return flat


def _text(name: str, message: Any) -> str:
    """The text of a message."""
    other = [] if isinstance(message.content, str) else [p.type for p in message.content if p.type != "text"]
    if other:
        raise ConfigError(f"{name}: a message has a part of type {other[0]!r}; expected text")
    return message.text


def _library(module: str) -> Any:
    try:
        return importlib.import_module(f"inspect_ai.{module}")
    except ImportError as error:
        raise ConfigError(f"inspect_ai: cannot be imported ({error}); pip install inspect-ai") from None
