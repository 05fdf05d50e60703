"""Two commits of this repository in turns: generation, update and whole steps, of the array and of the host engine.

    python -m experiments.bench.commits --old=8499bd1 [--new=HEAD] [--rounds=5] [--only=NAME]... [--out=FILE.json]
    python -m experiments.bench.commits --page=docs/bench/commits.md --out=docs/results/commits.json

The second form writes the page of the recorded cases and measures nothing.
Each commit runs in a worktree and a process of its own. A round is one turn of the old and one of the new commit, in
changing order. The ratio is new / old: above 1, the new commit takes longer. Random weights, no end tokens, except for
the host engine, whose completions have the length that they have: there the figure is seconds for each sampled token.
Compiles are warmed up first, and those behind the warm-up are counted.

A compile case lowers and compiles the training program of a claim, five seeds mapped, anew in each turn and without a
compilation cache. With --out a case replaces its record in the file and leaves the other cases there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import nearest
from jaxmarl_llm.errors import ConfigError

# The weights stay as they are: a team that learns would sample other numbers of tokens in each commit.
STILL = ["optimizer.learning_rate", "1e-12"]
TINY = ("experiments/configs/joyagents_r1.py:tiny", [["sft.steps", "0"], ["run.eval_every", "0"], STILL])
# The commits play tasks in different orders. So texts are of nearly one length, and a step is equal work.
WRITING: list[list[str]] = [
    ["team.max_new", "32"],
    ["env.args.reward", "parity"],
    ["env.args.min_source", "154"],
    ["env.args.max_source", "174"],
    ["env.workers", "0"],
    STILL,
]
HOST = ("experiments/configs/magrpo.py:smollm2", WRITING)
# A host team of random bytes: two models of 0.1 M parameters. Keys have the names that both commits read.
SMALL = [["team.backbone.path", "none"], ["team.share", "separate"], ["env.max_prompt", "1200"]]
# Name -> what the worker makes, calls before the first round, calls in a turn.
CASES: dict[str, dict[str, Any]] = {
    "generation, 7m": {"sampler": ["7m", 115, 16, 64], "warm": 3, "calls": 4},
    "generation, smollm2_135m": {"sampler": ["smollm2_135m", 512, 16, 64], "warm": 1, "calls": 1},
    "update, 7m": {"update": ["7m", 115, 16, 64], "warm": 3, "calls": 4},
    "update, smollm2_135m": {"update": ["smollm2_135m", 512, 16, 64], "warm": 1, "calls": 1},
    "step, array engine, 7m, two agents": {"step": ["7m", 2, 4, 115, 64], "warm": 3, "calls": 4},
    "step, array engine, smollm2_135m": {"step": ["smollm2_135m", 1, 16, 512, 64], "warm": 1, "calls": 1},
    # Its micro-batches have five sizes, and a rare one comes up after dozens of steps.
    "step, array engine, JoyAgents-R1, tiny": {"run": TINY, "warm": 100, "calls": 20},
    "step, host engine, MAGRPO, tiny": {"run": [HOST[0], WRITING + SMALL], "warm": 12, "calls": 4},
    "step, host engine, MAGRPO, smollm2_135m": {"run": HOST, "warm": 6, "calls": 1},
    # The runs of the claims that are one program in both commits.
    **{
        f"compile, {spec}": {"compile": f"experiments/configs/{spec.replace(':', '.py:')}", "warm": 0, "calls": 1}
        for spec in (
            "advantage_alignment:tiny",
            "dr_mas:tiny",
            "magrpo:maze",
            "marshal:tic_tac_toe",
            "rema:tiny",
            "waltzrl:tiny",
        )
    },
}
SEEDS = 5  # of a compile case

# What a worktree's process runs: it has the modules of its own commit. One line of JSON for each turn.
WORKER = r'''
import contextlib, json, os, sys, time
import jax
import numpy as np

# By the file: an editable installation would find a module that this commit lacks in another checkout.
if os.path.exists("jaxmarl_llm/cli/config_flags.py"):
    from jaxmarl_llm.cli import config_flags
    from jaxmarl_llm.telemetry.logger import Logger
    from jaxmarl_llm.runs.allocator import retain
else:  # before the rooms
    from experiments import cli as config_flags
    from jaxmarl_llm.metrics import Logger
    from experiments.heap import keep as retain
retain()

compiles = [0]
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: compiles.__setitem__(0, compiles[0] + name.endswith("backend_compile_duration"))
)
case = json.loads(sys.argv[1])


class Timed(Logger):
    """Logger that keeps the seconds of its stages."""

    seconds: dict = {}

    @contextlib.contextmanager
    def stage(self, name):
        clock = time.perf_counter()
        with super().stage(name):
            yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - clock


def compiles_anew(spec, seeds):
    cfg = config_flags.load(spec)
    module, seeds = config_flags.recipe_module(cfg.recipe), list(range(seeds))
    if os.path.exists("jaxmarl_llm/runs/compiled.py"):
        from jaxmarl_llm.runs.compiled import make_program, task_data
        recipe = module.make(cfg)
        run, more = make_program(recipe).run, (task_data(recipe, seeds),)
    else:
        from jaxmarl_llm.compiled import make_program
        # As the claims of that commit make their programs.
        learns = module.learns(cfg) if cfg.recipe == "rema" else None
        program = module.program(cfg) if cfg.recipe == "waltzrl" else make_program(cfg, module.make_plan(cfg), learns)
        run, more = program.run, ()
    seeds = jax.numpy.array(seeds)

    def compile():
        clock = time.perf_counter()
        lowered = jax.jit(jax.vmap(lambda *args: run(*args))).lower(seeds, *more)
        lowering = time.perf_counter() - clock
        lowered.compile()
        lines = lowered.as_text().count(chr(10))
        return {"lowering": lowering, "compiling": time.perf_counter() - clock - lowering, "lines": lines}

    return compile


def make():
    from experiments.bench import SHAPES
    if "sampler" in case:
        from experiments.bench.decode import sampler
        name, prompt, group, response = case["sampler"]
        tokens = np.random.default_rng(0).integers(0, SHAPES[name].vocab_size, (1, prompt)).astype(np.int32)
        form = sampler(SHAPES[name], tokens, group, response)
        return lambda: (form(), None)[1]
    if "update" in case:
        from experiments.bench import update
        name, prompt, group, response = case["update"]
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, SHAPES[name].vocab_size, (1, prompt)).astype(np.int32)
        said = rng.integers(0, SHAPES[name].vocab_size, (1, group, response)).astype(np.int32)
        form = update.ours(SHAPES[name], tokens, said, rng.normal(size=(1, group)).astype(np.float32))
        return lambda: (form(), None)[1]
    if "step" in case:
        from experiments.bench.step import stepper
        name, *sizes = case["step"]
        form = stepper(SHAPES[name], *sizes)
        return lambda: (form(), None)[1]
    if "compile" in case:
        return compiles_anew(case["compile"], case["seeds"])
    spec, overrides = case["run"]
    cfg = config_flags.load(spec, [tuple(pair) for pair in overrides])
    recipe = config_flags.recipe_module(cfg.recipe).make(cfg)
    logger = Timed(".", resume_step=None, total_steps=0, primary=False)
    held = [recipe.init(0)]

    def compile_ahead():  # as `fit` does after the first step
        from jaxmarl_llm.runs.ahead import Ahead
        with Ahead() as ahead:
            ahead.begin(recipe.ahead(held[0], rollouts=False, updates=True))
            ahead.wait()

    def step():
        Timed.seconds = {}
        number = held[0].step
        state, metrics = recipe.step(held[0], logger)
        held[0] = jax.block_until_ready(state.replace(step=number + 1))  # older commits leave it to the caller
        if not number and os.path.exists("jaxmarl_llm/training/programs.py"):
            compile_ahead()
        return {**Timed.seconds, "tokens": float(metrics["count/completion_tokens"])}

    return step


out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
form = make()
for _ in range(case["warm"]):
    form()
print(json.dumps("ready"), file=out, flush=True)
for _ in sys.stdin:
    before, calls = compiles[0], []
    for _ in range(case["calls"]):
        clock = time.perf_counter()
        parts = form()
        calls.append({"all": time.perf_counter() - clock, **(parts or {})})
    print(json.dumps({"calls": calls, "compiles": compiles[0] - before}), file=out, flush=True)
'''


@contextlib.contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """A checkout of ``commit`` in ``folder``, with the kernels that this checkout has and the weights of this one."""
    subprocess.run(["git", "worktree", "add", "--detach", str(folder), commit], check=True, capture_output=True)
    try:
        if not (folder / "jaxmarl_llm/kernels").exists():  # before the rooms an installation mapped the folder
            (folder / "jaxmarl_llm/kernels").symlink_to("../kernels")
        if (weights := Path("weights").absolute()).exists() and not (folder / "weights").exists():
            (folder / "weights").symlink_to(weights)
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], check=True, capture_output=True)


class Worker:
    """A process that runs one case with the modules of a worktree."""

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps({"seeds": SEEDS, **case})],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"the process of a commit ended with {self.process.returncode}; its error is above")
        return json.loads(line)

    def turn(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        """Wait for the end of the process, which has no more input."""
        self.process.communicate(timeout=60)


def seconds(turn: dict[str, Any], part: str) -> float:
    """Seconds of a call, the mean of a turn. For runs: seconds for each sampled token."""
    calls = turn["calls"]
    total = sum(call[part] for call in calls)
    return total / (sum(call["tokens"] for call in calls) if "tokens" in calls[0] else len(calls))


def measure(old: Path, new: Path, case: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Turns of both commits: part -> seconds of the old and the new commit by round, and compiles after warm-up."""
    workers = {"old": Worker(old, case), "new": Worker(new, case)}
    turns: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    for i in range(rounds):
        for name in ("old", "new") if i % 2 == 0 else ("new", "old"):
            turns[name].append(workers[name].turn())
    for worker in workers.values():
        worker.close()
    parts = [p for p in ("all", "rollout", "update", "lowering", "compiling") if p in turns["new"][0]["calls"][0]]
    return {
        "seconds": {p: {name: [seconds(t, p) for t in seen] for name, seen in turns.items()} for p in parts},
        "compiles": {name: sum(t["compiles"] for t in seen) for name, seen in turns.items()},
        **(
            {"lines": {name: seen[0]["calls"][0]["lines"] for name, seen in turns.items()}} if "compile" in case else {}
        ),
    }


