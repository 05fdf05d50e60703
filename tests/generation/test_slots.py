"""Nodes that enter and leave a decoding loop have the completions and caches of a launch, token for token."""

import jax
import numpy as np
import pytest

from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.generation.generate import PromptRows, generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.generation.slots import CHUNK, SlotLoop
from jaxmarl_llm.models.batch_invariant import invariant
from jaxmarl_llm.models.decoder import make_policy
from tests.generation.test_generate import ENDS, EVERY, FAMILIES, random_params
from tests.generation.test_generate import prompts as make_prompts
from tests.toys import Compiles

NODES, PROMPT, LIMIT = 14, 12, 8


def nodes_of(groups, limits=(LIMIT,)):
    """Prompts, and of each node its length, its keys [G] and its limit, for numbers of samples in turn."""
    tokens, length = make_prompts(NODES, PROMPT)
    out = []
    for i in range(NODES):
        group = groups[i % len(groups)]
        keys = jax.random.split(jax.random.key(100 + i), group)
        out.append((tokens[i], int(length[i]), keys, limits[i % len(limits)]))
    return out


def launched(policy, variables, nodes, sampling):
    """Of each node (tokens, length, log-probs, truncated), from a launch of the nodes with equally many samples."""
    out = {}
    for group in {len(keys) for _, _, keys, _ in nodes}:
        these = [i for i, node in enumerate(nodes) if len(node[2]) == group]
        tokens, length, keys, limit = (np.stack([np.asarray(nodes[i][k]) for i in these]) for k in (0, 1, 1, 3))
        keys = jax.numpy.stack([nodes[i][2] for i in these])
        got = generate(
            policy,
            variables,
            tokens,
            length,
            keys,
            np.ones(len(these), bool),
            limit=limit,
            max_new_tokens=LIMIT,
            sampling=sampling,
            keep=True,
            **ENDS,
        )
        for row, i in enumerate(these):
            out[i] = jax.tree.map(lambda x, row=row: np.asarray(x)[row], got)
    return out


def flown(policy, variables, nodes, sampling, lanes, finished=1):
    """As `launched`, through a loop: a node enters as soon as there is room."""
    loop = SlotLoop(policy, variables, lanes=lanes, max_new_tokens=LIMIT, sampling=sampling, **ENDS)
    waiting, out, most = list(range(len(nodes))), {}, 0
    while waiting or loop.taken:
        for group in {len(node[2]) for node in nodes}:
            these = [i for i in waiting if len(nodes[i][2]) == group][: min(2, loop.room(group).sum())]
            if these:
                size = bucket(len(these), 4)
                pad = lambda x, size=size: np.concatenate([x, np.repeat(x[-1:], size - len(x), 0)])
                tokens, length, limit = (pad(np.stack([np.asarray(nodes[i][k]) for i in these])) for k in (0, 1, 3))
                keys = jax.numpy.stack([nodes[i][2] for i in these + these[-1:] * (size - len(these))])
                active = np.arange(size) < len(these)
                loop.enter(these, PromptRows(tokens, length, keys, active, limit=limit))
                waiting = [i for i in waiting if i not in these]
        most = max(most, loop.taken)
        for left in loop.advance(finished):
            for row, i in enumerate(left.tickets):
                assert i not in out
                out[i] = jax.tree.map(
                    lambda x, row=row: np.asarray(x)[row], (left.completions, left.prefix, left.suffix)
                )
    return out, most


