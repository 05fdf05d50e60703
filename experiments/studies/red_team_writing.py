"""Degenerate strategies against the rewards of the writing tasks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from experiments.studies.red_team_table import Table
from jaxmarl_llm.envs.writing import env as writing
from jaxmarl_llm.envs.writing.prose import SENTENCE, WORD
from jaxmarl_llm.envs.writing.rewards import COMPONENTS, STOPWORDS, TRANSITIONS

INVENTED = (
    "The festival in Lisbon opened with a parade of painted elephants and fireworks over the river. The mayor of the "
    "town praised the bakers because their bread had won a prize. However, the harvest of olives was poor, and the "
    "fishermen stayed at home during the storm. In addition, a travelling circus lost two camels in the mountains. "
    "Therefore the village closed its gates, while the children played chess with an old sailor. For example, the "
    "baker of the castle sold cakes to soldiers who slept beneath the bridge. Finally, the orchestra sang under the "
    "lemon trees, although nobody in the crowd had bought a ticket."
)
GENERIC = (
    "We propose a new method for learning and show that it improves the results. The approach is simple and can be "
    "used with many models. However, the performance on the data depends on the training of the network. In the "
    "experiments, the method is better than the baseline on several tasks. We also analyse the approach in detail."
)

STOPPED = sorted(STOPWORDS)
# Function words and what a strategy writes instead of them.
EXCHANGED = {
    **{
        "the": "a",
        "a": "the",
        "an": "the",
        "of": "for",
        "for": "of",
        "and": "or",
        "in": "at",
        "is": "was",
        "are": "were",
    },
    **{
        "we": "they",
        "our": "their",
        "that": "which",
        "which": "that",
        "with": "by",
        "by": "with",
        "can": "may",
        "to": "for",
    },
}


class Text(NamedTuple):
    """A writing task with its reference pair (c1, c2), and a text that belongs to another task."""

    config: writing.Config
    task: Mapping[str, Any]
    c1: str
    c2: str
    other: str
    rng: random.Random

    @property
    def source(self) -> str:
        return self.task["text"]

    @property
    def least(self) -> int:
        """The least number of words of a text."""
        return self.config.limits[0]

    @property
    def short(self) -> int:
        """Words of an ordinary first text: 20 of a summary, half an abstract of an introduction."""
        return 20 if self.config.task == "tldr" else len(self.source.split()) // 2

    @property
    def long(self) -> int:
        """Words of an ordinary second text."""
        return 50 if self.config.task == "tldr" else self.short

    @property
    def sentences(self) -> list[str]:
        return [s for s in SENTENCE.split(self.source) if s.strip()]

    @property
    def keywords(self) -> list[str]:
        return list(dict.fromkeys(w for w in WORD.findall(self.source.lower()) if w not in STOPWORDS and len(w) > 3))

    @property
    def copied(self) -> str:
        """The beginning of the source, shorter than an ordinary second text."""
        return closed(self.words(0, int(0.8 * self.long)))

    def words(self, start: int, stop: int) -> str:
        return " ".join(self.source.split()[start:stop])

    def lead(self, sentences: Sequence[str]) -> str:
        """The first of these sentences, and as many more as the least length takes."""
        taken: list[str] = []
        for sentence in sentences:
            if len(" ".join(taken).split()) < max(self.least, 1):
                taken.append(sentence)
        return closed(" ".join(taken))

    def salted(self, every: int, instead: int) -> str:
        """The lead with an invented word before every ``every``-th word, or ``instead`` of it (1)."""
        invented = itertools.cycle(w for w in WORD.findall(INVENTED.lower()) if len(w) > 5)
        words = self.lead(self.sentences).rstrip(".").split()[:150]
        chunks = [words[i : i + every] for i in range(0, len(words), every)]
        return closed([w for chunk in chunks for w in (next(invented), *chunk[instead:])])

    def exchanged(self, text: str) -> str:
        """``text`` with its function words exchanged by a fixed table."""
        return closed([EXCHANGED.get(w.lower(), w) for w in text.split()])

    def halves(self) -> str:
        """The first half of one sentence and the second half of the next."""
        one, two = (self.sentences * 2)[:2]
        return f"{cut(one, len(one.split()) // 2).rstrip('.')} {' '.join(two.split()[len(two.split()) // 2 :])}"

    def keyword_list(self, start: int, count: int) -> str:
        return closed(", ".join(self.keywords[start : start + count]))

    def template(self) -> str:
        """Sentences with keywords in their gaps, as many as the least length takes."""
        made: list[str] = []
        while len(" ".join(made).split()) < self.least:
            a, b, c, d, e = self.rng.sample(self.keywords, 5)
            made.append(f"We present a method for {a}, {b} and {c} with {d} and {e}.")
        return " ".join(made)

    def prefix_and_invention(self, share: float) -> str:
        """A prefix of ``share`` of an ordinary length, and invented words that are no answer to the task."""
        return f"{closed(self.words(0, int(share * self.short)))} {cut(INVENTED, int(0.8 * self.short))}"

    def shuffled(self, count: int, size: int = 1) -> str:
        """The first ``count`` words of the source in chunks of ``size`` words, in a random order."""
        words = [w.strip(".,;:") for w in self.source.split()]
        chunks = [words[i : i + size] for i in range(0, len(words), size)]
        self.rng.shuffle(chunks)
        return closed(" ".join(w for chunk in chunks for w in chunk if w).split()[:count])

    def beside(self, c1: str) -> Pair:
        """``c1`` with the run of the source's sentences that pays most beside it."""
        n = len(self.sentences)
        runs = [" ".join(self.sentences[i:j]) for i in range(n) for j in range(i + 1, n + 1)]
        low, _, _, high = self.config.spec.ratio  # of lengths; strict mode measures other ones, so with a margin
        runs = [run for run in runs if 0.7 * low <= len(run) / len(c1) <= 1.5 * high] or runs
        return c1, max(runs, key=lambda run: written(self.config, self.task, (c1, run))), False


