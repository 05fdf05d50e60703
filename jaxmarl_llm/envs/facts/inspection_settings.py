"""The protocol `inspect` of facts in names, numbers and settings: see `facts.inspection`.

Shared argument: ``settings`` are those of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.facts.pipeline import LONGEST
from jaxmarl_llm.envs.facts.tasks import FACTS, QUESTION

ROLES = ("planner", "solver", "inspector")
COMPONENTS = ("em", "before", "change", "interventions", "passed_right", "evidence", "format", "turns")
PLANNER, SOLVER, INSPECTOR = range(3)
MARKS = "PSI"
PASS, REWRITE, EXPAND, RETRY = LETTERS = "pwer"
MOST = 2  # interventions: 8 turns
ANSWER = 2  # characters of an answer that the inspector reads, at most


@dataclass(frozen=True)
class Settings:
    """The settings of documents, interventions and demonstrations."""

    documents: int = 6  # facts that the solver reads, at most
    interventions: int = MOST  # of the inspector in an episode, at most
    trace: bool = True  # whether the inspector reads queries, facts and answer beside the question
    # Probabilities of mistakes in demonstrations.
    query_error_rate: float = 0.2  # the first query names another relation
    hop_error_rate: float = 0.4  # the second hop is not asked for
    answer_error_rate: float = 0.3  # the answer is another entity of the facts
    verdict_error_rate: float = 0.3  # the inspector writes another letter

    def check(self, path: str) -> None:
        checks.in_range(path, self, 1, FACTS, "documents")
        checks.in_range(path, self, 1, MOST, "interventions")
        checks.probabilities(path, self, "query_error_rate", "hop_error_rate")
        checks.probabilities(path, self, "answer_error_rate", "verdict_error_rate")


def queries_length(settings: Settings) -> int:
    """Q: the number of characters of the queries of all turns, with a comma between two turns."""
    return (LONGEST + 1) * (settings.interventions + 1) - 1


def prompt_lengths(settings: Settings) -> tuple[int, int, int]:
    """The number of tokens of the longest prompt of each role."""
    reads = 1 + 3 * settings.documents + 1 + QUESTION + 1
    inspects = reads + 1 + queries_length(settings) + 1 + ANSWER if settings.trace else 1 + QUESTION + 1
    return reads, reads, inspects


def prompt_length(settings: Settings) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return max(prompt_lengths(settings))
