"""The adaptive memory against its slow twin, and one test for each rule that its docstring states."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmarl_llm.agents import memory as mem
from jaxmarl_llm.agents.memory import MemoryConfig, Samples
from jaxmarl_llm.errors import ConfigError
from tests.reference_memory import Twin

D, T, BYTES = 8, 4, 12
update = jax.jit(mem.update, static_argnums=0)
read = jax.jit(mem.read, static_argnums=0)
SMALL = MemoryConfig(capacity=4, retrieve=2, warmup=2)


def fresh(config=SMALL):
    return mem.init(config, dim=D, max_ids=T, max_bytes=BYTES)


def axis(*which):
    """Unit vectors along the axes: entries that have nothing in common."""
    return np.eye(D, dtype=np.float32)[list(which)]


def samples(keys, reward, retrieved=None, similarity=None, valid=None, tag=None):
    """Samples whose ids and text name their position, or ``tag``; padded to eight, so that few programs compile."""
    n = len(reward)
    tag = np.arange(n) if tag is None else np.asarray(tag)
    retrieved = np.full((n, 2), -1) if retrieved is None else np.asarray(retrieved)
    similarity = np.where(retrieved >= 0, 1.0, 0.0) if similarity is None else np.asarray(similarity)
    text = np.stack([np.asarray(mem.encode_text(f"text {i}", BYTES)) for i in tag])

    def column(x, dtype):
        return jnp.asarray(np.concatenate([x, np.zeros((max(8 - n, 0), *np.shape(x)[1:]))]), dtype)

    return Samples(
        keys=column(keys, jnp.float32),
        ids=column(np.repeat(tag[:, None], T, 1), jnp.int32),
        length=column(tag % T + 1, jnp.int32),
        text=column(text, jnp.uint8),
        reward=column(reward, jnp.float32),
        retrieved=column(retrieved, jnp.int32),
        similarity=column(similarity, jnp.float32),
        valid=column(np.ones(n) if valid is None else valid, bool),
    )


def stored(config=SMALL, which=(0, 1), now=1):
    """A memory that holds the axes ``which``, one each, all of initial weight; half of the rewards were 0, half 1."""
    n = len(which)
    keys = np.concatenate([axis(*which), np.zeros((n, D))])
    memory, metrics = update(config, fresh(config), samples(keys, [1.0] * n + [0.0] * n), now)
    assert metrics["inserted"] == n
    return memory


def same_bytes(a, b):
    leaves = [jax.tree.leaves(tree) for tree in (a, b)]
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(*leaves, strict=True))


CONFIGS = [
    MemoryConfig(capacity=4, retrieve=2, warmup=6, decay=0.05),
    MemoryConfig(capacity=6, retrieve=3, warmup=1, z=1.0, beta=0.5, penalty=0.2, min_similarity=0.3),
    MemoryConfig(capacity=5, retrieve=5, warmup=3, z=0.2, refresh_similarity=0.8, max_weight=1.3, alpha=2.0),
]


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from(CONFIGS), st.booleans())
def test_update_and_read_are_the_slow_twin(seed, config, bounded):
    rng = np.random.default_rng(seed)
    memory, twin, now, n = fresh(config), Twin(config), 0, 8
    places = rng.normal(size=(7, D))  # situations that come back, so that entries are refreshed and retrieved
    for _ in range(8):
        now += int(rng.integers(0, 15))
        keys = (places[rng.integers(0, 7, n)] + rng.normal(size=(n, D)) * 0.1).astype(np.float32)
        keys[rng.random(n) < 0.05] = 0.0
        reward = rng.choice([0.0, 0.5, 1.0, 1.5], n) if bounded else rng.normal(size=n)
        reward = reward.astype(np.float32)
        reward[rng.random(n) < 0.05] = rng.choice([np.nan, np.inf])
        retrieved, similarity = (np.array(x) for x in jax.vmap(read, (None, None, 0))(config, memory, keys))
        for i in range(n):
            slots, cosines = twin.read(keys[i])
            assert retrieved[i].tolist() == slots
            np.testing.assert_allclose(similarity[i], cosines, atol=1e-5)
        if rng.random() < 0.2:  # slots that read would not give: twice the same, free, out of range
            retrieved = rng.integers(-1, config.capacity + 2, retrieved.shape)
            similarity = rng.uniform(-1, 1.5, retrieved.shape)
        batch = samples(keys, reward, retrieved, similarity, rng.random(n) < 0.9, tag=rng.integers(0, 1000, n))
        memory, metrics = update(config, memory, batch, now)
        host = jax.device_get(batch.__dict__)
        rows = [
            {"key": host["keys"][i].astype(float), "ids": host["ids"][i], "text": host["text"][i]}
            | {"reward": float(host["reward"][i]), "valid": bool(host["valid"][i])}
            | {"retrieved": host["retrieved"][i].tolist(), "similarity": host["similarity"][i].astype(float).tolist()}
            for i in range(n)
        ]
        expected = twin.update(rows, now)
        assert set(metrics) == set(expected)
        for name in expected:
            np.testing.assert_allclose(metrics[name], expected[name], atol=1e-5, err_msg=name)
        assert np.array_equal(memory.used, [entry is not None for entry in twin.slots])
        for slot, entry in enumerate(twin.slots):
            if entry is not None:
                for name in ("key", "ids", "text", "weight", "reward", "uses", "last_used"):
                    np.testing.assert_allclose(getattr(memory, name)[slot], entry[name], atol=1e-5, err_msg=name)


def test_what_is_written_is_read():
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(8, D)) * rng.uniform(1e-25, 1e25, (8, 1))  # any norm
    keys[4:] = 0.0
    memory, metrics = update(SMALL, fresh(), samples(keys, [1.0] * 4 + [0.0] * 4), 3)
    assert metrics["inserted"] == 4 == mem.size(memory)
    for i in range(4):
        slots, similarity = read(SMALL, memory, jnp.asarray(keys[i], jnp.float32))
        assert slots[0] == i and similarity[0] == pytest.approx(1.0, abs=1e-6)
        assert mem.decode_text(memory.text[i]) == f"text {i}" and memory.ids[i].tolist() == [i] * T
        assert memory.length[i] == i % T + 1


def test_read_orders_by_cosine_then_weight_then_slot():
    config = MemoryConfig(capacity=4, retrieve=4, warmup=2)
    memory = stored(config, which=(0, 1, 2, 3))
    query = jnp.asarray(axis(0)[0] + axis(1)[0] + axis(2)[0])
    assert read(config, memory, query)[0].tolist() == [0, 1, 2, 3]
    heavier = memory.replace(weight=memory.weight.at[2].set(3.0))
    slots, similarity = read(config, heavier, query)
    assert slots.tolist() == [2, 0, 1, 3]
    np.testing.assert_allclose(similarity, [3**-0.5] * 3 + [0.0], atol=1e-6)
    strict = replace(config, min_similarity=0.5)
    assert read(strict, heavier, query)[0].tolist() == [2, 0, 1, -1]
    assert read(replace(config, retrieve=1), heavier, query)[0].tolist() == [2]


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_query_without_direction_retrieves_nothing(value):
    config = replace(SMALL, min_similarity=-1.0)
    slots, similarity = read(config, stored(), jnp.full(D, value))
    assert slots.tolist() == [-1, -1] and similarity.tolist() == [0.0, 0.0]
    assert read(config, fresh(), jnp.ones(D))[0].tolist() == [-1, -1]


def test_bounded_rewards_are_inserted_although_the_normal_puts_hi_out_of_reach():
    reward = np.array([1.5, 0.0, 1.5, 0.5] * 2)
    assert reward.mean() + 1.96 * reward.std() > 1.5
    memory, metrics = update(SMALL, fresh(), samples(axis(*range(8)), reward), 1)
    assert metrics["hi"] == 1.5 and metrics["lo"] == 0.0 and metrics["inserted"] == 4
    assert [row["text"] for row in mem.entries(memory)] == ["text 0", "text 2", "text 4", "text 6"]


def test_the_normal_takes_the_upper_fortieth_of_unbounded_rewards():
    config = MemoryConfig(capacity=64, decay=0.0)
    rng, inserted = np.random.default_rng(1), 0
    memory = mem.init(config, dim=64, max_ids=T, max_bytes=BYTES)
    for _ in range(4):
        reward = rng.normal(3.0, 2.0, 500)
        memory, metrics = update(config, memory, samples(rng.normal(size=(500, 64)), reward), 1)
        inserted += int(metrics["inserted"])
    assert 30 <= inserted <= 70  # 2.5 % of 2000
    assert metrics["hi"] == pytest.approx(3 + 1.96 * 2, abs=0.3) and metrics["lo"] == pytest.approx(
        3 - 1.96 * 2, abs=0.3
    )


def test_nothing_happens_while_all_rewards_are_equal_and_the_first_success_is_kept():
    memory = fresh()
    for now in (1, 2):
        memory, metrics = update(SMALL, memory, samples(axis(0, 1), [0.0, 0.0], [[0, 1], [0, 1]]), now)
        assert metrics["inserted"] == metrics["penalised"] == 0
    memory, metrics = update(SMALL, memory, samples(axis(0, 1), [0.0, 1.0]), 3)
    assert metrics["inserted"] == 1 and mem.entries(memory)[0]["text"] == "text 1"


def test_no_threshold_applies_before_warm_up():
    config = replace(SMALL, warmup=5)
    memory, metrics = update(config, fresh(config), samples(axis(0, 1), [0.0, 1.0]), 1)
    assert metrics["inserted"] == 0 and memory.count == 2
    memory, metrics = update(config, memory, samples(axis(0, 1), [0.0, 1.0]), 2)
    assert metrics["inserted"] == 0
    memory, metrics = update(config, memory, samples(axis(0, 1), [0.0, 1.0]), 3)
    assert metrics["inserted"] == 1


def test_use_moves_the_weight_by_similarity_times_reward_difference():
    config = replace(SMALL, decay=0.0, penalty=0.0)
    memory = stored(config)  # mean reward 1/2, so rbar = 1/2
    batch = samples(np.zeros((2, D)), [1.0, 0.25], [[0, 1], [0, 0]], [[0.5, 0.25], [0.4, 0.8]])
    memory, metrics = update(config, memory, batch, 2)
    # slot 0: +0.5 (1 - 0.5), rbar (0.5 + 1) / 2; then once, by its larger cosine, +0.8 (0.25 - 0.75)
    np.testing.assert_allclose(memory.weight[:2], [1 + 0.25 - 0.4, 1 + 0.125], atol=1e-6)
    np.testing.assert_allclose(memory.reward[:2], [(0.5 + 1 + 0.25) / 3, 0.75], atol=1e-6)
    assert memory.uses[:2].tolist() == [2, 1] and memory.last_used[:2].tolist() == [2, 2]
    assert metrics["hit"] == 1.0 and metrics["penalised"] == 0


def test_a_bad_reward_costs_the_penalty_whatever_the_similarity():
    config = replace(SMALL, decay=0.0)
    memory, metrics = update(config, stored(config), samples(np.zeros((1, D)), [0.0], [[0, -1]], [[0.0, 0.0]]), 2)
    assert metrics["penalised"] == 1
    np.testing.assert_allclose(memory.weight[:2], [1 - config.penalty, 1], atol=1e-6)


@pytest.mark.parametrize("similarity", [0.0, 0.3, 1.0])
def test_the_strongest_entry_that_turns_bad_is_gone_after_a_bounded_number_of_uses(similarity):
    config = MemoryConfig(capacity=4, retrieve=2, warmup=2)
    memory = stored(config)
    # at its strongest, and bad for so long that the reward difference has vanished
    memory = memory.replace(weight=memory.weight.at[0].set(config.max_weight), reward=memory.reward.at[0].set(0.0))
    bound = int(np.ceil((config.max_weight - config.min_weight) / config.penalty)) + 1
    batch = samples(axis(1, 1), [0.0, 1.0], [[0, -1], [-1, -1]], [[similarity, 0.0]] * 2)
    for _ in range(bound):
        memory, _ = update(config, memory, batch, 2)
    assert not memory.used[0]
    assert 0 not in read(config, memory, jnp.asarray(axis(0)[0]))[0].tolist() and not memory.text[0].any()


def test_a_bad_reward_never_raises_a_weight():
    config = replace(SMALL, decay=0.0)
    memory = stored(config).replace(reward=jnp.full(4, -3.0))
    memory, _ = update(config, memory, samples(np.zeros((1, D)), [0.0], [[0, -1]]), 2)
    assert memory.weight[0] == pytest.approx(1 - config.penalty)


def test_poison_above_lo_is_evicted_too():
    """Rewards fall from the usual 1.0 to 0.5 when the entry is used; lo stays at 0, so only the difference acts."""
    config = MemoryConfig(capacity=4, retrieve=2, warmup=2)
    keys = np.concatenate([axis(0), np.zeros((3, D))])
    memory, _ = update(config, fresh(config), samples(keys, [1.5, 1.5, 1.0, 0.0]), 1)
    for use in range(1, 20):
        memory, metrics = update(config, memory, samples(np.zeros((2, D)), [0.5, 1.5], [[0, -1], [-1, -1]]), 1 + use)
        assert metrics["penalised"] == 0
        if not memory.used[0]:
            break
    assert use <= 5 and read(config, memory, jnp.asarray(axis(0)[0]))[0].tolist() == [-1, -1]


def test_an_idle_entry_loses_each_step_once_and_dies():
    memory = stored(now=1)
    nothing = samples(axis(0, 1), [1.0, 1.0], valid=[False, False])
    once, _ = update(SMALL, memory, nothing, 31)
    np.testing.assert_allclose(once.weight[:2], 1 - (1 - np.exp(-0.3)), atol=1e-6)
    again, _ = update(SMALL, once, nothing, 31)
    back, _ = update(SMALL, again, nothing, 5)  # a clock that runs backwards gives nothing back
    assert same_bytes(once, again) and same_bytes(once, back)
    life = 0
    while mem.size(memory):
        life += 1
        memory, metrics = update(SMALL, memory, nothing, 1 + life)
    assert life == 91 and metrics["evicted"] == 2


def test_use_restarts_the_idle_time():
    memory, _ = update(SMALL, stored(now=1), samples(np.zeros((1, D)), [0.5], [[0, -1]]), 51)
    np.testing.assert_allclose(memory.weight[:2], [1.0, np.exp(-0.5)], atol=1e-6)
    assert memory.last_used[:2].tolist() == [51, 1]


def test_a_near_copy_refreshes_and_does_not_fill_the_store():
    memory = stored(now=1)
    memory = memory.replace(weight=memory.weight.at[0].set(0.4).at[1].set(2.0), reward=memory.reward.at[1].set(1.0))
    keys = axis(0, 1) + 0.1 * axis(2, 3)
    after, metrics = update(SMALL, memory, samples(keys, [1.0, 1.0], tag=[7, 8]), 5)
    assert metrics["refreshed"] == 2 and metrics["inserted"] == 0 and metrics["size"] == 2
    np.testing.assert_allclose(after.weight[:2], [1.0, 2.0])
    assert after.last_used[:2].tolist() == [5, 5] and after.uses[:2].tolist() == [0, 0]
    # 1 > rbar_0 = 1/2: the new text is better than what the entry earns; 1 > rbar_1 = 1 is false
    assert [mem.decode_text(row) for row in after.text[:2]] == ["text 7", "text 1"]
    assert read(SMALL, after, jnp.asarray(keys[0]))[1][0] == pytest.approx(1.0)


def test_a_full_store_gives_up_its_least_entry_and_only_for_a_heavier_one():
    memory = stored(which=(0, 1, 2, 3))
    full, metrics = update(SMALL, memory, samples(axis(4, 5), [1.0, 0.0]), 1)
    assert metrics["inserted"] == metrics["evicted"] == 0  # 1 does not exceed 1
    for weights, ages, victim in [
        ([0.9, 0.5, 0.8, 0.7], [1, 1, 1, 1], 1),
        ([0.9, 0.5, 0.5, 0.7], [1, 1, 0, 1], 2),
        ([0.9, 0.5, 0.5, 0.5], [1, 1, 1, 1], 1),
    ]:
        lighter = full.replace(weight=jnp.asarray(weights), last_used=jnp.asarray(ages))
        after, metrics = update(SMALL, lighter, samples(axis(4, 5), [1.0, 0.0], tag=[9, 9]), 1)
        assert metrics["inserted"] == metrics["evicted"] == 1 and metrics["size"] == 4
        assert mem.decode_text(after.text[victim]) == "text 9" and after.uses[victim] == 0


def test_a_slot_that_changed_hands_in_the_batch_earns_nothing_for_the_old_entry():
    memory = stored(which=(0, 1, 2, 3))
    memory = memory.replace(weight=memory.weight.at[3].set(0.5))
    batch = samples(np.concatenate([axis(4), np.zeros((1, D))]), [1.0, 0.0], [[-1, -1], [3, -1]], tag=[9, 9])
    after, metrics = update(SMALL, memory, batch, 1)
    assert mem.decode_text(after.text[3]) == "text 9" and metrics["penalised"] == 0
    assert after.uses[3] == 0 and after.weight[3] == 1.0


@settings(deadline=None, max_examples=30, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["invalid", "reward", "key", "similarity"]))
def test_invalid_and_non_finite_samples_change_nothing(seed, what):
    rng = np.random.default_rng(seed)
    memory = stored()
    keys, reward = rng.normal(size=(4, D)), rng.choice([0.0, 1.0], 4)
    retrieved, similarity = rng.integers(-1, 4, (4, 2)), rng.random((4, 2))
    valid = np.array([True, False, True, False])
    calm = samples(keys, reward, retrieved, similarity, valid)
    wild_keys, wild_reward, wild_similarity = keys.copy(), reward.copy(), similarity.copy()
    bad = rng.choice([np.nan, np.inf, -np.inf])
    {"invalid": wild_reward, "reward": wild_reward, "key": wild_keys, "similarity": wild_similarity}[what][~valid] = bad
    mask = valid if what == "invalid" else np.ones(4, bool)
    wild = samples(wild_keys, wild_reward, retrieved, wild_similarity, mask)
    assert same_bytes(update(SMALL, memory, calm, 2), update(SMALL, memory, wild, 2))
    nobody = samples(keys, reward, retrieved, similarity, np.zeros(4, bool))
    untouched, metrics = update(SMALL, memory, nobody, 1)
    assert same_bytes(memory, untouched) and metrics["hit"] == 0


def test_a_long_run_keeps_its_size_is_deterministic_and_reads_fast():
    config, n, dim = MemoryConfig(), 512, 64
    step, look = jax.jit(mem.update, static_argnums=0, donate_argnums=1), jax.jit(mem.read, static_argnums=0)

    def run(batches):
        rng = np.random.default_rng(5)
        memory = mem.init(config, dim=dim, max_ids=16, max_bytes=64)
        texts = jnp.asarray(rng.integers(65, 90, (n, 64)), jnp.uint8)
        arrays = None
        for now in range(batches):
            batch = Samples(
                keys=jnp.asarray(rng.normal(size=(n, dim)), jnp.float32),
                ids=jnp.full((n, 16), now, jnp.int32),
                length=jnp.full(n, 16, jnp.int32),
                text=texts,
                reward=jnp.asarray(rng.choice([0.0, 0.5, 1.5], n), jnp.float32),
                retrieved=jnp.asarray(rng.integers(-1, 256, (n, 3)), jnp.int32),
                similarity=jnp.asarray(rng.random((n, 3)), jnp.float32),
                valid=jnp.ones(n, bool),
            )
            size = mem.size(memory)
            memory, metrics = step(config, memory, batch, now)
            assert metrics["size"] == size + metrics["inserted"] - metrics["evicted"] <= config.capacity
            if now == 20:
                gc.collect()
                arrays = len(jax.live_arrays())
        gc.collect()
        assert arrays is None or len(jax.live_arrays()) <= arrays + 1
        return memory

    empty = mem.init(config, dim=dim, max_ids=16, max_bytes=64)
    memory = run(200)  # 102400 writes
    assert memory.count == 200 * n and step._cache_size() == 1
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(memory)] == [(x.shape, x.dtype) for x in jax.tree.leaves(empty)]
    for name in ("key", "ids", "text", "weight", "uses"):  # free slots are zeros
        assert not np.asarray(getattr(memory, name))[~np.asarray(memory.used)].any()
    assert same_bytes(run(10), run(10))

    query, times = jnp.ones(dim), []
    for _ in range(50):
        start = time.perf_counter()
        jax.block_until_ready(look(config, memory, query))
        times.append(time.perf_counter() - start)
    assert np.median(times) < 0.01


def test_no_random_numbers_are_drawn():
    batch = samples(axis(0, 1), [0.0, 1.0])
    program = str(jax.make_jaxpr(mem.update, static_argnums=0)(SMALL, fresh(), batch, 1))
    program += str(jax.make_jaxpr(mem.read, static_argnums=0)(SMALL, fresh(), jnp.ones(D)))
    assert "scan" in program and not any(word in program for word in ("random", "threefry", "rng"))


@settings(deadline=None)
@given(st.text(st.characters(exclude_characters="\0")), st.integers(0, 24))
def test_text_is_cut_at_a_character(text, size):
    row = mem.encode_text(text, size)
    assert row.shape == (size,) and row.dtype == jnp.uint8
    back = mem.decode_text(row)
    whole = text.encode("utf-8", "replace").decode()
    assert whole.startswith(back)
    assert back == whole or len(whole[: len(back) + 1].encode()) > size  # one more character would not fit


def test_entries_are_listed_by_weight():
    memory = stored(which=(0, 1, 2))
    memory = memory.replace(weight=memory.weight.at[1].set(2.0))
    rows = mem.entries(memory)
    assert [row["slot"] for row in rows] == [1, 0, 2]
    assert rows[0] == {"slot": 1, "text": "text 1", "weight": 2.0, "reward": 0.5, "uses": 0, "last_used": 1}
    assert mem.entries(fresh()) == []


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ({"retrieve": 0}, "config.memory.retrieve: expected >= 1, got 0"),
        (
            {"retrieve": 9, "capacity": 8},
            "config.memory.retrieve: expected at most config.memory.capacity=8, got 9",
        ),
        ({"capacity": 10**9}, "config.memory.capacity: expected <= 1048576, got 1000000000"),
        ({"decay": float("inf")}, "config.memory.decay: expected a finite number, got inf"),
        ({"min_similarity": 1.5}, "config.memory.min_similarity: expected in [-1, 1], got 1.5"),
        (
            {"min_weight": 2.0},
            "config.memory.initial_weight: expected in [config.memory.min_weight, config.memory.max_weight] = "
            "[2, 4], got 1",
        ),
    ],
)
def test_a_config_that_cannot_work_is_refused(bad, line):
    with pytest.raises(ConfigError) as error:
        MemoryConfig(**bad).check("config.memory")
    assert str(error.value) == line
