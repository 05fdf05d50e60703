"""`TextTask`: rows, prompts, turns, replies, rewards of every form, the split, and errors in one line."""

from __future__ import annotations

import json
import pickle

import pytest

from jaxmarl_llm.envs import TextTask
from jaxmarl_llm.envs.contract import check
from jaxmarl_llm.envs.splits import split_contents
from jaxmarl_llm.envs.text_values import paid
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, Message

ROWS = [{"q": f"{a}+{b}", "answer": str(a + b)} for a in range(6) for b in range(6)]
PROMPTS = {"solver": "What is {q}?"}


def exact(task, texts):
    return float(texts["solver"].strip() == task["answer"])


def said(**texts):
    return {role: Action(text, tuple(text.encode())) for role, text in texts.items()}


def play(task, *rounds):
    """Prompts, rewards and ends of every turn of one episode of ``task``'s first row."""
    env, out = task.make(), []
    state = env.reset(0, task.tasks[0])
    for texts in rounds:
        prompts = env.observe(state)
        state, rewards, done = env.step(0, state, said(**texts))
        state = pickle.loads(pickle.dumps(state))
        out.append((prompts, rewards, done))
    return out


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_file_a_prompt_and_a_reward_are_an_environment(tmp_path):
    path = write(tmp_path / "sums.jsonl", ROWS)
    path.write_text("\n" + path.read_text() + "\n\n")  # blank lines
    task = TextTask(path, PROMPTS, exact, demonstrations={"solver": "{answer}"})
    check(task, "sums")
    env = pickle.loads(pickle.dumps(task.make))()
    assert (env.roles, env.max_turns, env.components) == (("solver",), 1, ("reward",))
    row = task.tasks[0]
    ((prompts, rewards, done),) = play(task, {"solver": f" {row['answer']}\n"})
    assert prompts == {"solver": (Message("user", f"What is {row['q']}?"),)}
    assert rewards == {"solver": {"reward": 1.0}} and done
    assert play(task, {"solver": "no"})[0][1] == {"solver": {"reward": 0.0}}
    assert task.demonstrations is not None
    taught = list(task.demonstrations(task.tasks))
    assert taught[0] == ("solver", prompts["solver"], row["answer"]) and len(taught) == len(task.tasks)


def test_rows_are_split_by_what_the_first_turn_shows():
    rows = [{**row, "answer": answer} for row in ROWS for answer in (row["answer"], "other")]
    task = TextTask(rows, PROMPTS, exact)
    sides = [{row["q"] for row in side} for side in (task.tasks, task.held_out)]
    assert not sides[0] & sides[1] and len(task.tasks) + len(task.held_out) == len(rows)
    assert 0.1 < len(task.held_out) / len(rows) < 0.4
    grown = TextTask([*reversed(rows), *({"q": f"new {i}", "answer": "1"} for i in range(50))], PROMPTS, exact)
    assert {row["q"] for row in task.held_out} <= {row["q"] for row in grown.held_out}  # whatever else there is


def test_few_contents_leave_no_side_empty():
    for contents in (["a", "b"], ["a", "a", "b"], ["b", "c"], [str(i) for i in range(3)], ["x1", "x7"]):
        mask = split_contents(contents)
        assert mask is not None and mask.any() and not mask.all()
        assert len({(content, bool(out)) for content, out in zip(contents, mask, strict=True)}) == len(set(contents))
    assert split_contents(["a", "a"]) is None


def test_repeated_rows_are_left_out_with_a_warning(caplog):
    task = TextTask([*ROWS, *ROWS[:5]], PROMPTS, exact)
    assert len(task.tasks) + len(task.held_out) == len(ROWS)
    assert "5 of 41 rows repeat an earlier row" in caplog.text


def test_held_out_data_of_its_own(tmp_path):
    train, test = write(tmp_path / "train.jsonl", ROWS[:20]), write(tmp_path / "test.jsonl", ROWS[20:])
    for task in (
        TextTask(train, PROMPTS, exact, held_out=test),
        TextTask({"train": ROWS[:20], "test": ROWS[20:]}, PROMPTS, exact),
        TextTask(ROWS[:20], PROMPTS, exact, held_out=iter(ROWS[20:])),
    ):
        assert (list(task.tasks), list(task.held_out)) == (ROWS[:20], ROWS[20:])
    assert TextTask(train, PROMPTS, exact, count=7, held_out=test).tasks == ROWS[:7]
    write(test, [{**ROWS[3], "answer": "other"}])
    with pytest.raises(ConfigError) as error:
        TextTask(train, PROMPTS, exact, held_out=test)
    assert str(error.value) == (
        f"held_out: 1 of 1 rows show a training prompt; first {tmp_path}/test.jsonl:1 and {tmp_path}/train.jsonl:4"
    )
    same = TextTask(ROWS[:1], PROMPTS, exact, same_tasks=True)
    check(same, "same")
    assert same.tasks == same.held_out == ROWS[:1]


