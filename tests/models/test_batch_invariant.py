"""Invariant generation: the samples of `decoder.make_policy`, with bits that depend on nothing around them."""

from __future__ import annotations

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.agents.team import Backbone, TeamConfig, make_team
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.generate import by_row, generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.batch_invariant import KEYS, ROWS, attend_to, in_tiles, invariant
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings
from jaxmarl_llm.rollout.host import play as play_host
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.runs.compiled import make_evaluation, make_program
from tests import toys
from tests.generation.test_generate import ENDS, EVERY, FAMILIES, Played, play, prompts, random_params, sample_keys
from tests.models.test_lora import trained

N, G, P, R = 4, 5, 80, 9  # more rows than a tile has, more keys than a block
WIDE = {"vocab_size": 64, "used_vocab": 61, "hidden_size": 96, "intermediate_size": 256}


def bits(got, want):
    """Equal to the last bit, in every leaf."""
    chex.assert_trees_all_equal(jax.device_get(got), jax.device_get(want))


@functools.cache
def model_of(name):
    """The policy, its invariant form and parameters; ``lora``: Qwen2 with an adapter that is not zero."""
    base = make_policy(dataclasses.replace(FAMILIES["qwen2" if name == "lora" else name], **WIDE), remat=False)
    variables = {"params": random_params(base)}
    if name == "lora":
        variables["lora"] = trained(variables["params"], seed=1)
    return base, invariant(base), variables


MODELS = [*FAMILIES, "lora"]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return model_of(request.param)


@pytest.fixture(scope="module")
def qwen2():
    return model_of("qwen2")


@functools.cache
def said(name="qwen2"):
    _, steady, variables = model_of(name)
    return play((steady, variables), *prompts(N, P), sample_keys(N, G), max_new_tokens=R, **ENDS)


@pytest.mark.parametrize("sampling", [EVERY, Sampling(), Sampling(temperature=0.0)], ids=["filters", "plain", "greedy"])
def test_says_what_the_policy_says(model, sampling):
    """Tokens of every family; log-probs but for rounding."""
    base, steady, variables = model
    given = (*prompts(N, P), sample_keys(N, G))
    active = np.arange(N) != 2
    out, want = (
        play((p, variables), *given, active, max_new_tokens=R, sampling=sampling, **ENDS) for p in (steady, base)
    )
    np.testing.assert_array_equal(out.tokens, want.tokens)
    np.testing.assert_array_equal(out.length, want.length)
    np.testing.assert_allclose(out.logprobs, want.logprobs, rtol=0, atol=1e-5)
    assert not out.length[2].any() and (sampling.temperature == 0 or out.logprobs[0].min() < -0.1)


def test_in_bfloat16():
    base = make_policy(dataclasses.replace(FAMILIES["qwen2"], **WIDE, dtype="bfloat16"), remat=False)
    variables, (tokens, length), keys = {"params": random_params(base)}, prompts(N, P), sample_keys(N, G)
    ours, theirs = (play((p, variables), tokens, length, keys, sampling=Sampling()) for p in (invariant(base), base))
    first = ours.tokens[..., 0] == theirs.tokens[..., 0]
    assert first.mean() > 0.9
    np.testing.assert_allclose(ours.logprobs[..., 0][first], theirs.logprobs[..., 0][first], rtol=0, atol=0.1)
    alone = play((invariant(base), variables), tokens[1:2], length[1:2], keys[1:2, 2:3], sampling=Sampling())
    bits(alone, ours.rows((slice(1, 2), slice(2, 3))))


# ---------------------------------------------------------------------------------- no bit depends on what is around


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_alone(name):
    """No other prompt, no sibling."""
    _, steady, variables = model_of(name)
    (tokens, length), keys, all_of = prompts(N, P), sample_keys(N, G), said(name)
    for n, g in [(0, 0), (1, 4), (2, 2), (3, 1)]:
        row, one = slice(n, n + 1), slice(g, g + 1)
        out = play((steady, variables), tokens[row], length[row], keys[row, one], max_new_tokens=R, **ENDS)
        bits(out, all_of.rows((row, one)))


