"""The benchmark command: forms are measured in turns, ratios are of rounds, other systems answer one step at a time,
every part runs on the tiny shape, tables say what was missed.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from importlib import import_module

import numpy as np
import pytest

from experiments import bench
from experiments.bench import __main__ as command
from experiments.bench import peers, sweep, torch_forms
from experiments.bench.apart import apart
from experiments.studies import common as budget
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs import allocator


def test_forms_take_turns_and_ratios_are_of_rounds(monkeypatch):
    clock, called = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def form(name, seconds):
        def run():
            called.append(name)
            clock[0] += seconds * (10 if called.count(name) == 1 else called.count(name) - 1)  # the first call compiles

        return run

    row = bench.measure("part", "case", {"ours": form("ours", 1.0), "other": form("other", 3.0)}, 3, facts={"n": 5})
    assert called == ["ours"] * 2 + ["other"] + ["ours", "other"] * 3  # the second tells how many make a turn
    assert row.first == {"ours": 10, "other": 30} and row.facts == {"n": 5}
    assert row.values == {"ours": [2, 3, 4], "other": [3, 6, 9]}
    assert row.ratio("other") == (2, 1.5, 2.25)
    uneven = dataclasses.replace(row, values={"ours": [1.0, 1.0, 2.0], "other": [4.0, 6.0, 4.0]})
    assert uneven.ratio("other") == (4, 2, 6)


def test_a_turn_of_a_short_form_is_many_calls(monkeypatch):
    clock, called = [0.0], []
    monkeypatch.setattr(bench.time, "perf_counter", lambda: clock[0])

    def form(name, seconds):
        def run():
            called.append(name)
            clock[0] += seconds

        return run

    row = bench.measure("part", "case", {"ours": form("ours", 0.06), "tiny": form("tiny", 1e-9)}, 2)
    assert called.count("ours") == 2 + 2 * 4 and called.count("tiny") == 2 + 2 * bench.MOST
    np.testing.assert_allclose([row.values["ours"], row.values["tiny"]], [[0.06] * 2, [1e-9] * 2], rtol=1e-3)


def test_the_bound_of_sharing_a_prompt_counts_tokens():
    assert bench.trunk_ratio(16, 512, 64) == 16 * 575 / (512 + 16 * 63)
    assert bench.trunk_ratio(1, 512, 64) == 1


FAKE = """
import sys, types
sys.argv = ["fake", '{"threads": 1}']
sys.path.insert(0, %r)
from drive import Turns
print("chatter that is no answer")
turns = Turns("numpy")
for count, item in enumerate(turns.items("item")):
    print("more of it", item)
    if count == 2:
        raise ValueError("the third step fails")
"""


@pytest.fixture
def fake():
    """A peer that takes two steps and fails in the third, with the drivers' own protocol."""
    program = FAKE % str(peers.Path(peers.__file__).parent)
    with peers.Peer([sys.executable, "-c", program], "Fake", limit=60) as peer:
        yield peer


def test_a_peer_takes_one_step_for_each_line_and_says_why_it_ended(fake):
    assert fake.versions == {"numpy": np.__version__}
    assert fake._process.poll() is None
    for _ in range(2):
        assert 0 <= fake.step() < 5
    with pytest.raises(RuntimeError, match=r"Fake: expected 'seconds' from its driver.*the third step fails"):
        fake.step()
    assert fake._process.poll() is not None


def test_a_peer_ends_with_its_parent_and_when_it_takes_too_long(fake):
    fake.close()
    assert fake._process.returncode == 0
    slow = (
        'import sys, time; print(\'{"ready": true, "versions": {}}\', flush=True); sys.stdin.readline(); time.sleep(60)'
    )
    with peers.Peer([sys.executable, "-c", slow], "Slow", limit=0.5) as peer, pytest.raises(RuntimeError, match="Slow"):
        clock = time.monotonic()
        peer.step()
    assert time.monotonic() - clock < 30


def test_a_missing_environment_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no .*torch/bin/python, in which TRL runs; `make peers`"):
        peers.start("TRL", str(tmp_path), {})


OTHERS = {
    "head": {"head_logprob", "dense", "one array of the logits", "jax.random.categorical", "jnp.argmax"},
    "decode": {"naive JAX", "google-tunix"},
    "update": {"naive JAX"},
    "step": {"TRL", "google-tunix", "CoMLRL"},
    "machine": set(),
    "product": {"weights [out in]", "q k v, gate up joined", "a row at a time", "vmapped"},
    "invariant": {"invariant"},
    "kernels": {"Pallas"},
    "variants": {"XLA's attention", "layers unrolled"},
    "adapters": {"a launch for each adapter"},
}
ON_CPU = {"variants": {"the compiler's layouts"}}  # of parts that measure something else there


