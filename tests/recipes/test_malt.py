"""MALT: values, labels and pairs of trees against golden numbers and a slow twin, the data set on disk, whole runs."""

import copy
import dataclasses
import functools
import json
import math
import shutil
from types import SimpleNamespace

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
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import malt
from jaxmarl_llm.rollout.env_runner import RolloutResult
from jaxmarl_llm.runs import loop
from jaxmarl_llm.storage import dataset as offline
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training import evaluation as diagnose
from jaxmarl_llm.training import harvest, step_metrics
from jaxmarl_llm.training.config import SFT, Offline, RunConfig
from jaxmarl_llm.training.drivers import HostDriver
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.supervised import Supervised
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree
from tests import reference, toys

pytestmark = pytest.mark.usefixtures("numpy_tables")
ROLES = malt.ROLES
TEAM = SimpleNamespace(roles=[SimpleNamespace(name=role) for role in ROLES])
ROWS = 64  # of the tables by hand, so that credit is compiled once


# Trees by hand. A task is the list of its root samples; a sample is (reward or None when it is invalid, its samples).


def tree_of(tasks):
    """Tables of ROWS rows. A prompt holds its node's row and a completion its step's, to know them again."""
    nodes, moves = [], []

    def grow(samples, task, turn, parent):
        if not samples:
            return
        nodes.append((turn, task, parent))
        node, rows = len(nodes) - 1, []
        for reward, _ in samples:
            moves.append((node, task, turn, parent, reward))
            rows.append(len(moves) - 1)
        for row, (_, below) in zip(rows, samples):
            grow(below, task, turn + 1, row)

    for task, samples in enumerate(tasks):
        grow(samples, task, 0, -1)
    assert len(moves) <= ROWS
    pad = lambda column, fill: np.array([*column, *[fill] * (ROWS - len(column))], np.int32)
    rows, there = np.arange(ROWS, dtype=np.int32), np.arange(ROWS) < len(moves)
    turn, task, parent = (pad(column, fill) for column, fill in zip(zip(*nodes), (0, 0, -1)))
    zeros, one = np.zeros(ROWS, np.int32), np.ones(ROWS, np.int32)
    known = np.arange(ROWS) < len(nodes)
    table = Nodes(rows[:, None], one, turn, zeros, task, turn, parent, Retrieval.empty(ROWS), known)
    node, task, turn, parent = (pad([m[k] for m in moves], f) for k, f in ((0, 0), (1, 0), (2, 0), (3, -1)))
    steps = Steps(node, rows[:, None], one, there[:, None], np.zeros((ROWS, 1)), ~there, zeros, zeros, there)
    reward = np.zeros((ROWS, 3), np.float32)
    reward[: len(moves)] = [[np.nan if m[4] is None else m[4]] * 3 for m in moves]
    valid = there & ~np.isnan(reward[:, 0])
    rewards = {"accuracy": reward}
    leaf = ~np.isin(rows, parent)
    seats = np.where(there, rows, -1)[:, None]
    return Tree(table, steps, Transitions(seats, parent, task, turn, rewards, leaf, there, valid), Counts(*[0] * 7))


def tables_of(tasks, cfg=malt.Config()):
    tree = tree_of(tasks)
    credited = jax.device_get(assign(cfg.credit, tree, weights=(("accuracy", 1.0),), sizes=Sizes(3, 8, 3)))
    return malt.labelled(cfg, harvest.role_tables(TEAM, tree, credited.valid, {"value": credited.returns}))


def full(leaves):
    """A tree of the refinements' rewards [3][3]; the other moves pay nothing."""
    return [(0.0, [(0.0, [(float(r), []) for r in refinements]) for refinements in verdicts]) for verdicts in leaves]


def test_golden_values_and_labels():
    leaves = [["110", "100", "000"], ["111", "111", "101"], ["000", "000", "010"]]
    tables = tables_of([full(leaves)])
    by = lambda role, name: tables[role][name].reshape(-1)
    np.testing.assert_allclose(by("generator", "value"), [1 / 3, 8 / 9, 1 / 9], atol=1e-6)
    np.testing.assert_allclose(by("verifier", "value"), [2 / 3, 1 / 3, 0, 1, 1, 2 / 3, 0, 0, 1 / 3], atol=1e-6)
    np.testing.assert_array_equal(by("refiner", "value"), [int(c) for v in leaves for r in v for c in r])
    assert by("generator", "label").tolist() == [0, 1, 0]
    assert by("verifier", "label").tolist() == [1, 0, 0, 1, 1, 1, 0, 0, 0]
    assert tables["generator"]["pairs"].tolist() == [[1, 0], [1, 2]]
    assert tables["verifier"]["pairs"].tolist() == [[0, 1], [0, 2]]
    assert tables["refiner"]["pairs"].tolist() == [
        [0, 2],
        [1, 2],
        [3, 4],
        [3, 5],
        [15, 16],
        [17, 16],
        [25, 24],
        [25, 26],
    ]
    assert [len(tables[role]["node"]) for role in ROLES] == [3, 9, 27]


