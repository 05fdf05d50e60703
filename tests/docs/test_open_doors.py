"""The code of the pages for users: a recipe, a credit rule, environments, a reward and data of their own.

Everything lives in a scratch folder and is trained from an installed wheel: nothing of the repository is on the path.
"""

import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tokenize

import pytest

from tests.test_layering import ROOT

PAGES = ("write_an_environment", "your_reward_and_data", "write_a_recipe")
FILE = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^jaxmarl-llm (train .*)$", re.MULTILINE)
OWN = ("capitals", "same_word", "edited", "lookup", "guess", "graded", "sums_array", "sums_text")
# A single turn, two roles at once with a joint reward, several turns with a tool, PettingZoo: components that are paid.
FOUR = {
    "capitals": {"accuracy", "length"},
    "same_word": {"same", "letters"},
    "lookup": {"right", "calls", "length"},
    "guess": {"reward", "illegal"},
}


def own(line: str) -> str:
    """The module of the task that a command trains with a configuration of own tasks; empty for other commands."""
    found = re.search(r"--config=m?a?grpo:task --config.env.name=(\w+):make ", line)
    return found[1] if found else ""


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder in which pip has installed the wheel, without what the wheel depends on: that is here already."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip"]
    build = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(ROOT)]
    subprocess.run(build, check=True, cwd=folder, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    install = [*pip, "install", "-q", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)]
    subprocess.run(install, check=True, cwd=folder, capture_output=True, timeout=300)
    return folder / "site"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scratch")
    for name in PAGES:
        for file, text in FILE.findall(page(name)):
            assert not (folder / file).exists(), f"two pages have a file {file}"
            (folder / file).write_text(text)
    return folder


