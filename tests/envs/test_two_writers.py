"""Two writers: who reads what, the reward by hand, demonstrations, and a tiny run."""

import dataclasses
import json
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs.two_writers import env as writers
from jaxmarl_llm.envs.writing import prose
from jaxmarl_llm.envs.writing.rouge import rouge
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.runs import loop

TRAIN, TEST = (writers.tasks(writers.Config(split=split)) for split in ("train", "test"))
TASK = {
    "id": "a",
    "title": "T",
    "text": "Old words. We tame cats with fish.",
    "targets": ["We tame cats.", "Dogs run."],
    "others": ["Cats tame us."],
}


def played(task, proposal, text, *, config=writers.Config(), cut=False):
    """The rewards of an episode."""
    env = writers.make(config)
    state, paid, done = env.step(0, env.reset(0, task), {"proposer": Action(proposal, ())})
    assert not paid and not done
    _, paid, done = env.step(0, state, {"editor": Action(text, (), cut)})
    assert done and paid["proposer"] == paid["editor"] and set(paid["editor"]) == set(writers.COMPONENTS)
    return paid["editor"]


def test_rewards_by_hand():
    """The best summary counts. "we cats tame": three words of three are shared, and two in order."""
    full = played(TASK, "We tame dogs.", "We tame cats.")
    assert full == {
        "rougeL": 1, "length": 1, "rouge1": 1, "words": 3, "ended": 1, "proposal": pytest.approx(2 / 3),
        "specific": pytest.approx(2 / 3),
    }  # fmt: skip
    mixed = played(TASK, "", "We cats tame.")
    assert (mixed["rouge1"], mixed["rougeL"], mixed["proposal"]) == (1, pytest.approx(2 / 3), 0)
    assert mixed["specific"] == pytest.approx(0)  # "cats tame" is of the other article too
    assert played(TASK, "", "Dogs run.")["rougeL"] == 1  # the other summary
    assert played(TASK, "", "")["rougeL"] == 0 == played(TASK, "", ".")["length"]


def test_the_length_rule():
    """Full pay up to ``most_words``, half at one and a half times as many words, none at twice as many."""
    config = writers.Config(most_words=2)
    share = lambda text, **kw: (got := played(TASK, "", text, config=config, **kw))["length"] / got["rougeL"]
    assert share("We cats.") == 1 and share("We tame cats.") == 0.5 and share("We tame two cats.") == 0
    assert share("We tame two more cats.") == 0
    assert share("We cats.", cut=True) == 0 == share("We cats")
    assert played(TASK, "", "We cats", config=config)["ended"] == 0 == played(TASK, "", "A.", cut=True)["ended"]


def test_a_text_that_fits_every_article_is_not_specific():
    """The articles are a ring, so the mean over a split is 0 for any fixed text."""
    for tasks in (TRAIN, TEST):
        judged = [writers.judge(writers.Config(), task, "We propose a method for learning networks.") for task in tasks]
        assert sum(row["rougeL"] for row in judged) > 0.1 * len(tasks)
        assert sum(row["specific"] for row in judged) == pytest.approx(0, abs=1e-9)


def test_form_alone_earns_nothing():
    weights = config_flags.load("magrpo:two_writers").reward
    assert weights == {"rougeL": 0.5, "length": 0.5}
    other = played(TASK, "We tame cats.", "Green ideas sleep.")
    assert other["ended"] == 1 and other["words"] == 3 and sum(w * other[name] for name, w in weights.items()) == 0


@given(st.text(max_size=80), st.text(max_size=80), st.booleans())
def test_any_text_has_a_reward(proposal, text, cut):
    paid = played(TASK, proposal, text, cut=cut)
    assert 0 <= paid["length"] <= paid["rougeL"] <= paid["rouge1"] <= 1


def test_a_task_without_a_human_summary_has_no_reward():
    """The step raises, so the joint action is invalid, and never 0."""
    with pytest.raises(ValueError, match="task 'a' has no human summary"):
        played({**TASK, "targets": []}, "a", "b")


def test_who_reads_what():
    for reads in ("proposal", "abstract"):
        env = writers.make(writers.Config(editor_reads=reads, abstract_words=4))
        start = env.reset(0, TASK)
        (asked,) = env.observe(start).values()
        assert asked[1].text == "Old words. We tame"
        state, _, _ = env.step(0, start, {"proposer": Action("We\n tame dogs.", ())})
        (read,) = env.observe(state).values()
        shown = "Sentence: We tame dogs."
        assert read[1].text == (f"Old words. We tame\n{shown}" if reads == "abstract" else shown)
        other, _, _ = env.step(0, env.reset(0, {**TASK, "targets": ["x"]}), {"proposer": Action("We\n tame dogs.", ())})
        assert env.observe(other) == {"editor": read}  # no human summary is shown
    empty, _, _ = env.step(0, start, {"proposer": Action("", ())})
    assert env.observe(empty)["editor"][1].text.endswith("Sentence: (nothing)")
    assert writers.hears("editor", (), "proposer", "a") and not writers.hears("proposer", (), "editor", "a")


