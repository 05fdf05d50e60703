"""Prompts of recorded rollouts as messages: who said what, what was cut, and what a role did not see."""

from __future__ import annotations

import types

import pytest

from jaxmarl_llm.envs.chat import quotes
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.messages import Action, HostEnv, Message
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.rollout import plans
from jaxmarl_llm.rollout.host import Record
from jaxmarl_llm.rollout.host_runner import HostEnvRunner
from jaxmarl_llm.training.rollout_prompts import PromptReader
from tests.rollout.test_host import go, make_team, raw

LETTERS = ((*range(97, 123),), 12.0)  # a random model writes letters


def whispers():
    """Turns of a, b, a: b is told nothing of what a wrote, and a sees its own turn and what b wrote."""

    def observe(said):
        if len(said) == 1:
            return {"b": raw(b"go on")}
        talk = [Message("system", "you are a")]
        if said:
            talk += [said[0].message("a"), Message("user", f"b wrote: {said[1].text}.", owner=None)]
        return {"a": tuple(talk)}

    def step(seed, said, actions):
        (action,) = actions.values()
        return (*said, action), {}, len(said) == 2

    return HostEnv("whispers", ("a", "b"), 3, ("accuracy",), lambda seed, task: (), observe, step)


def reader(team, tree, records, hears=quotes):
    runner = HostEnvRunner(HostTask(whispers, [0], [1], hears=hears), EnvConfig("whispers", workers=0))
    step = types.SimpleNamespace(team=team, env_runner=runner)
    host = None if records is None else types.SimpleNamespace(records=records)
    return PromptReader(step, types.SimpleNamespace(tree=tree, played=types.SimpleNamespace(records=host)))


@pytest.fixture(scope="module")
def played():
    """(team, rollout) of one task: 2 completions a, 2 of b behind each, 2 of a behind each of those."""
    team = make_team("a", "b", bias=(LETTERS,))
    return team, go(whispers(), team, [0], plans.product(2), max_prompt=24)


def test_messages_have_a_speaker_an_owner_and_a_text(played):
    team, rollout = played
    tree, records = rollout.tree, rollout.records
    found = reader(team, tree, records)
    turns = tree.nodes.turn[tree.nodes.valid].tolist()
    assert turns == [0, 1, 1, 2, 2, 2, 2]
    assert found.messages(0) == (("system", "", "you are a"),)
    assert found.messages(1) == (("raw", "", "go on"),)
    for node in range(3, 7):
        b = tree.transitions.parent  # a chain of joint actions: each is one completion
        second = int(tree.nodes.parent[node])
        first = int(b[second])
        own, said = (records[int(tree.transitions.steps[j].max())].action.text for j in (first, second))
        assert found.messages(node)[1:] == (("assistant", "a", own), ("user", "", f"b wrote: {said}."))


def test_what_a_prompt_does_not_tell_is_unseen(played):
    team, rollout = played
    tree, found = rollout.tree, reader(team, rollout.tree, rollout.records)
    assert found.unseen(0) == ()
    for node in (1, 2):  # b was not told what a wrote
        assert found.unseen(node) == (int(tree.transitions.steps[tree.nodes.parent[node]].max()),)
    assert [found.unseen(node) for node in range(3, 7)] == [()] * 4
    told = reader(team, tree, rollout.records, hears=lambda role, prompt, speaker, text: (role, speaker) == ("b", "a"))
    assert [told.unseen(node) for node in range(7)] == [()] * 7


def test_a_function_of_the_environment_that_fails_stops_nothing(played):
    team, rollout = played
    found = reader(team, rollout.tree, rollout.records, hears=lambda *given: 1 / 0)
    assert len(found.unseen(1)) == 1


def test_tokens_that_the_limit_left_out_are_counted(played):
    team, rollout = played
    found, tokenizer = reader(team, rollout.tree, rollout.records), ByteTokenizer()
    cut = [found.cut_tokens(node) for node in range(7)]
    assert cut[:3] == [0, 0, 0] and sum(cut) == rollout.cut_tokens > 0
    for node in range(3, 7):
        prompt = rollout.records[[*rollout.tree.steps.node].index(node)].prompt
        assert cut[node] == len(tokenizer.render(prompt, "a")) - 24


def test_a_prompt_without_messages_has_none(played):
    team, rollout = played
    found = reader(team, rollout.tree, None)
    assert (found.messages(3), found.cut_tokens(3), found.unseen(3)) == ((), 0, ())


def test_words_inside_of_words_are_no_quotation(played):
    team, rollout = played
    records = [Record(r.role, r.prompt, Action("o", (111,))) for r in rollout.records]  # "go on" has no word "o"
    found, moves = reader(team, rollout.tree, records), rollout.tree.transitions
    assert len(found.unseen(1)) == 1
    second = int(rollout.tree.nodes.parent[3])  # nor has "you are a" one: both turns before are unseen, the last first
    assert found.unseen(3) == tuple(int(moves.steps[j].max()) for j in (second, moves.parent[second]))


def test_tokens_of_a_raw_message_are_quoted_by_their_text(played):
    team, rollout = played
    records = [Record(r.role, r.prompt, Action("go", (103, 111))) for r in rollout.records]
    assert reader(team, rollout.tree, records).unseen(1) == ()
