"""Generation: decode = forward, ends of completions, independence of batch and bucket, padding ids, compiles."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.generation.buckets import bucket, coarse
from jaxmarl_llm.generation.decoding import Decoding, compaction_sizes, gather_lanes, scatter_back, unfinished
from jaxmarl_llm.generation.generate import generate, sample_completions
from jaxmarl_llm.generation.sampling import Sampling, score
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from tests.toys import Compiles

V = 61
LLAMA3 = (
    ("factor", 8.0),
    ("high_freq_factor", 4.0),
    ("low_freq_factor", 1.0),
    ("original_max_position_embeddings", 16),
    ("rope_type", "llama3"),
)
QWEN2 = Config(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
FAMILIES = {
    "qwen2": QWEN2,
    "qwen3": dataclasses.replace(
        QWEN2, family="qwen3", attention_bias=False, qk_norm=True, head_dim=16, tie_embeddings=False
    ),
    "llama": dataclasses.replace(
        QWEN2, family="llama", attention_bias=False, num_kv_heads=1, rope_theta=500.0, rope_scaling=LLAMA3
    ),
}
N, G, P, R = 6, 8, 12, 8  # one shape and few settings for most tests, so that they share programs
ENDS = {"stop_ids": (16, 52, 59), "pad_id": 9}  # ids that these models say often
EVERY = Sampling(temperature=1.1, top_k=30, top_p=0.95, min_p=0.02)


def random_params(policy, seed=0):
    """Every leaf random, norms and biases too; logits have a standard deviation of about 1.5."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape):
        name = path[-1].key
        centre = 1.0 if name == "scale" else 0.0
        fan_in = shape.shape[-1] if name == "embedding" else shape.shape[-2] if name == "kernel" else 16
        gain = 1.5 if name == "embedding" or "lm_head" in str(path) else 1.0
        return jnp.asarray(rng.normal(centre, gain * fan_in**-0.5, shape.shape), shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(policy.init, jax.random.key(0)))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    policy = make_policy(FAMILIES[request.param], remat=False)
    return policy, {"params": random_params(policy)}


@pytest.fixture(scope="module")
def qwen2():
    policy = make_policy(QWEN2, remat=False)
    return policy, {"params": random_params(policy)}


def prompts(n, p, seed=0):
    """Ragged prompts [n p] with a full one and one of length 1; random ids stand in the padding too."""
    rng = np.random.default_rng(seed)
    length = rng.integers(1, p + 1, n).astype(np.int32)
    length[0], length[-1] = p, 1
    return rng.integers(0, V, (n, p)).astype(np.int32), length


def sample_keys(n, g, seed=0):
    return jax.random.wrap_key_data(np.random.default_rng(seed).integers(0, 2**32, (n, g, 2), dtype=np.uint32))


class Played(NamedTuple):
    """`Completions` as numpy arrays."""

    tokens: np.ndarray
    length: np.ndarray
    logprobs: np.ndarray
    truncated: np.ndarray

    def rows(self, index):
        return Played(*(x[index] for x in self))


def play(model, tokens, length, keys, active=None, *, max_new_tokens=R, sampling=EVERY, **ends):
    active = np.ones(len(length), bool) if active is None else active
    ends = {"stop_ids": (), "pad_id": 0, **ends}
    out = generate(*model, tokens, length, keys, active, max_new_tokens=max_new_tokens, sampling=sampling, **ends)
    return Played(*(np.asarray(x) for x in (out.tokens, out.length, out.logprobs, out.truncated)))


@partial(jax.jit, static_argnames=("policy",))
def forced(policy, variables, tokens, length, completions):
    """Teacher-forced logits [N G R V]."""
    return policy.unembed(variables, policy.hidden(variables, tokens, length, completions))


grade = jax.jit(score, static_argnames=("sampling",))


def sampled(out):
    return np.arange(out.tokens.shape[-1]) < out.length[..., None]


# --------------------------------------------------------------------------------------------- decode = forward


def assert_decode_is_forward(model, sampling):
    tokens, length = prompts(N, P)
    out = play(model, tokens, length, sample_keys(N, G), sampling=sampling, **ENDS)
    want = np.asarray(grade(forced(*model, tokens, length, out.tokens), out.tokens, sampling)[0])
    mask = sampled(out)
    np.testing.assert_allclose(out.logprobs[mask], want[mask], atol=1e-5, rtol=0)
    assert not out.logprobs[~mask].any()
    assert mask.all(-1).any() and not mask.all() and out.logprobs[mask].std() > 0.1


