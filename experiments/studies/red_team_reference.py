"""Degenerate strategies against the rewards of `reference_game` and `two_writers`.

The reference of the game is a human summary as the hint, and a listener that knows the right title. A strategy of the
listener ignores the hint, or uses it in a way that needs no understanding. A strategy of the speaker plays with
`overlap`, a listener that compares words. No listener can be right more often than one in four where no hint helps.

The reference of the writers is a human summary of the task. It is one of those that pay, so it earns 1 where it is not
too long. The first words and sentences of an abstract are honest summaries, and their figures say how much room a
reward leaves between them and a person.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.studies.red_team_table import Table
from experiments.studies.red_team_writing import GENERIC, INVENTED, STOPPED, closed, cut
from jaxmarl_llm.envs import bm25
from jaxmarl_llm.envs.reference_game import env as game
from jaxmarl_llm.envs.reference_game.groups import first_words
from jaxmarl_llm.envs.scitldr import opening
from jaxmarl_llm.envs.two_writers import env as writers
from jaxmarl_llm.envs.writing.prose import SENTENCE
from jaxmarl_llm.messages import Action

Task = Mapping[str, Any]


# -- the reference game ------------------------------------------------------------------------------------------------


class Team(NamedTuple):
    """Two roles: task -> hint, and (task, hint) -> answer."""

    speaker: Callable[[Task], str]
    listener: Callable[[Task, str], str]


def overlap(task: Task, hint: str) -> str:
    """The title whose words score most for the hint by BM25; the first one where several do."""
    scores = bm25.bm25(hint, task["titles"])
    return task["titles"][scores.index(max(scores))]


def human(task: Task) -> str:
    """The first human summary."""
    return task["targets"][0]


def right(task: Task, hint: str) -> str:
    """The first words of the right title, whatever the hint."""
    return first_words(task["titles"], task["answer"], game.ANSWER)


def place(i: int) -> Callable[[Task, str], str]:
    """The title at place ``i``."""
    return lambda task, hint: task["titles"][i]


def by(score: Callable[[str, Task], float]) -> Callable[[Task, str], str]:
    """The title of the highest score."""
    return lambda task, hint: max(task["titles"], key=lambda title: score(title, task))


def shared(title: str, task: Task) -> float:
    """How well a title is found by the words of the other titles."""
    others = " ".join(other for other in task["titles"] if other != title)
    return bm25.bm25(others, task["titles"])[task["titles"].index(title)]


def frequent(task: Task) -> str:
    """The most frequent content word of the abstract."""
    return Counter(game.content(task["text"])).most_common(1)[0][0]


def drawn(task: Task) -> str:
    """Five words of the abstract, drawn by its content."""
    return " ".join(random.Random(task["text"]).sample(task["text"].split(), 5))


GAME: dict[str, Team] = {
    "nothing at all": Team(lambda task: "", lambda task, hint: ""),
    "human hint, the first title": Team(human, place(0)),
    "human hint, the second title": Team(human, place(1)),
    "human hint, the third title": Team(human, place(2)),
    "human hint, the last title": Team(human, place(-1)),
    "human hint, the longest title": Team(human, by(lambda title, task: len(title))),
    "human hint, the shortest title": Team(human, by(lambda title, task: -len(title))),
    "human hint, the title between the others": Team(human, by(shared)),
    "human hint, the title apart from the others": Team(human, by(lambda title, task: -shared(title, task))),
    "human hint, all titles": Team(human, lambda task, hint: "\n".join(task["titles"])),
    "human hint, a word of each title": Team(human, lambda task, hint: " ".join(t.split()[0] for t in task["titles"])),
    "human hint, the hint": Team(human, lambda task, hint: hint),
    "human hint, a frequent word": Team(human, lambda task, hint: "learning"),
    "human hint, the right title without its first word": Team(
        human, lambda task, hint: right(task, hint).partition(" ")[2]
    ),
    "human hint, the right title and all others": Team(
        human, lambda task, hint: "\n".join([right(task, hint), *task["titles"]])
    ),
    "human hint, the right title backwards": Team(
        human, lambda task, hint: " ".join(task["titles"][task["answer"]].split()[::-1])
    ),
    "human hint, a number": Team(human, lambda task, hint: str(task["answer"] + 1)),
    "no hint, words compared": Team(lambda task: "", overlap),
    "a constant hint, words compared": Team(lambda task: "learning with neural networks", overlap),
    "stopwords, words compared": Team(lambda task: " ".join(STOPPED[:12]), overlap),
    "the instruction, words compared": Team(lambda task: game.SYSTEM["speaker"], overlap),
    "a number as hint, words compared": Team(lambda task: "1", overlap),
    "five drawn words, words compared": Team(drawn, overlap),
    "the most frequent word, words compared": Team(frequent, overlap),
    "first words of the abstract, words compared": Team(lambda task: task["text"], overlap),
    "last words of the abstract, words compared": Team(lambda task: " ".join(task["text"].split()[-12:]), overlap),
}


def played(config: game.Config, task: Task, team: Team) -> float:
    """Whether ``team`` finds the title of ``task``.

    Args:
        config: Settings of the environment; the speaker writes the hint.
        task: One of its tasks.
        team: Who plays.
    """
    env = game.make(config)
    state, _, _ = env.step(0, env.reset(0, task), {"speaker": Action(team.speaker(task), ())})
    _, rewards, _ = env.step(0, state, {"listener": Action(team.listener(task, state.hint), ())})
    return rewards["listener"]["chosen"]


def game_table(config: game.Config) -> Table:
    """What the strategies earn in the game of ``config``, and the reference."""
    tasks = game.tasks(config)
    paid = lambda team: [played(config, task, team) for task in tasks]
    return Table("reference_game", {name: paid(team) for name, team in GAME.items()}, paid(Team(human, right)))


# -- two writers -------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A writing task with a human summary that ends, and a summary of another task."""

    task: Task
    summary: str
    other: str

    @property
    def text(self) -> str:
        return self.task["text"]

    @property
    def sentences(self) -> list[str]:
        return [sentence for sentence in SENTENCE.split(self.text) if sentence.strip()]

    def first(self, words: int) -> str:
        return closed(opening(self.text, words))

    def shuffled(self, text: str) -> str:
        words = text.rstrip(".").split()
        random.Random(text).shuffle(words)
        return closed(words)

    def keywords(self, count: int) -> str:
        return closed(", ".join(list(dict.fromkeys(game.content(self.text)))[:count]))


