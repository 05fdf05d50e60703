"""Function calls by a team: rules by hand, values of BFCL, routes, conventions, splits, wrong data, training."""

import dataclasses
import itertools
import json
import os
import pickle
import re
import shutil
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.joyagents_r1 import get_config
from jaxmarl_llm.data import call_sets, loaders
from jaxmarl_llm.envs.assistant.function_calls import call_score
from jaxmarl_llm.envs.call_team import calls, conventions, env, prompts
from jaxmarl_llm.envs.call_team import tasks as call_tasks
from jaxmarl_llm.envs.call_team.specialists import SPECIALISTS, owner
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.recipes import joyagents_r1
from tests.envs.first_steps import first_steps

DATA = Path(os.environ.get("JAXMARL_DATA", "data"))
CONFIG = env.Config()
ENV = env.make(CONFIG)
TASKS = {split: env.tasks(env.Config(split=split)) for split in ("train", "test")}
EVERY = [*TASKS["train"], *TASKS["test"]]
GOVERNED = {split: env.tasks(env.Config(split=split, conventions=True)) for split in ("train", "test")}

ROUTE = {"properties": {"start": {"type": "string"}, "miles": {"type": "integer"}, "tolls": {"type": "boolean"}}}
ANSWERS = {"start": ["New York", "NYC"], "miles": [3], "tolls": [False, ""]}
TASK = {
    "id": "by hand",
    "source": "bfcl",
    "query": "Drive three miles from New York",
    "name": "maps.route",
    "functions": [
        {"name": "maps.route", "owner": "places", **ROUTE, "required": ["start", "miles"]},
        {"name": "sum", "owner": "maths", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    ],
    "specialist": "places",
    "answers": ANSWERS,
    "governed": [],
    "unseen_function": True,
}
RIGHT = 'maps.route(start="New York", miles=3)'


def played(task, *replies):
    """The components that an episode pays in all, and whether it has ended."""
    state, total, done = env.reset(0, task), dict.fromkeys(env.COMPONENTS, 0.0), False
    for reply in replies:
        (role,) = env.observe(state)
        state, rewards, done = env.step(0, state, {role: Action(reply, ())})
        assert not rewards or set(rewards) == set(env.make(CONFIG).roles)
        for name, value in rewards.get(role, {}).items():
            total[name] += value
    return total, done


# ---- the written form ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("f()", ("f", {})),
        (' f( a = 1 ,b="x, y)" ) and more', ("f", {"a": 1, "b": "x, y)"})),
        ("a.b_c(x=-1.5e2, y=[1, [2]], z=null)", ("a.b_c", {"x": -150.0, "y": [1, [2]], "z": None})),
        ("f(a=True, b=None, c='it', d=false)", ("f", {"a": True, "b": None, "c": "it", "d": False})),
        ("f(a=1) g(b=2)", ("f", {"a": 1})),
        ('f(a="\\u00e9")', ("f", {"a": "é"})),
        ('f(a={"b": 1})', ("f", {"a": {"b": 1}})),
    ],
)
def test_a_call_is_read(text, call):
    assert calls.read(text) == call


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected name"),
        ("f", "expected name"),
        ("I call f(a=1)", "expected name"),
        ('{"name": "f", "arguments": {}}', "expected name"),
        ("f(", "expected argument=value"),
        ("f(1)", "expected argument=value"),
        ("f(a=1, )", "expected argument=value"),
        ("f(a=)", "argument a"),
        ("f(a=x)", "argument a"),
        ("f(a=1 b=2)", "argument a: expected , or )"),
        ("f(a=1, a=1)", "argument a is given twice"),
        ('f(a={"b": 1, "b": 2})', "argument a: a key is given twice"),
        ("f(a=NaN)", "argument a: NaN is not allowed"),
        ("f(a=1e999)", "argument a: a number is too large"),
        ("f(a=" + "9" * 3000, "argument a: expected , or )"),
        ("f(a=" + "[" * 50 + ")", "nested deeper"),
        ('f(a="' + "x" * 5000, "argument a"),
    ],
)
def test_what_is_no_call_has_a_reason(text, why):
    assert isinstance(calls.read(text), str) and why in calls.read(text)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.text("f(a=1,\"'[]{}) .e9-TrueNone\\u", max_size=60).map(lambda t: f"f({t}"))
