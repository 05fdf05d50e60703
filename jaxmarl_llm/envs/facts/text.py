"""The protocol `pipeline` of facts on real questions, for host models: rewriter, selector and generator, once each.

Questions and passages are those of HotpotQA, see `facts.passages`. A passage has no fixed form, and so this module has
rules of its own. Roles, components of the reward and penalties are those of `facts.pipeline`.

    role       reads                                    writes
    rewriter   the question                             search queries, one on each line
    selector   the question, and numbered passages      the numbers of those that it keeps, such as 0, 3; or none
    generator  the question, and the kept passages      the answer

The first four queries run, each on the whole corpus, and return ``results`` passages each. The selector reads the best
passage of each query, then the second ones, up to ``documents``. The generator reads the kept passages in the order
of the selector's numbers, up to ``kept``.

The text of a passage is cut behind ``passage_chars`` characters, so that prompts fit ``max_prompt`` of a run. The log
of a run counts the passages that are cut. Search reads the whole text. With the defaults, prompts of the reference
episodes have fewer than 3,000 characters. Supporting passages of the 100 questions have 110 answers, 3 of them behind
the cut.

Out of form are

    rewriter   no query, more than four, a query without a word, or more than ``rewrite_chars`` characters in all
    selector   anything but numbers between commas; a repeated number, or one that no passage has
    generator  more than ``answer_words`` words

and every reply that the length limit ended. Such a reply is penalised, and read as far as it can be. Queries beyond
``rewrite_chars`` characters do not run. A number amid other text is kept. A selector that keeps nothing, and a
generator that answers nothing, are in form.

Rewards, where a role's own is what only the role that acts is paid:

    f1         token F1 of the answer by HotpotQA's rules, to all roles at the last turn
    em         1 if the normalised answer is the gold one, and was not cut off; to all roles at the last turn
    penalty    its own: the role's penalty for a reply out of form
    evidence   its own: share of the supporting passages among those shown (rewriter) or kept (selector)
    format     its own: 1 for a reply in form
    turns      its own: 1

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.answer_rules import exact_match, token_f1
from jaxmarl_llm.envs.bm25 import words
from jaxmarl_llm.envs.chat import asked, cut, entry, with_memory
from jaxmarl_llm.envs.facts import passages
from jaxmarl_llm.envs.facts.roles import COMPONENTS, PENALTIES, QUERIES, ROLES, check_penalties
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = [
    "Config", "State", "ask", "demonstrations", "hears", "make", "play", "reference", "strategy", "tasks",
    "with_memory",
]  # fmt: skip

REWRITER, SELECTOR, GENERATOR = ROLES
NOTHING = "none"  # of a selector that keeps no passage
ASKED = {
    REWRITER: f"Write one to {QUERIES} search queries that find what the question is about, one on each line.",
    SELECTOR: f"Name the numbers of the passages that help to answer, such as 0, 3, or write {NOTHING}.",
    GENERATOR: "Answer the question from the passages in as few words as possible.",
}


@dataclass(frozen=True)
class Config:
    """The settings of data, passages and penalties."""

    data_dir: str | None = None  # folder of the data sets, or its URL; None: the samples in the package
    split: str = "train"  # train, validation or test
    count: int = 0  # tasks; 0: all there are
    seed: int = 0  # of the order of tasks
    results: int = 3  # passages that a query returns, at most
    documents: int = 6  # passages that the selector reads, at most
    kept: int = 3  # passages that the generator reads, at most
    passage_chars: int = 400  # characters of a passage; longer ones are cut
    rewrite_chars: int = 400  # characters of a rewriter's reply that is not too long
    answer_words: int = 12  # words of an answer that is not too long
    penalties: tuple[float, float, float] = PENALTIES  # of each role, for a reply out of form

    def check(self, path: str) -> None:
        one_of(f"{path}.split", self.split, passages.SPLITS)
        checks.in_range(path, self, 0, checks.MOST_TASKS, "count")
        checks.at_least(path, self, 0, "seed")
        checks.in_range(path, self, 1, 100, "results", "documents")
        checks.in_range(path, self, 1, self.documents, "kept")
        checks.in_range(path, self, 1, checks.MOST_TEXT, "passage_chars", "rewrite_chars", "answer_words")
        check_penalties(path, self)


@dataclass(frozen=True)
class State:
    """An episode so far. Passages are places in the corpus. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    turn: int = 0
    shown: tuple[int, ...] = ()  # passages that the selector reads
    kept: tuple[int, ...] = ()  # passages that the generator reads


