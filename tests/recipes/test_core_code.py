"""CoRe-Code: golden numbers, a slow twin on ragged trees, who learns when, a frozen role to the bit, bad input."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs.core_code import VARIANTS, get_config
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import core_code
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree

PLANNER, CODER = 0, 1


def tree_of(tasks):
    """Tasks as lists of plans, a plan as a list of programs (tests, excess, valid); and a row of padding."""
    nodes, steps, moves = [], [], []  # (role, task, turn, parent), node, (step, parent, tests, excess, valid)
    for task, plans in enumerate(tasks):
        nodes.append((PLANNER, task, 0, -1))
        root = len(nodes) - 1
        for programs in plans:
            steps.append(root)
            moves.append((len(steps) - 1, -1, task, 0, 0.0, 0.0, True))
            up = len(moves) - 1
            nodes.append((CODER, task, 1, up))
            own = len(nodes) - 1
            for tests, excess, valid in programs:
                steps.append(own)
                moves.append((len(steps) - 1, up, task, 1, tests, excess, valid))
    role, task, turn, parent = (np.array([*column, 0]) for column in zip(*nodes))
    n, c, j = len(role), len(steps) + 1, len(moves) + 1
    parent[-1] = -1
    step, up, where, when, tests, excess, valid = (np.array([*column, 0]) for column in zip(*moves))
    step[-1] = up[-1] = -1
    used, played = np.arange(c) < c - 1, np.arange(j) < j - 1
    blank = np.ones((c, 1))
    table = Nodes(
        tokens=np.zeros((n, 1), np.int32),
        length=np.ones(n, np.int32),
        role=role,
        model=role,
        task=task,
        turn=turn,
        parent=parent,
        retrieved=Retrieval.empty(n),
        valid=np.arange(n) < n - 1,
    )
    said = Steps(
        node=np.array([*steps, n - 1]),
        tokens=np.zeros((c, 1), np.int32),
        length=np.ones(c, np.int32),
        loss_mask=blank > 0,
        logprobs=0 * blank,
        truncated=np.zeros(c, bool),
        source=np.zeros(c, np.int32),
        version=np.zeros(c, np.int32),
        valid=used,
    )
    joint = Transitions(
        steps=step[:, None],
        parent=up,
        task=where,
        turn=when,
        rewards={  # tests to both roles, excess to the coder, as `programs` pays them
            "tests": np.stack([tests, tests], 1).astype(np.float32),
            "excess": np.stack([0 * excess, excess], 1).astype(np.float32),
        },
        done=when == 1,
        played=played,
        valid=played & (valid > 0),
    )
    return Tree(table, said, joint, Counts(*[np.int32(0)] * 7))


def credited(tasks):
    """Return and advantage of each completion, in the order of the tree."""
    cfg, tree = core_code.Config(), tree_of(tasks)
    got = assign(core_code.algorithm(cfg).credit, tree, weights=cfg.reward, sizes=Sizes(2, len(tasks), 2))
    return [np.asarray(x)[:-1] for x in (got.returns, got.advantage, got.valid)]


def test_golden_numbers():
    """Pass rates [[1, .5, 0], [1, 1, 1]] of two plans: rewards .5 and 1, advantages -1 and 1.

    A second task: three excess operations cost .06 of a program that passes all tests, and its plan nothing.
    """
    rates = [[(1.0, 0, True), (0.5, 0, True), (0.0, 0, True)], [(1.0, 0, True)] * 3]
    value, advantage, _ = credited([rates, [[(1.0, 0, True), (1.0, 3, True)]]])
    planner, first, second, excess = [0, 4], [1, 2, 3], [5, 6, 7], [8, 9, 10]
    np.testing.assert_allclose(value[planner], [0.5, 1.0], atol=1e-6)
    np.testing.assert_allclose(advantage[planner], [-1.0, 1.0], atol=1e-5)
    third = math.sqrt(1.5)  # 0.5 over the population's std of 1, .5 and 0
    np.testing.assert_allclose(advantage[first], [third, 0, -third], atol=1e-5)
    assert not advantage[second].any()  # equal programs
    np.testing.assert_allclose(value[excess], [1.0, 1.0, 0.94], atol=1e-6)
    np.testing.assert_allclose(advantage[excess], [0.0, 1.0, -1.0], atol=1e-4)


def twin(tasks):
    """The rewards and advantages of the docstring, in loops."""

    def compared(values):
        known = [v for v in values if v is not None]
        mean = math.fsum(known) / len(known) if known else 0.0
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in known) / len(known)) if known else 0.0
        flat = not known or max(known) == min(known)
        return [0.0 if v is None or flat else (v - mean) / (std + 1e-6) for v in values]

    rows = []
    for plans in tasks:
        rate = lambda programs: [np.float32(tests) for tests, _, valid in programs if valid]
        worth = [float(np.mean(rate(p), dtype=np.float32)) if rate(p) else None for p in plans]
        for value, gain, programs in zip(worth, compared(worth), plans, strict=True):
            rows.append((value, gain))
            paid = [tests - 0.02 * excess if valid else None for tests, excess, valid in programs]
            rows += zip(paid, compared(paid), strict=True)
    return rows


def test_ragged_trees_equal_the_twin():
    """Up to five plans of up to five programs; some are invalid, and so are plans without a valid program."""
    rng = np.random.default_rng(0)
    draw = lambda: (rng.integers(4) / 3, int(rng.integers(4)), rng.random() < 0.7)
    ragged = lambda make: [make() for _ in range(rng.integers(1, 6))]
    tasks = [ragged(lambda: ragged(draw)) for _ in range(40)]
    value, advantage, valid = credited(tasks)
    want = twin(tasks)
    assert [v is not None for v, _ in want] == valid.tolist()
    np.testing.assert_allclose(value[valid], [v for v, _ in want if v is not None], atol=1e-5)
    np.testing.assert_allclose(advantage, [a for _, a in want], atol=2e-3)
    programs = [p for plans in tasks for p in plans]
    assert sum(len(p) == 1 for p in programs) > 10 and sum(not any(ok for *_, ok in p) for p in programs) > 10


# Who learns

TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def config(**changes):
    base = core_code.Config(
        steps=4,
        stage_one=2,
        plans=3,
        programs=2,
        batch=8,
        team=TeamConfig(backbone=TINY, max_new_tokens=5, remat=False),
        env=EnvConfig("programs", {"tasks": 64}, eval_tasks=4),
        optimizer=Optimizer(learning_rate=3e-2, max_grad_norm=0.0),
        sft=SFT(steps=12, batch=64, samples=128, optimizer=Optimizer(learning_rate=2e-2)),
    )
    return dataclasses.replace(base, **changes)


def test_a_stage_for_each_role():
    who = lambda cfg, steps: [np.flatnonzero(core_code.trainable_roles(cfg)(t)).tolist() for t in steps]
    assert who(config(), range(4)) == [[PLANNER], [PLANNER], [CODER], [CODER]]
    assert who(config(stage_one=0), range(2)) == [[CODER], [CODER]]
    traced = jax.jit(jax.vmap(core_code.trainable_roles(config())))(jnp.arange(4))
    np.testing.assert_array_equal(traced[:, CODER], [False, False, True, True])


def test_plans_and_programs_of_a_task():
    plan = core_code.make_plan(config(plans=4, programs=3))
    assert plan.name == "product((4, 3))" and plan.turns == 2


@pytest.mark.slow
def test_the_frozen_role_stays_byte_identical(tmp_path):
    """After each stage, optimizer state included, while the other role's parameters move."""
    cfg = config()
    cfg.check("config")
    recipe = core_code.make(cfg)
    state = recipe.init(0)
    copy = lambda s: jax.tree.map(np.array, {r: (s.params["agents"][r], s.opt_state[r]) for r in core_code.ROLES})
    begin = cfg.sft.steps
    with Logger(tmp_path, resume_step=None, total_steps=20, tensorboard=False) as logger:
        for step in range(recipe.total_steps):
            if step in (begin + 1, begin + cfg.stage_one):  # the first RL step starts new optimizers
                before = copy(state)
            state, metrics = recipe.step(state, logger)
            if step + 1 in (begin + cfg.stage_one, begin + cfg.steps):
                stage_one = step < begin + cfg.stage_one
                learner, frozen = core_code.ROLES if stage_one else core_code.ROLES[::-1]
                after = copy(state)
                assert digests(before[frozen]) == digests(after[frozen])
                assert digests(before[learner][0]) != digests(after[learner][0])
                assert metrics[f"agent/{frozen}/updated"] == 0 and metrics[f"agent/{learner}/updated"] == 1


