"""Answer rules against tables of the field and against BFCL's own gold answers."""

import itertools
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs import answer_rules
from jaxmarl_llm.envs.assistant import function_calls

# -- question answering ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prediction, gold, f1",
    [
        ("The Eiffel Tower.", "eiffel tower", 1.0),
        ("Animorphs", "Animorphs", 1.0),
        ("Shirley Temple Black", "Shirley Temple", 0.8),  # precision 2/3, recall 1
        ("yes", "Yes.", 1.0),
        ("yes it is", "yes", 0.0),  # HotpotQA: yes/no is all or nothing
        ("no", "a dog", 0.0),
        ("", "Paris", 0.0),
        ("Paris Paris", "Paris", 2 / 3),  # a repeated word counts once
    ],
)
def test_f1(prediction, gold, f1):
    assert answer_rules.token_f1(prediction, gold) == pytest.approx(f1)
    assert answer_rules.exact_match(prediction, gold) == (f1 == 1.0)


# -- mathematics -------------------------------------------------------------------------------------------------------

FORMATS = [
    ("18", True), ("18.0", True), ("$18", True), ("18.", True), ("answer: 18 dollars", True), (r"\boxed{18}", True),
    ("Answer: **18**", True), ("#### 18", True), ("5 + 13 = 18 apples are left.", True), ("so it is 17, no, 18", True),
    (r"First \boxed{17}, then \boxed{18}", True), (r"\boxed{\frac{36}{2}}", True), ("Answer: 36/2", True),
    ("Answer: 9 * 2 = 18", True), ("Answer: 18%", True), ("final answer is 18", True), (r"Answer: \$18.00", True),
    ("17", False), ("-18", False), ("181", False), ("1.8", False), ("Answer: 17 or 18", False), ("", False),
    ("Answer: 17, 18", False), ("Answer: 18 and 17", False), ("Answer: 1 8", False), ("18 then #### 17", False),
    ("Answer: none", False), (r"\boxed{", False), ("1,8", False), ("Answer: 18/0", False), ("18^{9^9}", False),
]  # fmt: skip


@pytest.mark.parametrize("text, right", FORMATS)
def test_gsm8k_formats(text, right):
    assert answer_rules.math_equal(text, "18") is right


def test_thousands_and_whole_solutions():
    assert answer_rules.math_equal("Answer: 1,800", "1800") and answer_rules.math_equal("1800", "1,800")
    assert answer_rules.math_equal("Answer: 1,234,567.50", "1234567.5")
    assert answer_rules.math_equal("18", "He has 9 * 2 = 18.\n#### 18") and not answer_rules.math_equal(
        "9", "9 * 2\n#### 18"
    )


@pytest.mark.parametrize(
    "text, gold, right",
    [
        (r"\boxed{x^2+2x+1}", "(x+1)^2", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\frac{\pi}{3}}", r"\frac{\pi}{4}", False),
        ("Answer: x+1", "x+2", False),
    ],
)
def test_symbolic(text, gold, right):
    assert answer_rules.math_equal(text, gold) is right


