"""Memory, FLOPs and time of a rollout and its update.

Bytes and FLOPs follow from the architecture and from `costs.counts`. Seconds follow from the public figures of a chip
(`roofline`, a lower bound), or from a short calibration on this machine. Where an allocation depends on uncertain
events (padding, cache, launches of a host rollout), the result is the largest possible allocation.

Arguments of all functions: ``cfg`` and ``arch`` are the architecture of a model, and ``weights`` is its size. ``plan``
is the plan of sampling, and ``work`` the workload.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxmarl_llm.costs.chips import Chip
from jaxmarl_llm.costs.counts import (
    Launch,
    Lengths,
    ModelSize,
    RoleLengths,
    Workload,
    acting,
    counts,
    launches,
    longest,
    mean,
    turn_states,
)
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.rollout.plans import Plan

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Number of copies of the trained parameters in an optimizer's state. The factors of adafactor are a fraction of a copy.
MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0, "adafactor": 0}


# ---- the model ------------------------------------------------------------------------------------------------------


def kernels(cfg: Config) -> dict[str, tuple[int, int]]:
    """Shape (in, out) of each weight matrix of a layer."""
    d, f, q, kv = cfg.hidden_size, cfg.intermediate_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    heads = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
    return {**heads, "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}


def parameters(cfg: Config) -> int:
    """Number of parameters of ``make_policy(cfg).init``: embedding, layers, last norm, and an untied output head."""
    layer = sum(a * b for a, b in kernels(cfg).values()) + 2 * cfg.hidden_size
    layer += (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim if cfg.attention_bias else 0
    layer += 2 * cfg.head_dim if cfg.qk_norm else 0
    embedding = cfg.vocab_size * cfg.hidden_size
    return embedding * (1 if cfg.tie_embeddings else 2) + cfg.num_layers * layer + cfg.hidden_size


def adapter_parameters(weights: ModelSize) -> int:
    """Number of parameters of a LoRA adapter: r (in + out) for each target of each layer."""
    shapes = kernels(weights.config)
    return weights.config.num_layers * weights.rank * sum(sum(shapes[t]) for t in weights.targets)


def own_bytes(weights: ModelSize) -> int:
    """Bytes of one model's trained parameters. Adapters and value heads are float32."""
    if weights.rank:
        return 4 * (adapter_parameters(weights) + weights.extra)
    return ITEMSIZE[weights.config.dtype] * parameters(weights.config) + 4 * weights.extra


def base_bytes(models: Sequence[ModelSize]) -> int:
    """Bytes of the frozen bases of adapters, one base for each architecture.

    models: sizes of the models of a run.
    """
    return sum(ITEMSIZE[c.dtype] * parameters(c) for c in {w.config for w in models if w.rank})


def matrix_bytes(weights: ModelSize) -> int:
    """Bytes of the weight matrices of all layers in the dtype of training, without adapters."""
    c = weights.config
    return ITEMSIZE[c.dtype] * c.num_layers * sum(a * b for a, b in kernels(c).values())


def formed_bytes(weights: ModelSize) -> int:
    """Bytes of the matrices that a training rollout reads beside the parameters: 0 unless they have another form.

    int8 and fp8: one byte for each entry and a float32 scale for each column.
    """
    c = weights.config
    of_layer = sum(a * b + 4 * b for a, b in kernels(c).values())
    return 0 if weights.rollout_weights == "same" else c.num_layers * of_layer


def saved_reading(weights: ModelSize) -> int:
    """Bytes by which the weights that a rollout reads are fewer than those of training."""
    formed = formed_bytes(weights)
    return matrix_bytes(weights) - formed if formed else 0


def token_flops(weights: ModelSize) -> int:
    """FLOPs of one token in all weight matrices of the layers, adapters included: 2 in out for each matrix."""
    c = weights.config
    dense = c.num_layers * sum(2 * a * b for a, b in kernels(c).values())
    return dense + 2 * (adapter_parameters(weights) if weights.rank else 0)


