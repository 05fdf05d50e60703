"""Facts through text: search against slow twins, golden rewards, replies of all kinds, splits, wrong data, training."""

import dataclasses
import itertools
import json
import math
import pickle
import re
import shutil
import statistics
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.studies.red_team_facts import FACTS, played
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import bm25
from jaxmarl_llm.envs.facts import passages, pipeline, text
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.recipes import mmoa_rag
from jaxmarl_llm.training.optimizers import Optimizer
from tests.envs.first_steps import first_steps

CONFIG = text.Config()
ENV = text.make(CONFIG)
CORPUS = passages.corpus(None)
TASKS = {split: text.tasks(text.Config(split=split)) for split in passages.SPLITS}
EVERY = [task for rows in TASKS.values() for task in rows]


def act(state, reply, truncated=False, config=CONFIG):
    """The state after a reply, the role's own rewards, and those of all."""
    (role,) = text.observe(config, state)
    after, rewards, _ = text.step(config, 0, state, {role: Action(reply, (), truncated)})
    return after, rewards[role], rewards


# ---- search ----------------------------------------------------------------------------------------------------------


def slow_bm25(query, texts):
    """Lucene's BM25, one passage and one word of the query at a time, on arrays of words."""
    bags = [np.array(re.findall(r"\w+", text.lower()), dtype=object) for text in texts]
    mean = np.mean([len(bag) for bag in bags]) or 1.0
    out = np.zeros(len(texts))
    for place, bag in enumerate(bags):
        for word in re.findall(r"\w+", query.lower()):
            count, having = (bag == word).sum(), sum((other == word).any() for other in bags)
            rare = np.log(1 + (len(bags) - having + 0.5) / (having + 0.5))
            out[place] += rare * count / (count + 1.5 * (0.25 + 0.75 * len(bag) / mean))
    return out


WORDS = st.lists(st.sampled_from(["a", "b", "c", "d", "e", "Ä", "ß7", "I'm"]), max_size=9).map(" ".join)


@given(WORDS, st.lists(WORDS, min_size=1, max_size=7))
@settings(max_examples=150, deadline=None)
def test_scores_and_ranks_are_those_of_a_slow_twin(query, texts):
    want, counted = slow_bm25(query, texts), bm25.index(texts)
    assert bm25.bm25(query, counted) == pytest.approx(want) and bm25.bm25(query, texts) == pytest.approx(want)
    best = bm25.top(query, counted, 3)
    ranked = [want[i] for i in best]
    assert ranked == pytest.approx(sorted(want[want > 0], reverse=True)[:3]) and len(set(best)) == len(best)


