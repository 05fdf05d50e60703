"""BM25 over a handful of passages: which passages share the query's rare words?

Lucene's variant (k1 = 1.5, b = 0.75), scored directly. The package bm25s does the same for large corpora, but its
import loads JAX and runs a kernel, which a worker process must not do. The tests compare with it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

K1, B = 1.5, 0.75


def words(text: str) -> list[str]:
    """Words of ``text`` in lower case."""
    return re.findall(r"\w+", text.lower())


def bm25(query: str, passages: Sequence[str]) -> list[float]:
    """Score of each of the ``passages`` for ``query``; 0.0 where no word is shared."""
    bags = [Counter(words(p)) for p in passages]
    lengths = [bag.total() for bag in bags]
    mean = sum(lengths) / len(lengths) if any(lengths) else 1.0
    scores = [0.0] * len(bags)
    for word in words(query):
        df = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(bags) - df + 0.5) / (df + 0.5))
        for i, bag in enumerate(bags):
            tf = bag[word]
            scores[i] += idf * tf / (tf + K1 * (1 - B + B * lengths[i] / mean))
    return scores


def top(query: str, passages: Sequence[str], count: int) -> list[int]:
    """Indices of the best ``count`` passages for ``query``, best first.

    Ties keep the order of the ``passages``. A passage that scores 0 is left out.
    """
    scores = bm25(query, passages)
    return [i for i in sorted(range(len(scores)), key=lambda i: -scores[i]) if scores[i] > 0][:count]
