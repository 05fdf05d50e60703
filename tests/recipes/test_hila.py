"""HILA: golden advantages, who is trained and who is imitated, experts outside, kill and resume, bad input."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.hila import VARIANTS, get_config, inner
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.recipes import hila
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.runs import loop
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.packing import pack
from jaxmarl_llm.types import EXPERT, MENU, POLICY
from tests.envs.test_expert import chat, endpoint, reply
from tests.killed_run import killed_and_whole
from tests.recipes.test_fidelity import Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
B, K = 6, 4
CONFIG = hila.Config(
    batch=B,
    team=TeamConfig(parameter_sharing="shared", backbone=SMALL, max_new_tokens=1, remat=False),
    env=EnvConfig("defer", {"planted": False, "silent": 0.5, "tasks": 32}, eval_tasks=8),
    sft=SFT(0),
)
RIGHT, WRONG, CREATED, DEFERRED = {"accuracy": 1}, {}, {"accuracy": 1, "create": 1}, {"accuracy": 1, "defer": 1}


def test_golden_advantages():
    """R = [1, 0, .9, .7]: A = [.35, -.65, .25, .05]. One menu of four choices, beside another node."""
    table = Table(("accuracy", "create", "defer"))
    table.act(0, 0, 0, **RIGHT)
    for k, pay in enumerate((WRONG, CREATED, DEFERRED), 1):
        table.steps.append(0)
        table.move([k], 0, 0, -1, {name: {0: value} for name, value in pay.items()})
    table.act(0, 1, 0, **RIGHT)
    tree = table.tree()
    source = np.where(np.arange(len(tree.steps.source)) < K, MENU, POLICY)
    table.tree = lambda: tree.replace(steps=tree.steps.replace(source=source))
    returns, advantage = table.credit(hila.rule(CONFIG), **CONFIG.reward)
    np.testing.assert_allclose(returns, [1, 0, 0.9, 0.7, 1], atol=1e-6)
    np.testing.assert_allclose(advantage, [0.35, -0.65, 0.25, 0.05, 0], atol=1e-6)


@pytest.fixture(scope="module")
def step():
    """Recipe, rollout and the parts of a step that are computed from it."""
    recipe = hila.make(CONFIG)
    train, params = recipe.phases[-1].step, recipe.init(0).params
    rollout = jax.jit(make_rollout(recipe.team, recipe.env_runner.env, train.plan, CONFIG.sampling))
    tasks = {k: v[:B] for k, v in recipe.env_runner.tasks.items()}
    tree = jax.device_get(rollout(params, {}, tasks, jax.random.key(3), 0))
    return train, tree, jax.device_get(train.assign(tree, CONFIG.reward))


def test_choices_are_trained_and_experts_imitated_where_the_policy_defers(step):
    train, tree, credited = step
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    expert = np.flatnonzero(steps.source == EXPERT)
    node = steps.node[expert]
    choice = moves.steps[nodes.parent[node], 0]
    assert len(expert) == B and (steps.tokens[choice, 0] == ord("d")).all() and (nodes.role[node] == 1).all()
    silent = steps.length[expert] == 0
    assert silent.any() and not silent.all() and (steps.valid[expert] == ~silent).all()
    assert (credited.valid[choice] == ~silent).all() and tree.counts.invalid == silent.sum()
    selected = hila.menus(credited, B)
    trained = credited.valid & np.asarray(selected)[credited.group] & (steps.source != EXPERT)
    assert set(steps.source[trained]) == {MENU} and (nodes.role[steps.node[trained]] == 0).all()
    menu = credited.valid & (steps.source == MENU)
    for n in np.unique(steps.node[menu]):
        of = menu & (steps.node == n)
        np.testing.assert_allclose(
            credited.advantage[of], credited.returns[of] - credited.returns[of].mean(), atol=1e-6
        )
    rates, imitate = np.zeros(len(steps.node)), train.algorithm.imitate
    every = jax.jit(jax.vmap(lambda key: imitate(key, tree, CONFIG.loss)))(jax.random.split(jax.random.key(0), 400))
    for weights in np.asarray(every):
        drawn = weights.any(1)
        rates += drawn
        assert not drawn.any() or weights.sum() == pytest.approx(CONFIG.imitation)
    assert not rates[steps.source != EXPERT].any() and not rates[expert[silent]].any()
    chance = np.exp(steps.logprobs[:, 0])
    for row, k in zip(expert[~silent], choice[~silent]):
        share = chance[k] / chance[(steps.node == steps.node[k]) & (steps.source == MENU)].sum()
        assert rates[row] / 400 == pytest.approx(share, abs=0.1)


def rows_of(batches):
    """Weights of the policy term and of imitation [C R], advantages and tokens of each trained completion, by row."""
    found = {}
    for b in batches:
        for n, g in np.ndindex(*b.rows.shape):
            if b.weights[n, g].any() or b.imitation[n, g].any():
                found[int(b.rows[n, g])] = (b.weights[n, g], b.imitation[n, g], b.advantages[n, g], b.completions[n, g])
    return found


def test_what_the_expert_writes_changes_nothing_of_the_policy_term(step):
    """Other tokens of the expert, equal rewards: choices keep weights and advantages, and its tokens have neither."""
    train, tree, credited = step
    steps, expert = tree.steps, tree.steps.source == EXPERT
    other = tree.replace(steps=steps.replace(tokens=np.where(expert[:, None], ord("0") + 9, steps.tokens)))
    drawn = (np.asarray(train.algorithm.imitate(jax.random.key(k), tree, CONFIG.loss)) for k in range(99))
    weights, seen = next(w for w in drawn if w.any()), []  # the policy defers where the expert answers
    for of in (tree, other):
        again = jax.device_get(train.assign(of, CONFIG.reward))
        trained = train.trained(None, again, np.asarray(hila.menus(again, B)), of, None, 0)
        assert not trained[expert].any()
        batches = pack(of, 0, again.advantage, trained, CONFIG.loss, micro_tokens=4096, imitation=weights)
        seen.append(rows_of(batches))
    assert set(seen[0]) == set(seen[1]) and {True, False} == {bool(expert[row]) for row in seen[0]}
    for row, (policy, imitated, advantage, tokens) in seen[0].items():
        twin = seen[1][row]
        assert (policy > 0).any() == (not expert[row]) and (imitated > 0).any() == expert[row]
        np.testing.assert_array_equal(policy, twin[0])
        np.testing.assert_array_equal(imitated, twin[1])
        assert expert[row] or (advantage == twin[2] and (tokens == twin[3]).all())


def told(question):
    """An expert that is right about nothing in particular, and always the same."""
    return str(sum(map(ord, question)) % 10)


def nobody(question):
    raise TimeoutError("nobody is there")


def outside(expert, **changes):
    """The configuration with an expert outside."""
    args = {"planted": False, "tasks": 32, "asked": expert, "expert_model": "m", "expert_retries": 0}
    return dataclasses.replace(CONFIG, env=EnvConfig("defer", args, eval_tasks=8), **changes)


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_whose_expert_never_answers_stops_with_one_line(tmp_path):
    cfg = outside(f"{__name__}:nobody", steps=9, run=RunConfig(max_bad_steps=3, eval_every=0, checkpoint_every=2))
    with pytest.raises(RunError) as error:
        loop.fit(cfg, hila.make(cfg), tmp_path)
    assert str(error.value) == (
        "step 3: in 3 steps in a row no expert answered, where experts were asked; stopped; "
        "the last checkpoint is that of step 2"
    )
    rows = metrics_of(tmp_path)
    assert [row["count/expert_silent"] for row in rows] == [row["count/expert_asked"] for row in rows] == [B] * 3
    assert all(row["count/invalid"] == B and row["agent/chooser/updated"] for row in rows)
    assert not any("unanswered" in row or "agent/creator/reward" not in row for row in rows)


@pytest.mark.slow
def test_an_endpoint_that_sometimes_fails_leaves_its_choices_out(tmp_path):
    """It answers no product: its silence is counted as invalid, and a question that it answered is not asked again."""

    def say(handler):
        question = handler.body["messages"][1]["content"]
        (reply(b"", 500) if "*" in question else chat(told(question)))(handler)

    with endpoint(say) as (url, asked):
        cfg = outside(url, steps=3, run=RunConfig(max_bad_steps=1, eval_every=0))
        loop.fit(cfg, hila.make(cfg), tmp_path)
    questions = [body["messages"][1]["content"] for _, body, _ in asked]
    answered = [text for text in questions if "*" not in text]
    assert len(set(answered)) == len(answered) and len(answered) < len(questions)
    rows = metrics_of(tmp_path)
    silent = sum(row["count/expert_silent"] for row in rows)
    assert 0 < silent < sum(row["count/expert_asked"] for row in rows) == 3 * B
    assert silent == sum(row["count/invalid"] for row in rows)


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit(tmp_path):
    """Killed with -9 behind the checkpoint of step 3: parameters and what the expert wrote are byte-equal."""
    run_config = RunConfig(
        eval_every=0, checkpoint_every=3, rollouts=dataclasses.replace(RunConfig().rollouts, every=1)
    )
    cfg = outside("tests.recipes.test_hila:told", steps=6, run=run_config)
    run, _ = killed_and_whole(hila, cfg, tmp_path)
    assert [row["step"] for row in metrics_of(run)] == list(range(1, 7))
    written = lambda folder: {path.name: path.read_bytes() for path in (folder / "rollouts").glob("*.zst")}
    assert written(run) == written(tmp_path / "whole") and len(written(run)) >= 6


def test_without_imitation_there_is_no_outer_loop():
    assert hila.algorithm(inner()).imitate is None
    assert hila.algorithm(dataclasses.replace(CONFIG, imitation=0.5)).imitate.coef == 0.5
    assert hila.rule(dataclasses.replace(CONFIG, menu_weights="by_policy")) != hila.rule(CONFIG)


BAD = [
    ({"menu": ("1",)}, r"^plan\.menu: expected at least two choices, none of them empty, got \('1',\)$"),
    ({"menu": ("1", "2", "2")}, r"^plan\.menu: expected choices that differ, got '2' twice$"),
    (
        {"menu": ("1", "defer")},
        r"^plan\.menu: expected at most max_new_tokens=1 tokens for role 'chooser', got 'defer'",
    ),
    ({"menu": ("1", "\udcff")}, r"^plan\.menu: expected text in the vocabulary of model 'team', which plays 'chooser'"),
    ({"menu_weights": "best"}, r"^config\.menu_weights: unknown value 'best'; choose from 'alike', 'by_policy'$"),
    ({"imitation": -1.0}, r"^config\.imitation: expected >= 0, got -1\.0$"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        cfg = dataclasses.replace(CONFIG, **change)
        cfg.check("config")
        hila.make(cfg)
    assert "\n" not in str(error.value)


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(hila.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.loss.kl_coef == 0.02 and cfg.loss.clip_low == 0.2 and cfg.loss.entropy_coef == 0.001
        assert (cfg.imitation == 0) == (variant == "inner")
        assert cfg.env.args.get("planted", True) == (variant == "tiny")
