"""Chain: the array game against the same game through text, who sees what, tasks, demonstrations, bad input."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.arena import EnvConfig
from jaxmarl_llm.envs import chain, chain_text
from jaxmarl_llm.text import Action, ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer

BYTES, KEY = ByteTokenizer(), jax.random.key(0)
CONFIGS = {
    "solo": chain.Config(protocol="solo"),
    "verify": chain.Config(protocol="verify", rounds=3),
    "refine": chain.Config(protocol="refine"),
    "meta": chain.Config(protocol="meta", rounds=3, terms=4),
    "single": chain.Config(protocol="meta", rounds=1, terms=2, shaping=0.25, filler=2),
    "mod 7": chain.Config(protocol="verify", modulus=7),
}
games = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def compiled(name):
    env = chain.make(CONFIGS[name])
    return env, jax.jit(env.step), jax.jit(env.observe)


def row(text, ends, width):
    ids = ([*text.encode()] + [BYTES.EOS] * ends)[:width]
    return np.array([ids + [BYTES.PAD] * (width - len(ids))], np.int32), np.array([len(ids)], np.int32)


def start(name, task):
    env, _, _ = compiled(name)
    question = np.array([*task[0].encode()], np.int32)
    padded = np.full(chain.question_length(CONFIGS[name]), BYTES.PAD, np.int32)
    padded[: len(question)] = question
    return env.reset(KEY, dict(question=padded, question_length=len(question), answer=task[1]))


def seen(name, state):
    """Role and prompt of the array game."""
    env, _, observe = compiled(name)
    obs = observe(state)
    return env.roles[int(obs.role[0])], BYTES.decode(np.asarray(obs.tokens[0, : obs.length[0]])), bool(obs.active[0])


def brief(state, role):
    """What the docstring says this role sees."""
    told = {
        "verifier": lambda: "|" + state.answers[-1],
        "meta": lambda: "".join("|" + a for a in state.answers),
        "reasoner": lambda: "|" + state.hint,
    }.get(role, lambda: "".join(f"|{a}{v}" for a, v in zip(state.answers, state.verdicts)))
    return f"{chain.MARKS[role]}{state.question}{told()}>"


words = st.one_of(
    st.sampled_from(["y", "n", "5!", "!", "3+4", "1-2!", "7", "12", "", "y!", "3x4", "99999"]),
    st.text("0123456789", min_size=1, max_size=1),
    st.text("yn059+-!x?", max_size=5),
)


@games
@settings(max_examples=60, deadline=None, database=None)
@given(lines=st.lists(st.tuples(words, st.booleans() | st.just(True)), min_size=6, max_size=6), seed=st.integers(0, 99))
def test_arrays_and_text_are_one_game(name, lines, seed):
    """Any completions: the same roles, views, rewards and ends, and nothing after the end."""
    config = CONFIGS[name]
    task = chain_text.text_tasks(config, seed, 1)[0]
    env, step, _ = compiled(name)
    game = chain_text.host(config)
    array, text = start(name, task), game.reset(0, task)
    for said, ends in lines:
        if text.done:
            before = array
            array, rewards, done = step(KEY, array, *row("5", True, 6))
            assert bool(done) and not any(np.any(r) for r in rewards.values())
            assert jax.tree.all(jax.tree.map(np.array_equal, before, array)) and not seen(name, array)[2]
            continue
        ((role, prompt),) = game.observe(text).items()
        assert seen(name, array) == (role, brief(text, role), True)
        assert text.question in prompt[-1].text
        text, want, over = game.step(0, text, {role: Action(said, (), not ends)})
        array, rewards, done = step(KEY, array, *row(said, ends, 6))
        assert bool(done) == over
        for component, values in rewards.items():
            np.testing.assert_allclose(values, [want[r][component] for r in env.roles], atol=1e-7, err_msg=component)


def play(name, task, *lines):
    """Prompts, and rewards of the last line."""
    state, prompts = start(name, task), []
    for said in lines:
        prompts.append(seen(name, state)[1])
        state, rewards, done = compiled(name)[1](KEY, state, *row(said, True, 6))
    return prompts, {c: np.asarray(r).round(6).tolist() for c, r in rewards.items()}, bool(done)


def test_a_verifier_sends_the_solver_back():
    prompts, paid, done = play("verify", ("3+4-2", 5), "9", "n", "5", "y")
    assert prompts == ["S3+4-2>", "V3+4-2|9>", "S3+4-2|9n>", "V3+4-2|5>"] and done
    assert paid["accuracy"] == [1, 1] and paid["format"] == pytest.approx([0.1, 0.1]) and paid["invalid"] == [0, 0]
    _, paid, done = play("verify", ("3+4-2", 5), "9", "y")
    assert done and paid["accuracy"] == [0, 0]
    _, paid, done = play("verify", ("3+4-2", 5), "9", "n", "x", "n", "5")  # the verifier is skipped after the last
    assert done and paid["accuracy"] == [1, 1] and paid["format"] == [0, 0]
    _, paid, done = play("verify", ("3+4-2", 5), "9", "maybe")
    assert not done and paid["invalid"] == pytest.approx([0, -0.1])


def test_three_roles_in_sequence_whatever_the_verdict():
    prompts, paid, done = play("refine", ("3+4-2", 5), "9", "y", "5")
    assert prompts == ["G3+4-2>", "V3+4-2|9>", "F3+4-2|9y>"] and done and paid["accuracy"] == [1, 1, 1]


def test_an_unfinished_conversation_earns_nothing():
    task = ("3+4-2+0", 5)
    prompts, paid, done = play("meta", task, "3+4", "7", "7-2!", "5")
    assert prompts == ["M3+4-2+0>", "R3+4-2+0|3+4>", "M3+4-2+0|7>", "R3+4-2+0|7-2!>"]
    assert done and paid["accuracy"] == [1, 1]
    for last, want in (("5+0", 0), ("5+0!", 1)):
        _, paid, done = play("meta", task, "3+4", "7", "7-2", "5", last, "5")
        assert done and paid["accuracy"] == [want, want] and paid["format"] == pytest.approx([0.1 * want] * 2)


def test_single_turns_are_shaped():
    _, paid, _ = play("single", ("3gh-1", 2), "2")
    assert paid["shaping"] == [-0.25, 0]  # the meta-thinker gave an answer away
    _, paid, done = play("single", ("3gh-1", 2), "3-1", "2")
    assert done and paid["shaping"] == [0, 0.25] and paid["accuracy"] == [1, 1]
    assert play("single", ("3gh-1", 2), "3-1", "22")[1]["shaping"] == [0, 0]


@games
def test_tasks_are_worked_out(name):
    config = CONFIGS[name]
    tasks = chain_text.text_tasks(config, 3, 200)
    for question, answer in tasks:
        bare = re.sub("[a-z]", "", question)
        assert len(question) - len(bare) == config.filler and len(re.findall(r"\d", bare)) == config.terms
        assert eval(bare) % config.modulus == answer
    assert {a for _, a in tasks} == set(range(config.modulus)) and any("-" in q for q, _ in tasks)
    assert tasks == chain_text.text_tasks(config, 3, 200) != chain_text.text_tasks(config, 4, 200)


@games
def test_demonstrations_are_prompts_of_play_with_systematic_mistakes(name):
    config = CONFIGS[name]
    shown = chain.demonstrations(config, 0, 600)
    assert set(shown) == set(chain.ROLES[config.protocol])
    tail = {
        "solver": r"(\|\dn)*",
        "generator": "",
        "verifier": r"\|\d",
        "refiner": r"\|\d[yn]",
        "meta": r"(\|\d)*",
        "reasoner": r"\|\d[+-]\d!?",
    }
    for role, samples in shown.items():
        mistakes = count = 0
        columns = (samples[k] for k in ("tokens", "length", "completion", "completion_length"))
        for ids, length, said, size in zip(*columns):
            prompt, reply = BYTES.decode(ids[:length]), BYTES.decode(said[: size - 1])
            found = re.fullmatch(rf"{chain.MARKS[role]}([0-9+\-a-z]+?){tail[role]}>", prompt)
            assert found and said[size - 1] == BYTES.EOS and size <= config.max_new
            question = re.sub("[a-z]", "", found[1])
            gold = str(eval(question) % config.modulus)
            if role in ("solver", "generator") and "-" in question:
                plus = str(eval(question.replace("-", "+")) % config.modulus)
                assert reply in (gold, plus)
                if gold != plus:
                    mistakes, count = mistakes + (reply == plus), count + 1
            elif role == "verifier":
                mistakes, count = mistakes + ((reply == "y") != (prompt[-2] == gold)), count + 1
        if count:
            assert 0.3 < mistakes / count < 0.65, role


def test_without_mistakes_imitation_is_right():
    config = dataclasses.replace(CONFIGS["verify"], slip=0.0, lenient=0.0, strict=0.0)
    samples = chain.demonstrations(config, 0, 100)["solver"]
    for ids, length, said in zip(samples["tokens"], samples["length"], samples["completion"]):
        question = BYTES.decode(ids[:length])[1:].split("|")[0].rstrip(">")
        assert eval(question) % 10 == int(BYTES.decode(said[:1]))


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"protocol": "debate"}, "chain: protocol"),
        ({"protocol": "verify", "rounds": 1}, "rounds: expected >= 2"),
        ({"terms": 1}, "terms >= 2"),
        ({"filler": -1}, "filler >= 0"),
        ({"modulus": 11}, "modulus in"),
        ({"largest": 12}, "single digits"),
        ({"protocol": "meta", "rounds": 2, "shaping": 0.25}, "shaping: expected 0"),
        ({"slip": 1.5}, "slip is 1.5"),
    ],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message):
        chain.Config(**bad)
    with pytest.raises(ConfigError):
        EnvConfig("chain", bad).check("config.env")
