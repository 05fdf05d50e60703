"""Chain with a coach: whole episodes against a slow twin, sides of questions, demonstrations, bad settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.array_env import EOS
from jaxmarl_llm.envs.chain import array as chain
from jaxmarl_llm.envs.chain import coach
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, N = ByteTokenizer(), 400
CONFIG = coach.Config(terms=3, largest=2, modulus=4)
WIDTH = 7  # tokens of a completion: one more than the longest well-formed one


def value(text, modulus):
    """The answer to a question, by Python's own arithmetic."""
    return eval(text) % modulus


def side_of(text):
    """The side of a question, by its text."""
    content = f"{[int(x) for x in text[::2]]}{text[1::2]}"
    if splits.is_held_out(content):
        return coach.TEST
    return coach.VALIDATION if splits.is_held_out(f"validation {content}") else coach.TRAINING


def row(text, ended=True):
    """A completion [R] and its number of tokens, with eos where it ``ended``."""
    ids = [*text.encode(), *([EOS] if ended else [])][:WIDTH]
    return ids + [BYTES.PAD] * (WIDTH - len(ids)), len(ids)


def said_by(rng, turn, config):
    """A completion: well-formed, or wrong in length, in a character, in its end."""
    every = coach.questions(config.terms, config.largest)
    good = every[rng.integers(len(every))].text if turn == 0 else str(rng.integers(10))
    kind = rng.integers(8) if rng.random() < 0.5 else 0
    return {
        1: (good[:-1], True),
        2: (good + "1", True),
        3: (good, False),
        4: ("", True),
        5: (f"{good[:-1]}7", True),
        6: (good.replace("+", "*"), True),
        7: ("x" + good[1:], True),
    }.get(int(kind), (good, True))


@pytest.mark.parametrize("held_out", [False, True], ids=["training", "held out"])
def test_random_episodes_are_those_of_a_slow_twin(held_out):
    """Numbers up to 2 modulo 4, so that 5 and 7 are malformed as numbers and as answers."""
    env = coach.make(CONFIG)
    both = jax.jit(jax.vmap(lambda s, words, size: (env.observe(s), env.step(None, s, words[None], size[None]))))
    tasks = coach.make_tasks(CONFIG, n=N, held_out=held_out)
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), N), {k: jnp.asarray(v) for k, v in tasks.items()})
    rng, over, seen = np.random.default_rng(1), np.zeros(N, bool), set()
    question = [BYTES.decode(q) for q in tasks["question"]]
    assert all(len(q) == 5 * held_out for q in question)
    for turn in range(3):
        said = [said_by(rng, turn, CONFIG) for _ in range(N)]
        rows, size = zip(*(row(*one) for one in said))
        shown, (state, paid, done) = jax.device_get(both(state, np.array(rows, np.int32), np.array(size, np.int32)))
        for i, (text, ended) in enumerate(said):
            role, want = min(turn, 1), np.zeros((4, 2))
            assert bool(shown.active[i, 0]) == (not over[i] and (turn > 0 or not held_out))
            prompt = f"S{question[i]}>" if role else "Q>"
            if not over[i]:
                assert shown.role[i, 0] == role
                assert BYTES.decode(shown.tokens[i, 0, : shown.length[i, 0]]) == prompt
            if turn == 0 and not held_out:
                legal = ended and text in {q.text for q in coach.questions(3, 2)}
                if legal and side_of(text) == coach.TRAINING:
                    question[i] = text
                else:
                    want[3 if legal else 2, 0], over[i] = 1, True
                seen.add((turn, legal, bool(over[i])))
            elif turn == 1 and not over[i]:
                digit = int(text) if ended and text in {"0", "1", "2", "3"} else -1
                right = digit == value(question[i], 4)
                want[0], want[1, 1], over[i] = right, digit, True
                seen.add((turn, digit < 0, right))
            got = np.array([paid[c][i] for c in coach.COMPONENTS])
            np.testing.assert_array_equal(got, want, err_msg=f"{turn} {text!r} {ended}")
            assert done[i] == over[i]
    answers = {(1, False, True), (1, False, False), (1, True, False)}
    assert seen == (answers if held_out else answers | {(0, True, False), (0, True, True), (0, False, True)})