class Reply(NamedTuple):
    """A reply of the rewriter or the selector, read by the rules above.

    Attributes:
        items: Queries of a rewriter, or places among the shown passages of a selector.
        proper: Whether the reply is in form; the length limit is not looked at.
    """

    items: tuple[Any, ...]
    proper: bool


def make(config: Config) -> HostEnv:
    """The environment of ``config``."""
    return HostEnv(
        name="facts_text",
        roles=ROLES,
        max_turns=len(ROLES),
        components=COMPONENTS,
        reset=reset,
        observe=partial(observe, config),
        step=partial(step, config),
    )


# -- the episode -------------------------------------------------------------------------------------------------------


def reset(seed: int, task: Mapping[str, Any]) -> State:
    """The first state of an episode. Nothing is drawn, so ``seed`` has no effect."""
    return State(task)


def observe(config: Config, state: State) -> dict[str, Prompt]:
    """The prompt of the role that acts."""
    role, found = ROLES[state.turn], passages.corpus(config.data_dir).passages
    lines = [f"Question: {state.task['question']}"]
    if role != REWRITER:
        places = state.shown if role == SELECTOR else state.kept
        texts = [f"{found[i].title}: {cut(found[i].text, config.passage_chars)}" for i in places]
        numbered = [f"{i}. {text}" for i, text in enumerate(texts)] if role == SELECTOR else texts
        lines += ["Passages:", *(numbered or [NOTHING])]
    rule = f"You are the {role}. {ASKED[role]} Write nothing else."
    return {role: (Message("system", rule), Message("user", "\n".join(lines)))}


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after a reply, the rewards of the turn, and whether the episode has finished.

    ``seed`` has no effect. ``actions``: the reply of the role that acts.
    """
    if state.turn >= len(ROLES) or set(actions) != {ROLES[state.turn]}:
        raise ValueError(f"expected one action of the role that acts in an unfinished episode, got {sorted(actions)}")
    role = ROLES[state.turn]
    action, found, task = actions[role], passages.corpus(config.data_dir), state.task
    said, after = action.text, replace(state, turn=state.turn + 1)
    if role == REWRITER:
        queries, proper = read_queries(config, said)
        after = replace(after, shown=passages.retrieve(found, queries, config.results, config.documents))
    elif role == SELECTOR:
        numbers, proper = read_numbers(said, len(state.shown))
        after = replace(after, kept=tuple(state.shown[i] for i in numbers[: config.kept]))
    else:
        proper = len(said.split()) <= config.answer_words
    if task.get("asked"):  # by a person
        return after, {}, role == GENERATOR
    proper &= not action.truncated
    share = (
        0.0
        if role == GENERATOR
        else passages.recall(found, task["supporting"], after.shown if role == REWRITER else after.kept)
    )
    penalty = 0.0 if proper else -config.penalties[state.turn]
    rewards = {role: {"penalty": penalty, "evidence": share, "format": float(proper), "turns": 1.0}}
    if role == GENERATOR:
        right = exact_match(said, task["answer"]) and not action.truncated
        paid = {"f1": token_f1(said, task["answer"]), "em": float(right)}
        rewards = {name: paid | rewards.get(name, {}) for name in ROLES}
    return after, rewards, role == GENERATOR


# -- replies -----------------------------------------------------------------------------------------------------------


def read_queries(config: Config, text: str) -> Reply:
    """The queries of a rewriter's reply ``text``, `QUERIES` of them at most."""
    text = text.strip()
    queries = [line.strip() for line in text[: config.rewrite_chars].splitlines() if line.strip()]
    proper = 1 <= len(queries) <= QUERIES and all(map(words, queries)) and len(text) <= config.rewrite_chars
    return Reply(tuple(queries[:QUERIES]), proper)