def run(site, folder, *arguments):
    """The installed command in ``folder``; compiled programs are those of the tests."""
    shared = (
        {"JAX_COMPILATION_CACHE_DIR": os.environ["JAXMARL_TEST_CACHE"]} if "JAXMARL_TEST_CACHE" in os.environ else {}
    )
    environment = {**os.environ, **shared, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(site)}
    command = [sys.executable, str(site / "bin" / "jaxmarl-llm"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


COMMANDS = [(name, line) for name in PAGES for line in COMMAND.findall(page(name))]


def test_the_pages_have_what_the_test_runs():
    assert len(COMMANDS) == 13
    assert {task for _, line in COMMANDS if (task := own(line))} == set(OWN)
    for name in PAGES:
        for file, text in FILE.findall(page(name)):
            code = [
                line for line in text.splitlines() if line.strip() and not line.startswith(("import", "from", '"""'))
            ]
            assert len(code) <= 30, f"{name}: {file} has {len(code)} lines"


def code_lines(text):
    """Lines with code or a docstring on them: neither blank nor only a comment."""
    spoken = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({i for t in tokens if t.type not in spoken for i in range(t.start[0], t.end[0] + 1)})


def test_lines_of_code_are_counted():
    assert code_lines('"""Two\nlines."""\n\n# none\nx = (\n    1,  # one\n)\n') == 5


@pytest.mark.slow
def test_four_own_tasks_train_from_the_wheel_in_an_empty_folder(site, tmp_path):
    """The page's blocks and nothing else: 20 lines for a task, its own command, 20 steps, a reward that is paid."""
    files = dict(FILE.findall(page("your_reward_and_data")))
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    lines = {name: code_lines(files[f"{name}.py"]) for name in FOUR}
    assert max(lines.values()) <= 20, lines
    where = "import jaxmarl_llm; print(jaxmarl_llm.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(site)}
    imported = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert imported.stdout.startswith(str(site)), imported
    tiny = "--config.team.backbone.hidden_size=16", "--config.team.backbone.num_layers=1", "--config.batch=2"
    tiny += "--config.steps=20", "--config.team.max_new_tokens=8"
    commands = {own(line): line for _, line in COMMANDS if own(line)}
    for name, components in FOUR.items():
        done = run(site, tmp_path, *shlex.split(commands[name]), *tiny, "--config.run.tensorboard=False")
        assert done.returncode == 0, f"{name}: {done.stderr[-3000:]}"
        rows = [json.loads(text) for text in (tmp_path / f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, 21)), name
        assert all(math.isfinite(x) for row in rows for x in row.values() if isinstance(x, (int, float))), name
        assert all(f"reward/{component}" in row for row in rows for component in components), name
        assert any(row["reward/total"] != 0 for row in rows), f"{name}: no reward was paid"
        assert any(row[key] > 0 for row in rows for key in row if key.endswith("/grad_norm")), f"{name}: never updated"
        if name == "lookup":
            assert all(row["reward/calls"] < 0 for row in rows), "the tool was not used"


TWO_STEPS = [(name, line) for name, line in COMMANDS if own(line) not in FOUR]


@pytest.mark.parametrize("name, line", TWO_STEPS, ids=[line.rsplit("/", 1)[1] for _, line in TWO_STEPS])
def test_a_command_of_a_page_trains(name, line, site, scratch):
    """Two steps of each: every step has a line of metrics, and the held-out tasks were played."""
    taught = "--config.sft.steps=" in line
    stage_0 = 2 if taught else {"write_a_recipe": 30}.get(name, 0)
    fewer = ["--config.steps=2"] + ["--config.sft.steps=2"] * taught
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


ARRAY, TEXT, SIGNS = "grpo:task", "grpo:task", "signs_config.py"
TAUGHT = {ARRAY: ["--config.sft.steps=20"]}  # stage 0 asks for demonstrations
BAD = (
    {
        "no such module": (ARRAY, ["--config.env.name=sums_arry:make"], "cannot import module 'sums_arry'"),
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
        "a number": (
            ARRAY,
            ["--config.env.name=math:pi"],
            "config.env.name: math:pi: expected a function that returns",
        ),
        "update that is none": (
            SIGNS,
            ["--config.update=wrong:rule_of_one"],
            "expected a function of (step, driver, state",
        ),
    }
    | {
        f"make {name}": (ARRAY, [f"--config.env.name=wrong:{name}"], message)
        for name, message in {
            "raises": "wrong:raises raised RuntimeError: no data here",
            "no_step": "wrong:no_step raised TypeError: ArrayEnv.__new__() missing 1 required",
            "actors": "actors[0]: expected indices of roles, 0 to 0, got (3,)",
            "float_role": "observe(state).role has dtype float32, expected an integer type",
            "float_tokens": "observe(state).tokens has dtype float32, expected an integer type",
            "role_7": "observe(state).role is 7 in seat 0 at turn 0, expected 0",
            "seen": "all 15 held-out tasks are in the part 'seen'",
            "taught_raises": "demonstrations raised KeyError: 'nothing'",
            "taught_list": "demonstrations returned list, expected {role: samples}",
            "taught_role": "demonstrations has the role 'boss'; the roles are solver",
            "taught_floats": "demonstrations of role 'solver': tokens has dtype float64, expected integers",
        }.items()
    }
    | {
        f"module {name}": (ARRAY, [f"--config.env.name=scratch_{name}.x"], message)
        for name, message in {
            "make": "environment scratch_make.x: make raised RuntimeError: no board",
            "tasks": "environment scratch_tasks.x: make_tasks raised RuntimeError: no tasks",
        }.items()
    }
    | {
        f"text {name}": (TEXT, [f"--config.env.name=wrong:text_{name}"], message)
        for name, message in {
            "none": "step returned NoneType, expected (state, {role: {component: reward}}, done)",
            "two": "step returned a tuple of 2, expected (state",
            "flat": "step returned rewards {'accuracy': 1.0}, expected {role: {component: reward}}",
            "role": "step pays the role 'boss'; the roles are solver",
            "component": "step pays 'speed'; the components are accuracy",
            "word": "reward 'accuracy' of role 'solver' is 'good', expected a number",
            "done": "step returned done='no', expected True or False",
            "raises": "step raised RuntimeError: always, for empty and for other texts",
            "no_pairs": "demonstration 0: expected (role, prompt, completion), got str",
            "other_role": "demonstrations has the role 'boss'; the roles are solver",
            "number": "demonstration 0: the completion is of type int, expected str",
            "taught": "demonstrations raised ZeroDivisionError: division by zero",
        }.items()
    }
    | {
        f"rule {name}": (SIGNS, [f"--config.credit.rule={name}"], f"config.credit.rule: {name}: {message}")
        for name, message in {
            "json:dumps": "expected a rule (tree, signal) -> signal: too many positional arguments",
            "math:pi": "expected a rule (tree, signal) -> signal, got 3.14",
            "wrong:rule_of_one": "expected a rule (tree, signal) -> signal: too many positional arguments",
            "wrong:rule_raises": "raised ZeroDivisionError: division by zero; a rule replaces the whole chain",
            "wrong:rule_reward": "expected a rule (tree, signal) -> signal, but it returned dict",
            "wrong:rule_list": "expected a function or a frozen dataclass, which have a hash",
            "wrong:rule_scalar": "advantage has dtype float32 and shape (), expected float of [",
        }.items()
    }
)


WRONG = """
import dataclasses

import sums_array
import sums_text
from sums_array import ArrayTask, jnp, observe, step


def changed(task=(), **env):
    made = sums_array.make()
    return dataclasses.replace(made, env=made.env._replace(**env), **dict(task))


def make():
    return changed(step=lambda *a: (step(*a)[0], {"accuracy": jnp.zeros(2)}, jnp.bool_(True)))


def raises():
    raise RuntimeError("no data here")


def no_step():
    return ArrayTask(sums_array.ArrayEnv("sums", ("solver",), 1, 1, ("accuracy",), ((0,),), None, observe), {}, {})


seen_as = lambda **fields: changed(observe=lambda state: observe(state).replace(**fields))
actors = lambda: changed(actors=((3,),))
float_role = lambda: seen_as(role=jnp.array([0.0]))
float_tokens = lambda: seen_as(tokens=jnp.zeros((1, 4)))
role_7 = lambda: seen_as(role=jnp.array([7]))
seen = lambda: changed({"parts": {"seen": sums_array.HELD_OUT[: len(sums_array.PARTS["test"])] >= 0}})
taught = lambda function: changed({"demonstrations": function})
taught_raises = lambda: taught(lambda *a: {}["nothing"])
taught_list = lambda: taught(lambda *a: [1])
taught_role = lambda: taught(lambda *a: {"boss": sums_array.demonstrations(*a)["solver"]})


def floats(*a):
    rows = sums_array.demonstrations(*a)["solver"]
    return {"solver": {**rows, "tokens": rows["tokens"] / 2}}


taught_floats = lambda: taught(floats)


def text(result=None, **task):
    made = sums_text.make()
    env = made.make()
    bad = env.step if result is None else lambda *a: result()
    return dataclasses.replace(made, make=lambda: env._replace(step=bad), **task)


def always():
    raise RuntimeError("always")


text_none = lambda: text(lambda: None)
text_two = lambda: text(lambda: (0, True))
text_flat = lambda: text(lambda: (0, {"accuracy": 1.0}, True))
text_role = lambda: text(lambda: (0, {"boss": {"accuracy": 1.0}}, True))
text_component = lambda: text(lambda: (0, {"solver": {"speed": 1.0}}, True))
text_word = lambda: text(lambda: (0, {"solver": {"accuracy": "good"}}, True))
text_done = lambda: text(lambda: (0, {"solver": {"accuracy": 1.0}}, "no"))
text_raises = lambda: text(always)
text_no_pairs = lambda: text(demonstrations=lambda tasks: ["3"])
text_other_role = lambda: text(demonstrations=lambda tasks: [("boss", (), "3")])
text_number = lambda: text(demonstrations=lambda tasks: [("solver", (), 3)])
text_taught = lambda: text(demonstrations=lambda tasks: 1 / 0)


def text_strict():
    def step(seed, task, actions):
        right = int(actions["solver"].text) == task[0] + task[1]
        return task, {"solver": {"accuracy": float(right)}}, True

    made = sums_text.make()
    env = made.make()
    return dataclasses.replace(made, make=lambda: env._replace(step=step))


class Listed(list):
    def __call__(self, tree, signal):
        return signal


rule_of_one = lambda tree: tree
rule_raises = lambda tree, signal: 1 / 0
rule_reward = lambda tree, signal: {"reward": signal.reward}
rule_list = Listed()
rule_scalar = lambda tree, signal: signal.replace(
    value=jnp.zeros(tree.steps.node.shape), advantage=signal.reward.sum(), valid=tree.steps.valid
)
"""
MODULES = {  # an environment's module whose one function fails
    "make": "make_tasks = len\n\n\ndef make(config):\n    raise RuntimeError('no board')\n",
    "tasks": "import sums_array\n\n\ndef make(config):\n    return sums_array.make().env\n\n\n"
    "def make_tasks(config, seed=None, n=None, *, held_out=False):\n    raise RuntimeError('no tasks')\n",
}
CONFIG = "import dataclasses\n\n\n@dataclasses.dataclass(frozen=True)\nclass Config:\n    seed: int = 0\n\n\n"


def test_bad_names_and_environments_end_in_one_line(site, scratch):
    """All in one process: importing JAX is most of the time of a command."""
    (scratch / "broken.py").write_text("raise RuntimeError('not today')\n")
    (scratch / "wrong.py").write_text(WRONG)
    for name, text in MODULES.items():
        (scratch / f"scratch_{name}").mkdir()
        (scratch / f"scratch_{name}" / "x.py").write_text(CONFIG + text)
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
    except Exception as error:
        out[name] = f"TRACEBACK {type(error).__name__}: {error}"
print(json.dumps(out))
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{site}{os.pathsep}{scratch}"}
    strict = {"strict": (TEXT, ["--config.env.name=wrong:text_strict"], "accepted")}
    given = {name: (spec, [*TAUGHT.get(spec, ()), *more], says) for name, (spec, more, says) in (BAD | strict).items()}
    command = [sys.executable, "-c", program, json.dumps(given)]
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("step raised ValueError: invalid literal for int()") == 1, done.stderr  # a warning
    got = json.loads(done.stdout.splitlines()[-1])
    asked = {name: message for name, (*_, message) in (BAD | strict).items()}
    other = [f"{name}: {got[name]}" for name, message in asked.items() if message not in got[name] or "\n" in got[name]]
    assert not other, "\n".join(other)
