"""Trust-and-Split against a slow twin in words, the iterated prisoner's dilemma, their demonstrations."""

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
from jaxmarl_llm.envs.dilemma import array as dilemma
from jaxmarl_llm.envs.dilemma import text as dilemma_text
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES, KEY = ByteTokenizer(), jax.random.key(0)
SPLITS = {
    (m, s): dilemma.Config(game="split", rounds=3, message=m, shown=s) for m, s in ((0, 1), (1, 0), (1, 1), (3, 9))
}
ENVS = {k: dilemma.make(c) for k, c in SPLITS.items()}
STEPS = {k: jax.jit(env.step) for k, env in ENVS.items()}
LOOKS = {k: jax.jit(env.observe) for k, env in ENVS.items()}
quick = settings(max_examples=30, deadline=None, database=None)
claims = st.sampled_from([*dilemma.CLAIMS, "?", "a", ":"])
WIDTH = 4  # tokens of a completion here, more than a message has


def ids(text):
    said = [*text.encode(), BYTES.EOS][:WIDTH]
    return said + [BYTES.PAD] * (WIDTH - len(said)), len(said)


class Twin:
    """Trust-and-Split in words, written from the docstring."""

    def __init__(self, hands, message, shown):
        self.hands, self.message, self.shown = ["rps"[a] + "rps"[b] for a, b in hands], message, shown
        self.past, self.words, self.round = [], None, 0

    def prompts(self):
        out = []
        for me in (0, 1):
            past = self.past[max(0, len(self.past) - self.shown) :] if self.shown else []
            text = "12"[me] + "".join(h[me] + h[1 - me] + c[me] + c[1 - me] + "," for h, c in past)
            text += self.hands[self.round][me]
            if self.words is not None:
                text += f":{self.words[me]}:{self.words[1 - me]}"
            out.append(text + ">")
        return out

    def say(self, one, two):
        if self.message and self.words is None:
            clean = lambda x: "".join("?" if c in ">:,?" else c for c in x[: self.message])
            self.words = [clean(one), clean(two)]
            return [0.0, 0.0]
        legal = [x[:1] if x[:1] and x[:1] in "0123456789X" else "?" for x in (one, two)]
        p = [{"X": 10, "?": 0}.get(x) if x in "X?" else int(x) for x in legal]
        hand = self.hands[self.round]
        value = [10 if hand in ("pr", "sp", "rs") else 1, 10 if hand in ("rp", "ps", "sr") else 1]
        self.past.append((hand, "".join(legal)))
        self.words, self.round = None, self.round + 1
        return [10 * p[i] / max(10, sum(p)) * value[i] for i in (0, 1)]


def shown(key, state):
    obs = LOOKS[key](state)
    return [BYTES.decode(np.asarray(obs.tokens[i, : obs.length[i]])) for i in (0, 1)]


def move(key, state, one, two):
    rows = [ids(one), ids(two)]
    tokens, length = jnp.array([r for r, _ in rows]), jnp.array([n for _, n in rows])
    state, rewards, done = STEPS[key](KEY, state, tokens, length)
    return state, {k: np.asarray(v) for k, v in rewards.items()}, bool(done)


@settings(max_examples=60, deadline=None, database=None)
@given(
    key=st.sampled_from(sorted(SPLITS)),
    seed=st.integers(0, 1000),
    moves=st.lists(
        st.tuples(st.text("rps:>?,~ z", max_size=3), claims, st.text("rps", max_size=3), claims), min_size=3
    ),
)
def test_a_game_is_the_twins_game(key, seed, moves):
    config, env = SPLITS[key], ENVS[key]
    task = dilemma.make_tasks(config, seed, 1)["hands"][0]
    twin, state, done = Twin(task, *key), env.reset(KEY, {"hands": task}), False
    for word, claim, other_word, other_claim in moves[:3]:
        lines = [(claim, other_claim)]
        if config.message:
            lines.insert(0, (word, other_word))
        for one, two in lines:
            assert shown(key, state) == twin.prompts() and not done
            before = shown(key, state)
            paid = twin.say(one, two)
            state, rewards, done = move(key, state, one, two)
            np.testing.assert_allclose(rewards["payoff"], paid, rtol=1e-6)
            np.testing.assert_allclose(rewards["social"], [sum(paid)] * 2, rtol=1e-6)
            assert max(map(len, before)) <= dilemma.prompt_length(config)
    assert done and not np.asarray(LOOKS[key](state).active).any()
    again, rewards, done = move(key, state, "X", "X")
    assert done and not rewards["payoff"].any() and jax.tree.all(jax.tree.map(jnp.array_equal, state, again))


