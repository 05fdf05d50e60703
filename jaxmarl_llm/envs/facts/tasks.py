"""Tasks of facts: facts about entities, and a question of one or two hops whose answer is unique.

A fact such as a1c says that entity c is relation 1 of entity a. An entity is a letter and a relation a digit, both
drawn for each task. So nothing about them can be learned by heart. An entity has each relation at most once. The
question a1 asks for relation 1 of a. The question a12 asks for relation 2 of relation 1 of a. The gold path has the
facts that lead to the answer, in their order. A task belongs to one side of the split by its facts and its question.

Shared arguments: ``config`` has the settings. ``rng`` (NumPy) determines what is drawn. ``held_out`` is the side of
the split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import PAD, task_draws
from jaxmarl_llm.envs.splits import draw_task

FACTS = 12  # of a task
LETTERS, DIGITS = "abcdefghijkl", "123456"
HOPS = 2  # at most
QUESTION = 1 + HOPS  # characters of the longest question


@dataclass(frozen=True)
class TaskConfig:
    """The settings of facts and questions."""

    seed: int = 0  # of the training tasks
    tasks: int = 2048  # training tasks
    entities: int = 6  # letters of a task
    relations: int = 4  # digits of a task
    two_hops: float = 0.5  # share of questions with two hops
    copying: float = 0.75  # share of a role's demonstrations that are copying exercises, see `facts.exercises`

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        checks.in_range(path, self, 3, len(LETTERS), "entities")
        checks.in_range(path, self, 2, len(DIGITS), "relations")
        checks.probabilities(path, self, "two_hops", "copying")
        if self.entities * self.relations < FACTS:
            expected = f"at least {-(-FACTS // self.entities)} with entities={self.entities}: a task has {FACTS} facts"
            checks.refuse(path, "relations", expected, self.relations)


class Task(NamedTuple):
    """A task as text.

    Attributes:
        facts: Facts of three characters, in the order in which they are stored.
        question: Entity and one or two relations.
        path: Facts that lead to the answer, one for each hop.
    """

    facts: tuple[str, ...]
    question: str
    path: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The entity that the last fact of the path ends with."""
        return self.path[-1][2]


def draw(rng: np.random.Generator, config: TaskConfig) -> Task:
    """A random task. Entities of the gold path differ."""
    hops = HOPS if rng.random() < config.two_hops else 1
    while True:
        entities = [LETTERS[i] for i in rng.permutation(len(LETTERS))[: config.entities]]
        relations = [DIGITS[i] for i in rng.permutation(len(DIGITS))[: config.relations]]
        subjects, named = np.divmod(rng.permutation(config.entities * config.relations)[:FACTS], config.relations)
        objects = rng.integers(config.entities - 1, size=FACTS)
        objects += objects >= subjects  # no fact leads back to its own entity
        triples = zip(subjects.tolist(), named.tolist(), objects.tolist(), strict=True)
        facts = [entities[i] + relations[k] + entities[j] for i, k, j in triples]
        paths = [path for first in facts for path in paths_from(facts, first, hops)]
        if paths:
            path = paths[rng.integers(len(paths))]
            return Task(tuple(facts), path[0][0] + "".join(fact[1] for fact in path), path)


def paths_from(facts: Sequence[str], first: str, hops: int) -> list[tuple[str, ...]]:
    """The paths of ``hops`` facts that begin with ``first`` and meet no entity twice. ``facts``: those of the task."""
    if hops == 1:
        return [(first,)]
    return [(first, second) for second in facts if second[0] == first[2] and second[2] != first[0]]


def content(task: Task) -> str:
    """The text of ``task`` that decides its side of the split; the order of its facts does not count."""
    return task.question + "|" + "".join(sorted(task.facts))


def drawn(rng: np.random.Generator, config: TaskConfig, held_out: bool = False) -> Task:
    """Draw a task from one side of the split."""
    return draw_task(lambda: draw(rng, config), content, held_out)


def rows(
    config: TaskConfig, seed: int | None = None, n: int | None = None, held_out: bool = False
) -> tuple[dict[str, np.ndarray], np.random.Generator]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``) as arrays.

    Returns:
        facts [n 12 3], question [n 3], question_length [n], path [n 2] and answer [n]; and the generator, for columns
        that a protocol adds. Text is bytes. A path has the places of its facts, and -1 for no fact.
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    out = {
        "facts": np.zeros((count, FACTS, 3), np.int32),
        "question": np.full((count, QUESTION), PAD, np.int32),
        "question_length": np.zeros(count, np.int32),
        "path": np.full((count, HOPS), -1, np.int32),
        "answer": np.zeros(count, np.int32),
    }
    for i in range(count):
        task = drawn(rng, config, held_out)
        size, hops = len(task.question), len(task.path)
        out["facts"][i] = [list(fact.encode()) for fact in task.facts]
        out["question"][i, :size], out["question_length"][i] = list(task.question.encode()), size
        out["path"][i, :hops] = [task.facts.index(fact) for fact in task.path]
        out["answer"][i] = ord(task.answer)
    return out, rng
