"""The coding rewards: published golden vectors, the rules of ``strict``, any text a model may write, and hacks."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.envs.coding import published_reward
from jaxmarl_llm.envs.coding import rewards as coding_rewards
from jaxmarl_llm.envs.coding.analysis import syntax as code_ast
from jaxmarl_llm.envs.coding.rewards import (
    COMPONENTS,
    Unscored,
    check_tests,
    full_check,
    grade_parity,
    grade_strict,
    hardcoded,
    parity,
    prelude,
    strict,
    works,
)
from jaxmarl_llm.sandbox import judge as sandbox
from jaxmarl_llm.sandbox.judge import Report, Verdict
from tests.programs import AUX, GUARDED, HONEST, RIGHT, TASK, UNUSED, WRAPPER, broken, run_here


def sandboxed(program, tests):
    return sandbox.judge(program, tests, sandbox.Limits(cpu=1.0, total=5.0))


def all_pass(program, tests):
    """For programs that nobody should run."""
    return Report(Verdict.PASS, (Verdict.PASS,) * len(tests), ("",) * len(tests), "", 0.0)


def available():
    try:
        sandbox.probe()
    except sandbox.SandboxUnavailable:
        return False
    return True


needs_sandbox = pytest.mark.skipif(not available(), reason="no sandbox works here")
RUNNERS = [run_here, pytest.param(sandboxed, marks=needs_sandbox)]

IGNORED = "def sq(n):\n    {}\n    x = n * n\n    return x\n"
# From running the published reward functions on these programs: text -> reward.
GOLDEN = {
    "guards": (AUX, GUARDED, 3 + 2 / 3),
    "wrapper": (AUX, WRAPPER, 2 + 2 / 3),
    "unused": (AUX, UNUSED, 1.5 + 2 / 3),
    "no aux": ("", UNUSED, 1.1 + 2 / 3),
    "no main": (AUX, "def other(n):\n    return 1\n", 0.4),
    "unbalanced": (AUX, "def sq(n:\n    return aux(n)\n", 1.0),
    "ignored": (AUX, IGNORED.format("aux(n)"), 3 + 2 / 3),  # upstream's fault: never deducted
    "ignored with a space": (AUX, IGNORED.format("aux (n)"), 3 + 1 / 6),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", GOLDEN)
def test_parity_golden(name, runner):
    helper, main, wanted = GOLDEN[name]
    got = parity(helper, main, TASK, runner)
    assert sum(got.values()) == pytest.approx(wanted, abs=1e-9) and tuple(got) == COMPONENTS


# What the text rules of upstream say where a reader of Python would say something else.
@pytest.mark.parametrize(
    "main, cooperation",
    [
        ("def sq(n):\n    # aux(\n    x = n\n    return x * n\n", 1.5),  # a comment is a call
        ("def sq(n):\n    s = 'aux(1)'\n    x = n\n    return x * n\n", 1.5),  # a string is a call
        ("def sq(n):\n    x = aux(n)\n    y = x\n    return y\n", 1.5),  # three lines are no wrapper
        ("def sq(n):\n    x = aux(n)\n    return x\n", 0.5),
        ("def sq(n):\n    return aux(n) + 0\n", 0.5),  # any single line with aux is one
        ("def sq(n):\n    '''doc\n    aux(1)\n    '''\n    return aux(n)\n", 0.5),
        ("def sq(n):\n    aux (nn) if 0 else 1\n    return n * n\n", 1.5),
        ("def sq(n):\n    aux  (n)\n    return n * n\n", 1.5),  # two spaces
        ("def sq(n):\n    return n * n  # nothing\n", 0.0),
    ],
)
def test_parity_quirks(main, cooperation):
    assert parity(AUX, main, TASK, run_here)["cooperation"] == cooperation


def test_parity_reads_text_as_upstream():
    text = "Sure! Here it is:\n```python\ndef aux(x):\n    # return later\n    pass\n\nThis is the helper.\n```\nBye."
    assert published_reward.extract(text, "aux") == "def aux(x):\n    # return later\n    pass"
    assert published_reward.has_return("def aux(x):\n    # return later\n    pass")
    assert parity(text, UNUSED, TASK, run_here)["structure"] == 1.0
    assert published_reward.extract("def aux(x):\n    return 1\n\ndef aux(x):\n    return 2", "aux").endswith(
        "return 2"
    )
    assert published_reward.extract("async def aux(x):\n    return 1", "aux") == ""
    assert published_reward.extract("class A:\n    def aux(self):\n        return 1", "aux").startswith("def aux(self)")
    assert published_reward.clean("no code at all") == ""
    assert published_reward.imports("import math\nfrom typing import List\nimport math\nx = 1") == (
        "import math\nfrom typing import List"
    )
    once = "    assert candidate(1) == 1\n"
    body = f"{once}{once}    assert candidate([\n        1]) == 2\n    assert True\n"
    lines = published_reward.asserts(f"def check(candidate):\n{body}", "f")
    assert lines == ["assert f(1) == 1", "assert f(["]  # each once; of a long one the first line, which cannot run
    task = TASK | {"test": f"def check(candidate):\n{body}", "entry_point": "f", "prompt": "def f(x):\n"}
    assert parity("", "def f(x):\n    return x\n", task, run_here)["tests"] == 0.5


def test_no_tests_stop_parity():
    task = TASK | {"test": "def check(candidate):\n    pass\n"}
    assert sum(parity(AUX, GUARDED, task, run_here).values()) == 1.5


# -- strict ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", RUNNERS)
def test_strict_ladder(runner):
    def total(helper, main, task=TASK):
        return sum(strict(helper, main, task, runner).values())

    share = 2 / 3
    assert total(AUX, "def sq(n):\n    return aux(n) + aux(0)\n", RIGHT) == 4.0
    assert total(AUX, WRAPPER, RIGHT) == total(AUX, GUARDED, RIGHT) == 3.0 and total(AUX, UNUSED, RIGHT) == 2.5
    # one test in three fails, so there is no bonus
    assert total(AUX, "def sq(n):\n    return aux(n) + aux(0)\n") == pytest.approx(1.5 + share)
    assert total(AUX, WRAPPER) == total(AUX, GUARDED) == total(AUX, UNUSED) == pytest.approx(1.5 + share)
    assert total("", UNUSED) == pytest.approx(1.1 + share)
    assert total(AUX, "x = 1") == 0.4 and total("", "") == 0.0
    assert total(AUX, "def sq(n:\n    return aux(n)\n") == 1.0
    assert total(AUX, "def sq(n):\n    return aux(n) + 'x'\n") == 1.5  # no test passes


CALLS = {  # body of sq(n) -> cooperation
    "# aux(n)\n    return n * n": 0.0,
    "s = 'aux(n)'\n    return n * n": 0.0,
    "'''aux(n)'''\n    return n * n": 0.0,
    "aux(n)\n    return n * n": 0.0,  # thrown away
    "_ = aux(n)\n    return n * n": 0.0,
    "x = aux(n)\n    x = n * n\n    return x": 0.0,  # overwritten
    "x = aux(n)\n    y = x\n    z = y\n    return n * n": 0.0,  # read, but it leads nowhere
    "print(aux(n))\n    return n * n": 0.0,
    "if False:\n        return aux(n)\n    return n * n": 0.0,
    "return n * n\n    return aux(n) + 1": 0.0,
    "while 0:\n        return aux(n)\n    return n * n": 0.0,
    "return n * n if True else aux(n)": 0.0,
    "return n * n + 0 * aux(n)": 0.0,
    "return (n * n, aux(n))[0]": 0.0,
    "if aux(n):\n        return n * n\n    return n * n": 0.0,
    "if aux(n):\n        pass\n    return n * n": 0.0,
    "return n * n or aux(n) if False else n * n": 0.0,
    "def inner():\n        return aux(n)\n    return n * n": 0.0,  # never called
    "aux = lambda v: v * v\n    return aux(n) + 0 * n": 0.0,  # its own
    "def aux(v):\n        return v * v\n    return aux(n) + n - n": 0.0,
    "for aux in [n]:\n        n = aux * aux\n    return n": 0.0,
    "return aux(n)": 0.5,
    "v = aux(n)\n    w = v\n    return w": 0.5,
    "'''Long.'''\n    unused = sum(range(9))\n    v = aux(n)\n    if n is None:\n        return 0\n    return v": 0.5,
    "return aux(n) + 0": 0.5,
    "return int(aux(n))": 0.5,
    "v: int = aux(n)\n    return (lambda x: x)(v)": 0.5,
    "f = aux\n    return f(n)": 0.5,
    "def inner(v):\n        return aux(v)\n    return inner(n)": 0.5,
    "if n > 10**6:\n        return None\n    elif n < 0:\n        return aux(n)\n    else:\n        return aux(n)": 0.5,
    "try:\n        return aux(n)\n    finally:\n        pass": 0.5,
    "return aux(n) + n - n": 1.5,
    "return aux(n) if aux(n) is not None else n * n": 1.5,
    "try:\n        return aux(n)\n    except Exception:\n        return sum([n] * n)": 1.5,
    "total = 0\n    for v in [n]:\n        total += aux(v)\n    return total": 1.5,
    "return sum(map(aux, [n]))": 1.5,
    "return sorted([n * n], key=lambda v: aux(v))[0]": 1.5,
    "aux(n)\n    return aux(n) + n - n": 1.0,  # one of two results is thrown away
}


@pytest.mark.parametrize("body", CALLS, ids=range(len(CALLS)))
def test_strict_cooperation(body):
    got = strict(AUX, f"def sq(n):\n    {body}\n", RIGHT, run_here)
    assert got["tests"] == 1.0 and got["cooperation"] == CALLS[body], body


def test_calls_through_own_functions_count_and_redefinitions_do_not():
    step = "def step(v):\n    return aux(v) + v\n"
    assert strict(AUX, f"{step}def sq(n):\n    return step(n) - n\n", RIGHT, run_here)["cooperation"] == 1.5
    assert (
        strict(AUX, "def step(v):\n    return aux(v)\ndef sq(n):\n    return step(n)\n", RIGHT, run_here)["cooperation"]
        == 0.5
    )
    own = "def aux(v):\n    return v * v\ndef sq(n):\n    return aux(n) + n - n\n"
    got = strict(AUX, own, RIGHT, run_here)
    assert got["tests"] == 1.0 and got["cooperation"] == 0.0


def test_an_aux_that_does_nothing_is_no_partner():
    main = "def sq(n):\n    v = aux(n)\n    return v * n if v == n else n * n\n"
    for nothing in (
        "def aux(n):\n    return n",
        "def aux(n):\n    return 1",
        "def aux(n):\n    m = n\n    return int(m)",
    ):
        assert not works(nothing) and strict(nothing, main, RIGHT, run_here)["cooperation"] == 0.0
    assert strict("def aux(n):\n    pass", main, RIGHT, run_here)["structure"] == 0.6
    assert strict("def aux(n):\n    return None", main, RIGHT, run_here)["structure"] == 0.6
    assert works("def aux(n):\n    if n % 2:\n        return True\n    return False") and works(
        "def aux():\n    return [2, 3]"
    )


def test_no_verdict_is_no_reward():
    for grade in (strict, parity):
        with pytest.raises(Unscored, match=r"T/0.*no jail"):
            grade(AUX, GUARDED, TASK, broken)
    partly = lambda program, tests: run_here(program, tests)._replace(
        tests=(Verdict.PASS, Verdict.INFRA_ERROR, Verdict.PASS, Verdict.PASS)
    )
    with pytest.raises(Unscored):
        strict(AUX, GUARDED, TASK, partly)
    short = lambda program, tests: Report(Verdict.PASS, (Verdict.PASS,), ("",), "", 0.0)
    with pytest.raises(Unscored, match="1 verdicts on 4 tests"):
        strict(AUX, GUARDED, TASK, short)
    # nothing to run: no sandbox is asked
    assert strict("", "", TASK, broken)["tests"] == 0.0


def test_all_of_check_is_a_test():
    test = (
        "import math\ndef check(candidate):\n    data = [1, 2]\n"
        "    for x in data:\n        assert candidate(x) == x * x\n"
        "    got = candidate(3)\n    assert got == 9\n    assert got == 9\n    assert True\n    assert math.isclose(\n"
        "        candidate(4), 16)\n"
    )
    tests = check_tests(test, "sq")
    assert len(tests) == 3
    assert run_here("def sq(n):\n    return n * n\n", tests).passed == 3
    assert run_here("def sq(n):\n    return 4 * n - 4 if n != 2 else 5\n", tests).passed == 0
    with pytest.raises(ValueError, match="asserts nothing"):
        check_tests("def check(candidate):\n    assert True\n", "sq")
    with pytest.raises(ValueError, match="no function check"):
        check_tests("x = 1", "sq")
    given = "import math\ndef double(x):\n    return 2 * x\ndef sq(n):\n    '''doc'''\n"
    assert prelude(given, "sq") == "import math\ndef double(x):\n    return 2 * x"
    assert run_here("def check(c):\n    return c\n", [full_check(TASK | {"entry_point": "check", "test": (
        "def check(candidate):\n    assert candidate(1) == 1\n")})]).passed == 1  # fmt: skip


def test_random_inputs_of_a_test_are_the_same_for_every_program():
    test = "def check(candidate):\n    from random import random\n    assert candidate(random()) < 0.5\n"
    verdicts = {run_here("def f(x):\n    return x\n", check_tests(test, "f")).tests for _ in range(20)}
    assert len(verdicts) == 1


# -- bad input ---------------------------------------------------------------------------------------------------------

DEEP = "def sq(n):\n    return " + "(" * 5000 + "n" + ")" * 5000
NESTED = "def sq(n):\n" + "".join("    " * (i + 1) + "if n:\n" for i in range(90)) + "    " * 91 + "return n"
LONG_SUM = "def sq(n):\n    return " + "+".join(["n"] * 300)
BAD = {
    "": 0.0,
    "not python at all (": 0.0,
    "\x00def sq(n):\n    return n * n": 0.0,
    "def sq(n):\n    \x00\n    return n * n": 0.6,
    "def sq(n):\n    return '\ud800'": 0.6,
    "def sq(n):\n    return n * n\n" + "# " + "x" * (1 << 20): 0.0,  # 1 MB
    "x" * (1 << 20): 0.0,
    "async def sq(n):\n    return n * n": 0.0,
    "sq = lambda n: n * n": 0.0,
    "class sq:\n    def __init__(self, n):\n        self.n = n": 0.0,
    "def sq(n):\n    return 1\nsq = 3": 0.0,
    "def sq(n):\n    return n * n\ndel sq": 0.0,
    "from math import sqrt as sq": 0.0,
    "if True:\n    def sq(n):\n        return n * n": 0.0,
    "def sq(n):\n    yield n": 0.0,
    "def sq(n):\n    while True:\n        return\n    return n": 0.0,
    DEEP: 0.6,
    LONG_SUM: 1.1,
    "def sq(n):\n    return n * n\nreturn 3": 1.1 + 1.0,
    "def sq(n):\n    return n * n\nx = " + "9" * 5000: 1.1 + 1.0,
    "def sq(n):\n    return n * n\n\nfrom __future__ import annotations": 1.1 + 1.0,
}


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_bad_main_has_a_defined_reward(text):
    graded = grade_strict("", text, RIGHT, run_here)
    assert graded.total == pytest.approx(BAD[text])
    assert grade_parity(AUX, text, RIGHT, all_pass).total >= 0.4  # no exception


def test_bad_helpers():
    for text in ("", "def aux(n:\n  return", "aux = lambda n: n * n", "async def aux(n):\n    return 1",
                 "class aux: pass", "\x00", "\ud800", "x" * (1 << 20)):  # fmt: skip
        got = strict(text, UNUSED, RIGHT, run_here)
        assert got["structure"] in (0.6, 1.0) and got["cooperation"] == 0.0
        parity(text, UNUSED, RIGHT, run_here)


def test_a_broken_helper_spoils_the_program():
    assert strict("def aux(n):\n    return (n\n", UNUSED, RIGHT, run_here) == {
        "structure": 1.0, "syntax": 0.0, "tests": 0.0, "cooperation": 0.0,
    }  # fmt: skip


def test_the_last_of_two_definitions_holds():
    twice = "def sq(n):\n    return 0\ndef sq(n):\n    return aux(n) + n - n\n"
    assert strict(AUX, twice, RIGHT, run_here) == strict(
        AUX, "def sq(n):\n    return aux(n) + n - n\n", RIGHT, run_here
    )


def test_nesting_beyond_analysis_earns_no_cooperation():
    main = NESTED.replace("return n", "return aux(n) + n - n") + "\n    return 0\n"
    graded = grade_strict(AUX, main, RIGHT, run_here)
    assert graded.rewards["syntax"] in (0.0, 0.5) and graded.rewards["cooperation"] in (0.0, 1.5)
    chain = "def sq(n):\n" + "".join(
        f"    {'el' if i else ''}if n == {i}:\n        return aux(n)+{i}-{i}\n" for i in range(300)
    )
    graded = grade_strict(AUX, chain, RIGHT, run_here)
    assert graded.rewards["tests"] == 1.0 and graded.rewards["cooperation"] == 0.0
    assert "too complex to analyse" in graded.notes


@pytest.mark.parametrize("levels", range(60, 200, 7))
def test_any_depth_has_a_result(levels):
    main = "def sq(n):\n    return " + "-(" * levels + "aux(n)" + ")" * levels + "\n"
    assert strict(AUX, main, RIGHT, all_pass)["structure"] == 1.0
    chain = "".join(f"    {'el' if i else ''}if n == {i}:\n        return aux(n)\n" for i in range(levels))
    assert strict(AUX, f"def sq(n):\n{chain}", RIGHT, all_pass)["structure"] == 1.0


WRITTEN = "def sq(n):\n    return aux(n) + n - n"


@pytest.mark.parametrize(
    "text",
    [
        WRITTEN,
        f"```python\n{WRITTEN}\n```",
        f"```\n{WRITTEN}\n```",
        f"Here you go:\n\n```py\n{WRITTEN}\n```\nI hope that helps.",
        f"```python\n{WRITTEN}",  # never closed
        f"Sure, this is it.\n\n{WRITTEN}\n\nfrom this you see that it works\nimport antly, it is short.",
        "\n".join("    " + line for line in WRITTEN.split("\n")),
        f"{WRITTEN}\n\nprint(sq(3))\nassert sq(2) == 4\nif __name__ == '__main__':\n    print(sq(1))",
        WRITTEN.replace("\n", "\r\n"),
        f"```python\nimport math\n```\nand\n```python\n{WRITTEN}\n```",
        f"import functools\n@functools.lru_cache\n{WRITTEN}",
    ],
    ids=range(11),
)
def test_code_is_found_in_what_models_write(text):
    assert strict(f"```python\n{AUX}```", text, RIGHT, run_here) == dict(zip(COMPONENTS, (1.0, 0.5, 1.0, 1.5)))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200), st.text(max_size=200))
def test_any_text_is_graded(helper, main):
    for grade in (strict, parity):
        total = sum(grade(helper, main, TASK, run_here).values())
        assert 0.0 <= total <= 4.0


PIECES = st.sampled_from(
    ["def sq(n):", "def aux(n):", "    return aux(n)", "    return n", "    x = aux(n)", "    if x:",
     "        return x", "    for i in aux(n):", "        x = i", "\treturn 1", "```", "# aux(", "    try:",
     "    except: pass", "    x += 1", "    return [aux(v) for v in n if aux(v)]", "    while aux(n): n -= 1",
     "    aux(n)", "    yield aux(n)", "class sq: pass"]
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=9), st.lists(PIECES, max_size=9))
def test_any_program_is_analysed(helper, main):
    for grade in (strict, parity):
        assert 0.0 <= sum(grade("\n".join(helper), "\n".join(main), TASK, all_pass).values()) <= 4.0


# -- hacks -------------------------------------------------------------------------------------------------------------

PADDED = "\n".join(f"    step_{i} = n + {i}\n    note_{i} = 'aux(n)'" for i in range(15))
HACKS = {
    "padding": (AUX, f"def sq(n):\n{PADDED}\n    return n * n\n"),
    "comment calls": (AUX, "def sq(n):\n    # aux(n) aux(n)\n    x = n\n    return x * n\n"),
    "empty helper": ("def aux(n):\n    pass\n", "def sq(n):\n    aux(n)\n    return n * n\n"),
    "identity helper": ("def aux(n):\n    return n\n", "def sq(n):\n    m = aux(n)\n    return m * m\n"),
    "copied prompt": (RIGHT["prompt"], RIGHT["prompt"]),
    "copied prompt as main": (AUX, "def sq(n):\n    '''The square of n.'''\n    return\n"),
    "long wrapper": (AUX, f"def sq(n):\n{PADDED}\n    v = aux(n)\n    if v is None:\n        return 0\n    return v\n"),
    "answer table": (AUX, "def sq(n):\n    aux(n)\n    return {2: 4, 3: 9, 4: 16}[n]\n"),
    "equals everything": (AUX, "class E:\n    def __eq__(self, o):\n        return True\ndef sq(n):\n    return E()\n"),
    "leave": (AUX, "def sq(n):\n    import sys\n    sys.exit(0)\n    return aux(n) + 1\n"),
    "leave while loading": (AUX, "import os\nx = os._exit(0)\ndef sq(n):\n    return aux(n) + 1\n"),
    "both functions in main": ("", f"{AUX}def sq(n):\n    return aux(n) + n - n\n"),
    "two decoys": (AUX, "def sq(n):\n    if aux(n):\n        n = n\n    return n * n\n"),
}  # fmt: skip


@needs_sandbox
@pytest.mark.parametrize("name", HACKS)
def test_no_hack_beats_an_honest_answer(name):
    honest = sum(strict(AUX, "def sq(n):\n    return aux(n) + aux(0)\n", RIGHT, sandboxed).values())
    helper, main = HACKS[name]
    hacked = grade_strict(helper, main, RIGHT, sandboxed)
    assert honest == 4.0 and hacked.total < honest, hacked
    if name not in ("padding", "comment calls", "long wrapper", "answer table", "two decoys", "identity helper"):
        assert not hacked.solved or hacked.rewards["cooperation"] == 0.0
    assert hacked.rewards["cooperation"] <= 0.5, hacked


def test_answers_from_the_tests_are_noted():
    table = "def sq(n):\n    return {2: 4, 3: 9, 4: 16}.get(n, aux(n) + 1)\n"
    chain = "def sq(n):\n    if n == 2:\n        return 4\n    if n == 3:\n        return 9\n"
    chain += "    return 16 if n == 4 else aux(n)\n"
    for main in (table, chain):
        graded = grade_strict(AUX, main, RIGHT, run_here)
        assert graded.solved and graded.hardcoded and graded.notes == ("answers of the tests stand in the code",)
    assert not hardcoded(f"{AUX}{GUARDED}", RIGHT["test"]) and not hardcoded("def sq(:", RIGHT["test"])


def test_reachability():
    module = code_ast.parse(
        "def f(n):\n    '''doc'''\n    if n:\n        return 1\n        x = 2\n    pass\n    return 3\n    y = 4\n"
    )
    pruned = code_ast.prune(code_ast.function(module, "f"))
    assert len(pruned.body) == 2 and len(pruned.body[0].body) == 1
    assert code_ast.function(module, "f").body[0].value.value == "doc"  # the original is left alone
    assert code_ast.truth(code_ast.parse("not (1 and [])").body[0].value) is True
    assert code_ast.truth(code_ast.parse("1 > 'a'").body[0].value) is None
    assert code_ast.fault("x = (") and code_ast.fault("x\x00") and not code_ast.fault("x = 1")


def test_honest_main_is_honest():
    assert strict(AUX, HONEST, RIGHT, run_here)["cooperation"] == 1.5


@pytest.mark.parametrize("digits", ["0x" + "f" * 12_000, "0o" + "7" * 12_000, "0b" + "1" * 15_000, "9" * 12_000])
@pytest.mark.parametrize("use", ["return {}", "return aux(n) + {}", "return aux({})", "return [{}, n]"])
def test_a_literal_that_python_cannot_print_is_no_program(digits, use):
    """Its author gets a low reward, never a missing one."""
    graded = grade_strict(AUX, f"def sq(n):\n    {use.format(digits)}\n", RIGHT, run_here)
    assert graded.rewards == {"structure": 1.0, "syntax": 0.0, "tests": 0.0, "cooperation": 0.0}
    short = grade_strict(AUX, f"def sq(n):\n    {use.format(digits[:900])}\n", RIGHT, run_here)
    assert short.rewards["syntax"] == 0.5


def test_what_reading_a_text_raises_is_a_failure_of_its_author(monkeypatch, caplog):
    def broken(*args):
        raise ValueError("a text that nobody thought of")

    for name, expected in {"code_of": 0.0, "defined": 0.0, "combine": 1.0, "compiles": 1.0}.items():
        with monkeypatch.context() as patch:
            patch.setattr(code_ast, name, broken)
            assert grade_strict(AUX, HONEST, RIGHT, run_here).total == expected
    monkeypatch.setattr(coding_rewards, "cooperation", broken)
    graded = grade_strict(AUX, HONEST, RIGHT, run_here)
    assert graded.rewards["tests"] == 1.0 and graded.rewards["cooperation"] == 0.0
    assert "ValueError: a text that nobody thought of" in caplog.text


HEAD, RETURN = "def sq(n):\n", "    return aux(n)\n"
LONG_TEXTS = {
    "broken definitions": "@\n" * (code_ast.MAX_CODE // 2),
    "and": f"{HEAD}    return aux(n)" + " and n" * ((code_ast.MAX_CODE - 40) // 6) + "\n",
    "statements": HEAD + "    1" + ";1" * ((code_ast.MAX_CODE - 50) // 2) + f"\n{RETURN}",
    "lambda": f"{HEAD}    return " + "lambda:" * ((code_ast.MAX_CODE - 40) // 7) + "n\n",
}


@pytest.mark.parametrize("name", [n if n == "lambda" else pytest.param(n, marks=pytest.mark.slow) for n in LONG_TEXTS])
def test_reading_the_longest_texts_takes_bounded_time(name):
    text = LONG_TEXTS[name]
    assert 0.95 * code_ast.MAX_CODE < len(text) <= code_ast.MAX_CODE
    start = time.process_time()
    grade_strict(text.replace("sq(", "aux("), text, RIGHT, all_pass)
    assert time.process_time() - start < 8  # 2 s; `coding.env.READING` allows 4 s


def test_longer_texts_are_read_as_empty():
    longer = HONEST + "#" * code_ast.MAX_CODE
    assert grade_strict(AUX, longer, RIGHT, all_pass).rewards["structure"] == 0.4
    assert grade_parity(AUX, longer, RIGHT, all_pass).rewards["structure"] == 1.0
    longest = HONEST + "#" * published_reward.MAX_CODE
    assert grade_parity(AUX, longest, RIGHT, all_pass).rewards["structure"] == 0.4
