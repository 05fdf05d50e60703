"""The writing environment: episodes, who reads what, demonstrations, rewards of the user, and its loaders."""

import json
import pickle
import re
import shutil
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_writing_rewards import CAT, DOG, SHIPPED, numbered

from jaxmarl_llm.arena import EnvConfig, HostArena
from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import writing
from jaxmarl_llm.envs import writing_rewards as wr
from jaxmarl_llm.text import Action, ConfigError, Message

TASK = writing.tasks(writing.Config(count=1))[0]
SAID = {"concise": Action(TASK["targets"][0], (1, 2)), "detailed": Action(TASK["text"][:300], (3,))}


def act(env, state, **texts):
    return env.step(0, state, {role: Action(text, (5, 6)) for role, text in texts.items()})


@pytest.mark.parametrize("args", [{}, {"max_turns": 3, "feedback": "level"}, {"max_turns": 2, "reward": "parity"}])
def test_an_episode(args):
    config = writing.Config(**args)
    env = writing.make(config)
    state, done, turns = env.reset(0, TASK), False, 0
    while not done:
        assert set(env.observe(state)) == set(env.roles)
        before = pickle.dumps(state)
        new, got, done = env.step(turns, state, SAID)
        assert (new, got, done) == env.step(turns, state, SAID)  # stepping again gives the same
        assert pickle.dumps(state) == before and pickle.loads(pickle.dumps(new)) == new
        expected = wr.tldr(*(a.text for a in SAID.values()), mode=config.reward, source=TASK["text"])
        assert got == {role: expected for role in env.roles} == env.verify(new)
        state, turns = new, turns + 1
    assert turns == env.max_turns and len(state.threads[0]) == 2 + 2 * turns - 1
    with pytest.raises(ValueError, match="unfinished"):
        env.step(0, state, SAID)


def test_who_reads_what():
    env = writing.make(writing.Config(max_turns=2, min_words=9))
    seen = env.observe(env.reset(0, TASK))
    assert [m.speaker for m in seen["concise"]] == ["system", "user"] and "9 to 256 words" in seen["concise"][0].text
    assert seen["concise"] != seen["detailed"] and TASK["text"] in seen["detailed"][1].text
    assert not any(t in m.text for t in TASK["targets"] for p in seen.values() for m in p)  # the gold text is not shown
    state, _, _ = env.step(0, env.reset(0, TASK), SAID)
    later = env.observe(state)
    for role, prompt in later.items():
        assert prompt[:2] == seen[role] and prompt[2] == SAID[role].message(role)  # token in, token out
        assert prompt[3] == Message("user", "Revise your text.") and len(prompt) == 4
    with pytest.raises(ValueError, match="one action each"):
        env.step(0, state, {"concise": SAID["concise"]})
    scripted, _, _ = env.step(0, env.reset(0, TASK), {r: Action(a.text, ()) for r, a in SAID.items()})
    assert env.observe(scripted)["concise"][2] == Message("assistant", SAID["concise"].text)


@given(st.text(max_size=200), st.text(max_size=200))
def test_agents_do_not_read_each_other(one, other):
    """Nothing but the joint feedback depends on what the partner wrote."""
    for feedback in ("plain", "level"):
        env = writing.make(writing.Config(max_turns=2, feedback=feedback))
        start = env.reset(0, TASK)
        for mine, partner in (("concise", "detailed"), ("detailed", "concise")):
            states = [act(env, start, **{mine: "my words", partner: t})[0] for t in (one, other)]
            a, b = (env.observe(s)[mine] for s in states)
            assert a[:3] == b[:3] and (feedback == "level" or a == b)
            joint = [{p[3] for p in env.observe(s).values()} for s in states]
            assert all(len(j) == 1 for j in joint)  # both roles are told the same


def test_level_feedback_names_what_was_missed():
    config = writing.Config(max_turns=2, feedback="level", reward="parity")
    told = lambda c1, c2, **kw: writing.advice(writing.Config(**{"reward": "parity"} | kw), TASK, c1, c2)
    assert told("short", DOG) == ["Each text needs 8 to 256 words."]
    (ratio,) = told(CAT, CAT)
    assert "1.6 to 3.2 times as long as the concise one; it has too little" in ratio
    assert "too much" in told(CAT, numbered("w", 0, 200))[0]
    unique, transitions = told(CAT, DOG)
    assert "at least 2 times as many different words" in unique and "transition" in transitions
    strict = told(TASK["text"], TASK["text"], reward="strict")
    assert {"The two texts say the same words.", "A text copies what was given."} <= set(strict)
    env = writing.make(config)
    state, _, _ = act(env, env.reset(0, TASK), concise=CAT, detailed=CAT)
    assert env.observe(state)["concise"][3].text == f"{ratio} Revise your text."