@pytest.mark.filterwarnings("ignore")  # of the package that pickles its functions
def test_a_hugging_face_set():
    datasets = pytest.importorskip("datasets")
    # with a fingerprint of its own, because computing one fails with some versions of pyarrow
    table = lambda rows: datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint=f"of {len(rows)}")
    assert list(TextTask(table(ROWS), PROMPTS, exact).tasks) == list(TextTask(ROWS, PROMPTS, exact).tasks)
    parts = datasets.DatasetDict({"train": table(ROWS[:20]), "test": table(ROWS[20:])})
    assert list(TextTask(parts, PROMPTS, exact).held_out) == ROWS[20:]


# ------------------------------------------------------------------------------------------------- turns and rounds

TWO = {"draft": "Draft {q}", "editor": "Edit {q}: {draft}"}


def both(task, texts):
    return {"draft": len(texts["draft"]), "editor": {"reward": len(texts["editor"])}}


def test_roles_in_turn_read_earlier_texts_and_roles_at_once_do_not():
    task = TextTask(ROWS, TWO, both, turns=["draft", "editor"], instructions={"editor": "You edit."})
    first, second = play(task, {"draft": "{not a field}"}, {"editor": "ok"})
    q = task.tasks[0]["q"]
    assert first == ({"draft": (Message("user", f"Draft {q}"),)}, {}, False)
    assert second[0] == {"editor": (Message("system", "You edit."), Message("user", f"Edit {q}: {{not a field}}"))}
    assert second[1:] == ({"draft": {"reward": 13.0}, "editor": {"reward": 2.0}}, True)
    with pytest.raises(ConfigError, match=r"row 0: prompts\['editor'\]: no field 'draft'; choose from 'q', 'answer'"):
        TextTask(ROWS, TWO, both)
    together = TextTask(
        ROWS, {"left": "{q}", "right": lambda task: task["q"]}, lambda task, texts: texts["left"] == "a"
    )
    ((prompts, rewards, done),) = play(together, {"left": "a", "right": "b"})
    assert set(prompts) == {"left", "right"} and done
    assert rewards == {"left": {"reward": 1.0}, "right": {"reward": 1.0}}


def test_a_prompt_function_reads_the_texts_so_far():
    def editor(task, texts):
        return (Message("system", "s"), Message("user", f"{task['q']} {sorted(texts.items())}"))

    task = TextTask(ROWS, {"draft": "{q}", "editor": editor}, both, turns=["draft", "editor"])
    assert play(task, {"draft": "x"}, {"editor": "y"})[1][0]["editor"][1].text.endswith(" [('draft', 'x')]")


def calculator(task, rounds):
    last = rounds[-1]["solver"]
    return f"= {sum(map(int, last.removeprefix('calc ').split('+')))}" if last.startswith("calc ") else None


def test_reply_makes_several_rounds_and_conversations_only_grow():
    task = TextTask(ROWS, PROMPTS, exact, reply=calculator, rounds=3)
    assert task.make().max_turns == 3
    q, answer = task.tasks[0]["q"], task.tasks[0]["answer"]
    one, two = play(task, {"solver": f"calc {q}"}, {"solver": answer})
    assert one[1:] == ({}, False) and two[1:] == ({"solver": {"reward": 1.0}}, True)
    own = Message("assistant", f"calc {q}", tuple(f"calc {q}".encode()), "solver")
    assert two[0]["solver"] == (*one[0]["solver"], own, Message("user", f"= {answer}"))
    ends = [done for *_, done in play(task, *[{"solver": "calc 1+1"}] * 3)]
    assert ends == [False, False, True]


def test_reply_is_asked_before_every_later_turn_and_sees_the_round_in_progress():
    asked = []

    def reply(task, rounds):
        asked.append([dict(round_) for round_ in rounds])
        return {"editor": f"now: {rounds[-1]['draft']}"} if len(rounds) == 2 else "again"

    def last(task, texts, rounds):
        return {"rounds": len(rounds), "texts": float(texts == rounds[-1])}

    task = TextTask(ROWS, TWO, last, turns=["draft", "editor"], reply=reply, rounds=2, components=("rounds", "texts"))
    turns = play(task, {"draft": "a"}, {"editor": "b"}, {"draft": "c"}, {"editor": "d"})
    assert asked == [[{"draft": "a", "editor": "b"}], [{"draft": "a", "editor": "b"}, {"draft": "c"}]]
    assert turns[2][0]["draft"][-1] == Message("user", "again")
    assert turns[3][0]["editor"][-1] == Message("user", "now: c")
    assert turns[3][1]["draft"] == {"rounds": 2.0, "texts": 1.0} and turns[3][2]


