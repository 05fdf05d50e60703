"""One face for both kinds of environment: play a batch of tasks, give demonstrations, say what was learnt.

An environment module in `jaxmarl_llm.envs` provides ``Config`` and ``make(config)``, and

    array   make_tasks(config, seed, n), entry_length(config), demonstrations(config, seed, n, ...) as token arrays
    host    tasks(config), demonstrations(config, tasks, memory) as (role, prompt, completion), with_memory, strategy
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.config import from_dict, nearest, one_of
from jaxmarl_llm.envs.arrays import HELD_OUT
from jaxmarl_llm.envs.prompts import asked
from jaxmarl_llm.envs.protocols import PROTOCOLS, wrap
from jaxmarl_llm.generate import bucket
from jaxmarl_llm.memory import MemoryConfig, decode_text, read
from jaxmarl_llm.meshes import home
from jaxmarl_llm.plans import Plan
from jaxmarl_llm.rollout import check_seats, make_rollout, mean_embedding
from jaxmarl_llm.rollout_host import HostRollout, play
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.sharding import current, put_whole, to_host, to_rollout
from jaxmarl_llm.text import ConfigError, HostEnv, Prompt
from jaxmarl_llm.types import ArrayEnv, Params, PyTree, Retrieval, Team, Tree
from jaxmarl_llm.workers import EnvPool

KNOWN = (
    "dispatch",
    "dispatch_solo",
    "matrix",
    "dilemma",
    "dilemma_text",
    "maze",
    "maze_text",
    "duet",
    "chain",
    "chain_text",
    "games",
    "games_text",
    "safety",
    "safety_text",
    "assistant",
    "coding",
    "writing",
)
QUERY_TOKENS = 96  # tokens of a host prompt's first user message that make its memory key
ENTRY_TOKENS, ENTRY_BYTES = 64, 208  # of a host environment's memory entry


@dataclass(frozen=True)
class EnvConfig:
    name: str = "dispatch"
    args: dict[str, Any] = field(default_factory=dict)  # of the environment module's Config
    workers: int = 2  # processes of a host environment; 0: in this process, without timeouts
    timeout: float = 20.0  # seconds for one call of a host environment
    max_prompt: int = 1024  # tokens; longer prompts of a host environment are cut and counted
    eval_tasks: int = 256
    protocol: str = "together"  # of a host environment: who hears whom, see envs/protocols.py

    def check(self, path: str) -> None:
        if self.name not in KNOWN:
            raise ConfigError(f"{path}.name: no environment {self.name!r}; {nearest(self.name, KNOWN)}")
        if self.workers < 0 or self.timeout <= 0 or self.eval_tasks < 1 or self.max_prompt < 16:
            raise ConfigError(f"{path}: expected workers >= 0, timeout > 0, eval_tasks >= 1 and max_prompt >= 16")
        one_of(f"{path}.protocol", self.protocol, PROTOCOLS)
        self.build(f"{path}.args")

    def build(self, path: str = "config.env.args") -> Any:
        """The environment's own Config, checked."""
        return from_dict(self.module.Config, self.args, path)

    @property
    def module(self) -> Any:
        return importlib.import_module(f"jaxmarl_llm.envs.{self.name}")


class Played(NamedTuple):
    tree: Tree  # numpy arrays
    prompt_text: Callable[[int], str]  # of a step's row
    completion_text: Callable[[int], str]
    failures: list[str]
    records: HostRollout | None  # host environments
    watched: Mapping[str, float] = {}  # figures of the environment's own, see `HostArena.play`


class Demonstrations(NamedTuple):
    """Samples of one role, padded: prompts, and what was written there."""

    tokens: np.ndarray  # [n, P]
    length: np.ndarray
    completions: np.ndarray  # [n, R], stop id included; [n, G, R] where a prompt has a group of them
    completion_length: np.ndarray  # [n], or [n, G]


