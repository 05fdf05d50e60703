"""The command line as a user meets it: a process, its exit code, and one line that says what to type instead."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmarl_llm.cli import catalogue, config_flags

ROOT = Path(__file__).parents[2]

RECIPE = """
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Literal
from jaxmarl_llm.errors import ConfigError

@dataclass(frozen=True)
class Optimizer:
    learning_rate: float = 1e-3
    clip: float | None = None
    kind: Literal["adam", "sgd"] = "adam"

    def check(self, path):
        if self.learning_rate <= 0:
            raise ConfigError(f"{path}.learning_rate: must be positive, got {self.learning_rate}")

@dataclass(frozen=True)
class Config:
    recipe: str = "toys.solo"
    seed: int = 0
    fast: bool = True
    sizes: tuple[int, ...] = (2, 2)
    optimizer: Optimizer = Optimizer()
"""

CONFIG = """
from ml_collections import ConfigDict
from jaxmarl_llm.config import one_of, to_dict
from toys.solo import Config

def get_config(variant=""):
    one_of("variant", variant, ["", "large", "broken", "typo", "lost"])
    config = ConfigDict(to_dict(Config()))
    if variant == "large":
        config.sizes = (8, 8, 8)
    if variant == "broken":
        config.seed = undefined
    if variant == "typo":
        config.optimizer.lerning_rate = 1.0
    if variant == "lost":
        config.recipe = "magrpoo"
    return config
"""

# Modules that a dotted recipe may name by mistake.
RECIPES = {
    "raises": "import math\n\nmath.sqrt(-1)\n",
    "needs": "import a_module_that_is_not_installed\n",
    "syntax": "def make(:\n",
    "leaves": "raise SystemExit('bye')\n",
    "function": "def Config():\n    pass\n",
}

# What main sees is printed; so is whether JAX had been imported by the time the process ends.
MAIN = """
import atexit, sys, time
sys.path.insert(0, ROOT)
from absl import flags
from jaxmarl_llm.cli import config_flags as cli
from jaxmarl_llm.errors import ConfigError, RunError

flags.DEFINE_integer("every", 1, "A flag of this entry point.")
atexit.register(lambda: print("jax" in sys.modules))

def main(cfg, workdir, flags):
    print(cfg, workdir, flags.every, flush=True)
    if flags.every == 13:
        raise ConfigError("config.seed: unlucky\\nnumber")
    if flags.every == 12:
        raise RunError("every reward\\nfailed")
    if flags.every == 14:
        time.sleep(60)
    return 7 if flags.every == 7 else None

if __name__ == "__main__":
    cli.run(main, **OPTIONS)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "toys").mkdir()
    (folder / "toys" / "solo.py").write_text(RECIPE)
    (folder / "solo.py").write_text(CONFIG)
    (folder / "syntax.py").write_text("def get_config(:\n")
    (folder / "empty.py").write_text("")
    (folder / "plain.py").write_text("def get_config():\n    return {'recipe': 'toys.solo', 'seed': 5}\n")
    for name, text in RECIPES.items():
        (folder / "toys" / f"{name}.py").write_text(text)
    (folder / "broken").mkdir()
    (folder / "broken" / "__init__.py").write_text("raise RuntimeError('no licence')\n")
    (folder / "any.py").write_text("def get_config(recipe):\n    return {'recipe': recipe}\n")
    (folder / "flags.txt").write_text("--config.seed=9\n--every=2\n")
    (folder / "main.py").write_text(MAIN.replace("ROOT", repr(str(ROOT))).replace("OPTIONS", "{}"))
    (folder / "free.py").write_text(MAIN.replace("ROOT", repr(str(ROOT))).replace("OPTIONS", "{'required': ()}"))
    return folder


def call(folder, *args, script="main.py"):
    command = [sys.executable, "-W", "error", script, *args]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30)
    return done, time.perf_counter() - start


