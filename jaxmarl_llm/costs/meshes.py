"""Meshes for n chips: memory of one chip by part and seconds of a step for every possible mesh, by closed forms.

`proposals` tries meshes and sizes of a micro-batch, and `mesh_sizes` is the one that a configuration takes on n chips.
Memory counts parameters, moments, copies, cache, logits, saved layers and attention scores. Seconds count FLOPs, bytes
read, and weights gathered and reduced over the links, not the latency of a collective. They are not below the lower
bound of `costs.model.roofline`. XLA may need more or less than these forms.

Shared arguments: ``cfg`` is the configuration, ``plan`` its plan of sampling and ``work`` its workload
(`costs.workload.workload_of`). ``mesh`` are the sizes of the axes data, fsdp and tensor, and of context where
``cfg.mesh`` has it. That size is taken as it is, no other one is tried. ``layout`` are the number of blocks and the
devices that cut weights during generation (`distributed.meshes.Layout`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.chips import Chip
from jaxmarl_llm.costs.counts import Launch, ModelSize, Workload, launches, turn_states
from jaxmarl_llm.costs.decodings import Decoding, decodings
from jaxmarl_llm.costs.workload import joins_adapters, memory_options, update_selection
from jaxmarl_llm.distributed.sharding import AXES, CONTEXT
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.buckets import up_to
from jaxmarl_llm.models import decoder_config
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.training.packing import micro_rows

ROWS = (1, 2, 4)  # prompts of one micro-batch on a device that are tried
BLOCKS = (2, 4, 8, 16)  # numbers of models that may generate at once that are tried


class ChipMemory(NamedTuple):
    """Bytes of one chip, by part.

    parameters: frozen and trained ones of all models, and copies of a reference or of past policies. optimizer: its
    states. rollout_copy: weights that generation has gathered along fsdp, and matrices in another form. cache: keys and
    values of the largest launch. generation: activations of a prefill or logits of a decoding step, the larger of both.
    gradient: float32 gradients. activations: what a micro-batch saves for its backward pass. offload: an optimizer
    state is on the chip during the update alone.
    """

    parameters: float
    optimizer: float
    rollout_copy: float
    cache: float
    generation: float
    gradient: float
    activations: float
    offload: bool

    @property
    def generating(self) -> float:
        """Bytes while the largest launch runs."""
        beside = 0.0 if self.offload else self.optimizer
        return self.parameters + self.rollout_copy + self.cache + self.generation + beside

    @property
    def updating(self) -> float:
        """Bytes during an update."""
        return self.parameters + self.optimizer + self.gradient + self.activations

    @property
    def peak(self) -> float:
        """The larger of generation and update."""
        return max(self.generating, self.updating)


class Proposal(NamedTuple):
    """A mesh and the size of a micro-batch on it.

    mesh: sizes of data, fsdp and tensor; a fourth is that of context. layout: blocks and devices that cut weights
    during generation. micro_tokens: tokens of a micro-batch on one part of the rows. remat: layers are computed again
    in the backward pass. memory: bytes of one chip. seconds: of a step, with launches and micro-batches one after
    another. fits: whether the chip holds ``memory``.
    """

    mesh: tuple[int, ...]
    layout: tuple[int, int]
    micro_tokens: int
    remat: bool
    memory: ChipMemory
    seconds: float
    fits: bool

    @property
    def settings(self) -> dict[str, int]:
        """Fields of `distributed.meshes.MeshConfig`, without those that keep their default."""
        sizes, (blocks, parts) = dict(zip((*AXES, CONTEXT), self.mesh)), self.layout
        sizes |= {"rollout_blocks": blocks} if blocks > 1 else {}
        return sizes | ({"rollout_tensor": parts} if parts != self.mesh[2] else {})

    @property
    def flags(self) -> str:
        """Flags that select the mesh, as on a command line."""
        return " ".join(f"--config.mesh.{key}={size}" for key, size in self.settings.items())


def axis_sizes(mesh: Sequence[int]) -> tuple[int, int, int, int]:
    """Sizes of data, fsdp, tensor and context, of which ``mesh`` may lack the last."""
    data, fsdp, tensor, *context = mesh
    return data, fsdp, tensor, (context or [1])[0]


class _Step(NamedTuple):
    """What all meshes of a configuration share."""

    work: Workload
    top: Launch
    group: int  # samples of a node
    nodes: float  # trained ones of a model
    held: costs.Memory
    decoded: dict[int, list[Decoding]]  # by the number of blocks
    epochs: int  # of an update

    @property
    def weights(self) -> ModelSize:
        """The model of the largest launch."""
        return self.work.models[self.top.model]

    @property
    def arch(self) -> decoder_config.Config:
        """Architecture of this model."""
        return self.weights.config

    @property
    def whole(self) -> int:
        """Bytes of all weights that one token of this model reads in an update."""
        base = costs.base_bytes([self.weights]) if self.weights.rank else 0
        return base + costs.own_bytes(self.weights)

    @property
    def sampling(self) -> int:
        """Bytes of all weights that one sampled token of a launch reads."""
        return costs.rollout_bytes(self.work.models if self.work.join_adapters else [self.weights])

    @property
    def tokens(self) -> int:
        """Tokens of one trained node: its prompt and its completions."""
        return self.top.prompt + self.group * self.top.response


def largest_launch(plan: Plan, work: Workload) -> Launch:
    """The launch of a rollout with the largest cache and logits."""
    of = lambda x: work.models[x.model]
    return max(launches(plan, work), key=lambda x: costs.cache_bytes(x, of(x)) + costs.logits_bytes(x, of(x).config))


def trained_nodes(cfg: Any, plan: Plan, work: Workload) -> float:
    """Expected number of nodes in an update, over all models."""
    groups, most = update_selection(cfg, work)
    found = (level for level in turn_states(plan, work) if level.group > 1 or not groups)
    nodes = sum(level.states * len(work.turns[level.branch.turn].seats) for level in found)
    return float(nodes if most is None else min(nodes, most))


def tensor_sizes(arch: decoder_config.Config, chips: int) -> list[int]:
    """Sizes of the tensor axis that divide heads, units and vocabulary of ``arch``, and the number of ``chips``."""
    return [t for t in rollout_sizes(arch, chips) if arch.num_kv_heads % t == 0]


def rollout_sizes(arch: decoder_config.Config, chips: int) -> list[int]:
    """Numbers of devices that can cut the weights of ``arch`` during generation, on ``chips`` devices."""
    sizes = (arch.num_heads, arch.intermediate_size, arch.vocab_size, chips)
    return [t for t in range(1, 65) if all(n % t == 0 for n in sizes)]


def _step(cfg: Any, plan: Plan, work: Workload) -> _Step:
    """What the meshes of a configuration share. Arguments are the shared ones."""
    alike = all(model == work.models[0] for model in work.models)
    several = work.engine == "host" and len(work.models) > 1 and alike and cfg.mesh.models == "all"
    blocks = [1, *(n for n in BLOCKS if several and not work.join_adapters and n < 2 * len(work.models))]
    return _Step(
        work=work,
        top=largest_launch(plan, work),
        group=max(part.group for launch in launches(plan, work) for part in launch.parts),
        nodes=trained_nodes(cfg, plan, work) / len(work.models),
        held=costs.memory(plan, work, **memory_options(cfg)),
        decoded={n: decodings(plan, work, n) for n in blocks},
        epochs=cfg.loss.epochs,
    )


def most_of_a_block(rows: int, blocks: int, models: int) -> int:
    """The most rows that a block may get of a launch with ``rows``: all but one of each other model are of one model.

    Args:
        rows: Rows of all models.
        blocks: Number of blocks.
        models: Number of models.
    """
    return -(-rows // (blocks - min(blocks, models) + 1)) if blocks > 1 else rows


def _memory(
    step: _Step, chip: Chip, mesh: Sequence[int], layout: tuple[int, int], rows: int, remat: bool
) -> ChipMemory:
    """Bytes of one chip. ``rows``: prompts of a micro-batch on a device."""
    (_, fsdp, tensor, context), (blocks, wide) = axis_sizes(mesh), layout
    arch, held, top = step.arch, step.held, step.top
    copies = context if layout == (1, tensor) else 1  # of a row's cache; in another layout context is more rows
    parts = math.prod(mesh) // (blocks * wide * copies)  # of the rows of a block
    cut = fsdp * tensor * context
    team = held.base + held.own + held.copies
    # A host rollout gathers the weights of one model at a time, an array rollout those of all.
    playing = step.sampling if step.work.engine == "host" else costs.rollout_bytes(step.work.models) + held.copies
    most = lambda part: up_to(most_of_a_block(part.rows, blocks, len(step.work.models)), parts) // parts
    here = top._replace(parts=tuple(part._replace(rows=most(part)) for part in top.parts))
    lanes = sum(part.rows * part.group for part in here.parts)
    d, f, size = arch.hidden_size, arch.intermediate_size, costs.ITEMSIZE[arch.dtype]
    scored = 0 if chip.kernels else 1  # whether scores of attention are in memory
    prompt = scored * 4 * arch.num_heads * top.prompt**2 + size * top.prompt * (6 * d + 3 * f)
    layers = costs.saved_bytes(arch, rows, top.prompt, step.group, top.response, remat)
    scores = scored * rows * costs.saved_scores(arch, top.prompt, step.group, top.response, remat)
    gathered = 2 * rows * step.tokens * key_bytes(arch) / tensor if context > 1 else 0.0  # and rolled
    return ChipMemory(
        parameters=team / cut,
        optimizer=held.optimizer / cut,
        rollout_copy=held.formed / cut + (playing / wide if fsdp * context > 1 or layout != (1, tensor) else 0.0),
        cache=costs.cache_bytes(here, step.weights) / wide,
        generation=max(here.rows * prompt / copies, 3 * 4 * lanes * arch.vocab_size) / wide,
        gradient=held.gradient / cut,
        activations=(layers / (1 if remat else tensor) + scores / tensor) / context + gathered,
        offload=held.offload,
    )


def key_bytes(arch: decoder_config.Config) -> int:
    """Bytes of the keys and values of one token in one layer of ``arch``."""
    return 2 * arch.num_kv_heads * arch.head_dim * costs.ITEMSIZE[arch.dtype]


def _rollout_seconds(step: _Step, chip: Chip, least: float, chips: int, layout: tuple[int, int]) -> float:
    """Seconds of a rollout at the chip's public figures: weights read, and activations summed over tensor.

    ``least``: lower bound. ``chips``: number of devices with rows of their own.
    """
    (blocks, wide), arch = layout, step.arch
    weights = step.sampling / wide / chip.bandwidth
    of_lane = 4 * arch.num_layers * arch.hidden_size * costs.ITEMSIZE[arch.dtype] * (1 - 1 / wide) / chip.links
    found = (x.tokens * max(weights, x.lanes / (chips / wide) * of_lane) for x in step.decoded[blocks])
    return max(sum(found), least)


def _seconds(step: _Step, chip: Chip, mesh: Sequence[int], rows: int, remat: bool) -> float:
    """Seconds of an update at the chip's public figures. ``rows``: prompts of a micro-batch on a device.

    Along context the last device attends to all of a row, and the others wait for it. Keys and values are gathered, and
    their gradients summed.
    """
    data, fsdp, tensor, context = axis_sizes(mesh)
    parts, arch, models = data * fsdp, step.arch, len(step.work.models)
    d, size = arch.hidden_size, costs.ITEMSIZE[arch.dtype]
    pairs = costs.score_bytes(arch, step.top.prompt, step.group, step.top.response) / (4 * arch.num_heads)
    node = costs.token_flops(step.weights) * step.tokens + costs.attention_flops(arch) * pairs * (2 - 1 / context)
    several = parts * context > 1
    moved = 3 * step.whole / tensor * (fsdp * context > 1) + 2 * 4 * step.held.gradient / 8 / tensor * several
    moved += 4 * 4 * arch.num_layers * rows * step.tokens * d * size * (1 - 1 / tensor) / context
    moved += context_bytes(arch, rows * step.tokens, context, remat) / tensor
    learn = max(rows * node * (4 if remat else 3) / tensor / context / chip.flops, moved / chip.links)
    passes = math.ceil(step.nodes / (rows * parts))
    return step.epochs * models * passes * learn


def context_bytes(arch: decoder_config.Config, tokens: int, context: int, remat: bool) -> float:
    """Bytes that a device sends for attention of a micro-batch along context, forward and backward.

    Args:
        arch: Architecture.
        tokens: Tokens of the rows whose tokens are cut.
        context: Devices that cut them.
        remat: Whether layers are computed again in the backward pass.
    """
    passes = 3 if remat else 2  # keys and values are gathered; their gradients are summed and cut
    return passes * arch.num_layers * tokens * key_bytes(arch) * (1 - 1 / context)


def _layouts(step: _Step, mesh: Sequence[int]) -> list[tuple[int, int]]:
    """Layouts of generation on the devices of ``mesh``; that of training first."""
    chips, tensor = math.prod(mesh), mesh[2]
    found = [(1, tensor)]
    for blocks in step.decoded if axis_sizes(mesh)[3] == 1 else (1,):  # with context models sample in turn
        if chips % blocks == 0:
            found += [(blocks, t) for t in rollout_sizes(step.arch, chips // blocks) if (blocks, t) != found[0]]
    return found


def _meshes(arch: decoder_config.Config, chips: int, context: int) -> list[tuple[int, ...]]:
    """Sizes (data, fsdp, tensor) of ``chips`` devices that cut the model evenly, and ``context`` above 1 behind them.

    Raises ConfigError where ``context`` divides the number of chips or the hidden size not evenly.
    """
    if chips % context or arch.hidden_size % context:
        raise ConfigError(
            f"config.mesh.context: expected a divisor of {chips} chips and of the hidden size {arch.hidden_size}, got "
            f"{context}"
        )
    out: list[tuple[int, ...]] = []
    for tensor in tensor_sizes(arch, chips // context):
        parts = chips // context // tensor
        sizes = (n for n in range(1, parts + 1) if parts % n == 0 and arch.hidden_size % (n * context) == 0)
        out += [(parts // fsdp, fsdp, tensor, *([context] if context > 1 else [])) for fsdp in sizes]
    return out


def proposals(
    cfg: Any,
    plan: Plan,
    work: Workload,
    chip: Chip,
    chips: int,
    *,
    rows: Sequence[int] = ROWS,
    remats: Sequence[bool] = (True, False),
    layouts: bool = True,
) -> list[Proposal]:
    """Meshes of ``chips`` devices with each size of a micro-batch: those that fit first, the fastest of them first.

    Args:
        cfg: Configuration.
        plan: Plan of sampling.
        work: Workload.
        chip: Public figures of a device.
        chips: Number of devices.
        rows: Prompts of a micro-batch on a device that are tried.
        remats: Settings of ``team.remat`` that are tried.
        layouts: Whether layouts of generation other than training's are tried.

    Returns:
        Proposals, each once. Those that do not fit come last, the smallest of them first.
    """
    work = work._replace(join_adapters=joins_adapters(cfg, work.engine))
    step = _step(cfg, plan, work)
    least = costs.roofline(chip, plan, work, costs.UpdateSize(0, 0, 0, 0, 0))[0] / chips
    found = []
    context = cfg.mesh.context
    for mesh in _meshes(step.arch, chips, context):
        most = {micro_rows(n, step.nodes, mesh[0] * mesh[1]) for n in rows}
        own = _layouts(step, mesh) if layouts else [(1, mesh[2])]
        apart = {layout: chips // context if layout == (1, mesh[2]) else chips for layout in own}
        playing = {layout: _rollout_seconds(step, chip, least, apart[layout], layout) for layout in own}
        for remat, n in itertools.product(remats, sorted(most)):
            learning = _seconds(step, chip, mesh, n, remat)
            tried = []
            for layout, seconds in playing.items():
                memory, size = _memory(step, chip, mesh, layout, n, remat), n * step.tokens
                fits = memory.peak <= chip.memory
                tried.append(Proposal(mesh, layout, size, remat, memory, seconds + learning, fits))
            found.append(min(tried, key=_order))  # the first of equal ones: training's own layout
    return sorted(found, key=_order)


def _order(proposal: Proposal) -> tuple[bool, float]:
    """Those that fit first, the fastest of them first; of the others the smallest."""
    return not proposal.fits, proposal.seconds if proposal.fits else proposal.memory.peak


def mesh_sizes(cfg: Any, plan: Plan, work: Workload, chip: Chip, chips: int) -> Proposal:
    """The mesh of a configuration on ``chips`` devices: the fastest that fits, with the micro-batch of ``cfg``.

    Args:
        cfg: Configuration; its ``micro_tokens`` and ``team.remat`` are kept.
        plan: Plan of sampling.
        work: Workload.
        chip: Public figures of a device.
        chips: Number of devices.

    Returns:
        The best proposal. Where none fits, the one that needs the least memory.
    """
    rows = max(1, cfg.micro_tokens // _step(cfg, plan, work).tokens)
    return proposals(cfg, plan, work, chip, chips, rows=(rows,), remats=(cfg.team.remat,))[0]


def fitting(cfg: Any, plan: Plan, work: Workload, chip: Chip, chips: int) -> tuple[Proposal, dict[str, Any]]:
    """The mesh of a configuration on ``chips`` devices, and the settings to change so that it fits.

    The settings of ``cfg`` come first, then other sizes of a micro-batch, then both again with the optimizer's state
    in host memory between updates.

    Args:
        cfg: Configuration.
        plan: Plan of sampling.
        work: Workload.
        chip: Public figures of a device.
        chips: Number of devices.

    Returns:
        The proposal, and values by dotted key (empty: none has to change). Where nothing fits, the proposal of ``cfg``.
    """
    for offload in sorted({cfg.optimizer.offload, True}):
        tried = dataclasses.replace(cfg, optimizer=dataclasses.replace(cfg.optimizer, offload=offload))
        away = {"optimizer.offload": True} if offload != cfg.optimizer.offload else {}
        kept = mesh_sizes(tried, plan, work, chip, chips)
        if kept.fits:
            return kept, away
        best = proposals(tried, plan, work, chip, chips)[0]
        if best.fits:
            return best, away | {"micro_tokens": best.micro_tokens, "team.remat": best.remat}
    return mesh_sizes(cfg, plan, work, chip, chips), {}
