"""Prompts that go on from what is cached: the same samples, each token sent once, by a count of all beginnings."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.generation import prefix_cache
from jaxmarl_llm.generation.generate import by_row, fill, generate
from jaxmarl_llm.generation.prefix_cache import Prefixes
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import decoder
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.lora import init_lora, join_adapters
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.rollout import plans
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.types import Model, Retrieval, Role, Team
from tests.toys import conversation

pytestmark = pytest.mark.usefixtures("numpy_tables")

BYTES = ByteTokenizer()
CONFIG = Config(264, 16, 24, 2, 4, 2, 8)
TASKS = ["how many " + "apples, " * 7, "which of the " + "four rivers and seas " * 3]


# --- the trie --------------------------------------------------------------------


def array(ids):
    return np.array(ids, np.int32)


words = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=12)


@given(words, st.lists(st.integers(0, 2), max_size=9))
def test_the_trie_gives_every_beginning_one_slot(sequences, asked):
    trie, slot_of, free = prefix_cache.Trie(), {}, 0
    for ids in sequences:
        slots, known = trie.add(array(ids), free)
        assert known == sum(tuple(ids[: t + 1]) in slot_of for t in range(len(ids)))
        free += len(ids) - known
        for t in range(len(ids)):
            assert slot_of.setdefault(tuple(ids[: t + 1]), int(slots[t])) == slots[t]
    assert sorted(slot_of.values()) == list(range(free))  # each slot is one beginning's
    want = []
    for t in range(len(asked)):
        if tuple(asked[: t + 1]) not in slot_of:
            break
        want.append(slot_of[tuple(asked[: t + 1])])
    assert trie.find(array(asked)).tolist() == want


@given(words, st.integers(1, 3))
def test_stems_are_what_rows_share(sequences, short):
    rows = [array(r) for r in sorted(sequences)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "MIN_REUSED_TOKENS", short)
        found = [(level, tuple(ids.tolist())) for level, ids in prefix_cache.shared_prefixes(rows, 0, 0)]
    assert len({ids for _, ids in found}) == len(found)
    begins = lambda row, ids: tuple(row[: len(ids)]) == ids
    for level, ids in found:
        assert sum(begins(r, ids) for r in sequences) >= 2
        under = [other for _, other in found if other != ids and begins(ids, other)]
        assert level == len(under) and len(ids) - max(map(len, under), default=0) >= short
    for i, a in enumerate(sequences):
        for b in sequences[:i]:  # what two rows share is sent once, up to a short rest
            shared = next((t for t, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
            reach = max((len(s) for _, s in found if begins(a, s) and begins(b, s)), default=0)
            assert shared - reach < short


# --- extension -------------------------------------------------------------------


@functools.cache
def model(family="qwen2", layers=2):
    switches = {"family": family, "attention_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    return make_policy(dataclasses.replace(CONFIG, num_layers=layers, **switches), remat=False)


def adapter(base, seed, rank=2):
    noise = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + noise.normal(0, 0.1, x.shape).astype(x.dtype), init_lora(jax.random.key(0), base, rank)
    )


def variables_of(policy, lora=False):
    params = jax.jit(policy.init)(jax.random.key(1))
    return {"params": params, "lora": adapter(params, 3)} if lora else {"params": params}


def ragged(seed=0, n=5, p=12, e=9):
    """(whole prompts [n p], length, how much of each is cached, the rest [n e] with junk behind)."""
    rng = np.random.default_rng(seed)
    length = rng.integers(2, p + 1, n).astype(np.int32)
    length[0] = p
    start = np.maximum(length - rng.integers(1, e + 1, n), 0).astype(np.int32)
    start[:2] = p - 1, 0  # padding of the first row's rest would stand beyond the cache
    length[1] = min(length[1], e)
    tokens = rng.integers(0, 264, (n, p)).astype(np.int32)
    rest = rng.integers(0, 264, (n, e)).astype(np.int32)
    for row in range(n):
        rest[row, : length[row] - start[row]] = tokens[row, start[row] : length[row]]
    return tokens, length, start, rest


def cut_off(prefix, start, junk=7.0):
    """A cache of which the first ``start`` slots are left."""
    keep = lambda x: jnp.where((np.arange(x.shape[1]) < start[:, None])[..., None, None], x, junk)
    return jax.tree.map(keep, prefix)


@pytest.mark.parametrize("family,lora,queries", [("qwen2", True, 128), ("qwen3", False, 4), ("llama", False, 9)])
def test_extending_is_prefilling(family, lora, queries, monkeypatch):
    """Also where new tokens attend in pieces: 9 of them in pieces of 4. Stacked and split layers are the same."""
    monkeypatch.setattr(decoder, "QUERIES", queries)
    policy = model(family)
    variables = variables_of(policy, lora)
    tokens, length, start, rest = ragged()
    assert (start + rest.shape[1] > tokens.shape[1]).any() and (start == 0).any()
    hidden, prefix = jax.jit(policy.prefill)(variables, tokens, length)
    real = (np.arange(tokens.shape[1]) < length[:, None])[..., None, None]
    for read in (variables, policy.unstack(variables)):
        again, grown, filled = jax.jit(functools.partial(fill, policy))(
            read, rest, length - start, cut_off(prefix, start), start
        )
        np.testing.assert_array_equal(filled, length)
        np.testing.assert_allclose(again, hidden, atol=1e-5)
        for want, got in zip(jax.tree.leaves(prefix), jax.tree.leaves(grown), strict=True):
            np.testing.assert_allclose(np.where(real, got, 0), np.where(real, want, 0), atol=1e-5)


def test_extending_rows_that_have_parameters_of_their_own():
    policy, (tokens, length, start, rest) = model(), ragged()
    base = variables_of(policy)["params"]
    loras = [adapter(base, seed) for seed in range(len(length))]
    variables = {"params": base, "lora": jax.tree.map(lambda *x: jnp.stack(x), *loras)}
    rows = by_row(policy, ("lora",))
    hidden, prefix = jax.jit(rows.prefill)(variables, tokens, length)
    again, _ = jax.jit(rows.extend)(variables, rest, length - start, start, cut_off(prefix, start))
    np.testing.assert_allclose(again, hidden, atol=1e-5)
    assert np.abs(np.asarray(hidden) - np.asarray(policy.prefill({"params": base}, tokens, length)[0])).max() > 0.01


@pytest.mark.parametrize("long", [2, 20])
def test_few_long_rests_are_read_before_the_launch(long):
    """Hidden states are those of whole prompts, each with its own adapter. Padding is left out where rests differ."""
    policy, rng, n = model(), np.random.default_rng(0), 24
    base = variables_of(policy)["params"]
    loras = [adapter(base, seed, rank) for seed, rank in enumerate((2, 1, 3))]
    variables = {"params": base, "lora": join_adapters(loras)}
    adapters = {(task, m): m for task in range(n) for m in range(3)}
    owners = [(task, task % 3) for task in range(n)]
    prefixes = Prefixes(policy, 256)
    text = lambda size: rng.integers(0, 264, size).astype(np.int32)
    known = [text(20) for _ in owners]
    for ids in (known, [np.concatenate([ids, text(90 if row < long else 4)]) for row, ids in enumerate(known)]):
        before = prefixes.prefilled_tokens
        (ready,) = prefixes.prepare(variables, owners, ids, [n], adapters=adapters)
        of = np.array([adapters[task] for task in owners])[ready.prompts]
        hidden, prefix, _ = fill(
            policy, variables, ready.tokens, ready.length, ready.prefix, ready.start, jnp.asarray(of)
        )
        prefixes.store(owners, ids, prefix, rows=ready.rows)
        for row, (task, tokens) in enumerate(zip(owners, ids, strict=True)):
            alone = {"params": base, "lora": loras[adapters[task]]}
            want, _ = policy.prefill(alone, tokens[None], np.array([len(tokens)]))
            np.testing.assert_allclose(hidden[ready.rows[row]], want[0], atol=1e-5)
    assert prefixes.prefilled_tokens - before == sum(map(len, ids)) - 20 * n
    assert ready.tokens.shape[1] == (16 if long == 2 else 96)


def test_generation_goes_on_from_a_cache_and_gives_it_back():
    policy = model()
    variables, (tokens, length, start, rest) = variables_of(policy), ragged()
    keys = jax.random.wrap_key_data(np.random.default_rng(0).integers(0, 2**32, (5, 3, 2), dtype=np.uint32))
    options = {"max_new_tokens": 6, "stop_ids": tuple(range(0, 264, 5)), "pad_id": 256, "sampling": Sampling()}
    active = np.ones(5, bool)
    whole, prefix, suffix = generate(policy, variables, tokens, length, keys, active, keep=True, **options)
    cached = cut_off(prefix, start)
    out, prefix2, suffix2 = generate(
        policy, variables, rest, length - start, keys, active, prefix=cached, start=start, keep=True, **options
    )
    np.testing.assert_array_equal(out.tokens, whole.tokens)
    np.testing.assert_allclose(out.logprobs, whole.logprobs, atol=1e-5)
    assert len(set(out.length.ravel().tolist())) > 2
    # A sample's cache is that of its tokens as a prompt.
    for n, g in [(0, 0), (3, 2), (2, 1)]:
        said = np.asarray(out.tokens)[n, g, : out.length[n, g]]
        line = np.concatenate([tokens[n, : length[n]], said])[None]
        _, want = policy.prefill(variables, line, np.array([line.shape[1]]))
        for layer in range(2):
            for w, p, s in zip(want[layer], prefix2[layer], suffix2[layer]):
                got = np.concatenate([p[n, : length[n]], s[n, g, : len(said) - 1]])
                np.testing.assert_allclose(got, w[0, :-1], atol=1e-5)


# --- rollouts --------------------------------------------------------------------


@functools.cache
def make_team(kind, max_new_tokens=6):
    """Roles a and b of one model, of two, or of two adapters over a base."""
    names = ("m", "m") if kind == "shared" else ("a", "b")
    base = "base" if kind == "lora" else None
    policy = model(layers=1)
    odd = np.zeros(264, np.float32)
    odd[[BYTES.EOS, *range(97, 105)]] = 3.0, *[1.5] * 8  # ends, and says alike things, often
    policy = policy._replace(unembed=lambda v, hidden, inner=policy.unembed: inner(v, hidden) + odd)
    models = tuple(Model(n, policy, BYTES, base) for n in dict.fromkeys(names))
    return Team(tuple(Role(r, n, max_new_tokens) for r, n in zip("ab", names)), models)


@functools.cache
def params_of(team):
    init = jax.jit(model(layers=1).init)
    if team.models[0].base:
        base = init(jax.random.key(0))
        return {
            "shared": {"base": base},
            "agents": {m.name: {"lora": adapter(base, i)} for i, m in enumerate(team.models)},
        }
    return {"shared": {}, "agents": {m.name: {"params": init(jax.random.key(i))} for i, m in enumerate(team.models)}}


def go(env, team, plan, *, reuse=True, **options):
    with EnvPool(lambda: env, workers=0) as pool, pytest.MonkeyPatch.context() as patch:
        if not reuse:
            patch.setattr(prefix_cache, "MIN_REUSED_TOKENS", 10**9)  # nothing is long enough
        settings = HostSettings(plan, Sampling(), max_prompt=512, **options)
        return play(team, params_of(team), pool, TASKS, jax.random.key(5), settings).tree


def assert_same_samples(a, b):
    """Every table, but for log-probs up to rounding; and every count but what was sent."""
    for name in ("nodes", "steps", "transitions"):
        for one, two in zip(jax.tree.leaves(getattr(a, name)), jax.tree.leaves(getattr(b, name))):
            if np.issubdtype(one.dtype, np.floating):
                np.testing.assert_allclose(one, two, atol=1e-5)
            else:
                np.testing.assert_array_equal(one, two)
    assert a.counts.replace(prompt_tokens=0) == b.counts.replace(prompt_tokens=0)


def beginnings(tree):
    """(of prompts that decoding had not been through before, of prompts and of what was decoded): how many different
    ones there are, by task and model, with Python's sets alone."""
    nodes, steps = tree.nodes, tree.steps
    prompts, decoded = set(), set()
    for n in np.flatnonzero(nodes.valid):
        ids, who = nodes.tokens[n, : nodes.length[n]].tolist(), (int(nodes.task[n]), int(nodes.model[n]))
        prompts |= {(who, tuple(ids[: t + 1])) for t in range(len(ids))}
        for c in np.flatnonzero(steps.valid & (steps.node == n)):
            said = steps.tokens[c, : steps.length[c] - 1].tolist()  # the last token is never read
            decoded |= {(who, tuple(ids + said[: t + 1])) for t in range(len(said))}
    return len(prompts - decoded), len(prompts | decoded)


