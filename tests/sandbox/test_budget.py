"""One budget for a whole judge call: every program gets a verdict, and the machine's delays are not its own."""

import dataclasses
import gc
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import HostEnv
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.sandbox import budget, child, codec, jails
from jaxmarl_llm.sandbox import judge as sandbox
from jaxmarl_llm.sandbox.judge import Limits, Test, Verdict, judge

REFUSALS = {tier: sandbox.examine(tier) for tier in sandbox.TIERS}
needs_a_tier = pytest.mark.skipif(all(REFUSALS.values()), reason=f"no tier works here: {REFUSALS}")
LIMITS = Limits(cpu=0.5, total=1.5, wall=1.0, memory_mb=256)
MODULUS = 2**61 - 1  # integers that differ by it have one hash


def judged(program, test, limits=LIMITS):
    return judge(program, [Test(test, ("f",))], limits)


@needs_a_tier
def test_sleeping_within_the_limit_of_each_call_is_a_timeout():
    report = judged("import time\ndef f(): time.sleep(0.4)", "for _ in range(400): f()")
    assert report.tests == ("timeout",) and report.valid
    assert report.details[0].startswith(("no answer within", "more than 1 s in all"))
    within = judged("import time\ndef f(): time.sleep(0.1)", "for _ in range(5): f()")
    assert within.tests == ("pass",)  # the budget is one second


@needs_a_tier
def test_computing_within_the_limit_of_each_call_is_a_timeout():
    report = judged("def f():\n    for _ in range(10**6): pass", "for _ in range(400): f()", Limits(0.5, 1.0, 60.0))
    assert report.tests == ("timeout",) and report.details[0].startswith("more than ")


@needs_a_tier
def test_decoding_spends_the_budget():
    """Each reply is within every limit, and the judge computes more than the program."""
    program = "a = [set() for _ in range(60_000)]\ndef f(): return a"
    report = judged(program, "for _ in range(400): f()", Limits(cpu=0.8, total=0.8, wall=60.0))
    assert report.tests == ("timeout",) and report.valid


def test_full_garbage_collections_spend_nothing():
    """They go over all objects of the process that judges, a large one; young objects may be those of a reply."""
    gc.disable()
    try:
        objects = [[] for _ in range(500_000)]
        spent, start = budget.Budget(1.0, 1.0), time.thread_time()
        gc.collect(0)
        assert spent.own() > (time.thread_time() - start) / 2
        spent, start = budget.Budget(1.0, 1.0), time.thread_time()
        gc.collect(2)
        assert spent.own() < (time.thread_time() - start) / 10 and len(objects) == 500_000
    finally:
        gc.enable()


@needs_a_tier
@pytest.mark.parametrize("test", ["for _ in range(f()): pass", "sum(i for i in range(f()))", "while f: pass"])
def test_a_test_that_computes_for_ever_is_a_timeout(test):
    before = signal.getsignal(signal.SIGVTALRM)
    report = judged("def f(): return 10**15", test, Limits(0.3, 0.6, 30.0))
    assert report.tests == ("timeout",) and report.valid and report.details[0] == "more than 0.6 s of CPU in all"
    assert signal.getsignal(signal.SIGVTALRM) == before and signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@needs_a_tier
def test_starting_jails_again_spends_the_budget():
    tests = [Test("f()", ("f",))] * 200
    report = judge("import os\ndef f(): os._exit(0)", tests, LIMITS, stop_after_timeouts=None)
    assert set(report.tests) == {"crash", "timeout"} and report.tests[0] == "crash" and report.tests[-1] == "timeout"
    assert report.valid and report.tests.count(Verdict.CRASH) < 100


@needs_a_tier
def test_after_the_end_of_the_budget_no_jail_starts():
    tests = [Test("for _ in range(400): f()", ("f",)), *[Test("f()", ("f",))] * 50]
    with mock.patch.object(sandbox, "Jail", side_effect=jails.Jail) as started:
        report = judge("import time\ndef f(): time.sleep(0.3)", tests, LIMITS, stop_after_timeouts=None)
    assert report.tests == ("timeout",) * 51 and started.call_count <= 2


@needs_a_tier
def test_the_budget_holds_in_other_threads_too():
    reports = []
    thread = threading.Thread(
        target=lambda: reports.append(judged("import time\ndef f(): time.sleep(0.4)", "for _ in range(400): f()"))
    )
    thread.start()
    thread.join(60)
    assert reports[0].tests == ("timeout",)


