"""Compile what a training step runs for a TPU topology that is not there, and read off what one chip does in it.

The programs are those of a run: `generate.sample_completions` (prefill, then a loop of decode steps), the learner's
``accumulate`` on one micro-batch and its ``apply``, over a mesh of the topology's devices, from shapes alone. Agents of
one architecture share them, so the largest model of the team is compiled, and what all models keep resident is counted
from the sharding rules.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmarl_llm.costs import hlo, kernel_flops
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.chips import Chip
from jaxmarl_llm.costs.counts import ModelSize, Workload, turn_states
from jaxmarl_llm.costs.meshes import largest_launch, most_of_a_block
from jaxmarl_llm.costs.workload import joins_adapters
from jaxmarl_llm.distributed import heads, meshes, sharding
from jaxmarl_llm.distributed.meshes import Layout
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.blocks import Blocks
from jaxmarl_llm.generation.buckets import up_to
from jaxmarl_llm.generation.generate import TOGETHER, PromptRows, sample_launch
from jaxmarl_llm.kernels.quantized import ScaledMatrix
from jaxmarl_llm.models import rollout_cache
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.lora import init_lora, join_adapters
from jaxmarl_llm.models.rollout_weights import FORMS
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.learner import Batch, Learner, make_learner
from jaxmarl_llm.types import Params, Policy, PyTree

_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8")
TOPOLOGIES = tuple(
    f"{kind}:{shape}" for kind, all_ in (("v5e", _FLAT), ("v6e", _FLAT), ("v5p", _CUBE)) for shape in all_
)
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def context_of(mesh: Mesh) -> int:
    """Devices that cut the tokens of a row."""
    return mesh.shape.get(sharding.CONTEXT, 1)


def chips(topology: str) -> int:
    return math.prod(int(n) for n in topology.partition(":")[2].split("x"))


def check(topology: str) -> None:
    """ConfigError for a name that is not known, or without libtpu."""
    if topology not in TOPOLOGIES:
        raise ConfigError(f"--topology: unknown topology {topology!r}; known: {', '.join(TOPOLOGIES)}")
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("--topology: compiling for TPUs needs libtpu: pip install 'jaxmarl_llm[aot]'")


def devices(topology: str) -> Sequence[Any]:
    """The topology's devices, described by libtpu; none is touched."""
    check(topology)
    # No machine of the cloud to ask: without these libtpu looks for one, and complains on stderr.
    for name, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_STDERR_LOG_LEVEL", "3"),
        ("TPU_MIN_LOG_LEVEL", "3"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("TPU_ACCELERATOR_TYPE", "v5litepod-16"),
    ):
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


class Shape(NamedTuple):
    """What is compiled: the launch of a rollout with the largest cache, and one micro-batch."""

    parts: tuple[tuple[int, int], ...]  # of the launch: (nodes, group); nodes are a multiple of the mesh's rows
    prompt: int
    response: int
    micro: int  # nodes of a micro-batch, likewise
    micro_group: int