CASES = {
    "flat, one model": (conversation(4), "shared", plans.flat(3)),
    "node_wise, two models": (conversation(3, together=True), "separate", plans.node_wise(2)),
    "local, adapters": (conversation(4), "lora", plans.node_wise(3, "local")),
    "product, one model at once": (conversation(3, together=True), "shared", plans.product(2)),
}


@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_without_reuse_and_each_token_is_sent_once(name):
    env, kind, plan = CASES[name]
    tree, whole = (go(env, make_team(kind), plan, reuse=reuse) for reuse in (True, False))
    assert_same_samples(tree, whole)
    sent, full = int(tree.counts.prompt_tokens), int(tree.nodes.length[tree.nodes.valid].sum())
    assert int(whole.counts.prompt_tokens) == full
    needed, unique = beginnings(tree)
    assert needed <= sent <= 1.05 * needed < 1.05 * unique
    assert full > 1.5 * sent
    assert len(set(tree.nodes.length[tree.nodes.valid].tolist())) > 5  # ragged


def test_a_prompt_that_is_no_continuation_is_prefilled_in_full():
    tree = go(conversation(3, summary=True), make_team("separate"), plans.flat(1))
    assert int(tree.counts.prompt_tokens) == tree.nodes.length[tree.nodes.valid].sum()


def test_memory_that_changes_a_prompt_ends_its_reuse():
    """The third turn's system prompt differs: only what stands before it is found again."""
    turn = -1

    def recall(roles, prompts):
        nonlocal turn
        turn += 1
        note = "" if turn < 2 else " (as last time)"
        first = [(p[0]._replace(text=p[0].text[:12] + note + p[0].text[12:]), *p[1:]) for p in prompts]
        return first, Retrieval.empty(len(prompts))

    team = make_team("shared")
    tree = go(conversation(3), team, plans.flat(1), recall=recall)
    turn = -1
    assert_same_samples(tree, go(conversation(3), team, plans.flat(1), reuse=False, recall=recall))
    length, turn = tree.nodes.length[tree.nodes.valid], tree.nodes.turn[tree.nodes.valid]
    alike = np.array([0, 9, 13])[turn].sum()  # <system>you are | a, a| where the third turn differs
    assert int(tree.counts.prompt_tokens) == length.sum() - alike