def test_any_text_is_paid(text):
    """No reply raises; every component is a finite number."""
    for replies in ((text,), ("places", text)):
        paid, done = played(TASK, *replies)
        assert done or text.strip() in SPECIALISTS
        assert all(0 <= value <= 1 for value in paid.values())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True), values, max_size=4))
def test_a_written_call_is_read_back(arguments):
    assert calls.read(calls.write("a.b", arguments)) == ("a.b", arguments)


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (RIGHT, 1.0),
        ('maps.route(miles=3, start="nyc")', 1.0),  # another allowed value; BFCL ignores case
        ('maps.route(start="New York", miles=3, tolls=false)', 1.0),  # may be there
        ('maps.route(start="New York", miles=3, tolls=true)', 0.5),  # but not with another value
        ('maps.route(start="New York", miles=4)', 0.5),
        ('maps.route(start="New York", miles="3")', 0.5),  # a text is no integer
        ('maps.route(start="New York")', 0.5),
        ('maps.route(start="New York", speed=3)', 0.0),  # one of two, less one
        ('maps.route(start="New York", miles=3, speed=9)', 0.5),
        ('maps.route(start="New York", miles=3, x=1, y=1, z=1)', 0.0),  # not below 0
        ("maps.route()", 0.0),
        ("maps.route", 0.0),
        ("sum(a=3)", 0.0),
        ('maps.routes(start="New York", miles=3)', 0.0),
    ],
)
def test_rewards_by_hand(reply, score):
    paid, done = played(TASK, "places", reply)
    assert done and paid["call"] == score and paid["exact"] == paid["exact_unseen"] == float(score == 1)
    assert paid["routed"] == 1 and paid["unseen_function"] == 1 and paid["convention"] == paid["convention_met"] == 0
    assert paid["function"] == float(reply.startswith("maps.route("))
    assert paid["malformed"] == float(reply == "maps.route")


def test_a_gold_call_without_needed_arguments():
    grade = lambda arguments: calls.grade(("f", arguments), "f", {"a": [1, ""]}, {"properties": {"a": {}}}).score
    assert (grade({}), grade({"a": 1}), grade({"a": 2}), grade({"b": 1})) == (1, 1, 0, 0)
    needed = {"properties": {"a": {}}, "required": ["a"]}  # the schema requires what the answers leave open
    assert calls.grade(("f", {}), "f", {"a": [1, ""]}, needed).score == 0


def test_an_exact_call_of_a_seen_function_is_no_unseen_one():
    paid, _ = played(TASK | {"unseen_function": False}, "places", RIGHT)
    assert (paid["exact"], paid["unseen_function"], paid["exact_unseen"]) == (1, 0, 0)


def test_several_values_of_bfcl():
    """Golden answers of the package's rows: each allowed value is accepted, and others are not."""
    rows = {row["id"]: row for row in call_sets.bfcl_calls(loaders.FIXTURES)}
    count = 0
    for row in rows.values():
        schema = next(f["parameters"] for f in row["functions"] if f["name"] == row["name"])
        gold = calls.gold_arguments(row["answers"], schema.get("required", ()))
        for key, allowed in row["answers"].items():
            for value in allowed:
                if value == "" or isinstance(value, dict) or (isinstance(value, list) and any(value) is dict):
                    continue
                told = (row["name"], gold | {key: value})
                count += len(allowed) > 1
                graded = calls.grade(told, row["name"], row["answers"], schema)
                whole = call_score(row["functions"], [told], [{row["name"]: row["answers"]}])
                assert graded.exact == (whole == 1.0), told
            told = (row["name"], gold | {key: "no such value"})
            assert not calls.grade(told, row["name"], row["answers"], schema).exact
    assert count > 50


