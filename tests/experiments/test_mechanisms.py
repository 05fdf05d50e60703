"""The study of JoyAgents-R1's mechanisms: arms, what they change, decisions, and how a run is resumed."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.claims import FAILS, HOLDS, OPEN, Finding
from experiments.studies import mechanism_arms as arms
from experiments.studies import mechanism_changes as changes
from experiments.studies import mechanisms as study
from jaxmarl_llm.agents import memory
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import joyagents_r1
from jaxmarl_llm.rollout.array import layout
from jaxmarl_llm.runs.compiled import make_evaluation, make_program, task_data
from jaxmarl_llm.training.optimizers import Optimizer
from tests.test_layering import ROOT

WIDTH = {"hidden_size": 8, "intermediate_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8}


def small(**settings):
    """The reference with two hops, tiny models, and gradients that are not turned into signs."""
    cfg = arms.base()
    env = replace(cfg.env, args={"hops": (1.0, 0.0, 0.0, 0.0), "tasks": 16}, eval_tasks=8)
    sgd = Optimizer(name="sgd", learning_rate=0.3, max_grad_norm=0.0)
    sft = replace(cfg.sft, steps=80, batch=8, samples=64)  # some completions end
    team = replace(cfg.team, backbone=Backbone(**WIDTH))
    store = replace(cfg.memory, capacity=6, warmup=4)
    costly = {**cfg.reward, "efficiency": -1.0}  # tiny models are hardly ever paid: only the cost tells samples apart
    few = {
        "reward": costly,
        "steps": 10,
        "batch": 2,
        "group": 2,
        "optimizer": sgd,
        "sft": sft,
        "team": team,
        "memory": store,
    }
    return replace(cfg, env=env, **{**few, **settings})


# --- the configuration ---------------------------------------------------------------------------------------


def test_the_configuration_has_what_a_selection_needs():
    cfg = arms.harder()
    recipe = joyagents_r1.make(replace(cfg, sft=replace(cfg.sft, steps=0)))
    state = jax.eval_shape(lambda: recipe.initial(0, 0))
    for agent in state.params["agents"].values():
        assert sum(x.size for x in jax.tree.leaves(agent)) == 27_168 <= 50_000
    env, tasks = recipe.env_runner.env, recipe.env_runner.tasks
    assert len(env.roles) == 9 and env.max_turns == 11 and set(tasks["hops"]) == {3, 4, 5}
    groups = 2 * tasks["hops"] + 1  # a node is a group
    assert groups.min() == 7 > arms.K == cfg.selected_groups
    branching = [b for b in layout(joyagents_r1.make_plan(cfg), env, 1) if b.group > 1]
    assert len(branching) == groups.max() == 11 and cfg.use_memory
    assert set(np.unique(tasks["kinds"])) == {-1, 1, 2, 3} and "efficiency" not in cfg.reward  # no `add`, no cost


def played_out(plan, group, hops):
    """Completions of one task whose episodes have ``hops`` hops, counted by walking the tree of a plan."""
    turns = 2 * hops + 1
    if plan == "flat":
        return group * turns

    def node(turn, trunk):
        if turn == turns:
            return 0
        children = [node(turn + 1, trunk and sample == 0) for sample in range(group if trunk else 1)]
        return len(children) + sum(children)

    return node(0, True)


def completions(cfg):
    """Completions of a run: a third of the tasks has 3 hops, a third 4 and a third 5."""
    return cfg.steps * np.mean([played_out(cfg.plan, cfg.group, hops) for hops in (3, 4, 5)])


def test_arms_have_the_tokens_or_the_updates_of_the_reference():
    reference = arms.base()
    assert played_out("node_wise", 3, 4) == 3 * 9 + 2 * sum(range(9)) and played_out("flat", 8, 5) == 88
    for name, arm in arms.ARMS.items():
        cfg = arms.config_of(arm, reference)
        assert cfg.steps == arms.STEPS[name]  # what the claims state
        if name == "flat, equal updates":
            assert cfg.steps == reference.steps and cfg.group == reference.group  # as many samples as are trained on
        else:
            assert completions(cfg) == pytest.approx(completions(reference), rel=0.02), name
    assert {a for pair in arms.CONTRASTS.values() for a in pair} == set(arms.ARMS)


def test_pilot_runs_have_equal_tokens_whichever_size_is_chosen(monkeypatch):
    whole = completions(arms.budget())
    assert whole == pytest.approx(200 * (91 + 144 + 209) / 3)
    for name, arm in arms.pilot_arms().items():
        cfg = arms.config_of(arm, arms.budget())
        assert completions(cfg) == pytest.approx(whole, rel=0.04) and cfg.selected_groups is None, name
    before = {name: arms.settings_of(arm, arms.budget()) for name, arm in arms.pilot_arms().items()}
    monkeypatch.setitem(arms.GROUP, "node_wise", 2)
    assert completions(arms.base()) == pytest.approx(whole, rel=0.04)
    assert {name: arms.settings_of(arm, arms.budget()) for name, arm in arms.pilot_arms().items()} == before


def test_an_arm_changes_what_it_is_named_after():
    reference = arms.base()
    cost = arms.config_of(arms.ARMS["cost of tokens"], reference)
    assert cost.reward == {**reference.reward, "efficiency": -1.0} and cost.credit.normalise == "std"
    assert replace(cost, reward=reference.reward) == reference
    assert arms.config_of(arms.ARMS["reference"], reference) == reference


def test_every_contrast_is_a_claim_with_its_arms_and_budget():
    assert list(arms.CLAIMS) == list(arms.CONTRASTS) == list(arms.TEXTS)
    for name, (one, other) in arms.CONTRASTS.items():
        claim = arms.CLAIMS[name]
        assert claim.kind == "X" and claim.delta == arms.DELTA
        assert claim.effect.endswith(f"{one} minus {other}") and claim.control.startswith(other)
        sft, first, batch, second = map(int, re.findall(r"(?<!G = )\b\d+\b", claim.budget))
        cfg = arms.base()
        assert (sft, batch) == (cfg.sft.steps, cfg.batch)
        assert [first, second] == [arms.config_of(arms.ARMS[arm], cfg).steps for arm in (one, other)]


def test_a_version_of_the_claims_has_one_checksum(monkeypatch):
    before = arms.claims_version()
    assert before == arms.claims_version() and len(before) == 12
    monkeypatch.setitem(arms.CLAIMS, "std", replace(arms.CLAIMS["std"], delta=0.01))
    assert arms.claims_version() != before


# --- what arms change ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A program of the reference, its state after two steps, and the rollout of the second."""
    cfg = small()
    begin = arms.start(cfg, [5], tmp_path_factory.mktemp("work"))
    one = arms.programs(arms.ARMS[arms.REFERENCE], arms.config_of(arms.ARMS[arms.REFERENCE], cfg))
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
    one = arms.programs(arms.ARMS[arms.REFERENCE], cfg)
    assert one.success(5, data, state) == score(state.params, 5, data.held_out, state.memory)["accuracy"]


