"""The claims of UnityMAS-O: what the arms differ in, and all claims of a run in miniature."""

import dataclasses

import numpy as np
import pytest

from experiments.claims import unitymas_o as claims
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def test_arms_differ_in_what_the_claims_say():
    assert dataclasses.replace(claims.team(), pay="records") == claims.tiny()
    assert {name: (claim.kind, claim.delta) for name, claim in claims.CLAIMS.items()} == {
        "mask": ("L", 0.1), "pipeline": ("L", 0.1), "verify": ("L", 0.1), "code": ("L", 0.1), "records": ("X", 0.03),
    }  # fmt: skip
    assert {name: workflow.make().env.name for name, workflow in claims.WORKFLOWS.items()} == {
        "mask": "facts", "pipeline": "facts", "verify": "chain", "code": "programs",
    }  # fmt: skip


@pytest.mark.slow
def test_claims_of_a_run_in_miniature(monkeypatch):
    """A finding for each claim, by the figures of its arms. Two workflows stand for the four."""

    def small(cfg):
        env = dataclasses.replace(cfg.env, args={**cfg.env.args, "tasks": 32, "copying": 0.0}, eval_tasks=32)
        team = dataclasses.replace(cfg.team, backbone=SMALL, max_new_tokens=6)
        sft = SFT(40, 32, Optimizer(learning_rate=2e-2), samples=256)
        return dataclasses.replace(
            cfg, steps=2, batch=2, group=2, env=env, team=team, sft=sft, optimizer=Optimizer(learning_rate=1e-2)
        )

    two = {
        name: claims.WORKFLOWS[name]._replace(make=lambda cfg=small(claims.WORKFLOWS[name].make()): cfg)
        for name in ("mask", "pipeline")
    }
    monkeypatch.setattr(claims, "WORKFLOWS", two)
    monkeypatch.setattr(claims, "team", lambda cfg=small(claims.team()): cfg)
    lines = []
    found = {finding.claim: finding for finding in claims.run([3, 4], lines.append)}
    assert [*found] == ["mask", "pipeline", "records"] and len(lines) == 5
    for name in two:
        figures = found[name].figures
        wanted = np.subtract(figures[f"F1, {name}, RL"], figures[f"F1, {name}, stage 0"])
        np.testing.assert_allclose(found[name].effect, wanted)
    both = found["records"].figures
    np.testing.assert_allclose(found["records"].effect, np.subtract(both["F1, records"], both["F1, team"]))
    assert both["F1, stage 0"] == found["mask"].figures["F1, mask, stage 0"]
    assert all(0 < value < 2 for arm in ("records", "team") for value in both[f"thousand tokens, {arm}"])
