"""ROUGE of a text against human references: a figure to log, never a reward.

F1 of shared words (ROUGE-1) and of the longest common subsequence of words (ROUGE-L). Words are runs of the letters a-z
and digits in lower case, without stemming. With several references the best one counts for each figure (Lin, 2004).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

METRICS = ("rouge1", "rougeL")


def rouge(text: str, references: Sequence[str]) -> dict[str, float]:
    """ROUGE-1 and ROUGE-L of ``text``, each in [0, 1]; 0.0 without references.

    Args:
        text: The text to compare.
        references: Human texts of the same task.
    """
    words = _words(text)
    pairs = [(words, _words(reference)) for reference in references]
    one = [_f1(sum((Counter(a) & Counter(b)).values()), len(a), len(b)) for a, b in pairs]
    longest = [_f1(_common_subsequence(a, b), len(a), len(b)) for a, b in pairs]
    return dict(zip(METRICS, (max(one, default=0.0), max(longest, default=0.0))))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _f1(shared: int, first: int, second: int) -> float:
    """2 PR / (P + R) with P = shared / first and R = shared / second."""
    return 2 * shared / (first + second) if shared else 0.0


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for x in a:
        above = 0  # the previous row's value one column to the left
        for j, y in enumerate(b, 1):
            above, row[j] = row[j], above + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]
