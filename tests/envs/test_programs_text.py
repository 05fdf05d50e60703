"""Programs through text: shares against a slow exec, who reads what, replies that earn nothing, ends, training."""

import dataclasses
import itertools
import json
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.data import loaders
from jaxmarl_llm.envs.coding import env as coding
from jaxmarl_llm.envs.coding.rewards import Unscored
from jaxmarl_llm.envs.programs import text
from jaxmarl_llm.envs.programs.roles import ROLES
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action
from jaxmarl_llm.recipes import unitymas_o
from jaxmarl_llm.training.optimizers import Optimizer
from tests.envs.first_steps import first_steps
from tests.envs.test_coding_rewards import needs_sandbox

CONFIG = text.Config()
# Rows of the data set itself, by the id of their task.
UPSTREAM = {f"MBPP/{r['task_id']}": r for r in json.loads((loaders.FIXTURES / "mbpp/sanitized-mbpp.json").read_text())}
TASKS = {split: text.tasks(text.Config(split=split)) for split in ("train", "test")}
FIRST = next(task for task in TASKS["train"] if task["id"] == "MBPP/94")


def share(program, asserts):
    """Share of asserts that hold, by exec in this process: of programs that this file wrote."""
    passed = 0
    for line in asserts:
        scope = {}
        try:
            exec(program, scope)
            exec(line, scope)
            passed += 1
        except Exception:
            pass
    return passed / len(asserts)


def play(config, task, replies):
    """Prompts by turn, rewards by turn, the last state; a reply is a text, or a text and whether it was cut off."""
    state, prompts, paid, done = text.reset(0, task), [], [], False
    for reply in replies:
        assert not done
        ((role, prompt),) = text.observe(config, state).items()
        said, cut_off = reply if isinstance(reply, tuple) else (reply, False)
        prompts.append((role, "\n".join(m.text for m in prompt)))
        state, rewards, done = text.step(
            config, 0, pickle.loads(pickle.dumps(state)), {role: Action(said, (), cut_off)}
        )
        paid.append(rewards)
    assert done == state.done and (text.observe(config, state) == {}) == done
    return prompts, paid, state


def test_the_module_needs_no_jax():
    code = "import sys, jaxmarl_llm.envs.programs.text; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@needs_sandbox
@pytest.mark.parametrize("shown", [1, 2])
def test_scores_are_shares_of_the_hidden_tests(shown):
    """Solutions, the same with a fault, and constants: against exec of the asserts of the data set."""
    config, seen = text.Config(shown_tests=shown), set()
    for task in [*TASKS["train"][:4], *TASKS["test"][:2]]:
        upstream = UPSTREAM[task["id"]]
        name, asserts = task["entry_point"], upstream["test_list"]
        solution = upstream["code"]
        programs = [solution, f"def {name}(*args):\n    return True\n", f"def {name}(*args):\n    return 1 / 0\n"]
        programs += [wrong for wrong, _ in itertools.islice(text.faults(text.ast.unparse(text.ast.parse(solution))), 1)]
        for program in programs:
            found = text.judge(config, task, program)
            assert found.proper and found.score == pytest.approx(share(program, asserts[shown:])), program
            assert found.solves == (share(program, asserts[:shown]) == 1)
            assert found.correct == (share(program, asserts) == 1)
            seen.add(found.score)
    assert {0.0, 1.0} <= seen


@needs_sandbox
def test_nobody_reads_a_hidden_test():
    """Prompts of all turns of all protocols, with a program that is right and one that is wrong on all tests."""
    wrong = "def {}(*args):\n    return 'no'\n"
    replies = {
        "plan": ["a plan", wrong],
        "solo": [wrong],
        "refine": [wrong] * 3,
        "reflect": ["a plan", wrong, "a hint", wrong, "another hint", wrong],
    }
    assert set(replies) == set(ROLES)
    for name, said in replies.items():
        config = text.Config(protocol=name)
        prompts, paid, _ = play(config, FIRST, [reply.format(FIRST["entry_point"]) for reply in said])
        shown, *hidden = UPSTREAM[FIRST["id"]]["test_list"]
        inputs = [line.split("(", 1)[1].split("==")[0].strip() for line in hidden]
        assert [role for role, _ in prompts] == [*config.order] and len(prompts) == len(paid)
        for role, prompt in prompts:
            read = prompt.replace(" ", "").replace('"', "'")
            assert shown.split("==")[0].replace(" ", "").replace('"', "'") in read
            assert not any(given.replace(" ", "").replace('"', "'") in read for given in inputs)
            assert "candidate" not in prompt and f"You are the {role}." in prompt
    first, again = prompts[1][1], prompts[3][1]  # of the coder, in reflect
    assert "Plan: a plan" in first and "Last program" not in first
    assert (
        "Plan: a plan" in again and "return 'no'" in again and "0 of 1 shown pass" in again and "Hint: a hint" in again
    )
    assert "Plan" not in prompts[2][1] and "return 'no'" in prompts[2][1] and "Hint" not in prompts[2][1]


