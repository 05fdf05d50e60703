"""Real questions and the passages that answer them: HotpotQA, all passages in one corpus, searched by BM25.

The data are the file that `jaxmarl_llm.data.loaders` reads as ``hotpotqa``: questions of the distractor setting with
their own passages. The corpus has the passages of all questions, each once. Hashes of the words of a question decide
its part, so a question never changes its part. Test and validation have 20 % each, and training has the rest. Of all
100 questions these are 15, 24 and 61, and 7, 8 and 15 of the 30 samples in the package.

Shared arguments: ``data_dir`` is the folder of the data sets or its URL; None: the samples in the package. ``titles``
are those of the passages that support the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import bm25, checks
from jaxmarl_llm.envs.answer_rules import normalize_answer
from jaxmarl_llm.envs.splits import is_held_out
from jaxmarl_llm.errors import ConfigError

NAME = "hotpotqa"  # of the data set
SPLITS = ("train", "validation", "test")
Question = dict[str, Any]


class Passage(NamedTuple):
    """A passage of the corpus, without line breaks.

    Attributes:
        title: Its title.
        text: Its sentences.
    """

    title: str
    text: str


class Corpus(NamedTuple):
    """The passages of all questions.

    Attributes:
        passages: Passages, each once.
        counted: Their counted words, title and text together.
    """

    passages: tuple[Passage, ...]
    counted: bm25.Index


def one_line(text: str) -> str:
    """``text`` with single spaces in place of line breaks and other space."""
    return " ".join(text.split())


@lru_cache(maxsize=4)
def corpus(data_dir: str | None) -> Corpus:
    """The corpus of the data, read once a process."""
    rows = [row for split in ("train", "test") for row in loaders.load(NAME, data_dir=data_dir, split=split)[0]]
    pairs = (Passage(one_line(title), one_line(text)) for row in rows for title, text in row["passages"])
    passages = tuple(dict.fromkeys(pairs))
    return Corpus(passages, bm25.index([f"{passage.title} {passage.text}" for passage in passages]))


def questions(data_dir: str | None, split: str, seed: int) -> tuple[list[Question], str]:
    """Questions of one part, and their source.

    Left out, and counted in the source: questions whose answer has no word but articles. Every reply without a word is
    equal to such an answer.

    Args:
        data_dir: As above.
        split: The part, one of `SPLITS`.
        seed: Determines the order of questions.

    Returns:
        Questions ``{id, question, answer, supporting}``, and a text that names the files. ``supporting`` has titles.

    Raises:
        ConfigError: The data cannot be read, or the part is empty.
    """
    rows, source = loaders.load(NAME, data_dir=data_dir, split="test" if split == "test" else "train", seed=seed)
    if split != "test":
        aside = split == "validation"
        rows = [row for row in rows if is_held_out(loaders.content(row["question"])) == aside]
        source += f", {len(rows)} of them in {split}"
    kept = [row for row in rows if normalize_answer(row["answer"])]
    if not kept:
        raise ConfigError(
            f"{checks.ARGS}.split: expected a part with questions, got {split!r}, which is empty in {source}"
        )
    left_out = f", without {len(rows) - len(kept)} whose answer has no word" if len(kept) < len(rows) else ""
    return [_question(row) for row in kept], source + left_out


def _question(row: dict[str, Any]) -> Question:
    supporting = [one_line(title) for title in row["supporting"]]
    return {"id": row["id"], "question": one_line(row["question"]), "answer": row["answer"], "supporting": supporting}


def retrieve(found: Corpus, queries: Iterable[str], results: int, most: int) -> tuple[int, ...]:
    """Places of the passages that queries return, each once: first the best of each query, then the second ones.

    Args:
        found: The corpus that is searched.
        queries: Texts.
        results: Passages of a query, at most.
        most: Passages of all queries, at most.
    """
    ranked = zip_longest(*(bm25.top(query, found.counted, results) for query in queries))
    return tuple(dict.fromkeys(i for rank in ranked for i in rank if i is not None))[:most]


def recall(found: Corpus, titles: Sequence[str], places: Sequence[int]) -> float:
    """Share of ``titles`` among the passages at ``places`` of the corpus ``found``."""
    seen = {found.passages[i].title for i in places}
    return sum(title in seen for title in titles) / len(titles)
