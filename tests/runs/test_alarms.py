"""Lines about metrics that go wrong, and none about a run that learns."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxmarl_llm.agents.team import TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.recipes import grpo
from jaxmarl_llm.runs import loop
from jaxmarl_llm.runs.alarms import ADVICE, FEW, MANY, Alarms, replay
from jaxmarl_llm.training.step_metrics import variance_shares

KEPT = Path(__file__).parents[2] / "docs" / "results"  # runs that went wrong


def told(rows, pretrained=False):
    """(step, line) of each alarm."""
    lines: list[str] = []
    alarms, out = Alarms(lines.append, pretrained=pretrained), []
    for step, row in enumerate(rows, 1):
        before = len(lines)
        alarms.see(step, row)
        out += [(step, line) for line in lines[before:]]
    return out


def run(reward, **agent):
    """Rows of a run. reward, agent: step -> value."""
    return [
        {"reward/total": reward(t)} | {f"agent/solver/{name}": value(t) for name, value in agent.items()}
        for t in range(120)
    ]


@pytest.mark.parametrize(
    "agent, message",
    [
        ({"entropy": lambda t: 2.0 if t < 60 else 0.01}, "entropy of role 'solver' fell from 2 to"),
        ({"length": lambda t: 10.0 if t < 60 else 60.0}, "completions of role 'solver' grew from 10 to"),
        ({"truncated": lambda t: 0.1 if t < 60 else 1.0}, "the length limit ends"),
        ({"kl": lambda t: 0.1 if t < 60 else 30.0}, "nats per token from the reference policy"),
    ],
)
def test_a_collapse_is_said_once_within_twenty_steps(agent, message):
    found = told(run(lambda t: 0.5, **agent))
    assert len(found) == 1 and message in found[0][1] and 60 < found[0][0] <= 80
    better = told(run(lambda t: 0.5 + 0.001 * t, **agent))
    assert len(better) == ("kl" in agent), "a task that is being solved has low entropy too"
    assert not told(run(lambda t: 0.5, **{name: lambda t, f=f: f(0) for name, f in agent.items()}))


def test_the_first_steps_and_other_phases_alarm_nothing():
    assert not told(run(lambda t: 0.5, entropy=lambda t: 2.0 if t < FEW else 0.0)[: 2 * FEW - 1])
    assert not told([{"sft/nll": 9.0, "agent/solver/truncated": 1.0}] * 100)
    assert not told([{"reward/total": float("nan"), "agent/solver/truncated": 1.0}] * 100)


@pytest.mark.parametrize("share, rise, alarms", [(0.9, 0.0, 1), (0.9, 0.2, 0), (0.7, 0.0, 0)])
def test_a_dominant_component_alarms_while_success_is_flat(share, rise, alarms):
    rows = [
        {"reward/total": 1.0, "success": 0.3 + rise * t / 100, "reward_variance/length": share} for t in range(MANY + 9)
    ]
    found = told(rows)
    assert len(found) == alarms
    if alarms:
        assert found[0][0] == MANY and "component 'length' has 90% of the variance of the reward" in found[0][1]


def test_a_component_of_the_newest_steps_alone_alarms_nothing():
    rows = [{"reward/total": 1.0, "success": 0.3} for _ in range(2 * MANY)]
    assert not told([row | ({"reward_variance/length": 0.9} if t > MANY + 9 else {}) for t, row in enumerate(rows)])


def test_variance_shares_are_those_of_enumeration():
    rng = np.random.default_rng(0)
    rewards = {"accuracy": rng.normal(size=(9, 2)), "length": rng.normal(size=(9, 2)) ** 2, "unpaid": np.ones((9, 2))}
    weights, known = {"accuracy": 0.5, "length": -2.0}, np.arange(9) != 4
    rewards["length"][4] = np.nan  # an invalid joint action
    got = variance_shares(rewards, weights, known)
    seen = [(0.5 * rewards["accuracy"][j, a], -2 * rewards["length"][j, a]) for j in range(9) if j != 4 for a in (0, 1)]
    whole = np.cov(np.array([[x, y, x + y] for x, y in seen]).T, bias=True)
    assert got == pytest.approx({f"reward_variance/{n}": whole[k, 2] / whole[2, 2] for k, n in enumerate(weights)})
    assert sum(got.values()) == pytest.approx(1)
    assert variance_shares(rewards, {"accuracy": 1.0}, known) == {}
    assert variance_shares({n: np.ones((9, 2)) for n in weights}, weights, known) == {}


@pytest.mark.parametrize("pretrained", [False, True])
def test_a_run_says_its_alarms(pretrained, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(TeamConfig, "pretrained", property(lambda self: pretrained))
    cfg = from_dict(
        grpo.Config,
        {
            "steps": FEW if pretrained else 2 * FEW,
            "batch": 2,
            "group": 2,
            "reward": {"payoff": 1.0},
            "optimizer": {"learning_rate": 1e-9},
            "sft": {"steps": 0},
            "env": {"name": "matrix", "args": {"payoffs": [[1.0, 1.0]] * 4}, "eval_tasks": 2},
            "team": {"max_new_tokens": 1, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
            "run": {
                "eval_every": 10 * pretrained,
                "eval_greedy": False,
                "tensorboard": False,
                "rollouts": {"every": 0},
            },
        },
    )
    loop.fit(cfg, grpo.make(cfg), tmp_path)
    said = capsys.readouterr().out
    assert said.count("the length limit ends 100% of the completions of role") == 2, said
    assert (tmp_path / "best").exists() == pretrained and ("eval/return was best after" in said) == pretrained


@pytest.mark.parametrize(
    "agent, message, at",
    [
        ({"entropy": lambda t: 2.0 if t < 60 else 0.01}, "entropy of role 'solver' fell from 2 to", 70),
        ({"truncated": lambda t: 0.1 if t < 60 else 0.4}, "the length limit ends", 64),
        ({"zero_variance": lambda t: 0.4 if t < 60 else 0.7}, "of the groups of role 'solver' have equal rewards", 64),
    ],
)
def test_pretrained_models_alarm_while_the_reward_rises(agent, message, at):
    rising = run(lambda t: 0.5 + 0.001 * t, **agent)
    assert not told(rising)
    ((step, line),) = told(rising, pretrained=True)
    assert step == at and message in line and "no higher" not in line
    assert not told(run(lambda t: 0.5, **{name: lambda t, f=f: f(0) for name, f in agent.items()}), pretrained=True)


def test_equal_groups_alarm_unless_the_reward_rises():
    equal = {"zero_variance": lambda t: 0.4 if t < 60 else 0.7}
    ((step, line),) = told(run(lambda t: 0.5, **equal))
    assert step == 64 and "52% of the groups" in line and "the reward is no higher" in line


def test_a_role_that_plays_no_more_alarms_once_behind_ten_steps():
    rows = [{"reward/total": t / 9} | ({"agent/helper/length": 4.0} if t < 5 or t == 9 else {}) for t in range(40)]
    ((step, line),) = told(rows, pretrained=True)
    assert step == 10 + FEW and "role 'helper' has not played for 10 steps" in line
    assert not told(rows), "models that begin from nothing do not alarm"
    assert not told(rows[: 9 + FEW], pretrained=True)


@pytest.mark.parametrize("solved, varies, alarms", [(2, True, True), (3, True, False), (0, False, False)])
def test_steps_without_success_alarm_where_the_reward_varies(solved, varies, alarms):
    rows = [{"reward/total": 0.1 * (t % 2) * varies, "success": float(t < solved)} for t in range(FEW)]
    found = told(rows, pretrained=True)
    assert bool(found) == alarms and not told(rows)
    if alarms:
        assert found[0][0] == FEW and "8 of 10 steps have no success" in found[0][1]


@pytest.mark.parametrize("run_folder", ["smollm2", "magrpo_smollm2"])
def test_the_kept_runs_that_went_wrong_would_have_warned(run_folder):
    folder = KEPT / run_folder
    page = (folder / "README.md").read_text()
    shown = re.findall(r"<!-- warnings of (\S+) -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert [name for name, _ in shown] == sorted(path.name for path in folder.glob("*.jsonl"))
    for name, lines in shown:
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        said = replay(rows, pretrained=True)
        assert said and lines == "\n" + "".join(f"- {line}\n" for line in said) + "\n"
        assert not replay(rows, pretrained=False)


def test_every_alarm_says_what_to_change():
    keys = re.findall(r"config\.[\w.]+", " ".join(ADVICE.values()))
    cfg = grpo.Config()
    for key in keys:
        value = cfg
        for part in key.split(".")[1:]:
            value = getattr(value, part)