@pytest.mark.slow
def test_random_groups_are_k_of_each_task(played):
    tree = played[4]
    trained = tree.steps.valid & (tree.nodes.turn[tree.steps.node] < 4)
    select = jax.jit(changes.random_groups(2, 2))
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
    ids, count = changes.by_task_and_turn(tree, Sizes(5, 2, 9))
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
        got = jax.jit(changes.permuted)(store, jax.random.key(seed))
        np.testing.assert_array_equal(got.ids, store.ids)
        assert sorted(map(tuple, got.key[used].tolist())) == sorted(map(tuple, store.key[used].tolist()))
        assert not got.key[~used].any()
        places.add(int(got.key[:, 2].argmax()))
    assert places == {0, 2, 3, 5, 6}
    two = changes.permuted_stores({"a": store, "b": store}, jax.random.key(0))
    assert not np.array_equal(two["a"].key, two["b"].key)


@pytest.mark.slow
def test_stage_0_is_run_once_a_seed(tmp_path, monkeypatch):
    """Parameters are those of a run of stage 0 alone, come from the folder, and are of one configuration."""
    cfg = small(sft=replace(small().sft, steps=3))
    recipe = joyagents_r1.make(replace(cfg, steps=0))
    whole, _ = jax.jit(make_program(recipe).run)(7, jax.tree.map(lambda x: x[0], task_data(recipe, [7])))
    first = arms.start(cfg, [6, 7], tmp_path)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, atol=1e-5), first.params, whole.params)
    ran, learn = [], arms.stage_0
    monkeypatch.setattr(arms, "stage_0", lambda cfg, seeds: ran.append(list(seeds)) or learn(cfg, seeds))
    again = arms.start(cfg, [7, 8], tmp_path)
    assert ran == [[8]] and again.seeds.tolist() == [7, 8]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[1]), again.params, first.params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[0], b[1]), again.data, first.data)
    with pytest.raises(ConfigError, match="stage_0_seed_7: the data set is of another configuration"):
        arms.start(replace(cfg, batch=3), [7], tmp_path)


