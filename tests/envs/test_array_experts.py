"""Experts outside of the program, from compiled programs: who is asked, what is an answer, failures, endpoints."""

import json
import logging
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.distributed import processes
from jaxmarl_llm.envs import array_experts
from jaxmarl_llm.envs.array_experts import HostExpert
from jaxmarl_llm.envs.defer import array as defer
from jaxmarl_llm.envs.outside_experts import ExpertError
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from tests.envs.test_expert import chat, endpoint, reply

TEXTS = ["1+23", "*456", "78/9", "1+23"]
QUESTIONS = jnp.array([list(text.encode().ljust(6, b"#")) for text in TEXTS], jnp.int32)
LENGTH = jnp.full(len(TEXTS), 4)


def host(expert, size=2):
    return HostExpert(expert, size, lambda text: text.isdigit(), "a number")


def asked(expert, wanted):
    """Tokens and their numbers by a compiled map over questions."""
    tokens, size = jax.jit(jax.vmap(expert))(QUESTIONS, LENGTH, jnp.array(wanted))
    return [bytes(row[:n].tolist()).decode() for row, n in zip(np.asarray(tokens), np.asarray(size), strict=True)]


def test_only_wanted_questions_are_asked_and_answered_ones_once():
    seen, lock = [], threading.Lock()

    def expert(question):
        with lock:
            seen.append(question)
        return f" {len(question)}\n"

    of = host(expert)
    assert asked(of, [True, False, False, True]) == ["4", "", "", "4"] and seen == ["1+23"]
    assert asked(of, [True, True, False, False]) == ["4", "4", "", ""] and seen == ["1+23", "*456"]
    assert asked(of, [False] * 4) == [""] * 4 and len(seen) == 2


def test_a_map_over_seeds_asks_too():
    both = jax.jit(jax.vmap(jax.vmap(host(lambda q: str(ord(q[0]))), (0, 0, None)), (None, None, 0)))
    tokens, size = both(QUESTIONS, LENGTH, jnp.array([True, False]))
    assert size.tolist() == [[2] * 4, [0] * 4] and tokens[0, 1].tolist() == list(b"42")


USELESS = {
    "": r"expert: expected a number, got ''",
    "no": r"expert: expected a number, got 'no'",
    "123": r"expert: expected a number, got '123'",
    "\ud800": r"expert: expected a number, got '\\ud800'",
    None: r"expert: an answer must be text, not NoneType",
    7: r"expert: an answer must be text, not int",
    KeyError("who"): r"expert raised KeyError: 'who'",
    ExpertError("expert far: away"): r"expert far: away",
}


@pytest.mark.parametrize("said", USELESS, ids=repr)
def test_a_failure_is_no_answer_and_is_asked_again(said, caplog):
    first = [True]

    def expert(question):
        if first and first.pop():
            if isinstance(said, Exception):
                raise said
            return said
        return "5"

    of = host(expert)
    with caplog.at_level(logging.WARNING, logger="absl"):
        assert asked(of, [False, True, False, False]) == ["", "", "", ""]
    (line,) = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(USELESS[said] + "; what the expert does not answer is invalid", line)
    assert asked(of, [False, True, False, False]) == ["", "5", "", ""]


def test_a_reason_is_logged_once_and_a_failure_leaves_the_others(caplog):
    def expert(question):
        if "+" not in question:
            raise TimeoutError("late")
        return "8"

    of = host(expert)
    with caplog.at_level(logging.WARNING, logger="absl"):
        for _ in range(2):
            assert asked(of, [True] * 4) == ["8", "", "", "8"]
    assert len(caplog.records) == 1


def test_one_process_alone(monkeypatch):
    monkeypatch.setattr(processes, "count", lambda: 2)
    message = r"^config\.env\.args: an expert outside answers in one process alone, got 2$"
    with pytest.raises(ConfigError, match=message):
        host(str)


def test_questions_are_asked_at_the_same_time():
    """The first questions meet at a barrier, which one after the other would never pass."""
    together = threading.Barrier(3, timeout=10)

    def expert(question):
        together.wait()
        return "1"

    assert array_experts.AT_ONCE >= 3 and asked(host(expert), [True] * 4) == ["1"] * 4


