"""Means over held-out tasks: of all, of the parts that a task set names, and of those whose reward is known."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner
from jaxmarl_llm.training import evaluation
from jaxmarl_llm.training.config import RunConfig
from jaxmarl_llm.types import Transitions
from tests import toys

PLAIN = {"": Sampling()}
RUNNER = SimpleNamespace(evaluations=None)
CFG = SimpleNamespace(reward={"accuracy": 1.0, "form": 0.5})


def episodes(accuracy, form, known):
    """Episodes of two turns, one a task, of two roles: rewards [n 2 2] by task, turn and role."""
    n = len(known)
    flat = lambda x: np.asarray(x, float).swapaxes(0, 1).reshape(2 * n, 2)
    turn, task = np.repeat([0, 1], n), np.tile(np.arange(n), 2)
    return Transitions(
        steps=np.zeros((2 * n, 2), int),
        parent=np.where(turn == 1, task, -1),
        task=task,
        turn=turn,
        rewards={"accuracy": flat(accuracy), "form": flat(form)},
        done=turn == 1,
        valid=np.tile(known, 2),
        played=np.ones(2 * n, bool),
    )


def played(monkeypatch, *chunks):
    def held_out(*args):
        for c in chunks:
            yield c.task.max() + 1, SimpleNamespace(tree=SimpleNamespace(transitions=c))

    monkeypatch.setattr(evaluation, "held_out", held_out)


def test_parts_are_means_of_their_own_tasks(monkeypatch):
    rng = np.random.default_rng(0)
    accuracy, form = rng.random((2, 6, 2, 2))
    known = np.array([True, True, False, True, True, True])
    seen = np.array([True, False, True, True, False, False])
    runner = object.__new__(ArrayEnvRunner)
    runner.task = SimpleNamespace(parts={"seen": seen, "unseen": ~seen})
    played(monkeypatch, episodes(accuracy, form, known))
    got = evaluation.evaluate(CFG, None, runner, None, None, PLAIN)

    def mean(values, which):
        each = [values[i, :, 0].sum() / 2 + values[i, :, 1].sum() / 2 for i in range(6) if which[i] and known[i]]
        return sum(each) / len(each)

    for name, which in {"": np.ones(6, bool), "@seen": seen, "@unseen": ~seen}.items():
        assert got[f"eval/success{name}"] == pytest.approx(mean(accuracy, which)), name
        assert got[f"eval/return{name}"] == pytest.approx(mean(accuracy, which) + 0.5 * mean(form, which)), name
    assert got["eval/accuracy"] == got["eval/success"] and got["eval/form"] == pytest.approx(mean(form, known))
    assert len(got) == 8


def test_tasks_whose_reward_is_unknown_do_not_count(monkeypatch):
    """Not even when they fill a batch: the mean is of what is known, and NaN when nothing is."""
    ones, no = np.ones((2, 2, 2)), np.zeros(2, bool)
    played(monkeypatch, episodes(ones, ones, no), episodes(0.25 * ones, ones, ~no))
    got = evaluation.evaluate(CFG, None, RUNNER, None, None, PLAIN)
    assert got == {"eval/accuracy": 0.5, "eval/form": 2.0, "eval/return": 1.5, "eval/success": 0.5}
    played(monkeypatch, episodes(ones, ones, no))
    assert all(np.isnan(v) for v in evaluation.evaluate(CFG, None, RUNNER, None, None, PLAIN).values())


@pytest.mark.parametrize("greedy", [True, False])
def test_greedy_episodes_are_an_option(monkeypatch, greedy):
    ones = np.ones((2, 2, 2))
    played(monkeypatch, episodes(0.25 * ones, ones, np.ones(2, bool)))
    cfg = SimpleNamespace(reward=CFG.reward, sampling=Sampling(0.5), run=RunConfig(eval_greedy=greedy))
    wanted = {"": 0.5, "_greedy": 0.0} if greedy else {"": 0.5}
    assert {suffix: s.temperature for suffix, s in evaluation.eval_samplings(cfg).items()} == wanted
    got = evaluation.evaluate(cfg, None, RUNNER, None, None)
    assert set(got) == {f"eval/{name}{s}" for name in ("accuracy", "form", "return", "success") for s in wanted}


def test_episodes_show_each_role_its_own_rewards():
    """A joint action of a game whose payoffs sum to zero."""
    tree = SimpleNamespace(
        transitions=SimpleNamespace(
            played=np.array([True]), valid=np.array([True]), task=np.array([0]), turn=np.array([0]),
            parent=np.array([-1]), steps=np.array([[0, 1]]), rewards={"payoff": np.array([[1.0, -1.0]])},
        ),
        steps=SimpleNamespace(node=np.array([0, 1])),
        nodes=SimpleNamespace(role=np.array([0, 1])),
    )  # fmt: skip
    played = SimpleNamespace(tree=tree, prompt_text=str, completion_text=str)
    credited = SimpleNamespace(group=np.array([0, 1]), advantage=np.zeros(2))
    (episode,) = evaluation.episodes_of(toys.team(), played, range(2), credited, np.array([True, True]))
    assert [(turn["role"], turn["rewards"]) for turn in episode] == [("a", {"payoff": 1.0}), ("b", {"payoff": -1.0})]
