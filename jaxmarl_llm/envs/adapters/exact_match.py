"""Exact-match tasks in the form of lm-evaluation-harness: `doc_to_text`, `doc_to_target` and a filter.

    from jaxmarl_llm.envs.adapters.exact_match import exact_match

    def make(path):
        return exact_match(path, "Q: {{question}}\\nA:", "{{answer}}", ignore_case=True)

The harness itself is not needed. ``doc_to_text`` and ``doc_to_target`` are Jinja templates, names of a field, or
functions of the document. The one role is ``solver``, and its reward has the component ``accuracy``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs.text_task import TextTask
from jaxmarl_llm.errors import ConfigError

Doc = Mapping[str, Any]
Part = str | Callable[[Doc], Any]


def exact_match(data: Any, doc_to_text: Part, doc_to_target: Part, **settings: Any) -> TextTask:
    """A task of one role whose answer has to match.

    Args:
        data: Documents, as `TextTask` takes them.
        doc_to_text: The prompt of a document.
        doc_to_target: Its answer, or a list of answers of which one has to match; a number counts in ``choices``.
        settings: Of `Matcher`, and ``held_out``, ``count``, ``instructions``, ``ask`` and ``name`` of `TextTask`.
    """
    shared = ("held_out", "count", "instructions", "ask", "name")
    of_task = {name: settings.pop(name) for name in shared if name in settings}
    matcher = Matcher(doc_to_target, **settings)
    prompts = {"solver": _Prompt(doc_to_text)}
    return TextTask(data, prompts, matcher, demonstrations={"solver": matcher.first_target}, **of_task)


@dataclass(frozen=True)
class _Prompt:
    part: Part

    def __call__(self, doc: Doc) -> str:
        return str(_value("doc_to_text", self.part, doc))


@dataclass(frozen=True)
class Matcher:
    """The reward: whether a text equals the target of its document.

    Attributes:
        target: ``doc_to_target``.
        answer: Regular expression whose first group, at its last match in a text, is the answer; None: the whole text.
        until: Texts at which an answer ends.
        ignore_case: Upper and lower case are equal.
        ignore_punctuation: Punctuation is left out.
        regexes_to_ignore: What these match is left out.
    """

    target: Part
    answer: str | None = None
    until: Sequence[str] = ()
    ignore_case: bool = False
    ignore_punctuation: bool = False
    regexes_to_ignore: Sequence[str] = ()

    def __call__(self, doc: Doc, texts: Mapping[str, str]) -> dict[str, float]:
        """{"accuracy": 1.0} for a match, else 0.0."""
        text = texts["solver"]
        for stop in self.until:
            text = text.partition(stop)[0]
        if self.answer is not None:
            found = list(re.finditer(self.answer, text))
            if not found:
                return {"accuracy": 0.0}
            text = found[-1][min(1, len(found[-1].groups()))] or ""
        return {"accuracy": float(self._plain(text) in map(self._plain, self.targets(doc)))}

    def targets(self, doc: Doc) -> list[str]:
        """The answers of a document."""
        value = _value("doc_to_target", self.target, doc)
        if isinstance(value, int) and not isinstance(value, bool) and "choices" in doc:
            value = doc["choices"][value]
        found = value if isinstance(value, (list, tuple)) else [value]
        if not found:
            raise ConfigError("doc_to_target: expected an answer, got an empty list")
        return [str(target) for target in found]

    def first_target(self, doc: Doc) -> str:
        """The first answer of a document, its demonstration."""
        return self.targets(doc)[0]

    def _plain(self, text: str) -> str:
        for pattern in self.regexes_to_ignore:
            text = re.sub(pattern, "", text)
        if self.ignore_case:
            text = text.lower()
        if self.ignore_punctuation:
            text = text.translate(str.maketrans("", "", string.punctuation))
        return text.strip()


def _value(what: str, part: Part, doc: Doc) -> Any:
    """What a template, the name of a field or a function says of a document."""
    if callable(part):
        return part(doc)
    if part in doc:
        return doc[part]
    import jinja2

    try:
        made = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(part).render(**doc)
    except jinja2.TemplateError as error:
        raise ConfigError(f"{what}: {type(error).__name__}: {error}") from None
    return int(made) if what == "doc_to_target" and "choices" in doc and made.isdecimal() else made
