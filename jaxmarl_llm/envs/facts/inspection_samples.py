"""Demonstrators of the protocol `inspect` of facts: what good roles write, as texts, and with planted mistakes.

Shared arguments: ``settings`` are those of the protocol. ``task`` is a task as text, and ``found`` the facts that were
found, as texts. ``seed`` and ``rng`` (NumPy) determine what is drawn, and ``n`` is the number of samples of a role.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmarl_llm.envs.array_env import Samples
from jaxmarl_llm.envs.facts import exercises, tasks
from jaxmarl_llm.envs.facts.inspection_settings import (
    ANSWER,
    EXPAND,
    INSPECTOR,
    LETTERS,
    MARKS,
    PASS,
    PLANNER,
    RETRY,
    REWRITE,
    ROLES,
    SOLVER,
    Settings,
    prompt_lengths,
)
from jaxmarl_llm.envs.facts.pipeline import LONGEST, good_answer, good_queries, other_entities
from jaxmarl_llm.envs.facts.roles import QUERIES
from jaxmarl_llm.envs.facts.search import COMMA, look_up
from jaxmarl_llm.envs.facts.tasks import DIGITS, Task, TaskConfig
from jaxmarl_llm.envs.prompt_grammar import prompt_text


def retrieved(settings: Settings, facts: Sequence[str], turns: Sequence[Sequence[str]]) -> list[str]:
    """The facts that the queries of several turns find. ``facts``: of the task. ``turns``: the queries of each turn."""
    results = look_up(facts, [query for queries in turns for query in queries[:QUERIES]])
    return list(dict.fromkeys(fact for some in results for fact in some))[: settings.documents]


def next_queries(task: Task, found: Sequence[str]) -> list[str]:
    """The queries for what ``found`` lacks of the gold path. Where it lacks nothing, those of the whole path."""
    if task.path[0] in found and task.path[-1] not in found:
        return [task.path[-1][:2]]
    return good_queries(task)


def good_verdict(task: Task, found: Sequence[str], answer: str) -> str:
    """The letter for what an inspector reads: a pass where the facts of the gold path lead to ``answer``.

    Another answer is retried where they were found. Where the last one is missing the search is expanded. Else the
    queries are rewritten.
    """
    if all(fact in found for fact in task.path):
        return PASS if answer == task.answer else RETRY
    return EXPAND if task.path[0] in found else REWRITE


def demonstrated_queries(rng: np.random.Generator, settings: Settings, task: Task, found: Sequence[str]) -> list[str]:
    """Queries of a planner that reads ``found``, with the mistakes of ``settings``."""
    queries = next_queries(task, found)
    if rng.random() < settings.hop_error_rate:
        queries = [task.question[:2]]
    if rng.random() < settings.query_error_rate:
        others = [digit for digit in DIGITS if digit != queries[0][1]]
        queries[0] = queries[0][0] + others[rng.integers(len(others))]
    return queries


def demonstrated_answer(rng: np.random.Generator, settings: Settings, task: Task, found: Sequence[str]) -> str:
    """An answer of a solver that reads ``found``, with the mistakes of ``settings``."""
    answer = good_answer(task, found)
    others = other_entities(found, answer)
    if others and rng.random() < settings.answer_error_rate:
        return others[rng.integers(len(others))]
    return answer


def demonstrated_verdict(
    rng: np.random.Generator, settings: Settings, task: Task, found: Sequence[str], answer: str
) -> str:
    """The letter of an inspector, with the mistakes of ``settings``. ``answer``: what the solver said."""
    verdict = good_verdict(task, found, answer)
    if rng.random() < settings.verdict_error_rate:
        others = [letter for letter in LETTERS if letter != verdict]
        return others[rng.integers(len(others))]
    return verdict


def demonstrated(rng: np.random.Generator, settings: Settings, task: Task) -> list[list[tuple[str, str]]]:
    """An episode of demonstrators: prompt and completion of each turn, by role."""
    said: list[list[tuple[str, str]]] = [[], [], []]

    def says(role: int, found: Sequence[str], trace: Sequence[str], completion: str) -> str:
        said[role].append((prompt_text(MARKS[role], "".join(found), [task.question, *trace]), completion))
        return completion

    turns: list[list[str]] = []
    found: list[str] = []
    verdict = REWRITE
    for used in range(settings.interventions + 1):
        if verdict == REWRITE:
            turns, found = [], []
        if verdict != RETRY:
            queries = demonstrated_queries(rng, settings, task, found)
            says(PLANNER, found, (), COMMA.join(queries))
            turns = [*turns, queries]
            found = retrieved(settings, task.facts, turns)
        answer = says(SOLVER, found, (), demonstrated_answer(rng, settings, task, found))
        if used < settings.interventions:
            trace = COMMA.join(query for queries in turns for query in queries), answer
            verdict = says(INSPECTOR, found, trace, demonstrated_verdict(rng, settings, task, found, answer))
        if verdict == PASS:
            break
    if not settings.trace:
        alone = prompt_text(MARKS[INSPECTOR], task.question)
        said[INSPECTOR] = [(alone, completion) for _, completion in said[INSPECTOR]]
    return said


def demonstrations(config: TaskConfig, settings: Settings, seed: int, n: int) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens, length [n], completion, completion_length [n].

    Prompts and completions are as wide as the longest ones of their role, and of exercises. Each sample of a role is
    one turn, drawn from the role's turns in an episode of demonstrators on a training task. The share
    ``config.copying`` of the samples of a role are exercises in place of its own.
    """
    rng = np.random.default_rng([seed, 2])
    pairs: list[list[tuple[str, str]]] = []
    for _ in range(n):
        task = tasks.drawn(rng, config)
        said = [turns[rng.integers(len(turns))] for turns in demonstrated(rng, settings, task)]
        pairs.append(exercises.with_exercises(rng, config.copying, task, said))
    sizes = LONGEST + 1, ANSWER, 2  # of completions
    return exercises.as_samples(config.copying, ROLES, pairs, prompt_lengths(settings), sizes)
