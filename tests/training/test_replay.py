"""Replay: its weights by hand, its ring by a list, its gradient by differentiation of the formula, steps to the bit."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.keys import is_documented
from jaxmarl_llm.training import replay
from jaxmarl_llm.training.learner import Batch
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.replay import Replay, Ring, Samples
from tests.training.relay import make, steps

SGD = Optimizer(name="sgd", learning_rate=0.5, max_grad_norm=0.0)
SMALL = {"size": 6, "samples": 6, "prompt_tokens": 8, "bound": 0.4}


def samples(value, length, prompt=4, response=3, seed=0, model=0):
    """Rows with random tokens; the number of a row is its first prompt token."""
    rng, n = np.random.default_rng(seed), len(value)
    tokens = rng.integers(1, 200, (n, prompt))
    tokens[:, 0] = np.arange(n)
    return Samples(
        prompt=tokens.astype(np.int32),
        prompt_length=np.full(n, prompt, np.int32),
        tokens=rng.integers(1, 200, (n, response)).astype(np.int32),
        length=np.array(length, np.int32),
        logprobs=-rng.random((n, response), np.float32),
        value=np.array(value, np.float32),
        model=np.full(n, model, np.int32),
    )


def test_importance_weights_by_hand():
    """Weights min(e^(log pi - log mu), truncate); the last token is masked and holds NaN."""
    shape = (1, 1, 4)
    mu = np.array([-1.0, -2.0, -0.5, np.nan]).reshape(shape)
    pi = np.array([-1.5, -1.0, -0.5, np.nan]).reshape(shape)
    weights = np.array([0.25, 0.25, 0.5, 0.0]).reshape(shape)
    none = np.zeros((1, 2), np.int32)
    of = lambda truncate: replay.importance_weighted(
        Batch(none, np.array([2]), np.zeros(shape, np.int32), weights, np.full(shape, 0.4), mu), pi, truncate
    )
    batch, weight = of(1.5)
    got = np.asarray(batch.advantages).ravel()[:3]
    np.testing.assert_allclose(got, [0.4 * math.exp(-0.5), 0.4 * 1.5, 0.4], rtol=1e-6)  # e > 1.5
    assert float(weight) == pytest.approx(0.25 * math.exp(-0.5) + 0.25 * 1.5 + 0.5)
    np.testing.assert_allclose(np.asarray(batch.sampler_logprobs).ravel()[:3], pi.ravel()[:3])
    imitation, one = of(None)
    np.testing.assert_allclose(imitation.advantages, 0.4)
    assert float(one) == 1.0


def test_batches_by_hand():
    """Two of three samples count: 2 + 3 tokens share the weight 1, and advantages are R - b."""
    rows = samples([0.9, 7.0, 0.6], [2, 1, 3])
    (batch,) = replay.batches_of(rows, np.array([True, False, True]), 0.5, Loss(aggregation="token"), 1024)
    weights = np.asarray(batch.weights)[:, 0]
    assert weights.shape[0] == 3 and not weights[2].any()  # padded to the bucket of 2 samples, at most 3
    np.testing.assert_allclose(weights[:2], [[0.2, 0.2, 0.0], [0.2, 0.2, 0.2]])
    np.testing.assert_allclose(np.asarray(batch.advantages)[:2, 0, 0], [0.4, 0.1], rtol=1e-6)
    np.testing.assert_array_equal(batch.completions[:2, 0], rows.tokens[[0, 2]])
    np.testing.assert_array_equal(batch.tokens[:2], rows.prompt[[0, 2]])
    several = replay.batches_of(rows, np.array([True, False, True]), 0.5, Loss(aggregation="token"), 8)
    assert [b.weights.shape[0] for b in several] == [1, 1, 1]
    assert replay.batches_of(rows, np.zeros(3, bool), 0.5, Loss(), 1024) == []


def test_the_ring_is_a_list_of_the_last_good_samples():
    """Many pushes, some of more rows than the ring holds, against a deque; rows that are too long are left out."""
    rng, size = np.random.default_rng(0), 4
    ring = Ring(jax.tree.map(lambda x: jnp.zeros((size, *x.shape[1:]), x.dtype), samples([0.0], [1])), jnp.int32(0))
    kept, pushed, order = collections.deque(maxlen=size), 0, set()
    for trial in range(12):
        rows = samples(rng.random(9), rng.integers(1, 4, 9), prompt=4 + trial % 3, response=3 + trial % 2, seed=trial)
        rows = rows.replace(prompt_length=rng.integers(3, 4 + trial % 3 + 1, 9).astype(np.int32))
        rows = rows.replace(length=rng.integers(1, 3 + trial % 2 + 1, 9).astype(np.int32))
        trained = rng.random(9) < 0.9
        ring, added, too_long = replay.push(ring, rows, trained, 0.2)
        good = [i for i in range(9) if trained[i] and rows.value[i] > 0.2]
        wanted = len(good)
        good = [i for i in good if rows.prompt_length[i] <= 4 and rows.length[i] <= 3]
        for i in good:
            kept.append((rows.prompt[i, :4].tolist(), rows.tokens[i, :3].tolist(), float(rows.value[i])))
        pushed += len(good)
        order.add(len(good) > size)
        assert int(added) == len(good) and int(ring.count) == pushed and int(too_long) == wanted - len(good)
        at = [(pushed - len(kept) + k) % size for k in range(len(kept))]
        table = ring.samples
        got = [(table.prompt[i].tolist(), table.tokens[i].tolist(), float(table.value[i])) for i in at]
        assert got == list(kept)
        drawn, stored = replay.draw(jax.random.key(trial), ring, 4)
        assert int(stored.sum()) == min(4, len(kept))
        said = [tuple(row.tolist()) for row in np.asarray(drawn.prompt)[np.asarray(stored)]]
        assert len(set(said)) == len(said) and set(said) <= {tuple(row) for row, _, _ in kept}
    assert order == {True, False}


def test_each_stored_sample_is_drawn_equally_often():
    ring = Ring(samples([1.0] * 5, [1] * 5), jnp.int32(4))  # the fifth row holds none
    keys_of = jax.random.split(jax.random.key(1), 3000)
    drawn, stored = jax.vmap(lambda key: replay.draw(key, ring, 2))(keys_of)
    seen = np.bincount(np.asarray(drawn.prompt)[..., 0].ravel(), minlength=5) / 3000
    assert stored.all() and seen[4] == 0 and np.abs(seen[:4] - 0.5).max() < 5 * math.sqrt(0.25 / 3000)


@pytest.mark.parametrize("off", ({"coef": 0.0}, {"bound": math.inf}, {"truncate": 0.0}))
def test_replay_that_is_off_is_the_plain_run_to_the_bit(off, tmp_path):
    """``truncate=0`` weighs every replayed token 0, and does go through the update."""
    state, _, metrics = steps(make({"update": Replay(**{**SMALL, **off})}, optimizer=SGD), tmp_path, 3)
    plain, _, _ = steps(make(optimizer=SGD), tmp_path, 3)
    assert digests(state.params) == digests(plain.params)
    assert (metrics[-1]["replay/stored"] > 0) == ("bound" not in off)
    assert ("replay/weight" in metrics[-1]) == ("truncate" in off)


def by_hand(recipe, before, tool):
    """Gradient of the docstring's formula by model, with every sample of the ring: JAX differentiates plain sums."""
    step, ring = recipe.phases[1].step, jax.tree.map(np.asarray, before.kept["replay"])
    rows, count = ring.samples, min(int(ring.count), tool.size)
    out = {}
    for index, model in enumerate(step.team.models):
        mine = [i for i in range(count) if rows.model[i] == index]
        tokens = sum(int(rows.length[i]) for i in mine)

        def logprob(own, i, model=model):
            hidden = model.policy.hidden(
                own, rows.prompt[i][None], rows.prompt_length[i][None], rows.tokens[i][None, None]
            )
            scores = jax.nn.log_softmax(model.policy.unembed(own, hidden)[0, 0])
            return jnp.array([scores[t, rows.tokens[i, t]] for t in range(int(rows.length[i]))])

        own, total = before.params["agents"][model.name], None
        ratios = []
        for i in mine:
            ratio = np.exp(np.asarray(logprob(own, i)) - rows.logprobs[i, : rows.length[i]])
            ratios += ratio.tolist()
            factor = np.minimum(ratio, tool.truncate) * (rows.value[i] - tool.bound) / tokens
            grad = jax.grad(lambda own, i=i, factor=factor: -tool.coef * jnp.sum(factor * logprob(own, i)))(own)
            total = grad if total is None else jax.tree.map(jnp.add, total, grad)
        assert min(ratios) < tool.truncate < max(ratios)
        out[model.name] = total
    return out


