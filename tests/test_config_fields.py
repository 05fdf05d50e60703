"""Every field of every shipped configuration at values that are likely to be wrong.

A case is a shipped configuration with one field at -1, 0, NaN, 10**9 or a value of another type. Either it is refused
with one line that names the full key, or it is a configuration. Of the accepted cases of the tiny variants a sample is
run for one step, which may end in a `ConfigError` and in no other exception.

All accepted cases of the tiny variants are run by

    JAX_PLATFORMS=cpu python -m tests.test_config_fields [words that the case's name contains]
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import itertools
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import flatten, from_dict, override, replace_path, to_dict
from jaxmarl_llm.errors import ConfigError

ROOT = Path(__file__).parents[1]
LARGE = "1000000000"
TEXTS = ("-1", "0", "nan", LARGE, "a b")
SAMPLE = 8  # accepted cases that the tests run
REFUSED = 3  # refused cases that the tests give to the command


class Case(NamedTuple):
    spec: str  # config file and variant
    path: str  # dotted key without ``config.``
    value: Any  # text as on the command line, or a value that is no text

    def __str__(self) -> str:
        return f"{Path(self.spec).name} {self.path}={self.value!r}"


SPECS = [
    f"{path}:{variant}"
    for path in sorted((ROOT / "jaxmarl_llm" / "configs").glob("[!_]*.py"))
    for variant in importlib.import_module(f"jaxmarl_llm.configs.{path.stem}").VARIANTS
]


@functools.cache
def shipped(spec: str) -> Any:
    return config_flags.load(spec)


def fields(cfg: Any, path: str = "", owner: Any = None, name: str = "") -> Iterator[tuple[str, Any, str, Any]]:
    """(dotted key, class that holds it, name in that class, value) of every field, groups of fields included."""
    if path:
        yield path, owner, name, cfg
    if dataclasses.is_dataclass(cfg):
        inner = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
        owner, name = type(cfg), ""
    else:
        inner = cfg if isinstance(cfg, dict) else {}
    args = dataclasses.asdict(cfg.build()) if hasattr(cfg, "build") else {}
    for key, value in inner.items():
        if key == "args":  # of an environment: all of its fields, given or not
            for arg, default in args.items():
                yield f"{path}.args.{arg}", cfg.module.Config, arg, default
        else:
            yield from fields(value, f"{path}.{key}".lstrip("."), owner, f"{name}.{key}".lstrip("."))


@functools.cache
def cases() -> tuple[Case, ...]:
    """Every case once: equal fields of one class at equal values are one case, of the first variant that has it."""
    seen, found = set(), []
    for spec in SPECS:
        for path, owner, name, present in fields(shipped(spec)):
            nested = dataclasses.is_dataclass(present) or isinstance(present, dict)
            for value in (5, "5") if nested else (*TEXTS, 7, ("x", 3.5)):
                key = (owner, name, type(value), value)
                if key not in seen:
                    seen.add(key)
                    found.append(Case(spec, path, value))
    return tuple(found)


def built(case: Case, cfg: Any = None) -> Any:
    """The configuration of a case; a `ConfigError` where it is refused. ``cfg``: instead of the shipped one."""
    cfg = shipped(case.spec) if cfg is None else cfg
    if isinstance(case.value, str):
        return from_dict(type(cfg), override(type(cfg), to_dict(cfg), case.path, case.value))
    return replace_path(cfg, case.path, case.value)


def complaint(case: Case) -> str | None:
    """What is wrong with how a case ends; None when nothing is."""
    try:
        built(case)
        return None
    except ConfigError as error:
        message = str(error)
    except Exception as error:
        return f"{case}: {type(error).__name__}: {error}"
    last = case.path.split(".")[-1]
    if case.path.startswith("env.args."):
        named = message.startswith("config.env.args") and last in message
    else:
        named = f"config.{case.path}" in message
    return None if named and "\n" not in message and len(message) < 400 else f"{case}: {message!r}"


@pytest.mark.parametrize("spec", SPECS, ids=[Path(spec).name for spec in SPECS])
def test_a_value_is_accepted_or_refused_in_one_line_with_its_key(spec):
    wrong = [text for case in cases() if case.spec == spec and (text := complaint(case))]
    assert not wrong, "\n".join(wrong)


def test_cases_cover_accepted_and_refused_values_of_every_class():
    found = cases()
    assert len(found) > 2500
    assert {type(shipped(spec)).__module__ for spec in SPECS} == {type(shipped(c.spec)).__module__ for c in found}
    keys = {case.path for case in found}
    assert {"memory.retrieve", "optimizer.b2", "env.args.wrong_product", "run.deadlines.save", "sft", "group"} <= keys
    refused = sum(case.path == "optimizer.b2" for case in found if case.value in ("-1", LARGE, "nan"))
    assert refused == 3


def refused() -> list[Case]:
    """Refused cases that a command line can hold, in an order that is the same on every machine and mixes fields."""

    def wrong(case: Case) -> bool:
        try:
            built(case)
        except ConfigError:
            return isinstance(case.value, str)
        return False

    ordered = sorted(cases(), key=lambda case: hashlib.sha256(str(case).encode()).hexdigest())
    return list(itertools.islice(filter(wrong, ordered), REFUSED))


def test_a_sample_of_refused_cases_ends_the_command_with_exit_code_2(tmp_path):
    """And 10**9 epochs, which would never end."""
    endless = next(case for case in cases() if (case.path, case.value) == ("loss.epochs", LARGE))
    for case in [*refused(), endless]:
        given = [f"--config={case.spec}", f"--workdir={tmp_path / 'run'}", f"--config.{case.path}={case.value}"]
        command = [sys.executable, "-m", "jaxmarl_llm", "train", *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        last = done.stderr.rstrip().splitlines()[-1]
        assert done.returncode == 2 and "Traceback" not in done.stderr, f"{case}: {done.stderr[-2000:]}"
        assert f"config.{case.path.split('.')[0]}" in last and not (tmp_path / "run").exists(), f"{case}: {last}"


# ------------------------------------------------------------------------------------------------------ run a step

# What makes a step small; a case then sets its own field. Completions are as long as the environment needs.
SMALL: dict[str, Any] = {
    "steps": 1,
    "batch": 2,
    "group": 2,
    "tasks": 4,
    "votes": 1,
    "sft.steps": 0,
    "sft.batch": 2,
    "sft.samples": 8,
    "imitation.steps": 1,
    "imitation.batch": 2,
    "pairs": 2,
    "env.eval_tasks": 4,
    "env.args.tasks": 8,
    "team.backbone.hidden_size": 16,
    "team.backbone.intermediate_size": 32,
    "team.backbone.num_layers": 1,
    "team.backbone.num_heads": 2,
    "team.backbone.num_kv_heads": 1,
    "team.backbone.head_dim": 8,
    "run.tensorboard": False,
}


@functools.cache
def shrunk(spec: str, taught: int) -> Any:
    """A shipped configuration with the fields of SMALL as they are there, and ``taught`` steps of stage 0."""
    cfg = shipped(spec)
    keys = set(flatten(cfg))
    for path, value in (SMALL | {"sft.steps": taught}).items():
        if f"config.{path}" in keys:
            cfg = replace_path(cfg, path, value)
    return cfg


def small(case: Case) -> Any:
    """The configuration of a case whose other fields make a step small; a `ConfigError` where it is refused."""
    return built(case, shrunk(case.spec, int(case.path.startswith("sft."))))


def run(case: Case) -> str | None:
    """Run one step of stage 0, where the case is about it, and one of RL. The message of a `ConfigError`, or None."""
    from jaxmarl_llm.runs import preflight
    from jaxmarl_llm.telemetry.logger import Logger

    try:
        cfg = small(case)
        module = config_flags.recipe_module(cfg.recipe)
        preflight.check(cfg, module.make_plan(cfg))
        recipe = module.make(cfg)
        try:
            with tempfile.TemporaryDirectory() as folder:
                options = {"resume_step": None, "total_steps": recipe.total_steps, "tensorboard": False}
                with Logger(folder, interval=10**6, **options) as logger:
                    state = recipe.init(0)
                    for _ in range(min(2, recipe.total_steps) if cfg.sft.steps == 1 else 1):
                        state, _ = recipe.step(state, logger)
        finally:
            recipe.env_runner.close()
    except ConfigError as error:
        assert "\n" not in str(error), str(error)
        return str(error)
    return None


@functools.cache
def runnable() -> tuple[Case, ...]:
    """Accepted cases of the tiny variants, in an order that is the same on every machine and mixes fields."""

    def accepted(case: Case) -> bool:
        try:
            small(case)
        except ConfigError:
            return False
        return case.path != "recipe"  # the recipe is the config file's

    tiny = [case for case in cases() if case.spec.endswith(":tiny") and accepted(case)]
    return tuple(sorted(tiny, key=lambda case: hashlib.sha256(str(case).encode()).hexdigest()))


@pytest.mark.slow
def test_a_sample_of_accepted_cases_runs_a_step_or_is_refused_in_one_line(numpy_tables):
    for case in runnable()[:SAMPLE]:
        run(case)


def main(words: list[str]) -> int:
    """Run all accepted cases whose names contain all ``words``, and print those that end in another exception."""
    signal.signal(signal.SIGALRM, _late)
    chosen = [case for case in runnable() if all(word in str(case) for word in words)]
    print(f"{len(cases())} cases, of which {len(runnable())} of the tiny variants are accepted; {len(chosen)} to run")
    failed = 0
    for number, case in enumerate(chosen):
        started = time.perf_counter()
        signal.alarm(120)
        try:
            said = run(case)
        except Exception as error:
            failed += 1
            said = f"FAILED {type(error).__name__}: {error}"
            traceback.print_exc(limit=-4)
        signal.alarm(0)
        print(f"{number} {case}: {said or 'one step'} ({time.perf_counter() - started:.1f} s)", flush=True)
    print(f"{failed} of {len(chosen)} cases failed")
    return int(failed > 0)


def _late(*_: Any) -> None:
    raise TimeoutError("a step of a tiny team took longer than 120 s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
