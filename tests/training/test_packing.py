"""Forests of trained conversations: whose tokens they are, that an update is that of separate nodes, what it sends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.distributed import meshes
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh, use_mesh
from jaxmarl_llm.generation import prefix_cache, prefix_pool
from jaxmarl_llm.generation.decoding import Completions
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.value_head import init_head
from jaxmarl_llm.rollout import host, launches, plans
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.env_runner import Demonstrations
from jaxmarl_llm.training import packing
from jaxmarl_llm.training.learner import Batch, NodeTargets, make_learner, trunk_tokens, update
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.supervised import Supervised
from tests import toys

pytestmark = pytest.mark.usefixtures("numpy_tables")

TASKS = ["how many apples", "which of the four rivers and seas"]


def array(ids):
    return np.array(ids, np.int32)


def said(policy, variables, tokens, length, keys, active, *, max_new_tokens, **_):
    """Stands for generation, which would compile: random letters, often alike. Caches of one number a slot."""
    n, g = keys.shape[:2]
    rng = np.random.default_rng([n, g, int(tokens.sum())])
    shape = (n, g, max_new_tokens)
    size = rng.integers(1, max_new_tokens + 1, (n, g)).astype(np.int32)
    cache = lambda *slots: ((np.zeros((*slots, 1, 1), np.float32),) * 2,)
    words, logprobs = rng.integers(97, 100, shape).astype(np.int32), -rng.random(shape, np.float32)
    return Completions(words, size, logprobs, size == max_new_tokens), cache(n, 512), cache(n, g, max_new_tokens - 1)


@functools.cache
def rollout(name):
    """The tree of a real host rollout with random words."""
    env, plan = {
        "flat": (toys.conversation(4), plans.flat(3)),
        "node_wise": (toys.conversation(3, together=True), plans.node_wise(2)),
        "product": (toys.conversation(3), plans.product(2)),
        "one turn": (toys.conversation(1), plans.flat(4)),
    }[name]
    team = toys.team(shared=name != "node_wise", max_new_tokens=5)
    with EnvPool(lambda: env, workers=0) as pool, pytest.MonkeyPatch.context() as patch:
        each = lambda policy, variables, parts, **fixed: [said(policy, variables, *part[:4], **fixed) for part in parts]
        patch.setattr(launches, "generate_launch", each)
        patch.setattr(launches, "unstacked", lambda policy, variables: None)  # there are no parameters
        slots = lambda *size: ((np.zeros((*size, 1, 1), np.float32),) * 2,)
        patch.setattr(prefix_cache, "_fill", lambda policy, applied, variables, tokens, *_: slots(len(tokens), 512))
        patch.setattr(prefix_pool, "make", lambda cache, *, size, cut: slots(size))
        patch.setattr(prefix_pool, "take", lambda pool, slot, *, cut: slots(*slot.shape))
        patch.setattr(prefix_pool, "put", lambda pool, *_, cut: pool)
        patch.setattr(prefix_pool, "grow", lambda pool, *, more, cut: slots(len(pool[0][0]) + more))
        params = {"shared": {}, "agents": {m.name: {} for m in team.models}}
        key = jax.random.key(0)
        tree = host.play(team, params, pool, TASKS, key, host.HostSettings(plan, Sampling(), max_prompt=512)).tree
    rng = np.random.default_rng(3)
    trained = tree.steps.valid & (rng.random(len(tree.steps.valid)) < 0.8)
    return tree, rng.normal(size=len(trained)).astype(np.float32), trained


def packed(name, *, trees, micro_tokens=4096, loss=Loss(), values=None, model=0):
    tree, advantages, trained = rollout(name)
    smallest = (64, 8) if trees else (512, 8)  # separate nodes in one width: few programs
    return packing.pack(
        tree, model, advantages, trained, loss, micro_tokens=micro_tokens, smallest=smallest, values=values, trees=trees
    )


def trained_lines(name, model=0):
    """{step: (task, prompt, completion)} of what is trained, from the tables."""
    tree, _, trained = rollout(name)
    nodes, steps, out = tree.nodes, tree.steps, {}
    for c in np.flatnonzero(trained):
        n = steps.node[c]
        if nodes.model[n] == model:
            prompt = nodes.tokens[n, : nodes.length[n]].tolist()
            out[int(c)] = int(nodes.task[n]), prompt, steps.tokens[c, : steps.length[c]].tolist()
    return out


# --- the layout ------------------------------------------------------------------

words = st.lists(
    st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), min_size=1, max_size=7)), min_size=1, max_size=12
)


@given(words, st.integers(1, 40))
def test_a_token_sees_its_own_sequence_and_stands_once(lines, most):
    grown = packing.pack_sequences([(task, array(ids)) for task, ids in lines], most)
    assert sorted(i for one in grown for i, _ in one.paths) == list(range(len(lines)))
    for one in grown:
        tokens, position, end = map(array, (one.tokens, one.position, one.end))
        assert len(tokens) <= most or len(one.paths) == 1
        distinct = {tuple(lines[i][1][: t + 1]) for i, _ in one.paths for t in range(len(lines[i][1]))}  # of all tasks
        assert len(tokens) == len(distinct)
        for i, path in one.paths:
            assert tokens[path].tolist() == lines[i][1] and position[path].tolist() == list(range(len(path)))
            for t, at in enumerate(path):
                seen = [j for j in range(len(tokens)) if j <= at < end[j]]
                assert seen == path[: t + 1].tolist()
    for a, b in itertools.pairwise(grown):  # cut only where it has to be
        assert len(a.tokens) + len(b.tokens) > most


@pytest.mark.parametrize("name", ["flat", "product"])
@pytest.mark.parametrize("micro_tokens", [100_000, 300])
def test_batches_hold_the_trained_steps(name, micro_tokens):
    """Walks the mask of every batch: what a target's token sees is the step's prompt and what was said before it."""
    tree, advantages, trained = rollout(name)
    batches, found, rows = packed(name, trees=True, micro_tokens=micro_tokens), [], []
    assert len(batches) == 1 or micro_tokens == 300
    for batch in batches:
        f = batch.forest
        assert batch.tokens.shape[1] == 0 and (batch.weights.sum((1, 2)) > 0).any()
        for row in np.flatnonzero(batch.weights.any((1, 2))):
            size = int((batch.weights[row, 0] > 0).sum())
            end = f.end[0]
            seen = [j for j in range(len(end)) if j <= f.predictor[row, 0, size - 1] < end[j]]
            words = batch.completions[row, 0, :size].tolist()
            context = f.tokens[0, seen].tolist()
            assert context[len(context) - size + 1 :] == words[:-1]
            assert f.position[0, seen].tolist() == [*range(len(seen))]
            for t in range(size):
                assert f.predictor[row, 0, t] == seen[len(seen) - size + t]
            step = batch.rows[row, 0]
            assert trained[step] and tree.steps.tokens[step, :size].tolist() == words
            assert np.array_equal(batch.sampler_logprobs[row, 0], tree.steps.logprobs[step, : batch.weights.shape[2]])
            rows.append(step)
            found.append((context[: len(context) - size + 1], words, float(batch.advantages[row, 0, 0])))
    want = [(prompt, words, float(advantages[c])) for c, (_, prompt, words) in trained_lines(name).items()]
    assert sorted(found) == sorted(want) and len(found) > 10
    assert sorted(rows) == sorted(trained_lines(name))


# --- the update ------------------------------------------------------------------


@functools.cache
def policy():
    return toys.policy(layers=2)


@functools.cache
def own(head=False):
    start = {"params": jax.jit(policy().init)(jax.random.key(0))}
    return start | {"value": init_head(jax.random.key(1), 16, 8)} if head else start


def gradient(batches, own, loss):
    kit, total, value = make_learner(policy(), loss, Optimizer(), Sampling(0.8)), None, 0.0
    for batch in batches:
        total, metrics, _ = kit.accumulate(own, None, batch, total)
        value += float(metrics["loss"])
    return value, total


def assert_same_update(one, two):
    assert one[0] == pytest.approx(two[0], rel=1e-5, abs=1e-6)
    for x, y in zip(jax.tree.leaves(one[1]), jax.tree.leaves(two[1])):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y) + 1e-6


@pytest.mark.parametrize("name,micro_tokens", [("flat", 4096), ("product", 700)])
def test_loss_and_gradients_are_those_of_separate_nodes(name, micro_tokens):
    loss = Loss(tis_clip=2.0, entropy_coef=0.1, aggregation="sequence")
    forest = packed(name, trees=True, micro_tokens=micro_tokens, loss=loss)
    nodes = packed(name, trees=False, micro_tokens=micro_tokens, loss=loss)
    assert all(b.forest is not None for b in forest) and all(b.forest is None for b in nodes)
    assert len(forest) == 1 or micro_tokens == 700
    one, two = (gradient(batches, own(), loss) for batches in (forest, nodes))
    assert abs(one[0]) > 1e-3
    assert_same_update(one, two)


def test_values_of_nodes_go_along_once():
    """A node's value is at its last prompt token, whatever completions the forest holds."""
    tree, loss = rollout("product")[0], Loss(value_coef=0.5)
    rng, n = np.random.default_rng(0), len(tree.nodes.role)
    values = NodeTargets(*(rng.normal(size=n).astype(np.float32) for _ in range(3)))
    values = values.replace(weight=np.abs(values.weight))
    batches = [packed("product", trees=t, micro_tokens=700, loss=loss, values=values) for t in (True, False)]
    assert len(batches[0]) > 1 and batches[0][0].forest is not None
    assert_same_update(*(gradient(b, own(head=True), loss) for b in batches))


