"""What teams of perfect roles and of demonstrators reach on `facts`, by playing their episodes:

    python -m experiments.studies.facts_bounds

The protocols are `pipeline` and `mask`. A perfect team reaches F1 = 1 on every task. A perfect generator among
demonstrators shows what the generator alone can win. The difference to 1 is what the other two roles can win. A role of
`mask` is perfect where its demonstrator plants no mistakes. Its plan cannot be right but by chance, because no planner
reads a fact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm.envs.facts import mask, mask_samples, pipeline, tasks
from jaxmarl_llm.envs.facts.array import Config
from jaxmarl_llm.envs.facts.mask_settings import ANSWERER, END_OF_SEARCH, SEARCHER
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


MASK_RATES = {
    "planner": ("plan_error_rate",),
    "searcher": ("end_error_rate", "hop_error_rate"),
    "summarizer": ("selection_error_rate",),
    "updater": ("update_error_rate",),
    "answerer": ("answer_error_rate",),
}
EVERY_RATE = tuple(rate for rates in MASK_RATES.values() for rate in rates)
MASK_TEAMS = {
    "perfect": EVERY_RATE,
    **{f"perfect {role}": rates for role, rates in MASK_RATES.items()},
    "demonstrators": (),
}


def reached_by_mask(perfect: tuple[str, ...] = (), episodes: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Mean F1 of the first and of the last answer of demonstrators in the protocol `mask`.

    Args:
        perfect: Rates of mistakes that are 0.
        episodes: Number of training tasks.
        seed: Of tasks and mistakes.
    """
    none: dict[str, Any] = dict.fromkeys(perfect, 0.0)
    settings = dataclasses.replace(mask.Settings(), **none)
    config, rng = Config(protocol="mask", mask=settings), np.random.default_rng(seed)
    f1 = np.zeros((episodes, 2))
    for i in range(episodes):
        task, noise = tasks.drawn(rng, config), rng.permutation(FACTS).tolist()
        said = mask_samples.demonstrated(rng, settings, task, noise)
        ends = said[SEARCHER][0][1] == END_OF_SEARCH
        answers = [answer for _, answer in said[ANSWERER]]
        f1[i] = [answer == task.answer for answer in (answers[0], answers[0 if ends else 1])]
    first, last = f1.mean(0).tolist()
    return first, last


def main() -> None:
    """Print what each team reaches in the environment as it is."""
    for name, team in TEAMS.items():
        f1, penalty = reached(Config(), team)
        print(f"{name:18} F1 {f1:.3f}, penalties {penalty:.3f}")
    for name, rates in MASK_TEAMS.items():
        first, last = reached_by_mask(rates)
        print(f"mask, {name:18} F1 of the first answer {first:.3f}, of the last {last:.3f}")


if __name__ == "__main__":
    main()