@pytest.mark.parity
def test_a_shared_prompt_of_transformers_draws_what_generate_draws(monkeypatch):
    """The most likely tokens, and as many of them; and a sweep has a row for each length and group."""
    torch = pytest.importorskip("torch")
    net = torch_forms.model(bench.SHAPES["tiny"]).eval()
    tokens = np.random.default_rng(0).integers(0, 1024, (1, 12)).astype(np.int32)
    monkeypatch.setattr(torch, "multinomial", lambda p, n: p.argmax(-1, keepdim=True))
    said = torch_forms.shared_sampler(net, tokens, 3, 6)()
    with torch.no_grad():
        ids = torch.from_numpy(tokens.astype(np.int64))
        want = net.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=6)[:, 12:]
    assert said.shape == (3, 6) and (said == want).all()
    monkeypatch.undo()
    rows = list(sweep.run(bench.SUITES["tiny"]))
    assert [row.case for row in rows] == [f"tiny, G={g}, P={p}, R=8" for p in (8, 16) for g in (1, 2)]
    assert all(set(row.others()) == {"transformers", "transformers, prompt shared"} for row in rows)
    assert all("transformers, prompt shared" not in row.limits for row in rows)


CHECKED = [
    *(("tiny", part) for part in ("decode", "step", "product", "invariant", "variants")),
    *(("tiny_accelerator", part) for part in OTHERS if part not in ("product", "invariant")),
]


@pytest.mark.parametrize(("suite", "part"), CHECKED)
def test_a_part_runs_and_measures_every_form(suite, part, monkeypatch):
    suite = bench.SUITES[suite]
    assert part in suite.parts
    asked = []

    class Answers:
        versions = {"it": "1"}  # noqa: RUF012
        __enter__ = lambda self: self
        __exit__ = lambda self, *_: None
        step = lambda self: asked.append("step")

    def start(name, home, spec):
        asked.append(spec)
        return Answers()

    monkeypatch.setattr(torch_forms, "available", lambda: False)
    monkeypatch.setattr(peers, "start", start)
    rows = list(import_module(f"experiments.bench.{part}").run(suite))
    assert rows and all(np.isfinite(x) and x > 0 for row in rows for form in row.values.values() for x in form)
    named = OTHERS if suite.accelerator else OTHERS | ON_CPU
    others = named[part] - ({"TRL", "google-tunix", "CoMLRL"} if suite.name == "tiny_accelerator" else set())
    if part == "step":
        others |= {"naive JAX"} if suite.name == "tiny_accelerator" else {"agents in one launch"}
    assert {name for row in rows for name in row.others()} == others
    specs = [x for x in asked if x != "step"]
    assert len(specs) == len(others & set(peers.DRIVERS)) and asked.count("step") >= 2 * len(specs)
    assert all(spec["hf"]["vocab_size"] == 1024 and spec["response"] == 8 for spec in specs)


@pytest.mark.parametrize(("suite", "own"), [("tiny", True), ("tiny_accelerator", False)])
def test_a_form_works_in_a_process_of_its_own_on_a_cpu(suite, own, tmp_path):
    """Where it also says how much freed memory is kept; the memory of an accelerator is one process's."""
    told = "import os, pathlib; from jaxmarl_llm.runs import allocator"
    told += f"; pathlib.Path({str(tmp_path / 'told')!r}).write_text(f'{{os.getpid()}} {{allocator._retained}}')"
    for keep in (True, False):
        with apart(bench.SUITES[suite], functools.partial, exec, told, keep=keep) as form:
            form()
        pid, kept = (tmp_path / "told").read_text().split()
        assert (int(pid) != os.getpid()) == own and (kept == "True") == (keep and own and allocator.GLIBC)
        if own:
            with pytest.raises(ProcessLookupError):
                os.kill(int(pid), 0)


def test_a_form_whose_process_is_killed_is_an_error_that_says_so():
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with apart(bench.SUITES["tiny"], functools.partial, exec, dies) as form:
        with pytest.raises(RuntimeError, match=r"ended before its step was done: .* memory ran out"):
            form()


