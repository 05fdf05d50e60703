"""pass@k and its relatives, as pure functions of the results of n samples of one task.

``pass_at_k`` is the unbiased estimator (Chen et al. 2021, Evaluating Large Language Models Trained on Code). It
estimates the chance that at least one of k samples, drawn without replacement from the n, is correct. The ``first``
family is MAGRPO's: it looks at the first k samples in the order they were drawn. So its expectation is the same but its
variance larger.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n-c, k) / C(n, k): ``c`` of ``n`` samples are correct. ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not 0 <= c <= n:
        raise ValueError(f"pass_at_k: expected 0 <= c <= n, got c={c} and n={n}")
    if not 1 <= k <= n:
        raise ValueError(f"pass_at_k: expected 1 <= k <= n, got k={k} and n={n}")
    return 1.0 - comb(n - c, k) / comb(n, k)  # exact integers; comb is 0 when fewer than k are wrong


def best_of_k(values: Sequence[float], k: int) -> float:
    """Expected largest of k of the ``values``, drawn without replacement: unbiased for the best of k new samples.

    The i-th smallest of n values is the largest of C(i-1, k-1) of the C(n, k) subsets. Of values 0 and 1 the result is
    `pass_at_k`. ValueError unless 1 <= k <= n.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise ValueError(f"best_of_k: expected 1 <= k <= n, got k={k} and n={n}")
    ordered = sorted(values)
    return sum(comb(i - 1, k - 1) * value for i, value in enumerate(ordered, 1)) / comb(n, k)


def _first(values: Sequence[float], k: int) -> Sequence[float]:
    if not 1 <= k <= len(values):
        raise ValueError(f"expected 1 <= k <= {len(values)}, the number of samples, got {k}")
    return values[:k]


def pass_or_not(solved: Sequence[bool], k: int) -> float:
    """PassOrNot@k: 1.0 if one of the first k samples passes all tests. ``solved``: whether each sample does."""
    return float(any(_first(solved, k)))


def accuracy(shares: Sequence[float], k: int) -> float:
    """Accuracy@k: the largest of ``shares``, the shares of tests passed, of the first k samples."""
    return float(max(_first(shares, k)))


def max_coop(bonuses: Sequence[float], k: int) -> float:
    """MaxCoop@k: the largest of ``bonuses``, the cooperation rewards, of the first k samples."""
    return float(max(_first(bonuses, k)))


def summary(tasks: Iterable[Mapping[str, Sequence[float]]], ks: Sequence[int] = (1,)) -> dict[str, float]:
    """Means over ``tasks`` of the four figures at each k of ``ks``.

    The figures are ``pass@k``, ``pass_or_not@k``, ``accuracy@k`` and ``max_coop@k``. A task is ``{solved, tests,
    cooperation}``, one value a sample. Tasks without a sample are left out and counted in ``skipped``; a k beyond a
    task's samples raises ValueError.
    """
    rows = list(tasks)
    judged = [row for row in rows if len(row["solved"])]
    out: dict[str, float] = {"tasks": float(len(judged)), "skipped": float(len(rows) - len(judged))}
    for k in ks:
        each = [
            {
                "pass": pass_at_k(len(row["solved"]), sum(map(bool, row["solved"])), k),
                "pass_or_not": pass_or_not([bool(s) for s in row["solved"]], k),
                "accuracy": accuracy(row["tests"], k),
                "max_coop": max_coop(row["cooperation"], k),
            }
            for row in judged
        ]
        for name in ("pass", "pass_or_not", "accuracy", "max_coop"):
            out[f"{name}@{k}"] = sum(row[name] for row in each) / len(each) if each else float("nan")
    return out
