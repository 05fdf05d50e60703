"""Chain through text: the game of `chain` as chat prompts and replies, for models that a host plays.

The rules, protocols and rewards are those of `chain`. The last line of a reply is what a role says; one that is not in
form is malformed as there (shown as ``?`` and penalised), as is a reply cut off by the length limit.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxmarl_llm.envs.chain import COMPONENTS, LONGEST_HINT, ROLES, Config, make_tasks
from jaxmarl_llm.text import Action, HostEnv, Message, Prompt, Rewards

ASKED = {
    "answer": "Work it out modulo {modulus}; letters mean nothing. End with a line that holds the answer: a digit.",
    "verdict": "Is the proposed answer right, modulo {modulus}? End with a line that holds y or n.",
    "hint": (
        "Do not answer. Say what your partner should compute next, such as 3+4: at most "
        f"{LONGEST_HINT} characters, alone on the last line, with ! at its end if the reply will be the final answer."
    ),
}
TASKS = {"verifier": "verdict", "meta": "hint"}  # the other roles answer


@dataclass(frozen=True)
class State:
    question: str
    answer: int
    turn: int = 0
    answers: tuple[str, ...] = ()
    verdicts: tuple[str, ...] = ()
    hint: str = ""
    proper: bool = True
    done: bool = False


def text_tasks(config: Config, seed: int | None = None, n: int | None = None) -> list[tuple[str, int]]:
    """The questions and answers of `chain.make_tasks` as text and number."""
    rows = make_tasks(config, seed, n)
    pairs = zip(rows["question"], rows["question_length"], rows["answer"], strict=True)
    return [(bytes(q[:size].tolist()).decode(), int(a)) for q, size, a in pairs]


def host(config: Config) -> HostEnv:
    """The environment of one task (question, answer); nothing is random."""
    roles, protocol = ROLES[config.protocol], config.protocol
    open_ended = protocol == "meta" and config.rounds > 1

    def actor(state: State) -> str:
        return roles[state.turn if protocol == "refine" else state.turn % 2]

    def reset(seed: int, task: Any) -> State:
        question, answer = task
        return State(question, answer)

    def observe(state: State) -> dict[str, Prompt]:
        role = actor(state)
        lines = [f"Question: {state.question}"]
        if role == "verifier":
            lines.append(f"Proposed answer: {state.answers[-1]}")
        elif role == "meta":
            lines += [f"Reply: {a}" for a in state.answers]
        elif role == "reasoner":
            lines.append(f"Hint: {state.hint}")
        else:
            lines += [f"Earlier answer: {a}, verdict: {v}" for a, v in zip(state.answers, state.verdicts)]
        rule = ASKED[TASKS.get(role, "answer")].format(modulus=config.modulus)
        return {role: (Message("system", f"You are the {role}. {rule}"), Message("user", "\n".join(lines)))}

    def step(seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
        role = actor(state)
        said = actions[role].text.rstrip("\n").rpartition("\n")[2].strip()
        form = {"verdict": r"[yn]", "hint": rf"[0-9+\-!]{{1,{LONGEST_HINT}}}"}
        digits = f"[0-{config.modulus - 1}]"
        kind = TASKS.get(role, "answer")
        proper = not actions[role].truncated and re.fullmatch(form.get(kind, digits), said) is not None
        shown = said if proper else "?"
        after = replace(state, turn=state.turn + 1, proper=state.proper and proper)
        if kind == "answer":
            after = replace(after, answers=(*state.answers, shown))
        elif kind == "verdict":
            after = replace(after, verdicts=(*state.verdicts, shown))
        else:
            after = replace(after, hint=shown)
        finished = not open_ended or (role == "reasoner" and after.hint.endswith("!"))
        done = after.turn == config.max_turns
        if protocol == "verify":
            done |= kind == "verdict" and shown == "y"
        elif open_ended:
            done |= finished
        right = done and finished and after.answers[-1] == str(state.answer)
        rewards = {r: dict.fromkeys(COMPONENTS, 0.0) for r in roles}
        for paid in rewards.values():
            paid["accuracy"] = config.accuracy * right
            paid["format"] = config.format * (done and finished and after.proper)
        own = rewards[role]
        own["invalid"] = -config.invalid * (not proper)
        if role == "meta":
            own["shaping"] = -config.shaping * (re.fullmatch(digits, shown) is not None)
        else:
            own["shaping"] = config.shaping * proper
        return replace(after, done=done), rewards, done

    return HostEnv("chain", roles, config.max_turns, COMPONENTS, reset, observe, step)
