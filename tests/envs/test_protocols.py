"""Protocols around a host environment: who hears whom, what counts, and no leak between agents of one turn."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.envs.protocols import PROTOCOLS, wrap
from jaxmarl_llm.envs.writing import env as writing
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.models.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()
CONFIG = writing.Config(max_turns=2)
BASE = writing.make(CONFIG)
TASK = writing.tasks(CONFIG)[0]
words = st.text("abc .,\n", max_size=40)


def act(text):
    return Action(text, (*BYTES.encode(text), BYTES.EOS))


def tokens(env, state):
    return {role: BYTES.fit(prompt, role, 10_000).ids for role, prompt in env.observe(state).items()}


def play(env, texts):
    """The prompts of every step, the rewards of every step, and the last state."""
    state, seen, paid, texts = env.reset(0, TASK), [], [], list(texts)
    done = False
    while not done:
        prompts = env.observe(state)
        seen.append(tokens(env, state))
        state, rewards, done = env.step(0, state, {role: act(texts.pop(0)) for role in prompts})
        paid.append(rewards)
    assert not texts
    return seen, paid


def test_turns_and_roles():
    assert [wrap(BASE, p).max_turns for p in PROTOCOLS] == [2, 4, 4, 4]
    assert wrap(BASE, "together") is BASE and wrap(BASE, "solo").roles == ("solo",)
    seen, _ = play(wrap(BASE, "sequential"), "abcd")
    assert [list(s) for s in seen] == [["concise"], ["detailed"]] * 2
    seen, _ = play(wrap(BASE, "discussion"), "abcdefgh")
    assert [list(s) for s in seen] == [["concise", "detailed"]] * 4


@pytest.mark.parametrize("protocol", PROTOCOLS[1:])
def test_the_texts_that_count_are_paid_as_the_environment_pays_them(protocol):
    short = "The model learns a shared code for many tasks from few examples of each."
    long = f"{TASK['text'][:300]} However, details differ."
    last = [short, long]
    drafts = [["x", "y"], []][protocol != "discussion"]
    _, paid = play(wrap(BASE, protocol), [*drafts, *last] * 2)
    _, want = play(BASE, last * 2)
    ends = [r for r in paid if r]
    assert len(ends) == 2 and [r for r in paid if not r] == [{}] * (len(paid) - 2)
    for got, base in zip(ends, want):
        assert all(by_role == base["concise"] for by_role in got.values())
        assert list(got) == (["solo"] if protocol == "solo" else ["concise", "detailed"])


@settings(max_examples=30, deadline=None, database=None)
@given(mine=words, one=words, two=words, protocol=st.sampled_from(["together", "discussion"]))
def test_no_token_of_a_prompt_depends_on_what_others_say_in_that_turn(mine, one, two, protocol):
    """Two worlds that differ in what ``detailed`` says in turn t: ``concise`` reads the same tokens up to turn t."""
    env = wrap(BASE, protocol)
    turns = env.max_turns
    for t in range(turns):
        worlds = []
        for other in (one, two):
            texts = [x for turn in range(turns) for x in (mine, other if turn == t else "z")]
            worlds.append(play(env, texts)[0])
        for turn in range(t + 1):
            assert worlds[0][turn]["concise"] == worlds[1][turn]["concise"]
        if protocol == "together":  # and never hears it later: feedback is plain
            assert [s["concise"] for s in worlds[0]] == [s["concise"] for s in worlds[1]]


@settings(max_examples=20, deadline=None, database=None)
@given(first=words, one=words, two=words)
def test_a_pipeline_runs_one_way(first, one, two):
    """In a turn the first writer's prompt does not depend on the second's text; the second's on the first's does."""
    env = wrap(BASE, "sequential")
    a, b = (play(env, [first, other, "z", "z"])[0] for other in (one, two))
    assert a[0] == b[0] and a[1] == b[1]
    heard = play(env, [f"{first}!", one, "z", "z"])[0]
    assert heard[0] == a[0] and heard[1] != a[1]


def test_drafts_are_read_and_own_ids_are_spliced():
    env = wrap(BASE, "discussion")
    state, _, _ = env.step(0, env.reset(0, TASK), {"concise": act("mine"), "detailed": act("theirs")})
    own, heard = env.observe(state)["concise"][-2:]
    assert own.ids == act("mine").ids and own.owner == "concise"
    assert "theirs" in heard.text and "mine" not in heard.text
    solo = wrap(BASE, "solo")
    state, _, _ = solo.step(0, solo.reset(0, TASK), {"solo": act("first part")})
    assert "first part" in solo.observe(state)["solo"][-1].text


def test_states_are_not_changed_by_stepping():
    env = wrap(BASE, "sequential")
    state = env.reset(0, TASK)
    one = env.step(0, state, {"concise": act("a")})
    assert env.step(0, state, {"concise": act("a")}) == one and state.drafts == ()


def test_bad_protocols():
    with pytest.raises(ConfigError, match="together"):
        wrap(BASE, "choir")
    with pytest.raises(ConfigError, match="one role"):
        wrap(BASE._replace(roles=("a",)), "solo")