def test_a_score_is_one_exactly_where_bfcl_accepts_the_call():
    rng, seen = np.random.default_rng(0), set()
    for task in EVERY:
        schema = next(f for f in task["functions"] if f["name"] == task["name"])
        functions = [{"name": task["name"], "parameters": schema}]
        gold = calls.gold_arguments(task["answers"], schema["required"])
        for _ in range(6):
            made = {k: v for k, v in gold.items() if rng.random() < 0.8}
            if rng.random() < 0.3:
                made[rng.choice([*schema["properties"], "other"])] = ["x", 1, True, [1]][rng.integers(4)]
            score = calls.grade((task["name"], made), task["name"], task["answers"], schema).score
            twin = call_score(functions, [(task["name"], made)], [{task["name"]: task["answers"]}])
            assert 0 <= score <= 1 and (score == 1) == (twin == 1)
            seen.add(score)
    assert {0, 1} < seen


# ---- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", ["", "place", "places, maths", "Places", "master", "I choose places.", RIGHT])
def test_a_name_outside_the_list_ends_the_episode(reply):
    paid, done = played(TASK, reply)
    assert done and paid == dict.fromkeys(env.COMPONENTS, 0.0) | {"malformed": 1.0, "unseen_function": 1.0}


def test_spaces_around_a_name_do_not_matter():
    assert played(TASK, " places\n", RIGHT)[0]["exact"] == 1


@pytest.mark.parametrize("role", SPECIALISTS)
def test_a_wrong_specialist_lacks_the_function(role):
    (_, user), right = prompts.prompt(TASK, role), role == "places"
    assert ("maps.route(start: string, miles: integer, tolls?: boolean)" in user.text) == right
    assert ("sum(a: integer)" in user.text) == (role == "maths") and TASK["query"] in user.text
    assert ("\nnone\n" in user.text) == (role not in ("places", "maths"))
    paid, _ = played(TASK, role, RIGHT)
    assert paid["call"] == paid["exact"] == paid["routed"] == paid["function"] == float(right)
    assert paid["malformed"] == 0


def test_the_master_reads_no_function():
    text = "\n".join(message.text for message in prompts.prompt(TASK, "master"))
    assert TASK["query"] in text and all(f"{name}: {what}" in text for name, what in SPECIALISTS.items())
    assert not {"maps.route", "sum("} & set(re.findall(r"[\w.(]+", text))


def test_steps_are_pure_and_refuse_other_roles():
    state = env.reset(0, TASK)
    assert pickle.loads(pickle.dumps(state)) == state and ENV.max_turns == 2
    after, _, done = env.step(0, state, {"master": Action("places", ())})
    assert not done and state.role == "master" and env.verify(after)["master"] == {"call": 1.0}
    wrong, _, _ = env.step(0, state, {"master": Action("maths", ())})
    assert env.verify(wrong)["maths"] == {"call": 0.0}
    with pytest.raises(ValueError, match="expected one action of 'places'"):
        env.step(0, after, {"maths": Action("f()", ())})
    ended, _, _ = env.step(0, after, {"places": Action("f()", ())})
    with pytest.raises(ValueError, match="unfinished"):
        env.step(0, ended, {"places": Action("f()", ())})
    assert prompts.hears("places", (), "master", "places\n") and not prompts.hears("maths", (), "master", "places")


@pytest.mark.parametrize(
    ("name", "description", "source", "expected"),
    [
        ("geometry.area_circle", "", "bfcl", "maths"),
        ("f", "Retrieve the weather forecast for a city", "bfcl", "places"),
        ("PlayMusic", "", "apibank", "culture"),  # names in camel case are parted
        ("get_movies", "Find a hotel", "bfcl", "culture"),  # a word of the name counts more
        ("cancel_game", "Cancels a game of chess", "retail", "trade"),
        ("zzz", "", "bfcl", "office"),
    ],
)
def test_the_owner_of_a_function(name, description, source, expected):
    assert owner(name, description, source) == expected


