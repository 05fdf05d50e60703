"""Break the compiled driver of a training step in known ways, and see the tests of the drivers fail:

    python -m experiments.studies.mutations [--only=TEXT]

Each mutation replaces one piece of source in a copy of the checkout and runs one test of tests/runs/test_drivers.py.
The same tests run first without a mutation and have to pass. A row: the mutation, its test, the assertion that failed.
The exit code is 1 where a test passed with its mutation, or failed otherwise than in an assertion.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmarl_llm.cli import arguments
from jaxmarl_llm.errors import ConfigError

COPIED = ("jaxmarl_llm", "kernels", "tests", "experiments", "setup.cfg", "pyproject.toml")
TESTS = "tests/runs/test_drivers.py"
STEP, DRIVERS = "jaxmarl_llm/training/train_step.py", "jaxmarl_llm/training/drivers.py"
COMPILED = 'hasattr(driver, "data")'  # true for the driver of compiled runs
FAILED, TIMEOUT_S = "failed: ", 600


class Mutation(NamedTuple):
    """A fault, and the test that has to see it.

    Attributes:
        name: What a compiled run does wrong.
        file: Changed file, from the root of the checkout.
        before: Source that is replaced; it is there once.
        after: Source in its place.
        test: Name of a test, with its parameter where it has one.
    """

    name: str
    file: str
    before: str
    after: str
    test: str


def _case(name: str) -> str:
    return f"test_fit_and_a_compiled_run_take_the_same_steps[{name}]"


MUTATIONS = (
    Mutation(
        "WaltzRL's pick: every round of an episode is trained",
        STEP,
        "if algorithm.select_steps is not None:",
        f"if algorithm.select_steps is not None and not {COMPILED}:",
        _case("waltzrl, a stage each"),
    ),
    Mutation(
        "WaltzRL's weights of rewards stay those of its first stage",
        STEP,
        "weights = algorithm.reward(rl_step)",
        f"weights = algorithm.reward(0 if {COMPILED} else rl_step)",
        _case("waltzrl, a stage each"),
    ),
    Mutation(
        "WaltzRL's conversation agent stays frozen in the second stage",
        STEP,
        "learns = driver.host(algorithm.trainable_roles(rl_step))",
        f"learns = driver.host(algorithm.trainable_roles(0 if {COMPILED} else rl_step))",
        _case("waltzrl, a stage each"),
    ),
    Mutation(
        "one epoch in place of several",
        DRIVERS,
        "done = optimize(learner, loss, ",
        "done = optimize(learner, __import__('dataclasses').replace(loss, epochs=1), ",
        _case("rema, two epochs"),
    ),
    Mutation(
        "past policies are never stored",
        STEP,
        "driver.when((rl_step + 1) % cfg.past.every == 0,",
        f"driver.when(((rl_step + 1) % cfg.past.every == 0) & (not {COMPILED}),",
        _case("advantage_alignment, past policies"),
    ),
    Mutation(
        "past policies take no seat",
        DRIVERS,
        "batch, key, state.step, assignment)",
        "batch, key, state.step, None)",
        _case("advantage_alignment, past policies"),
    ),
    Mutation(
        "the memory of a role that did not act grows older",
        DRIVERS,
        "stores[role.name] = _where(mine.any(), after, store)",
        "stores[role.name] = after",
        _case("joyagents_r1, memory"),
    ),
    Mutation(
        "groups are not selected",
        STEP,
        "credited.valid & selected[credited.group]",
        f"credited.valid & (selected[credited.group] | {COMPILED})",
        _case("joyagents_r1, memory"),
    ),
    Mutation(
        "critics learn nothing",
        DRIVERS,
        "values = None if target is None else _of_trained(tree, learns, target.of_nodes())",
        "values = None",
        _case("iac"),
    ),
    Mutation(
        "experts are not imitated",
        DRIVERS,
        "if imitation is None\n",
        "if True\n",
        _case("hila"),
    ),
    Mutation(
        "a model without a trained token takes an optimizer step",
        DRIVERS,
        "_where(learns, (done.own, done.opt_state), before)",
        "(done.own, done.opt_state)",
        "test_a_compiled_update_leaves_a_model_without_a_trained_token_as_it_is",
    ),
    Mutation(
        "tasks in another order",
        STEP,
        "shuffled(stream(driver.seed, TASKS)",
        f"shuffled(stream(driver.seed + {COMPILED}, TASKS)",
        _case("dr_mas"),  # tasks differ
    ),
    Mutation(
        "keys of another step",
        STEP,
        "key = jax.random.fold_in(state.key, state.step)\n        numbers",
        f"key = jax.random.fold_in(state.key, state.step + {COMPILED})\n        numbers",
        _case("grpo"),
    ),
    Mutation(
        "the gradient of the last micro-batch alone",
        DRIVERS,
        "learner.accumulate(own, shared, batch, gradient)",
        "learner.accumulate(own, shared, batch, None)",
        "test_stacks_of_micro_batches_add_up_to_the_micro_batches",
    ),
)


def copy(root: Path, folder: Path) -> None:
    """Copy what tests need.

    Args:
        root: The checkout.
        folder: Where the copy goes.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        source = root / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)


@contextlib.contextmanager
def mutated(root: Path, mutation: Mutation) -> Iterator[None]:
    """Have a mutation in a checkout, and take it out again.

    Args:
        root: The checkout.
        mutation: The mutation.

    Raises:
        ConfigError: Its source is not there, or more than once.
    """
    path = root / mutation.file
    source = path.read_text()
    if (count := source.count(mutation.before)) != 1:
        raise ConfigError(f"{mutation.file}: expected {mutation.before!r} once, and it is there {count} times")
    path.write_text(source.replace(mutation.before, mutation.after))
    try:
        yield
    finally:
        path.write_text(source)


def outcome(root: Path, tests: Sequence[str]) -> str:
    """Run tests of a checkout: passed, the assertion that failed, or why there is no outcome.

    Args:
        root: The checkout.
        tests: Names of tests.
    """
    # Bytecode is known by the size and the second of its source, which a mutation may keep.
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {TIMEOUT_S} s"
    asserted = re.search(r"^E +(?:AssertionError: )?assert (.*)$", done.stdout, re.MULTILINE)
    if done.returncode == 1 and asserted:
        return FAILED + asserted[1]
    return "passed" if done.returncode == 0 else f"exit code {done.returncode}: {done.stdout[-300:]!r}"


def main(given: Any) -> int:
    """Print a row for each mutation whose name has the text ``given.only``."""
    chosen = [m for m in MUTATIONS if given.only in m.name]
    if not chosen:
        raise ConfigError(f"--only: expected a part of: {'; '.join(m.name for m in MUTATIONS)}")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        copy(Path(__file__).parents[2], root)
        alone = outcome(root, sorted({f"{TESTS}::{m.test}" for m in chosen}))
        print(f"Without a mutation the tests {alone}.\n\n| a compiled run | test | outcome |\n| --- | --- | --- |")
        survived = alone != "passed"
        for m in chosen:
            with mutated(root, m):
                seen = outcome(root, [f"{TESTS}::{m.test}"])
            survived |= not seen.startswith(FAILED)
            print(f"| {m.name} | {m.test} | {seen} |", flush=True)
    return int(survived)


if __name__ == "__main__":
    parser = arguments.Parser("mutations", __doc__)
    parser.add_argument("--only", metavar="TEXT", default="", help="mutations whose name has this text")
    arguments.run(parser, main)