def attention_flops(cfg: Config) -> int:
    """FLOPs of one query token and one key position in all layers: 2 H for the score and 2 H for the value per head."""
    return 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim


def cache_bytes(launch: Launch, weights: ModelSize, *, shared: bool = True) -> int:
    """Bytes of the keys and values of a launch.

    A slot holds 2 L K H numbers. There are N P slots for prompts and N G S slots for completions. S = max(R - 1, 1),
    because the last token is not read again. launch: the allocated shape. weights: the model. shared: False counts N G
    (P + S) slots, as if every sample had a prompt of its own.
    """
    own = max(launch.response - 1, 1)
    slots = sum(part.rows * ((1 if shared else part.group) * launch.prompt + part.group * own) for part in launch.parts)
    return slots * cache_slot_bytes(weights)


def cache_slot_bytes(weights: ModelSize) -> int:
    """Bytes of the cached keys and values of one token in all layers.

    int8 and fp8: one byte for each number and a float32 scale for each key and each value of a head.
    """
    c = weights.config
    vector = c.head_dim * ITEMSIZE[c.dtype] if weights.rollout_cache == "same" else c.head_dim + 4
    return 2 * c.num_layers * c.num_kv_heads * vector


def layer_bytes(weights: ModelSize) -> int:
    """Bytes of what the layers read for any sampled token: all parameters but the embedding and the output head."""
    c = weights.config
    tables = c.vocab_size * c.hidden_size * (1 if c.tie_embeddings else 2)
    adapters = 4 * adapter_parameters(weights) if weights.rank else 0
    return ITEMSIZE[c.dtype] * (parameters(c) - tables) + adapters - saved_reading(weights)


def logits_bytes(launch: Launch, cfg: Config) -> int:
    """Bytes of the float32 logits of one decoding step of ``launch``."""
    return 4 * sum(part.rows * part.group for part in launch.parts) * cfg.vocab_size


class Work(NamedTuple):
    """FLOPs of a launch with its padding, as the portable program computes them: for `features`.

    prefill, decode: FLOPs; decode includes the output head. steps: expected tokens of the longest completion.
    """

    prefill: float
    decode: float
    steps: float


def launch_work(launch: Launch, weights: ModelSize) -> Work:
    """Work of one launch: matrix products only.

    launch: the allocated shape and the rows that are computed. weights: the model. T decoding steps compute the head T
    times for N G samples, and the layers T - 1 times.
    """
    c, n = weights.config, sum(part.computed for part in launch.parts)
    lanes = sum(part.computed * part.group for part in launch.parts)
    steps, own = longest(launch.samples), max(launch.response - 1, 1)
    per, pair = token_flops(weights), attention_flops(c)
    prefill = n * launch.prompt * (per + pair * launch.prompt)
    decode = lanes * (steps * head_flops(c) + max(steps - 1, 0) * (per + pair * (launch.prompt + own)))
    return Work(prefill, decode, steps)


def head_flops(cfg: Config) -> int:
    """FLOPs of the output head for one token."""
    return 2 * cfg.hidden_size * cfg.vocab_size


def triangle(lengths: Lengths) -> float:
    """Expected number of pairs (query, key) of a causal sequence: E[n (n + 1) / 2].

    lengths: distribution of n.
    """
    return (mean(lengths, 2) + mean(lengths)) / 2


class LeastWork(NamedTuple):
    """Lower bounds of what a launch computes and moves, in expectation. No padding and no masked pair is counted.

    prefill, decode: FLOPs; decode includes the output head. prefill_bytes, decode_bytes: weights read, cache written
    and read. unshared_prefill: FLOPs of the prefill if every sample had a prompt of its own. uncached_prefill: FLOPs of
    the prefill if nothing was cached before: every node's prompt goes through the model once.
    """

    prefill: float
    decode: float
    prefill_bytes: float
    decode_bytes: float
    unshared_prefill: float
    uncached_prefill: float


