"""The study of JoyAgents-R1's mechanisms: arms, what they change, decisions, and how a run is resumed."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import FAILS, HOLDS, OPEN, Finding
from experiments.studies import mechanisms as study
from jaxmarl_llm.agents import memory
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.recipes import joyagents_r1
from jaxmarl_llm.rollout.array import layout
from jaxmarl_llm.runs.compiled import make_evaluation, make_program, task_data
from jaxmarl_llm.training.optimizers import Optimizer

WIDTH = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}


def small(**changes):
    """The reference with two hops, tiny models, and gradients that are not turned into signs."""
    cfg = study.base()
    env = replace(cfg.env, args={"hops": (1.0, 0.0, 0.0, 0.0), "tasks": 16}, eval_tasks=8)
    sgd = Optimizer(name="sgd", learning_rate=0.3, max_grad_norm=0.0)
    sft = replace(cfg.sft, steps=80, batch=8, samples=64)  # some completions end
    team = replace(cfg.team, backbone=Backbone(**WIDTH))
    store = replace(cfg.memory, capacity=6, warmup=4)
    few = {"steps": 10, "batch": 2, "group": 2, "optimizer": sgd, "sft": sft, "team": team, "memory": store}
    return replace(cfg, env=env, **{**few, **changes})


# --- the configuration ---------------------------------------------------------------------------------------


def test_the_configuration_has_what_a_selection_needs():
    cfg = study.harder()
    recipe = joyagents_r1.make(replace(cfg, sft=replace(cfg.sft, steps=0)))
    state = jax.eval_shape(lambda: recipe.initial(0, 0))
    for agent in state.params["agents"].values():
        assert sum(x.size for x in jax.tree.leaves(agent)) == 27_168 <= 50_000
    env, tasks = recipe.env_runner.env, recipe.env_runner.tasks
    assert len(env.roles) == 9 and env.max_turns == 11 and set(tasks["hops"]) == {4, 5}
    groups = 2 * tasks["hops"] + 1  # a node is a group
    assert groups.min() >= 8 > study.K == cfg.selected_groups
    branching = [b for b in layout(joyagents_r1.make_plan(cfg), env, 1) if b.group > 1]
    assert len(branching) == groups.max() == 11 and cfg.use_memory


def test_arms_have_the_tokens_or_the_updates_of_the_reference():
    reference = study.base()
    count = study.sequences(reference)
    assert count == 11 * 4 + 3 * 55  # G at each node, and what is behind the alternatives
    for name, arm in study.ARMS.items():
        cfg = study.config_of(arm, reference)
        ratio = cfg.steps * study.sequences(cfg) / (reference.steps * count)
        if name == "flat, equal updates":
            assert cfg.steps == reference.steps and study.sequences(cfg) == 11 * 4  # as many samples as are trained on
        else:
            assert ratio == pytest.approx(1, abs=0.02), name
    assert {a for pair in study.CONTRASTS.values() for a in pair} == set(study.ARMS)


# --- what arms change ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played():
    """A program of the reference, its state after two steps, and the rollout of the second."""
    cfg = small()
    begin = study.start(cfg, [5])
    one = study.programs(study.ARMS[study.REFERENCE], study.config_of(study.ARMS[study.REFERENCE], cfg))
    data = jax.tree.map(lambda x: jnp.asarray(x)[0], begin.data)
    state = one.first(jnp.int32(5), jax.tree.map(lambda x: x[0], begin.params))
    sample, learn = jax.jit(one.sample), jax.jit(one.learn)
    for i in range(2):
        tree = sample(5, data, state, i)
        state, tokens, hit = learn(5, data, state, tree, i)
    return cfg, begin, data, state, tree, tokens, hit


@pytest.mark.slow
def test_an_arm_takes_the_steps_of_a_compiled_run(played):
    """Two programs and updates of base trajectories alone, against one program and updates of all completions."""
    cfg, begin, data, state, tree, tokens, _ = played
    recipe = joyagents_r1.make(replace(cfg, steps=2))
    whole, _ = jax.jit(make_program(recipe).run)(5, jax.tree.map(lambda x: x[0], task_data(recipe, [5])))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), state.params, whole.params)
    np.testing.assert_array_equal(state.memory["master"].used, whole.memory["master"].used)
    taught = jax.tree.map(lambda x: x[0], begin.params)
    moved = [np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (taught, state.params)), strict=True)]
    assert max(moved) > 1e-3 and int(tokens) == int(tree.steps.length.sum())
    score = make_evaluation(cfg, memory=cfg.memory)
    one = study.programs(study.ARMS[study.REFERENCE], cfg)
    assert one.success(5, data, state) == score(state.params, 5, data.held_out, state.memory)["accuracy"]


@pytest.mark.slow
def test_random_groups_are_k_of_each_task(played):
    tree = played[4]
    trained = tree.steps.valid & (tree.nodes.turn[tree.steps.node] < 4)
    select = jax.jit(study.random_groups(2, 2))
    times = np.zeros(len(tree.nodes.task))
    for seed in range(200):
        kept = np.asarray(select(jax.random.key(seed), tree, trained))
        assert not (kept & ~np.asarray(trained)).any()
        nodes = np.unique(np.asarray(tree.steps.node)[kept])
        assert all(
            np.asarray(trained)[np.asarray(tree.steps.node) == n].sum() == (tree.steps.node[kept] == n).sum()
            for n in nodes
        )
        able = np.unique(np.asarray(tree.steps.node)[np.asarray(trained)])
        for task in range(2):
            mine = able[np.asarray(tree.nodes.task)[able] == task]
            assert (np.asarray(tree.nodes.task)[nodes] == task).sum() == min(2, len(mine))
        times[nodes] += 1
    for task in range(2):
        mine = able[np.asarray(tree.nodes.task)[able] == task]
        share = 200 * min(2, len(mine)) / len(mine)
        assert np.abs(times[mine] - share).max() < 5 * share**0.5  # uniform


@pytest.mark.slow
def test_groups_of_a_flat_plan_are_the_turns_of_a_task(played):
    tree = played[4]
    ids, count = study.by_task_and_turn(tree, Sizes(5, 2, 9))
    node = np.asarray(tree.steps.node)
    pairs = set(zip(ids.tolist(), np.asarray(tree.nodes.task)[node], np.asarray(tree.nodes.turn)[node], strict=True))
    assert count == 10 and len(pairs) == len(set(ids.tolist())) == 10


def test_shuffled_memories_have_other_keys_and_the_same_entries():
    config = memory.MemoryConfig(capacity=8, retrieve=1)
    store = memory.init(config, dim=8, max_ids=1, max_bytes=1)
    used = jnp.array([True, False, True, True, False, True, True, False])
    store = store.replace(key=jnp.eye(8) * used[:, None], used=used, ids=jnp.arange(8)[:, None])
    places = set()
    for seed in range(60):
        got = jax.jit(study.permuted)(store, jax.random.key(seed))
        np.testing.assert_array_equal(got.ids, store.ids)
        assert sorted(map(tuple, got.key[used].tolist())) == sorted(map(tuple, store.key[used].tolist()))
        assert not got.key[~used].any()
        places.add(int(got.key[:, 2].argmax()))
    assert places == {0, 2, 3, 5, 6}
    two = study.permuted_stores({"a": store, "b": store}, jax.random.key(0))
    assert not np.array_equal(two["a"].key, two["b"].key)


# --- decisions -----------------------------------------------------------------------------------------------


def test_contrasts_are_decided_after_the_correction():
    noise = np.random.default_rng(0).normal(0, 0.01, 20)
    effect = {"memory, off": 0.1, "std": -0.05, "selection, all": study.DELTA}
    decided = study.decisions([Finding(name, (x + noise - noise.mean()).tolist(), {}) for name, x in effect.items()])
    assert {name: d["verdict"] for name, d in decided.items()} == {
        "memory, off": HOLDS, "std": FAILS, "selection, all": OPEN,
    }  # fmt: skip
    for d in decided.values():
        assert d["holm"] >= d["p"] and 0 < d["detectable"] < 0.02
    # A p that one test would call significant is not, with six others.
    near = study.DELTA + noise - noise.mean() + 2.3 * noise.std(ddof=1) / 20**0.5
    alone = study.decisions([Finding("std", near.tolist(), {})])["std"]
    assert alone["p"] < 0.05 < alone["holm"] == pytest.approx(7 * alone["p"]) and alone["verdict"] == OPEN


def test_every_contrast_is_a_claim_with_delta():
    assert list(study.CLAIMS) == list(study.CONTRASTS) == list(study.TEXTS)
    assert all(claim.kind == "X" and claim.delta == study.DELTA for claim in study.CLAIMS.values())


# --- running -------------------------------------------------------------------------------------------------


class Runs:
    """Stands in for training: counts what is run, and returns a curve."""

    def __init__(self, monkeypatch):
        self.ran = []
        monkeypatch.setattr(study, "start", lambda cfg, seeds: study.Start(np.array(seeds), None, None))
        monkeypatch.setattr(study, "play", self.play)

    def play(self, arm, reference, begin):
        self.ran.append((arm, begin.seeds.tolist()))
        n, height = len(begin.seeds), 0.3 if arm.shuffled else 0.5
        curve = np.linspace(0.1, height, study.PLACES + 1) + 0.01 * np.asarray(begin.seeds)[:, None]
        return study.Curves(curve, np.full(n, 1000), np.full(n, 0.5))


def test_a_recorded_arm_is_not_run_again(monkeypatch):
    runs, done, saved = Runs(monkeypatch), {}, []
    names = ("reference", "shuffled memory")
    wanted = {name: study.ARMS[name] for name in names}
    go = lambda n, cfg: study.run(wanted, range(n), 2, cfg, done, lambda: saved.append(json.dumps(done)))
    go(5, small())
    assert [seeds for _, seeds in runs.ran] == [[0, 1], [2, 3], [4]] * 2 and len(saved) == 2
    assert list(json.loads(saved[0])) == ["reference"]  # saved after every arm
    go(5, small())
    assert len(runs.ran) == 6  # nothing was run again
    done = json.loads(saved[1])
    del done["reference"]
    go(5, small())
    assert len(runs.ran) == 9 and all(arm == study.ARMS["reference"] for arm, _ in runs.ran[6:])
    go(5, small(batch=4))
    assert len(runs.ran) == 15  # other settings
    go(6, small(batch=4))
    assert len(runs.ran) == 21  # other seeds
    found = study.findings(done)
    assert [f.claim for f in found] == ["memory, shuffled"]
    assert found[0].effect == pytest.approx([0.1] * 6)  # half of the difference of two straight lines' ends


def test_the_page_shows_what_is_recorded_and_what_is_not(monkeypatch):
    Runs(monkeypatch)
    arms: dict = {}
    text = study.page({})
    assert text.count("not recorded yet") == len(study.CLAIMS) and "No arm is recorded yet." in text
    wanted = {name: study.ARMS[name] for name in ("reference", "shuffled memory")}
    study.run(wanted, range(3), 3, small(), arms, lambda: None)
    text = study.page({"arms": arms, "pilot": {}})
    assert text.count("not recorded yet") == len(study.CLAIMS) - 1
    assert "| memory beats a memory with permuted keys | 0.100 ± 0.000 | 0.02 | 0 | holds | 0.000 |" in text
    assert "| shuffled memory | 0.210 ± 0.025 | 0.110 ± 0.025 | 0.310 ± 0.025 | 10 | 1,000 | 0.50 | 3 seeds" in text


def test_the_page_in_the_repository_is_that_of_the_records():
    records = study.Path("docs/results/mechanisms.json")
    got = json.loads(records.read_text()) if records.exists() else {}
    assert study.Path("docs/mechanisms.md").read_text() == study.page(got)


def test_pilot_runs_have_equal_tokens():
    reference = study.base()
    for name, arm in study.pilot_arms().items():
        cfg = study.config_of(arm, reference)
        spent = cfg.steps * study.sequences(cfg)
        assert spent == pytest.approx(reference.steps * study.sequences(reference), rel=0.06), name
        assert cfg.selected_groups is None
