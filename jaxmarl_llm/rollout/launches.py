"""Generation in a turn of a host rollout: one launch for each model.

Nodes of a launch that have equally many samples are one part of it. A launch reuses the prefix cache of earlier
launches (`prefix_cache`), and each part is padded to a bucket. Models with devices of their own (`meshes.Split`)
generate in parallel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.generation.decoding import Completions
from jaxmarl_llm.generation.generate import TOGETHER, PromptRows, Rows, generate_launch, unstacked
from jaxmarl_llm.generation.prefix_cache import LaunchInputs, Prefixes
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import Action
from jaxmarl_llm.rollout.keys import PLAY, fold
from jaxmarl_llm.types import Model, Params, Team


class GenerationRequest(NamedTuple):
    """One node for which completions are sampled."""

    model: int  # index into Team.models
    group: int  # completions to sample
    task: int
    role: int  # index into Team.roles
    key: np.ndarray  # key data of the state [2]; `keys.fold` adds role and sample
    prompt_ids: Sequence[int]
    earlier: int = 0  # samples that the state had before these


class SampledCompletion(NamedTuple):
    """One completion and its log-probs."""

    action: Action
    logprobs: np.ndarray  # of the action's ids


def as_completion(model: Model, ids: Sequence[int], truncated: bool, logprobs: np.ndarray) -> SampledCompletion:
    """Token ids as a completion with text.

    Args:
        model: Model that sampled them.
        ids: Token ids; the last one is a stop id unless ``truncated``.
        truncated: Whether the completion ended at its limit.
        logprobs: Of the ids.
    """
    text = model.tokenizer.decode(list(ids if truncated else ids[:-1]))
    return SampledCompletion(Action(text, tuple(ids), truncated), logprobs)


class RolloutWeights:
    """Variables of one model at a time, in the form that generation takes; the copies of the model before are freed.

    Copies of all models would be most of the memory of a device (docs/pods.md). Moving one model takes a small part of
    the time of a launch.
    """

    def __init__(self, params: Params):
        """``params``: of the team."""
        self._params = params
        self._whole: dict[tuple[str, str], Params] = {}
        self._cut: dict[str, Params] = {}

    def variables(self, model: Model) -> Params:
        """`Model.variables` of ``model``, gathered along the mesh axis fsdp."""
        names = [("agents", model.name)] + ([] if model.base is None else [("shared", model.base)])
        # The copies of the other model are freed before these are made: both may not fit.
        self._whole = {name: whole for name, whole in self._whole.items() if name in names}
        self._cut = {name: cut for name, cut in self._cut.items() if name == model.name}
        for kind, name in names:
            if (kind, name) not in self._whole:
                self._whole[kind, name] = sharding.to_rollout(sharding.current(), self._params[kind][name])
        return model.variables({kind: {name: whole} for (kind, name), whole in self._whole.items()})

    def layers(self, model: Model) -> Params | None:
        """`Policy.unstack` of `variables`; None on a mesh, where a launch reads the stacked layers."""
        if sharding.meshed():
            return None
        if model.name not in self._cut:
            self._cut = {model.name: unstacked(model.policy, self.variables(model))}
        return self._cut[model.name]


def request_keys(requests: Sequence[GenerationRequest], size: int, *, group: int) -> jax.Array:
    """Keys of the samples [N G] of requests, and of copies of the last one.

    Args:
        requests: The nodes.
        size: N, at least their number.
        group: Samples of a node, G.
    """
    columns = zip(*((r.key, np.int32(r.role), np.int32(r.earlier)) for r in requests))
    return sample_keys(*(pad(np.stack(column), size) for column in columns), group=group)


@functools.partial(jax.jit, static_argnames=("group",))
def sample_keys(data: jax.Array, role: jax.Array, earlier: jax.Array, *, group: int) -> jax.Array:
    """Keys of the samples [N G].

    Args:
        data: Key data of the states [N 2].
        role: Index of the role of each state [N].
        earlier: Samples that each state had before [N].
        group: Samples of a state, G.
    """
    keys = jnp.repeat(fold(jax.random.wrap_key_data(jnp.asarray(data)), PLAY, role)[:, None], group, 1)
    return fold(keys, jnp.asarray(earlier)[:, None] + jnp.arange(group))


def pad(rows: np.ndarray, size: int) -> np.ndarray:
    """``rows`` and copies of the last one, ``size`` in all."""
    return np.concatenate([rows, np.repeat(rows[-1:], size - len(rows), 0)])


class Sampler(Protocol):
    """Samples the completions of a host rollout, turn by turn."""

    launches: int  # generation programs, or turns of an engine, started so far

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that were read so far."""
        ...

    def sample(self, requests: Sequence[GenerationRequest], *, more: bool) -> list[list[SampledCompletion]]:
        """Sample the completions of a turn.

        Args:
            requests: Nodes of the turn.
            more: Whether later prompts may begin with these prompts and completions.
        """
        ...


class SamplerFactory(Protocol):
    """Makes the `Sampler` of a rollout."""

    def __call__(self, team: Team, params: Params, sampling: Sampling, version: int, /) -> Sampler:
        """Make a sampler.

        Args:
            team: Roles and models.
            params: Parameters of the team.
            sampling: Distribution of tokens.
            version: Steps of training before these parameters.
        """
        ...


