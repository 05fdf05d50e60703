"""SIGTERM and Ctrl-C: heard at once, also while a program compiles; the run is saved; a second Ctrl-C ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxmarl_llm.distributed import signals
from jaxmarl_llm.storage.checkpoint import Checkpointer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(os.name != "posix", reason="sends signals")

# The main thread is in one long call into C, as it is while a program compiles: it runs no signal handler.
BUSY = """
import hashlib, multiprocessing, time
from jaxmarl_llm.distributed import signals

def work():
    time.sleep(600)

if __name__ == "__main__":
    with signals.listening(), signals.at_exit(lambda: print("released", flush=True)):
        worker = multiprocessing.get_context("spawn").Process(target=work)
        worker.start()
        print(worker.pid, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


@pytest.fixture
def start(tmp_path):
    """(arguments of Python) -> a process, which is killed at the end. It does not ignore interrupts."""
    started = []

    def run(*arguments):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        told = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen([sys.executable, "-u", *arguments], cwd=ROOT, env=env, **told)
        signal.signal(signal.SIGINT, before)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_signals_are_answered_while_the_main_thread_is_busy(start, tmp_path):
    (tmp_path / "busy.py").write_text(BUSY)
    process = start(tmp_path / "busy.py")
    worker = int(process.stdout.readline())
    process.send_signal(signal.SIGTERM)
    assert process.stderr.readline().startswith("SIGTERM: heard; the run finishes the step in progress, saves it")
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("Ctrl-C: heard; the run finishes the step in progress, saves it and")
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline().startswith("Ctrl-C again: ended at once; the same command goes on")
    assert process.wait(timeout=30) == signals.EXIT_INTERRUPTED and process.stdout.readline() == "released\n"
    until = time.monotonic() + 30
    while time.monotonic() < until and Path(f"/proc/{worker}").exists():
        if Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # ended, and nobody has asked how
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{worker}").exists()


def until(condition):
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_what_was_asked_is_known_inside_and_forgotten_after(capfd):
    own, before = os.getpid(), signal.getsignal(signal.SIGINT)
    with signals.listening():
        assert signals.requested() == 0
        os.kill(own, signal.SIGTERM)
        until(lambda: signals.requested() == signals.EXIT_RETRY)
        os.kill(own, signal.SIGINT)
        until(lambda: signals.requested() == signals.EXIT_INTERRUPTED)
    assert signals.requested() == 0 and signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.count("heard") == 2


def test_a_second_interrupt_raises_in_a_main_thread_that_can_run(monkeypatch):
    monkeypatch.setattr(signals, "end_now", lambda code, ended: None)
    with pytest.raises(KeyboardInterrupt), signals.listening():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)


def test_another_thread_than_the_main_one_listens_to_nothing():
    before, inside = signal.getsignal(signal.SIGTERM), []

    def work():
        with signals.listening():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_function_that_hangs_at_exit_is_left():
    with signals.at_exit(lambda: time.sleep(60)):
        began = time.monotonic()
        signals.call_at_exit(0.1)
        assert time.monotonic() - began < 20


CONFIG = """
from ml_collections import ConfigDict
from jaxmarl_llm.config import from_dict, to_dict
from jaxmarl_llm.recipes import magrpo

def get_config(variant=""):
    return ConfigDict(to_dict(from_dict(magrpo.Config, {
        "steps": 100000, "batch": 4, "group": 2, "env": {"name": "matrix", "eval_tasks": 4}, "reward": {"payoff": 1.0},
        "team": {"max_new_tokens": 1, "remat": False, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
        "sft": {"steps": 0},
        "run": {
            "checkpoint_every": 100000, "eval_every": 0, "eval_greedy": False, "log_every": 1, "tensorboard": False
        },
    })))
"""


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(start, tmp_path):
    (tmp_path / "config.py").write_text(CONFIG)
    run = tmp_path / "run"
    process = start("-m", "jaxmarl_llm.cli.train", f"--config={tmp_path / 'config.py'}", f"--workdir={run}")
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    process.send_signal(signal.SIGINT)
    said, err = process.communicate(timeout=120)
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert process.returncode == signals.EXIT_INTERRUPTED, err
    assert "Ctrl-C: heard;" in err and "Traceback" not in err
    assert f"Ctrl-C: saved step {steps[-1]}; run the same command again to go on" in said
    assert Checkpointer(run, read_only=True).steps() == [steps[-1]] and not (run / "run.lock").exists()