def test_order_of_rows_and_samples(qwen2):
    _, steady, variables = qwen2
    (tokens, length), keys = prompts(N, P), sample_keys(N, G)
    rows, samples = np.array([2, 0, 3, 1]), np.array([4, 1, 0, 3, 2])
    out = play((steady, variables), tokens[rows], length[rows], keys[rows][:, samples], max_new_tokens=R, **ENDS)
    bits(out, said().rows((rows[:, None], samples)))


def test_buckets(qwen2):
    """Of nodes, of prompts and of tokens: 4 to 6, 80 to 200, 9 to 70, where samples go on alone besides."""
    _, steady, variables = qwen2
    (tokens, length), keys, all_of = prompts(N, P), sample_keys(N, G), said()
    wide = np.full((6, 200), 9, np.int32)
    wide[:N, :P] = tokens
    many = jnp.concatenate([keys, keys[:2]])
    out = play((steady, variables), wide, np.append(length, [0, 200]).astype(np.int32), many, np.arange(6) < N, **ENDS)
    bits(out.rows(slice(N)), Played(*(x[..., :8] if x.ndim == 3 else x for x in cut(all_of, 8))))
    out = play((steady, variables), tokens, length, keys, max_new_tokens=70, **ENDS)
    bits(cut(out, R), all_of)
    assert (out.length > R).any()


def cut(out, r):
    """What ``out`` would be with at most ``r`` tokens."""
    return Played(
        out.tokens[..., :r], np.minimum(out.length, r), out.logprobs[..., :r], out.truncated | (out.length > r)
    )


@pytest.mark.parametrize("name", MODELS)
def test_prefilled_is_sampled_is_gone_on_from(name):
    """Keys, values and hidden states of a conversation, whoever computed them: a prompt, a sample, or what goes on."""
    _, steady, variables = model_of(name)
    (tokens, length), keys = prompts(N, P), sample_keys(N, G)
    fixed = {"max_new_tokens": R, "stop_ids": (), "pad_id": 0, "sampling": Sampling(), "keep": True}
    out, prefix, suffix = generate(steady, variables, tokens, length, keys, np.ones(N, bool), **fixed)
    node, sample = 0, 3
    p = int(length[node])
    assert p > KEYS  # the prompt reaches into a second block of keys
    whole = np.concatenate([tokens[node, :p], out.tokens[node, sample]])[None]
    size = np.array([whole.shape[1]], np.int32)
    hidden, cache = jax.jit(steady.prefill)(variables, whole, size)
    bits(jax.tree.map(lambda x: x[0, :p], cache), jax.tree.map(lambda x: x[node, :p], prefix))
    last = size[0] - 1  # the last token is never read
    bits(jax.tree.map(lambda x: x[0, p:last], cache), jax.tree.map(lambda x: x[node, sample, : R - 1], suffix))
    for start in (1, 13, KEYS - 1, KEYS, KEYS + 1, p - 1, int(last)):
        room = jax.tree.map(lambda x, start=start: jnp.pad(x[:, :start], [(0, 0), (0, 120), (0, 0), (0, 0)]), cache)
        rest = np.pad(whole[:, start:], [(0, 0), (0, 30)])
        got, grown = jax.jit(steady.extend)(variables, rest, size - start, np.array([start], np.int32), room)
        bits(got, hidden)
        bits(jax.tree.map(lambda x: x[:, : size[0]], grown), jax.tree.map(lambda x: x[:, : size[0]], cache))