def test_decode_equals_forward(family):
    assert_decode_is_forward(family, EVERY)


def test_decode_equals_forward_without_filters(qwen2):
    assert_decode_is_forward(qwen2, Sampling())


def test_greedy_decoding_takes_the_argmax_of_the_forward_pass(qwen2):
    tokens, length = prompts(N, P)
    out = play(qwen2, tokens, length, sample_keys(N, G), sampling=Sampling(temperature=0.0, top_k=3))
    np.testing.assert_array_equal(out.tokens, forced(*qwen2, tokens, length, out.tokens).argmax(-1))
    np.testing.assert_array_equal(out.logprobs, 0.0)
    assert len(np.unique(out.tokens)) > 10


def test_token_t_is_drawn_from_the_key_folded_with_t(qwen2):
    """With a final norm of zero all logits are 0: no filter bites, and only the random number decides."""
    policy, variables = qwen2
    params = {**variables["params"], "norm": {"scale": jnp.zeros((32,))}}
    keys = sample_keys(N, G, seed=3)
    out = play((policy, {"params": params}), *prompts(N, P), keys)
    at = lambda t: jax.vmap(jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, t))))(keys)
    u = jnp.stack([at(t) for t in range(R)], axis=-1)
    np.testing.assert_array_equal(out.tokens, np.floor(np.asarray(u) * V))
    np.testing.assert_allclose(out.logprobs, -np.log(V), atol=1e-5)


# ---------------------------------------------------------------------------------------------- where it ends


def cut(free, stop_ids, pad_id):
    """What a run with stop ids must return, from one that never stopped."""
    tokens, length, logprobs, truncated = (x.copy() for x in free)
    for n, g in np.ndindex(length.shape):
        stops = np.flatnonzero(np.isin(free.tokens[n, g], stop_ids))
        if len(stops):
            length[n, g], truncated[n, g] = stops[0] + 1, False
        tokens[n, g, length[n, g] :], logprobs[n, g, length[n, g] :] = pad_id, 0.0
    return Played(tokens, length, logprobs, truncated)


@pytest.fixture(scope="module")
def endless(qwen2):
    """A run without stop ids: every completion is truncated."""
    out = play(qwen2, *prompts(N, P), sample_keys(N, G))
    assert (out.length == R).all() and out.truncated.all()
    return out


@pytest.fixture(scope="module")
def base(qwen2):
    return play(qwen2, *prompts(N, P), sample_keys(N, G), **ENDS)


def assert_equal(out, want):
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_array_equal(out.length, want.length)
    np.testing.assert_array_equal(out.truncated, want.truncated)
    np.testing.assert_allclose(out.logprobs, want.logprobs, atol=1e-5, rtol=0)


def test_every_kind_of_end(base, endless):
    """Several stop ids: at once, in the middle, exactly at the limit, never. What was sampled counts, a pad id too."""
    assert_equal(base, cut(endless, **ENDS))
    last = np.take_along_axis(base.tokens, base.length[..., None] - 1, axis=-1)[..., 0]
    stopped = np.isin(last, ENDS["stop_ids"])
    np.testing.assert_array_equal(base.truncated, ~stopped)
    assert set(last[stopped].tolist()) == set(ENDS["stop_ids"])
    assert {1, 4, R} <= set(base.length[stopped].tolist())  # at the limit is not truncated
    assert (base.length[~stopped] == R).all() and not stopped.all()
    assert (base.tokens[sampled(base)] == ENDS["pad_id"]).any()


def test_pad_equal_to_a_stop_id(qwen2, endless):
    """Length is what was sampled, never what tokens look like: the stop id counts once, its copies behind it do not."""
    ends = {**ENDS, "pad_id": 52}
    out = play(qwen2, *prompts(N, P), sample_keys(N, G), **ends)
    assert_equal(out, cut(endless, **ends))
    mask, stopped = sampled(out), ~out.truncated
    np.testing.assert_array_equal((np.isin(out.tokens, ends["stop_ids"]) & mask).sum(-1), stopped)
    assert (out.tokens[~mask] == 52).all() and (out.length[stopped] < R).any() and (out.tokens[mask] == 52).any()


