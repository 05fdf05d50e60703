"""WaltzRL: every round is paid for itself, whatever T_max; stages, the drawn round, frozen roles, bad teams."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.safety import array as safety
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.recipes import waltzrl
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.drivers import HostDriver
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree

pytestmark = pytest.mark.usefixtures("numpy_tables")

EOS, PAD = ByteTokenizer.EOS, ByteTokenizer.PAD
THREE, JUDGED = safety.Config(rounds=3), safety.Config(rounds=2, judge="role")
ROWS = 48


@functools.cache
def steps_of(config):
    return jax.jit(safety.make(config).step), safety.make(config).reset


def table(config, episodes):
    """The tree of scripted episodes (kind, lines), one task each, as a rollout would lay it out."""
    step, reset = steps_of(config)
    rows, pay = [], {c: np.zeros((ROWS, len(config.roles)), np.float32) for c in safety.COMPONENTS}
    for task, (kind, lines) in enumerate(episodes):
        text = np.full(config.length, ord("a"), np.int32)
        state = reset(None, dict(text=text, kind=np.int32(kind)))
        for turn, line in enumerate(lines):
            ids = [*line.encode(), EOS]
            state, rewards, _ = step(None, state, np.array([ids + [PAD] * (4 - len(ids))]), np.array([len(ids)]))
            good = all(np.isfinite(r).all() for r in rewards.values())
            for name, values in rewards.items():
                pay[name][len(rows)] = np.nan_to_num(values)
            rows.append((task, turn, config.order[turn], good))
    n, pad = len(rows), ROWS - len(rows)
    column = lambda i: np.array([r[i] for r in rows] + [0] * pad, np.int32)
    there, zero, one = np.arange(ROWS) < n, np.zeros(ROWS, np.int32), np.zeros((ROWS, 1), np.int32)
    parent = np.array([i - 1 if r[1] else -1 for i, r in enumerate(rows)] + [-1] * pad, np.int32)
    task, turn, role, ids = column(0), column(1), column(2), np.arange(ROWS)
    nodes = Nodes(one, zero, role, role, task, turn, parent, Retrieval.empty(ROWS), there)
    steps = Steps(ids, one, zero + 1, there[:, None], one.astype(np.float32), ~there, zero, zero, there)
    seats, valid = np.where(there, ids, -1)[:, None], column(3).astype(bool)
    return Tree(nodes, steps, Transitions(seats, parent, task, turn, pay, there, there, valid), Counts(*[zero[0]] * 7))


def credited(config, episodes, weights=None):
    cfg = waltzrl.Config()
    got = assign(
        waltzrl.algorithm(cfg).credit,
        table(config, episodes),
        weights=weights or cfg.reward,
        sizes=Sizes(len(config.order), 8, len(config.roles)),
    )
    return jax.device_get(got)


def flags_of(kind, response):
    openness = "rsc".index(response)
    return "ny"[openness > kind] + "ny"[openness < kind]


@st.composite
def episode(draw, config):
    """Well-formed lines until the episode ends, verdicts of a judge who errs; now and then one cannot be read."""
    kind, lines, values, verdicts = draw(st.integers(0, 2)), [], [], []
    pick = lambda *choices: draw(st.sampled_from(choices))
    for k in range(config.rounds + 1):
        response = pick(*"rsc")
        lines.append(response)
        verdict = flags_of(kind, response)
        if config.judge == "role":
            verdict = pick(verdict, verdict, "nn", "yn", "?")
            lines.append(verdict)
        verdicts.append(verdict)
        if verdict == "?" or k == config.rounds:
            break
        said = pick(verdict + "c", verdict + "r", "yns", "nyc", "nnr", "y")
        lines.append(said)
        values.append((said, verdict))
        if len(said) < 3 or said[:2] == "nn":
            break
    return kind, lines, values, verdicts


@pytest.mark.parametrize("config", [THREE, JUDGED], ids=["three rounds", "judge"])
@settings(max_examples=40, deadline=None, database=None)
@given(data=st.data(), alpha=st.sampled_from([0.0, 1.0, 0.5]), lam=st.sampled_from([0.0, 1.0, 2.0]))
def test_every_round_is_paid_for_itself(config, data, alpha, lam):
    """R_f of each round and R_c of each answer, by the paper's formulas, for any number of rounds."""
    episodes = [data.draw(episode(config)) for _ in range(4)]
    weights = {"response": 1.0, "improvement": alpha, "label": lam, "format": 0.25}
    got, row = credited(config, [e[:2] for e in episodes], weights), 0
    for _, lines, rounds, verdicts in episodes:
        good = [None if v == "?" else float(v == "nn") for v in verdicts]
        for turn in range(len(lines)):
            role, at = config.roles[config.order[turn]], config.order[:turn].count(0)
            if role == "judge":
                row += 1
                continue
            if role == "conversation":
                want = good[at]
            else:
                said, verdict = rounds[at - 1]
                label = float(len(said) == 3 and said[:2] == verdict)
                after = good[at] if at < len(good) else good[at - 1]  # no next answer: no improvement
                delta = None if after is None else after - good[at - 1]
                want = None if delta is None else alpha * label * delta + lam * label + 0.25 * (len(said) == 3)
            assert bool(got.valid[row]) == (want is not None)
            assert got.returns[row] == pytest.approx(want or 0.0)
            row += 1