@pytest.mark.parametrize("name", ["flat", "node_wise", "product"])
def test_an_update_sends_each_token_of_the_tree_once(name):
    batches, lines = packed(name, trees=True), trained_lines(name).values()
    context = [prompt + words[:-1] for _, prompt, words in lines]
    unique = len({tuple(ids[: t + 1]) for ids in context for t in range(len(ids))})
    assert unique <= sum(map(trunk_tokens, batches)) <= 1.05 * unique
    assert sum(map(trunk_tokens, packed(name, trees=False))) > 1.5 * unique


def test_nothing_is_gained_where_prompts_are_not_shared():
    """Prompts of one turn share what all tasks begin with, until their first tokens differ."""
    assert all(b.forest is not None for b in packed("one turn", trees=True))
    tree, advantages, trained = rollout("one turn")
    tokens = tree.nodes.tokens.copy()
    tokens[:, 0] = 97 + np.arange(len(tokens))
    apart = tree.replace(nodes=tree.nodes.replace(tokens=tokens))
    own_rows = packing.pack(apart, 0, advantages, trained, Loss(), micro_tokens=4096, smallest=(64, 8), trees=True)
    assert own_rows and all(b.forest is None for b in own_rows)
    dpo = Loss(objective="dpo", aggregation="sum")
    assert all(b.forest is None for b in packed("flat", trees=True, loss=dpo))


