"""What a rollout and its update cost beyond counts: parameters, cache bytes, memory, FLOPs, seconds.

Bytes and FLOPs follow from the architecture and the counts of `complexity`; seconds from public figures of a chip
(`roofline`, a lower bound) or from a short calibration on this machine. Where allocations depend on what is uncertain
(padding, cache, launches of a host rollout) the largest possible is meant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxmarl_llm.complexity import Launch, Weights, Workload, acting, counts, launches, levels, longest, mean
from jaxmarl_llm.plans import Plan
from jaxmarl_llm.qwen import Config
from jaxmarl_llm.text import ConfigError

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Copies of the trained parameters in an optimizer's state; adafactor's factors are a fraction of one.
MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0, "adafactor": 0}


# ---- the model ------------------------------------------------------------------------------------------------------


def kernels(cfg: Config) -> dict[str, tuple[int, int]]:
    """[in, out] of each matrix of a layer."""
    d, f, q, kv = cfg.hidden_size, cfg.intermediate_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    heads = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
    return {**heads, "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}


def parameters(cfg: Config) -> int:
    """Numbers in ``make_policy(cfg).init``: embedding, layers, last norm, and a head where it is not tied."""
    layer = sum(a * b for a, b in kernels(cfg).values()) + 2 * cfg.hidden_size
    layer += (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim if cfg.attention_bias else 0
    layer += 2 * cfg.head_dim if cfg.qk_norm else 0
    embedding = cfg.vocab_size * cfg.hidden_size
    return embedding * (1 if cfg.tie_embeddings else 2) + cfg.num_layers * layer + cfg.hidden_size


def adapter_parameters(weights: Weights) -> int:
    """r (in + out) a target and layer."""
    shapes = kernels(weights.config)
    return weights.config.num_layers * weights.rank * sum(sum(shapes[t]) for t in weights.targets)


def own_bytes(weights: Weights) -> int:
    """Trained parameters of one model. Adapters and value heads are float32."""
    if weights.rank:
        return 4 * (adapter_parameters(weights) + weights.extra)
    return ITEMSIZE[weights.config.dtype] * parameters(weights.config) + 4 * weights.extra


def base_bytes(models: Sequence[Weights]) -> int:
    """The frozen base of adapters, once for each architecture."""
    return sum(ITEMSIZE[c.dtype] * parameters(c) for c in {w.config for w in models if w.rank})


def token_flops(weights: Weights) -> int:
    """Multiplications and additions of one token in all matrices of the trunk: 2 in out each (adapters too)."""
    c = weights.config
    dense = c.num_layers * sum(2 * a * b for a, b in kernels(c).values())
    return dense + 2 * (adapter_parameters(weights) if weights.rank else 0)


def attention_flops(cfg: Config) -> int:
    """Of one query token and one key position, all layers: 2 H for the score and 2 H for the value, each head."""
    return 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim


def cache_bytes(launch: Launch, cfg: Config, *, shared: bool = True) -> int:
    """Keys and values of a launch: 2 L K H for each of N P prompt and N G S own slots, S = max(R - 1, 1): the last
    token is not read again. Not ``shared``: N G (P + S), as if every sample had its prompt to itself.
    """
    own = launch.group * max(launch.response - 1, 1)
    slots = launch.rows * ((launch.prompt if shared else launch.group * launch.prompt) + own)
    return slots * 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * ITEMSIZE[cfg.dtype]


def logits_bytes(launch: Launch, cfg: Config) -> int:
    """float32 logits of one token of every sample, once."""
    return 4 * launch.rows * launch.group * cfg.vocab_size


class Work(NamedTuple):
    """What a launch computes, padding included: it is computed too."""

    prefill: float  # FLOPs
    decode: float  # FLOPs, heads included
    prefill_bytes: float  # read at least: weights once, the prompts' cache written
    step_bytes: float  # read at least for one token of each sample: weights, cache
    steps: float  # expected tokens of the longest completion


def work_of(launch: Launch, weights: Weights) -> Work:
    """Matrix products alone. T steps draw T tokens (N G heads each) and go through the trunk T - 1 times."""
    c, n, lanes = weights.config, launch.rows, launch.rows * launch.group
    steps, own = longest(launch.samples), max(launch.response - 1, 1)
    per, pair = token_flops(weights), attention_flops(c)
    prefill = n * launch.prompt * (per + pair * launch.prompt)
    head = 2 * c.hidden_size * c.vocab_size
    decode = lanes * (steps * head + max(steps - 1, 0) * (per + pair * (launch.prompt + own)))
    size = base_bytes([weights]) + own_bytes(weights) if weights.rank else own_bytes(weights)
    cache = cache_bytes(launch, c)
    return Work(prefill, decode, size + cache, size + cache, steps)


# ---- memory ---------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes a run holds, at least: activations, tables, what earlier turns of a host rollout left cached (`prefixes`)
    and what the compiler adds are not in it.
    """

    base: int  # frozen
    own: int  # trained, all models
    optimizer: int
    copies: int  # reference policy and past policies
    cache: int  # of the largest launch
    unshared_cache: int  # of the same, had every sample its prompt to itself
    logits: int  # of the largest launch
    gradient: int  # float32, of the largest model, two while micro-batches are added up
    offload: bool = False  # optimizer states are there in their model's update alone

    @property
    def kept(self) -> int:
        """All the time."""
        return self.base + self.own + self.copies + (0 if self.offload else self.optimizer)

    @property
    def generating(self) -> int:
        return self.kept + self.cache + self.logits

    @property
    def updating(self) -> int:
        return self.base + self.own + self.copies + self.optimizer + self.gradient

    @property
    def least(self) -> int:
        """The higher of generation and update."""
        return max(self.generating, self.updating)


