"""Defer: whole episodes against a slow twin, the luck of those who answer, demonstrations, bad settings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.envs import splits
from jaxmarl_llm.envs.array_env import EOS
from jaxmarl_llm.envs.defer import array as defer
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, N = ByteTokenizer(), 600
PLANTED = defer.Config(silent=0.2, expert=(0.7, 1.0, 0.5, 0.9))
OPEN = dataclasses.replace(PLANTED, planted=False, table_seed=4)
WORDS = ["1", "2", "c", "d", "0", "7", "x", "11", ""]


def answer(config, text):
    """The answer from the text of a question, by a table that is drawn here again."""
    rng = np.random.default_rng([config.table_seed, 3])
    rows = [rng.permutation(10) for _ in range(4)]
    (at,) = [k for k, letter in enumerate(text) if not letter.isdigit()]
    return int(rows["+-*/".index(text[at])][int(text[at + 1])])


def turn_of(config):
    env = defer.make(config)
    return env, jax.jit(jax.vmap(lambda s, words, size: (env.observe(s), env.step(None, s, words[None], size[None]))))


def words_of(rng, n):
    """Completions of at most two tokens [n 2], their lengths, and what each says (None: no single token)."""
    rows, said = [], []
    for word in rng.choice(WORDS, n, p=(0.1, 0.1, 0.3, 0.3, 0.04, 0.04, 0.04, 0.04, 0.04)):
        ids = [*word.encode()]
        ended = (len(ids) < 2 and rng.random() < 0.5) or not ids
        rows.append((ids + [EOS] * ended, word if len(word) == 1 else None))
        said.append(rows[-1][1])
    tokens = np.array([(ids + [BYTES.PAD] * 2)[:2] for ids, _ in rows], np.int32)
    return tokens, np.array([len(ids) for ids, _ in rows], np.int32), said


@pytest.mark.parametrize("config", [PLANTED, OPEN], ids=["planted", "open"])
def test_random_episodes_are_those_of_a_slow_twin(config):
    env, both = turn_of(config)
    tasks = defer.make_tasks(config, n=N)
    state = jax.vmap(env.reset)(jax.random.split(jax.random.key(1), N), {k: jnp.asarray(v) for k, v in tasks.items()})
    drawn, rng, seen = jax.device_get(state), np.random.default_rng(0), set()
    over, before = np.zeros(N, bool), [None] * N
    for turn in range(env.max_turns + 1):
        words, size, said = words_of(rng, N)
        silent_turn = np.array([word == "d" for word in before]) & (turn == 1) & drawn.silent
        size = np.where(silent_turn, 0, size)
        shown, (state, paid, done) = jax.device_get(both(state, words, size))
        for i in range(N):
            text = bytes(tasks["question"][i].tolist()).decode()
            role = 0 if config.planted else min(turn, 1)
            assert bool(shown.active[i, 0]) == (not over[i]) and shown.role[i, 0] == role
            assert BYTES.decode(shown.tokens[i, 0, : shown.length[i, 0]]) == f"{'CA'[role]}{text}>"
            assert tasks["answer"][i] == answer(config, text) and "+-*/"[tasks["type"][i]] in text
            want = dict.fromkeys(defer.COMPONENTS, 0.0)
            if not config.planted:
                deferred = turn == 1 and before[i] == "d" and not over[i]
                words_there = -1 if not deferred else 0 if drawn.silent[i] else 1
                assert shown.expert_length[i, 0] == words_there
                assert shown.expert[i, 0, 0] == ord("0") + drawn.told[i]
                assert (drawn.told[i] == tasks["answer"][i]) == drawn.right[i, 3]
            if not over[i] and turn == 0:
                word = said[i] if said[i] in ("1", "2", "c", "d") else None
                want["malformed"], want["create"], want["defer"] = word is None, word == "c", word == "d"
                if word in ("1", "2") or (word and config.planted):
                    want["accuracy"] = drawn.right[i, "12cd".index(word)]
                if word == "d" and config.planted and drawn.silent[i]:
                    want["accuracy"] = np.nan
                over[i] = config.planted or word not in ("c", "d")
                before[i] = word
            elif not over[i]:
                want["accuracy"] = np.nan if silent_turn[i] else said[i] == str(tasks["answer"][i])
                over[i] = True
            got = {c: float(paid[c][i, 0]) for c in defer.COMPONENTS}
            assert got == pytest.approx({k: float(v) for k, v in want.items()}, nan_ok=True) and done[i] == over[i]
            seen |= {c for c in want if want[c] == 1} | {"nan" for c in want if np.isnan(want[c])}
    assert over.all() and seen == {*defer.COMPONENTS, "nan"}


def test_who_is_right_has_the_planted_probabilities():
    config, n = PLANTED, 6000
    env, tasks = defer.make(config), defer.make_tasks(PLANTED, n=n)
    keys = jax.random.split(jax.random.key(0), n)
    drawn = jax.device_get(jax.jit(jax.vmap(env.reset))(keys, {k: jnp.asarray(v) for k, v in tasks.items()}))
    for of in range(4):
        want = [row[of] for row in (config.peer_1, config.peer_2, config.creator, config.expert)]
        np.testing.assert_allclose(drawn.right[tasks["type"] == of].mean(0), want, atol=0.05)
    together = (drawn.right[:, 0] & drawn.right[:, 1])[tasks["type"] == 0].mean()
    assert abs(together - 0.95 * 0.3) < 0.05 and abs(drawn.silent.mean() - 0.2) < 0.02
    wrong = (drawn.told - tasks["answer"])[~drawn.right[:, 3]] % 10
    assert set(wrong) == set(range(1, 10)) and np.bincount(wrong)[1:].min() > 0.7 * len(wrong) / 9


def test_demonstrations_are_right_where_they_are_taught():
    config = dataclasses.replace(OPEN, taught=(1.0, 0.5, 0.0, 1.0))
    shown = defer.demonstrations(config, 5, 2000)
    text = lambda of, i: BYTES.decode(of["tokens"][i, : of["length"][i]])
    letters = [BYTES.decode(row[:1]) for row in shown["chooser"]["completion"]]
    assert set(letters) == set(defer.CHOICES) and min(letters.count(x) for x in "12cd") > 400
    right = np.zeros((4, 2))
    for i in range(2000):
        asked = text(shown["creator"], i)
        assert asked[0] == "A" and asked[-1] == ">" and text(shown["chooser"], i) == "C" + asked[1:]
        assert not splits.is_held_out(asked[1:-1])
        of = next(k for k, letter in enumerate(defer.TYPES) if letter in asked)
        said = BYTES.decode(shown["creator"]["completion"][i])
        right[of] += [said == str(answer(config, asked[1:-1])), 1]
    np.testing.assert_allclose(right[:, 0] / right[:, 1], (1.0, 0.55, 0.1, 1.0), atol=0.05)
    assert set(defer.demonstrations(PLANTED, 5, 8)) == {"chooser"}


BAD = [
    ({"creator": (0.5, 0.5, 1.5, 0.2)}, r"^config\.env\.args\.creator: expected four probabilities in \[0, 1\], got "),
    ({"silent": 2.0}, r"^config\.env\.args\.silent: expected a probability in \[0, 1\], got 2\.0$"),
    ({"table_seed": -1}, r"^config\.env\.args\.table_seed: expected at least 0, got -1$"),
    ({"peer_1": (0.5, 0.5)}, r"^config\.env\.args\.peer_1: expected "),
]


@pytest.mark.parametrize("args, message", BAD, ids=[m for _, m in BAD])
def test_bad_settings(args, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("defer", args).check("config.env")
    assert "\n" not in str(error.value)