def slow_value(sample):
    """Mean of the known values below; None where nobody knows."""
    reward, below = sample
    if reward is None:
        return None
    known = [v for v in map(slow_value, below) if v is not None]
    if below and not known:
        return None
    return reward + (math.fsum(known) / len(known) if below else 0.0)


def slow_pairs(samples):
    """(positive, negative) ids of siblings; a sample's id is its place in the walk of `tree_of`."""
    out, row = {role: [] for role in ROLES}, [0]

    def walk(siblings, depth):
        first = row[0]
        row[0] += len(siblings)
        values = [slow_value(s) for s in siblings]
        for i, a in enumerate(values):
            for j, b in enumerate(values):
                if a is not None and b is not None and a > 0.5 >= b:
                    out[ROLES[depth]].append((first + i, first + j))
        for _, below in siblings:
            walk(below, depth + 1)

    for task in samples:
        walk(task, 0)
    return {role: sorted(pairs) for role, pairs in out.items()}


reward = st.sampled_from([0.0, 1.0, 1.0, None])
refinements = st.lists(st.tuples(reward, st.just([])), max_size=3)
verdicts = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.0, None]), refinements), max_size=3)
generations = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 1.0, None]), verdicts), min_size=1, max_size=2)


@settings(max_examples=60, deadline=None, database=None)
@given(tasks=st.lists(generations, min_size=1, max_size=2))
def test_ragged_trees_equal_the_slow_twin(tasks):
    """Nodes of any width, episodes that end at any turn, invalid rewards, padding."""
    tables, want = tables_of(tasks), slow_pairs(tasks)
    for role, table in tables.items():
        said = table["tokens"][:, 0]
        assert sorted(map(tuple, said[table["pairs"]].tolist())) == want[role]
        parents = table["node"][table["pairs"]]
        np.testing.assert_array_equal(parents[:, 0], parents[:, 1])
        assert table["label"][table["pairs"][:, 0]].all() and not table["label"][table["pairs"][:, 1]].any()
        np.testing.assert_array_equal(table["label"], table["value"] > 0.5)
        pairs = harvest.demonstrations(table, table["pairs"])
        assert pairs.completions.shape == (len(table["pairs"]), 2, 1)
    flat_values = {}

    def walk(siblings):
        first = len(flat_values)
        flat_values.update({first + i: slow_value(s) for i, s in enumerate(siblings)})
        for _, below in siblings:
            walk(below)

    for task in tasks:
        walk(task)
    seen = {int(s): v for t in tables.values() for s, v in zip(t["tokens"][:, 0], t["value"])}
    assert seen == pytest.approx({row: v for row, v in flat_values.items() if v is not None}, abs=1e-6)


def test_an_episode_may_end_at_its_first_turn_and_equal_siblings_make_no_pairs():
    tables = tables_of([[(1.0, []), (0.0, []), (None, [])], full([["111"] * 3] * 3)])
    assert tables["generator"]["pairs"].tolist() == [[0, 1]]
    assert tables["generator"]["label"].tolist() == [1, 0, 1, 1, 1]
    assert not len(tables["verifier"]["pairs"]) and not len(tables["refiner"]["pairs"])
    nothing = tables_of([[(1.0, [])]])
    assert len(nothing["verifier"]["node"]) == 0 and malt.from_tables(nothing).counts["data/refiner/pairs"] == 0


def test_random_labels_are_as_many_and_pairs_still_have_one_parent():
    tasks = [full([["110", "100", "000"], ["111", "111", "101"], ["000", "000", "010"]])]
    by_value, by_chance = (tables_of(tasks, malt.Config(labels=labels)) for labels in ("value", "random"))
    for role in ROLES:
        assert by_value[role]["label"].sum() == by_chance[role]["label"].sum()
        parents = by_chance[role]["node"][by_chance[role]["pairs"]]
        np.testing.assert_array_equal(parents[:, 0], parents[:, 1])
    assert by_value["refiner"]["label"].tolist() != by_chance["refiner"]["label"].tolist()