# ---- conventions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "allowed", "found"),
    [
        ("date", ["2024/03/07", "2024-03-07"], ("dates", ["2024-03-07"])),
        ("when", ["March 7th, 2024"], ("dates", ["2024-03-07"])),
        ("date", ["03/07/2024"], ("dates", ["2024-03-07"])),
        ("date", ["March 7"], None),
        ("date", ["2024-03-07", "tomorrow"], None),
        ("date", ["2024-03-07", ""], None),  # may be absent
        ("unit", ["celsius", "Celsius"], ("units", ["C"])),
        ("distance_unit", ["Kilometers"], ("units", ["km"])),
        ("unit", ["parsec"], None),
        ("other", ["celsius"], None),
        ("city", ["Boston, MA", "Boston"], ("places", ["Boston"])),
        ("start_location", ["New York"], ("places", ["New York"])),
        ("location", ["12 Main Street"], None),
        ("order_id", ["#W123"], ("ids", ["order:W123"])),
        ("username", ["foo"], ("ids", ["user:foo"])),
        ("user_id", [7890], None),
        ("user_id", ["two words"], None),
        ("idea", ["x"], None),
    ],
)
def test_the_table_of_conventions(key, allowed, found):
    assert conventions.demanded(key, allowed) == found


@pytest.mark.parametrize(
    ("reply", "score", "met"),
    [
        ('f(date="2024-03-07", n=1)', 1.0, 1.0),
        ('f(date=" 2024-03-07 ", n=1)', 1.0, 1.0),
        ('f(date="2024/03/07", n=1)', 0.5, 0.0),  # BFCL's rules alone would accept it
        ('f(date="20240307", n=1)', 0.5, 0.0),
        ("f(date=20240307, n=1)", 0.5, 0.0),
        ('f(date="2024-03-07", n=2)', 0.5, 1.0),
        ("g(n=1)", 0.0, 0.0),
        ("no call", 0.0, 0.0),
    ],
)
def test_a_convention_is_met_to_the_letter(reply, score, met):
    answers, governed = conventions.apply({"date": ["2024/03/07"], "n": [1]})
    properties = {"date": {"type": "string"}, "n": {"type": "integer"}}
    function = {"name": "f", "owner": "office", "properties": properties, "required": ["date", "n"]}
    task = TASK | {"name": "f", "functions": [function], "specialist": "office"}
    paid, _ = played(task | {"answers": answers, "governed": list(governed)}, "office", reply)
    assert paid["call"] == score and paid["convention"] == 1 and paid["convention_met"] == met
    plain, _ = played(task | {"answers": {"date": ["2024/03/07"], "n": [1]}}, "office", reply)
    assert plain["convention"] == plain["convention_met"] == 0


@pytest.mark.parametrize("split", ["train", "test"])
def test_conventions_change_answers_alone(split):
    governed = 0
    for plain, task in zip(TASKS[split], GOVERNED[split], strict=True):
        assert plain == task | {key: plain[key] for key in ("answers", "governed")}
        kept = [key for key in plain["answers"] if key not in task["governed"]]
        assert all(plain["answers"][key] == task["answers"][key] for key in kept) and not plain["governed"]
        governed += bool(task["governed"])
    assert len(GOVERNED[split]) // 5 < governed < len(GOVERNED[split]) * 2 // 3


def test_no_prompt_and_no_demonstration_shows_a_convention():
    rows = env.demonstrations(env.Config(conventions=True), GOVERNED["train"])
    assert 0 < len(rows) < len(env.demonstrations(CONFIG, TASKS["train"]))
    for _, _, reply in rows:
        _, arguments = calls.read(reply) if "(" in reply else ("", {})
        assert not any(conventions.demanded(key, [value]) for key, value in arguments.items())
    for task in GOVERNED["train"]:
        texts = [m.text for role in prompts.ROLES for m in prompts.prompt(task, role)]
        for key in task["governed"]:
            if conventions.demanded(key, task["answers"][key]) is None:  # a prefix or a code
                assert not any(f'"{value}"' in text for text in texts for value in task["answers"][key])
    every = [task for task in GOVERNED["train"] if task["governed"]]
    with pytest.raises(ConfigError, match=r"^config\.env\.args\.demonstrated: expected tasks that show a call"):
        env.demonstrations(env.Config(conventions=True), every)