# --- decisions -----------------------------------------------------------------------------------------------

NOISE = np.random.default_rng(0).normal(0, 0.01, study.SEEDS)
NOISE -= NOISE.mean()


def decided(**effects):
    return study.decisions([Finding(name.replace("_", ", "), x.tolist(), {}) for name, x in effects.items()])


def test_contrasts_are_decided_after_the_correction():
    effects = {"memory_off": 0.1, "std": -0.05, "selection_random": 0.005, "selection_all": arms.DELTA}
    found = decided(**{name: effect + NOISE for name, effect in effects.items()})
    assert {name: d["verdict"] for name, d in found.items()} == {
        "memory, off": HOLDS, "std": FAILS, "selection, random": FAILS, "selection, all": OPEN,
    }  # fmt: skip
    for d in found.values():
        assert d["holm"] >= d["p"] and 0 < d["detectable"] < 0.02 and d["seeds"] == study.SEEDS


def test_a_p_that_one_test_would_call_significant_is_not_with_seven_others():
    near = arms.DELTA + NOISE + 2.3 * NOISE.std(ddof=1) / len(NOISE) ** 0.5
    alone = decided(std=near)["std"]
    assert alone["p"] < 0.05 < alone["holm"] == pytest.approx(8 * alone["p"]) and alone["verdict"] == OPEN
    # Holm, unlike Bonferroni: the seven others rejected, the same p counts once.
    names = [name for name in arms.CONTRASTS if name != "std"]
    most = [Finding(name, (1 + NOISE).tolist(), {}) for name in names] + [Finding("std", near.tolist(), {})]
    last = study.decisions(most)["std"]
    assert last["holm"] == pytest.approx(last["p"]) and last["verdict"] == HOLDS


def test_nothing_is_decided_before_all_seeds_are_there():
    early = decided(memory_off=(0.1 + NOISE)[:-1])["memory, off"]
    assert early["verdict"] == OPEN and early["holm"] < 1e-6 and early["seeds"] == study.SEEDS - 1


def synthetic(seeds, areas):
    return {"seeds": list(seeds), "area": list(areas)}


def test_a_contrast_pairs_the_seeds_that_both_arms_have():
    done = {
        "reference": [synthetic([5, 6], [0.5, 0.6]), synthetic([0, 1], [0.1, 0.2])],
        "no std": [synthetic([0, 1], [0.0, 0.0]), synthetic([6, 7], [0.1, 0.9])],
        "no memory": [synthetic([8], [0.1])],
    }
    (found,) = study.findings(done)  # seeds 0, 1 and 6 of `std`; no seed of `memory, off`
    assert found.claim == "std" and found.effect == pytest.approx([0.1, 0.2, 0.5])


# --- running -------------------------------------------------------------------------------------------------


class Runs:
    """Stands in for training: counts what is run, and returns a curve. It stops before run number ``last``."""

    def __init__(self, monkeypatch):
        self.ran, self.last = [], None
        monkeypatch.setattr(study, "start", lambda cfg, seeds, work: arms.Start(np.array(seeds), None, None))
        monkeypatch.setattr(study, "play", self.play)

    def play(self, arm, reference, begin):
        if len(self.ran) == self.last:
            raise KeyboardInterrupt
        self.ran.append((arm, begin.seeds.tolist()))
        n, height = len(begin.seeds), 0.3 if arm.shuffled else 0.5
        curve = np.linspace(0.1, height, arms.PLACES + 1) + 0.01 * np.asarray(begin.seeds)[:, None]
        return arms.Curves(curve, np.full(n, 1000), np.full(n, 0.5))


def command(folder, *asked, seeds=4, together=2):
    """The command's main with files in ``folder``; its records."""
    file = folder / "records.json"
    given = dict(records=str(file), page=str(folder / "page.md"), work=str(folder / "work"))
    study.main(None, None, SimpleNamespace(run=list(asked), seeds=seeds, together=together, **given))
    return json.loads(file.read_text())


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.setattr(study, "stated_in", lambda *paths: "abc")
    monkeypatch.setattr(jax.config, "update", lambda *settings: None)  # no folder of compiled programs
    return Runs(monkeypatch)