BAD = [
    ({"plans": 1}, r"^config\.plans: expected >= 2 in a stage that compares them, got 1$"),
    ({"programs": 1}, r"^config\.programs: expected >= 2 in a stage that compares them, got 1$"),
    ({"programs": 0, "stage_one": 4}, r"^config\.programs: expected >= 1, got 0$"),
    ({"plans": 0, "stage_one": 0}, r"^config\.plans: expected >= 1, got 0$"),
    ({"stage_one": -1}, r"^config\.stage_one: expected >= 0"),
    ({"team": TeamConfig(parameter_sharing="shared")}, r"^config\.team\.parameter_sharing: expected separate or lora"),
    (
        {"env": EnvConfig("programs", {"protocol": "solo"})},
        r"^config\.env: no role 'planner' in environment 'programs', whose roles are coder$",
    ),
    ({"env": EnvConfig("chain")}, r"^config\.env: no role 'planner' in environment 'chain'"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message):
        config(**change).check("config")


def test_one_program_of_a_plan_is_enough_for_stage_one():
    config(programs=1, stage_one=4).check("config")
    config(plans=1, stage_one=0).check("config")


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(core_code.Config, get_config(variant).to_dict())
        assert cfg.plans * cfg.programs == 16 and cfg.credit.group == "node"
        assert (cfg.programs == 1) == (cfg.steps == cfg.stage_one) == (variant == "plans")