def read_numbers(text: str, count: int) -> Reply:
    """The numbers of a selector's reply ``text``, each once. ``count``: how many passages it was shown."""
    if text.strip().lower() in ("", NOTHING):
        return Reply((), True)
    known = {str(i): i for i in range(count)}
    parts = [part.strip() for part in text.split(",")]
    proper = all(part in known for part in parts) and len(set(parts)) == len(parts)
    return Reply(tuple(dict.fromkeys(known[n] for n in re.findall("[0-9]+", text) if n in known)), proper)


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def tasks(config: Config) -> list[passages.Question]:
    """The tasks of the configured split ``{id, question, answer, supporting}``, in an order that the seed determines.

    The log has their source, and how many passages are cut.

    Raises:
        ConfigError: The data cannot be read, or the split has fewer than ``config.count`` tasks.
    """
    found, (chosen, source) = (
        passages.corpus(config.data_dir),
        passages.questions(config.data_dir, config.split, config.seed),
    )
    long = sum(len(passage.text) > config.passage_chars for passage in found.passages)
    told = f"{long} of {len(found.passages)} passages are cut behind {config.passage_chars} characters"
    logging.getLogger(__name__).info("facts_text: %s; %s", source, told)
    if config.count > len(chosen):
        checks.refuse(checks.ARGS, "count", f"at most {len(chosen)}, the questions in {source}", config.count)
    return chosen[: config.count or None]


def ask(config: Config, text: str) -> dict[str, Any]:
    """The task of a person's question ``text``, without an answer. The team searches the same passages."""
    return {"id": "asked", "asked": True, "question": passages.one_line(text)}


def hears(reader: str, prompt: Prompt, speaker: str, text: str) -> bool:
    """Whether a reply decides which passages a role reads: the role before it has written the reply.

    Args:
        reader: The role that acts after the reply.
        prompt: The prompt of ``reader``; not read.
        speaker: The role that wrote the reply.
        text: The reply; not read.
    """
    return (speaker, reader) in ((REWRITER, SELECTOR), (SELECTOR, GENERATOR))


def reference(config: Config, state: State) -> str:
    """The reply of a perfect role in ``state``.

    Titles of the supporting passages are the queries, and their numbers are the numbers. The answer is the gold one.
    """
    role, task, found = ROLES[state.turn], state.task, passages.corpus(config.data_dir).passages
    if role == REWRITER:
        return "\n".join(task["supporting"][:QUERIES])
    if role == SELECTOR:
        numbers = [str(i) for i, at in enumerate(state.shown) if found[at].title in task["supporting"]]
        return ", ".join(numbers[: config.kept]) or NOTHING
    return task["answer"]


def play(config: Config, task: Mapping[str, Any]) -> list[tuple[str, Prompt, str]]:
    """The reference episode of ``task``, as samples (role, prompt, reply)."""
    state, samples = reset(0, task), []
    for role in ROLES:
        text = reference(config, state)
        samples.append((role, observe(config, state)[role], text))
        state, _, _ = step(config, 0, state, {role: Action(text, ())})
    return samples


def demonstrations(config: Config, tasks: Iterable[Mapping[str, Any]]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, reply) of every role for fine-tuning: the reference episodes of ``tasks``."""
    return [sample for task in tasks for sample in play(config, task)]


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample of ``role``: the question in its ``prompt``, the text of its ``action``, its F1.

    ``rewards`` are the role's components.
    """
    return entry(role, rewards.get("f1", 0.0), asked(prompt).partition("\n")[0], action)
