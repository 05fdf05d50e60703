"""What teams of perfect roles and of demonstrators reach on the pipeline of `facts`, by playing their episodes:

    python -m experiments.studies.facts_bounds

A perfect team reaches F1 = 1 on every task. A perfect generator among demonstrators shows what the generator alone can
win. The difference to 1 is what the other two roles can win.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxmarl_llm.envs.facts import pipeline, tasks
from jaxmarl_llm.envs.facts.array import Config
from jaxmarl_llm.envs.facts.pipeline import Settings
from jaxmarl_llm.envs.facts.tasks import FACTS, Task


class Team(NamedTuple):
    """Three roles: each a function of a generator, the settings, the task, and what the role reads."""

    rewriter: Callable[[np.random.Generator, Settings, Task], list[str]]
    selector: Callable[[np.random.Generator, Settings, Task, list[str]], list[str]]
    generator: Callable[[np.random.Generator, Settings, Task, list[str]], str]


DEMONSTRATORS = Team(pipeline.demonstrated_queries, pipeline.demonstrated_quotes, pipeline.demonstrated_answer)
PERFECT = Team(
    lambda rng, settings, task: pipeline.good_queries(task),
    lambda rng, settings, task, documents: pipeline.good_quotes(task, documents),
    lambda rng, settings, task, kept: pipeline.good_answer(task, kept),
)
TEAMS = {
    "perfect": PERFECT,
    "perfect rewriter": DEMONSTRATORS._replace(rewriter=PERFECT.rewriter),
    "perfect selector": DEMONSTRATORS._replace(selector=PERFECT.selector),
    "perfect generator": DEMONSTRATORS._replace(generator=PERFECT.generator),
    "demonstrators": DEMONSTRATORS,
}


class Reached(NamedTuple):
    """Means over tasks.

    Attributes:
        f1: F1 of the answer.
        penalty: Sum of the penalties of all roles.
    """

    f1: float
    penalty: float


def episode(rng: np.random.Generator, config: Config, team: Team) -> tuple[float, float]:
    """F1 and the sum of penalties of one episode on a training task.

    Args:
        rng: Draws the task and the mistakes.
        config: Settings of the environment.
        team: Who plays.
    """
    settings, task = config.pipeline, tasks.drawn(rng, config)
    queries = team.rewriter(rng, settings, task)
    documents = pipeline.retrieved(settings, task.facts, rng.permutation(FACTS).tolist(), queries)
    quotes = team.selector(rng, settings, task, documents)
    kept = list(dict.fromkeys(quotes))[: settings.kept]
    answer = team.generator(rng, settings, task, kept)
    bad = len(queries) > pipeline.QUERIES, len(set(quotes)) < len(quotes), len(answer) > settings.answer_length
    return 2 * (task.answer in answer) / (1 + len(answer)), -float(np.dot(bad, settings.penalties))


def reached(config: Config, team: Team, episodes: int = 2000, seed: int = 0) -> Reached:
    """Mean F1 and penalties of a team.

    Args:
        config: Settings of the environment.
        team: Who plays.
        episodes: Number of training tasks.
        seed: Of tasks and mistakes.
    """
    rng = np.random.default_rng(seed)
    return Reached(*np.mean([episode(rng, config, team) for _ in range(episodes)], axis=0).tolist())


def main() -> None:
    """Print what each team reaches in the environment as it is."""
    for name, team in TEAMS.items():
        f1, penalty = reached(Config(), team)
        print(f"{name:18} F1 {f1:.3f}, penalties {penalty:.3f}")


if __name__ == "__main__":
    main()
