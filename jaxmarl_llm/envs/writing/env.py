"""Two agents write about one text at once: MAGRPO's writing tasks (arXiv 2508.04652).

    task    roles                 what they write
    tldr    concise, detailed     a short and a longer summary of the text
    arxiv   background, method    the two halves of an introduction that expands an abstract

Both read the text and neither sees the other's words, in its turn or later: what an agent reads in a later turn is its
own history and, with ``feedback="level"``, which levels of the joint reward were missed. Every role gets the same
components on every turn, see `writing_rewards`; their sum is the reward of the paper. A reward of your own is named by
``reward_fn``, ``"module:function"``, and called as f(c1, c2) or f(c1, c2, task) with the texts in the order of the
roles; it returns a number, the first of ``reward_components``, or a dict of those. A task is ``{id, title, text,
targets, source}``; ``text`` and ``targets`` (human summaries, maybe none) are words of the data set.

Data: SciTLDR (Apache-2.0) stands in for trl-lib/tldr and OpenMLRL/arXiv_abstract, which are read from the Hugging Face
hub by name.
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

from jaxmarl_llm.config import one_of
from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import writing_rewards as rewards
from jaxmarl_llm.envs.prompts import asked, entry, with_memory
from jaxmarl_llm.text import Action, ConfigError, HostEnv, Message, Prompt, Rewards

__all__ = ["ROLES", "Config", "State", "Task", "demonstrations", "make", "strategy", "tasks", "with_memory"]

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
    """Lengths are whitespace words. ``data``: None for the sample in the package, a directory that holds (or is) a
    ``scitldr`` folder, or a hub name ``org/name``. Texts outside [min_source, max_source] are left out, and counted.
    """

    task: Literal["tldr", "arxiv"] = "tldr"
    reward: Literal["strict", "parity"] = "strict"
    band: Literal["paper", "2026"] = "paper"  # of the length ratio in arxiv
    data: str | None = None
    split: str = "train"
    count: int = 0  # tasks; 0: all there are
    seed: int = 0
    max_turns: int = 1
    feedback: Literal["plain", "level"] = "plain"  # before a later turn
    min_words: int | None = None  # of a written text; None: the paper's, 8 for tldr and 128 for arxiv
    max_words: int | None = None  # likewise, 256
    min_source: int = 100  # 100 to 300: what the paper's arXiv set keeps
    max_source: int = 300
    reward_fn: str | None = None
    reward_components: tuple[str, ...] = ("reward",)  # of reward_fn

    def __post_init__(self) -> None:
        for key, choices in {
            "task": ROLES,
            "reward": rewards.MODES,
            "band": rewards.ARXIV,
            "feedback": ("plain", "level"),
        }.items():
            one_of(key, getattr(self, key), choices)
        low, high = self.limits
        if not 1 <= low <= high:
            raise ConfigError(f"min_words, max_words: expected 1 <= min_words <= max_words, got {low} and {high}")
        if not 1 <= self.min_source <= self.max_source:
            raise ConfigError(f"min_source, max_source: expected 1 <= {self.min_source} <= {self.max_source}")
        if self.max_turns < 1 or self.count < 0:
            raise ConfigError(f"expected max_turns >= 1 and count >= 0, got {self.max_turns} and {self.count}")
        if not self.reward_components or len(set(self.reward_components)) < len(self.reward_components):
            raise ConfigError(f"reward_components {self.reward_components}: expected distinct names, at least one")

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


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    threads: tuple[Prompt, Prompt]  # each role's whole conversation, in the order of the roles
    turn: int = 0
    latest: tuple[tuple[str, float], ...] = ()  # components of the last turn


def make(config: Config) -> HostEnv:
    if config.reward_fn is not None:
        reward_function(config.reward_fn)  # before the first rollout
    return HostEnv(
        name="writing",
        roles=ROLES[config.task],
        max_turns=config.max_turns,
        components=rewards.COMPONENTS if config.reward_fn is None else config.reward_components,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
        verify=partial(verify, config),
    )


# -- the episode -------------------------------------------------------------------------------------------------------


def reset(config: Config, seed: int, task: Task) -> State:
    """The episode's first state. Everything is deterministic, so the seed has no effect."""
    first, second = ((Message("system", _system(config, role)), _asked(task)) for role in ROLES[config.task])
    return State(task, (first, second))


def _system(config: Config, role: str) -> str:
    return f"{SYSTEM[role]} Use {config.limits[0]} to {config.limits[1]} words."


def _asked(task: Mapping[str, Any]) -> Message:
    return Message("user", f"{task['title']}\n{task['text']}" if task["title"] else task["text"])


def observe(config: Config, state: State) -> dict[str, Prompt]:
    return dict(zip(ROLES[config.task], state.threads))


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    roles = ROLES[config.task]
    if set(actions) != set(roles) or state.turn >= config.max_turns:
        raise ValueError(f"expected one action each of {roles} in an unfinished episode, got {sorted(actions)}")
    texts = [actions[role].text for role in roles]
    components = judge(config, state.task, *texts)
    done = state.turn + 1 >= config.max_turns
    threads = []
    for role, thread in zip(roles, state.threads):
        action = actions[role]
        # a scripted action has no ids; its text is encoded instead
        said = action.message(role) if action.ids else Message("assistant", action.text)
        told = () if done else (Message("user", feedback(config, state.task, components, *texts)),)
        threads.append((*thread, said, *told))
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