def test_batches_of_tasks_are_joined():
    one, other = (tables_of([full([[bits] * 3] * 3)])["refiner"] for bits in ("110", "001"))
    columns = ("prompt", "prompt_length", "task", "node", "tokens", "length", "value")
    wide = other["tokens"].repeat(3, axis=1)
    parts = [{k: one[k] for k in columns}, {k: other[k] for k in columns} | {"tokens": wide}]
    both = offline.joined(parts, tasks=4)
    assert both["node"].tolist() == [n // 3 for n in range(54)] and set(both["task"]) == {0, 4}
    np.testing.assert_array_equal(both["prompt"][both["node"][27:]], other["prompt"][other["node"]])
    assert both["tokens"].shape == (54, 3) and not both["tokens"][:27, 1:].any()
    np.testing.assert_array_equal(both["value"][27:], other["value"])


# The vote


@settings(max_examples=40, deadline=None, database=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_values_of_episodes_are_undiscounted_returns(seed):
    """What evaluations average, on random forests: an unknown episode is left out and does not count as 0."""
    rewards, parent, turn, valid = toys.random_forest(np.random.default_rng(seed))
    moves = SimpleNamespace(parent=parent, turn=turn, valid=valid, played=valid | (parent >= 0))
    total, roots = step_metrics.episode_values(moves, rewards[:, 0])
    want, ok = reference.returns_to_go(rewards[:, :1], parent, valid, 1.0)
    np.testing.assert_array_equal(roots, ok & (parent < 0))
    np.testing.assert_allclose(total[roots], want[roots, 0], rtol=1e-4, atol=1e-5)


def test_the_vote_of_three_takes_the_first_of_the_most_frequent():
    """Refinements' texts by task, right ones marked: one answer twice, all different, an invalid episode left out."""
    said = [[("7", 1.0), ("3", 0.0), ("7", 1.0)], [("2", 0.0), ("5", 1.0), ("4", 0.0)], [("9", None), ("8", 1.0)]]
    chains = [[(0.0, [(0.0, [(right, [])])]) for _, right in task] for task in said]
    tree = tree_of(chains)
    refined = iter([text for task in said for text, _ in task])
    texts = {r: next(refined) for r in np.flatnonzero(tree.steps.valid & (tree.nodes.role[tree.steps.node] == 2))}
    asked = []

    def play(team, params, memory, indices, plan, *rest, **kwargs):
        asked.append((plan.name, kwargs["held_out"]))
        return RolloutResult(tree, str, texts.__getitem__, [], None)

    env_runner = SimpleNamespace(array=False, held_out_size=3, play=play)
    state = SimpleNamespace(params={}, memory={}, step=0)
    seen = diagnose.majority(malt.Config(), TEAM, env_runner, state, 3)
    assert seen == {"eval/accuracy_majority@3": pytest.approx(2 / 3)} and asked == [("flat(3)", True)]


# The data set on disk

SOURCE = {"seed": 0, "env": {"name": "chain", "args": {"terms": 3}}, "sizes": (3, 9), "rate": 0.1}
TABLES = {
    "generator": {"tokens": np.arange(6, dtype=np.int32).reshape(3, 2), "value": np.array([0.5, 1.0, 0.0], np.float32)},
    "refiner": {"pairs": np.zeros((0, 2), np.int32), "label": np.array([True, False])},
}


def test_a_data_set_comes_back_as_it_was_written(tmp_path):
    folder = tmp_path / "run" / "data"
    (tmp_path / "run" / "data.tmp").mkdir(parents=True)  # of a process that was killed
    offline.save(folder, SOURCE, TABLES)
    got = offline.load(folder, SOURCE)
    assert digests(got) == digests(TABLES) and [*got] == [*TABLES]
    assert json.loads((folder / "meta.json").read_text())["rows"]["refiner"] == {"pairs": 0, "label": 2}
    assert [p.name for p in folder.parent.iterdir()] == ["data"]
    with pytest.raises(ConfigError, match="never written over"):
        offline.save(folder, SOURCE, TABLES)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-30])


def flip(path):
    raw = bytearray(path.read_bytes())
    at = raw.index(b"\x05\x00\x00\x00")  # the last token, in the middle of the file
    raw[at] ^= 1
    path.write_bytes(bytes(raw))


