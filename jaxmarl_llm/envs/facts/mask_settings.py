"""The protocol `mask` of facts in names, numbers and settings: see `facts.mask`.

Shared argument: ``settings`` are those of the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.facts import pipeline
from jaxmarl_llm.envs.facts.pipeline import LONGEST, QUOTES
from jaxmarl_llm.envs.facts.tasks import FACTS, HOPS, QUESTION

ROLES = ("planner", "searcher", "summarizer", "updater", "answerer")
PLANNER, SEARCHER, SUMMARIZER, UPDATER, ANSWERER = range(len(ROLES))
COMPONENTS = ("f1", "em", "score", "evidence", "invalid", "format", "turns")
MARKS = "PQSUG"
ORDER = (PLANNER, ANSWERER, SEARCHER, SUMMARIZER, UPDATER, ANSWERER, SEARCHER)  # who acts at each turn
CLOSING = len(ORDER) - 1  # the turn of the search behind the round
PLANNED = HOPS  # steps of a plan, at most
END_OF_SEARCH = "."
ADD = "a"


@dataclass(frozen=True)
class Settings:
    """The settings of documents, steps and demonstrations."""

    documents: int = 6  # facts that the summarizer reads, at most
    distractors: int = 2  # of them that no query returned
    kept: int = 2  # facts of a summary, at most
    # Probabilities of mistakes in demonstrations.
    plan_error_rate: float = 0.2  # the first step of a plan is about another relation
    end_error_rate: float = 0.1  # the first search ends, or the closing one asks
    hop_error_rate: float = 0.4  # the second query of a question with two hops is missing
    selection_error_rate: float = 0.2  # the facts of a summary are drawn at random
    update_error_rate: float = 0.3  # an update is drawn at random
    answer_error_rate: float = 0.3  # the answer is another entity of the steps

    def check(self, path: str) -> None:
        checks.in_range(path, self, 1, FACTS, "documents")
        checks.in_range(path, self, 0, self.documents - 1, "distractors")
        checks.in_range(path, self, 1, min(QUOTES, self.documents), "kept")
        checks.probabilities(path, self, "plan_error_rate", "end_error_rate", "hop_error_rate")
        checks.probabilities(path, self, "selection_error_rate", "update_error_rate", "answer_error_rate")

    @property
    def steps(self) -> int:
        """S, the steps of a plan and the facts of a summary."""
        return PLANNED + self.kept

    @property
    def reading(self) -> pipeline.Settings:
        """The settings of the protocol `pipeline` for documents, quotes and answers."""
        return pipeline.Settings(
            documents=self.documents,
            distractors=self.distractors,
            kept=self.kept,
            hop_error_rate=self.hop_error_rate,
            broad_rate=0.0,
            flood_rate=0.0,
            selection_error_rate=self.selection_error_rate,
            repeat_rate=0.0,
            answer_error_rate=self.answer_error_rate,
            long_rate=0.0,
        )


def prompt_lengths(settings: Settings) -> tuple[int, int, int, int, int]:
    """The number of tokens of the longest prompt of each role."""
    asked = 1 + QUESTION + 1
    steps = asked + 3 * settings.steps + 1
    updates = asked + 3 * PLANNED + 1 + 1 + 3 * settings.kept
    return asked, steps + 1 + LONGEST, asked + 3 * settings.documents + 1, updates, steps


def prompt_length(settings: Settings) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return max(prompt_lengths(settings))