def test_one_token_at_most(qwen2, endless):
    stops = tuple(np.unique(endless.tokens[:3, :, 0]).tolist())
    out = play(qwen2, *prompts(N, P), sample_keys(N, G), max_new_tokens=1, stop_ids=stops)
    assert out.tokens.shape == (N, G, 1) and (out.length == 1).all()
    np.testing.assert_array_equal(out.tokens[..., 0], endless.tokens[..., 0])
    np.testing.assert_allclose(out.logprobs[..., 0], endless.logprobs[..., 0], atol=1e-5)
    np.testing.assert_array_equal(out.truncated, ~np.isin(out.tokens[..., 0], stops))
    assert out.truncated.any() and not out.truncated.all()


# ------------------------------------------------------------------- one row's result is a function of that row
#
# The same program gives the same bits. Other shapes are other programs, which may add up in another order: there the
# tokens are the same and log-probs agree to 1e-5.


def test_prompt_padding_is_never_read(qwen2, base):
    """The same program on other ids behind the prompts: the same bits."""
    tokens, length = prompts(N, P)
    other = np.where(np.arange(P) < length[:, None], tokens, (tokens + 7) % V)
    assert (other != tokens).any()
    out = play(qwen2, other, length, sample_keys(N, G), **ENDS)
    assert_equal(out, base)
    np.testing.assert_array_equal(out.logprobs, base.logprobs)


def test_order_of_rows_and_of_samples(qwen2, base):
    tokens, length = prompts(N, P)
    rows, samples = np.random.default_rng(0).permutation(N), np.random.default_rng(1).permutation(G)
    keys = sample_keys(N, G)[rows][:, samples]
    assert_equal(play(qwen2, tokens[rows], length[rows], keys, **ENDS), base.rows((rows[:, None], samples)))


def test_one_sample_alone(qwen2, base):
    """N = G = 1: no other prompt, no sibling."""
    (tokens, length), keys = prompts(N, P), sample_keys(N, G)
    for n, g in np.ndindex(N, G):
        row, one = slice(n, n + 1), slice(g, g + 1)
        assert_equal(play(qwen2, tokens[row], length[row], keys[row, one], **ENDS), base.rows((row, one)))


def test_a_larger_bucket_with_longer_padding(qwen2, base):
    """N 6 -> 8 by inactive rows, of which one has length 0, and P 12 -> 24."""
    (tokens, length), keys = prompts(N, P), sample_keys(N, G)
    wide = np.full((8, 24), 9, np.int32)
    wide[:N, :P] = tokens
    length, keys = np.append(length, [0, 24]).astype(np.int32), jnp.concatenate([keys, keys[:2]])
    out = play(qwen2, wide, length, keys, np.arange(8) < N, **ENDS)
    assert_equal(out.rows(slice(N)), base)
    assert np.isfinite(out.logprobs).all() and not out.length[N:].any()


def test_a_larger_limit(qwen2, base):
    """What had stopped stays the same; what was truncated goes on from the same tokens."""
    out = play(qwen2, *prompts(N, P), sample_keys(N, G), max_new_tokens=R + 5, **ENDS)
    assert out.tokens.shape[-1] == R + 5
    first = Played(out.tokens[..., :R], np.minimum(out.length, R), out.logprobs[..., :R], out.length > R)
    assert_equal(first, base)
    assert (out.tokens[~base.truncated][:, R:] == ENDS["pad_id"]).all()
    assert not out.truncated[~base.truncated].any() and not out.logprobs[~base.truncated][:, R:].any()


# ------------------------------------------------------------------------------------------ unfinished go on alone


def counting(model, found):
    """``model``, which adds how many samples it decodes to ``found`` at each step."""
    policy, variables = model

    def decode(*args):
        jax.debug.callback(lambda: found.append(sum(x.size for x in args[1])))
        return policy.decode(*args)

    return policy._replace(decode=decode), variables


