"""A task and programs for the tests of the coding environment."""

from jaxmarl_llm.sandbox.judge import Report, Verdict

TASK = {
    "id": "T/0",
    "index": 0,
    "entry_point": "sq",
    "prompt": "def sq(n):\n    '''The square of n.'''\n",
    "test": (
        "def check(candidate):\n"
        "    assert candidate(2) == 4\n"
        "    assert candidate(3) == 9\n"
        "    assert candidate(4) == 17\n"
    ),
    "solution": "",
}  # the last test is wrong on purpose: a share of 2/3
RIGHT = TASK | {"test": TASK["test"].replace("17", "16")}
AUX = "def aux(n):\n    return n * n\n"
HONEST = "def sq(n):\n    v = aux(abs(n))\n    if n == 0:\n        return 0\n    return v + n - n % 10 - n // 10 * 10\n"
GUARDED = "def sq(n):\n    v = aux(n)\n    if v < 0:\n        return 0\n    return v\n"
WRAPPER = "def sq(n):\n    return aux(n)\n"
UNUSED = "def sq(n):\n    return n * n\n"


def run_here(program, tests):
    """A stand-in for the sandbox that runs the test's own, harmless programs in this process."""
    scope = {}
    try:
        exec(program, scope)
    except Exception as error:
        failed = (Verdict.FAIL,) * len(tests)
        return Report(Verdict.FAIL, failed, (repr(error),) * len(tests), repr(error), 0.0)
    verdicts, details = [], []
    for test in tests:
        names = {"__name__": "test"}
        exec(test.setup, names)
        names |= {f: scope[f] for f in test.functions}
        try:
            exec(test.code, names)
        except Exception as error:
            verdicts.append(Verdict.FAIL)
            details.append(f"{type(error).__name__}: {error}")
        else:
            verdicts.append(Verdict.PASS)
            details.append("")
    return Report(Verdict.PASS, tuple(verdicts), tuple(details), "", 0.0)


def broken(program, tests):
    """A sandbox without a verdict."""
    lost = (Verdict.INFRA_ERROR,) * len(tests)
    return Report(Verdict.INFRA_ERROR, lost, ("no jail",) * len(tests), "no jail", 0.0)
