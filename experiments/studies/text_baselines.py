"""What is reached without a model on SciTLDR, in `two_writers` and in `reference_game`:

    python -m experiments.studies.text_baselines [--data=DIR] [--split=test]

Summaries: the mean ROUGE-1 and ROUGE-L against the human summaries of an article, and the mean number of words. The
best summary counts for each figure. *Best sentence* reads the human summaries, so it bounds what copying a sentence can
reach. *One human against the others* is the mean over the summaries of articles that have several. The reward is that
of the configuration `magrpo:two_writers`.

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


def summaries(config: writers.Config) -> list[tuple[str, float, float, float, float]]:
    """Name, ROUGE-1, ROUGE-L, words and reward of every rule on the articles of ``config``."""
    tasks, rows = writers.tasks(config), []
    for name, write in SUMMARIES.items():
        texts = [(task, write(task)) for task in tasks]
        rows.append((name, *_means([(rouge(said, task["targets"]), task, said) for task, said in texts], config)))
    several = [task for task in tasks if len(task["targets"]) > 1]
    if several:
        among = [
            (rouge(said, task["targets"][:i] + task["targets"][i + 1 :]), task, said)
            for task in several
            for i, said in enumerate(task["targets"])
        ]
        one, longest, words, _ = _means(among, config)
        rows.append(("one human against the others", one, longest, words, math.nan))
    return rows


def _means(
    found: Sequence[tuple[Mapping[str, float], Task, str]], config: writers.Config
) -> tuple[float, float, float, float]:
    """ROUGE-1, ROUGE-L, words and reward, means over (figures, task, text)."""
    return (
        statistics.mean(figures["rouge1"] for figures, _, _ in found),
        statistics.mean(figures["rougeL"] for figures, _, _ in found),
        statistics.mean(len(said.split()) for _, _, said in found),
        statistics.mean(paid(config, task, (said, False)) for _, task, said in found),
    )


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
    lines = [f"## Summaries ({size} articles, {split})", "", "| rule | ROUGE-1 | ROUGE-L | words | reward |"]
    lines.append("| --- |" + " ---: |" * 4)
    for name, one, longest, words, reward in summaries(written):
        shown = "" if math.isnan(reward) else f"{reward:.3f}"
        lines.append(f"| {name} | {one:.3f} | {longest:.3f} | {words:.1f} | {shown} |")
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
