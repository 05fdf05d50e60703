"""Figures of the claims on AFM: held-out figures of scripted players, findings of the arms, the arms in miniature."""

import dataclasses

import numpy as np
import pytest

from experiments.claims import afm as claims
from experiments.studies.tag_bounds import tokens_read
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.recipes.afm import sequences
from jaxmarl_llm.training.config import SFT, Offline
from jaxmarl_llm.training.optimizers import Optimizer
from tests.envs.facts_episodes import texts_of
from tests.recipes.test_afm import FORMS, N, config, played

pytestmark = pytest.mark.usefixtures("numpy_tables")


@pytest.mark.parametrize("players", FORMS)
def test_figures_of_scripted_players(players):
    """Tokens by hand: 67 and 31 for two hops, 39 and 19 for one. Completions are as long in both forms."""
    known = texts_of(facts.make_tasks(FORMS[players], n=N))
    hops = np.array([len(task.path) for task in known])
    em, tokens, sampled, searches, form = claims.figures_of(played(players))
    assert em == pytest.approx(np.mean(["1" not in task.question for task in known]))
    size = {"team": (39, 67), "agent": (19, 31)}[players]
    assert tokens == pytest.approx(np.mean([size[h - 1] for h in hops]))
    assert sampled == pytest.approx(np.mean(4 * hops + 3 * hops + 1 + 3))
    assert searches == pytest.approx(hops.mean()) and form == 1
    assert tokens_read([]) == 0


def test_sequences_of_seeds_are_repeated_to_one_size():
    """Seeds with other numbers of right episodes, and with longest sequences of other lengths, are one table."""
    tree = played("team")
    moves = tree.transitions
    early = moves.task < N // 3
    few = dataclasses.replace(moves, rewards={**moves.rewards, "em": moves.rewards["em"] * early[:, None]})
    both = claims.jax.tree.map(lambda *x: np.stack(x), tree, dataclasses.replace(tree, transitions=few))
    rows = claims.told(both, 2, N)
    for s, own in enumerate((sequences(tree), sequences(dataclasses.replace(tree, transitions=few)))):
        count = len(own.length)
        assert count < N and rows.loss_mask.dtype == bool
        for name, column in own._asdict().items():
            for k in range(N):
                got, want = getattr(rows, name)[s, k], column[k % count]
                np.testing.assert_array_equal(got[..., : np.size(want)] if got.ndim else got, want)
                assert not got.ndim or not got[np.size(want) :].any()


def test_findings_are_differences_of_the_arms(monkeypatch):
    figures = lambda em, tokens: claims.Played(
        *map(np.array, ([em, em + 0.1], [tokens, 2 * tokens], [9, 9], [2, 2], [1, 1]))
    )
    arms = {
        "team": figures(0.8, 50.0),
        "agent, imitation": figures(0.5, 20.0),
        "agent": figures(0.7, 30.0),
        "alone": figures(0.2, 25.0),
    }
    monkeypatch.setattr(claims, "compare", lambda *_: arms)
    found = {finding.claim: finding for finding in claims.run([3, 4], print)}
    assert [*found] == [*claims.CLAIMS]
    for name, effect in {"rl": 0.2, "tokens": 0.4, "level": -0.1, "imitation": 0.5}.items():
        np.testing.assert_allclose(found[name].effect, [effect] * 2, err_msg=name)


@pytest.mark.slow
def test_the_arms_in_miniature():
    """All phases as programs of two seeds: the agent changes in imitation, and in RL from two states."""
    base, lines = claims.tiny(), []
    cfg = config(
        batch=2,
        steps=1,
        source_steps=1,
        harvested=32,
        imitation=Offline(20, 16, Optimizer(learning_rate=1e-2)),
        sft=SFT(120, 32, Optimizer(learning_rate=1e-2), samples=256),
    )
    env = dataclasses.replace(cfg.env, eval_tasks=16)
    got = claims.compare(dataclasses.replace(cfg, env=env), [3, 4], lines.append)
    assert [*got] == ["team, stage 0", "agent, stage 0", "team", "agent, imitation", "agent", "alone"]
    assert len(lines) == len(got) + 2 and base.recipe == "afm"
    for arm in got.values():
        assert arm.em.shape == (2,) and ((arm.em >= 0) & (arm.em <= 1)).all() and (arm.tokens > arm.sampled).all()
    for one, other in (("agent, stage 0", "agent, imitation"), ("agent, imitation", "agent"), ("agent", "alone")):
        assert (got[one].sampled != got[other].sampled).any(), (one, other)