def swap(path):
    np.savez(path, **(TABLES["generator"] | {"value": np.zeros(3, np.float32)}))


def forge(path):
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


DAMAGE = [
    ("generator.npz", truncate, "generator.npz: damaged"),
    ("generator.npz", flip, "generator.npz: damaged"),
    ("generator.npz", swap, "generator.npz: damaged .its checksum differs"),
    ("refiner.npz", lambda path: path.unlink(), "refiner.npz: missing"),
    ("refiner.npz", lambda path: path.write_bytes(b""), "refiner.npz: damaged"),
    ("meta.json", truncate, "meta.json, line .*: not valid JSON .*: damaged"),
    ("meta.json", lambda path: path.write_bytes(b"\xff\xfe"), "meta.json, line 1: not UTF-8 .*: damaged"),
    ("meta.json", lambda path: path.write_text("[]"), "meta.json: damaged"),
    ("meta.json", forge, "meta.json: damaged .its checksum differs"),
    ("meta.json", lambda path: path.unlink(), "meta.json: missing"),
]


@pytest.mark.parametrize("name, damage, message", DAMAGE)
def test_a_damaged_data_set_is_one_line(name, damage, message, tmp_path):
    offline.save(tmp_path / "data", SOURCE, TABLES)
    damage(tmp_path / "data" / name)
    with pytest.raises(ConfigError, match=message) as error:
        offline.load(tmp_path / "data", SOURCE)
    assert "\n" not in str(error.value)


def test_a_data_set_of_another_configuration_names_the_key(tmp_path):
    with pytest.raises(ConfigError, match="no data set is there"):
        offline.load(tmp_path / "data", SOURCE)
    offline.save(tmp_path / "data", SOURCE, TABLES)
    for change, message in (({"seed": 1}, r"config\.seed: 0 -> 1"), ({"env": {"name": "duet"}}, "config.env.name")):
        with pytest.raises(ConfigError, match=message):
            offline.load(tmp_path / "data", SOURCE | change)


def test_a_data_set_with_old_names_of_keys_is_that_of_the_new_names(tmp_path):
    cfg = malt.Config(group=2)
    now = malt.source(cfg)
    credit = {{"stats_over": "over", "joint_action_reduce": "reduce"}.get(k, k): v for k, v in now["credit"].items()}
    offline.save(tmp_path / "data", now | {"credit": credit}, TABLES)
    assert digests(offline.load(tmp_path / "data", now, malt.stored_source)) == digests(TABLES)
    other = malt.source(dataclasses.replace(cfg, credit=dataclasses.replace(cfg.credit, stats_over="episodes")))
    with pytest.raises(ConfigError, match=r"config\.credit\.stats_over: 'steps' -> 'episodes'"):
        offline.load(tmp_path / "data", other, malt.stored_source)


# Whole runs

TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
STAGE = 12  # steps of each phase, and between checkpoints: the last of a phase is saved
RECORDED = f"rollouts/step-{STAGE + 1:08}.jsonl.zst"  # the step that the data set is sampled before
TASKS = 16


def config(**changes):
    base = malt.Config(
        steps=STAGE,
        batch=8,
        tasks=TASKS,
        pairs=8,
        team=TeamConfig(backbone=TINY, max_new_tokens=2, remat=False),
        env=EnvConfig("chain", {"protocol": "refine", "terms": 2, "modulus": 2, "largest": 1}, eval_tasks=8),
        # Optimizers whose states differ in structure
        sft=SFT(steps=STAGE, batch=32, samples=64, optimizer=Optimizer("adam", learning_rate=3e-2)),
        imitation=Offline(steps=STAGE, batch=8, optimizer=Optimizer("sgd", learning_rate=1e-2)),
        optimizer=Optimizer(learning_rate=1e-3, max_grad_norm=0.0),
        run=RunConfig(checkpoint_every=STAGE, eval_every=0, eval_greedy=False, log_every=100, tensorboard=False),
    )
    return dataclasses.replace(base, **changes)


@functools.cache
def recipe():
    """Evaluations are left out: rollouts are what takes long to compile."""
    config().check("config")
    made = malt.make(config())
    made.evaluate = lambda state: {"eval/accuracy": 0.5}
    return made


def lines(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "speed/"))} for row in rows]


class Killed(Exception):
    pass