def test_demonstrations_of_later_roles_show_the_demonstrated_texts():
    task = TextTask(
        ROWS, TWO, both, turns=["draft", "editor"], demonstrations={"draft": "{answer}!", "editor": "{answer}"}
    )
    assert task.demonstrations is not None
    (_, _, first), (role, prompt, second) = task.demonstrations(ROWS[:1])
    assert (first, role, prompt[-1].text, second) == ("0!", "editor", "Edit 0+0: 0!", "0")


def test_memory_makes_a_system_message_where_there_is_none():
    task = TextTask(ROWS, PROMPTS, exact)
    prompt = task.with_memory((Message("user", "q"),), ["entry"])
    assert [m.speaker for m in prompt] == ["system", "user"] and "entry" in prompt[0].text
    assert task.with_memory((Message("user", "q"),), []) == (Message("user", "q"),)


# ---------------------------------------------------------------------------------------------------------- rewards

ROLES = ("left", "right")


@pytest.mark.parametrize(
    "result, expected",
    [
        (1, {"left": {"reward": 1.0}, "right": {"reward": 1.0}}),
        (True, {"left": {"reward": 1.0}, "right": {"reward": 1.0}}),
        ({"left": 1, "right": 0.5}, {"left": {"reward": 1.0}, "right": {"reward": 0.5}}),
        ({"left": {"a": 1}}, {"left": {"a": 1.0}}),
        ({"a": 1, "b": None}, {"left": {"a": 1.0, "b": None}, "right": {"a": 1.0, "b": None}}),
        ({"left": {"a": 1}, "right": 2}, {"left": {"a": 1.0}, "right": {"reward": 2.0}}),
        (None, {"left": {"reward": None}, "right": {"reward": None}}),
    ],
)
def test_forms_of_a_reward(result, expected):
    assert paid(result, ROLES) == expected


@pytest.mark.parametrize("result", ["1.0", [1.0], {"left": 1.0, "a": 1.0}, {"a": "x"}, {"left": {"a": [1]}}, object()])
def test_anything_else_is_refused_with_what_would_be_right(result):
    with pytest.raises(ConfigError, match=r"expected a number, \{role: number\}"):
        paid(result, ROLES)


@pytest.mark.parametrize(
    "result",
    [{"left": 1.0, "right": 0.0}, {"left": {"a": 1.0}, "right": {}}, {"left": {"a": 1.0}, "right": {"b": 0.0}}],
)
def test_a_role_may_be_paid_nothing_and_components_may_differ_by_role(result):
    task = TextTask(ROWS, {"left": "{q}", "right": "{q}"}, lambda task, texts: result)
    ((_, rewards, _),) = play(task, {"left": "", "right": ""})
    assert rewards == paid(result, ROLES) and set(rewards) == set(ROLES)


def raises(task, texts):
    return task["anwser"]