def test_an_entry_of_the_memory_shows_what_was_right():
    read = prompts.prompt(TASK, "places")
    entry = prompts.strategy("places", read, Action(RIGHT, ()), {"call": 1.0})
    assert entry == f"{TASK['query']} -> {RIGHT}"
    seen = env.with_memory(read, [entry])
    assert entry in seen[0].text and seen[1:] == read[1:]
    assert len(prompts.strategy("places", read, Action("x" * 900, ()), {})) <= 240


# ---- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", EVERY, ids=lambda task: task["id"])
def test_a_perfect_team_earns_one(task):
    (_, name), (_, call) = env.gold(task)
    paid, done = played(task, name, call)
    assert done and paid["call"] == paid["exact"] == paid["routed"] == paid["function"] == 1 and not paid["malformed"]
    assert played(task, name, "")[0]["call"] == 0 and played(task, name, f"{task['name']}()")[0]["call"] == 0


@pytest.mark.parametrize("task", [*GOVERNED["train"], *GOVERNED["test"]], ids=lambda task: task["id"])
def test_a_perfect_team_meets_the_conventions(task):
    paid, _ = played(task, *(reply for _, reply in env.gold(task)))
    assert paid["call"] == 1 and paid["convention"] == paid["convention_met"] == bool(task["governed"])


def check_split(train, test):
    """Nothing of a held-out task is in training, and the mark of unseen functions is right."""
    names = {task["name"] for task in train}
    assert not {loaders.content(t["query"]) for t in train} & {loaders.content(t["query"]) for t in test}
    assert not {task["id"] for task in train} & {task["id"] for task in test}
    assert not any(task["unseen_function"] for task in train)
    for task in test:
        assert task["unseen_function"] == (task["name"] not in names)
    shown = {function["name"] for task in train for function in task["functions"]}
    assert shown == names  # no training task offers a function that only held-out tasks call
    dialogues = [{re.sub(r"-\d+$", "", t["id"]) for t in rows if t["source"] == "apibank"} for rows in (train, test)]
    assert not dialogues[0] & dialogues[1]
    for task in (*train, *test):
        assert task["specialist"] in SPECIALISTS and task["name"] in {f["name"] for f in task["functions"]}


def test_the_split_of_the_sample():
    check_split(TASKS["train"], TASKS["test"])
    assert {task["source"] for task in TASKS["train"]} == {"bfcl", "apibank", "retail"}
    assert {task["specialist"] for task in TASKS["train"]} == set(SPECIALISTS)
    assert {task["unseen_function"] for task in TASKS["test"]} == {True, False}


@pytest.mark.skipif(not (DATA / "apibank").is_dir(), reason="needs the full data (JAXMARL_DATA)")
def test_the_split_of_the_full_data():
    read = lambda **more: env.tasks(env.Config(data_dir=str(DATA), **more))
    train, test = read(), read(split="test")
    check_split(train, test)
    unseen = sum(task["unseen_function"] for task in test)
    assert len(train) >= 500 and unseen >= 75 and len(test) - unseen >= 75
    first = test[:160]  # those that the configuration evaluates
    assert sum(task["unseen_function"] for task in first) == 80
    for name in SPECIALISTS:
        assert 0.1 < np.mean([task["specialist"] == name for task in train]) < 0.35
    cfg = from_dict(joyagents_r1.Config, get_config("call_team").to_dict())
    governed = read(**cfg.env.args)
    rows = env.demonstrations(cfg.env.build(), governed)
    shown = Counter(role for role, _, _ in rows)
    assert shown["master"] == 400 and 200 < len(rows) - 400 < 400 and min(shown.values()) >= 10
    assert 0.2 < np.mean([bool(task["governed"]) for task in governed]) < 0.5


def test_order_and_count():
    ids = lambda **more: [task["id"] for task in env.tasks(env.Config(**more))]
    assert ids() == ids() and ids() != ids(seed=1) and sorted(ids()) == sorted(ids(seed=1))
    assert ids(count=7) == ids()[:7]
    with pytest.raises(ConfigError, match=r"^config\.env\.args\.count: expected at most 98, .* got 99$"):
        env.tasks(env.Config(count=99))
    names = [task["name"] for task in env.tasks(env.Config(per_function=1))]
    assert len(set(names)) == len(names) < len(TASKS["train"])


