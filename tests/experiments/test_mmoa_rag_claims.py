"""The claims of MMOA-RAG: what the arms differ in, and all claims of a run in miniature."""

import dataclasses

import numpy as np
import pytest

from experiments.claims import mmoa_rag as claims
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
ARMS = ("tiny", "generator", "free")


def small(cfg):
    env = dataclasses.replace(cfg.env, args={"tasks": 64}, eval_tasks=64)
    team = dataclasses.replace(cfg.team, backbone=SMALL)
    sft = SFT(60, 32, Optimizer(learning_rate=2e-2), samples=512)
    arm = dataclasses.replace(cfg, steps=3, batch=4, group=2, env=env, team=team, sft=sft)
    return dataclasses.replace(arm, optimizer=Optimizer(learning_rate=1e-2))


def test_arms_differ_in_what_the_claims_say():
    joint, alone, free = (getattr(claims, name)() for name in ARMS)
    assert free == dataclasses.replace(joint, reward={"f1": 1.0})
    assert dataclasses.replace(alone, team=joint.team, trained_roles=joint.trained_roles) == joint
    assert alone.trained_roles == ("generator",) and set(alone.team.models) == {"rewriter", "selector"}
    assert {name: (claim.kind, claim.delta) for name, claim in claims.CLAIMS.items()} == {
        "joint": ("L", 0.05), "critic": ("U", 0.0), "penalties": ("X", 0.02),
    }  # fmt: skip


@pytest.mark.slow
def test_claims_of_a_run_in_miniature(monkeypatch):
    """A finding for each claim, by the figures of its arms; the control begins with two copies of one model."""
    for name in ARMS:
        monkeypatch.setattr(claims, name, lambda cfg=small(getattr(claims, name)()): cfg)
    lines, begun = [], []
    as_before = claims.begun_as

    def seen(recipe, states, agents):
        begun.append(agents)
        return as_before(recipe, states, agents)

    monkeypatch.setattr(claims, "begun_as", seen)
    found = {finding.claim: finding for finding in claims.run([3, 4], lines.append)}
    assert [*found] == [*claims.CLAIMS] and len(lines) == 4
    control = begun[2]
    assert set(control) == {"reader", "generator"}
    assert control["reader"] is control["generator"] is next(iter(begun[1].values()))
    f1, form, critic = (found[name] for name in ("joint", "penalties", "critic"))
    np.testing.assert_allclose(f1.effect, np.subtract(f1.figures["F1, joint"], f1.figures["F1, generator"]))
    share = {key.removeprefix("malformed share, "): value for key, value in form.figures.items()}
    np.testing.assert_allclose(form.effect, np.subtract(share["free"], share["joint"]))
    assert all(0 <= value <= 1 for values in (*f1.figures.values(), *share.values()) for value in values)
    assert share["joint"] != share["taught"], "RL trained nothing"
    assert np.isfinite(critic.effect).all() and critic.effect == critic.figures["explained variance, joint"]