def optimizer_bytes(weights: Weights, optimizer: str, masters: bool) -> int:
    """Of one model's optimizer state: moments as its parameters are, or all in float32 with `Masters`."""
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
    """``copies``: of all trained parameters that are kept beside them. The rest as in `optimizers.Optimizer`."""
    started = launches(plan, work)
    of = lambda launch: work.models[launch.model].config
    top = max(started, key=lambda x: cache_bytes(x, of(x)) + logits_bytes(x, of(x)))
    own = [own_bytes(w) for w in work.models]
    numbers = max(adapter_parameters(w) if w.rank else parameters(w.config) for w in work.models)
    return Memory(
        base_bytes(work.models),
        sum(own),
        (max if offload else sum)([optimizer_bytes(w, optimizer, masters) for w in work.models]),
        copies * sum(own),
        cache_bytes(top, of(top)),
        cache_bytes(top, of(top), shared=False),
        logits_bytes(top, of(top)),
        2 * 4 * numbers,
        offload,
    )


def update_bytes(arch: Config, rows: int, prompt: int, group: int, response: int, remat: bool) -> int:
    """About what one micro-batch keeps for its backward pass: saved layers and attention scores.

    rows: prompts of a micro-batch, each with its ``group`` of completions. ``remat``: a layer's input alone is kept.
    """
    return saved_bytes(arch, rows, prompt, group, response, remat) + rows * kept_scores(
        arch, prompt, group, response, remat
    )


def saved_bytes(arch: Config, rows: int, prompt: int, group: int, response: int, remat: bool) -> int:
    """Of `update_bytes`, what has one vector a token."""
    d, f, heads = arch.hidden_size, arch.intermediate_size, arch.num_heads * arch.head_dim
    saved, tokens = d if remat else 6 * d + 3 * f + 3 * heads, prompt + group * response
    return rows * tokens * ITEMSIZE[arch.dtype] * (arch.num_layers * saved + 6 * d + 3 * f)


def kept_scores(arch: Config, prompt: int, group: int, response: int, remat: bool) -> int:
    """Of `update_bytes`, a row's scores: three arrays of the layer at work; without ``remat`` also scores and
    probabilities of every layer, where the portable form of attention runs.
    """
    return (3 if remat else 3 + 2 * arch.num_layers) * score_bytes(arch, prompt, group, response)


def score_bytes(arch: Config, prompt: int, group: int, response: int) -> int:
    """Float32 attention scores of one layer over a prompt and its completions."""
    return 4 * arch.num_heads * (prompt**2 + group * response * (prompt + response))


# ---- time -----------------------------------------------------------------------------------------------------------


class Chip(NamedTuple):
    flops: float  # bfloat16 without sparsity, per second
    bandwidth: float  # bytes per second
    memory: float  # bytes
    links: float  # bytes per second that it sends to other chips, over all of its links
    source: str