def rows(name: str, got: dict[str, Any]) -> Iterator[str]:
    """Lines of the table of a case."""
    for part, both in got["seconds"].items():
        old, new = (np.array(both[k]) for k in ("old", "new"))
        ratio, each = np.median(new) / np.median(old), new / old
        compiled = f"{got['compiles']['old']}, {got['compiles']['new']}" if part == "all" else ""
        if "lines" in got:
            compiled = f"{got['lines']['old']:,} and {got['lines']['new']:,} lines" if part == "all" else ""
        yield (
            f"| {name}{'' if part == 'all' else f': {part}'} | {np.median(old):.4g} | {np.median(new):.4g} | "
            f"{ratio:.3f} | {each.min():.3f} to {each.max():.3f} | {compiled} |"
        )


HEAD = [
    "| what | old, s | new, s | new / old, medians | by round | compiles after warm-up |",
    "| --- | --- | --- | --- | --- | --- |",
]


PAGE = """# Two commits in turns

```bash
python -m experiments.bench.commits --old={old} --out=docs/results/commits.json   # --only=NAME: one case
python -m experiments.bench.commits --page=docs/bench/commits.md --out=docs/results/commits.json
```

The old commit is `{old}`, from before the rooms. Each commit runs in a worktree and a process of its own. A round is a
turn of each, in changing order. The ratio is new / old: above 1, the new commit takes longer.

- *generation*, *update*: one call, with random weights and no end tokens.
- *step, array engine, JoyAgents-R1* and *host engine*: seconds for each sampled token of a recipe's step. The weights
  stay as they are.
- *compile*: the training program of a claim is lowered and compiled, five seeds mapped, without a compilation cache.

"""


