"""A reference game over articles: cooperation that no single role could fake (SciTLDR, Apache-2.0).

    turn  role      reads                                writes
    1     speaker   the abstract, and no title           a hint
    2     listener  four titles and the hint, and        the first words of one title
                    no abstract

Both roles are paid 1 where the listener names the title of the speaker's article (``chosen``), else 0. The answer is
read by its words (`groups.named`). Any other answer is wrong, and never invalid. The other titles are of articles of
the same field and split. All tasks of a group show the same titles (`groups`). So a listener without a hint is right
in one task of four on average, whatever its rule.

A speaker may say the words that it expects in the title, and often hits them. It cannot copy a title, because it sees
none. A hint says nothing about places of the list.

``hint`` is a setting for comparisons. With ``model`` the speaker writes it. Otherwise it is made by a rule, and the
listener plays alone:

    human     the first words of a human summary: an upper bound
    keywords  the words of the title that stand in the abstract: what stage 0 teaches the speaker
    lead      the first words of the abstract
    none      no words: a lower bound

Facts to log, which no shipped configuration gives a weight: ``named`` is 1 where the answer names any title.
``hint_words`` is the number of words of the hint, and ``hint_ended`` is 1 where no length limit ended it.
`episode_metrics` has the share of each place among the answers.

The published split decides which articles are held out. Articles that fit no group are left out, and counted in the
log.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Literal

from jaxmarl_llm.envs import bm25, checks, scitldr
from jaxmarl_llm.envs.chat import action_of, asked, entry, with_memory
from jaxmarl_llm.envs.reference_game.groups import first_words, named, parted
from jaxmarl_llm.envs.scitldr import opening, stand_in
from jaxmarl_llm.envs.writing.prose import FUNCTION
from jaxmarl_llm.envs.writing.rewards import STEM, STOPWORDS
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = [
    "Config", "State", "Task", "demonstrations", "episode_metrics", "hears", "make", "stand_in", "strategy", "tasks",
    "with_memory",
]  # fmt: skip

Task = dict[str, Any]
ROLES = SPEAKER, LISTENER = ("speaker", "listener")
COMPONENTS = ("chosen", "named", "hint_words", "hint_ended")
KEYWORDS = 5  # words of a title in a demonstrated hint, at most
ANSWER = 3  # first words of a title in a demonstrated answer, at least
NO_HINT = "(none)"
SYSTEM = {
    SPEAKER: (
        "Your partner has a list of titles and must find the title of this text. Write a hint: a few keywords of the "
        "text, nothing else."
    ),
    LISTENER: (
        "The hint is about one of the titles. Copy the first words of that title, nothing else."
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Config:
    """The settings of data, titles and hints. Lengths are whitespace words."""

    data: str | None = None  # folder with SciTLDR, or its URL; None: the sample in the package
    split: str = "train"  # train or test
    count: int = 0  # tasks; 0: all there are
    seed: int = 0  # of the order of groups
    hint: Literal["model", "human", "keywords", "lead", "none"] = "model"  # who says it
    titles: int = 4  # titles that the listener reads
    abstract_words: int = 100  # first words of the abstract that the speaker reads
    title_words: int = 12  # first words of a title that are shown
    hint_words: int = 12  # first words of a hint that the listener reads

    def check(self, path: str) -> None:
        checks.split_and_count(path, self)
        checks.at_least(path, self, 0, "seed")
        checks.in_range(path, self, 2, 16, "titles")
        checks.in_range(path, self, 1, checks.MOST_TEXT, "abstract_words", "title_words", "hint_words")


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    hint: str | None = None  # None: the speaker has not said it
    ended: bool = True  # whether no length limit ended the hint
    done: bool = False


def make(config: Config) -> HostEnv:
    """The environment of ``config``. With a hint by a rule the speaker never acts, and an episode has one turn."""
    return HostEnv(
        name="reference_game",
        roles=ROLES,
        max_turns=2 if config.hint == "model" else 1,
        components=COMPONENTS,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


# -- the episode -------------------------------------------------------------------------------------------------------


def reset(config: Config, seed: int, task: Task) -> State:
    """The first state of an episode. Nothing is drawn, so ``seed`` has no effect."""
    return State(task, None if config.hint == "model" else scripted(config, task))


def observe(config: Config, state: State) -> dict[str, Prompt]:
    """The prompt of the role that acts."""
    if state.hint is None:
        return {SPEAKER: speaker_prompt(config, state.task)}
    return {LISTENER: listener_prompt(state.task, state.hint)}


def speaker_prompt(config: Config, task: Mapping[str, Any]) -> Prompt:
    """The prompt of the speaker: the beginning of the abstract."""
    return Message("system", SYSTEM[SPEAKER]), Message("user", opening(task["text"], config.abstract_words))


def listener_prompt(task: Mapping[str, Any], hint: str) -> Prompt:
    """The prompt of the listener: the titles, and the ``hint`` behind them, so that prompts of a task begin alike."""
    listed = "\n".join(f"- {title}" for title in task["titles"])
    return Message("system", SYSTEM[LISTENER]), Message("user", f"Titles:\n{listed}\nHint: {hint or NO_HINT}")


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after a text, the rewards of the turn, and whether the episode has finished.

    ``seed`` has no effect. ``actions``: the text of the role that acts.
    """
    role = SPEAKER if state.hint is None else LISTENER
    action = action_of(role, actions, state.done)
    if role == SPEAKER:
        return replace(state, hint=opening(action.text, config.hint_words), ended=not action.truncated), {}, False
    place = named(action.text, state.task["titles"], action.truncated)
    paid = {
        "chosen": float(place == state.task["answer"]),
        "named": float(place is not None),
        "hint_words": float(len((state.hint or "").split())),
        "hint_ended": float(state.ended),
    }
    return replace(state, done=True), {name: dict(paid) for name in ROLES}, True