def test_the_gradient_is_that_of_the_formula(tmp_path):
    tool = Replay(**SMALL, coef=0.7, truncate=1.2)
    recipe = make({"update": tool}, optimizer=SGD)
    before, _, _ = steps(recipe, tmp_path, 2)
    ring = before.kept["replay"]
    other = np.random.default_rng(0).normal(0, 0.5, ring.samples.logprobs.shape).astype(np.float32)
    ring = ring.replace(samples=ring.samples.replace(logprobs=ring.samples.logprobs + other))  # as of an older policy
    before = before.with_kept({"replay": ring})
    copy = lambda state: jax.tree.map(jnp.copy, state)
    wanted = by_hand(recipe, before, tool)
    with_replay, _, metrics = steps(recipe, tmp_path, state=copy(before))
    plain, _, _ = steps(make(optimizer=SGD), tmp_path, state=copy(before.with_kept({})))
    assert metrics[0]["logprob_diff"] < 1e-3  # replayed tokens count as sampled by the policy of the update
    for name, gradient in wanted.items():
        got = jax.tree.map(lambda a, b: (b - a) / 0.5, with_replay.params["agents"][name], plain.params["agents"][name])
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(gradient), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-6)
        assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-3


def test_the_ring_holds_good_trained_completions_of_the_steps(tmp_path):
    recipe = make({"update": Replay(**{**SMALL, "size": 64})})
    state, results, metrics = steps(recipe, tmp_path, 2)
    wanted = []
    for result in results:
        nodes, table = result.tree.nodes, result.tree.steps
        for c in np.flatnonzero(result.trained):
            if result.credited.returns[c] > 0.4:
                n, size = table.node[c], table.length[c]
                prompt, said = nodes.tokens[n, : nodes.length[n]].tolist(), table.tokens[c, :size].tolist()
                wanted.append((prompt, said, table.logprobs[c, :size].tolist(), float(result.credited.returns[c])))
    ring = jax.tree.map(np.asarray, state.kept["replay"])
    rows, got = ring.samples, []
    for i in range(int(ring.count)):
        p, r = rows.prompt_length[i], rows.length[i]
        got.append((rows.prompt[i, :p].tolist(), rows.tokens[i, :r].tolist(), rows.logprobs[i, :r].tolist()))
        got[-1] += (float(rows.value[i]),)
    assert got == wanted and 0 < len(got) < sum(int(r.trained.sum()) for r in results)
    assert metrics[-1]["replay/stored"] == len(got) and 0 < metrics[-1]["replay/added"] < len(got)
    assert all(is_documented(name) for name in metrics[-1] if name.startswith("replay/"))