HOSTILE = [
    "9^{9^9}", r"\boxed{9^{9^{9}}}", "\\frac{" * 10_000, "Answer: " + "(" * 150 + "1" + ")" * 150, "2**9**9**9",
    "Answer: 99999999999!", r"\boxed{(x+1)^{9999}}", r"\boxed{\sum_{n=1}^{99999} n}", "Answer: 1e999999999",
    r"\boxed{((9^{99})^{99})^{99}}", "9" * 100_000, "1," * 50_000, "Answer: " + "1/" * 90, "\\boxed{" * 50_000,
    r"\boxed{2^{x^x}}", "Answer: " + "sin(" * 40,
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_mathematics_is_wrong_and_quick(text):
    answer_rules.math_equal(r"\boxed{x+x}", "2x")  # the import of the algebra system is not timed
    start = time.monotonic()
    assert answer_rules.math_equal(text, r"\frac{x}{3}") is False
    assert answer_rules.math_equal(text, "7") is False
    assert time.monotonic() - start < 2


def test_same_verdicts_in_a_thread():
    here = [
        answer_rules.math_equal(t, g) for t, g in [(r"\sqrt{8}", r"2\sqrt{2}"), (r"\boxed{x+1}", "1+x"), ("18", "18")]
    ]
    there = []
    thread = threading.Thread(
        target=lambda: there.extend(
            answer_rules.math_equal(t, g)
            for t, g in [(r"\sqrt{8}", r"2\sqrt{2}"), (r"\boxed{x+1}", "1+x"), ("18", "18")]
        )
    )
    thread.start()
    thread.join()
    assert here == there == [True, True, True]


def test_golden_answers_are_right_in_a_thread_too():
    """Every answer of the samples of GSM8K against itself and against the next one, here and in a thread."""
    gold = [task["answer"] for part in ("train", "test") for task in loaders.load("gsm8k", split=part)[0]]
    pairs = [(text, other) for text, after in itertools.pairwise(gold) for other in (text, after)]
    verdicts = lambda: [answer_rules.math_equal(f"Answer: {text}", other) for text, other in pairs]
    there: list[list[bool]] = []
    thread = threading.Thread(target=lambda: there.append(verdicts()))
    thread.start()
    thread.join()
    assert there == [verdicts()] and all(there[0][::2]) and not all(there[0][1::2]) and len(pairs) > 50


def test_empty_gold_raises():
    with pytest.raises(ValueError, match="empty gold"):
        answer_rules.math_equal("18", " ")


@given(st.text(max_size=300), st.sampled_from(["18", r"\frac{x}{2}", "x^2"]))
@settings(max_examples=150, deadline=None)
def test_math_never_raises(text, gold):
    assert answer_rules.math_equal(text, gold) in (True, False)


# -- function calls ----------------------------------------------------------------------------------------------------

AREA = {
    "name": "area",
    "parameters": {
        "type": "dict",
        "properties": {
            "base": {"type": "integer"}, "height": {"type": "float"}, "unit": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}}, "box": {"type": "dict"},
            "flag": {"type": "boolean"},
        },
        "required": ["base", "height"],
    },
}  # fmt: skip
GOLD = [{"area": {"base": [10], "height": [5.0, 6.0], "unit": ["sq. cm", ""]}}]


@pytest.mark.parametrize(
    "arguments, score",
    [
        ({"base": 10, "height": 5.0}, 1.0),
        ({"base": 10, "height": 6}, 1.0),  # an integer for a float
        ({"base": 10.0, "height": 5.0}, 1 / 2),  # but no float for an integer
        ({"base": True, "height": 5.0}, 1 / 2),
        ({"base": "10", "height": 5.0}, 1 / 2),
        ({"base": 10}, 1 / 2),  # a required one is missing
        ({"base": 10, "height": 5.0, "unit": "SQ-CM"}, 1.0),  # BFCL's standardisation
        ({"base": 10, "height": 5.0, "unit": "inch"}, 2 / 3),
        ({"base": 10, "height": 5.0, "extra": 1}, 2 / 3),
        ({}, 0.0),
    ],
)
def test_arguments(arguments, score):
    assert answer_rules.call_score([AREA], [("area", arguments)], GOLD) == pytest.approx(score)


@pytest.mark.parametrize(
    "key, allowed, right, wrong",
    [
        ("tags", [["a b", "C"]], ["A-B", "c"], ["C", "a b"]),
        ("tags", [["a", "b"], ["b", "a"]], ["b", "a"], ["a"]),
        ("box", [{"x": [1], "y": ["", 2]}], {"x": 1}, {"y": 2}),
        ("box", [{"x": [1], "y": ["", 2]}], {"x": 1, "y": 2}, {"x": 1, "z": 2}),
        ("flag", [True], True, 1),
        ("tags", [[{"k": ["v"]}]], [{"k": "V"}], [{"k": "w"}]),
        ("unit", ["it's"], 'IT"S', "its"),
    ],
)
def test_nested_values(key, allowed, right, wrong):
    gold = [{"area": {"base": [1], "height": [1.0], key: allowed}}]
    made = {"base": 1, "height": 1.0}
    assert answer_rules.call_score([AREA], [("area", made | {key: right})], gold) == 1.0
    assert answer_rules.call_score([AREA], [("area", made | {key: wrong})], gold) == pytest.approx(2 / 3)


