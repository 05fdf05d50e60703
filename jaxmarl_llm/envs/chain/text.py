"""Chain through chat prompts, for host models: the rules, roles, protocols, tasks and rewards of `chain`.

The last line of a reply is the role's completion, without the spaces around it. The lines before it are for the model
alone. A last line that is not in form is malformed, and so is a reply that the length limit cut off.

Shared argument: ``config`` has the settings.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.chain import array as chain
from jaxmarl_llm.envs.chain.array import LONGEST_HINT
from jaxmarl_llm.envs.chat import strategy_by_accuracy as strategy
from jaxmarl_llm.envs.chat import with_memory
from jaxmarl_llm.envs.prompt_grammar import prompt_parts
from jaxmarl_llm.envs.text_adapter import by_last_line, sample_texts, task_rows
from jaxmarl_llm.messages import HostEnv, Message, Prompt

__all__ = ["Config", "demonstrations", "make", "prompt", "strategy", "tasks", "with_memory"]
ANSWER = "Work it out modulo {modulus}; letters mean nothing. End with a line that holds the answer: a digit."
ASKED = {  # of the other roles
    "verifier": "Is the proposed answer right, modulo {modulus}? End with a line that holds y or n.",
    "meta": "Do not answer. Say what your partner should compute next, such as 3+4: at most "
    f"{LONGEST_HINT} characters, alone on the last line, with ! at its end if the reply will be the final answer.",
}


@dataclass(frozen=True)
class Config(chain.Config):
    """The settings of `chain`, and which of its tasks are played."""

    split: str = "train"  # train or test: other questions
    count: int = 0  # 0: as many as ``tasks``

    def check(self, path: str) -> None:
        super().check(path)
        checks.split_and_count(path, self)


def prompt(config: Config, role: str, shown: str) -> Prompt:
    """The chat prompt of ``role``. ``shown`` is its prompt in `chain`."""
    _, question, entries = prompt_parts(shown)
    title = {"verifier": "Proposed answer", "meta": "Reply", "reasoner": "Hint"}.get(role)
    lines = [f"{title}: {e}" if title else f"Earlier answer: {e[0]}, verdict: {e[1]}" for e in entries]
    rule = ASKED.get(role, ANSWER).format(modulus=config.modulus)
    return (
        Message("system", f"You are the {role}. {rule}"),
        Message("user", "\n".join([f"Question: {question}", *lines])),
    )


def make(config: Config) -> HostEnv:
    """The environment of ``config``."""
    return by_last_line("chain_text", chain.make(config), config.max_new_tokens, functools.partial(prompt, config))


def tasks(config: Config) -> list[dict[str, Any]]:
    """The tasks of the configured split, as rows of `chain`'s tasks."""
    return task_rows(chain.make_tasks, config)


def demonstrations(config: Config, tasks: Sequence) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion): those of `chain`, as many for each role as there are tasks."""
    rows = sample_texts(chain.demonstrations(config, config.seed, len(tasks)))
    return [(role, prompt(config, role, shown), reply) for role, shown, reply in rows]