@pytest.mark.parametrize("micro_tokens", [600, 1200, 5000, 20_000])
def test_one_node_is_one_row_however_many_would_fit(micro_tokens):
    """A micro-batch of 1, 2, 8 or 32 nodes: an empty row would go through the trunk like any other."""
    tree, advantages, trained = rollout("one turn")
    node, model = np.asarray(tree.steps.node), np.asarray(tree.nodes.model)
    alone = trained & (node == node[trained & (model[node] == 0)][0])
    (batch,) = packing.pack(tree, 0, advantages, alone, Loss(), micro_tokens=micro_tokens, smallest=(512, 8))
    assert len(batch.tokens) == 1 and batch.weights.any()


def test_the_update_counts_what_it_sends():
    batches, loss = packed("flat", trees=True), Loss()
    kit = make_learner(policy(), loss, Optimizer(), Sampling(0.8))
    start = jax.tree.map(np.array, own())
    got = update(kit, loss, start, None, kit.init(start), batches)
    assert got.metrics["trunk_tokens"] == sum(map(trunk_tokens, batches)) > 100 and got.metrics["ok"]


# --- samples that nobody played --------------------------------------------------


def written(common, rows=6, own_words=12, said_words=9, seed=0):
    """Samples whose prompts begin with the same ``common`` tokens; lengths differ, and some tokens have no loss."""
    rng = np.random.default_rng(seed)
    told, p = rng.integers(97, 120, common), common + own_words
    tokens, length = np.zeros((rows, p), np.int32), rng.integers(common + 2, p + 1, rows).astype(np.int32)
    for row, n in zip(tokens, length, strict=True):
        row[:n] = np.concatenate([told, rng.integers(97, 120, n - common)])
    size = rng.integers(2, said_words + 1, rows).astype(np.int32)
    mask = (np.arange(said_words) < size[:, None]) & (rng.random((rows, said_words)) < 0.8)
    completions = np.where(np.arange(said_words) < size[:, None], rng.integers(97, 120, mask.shape), 0)
    weights = (mask / mask.sum()).astype(np.float32)[:, None]
    gain, nothing = np.ones(weights.shape, np.float32), np.zeros(weights.shape, np.float32)
    return Batch(tokens, length, completions[:, None].astype(np.int32), weights, gain, nothing), size


