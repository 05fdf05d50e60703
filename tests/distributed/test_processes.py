"""Many processes are one run: real ones on this machine (gloo), that agree token for token, and that end together."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import pytest

from jaxmarl_llm.cli import evaluate
from jaxmarl_llm.distributed import deadlines, processes, rendezvous, sharding
from jaxmarl_llm.distributed.deadlines import Deadlines, Progress
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.distributed.processes import EXIT_RETRY
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.runs import loop
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.storage.workdir import Workdir
from tests.distributed import test_sharded_runs as sharded

ROOT = Path(__file__).parents[2]

CONFIG = """
from ml_collections import ConfigDict
from jaxmarl_llm.config import from_dict, to_dict
from jaxmarl_llm.recipes import grpo, magrpo

SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
TEAM = {"remat": False, "parameter_sharing": "shared", "backbone": {"family": "qwen3", **SHAPE}}
RUN = {
    "eval_every": 0,
    "eval_greedy": False,
    "log_every": 1,
    "tensorboard": False,
    "checkpoint_every": 2,
    "episodes": 1,
}
# SGD: Adam makes whole steps of what rounding leaves of a gradient of 0.
BOTH = {"optimizer": {"name": "sgd", "learning_rate": 0.2}, "mesh": {"data": -1}, "run": RUN}


def get_config(variant=""):
    if variant == "host":  # an odd number of tasks: the processes have different shares
        made = from_dict(grpo.Config, {
            "steps": 1, "batch": 3, "group": 2, "sft": {"steps": 0}, "team": {"max_new_tokens": 2, **TEAM}, **BOTH,
            "env": {"name": "chain_text", "eval_tasks": 3, "workers": 1, "max_prompt": 256}, "reward": {"format": 1.0},
        })
    elif variant == "team":  # two separate models through text
        made = from_dict(magrpo.Config, {
            "steps": 2, "batch": 4, "group": 2, "sft": {"steps": 0}, **BOTH, "reward": {"payoff": 1.0},
            "loss": {"entropy_coef": 1.0},  # payoffs may all be equal
            "team": {"max_new_tokens": 4, **TEAM, "parameter_sharing": "separate"},
            "env": {"name": "dilemma_text", "args": {"game": "split"}, "eval_tasks": 4, "max_prompt": 512},
        })
    else:
        made = from_dict(magrpo.Config, {
            "steps": 4, "batch": 8, "group": 4, "team": {"max_new_tokens": 1, **TEAM}, **BOTH,
            "env": {"name": "matrix", "eval_tasks": 4}, "reward": {"payoff": 1.0},
            "sft": {"steps": 6, "batch": 8, "samples": 16, "optimizer": {"name": "sgd", "learning_rate": 1.0}},
        })
    return ConfigDict(to_dict(made))
"""

# experiments.train that notes what is sampled, which environment calls are made and which prompt tokens are prefilled.
# HANG=process,step: sleeps there. SCATTER: rows of a launch are on other devices than the prefixes of their prompts.
TRAIN = """
import hashlib, itertools, os, time
import numpy as np
from jaxmarl_llm.cli import config_flags as cli, train
from jaxmarl_llm.generation import prefix_cache
from jaxmarl_llm.generation.prefix_cache import Prefixes
from jaxmarl_llm.rollout import array_runner, env_pool as workers, host_runner

def note(name, *words):
    with open(f"{cli.FLAGS.workdir}/{name}{cli.FLAGS.process or 0}.txt", "a") as file:
        print(*words, file=file)

def spied(original):
    def play(*args, version, held_out=False, **more):
        if os.environ.get("HANG") == f"{cli.FLAGS.process},{version}" and not held_out:
            time.sleep(600)
        played = original(*args, version=version, held_out=held_out, **more)
        said = played.tree.steps
        note("tokens", version, held_out, hashlib.sha256(said.tokens.tobytes() + said.valid.tobytes()).hexdigest())
        return played
    return play

def counted(self, method, calls, original=workers.EnvPool._map):
    note("calls", method, len(calls))
    return original(self, method, calls)

