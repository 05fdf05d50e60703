"""One agent that writes the summary of `two_writers`: the same judgement, what it reads, and demonstrations."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.two_writers import env as writers
from jaxmarl_llm.envs.two_writers import solo
from jaxmarl_llm.messages import Action

CONFIG = solo.Config(most_words=9)
TRAIN, TEST = (writers.tasks(writers.Config(split=split)) for split in ("train", "test"))
ENV = solo.make(CONFIG)


def alone(task, text, cut=False):
    """The components of an episode of one agent."""
    _, rewards, done = ENV.step(0, ENV.reset(0, task), {"solo": Action(text, (), cut)})
    assert done and [*rewards] == ["solo"] and set(rewards["solo"]) == set(ENV.components)
    return rewards["solo"]


def team(task, text, cut=False):
    """The components of a team whose editor writes ``text``, without that of the proposal."""
    made = writers.make(CONFIG)
    state, _, _ = made.step(0, made.reset(0, task), {"proposer": Action("A proposal.", ())})
    _, rewards, _ = made.step(0, state, {"editor": Action(text, (), cut)})
    return {name: value for name, value in rewards["editor"].items() if name != "proposal"}


@st.composite
def written(draw):
    """A task, and words of its abstract and of its summary."""
    task = draw(st.sampled_from([*TRAIN, *TEST]))
    words = st.sampled_from([*task["text"].split()[:40], *task["targets"][0].split()])
    return task, " ".join(draw(st.lists(words, max_size=24))) + draw(st.sampled_from(["", ".", " we"]))


@given(written(), st.booleans())
def test_a_summary_has_the_judgement_that_the_team_has(case, cut):
    assert alone(*case, cut) == team(*case, cut)


def test_a_human_summary_earns_all_and_an_empty_text_nothing():
    for task in TEST:
        short = {**task, "targets": ["We learn."]}
        assert alone(short, "We learn.")["rougeL"] == alone(short, "We learn.")["length"] == 1
        assert alone(short, "We learn.", cut=True)["length"] == 0
        nothing = alone(task, "")
        assert nothing["rougeL"] == nothing["length"] == nothing["ended"] == nothing["words"] == 0
    assert "proposal" not in ENV.components
    with pytest.raises(ValueError, match="has no human summary"):
        alone({**TEST[0], "targets": []}, "We learn.")


def test_the_agent_reads_the_abstract_alone():
    for task in (*TRAIN, *TEST):
        config = solo.Config(abstract_words=7)
        ((role, (system, user)),) = solo.make(config).observe(ENV.reset(0, task)).items()
        assert (role, system.text, user.text) == ("solo", solo.SYSTEM, writers.opening(task["text"], 7))


def test_demonstrations_are_the_summaries_of_the_editor():
    rows = solo.demonstrations(CONFIG, TRAIN)
    pairs = writers.demonstrations(CONFIG, TRAIN)
    assert [text for _, _, text in rows] == [text for role, _, text in pairs if role == "editor"] and len(rows) > 55
    abstracts = {solo.prompt(CONFIG, task): task["text"] for task in TRAIN}
    for role, prompt, text in rows:
        assert role == "solo" and text[1:].rstrip(".") in " ".join(abstracts[prompt].split())


def test_the_environment_has_the_tasks_of_the_team():
    made, same = (
        EnvConfig(name, workers=0, eval_tasks=8).environment(3) for name in ("two_writers_solo", "two_writers")
    )
    assert (made.tasks, made.held_out) == (same.tasks, same.held_out) and len(made.held_out) == 8
    entry = made.strategy("solo", solo.prompt(CONFIG, TRAIN[0]), Action("A", ()), {"rougeL": 0.5})
    assert "(0.5) on '" in entry and entry in made.with_memory(solo.prompt(CONFIG, TRAIN[0]), [entry])[0].text


def test_an_episode_is_pure_and_ends():
    start = ENV.reset(0, TRAIN[0])
    before = pickle.dumps(start)
    done, _, _ = ENV.step(0, start, {"solo": Action("x", ())})
    assert pickle.dumps(start) == before and pickle.loads(pickle.dumps(done)) == done
    for state, actions in ((done, {"solo": Action("x", ())}), (start, {"editor": Action("x", ())})):
        with pytest.raises(ValueError, match="expected one action of 'solo'"):
            ENV.step(0, state, actions)
