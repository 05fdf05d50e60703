"""The writing environment: episodes, who reads what, demonstrations, rewards of the user, and its loaders."""

import json
import pickle
import random
import re
import shutil
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.writing import env as writing
from jaxmarl_llm.envs.writing import rewards as wr
from jaxmarl_llm.envs.writing import rouge, word_lists
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message
from jaxmarl_llm.rollout.make_runner import make_env_runner
from tests.envs.test_writing_rewards import CAT, DOG, SHIPPED, numbered

TASK = writing.tasks(writing.Config(count=1))[0]
SAID = {"concise": Action(TASK["targets"][0] + ".", (1, 2)), "detailed": Action(TASK["text"][:300] + ".", (3,))}


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
        expected = wr.tldr(*(a.text for a in SAID.values()), mode=config.reward, source=writing.given(TASK))
        expected |= rouge.rouge(SAID["concise"].text, TASK["targets"])
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


def test_a_text_that_the_limit_ended_pays_nothing_but_its_rouge():
    env = writing.make(writing.Config(max_turns=2, feedback="level"))
    cut = {role: action._replace(truncated=role == "detailed") for role, action in SAID.items()}
    state, got, _ = env.step(0, env.reset(0, TASK), cut)
    _, whole, _ = env.step(0, env.reset(0, TASK), SAID)
    assert sum(got["concise"][name] for name in wr.COMPONENTS) == 0.0 < whole["concise"]["words"]
    assert {k: got["concise"][k] for k in rouge.METRICS} == {k: whole["concise"][k] for k in rouge.METRICS}
    assert "A text does not end" in env.observe(state)["concise"][3].text


def test_rouge_is_logged_and_has_no_weight():
    for variant in ("smollm2", "tldr", "qwen3_1_7b"):
        assert not set(config_flags.load(f"magrpo:{variant}").reward) & set(rouge.METRICS)
    assert writing.make(writing.Config()).components == (*wr.COMPONENTS, *rouge.METRICS)
    assert writing.make(writing.Config(task="arxiv")).components == wr.COMPONENTS  # nobody wrote those introductions
    prompt = writing.observe(writing.Config(), writing.reset(writing.Config(), 0, TASK))["concise"]
    assert "(0.5)" in writing.strategy("concise", prompt, SAID["concise"], {"words": 0.5, "rouge1": 0.4})


def test_tasks_are_counted_filtered_and_ordered_by_the_seed():
    train, test = (writing.tasks(writing.Config(split=s)) for s in ("train", "test"))
    assert (len(train), len(test)) == (64, 32) and not {t["id"] for t in train} & {t["id"] for t in test}
    assert writing.tasks(writing.Config(count=5)) == train[:5]
    assert writing.tasks(writing.Config(seed=1)) != train
    short = writing.tasks(writing.Config(max_source=120))
    assert 0 < len(short) < 64 and all(len(t["text"].split()) <= 120 for t in short)
    with pytest.raises(ConfigError, match=r"count: expected at most 64, the texts of 100 to 300 words in .*, got 65"):
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
    env_runner = make_env_runner(EnvConfig("writing", {"max_turns": 2, "count": 8}, workers=0, eval_tasks=16))
    assert (env_runner.size, len(env_runner.held_out), env_runner.env.roles) == (8, 16, ("concise", "detailed"))
    env_runner.close()
    with pytest.raises(ConfigError, match=r"env\.args\.task: unknown value 'tl'"):
        EnvConfig("writing", {"task": "tl"}).check("env")


