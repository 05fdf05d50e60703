"""Runner of a Python environment over text, whose functions run in worker processes."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxmarl_llm.agents.memory import MemoryConfig, decode_text, read
from jaxmarl_llm.distributed.meshes import model_mesh, sampling_on
from jaxmarl_llm.distributed.sharding import put_whole, to_host
from jaxmarl_llm.envs.chat import asked
from jaxmarl_llm.envs.contract import HostTask, host_demonstrations
from jaxmarl_llm.envs.protocols import wrap
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.splits import content_hash
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.messages import HostEnv, Prompt
from jaxmarl_llm.rollout import scheduler
from jaxmarl_llm.rollout.block_sampler import sampler_of
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.env_runner import Demonstrations, EnvRunner, RolloutResult
from jaxmarl_llm.rollout.external import Engines
from jaxmarl_llm.rollout.host import HostSettings, Recall, play
from jaxmarl_llm.rollout.launches import SamplerFactory, here
from jaxmarl_llm.rollout.recall import mean_embedding
from jaxmarl_llm.types import Params, PyTree, Retrieval, Role, Team, Tree

QUERY_TOKENS = 96  # tokens of a host prompt's first user message that make its memory key
ENTRY_TOKENS, ENTRY_BYTES = 64, 208  # of a host environment's memory entry


class HostEnvRunner(EnvRunner):
    """Runner of a Python environment over text, whose functions run in worker processes.

    Args:
        task: The environment and its tasks.
        cfg: How the environment is played: its protocol, workers and longest prompt.

    ``engines``: External engines that sample the completions; None: this process does.
    """

    array = False
    entry_tokens, entry_bytes = ENTRY_TOKENS, ENTRY_BYTES
    engines: Engines | None = None

    def __init__(self, task: HostTask, cfg: EnvConfig):
        self.task, self.cfg = task, cfg
        self.tasks, self.held_out = task.tasks, task.held_out
        self.size = len(self.tasks)
        self._pool: EnvPool | None = None
        self._factory = functools.partial(_wrapped, task.make, cfg.protocol)
        self.env = self._factory()

    def open(self) -> None:
        if self.engines is not None:
            self.engines.open()

    def pool(self) -> EnvPool:
        """Worker processes; the first call starts them. Raises ConfigError if they cannot build the environment."""
        if self._pool is None:
            if self.cfg.workers:
                _check_picklable(self._factory, self.env.name)
            self._pool = EnvPool(self._factory, workers=self.cfg.workers, timeout=self.cfg.timeout)
        return self._pool

    def recall(self, team: Team, params: Params, memory: PyTree, config: MemoryConfig) -> Recall:
        """A function that adds memory entries to prompts.

        Args:
            team: Roles and models.
            params: Parameters of the team.
            memory: Memory of each role by its name.
            config: Settings of the memory.
        """
        return functools.partial(_recall, self.task.with_memory, team, params, memory, config)

    def play(
        self,
        team,
        params,
        memory,
        indices,
        plan,
        key,
        sampling,
        memory_config,
        *,
        version=0,
        held_out=False,
        assignment=None,
    ):
        source, team = self.held_out if held_out else self.tasks, self.playing(team, held_out)
        chosen = [source[i] for i in indices]
        settings = HostSettings(
            plan,
            sampling,
            max_prompt=self.cfg.max_prompt,
            version=version,
            assignment=None if assignment is None else np.asarray(assignment),
            sampler=self._sampler(),
        )
        with sampling_on(self.layout) as copied:
            params, memory, key = self._weights(params, held_out), copied(memory), copied(key)
            if memory_config is not None:
                settings = settings._replace(recall=self.recall(team, params, memory, memory_config))
            if self.cfg.lanes:
                got = scheduler.play(team, params, self.pool(), chosen, key, settings, self.cfg.lanes, self.layout)
            else:
                got = play(team, params, self.pool(), chosen, key, settings)

        def prompt(row: int) -> str:
            return "\n".join(f"[{m.speaker}] {m.text}" for m in got.records[row].prompt)

        watched: Mapping[str, float] = {}
        if self.task.episode_metrics is not None:
            moves = got.tree.transitions
            spoken = [
                (
                    source[indices[moves.task[j]]],
                    {got.records[s].role: got.records[s].action.text for s in seats[seats >= 0]},
                )
                for j, seats in enumerate(moves.steps)
                if moves.played[j]
            ]
            watched = self.task.episode_metrics(spoken)
        failures = [failure._replace(task=int(indices[failure.task])) for failure in got.failures]
        completion = lambda row: got.records[row].action.text
        return self._watched(RolloutResult(got.tree, prompt, completion, failures, got, watched), held_out)

    def _weights(self, params: Params, held_out: bool) -> Params:
        """Parameters of a rollout: where devices sample alone, all of them are copied there at once."""
        if self.layout is None or not self.layout.apart:
            return self.formed(params, held_out)
        return self.formed({k: params[k] for k in ("shared", "agents")}, held_out, self.layout.mesh)

    def _sampler(self) -> SamplerFactory:
        """What samples completions."""
        if self.engines is not None:
            return self.engines.sampler
        return here if self.layout is None else sampler_of(self.layout)

    @property
    def held_out_size(self) -> int:
        """Number of held-out tasks."""
        return len(self.held_out)

    def contents(self, numbers, held_out):
        source = self.held_out if held_out else self.tasks
        return [content_hash(source[i]) for i in numbers]

    def demonstrations(self, team, n, seed, context, *, min_fitting=0.0):
        rng = np.random.default_rng([seed, 7])
        rows = host_demonstrations(self.task)
        by_role: dict[str, list] = {role: [] for role in self.env.roles}
        for role, prompt, completion in rows:
            by_role["solo" if self.cfg.protocol == "solo" else role].append((prompt, completion))
        out, kept, every = {}, 0, 0
        for index, role in enumerate(team.roles):
            samples, tokenizer = by_role[role.name], team.model_of(index).tokenizer
            if not samples:
                continue
            encoded, drawn = [], rng.permutation(len(samples))[:n]
            for i in drawn:
                prompt, completion = samples[i]
                if context and rng.random() < 0.5:  # memory-bearing samples: strategies of other samples in front
                    others = rng.integers(0, len(samples), rng.integers(1, context + 1))
                    entries = [self._example(role.name, samples[j]) for j in others if j != i]
                    prompt = self.task.with_memory(prompt, entries)
                ids = tokenizer.fit(prompt, role.name, self.cfg.max_prompt).ids
                said = [*tokenizer.encode(completion), tokenizer.stop_ids[0]]
                if len(said) <= role.max_new_tokens:
                    encoded.append((ids, said))
            _check_fitting(role, len(encoded), len(drawn), min_fitting)
            kept, every = kept + len(encoded), every + len(drawn)
            out[role.name] = _stack(encoded, role.max_new_tokens, tokenizer.pad_id)
        self.dropped = 1 - kept / every if every else 0.0
        return out

    def _example(self, role: str, sample: tuple[Prompt, str]) -> str:
        from jaxmarl_llm.messages import Action

        prompt, completion = sample
        return self.task.strategy(role, prompt, Action(completion, ()), {"accuracy": 1.0})

    def lessons(self, team, played, rows):
        ids, length, texts = np.zeros((len(rows), self.entry_tokens), np.int32), np.zeros((len(rows),), np.int32), []
        tree = played.tree
        move_of = _final_move(tree)
        for k, row in enumerate(rows):
            record, node = played.records.records[row], tree.steps.node[row]
            own = {c: float(v[move_of[row], tree.nodes.role[node]]) for c, v in tree.transitions.rewards.items()}
            text = self.task.strategy(record.role, record.prompt, record.action, own)
            model = team.models[tree.nodes.model[node]]
            entry = model.tokenizer.encode(text)[: self.entry_tokens]
            ids[k, : len(entry)], length[k] = entry, len(entry)
            texts.append(text)
        return ids, length, texts

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _wrapped(make: Callable[[], HostEnv], protocol: str) -> HostEnv:
    return wrap(make(), protocol)


def _check_picklable(factory: Callable[[], HostEnv], name: str) -> None:
    """ConfigError where worker processes cannot build the environment."""
    try:
        pickle.dumps(factory)
    except Exception as error:
        raise ConfigError(
            f"config.env.workers: expected 0: worker processes cannot build environment {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from None


def _check_fitting(role: Role, fitting: int, drawn: int, least: float) -> None:
    """Say how many demonstrations of a role were left out.

    Args:
        role: The role.
        fitting: Demonstrations that are short enough.
        drawn: All of them.
        least: Share that has to fit.

    Raises:
        ConfigError: None fits, or less than ``least`` do.
    """
    if fitting == drawn:
        return
    long = f"{drawn - fitting} of {drawn} demonstrations of role {role.name!r}"
    shown = f"{long} are longer than {role.max_new_tokens} tokens"
    if not fitting or fitting < least * drawn:
        accept = ", or accept that share with --config.sft.min_fitting" if fitting else ""
        raise ConfigError(
            f"config.team.max_new_tokens: {shown}, so only {fitting / drawn:.0%} would be learned; give it a "
            f"larger value{accept}"
        )
    logging.warning("config.team.max_new_tokens: %s and are left out of stage 0", shown)


def _final_move(tree: Tree) -> np.ndarray:
    """The transition each step leads to at the end of its first line of play [C]."""
    moves = tree.transitions
    child = {}
    for j in np.flatnonzero(moves.played)[::-1]:
        if moves.parent[j] >= 0:
            child[int(moves.parent[j])] = int(j)
    end = np.zeros((len(tree.steps.node),), np.int64)
    for j in np.flatnonzero(moves.played):
        last = int(j)
        while last in child:
            last = child[last]
        for s in moves.steps[j]:
            if s >= 0:
                end[s] = last
    return end


def _stack(rows: list[tuple[list[int], list[int]]], response: int, pad: int) -> Demonstrations:
    p = bucket(max((len(a) for a, _ in rows), default=1), 32)
    tokens, completions = np.full((len(rows), p), pad, np.int32), np.full((len(rows), response), pad, np.int32)
    length, size = np.zeros((len(rows),), np.int32), np.zeros((len(rows),), np.int32)
    for i, (a, b) in enumerate(rows):
        tokens[i, : len(a)], length[i] = a, len(a)
        completions[i, : len(b)], size[i] = b, len(b)
    return Demonstrations(tokens, length, completions, size)


@functools.partial(jax.jit, static_argnames=("embed", "config"))
def _lookup(embed: Callable, config: MemoryConfig, variables: Params, store: PyTree, tokens: Any, length: Any) -> Any:
    query = mean_embedding(embed, variables, tokens, length)
    slots, similarity = jax.vmap(lambda q: read(config, store, q))(query)
    return query, slots, similarity


def _recall(
    with_memory: Callable,
    team: Team,
    params: Params,
    memory: PyTree,
    config: MemoryConfig,
    roles: Sequence[int],
    prompts: Sequence[Prompt],
) -> tuple[list[Prompt], Retrieval]:
    """Each prompt with its own role's nearest strategies; the key is the first user message."""
    n, out = len(roles), list(prompts)
    dim = max(memory[r.name].key.shape[1] for r in team.roles)
    slots, similarity = np.full((n, config.retrieve), -1, np.int32), np.zeros((n, config.retrieve), np.float32)
    query = np.zeros((n, dim), np.float32)
    for role in sorted(set(roles)):
        rows = [i for i, r in enumerate(roles) if r == role]
        model = team.model_of(role)
        size = bucket(len(rows), 4)
        tokens, length = np.zeros((size, QUERY_TOKENS), np.int32), np.zeros((size,), np.int32)
        for k, i in enumerate(rows):
            ids = model.tokenizer.encode(asked(prompts[i]))[:QUERY_TOKENS]
            tokens[k, : len(ids)], length[k] = ids, len(ids)
        with model_mesh(model.name):
            store = put_whole(memory[team.roles[role].name])
            got = to_host(_lookup(model.policy.embed, config, model.variables(params), store, tokens, length))
        texts = np.asarray(store.text)
        for k, i in enumerate(rows):
            query[i, : got[0].shape[1]], slots[i], similarity[i] = got[0][k], got[1][k], got[2][k]
            out[i] = with_memory(prompts[i], [decode_text(texts[s]) for s in got[1][k] if s >= 0])
    return out, Retrieval(slots, similarity, query, np.zeros((n,), np.int32))