@needs_sandbox
def test_an_episode_with_reflection_ends_where_the_shown_tests_pass():
    right, wrong = FIRST["solution"], f"def {FIRST['entry_point']}(x):\n    return 'no'\n"
    _, paid, state = play(CONFIG, FIRST, ["plan", wrong, "hint", right])
    assert state.done and state.solved
    coder = [paid[turn]["coder"] for turn in (1, 3)]
    assert [(c["score"], c["first"], c["tests"], c["accuracy"]) for c in coder] == [(0, 0, 0, 0), (1, 0, 1, 1)]
    assert all(set(rewards) <= set(ROLES["reflect"]) for rewards in paid)
    assert all(paid[3][role]["tests"] == 1 and "score" not in paid[3][role] for role in ("planner", "reflector"))
    _, paid, state = play(CONFIG, FIRST, ["plan", right])
    assert state.done and paid[1]["planner"]["first"] == paid[1]["planner"]["tests"] == 1
    # A program that is right on the shown test alone ends the episode, and earns nothing.
    given = UPSTREAM[FIRST["id"]]["test_list"][0].split("==")[1]
    _, paid, state = play(CONFIG, FIRST, ["plan", f"def {FIRST['entry_point']}(x):\n    return {given}\n"])
    assert state.done and paid[1]["coder"]["score"] == 0 and paid[1]["coder"]["accuracy"] == 0


@needs_sandbox
def test_refine_pays_each_program_and_goes_on():
    config = text.Config(protocol="refine", attempts=2)
    prompts, paid, state = play(config, FIRST, [FIRST["solution"], "def"])
    assert [p["coder"]["tests"] for p in paid] == [1, 0] and [p["coder"]["accuracy"] for p in paid] == [0, 0]
    assert "1 of 1 shown pass" in prompts[1][1] and state.done
    with pytest.raises(ValueError, match="unfinished episode"):
        text.step(config, 0, state, {"coder": Action("", ())})


NOTHING = [
    "",
    " \n",
    "```python\n```",
    "print('PASS')",
    "print(True)\nprint('all tests pass')",
    "I would sort the list and return its first item.",
    "def {name}(*args):\n    pass\n",
    "def {name}(*args):\n    print('Varsha')\n",
    "def {name}(*args):\n    print(args)\n    return\n",
    "def other(*args):\n    return True\n",
    "{name} = print",
    "assert True",
    "def {name}(*args):\n    return (",
]


@pytest.mark.parametrize("reply", NOTHING)
def test_an_empty_program_or_printing_earns_nothing(reply):
    """On every problem and in every protocol. What is no function that returns a value is out of form."""
    for task in [*TASKS["train"], *TASKS["test"]]:
        found = text.judge(CONFIG, task, reply.format(name=task["entry_point"]))
        assert not found.proper and found.score == 0 and not found.solves and not found.correct
    said = reply.format(name=FIRST["entry_point"])
    for name in ROLES:
        config = dataclasses.replace(CONFIG, protocol=name, attempts=1, reflections=1)
        order = config.order
        _, paid, state = play(config, FIRST, [said if role == "coder" else "words" for role in order])
        assert state.done and not state.solved
        for rewards in paid:
            assert all(not rewards[role].get(c) for role in rewards for c in ("tests", "first", "score", "accuracy"))
        assert all(paid[turn]["coder"]["invalid"] == -1 for turn, role in enumerate(order) if role == "coder")


@needs_sandbox
def test_what_a_right_program_prints_does_not_count():
    task, name = FIRST, FIRST["entry_point"]
    loud = task["solution"] + f"\nprint('FAIL')\nof = {name}\ndef {name}(x):\n    print('FAIL')\n    return of(x)\n"
    assert text.judge(CONFIG, task, loud).score == text.judge(CONFIG, task, task["solution"]).score == 1
    quiet = f"def {name}(x):\n    print('Varsha')\n    return 0\n"
    assert text.judge(CONFIG, task, quiet).score == 0


def test_words_out_of_form():
    """Empty, long and cut-off plans and hints are penalised; a long one is shown in part."""
    config = text.Config(plan_chars=10, hint_chars=5)
    for reply, invalid in [("ok", 0), ("", -1), ("x" * 11, -1), (("ok", True), -1)]:
        _, paid, state = play(config, FIRST, [reply])
        assert paid == [{"planner": {"invalid": invalid, "turns": 1.0}}] and len(state.plan) <= 16
    prompts, paid, _ = play(config, FIRST, ["a\nplan", "", "a long hint", ""])
    assert (
        paid[2]["reflector"]["invalid"] == -1
        and "Hint: a lon [cut]" in prompts[3][1]
        and "Plan: a plan" in prompts[1][1]
    )
    assert "- it does not define the function" in prompts[3][1] and "Last program:\nnone" in prompts[3][1]
    _, paid, _ = play(config, FIRST, ["plan", ("", True)])
    assert paid[1]["coder"]["invalid"] == -1


