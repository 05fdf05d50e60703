"""Two roles write one short summary in turn, and a human summary pays them (SciTLDR, Apache-2.0).

    turn  role      reads                                  writes
    1     proposer  the abstract                           a sentence
    2     editor    the proposal; with ``editor_reads``    the summary, shorter
                    also the abstract

Both roles are paid for the editor's text alone:

    rougeL  ROUGE-L F1 against the human summaries; the best one counts (`writing.rouge`)
    length  the same, times 1 for a text of at most ``most_words`` words. From there it falls linearly, to 0 at twice
            as many words. It is 0 for a text without an end: the length limit ended it, or its last sentence has no
            full stop

So form alone earns nothing. With weights that sum to 1, a human summary of permitted length earns 1.

Facts to log have no weight in a shipped configuration. ``rouge1``, ``words`` and ``ended`` are of the editor's text.
``proposal`` is the ROUGE-L of the proposal. The difference of ``rougeL`` and ``proposal`` is what the
editor adds. ``specific`` is ``rougeL`` minus the ROUGE-L against the summaries of another article. It is about 0 for a
text that fits every article.

The published split decides which articles are held out. Training is paid by summaries of the training split alone.
Those of the test split make the figures of evaluations. Test articles have several summaries each, and training
articles one, so the rewards of both sides cannot be compared.

What the reward cannot see: whether a summary is true, and whether its sentence is whole. A full stop behind the first
part of a sentence counts as its end. Human summaries of one article share few words.
On the test split they reach ROUGE-L .23 with each other, and so does the lead sentence. A fixed string of frequent
words reaches almost as much (`experiments.studies.text_baselines`). Compare a team with all three.
`two_writers.solo` is one agent that writes the summary from the abstract.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from jaxmarl_llm.envs import checks, scitldr
from jaxmarl_llm.envs.chat import action_of, asked, entry, with_memory
from jaxmarl_llm.envs.scitldr import opening, stand_in
from jaxmarl_llm.envs.writing.prose import SENTENCE, ended, misfits
from jaxmarl_llm.envs.writing.rouge import rouge
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = [
    "Config", "State", "Task", "ask", "demonstrations", "hears", "make", "stand_in", "strategy", "tasks", "with_memory",
]  # fmt: skip

Task = dict[str, Any]
ROLES = PROPOSER, EDITOR = ("proposer", "editor")
JUDGED = ("rougeL", "length", "rouge1", "words", "ended", "specific")  # components of a summary
COMPONENTS = (*JUDGED, "proposal")
PROPOSED = 17  # words of a demonstrated proposal, at most
EDITED = 7  # words of a demonstrated summary, at least
NOTHING = "(nothing)"
SYSTEM = {
    PROPOSER: "Write one sentence that says what is new in the text. Use its own words.",
    EDITOR: "Make the sentence shorter: keep what is new, leave out the rest, and end with a full stop.",
}


@dataclass(frozen=True)
class Config:
    """The settings of data, prompts and length. Lengths are whitespace words."""

    data: str | None = None  # folder with SciTLDR, or its URL; None: the sample in the package
    split: str = "train"  # train or test
    count: int = 0  # tasks; 0: all there are
    seed: int = 0  # of the order of tasks
    editor_reads: Literal["proposal", "abstract"] = "proposal"  # abstract: the proposal and the abstract
    abstract_words: int = 100  # first words of the abstract that are read
    most_words: int = 20  # of a summary; longer ones earn less

    def check(self, path: str) -> None:
        checks.split_and_count(path, self)
        checks.at_least(path, self, 0, "seed")
        checks.in_range(path, self, 1, checks.MOST_TEXT, "abstract_words", "most_words")


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    proposal: str | None = None  # None: the proposer has not written it
    done: bool = False


def make(config: Config) -> HostEnv:
    """The environment of ``config``."""
    return HostEnv(
        name="two_writers",
        roles=ROLES,
        max_turns=2,
        components=COMPONENTS,
        reset=reset,
        observe=partial(observe, config),
        step=partial(step, config),
    )


# -- the episode -------------------------------------------------------------------------------------------------------


def reset(seed: int, task: Task) -> State:
    """The first state of an episode. Nothing is drawn, so ``seed`` has no effect."""
    return State(task)


def observe(config: Config, state: State) -> dict[str, Prompt]:
    """The prompt of the role that acts."""
    if state.proposal is None:
        return {PROPOSER: proposer_prompt(config, state.task)}
    return {EDITOR: editor_prompt(config, state.task, state.proposal)}


def proposer_prompt(config: Config, task: Mapping[str, Any]) -> Prompt:
    """The prompt of the proposer: the beginning of the abstract."""
    return Message("system", SYSTEM[PROPOSER]), Message("user", opening(task["text"], config.abstract_words))


def editor_prompt(config: Config, task: Mapping[str, Any], proposal: str) -> Prompt:
    """The prompt of the editor: the ``proposal`` on one line, behind the abstract where ``editor_reads`` says so."""
    shown = f"Sentence: {' '.join(proposal.split()) or NOTHING}"
    if config.editor_reads == "abstract":
        shown = f"{opening(task['text'], config.abstract_words)}\n{shown}"
    return Message("system", SYSTEM[EDITOR]), Message("user", shown)


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after a text, the rewards of the turn, and whether the episode has finished.

    ``seed`` has no effect. ``actions``: the text of the role that acts.
    """
    role = PROPOSER if state.proposal is None else EDITOR
    action = action_of(role, actions, state.done)
    if role == PROPOSER:
        return replace(state, proposal=action.text), {}, False
    after = replace(state, done=True)
    if state.task.get("asked"):  # by a person
        return after, {}, True
    paid = judge(config, state.task, action.text, truncated=action.truncated)
    paid["proposal"] = rouge(state.proposal or "", state.task["targets"])["rougeL"]
    return after, {name: dict(paid) for name in ROLES}, True


