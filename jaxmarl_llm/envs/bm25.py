"""BM25 over a few thousand passages at most: which passages share the query's rare words?

Lucene's variant (k1 = 1.5, b = 0.75), scored directly. The package bm25s does the same for large corpora, but its
import loads JAX and runs a kernel, which a worker process must not do. The tests compare with it.

Passages that are searched often are counted once, by `index`. A list of passages is counted at each call.

Shared arguments: ``query`` is a text. ``passages`` are texts, or their index.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

K1, B = 1.5, 0.75


class Index(NamedTuple):
    """The counted words of passages.

    Attributes:
        postings: Word -> (place, count) of each passage that has the word.
        lengths: Number of words of each passage.
    """

    postings: Mapping[str, Sequence[tuple[int, int]]]
    lengths: Sequence[int]


def words(text: str) -> list[str]:
    """Words of ``text`` in lower case."""
    return re.findall(r"\w+", text.lower())


def index(passages: Sequence[str]) -> Index:
    """Count the words of ``passages``."""
    bags = [Counter(words(p)) for p in passages]
    postings: dict[str, list[tuple[int, int]]] = {}
    for i, bag in enumerate(bags):
        for word, count in bag.items():
            postings.setdefault(word, []).append((i, count))
    return Index(postings, [bag.total() for bag in bags])


def bm25(query: str, passages: Sequence[str] | Index) -> list[float]:
    """Score of each of the ``passages`` for ``query``; 0.0 where no word is shared."""
    postings, lengths = passages if isinstance(passages, Index) else index(passages)
    mean = sum(lengths) / len(lengths) if any(lengths) else 1.0
    scores = [0.0] * len(lengths)
    for word in words(query):
        found = postings.get(word, ())
        idf = math.log(1 + (len(lengths) - len(found) + 0.5) / (len(found) + 0.5))
        for i, tf in found:
            scores[i] += idf * tf / (tf + K1 * (1 - B + B * lengths[i] / mean))
    return scores


def top(query: str, passages: Sequence[str] | Index, count: int) -> list[int]:
    """Indices of the best ``count`` passages for ``query``, best first.

    Ties keep the order of the ``passages``. A passage that scores 0 is left out.
    """
    scores = bm25(query, passages)
    return [i for i in sorted(range(len(scores)), key=lambda i: -scores[i]) if scores[i] > 0][:count]
