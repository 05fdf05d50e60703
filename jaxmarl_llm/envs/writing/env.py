"""Two agents write about one text at once: MAGRPO's writing tasks (arXiv 2508.04652).

    task    roles                 what they write
    tldr    concise, detailed     a short and a longer summary of the text
    arxiv   background, method    the two halves of an introduction that expands an abstract

Both read the text and neither sees the other's words, in its turn or later. In a later turn an agent reads its own
history. With ``feedback="level"`` it also reads which levels of the joint reward were missed. Every role gets the same
components on every turn. Two rewards are built in (`rewards`): ``strict``, the default, and ``parity``, which is the
paper's own. Their sum over the five components is the return. ``word_lists`` names a file with the connectives and
stopwords of both, such as the authors' (`word_lists`).

tldr has two components more, ``rouge1`` and ``rougeL`` of the concise text against the human summaries. They are there
to be logged: no shipped configuration gives them a weight.

``reward_fn``, ``"module:function"``, names a reward of your own. It is called as f(c1, c2) or f(c1, c2, task), with the
texts in the order of the roles. It returns a number, the first of ``reward_components``, or a dict of those. A task is
``{id, title, text, targets, source}``; ``text`` and ``targets`` (human summaries, maybe none) are words of the data
set.

Data: SciTLDR (Apache-2.0) stands in for trl-lib/tldr and OpenMLRL/arXiv_abstract, which are read from the Hugging Face
hub by name.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from jaxmarl_llm.data import loaders, remote
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.chat import asked, entry, reply_message, with_memory
from jaxmarl_llm.envs.scitldr import stand_in
from jaxmarl_llm.envs.writing import prose, rewards, rouge, word_lists
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = [
    "ROLES", "Config", "State", "Task", "ask", "demonstrations", "make", "stand_in", "strategy", "tasks", "with_memory",
]  # fmt: skip

Task = dict[str, Any]
ROLES = {"tldr": ("concise", "detailed"), "arxiv": ("background", "method")}
SYSTEM = {
    "concise": "Write a concise summary of the text: a few sentences, only facts.",
    "detailed": (
        "Write a detailed summary of the text: more facts in other words than a short summary would use, joined by "
        "transition words."
    ),
    "background": (
        "Expand the abstract: write the background and motivation. Another writer covers the method and its "
        "implications, so leave them out."
    ),
    "method": (
        "Expand the abstract: write the method and its implications. Another writer covers the background and "
        "motivation, so leave them out."
    ),
}


@dataclass(frozen=True)
class Config:
    """The settings of task, reward, data and turns.

    Lengths are whitespace words. ``data`` is None for the sample in the package, a directory that holds (or is) a
    ``scitldr`` folder, or a hub name ``org/name``. Texts outside [min_source, max_source] are left out, and counted.
    """

    task: Literal["tldr", "arxiv"] = "tldr"  # what is written: summaries, or introductions
    reward: Literal["strict", "parity"] = "strict"  # parity: the paper's
    word_lists: str | None = None  # a JSON or text file; None: the lists of this project
    band: Literal["paper", "2026"] = "paper"  # of the length ratio in arxiv
    data: str | None = None  # folder, URL or hub name org/name; None: the sample in the package
    split: str = "train"  # train or test
    count: int = 0  # tasks; 0: all there are
    seed: int = 0  # of the order of tasks
    max_turns: int = 1  # turns of an episode
    feedback: Literal["plain", "level"] = "plain"  # before a later turn
    min_words: int | None = None  # of a written text; None: the paper's, 8 for tldr and 128 for arxiv
    max_words: int | None = None  # likewise, 256
    min_source: int = 100  # 100 to 300: what the paper's arXiv set keeps
    max_source: int = 300  # longest source text
    reward_fn: str | None = None  # module:function of a reward of your own
    reward_components: tuple[str, ...] = ("reward",)  # of reward_fn

    def check(self, path: str) -> None:
        checks.in_range(path, self, 0, checks.MOST_TASKS, "count")
        checks.in_range(path, self, 1, checks.MOST_ROUNDS, "max_turns")
        low, high = self.limits
        if high < 1:
            checks.refuse(path, "max_words", "at least 1", high)
        if not 1 <= low <= high:
            checks.refuse(path, "min_words", f"1 to max_words={high}", low)
        checks.at_least(path, self, 1, "max_source")
        if not 1 <= self.min_source <= self.max_source:
            checks.refuse(path, "min_source", f"1 to max_source={self.max_source}", self.min_source)
        if not self.reward_components or len(set(self.reward_components)) < len(self.reward_components):
            checks.refuse(path, "reward_components", "distinct names, at least one", self.reward_components)
        word_lists.read(self.word_lists, path)
        if self.reward_fn is not None:
            reward_function(self.reward_fn, path)

    @property
    def limits(self) -> tuple[int, int]:
        low, high = self._official.limits
        return low if self.min_words is None else self.min_words, high if self.max_words is None else self.max_words

    @property
    def _official(self) -> rewards.Spec:
        return rewards.TLDR if self.task == "tldr" else rewards.ARXIV[self.band]

    @property
    def spec(self) -> rewards.Spec:
        return self._official._replace(limits=self.limits)

    @property
    def components(self) -> tuple[str, ...]:
        """The reward components, those that are only logged among them."""
        if self.reward_fn is not None:
            return self.reward_components
        return (*rewards.COMPONENTS, *(rouge.METRICS if self.task == "tldr" else ()))


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    threads: tuple[Prompt, Prompt]  # each role's whole conversation, in the order of the roles
    turn: int = 0
    latest: tuple[tuple[str, float], ...] = ()  # components of the last turn


def make(config: Config) -> HostEnv:
    """The environment of ``config``."""
    return HostEnv(
        name="writing",
        roles=ROLES[config.task],
        max_turns=config.max_turns,
        components=config.components,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
        verify=partial(verify, config),
    )


# -- the episode -------------------------------------------------------------------------------------------------------


def reset(config: Config, seed: int, task: Task) -> State:
    """The episode's first state. Everything is deterministic, so the seed has no effect."""
    first, second = (
        (Message("system", _system(config, role)), Message("user", given(task))) for role in ROLES[config.task]
    )
    return State(task, (first, second))