class TeamSampler:
    """Samples completions of a team's models during one rollout.

    Args:
        team: Roles and models.
        params: Parameters of the team.
        sampling: Distribution of tokens.
        mesh: Mesh of generation; None: that of the caller.

    ``launches``: generation programs started so far.
    """

    def __init__(self, team: Team, params: Params, sampling: Sampling, mesh: Mesh | None = None):
        self._team, self._sampling, self._mesh = team, sampling, mesh
        common = RolloutWeights(params)
        self._weights = {m.name: RolloutWeights(params) if meshes.has_split_models() else common for m in team.models}
        self._cached: dict[str, Prefixes] = {}
        self.launches = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that went through a model so far; cached tokens do not go through it again."""
        return sum(prefixes.prefilled_tokens for prefixes in self._cached.values())

    def sample(self, requests: Sequence[GenerationRequest], *, more: bool) -> list[list[SampledCompletion]]:
        """The completions of every request. ``more``: later prompts may begin with these prompts and completions."""
        completions: list[list[SampledCompletion]] = [[] for _ in requests]
        rows_of: dict[int, dict[int, list[int]]] = {}  # model -> group size -> requests
        for n, request in enumerate(requests):
            rows_of.setdefault(request.model, {}).setdefault(request.group, []).append(n)
        models = {self._team.models[m].name: self._team.models[m] for m in sorted(rows_of)}
        parts = {self._team.models[m].name: [rows for _, rows in sorted(of.items())] for m, of in rows_of.items()}
        self.launches += len(models)

        def sample_model(name: str) -> None:
            sampled = self._launch(models[name], [[requests[n] for n in rows] for rows in parts[name]], more)
            for n, samples in zip(itertools.chain(*parts[name]), sampled, strict=True):
                completions[n] = samples

        with meshes.use_mesh(self._mesh):
            meshes.map_models(list(models), sample_model)
        return completions

    def _launch(
        self, model: Model, parts: Sequence[Sequence[GenerationRequest]], keep: bool
    ) -> list[list[SampledCompletion]]:
        """Completions of requests of one model, each with the limit of its own role.

        ``parts``: requests with equally many samples. ``keep``: put what was read and sampled into the prefix cache.
        """
        requests = list(itertools.chain(*parts))
        limits = {self._limit(request) for request in requests}
        weights = self._weights[model.name]
        prefixes = self._cached.setdefault(model.name, Prefixes(model.policy, model.tokenizer.pad_id))
        tasks, prompts = [r.task for r in requests], [np.array(r.prompt_ids, np.int32) for r in requests]
        variables, layers = weights.variables(model), weights.layers(model)
        ready = prefixes.prepare(variables, tasks, prompts, [len(part) for part in parts], layers=layers)
        sampled = generate_launch(
            model.policy,
            variables,
            [self._rows(part, inputs, len(limits) > 1) for part, inputs in zip(parts, ready, strict=True)],
            max_new_tokens=max(limits),
            stop_ids=model.tokenizer.stop_ids,
            pad_id=model.tokenizer.pad_id,
            sampling=self._sampling,
            keep=True,
            layers=layers,
        )
        completions, at = [], 0
        for part, inputs, (out, prefix, suffix) in zip(parts, ready, sampled, strict=True):
            found, own = completions_of(model, sharding.to_host(out), inputs.rows), slice(at, at + len(part))
            if keep:
                ids = [[sample.action.ids for sample in samples] for samples in found]
                prefixes.store(tasks[own], prompts[own], prefix, suffix, ids, inputs.rows)
            completions += found
            at += len(part)
        return completions

    def _limit(self, request: GenerationRequest) -> int:
        """The largest number of tokens of a completion of ``request``."""
        return self._team.roles[request.role].max_new_tokens

    def _rows(self, part: Sequence[GenerationRequest], ready: LaunchInputs, limited: bool) -> PromptRows:
        """One part of a launch, padded. ``limited``: whether rows of the launch have different limits."""
        return prompt_rows(part, ready, [self._limit(r) for r in part] if limited else None)


def prompt_rows(
    part: Sequence[GenerationRequest], ready: LaunchInputs, limits: Sequence[int] | None, applied: Rows = TOGETHER
) -> PromptRows:
    """One part of a launch on the devices, padded with copies of the last request.

    Args:
        part: Requests with equally many samples.
        ready: Inputs of the part, which say where the rows are.
        limits: Largest number of tokens of a completion of each request. None: that of the launch.
        applied: How functions are applied to rows.
    """
    of_row = ready.prompts
    limit = None if limits is None else np.array(limits, np.int32)[of_row]
    tables = (ready.tokens, ready.length, ready.active, ready.start, limit)
    tokens, length, active, start, limit = applied.put(tables)
    keys = request_keys([part[n] for n in of_row], len(of_row), group=part[0].group)
    return PromptRows(tokens, length, keys, active, ready.prefix, start, limit)


def completions_of(model: Model, out: Completions, rows: Iterable[int]) -> list[list[SampledCompletion]]:
    """Some rows of completions as actions with text.

    Args:
        model: Model that sampled them.
        out: Completions, as numpy arrays.
        rows: Their rows, in the order of the result.
    """
    completions: list[list[SampledCompletion]] = []
    logprobs = np.asarray(out.logprobs)
    for row in rows:
        samples = []
        for s in range(out.tokens.shape[1]):
            ids = out.tokens[row, s, : out.length[row, s]].tolist()
            samples.append(as_completion(model, ids, bool(out.truncated[row, s]), logprobs[row, s, : len(ids)]))
        completions.append(samples)
    return completions


def here(team: Team, params: Params, sampling: Sampling, version: int) -> TeamSampler:
    """A `SamplerFactory`: this process samples.

    Args:
        team: Roles and models.
        params: Parameters of the team.
        sampling: Distribution of tokens.
        version: Not read.
    """
    return TeamSampler(team, params, sampling)