def page(record: dict[str, Any]) -> str:
    """The page of a record: one table for each place and day on which cases were measured."""
    lines, last = [PAGE.format(old=record["old"]).rstrip()], ""
    for name, got in record["cases"].items():
        where = f"`{got['commit']}`, {got['date']}, JAX {got['jax']}, {got['machine']}"
        if where != last:
            lines += ["", f"{where}:", "", *HEAD]
        lines += rows(name, got)
        last = where
    return "\n".join(lines) + "\n"


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    from experiments.studies.common import origin, read_record

    if flag_values.page:
        form = {"old": str, "cases": dict}
        Path(flag_values.page).write_text(page(read_record(flag_values.out, form)))
        return
    if flag_values.old is None:
        raise ConfigError("--old: expected a commit to compare with")
    names = flag_values.only or list(CASES)
    for name in names:
        if name not in CASES:
            raise ConfigError(f"--only: no case {name!r}; {nearest(name, list(CASES))}")
    found: dict[str, Any] = {}
    if flag_values.out and Path(flag_values.out).exists():
        found = read_record(Path(flag_values.out)).get("cases", {})
    print("\n".join(HEAD), flush=True)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        old = stack.enter_context(worktree(flag_values.old, Path(folder) / "old"))
        new = stack.enter_context(worktree(flag_values.new, Path(folder) / "new"))
        for name in names:
            found[name] = {**measure(old, new, CASES[name], flag_values.rounds), **origin()}
            print("\n".join(rows(name, found[name])), flush=True)
            if flag_values.out:
                record = {"old": flag_values.old, "new": flag_values.new, "cases": found}
                Path(flag_values.out).write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    flags.DEFINE_string("old", None, "The commit to compare with.")
    flags.DEFINE_string("new", "HEAD", "The commit to measure.")
    flags.DEFINE_integer("rounds", 5, "Rounds.", lower_bound=1)
    flags.DEFINE_multi_string("only", [], "A case to measure; default: all.")
    flags.DEFINE_string("out", None, "Also write what was measured to this JSON file.")
    flags.DEFINE_string("page", None, "Write the page of the cases in --out to this file, and measure nothing.")
    config_flags.run(main, required=())
