"""Copying exercises among the demonstrations of facts: they teach a small model to look up.

    prompt      Ra1cc2xd3e>      a text
    completion  c2xd3ea1c        the same text from another place on, and then its begin

To continue a copy, a model looks for its last tokens in the prompt, and writes the token behind them. A look-up in
facts is the same operation: a1 is found among the facts, and c stands behind it. An exercise has many look-ups, where a
role has one or two. Half of the texts are three to five facts of a task. A copy of them begins with a fact. The other
texts are different characters, 6 to 15 of them.

An exercise takes the place of a role's own sample. So a role has as many samples as without exercises.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxmarl_llm.envs.array_env import Samples, text_samples
from jaxmarl_llm.envs.facts.tasks import DIGITS, FACTS, LETTERS, Task
from jaxmarl_llm.envs.prompt_grammar import END

MARK = "R"
MOST_FACTS = 5
LONGEST = 3 * MOST_FACTS  # characters of a text
PROMPT = 1 + LONGEST + 1  # tokens of the longest prompt
COMPLETION = LONGEST + 1  # tokens of the longest completion, eos included


def exercise(rng: np.random.Generator, task: Task) -> tuple[str, str]:
    """Prompt and completion of one exercise.

    Args:
        rng: Draws the text and the place from which it is copied.
        task: Half of the texts have facts of this task.
    """
    if rng.random() < 0.5:
        parts = [task.facts[i] for i in rng.permutation(FACTS)[: rng.integers(3, MOST_FACTS + 1)]]
    else:
        every = LETTERS + DIGITS
        parts = [every[i] for i in rng.permutation(len(every))[: rng.integers(6, LONGEST + 1)]]
    start = rng.integers(len(parts))
    return MARK + "".join(parts) + END, "".join(parts[start:] + parts[:start])


def with_exercises(
    rng: np.random.Generator, share: float, task: Task, samples: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The samples of the roles in one episode, some of them replaced by exercises.

    Args:
        rng: Draws which ones, and the exercises.
        share: Probability that a sample is replaced.
        task: The task of the episode.
        samples: Prompt and completion of each role.
    """
    return [exercise(rng, task) if rng.random() < share else sample for sample in samples]


def as_samples(
    share: float,
    roles: Sequence[str],
    episodes: Sequence[Sequence[tuple[str, str]]],
    prompts: Sequence[int],
    completions: Sequence[int],
) -> Samples:
    """The samples of `with_exercises` as arrays, as wide as the longest ones of their role and of exercises.

    Args:
        share: Probability of an exercise; without any the widths are those of the role.
        roles: Names of the roles.
        episodes: Prompt and completion of each role, by episode.
        prompts: Tokens of the longest prompt of each role.
        completions: Tokens of the longest completion of each role.
    """
    least = (PROMPT, COMPLETION) if share else (0, 0)
    of_role = zip(roles, zip(*episodes, strict=True), prompts, completions, strict=True)
    return {role: text_samples(rows, max(width, least[0]), max(size, least[1])) for role, rows, width, size in of_role}