@pytest.mark.parametrize(
    "args, message",
    [
        ({"task": "poem"}, "config.env.args.task: unknown value 'poem'"),
        ({"reward": "stric"}, "did you mean 'strict'"),
        ({"band": "2025"}, "band"),
        ({"feedback": "expert"}, "feedback"),
        ({"min_words": 0}, "args.min_words: expected 1 to max_words=256, got 0"),
        ({"max_words": 7}, "args.min_words: expected 1 to max_words=7, got 8"),
        ({"min_source": 301}, "min_source"),
        ({"max_turns": 0}, "max_turns"),
        ({"count": -1}, "count"),
        ({"reward_components": ()}, "reward_components"),
    ],
)
def test_bad_settings_are_refused(args, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        from_dict(writing.Config, args, "config.env.args")
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
    with pytest.raises(ConfigError, match=r"^config\.env\.args\.reward_fn: expected .*scorers:") as error:
        from_dict(writing.Config, {"reward_fn": f"scorers:{name}"}, "config.env.args")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("path", ["nowhere_to_be_found:f", "scorers", "", ":f"])
def test_a_reward_that_cannot_be_imported_is_refused(scorers, path):
    with pytest.raises(ConfigError, match="expected module:function"):
        from_dict(writing.Config, {"reward_fn": path}, "config.env.args")


# -- word lists --------------------------------------------------------------------------------------------------------

LISTS = {
    "transitions": {"one": ["zip", "zap zop"], "two": ["Wug"], "three": ["om"]},
    "stopwords": ["Blick", "of", "zip"],
}
AS_TEXT = """# lists of a test
[transitions one]
zip
zap zop
[transitions two]
Wug   # in lower case
[transitions three]
om
[stopwords]
Blick
of
zip
"""


@pytest.fixture
def listed(tmp_path):
    paths = {name: tmp_path / name for name in ("lists.json", "lists.txt")}
    paths["lists.json"].write_text(json.dumps(LISTS), "utf-8")
    paths["lists.txt"].write_text(AS_TEXT, "utf-8")
    word_lists.read.cache_clear()
    return {name: str(path) for name, path in paths.items()}


def twin(task, c1, c2):
    """The official rule of both tasks by `LISTS`, written once more without the module's functions."""
    low, ratios, uniques, cap = {
        "tldr": (8, (1.1, 1.6, 3.2, 5.0), (1.3, 2.0, 1e99, 1e99), 0.03),
        "arxiv": (128, (0.8, 1.0, 1.3, 1.5), (0.5, 0.7, 1.3, 1.7), 0.23),
    }[task]

    def share(x, a, b, c, d):
        return 1.0 if b <= x <= c else (x - a) / (b - a) if x < b else 1 - (x - c) / (d - c)

    if not (low <= len(c1.split()) <= 256 and low <= len(c2.split()) <= 256):
        return 0.0
    total, q = 0.5, len(c2) / len(c1)
    if not ratios[0] <= q <= ratios[3]:
        return total
    total += share(q, *ratios)
    bags = [set(re.findall(r"\b\w+\b", c.lower())) for c in (c1, c2)]
    if not bags[0] or not uniques[0] <= len(bags[1]) / len(bags[0]) <= uniques[3]:
        return total
    total += 0.5 * share(len(bags[1]) / len(bags[0]), *uniques)
    text = (c2 if task == "tldr" else c1 + " " + c2).lower()
    count = ("zip" in text or "zap zop" in text) + ("wug" in text) + ("om" in text)
    total += 0.4 * min(1.0, 0.4 + 0.05 * (count - 1)) if count else 0.0
    one, two = (bag - {"blick", "of", "zip"} for bag in bags)
    return total + 0.6 * min(len(one & two) / len(one | two) if one | two else 1.0, cap) / cap


@pytest.mark.parametrize("name", ["lists.json", "lists.txt"])
def test_scores_follow_the_file_and_equal_a_twin(listed, name):
    """200 random ragged texts of each task: zero mismatches."""
    rng, differ, paid = random.Random(0), 0, 0
    vocabulary = [
        "zip",
        "zap zop",
        "WUG,",
        "zap",
        "home",
        "Blick",
        "of",
        "is",
        "however",
        *(f"w{i}" for i in range(90)),
    ]
    for task in ("tldr", "arxiv"):
        config = writing.Config(task=task, reward="parity", word_lists=listed[name])
        ours = writing.Config(task=task, reward="parity")
        for _ in range(200):
            length = rng.randint(6, 40) if task == "tldr" else rng.randint(120, 180)
            factor = rng.uniform(0.9, 5.0) if task == "tldr" else rng.uniform(0.7, 1.5)
            pool = rng.sample(vocabulary, rng.randint(3, len(vocabulary)))
            c1, c2 = (" ".join(rng.choices(pool, k=int(n))) for n in (length, length * factor))
            got, other = (sum(writing.judge(c, TASK | {"targets": []}, c1, c2).values()) for c in (config, ours))
            assert got == pytest.approx(twin(task, c1, c2), abs=1e-9), (c1, c2)
            differ, paid = differ + (abs(got - other) > 1e-9), paid + (got > 2)
    assert differ > 100 and paid > 100  # the lists matter, and the texts reach them


def test_strict_mode_reads_the_file_too(listed):
    lists = word_lists.read(listed["lists.json"])
    assert lists == word_lists.read(listed["lists.txt"]) and lists.stopwords == {"blick", "of", "zip"}
    assert wr._connectives(["however", "zap", "zop"], lists) == [(1, 3, "one")]
    assert word_lists.read(None) == wr.Lists()


@pytest.mark.parametrize(
    "file, content, message",
    [
        ("none.json", None, "cannot be read (No such file or directory)"),
        ("a.json", '{"stopwords": ["a"]}', "expected the lists transitions and stopwords, found no 'transitions'"),
        ("a.json", '{"transitions": {"a": ["b"]}, "stopwords": []}', "found no 'stopwords'"),
        ("a.json", '{"transitions": {"a": []}, "stopwords": ["a"]}', "with a phrase in each category"),
        ("a.json", '{"transitions": ["b"], "stopwords": ["a"]}', "expected category -> phrases"),
        ("a.json", '{"transitions": {"a": ["b"]}, "stopwords": [1]}', "expected words in 'stopwords'"),
        ("a.json", '{"transitions": {"a": ["b"]}, "stopwords": ["a"], "more": 1}', "found 'more' too"),
        ("a.json", "{\n", "line 2: not valid JSON"),
        ("a.json", "[]", "expected a JSON object"),
        ("a.txt", "[stopwords]\nthe", "found no 'transitions'"),
        ("a.txt", "[transitions a]\nb", "found no 'stopwords'"),
        ("a.txt", "the\n", "line 1: expected a heading such as [stopwords] before 'the'"),
        ("a.txt", b"\xff\xfe", "cannot be read (not UTF-8)"),
    ],
)
def test_bad_word_lists_are_one_line_with_the_key(tmp_path, file, content, message):
    path = tmp_path / file
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    word_lists.read.cache_clear()
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        from_dict(writing.Config, {"word_lists": str(path)}, "config.env.args")
    assert str(error.value).startswith(f"config.env.args.word_lists: {path}") and "\n" not in str(error.value)


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
        ("scitldr", Hub, "expected a folder with SciTLDR, its URL or a hub name"),
    ],
)
def test_data_that_cannot_be_had(monkeypatch, data, package, message):
    monkeypatch.setitem(sys.modules, "datasets", package)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        writing.tasks(writing.Config(data=data))
    assert "\n" not in str(error.value) and data in str(error.value)