def _system(config: Config, role: str) -> str:
    return f"{SYSTEM[role]} Use {config.limits[0]} to {config.limits[1]} words."


def given(task: Mapping[str, Any]) -> str:
    """Text of ``task`` that both roles read: its title, if it has one, and its text."""
    return f"{task['title']}\n{task['text']}" if task["title"] else task["text"]


def observe(config: Config, state: State) -> dict[str, Prompt]:
    """The prompts of both roles."""
    return dict(zip(ROLES[config.task], state.threads))


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after both texts, the rewards of the turn, and whether the episode has finished.

    ``seed`` has no effect. ``actions``: the texts by role.
    """
    roles = ROLES[config.task]
    if set(actions) != set(roles) or state.turn >= config.max_turns:
        raise ValueError(f"expected one action each of {roles} in an unfinished episode, got {sorted(actions)}")
    texts = [actions[role].text for role in roles]
    truncated = any(actions[role].truncated for role in roles)
    components = judge(config, state.task, *texts, truncated=truncated)
    done = state.turn + 1 >= config.max_turns
    threads = []
    for role, thread in zip(roles, state.threads):
        advised = "" if done else feedback(config, state.task, components, *texts, truncated=truncated)
        told = (Message("user", advised),) if advised else ()
        threads.append((*thread, reply_message(role, actions[role]), *told))
    new = replace(
        state,
        threads=(threads[0], threads[1]),
        turn=state.turn + 1,
        latest=tuple((k, v) for k, v in components.items()),
    )
    return new, {role: dict(components) for role in roles}, done


def verify(config: Config, state: State) -> Rewards:
    """The components of the last turn: a text is judged when it is written, so the local verdict is the reward."""
    return {role: dict(state.latest) for role in ROLES[config.task]}


def judge(config: Config, task: Mapping[str, Any], c1: str, c2: str, *, truncated: bool = False) -> dict[str, float]:
    """Components of the joint reward. What ``reward_fn`` returns is checked where rewards become tables.

    Args:
        config: Settings of the reward.
        task: The text that was given, and human summaries.
        c1: Text of the first role.
        c2: Text of the second role.
        truncated: Whether the length limit ended one of the texts.
    """
    if config.reward_fn is None:
        paid = rewards.score(config.spec, c1, c2, **_measured_by(config, task), truncated=truncated)
        return paid | (rouge.rouge(c1, task["targets"]) if config.task == "tldr" else {})
    function, wants_task = reward_function(config.reward_fn)
    got = function(c1, c2, task) if wants_task else function(c1, c2)
    return dict(got) if isinstance(got, Mapping) else {config.reward_components[0]: got}


def _measured_by(config: Config, task: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the built-in rewards."""
    return {"mode": config.reward, "source": given(task), "lists": word_lists.read(config.word_lists)}