def judge(config: Config, task: Mapping[str, Any], c1: str, c2: str) -> dict[str, float]:
    """Components of the joint reward. What ``reward_fn`` returns is checked where rewards become tables."""
    if config.reward_fn is None:
        return rewards.score(config.spec, c1, c2, mode=config.reward, source=task["text"])
    function, wants_task = reward_function(config.reward_fn)
    got = function(c1, c2, task) if wants_task else function(c1, c2)
    return dict(got) if isinstance(got, Mapping) else {config.reward_components[0]: got}


def feedback(config: Config, task: Mapping[str, Any], components: Mapping[str, float], c1: str, c2: str) -> str:
    """What both agents read before the next turn. It quotes neither text."""
    if config.feedback == "plain":
        return "Revise your text."
    if config.reward_fn is not None:
        scores = ", ".join(f"{name} {value:.2f}" for name, value in components.items())
        return f"Joint score: {scores}. Revise your text."
    return " ".join([*(advice(config, task, c1, c2) or ["All levels were reached."]), "Revise your text."])


def advice(config: Config, task: Mapping[str, Any], c1: str, c2: str) -> list[str]:
    """A sentence for each level of the reward, or guard of strict mode, that was missed."""
    first, second = ROLES[config.task]
    spec, (values, ratio, unique) = (
        config.spec,
        rewards.levels(config.spec, c1, c2, mode=config.reward, source=task["text"]),
    )

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
        warned = {
            "repetition": "A text repeats itself.",
            "partner": "The two texts say the same words.",
            "prompt": "A text copies what was given.",
            "faithful": "A text is not about what was given.",
        }
        out += [warned[name] for name, factor in rewards.guards(c1, c2, task["text"]).items() if factor < 1]
    return out


@lru_cache(maxsize=8)
def reward_function(path: str) -> tuple[Callable[..., Any], bool]:
    """The callable named ``module:function``, and does it take the task? Raises ConfigError for what cannot be called
    with two texts.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD]
    except Exception as error:  # importing it runs code of the user's
        why = " ".join(str(error).split())
        raise ConfigError(f"reward_fn {path!r}: expected module:function ({type(error).__name__}: {why})") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in positional if p.default is p.empty]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    wants_task = len(positional) > 2 and positional[2].name == "task"
    if named or (len(positional) < 2 and not several) or len(required) > 2 + wants_task:
        raise ConfigError(
            f"reward_fn {path!r}: takes {inspect.signature(function)}; expected (c1, c2) or (c1, c2, task), "
            "the texts of two agents"
        )
    return function, wants_task


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def tasks(config: Config) -> list[Task]:
    """Tasks of the split in an order fixed by the seed, the first ``count`` of them. Raises ConfigError."""
    rows, source = _rows(config)
    kept = [row | {"source": source} for row in rows if _permitted(config, row)]
    logging.getLogger(__name__).info("writing: %s; %d of %d texts are usable", source, len(kept), len(rows))
    if len(kept) < max(1, config.count):
        raise ConfigError(
            f"{source}: {len(kept)} texts of {config.min_source} to {config.max_source} words, "
            f"{max(1, config.count)} asked for"
        )
    return kept[: config.count or None]


def _rows(config: Config) -> tuple[list[Task], str]:
    data = config.data
    if data is None or Path(data).is_dir():
        return loaders.load("scitldr", data_dir=data, split=config.split, seed=config.seed)
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", data):
        raise ConfigError(f"data {data!r}: no such folder; expected a folder with SciTLDR or a hub name org/name")
    try:
        rows, source = loaders.load(data, split=config.split, seed=config.seed)
    except ConfigError as error:
        raise ConfigError(f"data {data!r}: no such folder, and as a hub name: {error}") from None
    return [r if "targets" in r else loaders.writing_row(f"{data}, {r['id']}", r, r["id"]) for r in rows], source


def _permitted(config: Config, row: Mapping[str, Any]) -> bool:
    return config.min_source <= len(row["text"].split()) <= config.max_source


def demonstrations(config: Config, tasks: Iterable[Task]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) from the data's own words, by the built-in reward the best pair of each task.

    tldr: a human summary (with the title in front when it is too short) and a run of the text's sentences. arxiv: the
    abstract cut in two at the end of a sentence, within the limits of words, so abstracts of the paper's length give
    none under its own limits. Tasks without a pair of permitted lengths are left out.
    """
    samples = []
    for task in tasks:
        best, reached = None, 0.5  # a permitted length alone is no example
        for pair in _pairs(config, task):
            total = sum(rewards.score(config.spec, *pair, mode=config.reward, source=task["text"]).values())
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
        least, _, _, most = config.spec.ratio
        out += [(short, run) for run in runs if least <= len(run) / len(short) <= most]
    return out


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """What a successful sample leaves in memory: what was asked and what was written.

    ``rewards`` are the components, whose sum is shown as the score.
    """
    return entry(role, sum(rewards.values()), asked(prompt), action, shown=60)