# -- defer -------------------------------------------------------------------------------------------------------------


ASKED = []


def behind(question):
    """The digit behind the operation."""
    ASKED.append(question)
    return question[1 + next(i for i, letter in enumerate(question) if letter in defer.TYPES)]


def second_turn(config, choices):
    """What the creator's node has after the ``choices`` of one question each, and the reward of what was said there."""
    env, n = defer.make(config), len(choices)
    tasks = {k: jnp.asarray(v) for k, v in defer.make_tasks(config, n=n).items()}
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), n), tasks)
    said = jnp.array([[[ord(choice)]] for choice in choices], jnp.int32)
    step = jax.vmap(lambda s, words, size: env.step(None, s, words, size))
    state, _, _ = step(state, said, jnp.ones((n, 1), jnp.int32))
    shown = jax.jit(jax.vmap(env.observe))(state)
    _, paid, _ = step(state, shown.expert, jnp.maximum(shown.expert_length, 0))
    texts = [bytes(row.tolist()).decode() for row in np.asarray(tasks["question"])]
    return texts, shown, np.asarray(paid["accuracy"])[:, 0], np.asarray(tasks["answer"])


def test_the_expert_of_defer_is_asked_where_the_chooser_deferred():
    config = defer.Config(planted=False, asked=f"{__name__}:behind", silent=1.0, expert=(0.0,) * 4)
    ASKED.clear()
    texts, shown, accuracy, answer = second_turn(config, "dcd1dddd")
    deferred = np.array([c == "d" for c in "dcd1dddd"])
    assert np.asarray(shown.expert_length)[:, 0].tolist() == np.where(deferred, 1, -1).tolist()
    assert sorted(ASKED) == sorted(text for text, there in zip(texts, deferred, strict=True) if there)
    for text, tokens, there in zip(texts, np.asarray(shown.expert)[:, 0, 0], deferred, strict=True):
        assert not there or chr(tokens) == behind(text)
    told = np.array([behind(text) for text in texts], int)
    assert (accuracy[deferred] == (told == answer)[deferred]).all()


def test_an_endpoint_answers_the_questions_of_defer(monkeypatch):
    """Products are not answered: their rewards are unknown, and no other is."""
    monkeypatch.setenv("EXPERT_TEST_KEY", "s3cret")

    def say(handler):
        question = handler.body["messages"][1]["content"]
        (reply(b"", 503) if "*" in question else chat(behind(question)))(handler)

    with endpoint(say) as (url, seen):
        settings = {"asked": url, "expert_model": "m", "expert_key_env": "EXPERT_TEST_KEY", "expert_retries": 0}
        texts, shown, accuracy, _ = second_turn(defer.Config(planted=False, **settings), "d" * 12)
    products = np.array(["*" in text for text in texts])
    assert products.any() and not products.all()
    assert (np.asarray(shown.expert_length)[:, 0] == ~products).all() and (np.isnan(accuracy) == products).all()
    assert sorted(body["messages"][1]["content"] for _, body, _ in seen) == sorted(texts)
    assert {headers["Authorization"] for _, _, headers in seen} == {"Bearer s3cret"}
    assert all(body["model"] == "m" and "one digit" in json.dumps(body) for _, body, _ in seen)


BAD = [
    ({"asked": "nowhere:f"}, r"^config\.env\.args\.asked: expected module:function, .* got 'nowhere:f' \(No module"),
    ({"asked": f"{__name__}:TEXTS"}, r"^config\.env\.args\.asked: expected .*, which is not a function$"),
    ({"asked": "http://127.0.0.1:1/v1"}, r"^config\.env\.args\.expert_model: expected the name of a model of http"),
    ({"asked": "os:getcwd", "expert_timeout": 0.0}, r"^config\.env\.args\.expert_timeout: expected more than 0 and"),
    ({"expert_retries": 11}, r"^config\.env\.args\.expert_retries: expected 0 to 10, got 11$"),
    ({"asked": "os:getcwd", "planted": True}, r"^config\.env\.args\.planted: expected false with an expert outside"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[m for _, m in BAD])
def test_bad_settings(args, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("defer", {"planted": False, **args}).check("config.env")
    assert "\n" not in str(error.value)
