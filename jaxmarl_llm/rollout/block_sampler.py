"""Samplers for host rollouts whose generation cuts the devices otherwise than training (`meshes.Layout`).

Without blocks, models sample one after another as in `launches`, on the mesh of the layout. With blocks, a turn of a
host rollout is one launch for all models. Each block of devices samples for one model. A model with many requests has
several blocks. All models are of one architecture.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import Layout
from jaxmarl_llm.generation.blocks import Blocks, blocks_of, stacked
from jaxmarl_llm.generation.buckets import bucket, up_to
from jaxmarl_llm.generation.generate import PromptRows, generate_launch
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.launches import (
    GenerationRequest,
    SampledCompletion,
    Sampler,
    SamplerFactory,
    TeamSampler,
    completions_of,
    request_keys,
)
from jaxmarl_llm.types import Params, Team


def sampler_of(layout: Layout) -> SamplerFactory:
    """Make the `SamplerFactory` of a layout.

    Args:
        layout: How devices are cut during generation.
    """

    def factory(team: Team, params: Params, sampling: Sampling, version: int, /) -> Sampler:
        if layout.blocks > 1:
            return BlockSampler(team, params, sampling, layout)
        return TeamSampler(team, params, sampling, layout.mesh)

    return factory


class BlockSampler:
    """Samples completions of a team's models during one rollout, several models at once.

    Args:
        team: Roles and models; the models are alike (`meshes.check_alike`).
        params: Parameters of the team.
        sampling: Distribution of tokens.
        layout: How devices are cut.

    ``launches``: generation programs started so far. ``prompt_tokens``: prompt tokens that were read so far.
    """

    def __init__(self, team: Team, params: Params, sampling: Sampling, layout: Layout):
        self._team, self._params, self._sampling, self._layout = team, params, sampling, layout
        self._variables: dict[tuple[int, ...], Params] = {}  # of the last launch, by the model of each block
        self.launches = 0
        self.prompt_tokens = 0

    def sample(self, requests: Sequence[GenerationRequest], *, more: bool) -> list[list[SampledCompletion]]:
        """The completions of every request. ``more``: not read, because nothing is cached on a mesh."""
        completions: list[list[SampledCompletion]] = [[] for _ in requests]
        models, blocks = sorted({request.model for request in requests}), self._layout.blocks
        with meshes.use_mesh(self._layout.mesh):
            for first in range(0, len(models), blocks):
                chosen = models[first : first + blocks]
                numbers = [n for n, request in enumerate(requests) if request.model in chosen]
                sampled = self._launch(chosen, [requests[n] for n in numbers])
                for n, samples in zip(numbers, sampled, strict=True):
                    completions[n] = samples
        return completions

    def _launch(self, models: Sequence[int], requests: Sequence[GenerationRequest]) -> list[list[SampledCompletion]]:
        """Completions of requests of some models, at most one model for each block."""
        self.launches += 1
        self.prompt_tokens += sum(len(request.prompt_ids) for request in requests)
        loads = [sum(r.group for r in requests if r.model == m) for m in models]
        owners = tuple(np.repeat(models, blocks_of(loads, self._layout.blocks)).tolist())
        model = self._team.models[owners[0]]
        own = tuple(self._params["agents"][model.name])
        limits = [self._team.roles[request.role].max_new_tokens for request in requests]
        columns = bucket(max(len(request.prompt_ids) for request in requests), 32)
        groups = sorted({request.group for request in requests})
        placed = [_placed([n for n, r in enumerate(requests) if r.group == g], requests, owners) for g in groups]
        parts = [self._rows(rows, requests, limits, columns, group) for rows, group in zip(placed, groups, strict=True)]
        sampled = generate_launch(
            model.policy,
            self._stacked(owners, own),
            parts,
            max_new_tokens=max(limits),
            stop_ids=model.tokenizer.stop_ids,
            pad_id=model.tokenizer.pad_id,
            sampling=self._sampling,
            applied=Blocks(own),
        )
        completions: list[list[SampledCompletion]] = [[] for _ in requests]
        for blocks, out in zip(placed, sampled, strict=True):
            at = tuple(np.array([(b, k) for b, numbers in enumerate(blocks) for k in range(len(numbers))]).T)
            real = jax.tree.map(lambda x, at=at: x[at], sharding.to_host(out))
            numbers = [n for block in blocks for n in block]
            for n, samples in zip(numbers, completions_of(model, real, len(numbers)), strict=True):
                completions[n] = samples
        return completions

    def _stacked(self, owners: tuple[int, ...], own: tuple[str, ...]) -> Params:
        """Variables of the model of each block. ``own``: collections that differ between models."""
        if owners not in self._variables:
            self._variables = {}  # both may not fit
            mesh, first = self._layout.mesh, self._team.models[owners[0]]
            trees = [self._params["agents"][self._team.models[m].name] for m in owners]
            shared = {}
            if first.base is not None and "params" not in own:
                shared = {"params": sharding.to_rollout(mesh, self._params["shared"][first.base])}
            self._variables = {owners: {**shared, **stacked(mesh, trees)}}
        return self._variables[owners]

    def _rows(
        self,
        blocks: Sequence[Sequence[int]],
        requests: Sequence[GenerationRequest],
        limits: Sequence[int],
        columns: int,
        group: int,
    ) -> PromptRows:
        """One part of a launch: the requests of each block, filled up to equally many rows.

        ``blocks``: numbers of the requests of each block. ``limits``: tokens of a completion of each request.
        ``columns``: of prompts. ``group``: samples of each request.
        """
        mesh = self._layout.mesh
        size = up_to(bucket(max(map(len, blocks))), mesh.size // (len(blocks) * mesh.shape["tensor"]))
        any_one = next(n for block in blocks for n in block)
        numbers = [n for block in blocks for n in (*block, *[any_one] * (size - len(block)))]
        active = np.array([k < len(block) for block in blocks for k in range(size)])
        tokens = np.full((len(numbers), columns), self._team.models[0].tokenizer.pad_id, np.int32)
        for row, n in enumerate(numbers):
            tokens[row, : len(requests[n].prompt_ids)] = requests[n].prompt_ids
        length = np.array([len(requests[n].prompt_ids) for n in numbers], np.int32)
        limit = np.array([limits[n] for n in numbers], np.int32) if len(set(limits)) > 1 else None
        keys = request_keys([requests[n] for n in numbers], len(numbers), group=group)
        rows = tokens, length, active, limit
        by_block = jax.tree.map(lambda x: x.reshape(len(blocks), size, *x.shape[1:]), rows)
        where = NamedSharding(mesh, PartitionSpec("data", "fsdp"))
        tokens, length, active, limit = sharding.put(by_block, where)
        return PromptRows(tokens, length, _by_block(keys, len(blocks), where), active, limit=limit)


@functools.partial(jax.jit, static_argnames=("blocks", "where"))
def _by_block(keys: jax.Array, blocks: int, where: NamedSharding) -> jax.Array:
    """Keys [blocks N G], which all processes have made, from keys [blocks * N G]."""
    return jax.lax.with_sharding_constraint(keys.reshape(blocks, -1, keys.shape[1]), where)


def _placed(numbers: Sequence[int], requests: Sequence[GenerationRequest], owners: Sequence[int]) -> list[list[int]]:
    """Which of the requests ``numbers`` each block samples, if block b plays the model ``owners[b]``."""
    blocks: list[list[int]] = []
    for model in sorted(set(owners)):
        mine = [n for n in numbers if requests[n].model == model]
        blocks += [part.tolist() for part in np.array_split(np.array(mine, int), owners.count(model))]
    return blocks