def test_samples_that_begin_alike_are_one_forest_with_their_gradient():
    batch, size = written(common=100)
    packed, loss = packing.as_forest(batch, size), Loss(clip_low=None)
    assert packed.forest is not None and packed.forest.tokens.shape == (1, 256) and packed.rows is None
    ids = [[*batch.tokens[i, :n], *batch.completions[i, 0, : size[i] - 1]] for i, n in enumerate(batch.length)]
    assert trunk_tokens(packed) == len({tuple(x[: t + 1]) for x in ids for t in range(len(x))})
    one, two = (gradient([b], own(), loss) for b in (packed, batch))
    assert abs(one[0]) > 1e-3
    assert_same_update(one, two)


def test_samples_stay_rows_where_a_forest_has_not_fewer_tokens():
    for batch, size in (written(common=1), written(common=100, rows=2), written(common=2100)):
        assert packing.as_forest(batch, size) is batch


@pytest.mark.parametrize(
    "case", ["trees", "no trees", "two completions", "a loss of groups", "no hidden_tree", "a mesh", "split models"]
)
def test_which_supervised_steps_share_beginnings(case, monkeypatch):
    batch, size = written(common=100)
    two = case == "two completions"
    said = np.repeat(batch.completions, 2, 1) if two else batch.completions[:, 0]
    lengths = np.stack([size, size], 1) if two else size
    data = Demonstrations(batch.tokens, batch.length, said, lengths)
    monkeypatch.setattr(meshes, "has_split_models", lambda: case == "split models")
    team = toys.team(("a",))
    if case == "no hidden_tree":
        (model,) = team.models
        plain = dataclasses.replace(model, policy=model.policy._replace(hidden_tree=None))
        team = dataclasses.replace(team, models=(plain,))
    found = []
    driver = SimpleNamespace(
        seed=0, host=np.asarray, optimize=lambda models, learners, loss, state, batches: found.append(batches)
    )
    loss = Loss(objective="dpo", aggregation="sum") if case == "a loss of groups" else Loss(clip_low=None)
    where = use_mesh(make_mesh(MeshConfig(data=8))) if case == "a mesh" else contextlib.nullcontext()
    with where:
        gain = (1.0, -1.0) if two else (1.0,)
        learning = Supervised(team, {}, 6, loss, advantages=gain, trees=case != "no trees")
        learning.step(driver, None, 0, {team.roles[0].name: data})
    ((batches,),) = [tuple(x.values()) for x in found]
    assert len(batches) == 1 and (batches[0].forest is not None) == (case == "trees")