@pytest.mark.parametrize(
    "claims, want", [((10, 0), (100, 0)), ((10, 10), (50, 5)), ((0, 10), (0, 10)), ((4, 4), (40, 4)), ((0, 0), (0, 0))]
)
def test_golden_payoffs(claims, want):
    """Values 10 and 1: the joint optimum is 100 a round, both greedy earn 55."""
    for hands in ([1, 0], [2, 1], [0, 2]):  # paper and rock, scissors and paper, rock and scissors
        np.testing.assert_allclose(dilemma.payoffs(jnp.array(hands), jnp.array(claims)), want, rtol=1e-6)
        back = dilemma.payoffs(jnp.array(hands[::-1]), jnp.array(claims[::-1]))
        np.testing.assert_allclose(back, want[::-1], rtol=1e-6)


def test_hands_differ_come_from_the_task_and_nothing_else_is_random():
    config = dilemma.Config(game="split")
    hands = dilemma.make_tasks(config, 3, 400)["hands"]
    assert hands.shape == (400, 10, 2) and (hands[..., 0] != hands[..., 1]).all()
    wins = np.asarray(dilemma.wins(jnp.array(hands[..., 0]), jnp.array(hands[..., 1])))
    assert abs(wins.mean() - 0.5) < 0.05 and len(np.unique(hands.reshape(-1, 2), axis=0)) == 6
    env = dilemma.make(config)
    states = [env.reset(jax.random.key(k), {"hands": hands[0]}) for k in (0, 1)]
    assert jax.tree.all(jax.tree.map(jnp.array_equal, *states))


def test_a_hand_is_seen_by_its_owner_alone():
    """Before messages a player's prompt is the same whatever the other holds."""
    env = ENVS[1, 1]
    seen = {}
    for mine in range(3):
        for other in {0, 1, 2} - {mine}:
            state = env.reset(KEY, {"hands": np.array([[mine, other]] * 3, np.int32)})
            seen.setdefault(mine, set()).add(shown((1, 1), state)[0])
    assert sorted(map(len, seen.values())) == [1, 1, 1] and len(set.union(*seen.values())) == 3


def test_the_iterated_prisoners_dilemma():
    env = dilemma.make(dilemma.Config(rounds=2))
    assert env.components == ("payoff", "social", "cooperation") and env.max_turns == 2
    play = lambda state, one, two: env.step(KEY, state, jnp.array([[ord(one)], [ord(two)]]), jnp.ones(2, jnp.int32))
    for one, two, want in [("C", "C", (3, 3)), ("C", "D", (0, 5)), ("D", "C", (5, 0)), ("D", "D", (1, 1))]:
        state, rewards, done = play(env.reset(KEY, {"game": 0}), one, two)
        np.testing.assert_array_equal(rewards["payoff"], want)
        np.testing.assert_allclose(rewards["cooperation"], [(one == "C") / 2, (two == "C") / 2])
        assert not done
    obs = env.observe(state)
    assert BYTES.decode(np.asarray(obs.tokens[1, : obs.length[1]])) == "2DD>"
    state, rewards, done = play(state, "x", "C")  # no move: neither is paid
    assert done and not rewards["payoff"].any() and rewards["cooperation"].tolist() == [0.0, 0.5]
    _, rewards, done = play(state, "C", "C")
    assert done and not any(np.asarray(r).any() for r in rewards.values())


@pytest.mark.parametrize("key", sorted(SPLITS))
def test_demonstrations_look_like_play(key):
    config = SPLITS[key]
    assert set(dilemma.demonstrations(dilemma.Config(), 0, 8)) == set(dilemma.ROLES)
    for seat, samples in enumerate(dilemma.demonstrations(config, 0, 300).values()):
        kinds, replies = set(), set()
        for row, length, said, size in zip(
            *(samples[k] for k in ("tokens", "length", "completion", "completion_length"))
        ):
            asked, reply = BYTES.decode(row[:length]), BYTES.decode(said[:size]).strip()
            past = rf"([rps][rps][0-9X][0-9X],){{0,{min(config.shown, 2)}}}"
            assert re.fullmatch(rf"{1 + seat}{past}[rps](:[rps]:[rps])?>", asked) and 1 <= size <= config.max_new_tokens
            claims = config.message == 0 or ":" in asked
            assert reply in ([*dilemma.CLAIMS] if claims else [*dilemma.HANDS])
            kinds.add(claims)
            replies.add(reply)
        assert kinds == ({True, False} if config.message else {True})
        assert replies >= set(dilemma.CLAIMS)


