"""Figures of the claims on PRISMA: frozen roles to the bit, by seed; findings of two arms; an arm in miniature."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.claims import prisma as claims
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.recipes.prisma import ROLES
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def state_of(rng):
    """Parameters and optimizer states of two seeds."""
    tree = lambda: {role: {"w": rng.normal(size=(2, 3)).astype(np.float32), "n": np.zeros(2, int)} for role in ROLES}
    return SimpleNamespace(params={"agents": tree()}, opt_state=tree())


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("part", ["agents", "moments"])
def test_one_bit_of_a_frozen_role_counts_and_none_of_the_inspector(role, part):
    """0 and -0 are different bits."""
    before, after = (state_of(np.random.default_rng(0)) for _ in range(2))
    tree = {"agents": after.params["agents"], "moments": after.opt_state}[part]
    assert claims.same_bits(before, after).tolist() == [True, True]
    {"agents": before.params["agents"], "moments": before.opt_state}[part][role]["w"][1, 2] = 0.0
    tree[role]["w"][1, 2] = -0.0
    assert claims.same_bits(before, after).tolist() == [True, role == "inspector"]


def test_findings_are_differences_of_the_arms(monkeypatch):
    """One finding for each claim, from the arms with and without trace."""
    arm = lambda *rows: claims.Arm(*map(np.array, rows))
    own = arm([0.5, 0.6], [0.7, 0.65], [0.9, 0.8], [0.2, 0.1], [1.0, 0.0])
    other = arm([0.5, 0.6], [0.6, 0.6], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0])
    monkeypatch.setattr(claims, "train", lambda cfg, *rest: own if cfg.env.build().inspect.trace else other)
    found = {finding.claim: finding for finding in claims.run([3, 4], print)}
    assert [*found] == [*claims.CLAIMS]
    want = {"stage_two": [0.2, 0.05], "frozen": [1, 0], "passes": [0.9, 0.8], "trace": [0.1, 0.05]}
    for name, effect in want.items():
        np.testing.assert_allclose(found[name].effect, effect)


@pytest.mark.slow
def test_an_arm_in_miniature():
    """Both stages run as one program for all seeds: the team moves in stage I alone, and figures are shares."""
    base, lines = claims.tiny(), []
    env = dataclasses.replace(base.env, args={**base.env.args, "tasks": 64}, eval_tasks=16)
    cfg = dataclasses.replace(
        base,
        steps=2,
        stage_one=1,
        batch=2,
        plans=2,
        verdicts=2,
        env=env,
        team=TeamConfig(backbone=SMALL, max_new_tokens=6, remat=False),
        sft=SFT(20, 16, Optimizer(learning_rate=2e-2), samples=64),
        reward={**base.reward, "format": 0.1},
    )
    arm = claims.train(cfg, [3, 4], "small", lines.append)
    assert [line.split(":")[0] for line in lines] == [f"prisma, small, after stage {n}" for n in ("0", "I", "II")]
    assert arm.frozen.tolist() == [1.0, 1.0]
    for figures in arm[:4]:
        assert figures.shape == (2,) and ((figures >= 0) & (figures <= 1)).all()