def check_equal(nodes, want, got):
    assert set(got) == set(want) == set(range(len(nodes)))
    for i, (_, length, keys, _) in enumerate(nodes):
        (a, prefix_a, suffix_a), (b, prefix_b, suffix_b) = want[i], got[i]
        for name in ("tokens", "length", "truncated"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=f"{name} of node {i}")
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
        for x, y in zip(jax.tree.leaves(prefix_a), jax.tree.leaves(prefix_b), strict=True):
            np.testing.assert_allclose(x[:length], y[:length], atol=2e-5)
        for x, y in zip(jax.tree.leaves(suffix_a), jax.tree.leaves(suffix_b), strict=True):
            for g in range(len(keys)):
                filled = a.length[g] - 1
                np.testing.assert_allclose(x[g, :filled], y[g, :filled], atol=2e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_nodes_have_the_completions_and_caches_of_a_launch(name):
    policy = make_policy(FAMILIES[name], remat=False)
    variables, nodes = {"params": random_params(policy)}, nodes_of((4,), (LIMIT, 3, 1))
    want = launched(policy, variables, nodes, EVERY)
    got, most = flown(policy, variables, nodes, EVERY, lanes=12)
    assert most == 3
    check_equal(nodes, want, got)
    lengths = np.concatenate([want[i][0].length for i in want])
    assert len(set(lengths.tolist())) > 4, "completions of one length would leave together"


def never_ending(loop, limits):
    """Enter nodes 0, 1, ... with ``limits``."""
    for i, limit in limits.items():
        tokens, length, keys, _ = nodes_of((2,))[i]
        pad = lambda x: np.repeat(np.asarray(x)[None], 4, 0)
        rows = PromptRows(pad(tokens), pad(length), jax.numpy.stack([keys] * 4), np.arange(4) < 1, limit=pad(limit))
        loop.enter([i], rows)


@pytest.mark.parametrize("last", [LIMIT, 4 * CHUNK])
def test_the_loop_stops_before_a_finished_node_is_lost_or_late(last):
    """Node 0 is finished long before node 2, for which the loop could wait. Its first column would be written again."""
    policy = make_policy(FAMILIES["qwen2"], remat=False)
    variables, fixed = {"params": random_params(policy)}, {"stop_ids": (10**6,), "pad_id": 9, "sampling": Sampling()}
    loop = SlotLoop(policy, variables, lanes=6, max_new_tokens=last, **fixed)
    never_ending(loop, {0: LIMIT, 1: 1})
    assert [left.tickets for left in loop.advance(1)] == [[1]]
    never_ending(loop, {2: last})
    (left,) = loop.advance(2)
    assert left.tickets == [0] and loop.taken == 1 and int(loop.time) == 1 + min(last - 1, CHUNK)
    tokens, length, keys, _ = nodes_of((2,))[0]
    alone = generate(
        policy, variables, tokens[None], np.array([length]), keys[None], np.ones(1, bool), max_new_tokens=LIMIT, **fixed
    )
    np.testing.assert_array_equal(left.completions.tokens[0, :, :LIMIT], alone.tokens[0])
    assert [left.tickets for left in loop.advance(1)] == [[2]] and loop.taken == 0


def test_tables_of_several_widths_are_decoded_in_one_loop():
    policy = make_policy(FAMILIES["qwen2"], remat=False)
    variables, nodes = {"params": random_params(policy)}, nodes_of((4, 1))
    got, most = flown(policy, variables, nodes, Sampling(), lanes=8, finished=3)
    assert most > 8 // 4 + 1
    check_equal(nodes, launched(policy, variables, nodes, Sampling()), got)


def test_tables_are_cut_to_a_quarter_once_few_nodes_stay(monkeypatch):
    """A lull of one call of `advance` moves nothing, and nodes that enter a small table make it whole again."""
    policy = make_policy(FAMILIES["qwen2"], remat=False)
    variables, nodes = {"params": random_params(policy)}, nodes_of((1,))
    loop = SlotLoop(
        policy, variables, lanes=16, max_new_tokens=4 * LIMIT, sampling=Sampling(), stop_ids=(10**6,), pad_id=9
    )

    def enter(*limits):
        tokens, length, keys, _ = zip(*nodes[: len(limits)])
        arrays = np.stack(tokens), np.array(length), jax.numpy.stack(keys), np.ones(len(limits), bool)
        loop.enter(range(len(limits)), PromptRows(*arrays, limit=np.array(limits)))

    sizes, resize = [], loop._resize
    monkeypatch.setattr(loop, "_resize", lambda group, size: (resize(group, size), sizes.append(size)))
    enter(1, 1, 1, 2, 3, 4, 5)
    out = [loop.advance(1) for _ in range(2)]
    assert sizes == [16, 16], "four nodes stay, for the first time"
    enter(5, 5)
    out += [loop.advance(1) for _ in range(3)]
    assert sizes[2:] == [16, 16, 4]
    enter(4, 4, 4)
    assert sizes[5:] == [16], "two and three nodes have no room in a quarter"
    while loop.taken:
        out += [loop.advance(1)]
    assert sorted(t for lefts in out for left in lefts for t in left.tickets) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6]


def test_a_policy_that_cannot_begin_at_different_times_says_so():
    policy = make_policy(FAMILIES["qwen2"], remat=False)
    assert policy.decode_slots is not None and invariant(policy).decode_slots is None


def test_a_loop_is_compiled_once():
    """One program of the loop, whatever nodes are in it."""
    policy = make_policy(FAMILIES["qwen2"], remat=False)
    variables, nodes = {"params": random_params(policy)}, nodes_of((2,))
    flown(policy, variables, nodes, Sampling(), lanes=6)
    with Compiles() as compiles:
        flown(policy, variables, nodes[::-1], Sampling(), lanes=6)
    assert compiles.count == 0