@pytest.mark.parametrize("n,g", [(N, G), (1, 20), (12, 3)])
def test_the_unfinished_alone_say_what_they_say_together(qwen2, n, g):
    """Samples, caches and padding; with an inactive row, and prefixes that are gone on from."""
    (tokens, length), keys, active, sizes = prompts(n, P), sample_keys(n, g), np.arange(n) != 2, []
    run = jax.jit(
        sample_completions, static_argnames=("policy", "max_new_tokens", "sampling", "compact", "keep", *ENDS)
    )
    fixed = {"max_new_tokens": 48, "sampling": EVERY, "keep": True, **ENDS}

    def both(prefix, start, tokens, length):
        out = []
        for compact in (False, True):
            model = counting(qwen2, sizes) if compact else qwen2
            given = None if prefix is None else jax.tree.map(jnp.copy, prefix)
            more = {"prefix": given, "start": start, "compact": compact}
            out.append(jax.device_get(run(*model, tokens, length, keys, active, **more, **fixed)))
        (one, p1, s1), (some, p2, s2) = out
        assert_equal(some, one)
        filled = np.arange(47) < one.length[..., None] - 1
        for a, b in zip(jax.tree.leaves(s1), jax.tree.leaves(s2), strict=True):
            np.testing.assert_allclose(a[filled], b[filled], atol=1e-5)
        chex.assert_trees_all_equal(p1, p2)
        jax.effects_barrier()
        late = np.sort(one.length.max(1) if n > 1 else one.length[0])[::-1]  # of nodes, or of samples of the only one
        due, left = [], [n * g, *(a * b for a, b in compaction_sizes(n, g))]
        fits = [n if n > 1 else g, *(a if n > 1 else b for a, b in compaction_sizes(n, g))]
        for t in range(1, late[0]):  # the step behind t tokens is made for those that say more
            while len(left) > 1 and (late >= t).sum() <= fits[1]:
                left, fits = left[1:], fits[1:]
            due.append(left[0])
        assert sizes == due and len(set(due)) == 1 + len(compaction_sizes(n, g))
        sizes.clear()
        return one, p1

    one, prefix = both(None, None, tokens, length)
    assert n == 1 or not one.length[2].any()
    wide = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, 8), (0, 0), (0, 0)]), prefix)
    both(wide, jnp.asarray(length), *prompts(n, 6, seed=3))


@pytest.mark.parametrize("most", [R, 80])
def test_each_row_ends_at_its_own_limit(qwen2, most):
    """As in a launch of its own with that limit. 80 tokens gather unfinished samples into smaller loops."""
    n = 4
    (tokens, length), keys, limits = prompts(n, P), sample_keys(n, G), np.array([1, 3, most - 1, most], np.int32)
    out = play(qwen2, tokens, length, keys, max_new_tokens=most, limit=limits, **ENDS)
    for row, limit in enumerate(limits):
        one = play(qwen2, *(x[row : row + 1] for x in (tokens, length, keys)), max_new_tokens=int(limit), **ENDS)
        mine = out.rows([row])
        assert (mine.length == one.length).all() and (mine.truncated == one.truncated).all()
        assert (mine.tokens[..., :limit] == one.tokens).all() and (mine.tokens[..., limit:] == ENDS["pad_id"]).all()
        np.testing.assert_allclose(mine.logprobs[..., :limit], one.logprobs, atol=1e-5)
        assert (mine.logprobs[..., limit:] == 0).all()
    assert out.truncated.any() and not out.truncated.all()
    equal = play(qwen2, tokens, length, keys, max_new_tokens=most, limit=np.full((n,), most, np.int32), **ENDS)
    assert_equal(equal, play(qwen2, tokens, length, keys, max_new_tokens=most, **ENDS))


def test_sizes_of_those_that_go_on_alone():
    """Few, each is compiled; none where a quarter of the samples takes as long."""
    sizes = {(1, 1): [], (3, 5): [], (1, 16): [(1, 4)], (2, 8): [(1, 8)], (1, 64): [(1, 16), (1, 4)]}
    sizes |= {(6, 8): [(2, 8), (1, 8)], (64, 8): [(16, 8), (4, 8)], (2, 64): [(1, 64), (1, 16)]}
    assert {of: compaction_sizes(*of) for of in sizes} == sizes


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=9), st.integers(0, 3))
def test_unfinished_names_every_sample_that_goes_on(rows, spare):
    done = np.array(rows)
    going = sorted(zip(*np.nonzero(~done)))
    n = min(len({n for n, _ in going}) + spare, len(rows)) or 1
    g = min(int((~done).sum(1).max()) + spare, 5) or 1
    nodes, samples = (np.asarray(x) for x in unfinished(jnp.asarray(done), (n, g)))
    assert nodes.shape == (n,) and samples.shape == (n, g)
    assert sorted((nodes[i], k) for i in range(n) for k in samples[i] if k >= 0) == going
    numbers = jnp.arange(done.size).reshape(done.shape)
    state = Decoding(jnp.asarray(done), *[numbers] * 5, numbers[:, 0], {"k": numbers[:, :2]}, {"k": numbers})
    picked = gather_lanes(state, nodes, samples)
    np.testing.assert_array_equal(picked.done, samples < 0)  # what stands for none is done
    np.testing.assert_array_equal(np.asarray(picked.length)[nodes >= 0], state.length[nodes[nodes >= 0]])
    chex.assert_trees_all_equal(scatter_back(state, nodes, samples, picked), state)
    after = scatter_back(state, nodes, samples, picked.replace(count=picked.count + 100))
    np.testing.assert_array_equal(after.count, numbers + 100 * ~done)