@given(st.lists(WORDS, max_size=4), st.lists(WORDS, min_size=1, max_size=7, unique=True), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_the_best_passage_of_each_query_comes_before_the_second_ones(queries, texts, most):
    corpus = passages.Corpus(tuple(passages.Passage("", t) for t in texts), bm25.index(texts))
    want = []
    for rank in range(2):
        for query in queries:
            found = bm25.top(query, corpus.counted, 2)
            want += [i for i in found[rank : rank + 1] if i not in want]
    assert passages.retrieve(corpus, queries, 2, most) == tuple(want[:most])


def test_the_corpus_has_every_passage_once():
    """And a title finds its own passage, nearly always."""
    rows = [row for split in ("train", "test") for row in loaders.load("hotpotqa", split=split)[0]]
    pairs = {(title, " ".join(words.split())) for row in rows for title, words in row["passages"]}
    assert {*CORPUS.passages} == pairs and len(CORPUS.passages) == len(pairs) == 300
    found = [i in passages.retrieve(CORPUS, [p.title], 3, 6) for i, p in enumerate(CORPUS.passages)]
    assert np.mean(found) > 0.95


# ---- rewards ---------------------------------------------------------------------------------------------------------

GOLDEN = {"id": "x", "question": "who?", "answer": "one two three four five", "supporting": EVERY[0]["supporting"][:1]}
BRIEF = dataclasses.replace(CONFIG, answer_words=4)


def test_golden_rewards():
    """Five queries, a repeated number, five words of which three are right: F1 is .6, and .1, -.4 and -.4 are paid."""
    state = text.reset(0, GOLDEN)
    replies = (f"{GOLDEN['supporting'][0]}\na b\nb c\nc d\nd e", "0, 0", "one two three, 6 7!")
    own = []
    for reply in replies:
        state, paid, rewards = act(state, reply, config=BRIEF)
        own.append(paid)
    shared = {name: rewards[name]["f1"] for name in text.ROLES}
    assert shared == dict.fromkeys(text.ROLES, pytest.approx(0.6))
    total = [shared[role] + paid["penalty"] for role, paid in zip(text.ROLES, own, strict=True)]
    assert total == pytest.approx([0.1, -0.4, -0.4])
    assert [paid["format"] for paid in own] == [0, 0, 0] and [paid["turns"] for paid in own] == [1, 1, 1]
    assert [paid["evidence"] for paid in own] == [1, 1, 0]


def test_names_are_those_of_the_array_form():
    assert (ENV.roles, ENV.components) == (pipeline.ROLES, pipeline.COMPONENTS)
    assert CONFIG.penalties == pipeline.Settings().penalties


@pytest.mark.parametrize(
    "answer, gold, f1, em",
    [
        ("The Greenwich Village.", "Greenwich Village", 1, 1),
        ("Greenwich Village, New York City", "Greenwich Village, New York", 8 / 9, 0),
        ("yes", "yes", 1, 1),
        ("yes, both", "yes", 0, 0),
        ("", "yes", 0, 0),
        ("1990", "1991", 0, 0),
    ],
)
def test_answers(answer, gold, f1, em):
    state = text.State({**GOLDEN, "answer": gold}, turn=2)
    _, _, rewards = act(state, answer)
    for role in text.ROLES:
        assert (rewards[role]["f1"], rewards[role]["em"]) == (pytest.approx(f1), em)
    assert act(state, answer, truncated=True)[1] == {
        "f1": pytest.approx(f1), "em": 0, "penalty": -1, "evidence": 0, "format": 0, "turns": 1
    }  # fmt: skip


@pytest.mark.parametrize(
    "reply, queries, proper",
    [
        ("one\ntwo", ("one", "two"), True),
        ("  one \r\n\n two words  \n", ("one", "two words"), True),
        ("a\nb\nc\nd", ("a", "b", "c", "d"), True),
        ("a\nb\nc\nd\ne", ("a", "b", "c", "d"), False),
        ("", (), False),
        (" \n ", (), False),
        ("one\n???", ("one", "???"), False),
        ("x" * 400, ("x" * 400,), True),
        ("x" * 401, ("x" * 400,), False),
    ],
)
def test_queries_of_a_reply(reply, queries, proper):
    assert text.read_queries(CONFIG, reply) == (queries, proper)


@pytest.mark.parametrize(
    "reply, numbers, proper",
    [
        ("0, 3, 5", (0, 3, 5), True),
        ("5,0", (5, 0), True),
        (" 2 \n", (2,), True),
        ("none", (), True),
        ("None", (), True),
        ("", (), True),
        ("0, 0", (0,), False),
        ("0, 6", (0,), False),
        ("6", (), False),
        ("-1", (1,), False),
        ("01", (), False),
        ("1.", (1,), False),
        ("Passages 1 and 4 help.", (1, 4), False),
        ("0, 3,", (0, 3), False),
        ("0 3", (0, 3), False),
        ("²", (), False),
        ("٣", (), False),
        ("9" * 6000, (), False),
        ("all of them", (), False),
    ],
)
def test_numbers_of_a_reply(reply, numbers, proper):
    assert text.read_numbers(reply, 6) == (numbers, proper)


def test_evidence_counts_what_is_shown_and_what_is_kept():
    """Half where one of two supporting passages is there, none where nothing is kept; three passages are kept."""
    task = next(task for task in EVERY if task["supporting"][0] == "Local H")
    shown, own, _ = act(text.reset(0, task), "Local H")
    at = [CORPUS.passages[i].title for i in shown.shown].index("Local H")
    assert own["evidence"] == 0.5 and len(shown.shown) == 3
    assert [act(shown, reply)[1]["evidence"] for reply in (str(at), "none", "0, 1, 2")] == [0.5, 0, 0.5]
    whole, own, _ = act(text.reset(0, task), "\n".join(task["supporting"]))
    kept, _, _ = act(whole, "5, 4, 3, 2, 1, 0")
    assert own["evidence"] == 1 and kept.kept == whole.shown[:2:-1] and len(kept.kept) == 3


SCRAPS = [
    *(",", "0", "1", "5", "6", "99", "?", ":", ".", "none", "\0", "\ud800", "\u202e", "²"),
    *("\n", "the", "yes", "Local H", "South Korean boy group", "director of the film", "x" * 500),
    *("FIRST", "SECOND", "ANSWER"),  # for titles and answer of the task
]
NUMBERS = st.lists(st.integers(0, 6), max_size=7).map(lambda numbers: ", ".join(map(str, numbers)))
REPLIES = st.lists(st.sampled_from(SCRAPS), max_size=12).map(" ".join) | NUMBERS


@given(st.integers(0, len(EVERY) - 1), st.tuples(REPLIES, REPLIES, REPLIES), st.tuples(*3 * [st.booleans()]))
@settings(max_examples=150, deadline=None)
def test_nothing_that_a_model_writes_is_invalid(which, replies, cut):
    """Every reward is finite. Evidence is what a reader of the prompts counts, and a penalty is paid out of form."""
    task, state = EVERY[which], text.reset(0, EVERY[which])
    known = {"FIRST": task["supporting"][0], "SECOND": task["supporting"][1], "ANSWER": task["answer"]}
    for role, reply, truncated, penalty in zip(text.ROLES, replies, cut, (0.5, 1, 1), strict=True):
        state, own, rewards = act(state, re.sub("[A-Z]{5,}", lambda found: known[found[0]], reply), truncated)
        assert all(math.isfinite(value) for values in rewards.values() for value in values.values())
        assert own["penalty"] == -penalty * (1 - own["format"]) and own["format"] <= (not truncated)
        if role != "generator":
            (prompt,) = text.observe(CONFIG, state).values()
            lines = [re.sub(r"^\d\. ", "", line) for line in prompt[1].text.split("\n")[2:]]
            share = np.mean([any(line.startswith(f"{title}: ") for line in lines) for title in task["supporting"]])
            assert own["evidence"] == share and len(lines) <= (6 if role == "rewriter" else 3)
        assert all("f1" not in values for values in rewards.values()) or role == "generator"


# ---- prompts and episodes --------------------------------------------------------------------------------------------


def test_what_each_role_reads():
    task = next(task for task in EVERY if text.play(CONFIG, task)[1][2].count(",") == 1)
    said = text.play(CONFIG, task)
    asked = f"Question: {task['question']}"
    (_, rewriter, queries), (_, selector, numbers), (_, generator, answer) = said
    assert rewriter[1].text == asked and queries == "\n".join(task["supporting"]) and answer == task["answer"]
    shown, kept = (prompt[1].text.split("\n") for prompt in (selector, generator))
    assert shown[:2] == kept[:2] == [asked, "Passages:"]
    assert [line[:3] for line in shown[2:]] == [f"{i}. " for i in range(len(shown) - 2)] and len(shown) > 4
    assert [shown[2 + int(number)][3:] for number in numbers.split(", ")] == kept[2:]
    assert {line.partition(":")[0] for line in kept[2:]} == {*task["supporting"]}
    assert all(len(line) <= 3 + 100 + 400 + len(" [cut]") for line in shown) and any("[cut]" in line for line in shown)
    nothing, _, _ = act(text.reset(0, task), "zzzz")
    assert text.observe(CONFIG, nothing)["selector"][1].text == f"{asked}\nPassages:\nnone"


def test_the_reference_earns_all_and_prompts_are_short():
    evidence = []
    for task in EVERY:
        state = text.reset(0, task)
        for role, prompt, reply in text.play(CONFIG, task):
            assert sum(len(message.text) for message in prompt) < 3000
            state, own, rewards = act(state, reply)
            assert own["penalty"] == 0 and own["format"] == 1
            evidence += [own["evidence"]] * (role == "selector")
        assert all(values["f1"] == values["em"] == 1 for values in rewards.values())
    assert np.mean(evidence) > 0.9


def test_states_are_small_and_go_to_workers_and_back():
    state, _, _ = act(text.reset(0, EVERY[0]), EVERY[0]["question"])
    assert pickle.loads(pickle.dumps(state)) == state and len(pickle.dumps(state)) < 2000
    env = pickle.loads(pickle.dumps(ENV))
    assert env.observe(state) == ENV.observe(state)
    with pytest.raises(ValueError, match="expected one action of the role that acts"):
        ENV.step(0, state, {"rewriter": Action("x", ())})


def test_a_worker_does_not_load_jax():
    code = "import sys, jaxmarl_llm.envs.facts.text; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_person_may_ask():
    state = text.reset(0, text.ask(CONFIG, "Who directed\nBadlands?"))
    for reply in ("Badlands", "0", "Malick"):
        assert "Question: Who directed Badlands?" in next(iter(text.observe(CONFIG, state).values()))[1].text
        state, rewards, done = text.step(CONFIG, 0, state, {text.ROLES[state.turn]: Action(reply, ())})
        assert rewards == {}
    assert done and text.hears("selector", (), "rewriter", "") and not text.hears("generator", (), "rewriter", "")


def test_a_memory_entry_has_question_reply_and_f1():
    prompt = text.observe(CONFIG, text.reset(0, GOLDEN))["rewriter"]
    assert (
        text.strategy("rewriter", prompt, Action("a\nb", ()), {"f1": 0.6}) == "rewriter (0.6) on 'Question: who?': a b"
    )


# ---- data ------------------------------------------------------------------------------------------------------------


def test_parts_of_the_data_share_no_question():
    plain = {split: {loaders.content(task["question"]) for task in rows} for split, rows in TASKS.items()}
    assert {split: len(rows) for split, rows in plain.items()} == {"train": 15, "validation": 8, "test": 7}
    assert len(set().union(*plain.values())) == 30
    order = [task["id"] for task in text.tasks(text.Config(seed=1))]
    assert order != [task["id"] for task in TASKS["train"]] and sorted(order) == sorted(t["id"] for t in TASKS["train"])


def test_the_shares_of_the_parts():
    """By the hashes alone, on many made-up questions."""
    rows = [(f"row {i}", {"id": str(i), "question": f"question {i}"}) for i in range(3000)]
    train, test = (loaders._hashed(rows, split, "", "question") for split in ("train", "test"))
    aside = sum(passages.is_held_out(task["question"]) for _, task in train)
    assert [len(train) - aside, aside, len(test)] == pytest.approx([1800, 600, 600], abs=75)


def folder(tmp_path, change):
    """A copy of the samples whose rows ``change`` has changed."""
    shutil.copytree(loaders.FIXTURES / "hotpotqa", tmp_path / "hotpotqa")
    path = tmp_path / "hotpotqa" / "dev_distractor_slice.json"
    rows = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(change(rows)), "utf-8")
    return str(tmp_path)


