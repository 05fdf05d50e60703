"""Programs of RL are compiled beside other steps, and not again."""

import os
import threading
import time

import jax
import pytest

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.runs import loop
from jaxmarl_llm.runs.ahead import Ahead

CONFIG = {
    "steps": 1,
    "batch": 2,
    "group": 2,
    "reward": {"payoff": 1.0},
    "sft": {"steps": 2, "batch": 4, "samples": 8},
    "env": {"name": "matrix", "eval_tasks": 2},
    "team": {"max_new_tokens": 1, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
    "run": {"tensorboard": False, "rollouts": {"every": 0}},
}


def recipe():
    cfg = from_dict(grpo.Config, CONFIG)
    return cfg, grpo.make(cfg)


class Compiled:
    """Threads in which a program is compiled while the block runs.

    Args:
        name: Name of the program's function.
    """

    def __init__(self, name="rollout"):
        self.name = f"jit({name})"

    def __enter__(self):
        self.threads: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event, duration, fun_name="", **_):
        if event == "/jax/core/compile/backend_compile_duration" and fun_name == self.name:
            self.threads.append(threading.current_thread().name)


def test_a_run_compiles_its_rollouts_beside_stage_0_and_once(tmp_path):
    cfg, made = recipe()
    with Compiled() as compiled:
        loop.fit(cfg, made, tmp_path)
    assert len(compiled.threads) == 3, "two evaluations and the rollout of training"
    assert all(name.startswith("compile ahead") for name in compiled.threads)


def test_the_second_step_waits_for_what_is_compiled(tmp_path):
    cfg, made = recipe()
    stepped, take, done, seen = threading.Event(), made.step, [], []

    def step(state, logger):
        out = take(state, logger)
        stepped.set()
        return out

    def slow():
        stepped.wait(100)
        time.sleep(0.5)
        done.append(1)

    made.step, made.ahead = step, lambda state, **wanted: [slow]
    loop.fit(cfg, made, tmp_path, callbacks=[lambda number, state, metrics: seen.append(list(done))])
    assert seen[0] == [1]


def test_without_stage_0_nothing_is_compiled_ahead(tmp_path):
    cfg = from_dict(grpo.Config, CONFIG | {"sft": {"steps": 0}})
    with Compiled() as compiled:
        loop.fit(cfg, grpo.make(cfg), tmp_path)
    assert compiled.threads == ["MainThread"] * 3


@pytest.mark.parametrize("supervised", [2, 0])
def test_a_long_run_compiles_its_updates_before_the_second_step(supervised, tmp_path, monkeypatch):
    """Beside the first step of stage 0, or after the first step of RL; a run of fewer steps than LONG does not."""

    def threads(long):
        """Threads that compile ``accumulate``; models of another width have other programs."""
        monkeypatch.setattr(loop, "LONG", long)
        backbone = CONFIG["team"]["backbone"] | {"intermediate_size": 8 * (long + supervised)}
        steps = {"steps": 2, "sft": CONFIG["sft"] | {"steps": supervised}}
        cfg = from_dict(grpo.Config, CONFIG | steps | {"team": CONFIG["team"] | {"backbone": backbone}})
        with Compiled("accumulate") as compiled:
            count = lambda *_: seen.append(len(compiled.threads))
            loop.fit(cfg, grpo.make(cfg), tmp_path / str(long), callbacks=[count])
        return compiled.threads

    seen = []
    assert set(threads(supervised + 3)) <= {"MainThread"}
    seen.clear()
    ours = [thread for thread in threads(supervised + 2) if thread.startswith("compile ahead")]
    assert ours and seen == [seen[0]] * len(seen)


def test_an_error_is_left_to_the_run_and_the_others_go_on():
    def fail():
        raise ValueError("no such program")

    done: list[int] = []
    with Ahead() as ahead:
        ahead.wait()
        ahead.begin([lambda: done.append(1), fail, lambda: done.append(2)])
        ahead.wait()
    assert sorted(done) == [1, 2] and not ahead.busy


def test_all_threads_take_what_a_compiler_adds():
    """A thread without work waits for a compiler in progress, which may add some."""
    both = threading.Barrier(2, timeout=100)

    def first():
        time.sleep(0.2)
        return [both.wait, both.wait]

    with Ahead() as ahead:
        ahead.begin([first])
        ahead.wait()
    assert not both.broken and both.n_waiting == 0


def test_the_end_compiles_nothing_more():
    begun, go, done = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        go.wait(100)
        return [lambda: done.append(1)]

    with Ahead() as ahead:
        ahead.begin([first, *[lambda: begun.wait(100)] * 3, *[lambda: (go.wait(100), done.append(2))] * 50])
        begun.wait(100)
        threading.Timer(0.3, go.set).start()
    assert not ahead.busy and 1 not in done and len(done) <= (os.cpu_count() or 1)