def episode_metrics(spoken: Sequence[tuple[Task, Mapping[str, str]]]) -> dict[str, float]:
    """The share of each place among the answers, ``place/<number>``, and of answers that name no title, ``place/none``.

    ``spoken``: pairs of a task and its texts by role.
    """
    places = [named(said[LISTENER], task["titles"], True) for task, said in spoken if LISTENER in said]
    size = max((len(task["titles"]) for task, _ in spoken), default=0)
    shares = {f"place/{i + 1}": places.count(i) / max(1, len(places)) for i in range(size)}
    return shares | {"place/none": places.count(None) / max(1, len(places))}


def hears(reader: str, prompt: Prompt, speaker: str, text: str) -> bool:
    """Whether a prompt tells the reader what the speaker wrote: the listener reads the hint.

    Args:
        reader: The role that reads.
        prompt: Its prompt; not read.
        speaker: The role that wrote.
        text: What it wrote; not read.
    """
    return (speaker, reader) == ROLES


# -- hints by a rule ---------------------------------------------------------------------------------------------------


def scripted(config: Config, task: Mapping[str, Any]) -> str:
    """The hint of ``config.hint``, which is not ``model``."""
    said = {"human": task["targets"][0], "lead": task["text"], "none": ""}
    text = keywords(config, task) if config.hint == "keywords" else said[config.hint]
    return opening(text, config.hint_words)


def keywords(config: Config, task: Mapping[str, Any]) -> str:
    """Content words of the title that the shown abstract has, in lower case, `KEYWORDS` at most.

    Two words agree by their first letters (`writing.rewards.STEM`). Where fewer than two words of the title stand in
    the abstract, content words of the human summary follow.
    """
    given = {word[:STEM] for word in bm25.words(opening(task["text"], config.abstract_words))}
    chosen: dict[str, None] = {}
    for text in (task["title"], task["targets"][0]):
        if len(chosen) < 2:
            chosen |= dict.fromkeys(word for word in content(text) if word[:STEM] in given)
    return " ".join([*chosen][:KEYWORDS])


def content(text: str) -> list[str]:
    """The words of ``text`` of more than one letter that are no function words, in lower case."""
    return [word for word in bm25.words(text) if len(word) > 1 and word not in STOPWORDS and word not in FUNCTION]


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


@lru_cache(maxsize=8)
def _groups(data: str | None, split: str, titles: int, title_words: int) -> tuple[tuple[tuple[Task, ...], ...], str]:
    """The tasks of every group, and the source."""
    rows, source = scitldr.articles(data, split, 0)
    made = []
    for group in parted(rows, titles, title_words):
        shown = [opening(article["title"], title_words) for article in group]
        made.append(tuple({**article, "titles": shown, "answer": i} for i, article in enumerate(group)))
    return tuple(made), f"{source}; {titles * len(made)} of them are in groups of {titles}"


def tasks(config: Config) -> list[Task]:
    """The tasks of the split, group after group, the first ``count`` of them. Raises ConfigError.

    A task is an article with ``titles``, as they are shown, and ``answer``, the place of the own one. The seed fixes
    the order of the groups.
    """
    found, source = _groups(config.data, config.split, config.titles, config.title_words)
    logging.getLogger(__name__).info("reference_game: %s", source)
    order = list(found)
    random.Random(f"reference_game {config.split} {config.seed}").shuffle(order)
    return scitldr.first([dict(task) for group in order for task in group], config.count, source)


def demonstrations(config: Config, tasks: Iterable[Task]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) of ``tasks``.

    The speaker says `keywords`. The listener copies the first words of the right title, once for this hint and once for
    the first words of the human summary. With a hint by a rule the listener reads that hint alone.
    """
    samples = []
    for task in tasks:
        answer = first_words(task["titles"], task["answer"], ANSWER)
        hints = [scripted(config, task)] if config.hint != "model" else []
        if config.hint == "model" and (hint := keywords(config, task)):
            samples.append((SPEAKER, speaker_prompt(config, task), hint))
            hints = [hint, scripted(replace(config, hint="human"), task)]
        samples += [(LISTENER, listener_prompt(task, hint), answer) for hint in hints]
    return samples


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample of ``role``: what its ``prompt`` showed, and what its ``action`` wrote.

    ``rewards`` are the components; ``chosen`` is shown as the score.
    """
    return entry(role, rewards.get("chosen", 0.0), asked(prompt), action)