def without(rows, *keys):
    for key in keys[:-1]:
        rows = rows[key]
    rows.pop(keys[-1])


BAD_ROWS = [
    (lambda rows: without(rows, 1, "answer"), "row 2: field 'answer' is missing"),
    (lambda rows: without(rows, 0, "context", "title", 0), "row 1: field 'context' needs as many titles"),
    (lambda rows: rows[2]["supporting_facts"].update(title=[]), "row 3: field 'supporting_facts' needs titles that"),
    (lambda rows: rows[2]["supporting_facts"].update(title=["?"]), "row 3: field 'supporting_facts' needs titles that"),
    (lambda rows: rows.clear(), "expected a filled list"),
]


@pytest.mark.parametrize("change, message", BAD_ROWS, ids=[message for _, message in BAD_ROWS])
def test_wrong_data_are_one_line(tmp_path, change, message):
    config = text.Config(data_dir=folder(tmp_path, lambda rows: change(rows) or rows))
    with pytest.raises(ConfigError) as error:
        text.tasks(config)
    assert message in str(error.value) and "dev_distractor_slice.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_answer_without_a_word_is_left_out_and_counted(tmp_path):
    """The empty reply would be right."""
    first = TASKS["train"][0]["question"]
    change = lambda rows: [{**row, "answer": "The"} if row["question"] == first else row for row in rows]
    kept, source = passages.questions(folder(tmp_path, change), "train", 0)
    assert len(kept) == 14 and source.endswith("without 1 whose answer has no word")