class Arena(ABC):
    """Plays tasks of one environment with one team; ``array`` tells the kind."""

    array: bool
    env: ArrayEnv | HostEnv
    size: int  # training tasks
    held_out: Any  # evaluation tasks: a pytree of arrays, or a list

    @abstractmethod
    def play(
        self,
        team: Team,
        params: Params,
        memory: PyTree,
        indices: Sequence[int],
        plan: Plan,
        key: jax.Array,
        sampling: Sampling,
        memory_config: MemoryConfig | None,
        *,
        version: int = 0,
        held_out: bool = False,
        cast: jax.Array | None = None,
    ) -> Played:
        """One rollout of the tasks ``indices`` of the training tasks, or of the held-out ones. ``cast``: see
        `rollout.make_rollout`.
        """

    @abstractmethod
    def demonstrations(self, team: Team, n: int, seed: int, context: int) -> dict[str, Demonstrations]:
        """At most ``n`` supervised samples a role, some with up to ``context`` memory entries in the prompt."""

    @abstractmethod
    def lessons(self, team: Team, played: Played, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Memory entries for the steps ``rows``: ids [n T], lengths [n], texts."""

    entry_tokens: int
    entry_bytes: int

    def close(self) -> None:  # noqa: B027  # only host environments hold processes
        """End what the arena started."""


class ArrayArena(Arena):
    array = True
    env: ArrayEnv

    def __init__(self, cfg: EnvConfig):
        self.module, self.config = cfg.module, cfg.build()
        self.env = self.module.make(self.config)
        self.tasks = self.module.make_tasks(self.config)
        self.size = len(jax.tree.leaves(self.tasks)[0])
        self.held_out = self.module.make_tasks(self.config, self.config.seed + HELD_OUT, cfg.eval_tasks)
        self.entry_tokens = self.module.entry_length(self.config)
        self.entry_bytes = 2 * self.entry_tokens
        self._compiled = functools.lru_cache(maxsize=None)(self._rollout)

    def _rollout(self, team: Team, plan: Plan, sampling: Sampling, memory_config: MemoryConfig | None) -> Callable:
        return jax.jit(make_rollout(team, self.env, plan, sampling, memory_config))

    def play(
        self, team, params, memory, indices, plan, key, sampling, memory_config, *, version=0, held_out=False, cast=None
    ):
        source = self.held_out if held_out else self.tasks
        tasks = jax.tree.map(lambda x: x[np.asarray(indices)], source)
        params = to_rollout(current(), {k: params[k] for k in ("shared", "agents")})
        rollout = self._compiled(team, plan, sampling, memory_config)
        tree = to_host(rollout(params, memory, tasks, key, jnp.int32(version), cast))
        check_seats(self.env, tree)
        decode = team.models[0].tokenizer.decode

        def prompt(row: int) -> str:
            node = tree.steps.node[row]
            return decode(tree.nodes.tokens[node, : tree.nodes.length[node]])

        completion = lambda row: decode(tree.steps.tokens[row, : tree.steps.length[row]])
        return Played(tree, prompt, completion, [], None)

    def demonstrations(self, team, n, seed, context):
        rows = self.module.demonstrations(self.config, seed, n, context=context)
        return {
            r: Demonstrations(d["tokens"], d["length"], d["completion"], d["completion_length"])
            for r, d in rows.items()
        }

    def lessons(self, team, played, rows):
        """The prompt without what memory had put in front, the completion without its stop id, a separator."""
        tree, t = played.tree, self.entry_tokens
        ids, length, texts = np.zeros((len(rows), t), np.int32), np.zeros((len(rows),), np.int32), []
        for k, row in enumerate(rows):
            node = tree.steps.node[row]
            tokenizer = team.models[tree.nodes.model[node]].tokenizer
            asked = tree.nodes.tokens[node, tree.nodes.retrieved.added[node] : tree.nodes.length[node]]
            said = tree.steps.tokens[row, : tree.steps.length[row]]
            said = said[~np.isin(said, tokenizer.stop_ids)]
            entry = [*asked.tolist(), *said.tolist(), tokenizer.SEP][:t]
            ids[k, : len(entry)], length[k] = entry, len(entry)
            texts.append(tokenizer.decode(entry))
        return ids, length, texts


class HostArena(Arena):
    array = False
    entry_tokens, entry_bytes = ENTRY_TOKENS, ENTRY_BYTES

    def __init__(self, cfg: EnvConfig):
        self.module, self.config, self.cfg = cfg.module, cfg.build(), cfg
        self.tasks = self.module.tasks(self.config)
        if not self.tasks:
            raise ConfigError(f"env {cfg.name}: no training tasks")
        self.size = len(self.tasks)
        # All usable test tasks, in the order fixed by the seed; loaded now, so that bad data shows before any step.
        test = dataclasses.replace(self.config, split="test", count=0)
        self.held_out = self.module.tasks(test)[: cfg.eval_tasks]
        self._pool: EnvPool | None = None
        self.env = _wrapped(self.module.make, self.config, cfg.protocol)

    def pool(self) -> EnvPool:
        if self._pool is None:
            factory = functools.partial(_wrapped, self.module.make, self.config, self.cfg.protocol)
            self._pool = EnvPool(factory, workers=self.cfg.workers, timeout=self.cfg.timeout)
        return self._pool

    def play(
        self, team, params, memory, indices, plan, key, sampling, memory_config, *, version=0, held_out=False, cast=None
    ):
        source = self.held_out if held_out else self.tasks
        recall = None
        if memory_config is not None:
            recall = functools.partial(_recall, self.module.with_memory, team, params, memory, memory_config)
        got = play(
            team,
            params,
            self.pool(),
            [source[i] for i in indices],
            plan,
            key,
            sampling,
            max_prompt=self.cfg.max_prompt,
            version=version,
            recall=recall,
            cast=None if cast is None else np.asarray(cast),
        )

        def prompt(row: int) -> str:
            return "\n".join(f"[{m.speaker}] {m.text}" for m in got.records[row].prompt)

        watched: Mapping[str, float] = {}
        if hasattr(self.module, "watch"):  # (task, {role: text}) of every joint action -> figures for the log
            moves = got.tree.transitions
            spoken = [
                (
                    source[indices[moves.task[j]]],
                    {got.records[s].role: got.records[s].action.text for s in seats[seats >= 0]},
                )
                for j, seats in enumerate(moves.steps)
                if moves.played[j]
            ]
            watched = self.module.watch(spoken)
        return Played(got.tree, prompt, lambda row: got.records[row].action.text, got.failures, got, watched)

    def demonstrations(self, team, n, seed, context):
        rng = np.random.default_rng([seed, 7])
        rows = self.module.demonstrations(self.config, self.tasks)
        by_role: dict[str, list] = {role: [] for role in self.env.roles}
        for role, prompt, completion in rows:
            by_role["solo" if self.cfg.protocol == "solo" else role].append((prompt, completion))
        out = {}
        for index, role in enumerate(team.roles):
            samples, tokenizer = by_role[role.name], team.model_of(index).tokenizer
            if not samples:
                continue
            encoded = []
            for i in rng.permutation(len(samples))[:n]:
                prompt, completion = samples[i]
                if context and rng.random() < 0.5:  # memory-bearing samples: strategies of other samples in front
                    others = rng.integers(0, len(samples), rng.integers(1, context + 1))
                    entries = [self._example(role.name, samples[j]) for j in others if j != i]
                    prompt = self.module.with_memory(prompt, entries)
                ids = tokenizer.fit(prompt, role.name, self.cfg.max_prompt).ids
                said = [*tokenizer.encode(completion), tokenizer.stop_ids[0]]
                if len(said) <= role.max_new:
                    encoded.append((ids, said))
            if not encoded:
                raise ConfigError(
                    f"config.team.max_new: none of the {len(samples)} demonstrations of role {role.name!r} "
                    f"fits in {role.max_new} tokens"
                )
            out[role.name] = _stack(encoded, role.max_new, tokenizer.pad_id)
        return out

    def _example(self, role: str, sample: tuple[Prompt, str]) -> str:
        from jaxmarl_llm.text import Action

        prompt, completion = sample
        return self.module.strategy(role, prompt, Action(completion, ()), {"accuracy": 1.0})

    def lessons(self, team, played, rows):
        ids, length, texts = np.zeros((len(rows), self.entry_tokens), np.int32), np.zeros((len(rows),), np.int32), []
        tree = played.tree
        move_of = _final_move(tree)
        for k, row in enumerate(rows):
            record, node = played.records.records[row], tree.steps.node[row]
            own = {c: float(v[move_of[row], tree.nodes.role[node]]) for c, v in tree.transitions.rewards.items()}
            text = self.module.strategy(record.role, record.prompt, record.action, own)
            model = team.models[tree.nodes.model[node]]
            entry = model.tokenizer.encode(text)[: self.entry_tokens]
            ids[k, : len(entry)], length[k] = entry, len(entry)
            texts.append(text)
        return ids, length, texts

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def make_arena(cfg: EnvConfig) -> Arena:
    made = cfg.module.make(cfg.build())
    if not isinstance(made, ArrayEnv):
        return HostArena(cfg)
    if cfg.protocol != "together":
        raise ConfigError(f"config.env.protocol: expected 'together' with the array environment {cfg.name!r}")
    return ArrayArena(cfg)


def _wrapped(make: Callable[[Any], HostEnv], config: Any, protocol: str) -> HostEnv:
    return wrap(make(config), protocol)


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
        with home(model.name):
            store = put_whole(memory[team.roles[role].name])
            got = to_host(_lookup(model.policy.embed, config, model.variables(params), store, tokens, length))
        texts = np.asarray(store.text)
        for k, i in enumerate(rows):
            query[i, : got[0].shape[1]], slots[i], similarity[i] = got[0][k], got[1][k], got[2][k]
            out[i] = with_memory(prompts[i], [decode_text(texts[s]) for s in got[1][k] if s >= 0])
    return out, Retrieval(slots, similarity, query, np.zeros((n,), np.int32))
