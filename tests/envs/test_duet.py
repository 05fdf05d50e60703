"""Duet: its reward against a slow twin, who sees what under each protocol, and its demonstrations."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.duet import array as duet
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, KEY, R = ByteTokenizer(), jax.random.key(0), 10
ENVS = {p: duet.make(duet.Config(protocol=p)) for p in duet.PROTOCOLS}
STEPS = {p: jax.jit(env.step) for p, env in ENVS.items()}
text = st.text("abcdefgh", max_size=9) | st.text("abcxyz|>", max_size=10)


def twin(topic, c1, c2, ended):
    """The reward written from the docstring."""
    out = dict.fromkeys(duet.COMPONENTS, 0.0)
    if not all(ended) or set(c1 + c2) - set("abcdefgh") or not (2 <= len(c1) <= 4 and 4 <= len(c2) <= 9):
        return out
    out["form"] = 0.5
    q = len(c2) / len(c1)
    if q < 1.1 or q > 5:
        return out
    out["ratio"] = 1.0 if 1.6 <= q <= 3.2 else (q - 1.1) / 0.5 if q < 1.6 else 1 - (q - 3.2) / 1.8
    u = len(set(c2)) / len(set(c1))
    if u < 1.3:
        return out
    out["unique"] = 0.5 * min(1.0, (u - 1.3) / 0.7)
    out["topic"] = sum(x in c1 and x in c2 for x in topic) / 3
    return out


def row(said, ends, width=R):
    ids = ([*said.encode()] + ([BYTES.EOS] if ends else []))[:width]
    return np.array(ids + [BYTES.PAD] * (width - len(ids)), np.int32), len(ids)


def start(protocol, topic):
    return ENVS[protocol].reset(KEY, {"topic": np.array([*topic.encode()], np.int32)})


def say(protocol, state, *lines, ends=True):
    width = 2 * R if protocol == "solo" else R
    rows = [row(line, ends, width) for line in lines]
    return STEPS[protocol](KEY, state, np.stack([r for r, _ in rows]), np.array([n for _, n in rows], np.int32))


def prompts(protocol, state):
    obs = ENVS[protocol].observe(state)
    return [BYTES.decode(np.asarray(obs.tokens[i, : obs.length[i]])) for i in range(len(obs.role))]


def paid(rewards):
    got = {name: np.asarray(v) for name, v in rewards.items()}
    assert all((v == v[0]).all() for v in got.values())  # a joint reward
    return {name: float(v[0]) for name, v in got.items()}


@settings(max_examples=150, deadline=None, database=None)
@given(topic=st.permutations("abcdefgh").map(lambda x: "".join(x[:3])), c1=text, c2=text, ends=st.booleans())
def test_every_protocol_pays_what_the_twin_pays(topic, c1, c2, ends):
    fits = [ends and len(c) < R for c in (c1, c2)]
    want = twin(topic, c1, c2, fits)
    state, rewards, done = say("together", start("together", topic), c1, c2, ends=ends)
    assert paid(rewards) == pytest.approx(want, abs=1e-6) and bool(done)
    state, first, done = say("sequential", start("sequential", topic), c1, ends=ends)
    assert not any(paid(first).values()) and not bool(done)
    _, rewards, done = say("sequential", state, c2, ends=ends)
    assert paid(rewards) == pytest.approx(want, abs=1e-6) and bool(done)
    state, first, _ = say("discussion", start("discussion", topic), "aaaa", "b")
    assert not any(paid(first).values())
    _, rewards, _ = say("discussion", state, c1, c2, ends=ends)
    assert paid(rewards) == pytest.approx(want, abs=1e-6)
    if "|" not in c1 + c2:
        _, rewards, _ = say("solo", start("solo", topic), f"{c1}|{c2}", ends=ends)
        whole = ends and len(c1) + len(c2) + 2 <= 2 * R
        assert paid(rewards) == pytest.approx(twin(topic, c1, c2, [True, whole]), abs=1e-6)


def test_the_best_pair():
    _, rewards, _ = say("together", start("together", "fad"), "fad", "fadbce")
    assert sum(paid(rewards).values()) == 3.0
    assert sum(paid(say("solo", start("solo", "fad"), "fadbce")[1]).values()) == 0.0  # no bar, no second string


@pytest.mark.parametrize("c1, c2, low", [("fad", "fadbce", 3.0), ("fad", "fadbc", 2.75), ("fad", "fadb", 1.9)])
def test_below_the_bar_a_pair_earns_nothing(c1, c2, low):
    total = sum(twin("fad", c1, c2, [True, True]).values())
    assert total >= low
    for bar, earns in ((low, True), (total + 0.01, False)):
        if bar > 3.0:
            continue
        env = duet.make(duet.Config(bar=bar))
        state = env.reset(KEY, {"topic": np.array([*b"fad"], np.int32)})
        rows = [row(line, True) for line in (c1, c2)]
        _, rewards, done = env.step(KEY, state, np.stack([r for r, _ in rows]), np.array([n for _, n in rows]))
        assert sum(paid(rewards).values()) == pytest.approx(total if earns else 0.0) and bool(done)


def test_who_sees_what():
    assert prompts("together", start("together", "fad")) == ["1fad>", "2fad>"]
    assert prompts("solo", start("solo", "fad")) == ["Sfad>"]
    state = start("sequential", "fad")
    assert prompts("sequential", state) == ["1fad>"]
    assert prompts("sequential", say("sequential", state, "fab")[0]) == ["2fad|fab>"]
    state = start("discussion", "fad")
    assert prompts("discussion", state) == ["1fad>", "2fad>"]
    assert prompts("discussion", say("discussion", state, "fab", "dcde")[0]) == ["1fad|fab|dcde>", "2fad|dcde|fab>"]


@settings(max_examples=40, deadline=None, database=None)
@given(mine=text, one=text, two=text, protocol=st.sampled_from(["together", "discussion"]))
def test_nobody_sees_the_others_words_of_the_same_turn(mine, one, two, protocol):
    """A seat's prompt is a function of the state before anyone speaks, and later shows only past turns."""
    state = start(protocol, "fad")
    before = prompts(protocol, state)
    after = [say(protocol, state, mine, other)[0] for other in (one, two)]
    assert prompts(protocol, state) == before
    if protocol == "together":  # and what the other said is nowhere in the next state's prompts
        assert prompts(protocol, after[0]) == prompts(protocol, after[1]) == before


