"""Sampling for `scheduler`: a decoding loop for each model, which requests enter one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.generation.buckets import doubled
from jaxmarl_llm.generation.prefix_cache import Prefixes
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.generation.slots import SlotLoop
from jaxmarl_llm.rollout.launches import (
    GenerationRequest,
    SampledCompletion,
    TeamSampler,
    completions_of,
    prompt_rows,
)
from jaxmarl_llm.types import Model, Params, Team

SHARE = 4  # a loop returns to the host once one of so many of its nodes is finished


class _Node(NamedTuple):
    """A request of a loop."""

    ticket: Any
    request: GenerationRequest
    more: bool


class _Loop:
    """The loop of one model, the requests that wait for it, and the prefix cache of both."""

    def __init__(self, team: Team, model: Model, params: Params, sampling: Sampling, lanes: int):
        self._model, self._variables = model, model.variables(params)
        self._limits = [role.max_new_tokens for role in team.roles]
        longest = max(role.max_new_tokens for role in team.roles if model.name in role.players)
        stop, padding = model.tokenizer.stop_ids, model.tokenizer.pad_id
        fixed = {"max_new_tokens": longest, "stop_ids": stop, "pad_id": padding, "sampling": sampling}
        self._slots = SlotLoop(model.policy, self._variables, lanes=lanes, **fixed)
        self._lanes = lanes
        self.prefixes = Prefixes(model.policy, padding, doubled)  # few shapes: numbers of rows vary
        self.waiting: list[_Node] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._slots.taken)

    @property
    def decoding(self) -> bool:
        """Whether a request is in the loop."""
        return self._slots.taken > 0

    @property
    def room(self) -> bool:
        """Whether one more request would be decoded at once."""
        return not self.waiting or len(self.waiting) < self._slots.room(self.waiting[-1].request.group).sum()

    def work(self) -> list[tuple[Any, list[SampledCompletion]]]:
        """Let requests enter, decode, and return what is finished."""
        for group in {node.request.group for node in self.waiting}:
            room = self._slots.room(group).sum()
            entering = [node for node in self.waiting if node.request.group == group][:room]
            if entering:
                self._enter(entering)
                chosen = set(map(id, entering))
                self.waiting = [node for node in self.waiting if id(node) not in chosen]
        out = []
        for left in self._slots.advance(max(1, self._slots.taken // SHARE)):
            nodes: Sequence[_Node] = left.tickets
            found = completions_of(self._model, left.completions, left.rows)
            if any(node.more for node in nodes):
                prompts = [np.array(node.request.prompt_ids, np.int32) for node in nodes]
                ids = [[sample.action.ids for sample in samples] for samples in found]
                tasks = [node.request.task for node in nodes]
                self.prefixes.store(tasks, prompts, left.prefix, left.suffix, ids, left.rows)
            out += [(node.ticket, samples) for node, samples in zip(nodes, found, strict=True)]
        return out

    def _enter(self, nodes: Sequence[_Node]) -> None:
        """Read the prompts of ``nodes``, which have equally many samples, and put them into the loop."""
        requests = [node.request for node in nodes]
        prompts = [np.array(r.prompt_ids, np.int32) for r in requests]
        tasks = [r.task for r in requests]
        room = self._slots.room(requests[0].group)
        (ready,) = self.prefixes.prepare(self._variables, tasks, prompts, [len(requests)], room=room)
        rows = prompt_rows(requests, ready, [self._limits[r.role] for r in requests])
        self._slots.enter(nodes, rows, ready.rows)


class SlotSampler:
    """Samples completions of a team's models during one rollout, each request for itself.

    A model that cannot decode nodes of different times together (`Policy.decode_slots`) takes what waits as a launch.
    On a mesh all models have their weights in the layout of generation until the rollout ends.

    Args:
        team: Roles and models.
        params: Parameters of the team.
        sampling: Distribution of tokens.
        lanes: Samples of a model that are decoded at once, at most.
        mesh: Mesh of generation; None: that of the caller.

    ``launches``: times that a model was called.
    """

    def __init__(self, team: Team, params: Params, sampling: Sampling, lanes: int, mesh: Mesh | None = None):
        self._team, self._sampling, self._lanes, self._mesh = team, sampling, lanes, mesh
        with meshes.use_mesh(mesh):
            own = sharding.current()
            moved = lambda trees: {name: sharding.to_rollout(own, tree) for name, tree in trees.items()}
            self._params = {kind: moved(params[kind]) for kind in ("shared", "agents")}
        self._loops: dict[int, _Loop] = {}
        self._plain = TeamSampler(team, params, sampling, mesh)
        self._waiting: list[_Node] = []  # of models without a loop
        self.launches = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that went through a model so far."""
        return self._plain.prompt_tokens + sum(loop.prefixes.prefilled_tokens for loop in self._loops.values())

    @property
    def busy(self) -> bool:
        """Whether a request waits or is decoded."""
        return bool(self._waiting) or any(loop.busy for loop in self._loops.values())

    @property
    def decoding(self) -> bool:
        """Whether a request is half decoded."""
        return any(loop.decoding for loop in self._loops.values())

    @property
    def room(self) -> bool:
        """Whether more requests would be decoded at once with those that are there."""
        return all(loop.room for loop in self._loops.values())

    def submit(self, ticket: Any, request: GenerationRequest, *, more: bool) -> None:
        """Take a request.

        Args:
            ticket: Name of the request in the results of `work`.
            request: One node.
            more: Whether later prompts may begin with its prompt and completions.
        """
        node, model = _Node(ticket, request, more), self._team.models[request.model]
        if model.policy.decode_slots is None:
            self._waiting.append(node)
            return
        if request.model not in self._loops:
            with meshes.use_mesh(self._mesh):
                self._loops[request.model] = _Loop(self._team, model, self._params, self._sampling, self._lanes)
        self._loops[request.model].waiting.append(node)

    def work(self) -> list[tuple[Any, list[SampledCompletion]]]:
        """Decode for a while: finished requests by ticket, and their completions."""
        out: list[tuple[Any, list[SampledCompletion]]] = []
        if self._waiting:
            nodes, self._waiting = self._waiting, []
            more = any(node.more for node in nodes)
            sampled = self._plain.sample([node.request for node in nodes], more=more)
            out += [(node.ticket, samples) for node, samples in zip(nodes, sampled, strict=True)]
        with meshes.use_mesh(self._mesh):
            for loop in self._loops.values():
                if loop.busy:
                    self.launches += 1
                    out += loop.work()
        return out