@pytest.mark.slow
def test_many_rollouts_of_heavy_tailed_lengths_are_a_program_a_bucket_and_wait_for_nothing(qwen2):
    """200 launches of up to 96 tokens: a program for each bucket and one for the layers, then none."""
    rng, compiled, lengths = np.random.default_rng(5), [], []
    shapes = [(bucket(n, 4), bucket(p, 16)) for n, p in zip(rng.integers(1, 9, 200), rng.integers(4, 33, 200))]
    for launch, (n, p) in enumerate([*shapes, *shapes[:40]]):
        tokens, length = prompts(n, p, seed=launch % 200)
        keys = jax.random.wrap_key_data(rng.integers(0, 2**32, (n, 8, 2), dtype=np.uint32))
        with Compiles() as counted:
            out = play(qwen2, tokens, length, keys, max_new_tokens=96, sampling=Sampling(), **ENDS)
        compiled.append(counted.count)
        lengths.extend(out.length.ravel())
    assert sum(compiled[:200]) <= len(set(shapes)) + 3 and not any(compiled[200:])
    assert np.median(lengths) < 32 and max(lengths) == 96  # heavy-tailed
    # Nothing is read on the way: without values there is nothing to read.
    args = (tokens, length, keys, np.ones(len(length), bool))
    said = jax.eval_shape(partial(generate, *qwen2, max_new_tokens=96, sampling=Sampling(), **ENDS), *args)
    assert said.tokens.shape == (len(length), 8, 96)


# ---------------------------------------------------------------------------------------------- inactive rows


def test_inactive_rows_generate_nothing_and_cost_no_steps(qwen2, base):
    policy, variables = qwen2
    decoded, drawn = [], []  # grow each time that the program runs there

    def decode(*args):
        jax.debug.callback(lambda t: decoded.append(int(t)), args[-1])
        return policy.decode(*args)

    def unembed(variables, hidden):
        jax.debug.callback(lambda: drawn.append(1))
        return policy.unembed(variables, hidden)

    model = policy._replace(decode=decode, unembed=unembed), variables
    first = base.rows((slice(None), slice(0, 1)))  # one sample for each prompt
    length = first.length[:, 0]
    assert (length == R).any() and len(set(length[length < 4].tolist())) > 1
    for active in (np.ones(N, bool), length < 4, np.zeros(N, bool)):
        decoded.clear(), drawn.clear()
        out = play(model, *prompts(N, P), sample_keys(N, G)[:, :1], active, **ENDS)
        jax.effects_barrier()
        steps = length[active].max(initial=0)
        assert sorted(decoded) == list(range(steps - 1))  # nothing follows the last token
        assert len(drawn) in (steps, max(steps, 1))  # the first draw may be made for nobody
        assert_equal(out.rows(active), first.rows(active))
        rest = out.rows(~active)
        assert not rest.length.any() and not rest.logprobs.any() and not rest.truncated.any()
        assert (rest.tokens == ENDS["pad_id"]).all()


# ------------------------------------------------------------------------------------------- embedding padding