def scattered(known, capacity, turn=itertools.count()):
    return (np.arange(len(known)) + next(turn)) % known.shape[1]

def reused(self, variables, tasks, prompts, *args, original=Prefixes.prepare, **words):
    before, ready = self.prefilled_tokens, original(self, variables, tasks, prompts, *args, **words)
    note("prefixes", sum(map(len, prompts)), self.prefilled_tokens - before, self.moved_tokens)
    return ready

if __name__ == "__main__":
    Prefixes.prepare = reused
    prefix_cache.place_rows = scattered if "SCATTER" in os.environ else prefix_cache.place_rows
    for kind in (array_runner.ArrayEnvRunner, host_runner.HostEnvRunner):
        kind.play = spied(kind.play)
    workers.EnvPool._map = counted
    cli.run(train.main)
"""

# Processes that exchange numbers for ever; the last argument is what goes wrong in process 1.
TALK = """
import json, sys, time
from jaxmarl_llm.distributed import deadlines, rendezvous as meeting, processes
from jaxmarl_llm.errors import ConfigError

address, count, index, timeout, facts, wrong = sys.argv[1:]
limits = deadlines.Deadlines(rollout=2 if wrong == "sleeps" else 3600)
with (
    processes.distributed_run(meeting.ClusterSpec(address, int(count), int(index)), json.loads(facts), float(timeout)),
    processes.watchdog(limits),
):
    for n in range(10**6):
        deadlines.set_step(n)
        with deadlines.stage("rollout"):
            if wrong == "sleeps" and n == 4 and index == "1":
                time.sleep(600)
            assert processes.all_gather(n * "x") == [n * "x"] * int(count)
        print(n, flush=True)
        if wrong.startswith("/") and n == 3 and index == "1":
            raise ConfigError(wrong)
        time.sleep(0.02)
