"""The adaptive memory of JoyAgents-R1 (arXiv 2506.19846): what an agent did when it did well, kept beside its weights.

One ``Memory`` per agent, of fixed capacity: ``read`` finds entries for a prompt, ``update`` learns from the rewards the
policy is trained on. From the paper: the reward is accuracy plus format (R_A + R_F, no efficiency penalty: the caller
adds them up). The thresholds lo and hi are the 2.5 % and 97.5 % points of a normal fitted to the rewards. Time decay
and reward difference, weighted alpha = beta = 1, move an entry's weight w. Retrieval is by cosine.

Ours, where the paper as we know it is silent (r: a sample's reward; rbar: an entry's mean reward in use):

* lo and hi are fitted to all rewards seen, this batch included. So the first success after many failures is kept. Both
  are clipped to the least and largest reward, because bounded rewards may never reach mean + 1.96 s. There are no
  thresholds before ``warmup`` rewards, or while all were equal.
* Use: w += beta * cosine * (r - rbar); then r enters rbar, which starts at the agent's mean as if after one use. The
  reward that made an entry is extreme by construction: counted in rbar it would punish each entry for regressing to
  the mean. If r <= lo, each entry in the prompt also loses ``penalty``, however similar. w stops at ``max_weight``, so
  (max_weight - min_weight) / penalty such uses at most end any entry: a bad reward never raises w.
* r >= hi: an entry at least ``refresh_similarity`` alike is refreshed. Its idle time restarts, w rises to
  ``initial_weight`` if below, and the content becomes the sample's if r > rbar. If there is none the sample is inserted
  into a free slot. Without a free slot it replaces the entry of least w (longest unused, lowest slot), if this w is
  below ``initial_weight``.
* Time: after the samples, an entry idle for n steps since the last update loses alpha * (1 - exp(-decay * n)). So each
  idle step is charged once, and an unused entry dies. Below ``min_weight`` an entry leaves; free slots are zeros.
* ``retrieved`` are slots of the memory given to ``update``, each counted once a sample. An entry written by an earlier
  sample of the batch earns nothing from a later one. A sample with a value that is not finite is invalid.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt8

from jaxmarl_llm.config import at_least, finite, in_range
from jaxmarl_llm.errors import ConfigError

CAPACITY_LIMIT = 2**20  # entries


@dataclass(frozen=True)
class MemoryConfig:
    """Settings of the adaptive memory of a role."""

    capacity: int = 256  # entries (E)
    retrieve: int = 3  # most entries put into a prompt (X)
    min_similarity: float = 0.0  # cosine; an entry less similar to the query is not retrieved
    alpha: float = 1.0  # weight of time decay
    beta: float = 1.0  # weight of the reward difference
    decay: float = 0.01  # per step; at 0.01 a new entry that nobody uses lives 90 steps
    penalty: float = 0.05  # weight lost by each entry retrieved for a reward <= lo
    refresh_similarity: float = 0.95  # cosine from which a good sample refreshes an entry and is not a new one
    min_weight: float = 0.1  # an entry below it is evicted
    initial_weight: float = 1.0  # weight of a new entry, in units of reward (beta = 1)
    max_weight: float = 4.0  # bounds how long an entry that turned bad can live on its past
    warmup: int = 32  # rewards seen before thresholds apply
    z: float = 1.96  # thresholds in standard deviations; 1.96: 2.5 % and 97.5 % of the normal

    def check(self, path: str) -> None:
        at_least(f"{path}.capacity", self.capacity, 1, CAPACITY_LIMIT)
        at_least(f"{path}.retrieve", self.retrieve, 1)
        if self.retrieve > self.capacity:
            raise ConfigError(f"{path}.retrieve: expected at most {path}.capacity={self.capacity}, got {self.retrieve}")
        for name in ("min_similarity", "refresh_similarity"):
            in_range(f"{path}.{name}", getattr(self, name), -1, 1)
        for name in ("alpha", "beta", "decay", "penalty", "min_weight", "warmup", "z"):
            at_least(f"{path}.{name}", getattr(self, name), 0)
        finite(f"{path}.max_weight", self.max_weight)
        if not self.min_weight <= self.initial_weight <= self.max_weight:
            raise ConfigError(
                f"{path}.initial_weight: expected in [{path}.min_weight, {path}.max_weight] = "
                f"[{self.min_weight:g}, {self.max_weight:g}], got {self.initial_weight:g}"
            )


@struct.dataclass
class Memory:
    """Memory of one role: E entries, and running statistics of the rewards."""

    key: Float[Array, "E D"]  # unit norm
    ids: Int[Array, "E T"]
    length: Int[Array, " E"]
    text: UInt8[Array, "E bytes"]  # utf-8 of the same content, for people and for other tokenizers
    weight: Float[Array, " E"]
    reward: Float[Array, " E"]  # mean reward in use (rbar)
    last_used: Int[Array, " E"]  # step of the last use, refresh or insertion
    uses: Int[Array, " E"]
    used: Bool[Array, " E"]  # False: a free slot
    now: Int[Array, ""]  # step of the last update
    count: Int[Array, ""]  # rewards seen, and their mean, sum of squared deviations, least and largest
    mean: Float[Array, ""]
    m2: Float[Array, ""]
    low: Float[Array, ""]
    high: Float[Array, ""]


@struct.dataclass
class Samples:
    """Samples of an agent that its memory learns from."""

    keys: Float[Array, "C D"]  # embedding of the prompt; any norm, a zero key is never stored
    ids: Int[Array, "C T"]
    length: Int[Array, " C"]
    text: UInt8[Array, "C bytes"]
    reward: Float[Array, " C"]  # R_A + R_F
    retrieved: Int[Array, "C X"]  # slots in the prompt, -1 for none
    similarity: Float[Array, "C X"]
    valid: Bool[Array, " C"]


def init(config: MemoryConfig, *, dim: int, max_ids: int, max_bytes: int) -> Memory:
    """Make an empty memory.

    Args:
        config: settings of the memory; ``config.capacity`` is E.
        dim: size of a key, D.
        max_ids: largest number of token ids of an entry, T.
        max_bytes: largest number of bytes of the text of an entry.
    """

    def rows(dtype, *shape):
        return jnp.zeros((config.capacity, *shape), dtype)

    f32, i32, u8, inf = jnp.float32, jnp.int32, jnp.uint8, jnp.inf
    content = {"key": rows(f32, dim), "ids": rows(i32, max_ids), "length": rows(i32), "text": rows(u8, max_bytes)}
    value = {"weight": rows(f32), "reward": rows(f32), "last_used": rows(i32), "uses": rows(i32), "used": rows(bool)}
    rewards = {"count": i32(0), "mean": f32(0), "m2": f32(0), "low": f32(inf), "high": f32(-inf)}
    return Memory(**content, **value, **rewards, now=i32(0))


def read(
    config: MemoryConfig, memory: Memory, query: Float[Array, " D"]
) -> tuple[Int[Array, " X"], Float[Array, " X"]]:
    """Find the entries nearest to a query, nearest first.

    Ties go to the larger weight, then to the lower slot. A query that is zero or not finite retrieves nothing.

    Args:
        config: settings of the memory; ``config.retrieve`` is X.
        memory: memory of one role.
        query: embedding of a prompt [D], of any norm.

    Returns:
        Slots [X] and cosines [X]; -1 and 0 where there is no entry.
    """
    query = _unit(query)
    cosine = jnp.where(memory.used, jnp.dot(memory.key, query, precision="highest"), -jnp.inf)
    slots = jnp.lexsort((-memory.weight, -cosine))[: config.retrieve].astype(jnp.int32)
    found = (cosine[slots] >= config.min_similarity) & query.any()
    return jnp.where(found, slots, -1), jnp.where(found, cosine[slots], 0.0)


def update(config: MemoryConfig, memory: Memory, samples: Samples, now: Int[ArrayLike, ""]) -> tuple[Memory, dict]:
    """Learn from samples, in their order.

    Args:
        config: settings of the memory.
        memory: memory before the update.
        samples: C samples of the agent.
        now: step of training.

    Returns:
        The new memory, and metrics: ``evicted`` entries (replaced ones included), ``penalised`` uses, and ``hit``, the
        share of valid samples that retrieved an entry.
    """
    values = jnp.concatenate([samples.keys, samples.similarity, samples.reward[:, None]], 1)
    valid = samples.valid & jnp.isfinite(values).all(1)
    reward = jnp.where(valid, samples.reward, 0.0).astype(jnp.float32)
    keys, similarity = jax.vmap(_unit)(samples.keys), jnp.clip(samples.similarity, 0.0, 1.0)
    clock = jnp.maximum(memory.now, now).astype(jnp.int32)
    memory = _observe(memory, reward, valid)
    spread = config.z * jnp.sqrt(memory.m2 / jnp.maximum(memory.count, 1))
    lo, hi = jnp.maximum(memory.mean - spread, memory.low), jnp.minimum(memory.mean + spread, memory.high)
    armed = valid & (memory.count >= config.warmup) & (memory.low < memory.high)

    def process(carry, sample):
        memory, written, counts = carry
        content, reward, retrieved, similarity, valid, bad, good = sample
        match = (retrieved[:, None] == jnp.arange(config.capacity)) & memory.used & ~written & valid
        touched, similarity = match.any(0), jnp.where(match, similarity[:, None], 0.0).max(0)
        change = config.beta * similarity * (reward - memory.reward)
        change = jnp.where(bad, jnp.minimum(change, 0.0) - config.penalty, change)
        weight = jnp.where(touched, jnp.minimum(memory.weight + change, config.max_weight), memory.weight)
        uses = memory.uses + touched
        mean = jnp.where(touched, memory.reward + (reward - memory.reward) / (uses + 1), memory.reward)
        last_used = jnp.where(touched, clock, memory.last_used)
        used = memory.used & (weight >= config.min_weight)
        cosine = jnp.where(used, jnp.dot(memory.key, content["key"], precision="highest"), -jnp.inf)
        alike = cosine.max() >= config.refresh_similarity
        rank = jnp.where(used, weight, -jnp.inf)
        worst = jnp.where(rank == rank.min(), jnp.where(used, last_used, -1), jnp.iinfo(jnp.int32).max).argmin()
        slot = jnp.where(alike, cosine.argmax(), worst)
        refresh, insert = good & alike, good & ~alike & (rank[slot] < config.initial_weight)
        kept, fill = insert | refresh, insert | (refresh & (reward > mean[slot]))

        def put(column, value, when):
            return column.at[slot].set(jnp.where(when, value, column[slot]))

        new = replace(
            memory,
            **{name: put(getattr(memory, name), value, fill) for name, value in content.items()},
            weight=put(weight, jnp.maximum(weight[slot], config.initial_weight), kept),
            last_used=put(last_used, clock, kept),
            reward=put(mean, memory.mean, insert),
            uses=put(uses, 0, insert),
            used=put(used, True, insert),
        )
        evicted = (memory.used & ~used).sum() + (insert & used[slot])
        counts += jnp.stack([insert, refresh, (touched & bad).sum(), evicted]).astype(jnp.int32)
        return (new, put(written, True, insert), counts), None

    content = {"key": keys, "ids": samples.ids, "length": samples.length, "text": samples.text}
    start = (memory, jnp.zeros_like(memory.used), jnp.zeros(4, jnp.int32))
    good = armed & (reward >= hi) & keys.any(-1)
    rows = (content, reward, samples.retrieved, similarity, valid, armed & (reward <= lo), good)
    (memory, _, (inserted, refreshed, penalised, evicted)), _ = jax.lax.scan(process, start, rows)

    idle = clock - jnp.maximum(memory.last_used, memory.now)
    weight = memory.weight + config.alpha * jnp.expm1(-config.decay * idle)
    used = memory.used & (weight >= config.min_weight)
    evicted += (memory.used & ~used).sum()
    keep = lambda x: jnp.where(used.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros_like(x)) if x.ndim else x
    memory = jax.tree.map(keep, replace(memory, weight=weight, used=used, now=clock))

    hit = (valid & (samples.retrieved >= 0).any(-1)).sum() / jnp.maximum(valid.sum(), 1)
    lo, hi = jnp.where(memory.count > 0, jnp.stack([lo, hi]), 0.0)
    metrics = {"size": size(memory), "inserted": inserted, "refreshed": refreshed, "penalised": penalised}
    metrics |= {"evicted": evicted, "mean_weight": memory.weight.sum() / jnp.maximum(size(memory), 1)}
    return memory, metrics | {"hit": hit, "lo": lo, "hi": hi}


def size(memory: Memory) -> Int[Array, ""]:
    """Number of entries in ``memory``."""
    return memory.used.sum()


def encode_text(text: str, max_bytes: int) -> UInt8[np.ndarray, "bytes"]:
    """Encode ``text`` as UTF-8, cut at a character boundary to ``max_bytes`` bytes and padded with zeros."""
    raw = text.encode("utf-8", "replace")[:max_bytes].decode("utf-8", "ignore").encode()
    return np.frombuffer(raw.ljust(max_bytes, b"\0"), np.uint8)


def decode_text(row: UInt8[ArrayLike, "bytes"]) -> str:
    """Decode a ``row`` of bytes that `encode_text` made."""
    return jax.device_get(row).tobytes().rstrip(b"\0").decode("utf-8", "replace")


def entries(memory: Memory, decode: Callable[[list[int]], str] | None = None) -> list[dict]:
    """Entries for reports, heaviest first.

    Args:
        memory: memory of one role.
        decode: token ids -> text, for entries that were stored without text (array environments).
    """
    names = ("weight", "reward", "uses", "last_used")
    fields = ("ids", "length", "text", "used", *names)
    ids, length, text, used, *columns = jax.device_get([getattr(memory, name) for name in fields])

    def shown(j: int) -> str:
        return decode_text(text[j]) or (decode(ids[j, : length[j]].tolist()) if decode is not None else "")

    rows = [(j, shown(j), *(column[j].item() for column in columns)) for j in used.nonzero()[0].tolist()]
    return [dict(zip(("slot", "text", *names), row)) for row in sorted(rows, key=lambda row: -row[2])]


def _unit(x: Float[Array, " D"]) -> Float[Array, " D"]:
    """x / |x|; zeros if x is zero, NaN (which is not similar to anything) if x is not finite."""
    x = x.astype(jnp.float32) / jnp.maximum(jnp.abs(x).max(), 1e-37)  # squares neither overflow nor vanish
    return x / jnp.maximum(jnp.sqrt((x * x).sum()), 1.0)


def _observe(memory: Memory, reward: Float[Array, " C"], valid: Bool[Array, " C"]) -> Memory:
    """Merge the rewards of a batch into the running normal."""
    n = valid.sum()
    share = n / jnp.maximum(memory.count + n, 1)
    mean = reward.sum() / jnp.maximum(n, 1)  # invalid rewards are 0
    m2 = jnp.where(valid, (reward - mean) ** 2, 0.0).sum()
    return replace(
        memory,
        count=memory.count + n,
        mean=memory.mean + (mean - memory.mean) * share,
        m2=memory.m2 + m2 + (mean - memory.mean) ** 2 * memory.count * share,
        low=jnp.minimum(memory.low, jnp.where(valid, reward, jnp.inf).min()),
        high=jnp.maximum(memory.high, jnp.where(valid, reward, -jnp.inf).max()),
    )