GOOD = ("--config=solo.py", "--workdir=run")
ERRORS = {
    "unknown flag": ((*GOOD, "--workdri=x"), "--workdri: unknown flag; did you mean '--workdir'?"),
    "ill-typed flag": ((*GOOD, "--every=x"), "flag --every=x: "),
    "no config": (("--workdir=run",), "--config: required but not given"),
    "no workdir": (("--config=solo.py",), "--workdir: required but not given"),
    "bare argument": ((*GOOD, "config.seed=1"), "unexpected argument 'config.seed=1'"),
    "unknown key": ((*GOOD, "--config.optimizer.lr=1"), "config.optimizer.lr: unknown key; "),
    "near key": (
        (*GOOD, "--config.optimiser.learning_rate=1"),
        "config.optimiser: unknown key; did you mean 'optimizer'?",
    ),
    "ill-typed value": ((*GOOD, "--config.seed=eight"), "config.seed: expected int, got 'eight'"),
    "no value": ((*GOOD, "--config.seed"), "config.seed: expected int, got 'true'"),
    "out of range": ((*GOOD, "--config.optimizer.learning_rate=-1"), "config.optimizer.learning_rate: must be positiv"),
    "other recipe": ((*GOOD, "--config.recipe=x"), "config.recipe: fixed by the config file"),
    "missing file": (("--config=sol.py", "--workdir=run"), "--config: no file 'sol.py'; did you mean 'solo.py'?"),
    "missing folder": (("--config=a/b.py", "--workdir=run"), "--config: no file 'a/b.py': 'a' has no config files"),
    "not Python": (("--config=flags.txt", "--workdir=run"), "--config: 'flags.txt' is not a Python file"),
    "no get_config": (("--config=empty.py", "--workdir=run"), "empty.py: defines no get_config"),
    "syntax": (("--config=syntax.py", "--workdir=run"), "syntax.py: SyntaxError: "),
    "unknown variant": (
        ("--config=solo.py:lrge", "--workdir=run"),
        "solo.py: variant: unknown value 'lrge'; did you mean 'large'?",
    ),
    "no variants": (("--config=plain.py:large", "--workdir=run"), "plain.py: unknown variant 'large'"),
    "file fails": (("--config=solo.py:broken", "--workdir=run"), "solo.py:12: NameError: name 'undefined'"),
    "key in file": (
        ("--config=solo.py:typo", "--workdir=run"),
        "config.optimizer.lerning_rate: unknown key; did you mean 'learning_rate'?",
    ),
    "unknown recipe": (("--config=solo.py:lost", "--workdir=run"), "solo.py:lost: config.recipe: no recipe 'magrpoo'"),
    "no module": (("--config=any.py:toys.solos", "--workdir=run"), "any.py:toys.solos: config.recipe: no recipe"),
    "no package": (("--config=any.py:toyz.solo", "--workdir=run"), "any.py:toyz.solo: config.recipe: no recipe"),
    "another module": (
        ("--config=any.py:json.decoder", "--workdir=run"),
        "any.py:json.decoder: config.recipe: json.decoder is no recipe: it defines no dataclass Config",
    ),
    "Config is a function": (
        ("--config=any.py:toys.function", "--workdir=run"),
        "any.py:toys.function: config.recipe: toys.function is no recipe: it defines no dataclass Config",
    ),
    "recipe raises": (
        ("--config=any.py:toys.raises", "--workdir=run"),
        "any.py:toys.raises: config.recipe: importing toys.raises (FOLDER/toys/raises.py:3) failed: ValueError: ",
    ),
    "recipe needs a package": (
        ("--config=any.py:toys.needs", "--workdir=run"),
        "any.py:toys.needs: config.recipe: importing toys.needs (FOLDER/toys/needs.py:1) failed: ModuleNotFoundError: "
        "No module named 'a_module_that_is_not_installed'",
    ),
    "recipe's syntax": (
        ("--config=any.py:toys.syntax", "--workdir=run"),
        "any.py:toys.syntax: config.recipe: importing toys.syntax (FOLDER/toys/syntax.py) failed: SyntaxError: ",
    ),
    "recipe ends the process": (
        ("--config=any.py:toys.leaves", "--workdir=run"),
        "any.py:toys.leaves: config.recipe: importing toys.leaves (FOLDER/toys/leaves.py:1) failed: SystemExit: bye",
    ),
    "package raises": (
        ("--config=any.py:broken.recipe", "--workdir=run"),
        "any.py:broken.recipe: config.recipe: importing broken.recipe failed: RuntimeError: no licence",
    ),
    "workdir is a file": (("--config=solo.py", "--workdir=main.py"), "--workdir: cannot write to 'main.py': "),
    "workdir in a file": (("--config=solo.py", "--workdir=main.py/x"), "--workdir: cannot write to 'main.py/x': "),
    "flagfile": (
        (*GOOD, "--flagfile=none.txt"),
        "Unable to open flagfile: [Errno 2] No such file or directory: 'none.txt'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_error_is_one_line_and_exit_code_2(folder, name):
    args, message = ERRORS[name]
    done, seconds = call(folder, *args)
    assert done.returncode == 2, done.stderr
    message = message.replace("FOLDER", str(folder))
    assert done.stderr.startswith(f"error: {message}") and done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == "False\n"  # main was not entered, JAX not imported
    assert seconds < 3.0


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        (GOOD, "sizes=(2, 2), optimizer=Optimizer(learning_rate=0.001, clip=None, kind='adam')) run 1"),
        (("--config=solo.py:large", "--workdir=run"), "sizes=(8, 8, 8)"),
        ((*GOOD, "--config.sizes=(4,4)", "--config.optimizer.clip=2", "--noconfig.fast"), "fast=False, sizes=(4, 4)"),
        ((*GOOD, "--config.sizes", "4", "--config.fast", "--config.seed", "-3"), "seed=-3, fast=True, sizes=(4,)"),
        ((*GOOD, "--config.optimizer.clip=2", "--config.optimizer.clip=None"), "clip=None"),
        ((*GOOD, "--flagfile=flags.txt"), "seed=9"),
        (("--config=plain.py", "--workdir=a b/ü"), "seed=5"),
    ],
)  # fmt: skip
def test_main_receives_the_built_config(folder, args, shown):
    done, _ = call(folder, *args)
    assert (done.returncode, done.stderr) == (0, "")
    assert shown in done.stdout and done.stdout.startswith("Config(recipe='toys.solo', ")