@pytest.mark.parametrize(
    "bad, message",
    [({"game": "stag"}, "split"), ({"rounds": 0}, "rounds"), ({"message": -1}, "message"), ({"honest": 2.0}, "honest")],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message):
        from_dict(dilemma.Config, bad, "config.env.args")


# The same games as text


@pytest.mark.parametrize(
    "game, reply, move",
    [
        ("ipd", "C", "C"),
        ("ipd", "I will defect.", "D"),
        ("ipd", "I cooperate: C", "C"),
        ("ipd", "C or D?", dilemma_text.NONE),
        ("ipd", "Call", dilemma_text.NONE),
        ("split", "I claim 10 coins.", "10"),
        ("split", "0", "0"),
        ("split", "11", dilemma_text.NONE),
        ("split", "-3", dilemma_text.NONE),
        ("split", "2.5", dilemma_text.NONE),
        ("split", "3 or 4", dilemma_text.NONE),
        ("split", "3 of 100", dilemma_text.NONE),
        ("split", "", dilemma_text.NONE),
    ],
)
def test_replies(game, reply, move):
    assert dilemma_text.move_of(game, reply) == move


TEXTS = {(m, s): dilemma_text.Config(game="split", rounds=3, message=500 * min(1, m), shown=s) for m, s in SPLITS}
TEXTS["ipd"] = dilemma_text.Config(rounds=3)
through_text = functools.cache(lambda key: dilemma_text.make(TEXTS[key]))


def task_of(config, seed=0):
    return {k: v[0] for k, v in dilemma.make_tasks(config, seed, 1).items()}


def spoken(host, one, two):
    return dict(zip(host.roles, (Action(one, ()), Action(two, ()))))


@pytest.mark.parametrize("key", [(0, 1), (1, 0), (1, 1)])
@quick
@given(seed=st.integers(0, 99), moves=st.lists(st.tuples(claims, claims), min_size=3, max_size=3))
def test_text_pays_what_arrays_and_the_twin_pay(key, seed, moves):
    """Trust-and-Split, with and without messages: claims in sentences, every state on the way."""
    task, host = task_of(SPLITS[key], seed), through_text(key)
    twin, array, text = Twin(task["hands"], *key), ENVS[key].reset(KEY, task), host.reset(seed, task)
    for pair in moves:
        if key[0]:
            twin.say("r", "p")
            array, _, _ = move(key, array, "r", "p")
            text, rewards, done = host.step(0, text, spoken(host, "It's rock, you know?", "paper: 5"))
            assert not done and not any(v for paid in rewards.values() for v in paid.values())
            assert text.words == ("It's rock, you know?", "paper: 5")
        want = twin.say(*pair)
        array, rewards, done = move(key, array, *pair)
        words = [f"I claim {dilemma_text.NAMES.get(x, 'a lot')} coins." for x in pair]
        text, paid, over = host.step(0, text, spoken(host, *words))
        np.testing.assert_allclose([paid[r]["payoff"] for r in host.roles], want, rtol=1e-6)
        for component, values in rewards.items():
            assert [paid[r][component] for r in host.roles] == values.tolist()
        assert text.words == () and np.array_equal(text.inner.claims, array.claims) and done == over
    assert done and host.observe(text) == {}


@quick
@given(moves=st.lists(st.tuples(*[st.sampled_from(["C", "defect", "either C or D", ""])] * 2), min_size=3, max_size=3))
def test_text_pays_the_prisoners_what_their_table_says(moves):
    host = through_text("ipd")
    state, table = host.reset(0, {"game": 0}), {"CC": (3, 3), "CD": (0, 5), "DC": (5, 0), "DD": (1, 1)}
    for i, pair in enumerate(moves):
        assert {r: len(p[-1].text.split("\n")) for r, p in host.observe(state).items()} == dict.fromkeys(
            host.roles, i + 1
        )
        state, paid, done = host.step(0, state, spoken(host, *pair))
        short = [{"C": "C", "defect": "D"}.get(x, "?") for x in pair]
        for seat, role in enumerate(host.roles):
            want = table.get("".join(short), (0, 0))
            assert paid[role]["payoff"] == want[seat] and paid[role]["social"] == sum(want)
            assert paid[role]["cooperation"] == pytest.approx((short[seat] == "C") / 3)
    assert done and host.observe(state) == {}