CHIPS = {
    "v5e": Chip(197e12, 819e9, 16e9, 200e9, "cloud.google.com/tpu/docs/v5e"),
    "v5p": Chip(459e12, 2765e9, 95e9, 600e9, "cloud.google.com/tpu/docs/v5p"),
    "v6e": Chip(918e12, 1638e9, 32e9, 400e9, "cloud.google.com/tpu/docs/v6e"),
    "a100": Chip(312e12, 2039e9, 80e9, 300e9, "NVIDIA A100 datasheet, SXM 80 GB"),
    "h100": Chip(989e12, 3.35e12, 80e9, 450e9, "NVIDIA H100 datasheet, SXM"),
    "h200": Chip(989e12, 4.8e12, 141e9, 450e9, "NVIDIA H200 datasheet, SXM"),
}


def roofline(chip: Chip, plan: Plan, work: Workload, update: Trained) -> tuple[float, float]:
    """Seconds of rollout and update on one chip at its full peak: what no implementation can be faster than.

    Each part takes the longer of its FLOPs over the peak and its bytes over the bandwidth; environments take none.
    """
    play = 0.0
    for launch in launches(plan, work):
        w = work_of(launch, work.models[launch.model])
        play += max(w.prefill / chip.flops, w.prefill_bytes / chip.bandwidth)
        play += max(w.decode / chip.flops, w.steps * w.step_bytes / chip.bandwidth)
    return play, update.flops / chip.flops


FEATURES = ("launch", "decode step", "sequence", "prefill FLOP", "decode FLOP")


def features(plan: Plan, work: Workload) -> list[float]:
    """What the time of a rollout is made of, in the order of FEATURES."""
    seen = counts(plan, work)
    done = [work_of(launch, work.models[launch.model]) for launch in launches(plan, work)]
    flops = sum(w.prefill for w in done), sum(w.decode for w in done)
    return [float(seen.launches), float(seen.decode_steps), float(seen.sequences), *map(float, flops)]


class Calibration(NamedTuple):
    """Seconds for one of each of FEATURES on one machine."""

    seconds: tuple[float, ...]
    spread: float  # the largest gap between a setting's shortest and third shortest repeat, over the shortest
    stable: bool

    def predict(self, parts: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(self.seconds, parts))


UNSTABLE = 0.25  # spread of repeats above which a machine is called unstable


def calibrate(parts: Sequence[Sequence[float]], repeats: Sequence[Sequence[float]]) -> Calibration:
    """Non-negative least squares of each setting's shortest repeat on its features [settings, 5], errors relative.

    Other programs only add time, hence the shortest. It is believed where two more come close to it: ``stable`` is
    otherwise False.
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


class Trained(NamedTuple):
    """Expected size of an update's batch."""

    sequences: float
    prompt_tokens: float  # each trained node's prompt once: the most, conversations share more (`packing`)
    completion_tokens: float
    unshared_prompt_tokens: float
    flops: float  # of one epoch


def trained(
    plan: Plan, work: Workload, *, groups: bool = False, most: int | None = None, remat: bool = True
) -> Trained:
    """What an update on the tree goes through: every completion, or with ``groups`` those with siblings alone.

    ``most``: at most so many nodes, and then those that cost most are counted: which are selected depends on rewards.
    FLOPs: forward, twice that backward (once in matrices that are frozen), and the trunk once more with ``remat``. The
    head as `head_loss` has it, logits once; with filters or on a mesh they are made twice. Padding of micro-batches is
    not counted.
    """
    passes = 4 if remat else 3
    rows: list[tuple[float, float, float, float, float, float]] = []
    for level in levels(plan, work):
        if groups and level.group < 2:
            continue
        for n, speaker in acting(level, work):
            p, r, g = mean(speaker.prompt_at(level.branch.turn)), mean(speaker.response), level.group
            weights = work.models[speaker.model]
            c, frozen = weights.config, weights.rank > 0
            pairs = mean(speaker.prompt_at(level.branch.turn), 2) + g * (p * r + mean(speaker.response, 2))
            a_token = passes * token_flops(weights)
            if frozen:  # no gradient of the matrices under an adapter
                a_token -= token_flops(weights._replace(rank=0))
            trunk = a_token * (p + g * r) + passes * attention_flops(c) * pairs
            head = (2 if frozen else 3) * 2 * c.hidden_size * c.vocab_size * g * r
            rows.append((n, g, p, g * r, g * p, trunk + head))
    rows.sort(key=lambda row: -(row[2] + row[3]))
    left: float = math.inf if most is None else most
    total = [0.0] * 5
    for n, *costs in rows:
        n = min(n, left)
        left -= n
        total = [t + n * c for t, c in zip(total, costs)]
    return Trained(*total)