def left_out(caplog, config):
    """Counts by reason, from the log."""
    caplog.clear()
    with caplog.at_level("INFO"):
        chosen = env.tasks(config)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("call_team")]
    assert line.startswith(f"call_team: split {config.split}: {len(chosen)} tasks; left out: ")
    return {why: int(count) for count, why in re.findall(r"(\d+) (\w+)", line.partition("left out: ")[2])}


def test_what_is_left_out_is_counted(caplog):
    every, few = left_out(caplog, CONFIG), left_out(caplog, env.Config(per_function=2))
    assert {k: v for k, v in few.items() if k != "many"} == every and set(every) <= set(few)
    assert len(TASKS["train"]) - few["many"] == len(env.tasks(env.Config(per_function=2)))
    config = env.Config(query_chars=60, call_chars=40)
    assert left_out(caplog, config)["long"] > 100 > every["long"] > 0
    for task in env.tasks(config):
        assert len(task["query"]) <= 60 and len(env.gold(task)[1][1]) <= 40


ROW = {"source": "bfcl", "query": "q", "name": "f", "answers": {"a": [1]}}
SCHEMA = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}, "required": ["a"]}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"query": "q" * 400}, "long"),
        ({"answers": {"a": [10**200]}}, "long"),
        ({"answers": {"a": [1, ""]}, "functions": [SCHEMA | {"parameters": {"properties": {"a": {}}}}]}, "plain"),
        ({"answers": {"a": [{"b": [1]}]}}, "nested"),
        ({"answers": {"a": [[[{"b": 1}]]]}}, "nested"),
        ({"answers": {"a": [1], "b": [2]}}, "wrong"),
        ({"name": "g"}, "wrong"),
        ({"source": "retail"}, "unstated"),
        ({"source": "retail", "query": "take 1"}, None),
    ],
)
def test_why_a_call_is_left_out(change, why):
    assert call_tasks._reason(CONFIG, {"functions": [SCHEMA]} | ROW | change) == why


def test_equal_queries_and_dialogues_are_on_one_side():
    """One row is held out for its source; a row of its dialogue and a row with its query follow."""
    row = lambda name, group, query, **more: {"name": name, "group": group, "query": query, **more}
    rows = [row("a", "one", "Hi, you", upstream_test=True), row("b", "one", "x"), row("c", "two", "hi you")]
    assert call_tasks._held_out(rows) == [True, True, True]
    assert call_tasks._held_out([rows[1], row("c", "two", "y")]) == [False, False]


def test_the_calls_of_a_dialogue(tmp_path):
    """The query is what was said before the call. Tokens and calls of ToolSearcher are left out."""
    folder = tmp_path / "apibank" / "lv1-lv2-samples" / "level"
    folder.mkdir(parents=True)
    user = lambda text: {"role": "User", "text": text}
    api = lambda name, **given: {"role": "API", "api_name": name, "param_dict": given}
    dialogues = {
        "one": [user("a"), api("ToolSearcher", keywords="k"), api("Add", token="t", n=1), user("b"), api("Get", x="y")],
        "two": [user("c"), api("Add", token="t", n="2", when="now")],
    }
    for name, turns in dialogues.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    first, second, third = call_sets.apibank_calls(tmp_path)
    assert (first["query"], second["query"], third["query"]) == ("a", "a\nb", "c")
    assert (first["answers"], second["answers"]) == ({"n": [1]}, {"x": ["y"]}) and first["group"] == second["group"]
    assert [schema["name"] for schema in first["functions"]] == ["Add", "Get"]
    kinds = {"n": {"type": "any"}, "when": {"type": "string"}}
    assert first["functions"][0]["parameters"] == {"type": "dict", "properties": kinds, "required": ["n"]}


# ---- wrong data ------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path):
    """A copy of the sample."""
    for name in call_sets.FOLDERS:
        shutil.copytree(loaders.FIXTURES / name, tmp_path / name)
    return tmp_path


def test_a_copy_of_the_sample_has_the_same_tasks(copied):
    assert env.tasks(env.Config(data_dir=str(copied))) == TASKS["train"]