def feedback(
    config: Config,
    task: Mapping[str, Any],
    components: Mapping[str, float],
    c1: str,
    c2: str,
    *,
    truncated: bool = False,
) -> str:
    """Message that both agents read before the next turn. It quotes neither text. Arguments are those of `judge`.

    ``components``: the reward of the turn.
    """
    if config.feedback == "plain":
        return "Revise your text."
    if config.reward_fn is not None:
        scores = ", ".join(f"{name} {value:.2f}" for name, value in components.items())
        return f"Joint score: {scores}. Revise your text."
    missed = advice(config, task, c1, c2, truncated=truncated)
    return " ".join([*(missed or ["All levels were reached."]), "Revise your text."])


def advice(config: Config, task: Mapping[str, Any], c1: str, c2: str, *, truncated: bool = False) -> list[str]:
    """A sentence for each level of the reward, or guard of strict mode, that was missed.

    Arguments are those of `judge`.
    """
    first, second = ROLES[config.task]
    spec, measured = config.spec, _measured_by(config, task)
    values, ratio, unique = rewards.levels(spec, c1, c2, **measured)

    def wanted(edges: Sequence[float], x: float) -> str:
        span = f"{edges[1]:g} to {edges[2]:g}" if edges[2] < float("inf") else f"at least {edges[1]:g}"
        return f"{span} times as %s as the {first} one; it {'has too little' if x < edges[1] else 'has too much'}."

    where = "The two texts" if spec.both else f"The {second} text"
    said = {
        "words": (0.5, f"Each text needs {spec.limits[0]} to {spec.limits[1]} words."),
        "ratio": (1.0, f"The {second} text should be {wanted(spec.ratio, ratio) % 'long'}"),
        "unique": (0.5, f"The {second} text should have {wanted(spec.unique, unique) % 'many different words'}"),
        "transitions": (0.4 * 0.6, f"{where} should use more kinds of transition words, at most one in a sentence."),
        "jaccard": (0.6, "The two texts should share more of their important words."),
    }
    out = [text for name, (full, text) in said.items() if name in values and values[name] < full - 1e-9]
    if config.reward == "strict":
        factors = rewards.guards(spec, c1, c2, measured["source"], lists=measured["lists"], truncated=truncated)
        warned = {
            "ended": "A text does not end: close the last sentence in time.",
            "repetition": "A text repeats itself.",
            "prose": "A text is not made of sentences.",
            "partner": "The two texts say the same words.",
            "prompt": "A text copies what was given.",
            "faithful": "A text has too many words that were not given.",
            "order": "A text is not about what was given.",
            "reworded": f"The {first} text should use words of its own.",
        }
        out += [warned[name] for name, factor in factors.items() if factor < 1]
    return out