"""


def address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


class Started:
    """Some processes, what they print, and when they end."""

    every: ClassVar[list[subprocess.Popen]] = []

    def __init__(self, folder, commands, devices, **env):
        """``devices``: of every process, or of each."""
        self.logs = [folder / f"log{time.monotonic_ns()}.{i}" for i in range(len(commands))]
        flags = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        each = devices if isinstance(devices, list) else [devices] * len(commands)
        self.all: list[subprocess.Popen] = []
        for command, log, own in zip(commands, self.logs, each):
            own_flags = f"--xla_force_host_platform_device_count={own} {flags}"
            its = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": own_flags, **env}
            with open(log, "w") as out:
                self.all.append(
                    subprocess.Popen(
                        [sys.executable, *command], cwd=ROOT, env=its, stdout=out, stderr=subprocess.STDOUT
                    )
                )
        self.every.extend(self.all)

    def codes(self, timeout=500):
        """Their exit codes; those that do not end in time are killed, which no test expects."""
        end = time.monotonic() + timeout
        for process in self.all:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.1))
        alive = [p for p in self.all if p.poll() is None]
        for process in alive:
            process.kill()
            process.wait()
        assert not alive, self.said()
        return [process.returncode for process in self.all]

    def said(self):
        return [log.read_text() for log in self.logs]

    def until(self, there, timeout=300):
        end = time.monotonic() + timeout
        while not there():
            assert time.monotonic() < end and all(p.poll() is None for p in self.all), self.said()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "config.py").write_text(CONFIG)
    (folder / "train.py").write_text(TRAIN)
    (folder / "talk.py").write_text(TALK)
    yield folder
    for process in Started.every:  # of tests that failed
        process.kill()
        process.wait()


def train(folder, name, count, *overrides, variant="", **env):
    """``count`` processes with four devices together."""
    workdir = folder / name
    workdir.mkdir(exist_ok=True)
    at = address()
    command = [folder / "train.py", f"--config={folder / 'config.py'}:{variant}", f"--workdir={workdir}", *overrides]
    place = [f"--coordinator={at}", f"--processes={count}", "--init_timeout=200"]
    commands = [[*command, *place, f"--process={i}"] for i in range(count)] if count > 1 else [command]
    return Started(folder, commands, 4 // count, **env)


TIMES = ("time/", "speed/")  # a resumed run compiles at other steps, so it has other keys of these kinds


def rows(workdir):
    """Rows of metrics.jsonl without times."""
    read = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in read]


def steps(workdir):
    path = workdir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def tokens(workdir, process):
    return set((workdir / f"tokens{process}.txt").read_text().splitlines())


def parameters(workdir):
    """Parameters of the newest checkpoint, and before the first step."""
    _, recipe, state = evaluate.open_run(workdir)
    recipe.env_runner.close()
    return jax.device_get((state.params, recipe.init(0).params))


def check_same_run(one, many, count, models_at_once=1, learns=True):
    """Every token that was sampled, in training and evaluation, by every process; every metric but for rounding.

    Parameters at the end are within 1e-6, so the sum of all gradients is, times the rate of SGD.
    """
    assert len(tokens(one, 0)) >= 3 and [tokens(many, p) for p in range(count)] == [tokens(one, 0)] * count
    expected, got = rows(one), rows(many)
    assert [r["step"] for r in got] == [r["step"] for r in expected] == list(range(1, len(got) + 1))
    for a, b in zip(expected, got):
        assert a.keys() == b.keys()
        for key, value in a.items():
            value = value / models_at_once if key == "count/launches" else value
            assert b[key] == pytest.approx(value, rel=1e-5, abs=1e-5), (key, a["step"])
    for file in ("config.json", "report.png", "episodes.md"):
        assert (many / file).exists()
    assert (many / "episodes.md").read_bytes() == (one / "episodes.md").read_bytes()
    if learns:
        (wanted, before), (found, _) = parameters(one), parameters(many)
        print(f"{count} processes: parameters {sharded.distance(found, wanted):.1e} from those of one")
        assert sharded.distance(wanted, before) > 1e-3 and sharded.distance(found, wanted) < 1e-6


@pytest.fixture(scope="module")
def alone(folder):
    """The run of one process."""
    run = train(folder, "alone", 1)
    assert run.codes() == [0], run.said()
    assert len({r["reward/total"] for r in rows(folder / "alone")[6:]}) > 2  # it learns: there is something to compare
    return folder / "alone"


@pytest.mark.slow
def test_four_processes_are_the_run_of_one(folder, alone):
    run = train(folder, "four", 4, "--config.run.checkpoint_every=100")
    assert run.codes() == [0] * 4, run.said()
    check_same_run(alone, folder / "four", 4)
    assert all("step 10/10" not in said for said in run.said()[1:])  # one of them speaks


def saved(workdir):
    """Digests in the newest checkpoint's meta, which a restore in one process has verified."""
    _, recipe, state = evaluate.open_run(workdir)
    recipe.env_runner.close()
    assert int(state.step) == 10
    return digests(state)


@pytest.mark.slow
def test_a_run_of_two_that_is_stopped_and_loses_a_process_is_the_run_that_was_not(folder, alone):
    """Parameters are cut over both processes. SIGTERM to one saves at the same step in both and asks to be run again;
    kill -9 of one ends the other, which names it; what comes out is equal to the byte.
    """
    mesh = ("--config.mesh.data=1", "--config.mesh.fsdp=4")
    unbroken = train(folder, "unbroken", 2, *mesh)
    assert unbroken.codes() == [0, 0], unbroken.said()
    check_same_run(alone, folder / "unbroken", 2)
    workdir = folder / "broken"
    first = train(folder, "broken", 2, *mesh, "--config.run.checkpoint_every=100")
    first.until(lambda: steps(workdir) == 1)
    first.all[1].send_signal(signal.SIGTERM)
    assert first.codes() == [EXIT_RETRY, EXIT_RETRY], first.said()
    stopped = steps(workdir)
    assert stopped < 10 and (workdir / "checkpoints" / str(stopped)).is_dir()
    assert f"SIGTERM: saved step {stopped}" in first.said()[0]
    second = train(folder, "broken", 2, *mesh, "--config.run.checkpoint_every=100")
    second.until(lambda: steps(workdir) > stopped + 1)
    assert f"at step {stopped}" in second.said()[0]
    killed = time.monotonic()
    second.all[1].kill()
    assert second.codes(60) == [EXIT_RETRY, -signal.SIGKILL], second.said()
    print(f"the other ended after {time.monotonic() - killed:.1f} s")
    assert f"process 1 of 2 ({socket.gethostname()}, pid {second.all[1].pid}) is gone" in second.said()[0]
    assert steps(workdir) < 10
    third = train(folder, "broken", 2, *mesh)
    assert third.codes() == [0, 0], third.said()
    check_same_run(alone, workdir, 2)
    assert saved(workdir) == saved(folder / "unbroken")