def shape_of(
    cfg: BaseConfig, mesh: Mesh, plan: Plan, work: Workload, rows: int | None = None, layout: Layout | None = None
) -> Shape:
    """``rows``: nodes of each part of the mesh's rows, in place of what the configuration comes to. ``layout``: of
    generation. With blocks, the most nodes that one block may get stand in every block.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    top = largest_launch(plan, work)
    group = max(level.group for level in turn_states(plan, work))
    tokens = top.prompt + group * top.response
    micro = 1 << max(0, (cfg.micro_tokens // tokens).bit_length() - 1)
    if rows is not None:
        return Shape(((rows * parts, group),), top.prompt, top.response, rows * parts, group)
    drawn = parts if layout is None else layout.mesh.size // layout.mesh.shape["tensor"]
    blocks = 1 if layout is None else layout.blocks
    most = lambda rows: blocks * up_to(most_of_a_block(rows, blocks, len(work.models)), drawn // blocks)
    widths = tuple((most(part.rows), part.group) for part in top.parts)
    return Shape(widths, top.prompt, top.response, micro * parts, group)


# ---- programs -------------------------------------------------------------------------------------------------------


class Team(NamedTuple):
    """Shapes of the model that is compiled, and what the whole team keeps on a chip."""

    policy: Policy
    own: Params  # ShapeDtypeStructs with shardings, as all trees here
    shared: Params | None
    optimizer: PyTree
    playing: Params  # variables of a launch as generation takes them: whole along fsdp
    joined: bool  # whether these are adapters of all models, side by side (`launches.launched_together`)
    parameter_bytes: int  # per chip, of all models; frozen ones and copies included
    optimizer_bytes: int
    # Of the models that have copies at once, beside those, and of matrices in another form (`rollout_weights`). 0 where
    # nothing is cut along fsdp and rollouts read the weights of training.
    playing_bytes: int


def placed(mesh: Mesh, tree: PyTree) -> PyTree:
    put = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    return jax.tree.map(put, tree, sharding.shardings(mesh, tree))


def chip_bytes(tree: PyTree) -> int:
    """Bytes of one device's part of a tree of placed shapes."""
    sizes = (math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return int(sum(sizes))


def team_of(
    cfg: BaseConfig, mesh: Mesh, models: Sequence[ModelSize], copies: int, engine: str, layout: Layout | None = None
) -> Team:
    """ConfigError where heads or a dimension cannot be cut as the mesh asks, or costs cannot be known.

    In a host rollout one model at a time has copies to play with (`launches.RolloutWeights`), in an array rollout all,
    and so have adapters of one backbone. With blocks, a device has the copy of one model. ``layout``: of generation.
    """
    if cfg.team.batch_invariant:
        raise ConfigError(
            "config.team.batch_invariant: expected false: its loops over tiles and keys run as often as lengths ask, "
            "so the compiled program does not tell what it costs"
        )
    largest_first = sorted(set(models), key=lambda w: -costs.parameters(w.config))
    learner = learner_of(cfg, largest_first[0])
    trees: dict[ModelSize, tuple[Params, Params | None, PyTree]] = {}
    for weights in largest_first:
        c = weights.config
        name = f"a {costs.parameters(c) / 1e9:.1f}B model"
        heads.check_heads(mesh.shape["tensor"], name, c.num_heads, c.num_kv_heads)
        if layout is not None:
            heads.check_heads(layout.tensor, name, c.num_heads, c.num_heads, "config.mesh.rollout_tensor")
        params = jax.eval_shape(make_policy(c).init, jax.random.key(0))
        shared, own = None, {"params": params}
        if weights.rank:
            adapter = lambda p=params, w=weights: init_lora(jax.random.key(0), p, w.rank, w.targets)
            shared, own = placed(mesh, params), {"lora": jax.eval_shape(adapter)}
        trees[weights] = placed(mesh, own), shared, placed(mesh, jax.eval_shape(learner.init, own))
    joined = len(models) > 1 and joins_adapters(cfg, engine) and (layout is None or layout.blocks == 1)

    def variables(w: ModelSize) -> Params:
        own, base = trees[w][:2]
        if joined:
            own = {"lora": jax.eval_shape(join_adapters, [trees[other][0]["lora"] for other in models])}
        return own if base is None else {"params": base, **own}

    frozen = {w.config: w for w, (_, shared, _) in trees.items() if shared is not None}
    held = lambda pick: (
        sum(chip_bytes(pick(trees[w][0])) for w in models) + sum(chip_bytes(pick(trees[w][1])) for w in frozen.values())
    )
    own, shared, optimizer = trees[largest_first[0]]
    resident = held(lambda tree: tree)
    read = partial(jax.eval_shape, FORMS[cfg.rollout_weights] or (lambda params: params))
    playing = lambda w: rollout_variables(mesh, layout, read(variables(w)), tuple(trees[w][0]))
    alone = chip_bytes(playing(largest_first[0]))
    is_formed = lambda x: isinstance(x, ScaledMatrix)
    formed = held(lambda tree: list(filter(is_formed, jax.tree.leaves(placed(mesh, read(tree)), is_leaf=is_formed))))
    beside = layout is not None or mesh.shape["fsdp"] * context_of(mesh) > 1
    one = engine == "host" or (layout is not None and layout.blocks > 1)
    return Team(
        policy_of(cfg, largest_first[0]),
        own,
        shared,
        optimizer,
        playing(largest_first[0]),
        joined,
        resident + copies * sum(chip_bytes(trees[w][0]) for w in models),
        (max if cfg.optimizer.offload else sum)([chip_bytes(trees[w][2]) for w in models]),
        formed
        + (0 if not beside else alone if one else held(lambda tree: rollout_variables(mesh, layout, read(tree)))),
    )


def rollout_variables(mesh: Mesh, layout: Layout | None, tree: PyTree, own: Sequence[str] = ()) -> PyTree:
    """Placed shapes as `sharding.to_rollout` lays them, or `blocks.stacked` where there are blocks.

    ``own``: collections of the variables that differ between models.
    """
    where, blocks = (mesh, 1) if layout is None else layout[:2]

    def whole(path: Any, place: PartitionSpec, x: Any) -> Any:
        shape = x.shape
        if blocks > 1 and sharding.names_of(path)[0] in own:
            place, shape = PartitionSpec("data", *place), (blocks, *shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(where, place))

    return jax.tree_util.tree_map_with_path(whole, sharding.rollout_specs(where, tree), tree, is_leaf=sharding.is_spec)


def policy_of(cfg: BaseConfig, weights: ModelSize) -> Policy:
    return make_policy(weights.config, remat=cfg.team.remat)


def learner_of(cfg: BaseConfig, weights: ModelSize) -> Learner:
    return make_learner(policy_of(cfg, weights), cfg.loss, cfg.optimizer, cfg.sampling)


class Stage(NamedTuple):
    """One program on one chip. Bytes."""

    name: str
    arguments: int
    outputs: int  # those that do not take an argument's place
    temporary: int
    least: int  # of memory at its peak; where it does not fit, what the compiler says it needs
    compiled: bool  # False: it does not fit, and what follows is unknown
    flops: float = 0.0
    bytes: float = 0.0  # of memory, read and written
    collectives: Mapping[str, float] | None = None  # kind -> bytes sent; None: unknown
    seconds: float = 0.0  # to lower and compile it, of CPU time

    def roofline(self, chip: Chip) -> tuple[float, str]:
        """Seconds at the chip's public figures, and which of them bounds it."""
        sent = sum((self.collectives or {}).values())
        terms = {
            "compute": self.flops / chip.flops,
            "memory": self.bytes / chip.bandwidth,
            "network": sent / chip.links,
        }
        bound = max(terms, key=lambda k: terms[k])
        return terms[bound], bound


def compile_stages(
    cfg: BaseConfig, mesh: Mesh, team: Team, shape: Shape, only: Sequence[str] = (), layout: Layout | None = None
) -> dict[str, Stage]:
    """prefill and decode (one token of every sample; one program), accumulate and apply. ``only``: of these programs,
    ``rollout``, ``accumulate`` and ``apply``, some. ``layout``: of generation.
    """
    spec = jax.ShapeDtypeStruct
    where, blocks = (mesh, 1) if layout is None else layout[:2]
    applied = TOGETHER if blocks == 1 else Blocks(tuple(team.own))

    def rows(shape: tuple[int, ...], dtype: Any) -> Any:  # shapes stand for the arrays of a batch
        return spec(shape, dtype, sharding=sharding.rows(mesh))

    def played(n: int, shape: tuple[int, ...], dtype: Any) -> Any:  # of n rows in the layout of generation
        if blocks == 1:
            return spec((n, *shape), dtype, sharding=sharding.rows(where))
        place = NamedSharding(where, PartitionSpec("data", "fsdp"))
        return spec((blocks, n // blocks, *shape), dtype, sharding=place)

    p, r = shape.prompt, shape.response
    learner = make_learner(team.policy, cfg.loss, cfg.optimizer, cfg.sampling)
    cached = rollout_cache.FORMS[cfg.rollout_cache]
    playing = team.policy if cached is None else cached(team.policy)

    def rollout(variables: Params, parts: Sequence[PromptRows]) -> Any:
        return sample_launch(
            playing,
            variables,
            [part._replace(keys=jax.random.wrap_key_data(part.keys)) for part in parts],
            max_new_tokens=r,
            stop_ids=(1,),
            pad_id=0,
            sampling=cfg.sampling,
            applied=applied,
        )

    width = jax.random.key_data(jax.random.key(0)).shape
    prompts = [
        PromptRows(
            played(n, (p,), jnp.int32),
            played(n, (), jnp.int32),
            played(n, (g, *width), jnp.uint32),
            played(n, (), jnp.bool_),
            adapter=played(n, (), jnp.int32) if team.joined else None,
        )
        for n, g in shape.parts
    ]
    m, mg = shape.micro, shape.micro_group
    f32 = lambda: rows((m, mg, r), jnp.float32)
    batch = Batch(rows((m, p), jnp.int32), rows((m,), jnp.int32), rows((m, mg, r), jnp.int32), f32(), f32(), f32())
    batch = batch.replace(
        old=f32() if cfg.loss.epochs > 1 else None, reference=f32() if cfg.loss.needs_reference else None
    )
    gradient = jax.tree.map(lambda x: spec(x.shape, jnp.float32, sharding=x.sharding), team.own)
    programs: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "rollout": (jax.jit(rollout), (team.playing, prompts)),
        "accumulate": (learner.accumulate, (team.own, team.shared, batch, gradient)),
        "apply": (
            learner.apply,
            (team.own, team.optimizer, gradient, spec((), jnp.float32, sharding=sharding.whole(mesh))),
        ),
    }
    count = partial(hlo.count, devices=mesh.size, kernels=kernel_flops.TPU)
    found: dict[str, Stage] = {}
    for name, (function, arguments) in programs.items():
        if only and name not in only:
            continue
        clock = time.process_time()
        with meshes.use_mesh(where if name == "rollout" else mesh):
            lowered = function.lower(*arguments)
        try:
            compiled, text = compile_text(lowered)
        except jax.errors.JaxRuntimeError as error:
            needed = needs(str(error))
            if needed is None:
                raise
            seconds = time.process_time() - clock
            first = "prefill" if name == "rollout" else name
            found[first] = Stage(first, 0, 0, 0, needed, False, seconds=seconds)
            continue
        seconds = time.process_time() - clock
        held = compiled.memory_analysis()
        kept = held.output_size_in_bytes - held.alias_size_in_bytes
        peak = held.argument_size_in_bytes + kept + held.temp_size_in_bytes
        sizes = (held.argument_size_in_bytes, kept, held.temp_size_in_bytes, peak, True)
        if name != "rollout":
            seen = count(text)
            found[name] = Stage(name, *sizes, seen.flops, seen.bytes, seen.collectives, seconds)
            continue
        before, once = count(text, early=0), count(text, early=1)
        one = {k: v - before.collectives.get(k, 0.0) for k, v in once.collectives.items()}
        found["prefill"] = Stage("prefill", *sizes, before.flops, before.bytes, before.collectives, seconds)
        found["decode"] = Stage("decode", *sizes, once.flops - before.flops, once.bytes - before.bytes, one)
    return found


def compile_text(lowered: Any) -> tuple[Any, str]:
    """The compiled program and its text, which libtpu writes to a file: JAX 0.10 cannot read back programs with
    asynchronous collectives in three parts, as those of v5p and v6e.
    """
    # Without a TPU a program cannot be read back from the compilation cache, so none is written to it.
    least = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    try:
        with tempfile.TemporaryDirectory() as folder:
            compiled = lowered.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})
            (path,) = Path(folder).glob("*.after_optimizations.txt")
            return compiled, path.read_text()
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def needs(message: str) -> int | None:
    """Bytes of memory that the compiler wanted, from its complaint that there are not as many."""
    match = re.search(r"[Uu]sed ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message) or re.search(
        r"memory required for HLO temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM", message
    )
    return int(float(match.group(1)) * UNITS[match.group(2)]) if match else None


def mesh_for(cfg: BaseConfig, given: str | None, topology: str) -> Mesh:
    """The mesh of ``--mesh=data,fsdp,tensor[,context]``, or of the configuration, over a topology."""
    wanted = cfg.mesh
    if given is not None:
        try:
            data, fsdp, tensor, *more = map(int, given.split(","))
            (context,) = more or (cfg.mesh.context,)
        except ValueError:
            raise ConfigError(f"--mesh: expected data,fsdp,tensor[,context] (-1 for the rest), got {given!r}") from None
        wanted = dataclasses.replace(cfg.mesh, data=data, fsdp=fsdp, tensor=tensor, context=context)
    return meshes.make_mesh(wanted, devices(topology), path="config.mesh" if given is None else "--mesh")
