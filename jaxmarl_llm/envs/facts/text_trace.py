"""A trace of `facts.trace` as text, and demonstrators of traces with planted mistakes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmarl_llm.envs.facts.search import LAST, look_up
from jaxmarl_llm.envs.facts.tasks import Task
from jaxmarl_llm.envs.facts.trace import ANSWER, FOUND
from jaxmarl_llm.envs.prompt_grammar import END


class TextTrace(NamedTuple):
    """A trace with its answer.

    Attributes:
        queries: Its searches.
        results: The facts that each of them returned.
        answer: One letter.
    """

    queries: list[str]
    results: list[list[str]]
    answer: str

    def text(self, searches: int) -> str:
        """Its first searches, as prompts show them. ``searches``: their number."""
        shown = zip(self.queries[:searches], self.results, strict=False)
        return "".join(query + FOUND + "".join(found) + END for query, found in shown)

    def whole(self) -> str:
        """The searches and the answer, as prompts show them."""
        return self.text(len(self.queries)) + ANSWER + self.answer

    def segments(self) -> list[tuple[str, str]]:
        """Each segment, behind the text of the searches before it."""
        said = [*self.queries, ANSWER + self.answer]
        return [(self.text(i), segment) for i, segment in enumerate(said)]


def good_cut(task: Task, trace: TextTrace) -> int:
    """The cut of a perfect refiner: before the first search without evidence, or else before the last; 0 accepts.

    Args:
        task: The task of the trace.
        trace: A trace of one search or several.
    """
    missed = [i + 1 for i, found in enumerate(trace.results) if not set(found) & set(task.path)]
    return 0 if trace.answer == task.answer else [*missed, len(trace.queries)][0]


def demonstrated_trace(
    rng: np.random.Generator, task: Task, searches: int, relation_error_rate: float, answer_error_rate: float
) -> TextTrace:
    """A trace with planted mistakes: one query for each hop, then an answer. Each step follows the one before it.

    Args:
        rng: Draws the mistakes.
        task: The task; the question is followed relation by relation.
        searches: The most searches of the trace.
        relation_error_rate: Probability that a query asks for another relation of the task.
        answer_error_rate: Probability that the answer is another entity of the trace. A trace whose last search
            returned nothing always has such an answer.
    """
    relations = sorted({fact[1] for fact in task.facts})
    queries: list[str] = []
    for hop, relation in enumerate(task.question[1:][:searches]):
        if rng.random() < relation_error_rate:
            others = [other for other in relations if other != relation]
            relation = others[rng.integers(len(others))]
        queries.append((LAST if hop else task.question[0]) + relation)
    results = look_up(task.facts, queries)
    answer = results[-1][0][2] if results[-1] else ""
    others = sorted(
        {task.question[0], *(letter for some in results for fact in some for letter in fact[::2])} - {answer}
    )
    if not answer or rng.random() < answer_error_rate:
        answer = others[rng.integers(len(others))]
    return TextTrace(queries, results, answer)