def test_host_environments_run_where_their_tasks_are(folder):
    """Every process has every result, and made only the calls of its own tasks. Cached prefixes change processes."""
    runs = {1: train(folder, "host1", 1, variant="host"), 2: train(folder, "host2", 2, variant="host", SCATTER="1")}
    for count, run in runs.items():
        assert run.codes() == [0] * count, run.said()
    check_same_run(folder / "host1", folder / "host2", 2, learns=False)  # a random model earns nothing
    read, prefilled, moved = np.loadtxt(folder / "host2" / "prefixes1.txt", int).T
    assert prefilled.sum() < 0.7 * read.sum() and moved.max() > read.max() / 4
    counts = {}
    for name, process in (("host1", 0), ("host2", 0), ("host2", 1)):
        for line in (folder / name / f"calls{process}.txt").read_text().splitlines():
            method, n = line.split()
            counts.setdefault((name, process, method), []).append(int(n))
    for method in ("reset", "step"):
        whole, *parts = (
            np.array(counts[where[0], where[1], method]) for where in (("host1", 0), ("host2", 0), ("host2", 1))
        )
        assert (sum(parts) == whole).all() and (parts[0] > parts[1]).any() and parts[1].any()


@pytest.mark.slow
def test_models_that_sample_at_once_on_two_processes_are_the_run_of_one(folder):
    """Each of two blocks is one process, so a model's weights cross over for the rollout, cut over two devices."""
    layout = ("--config.mesh.fsdp=4", "--config.mesh.data=1", "--config.mesh.rollout_blocks=2")
    one = train(folder, "turns", 1, variant="team")
    many = train(folder, "blocks", 2, *layout, "--config.mesh.rollout_tensor=2", variant="team")
    assert one.codes() == [0], one.said()
    assert many.codes() == [0, 0], many.said()
    check_same_run(folder / "turns", folder / "blocks", 2, models_at_once=2)


@pytest.mark.slow
def test_tokens_that_are_cut_over_two_processes_are_those_of_one(folder, alone):
    run = train(folder, "context", 2, "--config.mesh.data=1", "--config.mesh.context=4")
    assert run.codes() == [0, 0], run.said()
    check_same_run(alone, folder / "context", 2)


def test_a_run_that_hangs_ends_and_says_where(folder, alone):
    run = train(folder, "hangs", 1, "--config.run.deadlines.rollout=12", HANG="None,7")
    assert run.codes() == [1], run.said()
    (said,) = run.said()
    late = "the process hangs in rollout after step 7, for 12 s, longer than config.run.deadlines.rollout=12"
    assert late in said or late.replace("12 s", "13 s") in said
    assert "train.py" in said and "in play" in said and "in _train" in said  # the stack
    assert steps(folder / "hangs") == 7


def talk(folder, count, present=None, facts=None, timeout=60, wrong="", devices=1):
    at = address()
    facts = facts or [{"seed": 0}] * count
    command = lambda i: [folder / "talk.py", at, str(count), str(i), str(timeout), json.dumps(facts[i]), wrong]
    return Started(folder, [command(i) for i in present or range(count)], devices)