def test_what_is_counted():
    now = [100.0]
    with mock.patch.object(budget.time, "thread_time", lambda: now[0]):
        spent = budget.Budget(10.0, 5.0)
        now[0] += 1.0
        assert spent.left() == pytest.approx((9.0, 4.0)) and spent.over() == ""
        assert spent.left(cpu=2.0, wall=3.5) == pytest.approx((7.0, 0.5))
        assert spent.over(cpu=9.0) == "more than 10 s of CPU in all"
        spent.jails_cpu, spent.jails_wall = 3.0, 4.5
        assert spent.left(cpu=1.0) == pytest.approx((5.0, -0.5)) and spent.over() == "more than 5 s in all"


def clock_of(waited, slept, seconds=0.1, cpu=0.1):
    """A clock of a process with these numbers, which began 100 seconds ago."""
    now = {"waited": 0.0, "slept": 0}
    jail = SimpleNamespace(
        cpu=lambda: 0.0, _waited=lambda: now["waited"], _slept=lambda: now["slept"], limits=Limits(cpu=cpu), late=0.0
    )
    clock = jails._Clock(jail, seconds)
    clock._wall -= 100
    clock._next = 0.0
    now.update(waited=waited, slept=slept)
    return clock


def test_a_program_cannot_wait_by_its_own_doing():
    """Sleeping for moments on a busy machine is waiting for a processor, and no fault of the machine."""
    assert clock_of(waited=99.9, slept=2)() and isinstance(clock_of(99.9, 2).verdict, jails.Stopped)
    machine, program = clock_of(waited=99.9, slept=0), clock_of(waited=99.9, slept=3000)
    assert machine() and isinstance(machine.verdict, jails.Starved)
    assert program() and program.verdict.kind == "timeout"
    assert clock_of(99.9, 0).counted() < 1 < 99 < clock_of(99.9, 3000).counted()


def test_a_small_rest_of_the_budget_makes_no_fault_of_the_machine():
    """A program that has spent almost all would else be starved after moments."""
    assert not clock_of(waited=99.9999, slept=0, seconds=0.001, cpu=20.0)()


# The decoder


@pytest.mark.parametrize(
    "text",
    [
        "[" + ",".join(["[]"] * 150_000) + "]",
        "[" + ",".join(['{"s":[]}'] * 100_000) + "]",
        "[" * 250_000 + "]" * 250_000,
        "[" + "1," * 250_000 + "1]",
        '["' + "x" * 10 + '",' + "[]," * 150_000 + "1]",
    ],
)
def test_elements_are_limited_before_anything_is_built(text):
    with mock.patch.object(codec.json, "loads", side_effect=AssertionError("built")):
        with pytest.raises(codec.ProtocolError, match="more than 200000 elements"):
            codec.decode(text.encode())


@pytest.mark.parametrize("inside", ["[" * 300_000, ",{" * 200_000, '\\",[' * 100_000, "\\\\" * 300_000])
def test_signs_in_a_text_are_no_elements(inside):
    text = f'["{inside}",[1,2]]'
    assert child.elements(text) == 4 and len(codec.decode(text.encode())) == 2


def test_a_large_result_is_a_failure_of_the_program():
    if all(REFUSALS.values()):
        pytest.skip(str(REFUSALS))
    report = judged("def f(): return [0] * 300_000", "f()", dataclasses.replace(LIMITS, wall=20.0))
    assert report.tests == ("fail",) and "more than 200000 elements" in report.details[0]


@pytest.mark.parametrize(
    "values",
    [
        [range(k * MODULUS, k * MODULUS + 1) for k in range(1000)],
        [range(k * MODULUS, k * MODULUS + 9, 3) for k in range(1000)],
        [(range(k * MODULUS, k * MODULUS + 1), 1) for k in range(1000)],
    ],
)
def test_ranges_chosen_to_have_one_hash_are_refused(values):
    with pytest.raises(codec.ProtocolError, match="one hash"):
        codec.plain(codec.decode(child.encode(values).encode()))


@pytest.mark.parametrize(
    "values", [[range(k, k) for k in range(999)], [range(0, 9, 3 + k % 2) for k in range(999)], [range(9)] * 999]
)
def test_equal_ranges_are_no_crowd(values):
    assert codec.plain(codec.decode(child.encode(values).encode())) == values


# The pool


def host(seconds):
    return HostEnv("slow", ("a",), 1, (), lambda *a: None, lambda s: {}, lambda *a: None, seconds=seconds)


def test_a_pool_whose_timeout_is_shorter_than_a_step_is_refused():
    with pytest.raises(ConfigError, match=r"config.env.timeout: expected more than 30, .* of 'slow' may take, got 20"):
        EnvPool(lambda: host(30.0), workers=1, timeout=20.0)
    assert EnvPool(lambda: host(30.0), workers=0, timeout=20.0).timeout == 20.0  # without workers there is no timeout
    assert EnvPool(lambda: host(19.0), workers=1, timeout=20.0).timeout == 20.0
