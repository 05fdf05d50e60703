"""What perfect players and demonstrators reach on the protocol `tags` of facts, and how many tokens they need:

    python -m experiments.studies.tag_bounds

A token counts once for each role that reads or writes it at the same place of the same text. So a prompt that continues
what its role has read and written costs the tokens that are new. This is what a cache of prefixes computes for models
of their own. Every role of the team reads the sequence for itself, and the agent reads it once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxmarl_llm.envs.facts import tags, tasks
from jaxmarl_llm.envs.facts.array import Config
from jaxmarl_llm.envs.facts.tags import AGENT, ANSWERER, MARKS, PLANNER, SEARCHER, TAGS
from jaxmarl_llm.envs.facts.tasks import Task

Ids = Sequence[int] | np.ndarray
Turn = tuple[int, Ids, Ids]  # role, prompt, completion
WRITERS = dict(zip(TAGS, (PLANNER, SEARCHER, ANSWERER), strict=True))


def tokens_read(turns: Iterable[Turn]) -> int:
    """Tokens that the roles of one episode read and write. ``turns``: of the episode, as token ids or bytes."""
    seen = set()
    for role, prompt, said in turns:
        whole = (*map(int, prompt), *map(int, said))
        seen |= {(role, whole[:n]) for n in range(1, len(whole) + 1)}
    return len(seen)


def turns_of(said: Sequence[tuple[str, str]], players: str) -> list[Turn]:
    """An episode of `tags.demonstrated` as turns of the team or of the agent. A text has one byte for each token."""
    role = lambda segment: AGENT if players == "agent" else WRITERS[segment[0]]
    return [
        (role(segment), (MARKS[role(segment)] + before).encode(), (segment + tags.CLOSE).encode())
        for before, segment in said
    ]


def without_plan(task: Task, said: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """An episode of `tags.demonstrated` whose plan is left out. ``task``: of the episode."""
    asked = task.question + tags.END
    plan = said[0][1] + tags.CLOSE
    return [(asked + before[len(asked) + len(plan) :], segment) for before, segment in said[1:]]


class Reached(NamedTuple):
    """Means over tasks.

    Attributes:
        em: Share of right answers.
        team: Tokens of the team.
        agent: Tokens of the agent who writes the same.
        short: Tokens of the agent who writes the same without the plan.
    """

    em: float
    team: float
    agent: float
    short: float


def reached(config: Config, errors: Sequence[float], episodes: int = 2000, seed: int = 0) -> Reached:
    """Means over training tasks.

    Args:
        config: Settings of the environment.
        errors: Probabilities of mistakes: second hop not planned, another relation, another answer.
        episodes: Number of tasks.
        seed: Of tasks and mistakes.
    """
    rng, rows = np.random.default_rng(seed), []
    for _ in range(episodes):
        task = tasks.drawn(rng, config)
        said = tags.demonstrated(rng, config.tags, task, *errors)
        sizes = [tokens_read(turns_of(said, players)) for players in ("team", "agent")]
        right = said[-1][1] == tags.ANSWER + task.answer
        rows.append((right, *sizes, tokens_read(turns_of(without_plan(task, said), "agent"))))
    return Reached(*np.mean(rows, axis=0).tolist())


def main() -> None:
    """Print what players of the environment as it is reach."""
    config = Config(protocol="tags")
    own = config.tags
    errors = {
        "perfect": (0.0, 0.0, 0.0),
        "demonstrators of the team": (own.hop_error_rate, own.relation_error_rate, own.answer_error_rate),
        "demonstrators of the agent": (own.agent_error_rate,) * 3,
    }
    for name, rates in errors.items():
        got = reached(config, rates)
        less = f"agent {got.agent:.1f} (-{1 - got.agent / got.team:.0%}), without plan {got.short:.1f}"
        print(f"{name:27} EM {got.em:.3f}; tokens: team {got.team:.1f}, {less} (-{1 - got.short / got.team:.0%})")


if __name__ == "__main__":
    main()