@pytest.mark.parametrize("count,victim", [(4, 2), (3, 0)])
def test_when_one_is_killed_the_others_end_and_name_it(folder, count, victim):
    run = talk(folder, count)
    run.until(lambda: all("\n3\n" in said for said in run.said()))
    run.all[victim].kill()
    codes = run.codes(60)
    for p, said in enumerate(run.said()):
        if p != victim:
            assert codes[p] == EXIT_RETRY, said
            name = f"process {victim} of {count} ({socket.gethostname()}, pid {run.all[victim].pid})"
            assert f"{name} is gone; run the same command again" in said


def test_when_one_hangs_all_say_where_they_wait_and_end(folder):
    """Process 1 sleeps in a rollout, process 0 waits for it there."""
    run = talk(folder, 2, wrong="sleeps")
    assert run.codes(60) == [1, 1], run.said()
    for p, said in enumerate(run.said()):
        assert (
            f"process {p} of 2 ({socket.gethostname()}, pid {run.all[p].pid}) is in rollout after step 4, for" in said
        )
        assert "hangs in rollout after step 4" in said and "longer than config.run.deadlines.rollout=2" in said
        assert 'talk.py", line' in said  # the stack


def test_when_one_fails_the_others_say_so(folder):
    run = talk(folder, 2, wrong="/runs: disk full")
    assert run.codes(60) == [2, 2], run.said()
    first, second = run.said()
    assert "process 1 of 2" in first and "failed: error: /runs: disk full" in first
    assert second.strip().endswith("error: /runs: disk full")


def test_one_that_never_starts_is_named_by_all(folder):
    start = time.monotonic()
    run = talk(folder, 4, present=[0, 2], timeout=8)
    assert run.codes(60) == [1, 1], run.said()
    assert time.monotonic() - start < 30
    for said in run.said():
        assert "ConfigError: waited 8 s for processes 1, 3 of 4: started on every host?" in said
    run = talk(folder, 2, present=[1], timeout=3)
    assert run.codes(60) == [1], run.said()
    assert "waited 3 s for process 0 of 2 at 127.0.0.1:" in run.said()[0]


def test_processes_that_differ_do_not_start(folder):
    run = talk(folder, 3, facts=[{"jax": "1", "config.seed": 0}, {"jax": "1", "config.seed": 0}, {"jax": "2"}])
    assert run.codes(60) == [1] * 3, run.said()
    for said in run.said():
        last = said.strip().splitlines()[-1]
        assert "config.seed: nothing in process 2 of 3 (" in last and "but 0 in process 0 of 3 (" in last
    at, files = address(), [folder / "train.py", f"--config={folder / 'config.py'}:", f"--workdir={folder / 'differ'}"]
    flags = [f"--coordinator={at}", "--processes=2", "--init_timeout=60"]
    more = [["--process=0"], ["--process=1", "--config.optimizer.learning_rate=0.5"]]
    run = Started(folder, [[*files, *flags, *own] for own in more], 1)
    assert run.codes(60) == [2, 2], run.said()
    for said in run.said():
        assert said.count("\n") == 1 and said.startswith(
            "error: config.optimizer.learning_rate: 0.5 in process 1 of 2 ("
        )