@pytest.mark.slow
def test_a_resumed_run_is_equal_to_the_bit(tmp_path):
    def run(count, folder):
        recipe = make({"update": Replay(**{**SMALL, "samples": 3})}, steps=count)
        return fit(recipe.cfg, recipe, folder)

    straight = run(4, tmp_path / "straight")
    run(2, tmp_path / "twice")
    assert digests(straight) == digests(run(4, tmp_path / "twice"))
    assert int(straight.kept["replay"].count) > 6  # the ring is full


@pytest.mark.slow
def test_a_compiled_run_takes_the_same_steps(tmp_path):
    recipe = make({"update": Replay(**{**SMALL, "samples": 3})}, optimizer=SGD)
    state, _, metrics = steps(recipe, tmp_path, 4)
    compiled, figures = jax.jit(make_program(recipe).run)(recipe.cfg.seed)
    for ours, theirs in zip(jax.tree.leaves(compiled.kept), jax.tree.leaves(state.kept), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    for ours, theirs in zip(jax.tree.leaves(compiled.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-4)
    np.testing.assert_allclose(figures["replay/weight"][-1], metrics[-1]["replay/weight"], atol=1e-4)


def test_bad_settings_are_refused_in_one_line():
    for settings, line in {
        ("size", 0): r"^Replay.size: expected >= 1, got 0$",
        ("samples", 2000): r"^Replay.samples: expected <= 1024, got 2000$",
        ("truncate", -1.0): r"^Replay.truncate: expected >= 0, got -1.0$",
        ("bound", math.nan): r"^Replay.bound: expected a number, got nan$",
    }.items():
        with pytest.raises(ConfigError, match=line):
            Replay(**dict([settings]))
    learn_all = {"update": Replay(), "trainable_roles": lambda rl_step: np.ones(2, bool)}
    with pytest.raises(
        ConfigError, match=r"^config.recipe: expected roles that all learn .* with replay of good samples$"
    ):
        make(learn_all).init(0)
