"""PRISMA: golden numbers, a slow twin on ragged trees, who learns when, frozen roles to the bit, bad input."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs.prisma import VARIANTS, blind, get_config, tiny
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.facts import inspection
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import prisma
from jaxmarl_llm.rollout.array import frontiers, table_rows
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.drivers import HostDriver
from jaxmarl_llm.training.optimizers import Optimizer
from tests.recipes.test_fidelity import ROWS, TASKS, Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

PLANNER, SOLVER, INSPECTOR = range(3)
ROLES = prisma.ROLES
WEIGHTS = prisma.Config().reward


def siblings(table, role, task, turn, parent, pays):
    """Completions of one new node, and their joint actions. ``pays``: component -> role -> reward, of each."""
    table.nodes.append((role, task, turn, parent))
    own, moves = len(table.nodes) - 1, []
    for pay in pays:
        table.steps.append(own)
        moves.append(table.move([len(table.steps) - 1], task, turn, parent, pay))
    return moves


def table_of(forest):
    """Tasks as lists of plans, a plan as a list of (before, verdicts); a verdict is None (pass) or EM after a retry."""
    table, all_of = Table(inspection.COMPONENTS), lambda value: dict.fromkeys(range(3), value)
    for task, plans in enumerate(forest):
        for plan, answers in zip(siblings(table, PLANNER, task, 0, -1, [{}] * len(plans)), plans, strict=True):
            paid = [{"before": all_of(before)} for before, _ in answers]
            for answer, (before, verdicts) in zip(siblings(table, SOLVER, task, 1, plan, paid), answers, strict=True):
                ends = [{"em": all_of(before)} if v is None else {"interventions": {INSPECTOR: 1}} for v in verdicts]
                for move, after in zip(siblings(table, INSPECTOR, task, 2, answer, ends), verdicts, strict=True):
                    if after is not None:
                        pay = {"em": all_of(after), "change": {INSPECTOR: after - before}}
                        siblings(table, SOLVER, task, 3, move, [pay])
    return table


def twin(forest):
    """(role, turn) -> returns and advantages in the order of the tree; in loops, from the docstring."""

    def compared(values):
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        return [0.0 if max(values) == min(values) else (v - mean) / (std + 1e-6) for v in values]

    rows = {PLANNER: [], SOLVER: [], INSPECTOR: []}
    for plans in forest:
        worth = [math.fsum(before for before, _ in answers) / len(answers) for answers in plans]
        rows[PLANNER] += zip(worth, compared(worth), strict=True)
        for answers in plans:
            rows[SOLVER] += zip([b for b, _ in answers], compared([b for b, _ in answers]), strict=True)
            for before, verdicts in answers:
                paid = [0.0 if after is None else after - before - 0.05 for after in verdicts]
                rows[INSPECTOR] += zip(paid, compared(paid), strict=True)
    return rows


def credited(forest):
    """As `twin`, by the recipe's rule; and what it makes of the turns behind a verdict."""
    table = table_of(forest)
    value, advantage = table.credit(prisma.algorithm(prisma.Config()).credit, **WEIGHTS)
    role, turn = (np.array([table.nodes[node][k] for node in table.steps]) for k in (0, 2))
    rows = {r: [*zip(value[(role == r) & (turn < 3)], advantage[(role == r) & (turn < 3)])] for r in range(3)}
    return rows, value[turn == 3], advantage[turn == 3]


def test_golden_numbers():
    """A wrong and a right answer to one plan, and verdicts on each: .95, -.05 and 0; 0, -.05 and -1.05."""
    rows, _, _ = credited([[[(0.0, [1.0, 0.0, None]), (1.0, [None, 1.0, 0.0])]]])
    assert rows[PLANNER] == [(0.5, 0.0)]
    np.testing.assert_allclose(rows[SOLVER], [(0, -1), (1, 1)], atol=1e-5)
    value, advantage = np.transpose(rows[INSPECTOR])
    np.testing.assert_allclose(value, [0.95, -0.05, 0.0, 0.0, -0.05, -1.05], atol=1e-6)
    std = math.sqrt((0.95**2 + 0.05**2) / 3 - 0.3**2)  # of .95, -.05 and 0, whose mean is .3
    np.testing.assert_allclose(advantage[:3], np.array([0.65, -0.35, -0.3]) / std, atol=1e-5)
    assert advantage[3] > advantage[4] > 0 > advantage[5]


@pytest.mark.parametrize("seed", range(12))
def test_ragged_trees_equal_the_twin(seed):
    """What follows an answer changes nothing for planner and solver, and nobody is compared behind a verdict."""
    rng = np.random.default_rng(seed)
    verdict = lambda: [None, 0.0, 1.0][rng.integers(3)]
    ragged = lambda make, most: [make() for _ in range(rng.integers(1, most + 1))]
    answer = lambda: (float(rng.integers(2)), ragged(verdict, 3))
    forest = [ragged(lambda: ragged(answer, 2), 3) for _ in range(TASKS)]
    while sum(2 * len(verdicts) + 1 for plans in forest for answers in plans for _, verdicts in answers) > ROWS - 20:
        forest.pop()
    rows, behind, gains = credited(forest)
    for role, want in twin(forest).items():
        np.testing.assert_allclose(np.reshape(rows[role], (-1, 2)), want, atol=2e-3)
    assert not behind.any() and not gains.any()


# Who learns

TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def config(**changes):
    base = prisma.Config(
        steps=4,
        stage_one=2,
        plans=2,
        answers=2,
        verdicts=3,
        batch=8,
        team=TeamConfig(backbone=TINY, max_new_tokens=4, remat=False),
        env=EnvConfig("facts", {"protocol": "inspect", "tasks": 64, "inspect": {"interventions": 1}}, eval_tasks=4),
        reward={**WEIGHTS, "format": 0.1},  # a team that is hardly taught is never right
        optimizer=Optimizer(learning_rate=3e-2, max_grad_norm=0.0),
        sft=SFT(steps=12, batch=64, samples=128, optimizer=Optimizer(learning_rate=2e-2)),
    )
    return dataclasses.replace(base, **changes)


def test_a_stage_for_the_team_and_one_for_the_inspector():
    who = lambda cfg, steps: [np.flatnonzero(prisma.trainable_roles(cfg)(t)).tolist() for t in steps]
    team = [PLANNER, SOLVER]
    assert who(config(), range(4)) == [team, team, [INSPECTOR], [INSPECTOR]]
    assert who(config(stage_one=0), range(2)) == [[INSPECTOR]] * 2
    traced = jax.jit(jax.vmap(prisma.trainable_roles(config())))(jnp.arange(4))
    np.testing.assert_array_equal(traced[:, INSPECTOR], [False, False, True, True])


@pytest.mark.parametrize("interventions", [1, 2])
def test_the_tree_of_a_task(interventions):
    """2 plans, 2 x 3 answers, 2 x 3 x 4 verdicts, and one completion behind each verdict at every later turn."""
    args = {"protocol": "inspect", "inspect": {"interventions": interventions}}
    env = EnvConfig("facts", args).environment(0).env
    plan = prisma.make_plan(config(plans=2, answers=3, verdicts=4))
    states = [sum(frontier.values()) for frontier in frontiers(plan, env, 1)]
    assert states == [1, 2, 6] + [24] * (3 * interventions - 1)
    assert table_rows(plan, env, 1).steps == 2 + 6 + 24 * 3 * interventions
    assert plan is prisma.make_plan(config(plans=2, answers=3, verdicts=4))  # what was compiled is found again


@pytest.mark.slow
def test_stages_of_a_run(tmp_path, monkeypatch):
    """Frozen roles stay byte-identical, optimizer state included. Trained are first turns alone, among siblings."""
    trained, lay_out = [], HostDriver.lay_out

    def watch(driver, step, tree, played, advantage, rows, *rest):
        trained.append((tree, rows))
        return lay_out(driver, step, tree, played, advantage, rows, *rest)

    monkeypatch.setattr(HostDriver, "lay_out", watch)
    cfg = config()
    cfg.check("config")
    recipe = prisma.make(cfg)
    state, begin, moved = recipe.init(0), cfg.sft.steps, []
    copy = lambda s: jax.tree.map(np.array, {r: (s.params["agents"][r], s.opt_state[r]) for r in ROLES})
    with Logger(tmp_path, resume_step=None, total_steps=20, tensorboard=False) as logger:
        for step in range(recipe.total_steps):
            before = copy(state)
            state, metrics = recipe.step(state, logger)
            after = copy(state)
            which = 0 if step == begin else slice(None)  # the first RL step starts new optimizers
            moved.append({r for r in ROLES if digests(before[r][which]) != digests(after[r][which])})
    assert moved[begin:] == [{"planner", "solver"}] * 2 + [{"inspector"}] * 2
    assert metrics["agent/planner/updated"] == metrics["agent/solver/updated"] == 0
    for step, (tree, rows) in enumerate(trained):
        node = tree.steps.node[rows]
        learn = {(PLANNER, 0), (SOLVER, 1)} if step < 2 else {(INSPECTOR, 2)}
        assert {*zip(tree.nodes.role[node].tolist(), tree.nodes.turn[node].tolist())} == learn
        assert {np.sum(tree.steps.node[tree.steps.valid] == n) for n in {*node.tolist()}} <= {2, 3}


BAD = [
    ({"plans": 1}, r"^config\.plans: expected >= 2 in a stage that compares them, got 1$"),
    ({"answers": 1}, r"^config\.answers: expected >= 2 in a stage that compares them, got 1$"),
    ({"verdicts": 1}, r"^config\.verdicts: expected >= 2 in a stage that compares them, got 1$"),
    ({"verdicts": 0, "stage_one": 4}, r"^config\.verdicts: expected >= 1, got 0$"),
    ({"plans": 0, "stage_one": 0}, r"^config\.plans: expected >= 1, got 0$"),
    ({"stage_one": -1}, r"^config\.stage_one: expected >= 0"),
    ({"team": TeamConfig(parameter_sharing="shared")}, r"^config\.team\.parameter_sharing: expected separate or lora"),
    ({"env": EnvConfig("facts")}, r"^config\.env: no role 'planner' in environment 'facts', whose roles are rewriter"),
    ({"env": EnvConfig("chain")}, r"^config\.env: no role 'planner' in environment 'chain'"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        config(**change).check("config")
    assert "\n" not in str(error.value)


def test_one_sample_is_enough_where_nobody_is_compared():
    config(verdicts=1, stage_one=4).check("config")
    config(plans=1, answers=1, stage_one=0).check("config")


def test_a_reward_that_the_environment_does_not_pay():
    with pytest.raises(ConfigError, match=r"^config\.reward: environment 'facts' pays no 'f1'; it pays em"):
        prisma.make(config(reward={"f1": 1.0}))


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(prisma.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.credit.group == "node" and cfg.credit.normalise == "std" and cfg.loss.clip_low == 0.2
        assert 0 < cfg.stage_one < cfg.steps and cfg.env.build().inspect.trace == (variant != "blind")
    same = dataclasses.replace(blind(), env=tiny().env)
    assert same == tiny()  # the control differs in what the inspector reads alone