def least_work(launch: Launch, weights: ModelSize) -> LeastWork:
    """Lower bounds of one launch, from the expected nodes of its ``members`` and their lengths.

    launch: its members count every node once, in the launch of the model that plays it. weights: the model.

    A prompt of p tokens takes p tokens and p (p + 1) / 2 pairs of attention. Where all but its last token may be
    cached, it takes one token and p pairs. A completion of r tokens takes the head r times and the layers r - 1 times.
    Its pairs are (r - 1) p + r (r - 1) / 2. Weights are read at least once, and once in each step until the last
    completion ends (`least_steps`).
    """
    c = weights.config
    per, pair, head = token_flops(weights), attention_flops(c), head_flops(c)
    prefill = decode = uncached = unshared = written = read = 0.0
    for g, part in launch.members:
        p, r = mean(part.prompt), mean(part.response)
        whole = per * p + pair * triangle(part.prompt)
        prefill += part.fresh * whole + (part.nodes - part.fresh) * (per + pair * p)
        uncached += part.nodes * whole
        unshared += part.nodes * whole * g
        own = triangle(part.response) - r  # r (r - 1) / 2
        decode += part.nodes * g * (r * head + (r - 1) * per + pair * ((r - 1) * p + own))
        written += part.fresh * p
        read += part.nodes * ((r - 1) * p + g * max(own - (r - 1), 0.0))
    steps, started = least_steps(launch), max((x.nodes / x.most for _, x in launch.members), default=0.0)
    slot = cache_slot_bytes(weights)
    layers, table = layer_bytes(weights), ITEMSIZE[c.dtype] * c.vocab_size * c.hidden_size
    decode_bytes = steps * table + max(steps - started, 0.0) * layers + read * slot
    return LeastWork(prefill, decode, started * layers + written * slot, decode_bytes, unshared, uncached)


def least_steps(launch: Launch) -> float:
    """Lower bound of the expected number of decoding steps of a launch: the tokens of its longest completion.

    Members whose number of nodes is certain count together. For a member that has n of at most N nodes in expectation,
    the bound is n / N times the longest of N G completions. The reason: the longest is concave in the number of
    completions.
    """
    certain = [(x.nodes * g, x.response) for g, x in launch.members if x.nodes == x.most]
    uncertain = [x.nodes / x.most * longest([(x.most * g, x.response)]) for g, x in launch.members if x.nodes != x.most]
    return max([longest(certain), *uncertain])