def test_a_stopped_study_goes_on_at_its_next_part(runs, tmp_path):
    names = ("reference", "shuffled memory")
    runs.last = 3
    with pytest.raises(KeyboardInterrupt):
        command(tmp_path, *names)
    assert [seeds for _, seeds in runs.ran] == [[0, 1], [0, 1], [2, 3]]  # both arms of the first part come first
    kept = json.loads((tmp_path / "records.json").read_text())
    assert {name: [p["seeds"] for p in parts] for name, parts in kept["arms"].items()} == {
        "reference": [[0, 1], [2, 3]], "shuffled memory": [[0, 1]],
    }  # fmt: skip
    assert "| 2 seeds," in (tmp_path / "page.md").read_text()
    runs.last = None
    done = command(tmp_path, *names)
    assert runs.ran[3:] == [(arms.ARMS["shuffled memory"], [2, 3])]
    assert done["arms"]["reference"] == kept["arms"]["reference"] and done["claims_commit"] == "abc"
    command(tmp_path, *names)
    assert len(runs.ran) == 4  # nothing was run again
    command(tmp_path, *names, seeds=5, together=3)
    assert [seeds for _, seeds in runs.ran[4:]] == [[4], [4]]  # other parts, and no seed twice
    (found,) = study.findings(json.loads((tmp_path / "records.json").read_text())["arms"])
    assert found.claim == "memory, shuffled" and found.effect == pytest.approx([0.1] * 5)  # half of the ends' distance


def test_the_pilot_has_seeds_of_its_own_and_is_no_part_of_the_study(runs, tmp_path):
    done = command(tmp_path, "pilot", seeds=2)
    assert list(done["pilot"]) == list(arms.pilot_arms()) and "arms" not in done
    assert [seeds for _, seeds in runs.ran] == [[100, 101]] * 6
    assert command(tmp_path, "all", seeds=2)["pilot"] == done["pilot"]
    assert [arm for arm, _ in runs.ran[6:]] == list(arms.ARMS.values())
    assert (tmp_path / "page.md").read_text().count("not recorded yet") == 0


@pytest.mark.parametrize(
    ("group", "name", "key", "value", "words"),
    [
        ("arms", "reference", "settings", "old", r"part 0: recorded with another configuration \(old, now \w{12}\)"),
        (
            "arms",
            "reference",
            "claims",
            "old",
            r"part 0: recorded with another version of the claims \(old, now \w{12}\)",
        ),
        ("pilot", "flat, G = 8", "settings", "old", "flat, G = 8, part 0: recorded with another configuration"),
        ("arms", "reference", "hit", [0.5], "reference, part 0: expected one value a seed in each of seeds, curve"),
        ("arms", "reference", "area", "old", "reference, part 0: key 'area': expected a list, found \"old\""),
    ],
)
def test_a_part_of_another_configuration_or_of_other_claims_is_refused(runs, tmp_path, group, name, key, value, words):
    done = command(tmp_path, "pilot", "reference", seeds=2)
    done[group][name][0][key] = value
    (tmp_path / "records.json").write_text(json.dumps(done))
    before = len(runs.ran)
    for asked in (["all"], []):  # the page is not written either
        with pytest.raises(ConfigError, match=words) as error:
            command(tmp_path, *asked)
        assert "\n" not in str(error.value) and "records.json" in str(error.value)
    assert len(runs.ran) == before


def test_an_arm_that_is_not_known_is_refused(runs, tmp_path):
    with pytest.raises(ConfigError, match="--run: no arm 'flta'; expected all, pilot or one of reference;"):
        command(tmp_path, "flta")
    done = command(tmp_path, "reference", seeds=2)
    done["arms"]["old arm"] = []
    (tmp_path / "records.json").write_text(json.dumps(done))
    with pytest.raises(ConfigError, match=r"records\.json: no arm 'old arm'"):
        command(tmp_path, "reference")


def test_the_page_shows_what_is_recorded_and_what_is_not(runs, tmp_path):
    text = study.page({})
    assert text.count("not recorded yet") == len(arms.CLAIMS) + len(arms.ARMS) + len(arms.pilot_arms())
    text = study.page(command(tmp_path, "reference", "shuffled memory", seeds=3, together=2))
    assert text.count("not recorded yet") == len(arms.CLAIMS) - 1 + len(arms.ARMS) - 2 + len(arms.pilot_arms())
    row = "| memory beats a memory with permuted keys | 0.100 ± 0.000 | 3 | 0.02 | 0 | **not decided** | 0.000 |"
    assert row in text  # three seeds of twenty
    assert "| shuffled memory | 0.210 ± 0.025 | 0.110 ± 0.025 | 0.310 ± 0.025 | 200 | 1,000 | 0.50 | 3 seeds" in text


def test_the_page_in_the_repository_is_that_of_the_records():
    page = ROOT / "docs/mechanisms.md"
    assert page.read_text() == study.page(study.checked(ROOT / "docs/results/mechanisms.json"))