def test_naive_jax_and_ours_update_alike():
    """The same gradient, but for rounding: the forms do the same work."""
    from experiments.bench import update

    cfg, rng = bench.SHAPES["tiny"], np.random.default_rng(0)
    tokens = rng.integers(0, cfg.vocab_size, (1, 16)).astype(np.int32)
    said, gain = rng.integers(0, cfg.vocab_size, (1, 4, 8)).astype(np.int32), rng.normal(size=(1, 4)).astype(np.float32)
    policy = update.make_policy(cfg, remat=False)
    own = {"params": policy.init(update.jax.random.key(0))}
    slope, *_ = update._learner(policy).accumulate(own, None, update._batch(tokens, said, gain), None)
    other = update.jax.grad(update._naive_loss(policy))(own, *update._repeated(tokens, said, gain))
    for a, b in zip(update.jax.tree.leaves(slope), update.jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()) + 1e-9)


def test_a_profile_names_operations_and_the_share_of_the_time_that_something_ran():
    """In a process of its own: a profiler that crashes ends no other test."""
    line = [sys.executable, "-m", "experiments.bench", "--suite=tiny_accelerator", "--only=profile"]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=300)
    for what in ("generation", "update"):
        of = [x for x in done.stdout.splitlines() if x.startswith(f"- profile, {what}, tiny, G=4, P=16, R=8: ")]
        assert len(of) == 10 and "device busy" in of[0] and "operations started" in of[1]
        assert all(x.endswith(" times") for x in of[2:])


def test_a_table_keeps_what_was_missed_and_says_where_it_is_from(tmp_path):
    values = {"ours": [1.0, 1.0], "fast": [0.5, 0.6], "slow": [4.0, 5.0]}
    row = bench.Row("part", "case", values, targets={"fast": 1.0, "slow": 3.0}, limits={"slow": 6.0}, facts={"n": 7})
    origin = {"command": "it", "date": "2026-01-02", "at": "03:04", "commit": "abc", "jax": "1", "cores": 2}
    origin |= {"machine": "a cpu", "minutes": 1.5, "load": 0.1}
    out, page = tmp_path / "bench.json", tmp_path / "page.md"
    held = {"part, case": {**dataclasses.asdict(row), "origin": origin}}
    there = bench.Row("part", "case", {"ours": [1.0, 1.0], "fast": [7.0, 7.0]})
    held["elsewhere"] = {**dataclasses.asdict(there), "origin": {**origin, "machine": "another"}}
    out.write_text(json.dumps(held))
    text = command.written(command.read(str(out)))
    here, elsewhere = text.split("### 2 cores of another")
    assert here.startswith("### 2 cores of a cpu\n\n| part") and "7.00" not in here
    assert "| 7 s | 7.00 | 7.00 to 7.00 |" in elsewhere and "missed" not in elsewhere
    assert "| part | case | 1 s | fast | 550 ms | 0.55 | 0.50 to 0.60 |  | 1 | **missed** |" in text
    assert "| part | case | 1 s | slow | 4.5 s | 4.50 | 4.00 to 5.00 | 6 | 3 | met |" in text
    assert "- part, case: n 7" in text and "`it`, 2026-01-02 03:04 UTC, commit abc" in text
    page.write_text("before\n<!-- bench: begin -->\nold\n<!-- bench: end -->\nafter\n")
    line = [sys.executable, "-m", "experiments.bench", f"--table={out}", f"--into={page}"]
    subprocess.run(line, check=True)
    assert page.read_text() == f"before\n<!-- bench: begin -->\n{text}\n<!-- bench: end -->\nafter\n"
    page.write_text("no markers")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "expected <!-- bench: begin --> and" in done.stderr


MINE = "update, tiny, G=4, P=16, R=8, PyTorch"


@pytest.mark.parity
def test_the_command_adds_what_it_measured_to_a_file(tmp_path):
    out = tmp_path / "bench.json"
    mine = f"{budget.origin()['machine']}, {MINE}"
    held = {"another, case": {}, f"a machine, {MINE}": {"theirs": True}, mine: {"old": True}}
    out.write_text(json.dumps(held))
    line = [sys.executable, "-m", "experiments.bench", "--suite=tiny", "--only=update", f"--out={out}"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert "| update | tiny, G=4, P=16, R=8 |" in done.stdout and "| PyTorch |" in done.stdout
    rows = json.loads(out.read_text())
    assert rows[f"a machine, {MINE}"] == {"theirs": True}
    mine = rows[mine]
    assert {"command", "date", "commit", "machine", "load", "cores"} <= set(mine["origin"]) and "old" not in mine
    assert rows["another, case"] == {} and len(mine["values"]["ours"]) == 1
    done = subprocess.run([*line[:4], "--only=decod"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "did you mean 'decode'" in done.stderr