GOLDEN = {"repair, right flags": (["c", "ynr", "r"], 3, 2), "repair, wrong flags": (["c", "nyr", "r"], 1, 1)}
GOLDEN |= {"no revision, right flags": (["r", "nnr"], 2, 1)}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_table(name):
    """alpha = lambda = gamma = 1 in stage 1; lambda = 0 in stage 2. c_0 is paid R_c(c_0) alone."""
    lines, first, second = GOLDEN[name]
    weights = waltzrl.reward_schedule(waltzrl.Config(stage_one=5))
    for step, want in ((4, first), (5, second)):
        got = credited(safety.Config(), [(safety.HARMFUL, lines)], weights(step))
        assert got.returns[1] == want and got.returns[0] == float(lines[0] == "r")


def test_equal_rewards_and_groups_of_one_have_no_advantage():
    config = safety.Config()
    one = credited(config, [(safety.HARMFUL, ["c", "nnr"])])
    assert one.valid[:2].all() and not one.advantage.any()
    equal = credited(config, [(safety.HARMFUL, ["r", "nnr"])] * 3)
    assert equal.valid[:6].all() and not equal.advantage.any()
    mixed = credited(config, [(safety.HARMFUL, ["r", "nnr"]), (safety.HARMFUL, ["c", "ynr", "r"])])
    assert mixed.advantage[0] > 0 > mixed.advantage[2] and mixed.advantage[3] > 0 > mixed.advantage[1]


def test_an_episode_that_ends_at_its_first_verdict():
    """Nothing is known of it, and the others are credited as if it were not there."""
    good = [(safety.BENIGN, ["c", "nn", "nnc"]), (safety.BENIGN, ["r", "ny", "nnc"])]
    got, alone = credited(JUDGED, [(safety.BENIGN, ["c", "?"]), *good]), credited(JUDGED, good)
    assert not got.valid[:2].any() and not got.advantage[:2].any()
    np.testing.assert_array_equal(got.advantage[2:8], alone.advantage[:6])


# Stages

TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


def config(**changes):
    base = waltzrl.Config(
        steps=4,
        stage_one=2,
        batch=8,
        team=TeamConfig(backbone=TINY, max_new_tokens=4, remat=False),
        env=EnvConfig("safety", {"length": 3, "judge": "role"}, eval_tasks=4),
        optimizer=Optimizer(learning_rate=3e-2, max_grad_norm=0.0),
        sft=SFT(steps=16, batch=64, samples=256, optimizer=Optimizer(learning_rate=2e-2)),
    )
    return dataclasses.replace(base, **changes)


def test_who_learns_and_what_is_paid():
    cfg = config()
    who = [np.asarray(waltzrl.trainable_roles(cfg)(t)).tolist() for t in range(4)]
    assert who == [[False, True, False]] * 2 + [[True, True, False]] * 2
    labels = [float(waltzrl.reward_schedule(cfg)(t)["label"]) for t in range(4)]
    others = {k: float(v) for k, v in waltzrl.reward_schedule(cfg)(3).items() if k != "label"}
    assert labels == [1, 1, 0, 0] and others == {"response": 1, "improvement": 1, "format": 1}
    traced = jax.jit(jax.vmap(lambda t: (waltzrl.trainable_roles(cfg)(t), waltzrl.reward_schedule(cfg)(t)["label"])))(
        jnp.arange(4)
    )
    np.testing.assert_array_equal(traced[0], who)
    np.testing.assert_array_equal(traced[1], labels)
    assert waltzrl.trainable_roles(config(env=EnvConfig("safety")))(0).tolist() == [False, True]