def test_hidden_states_where_keys_go_from_one_block_to_the_next(qwen2):
    """Token by token behind prompts of two lengths: those of a prompt that ends there."""
    _, steady, variables = qwen2
    whole = np.random.default_rng(4).integers(0, 61, (1, KEYS + 8)).astype(np.int32)
    prefill = jax.jit(steady.prefill)
    ends = {p: prefill(variables, whole, np.array([p], np.int32))[0] for p in range(KEYS - 8, KEYS + 9)}
    layers = steady.unstack(variables)
    for p in (KEYS - 8, KEYS - 3):
        size = np.array([p], np.int32)
        _, prefix = prefill(variables, whole[:, :p], size)
        suffix = steady.init_suffix(prefix, 2, KEYS + 8 - p)
        for t in range(KEYS + 8 - p):
            token = np.array([[whole[0, p + t], 7]], np.int32)  # a sibling says something else
            (hidden,), (suffix,) = jax.jit(steady.decode)(layers, (token,), (prefix,), (size,), (suffix,), t)
            bits(hidden[:, 0], ends[p + t + 1])


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1), (2, 2, 2)], ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("name", ["qwen2", "lora"])
def test_meshes_of_eight_devices(name, shape):
    """Three nodes, and what is behind their caches: rows that do not divide are filled up."""
    _, steady, variables = model_of(name)
    mesh = make_mesh(MeshConfig(*shape))
    (tokens, length), keys = prompts(N, P), sample_keys(N, G)
    fixed = {"max_new_tokens": R, "sampling": EVERY, "keep": True, **ENDS}

    def run(variables, put):
        given = tokens[:3], length[:3], keys[:3], np.ones(3, bool)
        first, prefix, suffix = generate(steady, variables, *given, **fixed)
        room = put(jax.tree.map(lambda x: np.pad(x, [(0, 0), (0, 16), (0, 0), (0, 0)]), sharding.to_host(prefix)))
        then = tokens[1:4, :11], np.full(3, 11, np.int32), keys[1:4], np.ones(3, bool)
        return sharding.to_host(
            (first, prefix, suffix, generate(steady, variables, *then, prefix=room, start=length[:3], **fixed)[0])
        )

    alone = run(variables, lambda tree: tree)
    with meshes.use_mesh(mesh):
        placed = sharding.place(mesh, variables)
        meshed = run(placed, lambda tree: jax.tree.map(jnp.asarray, tree))
    bits(meshed[0], alone[0])
    bits(meshed[3], alone[3])
    assert meshed[1][0][0].shape[:2] == (3, P) and meshed[2][0][0].shape[:3] == (3, G, R - 1)
    out = meshed[0]
    bits(Played(out.tokens, out.length, out.logprobs, out.truncated), said(name).rows(slice(3)))


# ------------------------------------------------------------------------------------------------------ whole rollouts


def team_of(roles, max_new_tokens):
    backbone = Backbone(hidden_size=64, intermediate_size=128, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8)
    return make_team(
        TeamConfig(parameter_sharing="shared", backbone=backbone, max_new_tokens=max_new_tokens, batch_invariant=True),
        roles,
    )


def logprobs(tree, tasks):
    """Of the steps of the first ``tasks`` tasks."""
    steps = tree.steps
    mine = steps.valid & (tree.nodes.task[steps.node] < tasks)
    assert mine.any()
    return jax.device_get((steps.tokens[mine], steps.logprobs[mine]))


def test_a_host_rollout():
    """Three turns, each behind what is cached: one task alone, three, and three on eight devices."""
    team = team_of(("a", "b"), max_new_tokens=3)
    params, trees = toys.params(team), []
    for devices, tasks in ((None, [0]), (None, [0, 1, 2]), (8, [0, 1, 2])):
        mesh = None if devices is None else make_mesh(MeshConfig(devices))
        pool = EnvPool(functools.partial(toys.conversation, 3), workers=0)
        placed = params if mesh is None else sharding.place(mesh, params)
        names = [f"task {i}" for i in tasks]
        with meshes.use_mesh(mesh):
            settings = HostSettings(flat(2), Sampling(), max_prompt=512)
            got = play_host(team, placed, pool, names, jax.random.key(5), settings)
        trees.append(got.tree)
        sent, whole = int(got.tree.counts.prompt_tokens), int(got.tree.nodes.length[got.tree.nodes.valid].sum())
        assert sent < whole, (sent, whole)
    one, three, meshed = trees
    bits(logprobs(one, 1), logprobs(three, 1))
    bits(logprobs(three, 3), logprobs(meshed, 3))


def test_an_array_rollout():
    team = team_of(("a", "b"), max_new_tokens=3)
    run = jax.jit(make_rollout(team, toys.relay(2), flat(2), Sampling()))
    trees = []
    for mesh, tasks in ((None, 1), (None, 8), (make_mesh(MeshConfig(8)), 8)):
        with meshes.use_mesh(mesh):
            params = toys.params(team) if mesh is None else sharding.place(mesh, toys.params(team))
            key, version = jax.random.key(2), jnp.int32(0)
            trees.append(sharding.to_host(run(params, None, toys.relay_tasks(tasks), key, version)))
    one, eight, meshed = trees
    bits(logprobs(one, 1), logprobs(eight, 1))
    bits(logprobs(eight, 8), logprobs(meshed, 8))


