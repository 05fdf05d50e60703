"""`jaxmarl-llm view --text --node` and `--sample`: what a role saw, the arithmetic of an advantage, and tokens."""

from __future__ import annotations

import argparse

import pytest

from experiments.viewer.samples import written
from jaxmarl_llm.cli import view
from jaxmarl_llm.cli.view_sample import SampleView
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import rollouts
from tests.cli.test_cli import command
from tests.viewer.test_transcript import ROLES, rows


@pytest.fixture
def run(tmp_path):
    """The rows of the viewer's test; completion 4 has pieces, differences, and a group whose returns differ."""
    out = rows()
    for at, row in enumerate(out):
        if isinstance(row, rollouts.Completion) and row.step == 4:
            row = row._replace(text="o\u20ac\x1b", token_ids=(7, 8, 9, 257), logprobs=(-1.0, -2.0, None, -0.5))
            row = row._replace(learner_logprobs=(-1.25, -2.0, None, -0.5), token_chars=(1, 0, 2, 0))
            out[at] = row._replace(token_names=("\\xe2", "<eos>"), returns=2.0, advantage=2.0)
        if isinstance(row, rollouts.Group) and row.group == 3:
            out[at] = row._replace(mean=1.0, variance=0.25, high=2.0, size=4)
    return written(tmp_path, out, roles=ROLES)


def shown(capsys, run, **more):
    given = {"run": [str(run)], "text": True, "serve": False, "out": None, "port": None, "step": None, "task": None}
    given |= {"node": None, "sample": None, "held_out": False, "chars": 60, **more}
    assert view.main(argparse.Namespace(**given)) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_completion_with_its_prompt_its_advantage_and_its_tokens(run, capsys):
    lines = shown(capsys, run, sample=4)
    assert lines[0] == "step 31 \u00b7 task 0 \u00b7 turn 2 \u00b7 planner (m) \u00b7 node 3 \u00b7 completion 4"
    assert lines[1] == "planner saw 2 tokens, 5 more were cut from its middle"
    at = lambda text: next(k for k, line in enumerate(lines) if text in line)
    assert [lines[k].split(maxsplit=1) for k in (2, 4)] == [["tool", "stay: 7 no, 17 no"], ["user", "say no. nothing"]]
    assert lines[5].split() == ["memory", "read", "slot", "3:", "an", "old", "entry"]
    before = [" ".join(line.split()) for line in lines[at("played before") + 1 : at("planner wrote")]]
    assert before == ["planner, not seen go left", "planner, not seen stay", "critic no"]
    assert "joint action 2: pay 1 \u00d7 1 = 1, form 0 \u00d7 0.5 = 0" in lines[at("joint action")]
    sums = [line.strip() for line in lines[at("advantage") + 1 : at("memory written")]]
    assert sums == [
        "return 2 \u2212 group mean 1 = +1",
        "divided by the standard deviation of the group, 0.5",
        "advantage +2 \u00b7 trained",
    ]
    assert "slot 1: a new text" in lines[at("memory written")]
    assert "slot 2: a better text" in lines[at("memory refreshed")]
    assert not any("of another" in line for line in lines)
    table = [line.split() for line in lines[at("tokens: 4") + 2 :]]
    assert table == [
        ["0", "\u201co\u201d", "7", "-1", "-0.25"],
        ["1", "\\xe2", "8", "-2", "+0"],
        ["2", "\u201c\u20ac\\x1b\u201d", "9", "\u2013", "\u2013"],
        ["3", "<eos>", "257", "-0.5", "+0"],
    ]


def test_a_prompt_with_its_completions(run, capsys):
    lines = shown(capsys, run, node=2)
    assert lines[0].endswith("planner (m) \u00b7 node 2") and "planner (assistant) go left" in "\n".join(lines)
    after = [" ".join(line.split()) for line in lines[lines.index("completions") + 1 :]]
    same = "return 1 \u2212 group mean 1 = +0; the advantage is this difference; advantage +0 \u00b7 trained"
    assert after == ["3 stay", same] and not any("tokens:" in line for line in lines)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"advantage": 1.0}, "the advantage is this difference"),
        ({"advantage": 4.0}, "the credit rule made it +4, 4 times the difference"),
        ({"advantage": 1.0, "returns": 1.0}, "the credit rule made it +1"),
        ({"returns": None, "group": -1, "why": "no_return"}, "no return is known, so there is no advantage"),
    ],
)
def test_the_arithmetic_of_an_advantage(change, said, run):
    rollout = rollouts.read_file(next(iter(rollouts.files(run).values())))
    sums = SampleView(rollout, None, 4).arithmetic(rollout.steps[4]._replace(**change))
    assert any(text == said or text.startswith(f"{said} \u00b7") for text in sums)


WRONG = {
    "a lost completion": ({"sample": 9}, "--sample: .* has no completion 9; its numbers are 0 to 4"),
    "a lost prompt": ({"node": -1}, "--node: .* has no prompt -1; its numbers are 0 to 3"),
    "a completion of another prompt": ({"node": 0, "sample": 4}, "--sample: completion 4 belongs to node 3, not 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_there_is_one_line(case, run, capsys):
    change, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        shown(capsys, run, **change)


def test_the_command(run, tmp_path):
    done = command("jaxmarl_llm", "view", str(run), "--text", "--sample=4", folder=tmp_path)
    assert done.returncode == 0 and "tokens: 4" in done.stdout, done.stderr
    for flags, said in (
        (["--node=1"], "--node, --sample and --held-out belong"),
        (["--text", "--task=0", "--node=1"], "--task: "),
    ):
        done = command("jaxmarl_llm", "view", str(run), *flags, folder=tmp_path)
        assert done.returncode == 2 and said in done.stderr