def test_stages_of_a_run(tmp_path, monkeypatch):
    """Frozen roles stay byte-identical, optimizer state included; one round of each learning role is trained."""
    trained, lay_out = [], HostDriver.lay_out

    def watch(driver, step, tree, played, advantage, rows, *rest):
        trained.append((tree, rows))
        return lay_out(driver, step, tree, played, advantage, rows, *rest)

    monkeypatch.setattr(HostDriver, "lay_out", watch)
    cfg = config()
    cfg.check("config")
    recipe = waltzrl.make(cfg)
    roles, state = recipe.env_runner.env.roles, recipe.init(0)
    copy = lambda s: jax.tree.map(np.array, {r: (s.params["agents"][r], s.opt_state[r]) for r in roles})
    moved, last = [], None
    with Logger(tmp_path, resume_step=None, total_steps=20, tensorboard=False) as logger:
        for step in range(recipe.total_steps):
            before = copy(state)
            state, metrics = recipe.step(state, logger)
            after, last = copy(state), metrics
            which = 0 if step == cfg.sft.steps else slice(None)  # the first RL step starts new optimizers
            changed = {r for r in roles if digests(before[r][which]) != digests(after[r][which])}
            if step > cfg.sft.steps:
                moved.append(changed)
            elif step == cfg.sft.steps:
                assert changed.isdisjoint({"conversation", "judge"})
    assert moved == [{"feedback"}, {"conversation", "feedback"}, {"conversation", "feedback"}]
    assert {"reward/unsafe", "reward/trigger", "agent/conversation/reward"} <= set(last)
    for step, (tree, rows) in enumerate(trained):
        role, task = tree.nodes.role[tree.steps.node], tree.nodes.task[tree.steps.node]
        pairs = list(zip(task[rows].tolist(), role[rows].tolist()))
        assert len(set(pairs)) == len(pairs) > 0 and {r for _, r in pairs} <= ({1} if step < 2 else {0, 1})


def test_the_compiled_run_has_the_same_stages():
    """One program, in which the length of stage 1 is data; the reference is the policy after stage 0."""
    cfg = config(steps=2, env=EnvConfig("safety", {"length": 3}, eval_tasks=4))

    def one(stage):
        algorithm = waltzrl.algorithm(dataclasses.replace(cfg, stage_one=stage))
        state, seen = make_program(phases.with_algorithm(waltzrl.make(cfg), algorithm)).run(0)
        return state.params, seen

    run = jax.jit(one)
    moved = lambda p: {r for r, own in p["agents"].items() if digests(own) != digests(p["reference"][r])}
    first, seen = run(2)
    assert moved(first) == {"feedback"} and moved(run(1)[0]) == {"conversation", "feedback"}
    assert seen["unsafe"].shape == (2,) and seen["kl/feedback"][0] == pytest.approx(0, abs=1e-5)


BAD = [
    ({"group": 0}, "config.group: expected >= 1"),
    ({"stage_one": -1}, "config.stage_one: expected >= 0"),
    ({"env": EnvConfig("chain")}, "config.env: no role 'conversation' in environment 'chain', whose roles are solver"),
    ({"team": TeamConfig(parameter_sharing="shared")}, "config.team.parameter_sharing: .*'conversation' is frozen"),
    ({"sft": SFT()}, "config.sft.steps: .*the role 'judge'"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[str(m)[:40] for _, m in BAD])
def test_bad_configurations(change, message):
    cfg = config(**change)
    with pytest.raises(ConfigError, match=message):
        cfg.credit.check("config.credit")
        cfg.check("config")


def test_an_environment_that_does_not_pay():
    with pytest.raises(ConfigError, match="pays no 'tone'"):
        waltzrl.make(config(reward={"response": 1.0, "tone": 1.0}))
