"""Consult through chat prompts, for host models: the patients, turns, tasks and rewards of `consult`, in sentences.

The 8 illnesses and their names are fictitious. What each name stands for is the table of `consult`, which differs
between seeds. As there, no prompt shows the table. The pieces of advice and the illness that each helps against are
written below, and no prompt shows that either.

    reply                                   read as
    Ask: dry cough                          a question
    Diagnosis: brell fever                  a diagnosis
    Advice: stay in bed                     advice, beside a diagnosis alone
    Do you have a dry cough?                a question: without a line ``Ask:`` or ``Diagnosis:``, the only name in it

The last tag with exactly one name of its kind behind it counts. Case, spaces, hyphens and stars do not matter. A reply
without a tag counts if it has exactly one name and no word such as "not". Every other reply is malformed, as in
`consult`. A reply that the length limit cut off is read as far as it goes.

Rewards are those of `consult`, and one more that needs words:
    advice     5 at a diagnosis whose reply names the advice against the patient's illness, right diagnosis or not

Shared argument: ``config`` has the settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import EOS
from jaxmarl_llm.envs.chat import strategy_by_accuracy as strategy
from jaxmarl_llm.envs.chat import with_memory
from jaxmarl_llm.envs.consult import array as consult
from jaxmarl_llm.envs.consult.array import ANSWERS, DIAGNOSES, NO, RESPONSE, RIGHT, ROLES, SYMPTOMS, YES
from jaxmarl_llm.envs.prompt_grammar import prompt_parts
from jaxmarl_llm.envs.text_adapter import board, sample_texts, task_rows
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = ["Config", "advice_of", "demonstrations", "make", "move_of", "prompt", "strategy", "tasks", "with_memory"]
COMPLAINTS = (  # as the patient says them, in the order of SYMPTOMS
    *("a dry cough", "a sore throat", "a stiff neck", "a skin rash", "chest pain"),
    *("night sweats", "blurred vision", "swollen ankles", "ringing ears", "numb fingers"),
)
ILLNESSES = (  # in the order of DIAGNOSES
    *("brell fever", "corvan fever", "dorrick fever", "elvane fever"),
    *("fendle sickness", "gadrel sickness", "hessim sickness", "ilmar sickness"),
)
ADVICE = ("stay in bed", "drink warm broth", "keep out of the sun", "breathe steam")
HELPS = dict(zip(ILLNESSES, ADVICE * 2, strict=True))  # illness -> the advice against it; it differs within a pair
NAMES = {  # letter in `consult` -> name
    **dict(zip(SYMPTOMS, (c.removeprefix("a ") for c in COMPLAINTS), strict=True)),
    **dict(zip(DIAGNOSES, ILLNESSES, strict=True)),
}
NONE = "?"  # a reply that is malformed
RULES = (
    "You are a doctor. Your patient has one of these illnesses: {illnesses}. In each turn, ask about one symptom or "
    "give your diagnosis, which ends the visit. Give it before the turns end. The symptoms are {symptoms}. The pieces "
    "of advice are: {advice}. Ask with a line such as 'Ask: {symptom}'. End with a line such as 'Diagnosis: {illness}' "
    "and a line such as 'Advice: {one}'."
).format(
    illnesses=", ".join(ILLNESSES),
    symptoms=", ".join(NAMES[letter] for letter in SYMPTOMS),
    advice=", ".join(ADVICE),
    symptom=NAMES[SYMPTOMS[0]],
    illness=ILLNESSES[0],
    one=ADVICE[0],
)

LONGEST = 20_000  # characters of a reply that are read
TAG = re.compile(r"\b(ask|diagnosis|advice)\b[ *_`]{0,4}[:=]", re.IGNORECASE)
DENIES = re.compile(
    r"\b(?:no|not|never|cannot|neither|nor|without|unlikely|excluded?|rules? out)\b|n't\b", re.IGNORECASE
)
KINDS = {"ask": SYMPTOMS, "diagnosis": DIAGNOSES}


@dataclass(frozen=True)
class Config(consult.Config):
    """The settings of `consult`, and which of its tasks are played."""

    split: str = "train"  # train or test: other patients
    count: int = 0  # 0: as many as ``tasks``

    def check(self, path: str) -> None:
        super().check(path)
        checks.split_and_count(path, self)


def move_of(text: str) -> str:
    """The letter in `consult` of what the reply ``text`` asks or diagnoses; NONE where it is malformed."""
    text = text[:LONGEST].replace("’", "'")
    lines = [(tag, rest) for tag, rest in _tagged(text) if tag in KINDS]
    for tag, rest in reversed(lines):
        found = _named(rest, {letter: NAMES[letter] for letter in KINDS[tag]})
        if len(found) == 1:
            return found[0]
    found = [] if lines or DENIES.search(text) else _named(text, NAMES)
    return found[0] if len(found) == 1 else NONE


def advice_of(text: str) -> str | None:
    """The advice of the last line ``Advice:`` in the reply ``text`` that names exactly one; None without any."""
    for tag, rest in reversed(_tagged(text[:LONGEST])):
        found = _named(rest, {one: one for one in ADVICE}) if tag == "advice" else []
        if len(found) == 1:
            return found[0]
    return None


def _tagged(text: str) -> list[tuple[str, str]]:
    """(tag, what follows it up to the next tag or the end of the line) of each tag in ``text``."""
    _, *parts = TAG.split(text)
    return [(tag.lower(), rest.partition("\n")[0]) for tag, rest in zip(parts[::2], parts[1::2], strict=True)]


def _named(text: str, names: Mapping[str, str]) -> list[str]:
    """The keys of those ``names`` that stand in ``text``, in any case, with any spaces or hyphens between words."""
    words = f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "
    return [key for key, name in names.items() if f" {name} " in words]


def prompt(shown: str) -> Prompt:
    """The chat prompt of the doctor. ``shown`` is its prompt in `consult`."""
    subject = prompt_parts(shown).subject
    left, lines = subject[0], [line for letter in subject[1:] for line in _exchange(letter)]
    lines.append("This is the last turn." if left == "1" else f"{left} turns are left, this one included.")
    return Message("system", RULES), Message("user", "\n".join(lines))


def _exchange(letter: str) -> tuple[str, ...]:
    """The lines of a past turn. ``letter``: the patient's answer as prompts of `consult` show it, ? for none."""
    if letter == NONE:
        return ("Doctor: nothing readable.",)
    answer = next(kind for kind, letters in enumerate(ANSWERS) if letter in letters)
    complaint = COMPLAINTS[ANSWERS[answer].index(letter)]
    said = {YES: f"Yes, I have {complaint}.", NO: f"No, I do not have {complaint}."}
    return f"Doctor: Do you have {complaint}?", f"Patient: {said.get(answer, 'I do not know.')}"


