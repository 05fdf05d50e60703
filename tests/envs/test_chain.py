"""Chain: the array game against the same game through text, who sees what, tasks, demonstrations, bad input."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.envs.chain import array as chain
from jaxmarl_llm.envs.chain import text as chain_text
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.text_adapter import last_line
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.rollout.make_runner import make_env_runner

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


@functools.cache
def through_text(name):
    config = CONFIGS[name]
    return chain_text.make(chain_text.Config(**dataclasses.asdict(config)))


def questions(config, seed, n):
    """The questions and answers of `chain.make_tasks` as text and number."""
    rows = chain.make_tasks(config, seed, n)
    pairs = zip(rows["question"], rows["question_length"], rows["answer"])
    return [(BYTES.decode(q[:size]), int(a)) for q, size, a in pairs]


def row(text, ends, width):
    ids = ([*text.encode()] + [BYTES.EOS] * ends)[:width]
    return np.array([ids + [BYTES.PAD] * (width - len(ids))], np.int32), np.array([len(ids)], np.int32)


def as_task(name, question, answer):
    padded = np.full(chain.question_length(CONFIGS[name]), BYTES.PAD, np.int32)
    padded[: len(question)] = [*question.encode()]
    return dict(question=padded, question_length=len(question), answer=answer)


def start(name, task):
    return compiled(name)[0].reset(KEY, as_task(name, *task))


def seen(name, state):
    """Role and prompt of the array game."""
    env, _, observe = compiled(name)
    obs = observe(state)
    return env.roles[int(obs.role[0])], BYTES.decode(np.asarray(obs.tokens[0, : obs.length[0]])), bool(obs.active[0])


class Twin:
    """The game in Python, written from the docstring."""

    def __init__(self, config, question, answer):
        self.config, self.question, self.answer = config, question, answer
        self.roles, self.turn, self.done, self.proper = chain.ROLES[config.protocol], 0, False, True
        self.answers, self.verdicts, self.hint = [], [], ""

    @property
    def actor(self):
        return self.roles[self.turn if self.config.protocol == "refine" else self.turn % 2]

    def brief(self):
        """What the docstring says the role that acts sees."""
        role, told = self.actor, [a + v for a, v in zip(self.answers, self.verdicts)]
        heard = {"verifier": self.answers[-1:], "meta": self.answers, "reasoner": [self.hint]}.get(role, told)
        return f"{chain.MARKS[role]}{self.question}{''.join('|' + h for h in heard)}>"

    def say(self, said, ends):
        config, role = self.config, self.actor
        open_ended = config.protocol == "meta" and config.rounds > 1
        digits = f"[0-{config.modulus - 1}]"
        form = {"verifier": "[yn]", "meta": r"[0-9+\-!]{1,4}"}.get(role, digits)
        proper = ends and re.fullmatch(form, said) is not None
        shown = said if proper else "?"
        self.turn, self.proper = self.turn + 1, self.proper and proper
        if role == "meta":
            self.hint = shown
        else:
            (self.verdicts if role == "verifier" else self.answers).append(shown)
        finished = not open_ended or (role == "reasoner" and self.hint.endswith("!"))
        self.done = self.turn == config.max_turns
        self.done |= config.protocol == "verify" and role == "verifier" and shown == "y"
        self.done |= open_ended and finished
        right = self.done and finished and self.answers[-1] == str(self.answer)
        pay = {r: dict.fromkeys(chain.COMPONENTS, 0.0) for r in self.roles}
        for paid in pay.values():
            paid["accuracy"] = config.accuracy * right
            paid["format"] = config.format * (self.done and finished and self.proper)
        pay[role]["invalid"] = -config.invalid * (not proper)
        leaks = re.fullmatch(digits, shown) is not None
        pay[role]["shaping"] = config.shaping * (-leaks if role == "meta" else proper)
        return pay


words = st.one_of(
    st.sampled_from(["y", "n", "5!", "!", "3+4", "1-2!", "7", "12", "", "y!", "3x4", "99999"]),
    st.text("0123456789", min_size=1, max_size=1),
    st.text("yn059+-!x?", max_size=5),
)


@games
@settings(max_examples=60, deadline=None, database=None)
@given(lines=st.lists(st.tuples(words, st.booleans() | st.just(True)), min_size=6, max_size=6), seed=st.integers(0, 99))
def test_arrays_text_and_twin_are_one_game(name, lines, seed):
    """Any completions: the same roles, views, rewards and ends, and nothing after the end."""
    config = CONFIGS[name]
    task = questions(config, seed, 1)[0]
    env, step, _ = compiled(name)
    twin, array, text = Twin(config, *task), start(name, task), through_text(name)
    state = text.reset(seed, as_task(name, *task))
    for said, ends in lines:
        if twin.done:
            before = array
            array, rewards, done = step(KEY, array, *row("5", True, 6))
            assert bool(done) and not any(np.any(r) for r in rewards.values())
            assert jax.tree.all(jax.tree.map(np.array_equal, before, array)) and not seen(name, array)[2]
            assert text.observe(state) == {}
            continue
        assert seen(name, array) == (twin.actor, twin.brief(), True)
        ((role, prompt),) = text.observe(state).items()
        assert role == twin.actor and prompt == chain_text.prompt(config, role, twin.brief())
        want = twin.say(said, ends)
        array, rewards, done = step(KEY, array, *row(said, ends, 6))
        state, paid, over = text.step(0, state, {role: Action(said, (), not ends)})
        assert bool(done) == over == twin.done
        assert jax.tree.all(jax.tree.map(np.array_equal, array, state))
        for component, values in rewards.items():
            np.testing.assert_allclose(values, [want[r][component] for r in env.roles], atol=1e-7, err_msg=component)
            assert [paid[r][component] for r in env.roles] == values.tolist()


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
    tasks = questions(config, 3, 200)
    for question, answer in tasks:
        bare = re.sub("[a-z]", "", question)
        assert len(question) - len(bare) == config.filler and len(re.findall(r"\d", bare)) == config.terms
        assert eval(bare) % config.modulus == answer
    assert {a for _, a in tasks} == set(range(config.modulus)) and any("-" in q for q, _ in tasks)
    assert tasks == questions(config, 3, 200) != questions(config, 4, 200)


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
            assert found and said[size - 1] == BYTES.EOS and size <= config.max_new_tokens
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


def test_a_refiner_keeps_what_is_judged_right_and_heeds_what_is_judged_wrong():
    for revision_rate, low, high in ((0.0, 0.3, 0.7), (0.5, 0.65, 0.85), (1.0, 1.0, 1.0)):
        config = dataclasses.replace(CONFIGS["refine"], revision_rate=revision_rate)
        samples, other = chain.demonstrations(config, 0, 600)["refiner"], []
        for ids, length, said in zip(samples["tokens"], samples["length"], samples["completion"]):
            question, judged = re.fullmatch(r"F(.*)\|(\d[yn])>", BYTES.decode(ids[:length])).groups()
            if judged[1] == "y":
                assert chr(said[0]) == judged[0]
            elif eval(question) % 10 != eval(question.replace("-", "+")) % 10:
                other.append(chr(said[0]) != judged[0])
        assert len(other) > 100 and low <= np.mean(other) <= high


def test_without_mistakes_imitation_is_right():
    config = dataclasses.replace(CONFIGS["verify"], answer_error_rate=0.0, false_accept_rate=0.0, false_reject_rate=0.0)
    samples = chain.demonstrations(config, 0, 100)["solver"]
    for ids, length, said in zip(samples["tokens"], samples["length"], samples["completion"]):
        question = BYTES.decode(ids[:length])[1:].split("|")[0].rstrip(">")
        assert eval(question) % 10 == int(BYTES.decode(said[:1]))


# Through text


@pytest.mark.parametrize(
    "role, shown, lines",
    [
        ("solver", "S3+4-2>", ["Question: 3+4-2"]),
        (
            "solver",
            "S3+4-2|9n|?n>",
            ["Question: 3+4-2", "Earlier answer: 9, verdict: n", "Earlier answer: ?, verdict: n"],
        ),
        ("refiner", "F3+4-2|9y>", ["Question: 3+4-2", "Earlier answer: 9, verdict: y"]),
        ("verifier", "V3+xk4-2|9>", ["Question: 3+xk4-2", "Proposed answer: 9"]),
        ("meta", "M3+4-2|7|5>", ["Question: 3+4-2", "Reply: 7", "Reply: 5"]),
        ("reasoner", "R3+4-2|7-2!>", ["Question: 3+4-2", "Hint: 7-2!"]),
    ],
)
def test_prompts_in_words(role, shown, lines):
    rules, asked = chain_text.prompt(CONFIGS["mod 7"], role, shown)
    assert (rules.speaker, asked.speaker) == ("system", "user") and rules.text.startswith(f"You are the {role}.")
    assert asked.text.split("\n") == lines
    assert ("modulo 7" in rules.text) == (role != "meta")


@pytest.mark.parametrize(
    "reply, ends, accuracy, invalid",
    [
        ("5", True, 1, 0),
        ("3+4 is 7, and 7-2 is 5.\n\n  5 \n\n", True, 1, 0),
        ("6\n", True, 0, 0),
        ("The answer is 5", True, 0, -0.1),
        ("5", False, 0, -0.1),  # cut off: the answer may have gone on
        ("5\n5.", True, 0, -0.1),
        ("", True, 0, -0.1),
        ("\n", False, 0, -0.1),
        ("\u0665", True, 0, -0.1),  # a digit elsewhere
        ("\ud800", True, 0, -0.1),  # no character at all
        ("55555", True, 0, -0.1),
    ],
)
def test_the_last_line_of_a_reply_is_what_is_said(reply, ends, accuracy, invalid):
    env = through_text("solo")
    state = env.reset(0, as_task("solo", "3+4-2", 5))
    _, paid, done = env.step(0, state, {"solver": Action(reply, (), not ends)})
    assert done and paid["solver"]["accuracy"] == accuracy and paid["solver"]["invalid"] == pytest.approx(invalid)


@games
def test_demonstrations_in_words_are_those_of_chain(name):
    config = chain_text.Config(**dataclasses.asdict(CONFIGS[name]), count=40)
    tasks = chain_text.tasks(config)
    rows, n = chain_text.demonstrations(config, tasks), 0
    assert len(tasks) == 40 and len(rows) == 40 * len(through_text(name).roles)
    for role, samples in chain.demonstrations(CONFIGS[name], config.seed, 40).items():
        for ids, length, said, size in zip(*samples.values()):
            shown = chain_text.prompt(config, role, BYTES.decode(ids[:length]))
            assert rows[n] == (role, shown, BYTES.decode(said[: size - 1]))
            assert last_line(Action(rows[n][2], ())) == said[:size].tolist()
            n += 1


def test_both_forms_train_and_are_tested_on_the_same_questions():
    array = make_env_runner(EnvConfig("chain", {"tasks": 12}, eval_tasks=8))
    text = make_env_runner(EnvConfig("chain_text", {"tasks": 12}, workers=0, eval_tasks=8))
    assert text.size == 12 and len(text.held_out) == 8
    for own, other in ((array.tasks, text.tasks), (array.held_out, text.held_out)):
        for i, task in enumerate(other):
            assert set(task) == set(own) and all(np.array_equal(task[k], own[k][i]) for k in own)
    assert not np.array_equal(text.held_out[0]["question"], text.tasks[0]["question"])


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"protocol": "debate"}, "args.protocol: unknown value"),
        ({"protocol": "verify", "rounds": 1}, "args.rounds: expected 2 to 100 with protocol=verify, got 1"),
        ({"terms": 1}, "args.terms: expected 2 to"),
        ({"filler": -1}, "args.filler: expected 0 to"),
        ({"modulus": 11}, "args.modulus: expected 2 to 10"),
        ({"largest": 12}, "args.largest: expected 1 to 9"),
        ({"protocol": "meta", "rounds": 2, "shaping": 0.25}, "shaping: expected 0"),
        ({"answer_error_rate": 1.5}, "args.answer_error_rate: expected a probability in .0, 1., got 1.5"),
    ],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message):
        EnvConfig("chain", bad).check("config.env")
    with pytest.raises(ConfigError, match=message):
        EnvConfig("chain_text", bad).check("config.env")


@pytest.mark.parametrize(
    "bad, message",
    [({"split": "dev"}, "args.split"), ({"count": -1}, "args.count: expected 0 to"), ({"rouns": 2}, "rounds")],
)
def test_bad_configurations_of_the_text_form(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("chain_text", bad).check("config.env")
    assert "\n" not in str(error.value)