def test_an_episode_is_pure():
    env = writers.make(writers.Config())
    start, said = env.reset(0, TASK), {"proposer": Action("a", (1,))}
    before = pickle.dumps(start)
    assert env.step(0, start, said) == env.step(1, start, said) and pickle.dumps(start) == before
    state, _, _ = env.step(0, start, said)
    assert pickle.loads(pickle.dumps(state)) == state
    done, _, _ = env.step(0, state, {"editor": Action("x", ())})
    for bad, actions in ((start, {"editor": Action("x", ())}), (state, said), (done, {"editor": Action("x", ())})):
        with pytest.raises(ValueError, match="expected one action of"):
            env.step(0, bad, actions)


def test_no_article_is_on_both_sides():
    words = [{loaders.content(task["text"]) for task in tasks} for tasks in (TRAIN, TEST)]
    assert len(words[0]) == 64 and len(words[1]) == 32 and not words[0] & words[1]
    targets = [{text for task in tasks for text in task["targets"]} for tasks in (TRAIN, TEST)]
    assert not targets[0] & targets[1]
    assert writers.tasks(writers.Config(seed=1)) != TRAIN and writers.tasks(writers.Config(count=5)) == TRAIN[:5]
    others = {task["id"]: task["others"] for task in TRAIN}
    assert others == {task["id"]: task["others"] for task in writers.tasks(writers.Config(seed=1))}
    assert sorted(others.values()) == sorted(task["targets"] for task in TRAIN)
    assert not any(task["others"] == task["targets"] for task in TRAIN)
    with pytest.raises(ConfigError, match=r"args\.count: expected at most 64, the usable articles in .*, got 65"):
        writers.tasks(writers.Config(count=65))


def test_demonstrations_are_the_abstracts_own_words_and_end():
    config = writers.Config()
    samples = writers.demonstrations(config, TRAIN)
    proposals = {prompt: text for role, prompt, text in samples if role == "proposer"}
    edits = [(prompt, text) for role, prompt, text in samples if role == "editor"]
    assert len(proposals) == 64 and len(edits) > 55
    for task in TRAIN:
        text = proposals[writers.proposer_prompt(config, task)]
        assert text in writers.opening(task["text"], 100) and len(text.split()) <= writers.PROPOSED
    better = 0
    for prompt, text in edits:
        task = next(
            t
            for t in TRAIN
            if prompt == writers.editor_prompt(config, t, proposals[writers.proposer_prompt(config, t)])
        )
        proposal = proposals[writers.proposer_prompt(config, task)]
        assert prose.ended(text) and not prose.misfits(text) and len(text.split()) >= writers.EDITED
        assert text[1:].rstrip(".") in proposal
        better += rouge(text, task["targets"])["rougeL"] - rouge(proposal, task["targets"])["rougeL"]
    assert better / len(edits) > 0.01  # the editor shows how to improve a proposal


def test_parts_of_a_sentence():
    made = [*writers.parts("In this work, we show that a net of many layers is the best (of all")]
    assert "We show that a net of many layers." in made and "We show that a net of many layers is." not in made
    assert "In this work, we show that a net of many layers." in made
    assert not [text for text in made if text.endswith(" the.") or text.count("(") != text.count(")")]
    assert {text.split()[0] for text in made} == {"In", "We"} and [*writers.parts("too short")] == []


def test_a_person_may_give_the_text():
    task = writers.ask(writers.Config(), "A short text.")
    env = writers.make(writers.Config())
    state, _, _ = env.step(0, env.reset(0, task), {"proposer": Action("A text.", ())})
    assert env.step(0, state, {"editor": Action("Text.", ())})[1:] == ({}, True)
    assert writers.stand_in({"count": 9}) == {} and writers.stand_in({"count": 9, "data": "d"}) == {
        "count": 9,
        "data": "d",
    }
    assert "(0.5) on 'A short text.': A" in writers.strategy(
        "proposer", writers.proposer_prompt(writers.Config(), task), Action("A", ()), {"rougeL": 0.5}
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"editor_reads": "all"}, "editor_reads: unknown value 'all'"),
        ({"most_words": 0}, "most_words: expected 1 to"),
        ({"split": "dev"}, "split: unknown value 'dev'"),
    ],
)
def test_bad_settings_are_refused(args, message):
    with pytest.raises(ConfigError, match=re.escape(f"config.env.args.{message}")):
        from_dict(writers.Config, args, "config.env.args")


def test_two_steps_of_the_tiny_configuration(tmp_path):
    cfg = config_flags.load("magrpo:two_writers_tiny")
    recipe = config_flags.recipe_module(cfg.recipe).make(cfg)
    state = loop.fit(dataclasses.replace(cfg), recipe, tmp_path)
    recipe.env_runner.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert int(state.step) == 4 and [row["count/invalid"] for row in rows[2:]] == [0, 0]
    assert [row["count/sequences"] for row in rows[2:]] == [8, 8] and 0 < rows[0]["sft/dropped"] < 1
    both = [0.5 * row["reward/rougeL"] + 0.5 * row["reward/length"] for row in rows[2:]]
    assert [row["reward/total"] for row in rows[2:]] == pytest.approx(both)
    assert "eval/proposal" in rows[2] and rows[2]["eval/words"] > 0