def test_tasks_are_counted_filtered_and_ordered_by_the_seed():
    train, test = (writing.tasks(writing.Config(split=s)) for s in ("train", "test"))
    assert (len(train), len(test)) == (64, 32) and not {t["id"] for t in train} & {t["id"] for t in test}
    assert writing.tasks(writing.Config(count=5)) == train[:5]
    assert writing.tasks(writing.Config(seed=1)) != train
    short = writing.tasks(writing.Config(max_source=120))
    assert 0 < len(short) < 64 and all(len(t["text"].split()) <= 120 for t in short)
    with pytest.raises(ConfigError, match="64 texts of 100 to 300 words, 65 asked for"):
        writing.tasks(writing.Config(count=65))


@pytest.mark.parametrize("args", SHIPPED.values(), ids=SHIPPED)
def test_demonstrations_are_what_the_roles_read_and_are_paid(args):
    config = writing.Config(**args)
    tasks = writing.tasks(config)
    samples = writing.demonstrations(config, tasks)
    prompts = {p for t in tasks for p in writing.observe(config, writing.reset(config, 0, t)).items()}
    assert len(samples) >= 100 and {(role, prompt) for role, prompt, _ in samples} <= prompts
    low, high = config.limits
    assert all(low <= len(text.split()) <= high for _, _, text in samples)


def test_memory_and_strategies():
    prompt = writing.observe(writing.Config(), writing.reset(writing.Config(), 0, TASK))["concise"]
    added = writing.with_memory(prompt, ["one", "two"])
    assert added[1:] == prompt[1:] and added[0].text.endswith("- one\n- two")
    text = writing.strategy("concise", prompt, SAID["concise"], {"words": 0.5, "ratio": 1.0})
    assert len(writing.strategy("concise", prompt, Action("word " * 90, ()), {})) == 200
    assert text.startswith("concise (1.5) on '") and len(text) <= 200 and "\n" not in text


def test_the_arena_holds_it():
    arena = HostArena(EnvConfig("writing", {"max_turns": 2, "count": 8}, workers=0, eval_tasks=16))
    assert (arena.size, len(arena.held_out), arena.env.roles) == (8, 16, ("concise", "detailed"))
    arena.close()
    with pytest.raises(ConfigError, match=r"env\.args\.task: unknown value 'tl'"):
        EnvConfig("writing", {"task": "tl"}).check("env")