# ---- memory ---------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Lower bound of the bytes that a run holds.

    It leaves out activations, tables, prefixes that a host rollout caches, and memory that the compiler adds.

    base: frozen parameters. own: trained parameters of all models. optimizer: optimizer states. copies: reference
    policy and past policies. cache, logits: of the largest launch. unshared_cache: the same cache if every sample had a
    prompt of its own. gradient: float32 gradients of the largest model, two while micro-batches are summed. offload:
    the optimizer state of a model is on the device only during this model's update. formed: matrices of all models in
    the form that rollouts read, beside the parameters.
    """

    base: int
    own: int
    optimizer: int
    copies: int
    cache: int
    unshared_cache: int
    logits: int
    gradient: int
    offload: bool = False
    formed: int = 0

    @property
    def resident(self) -> int:
        """Bytes resident during the whole run."""
        return self.base + self.own + self.copies + (0 if self.offload else self.optimizer)

    @property
    def generating(self) -> int:
        """Bytes during the largest launch."""
        return self.resident + self.formed + self.cache + self.logits

    @property
    def updating(self) -> int:
        """Bytes during an update, without activations."""
        return self.base + self.own + self.copies + self.optimizer + self.gradient

    @property
    def peak_lower_bound(self) -> int:
        """Lower bound of the peak: the larger of generation and update."""
        return max(self.generating, self.updating)


def optimizer_bytes(weights: ModelSize, optimizer: str, masters: bool) -> int:
    """Bytes of one model's optimizer state.

    weights: the model. optimizer: its name in MOMENTS. masters: for a full copy that is not float32, moments and a
    master copy of the parameters are float32. Otherwise moments have the dtype of the parameters.
    """
    own = own_bytes(weights)
    if not masters or weights.rank or weights.config.dtype == "float32":
        return MOMENTS[optimizer] * own
    numbers = parameters(weights.config)
    return 4 * (MOMENTS[optimizer] * (numbers + weights.extra) + numbers)


def memory(
    plan: Plan,
    work: Workload,
    *,
    optimizer: str = "adamw",
    copies: int = 0,
    masters: bool = True,
    offload: bool = False,
) -> Memory:
    """Lower bound of the memory of ``plan`` on ``work``.

    copies: number of additional copies of all trained parameters. optimizer, masters, offload: as in
    `training.optimizers.Optimizer`.
    """
    started = launches(plan, work)
    of = lambda launch: work.models[launch.model]
    top = max(started, key=lambda x: cache_bytes(x, of(x)) + logits_bytes(x, of(x).config))
    own = [own_bytes(w) for w in work.models]
    numbers = max(adapter_parameters(w) if w.rank else parameters(w.config) for w in work.models)
    return Memory(
        base_bytes(work.models),
        sum(own),
        (max if offload else sum)([optimizer_bytes(w, optimizer, masters) for w in work.models]),
        copies * sum(own),
        cache_bytes(top, of(top)),
        cache_bytes(top, of(top), shared=False),
        logits_bytes(top, of(top).config),
        2 * 4 * numbers,
        offload,
        sum(formed_bytes(w) for w in _copies(work.models)),
    )


def _copies(models: Sequence[ModelSize]) -> list[ModelSize]:
    """Models with weight matrices of their own, and one for each frozen base of adapters."""
    return [w for w in models if not w.rank] + list({w.config: w for w in models if w.rank}.values())


def rollout_bytes(models: Sequence[ModelSize]) -> int:
    """Bytes of the weights that rollouts of ``models`` read: bases, own parameters, and matrices in their form."""
    fewer = sum(map(saved_reading, _copies(models)))
    return base_bytes(models) + sum(map(own_bytes, models)) - fewer


def update_bytes(arch: Config, rows: int, prompt: int, group: int, response: int, remat: bool) -> int:
    """Estimate of the bytes that one micro-batch stores for its backward pass: activations and attention scores.

    arch: the model. rows: prompts of the micro-batch, each with ``group`` completions. prompt, response: tokens of
    each. remat: only the input of each layer is stored.
    """
    return saved_bytes(arch, rows, prompt, group, response, remat) + rows * saved_scores(
        arch, prompt, group, response, remat
    )


def saved_bytes(arch: Config, rows: int, prompt: int, group: int, response: int, remat: bool) -> int:
    """Part of `update_bytes` that stores vectors for each token. Arguments are those of `update_bytes`."""
    d, f, heads = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
    saved, tokens = d if remat else 6 * d + 3 * f + 3 * heads, prompt + group * response
    return rows * tokens * ITEMSIZE[arch.dtype] * (arch.num_layers * saved + 6 * d + 3 * f)


def saved_scores(arch: Config, prompt: int, group: int, response: int, remat: bool) -> int:
    """Part of `update_bytes` for the attention scores of one row. Arguments are those of `update_bytes`.

    These are three arrays of the layer that is computed. Without ``remat``, the portable form of attention also stores
    scores and probabilities of every layer.
    """
    return (3 if remat else 3 + 2 * arch.num_layers) * score_bytes(arch, prompt, group, response)


def score_bytes(arch: Config, prompt: int, group: int, response: int) -> int:
    """Bytes of the float32 attention scores of one layer over a prompt and its completions.

    Arguments are those of `update_bytes`.
    """
    return 4 * arch.num_heads * (prompt**2 + group * response * (prompt + response))


# ---- time -----------------------------------------------------------------------------------------------------------


def roofline(chip: Chip, plan: Plan, work: Workload, update: UpdateSize) -> tuple[float, float]:
    """Lower bound of the seconds of rollout and update on one chip.

    chip: its peak figures. update: size of the update's batch. The launches run one after another; prefill and decoding
    of each take the longer of FLOPs / peak and bytes / bandwidth (`least_work`). Environments take no time.
    """
    rollout = 0.0
    for launch in launches(plan, work):
        w = least_work(launch, work.models[launch.model])
        rollout += max(w.prefill / chip.flops, w.prefill_bytes / chip.bandwidth)
        rollout += max(w.decode / chip.flops, w.decode_bytes / chip.bandwidth)
    return rollout, update.flops / chip.flops


FEATURES = ("launch", "decode step", "sequence", "prefill FLOP", "decode FLOP")


def features(plan: Plan, work: Workload) -> list[float]:
    """Quantities that determine the time of a rollout, in the order of FEATURES."""
    seen = counts(plan, work)
    done = [launch_work(launch, work.models[launch.model]) for launch in launches(plan, work)]
    flops = sum(w.prefill for w in done), sum(w.decode for w in done)
    return [float(seen.launches), float(seen.decode_steps), float(seen.sequences), *map(float, flops)]


class Calibration(NamedTuple):
    """Fitted speed of one machine.

    seconds: time of one unit of each of FEATURES. spread: largest relative gap between the shortest and the third
    shortest repeat of a setting. stable: whether the spread is at most UNSTABLE.
    """

    seconds: tuple[float, ...]
    spread: float
    stable: bool

    def predict(self, parts: Sequence[float]) -> float:
        """Predicted seconds of a rollout with the features ``parts``."""
        return sum(a * b for a, b in zip(self.seconds, parts))


UNSTABLE = 0.25  # a machine with a larger spread of repeats counts as unstable


def calibrate(parts: Sequence[Sequence[float]], repeats: Sequence[Sequence[float]]) -> Calibration:
    """Fit the seconds of each feature by non-negative least squares with relative errors.

    parts: features of each setting [settings, 5]. repeats: measured seconds of each setting, 3 or more. The fit uses
    the shortest repeat, because other programs only add time. A shortest repeat is reliable if two more repeats are
    close to it; otherwise ``stable`` is False.
    """
    import numpy as np
    from scipy.optimize import nnls

    if min(len(r) for r in repeats) < 3 or len(parts) < len(FEATURES):
        raise ConfigError(f"calibration: expected {len(FEATURES)} settings or more, of 3 repeats or more")
    best = np.array([min(r) for r in repeats])
    x = np.array(parts, float) / best[:, None]
    scale = np.maximum(x.max(0), 1e-300)
    found, _ = nnls(x / scale, np.ones(len(best)))
    spread = float(max((sorted(r)[2] - min(r)) / min(r) for r in repeats))
    return Calibration(tuple(float(v) for v in found / scale), spread, spread <= UNSTABLE)


class UpdateSize(NamedTuple):
    """Expected size of an update's batch.

    sequences: trained completions. prompt_tokens: prompt tokens, each trained node once; an upper bound, because
    conversations share more (`training.packing`). completion_tokens: their tokens. unshared_prompt_tokens: prompt
    tokens if every completion had a prompt of its own. flops: lower bound of the FLOPs of one epoch.
    """

    sequences: float
    prompt_tokens: float
    completion_tokens: float
    unshared_prompt_tokens: float
    flops: float


def trained_token_flops(weights: ModelSize, remat: bool) -> int:
    """Lower bound of the FLOPs of one token in the weight matrices of an update.

    One forward pass; in the backward pass one product for the input and, unless the matrix is frozen, one for the
    matrix. weights: the model. remat: layers are computed once more, without the down projection, whose result the
    backward pass does not use. Under an adapter nothing below the first layer learns, so that q, k and v of the first
    layer need no gradient of their input.
    """
    c, rank = weights.config, weights.rank
    shapes, per, dense = kernels(c), token_flops(weights), token_flops(weights._replace(rank=0))
    total = (4 if remat else 3) * per - (dense if rank else 0)
    if remat:
        rows, columns = shapes["down_proj"]
        adapter = 2 * rank * columns if rank and "down_proj" in weights.targets else 0
        total -= c.num_layers * (2 * rows * columns + adapter)
    if rank:
        first = ("q_proj", "k_proj", "v_proj")
        total -= sum(2 * math.prod(shapes[name]) for name in first)
        total -= sum(2 * rank * shapes[name][0] for name in first if name in weights.targets)
    return total


def update_flops(role: RoleLengths, turn: int, group: int, weights: ModelSize, remat: bool) -> tuple[float, float]:
    """Lower bound of an update's FLOPs for one trained node: of its prompt, and of its completions.

    role: lengths. turn: of the node. group: completions of the node, all trained. weights: the model of the role.
    remat: the layers are computed once more. The last token of a completion is not read, and attention counts the pairs
    that a causal mask leaves. The output head counts as in `kernels.head.loss`, which computes logits once; with
    filters or a context axis they are computed twice.
    """
    prompt = role.prompt_at(turn)
    p, r = mean(prompt), mean(role.response)
    token, pair = trained_token_flops(weights, remat), (4 if remat else 3) * attention_flops(weights.config)
    own = triangle(role.response) - r
    head = (2 if weights.rank else 3) * head_flops(weights.config) * r
    samples = group * (token * (r - 1) + pair * ((r - 1) * p + own) + head)
    return token * p + pair * triangle(prompt), samples


def update_size(
    plan: Plan,
    work: Workload,
    *,
    groups: bool = False,
    most: int | None = None,
    remat: bool = True,
    shares: Sequence[float] | None = None,
) -> UpdateSize:
    """Size of an update on the rollout tree.

    groups: train only completions with siblings, instead of all. most: largest number of trained nodes (None: all). The
    selection depends on rewards: tokens are those of the nodes with the most tokens, FLOPs those of the nodes that cost
    least. remat: the layers are computed once more. shares: for each role, the share of its completions that is trained
    (None: all of every role).

    FLOPs are a lower bound. They leave out the padding of micro-batches. An update of a host rollout may hold the
    prompts of a task once (`training.packing`). So they count once for each task and model, and not at all where some
    nodes are left out. Completions of one node are taken to differ from the first token on.
    """
    rows: list[tuple[float, float, float, float, float]] = []
    costs: list[tuple[float, float]] = []  # (nodes, FLOPs of a node)
    whole: dict[int, float] = {}  # model -> FLOPs of the prompts of a host rollout
    for level in turn_states(plan, work):
        if groups and level.group < 2:
            continue
        t, g = level.branch.turn, level.group
        for n, index in acting(level, work):
            role, share = work.roles[index], 1.0 if shares is None else shares[index]
            p, r = mean(role.prompt_at(t)), mean(role.response)
            rows.append((n * share, g, p, g * r, g * p))
            prompt, samples = update_flops(role, t, g, work.models[role.model], remat)
            host = work.engine == "host"
            costs.append((n * share, samples if host else prompt + samples))
            if host and most is None and share == 1 and n:
                sure = work.tasks * (n / level.slots)
                whole[role.model] = max(whole.get(role.model, 0.0), min(sure, n) * prompt)
    rows.sort(key=lambda row: -(row[2] + row[3]))
    total = [0.0] * 4
    for n, row in _first(most, [(row[0], row) for row in rows]):
        total = [t + n * c for t, c in zip(total, row[1:])]
    costs.sort(key=lambda row: row[1])
    flops = sum(n * cost for n, cost in _first(most, costs)) + sum(whole.values())
    sequences, prompts, completions, unshared = total
    return UpdateSize(sequences, prompts, completions, unshared, flops)


def _first(most: int | None, rows: Sequence[tuple[float, Any]]) -> Iterator[tuple[float, Any]]:
    """``rows`` (nodes, anything) from the first one on, cut after ``most`` nodes (None: not cut)."""
    left: float = math.inf if most is None else most
    for n, row in rows:
        n = min(n, left)
        left -= n
        yield n, row
