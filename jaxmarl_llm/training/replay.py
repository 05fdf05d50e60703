"""Replay of good samples: completions of earlier steps with a high return take part in later updates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int

from jaxmarl_llm.config import at_least
from jaxmarl_llm.distributed import sharding
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.rollout.keys import REPLAY
from jaxmarl_llm.training.algorithm import Driver, StepParts, StepResult, UpdateFunction, Updates
from jaxmarl_llm.training.critic import stacks_of_rows
from jaxmarl_llm.training.learner import Batch, pad_rows, token_weights
from jaxmarl_llm.training.losses import Loss, log_ratios, masked
from jaxmarl_llm.training.train_step import policy_update
from jaxmarl_llm.types import POLICY, Array, Model, Params, PyTree, TrainState


class Samples(struct.PyTreeNode):
    """Completions with what an update reads of them. Leading axis N."""

    prompt: Int[Array, "N P"]
    prompt_length: Int[Array, " N"]
    tokens: Int[Array, "N R"]
    length: Int[Array, " N"]
    logprobs: Float[Array, "N R"]  # of the policy that sampled them
    value: Float[Array, " N"]  # the return
    model: Int[Array, " N"]  # index into Team.models


class Ring(struct.PyTreeNode):
    """The last N samples that were stored."""

    samples: Samples
    count: Int[Array, ""]  # all that were stored so far; number c is in row c mod N


@dataclass(frozen=True)
class Replay:
    """Mix good completions of earlier steps into each update: a `algorithm.UpdateFunction`.

    A trained completion of return R above ``bound`` is stored with the log-probs log mu of the policy that sampled it.
    The ring has ``size`` rows, and the oldest one is overwritten. Each update draws ``samples`` stored completions, all
    with the same chance and none twice. Their loss is added to the step's own:

        ``coef * sum_t w_t (-min(pi_t / mu_t, truncate) (R - bound) log pi_t)``

    The last factor alone has a gradient; pi is the policy before the update. ``max(R - b, 0)`` is the advantage of
    self-imitation learning (Oh et al., arXiv 1806.05635, eq. 2), with a constant b in place of its value function. The
    truncated importance weight of a token is that of IMPALA (arXiv 1802.01561, section 4.1). Self-imitation has none:
    ``truncate=None``. The weights w are those of ``loss.aggregation`` over the drawn completions of a model.

    RePO (arXiv 2506.09340) puts stored completions into the group of a prompt that is played again. Here they have
    their own advantage, so the statistics of groups do not change.

    Drawn completions go through the step's own loss with the advantage above, as a group each. So KL and entropy terms
    count their tokens too, ``coef`` times. Ratios of several epochs are those to the policy before the first one, and
    ``loss.tis_clip`` has no effect on them. Completions of the step itself are stored after the update. The ring is in
    ``state.kept["replay"]``. Draws depend on the ring and the step's key alone.

    Metrics: ``replay/stored`` completions in the ring, ``replay/added`` of this step, and ``replay/too_long``, the good
    ones of this step that do not fit into a row. ``replay/weight`` is the mean of the truncated importance weights.

    Attributes:
        size: Rows of the ring. A row has ``2 R + P`` numbers of 4 bytes and five more.
        bound: Return b that a stored completion is above. Infinity stores none, which is the step without replay.
        samples: Completions of an update, at most ``size``.
        coef: Coefficient of the replayed loss. 0 leaves it out: the step without replay, to the bit.
        truncate: Upper bound of the importance weight of a token; None: the weight is 1.
        prompt_tokens: P, the tokens of the longest prompt that is stored. Longer ones are left out.
        update: Function that updates on the batches, those of the replay included.
    """

    size: int = 1024
    bound: float = 0.5
    samples: int = 64
    coef: float = 1.0
    truncate: float | None = 1.0
    prompt_tokens: int = 512
    update: UpdateFunction = policy_update
    name: ClassVar[str] = "replay"

    def __post_init__(self) -> None:
        at_least("Replay.size", self.size, 1)
        at_least("Replay.samples", self.samples, 1, self.size)
        at_least("Replay.coef", self.coef, 0)
        at_least("Replay.prompt_tokens", self.prompt_tokens, 1)
        if self.truncate is not None:
            at_least("Replay.truncate", self.truncate, 0)
        if self.bound != self.bound:
            raise ConfigError("Replay.bound: expected a number, got nan")

    def begin(self, step: StepParts, agents: Params) -> Ring:
        """An empty ring.

        Args:
            step: parts of the training step.
            agents: not used.

        Raises:
            ConfigError: The run has a part that replay does not go with.
        """
        cfg, algorithm = step.cfg, step.algorithm
        beyond = {
            "loss.objective: expected another loss than dpo": cfg.loss.objective == "dpo",
            "mesh.models: expected 'all'": cfg.mesh.models == "split",
            "team.critic: expected none": algorithm.critic is not None or bool(step.team.critics),
            "recipe: expected roles that all learn in every step": algorithm.trainable_roles is not None,
        }
        for name, asked in beyond.items():
            if asked:
                raise ConfigError(f"config.{name} with replay of good samples")
        n, p, r = self.size, self.prompt_tokens, max(role.max_new_tokens for role in step.team.roles)
        ints, floats = (lambda *of: jnp.zeros(of, jnp.int32)), (lambda *of: jnp.zeros(of, jnp.float32))
        rows = Samples(ints(n, p), ints(n), ints(n, r), ints(n), floats(n, r), floats(n), ints(n))
        return Ring(rows, jnp.int32(0))

    def __call__(
        self, step: StepParts, driver: Driver, state: TrainState, batches: Mapping[str, list[Batch]]
    ) -> Updates:
        """Update on the step's batches and on drawn completions.

        Args:
            step: parts of the training step.
            driver: driver that runs the step.
            state: state before the update.
            batches: micro-batches by model.
        """
        if not self.coef:
            return self.update(step, driver, state, batches)
        key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), REPLAY)
        drawn, stored = driver.host(draw(key, state.kept[self.name], self.samples))
        mixed, seen = dict(batches), {}
        for index, model in enumerate(step.team.models):
            parts = batches_of(drawn, stored & (drawn.model == index), self.bound, step.cfg.loss, step.cfg.micro_tokens)
            if parts:
                replayed = [self._scored(step, driver, state, model, part) for part in parts]
                mixed[model.name] = [*batches.get(model.name, []), *(batch for batch, _ in replayed)]
                seen[model.name] = sum(weight for _, weight in replayed)
        state, metrics = self.update(step, driver, state, mixed)
        return state, {name: {**m, "replay_weight": seen[name]} if name in seen else m for name, m in metrics.items()}

    def _scored(
        self, step: StepParts, driver: Driver, state: TrainState, model: Model, batch: Batch
    ) -> tuple[Batch, Any]:
        """A micro-batch with importance weights in its advantages, and the sum of ``w_t`` times these weights."""
        shared = None if model.base is None else state.params["shared"][model.base]
        rows = sharding.put_rows(pad_rows(batch, sharding.row_parts()))
        own = state.params["agents"][model.name]
        logprobs = driver.host(sharding.settle(step.learners[model.name].score(own, shared, rows)))[: len(batch.length)]
        weighted, weight = importance_weighted(batch, logprobs, self.truncate)
        return driver.host((weighted.replace(weights=self.coef * weighted.weights), weight))

    def keep(self, step: StepParts, kept: PyTree, result: StepResult) -> tuple[Ring, Mapping[str, Any]]:
        """Store the good completions of a step.

        Args:
            step: parts of the training step, not used.
            kept: ring before the step.
            result: result of the step.
        """
        nodes, steps, node = result.tree.nodes, result.tree.steps, result.tree.steps.node
        rows = Samples(
            nodes.tokens[node],
            nodes.length[node],
            steps.tokens,
            steps.length,
            steps.logprobs,
            result.credited.returns,
            nodes.model[node],
        )
        learnt = result.trained & steps.valid & (steps.source == POLICY) & steps.loss_mask.any(-1)
        ring, added, too_long = push(kept, rows, learnt, self.bound)
        weights = [m["replay_weight"] for m in result.updated.values() if "replay_weight" in m]
        seen = {"replay/weight": sum(weights) / len(weights)} if weights else {}
        stored = jnp.minimum(ring.count, self.size)
        return ring, {"replay/stored": stored, "replay/added": added, "replay/too_long": too_long, **seen}


@jax.jit
def push(
    ring: Ring, rows: Samples, trained: Bool[Array, " C"], bound: float
) -> tuple[Ring, Int[jax.Array, ""], Int[jax.Array, ""]]:
    """Store the rows of a return above a bound. Rows that are too long for the ring are left out.

    Args:
        ring: the ring. Where there are more rows than it holds, the last ones stay.
        rows: completions [C].
        trained: completions that may be stored.
        bound: return that a stored completion is above.

    Returns:
        The ring, the number of stored rows, and the number of rows that were too long.
    """
    (size, width), most = ring.samples.prompt.shape, ring.samples.tokens.shape[1]
    wanted = trained & (rows.value > bound)
    good = wanted & (rows.prompt_length <= width) & (rows.length <= most)
    place, total = jnp.cumsum(good) - 1, jnp.sum(good)
    slot = jnp.where(good & (place >= total - size), (ring.count + place) % size, size)

    def put(old: jax.Array, new: jax.Array) -> jax.Array:
        if new.ndim == 2:
            width = old.shape[1]
            new = jnp.pad(new[:, :width], ((0, 0), (0, max(0, width - new.shape[1]))))
        return old.at[slot].set(new.astype(old.dtype), mode="drop")

    return Ring(jax.tree.map(put, ring.samples, rows), ring.count + total), total, jnp.sum(wanted) - total


@functools.partial(jax.jit, static_argnames=("samples",))
def draw(key: jax.Array, ring: Ring, samples: int) -> tuple[Samples, Bool[jax.Array, " N"]]:
    """Draw stored completions without replacement, and tell which rows are stored ones.

    Args:
        key: random key.
        ring: the ring. Where it holds fewer than ``samples``, the rows behind them are not stored ones.
        samples: number of completions, N.
    """
    size = len(ring.samples.length)
    stored = jnp.arange(size) < ring.count
    order = jnp.where(stored, jax.random.uniform(key, (size,)), -1.0)
    rows = jax.lax.top_k(order, samples)[1]
    return jax.tree.map(lambda x: x[rows], ring.samples), stored[rows]


def batches_of(samples: Samples, mine: Bool[Array, " N"], bound: float, loss: Loss, micro_tokens: int) -> list[Batch]:
    """Micro-batches of the samples of one model, each a group of its own with advantage ``max(R - bound, 0)``.

    Args:
        samples: completions.
        mine: which samples count. On the host the others are left out, and prompts and completions are cut to buckets
            of the longest ones. In a compiled run shapes are static, and the others weigh 0.
        bound: b, subtracted from the returns.
        loss: sets the weight of each token.
        micro_tokens: tokens of a micro-batch, at most where possible.
    """
    p, r = samples.prompt.shape[1], samples.tokens.shape[1]
    if isinstance(mine, np.ndarray):
        rows = np.flatnonzero(mine)
        if not len(rows):
            return []
        count = min(bucket(len(rows), 4), len(mine))
        mine = np.arange(count) < len(rows)
        samples = jax.tree.map(lambda x: x[np.resize(rows, count)], samples)  # padded by rows that weigh 0
        p = min(p, bucket(int(samples.prompt_length.max()), 16))
        r = min(r, bucket(int(samples.length.max()), 8))
    mask = np.arange(r) < samples.length[:, None]
    weights = token_weights(mask, mine.astype(np.float32), loss.aggregation, loss.loss_length)
    gain = jnp.maximum(samples.value - bound, 0.0)
    group = lambda x: x[:, None, :r]
    whole = Batch(
        tokens=samples.prompt[:, :p],
        length=jnp.maximum(samples.prompt_length, 1),
        completions=group(samples.tokens),
        weights=group(weights),
        advantages=group(jnp.broadcast_to(gain[:, None], mask.shape)),
        sampler_logprobs=group(samples.logprobs),
    )
    parts = [part for stack in stacks_of_rows(len(mask), micro_tokens // (p + r)) for part in stack]
    return [jax.tree.map(lambda x, part=part: x[part], whole) for part in parts]


def importance_weighted(
    batch: Batch, logprobs: Float[Array, "N G R"], truncate: float | None
) -> tuple[Batch, Float[jax.Array, ""]]:
    """Multiply advantages by ``min(pi / mu, truncate)``, and count the batch as sampled by pi from then on.

    Args:
        batch: a micro-batch with log-probs of the policy mu that sampled it.
        logprobs: log-probs of its tokens under pi, without a gradient.
        truncate: upper bound of the weight of a token; None: the weight is 1.

    Returns:
        The micro-batch, and the sum over tokens of the batch's weight times the importance weight.
    """
    mask = jnp.asarray(batch.weights > 0)
    pi, mu = masked(mask, jnp.asarray(logprobs)), masked(mask, jnp.asarray(batch.sampler_logprobs))
    ratio = jnp.ones_like(pi)
    if truncate is not None:
        ratio = jnp.minimum(jnp.exp(log_ratios(pi, mu, mask, "token")), truncate)
    weighted = batch.replace(advantages=ratio * batch.advantages, sampler_logprobs=pi)
    return weighted, jnp.sum(batch.weights * ratio)