LATER = {"first": "{q}", "second": "{q}"}
BAD = {
    "empty prompt": (lambda: TextTask(ROWS, {"a": "{q}", "b": " "}, exact), r"prompts\['b'\]: empty; expected text"),
    "no number": (lambda: TextTask(ROWS, PROMPTS, lambda task, texts: {}), r"row \d+: reward: returned no number; exp"),
    "no text": (lambda: TextTask(ROWS, PROMPTS, raises), r"KeyError: 'anwser'; it has to grade any text, here the em"),
    "no held-out rows": (lambda: TextTask({"train": ROWS, "test": []}, PROMPTS, exact), "held_out: no rows"),
    "arity": (lambda: TextTask(ROWS, PROMPTS, lambda texts: 1), r"reward: takes \(texts\), expected \(task, tex"),
    "no function": (lambda: TextTask(ROWS, PROMPTS, 3), "reward: expected a function of"),
    "raises": (lambda: TextTask(ROWS, PROMPTS, raises), r"row \d+: reward raised KeyError: 'anwser'; it has to gra"),
    "none": (lambda: TextTask(ROWS, PROMPTS, lambda task, texts: None), r"row \d+: reward: returned None; expected a "),
    "a role less": (
        lambda: TextTask(ROWS, LATER, lambda task, texts: {"first": 1.0}),
        r"row \d+: reward: returned 'first' and no 'second'; expected every role, and 0.0 for a role that is paid not",
    ),
    "a role less, by component": (
        lambda: TextTask(ROWS, LATER, lambda task, texts: {"second": {"a": 1.0}}, turns=["first", "second"]),
        "reward: returned 'second' and no 'first'",
    ),
    "a role less, in rounds": (
        lambda: TextTask(ROWS, LATER, lambda task, texts: {"first": 1.0}, reply=lambda task, rounds: "", rounds=2),
        "reward: returned 'first' and no 'second'",
    ),
    "type": (lambda: TextTask(ROWS, PROMPTS, lambda task, texts: "1"), r"row \d+: reward: 'reward' is '1' \(str\)"),
    "list": (lambda: TextTask(ROWS, PROMPTS, lambda task, texts: [1.0]), r"row \d+: reward: 'reward' is \[1.0\] \(lis"),
    "no roles": (lambda: TextTask(ROWS, {}, exact), "prompts: expected {role: prompt} with at least one role"),
    "prompt's type": (lambda: TextTask(ROWS, {"solver": 3}, exact), r"prompts\['solver'\]: expected a template or a f"),
    "prompt's arity": (lambda: TextTask(ROWS, {"a": lambda: ""}, exact), r"prompts\['a'\]: takes \(\), expected \(tas"),
    "prompt returns": (lambda: TextTask(ROWS, {"a": len}, exact), r"row 0: prompts\['a'\]: returned int, expected tex"),
    "field": (lambda: TextTask(ROWS, {"solver": "{question}"}, exact), r"row 0: prompts\['solver'\]: no field 'questi"),
    "later field": (
        lambda: TextTask(ROWS, {"a": "{q}", "b": "{a} {qq}"}, exact, turns=["a", "b"]),
        r"row 0: prompts\['b'\]: no field 'qq'; did you mean 'q'",
    ),
    "clash": (lambda: TextTask(ROWS, {"q": "{answer}"}, exact), "row 0: the field 'q' has the name of a role"),
    "never acts": (lambda: TextTask(ROWS, LATER, exact, turns=["first"]), "turns: 'second' has a prompt and never act"),
    "twice": (lambda: TextTask(ROWS, LATER, exact, turns=["first", "second", "first"]), "turns: 'first' acts twice"),
    "no role": (lambda: TextTask(ROWS, PROMPTS, exact, turns=["solvr"]), "turns: no role 'solvr'; the roles are solve"),
    "instructions": (lambda: TextTask(ROWS, PROMPTS, exact, instructions={"x": ""}), "instructions: no role 'x'"),
    "demonstrations": (lambda: TextTask(ROWS, PROMPTS, exact, demonstrations={"x": ""}), "demonstrations: no role 'x'"),
    "rounds": (lambda: TextTask(ROWS, PROMPTS, exact, rounds=2), "rounds: expected 1 without reply"),
    "one round": (lambda: TextTask(ROWS, PROMPTS, exact, reply=calculator), "rounds: expected at least 2 with reply"),
    "one task": (lambda: TextTask(ROWS[:1], PROMPTS, exact), "row 0 to row 0: all rows show one prompt"),
    "no rows": (lambda: TextTask([], PROMPTS, exact), "data: no rows"),
    "no mapping": (lambda: TextTask([1], PROMPTS, exact), "row 0: expected a mapping with names as keys, got int"),
    "no data": (lambda: TextTask(3, PROMPTS, exact), "data: expected a path, or an iterable of mappings, got int"),
    "parts": (lambda: TextTask({"tran": ROWS}, PROMPTS, exact), "data: expected the parts train and test, got 'tran'"),
    "no file": (lambda: TextTask("nowhere.jsonl", PROMPTS, exact), "nowhere.jsonl: no such file; expected a JSONL fil"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors_are_one_line(name):
    build, message = BAD[name]
    with pytest.raises(ConfigError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, message",
    [
        ('{"q": 1}\n{"q": 1\n', "{path}:2: not JSON: Expecting ',' delimiter at column 8"),
        ('{"q": 1}\n\n[1]\n', '{path}:3: expected an object, as {{"question": ...}}, got list'),
        ('{"q": 1}\n{"p": 1}\n', "{path}:2: prompts['solver']: no field 'q'; choose from 'p'"),
        ("[\n{}\n]", "{path}:1: not JSON: Expecting value"),
        ("", "{path}: no rows"),
        (b'{"q": "\xff"}', "{path}: not UTF-8: invalid start byte at byte 7"),
    ],
)
def test_errors_of_a_file_name_the_line_and_the_key(text, message, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        TextTask(path, {"solver": "{q}"}, exact)
    assert str(error.value).startswith(message.format(path=path)) and "\n" not in str(error.value)