def make(config: Config) -> HostEnv:
    """The environment of ``config``. Its states are those of `consult`."""
    env, (doctor,) = consult.make(config), ROLES
    play = board(env, RESPONSE)

    def observe(state: consult.State) -> dict[str, Prompt]:
        return {role: prompt(shown) for role, shown in play.look(state).items()}

    def step(seed: int, state: consult.State, actions: Mapping[str, Action]) -> tuple[consult.State, Rewards, bool]:
        text = actions[doctor].text
        move = move_of(text)
        after, rewards, done = play.step(state, [[ord(move), EOS]], seed)
        helps = HELPS[ILLNESSES[int(state.task["diagnosis"])]]
        advises = move in DIAGNOSES and advice_of(text) == helps and not state.done
        return after, {doctor: {**rewards[doctor], "advice": RIGHT * advises}}, done

    return HostEnv("consult_text", ROLES, env.max_turns, (*env.components, "advice"), play.reset, observe, step)


def tasks(config: Config) -> list[dict[str, Any]]:
    """The tasks of the configured split, as rows of `consult`'s tasks."""
    return task_rows(consult.make_tasks, config)


def demonstrations(config: Config, tasks: Sequence) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion): those of `consult`, as many as there are ``tasks``.

    A diagnosis comes with the advice against the illness that it names.
    """
    rows = sample_texts(consult.demonstrations(config, config.seed, len(tasks)))
    return [(role, prompt(shown), _reply(move)) for role, shown, move in rows]


def _reply(move: str) -> str:
    """A reply that is read as the letter ``move`` of `consult`."""
    name = NAMES[move]
    return f"Ask: {name}" if move in SYMPTOMS else f"Diagnosis: {name}\nAdvice: {HELPS[name]}"