def test_padding_ids_are_never_sampled():
    """12288 draws although padded rows are a thousand times larger; log-probs are those of the model without them."""
    used = 53
    full, short = dataclasses.replace(QWEN2, used_vocab=used), dataclasses.replace(QWEN2, vocab_size=used)
    policy, cut_policy = make_policy(full, remat=False), make_policy(short, remat=False)
    params = random_params(policy)
    embedding = params["embed"]["embedding"].at[used:].multiply(1e3)
    (tokens, length), keys = prompts(4, 8), sample_keys(4, 64)
    run = partial(play, tokens=tokens % used, length=length, keys=keys, max_new_tokens=48, sampling=Sampling())
    out = run((policy, {"params": {**params, "embed": {"embedding": embedding}}}))
    assert out.tokens.size == 12288 and out.truncated.all()
    assert out.tokens.max() < used and len(np.unique(out.tokens)) == used
    assert_equal(out, run((cut_policy, {"params": {**params, "embed": {"embedding": embedding[:used]}}})))


@pytest.mark.parametrize("tied", [True, False])
def test_padding_ids_have_no_probability(tied):
    cfg = dataclasses.replace(QWEN2, tie_embeddings=tied, used_vocab=53)
    policy, bare = make_policy(cfg), make_policy(dataclasses.replace(cfg, used_vocab=None))
    variables = {"params": random_params(policy)}
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(7, 32)), jnp.float32)
    want = np.asarray(bare.unembed(variables, hidden))
    for form in (variables, policy.unstack(variables)):
        logits = np.asarray(policy.unembed(form, hidden))
        assert (logits[:, 53:] == np.float32(-1e30)).all() and (np.abs(want[:, 53:]) < 100).all()
        np.testing.assert_allclose(logits[:, :53], want[:, :53], atol=1e-5)
        assert not np.exp(np.asarray(grade(logits, np.full(7, 60, np.int32), Sampling())[0])).any()


# --------------------------------------------------------------------------------------------------- compiles


def test_nothing_compiles_after_the_warm_up_of_a_bucket():
    """30 batches of random sizes, padded as host rollouts pad them; then all of them again with other contents."""
    full = make_policy(QWEN2)
    traces = 0

    def prefill(variables, tokens, length):
        nonlocal traces
        traces += 1
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        return full.embed(variables, last), ()

    # A model without layers: what compiles, and when, does not depend on them.
    policy = full._replace(
        prefill=prefill, unstack=lambda v: v, init_suffix=lambda *_: (),
        decode=lambda v, tokens, *_: (tuple(full.embed(v, x) for x in tokens), ((),)),
    )  # fmt: skip
    model = policy, {"params": random_params(full)}
    rng = np.random.default_rng(0)
    sizes = [(int(rng.integers(1, 7)), int(rng.integers(1, 49))) for _ in range(30)]
    seen = set()
    with Compiles() as compiles:
        for seed, (n, p) in enumerate(sizes * 2):
            rows, width = bucket(n, 4), bucket(p, 32)
            tokens, length = prompts(rows, width, seed)
            before, programs = traces, compiles.count
            out = play(
                model, tokens, np.minimum(length, p), sample_keys(rows, 2, seed), np.arange(rows) < n, max_new_tokens=3,
                stop_ids=(3, 17), sampling=Sampling(),
            )  # fmt: skip
            assert out.length[:n].all() and not out.length[n:].any()
            new = (rows, width) not in seen
            seen.add((rows, width))
            assert traces - before == new, (seed, rows, width)
            assert (compiles.count > programs) == new, (seed, rows, width)
    assert seen == {(4, 32), (6, 32), (4, 48), (6, 48)}


@given(st.integers(1, 10**6), st.integers(1, 64))
def test_coarse_sizes_are_a_factor_of_four_apart(n, smallest):
    size = coarse(n, smallest)
    assert size >= n and size in [smallest * 4**i for i in range(12)] and (size == smallest or size < 4 * n)


@given(st.integers(0, 100_000), st.integers(1, 100))
def test_bucket(n, smallest):
    size = bucket(n, smallest)
    assert size >= n and size >= smallest
    if n > smallest:
        assert 3 * (size - n) < size  # less than a third is padding
    assert bucket(size, smallest) == size
    assert size <= bucket(n + 1, smallest)
    octaves = [smallest * 2**i for i in range(18)]
    assert size in octaves or size in [x + (x + 1) // 2 for x in octaves]


def test_bucket_has_two_sizes_an_octave():
    assert sorted({bucket(n) for n in range(1, 65)}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert sorted({bucket(n, 32) for n in range(0, 257)}) == [32, 48, 64, 96, 128, 192, 256]
    assert sorted({bucket(n, 5) for n in range(0, 41)}) == [5, 8, 10, 15, 20, 30, 40]