def judge(config: Config, task: Mapping[str, Any], text: str, *, truncated: bool = False) -> dict[str, float]:
    """The components `JUDGED` of a summary.

    Args:
        config: The settings.
        task: Its ``targets`` are the human summaries, and its ``others`` those of another article.
        text: The summary.
        truncated: Whether the length limit ended it.

    Raises:
        ValueError: The task has no human summary, so there is no reward.
    """
    if not task["targets"]:
        raise ValueError(f"task {task['id']!r} has no human summary")
    found, size = rouge(text, task["targets"]), len(text.split())
    whole = ended(text) and not truncated
    fit = min(1.0, max(0.0, 2 - size / config.most_words)) if whole else 0.0
    specific = found["rougeL"] - rouge(text, task["others"])["rougeL"]
    return {
        **found, "length": found["rougeL"] * fit, "words": float(size), "ended": float(whole), "specific": specific
    }  # fmt: skip


def hears(reader: str, prompt: Prompt, speaker: str, text: str) -> bool:
    """Whether a prompt tells the reader what the speaker wrote: the editor reads the proposal.

    Args:
        reader: The role that reads.
        prompt: Its prompt; not read.
        speaker: The role that wrote.
        text: What it wrote; not read.
    """
    return (speaker, reader) == ROLES


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def tasks(config: Config) -> list[Task]:
    """The articles of the split in an order fixed by the seed, the first ``count`` of them. Raises ConfigError.

    ``others`` of a task are the summaries of the article behind it in an order that content alone determines.
    """
    rows, source = scitldr.articles(config.data, config.split, config.seed)
    logging.getLogger(__name__).info("two_writers: %s", source)
    ring = sorted(rows, key=lambda row: scitldr.digest(row["text"]))
    others = {row["id"]: behind["targets"] for row, behind in zip(ring, [*ring[1:], ring[0]])}
    return scitldr.first([{**row, "others": others[row["id"]]} for row in rows], config.count, source)


def ask(config: Config, text: str) -> Task:
    """The task of a person's ``text``, which the proposer reads."""
    return {"id": "asked", "asked": True, "title": "", "text": text, "targets": []}


def demonstrations(config: Config, tasks: Iterable[Task]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) of ``tasks``: the proposal and the summary of `shown_texts`.

    A task without a summary teaches the proposer alone.
    """
    samples = []
    for task in tasks:
        proposal, summary = shown_texts(config, task)
        samples.append((PROPOSER, proposer_prompt(config, task), proposal))
        if summary:
            samples.append((EDITOR, editor_prompt(config, task, proposal), summary))
    return samples


def shown_texts(config: Config, task: Task) -> tuple[str, str]:
    """The proposal and the summary of a demonstration, made of the abstract's own words.

    The proposal is a sentence of the shown abstract, or its first `PROPOSED` words. The summary is a part of the
    proposal that begins where a clause begins, as a sentence. ROUGE-L against the human summary decides which ones.
    The summary is empty where the proposal has no part of `EDITED` words.
    """
    best = lambda texts: max(texts, key=lambda text: rouge(text, task["targets"])["rougeL"], default="")
    sentences = SENTENCE.split(opening(task["text"], config.abstract_words))
    proposal = best([opening(sentence, PROPOSED) for sentence in sentences if sentence.strip()])
    return proposal, best(parts(proposal))


def parts(text: str) -> Iterator[str]:
    """Parts of a sentence ``text`` as sentences, of `EDITED` words at least.

    A part begins at the beginning, behind a comma, a colon or a dash, or with "we". No part ends with an open word.
    """
    words = text.split()
    begins = [
        i for i, word in enumerate(words) if not i or word.lower() == "we" or re.search(r"[,:;–—-]$", words[i - 1])
    ]
    for i in begins:
        for j in range(i + EDITED, len(words) + 1):
            made = " ".join(words[i:j]).rstrip(" .,:;–—-") + "."
            if not misfits(made) and made.count("(") == made.count(")"):
                yield made[0].upper() + made[1:]


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample of ``role``: what its ``prompt`` showed, and what its ``action`` wrote.

    ``rewards`` are the components; ``rougeL`` is shown as the score.
    """
    return entry(role, rewards.get("rougeL", 0.0), asked(prompt), action, shown=60)