def test_an_empty_part_is_one_line(tmp_path):
    """No question of training is left for validation."""
    aside = {task["question"] for task in TASKS["validation"]}
    data = folder(tmp_path, lambda rows: [row for row in rows if row["question"] not in aside])
    assert len(text.tasks(text.Config(data_dir=data))) == 15
    with pytest.raises(ConfigError, match=r"^config\.env\.args\.split: expected a part with .*'validation'.*$"):
        text.tasks(text.Config(data_dir=data, split="validation"))


BAD = [
    ({"split": "dev"}, r"^config\.env\.args\.split: unknown value 'dev'"),
    ({"kept": 7}, r"^config\.env\.args\.kept: expected 1 to 6, got 7$"),
    ({"penalties": (0.5, -1.0, 1.0)}, r"^config\.env\.args\.penalties: expected three finite numbers"),
    ({"results": 0}, r"^config\.env\.args\.results: expected 1 to 100, got 0$"),
    ({"answer_words": 0}, r"^config\.env\.args\.answer_words: expected 1 to"),
]


@pytest.mark.parametrize("args, message", BAD, ids=[str(args) for args, _ in BAD])
def test_wrong_settings_are_one_line(args, message):
    with pytest.raises(ConfigError, match=message):
        EnvConfig("facts_text", args).build()


