"""Sizes that arrays are padded to, so that few shapes are compiled."""

from __future__ import annotations


def up_to(n: int, multiple: int) -> int:
    """Round ``n`` up to the next multiple of ``multiple``."""
    return -(-n // multiple) * multiple


def bucket(n: int, smallest: int = 1) -> int:
    """Round ``n`` up to the next bucket size: smallest * {1, 1.5} * 2^i, rounded up.

    There are two sizes in an octave, so at most 1/3 of a bucket is padding.

    Args:
        n: number of entries to hold.
        smallest: the least bucket size.
    """
    size = max(smallest, 1)
    while size < n:
        half = size + (size + 1) // 2
        if half >= n:
            return half
        size *= 2
    return size


def coarse(n: int, smallest: int, factor: int = 4) -> int:
    """Round ``n`` up to smallest * factor^i, for programs that take longer to compile than padding takes to run.

    Args:
        n: number of entries to hold.
        smallest: the least size, at least 1.
        factor: ratio of a size to the one before, at least 2.
    """
    size = smallest
    while size < n:
        size *= factor
    return size


def doubled(n: int, smallest: int) -> int:
    """Round ``n`` up as `coarse` does with factor 2: sizes where several of them occur together, as products.

    Args:
        n: number of entries to hold.
        smallest: the least size, at least 1.
    """
    return coarse(n, smallest, 2)


def coarse_sizes(n: int, smallest: int) -> list[int]:
    """All sizes that `coarse` gives for 1 to ``n`` entries.

    Args:
        n: number of entries to hold, at most.
        smallest: the least size, at least 1.
    """
    sizes = [smallest]
    while sizes[-1] < n:
        sizes.append(sizes[-1] * 4)
    return sizes
