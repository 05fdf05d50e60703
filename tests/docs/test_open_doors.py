"""The code of the pages for users: a recipe, a credit rule, environments, a reward and data of their own.

Everything lives in a scratch folder and is trained from an installed wheel: nothing of the repository is on the path.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import zipfile

import pytest

from tests.test_layering import ROOT

PAGES = ("write_an_environment", "your_reward_and_data", "write_a_recipe")
FILE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^jaxmarl-llm (train .*)$", re.MULTILINE)
OWN = ("capitals", "agree_own", "edited", "lookup", "guess", "graded")  # tasks of 20 lines that train 20 steps


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The wheel, unpacked where an installation would put it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([*build, str(folder), str(ROOT)], check=True, cwd=folder, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scratch")
    for name in PAGES:
        for file, text in FILE.findall(page(name)):
            (folder / file).write_text(text)
    return folder


def run(site, folder, *arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "jaxmarl_llm", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


COMMANDS = [(name, line) for name in PAGES for line in COMMAND.findall(page(name))]


def test_the_pages_have_what_the_test_runs():
    assert len(COMMANDS) == 12
    assert {line.rsplit("workdir=runs/")[1].split()[0] for name, line in COMMANDS if "own_config" in line} == set(OWN)
    for name in PAGES:
        for file, text in FILE.findall(page(name)):
            code = [
                line for line in text.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))
            ]
            assert len(code) <= 30, f"{name}: {file} has {len(code)} lines"


@pytest.mark.parametrize("name, line", COMMANDS, ids=[line.rsplit("/", 1)[1] for _, line in COMMANDS])
def test_a_command_of_a_page_trains(name, line, site, scratch):
    """Two steps of each: every step has a line of metrics, and the held-out tasks were played."""
    stage_0 = {"sums": 2, "write_a_recipe": 30}.get("sums" if "sums" in line else name, 0)
    fewer = ["--config.steps=2"] + (["--config.sft.steps=2"] if "sums" in line else [])
    small = "--config.team.backbone.hidden_size=16", "--config.team.backbone.num_layers=1"
    done = run(site, scratch, *shlex.split(line), *fewer, *small)
    assert done.returncode == 0, done.stderr[-3000:]
    workdir = re.search(r"--workdir=(\S+)", line)[1]
    metrics = [json.loads(text) for text in (scratch / workdir / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == stage_0 + 2
    if name == "write_a_recipe":  # with its own credit rule, every agent learns at every step
        norms = [metrics[-1].get(f"agent/{role}/grad_norm", 0) for role in ("first", "second")]
        assert min(norms) > 0, metrics[-1]
    assert any(key.startswith("reward/") for key in metrics[-1]) and any("eval/return" in line for line in metrics)


ARRAY, SIGNS = "sums_config.py:array", "signs_config.py"
BAD = {
    "no such module": (
        "sums_config.py:array",
        ["--config.env.name=sums_arry:make"],
        "cannot import module 'sums_arry'",
    ),
    "no such function": (ARRAY, ["--config.env.name=sums_array:mak"], "has no attribute 'mak'"),
    "raises while importing": (ARRAY, ["--config.env.name=broken:make"], "RuntimeError: not today"),
    "not a bundle": (ARRAY, ["--config.env.name=sums_array:observe"], "config.env.args"),
    "wrong shape": (ARRAY, ["--config.env.name=wrong:make"], "reward 'accuracy' has shape (2,)"),
    "no rule": (
        "signs_config.py",
        ["--config.credit.rule=signs:sings"],
        "has no attribute 'sings'; did you mean 'signs'",
    ),
    "unknown role": (SIGNS, ["--config.team.models={'third': 'first'}"], "unknown role 'third'"),
    "removed key": (SIGNS, ["--config.credit.coupling=2.0"], "config.beta of recipe advantage_alignment"),
}


WRONG = """
import sums_array
from sums_array import ArrayTask, jnp, step


def make():
    task = sums_array.make()
    bad = lambda *a: (step(*a)[0], {"accuracy": jnp.zeros(2)}, jnp.bool_(True))
    return ArrayTask(task.env._replace(step=bad), task.tasks, task.held_out)
"""


def test_bad_names_and_environments_end_in_one_line(site, scratch):
    """All in one process: importing JAX is most of the time of a command."""
    (scratch / "broken.py").write_text("raise RuntimeError('not today')\n")
    (scratch / "wrong.py").write_text(WRONG)
    program = """
import json, sys
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.errors import ConfigError
out = {}
for name, (spec, overrides, _) in json.loads(sys.argv[1]).items():
    try:
        pairs = [tuple(o.removeprefix("--config.").split("=", 1)) for o in overrides]
        cfg = config_flags.load(spec, pairs)
        config_flags.recipe_module(cfg.recipe).make(cfg)
        out[name] = "accepted"
    except ConfigError as error:
        out[name] = str(error)
print(json.dumps(out))
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{site}{os.pathsep}{scratch}"}
    command = [sys.executable, "-c", program, json.dumps(BAD)]
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    for name, (*_, message) in BAD.items():
        assert message in got[name] and "\n" not in got[name], f"{name}: {got[name]}"