def watched(seen, stop=None):
    """The recipe, which tells what every step left of every role, or ends before step ``stop``."""

    def step(state, logger):
        now = int(state.step)
        if now == stop:
            raise Killed
        state, metrics = type(made).step(made, state, logger)
        seen[now + 1] = {r: (digests(state.params["agents"][r]), digests(state.opt_state[r])) for r in ROLES}
        return state, metrics

    made = copy.copy(recipe())
    made.step = step
    return made


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    workdir, seen = tmp_path_factory.mktemp("straight"), {}
    return loop.fit(config(), watched(seen), workdir), workdir, seen


def test_every_task_has_3_9_and_27_samples(straight):
    _, workdir, _ = straight
    tables = offline.load(workdir / "data", malt.source(config()))
    for role, size in zip(ROLES, (3, 9, 27)):
        t = tables[role]
        np.testing.assert_array_equal(np.bincount(t["task"][t["node"]], minlength=TASKS), np.full(TASKS, size))
        np.testing.assert_array_equal(np.bincount(t["node"]), np.full(TASKS * size // 3, 3))
        assert 0 < t["label"].mean() < 1 and len(t["pairs"]) > 0
        counts = {k: v for k, v in lines(workdir)[STAGE].items() if k.startswith(f"data/{role}/")}
        assert counts == {
            f"data/{role}/nodes": TASKS * size // 3,
            f"data/{role}/steps": TASKS * size,
            f"data/{role}/positive": t["label"].sum(),
            f"data/{role}/pairs": len(t["pairs"]),
        }
    played = tables["verifier"]["prompt"]
    np.testing.assert_array_equal(played[:, 0], np.full(len(played), ord("V")))


def test_the_first_tasks_of_the_tree_are_recorded(straight):
    """Every prompt, completion, value and label of the file is that of the data set, of the same task and branch."""
    _, workdir, _ = straight
    (rollout,) = rollouts.read(workdir)
    assert rollout.path == workdir / RECORDED and rollout.header.plan == "product(3)"
    assert (rollout.header.batch, len(rollout.tasks)) == (8, 4) and rollout.header.updated == ROLES
    assert len(rollout.nodes) == 4 * (1 + 3 + 9) and len(rollout.steps) == 4 * 39
    tables, node_of = offline.load(workdir / "data", malt.source(config())), {n.node: n for n in rollout.nodes}
    for role in ROLES:
        t = tables[role]
        mine = [step for step in rollout.steps if node_of[step.node].role == role]
        paired = set(t["pairs"].reshape(-1).tolist()) if role != "generator" else set()
        rows = [k for k in range(len(t["node"])) if t["task"][t["node"][k]] in [task.task for task in rollout.tasks]]
        rows = [k for k in rows if t["node"][k] < 8 * len(t["task"]) // TASKS]  # of the first batch
        stored = [
            (
                t["prompt"][n][: t["prompt_length"][n]].tolist(),
                t["tokens"][k][: t["length"][k]].tolist(),
                pytest.approx(float(t["value"][k]), abs=1e-6),
                bool(t["label"][k]) or k in paired,
            )
            for k in rows
            for n in [t["node"][k]]
        ]
        assert stored == [(list(node_of[s.node].prompt_ids), list(s.token_ids), s.returns, s.trained) for s in mine]
        assert {s.advantage for s in mine} == {None} and 0 < sum(s.trained for s in mine) < len(mine)


def test_the_generator_is_untouched_by_preferences(straight):
    """Byte-equal, optimizer state included; the other two learn, from a loss of log 2 on."""
    _, workdir, seen = straight
    last = 3 * STAGE
    for step in range(2 * STAGE + 1, last + 1):
        assert seen[step]["generator"][0] == seen[2 * STAGE]["generator"][0]
        assert seen[step]["generator"] == seen[2 * STAGE + 1]["generator"]
    for role in ROLES:
        assert seen[STAGE + 1][role] != seen[STAGE + 2][role]  # imitation moves all three
        assert role == "generator" or seen[last - 1][role] != seen[last][role]
    first = lines(workdir)[2 * STAGE]
    for role in ("verifier", "refiner"):
        assert first[f"dpo/{role}/loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first[f"dpo/{role}/margin"] == pytest.approx(0.0, abs=1e-6)
    assert "dpo/generator/loss" not in first


def test_a_run_that_was_killed_twice_ends_byte_equal(straight, tmp_path, monkeypatch):
    """Once after the data set was written, once in the last phase, each time back to the end of the phase before."""
    state, workdir, _ = straight
    train = []
    play = recipe().env_runner.play
    monkeypatch.setattr(
        recipe().env_runner, "play", lambda *a, **k: (train.append(not k.get("held_out")), play(*a, **k))[1]
    )
    for stop in (STAGE + 2, 2 * STAGE + 2):
        with pytest.raises(Killed):
            loop.fit(config(), watched({}, stop), tmp_path)
        again = stop > STAGE + 2  # the second process records the first batch again, which it did not sample
        assert sum(train) == TASKS // config().batch + again  # sampled by the first process alone
        episodes = (tmp_path / "episodes.md").read_bytes()  # and written by it
        assert b"## Episode 1" in episodes and episodes == (workdir / "episodes.md").read_bytes()
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "checkpoints", kept / "checkpoints")
    resumed = loop.fit(config(), recipe(), tmp_path)
    assert sum(train) == TASKS // config().batch + 1
    assert (tmp_path / RECORDED).read_bytes() == (workdir / RECORDED).read_bytes()
    assert digests(loop.without_shared(resumed)) == digests(loop.without_shared(state))
    assert lines(tmp_path) == lines(workdir)
    with pytest.raises(ConfigError, match="kept/data: no data set is there"):
        loop.fit(config(), recipe(), kept)  # too late to sample it again: the policy has moved on


def test_a_complete_data_set_is_used_by_another_run(straight, tmp_path):
    """Learning rates are no part of what it depends on; a seed is."""
    _, workdir, _ = straight
    other = config(data=str(workdir / "data"), imitation=Offline(steps=1, batch=4), steps=0)
    used, state = malt.make(other), recipe().init(0)
    with Logger(tmp_path, resume_step=None, total_steps=9, primary=False) as logger:
        _, metrics = used.step(used.init(STAGE + 1).replace(step=jnp.int32(STAGE)), logger)
        assert metrics["data/refiner/steps"] == TASKS * 27 and "imitation/nll" in metrics
        with pytest.raises(ConfigError, match=r"config\.seed: 0 -> 1"):
            malt.make(dataclasses.replace(other, seed=1)).step(state.replace(step=jnp.int32(STAGE)), logger)


def test_roles_without_samples_stay_as_they_are():
    """Nobody was ever right: no label, no pair, and no parameter moves."""
    state, table = recipe().init(0), tables_of([full([["000"] * 3] * 3)])["refiner"]
    before = digests((state.params, state.opt_state))
    for rows, advantages in ((np.flatnonzero(table["label"]), (1.0,)), (table["pairs"], (1.0, -1.0))):
        data = dict.fromkeys(ROLES, harvest.demonstrations(table, rows))
        driver = HostDriver(0, Logger(".", resume_step=None, total_steps=0, primary=False))
        learning = Supervised(recipe().team, {}, 32, advantages=advantages)
        state, updated = learning.step(driver, state, 0, data)
        assert learning.metrics("x", updated) == {"bad": 0.0}
        assert digests((state.params, state.opt_state)) == before


def test_evaluations_have_the_vote_beside_them(monkeypatch):
    monkeypatch.setattr(malt, "evaluate", lambda *_: {"one": 0.25})
    monkeypatch.setattr(malt, "majority", lambda *args: {"vote": args[-1]})
    assert malt.make(config(votes=5)).evaluate(None) == {"one": 0.25, "vote": 5}


BAD = [
    ({"group": 1}, "config.group: expected >= 2"),
    ({"pairs": 0}, "config.pairs: expected >= 1"),
    ({"tasks": 0}, "config.tasks: expected >= 1"),
    ({"labels": "rnadom"}, "did you mean 'random'"),
    ({"loss": Loss()}, "config.loss.objective: expected 'dpo'"),
    ({"team": TeamConfig(critic="head")}, "no past policies and no critic"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message):
        config(**change).check("config")


def test_bad_losses_and_environments_without_the_roles():
    for change, message in (
        ({"objective": "ppo"}, "config.loss.objective: unknown value 'ppo'"),
        ({"aggregation": "token"}, r"aggregation: expected 'sum'"),
        ({"beta": 0.0}, "beta: expected > 0"),
        ({"kl_coef": 0.1}, "kl_coef: expected 0 with"),
    ):
        with pytest.raises(ConfigError, match=message):
            dataclasses.replace(malt.Config().loss, **change).check("config.loss")
    for protocol, role in (("verify", "generator"), ("solo", "generator")):
        with pytest.raises(ConfigError, match=f"'chain' has no role '{role}'; MALT needs generator, verifier, refiner"):
            malt.make(config(env=EnvConfig("chain", {"protocol": protocol})))
