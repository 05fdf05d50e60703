"""Samplers for host rollouts whose generation cuts the devices otherwise than training (`meshes.Layout`).

Without blocks, models sample one after another as in `launches`, on the mesh of the layout. With blocks, a turn of a
host rollout is one launch for all models. Each block of devices samples for one model. A model with many requests has
several blocks. All models are of one architecture.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import Layout
from jaxmarl_llm.generation.blocks import Blocks, blocks_of, stacked
from jaxmarl_llm.generation.generate import PromptRows, generate_launch
from jaxmarl_llm.generation.prefix_cache import LaunchInputs, Prefixes
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.launches import (
    GenerationRequest,
    SampledCompletion,
    Sampler,
    SamplerFactory,
    TeamSampler,
    completions_of,
    prompt_rows,
)
from jaxmarl_llm.types import Model, Params, Team


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

    ``launches``: generation programs started so far.
    """

    def __init__(self, team: Team, params: Params, sampling: Sampling, layout: Layout):
        self._team, self._params, self._sampling, self._layout = team, params, sampling, layout
        self._variables: dict[tuple[int, ...], Params] = {}  # of the last launch, by the model of each block
        self._cached: Prefixes | None = None
        self.launches = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that went through a model so far; cached tokens do not go through it again."""
        return 0 if self._cached is None else self._cached.prefilled_tokens

    def sample(self, requests: Sequence[GenerationRequest], *, more: bool) -> list[list[SampledCompletion]]:
        """The completions of every request. ``more``: later prompts may begin with these prompts and completions."""
        completions: list[list[SampledCompletion]] = [[] for _ in requests]
        models, blocks = sorted({request.model for request in requests}), self._layout.blocks
        with meshes.use_mesh(self._layout.mesh):
            for first in range(0, len(models), blocks):
                chosen = models[first : first + blocks]
                numbers = [n for n, request in enumerate(requests) if request.model in chosen]
                sampled = self._launch(chosen, [requests[n] for n in numbers], more)
                for n, samples in zip(numbers, sampled, strict=True):
                    completions[n] = samples
        return completions

    def _launch(
        self, models: Sequence[int], requests: Sequence[GenerationRequest], keep: bool
    ) -> list[list[SampledCompletion]]:
        """Completions of requests of some models, at most one model for each block.

        ``keep``: put what was read and sampled into the prefix cache.
        """
        self.launches += 1
        loads = [sum(r.group for r in requests if r.model == m) for m in models]
        owners = tuple(np.repeat(models, blocks_of(loads, self._layout.blocks)).tolist())
        model = self._team.models[owners[0]]
        own = tuple(self._params["agents"][model.name])
        applied, prefixes = Blocks(own), self._prefixes(model, own)
        groups = sorted({request.group for request in requests})
        numbers = [[n for n, r in enumerate(requests) if r.group == group] for group in groups]
        parts = [[requests[n] for n in chosen] for chosen in numbers]
        ordered = list(itertools.chain(*parts))
        tasks, prompts = [(r.model, r.task) for r in ordered], [np.array(r.prompt_ids, np.int32) for r in ordered]
        blocks = {task: tuple(b for b, owner in enumerate(owners) if owner == task[0]) for task in tasks}
        variables = self._stacked(owners, own)
        ready = prefixes.prepare(variables, tasks, prompts, [len(part) for part in parts], blocks)
        limits = {self._limit(request) for request in requests}
        sampled = generate_launch(
            model.policy,
            variables,
            [self._rows(part, inputs, len(limits) > 1, applied) for part, inputs in zip(parts, ready, strict=True)],
            max_new_tokens=max(limits),
            stop_ids=model.tokenizer.stop_ids,
            pad_id=model.tokenizer.pad_id,
            sampling=self._sampling,
            keep=True,
            applied=applied,
        )
        completions: list[list[SampledCompletion]] = [[] for _ in requests]
        at = 0
        for chosen, inputs, (out, prefix, suffix) in zip(numbers, ready, sampled, strict=True):
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), sharding.to_host(out))
            found, of_part = completions_of(model, flat, inputs.rows), slice(at, at + len(chosen))
            if keep:
                ids = [[sample.action.ids for sample in samples] for samples in found]
                prefixes.store(tasks[of_part], prompts[of_part], prefix, suffix, ids, inputs.rows)
            for n, samples in zip(chosen, found, strict=True):
                completions[n] = samples
            at += len(chosen)
        return completions

    def _prefixes(self, model: Model, own: tuple[str, ...]) -> Prefixes:
        """The prefix cache of all models, which are alike. ``own``: collections that differ between models."""
        if self._cached is None:
            blocks = self._layout.blocks
            self._cached = Prefixes(model.policy, model.tokenizer.pad_id, applied=Blocks(own), blocks=blocks)
        return self._cached

    def _limit(self, request: GenerationRequest) -> int:
        """The largest number of tokens of a completion of ``request``."""
        return self._team.roles[request.role].max_new_tokens

    def _rows(
        self, part: Sequence[GenerationRequest], ready: LaunchInputs, limited: bool, applied: Blocks
    ) -> PromptRows:
        """One part of a launch, on the devices. ``limited``: whether rows of the launch have different limits."""
        rows = prompt_rows(part, ready, [self._limit(r) for r in part] if limited else None, applied=applied)
        where = NamedSharding(self._layout.mesh, PartitionSpec("data", "fsdp"))
        return rows._replace(keys=_by_block(rows.keys, self._layout.blocks, where))

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


@functools.partial(jax.jit, static_argnames=("blocks", "where"))
def _by_block(keys: jax.Array, blocks: int, where: NamedSharding) -> jax.Array:
    """Keys [blocks N G], which all processes have made, from keys [blocks * N G]."""
    return jax.lax.with_sharding_constraint(keys.reshape(blocks, -1, keys.shape[1]), where)
