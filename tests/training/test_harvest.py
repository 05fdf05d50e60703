"""Harvested paths: a walk from the roots down, rollouts of both seats and of turns, and what is refused."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.plans import product
from jaxmarl_llm.training.harvest import demonstrations, harvest, paths, role_tables
from tests import toys

pytestmark = pytest.mark.usefixtures("numpy_tables")
SEATS = 3


def joint_tree(rng, moves=20):
    """Random tables: every joint action has one to three completions, each at a node of its own."""
    parent = [-1 if not j or rng.random() < 0.2 else int(rng.integers(j)) for j in range(moves)]
    acting = [sorted(rng.permutation(SEATS)[: rng.integers(1, SEATS + 1)].tolist()) for _ in range(moves)]
    seats, node, role = np.full((moves, SEATS), -1), [], []
    rows = rng.permutation(sum(map(len, acting)))
    for j, who in enumerate(acting):
        for seat in who:
            seats[j, seat] = rows[len(node)]
            node.append(j)
            role.append(seat)
    place = np.argsort(rows)
    size = rng.integers(1, 5, (2, len(node)))
    tokens = rng.integers(1, 99, (2, len(node), 5))
    where = rng.permutation(len(node))  # row of the node of each completion
    nodes = SimpleNamespace(tokens=tokens[0], length=size[0], role=np.zeros(len(node), int), task=where % 3)
    nodes.role[where] = np.array(role)[place]
    steps = SimpleNamespace(tokens=tokens[1], length=size[1], node=where)
    return SimpleNamespace(nodes=nodes, steps=steps, transitions=SimpleNamespace(parent=np.array(parent), steps=seats))


def walk(tree, keep):
    """The slow twin: all paths from the roots down, in the order of the ends. Lists of (role, prompt, completion)."""
    moves, out = tree.transitions, {}

    def said(row):
        node = tree.steps.node[row]
        prompt = tree.nodes.tokens[node].tolist()[: tree.nodes.length[node]]
        return int(tree.nodes.role[node]), prompt, tree.steps.tokens[row].tolist()[: tree.steps.length[row]]

    def down(j, before):
        own = before + [said(row) for row in moves.steps[j].tolist() if row != -1]
        if keep[j]:
            out[j] = own
        for child in range(len(moves.parent)):
            if moves.parent[child] == j:
                down(child, own)

    for j in range(len(moves.parent)):
        if moves.parent[j] == -1:
            down(j, [])
    return [out[j] for j in sorted(out)]


@pytest.mark.parametrize("seed", range(20))
def test_paths_equal_a_walk_from_the_roots(seed):
    rng = np.random.default_rng(seed)
    tree = joint_tree(rng)
    keep = rng.random(20) < 0.4
    got = [[(s.role, s.prompt.tolist(), s.completion.tolist()) for s in path] for path in paths(tree, keep)]
    assert got == walk(tree, keep) and len(got) == keep.sum()


def whole(path):
    """The first prompt, and all completions as one sequence."""
    return path[0].prompt, np.concatenate([said.completion for said in path])


def test_a_path_of_a_rollout_is_one_demonstration_that_reads_back_to_the_same_ids():
    team = toys.team()
    rollout = jax.jit(make_rollout(team, toys.relay(), product((2, 1, 2, 1)), Sampling()))
    tree = jax.device_get(rollout(toys.params(team), {}, toys.relay_tasks(2), jax.random.key(0), 0))
    moves = tree.transitions
    keep = moves.valid & (moves.turn == 3) & (moves.rewards["accuracy"][:, 0] > 0.5)
    told, kept = harvest(tree, keep, whole), list(paths(tree, keep))
    assert 0 < len(kept) < (moves.turn == 3).sum() and len(told.length) == len(kept)
    for prompt, size, said, count, path in zip(*told[:4], kept, strict=True):
        assert [s.role for s in path] == [0, 1, 0, 1]
        # A relay prompt begins with the parity of what was said before: the path is the one that was played.
        assert [s.prompt[0] for s in path[1:]] == [65 + s.completion[0] % 2 for s in path[:-1]]
        np.testing.assert_array_equal(prompt[:size], path[0].prompt)
        assert said[:count].tolist() == [t for s in path for t in s.completion]
        assert not said[count:].any() and not prompt[size:].any()


def test_what_cannot_be_learned_from_is_refused():
    tree = joint_tree(np.random.default_rng(0))
    with pytest.raises(ConfigError, match="no path of the rollout is kept"):
        harvest(tree, np.zeros(20, bool), whole)
    for empty, tell in {"prompt": lambda p: ([], [1]), "completion": lambda p: ([1], [])}.items():
        with pytest.raises(ConfigError, match=f"`tell` returned an empty {empty} for kept path 0"):
            harvest(tree, np.ones(20, bool), tell)


def test_a_table_of_a_role_has_its_kept_completions_with_their_nodes():
    rng = np.random.default_rng(1)
    tree = joint_tree(rng)
    keep, worth = rng.random(len(tree.steps.node)) < 0.5, rng.random(len(tree.steps.node))
    team = SimpleNamespace(roles=[SimpleNamespace(name=name) for name in "abc"])
    tables = role_tables(team, tree, keep, {"worth": worth})
    assert sum(len(table["node"]) for table in tables.values()) == keep.sum() and list(tables) == ["a", "b", "c"]
    for index, table in enumerate(tables.values()):
        rows = [row for row in range(len(keep)) if keep[row] and tree.nodes.role[tree.steps.node[row]] == index]
        np.testing.assert_array_equal(table["worth"], worth[rows])
        shown = demonstrations(table, np.arange(len(rows)))
        for row, prompt, size, said, count in zip(rows, *shown[:4], strict=True):
            node = tree.steps.node[row]
            np.testing.assert_array_equal(prompt, tree.nodes.tokens[node])
            np.testing.assert_array_equal(said, tree.steps.tokens[row])
            assert (size, count) == (tree.nodes.length[node], tree.steps.length[row])
        np.testing.assert_array_equal(table["task"][table["node"]], tree.nodes.task[tree.steps.node[rows]])