def test_a_finished_state_changes_no_more():
    state, _, _ = say("together", start("together", "fad"), "fad", "fadbce")
    again, rewards, done = say("together", state, "ab", "abcd")
    assert not any(paid(rewards).values()) and bool(done) and jax.tree.all(jax.tree.map(jnp.array_equal, state, again))


@pytest.mark.parametrize("protocol", duet.PROTOCOLS)
def test_demonstrations_look_like_play_and_are_far_from_perfect(protocol):
    config = duet.Config(protocol=protocol)
    shown = duet.demonstrations(config, 0, 400)
    assert set(shown) == set(ENVS[protocol].roles)
    form = {"together": r"[12]\w{3}>", "solo": r"S\w{3}>", "sequential": r"1\w{3}>|2\w{3}\|[a-h]+>"}
    form["discussion"] = r"[12]\w{3}(\|[a-h]+\|[a-h]+)?>"
    for samples in shown.values():
        for ids, length, said, size in zip(
            *(samples[k] for k in ("tokens", "length", "completion", "completion_length"))
        ):
            assert re.fullmatch(form[protocol], BYTES.decode(ids[:length]))
            assert said[size - 1] == BYTES.EOS and size <= config.max_new_tokens
    if protocol == "together":
        pairs = zip(*([BYTES.decode(c) for c in shown[r]["completion"]] for r in ("concise", "detailed")))
        tasks = duet.make_tasks(config, 1, 400)["topic"]
        total = [sum(twin(bytes(t.tolist()).decode(), a, b, [1, 1]).values()) for t, (a, b) in zip(tasks, pairs)]
        assert 0.5 < np.mean(total) < 2.0


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"protocol": "choir"}, "together"),
        ({"response": 9}, "args.response: expected 10 to"),
        ({"own": 2.0}, "args.own: expected a probability"),
        ({"bar": 3.1}, "args.bar: expected 0 to 3.0, got 3.1"),
    ],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(duet.Config, bad, "config.env.args")
