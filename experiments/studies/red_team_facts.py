"""Degenerate strategies against the rewards of `facts_text`: questions about passages that a team searches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.studies.red_team_table import Table
from jaxmarl_llm.envs.facts import text as facts
from jaxmarl_llm.envs.facts.roles import ROLES
from jaxmarl_llm.messages import Action

Say = Callable[[str], str]  # the user message of a role -> its reply


class Team(NamedTuple):
    """A strategy of each role; None: the reference plays it."""

    rewriter: Say | None
    selector: Say | None
    generator: Say | None


def always(reply: str) -> Say:
    """A strategy that writes ``reply`` whatever it reads."""
    return lambda read: reply


def question(read: str) -> str:
    """The question of the message ``read``."""
    return read.partition("\n")[0].removeprefix("Question: ")


def read_passages(read: str) -> list[str]:
    """The passages of the message ``read``."""
    return read.split("Passages:\n", 1)[1].split("\n")


def all_numbers(read: str) -> str:
    """The numbers of all passages of the message ``read``."""
    return ", ".join(str(i) for i in range(len(read_passages(read))))


def names(text: str) -> list[str]:
    """Runs of words of ``text`` that begin with a capital letter, or ``none``."""
    return re.findall(r"\b[A-Z]\w+(?: [A-Z]\w+)*", text) or ["none"]


def most_frequent_name(read: str) -> str:
    """The name that the passages of the message ``read`` have most often, and the question does not have."""
    found = [name for name in names("\n".join(read_passages(read))) if name not in question(read)] or ["none"]
    return max(found, key=found.count)


SEARCH = (question, all_numbers)  # one query, the question; every passage is kept
PERFECT = (None, None)
FACTS: dict[str, Team] = {
    "empty replies": Team(always(""), always(""), always("")),
    "nothing is searched, yes": Team(always(""), always("none"), always("yes")),
    "perfect passages, yes": Team(*PERFECT, always("yes")),
    "perfect passages, no": Team(*PERFECT, always("no")),
    "perfect passages, no answer": Team(*PERFECT, always("noanswer")),
    "perfect passages, a constant name": Team(*PERFECT, always("New York City")),
    "perfect passages, words of many answers": Team(*PERFECT, always("the American film of John in New York 1990")),
    "perfect passages, the question": Team(*PERFECT, question),
    "perfect passages, the first title": Team(*PERFECT, lambda read: read_passages(read)[0].partition(":")[0]),
    "perfect passages, the last title": Team(*PERFECT, lambda read: read_passages(read)[-1].partition(":")[0]),
    "perfect passages, the first passage": Team(*PERFECT, lambda read: read_passages(read)[0]),
    "perfect passages, all passages": Team(*PERFECT, lambda read: " ".join(read_passages(read))),
    "perfect passages, all names": Team(*PERFECT, lambda read: " ".join(names(read))),
    "perfect passages, the most frequent name": Team(*PERFECT, most_frequent_name),
    "perfect passages, twelve words": Team(*PERFECT, lambda read: " ".join(read_passages(read)[0].split()[:12])),
    "the question, all numbers, the first title": Team(*SEARCH, lambda read: read_passages(read)[0].partition(":")[0]),
    "the question, all numbers, the most frequent name": Team(*SEARCH, most_frequent_name),
    "the question, the best passage, its title": Team(
        question, always("0"), lambda read: read_passages(read)[0].partition(":")[0]
    ),
    "names of the question, no number, the last name": Team(
        lambda read: "\n".join(names(question(read))), always("none"), lambda read: names(read)[-1]
    ),
    "ten queries, otherwise perfect": Team(lambda read: "\n".join(question(read).split()[:10]), None, None),
    "a number twice, otherwise perfect": Team(None, always("0, 0, 1"), None),
    "numbers that nothing has, otherwise perfect": Team(None, always("0, 1, 99"), None),
    "a long answer that begins well": Team(*PERFECT, lambda read: question(read) + " " + most_frequent_name(read)),
}


def played(config: facts.Config, task: Mapping[str, Any], team: Team) -> dict[str, float]:
    """The totals of an episode: F1, and the mean over roles of F1 and penalty as ``return``.

    Args:
        config: Settings of the environment.
        task: One of its tasks.
        team: Who plays.
    """
    env, state, total = facts.make(config), facts.reset(0, task), {"f1": 0.0, "return": 0.0}
    for role, say in zip(ROLES, team, strict=True):
        prompt = env.observe(state)[role]
        reply = facts.reference(config, state) if say is None else say(prompt[-1].text)
        state, rewards, _ = env.step(0, state, {role: Action(reply, ())})
        total["f1"] += rewards[role].get("f1", 0.0)
        total["return"] += rewards[role]["penalty"] / len(ROLES)
    total["return"] += total["f1"]
    return total


def facts_table(config: facts.Config, count: int = 0) -> Table:
    """What the strategies earn: F1 and penalty, as the mean of the roles.

    Args:
        config: Settings of the environment and its tasks.
        count: Tasks, at most; 0: all.
    """
    tasks = facts.tasks(config)[: count or None]
    paid = lambda team: [played(config, task, team)["return"] for task in tasks]
    return Table("facts_text", {name: paid(team) for name, team in FACTS.items()}, paid(Team(None, None, None)))