def test_parallel_calls_match_in_any_order_and_once():
    other = AREA | {"name": "volume"}
    gold = [{"area": {"base": [1, 2], "height": [1.0]}}, {"area": {"base": [1], "height": [1.0]}}]
    gold.append({"volume": {"base": [3], "height": [1.0]}})
    made = [("area", {"base": b, "height": 1.0}) for b in (1, 2)] + [("volume", {"base": 3, "height": 1.0})]
    for order in itertools.permutations(made):
        assert answer_rules.call_score([AREA, other], order, gold) == 1.0
    assert answer_rules.call_score([AREA, other], made[:2], gold) == pytest.approx(4 / 6)  # one is missing
    assert answer_rules.call_score([AREA, other], [*made, made[0]], gold) == pytest.approx(6 / 8)  # one too many
    assert answer_rules.call_score([AREA], [("area", {"base": 2, "height": 1.0})] * 2, gold[:2]) == pytest.approx(3 / 4)


def bfcl_rows():
    return [t for split in ("train", "test") for t in loaders.load("bfcl", split=split)[0]]


def test_bfcl_gold_scores_one_and_mutants_less():
    rows = bfcl_rows()
    assert len(rows) == 60
    for row in rows:
        ((name, arguments),) = made = answer_rules.gold_calls(row["functions"], row["answers"])
        assert answer_rules.call_score(row["functions"], made, row["answers"]) == 1.0, row["id"]
        mutants = [(name + "x", arguments), (name, arguments | {"bogus": 1})]
        mutants += [(name, {k: v for k, v in arguments.items() if k != gone}) for gone in arguments]
        mutants += [(name, arguments | {k: "surely not this"}) for k in arguments]
        for mutant in mutants:
            assert answer_rules.call_score(row["functions"], [mutant], row["answers"]) < 1.0, (row["id"], mutant)


@pytest.mark.parametrize(
    "text",
    [
        "", "area(1)", "[]", "{", '{"name": 1, "arguments": {}}', '{"name": "f"}', '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": 1e999}}', "[" * 10_000,
        '{"name": "f", "arguments": {"x": ' + "[" * 9000 + "]" * 9000 + "}}", "{" + "9" * 19_000,
        '{"name": "f", "arguments": {"x": ' + "9" * 6000 + "}}", '{"name": "f", "arguments": {"x": "' + "a" * 10**7,
    ],
    ids=range(14),
)  # fmt: skip
def test_malformed_calls_are_refused_in_words(text):
    assert isinstance(answer_rules.parse_call(text), str)


def test_depth_has_a_limit_of_its_own():
    deep = lambda n: '{"name": "f", "arguments": {"x": ' + "[" * n + "]" * n + "}}"
    assert answer_rules.parse_call(deep(18))[0] == "f" and "deeper" in answer_rules.parse_call(deep(19))


def test_a_call_is_read_and_what_follows_is_ignored():
    text = json.dumps({"name": "f", "arguments": {"x": [1, {"y": "é"}]}})
    assert answer_rules.parse_call(f"  {text}\nObservation: made up") == ("f", {"x": [1, {"y": "é"}]})


def test_shop_calls_match_exactly_and_once():
    a, b = ("cancel", {"id": "1"}), ("cancel", {"id": "2"})
    assert answer_rules.same_call(a, ("cancel", {"id": "1"})) and not answer_rules.same_call(a, b)
    assert answer_rules.matched_calls([b, a], [a, b]) == 2 and answer_rules.matched_calls([a, a], [a, b]) == 1
    assert function_calls.matched_calls([], [a]) == 0 and answer_rules.matched_calls([a], [a, a]) == 1


def test_workers_start_without_jax():
    code = "import sys, jaxmarl_llm.envs.assistant; sys.exit(any(m in sys.modules for m in ('jax', 'math_verify')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
