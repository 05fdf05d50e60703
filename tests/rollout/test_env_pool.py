"""Worker processes: results in order, and every way a call can fail is a value, not the end of the pool."""

import functools
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from unittest import mock

import jax
import pebble
import pytest

from jaxmarl_llm.messages import Action, HostEnv
from jaxmarl_llm.rollout.env_pool import EnvPool, Failure

TIMEOUT = 1.5


class Strange(Exception):
    """Pickles, but does not unpickle: it wants two arguments."""

    def __init__(self, a, b):
        super().__init__(f"{a} {b}")


def reset(seed, task):
    if task == "slow":
        time.sleep(0.3)
    return (seed, task, os.getpid())


def step(seed, state, actions):
    word = actions["a"].text
    if word == "raise":
        raise KeyError("no such order")
    if word == "strange":
        raise Strange("not", "picklable")
    if word == "hang":
        time.sleep(60)
    if word == "exit":
        os._exit(3)
    if word.startswith("signalled"):  # the first time, where a file's name follows
        path = Path(word.removeprefix("signalled"))
        if path == Path() or not path.exists():
            path.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
    if word == "sys.exit":
        sys.exit(4)
    if word == "lambda":
        return lambda: None, {}, False
    return (*state, word, seed), {"a": {"accuracy": float(seed)}}, word == "end"


def make(path=None, forbidden=False):
    if forbidden:
        raise RuntimeError("no database")
    if path is not None:
        with open(path, "a") as f:
            f.write(f"{os.getpid()}\n")
    return HostEnv("toy", ("a",), 3, ("accuracy",), reset, lambda state: {}, step)


def call(word, seed=0):
    return (seed, ("state",), {"a": Action(word, (1, 2))})


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tmp_path_factory.mktemp("workers") / "built"


@pytest.fixture(scope="module")
def pool(built):
    with EnvPool(functools.partial(make, str(built)), workers=2, timeout=TIMEOUT) as pool:
        pool.map("reset", [(0, "slow")] * 4)  # both workers have started
        yield pool


@pytest.fixture(params=["processes", "inline"])
def either(request):
    """The pool, and one without processes: what does not need a timeout holds for both."""
    if request.param == "processes":
        yield request.getfixturevalue("pool")
    else:
        with EnvPool(make, workers=0) as inline:
            yield inline


def works(pool):
    got = pool.map("step", [call(f"w{i}", i) for i in range(6)])
    return [(g[0][1:], g[1]["a"]["accuracy"]) for g in got] == [((f"w{i}", i), float(i)) for i in range(6)]


def test_results_in_order(either):
    assert works(either)
    assert either.map("reset", [(i, t) for i, t in enumerate(["slow", "x", "slow", "y", "z"])]) == [
        (i, t, mock.ANY) for i, t in enumerate(["slow", "x", "slow", "y", "z"])
    ]
    assert either.map("step", []) == []


def test_work_is_spread_over_processes_that_build_once(pool, built):
    pids = {pid for _, _, pid in pool.map("reset", [(i, "slow") for i in range(6)])}
    assert len(pids) == 2 and os.getpid() not in pids
    makers = [int(line) for line in built.read_text().split()]
    assert len(makers) == len(set(makers)) and os.getpid() in makers and pids <= set(makers)


def test_an_exception_is_a_failure_in_its_place(either):
    good, bad, last = either.map("step", [call("x", 1), call("raise"), call("end", 2)])
    assert good[1] == {"a": {"accuracy": 1.0}} and last[2] is True
    assert bad[:2] == ("raised", "KeyError: 'no such order'")
    assert 'raise KeyError("no such order")' in bad.trace and "rollout/env_pool.py" not in bad.trace
    assert works(either)


def test_an_unknown_method_is_a_failure(either):
    (bad,) = either.map("undo", [("state",)])
    assert bad.kind == "raised" and "undo" in bad.message


def test_a_hanging_call_times_out_and_the_others_are_answered(pool):
    started = time.monotonic()
    got = pool.map("step", [call("a", 1), call("hang"), call("b", 3), call("c", 4)])
    assert time.monotonic() - started < TIMEOUT + 10
    assert got[1] == Failure("timeout", f"no answer within {TIMEOUT:g} s")
    assert [g[0][1] for g in (got[0], got[2], got[3])] == ["a", "b", "c"]
    assert works(pool)


def test_a_dying_worker_is_a_failure_and_is_replaced(pool):
    got = pool.map("step", [call("a", 1), call("exit"), call("b", 3)])
    # Rarely a timeout: a death that pebble reads of before it knows the call, while the other worker is busy.
    assert got[1].kind in ("died", "timeout")
    assert (got[0][0][1], got[2][0][1]) == ("a", "b")
    assert works(pool)


def test_a_call_whose_worker_is_told_to_end_is_made_again(pool, tmp_path):
    """As a scheduler does to every process of a run; a call that does it each time is a failure."""
    word = f"signalled{tmp_path / 'once'}"
    got = pool.map("step", [call("a", 1), call(word, 2), call("b", 3)])
    assert [g[0][1] for g in got] == ["a", word, "b"]
    (bad,) = pool.map("step", [call("signalled")])
    assert bad.kind == "died"
    assert works(pool)


def test_a_worker_that_dies_at_rest_costs_nothing(pool):
    """Or one whose call is not known yet: either breaks the whole pool below us."""
    for _ in range(2):
        ((_, _, pid),) = pool.map("reset", [(0, "t")])
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        assert works(pool)


def test_a_pool_that_breaks_at_every_call_gives_failures(pool, monkeypatch):
    """Pebble reads of a death before it reads which call had begun."""
    slow = pebble.pool.process.TaskManager.task_start
    late = lambda *args: (time.sleep(0.6), slow(*args))
    monkeypatch.setattr(pebble.pool.process.TaskManager, "task_start", late)
    got = pool.map("step", [call("exit"), call("a", 1)])
    assert got[0].kind in ("died", "timeout") and got[1][0][1] == "a"
    monkeypatch.undo()
    assert works(pool)


@pytest.mark.parametrize("word", ["strange", "lambda", "sys.exit"])
def test_what_cannot_be_sent_back_is_a_failure(pool, word):
    (bad,) = pool.map("step", [call(word)])
    assert isinstance(bad, Failure)
    assert works(pool)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_factory_that_raises_shows_at_construction(workers):
    with pytest.raises(RuntimeError, match="no database"):
        EnvPool(functools.partial(make, forbidden=True), workers=workers)


def test_inline_runs_in_this_process():
    with EnvPool(make, workers=0) as inline:
        assert inline.map("reset", [(1, "t")]) == [(1, "t", os.getpid())]
        assert inline.env.name == "toy"


def device_of(seed, state, actions):
    return jax.devices()[0].platform, {"a": {"accuracy": float(jax.config.jax_platforms == "cpu")}}, True


def make_with_jax():
    return make()._replace(step=device_of)


def test_workers_leave_accelerators_alone(monkeypatch):
    """Whatever platform this process was told to use, and whether JAX came with the factory or not."""
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    with EnvPool(make_with_jax, workers=1, timeout=60) as pool:
        assert pool.map("step", [call("x")]) == [("cpu", {"a": {"accuracy": 1.0}}, True)]


def test_close_leaves_no_process():
    before = {p.pid for p in multiprocessing.active_children()}
    pool = EnvPool(make, workers=1, timeout=30)
    ((_, _, pid),) = pool.map("reset", [(0, "t")])
    assert pid in {p.pid for p in multiprocessing.active_children()}
    pool.close()
    assert {p.pid for p in multiprocessing.active_children()} <= before
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    pool.close()  # twice is once