@pytest.mark.parametrize("name", call_sets.FOLDERS)
def test_an_absent_folder_is_named_with_the_flag(copied, name):
    shutil.rmtree(copied / name)
    with pytest.raises(ConfigError) as error:
        env.tasks(env.Config(data_dir=str(copied)))
    assert str(error.value) == (
        f"config.env.args.data_dir: {copied} has no folder '{name}'; give a folder that holds bfcl, apibank, "
        "taubench_retail with --config.env.args.data_dir=DIR, or leave it out for the samples in the package"
    )


def test_damaged_dialogues_and_answers(copied):
    path = sorted((copied / "apibank").glob("lv1*/*/*.jsonl"))[0]
    path.write_text('{"role": "API", "api_name": "f"}\n')
    with pytest.raises(ConfigError, match=r"line 1: field 'param_dict' is missing$"):
        env.tasks(env.Config(data_dir=str(copied)))
    path.write_text("")  # as one file of upstream
    assert env.tasks(env.Config(data_dir=str(copied)))
    shutil.rmtree(copied / "apibank" / "lv1-lv2-samples")
    with pytest.raises(ConfigError, match=r"lv1-lv2-samples: no dialogue <level>/<name>\.jsonl$"):
        env.tasks(env.Config(data_dir=str(copied)))
    answers = copied / "bfcl" / "possible_answer" / "BFCL_v4_multiple.json"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    rows[3]["ground_truth"] = ["f"]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"line 4: a call of field 'ground_truth' must be"):
        env.tasks(env.Config(data_dir=str(copied)))


# ---- training --------------------------------------------------------------------------------------------------------


def tiny(**changes):
    cfg = from_dict(joyagents_r1.Config, get_config("call_team_tiny").to_dict())
    return dataclasses.replace(cfg, **changes)


def test_demonstrations_that_do_not_fit_are_counted_and_an_error():
    """Tokens are bytes. A share that is accepted has no error."""
    cfg = tiny()
    env_config = dataclasses.replace(cfg.env, args={})
    cfg = dataclasses.replace(cfg, env=env_config, team=dataclasses.replace(cfg.team, max_new_tokens=60))
    with pytest.raises(ConfigError, match=r"max_new_tokens: \d+ of \d+ demonstrations of role '\w+' are longer than 6"):
        joyagents_r1.make(cfg)
    joyagents_r1.make(dataclasses.replace(cfg, sft=dataclasses.replace(cfg.sft, min_fitting=0.05))).env_runner.close()


def test_demonstrations_are_those_of_the_first_tasks():
    rows = env.demonstrations(env.Config(demonstrated=3), TASKS["train"])
    assert rows == env.demonstrations(CONFIG, TASKS["train"][:3]) and len(rows) == 6
    assert [role for role, _, _ in rows[::2]] == ["master"] * 3


def test_the_tiny_team_takes_two_steps(tmp_path):
    """The master moves at each, nothing is invalid, no prompt is cut, and no demonstration is dropped."""
    cfg = tiny(sft=dataclasses.replace(tiny().sft, steps=1))
    cfg.check("config")
    recipe = joyagents_r1.make(cfg)
    assert recipe.env_runner.dropped == 0
    states, rows = first_steps(recipe, tmp_path, 3)
    assert rows[0]["sft/master/nll"] > 0
    for row in rows[1:]:
        assert row["count/invalid"] == 0 and row["count/cut_prompts"] == 0
        assert row["reward/malformed"] == 1 and row["reward/call"] == 0  # random models
    before, after = states[:2]
    leaves = zip(*(jax.tree.leaves(state.params["agents"]) for state in (before, after)), strict=True)
    assert any(not np.array_equal(a, b) for a, b in leaves)
    assert all(int(b.step) == int(a.step) + 1 for a, b in itertools.pairwise(states))


def test_the_configuration_of_smollm2_is_valid():
    cfg = from_dict(joyagents_r1.Config, get_config("call_team").to_dict())
    cfg.check("config")
    assert cfg.reward == cfg.memory_reward == {"call": 1.0} and cfg.team.max_new_tokens <= 48
    assert cfg.sft.min_fitting >= 0.9 and cfg.env.eval_tasks >= 150 and cfg.run.best == "eval/call"
