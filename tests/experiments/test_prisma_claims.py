"""Figures of the claims on PRISMA: frozen roles to the bit, by seed; and all claims of a run in miniature."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from experiments.claims import prisma as claims
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.recipes.prisma import ROLES, make
from jaxmarl_llm.runs.compiled import make_program, task_data
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


@pytest.mark.slow
def test_claims_of_a_run_in_miniature(monkeypatch):
    """A finding for each claim; the arms are those of the program of a whole run."""

    def small(cfg):
        env = dataclasses.replace(cfg.env, args={**cfg.env.args, "tasks": 64, "copying": 0.0}, eval_tasks=64)
        team = TeamConfig(backbone=SMALL, max_new_tokens=6, remat=False)
        sft = SFT(80, 32, Optimizer(learning_rate=2e-2), samples=512)
        return dataclasses.replace(
            cfg, steps=2, stage_one=1, batch=2, plans=2, verdicts=2, env=env, team=team, sft=sft,
            reward={**cfg.reward, "format": 0.1}, optimizer=Optimizer(learning_rate=1e-2),
        )  # fmt: skip

    own, other = small(claims.tiny()), small(claims.blind())
    monkeypatch.setattr(claims, "tiny", lambda: own)
    monkeypatch.setattr(claims, "blind", lambda: other)
    arms, train = {}, claims.train
    monkeypatch.setattr(claims, "train", lambda *of: arms.setdefault(of[2], train(*of)))
    lines = []
    found = {finding.claim: finding for finding in claims.run([3, 4], lines.append)}
    assert [*found] == [*claims.CLAIMS] and len(lines) == 6
    trace, blind = arms["trace"], arms["blind"]
    assert found["frozen"].effect == [1.0, 1.0] and found["passes"].effect == trace.passed.tolist()
    assert ((trace.passed >= 0) & (trace.passed <= 1)).all() and trace.first.max() > 0
    np.testing.assert_allclose(found["stage_two"].effect, trace.last - trace.first)
    np.testing.assert_allclose(found["trace"].effect, trace.last - blind.last)
    np.testing.assert_allclose(trace.first, blind.first, atol=0.02)  # equal but for rounding
    recipe = make(own)
    states, _ = jax.jit(jax.vmap(make_program(recipe).run))(np.array([3, 4]), task_data(recipe, [3, 4]))
    seen = jax.jit(jax.vmap(claims.make_evaluation(own)))(states.params, np.array([3, 4]), task_data(recipe, [3, 4])[1])
    np.testing.assert_allclose(seen["em"], trace.last, atol=0.02)
