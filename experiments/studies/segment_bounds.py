"""What length is possible on `segments`, and what demonstrators of stage 0 have, exactly, by enumeration:

    python -m experiments.studies.segment_bounds

The shortest derivation is the shortest text from which the answer follows. The shortest answer is the shortest text
whose answer is right: a reasoner that works everything out in its head could write it. Figures of demonstrators are
over all of their texts, with the probabilities of these. Lengths are in tokens, without eos.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from experiments.configs.scma import tiny
from jaxmarl_llm.envs.chain.array import work_out
from jaxmarl_llm.envs.segments.array import Config, needed_texts


class Bounds(NamedTuple):
    """Lengths and accuracies.

    Attributes:
        derivation: length of the shortest derivation
        answer: length of the shortest right answer
        demonstrated: mean length of demonstrated texts
        without_filler: mean length of these without their filler
        accuracy: accuracy of demonstrated texts
    """

    derivation: int
    answer: int
    demonstrated: float
    without_filler: float
    accuracy: float

    @property
    def reduction(self) -> float:
        """The share of the demonstrated length that the shortest derivation saves."""
        return 1 - self.derivation / self.demonstrated


def questions(config: Config) -> Iterator[tuple[tuple[int, ...], str]]:
    """Every question, as its numbers and signs. ``config``: the settings of the environment."""
    for numbers in itertools.product(range(config.largest + 1), repeat=config.terms):
        for signs in itertools.product("+-", repeat=config.needed):
            yield numbers, "".join(signs)


def shapes(config: Config) -> Iterator[tuple[float, list[int], list[int]]]:
    """Every shape of a demonstrated text: its probability, lengths of its steps, lengths of its filler sentences.

    ``config``: the settings of demonstrations.
    """
    size, skip = len(needed_texts(config, [0] * config.terms, "+" * config.needed)[0]), config.skip_rate
    rate = config.filler_rate
    filler = {0: 1 - rate} | {letters: rate / config.filler for letters in range(1, config.filler + 1)}
    for skipped in itertools.product((False, True), repeat=config.needed - 1):
        chance = np.prod([skip if gone else 1 - skip for gone in skipped])
        steps = [size] * (config.needed - sum(skipped))
        for letters in itertools.product(filler, repeat=config.terms):
            of_letters = np.prod([filler[x] for x in letters])
            yield float(chance * of_letters), steps, [x for x in letters if x]


def text_length(sentences: list[int]) -> int:
    """Length of a text with a separator between sentences. ``sentences``: their lengths."""
    return sum(sentences) + max(0, len(sentences) - 1)


def demonstrated_accuracy(config: Config) -> float:
    """Accuracy of demonstrated texts, over all questions and all errors. ``config``: the settings."""
    right, every = 0.0, list(questions(config))
    for wrong in itertools.product((False, True), repeat=config.needed):
        chance = np.prod([config.step_error_rate if w else 1 - config.step_error_rate for w in wrong])
        for numbers, signs in every:
            taken = "".join("+-"[(sign == "+") == w] for sign, w in zip(signs, wrong, strict=True))
            same = work_out([*numbers], taken, config.modulus) == work_out([*numbers], signs, config.modulus)
            right += float(chance) * same / len(every)
    return right


def bounds(config: Config) -> Bounds:
    """Lengths and accuracies of the environment. ``config``: its settings."""
    numbers, signs = next(questions(config))
    steps = needed_texts(config, numbers, signs)
    every = list(shapes(config))
    return Bounds(
        derivation=text_length([*map(len, steps)]),
        answer=len(f"={work_out([*numbers], signs, config.modulus)}"),
        demonstrated=sum(chance * text_length(of_steps + filler) for chance, of_steps, filler in every),
        without_filler=sum(chance * text_length(of_steps) for chance, of_steps, _ in every),
        accuracy=demonstrated_accuracy(config),
    )


def main() -> None:
    """Print the figures of the environment of ``scma:tiny``."""
    found = bounds(tiny().env.build())
    print(f"shortest derivation {found.derivation}, shortest right answer {found.answer}")
    print(f"demonstrated {found.demonstrated:.2f}, without filler {found.without_filler:.2f}")
    print(f"the shortest derivation saves {found.reduction:.3f} of the demonstrated length")
    print(f"accuracy of demonstrations {found.accuracy:.4f}")


if __name__ == "__main__":
    main()