def test_one_launch_of_several_models_is_a_batch():
    with pytest.raises(ConfigError, match=r"^team\.batch_invariant: expected false with team\.batch_models"):
        TeamConfig(batch_invariant=True, batch_models=True).check("team")
    with pytest.raises(ValueError, match="a policy of invariant generation: expected another where each row"):
        by_row(model_of("lora")[1], ("lora",))


def test_what_is_vmapped_over_seeds_has_none():
    """Its tiles would be one product."""
    payoff = {"payoff": 1.0}
    cfg = magrpo.Config(env=EnvConfig("matrix", eval_tasks=4), reward=payoff, team=TeamConfig(batch_invariant=True))
    for make in (lambda: make_program(magrpo.make(cfg)), lambda: make_evaluation(cfg)):
        with pytest.raises(ConfigError, match=r"config\.team\.batch_invariant: a run compiled as a whole has none"):
            make()


# ------------------------------------------------------------------------------------------------------------- pieces


@given(
    seed=st.integers(0, 2**32 - 1), last=st.integers(0, 3 * KEYS - 2), heads=st.sampled_from([(1, 1), (6, 2), (4, 4)])
)
def test_attention_is_softmax_over_what_it_may_see(seed, last, heads):
    """Against float64, and with other keys behind ``last`` to the bit; the rows are at different positions."""
    rng, (q_heads, kv), size = np.random.default_rng(seed), heads, 3 * KEYS
    q = rng.normal(size=(ROWS, q_heads, 8)).astype(np.float32)
    k, v = rng.normal(size=(2, size, kv, 8)).astype(np.float32)
    seen = rng.integers(0, last + 1, ROWS).astype(np.int32)
    seen[rng.integers(ROWS)] = last
    out = attention(q, k, v, seen)
    behind = np.arange(size) > last
    bits(attention(q, *(np.where(behind[:, None, None], 5.0, x).astype(np.float32) for x in (k, v)), seen), out)
    for row in range(ROWS):
        many = lambda x, row=row: np.repeat(x[: seen[row] + 1].astype(np.float64), q_heads // kv, 1)
        score = np.einsum("qh,sqh->qs", q[row] / np.sqrt(8), many(k))
        weight = np.exp(score - score.max(1, keepdims=True))
        want = np.einsum("qs,sqh->qh", weight / weight.sum(1, keepdims=True), many(v))
        np.testing.assert_allclose(out[row], want, rtol=0, atol=2e-6)


@jax.jit
def attention(q, k, v, last):
    rows = lambda x: jnp.broadcast_to(x, (ROWS, *x.shape))
    return attend_to(q, lambda at: (rows(k.at[at].get(mode="clip")), rows(v.at[at].get(mode="clip"))), last)


@pytest.mark.parametrize("n", [1, ROWS - 1, ROWS, 2 * ROWS + 3])
def test_tiles_are_of_one_size_and_lose_no_row(n):
    sizes = []

    def function(a, b):
        sizes.append(len(a))
        return {"sum": a + b[:, 0], "b": b}

    a, b = jnp.arange(n), jnp.arange(2 * n).reshape(n, 2)
    out = in_tiles(function, a, b)
    bits(out, {"sum": a + b[:, 0], "b": b})
    assert set(sizes) == {ROWS}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_lowers_for_accelerators(qwen2, platform):
    _, steady, variables = qwen2
    fixed = {"max_new_tokens": 4, "sampling": Sampling(), **ENDS}
    run = jax.jit(lambda v, *rows: generate(steady, v, *rows, **fixed).logprobs)
    given = (variables, *prompts(N, P), sample_keys(N, G), np.ones(N, bool))
    text = run.trace(*given).lower(lowering_platforms=(platform,)).as_text()
    # Every product of hidden states with weights is one of a tile.
    wide = re.findall(
        r"stablehlo\.dot_general .*tensor<(\d+(?:x\d+)*)x(?:96|256)xf32>, tensor<(?:96|256)x\d+xf32>", text
    )
    assert wide and all(rows in (f"{ROWS}", f"{ROWS}x1") for rows in wide)
