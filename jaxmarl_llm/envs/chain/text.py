"""Chain through chat prompts, for host models: the rules, roles, protocols, tasks and rewards of `chain`.

The last line of a reply is what a role says, spaces around it left out; what comes before is for the model alone. One
that is not in form is malformed, as is a reply cut off by the length limit.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs import chain
from jaxmarl_llm.envs.array_text import by_last_line, check_tasks, spoken, task_rows
from jaxmarl_llm.envs.chain import LONGEST_HINT, MARKS
from jaxmarl_llm.envs.prompts import asked, entry, with_memory
from jaxmarl_llm.text import Action, HostEnv, Message, Prompt

__all__ = ["Config", "demonstrations", "make", "prompt", "strategy", "tasks", "with_memory"]
ANSWER = "Work it out modulo {modulus}; letters mean nothing. End with a line that holds the answer: a digit."
ASKED = {  # of the other roles
    "verifier": "Is the proposed answer right, modulo {modulus}? End with a line that holds y or n.",
    "meta": "Do not answer. Say what your partner should compute next, such as 3+4: at most "
    f"{LONGEST_HINT} characters, alone on the last line, with ! at its end if the reply will be the final answer.",
}


@dataclass(frozen=True)
class Config(chain.Config):
    split: str = "train"  # train or test: other questions
    count: int = 0  # 0: as many as ``tasks``

    def __post_init__(self):
        super().__post_init__()
        check_tasks("chain_text", self)


def prompt(config: Config, role: str, shown: str) -> Prompt:
    """``shown`` as in `chain`: a mark, the question, behind bars what this role hears, ``>``."""
    question, *heard = shown.removeprefix(MARKS[role]).removesuffix(">").split("|")
    title = {"verifier": "Proposed answer", "meta": "Reply", "reasoner": "Hint"}.get(role)
    lines = [f"{title}: {h}" if title else f"Earlier answer: {h[0]}, verdict: {h[1]}" for h in heard]
    rule = ASKED.get(role, ANSWER).format(modulus=config.modulus)
    return (
        Message("system", f"You are the {role}. {rule}"),
        Message("user", "\n".join([f"Question: {question}", *lines])),
    )


def make(config: Config) -> HostEnv:
    return by_last_line("chain_text", chain.make(config), config.max_new, functools.partial(prompt, config))


def tasks(config: Config) -> list[dict[str, Any]]:
    return task_rows(chain.make_tasks, config)


def demonstrations(config: Config, tasks: Sequence, memory: Sequence[str] = ()) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion): those of `chain`, as many for each role as there are tasks."""
    rows = spoken(chain.demonstrations(config, config.seed, len(tasks)))
    return [(role, with_memory(prompt(config, role, shown), memory), reply) for role, shown, reply in rows]


def strategy(role: str, shown: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    return entry(role, rewards["accuracy"], asked(shown), action)
