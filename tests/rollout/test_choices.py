"""Choices of where a tree grows: what each names, and Thompson sampling against a twin in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.rollout import choices

K, DRAWS = 8, 6000
NAN = np.nan


@functools.cache
def many(choose):
    return jax.jit(jax.vmap(choose, in_axes=(0, None, None, None, None)))


def drawn(choose, parents, players, rewards, seed=0):
    """Choices (parent, player) [DRAWS] on a tree, whose columns are padded as the engines pad them."""
    n = len(parents)
    pad = lambda x, fill, kind: jnp.array([*x, *[fill] * (K - n)], kind)
    columns = pad(parents, -2, jnp.int32), pad(players, -1, jnp.int32), pad(rewards, NAN, jnp.float32)
    found = many(choose)(jax.random.split(jax.random.key(seed), DRAWS), *columns, jnp.int32(n))
    return [np.broadcast_to(x, (DRAWS,)) for x in found]


TREES = {
    "empty": ([], [], []),
    "one": ([-1], [0], [0.9]),
    "deep": ([-1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [0.2, 0.9, 1.0, 0.1, 0.6]),
    "wide": ([-1, -1, -1, 0, 2, 2], [0, 1, 0, 1, 0, 0], [0.0, 0.1, 0.3, 1.0, 1.0, 1.0]),
    "unknown": ([-1, -1, 0, 0], [1, 1, 0, 1], [NAN, 1.0, NAN, 0.0]),
    "beyond": ([-1, 0, 0], [0, 1, 1], [-3.0, 7.0, 0.5]),
}


def test_what_each_choice_names():
    tree = TREES["deep"]
    assert set(drawn(choices.root(), *tree)[0]) == {-1} and set(drawn(choices.last(), *tree)[0]) == {4}
    assert set(drawn(choices.best(), *tree)[0]) == {2}
    assert set(drawn(choices.best(), *TREES["unknown"])[0]) == {1}
    assert set(drawn(choices.best(), [-1, -1], [0, 0], [NAN, NAN])[0]) == {-1}
    assert set(drawn(choices.best(), [-1, -1], [0, 0], [0.5, 0.5])[0]) == {0}  # the first of equal ones
    where, who = drawn(choices.uniform(3), *tree)
    np.testing.assert_allclose(np.bincount(where + 1, minlength=6) / DRAWS, np.full(6, 1 / 6), atol=0.02)
    np.testing.assert_allclose(np.bincount(who, minlength=3) / DRAWS, np.full(3, 1 / 3), atol=0.02)
    joint = np.bincount(3 * (where + 1) + who, minlength=18) / DRAWS
    np.testing.assert_allclose(joint, np.full(18, 1 / 18), atol=0.015)  # drawn apart
    for make in (choices.root, choices.last, choices.uniform, choices.best, choices.thompson):
        assert set(drawn(make(), *TREES["empty"])[0]) == {-1} and set(drawn(make(), *tree)[1]) == {0}
        assert make(2) is make(2)


def twin(rng, parents, players, rewards, models):
    """One choice, written from the docstring of `thompson`."""
    children = {v: [i for i, p in enumerate(parents) if p == v] for v in range(-1, len(parents))}

    def value(rows):
        fine = [min(max(rewards[i], 0.0), 1.0) for i in rows if not np.isnan(rewards[i])]
        return rng.beta(1 + sum(fine), 1 + len(fine) - sum(fine))

    at = -1
    while True:
        options = [(value(children[at]), None), *((value(children[c]), c) for c in children[at])]
        _, to = max(options, key=lambda option: option[0])
        if to is None:
            break
        at = to
    wrote = [value([i for i in children[at] if players[i] == m]) for m in range(models)]
    return at, int(np.argmax(wrote))


@pytest.mark.parametrize("name", TREES)
def test_thompson_equals_the_twin(name):
    """Frequencies of all (parent, player) pairs, within five standard errors of their difference."""
    tree, rng = TREES[name], np.random.default_rng(1)
    where, who = drawn(choices.thompson(2), *tree)
    size = 2 * (len(tree[0]) + 1)
    ours = np.bincount(2 * (where + 1) + who, minlength=size) / DRAWS
    pairs = [twin(rng, *tree, 2) for _ in range(DRAWS)]
    theirs = np.bincount([2 * (v + 1) + m for v, m in pairs], minlength=size) / DRAWS
    assert len(ours) == size
    limit = 5 * np.sqrt(2 * (theirs * (1 - theirs) + 1e-4) / DRAWS)
    assert (np.abs(ours - theirs) < limit).all(), (ours, theirs)


def test_thompson_by_hand():
    """Without children a node is Beta(1, 1). One child of reward 1 makes "a new child here" Beta(2, 1).

    The child is then preferred with probability E[U^2] = 1/3, for U uniform.
    """
    where, who = drawn(choices.thompson(2), [-1], [0], [1.0])
    assert abs((where == 0).mean() - 1 / 3) < 0.03
    # at the root model 0 has Beta(2, 1) and model 1 has Beta(1, 1)
    assert abs((who[where == -1] == 0).mean() - 2 / 3) < 0.04
    assert abs((who[where == 0] == 0).mean() - 1 / 2) < 0.05
