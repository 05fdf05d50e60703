"""Consult in sentences: the same episodes as in the array form, what replies are read as, advice, a short training."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.array_env import EOS
from jaxmarl_llm.envs.consult import array as consult
from jaxmarl_llm.envs.consult import text as consult_text
from jaxmarl_llm.envs.consult.text import advice_of, move_of
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.text_adapter import board
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.recipes import doctor_agent
from jaxmarl_llm.telemetry.logger import Logger

CONFIGS = {
    "2 to 6": consult_text.Config(tasks=24, noise=0.3),
    "8": consult_text.Config(tasks=24, budgets=(8,), seed=3, unknown=1.0, split="test"),
}
# Written again, and not taken from the module.
SYMPTOMS = {
    **{"a": "dry cough", "b": "sore throat", "c": "stiff neck", "d": "skin rash", "e": "chest pain"},
    **{"f": "night sweats", "g": "blurred vision", "h": "swollen ankles", "i": "ringing ears", "j": "numb fingers"},
}
ILLNESSES = {
    **{"S": "brell fever", "T": "corvan fever", "U": "dorrick fever", "V": "elvane fever"},
    **{"W": "fendle sickness", "X": "gadrel sickness", "Y": "hessim sickness", "Z": "ilmar sickness"},
}
AGAINST = {"S": "stay in bed", "T": "drink warm broth", "U": "keep out of the sun", "V": "breathe steam"}
AGAINST |= dict(zip("WXYZ", AGAINST.values()))
WAYS = ("Ask: {}", "I see.\n**ASK:** {}.", "Do you have {}?", "Ask: Diagnosis: fever\nask = {}\nThank you")
NAMED = ("Diagnosis: {}", "diagnosis: {}\nAdvice: stay in bed", "You have {}!", "Ask: or not?\nDIAGNOSIS: the {}")
JUNK = (
    "",
    "hm",
    "Ask:",
    "Ask: brell fever",
    "Diagnosis: dry cough",
    "a",
    "Ask: dry cough, skin rash",
    "not elvane fever",
)
QUESTIONS = st.tuples(st.sampled_from(sorted(SYMPTOMS)), st.sampled_from(WAYS))
NAMED_ILLNESS = st.tuples(st.sampled_from(sorted(ILLNESSES)), st.sampled_from(NAMED))
UNREAD = st.tuples(st.just("?"), st.sampled_from(JUNK))
REPLIES = st.one_of(QUESTIONS, QUESTIONS, QUESTIONS, NAMED_ILLNESS, UNREAD)


@functools.cache
def played(name):
    """The text form, its tasks, and the array environment of a configuration."""
    config = CONFIGS[name]
    return consult_text.make(config), consult_text.tasks(config), board(consult.make(config), 2)


def letters_of(told):
    """The prompt of the array form that the user message ``told`` translates."""
    answers, out = {"Yes, I have": "abcdefghij", "No, I do not have": "ABCDEFGHIJ", "I do not know.": "klmnopqrst"}, ""
    *lines, left = told.split("\n")
    for line in lines:
        if line == "Doctor: nothing readable.":
            out += "?"
        elif line.startswith("Doctor: "):
            asked = re.fullmatch(r"Doctor: Do you have (?:a )?(.+)\?", line)[1]
            place = list(SYMPTOMS.values()).index(asked)
        else:
            said = line.removeprefix("Patient: ").removesuffix(f" {asked}.").removesuffix(" a")
            out += answers[said][place]
    return (
        f"D{1 if left == 'This is the last turn.' else left.removesuffix(' turns are left, this one included.')}{out}>"
    )


@settings(max_examples=40)
@given(
    name=st.sampled_from(sorted(CONFIGS)), number=st.integers(0, 23), replies=st.lists(REPLIES, min_size=9, max_size=9)
)
def test_an_episode_in_sentences_is_that_of_the_array_form(name, number, replies):
    """Rewards, states, prompts and ends; after the end too."""
    text, tasks, array = played(name)
    state = twin = text.reset(5, tasks[number])
    jax.tree.map(np.testing.assert_array_equal, twin, array.reset(9, tasks[number]))
    for turn, (letter, way) in enumerate(replies):
        shown, seen = array.look(twin), text.observe(state)
        assert {role: letters_of(told.text) for role, (_, told) in seen.items()} == shown
        said = way.format({**SYMPTOMS, **ILLNESSES}.get(letter, ""))
        state, rewards, done = text.step(turn, state, {"doctor": Action(said, (), truncated=bool(turn % 2))})
        before, (twin, paid, ended) = twin, array.step(twin, [[ord(letter), EOS]])
        jax.tree.map(np.testing.assert_array_equal, state, twin)
        diagnosis = "STUVWXYZ"[int(tasks[number]["diagnosis"])]
        advised = letter in ILLNESSES and "Advice" in said and diagnosis in "SW" and not before.done
        assert rewards == {"doctor": {**paid["doctor"], "advice": 5.0 * advised}} and done == ended
    assert done and not text.observe(state)


@pytest.mark.parametrize(
    "reply, letter",
    [
        ("Ask: dry cough", "a"),
        ("ask: Dry-Cough?", "a"),
        ("**Ask:** Do you have any   numb\tfingers, please", "j"),
        ("My question: Ask = blurred vision", "g"),
        ("I think of brell fever, but first:\nAsk: night sweats", "f"),
        ("Ask: dry cough\nAsk: skin rash", "d"),
        ("Ask: dry cough\nAsk: anything else", "a"),
        ("Ask: dry cough\nDiagnosis: corvan fever", "T"),
        ("Diagnosis: corvan fever. Advice: stay in bed. Ask: me again", "T"),
        ("Diagnosis: ilmar sickness, not brell", "Z"),
        ("Diagnosis: not sure\nAsk: chest pain", "e"),
        ("Do you have swollen ankles?", "h"),
        ("It must be hessim sickness.", "Y"),
        ("It isn't hessim sickness.", "?"),
        ("It isn’t hessim sickness.", "?"),
        ("We can rule out hessim sickness", "?"),
        ("Is it brell fever with a dry cough?", "?"),
        ("Ask: dry cough or skin rash", "?"),
        ("Ask: brell fever", "?"),
        ("Diagnosis: dry cough", "?"),
        ("Diagnosis: brell", "?"),
        ("Ask: dry coughs", "?"),
        ("task: is it a sore throat", "b"),
        ("a", "?"),
        ("S", "?"),
        ("", "?"),
        ("no" * 30_000 + "\nAsk: dry cough", "?"),
    ],
)
def test_what_a_reply_is_read_as(reply, letter):
    assert move_of(reply) == letter


@pytest.mark.parametrize(
    "reply, advice",
    [
        ("Advice: stay in bed", "stay in bed"),
        ("Diagnosis: brell fever. *Advice*: Drink Warm  Broth!", "drink warm broth"),
        ("Advice: breathe steam\nAdvice: keep out of the sun", "keep out of the sun"),
        ("Advice: breathe steam\nAdvice: and rest", "breathe steam"),
        ("Advice: stay in bed or breathe steam", None),
        ("Diagnosis: stay in bed", None),
        ("stay in bed", None),
        ("", None),
    ],
)
def test_what_advice_a_reply_names(reply, advice):
    assert advice_of(reply) == advice


def test_advice_is_paid_by_the_illness_of_the_patient():
    """All illnesses, diagnoses and pieces of advice. A question earns nothing for advice."""
    text, tasks, _ = played("2 to 6")
    paid = np.zeros((8, 8, 4))
    for ill in range(8):
        state = text.reset(0, {**tasks[0], "diagnosis": np.int32(ill)})
        reward = lambda reply, state=state: text.step(0, state, {"doctor": Action(reply, ())})[1]["doctor"]["advice"]
        for d, named in enumerate(ILLNESSES.values()):
            for a, advice in enumerate(list(AGAINST.values())[:4]):
                paid[ill, d, a] = reward(f"Diagnosis: {named}\nAdvice: {advice}")
        right = AGAINST["STUVWXYZ"[ill]]
        assert reward(f"Ask: dry cough\nAdvice: {right}") == reward(f"Advice: {right}") == 0
    want = 5.0 * (np.arange(8)[:, None] % 4 == np.arange(4))
    np.testing.assert_array_equal(paid, np.broadcast_to(want[:, None], paid.shape))


def test_no_prompt_says_more_than_that_of_the_array_form():
    """All rules are the same text, whatever the table, and it holds every name once before the examples."""
    rules = {
        text.observe(text.reset(0, task))["doctor"][0].text for text, tasks, _ in map(played, CONFIGS) for task in tasks
    }
    (only,) = rules
    names = [*SYMPTOMS.values(), *ILLNESSES.values(), *AGAINST.values()]
    assert all(only.count(name) == 1 + (name in ("dry cough", "brell fever", "stay in bed")) for name in names)
    assert not any(one in other for one in set(names) for other in set(names) if one != other)


@pytest.mark.parametrize("name", CONFIGS)
def test_demonstrations_in_sentences_are_those_of_the_array_form(name):
    config = dataclasses.replace(CONFIGS[name], tasks=80)
    rows = consult_text.demonstrations(config, consult_text.tasks(config))
    array, decode = consult.demonstrations(config, config.seed, 80)["doctor"], ByteTokenizer().decode
    assert len(rows) == 80 and any("Yes" in told.text for _, (_, told), _ in rows)
    for i, (role, (_, told), reply) in enumerate(rows):
        letter = decode(array["completion"][i][:1])
        assert (role, move_of(reply), advice_of(reply)) == ("doctor", letter, AGAINST.get(letter))
        assert letters_of(told.text) == decode(array["tokens"][i][: array["length"][i]])


def test_memory_entries():
    text, tasks, _ = played("8")
    shown = text.observe(text.reset(0, tasks[0]))["doctor"]
    line = consult_text.strategy("doctor", shown, Action("Ask: dry cough", ()), {"accuracy": 1.0})
    assert line == "doctor (1.0) on '8 turns are left, this one included.': Ask: dry cough"
    assert consult_text.with_memory(shown, [line])[0].text.endswith(f"\n- {line}")


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"split": "dev"}, "split: "),
        ({"count": -1}, "count: "),
        ({"budgets": (3, 2)}, "budgets: expected one or two numbers of turns in order"),
        ({"noise": 1.5}, "noise: "),
        ({"advice": True}, "advice"),
    ],
)
def test_bad_settings_are_refused_in_one_line(bad, message):
    with pytest.raises(ConfigError) as error:
        EnvConfig("consult_text", bad).check("config.env")
    assert str(error.value).startswith("config.env.args") and message in str(error.value)
    assert "\n" not in str(error.value)


TRAINED = {
    "steps": 2,
    "batch": 4,
    "group": 4,
    "team": {
        "max_new_tokens": 20,
        "remat": False,
        "backbone": {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "num_kv_heads": 1},
    },
    "env": {
        "name": "consult_text",
        "args": {"tasks": 32, "budgets": [2]},
        "workers": 0,
        "max_prompt": 128,
        "eval_tasks": 4,
    },
    "reward": {"valid": 1.0, "malformed": 1.0, "diagnosis": 1.0, "advice": 1.0},
    "sft": {"steps": 40, "batch": 8, "samples": 32, "optimizer": {"learning_rate": 1e-2}},
    "run": {"eval_every": 0, "eval_greedy": False, "tensorboard": False},
}


def test_two_steps_of_the_recipe(tmp_path):
    """A model of two layers that reads bytes, and of each prompt the last 30: the whole ones are long."""
    cfg = from_dict(doctor_agent.Config, TRAINED)
    short = lambda prompt: (Message("user", prompt[1].text[-30:]),)
    whole, env = cfg.env.environment(0), consult_text.make(cfg.env.build())
    brief = env._replace(observe=lambda state: {role: short(prompt) for role, prompt in env.observe(state).items()})
    taught = lambda tasks: [(role, short(prompt), reply) for role, prompt, reply in whole.demonstrations(tasks)]
    recipe = doctor_agent.make(cfg, env=dataclasses.replace(whole, make=lambda: brief, demonstrations=taught))
    play, seen = recipe.env_runner.play, []
    recipe.env_runner.play = lambda *args, **kwargs: seen.append(play(*args, **kwargs)) or seen[-1]
    with Logger(tmp_path, resume_step=None, total_steps=42, tensorboard=False) as log:
        state = recipe.init(0)
        for _ in range(cfg.sft.steps):
            state, _ = recipe.step(state, log)
        for _ in range(cfg.steps):
            before = jax.tree.map(jnp.copy, state.params["agents"])
            state, metrics = recipe.step(state, log)
            assert metrics["count/invalid"] == 0 and metrics["reward_variance/valid"] > 0
            assert metrics["logprob_diff"] <= 1e-4 and 0 < metrics["agent/doctor/grad_norm"] < np.inf
            leaves = jax.tree.leaves(before), jax.tree.leaves(state.params["agents"])
            assert any(not np.array_equal(a, b) for a, b in zip(*leaves))
    recipe.env_runner.close()
    for got in seen:
        moves, readable = got.tree.transitions, []
        for j in np.flatnonzero(moves.played):
            letter = move_of(got.records.records[moves.steps[j][0]].action.text)
            assert (moves.rewards["malformed"][j, 0] == -2) == (letter == "?")
            readable.append(letter != "?")
        assert 0 < sum(readable) < len(readable)