def test_exit_codes_of_main(folder):
    assert call(folder, *GOOD, "--every=7")[0].returncode == 7
    done, _ = call(folder, *GOOD, "--every=12")
    assert (done.returncode, done.stderr) == (1, "error: every reward failed\n")
    done, _ = call(folder, *GOOD, "--every=13")
    assert (done.returncode, done.stderr) == (2, "error: config.seed: unlucky number\n")
    done, _ = call(folder, script="free.py")
    assert done.stdout.startswith("None None 1")


def test_print_config_needs_no_workdir_and_makes_none(folder):
    done, _ = call(folder, "--config=solo.py", "--config.seed=4", "--print_config")
    assert done.returncode == 0
    assert "config.seed = 4\n" in done.stdout and "config.optimizer.clip = None\n" in done.stdout
    call(folder, "--config=solo.py", "--workdir=never", "--config.seeed=4")
    assert not (folder / "never").exists()  # a mistyped command leaves nothing behind


@pytest.mark.parametrize("flag", ["--help", "-h", "--helpshort", "--helpfull"])
def test_help_ends_with_0_and_lists_the_flags(folder, flag):
    done, _ = call(folder, flag)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--every" in done.stdout and "A flag of this entry point." in done.stdout and "--workdir" in done.stdout


def command(*args, folder):
    """Run a command of the package in ``folder``, with this checkout importable."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", *args]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize("entry", [("experiments.train",), ("jaxmarl_llm", "train")])
def test_the_train_command_shows_help_reads_configurations_and_reports_errors(folder, entry):
    done = command(*entry, "--help", folder=folder)
    assert (done.returncode, done.stderr) == (0, "")
    for flag in ("--config.KEY=VALUE", "--config:", "--workdir:", "--allow_config_change:", "--coordinator:"):
        assert flag in done.stdout
    done = command(*entry, "--config=solo.py", "--config.seed=4", "--print_config", folder=folder)
    assert (done.returncode, done.stderr) == (0, "") and "config.seed = 4\n" in done.stdout
    done = command(*entry, "--config=solo.py", "--config.seed=x", "--workdir=run", folder=folder)
    assert (done.returncode, done.stderr) == (2, "error: config.seed: expected int, got 'x'\n")
    done = command(*entry, "--config=solo.py", "--workdir=run", folder=folder)  # toys.solo has a Config and no more
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == (
        "error: config.recipe: toys.solo is no recipe: it defines no function make_plan(cfg)"
    )


def test_the_command_without_a_name_lists_the_commands(folder):
    done = command("jaxmarl_llm", "--help", folder=folder)
    assert done.returncode == 0 and "train" in done.stdout
    assert command("jaxmarl_llm", "trian", folder=folder).returncode == 2


@pytest.fixture
def interruptible():
    """What a script starts in the background ignores interrupts, and so would the processes that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(os.name != "posix", reason="sends a signal")
