"""What is reached without a model on SciTLDR, in `two_writers` and in `reference_game`:

    python -m experiments.studies.text_baselines [--data=DIR] [--split=test]

Summaries: the mean ROUGE-1 and ROUGE-L against the human summaries of an article, and the mean number of words. The
best summary counts for each figure. *Best sentence* reads the human summaries, so it bounds what copying a sentence
can reach. *Specific* is ROUGE-L minus that against the summaries of another article. *One human against the others* is
the mean over the summaries of articles that have several. The reward is that of the configuration
`magrpo:two_writers`.

The game: a listener takes the title whose words score most for a hint by BM25, and the first title where several do.
Hints are cut as in the environment. The interval has the standard error times 1.96 on both sides.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import app, flags

from experiments.studies.red_team_reference import FREQUENT, overlap, paid
from jaxmarl_llm.envs.reference_game import env as game
from jaxmarl_llm.envs.reference_game.groups import named
from jaxmarl_llm.envs.scitldr import opening
from jaxmarl_llm.envs.two_writers import env as writers
from jaxmarl_llm.envs.writing.prose import SENTENCE
from jaxmarl_llm.envs.writing.rouge import rouge

Task = Mapping[str, Any]
NEW = ("we ", "in this ", "this paper", "this work", "here")  # how a sentence about what is new begins


def sentences(task: Task) -> list[str]:
    """The sentences of the abstract of ``task``."""
    return [sentence for sentence in SENTENCE.split(task["text"]) if sentence.strip()]


def what_is_new(task: Task) -> str:
    """The first sentence of ``task`` that begins like one about what is new; else the first sentence."""
    found = sentences(task)
    return next((sentence for sentence in found if sentence.lower().startswith(NEW)), found[0])


def best(task: Task, name: str) -> str:
    """The sentence of ``task`` with the highest figure ``name`` against the human summaries."""
    return max(sentences(task), key=lambda sentence: rouge(sentence, task["targets"])[name])


SUMMARIES: dict[str, Callable[[Task], str]] = {
    "random sentence": lambda task: random.Random(task["id"]).choice(sentences(task)),
    "lead sentence": lambda task: sentences(task)[0],
    "lead sentence, 20 words": lambda task: opening(sentences(task)[0], 20),
    'first sentence with "we" or "in this"': what_is_new,
    "the same, 20 words": lambda task: opening(what_is_new(task), 20),
    "title": lambda task: task["title"],
    "frequent words of summaries, always the same": lambda task: FREQUENT,
    "best sentence by ROUGE-1": lambda task: best(task, "rouge1"),
    "best sentence by ROUGE-L": lambda task: best(task, "rougeL"),
}
HINTS: dict[str, Any] = {
    "human summary": "human",
    "words of the title in the abstract": "keywords",
    "first words of the abstract": "lead",
    "none": "none",
}


def summaries(config: writers.Config) -> list[tuple[str, list[float]]]:
    """Name of every rule, and its means on the articles of ``config``.

    The means are ROUGE-1, ROUGE-L, specific, words and reward. The reward of a human against the others is left out.
    """
    tasks, rows = writers.tasks(config), []
    for name, write in SUMMARIES.items():
        rows.append((name, _means(config, [(task, write(task)) for task in tasks])))
    among = [
        ({**task, "targets": task["targets"][:i] + task["targets"][i + 1 :]}, said)
        for task in tasks
        if len(task["targets"]) > 1
        for i, said in enumerate(task["targets"])
    ]
    return [*rows, ("one human against the others", _means(config, among)[:-1])] if among else rows


def _means(config: writers.Config, said: Sequence[tuple[Task, str]]) -> list[float]:
    """Means over pairs of a task and a text."""
    judged = [writers.judge(config, task, text) for task, text in said]
    means = [statistics.mean(row[name] for row in judged) for name in ("rouge1", "rougeL", "specific", "words")]
    return [*means, statistics.mean(paid(config, task, (text, False)) for task, text in said)]


def hints(config: game.Config) -> list[tuple[str, float]]:
    """Name of a hint, and how often the listener finds the title on the tasks of ``config``."""
    tasks, rows = game.tasks(config), []
    for name, kind in HINTS.items():
        said = dataclasses.replace(config, hint=kind)
        right = [named(overlap(task, game.scripted(said, task)), task["titles"]) == task["answer"] for task in tasks]
        rows.append((name, statistics.mean(right)))
    right = [named(overlap(task, task["text"]), task["titles"]) == task["answer"] for task in tasks]
    return [*rows, ("the whole abstract", statistics.mean(right))]


def markdown(data: str | None, split: str) -> str:
    """Both tables.

    Args:
        data: Folder with SciTLDR; None for the sample in the package.
        split: train or test.
    """
    written, played = writers.Config(data=data, split=split), game.Config(data=data, split=split)
    size, number = len(writers.tasks(written)), len(game.tasks(played))
    lines = [f"## Summaries ({size} articles, {split})", "", "| rule | ROUGE-1 | ROUGE-L | specific | words | reward |"]
    lines.append("| --- |" + " ---: |" * 5)
    for name, means in summaries(written):
        cells = [f"{x:.1f}" if i == 3 else f"{x:.3f}" for i, x in enumerate(means)] + [""] * (5 - len(means))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"## Listener by words ({number} tasks, {split})", "", "| hint | right | interval |"]
    lines.append("| --- | ---: | ---: |")
    for name, right in hints(played):
        half = 1.96 * math.sqrt(right * (1 - right) / number)
        lines.append(f"| {name} | {right:.3f} | {max(0.0, right - half):.3f} to {min(1.0, right + half):.3f} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Prints both tables."""
    sys.stdout.write(markdown(flags.FLAGS.data or None, flags.FLAGS.split) + "\n")


if __name__ == "__main__":
    flags.DEFINE_string("data", "", "Folder with SciTLDR; empty: the sample in the package.")
    flags.DEFINE_enum("split", "test", ["train", "test"], "Part of the data.")
    app.run(main)