@pytest.mark.parametrize("key", ["ipd", (0, 1), (1, 1)])
@quick
@given(lines=st.lists(st.text(), min_size=12, max_size=12))
def test_no_reply_breaks_the_text_game(key, lines):
    config, host = TEXTS[key], through_text(key)
    state, turns, done = host.reset(0, task_of(config)), 0, False
    while not done:
        prompts = host.observe(state)
        assert list(prompts) == list(host.roles) and all(m.text for p in prompts.values() for m in p)
        state, rewards, done = host.step(0, state, spoken(host, *lines[2 * turns : 2 * turns + 2]))
        assert all(np.isfinite(v) for of in rewards.values() for v in of.values())
        assert all(set(of) == set(host.components) for of in rewards.values())
        turns += 1
    assert turns == host.max_turns == dilemma.make(config.board).max_turns


def test_what_a_text_player_reads():
    host = through_text((1, 1))
    state = host.reset(0, {"hands": np.array([[1, 0], [0, 2], [0, 1]])})
    asked = lambda: [p[-1].text for p in host.observe(state).values()]
    assert asked()[1] == "Now your hand is rock.\nSend the other player a short message." and "rock" not in asked()[0]
    state, _, _ = host.step(0, state, spoken(host, "I have paper", "rock here" + "!" * 600))
    heard = f"The other player said: rock here{'!' * 491}"  # 500 characters
    assert asked()[0].endswith(f"You said: I have paper\n{heard}\nHow many coins do you claim?")
    assert "You said: rock here!" in asked()[1] and "The other player said: I have paper\nHow" in asked()[1]
    state, paid, _ = host.step(0, state, spoken(host, "10", "none"))
    assert paid["first"]["payoff"] == 100.0
    assert asked()[1].startswith("Earlier, with rock against paper: you chose nothing legal, the other player 10.\n")
    for _ in range(2):
        state, _, _ = host.step(0, state, spoken(host, "3", "4"))
    assert asked()[0].startswith(
        "Earlier, with rock against scissors: you chose 3, the other player 4.\nNow"
    )  # shown=1
    prisoners = through_text("ipd")
    state, _, _ = prisoners.step(0, prisoners.reset(0, {"game": 0}), spoken(prisoners, "C", "D"))
    rules, asked = prisoners.observe(state)["second"]
    assert asked.text == "Round 1: you chose D, the other player C.\nNow round 2." and "3 rounds" in rules.text


@pytest.mark.parametrize("key", TEXTS)
def test_demonstrations_in_words_are_those_of_dilemma(key):
    config = dataclasses.replace(TEXTS[key], count=30)
    tasks = dilemma_text.tasks(config)
    rows = dilemma_text.demonstrations(config, tasks)
    assert len(tasks) == 30 and [role for role, _, _ in rows] == ["first"] * 30 + ["second"] * 30
    array = dilemma.demonstrations(config.board, config.seed, 30)
    said = np.concatenate([array[role]["completion"][:, 0] for role in dilemma.ROLES])
    for (_, prompt, reply), byte in zip(rows, said):
        longer = dilemma_text.with_memory(prompt, ["claim ten"])
        assert longer[0].text == f"{prompt[0].text}\nStrategies that worked before:\n- claim ten"
        if prompt[1].text.endswith("a short message."):
            assert reply == {"r": "rock", "p": "paper", "s": "scissors"}[chr(byte)]
        else:
            assert dilemma_text.MOVES[dilemma_text.move_of(config.game, reply)] == chr(byte)
    talks = [prompt[1].text.endswith("a short message.") for _, prompt, _ in rows]
    assert any(talks) == (config.game == "split" and config.message > 0) and not all(talks)


def test_what_stays_in_memory_is_a_players_own_payoff():
    prompt = dilemma_text.prompt(TEXTS["ipd"], "2CD>")
    line = dilemma_text.strategy("second", prompt, Action("D", ()), {"payoff": 5.0, "social": 5.0, "cooperation": 0.0})
    assert line == "second (5.0) on 'Round 1: you chose C, the other player D. Now round 2.': D"


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"split": "dev"}, "args.split"),
        ({"count": -1}, "args.count"),
        ({"response": 2}, "args.response: expected 1"),
        ({"game": "stag"}, "args.game"),
        ({"massage": 1}, "message"),
    ],
)
def test_bad_configurations_of_the_text_form(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("dilemma_text", bad).check("config.env")
    assert "\n" not in str(error.value)
