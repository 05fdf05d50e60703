"""The claims of CoMAM: what the arms differ in, and all claims of a run in miniature."""

import dataclasses

import numpy as np
import pytest

from experiments.claims import comam as claims
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.envs.facts import remember
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def test_arms_differ_in_what_the_claims_say():
    own, local, uniform = (arm() for arm in (claims.tiny, claims.local, claims.uniform))
    assert [arm.weights for arm in (own, local, uniform)] == ["ranks", "none", "uniform"]
    assert dataclasses.replace(local, weights="ranks") == dataclasses.replace(uniform, weights="ranks") == own
    assert {name: (claim.kind, claim.delta) for name, claim in claims.CLAIMS.items()} == {
        "local": ("L", 0.03), "uniform": ("X", 0.0),
    }  # fmt: skip
    assert {key.split("/")[0] for key in claims.SHOWN.values()} == set(remember.COMPONENTS[:6])


@pytest.mark.slow
def test_claims_of_a_run_in_miniature(monkeypatch):
    """A finding for each claim, by the figures of its arms; both arms begin with one stage 0."""

    def small(cfg):
        env = dataclasses.replace(cfg.env, args={**cfg.env.args, "tasks": 64, "copying": 0.0}, eval_tasks=64)
        team = TeamConfig(backbone=SMALL, max_new_tokens=7, remat=False)
        sft = SFT(80, 32, Optimizer(learning_rate=2e-2), samples=512)
        local = {**cfg.local_reward, "format": 1.0}
        arm = dataclasses.replace(cfg, steps=2, batch=2, group=4, env=env, team=team, sft=sft, local_reward=local)
        return dataclasses.replace(arm, optimizer=Optimizer(learning_rate=1e-2))

    for name in ("tiny", "local", "uniform"):
        monkeypatch.setattr(claims, name, lambda cfg=small(getattr(claims, name)()): cfg)
    lines = []
    found = {finding.claim: finding for finding in claims.run([3, 4], lines.append)}
    assert [*found] == [*claims.CLAIMS] and len(lines) == 4
    for name, finding in found.items():
        figures = finding.figures
        wanted = np.subtract(figures["accuracy, ranks"], figures[f"accuracy, {name}"])
        np.testing.assert_allclose(finding.effect, wanted)
        assert set(figures) == {f"{shown}, {arm}" for shown in claims.SHOWN for arm in ("taught", "ranks", name)}
        assert all(0 <= value <= 1 for values in figures.values() for value in values)
    moved = [
        found["local"].figures[f"{shown}, ranks"] != found["local"].figures[f"{shown}, taught"]
        for shown in claims.SHOWN
    ]
    assert any(moved), "RL trained nothing"
