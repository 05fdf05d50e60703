"""MARS^2: golden numbers, `fit` on a tiny pair, a model's batch holds its own attempts alone, bad input."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.configs.mars2 import VARIANTS, get_config
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.credit.assign import Credit
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import mars2
from jaxmarl_llm.rollout.plans import grow
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.training import drivers
from jaxmarl_llm.training.config import SFT, Past, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import POLICY
from tests.recipes.test_fidelity import Table

TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
PAIR = TeamConfig(
    backbone=TINY, models={"coder": ("coder", "partner")}, overrides={"partner": TINY}, max_new_tokens=5, remat=False
)


def config(**changes):
    base = mars2.Config(
        steps=2,
        expansions=4,
        batch=8,
        team=PAIR,
        env=EnvConfig("programs", {"tasks": 64, "protocol": "refine", "attempts": 4}, eval_tasks=4),
        optimizer=Optimizer(learning_rate=3e-2, max_grad_norm=0.0),
        sft=SFT(steps=12, batch=64, samples=128, optimizer=Optimizer(learning_rate=2e-2)),
        run=RunConfig(eval_every=0, eval_greedy=False, checkpoint_every=100),
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.parametrize(
    "changes, shaped, advantage",
    [
        ({}, [0.2, 1.0, 1.4, -0.35], [-0.532, 0.642, 1.229, -1.339]),
        ({"credit": Credit(group="task", ddof=1)}, [0.2, 1.0, 1.4, -0.35], [-0.461, 0.556, 1.065, -1.160]),
        ({"strength": 0.0}, [0.4, 0.8, 1.0, 0.0], [-0.391, 0.651, 1.172, -1.432]),
        # the parent's shaped reward is .2: b is .1 for c, and .6 for d
        ({"shaped_parents": True}, [0.2, 1.0, 1.45, -0.3], None),
    ],
)
def test_golden_numbers(changes, shaped, advantage):
    """a = .4 and b = .8 at the root, c = 1 and d = 0 under a."""
    table = Table(("tests",))
    a = table.act(0, 0, 0, tests=0.4)
    table.act(0, 0, 1, tests=0.8)
    table.act(0, 0, 2, a, tests=1.0)
    table.act(0, 0, 3, a, tests=0.0)
    returns, got = table.credit(mars2.rule(config(**changes)), tests=1.0)
    np.testing.assert_allclose(returns, shaped, atol=1e-6)
    if advantage is not None:
        np.testing.assert_allclose(got, advantage, atol=6e-4)


def test_small_differences_are_compared_too():
    """The term added to the standard deviation is 1e-9: a difference of 2e-6 is no smaller than one of 2."""
    table = Table(("tests",))
    for pay in (0.0, 2e-6):
        table.act(0, 0, 0, tests=pay)
    _, got = table.credit(mars2.rule(config(strength=0.0)), tests=1.0)
    np.testing.assert_allclose(got, [-1.0, 1.0], atol=2e-3)


def test_the_loss_is_that_of_the_paper():
    loss = mars2.Config().loss
    assert (loss.ratio_level, loss.tis_clip, loss.kl_coef, loss.kl_kind) == ("sequence", 2.0, 1e-3, "k3")


def test_fit_teaches_each_model_from_its_own_attempts(tmp_path, monkeypatch):
    """Both models change. A batch has exactly the trained completions of nodes that its model played."""
    seen, lay_out = [], drivers.HostDriver.lay_out

    def watched(self, step, tree, played, advantage, trained, *rest):
        out = lay_out(self, step, tree, played, advantage, trained, *rest)
        seen.append((tree, np.asarray(trained), out))
        return out

    monkeypatch.setattr(drivers.HostDriver, "lay_out", watched)
    cfg = config()
    cfg.check("config")
    recipe, before = mars2.make(cfg), {}
    copy = lambda state: jax.tree.map(np.array, dict(state.params["agents"]))

    def keep(step, state, metrics):
        if step == cfg.sft.steps:
            before.update(copy(state))

    after = copy(fit(cfg, recipe, tmp_path, callbacks=(keep,)))
    assert set(after) == {"coder", "partner"} and len(seen) == cfg.steps
    for name, own in after.items():
        assert any((x != y).any() for x, y in zip(jax.tree.leaves(own), jax.tree.leaves(before[name]), strict=True))
    for tree, trained, batches in seen:
        model = tree.nodes.model[tree.steps.node]
        assert (tree.steps.source[tree.steps.valid] == POLICY).all() and trained.any()
        assert tree.transitions.played.sum() == cfg.batch * cfg.expansions
        assert len(set(tree.transitions.parent.tolist())) > 2
        for m, name in enumerate(("coder", "partner")):
            rows = [
                np.asarray(batch.rows)[np.asarray(batch.weights).max(-1) > 0].reshape(-1) for batch in batches[name]
            ]
            want = np.flatnonzero(trained & (model == m))
            assert sorted(np.concatenate([*rows, np.zeros(0, int)]).tolist()) == want.tolist() and len(want)


BAD = [
    ({"choose": "greedy"}, r"^config\.choose: unknown value 'greedy'"),
    ({"expansions": 1}, r"^config\.expansions: expected >= 2, got 1$"),
    ({"strength": 1.5}, r"^config\.strength: expected"),
    ({"mix": -0.1}, r"^config\.mix: expected"),
    ({"credit": Credit(group="node")}, r"^config\.credit\.group: expected 'task', a tree, got 'node'$"),
    ({"credit": Credit(0.9, "task")}, r"^config\.credit\.discount: expected 1: an attempt has its own reward"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message):
        config(**change).check("config")


def ahead(key, parents, players, rewards, n):
    return n, 0


def test_what_only_the_environment_shows():
    plan = grow(4, ahead, (("tests", 1.0),))
    with pytest.raises(ConfigError, match=r"^plan grow\(4, ahead\): choose before expansion 0: expected -1"):
        phases.make_recipe(config(), plan, mars2.algorithm(config()))
    with pytest.raises(ConfigError, match=r"^plan\.expansions: expected 4, the number of turns of environment 'pro"):
        mars2.make(config(expansions=5))
    with pytest.raises(ConfigError, match=r"^config\.past\.size: expected 0 with plan grow\(4, thompson\), which"):
        mars2.make(config(team=dataclasses.replace(PAIR, models={}, overrides={}), past=Past(size=2)))


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(mars2.Config, get_config(variant).to_dict())
        assert mars2.players(cfg) == (1 if variant in ("alone", "flat") else 2)
        assert mars2.make_plan(cfg).name == f"grow(8, {cfg.choose})" and cfg.expansions == 8