def test_a_host_with_fewer_devices_is_named_by_all(folder):
    """Process 1 of three has one device, the others have two."""
    run = talk(folder, 3, devices=[2, 1, 2])
    assert run.codes(60) == [2] * 3, run.said()
    who = f"process 1 of 3 ({socket.gethostname()}, pid {run.all[1].pid})"
    for said in run.said():
        (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
        assert line.startswith(f"error: devices: {who} has 1; the other processes have 2 each; ")
        assert "Traceback" not in said


def test_a_workdir_that_one_cannot_write_is_named(folder):
    taken = folder / "taken"
    taken.write_text("")
    at, files = address(), [folder / "train.py", f"--config={folder / 'config.py'}:"]
    flags = [f"--coordinator={at}", "--processes=2", "--init_timeout=10"]
    own = [[f"--workdir={folder / 'fine'}", "--process=0"], [f"--workdir={taken}", "--process=1"]]
    run = Started(folder, [[*files, *flags, *more] for more in own], 1)
    assert run.codes(60) == [2, 2], run.said()
    first, second = run.said()
    assert f"cannot write to {str(taken)!r}" in second and "waited 10 s for process 1 of 2" in first


# In one process


def test_sigterm_to_one_process_saves_and_asks_to_be_run_again(folder, alone):
    workdir = folder / "one"
    run = train(folder, "one", 1, "--config.run.checkpoint_every=100", "--config.steps=100000")
    run.until(lambda: steps(workdir) > 5)
    run.all[0].send_signal(signal.SIGTERM)
    assert run.codes() == [EXIT_RETRY], run.said()
    assert (workdir / "checkpoints" / str(steps(workdir))).is_dir()


def meet(*places, stranger=None):
    """What each of some processes learns when they meet: the names of all, or an error."""
    at = address()

    def one(processes_, process):
        try:
            names, peers = rendezvous.connect(rendezvous.ClusterSpec(at, processes_, process), {}, 5)
        except ConfigError as error:
            return str(error)
        for peer in peers:
            peer.socket.close()
        return names

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(one, *places[0])
        if stranger is not None:
            time.sleep(0.3)
            with socket.create_connection(("127.0.0.1", int(at.rpartition(":")[2]))) as line:
                line.sendall(stranger)
        others = [pool.submit(one, *place) for place in places[1:]]
        return [each.result() for each in (first, *others)]


def test_who_meets_whom():
    names = meet((3, 0), (3, 2), (3, 1))
    assert names[0] == names[1] == names[2]
    assert [name.split(" (")[0] for name in names[0]] == [f"process {i} of 3" for i in range(3)]
    for word in (b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"process": "x"}\n', b""):  # is sent away
        first, second = meet((2, 0), (2, 1), stranger=word)
        assert first == second and len(first) == 2
    for said in meet((2, 0), (3, 1)):
        assert "do not agree on how many there are" in said
    for said in meet((3, 0), (3, 1), (3, 1)):
        assert said.count("process 1 of 3") == 2 and said.endswith("the same number twice")


def can_bind(host):
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
    return True


@pytest.mark.skipif(not socket.has_ipv6 or not can_bind("::1"), reason="needs IPv6")
def test_a_coordinator_on_the_loopback_listens_there_alone():
    port = address().rpartition(":")[2]
    place = lambda process: rendezvous.ClusterSpec(f"[::1]:{port}", 2, process)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(rendezvous.connect, place(0), {}, 20)
        time.sleep(0.5)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", int(port)), timeout=5).close()
        names, peers = rendezvous.connect(place(1), {}, 20)
        assert len(names) == 2
        for peer in (*peers, *first.result()[1]):
            peer.socket.close()


@pytest.mark.parametrize("host,alone", [("[::1]", True), ("localhost", True), ("10.0.0.1", False)])
def test_jax_is_told_where_to_listen_and_a_run_that_has_left_is_not_watched(host, alone, monkeypatch):
    given = {}
    monkeypatch.setattr(processes, "connect", lambda where, facts, timeout: (["process 0", "process 1"], []))
    monkeypatch.setattr(processes, "listen_for_sigterm", lambda: None)
    monkeypatch.setattr(processes, "_check_devices", lambda names: None)  # process 1 is not there
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **named: given.update(named))
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    with processes.distributed_run(rendezvous.ClusterSpec(f"{host}:1234", 2, 0), {}, 5):
        assert processes._watch.is_alive()
    assert given["coordinator_bind_address"] == (f"{host}:1234" if alone else None)
    assert processes._watch is None  # a later run of this process alone has its own


