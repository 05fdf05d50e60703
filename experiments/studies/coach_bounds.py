"""What can be won on `chain_coach` without labels, exactly, by enumeration of questions and of votes:

    python -m experiments.studies.coach_bounds

A player that imitates the demonstrations perfectly is right on every question without a minus. Elsewhere it is
right with probability ``1 - guess_rate (1 - 1 / modulus)``. Wrong answers are equally likely. The bounds are those of
such a player. Its n answers to a question vote. Agreement with right labels leads to accuracy 1. So 1 minus the
accuracy can be won. Questions with a wrong majority cannot be won without labels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from jaxmarl_llm.envs.chain.coach import TEST, TRAINING, Config, Question, questions, sides, work_out
from jaxmarl_llm.recipes import cpmobius


class Vote(NamedTuple):
    """Probabilities of the vote on one question.

    Attributes:
        right: that the label is the right answer
        in_band: that the share of the majority is in the band
    """

    right: float
    in_band: float


class Bounds(NamedTuple):
    """Means over questions.

    Attributes:
        accuracy: of the imitating player on test questions
        won: 1 minus this accuracy
        label: probability that a label is right, on test questions
        useful: probability that a question of the demonstrated coach is in the band, one with training questions alone
    """

    accuracy: float
    won: float
    label: float
    useful: float


def arrangements(caps: list[int], total: int) -> float:
    """The sum of ``total! / (c_1! ... c_k!)`` over counts that add up to ``total``, each at most its cap.

    Args:
        caps: Largest count of each answer; a negative one allows none.
        total: Number of votes.
    """
    ways = np.zeros(total + 1)
    ways[0] = 1.0
    for cap in caps:
        after = np.zeros(total + 1)
        for count in range(min(cap, total) + 1):
            after[count:] += ways[: total + 1 - count] / math.factorial(count)
        ways = after
    return float(ways[total] * math.factorial(total))


def vote(right: float, truth: int, outcomes: int, n: int, band: tuple[float, float]) -> Vote:
    """The vote of n independent answers. Of equally frequent answers the smallest is the label.

    Args:
        right: Probability of the right answer; wrong ones are equally likely.
        truth: The right answer, from 0 to ``outcomes`` - 1.
        outcomes: Number of answers.
        n: Number of votes.
        band: Smallest and largest share of the majority.
    """
    wrong = (1 - right) / (outcomes - 1)
    label = inside = 0.0
    for count in range(n + 1):
        weight = math.comb(n, count) * right**count * wrong ** (n - count)
        caps = [count - 1] * truth + [count] * (outcomes - 1 - truth)
        label += weight * (arrangements(caps, n - count) if min(caps) >= 0 or n == count else 0.0)
        most = [arrangements([m] * (outcomes - 1), n - count) for m in range(n + 1)]  # no wrong answer above m
        for m in range(n + 1):
            share = max(m, count) / n
            if band[0] <= share <= band[1]:
                inside += weight * (most[m] - (most[m - 1] if m else 0.0))
    return Vote(label, inside)


def chance(config: Config, question: Question) -> float:
    """Probability that the imitating player answers right. ``config``: the environment. ``question``: a question."""
    return 1 - config.guess_rate * (1 - 1 / config.modulus) if "-" in question.signs else 1.0


def bounds(config: Config, recipe: cpmobius.Config) -> Bounds:
    """The bounds of the imitating player and of the demonstrated coach.

    Args:
        config: Settings of the environment.
        recipe: Its ``answers`` and ``band`` are read.
    """
    side = sides(config.terms, config.largest)
    rows = [(q, chance(config, q), work_out(list(q.numbers), q.signs, config.modulus)) for q in questions_of(config)]
    votes = {(p, t): vote(p, t, config.modulus, recipe.answers, recipe.band) for p, t in {(p, t) for _, p, t in rows}}
    test = [(p, votes[p, t].right) for (_, p, t), s in zip(rows, side, strict=True) if s == TEST]
    accuracy, label = np.mean(test, axis=0)
    written = [
        (written_by(config, q), votes[p, t].in_band) for (q, p, t), s in zip(rows, side, strict=True) if s == TRAINING
    ]
    weight, inside = np.array(written).T
    return Bounds(float(accuracy), float(1 - accuracy), float(label), float(weight @ inside / weight.sum()))


def questions_of(config: Config) -> tuple[Question, ...]:
    """All questions of ``config``."""
    return questions(config.terms, config.largest)


def written_by(config: Config, question: Question) -> float:
    """In proportion to the probability that a demonstration of the coach is this question.

    Args:
        config: Settings of the environment.
        question: A training question.
    """
    minus = question.signs.count("-")
    return config.minus_rate**minus * (1 - config.minus_rate) ** (len(question.signs) - minus)


def main() -> None:
    """Print the bounds of the environment as it is."""
    found = bounds(Config(), cpmobius.Config())
    print(f"accuracy of imitation: {found.accuracy:.4f}; to be won: {found.won:.4f}")
    print(f"majority labels that are right: {found.label:.4f}")
    print(f"questions of the demonstrated coach in the band: {found.useful:.4f}")


if __name__ == "__main__":
    main()