def test_no_verdict_is_no_reward(monkeypatch):
    """What the sandbox cannot judge raises, and is not 0."""

    def fails(*args, **kw):
        raise Unscored("no verdict")

    monkeypatch.setattr(coding, "grade", fails)
    state, _, _ = text.step(CONFIG, 0, text.reset(0, FIRST), {"planner": Action("plan", ())})
    with pytest.raises(Unscored):
        text.step(CONFIG, 0, state, {"coder": Action(FIRST["solution"], ())})


@needs_sandbox
def test_demonstrations_are_of_the_given_tasks_and_good():
    """Programs pass all tests; hints name a line that differs; a hint stands between two programs of one problem."""
    some = TASKS["train"][:3]
    samples = text.demonstrations(CONFIG, some)
    names = [task["entry_point"] for task in some]
    roles = [role for role, _, _ in samples]
    assert roles.count("planner") == 3 and roles.count("coder") == 3 + roles.count("reflector") and "reflector" in roles
    for role, prompt, reply in samples:
        (name,) = [name for name in names if f"def {name}(" in prompt[1].text.split("'''")[0]]
        task = some[names.index(name)]
        if role == "coder":
            assert share(reply, UPSTREAM[task["id"]]["test_list"]) == 1
        elif role == "reflector":
            line, right = reply.removeprefix("Line ").split(" should be: ")
            last = prompt[1].text.split("Last program:\n")[1].split("\n\nVerdicts:")[0].split("\n")
            asserts, old = UPSTREAM[task["id"]]["test_list"], last[int(line) - 1]
            assert share("\n".join(last), asserts) < 1
            last[int(line) - 1] = old[: len(old) - len(old.lstrip())] + right
            assert share("\n".join(last), asserts) == 1
    refined = text.demonstrations(text.Config(protocol="refine"), some)
    assert {role for role, _, _ in refined} == {"coder"} and len(refined) > 3
    assert len(text.demonstrations(text.Config(protocol="plan"), some)) == 6


def test_sides_share_no_problem_and_counts_are_checked():
    by_side = {split: {task["prompt"] for task in rows} for split, rows in TASKS.items()}
    assert by_side["train"] and by_side["test"] and not by_side["train"] & by_side["test"]
    assert len(text.tasks(text.Config(count=2))) == 2
    with pytest.raises(ConfigError, match=r"args\.count: expected at most 8, the problems with a hidden test, got 9"):
        text.tasks(text.Config(count=9))
    with pytest.raises(ConfigError, match=r"args\.shown_tests: expected fewer than the tests of a problem, got 3"):
        text.tasks(text.Config(shown_tests=3))


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"protocol": "debate"}, r"args\.protocol: unknown value 'debate'"),
        ({"reflections": 4}, r"args\.reflections: expected 1 to 3, got 4"),
        ({"attempts": 0}, r"args\.attempts: expected 1 to 1000, got 0"),
        ({"shown_tests": 0}, r"args\.shown_tests: expected at least 1, got 0"),
        ({"plan_chars": 0}, r"args\.plan_chars: expected 1 to"),
        ({"cpu": 9.0, "total": 1.0}, r"args\.cpu: expected more than 0 and at most total=1 seconds"),
        ({"split": "validation"}, r"args\.split: unknown value 'validation'"),
        ({"benchmark": "humaneval"}, "benchmark"),
    ],
)
def test_bad_configurations(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        EnvConfig("programs_text", bad).check("config.env")
    assert "\n" not in str(error.value)


@needs_sandbox
@pytest.mark.parametrize("protocol", ["refine", "reflect"])
def test_a_random_model_takes_two_steps_of_unitymas_o(protocol, tmp_path):
    """The model moves at each, nothing is invalid, and no prompt is cut."""
    args = {"protocol": protocol, "attempts": 2, "reflections": 1}
    shape = Backbone(hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
    cfg = dataclasses.replace(
        unitymas_o.Config(),
        steps=2,
        batch=2,
        group=2,
        scored=("coder",),
        absolute=(),
        team=TeamConfig(backbone=shape, parameter_sharing="shared", critic="head", max_new_tokens=3, remat=False),
        env=EnvConfig("programs_text", args, workers=0, max_prompt=1024, eval_tasks=2),
        optimizer=Optimizer(learning_rate=1e-3),
    )
    cfg.check("config")
    recipe = unitymas_o.make(cfg)
    states, rows = first_steps(recipe, tmp_path, 2)
    for metrics in rows:
        assert metrics["count/invalid"] == 0 and metrics["count/cut_prompts"] == 0 and metrics["logprob_diff"] < 1e-4
        assert metrics["reward/tests"] == 0 and metrics["reward/invalid"] < 0
    for before, after in itertools.pairwise(states):
        leaves = zip(*(jax.tree.leaves(state.params["agents"]) for state in (before, after)), strict=True)
        assert any(not np.array_equal(a, b) for a, b in leaves)
