"""Generation in a turn of a host rollout: one launch for each model, or one for all adapters of a backbone.

Nodes of a launch that have equally many samples are one part of it. A launch reuses the prefix cache of earlier
launches (`prefix_cache`), and each part is padded to a bucket. Models with devices of their own (`meshes.Split`)
generate in parallel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
from jaxmarl_llm.models.lora import join_adapters
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
        self._joined: dict[tuple[str, ...], tuple[Params, Params | None]] = {}

    def variables(self, model: Model) -> Params:
        """`Model.variables` of ``model``, gathered along the mesh axis fsdp."""
        self._joined = {}
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

    def joined(self, models: Sequence[Model]) -> tuple[Params, Params | None]:
        """`variables` and `layers` of all adapters of one backbone, side by side in the order of ``models``."""
        names = tuple(model.name for model in models)
        if names not in self._joined:
            self._whole, self._cut, first = {}, {}, models[0]
            whole = functools.partial(sharding.to_rollout, sharding.current())
            adapters = [whole(self._params["agents"][name])["lora"] for name in names]
            variables = {"params": whole(self._params["shared"][first.base]), "lora": join_adapters(adapters)}
            layers = None if sharding.meshed() else unstacked(first.policy, variables)
            self._joined = {names: (variables, layers)}
        return self._joined[names]


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


def launched_together(team: Team, params: Params) -> list[tuple[int, ...]]:
    """The models that one launch of a host rollout may have, for each model of a team: indices of models.

    They are the adapters of one backbone. Another model is alone.

    Args:
        team: Roles and models.
        params: Parameters of the team.
    """

    def kind(index: int) -> tuple[Hashable, ...]:
        model = team.models[index]
        joins = model.policy.choose_adapters is not None and model.policy.draw is None
        if not joins or meshes.has_split_models() or set(params["agents"][model.name]) != {"lora"}:
            return (index,)
        return *model.kind, jax.tree.structure(params["agents"][model.name])

    kinds = [kind(index) for index in range(len(team.models))]
    return [tuple(other for other, its in enumerate(kinds) if its == own) for own in kinds]


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
        self._cached: dict[tuple[int, ...], Prefixes] = {}
        self._params = params
        self.launches = 0

    @functools.cached_property
    def _together(self) -> list[tuple[int, ...]]:
        """The models of a launch, for each model."""
        with meshes.use_mesh(self._mesh):
            return launched_together(self._team, self._params)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that went through a model so far; cached tokens do not go through it again."""
        return sum(prefixes.prefilled_tokens for prefixes in self._cached.values())

    def sample(self, requests: Sequence[GenerationRequest], *, more: bool) -> list[list[SampledCompletion]]:
        """The completions of every request. ``more``: later prompts may begin with these prompts and completions."""
        completions: list[list[SampledCompletion]] = [[] for _ in requests]
        # models of a launch -> group size -> requests
        rows_of: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for n, request in enumerate(requests):
            rows_of.setdefault(self._together[request.model], {}).setdefault(request.group, []).append(n)
        of_launch = {
            self._team.models[together[0]].name: (together, [rows for _, rows in sorted(of.items())])
            for together, of in sorted(rows_of.items())
        }
        self.launches += len(of_launch)

        def sample_models(first: str) -> None:
            together, parts = of_launch[first]
            sampled = self._launch(together, [[requests[n] for n in rows] for rows in parts], more)
            for n, samples in zip(itertools.chain(*parts), sampled, strict=True):
                completions[n] = samples

        with meshes.use_mesh(self._mesh):
            meshes.map_models(list(of_launch), sample_models)
        return completions

    def _launch(
        self, together: tuple[int, ...], parts: Sequence[Sequence[GenerationRequest]], keep: bool
    ) -> list[list[SampledCompletion]]:
        """Completions of requests of models ``together``, each with the limit of its own role.

        ``parts``: requests with equally many samples. ``keep``: put what was read and sampled into the prefix cache.
        """
        requests = list(itertools.chain(*parts))
        limits = {self._limit(request) for request in requests}
        acting = {request.model for request in requests}
        model = self._team.models[min(acting)]
        weights = self._weights[model.name]
        prefixes = self._cached.setdefault(together, Prefixes(model.policy, model.tokenizer.pad_id))
        # Keys and values depend on the adapter. So models share none.
        tasks, prompts = [(r.model, r.task) for r in requests], [np.array(r.prompt_ids, np.int32) for r in requests]
        adapters: dict[tuple[int, int], int] | None = None  # by model and task
        if len(acting) > 1:
            adapters = {task: together.index(task[0]) for task in tasks}
            variables, layers = weights.joined([self._team.models[m] for m in together])
        else:
            variables, layers = weights.variables(model), weights.layers(model)
        sizes = [len(part) for part in parts]
        ready = prefixes.prepare(variables, tasks, prompts, sizes, layers=layers, adapters=adapters)
        sampled = generate_launch(
            model.policy,
            variables,
            [self._rows(part, inputs, len(limits) > 1, adapters) for part, inputs in zip(parts, ready, strict=True)],
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

    def _rows(
        self,
        part: Sequence[GenerationRequest],
        ready: LaunchInputs,
        limited: bool,
        adapters: Mapping[tuple[int, int], int] | None,
    ) -> PromptRows:
        """One part of a launch, padded.

        ``limited``: whether rows of the launch have different limits. ``adapters``: index of the adapter of each model
        and task; None: the variables have one.
        """
        limits = [self._limit(r) for r in part] if limited else None
        return prompt_rows(part, ready, limits, None if adapters is None else [adapters[r.model, r.task] for r in part])


def prompt_rows(
    part: Sequence[GenerationRequest],
    ready: LaunchInputs,
    limits: Sequence[int] | None,
    adapters: Sequence[int] | None = None,
    applied: Rows = TOGETHER,
) -> PromptRows:
    """One part of a launch on the devices, padded with copies of the last request.

    Args:
        part: Requests with equally many samples.
        ready: Inputs of the part, which say where the rows are.
        limits: Largest number of tokens of a completion of each request. None: that of the launch.
        adapters: Index of the adapter of each request, see `PromptRows`. None: the variables have one.
        applied: How functions are applied to rows.
    """
    of_row = ready.prompts
    limit, adapter = (None if x is None else np.array(x, np.int32)[of_row] for x in (limits, adapters))
    tables = (ready.tokens, ready.length, ready.active, ready.start, limit, adapter)
    tokens, length, active, start, limit, adapter = applied.put(tables)
    keys = request_keys([part[n] for n in of_row], len(of_row), group=part[0].group)
    return PromptRows(tokens, length, keys, active, ready.prefix, start, limit, adapter)


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