class Broken:
    """A stream whose reader is gone."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    flush = fileno = lambda self: self.write("")


@pytest.mark.parametrize("deaf", [False, True])
def test_a_process_ends_though_nobody_can_be_told(deaf, monkeypatch):
    codes, told = [], []

    class Ended(BaseException):
        pass

    def leave(code):
        codes.append(code)
        raise Ended

    def send(**words):
        if deaf:
            raise MemoryError
        told.append(words["ended"])

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "stderr", Broken())
    monkeypatch.setattr(sys, "stdout", Broken())
    peer = type("Peer", (), {"send": staticmethod(send), "process": 0})
    watch = processes._Watch("process 1", [peer], ["process 0", "process 1"])
    monkeypatch.setattr(processes, "_watch", watch)
    for end in (lambda: watch._end("it hangs", 3, where=True), lambda: processes._fail(ConfigError("no such key"))):
        with pytest.raises(Ended):
            end()
    assert codes == [3, 2]
    assert told == ([] if deaf else ["it hangs", "process 1 failed: error: no such key"])


@pytest.mark.parametrize("first", [True, False])
def test_one_that_has_heard_bye_may_be_gone_at_once(first, monkeypatch):
    """Process 0 took leave before this one did, or hears it take leave and ends: neither is a loss."""
    codes, gone = [], threading.Event()
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(processes._Watch, "_lost", lambda self, peer, how: codes.append(how))
    own, other = socket.socketpair()

    class Slow(rendezvous.PeerConnection):
        def __init__(self, line):
            self.socket, self.process, self.last_received, self._rest = line, 0, time.monotonic(), b""

        def send(self, **words):
            super().send(**words)
            if "bye" in words and not gone.is_set():
                other.close()
                gone.set()
                time.sleep(0.5)  # the watch sees it before `close` goes on

    watch = processes._Watch("process 1", [Slow(own)], ["process 0", "process 1"])
    watch.start()
    if first:
        other.sendall(b'{"bye": true}\n')
        other.close()
        gone.set()
        time.sleep(0.5)
    watch.close()
    assert not watch.is_alive() and gone.is_set() and codes == []
    own.close()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_environment_calls_are_divided_by_task_and_come_back_in_order(count, monkeypatch):
    made, calls, of = [], [(f"call {n}",) for n in range(7)], [0, 0, 2, 1, 1, 5, 2]
    pool = EnvPool(lambda: None, workers=0)
    monkeypatch.setattr(pool, "_map", lambda method, some: [(method, *args) for args in some])
    monkeypatch.setattr(processes, "count", lambda: count)
    for own in range(count):
        monkeypatch.setattr(processes, "index", lambda own=own: own)
        monkeypatch.setattr(processes, "all_gather", lambda mine: made.append(mine) or [[]] * count)
        with contextlib.suppress(StopIteration):
            pool.map("step", calls, of)
    assert [[args[1] for args in part] for part in made] == [
        [call for (call,), task in zip(calls, of) if task % count == own] for own in range(count)
    ]
    monkeypatch.setattr(processes, "all_gather", lambda mine: made)
    assert pool.map("step", calls, of) == [("step", call) for (call,) in calls]


@pytest.mark.parametrize("seen", [[True, True, True], [True, False, True]])
def test_a_workdir_that_not_all_hosts_share_is_an_error(seen, monkeypatch, tmp_path):
    monkeypatch.setattr(processes, "count", lambda: 3)
    monkeypatch.setattr(processes, "broadcast_from_0", lambda make: make())
    monkeypatch.setattr(processes, "all_gather", lambda mine: [mine and there for there in seen])
    refused = pytest.raises(ConfigError, match="--workdir: process 1 does not see what process 0 writes to")
    with contextlib.nullcontext() if all(seen) else refused:
        loop.check_shared(Workdir(tmp_path / "run"))
    assert list((tmp_path / "run").iterdir()) == []  # nothing is left


def test_time_that_goes_into_compiling_is_not_the_stages(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deadlines, "PROGRESS", work := Progress(limits=Deadlines(compile=50, rollout=20)))
    with deadlines.stage("rollout"):
        now[0] += 15
        work.on_compile_event("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1)
        now[0] += 45
        assert work.late() is None and work.current_stage() == ("compile", 45)
        now[0] += 10
        assert work.late() == "longer than config.run.deadlines.compile=50"
        work.on_compile_event("/jax/core/compile/backend_compile_duration", 55)
        assert work.late() is None and work.current_stage() == ("rollout", 15)
        with deadlines.stage("memory"):
            now[0] += 30
            assert work.late() is None and work.current_stage() == ("update", 30)
        assert work.late() is None and work.current_stage() == ("rollout", 15)
        now[0] += 6
        assert work.late() == "longer than config.run.deadlines.rollout=20"
    assert work.late() is None


def test_models_that_compile_at_once_have_compiled_when_the_last_has(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(deadlines, "PROGRESS", work := Progress(limits=Deadlines(compile=50, rollout=20)))
    lowered, compiled = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"
    with (
        concurrent.futures.ThreadPoolExecutor(1) as one,
        concurrent.futures.ThreadPoolExecutor(1) as two,
        deadlines.stage("rollout"),
    ):
        for seconds, thread, event in ((5, one, lowered), (10, two, lowered), (12, one, compiled)):
            now[0] += seconds
            thread.submit(work.on_compile_event, event, 22).result()
        assert work.current_stage() == ("compile", 12)
        now[0] += 30
        two.submit(work.on_compile_event, compiled, 42).result()
        assert work.current_stage() == ("rollout", 5) and work.late() is None  # 52 seconds of both, counted once


def test_jax_still_tells_when_it_compiles():
    """The two events that `Progress.compiles` listens for, before and after."""
    seen, work = [], Progress()

    def listen(event, seconds, **_):
        work.on_compile_event(event, seconds)
        seen.append(bool(work.compiling))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x * 3.25 + np.pi)(np.ones(3)).block_until_ready()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert True in seen and seen[-1] is False


def test_pieces_of_an_array_are_its_bytes_in_order(monkeypatch):
    """As for an array of several processes, which one alone cannot have: brought together a few rows at a time."""
    x = np.random.default_rng(0).normal(size=(16, 3, 8)).astype(np.float32)
    mesh = make_mesh(MeshConfig(2, 4))
    cut = jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", None, "data")))
    monkeypatch.setattr(sharding, "_far", lambda x: isinstance(x, jax.Array) and not x.is_fully_replicated)
    parts = list(sharding.pieces(cut, size=5 * x[0].nbytes))
    assert [len(part) for part in parts] == [5, 5, 5, 1]
    assert b"".join(part.tobytes() for part in parts) == x.tobytes()
    assert digests({"x": cut}) == digests({"x": x})


@pytest.mark.parametrize(
    "flags,message",
    [
        ((None, 2, None), "--coordinator: required with --processes"),
        (("host:1", 2, None), "--process: required with --coordinator"),
        (("host:1", 2, 2), "--process: expected 0 to 1 with --processes=2, got 2"),
        (("host", 2, 0), "--coordinator: expected host:port of process 0, got 'host'"),
        (("host:99999", 2, 0), "--coordinator: expected host:port"),
    ],
)
def test_flags_that_do_not_go_together_are_named(flags, message):
    with pytest.raises(ConfigError, match=message):
        rendezvous.find_cluster(*flags, 5)


def test_where_a_process_is_comes_from_the_environment(monkeypatch):
    assert rendezvous.find_cluster(None, None, None, 5) is None and rendezvous.find_cluster(None, 1, None, 5) is None
    assert rendezvous.find_cluster("host:8000", 2, 1, 5) == ("host:8000", 2, 1)
    slurm = {"JOB_ID": "4096", "STEP_NODELIST": "node[07-09]", "NTASKS": "3", "PROCID": "2", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert rendezvous.find_cluster(None, None, None, 5) == ("node07:61440", 3, 2)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert rendezvous.find_cluster(None, None, None, 5) is None
    monkeypatch.setenv("SLURM_NTASKS", "many")
    with pytest.raises(ConfigError, match=r"--processes: not known from the environment .*=1 for one alone"):
        rendezvous.find_cluster(None, None, None, 5)


def test_deadlines_are_checked():
    Deadlines(rollout=0).check("config.run.deadlines")
    with pytest.raises(ConfigError, match=r"config\.run\.deadlines\.save: expected >= 0"):
        Deadlines(save=-1).check("config.run.deadlines")