@lru_cache(maxsize=8)
def reward_function(name: str, path: str = checks.ARGS) -> tuple[Callable[..., Any], bool]:
    """The callable that ``name``, ``module:function``, stands for, and whether it takes the task.

    Raises ConfigError for one that cannot be called with two texts. ``path`` is the Config's name in the message.
    """
    module, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), function_name)
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    except Exception as error:  # importing it runs code of the user's
        why = " ".join(str(error).split())
        got = f"got {name!r} ({type(error).__name__}: {why})"
        raise ConfigError(f"{path}.reward_fn: expected module:function, {got}") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    wants_task = len(positional) > 2 and positional[2].name == "task"
    if named or (len(positional) < 2 and not several) or len(required) > 2 + wants_task:
        expected = "a function of (c1, c2) or (c1, c2, task), the texts of two agents"
        got = f"{name!r} with {inspect.signature(function)}"
        raise ConfigError(f"{path}.reward_fn: expected {expected}, got {got}")
    return function, wants_task


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def tasks(config: Config) -> list[Task]:
    """Tasks of the split in an order fixed by the seed, the first ``count`` of them. Raises ConfigError."""
    rows, source = _rows(config)
    kept = [row | {"source": source} for row in rows if _permitted(config, row)]
    logging.getLogger(__name__).info("writing: %s; %d of %d texts are usable", source, len(kept), len(rows))
    if len(kept) < max(1, config.count):
        found = f"at most {len(kept)}, the texts of {config.min_source} to {config.max_source} words in {source}"
        raise ConfigError(f"{checks.ARGS}.count: expected {found}, got {max(1, config.count)}")
    return kept[: config.count or None]


def _rows(config: Config) -> tuple[list[Task], str]:
    data = config.data
    if data is None or remote.is_url(data) or Path(data).is_dir():
        return loaders.load("scitldr", data_dir=data, split=config.split, seed=config.seed)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", data):
        expected = "a folder with SciTLDR, its URL or a hub name org/name"
        raise ConfigError(f"{checks.ARGS}.data: expected {expected}, got {data!r}: no such folder")
    try:
        rows, source = loaders.load(data, split=config.split, seed=config.seed)
    except ConfigError as error:
        raise ConfigError(f"{checks.ARGS}.data: got {data!r}: no such folder, and as a hub name: {error}") from None
    return [r if "targets" in r else loaders.writing_row(f"{data}, {r['id']}", r, r["id"]) for r in rows], source


def _permitted(config: Config, row: Mapping[str, Any]) -> bool:
    return config.min_source <= len(row["text"].split()) <= config.max_source


def ask(config: Config, text: str) -> Task:
    """The task of a person's ``text``, which both roles write about. ``max_source`` does not apply."""
    return {"id": "asked", "title": "", "text": text, "targets": [], "source": "asked"}


def demonstrations(config: Config, tasks: Iterable[Task]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) from the data's own words, the best pair of each of ``tasks``.

    The built-in reward decides which pair is best.

    A pair of tldr is a human summary and a run of the text's sentences. A title is put before a summary that is too
    short, and a full stop behind one that has none. A pair of arxiv is the abstract cut in two at the end of a
    sentence, within the limits of words. So abstracts of the paper's length give no pair under its own limits. Tasks
    without a pair of permitted lengths are left out.
    """
    samples = []
    for task in tasks:
        best, reached = None, 0.5  # a permitted length alone is no example
        for pair in _pairs(config, task):
            total = sum(rewards.score(config.spec, *pair, **_measured_by(config, task)).values())
            if total > reached:
                best, reached = pair, total
        if best is not None:
            prompts = observe(config, reset(config, 0, task))
            samples += [(role, prompts[role], text) for role, text in zip(ROLES[config.task], best)]
    return samples


def _pairs(config: Config, task: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    sentences = [s for s in rewards.SENTENCE.split(task["text"]) if s.strip()]
    n, low = len(sentences), config.limits[0]
    if config.task == "arxiv":
        return [(" ".join(sentences[:i]), " ".join(sentences[i:])) for i in range(1, n)]
    runs = [" ".join(sentences[i:j]) for i in range(n) for j in range(i + 1, n + 1)]
    out = []
    for target in task["targets"]:
        short = target if len(target.split()) >= low else f"{task['title']}: {target}"
        short = short if prose.ended(short) else f"{short.rstrip()}."
        least, _, _, most = config.spec.ratio
        out += [(short, run) for run in runs if least <= len(run) / len(short) <= most]
    return out


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample: what the ``prompt`` asked ``role`` for, and what its ``action`` wrote.

    ``rewards`` are the components. The sum of those that are paid is shown as the score.
    """
    score = sum(value for name, value in rewards.items() if name not in rouge.METRICS)
    return entry(role, score, asked(prompt), action, shown=60)