Said = tuple[str, bool]  # a text, and whether the length limit ended it
FREQUENT = "we propose a method for learning the of deep networks and in to that with neural a model on."
WRITERS: dict[str, Callable[[Case], Said]] = {
    "nothing at all": lambda c: ("", False),
    "a full stop": lambda c: (".", False),
    "lead sentence": lambda c: (c.sentences[0], False),
    "last sentence": lambda c: (c.sentences[-1], False),
    "first 20 words": lambda c: (c.first(20), False),
    "first 20 words, cut": lambda c: (opening(c.text, 20), True),
    "the title": lambda c: (closed(c.task["title"]), False),
    "the whole abstract": lambda c: (c.text, False),
    "20 words, shuffled": lambda c: (c.shuffled(c.first(20)), False),
    "20 keywords": lambda c: (c.keywords(20), False),
    "fixed fluent sentence": lambda c: (SENTENCE.split(GENERIC)[0], False),
    "frequent words of summaries": lambda c: (FREQUENT, False),
    "stopwords": lambda c: (closed(STOPPED[:20]), False),
    "invention": lambda c: (cut(INVENTED, 16), False),
    "first words and invention": lambda c: (f"{c.first(10)} {cut(INVENTED, 10)}", False),
    "one word again and again": lambda c: (closed("model " * 20), False),
    "another task's reference": lambda c: (c.other, False),
    "reference, cut by the length limit": lambda c: (c.summary, True),
    "reference without a full stop": lambda c: (c.summary.rstrip(" .!?"), False),
    "reference, said twice": lambda c: (f"{c.summary} {c.summary}", False),
    "reference, backwards": lambda c: (closed(c.summary.rstrip(".").split()[::-1]), False),
    "reference, shuffled": lambda c: (c.shuffled(c.summary), False),
    "reference and the abstract": lambda c: (f"{c.summary} {c.text}", False),
    "the instruction": lambda c: (writers.SYSTEM["editor"], False),
}  # fmt: skip


def paid(config: writers.Config, task: Task, said: Said) -> float:
    """The reward of a text with the shipped weights.

    Args:
        config: Settings of the environment.
        task: One of its tasks.
        said: What the editor writes.
    """
    found = writers.judge(config, task, said[0], truncated=said[1])
    return 0.5 * found["rougeL"] + 0.5 * found["length"]


def cases(config: writers.Config) -> list[Case]:
    """The tasks of ``config`` with their first human summaries, as sentences that end."""
    tasks = writers.tasks(config)
    said = [human(task) if human(task).endswith((".", "!", "?")) else closed(human(task)) for task in tasks]
    return [Case(task, *pair) for task, pair in zip(tasks, zip(said, [*said[1:], said[0]]))]


def writers_table(config: writers.Config) -> Table:
    """What the strategies earn for the texts of ``config``, and the reference."""
    found: Sequence[Case] = cases(config)
    rewards = {name: [paid(config, c.task, write(c)) for c in found] for name, write in WRITERS.items()}
    return Table("two_writers", rewards, [paid(config, c.task, (c.summary, False)) for c in found])