def test_more_tasks_than_there_are_and_no_data():
    with pytest.raises(ConfigError, match=r"^config\.env\.args\.count: expected at most 15, .*, got 16$"):
        EnvConfig("facts_text", {"count": 16}).environment(0)
    assert len(EnvConfig("facts_text", {"count": 2}, workers=0).environment(0).tasks) == 2
    with pytest.raises(ConfigError, match="no such folder"):
        EnvConfig("facts_text", {"data_dir": "/nowhere"}).environment(0)


# ---- degenerate strategies and training ------------------------------------------------------------------------------


def test_degenerate_answers_have_a_quarter_of_the_f1_of_the_reference():
    """Even where the other roles are perfect. Perfect answers behind replies out of form keep what is not penalised."""
    assert len(FACTS) >= 15
    for name, team in FACTS.items():
        rows = [played(CONFIG, task, team) for task in EVERY]
        f1, paid = (statistics.mean(row[key] for row in rows) for key in ("f1", "return"))
        assert f1 < 0.25 if team.generator is not None else f1 == 1, name
        assert paid < 0.85, name


def test_a_random_model_takes_two_steps_of_mmoa_rag(tmp_path):
    """The model moves at each, nothing is invalid, and no prompt is cut."""
    cfg = dataclasses.replace(
        mmoa_rag.Config(),
        steps=2,
        batch=2,
        group=2,
        team=TeamConfig(
            backbone=Backbone(
                hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8
            ),
            **dict(parameter_sharing="shared", critic="head", max_new_tokens=3, remat=False),
        ),
        env=EnvConfig("facts_text", {"passage_chars": 9, "documents": 3}, workers=0, max_prompt=512, eval_tasks=2),
        optimizer=Optimizer(learning_rate=1e-3),
    )
    cfg.check("config")
    recipe = mmoa_rag.make(cfg)
    states, rows = first_steps(recipe, tmp_path, 2)
    for row in rows:
        assert row["count/invalid"] == 0 and row["count/cut_prompts"] == 0 and row["logprob_diff"] < 1e-4
        assert np.isfinite(row["reward/f1"]) and row["reward/penalty"] < 0
    for before, after in itertools.pairwise(states):
        leaves = zip(*(jax.tree.leaves(state.params["agents"]) for state in (before, after)))
        assert any(not np.array_equal(a, b) for a, b in leaves)