def test_the_sides_are_apart_and_test_is_that_of_chain():
    """Every question of three settings: its place, its value, its side; and the tasks of two seeds."""
    for config in (coach.Config(terms=2, largest=2), CONFIG, coach.Config()):
        every = coach.questions(config.terms, config.largest)
        tokens = jnp.array([list(q.text.encode()) for q in every], jnp.int32)
        at = jax.jit(
            jax.vmap(lambda q, c=config: (coach.position(c, q), coach.answer_of(c, q), coach.is_question(c, q)))
        )
        place, answer, legal = at(tokens)
        assert place.tolist() == list(range(len(every))) == list(range(coach.count_questions(config))) and legal.all()
        assert answer.tolist() == [value(q.text, config.modulus) for q in every]
        assert coach.sides(config.terms, config.largest).tolist() == [side_of(q.text) for q in every]
        for seed in (0, 1):
            tasks = coach.make_tasks(config, seed, 40, held_out=True)
            parts = coach.parts(config, tasks)
            assert (parts["validation"] != parts["test"]).all() and parts["test"].sum() == 20
            for q, test in zip(tasks["question"], parts["test"]):
                assert side_of(BYTES.decode(q)) == (coach.TEST if test else coach.VALIDATION)
    rows = chain.make_tasks(chain.Config(protocol="solo"), n=50, held_out=True)["question"]
    assert {side_of(BYTES.decode(q)) for q in rows} == {coach.TEST}
    rows = chain.make_tasks(chain.Config(protocol="solo"), n=50)["question"]
    assert {side_of(BYTES.decode(q)) for q in rows} == {coach.TRAINING, coach.VALIDATION}


def test_demonstrations_make_the_stated_mistakes_on_training_questions():
    config = dataclasses.replace(coach.Config(), guess_rate=0.3, minus_rate=0.2)
    shown = coach.demonstrations(config, 5, 1500)
    text = lambda of, column: BYTES.decode(of[column][: of[f"{column}_length" if column != "tokens" else "length"]])
    written, wrong = [], []
    for i in range(1500):
        asked = {r: {k: v[i] for k, v in shown[r].items()} for r in coach.ROLES}
        assert text(asked["coach"], "tokens") == "Q>"
        written.append(text(asked["coach"], "completion"))
        prompt, reply = (text(asked["player"], c) for c in ("tokens", "completion"))
        question = prompt[1:-1]
        assert side_of(question) == side_of(written[-1]) == coach.TRAINING and prompt == f"S{question}>"
        right = value(question, 10)
        assert int(reply) == right or "-" in question
        if "-" in question:
            wrong.append((int(reply) - right) % 10)
    signs = "".join(q[1::2] for q in written)
    # Questions are of the training side alone, so the share of minuses is near the rate.
    assert abs(signs.count("-") / len(signs) - 0.2) < 0.05
    shares = np.bincount(wrong, minlength=10) / len(wrong)
    assert abs(shares[0] - 0.73) < 0.05 and np.abs(shares[1:] - 0.03).max() < 0.02


BAD = [
    ({"terms": 1}, r"^config\.env\.args\.terms: expected 2 to 8, got 1$"),
    ({"largest": 10}, r"^config\.env\.args\.largest: expected 1 to 9, got 10$"),
    ({"terms": 8, "largest": 9}, r"^config\.env\.args\.terms: expected at most 32768 questions with largest=9, got 8$"),
    ({"minus_rate": 1.5}, r"^config\.env\.args\.minus_rate: expected a probability in \[0, 1\], got 1\.5$"),
    ({"guess_rate": -1.0}, r"^config\.env\.args\.guess_rate: expected a probability in \[0, 1\], got -1\.0$"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[m for _, m in BAD])
def test_bad_settings(args, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("chain_coach", args).check("config.env")
    assert "\n" not in str(error.value)