def test_interrupt_ends_with_130_and_one_line(folder, interruptible):
    command = [sys.executable, "main.py", *GOOD, "--every=14"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # main has begun
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "interrupted\n")


OUTSIDE = """
from dataclasses import dataclass
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.recipes.magrpo import make_plan

@dataclass(frozen=True)
class Config(magrpo.Config):
    recipe: str = "outside.recipe"

def make(cfg):
    return magrpo.make(cfg)
"""


def test_a_recipe_outside_of_the_package_is_found_by_every_entry_point(tmp_path, monkeypatch):
    import jax

    from experiments.studies import common as budget
    from experiments.tpu import plan_pod
    from jaxmarl_llm.cli import evaluate, train
    from jaxmarl_llm.config import from_dict
    from jaxmarl_llm.distributed import processes
    from jaxmarl_llm.runs import loop
    from jaxmarl_llm.storage.checkpoint import Checkpointer

    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "recipe.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(tmp_path)
    small = {"max_new_tokens": 1, "remat": False, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}}
    fields = {"team": small, "env": {"name": "matrix", "eval_tasks": 4}, "reward": {"payoff": 1.0}, "sft": {"steps": 0}}
    cfg = from_dict(importlib.import_module("outside.recipe").Config, fields)
    recipe = budget.make(cfg)
    state, run = recipe.init(0), tmp_path / "run"
    saver = Checkpointer(run)
    saver.save(0, loop.without_shared(state), loop._meta(cfg, 0, loop.fingerprint_of(state.params["shared"])))
    saver.close()
    assert evaluate.open_run(run)[0] == cfg
    assert plan_pod.prepare(cfg)[1].name
    given = {"coordinator": None, "processes": None, "process": None, "init_timeout": 5.0}
    flags = type("Flags", (), {**given, "compilation_cache": "", "allow_config_change": [], "break_lock": False})
    fitted = []
    monkeypatch.setattr(loop, "fit", lambda cfg, recipe, workdir, **_: fitted.append(recipe.total_steps))
    monkeypatch.setattr(processes, "listen_for_sigterm", lambda: None)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    train.main(cfg, str(run), flags)
    assert fitted == [cfg.steps]


SHIPPED = [
    f"{name}:{variant}"
    for name in catalogue.config_files()
    for variant in importlib.import_module(f"jaxmarl_llm.configs.{name}").VARIANTS
]


@pytest.mark.parametrize("spec", SHIPPED, ids=SHIPPED)
def test_every_variant_that_ships_is_a_configuration(spec):
    cfg = config_flags.load(spec)
    cfg.check("config")
    env = cfg.env.build()
    assert cfg.team.max_new_tokens >= getattr(env, "max_new_tokens", 0), "the longest completion does not fit"
    for name in cfg.reward:
        assert name in getattr(env, "components", cfg.reward)