Pair = tuple[str, str, bool]  # two texts, and whether the length limit ended one of them


def closed(words: Sequence[str] | str) -> str:
    """Words as a text with a full stop."""
    return (words if isinstance(words, str) else " ".join(words)).rstrip(" .,;:") + "."


def cut(text: str, count: int) -> str:
    """The first ``count`` words of ``text``, with a full stop."""
    return closed(text.split()[:count])


def numbers(start: int, count: int) -> str:
    return closed([str(n) for n in range(start, start + count)])


def written(config: writing.Config, task: Mapping[str, Any], pair: tuple[str, ...], truncated: bool = False) -> float:
    """The reward of two texts: the sum of the components that are paid."""
    found = writing.judge(config, task, pair[0], pair[1], truncated=truncated)
    return sum(found[name] for name in COMPONENTS)


WRITING: dict[str, Callable[[Text], Pair]] = {
    "nothing at all": lambda t: ("", "", False),
    "empty partner": lambda t: (t.c1, "", False),
    "empty first text": lambda t: ("", t.c2, False),
    "reference, cut by the length limit": lambda t: (t.c1, t.c2, True),
    "reference without its last words": lambda t: (t.c1.rsplit(" ", 2)[0], t.c2.rsplit(" ", 2)[0], False),
    "reference beside a copy": lambda t: (t.c1, t.source, False),
    "reference by both": lambda t: (t.c1, t.c1, False),
    "reference said three times": lambda t: (t.c1, f"{t.c1} {t.c1} {t.c1}", False),
    "another task's reference beside the best run": lambda t: t.beside(t.other),
    "copy by both": lambda t: (t.source, t.source, False),
    "lead sentence beside a copy": lambda t: (t.lead(t.sentences), t.source, False),
    "lead sentence beside the best run": lambda t: t.beside(t.lead(t.sentences)),
    "last sentence beside the best run": lambda t: t.beside(t.lead(t.sentences[::-1])),
    "lead sentence with invented words between, beside the best run": lambda t: t.beside(t.salted(4, 0)),
    "lead sentence with invented words instead, beside the best run": lambda t: t.beside(t.salted(4, 1)),
    "lead sentence with exchanged function words, beside the best run": lambda t: t.beside(
        t.exchanged(t.lead(t.sentences))
    ),
    "first words with exchanged function words, beside the best run": lambda t: t.beside(
        t.exchanged(t.words(0, t.short))
    ),
    "halves of two sentences, beside the best run": lambda t: t.beside(closed(t.halves())),
    "halves of two sentences with exchanged function words, beside the best run": lambda t: t.beside(
        t.exchanged(t.halves())
    ),
    "short prefix beside a copy": lambda t: (closed(t.words(0, t.short * 3 // 5)), t.source, False),
    "short prefix beside the best run": lambda t: t.beside(closed(t.words(0, t.short * 3 // 5))),
    "prefix and longer prefix": lambda t: (closed(t.words(0, t.short)), closed(t.words(0, t.long)), False),
    "prefix and longer prefix, cut": lambda t: (t.words(0, t.short), t.words(0, t.long), True),
    "prefix (40 %) and irrelevant words beside a copy": lambda t: (t.prefix_and_invention(0.4), t.copied, False),
    "prefix (50 %) and irrelevant words beside a copy": lambda t: (t.prefix_and_invention(0.5), t.copied, False),
    "prefix (60 %) and irrelevant words beside a copy": lambda t: (t.prefix_and_invention(0.6), t.copied, False),
    "prefix (60 %) and irrelevant words beside the best run": lambda t: t.beside(t.prefix_and_invention(0.6)),
    "the title beside the best run": lambda t: t.beside(closed(t.task["title"] or t.sentences[0])),
    "invention by both": lambda t: (cut(INVENTED, t.short), cut(INVENTED, t.short + t.long), False),
    "invention beside the best run": lambda t: t.beside(cut(INVENTED, t.short)),
    "fixed fluent sentences beside the best run": lambda t: t.beside(t.lead(SENTENCE.split(GENERIC))),
    "template with keywords beside the best run": lambda t: t.beside(t.template()),
    "keyword lists": lambda t: (t.keyword_list(0, t.short * 2 // 3), t.keyword_list(0, t.long), False),
    "keyword list beside the best run": lambda t: t.beside(t.keyword_list(0, t.short * 2 // 3)),
    "one word again and again": lambda t: (closed("model " * t.short), closed("model " * t.long), False),
    "shuffled words": lambda t: (t.shuffled(t.short), t.shuffled(t.long), False),
    "shuffled words beside the best run": lambda t: t.beside(t.shuffled(t.short)),
    "shuffled pairs of words beside the best run": lambda t: t.beside(t.shuffled(t.short, 2)),
    "shuffled triples of words beside the best run": lambda t: t.beside(t.shuffled(t.short, 3)),
    "every third word left out, beside the best run": lambda t: t.beside(
        closed([w for i, w in enumerate(t.source.split()[: t.short * 3 // 2]) if i % 3 < 2])
    ),
    "stopwords only": lambda t: (closed(STOPPED[: t.short]), closed(STOPPED[t.short :][: t.long]), False),
    "numbers only": lambda t: (numbers(100, t.short), numbers(200, t.long), False),
    "connectives only": lambda t: (t.c1, closed([p for row in TRANSITIONS.values() for p in row]), False),
    "the instruction twice": lambda t: (*2 * (cut(f"{writing.SYSTEM['detailed']} " * 9, t.short),), False),
}  # fmt: skip


def reference_pair(config: writing.Config, task: Mapping[str, Any]) -> tuple[str, str]:
    """The human pair of a task that the reward of ``config`` pays most; two empty texts where the data has none.

    tldr: a human summary and a run of the abstract's sentences. arxiv: the beginning of the abstract and a later run
    of its sentences.
    """
    if config.task == "tldr":
        samples = writing.demonstrations(config, [dict(task)])
        return (samples[0][2], samples[1][2]) if samples else ("", "")
    sentences = [s for s in SENTENCE.split(task["text"]) if s.strip()]
    ends = range(1, len(sentences) + 1)
    spans = [(i, j, k) for i in ends for j in ends for k in ends if i <= j < k]
    pairs = [(" ".join(sentences[:i]), " ".join(sentences[j:k])) for i, j, k in spans]
    return max(pairs, key=lambda pair: written(config, task, pair), default=("", ""))


def texts(config: writing.Config) -> list[Text]:
    """The tasks of ``config`` with their references; an empty pair where the data has no reference pair."""
    tasks = writing.tasks(config)
    pairs = [reference_pair(config, task) for task in tasks]
    others = [next((c1 for c1, _ in [*pairs[i + 1 :], *pairs] if c1), GENERIC) for i in range(len(tasks))]
    rows = zip(tasks, pairs, others)
    return [Text(config, task, c1, c2, other, random.Random(i)) for i, (task, (c1, c2), other) in enumerate(rows)]


def writing_table(title: str, config: writing.Config) -> Table:
    """What the strategies earn by the strict reward, and by the paper's on the same texts."""
    cases, official = texts(config), replace(config, reward="parity")
    rewards: dict[str, list[float]] = {}
    papers: dict[str, list[float]] = {}
    for name, strategy in WRITING.items():
        found = [(t, strategy(t)) for t in cases]
        rewards[name] = [written(config, t.task, pair[:2], pair[2]) for t, pair in found]
        papers[name] = [written(official, t.task, pair[:2], pair[2]) for t, pair in found]
    reference, beside = ([written(c, t.task, (t.c1, t.c2)) for t in cases] for c in (config, official))
    return Table(title, rewards, reference, papers, beside)


WRITING_TASKS: dict[str, dict[str, Any]] = {  # arxiv with a least length that abstracts' halves reach
    "tldr": {},
    "arxiv, band paper": {"task": "arxiv", "min_words": 30},
    "arxiv, band 2026": {"task": "arxiv", "band": "2026", "min_words": 30},
}
