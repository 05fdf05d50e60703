"""What the best choices of `defer` reach, exactly, by enumeration of every choice for every type of question:

    python -m experiments.studies.defer_bounds

The worth of a choice is the probability of a right answer, minus what the choice costs. The best fixed choice is one
choice for all questions. The oracle takes the best choice of each type.

Where the creator is a role, imitation of the expert may raise its accuracy. The oracle is computed for the creator that
stage 0 ends with at best, and for one that is always right. The difference in deferral is what an outer loop can win.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmarl_llm.envs.defer.array import CHOICES, DEFER, TYPES, Config
from jaxmarl_llm.recipes import hila


class Best(NamedTuple):
    """The best choices and their worth.

    Attributes:
        fixed: the choice of largest mean worth
        fixed_worth: its mean worth
        of_type: the best choice of each type
        worth: mean worth of those
        margin: the smallest difference between the best choice of a type and the next one
    """

    fixed: str
    fixed_worth: float
    of_type: tuple[str, ...]
    worth: float
    margin: float

    @property
    def deferral(self) -> float:
        """Share of types whose best choice is to defer."""
        return self.of_type.count(CHOICES[DEFER]) / len(self.of_type)


def worth(config: Config, reward: Mapping[str, float]) -> np.ndarray:
    """Worth of each choice [4 types, 4 choices].

    Args:
        config: Settings of the environment, with a planted creator.
        reward: Weights of reward components.
    """
    right = np.array([config.peer_1, config.peer_2, config.creator, config.expert]).T
    costs = np.array([{"c": reward.get("create", 0.0), "d": reward.get("defer", 0.0)}.get(x, 0.0) for x in CHOICES])
    return reward.get("accuracy", 0.0) * right + costs


def best(config: Config, reward: Mapping[str, float], shares: Sequence[float] = (0.25,) * len(TYPES)) -> Best:
    """The best choices; of equal ones the first.

    Args:
        config: Settings of the environment, with a planted creator.
        reward: Weights of reward components.
        shares: Share of each type in the questions.
    """
    table = worth(config, reward)
    mean, ordered = np.asarray(shares) @ table, np.sort(table, axis=1)
    chosen = tuple(CHOICES[i] for i in table.argmax(1))
    margin = float((ordered[:, -1] - ordered[:, -2]).min())
    return Best(CHOICES[mean.argmax()], float(mean.max()), chosen, float(np.asarray(shares) @ table.max(1)), margin)


def imitator(config: Config) -> Config:
    """The environment with the accuracy of a creator that does what its demonstrations show, on average.

    Args:
        config: Settings of the environment, of which ``taught`` is read.
    """
    add, subtract, multiply, divide = (share + (1 - share) / 10 for share in config.taught)
    return dataclasses.replace(config, creator=(add, subtract, multiply, divide))


def main() -> None:
    """Print the best choices of the environment as it is, and before and after the creator is taught."""
    found = best(Config(), hila.Config().reward)
    print(f"best fixed choice: {found.fixed}, {found.fixed_worth:.4f}")
    print(f"by type {' '.join(TYPES)}: {' '.join(found.of_type)}, {found.worth:.4f}")
    print(f"to be won: {found.worth - found.fixed_worth:.4f}; smallest margin {found.margin:.4f}")
    always = dataclasses.replace(Config(), creator=(1.0, 1.0, 1.0, 1.0))
    for creator, config in {"creator of stage 0": imitator(Config()), "creator always right": always}.items():
        own = best(config, hila.Config().reward)
        print(f"{creator}: {' '.join(own.of_type)}, {own.worth:.4f}; deferral {own.deferral:.2f}")


if __name__ == "__main__":
    main()