@pytest.mark.parametrize(
    "args, message",
    [
        ({"task": "poem"}, "task: unknown value 'poem'"),
        ({"reward": "stric"}, "did you mean 'strict'"),
        ({"band": "2025"}, "band"),
        ({"feedback": "expert"}, "feedback"),
        ({"min_words": 0}, "1 <= min_words <= max_words, got 0 and 256"),
        ({"max_words": 7}, "got 8 and 7"),
        ({"min_source": 301}, "min_source"),
        ({"max_turns": 0}, "max_turns"),
        ({"count": -1}, "count"),
        ({"reward_components": ()}, "reward_components"),
    ],
)
def test_bad_settings_are_refused(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        writing.Config(**args)
    assert "\n" not in str(error.value)


# -- rewards of the user -----------------------------------------------------------------------------------------------


@pytest.fixture
def scorers(monkeypatch):
    module = types.ModuleType("scorers")
    module.two = lambda c1, c2: float(len(c1) - len(c2))
    module.three = lambda c1, c2, task: {"a": float(len(task["text"])), "b": 0.5}
    module.optional = lambda c1, c2, task=None: 1.0 if task else 0.0
    module.many = lambda *texts: float(len(texts))
    module.one = lambda c1: 0.0
    module.agents = lambda c1, c2, c3: 0.0
    module.four = lambda c1, c2, task, more: 0.0
    module.keyword = lambda c1, c2, *, key: 0.0
    module.nothing = None
    monkeypatch.setitem(sys.modules, "scorers", module)
    writing.reward_function.cache_clear()
    yield module
    writing.reward_function.cache_clear()


def test_a_reward_of_ones_own(scorers):
    def components(name, **kwargs):
        env = writing.make(writing.Config(reward_fn=f"scorers:{name}", **kwargs))
        _, got, _ = act(env, env.reset(0, TASK), concise="four", detailed="sixsix")
        assert got["concise"] == got["detailed"] and set(got["concise"]) <= set(env.components)
        return got["concise"]

    assert components("two") == {"reward": -2.0}
    assert components("three", reward_components=("a", "b")) == {"a": float(len(TASK["text"])), "b": 0.5}
    assert components("optional") == {"reward": 1.0} and components("many") == {"reward": 2.0}
    env = writing.make(writing.Config(reward_fn="scorers:two", max_turns=2, feedback="level"))
    state, _, _ = act(env, env.reset(0, TASK), concise="four", detailed="sixsix")
    assert env.observe(state)["concise"][3].text == "Joint score: reward -2.00. Revise your text."


@pytest.mark.parametrize("name", ["one", "agents", "four", "keyword", "nothing", "missing"])
def test_a_reward_of_another_shape_is_refused_before_any_rollout(scorers, name):
    with pytest.raises(ConfigError, match="reward_fn 'scorers:") as error:
        writing.make(writing.Config(reward_fn=f"scorers:{name}"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["nowhere_to_be_found:f", "scorers", "", ":f"])
def test_a_reward_that_cannot_be_imported_is_refused(scorers, path):
    with pytest.raises(ConfigError, match="expected module:function"):
        writing.make(writing.Config(reward_fn=path))


# -- data --------------------------------------------------------------------------------------------------------------


def test_the_sample_carries_its_licence():
    folder = loaders.FIXTURES / "scitldr"
    assert "Apache License" in (folder / "LICENSE").read_text("utf-8")
    assert "licence: Apache-2.0" in (folder / "SOURCE.txt").read_text("utf-8")
    assert sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) < 250_000


def test_a_directory_holds_or_is_the_folder(tmp_path):
    shutil.copytree(loaders.FIXTURES / "scitldr", tmp_path / "scitldr")
    shutil.copytree(loaders.FIXTURES / "scitldr", tmp_path / "mine")
    ids = [t["id"] for t in writing.tasks(writing.Config())]
    for data in (tmp_path, tmp_path / "scitldr", tmp_path / "mine"):
        found = writing.tasks(writing.Config(data=str(data)))
        assert [t["id"] for t in found] == ids and str(data) in found[0]["source"]


def row(**changes):
    return json.dumps({"source": ["A b."], "target": ["c"], "title": "t", "paper_id": "p"} | changes)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "empty"),
        (row() + "\n{oops", "line 2: not valid JSON"),
        (row() + "\n" + row(), "line 2: field 'id': 'p' is a duplicate"),
        (row(source="A b."), "line 1: field 'source' must be a filled list"),
        (row(source=[]), "line 1: field 'source' must be a filled list of str"),
        (row(target=[1]), "line 1: field 'target' must be a filled list of str"),
        (row(target=[" "]), "line 1: the text and its summaries must not be blank"),
        (row(paper_id=""), "line 1: field 'paper_id' must be a filled str"),
        ("[1]", "line 1: field 'paper_id' is missing"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    path = tmp_path / "SciTLDR-A" / "train.jsonl"
    path.parent.mkdir()
    path.write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        writing.tasks(writing.Config(data=str(tmp_path)))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


HUB_ROWS = {
    "trl-lib/tldr": {"prompt": "TITLE: t\n\nPOST: my cat ran.\n\nTL;DR:", "completion": " cat ran"},
    "OpenMLRL/arXiv_abstract": {"abstract_text": "<S> my cat ran . </S> <S> away . </S>"},
    "some/papers": {"source": ["My cat ran."], "target": ["Cat ran."], "title": "Cats"},
}


class Hub:
    """Stands in for the `datasets` package."""

    @staticmethod
    def load_dataset(name, config, split):
        if name not in HUB_ROWS:
            raise ConnectionError(f"no {name}\nand a second line")
        rows = type("Rows", (list,), {"info": types.SimpleNamespace(version=split)})
        return rows([HUB_ROWS[name]])


@pytest.mark.parametrize("name", HUB_ROWS)
def test_data_of_the_hub(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "datasets", Hub)
    (task,) = writing.tasks(writing.Config(data=name, split="test", min_source=1))
    assert "cat ran" in task["text"] and "<S>" not in task["text"] and "TL;DR" not in task["text"]
    assert task["targets"] == {"t": ["cat ran"], "O": [], "s": ["Cat ran."]}[name[0]]
    assert task["source"].startswith(f"hub {name} ({'val' if name[0] == 'O' else 'test'})")  # arXiv has no test split
    (prompt, _) = writing.observe(writing.Config(), writing.reset(writing.Config(), 0, task)).values()
    assert prompt[1].text.strip() == prompt[1].text


@pytest.mark.parametrize(
    "data, package, message",
    [
        ("trl-lib/tldr", None, "jaxmarl_llm[hf]"),
        ("trl-lib/tldrr", Hub, "hub trl-lib/tldrr, split train: cannot be had (ConnectionError: no trl-lib/tldrr)"),
        ("/nowhere/at/all", Hub, "no such folder"),
        ("scitldr", Hub, "expected a folder with SciTLDR or a hub name"),
    ],
)
def test_data_that_cannot_be_had(monkeypatch, data, package, message):
    monkeypatch.setitem(sys.modules, "datasets", package)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        writing.tasks(writing.Config(data=data))
    assert "\n" not in str(error.value) and data in str(error.value)
