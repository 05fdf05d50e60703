"""Demonstrators of the protocol `mask` of facts: what good roles write, as texts, and with planted mistakes.

Shared arguments: ``settings`` are those of the protocol. ``task`` is a task as text, and ``steps`` the steps of the
team. ``noise`` is the order of distractors (`pipeline.make_tasks`). ``seed`` and ``rng`` (NumPy) determine what is
drawn, and ``n`` is the number of samples of a role.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmarl_llm.envs.array_env import Samples
from jaxmarl_llm.envs.facts import exercises, pipeline, tasks
from jaxmarl_llm.envs.facts.mask_settings import (
    ADD,
    ANSWERER,
    END_OF_SEARCH,
    MARKS,
    PLANNED,
    PLANNER,
    ROLES,
    SEARCHER,
    SUMMARIZER,
    UPDATER,
    Settings,
    prompt_lengths,
)
from jaxmarl_llm.envs.facts.search import COMMA
from jaxmarl_llm.envs.facts.tasks import DIGITS, FACTS, LETTERS, Task, TaskConfig
from jaxmarl_llm.envs.prompt_grammar import prompt_text


def drawn_letter(rng: np.random.Generator, without: str) -> str:
    """A letter of `tasks.LETTERS` that is not ``without``."""
    others = [letter for letter in LETTERS if letter != without]
    return others[rng.integers(len(others))]


def demonstrated_plan(rng: np.random.Generator, settings: Settings, task: Task) -> list[str]:
    """The steps of a plan: one for each hop of the question, whose ends are guesses. With the mistakes of ``settings``.

    An entity at the end of a step is drawn, because a planner reads no fact.
    """
    steps: list[str] = []
    entity = task.question[0]
    for relation in task.question[1:]:
        if not steps and rng.random() < settings.plan_error_rate:
            others = [digit for digit in DIGITS if digit != relation]
            relation = others[rng.integers(len(others))]
        end = drawn_letter(rng, entity)
        steps.append(entity + relation + end)
        entity = end
    return steps


def updates(steps: Sequence[str]) -> list[str]:
    """The updates that are in form where the team has ``steps``."""
    return [ADD, *map(str, range(1, len(steps) + 1))]


def updated(steps: Sequence[str], summary: Sequence[str], update: str) -> list[str]:
    """The steps after an update in form. ``summary``: its facts. ``update``: the completion."""
    return [*(steps if update == ADD else steps[: int(update) - 1]), *summary]


def good_update(steps: Sequence[str], summary: Sequence[str]) -> str:
    """The update of a perfect updater: a summary with facts takes the place of all steps, which were guessed."""
    return "1" if summary and steps else ADD


def demonstrated_update(
    rng: np.random.Generator, settings: Settings, steps: Sequence[str], summary: Sequence[str]
) -> str:
    """An update with the mistakes of ``settings``. ``summary``: the facts that the updater reads."""
    if rng.random() < settings.update_error_rate:
        options = updates(steps)
        return options[rng.integers(len(options))]
    return good_update(steps, summary)


def demonstrated(
    rng: np.random.Generator, settings: Settings, task: Task, noise: Sequence[int]
) -> list[list[tuple[str, str]]]:
    """An episode of demonstrators: prompt and completion of each turn, by role.

    A first search that ends by mistake is one sample; the episode goes on as if it had asked. So every role acts.
    """
    said: list[list[tuple[str, str]]] = [[] for _ in ROLES]
    reading, question = settings.reading, task.question

    def says(role: int, subject: Sequence[str], entries: Sequence[str], completion: str) -> None:
        said[role].append((prompt_text(MARKS[role], "".join(subject), entries), completion))

    steps = demonstrated_plan(rng, settings, task)
    says(PLANNER, [question], [], "".join(steps))
    says(ANSWERER, steps, [question], pipeline.demonstrated_answer(rng, reading, task, steps))
    queries = pipeline.demonstrated_queries(rng, reading, task)
    asked = COMMA.join(queries)
    ends, goes_on = (rng.random() < settings.end_error_rate for _ in range(2))
    says(SEARCHER, steps, [question], END_OF_SEARCH if ends else asked)
    documents = pipeline.retrieved(reading, task.facts, noise, queries)
    quotes = pipeline.demonstrated_quotes(rng, reading, task, documents)
    says(SUMMARIZER, documents, [question], COMMA.join(quotes))
    summary = quotes[: settings.kept]
    update = demonstrated_update(rng, settings, steps, summary)
    says(UPDATER, steps, [question, "".join(summary)], update)
    steps = updated(steps, summary, update)
    says(ANSWERER, steps, [question], pipeline.demonstrated_answer(rng, reading, task, steps))
    says(SEARCHER, steps, [question, asked], asked if goes_on else END_OF_SEARCH)
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
        task, noise = tasks.drawn(rng, config), rng.permutation(FACTS).tolist()
        said = [turns[rng.integers(len(turns))] for turns in demonstrated(rng, settings, task, noise)]
        pairs.append(exercises.with_exercises(rng, config.copying, task, said))
    sizes = 3 * PLANNED + 1, pipeline.RESPONSE, pipeline.RESPONSE, 2, 2  # of completions
    return exercises.as_samples(config.copying, ROLES, pairs, prompt_lengths(settings), sizes)
