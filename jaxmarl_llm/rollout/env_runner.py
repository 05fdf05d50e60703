"""One face for both kinds of environment: play a batch of tasks, give demonstrations, make memory entries."""

from __future__ import annotations

import functools
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from jaxmarl_llm.agents.memory import MemoryConfig, decode_text, read
from jaxmarl_llm.distributed.meshes import Layout, model_mesh, sampling_on, use_mesh
from jaxmarl_llm.distributed.sharding import current, put_whole, to_host, to_rollout
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.envs.chat import asked
from jaxmarl_llm.envs.contract import (
    ArrayTask,
    Environment,
    HostTask,
    array_demonstrations,
    check,
    host_demonstrations,
)
from jaxmarl_llm.envs.protocols import wrap
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.splits import content_hash
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.buckets import bucket, coarse
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv, Prompt
from jaxmarl_llm.models.rollout_cache import with_caches
from jaxmarl_llm.rollout import scheduler
from jaxmarl_llm.rollout.array import check_seats, make_rollout
from jaxmarl_llm.rollout.block_sampler import sampler_of
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.external import Engines
from jaxmarl_llm.rollout.failures import RolloutFailure
from jaxmarl_llm.rollout.growth import check_choices
from jaxmarl_llm.rollout.host import HostRollout, HostSettings, Recall, play
from jaxmarl_llm.rollout.launches import SamplerFactory, here
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.rollout.recall import mean_embedding
from jaxmarl_llm.rollout.watching import later
from jaxmarl_llm.types import Array, Params, Policy, PyTree, Retrieval, Role, Team, TrainState, Tree

QUERY_TOKENS = 96  # tokens of a host prompt's first user message that make its memory key
ENTRY_TOKENS, ENTRY_BYTES = 64, 208  # of a host environment's memory entry


class RolloutResult(NamedTuple):
    """A rollout with its texts, its failures and its figures."""

    tree: Tree  # numpy arrays
    prompt_text: Callable[[int], str]  # of a step's row
    completion_text: Callable[[int], str]
    failures: list[RolloutFailure]  # of host environments
    records: HostRollout | None  # host environments
    watched: Mapping[str, float] = {}  # figures of the environment's own, see `HostEnvRunner.play`


class Demonstrations(NamedTuple):
    """Samples of one role, padded: prompts, and what was written there."""

    tokens: np.ndarray  # [n, P]
    length: np.ndarray
    completions: np.ndarray  # [n, R], stop id included; [n, G, R] where a prompt has a group of them
    completion_length: np.ndarray  # [n], or [n, G]
    loss_mask: np.ndarray | None = None  # as completions: True at tokens that are learned; None: all of them


class EvaluationWatcher(Protocol):
    """Object that sees every evaluation of a run on its held-out tasks."""

    def batch(self, state: TrainState, suffix: str, numbers: Sequence[int], played: RolloutResult) -> None:
        """See a batch of held-out tasks.

        Args:
            state: State that is evaluated.
            suffix: Of the metrics: "" as the policy samples, ``_greedy``.
            numbers: Numbers of the tasks of the batch [n].
            played: Rollout with one episode of each task.
        """

    def end(self, state: TrainState, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """See the end of an evaluation.

        Args:
            state: State that was evaluated.
            rows: Suffix -> component -> its sum over the episode of each task, a mean over roles [n]; NaN: unknown.
        """


class EnvRunner(ABC):
    """Plays tasks of one environment with one team; ``array`` tells the kind.

    ``watcher``: called with every rollout, and whether its tasks were held out; None: nobody watches. ``evaluations``:
    sees every evaluation; None: nothing does. ``layout``: how devices are cut during generation; None: as in training.
    ``form``: what a training rollout reads in place of a model's parameters, see `models.rollout_weights`; None: them.
    ``cache_form``: the policy of its generation in place of a model's, see `models.rollout_cache`; None: that policy.
    """

    layout: Layout | None = None
    form: Callable[[Params], Params] | None = None
    cache_form: Callable[[Policy], Policy] | None = None
    watcher: Callable[[RolloutResult, bool], None] | None = None
    evaluations: EvaluationWatcher | None = None
    dropped = 0.0  # share of the demonstrations that were left out

    array: bool
    env: ArrayEnv | HostEnv
    size: int  # training tasks
    held_out: Any  # evaluation tasks: a pytree of arrays, or a list
    given: bool = False  # the environment was handed in as an object, and is not made from the configuration

    @property
    @abstractmethod
    def held_out_size(self) -> int:
        """Number of held-out tasks."""

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
        assignment: Array | None = None,
    ) -> RolloutResult:
        """Play some tasks once.

        Args:
            team: Roles and models.
            params: Parameters of the team (`Model.variables`).
            memory: Memory of each role by its name; not read without ``memory_config``.
            indices: Numbers of the tasks [B].
            plan: Plan of sampling.
            key: Typed key; consumed by folding.
            sampling: Distribution of tokens.
            memory_config: Settings of the memory; None: no memory.
            version: Optimizer steps of the parameters, written into the steps table.
            held_out: Whether ``indices`` count the held-out tasks; otherwise they count the training tasks.
            assignment: Who plays which role of which task, see `rollout.make_rollout`; None: each role's own model.

        Raises:
            ConfigError: The environment lacks what the plan asks for.
        """

    def formed(self, params: Params, held_out: bool, mesh: Mesh | None = None) -> Params:
        """Parameters as a rollout reads them: in their form, and in the layout of generation.

        Args:
            params: Parameters of the team, ``{"shared": ..., "agents": ...}``.
            held_out: Whether the tasks are held out: an evaluation reads the parameters of training.
            mesh: Mesh of generation; None: they stay where they are.
        """
        form = self.form
        if held_out or form is None:
            return to_rollout(mesh, params)
        apart = self.layout is not None and self.layout.apart

        def of_model(tree: Params) -> Params:
            # Devices that train may run an update now: no second thread starts programs there.
            return form(to_rollout(mesh, tree)) if apart else to_rollout(mesh, form(tree))

        return {kind: {name: of_model(params[kind][name]) for name in params[kind]} for kind in ("shared", "agents")}

    def playing(self, team: Team, held_out: bool) -> Team:
        """The team as a rollout plays it: with caches in their form. Equal arguments give the same team.

        Args:
            team: Roles and models.
            held_out: Whether the tasks are held out: an evaluation has the caches of the models.

        Raises:
            ConfigError: The cache of a model has no such form.
        """
        return team if held_out or self.cache_form is None else with_caches(team, self.cache_form)

    @abstractmethod
    def contents(self, numbers: Sequence[int], held_out: bool) -> list[str]:
        """Hash of the content of some tasks [n], see `splits.content_hash`.

        Args:
            numbers: Numbers of the tasks [n].
            held_out: Whether ``numbers`` count the held-out tasks.
        """

    def _watched(self, played: RolloutResult, held_out: bool) -> RolloutResult:
        """``played``, after the watcher has seen it, or will see it (`watching.later`)."""
        kept = later()
        if kept is None:
            self.see(played, held_out)
        else:
            kept.append((played, held_out))
        return played

    def see(self, played: RolloutResult, held_out: bool) -> None:
        """Show a rollout to the watcher, where there is one.

        Args:
            played: The rollout.
            held_out: Whether its tasks were held out.
        """
        if self.watcher is not None:
            self.watcher(played, held_out)

    @abstractmethod
    def demonstrations(
        self, team: Team, n: int, seed: int, context: int, *, min_fitting: float = 0.0
    ) -> dict[str, Demonstrations]:
        """At most ``n`` supervised samples a role, some with up to ``context`` memory entries in the prompt.

        Samples of a host environment that are longer than a completion may be are left out, with a warning. Where less
        than the share ``min_fitting`` of a role's remain, ConfigError is raised.
        """

    @abstractmethod
    def lessons(self, team: Team, played: RolloutResult, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Memory entries for the steps ``rows``: ids [n T], lengths [n], texts."""

    entry_tokens: int
    entry_bytes: int

    def open(self) -> None:  # noqa: B027  # only host environments may have engines
        """Reach what the rollouts need beside this process. Raises ConfigError where it is away."""

    def close(self) -> None:  # noqa: B027  # only host environments hold processes
        """End the processes that the runner started."""


class ArrayEnvRunner(EnvRunner):
    """Runner of an array environment: a rollout is one compiled program.

    Args:
        task: The environment and its tasks.
    """

    array = True
    env: ArrayEnv

    def __init__(self, task: ArrayTask):
        self.task, self.env = task, task.env
        self.tasks, self.held_out = task.tasks, task.held_out
        self.size = len(jax.tree.leaves(self.tasks)[0])
        self.entry_tokens = task.entry_length
        self.entry_bytes = 1  # an entry is its ids; Orbax saves no array without elements
        self._compiled = functools.lru_cache(maxsize=None)(self._rollout)

    @property
    def held_out_size(self) -> int:
        """Number of held-out tasks."""
        return len(jax.tree.leaves(self.held_out)[0])

    def contents(self, numbers, held_out):
        columns = [np.asarray(x) for x in jax.tree.leaves(self.held_out if held_out else self.tasks)]
        return [content_hash([column[i] for column in columns]) for i in numbers]

    def _arguments(
        self,
        params: Params,
        memory: PyTree,
        indices: Sequence[int],
        key: jax.Array,
        version: int,
        held_out: bool,
        assignment: Array | None,
    ) -> tuple[Any, ...]:
        """Arguments of a compiled rollout, from those of `play`."""
        tasks = jax.tree.map(lambda x: x[np.asarray(indices)], self.held_out if held_out else self.tasks)
        params = self.formed({k: params[k] for k in ("shared", "agents")}, held_out, current())
        others = memory, tasks, key, jnp.int32(version), assignment
        return params, *(others if self.layout is None else put_whole(others))

    def program(
        self,
        team: Team,
        params: Params,
        memory: PyTree,
        indices: Sequence[int],
        plan: Plan,
        sampling: Sampling,
        memory_config: MemoryConfig | None,
        *,
        held_out: bool = False,
    ) -> tuple[Any, tuple[Any, ...]]:
        """The jitted rollout that `play` runs, and the shapes of its arguments.

        Args:
            team: As in `play`, like the other arguments. Only shapes of arrays are read, now and not later.
            params: Parameters.
            memory: Memory by role.
            indices: Tasks.
            plan: Plan of sampling.
            sampling: Distribution of tokens.
            memory_config: Settings of the memory.
            held_out: Whether the tasks are held-out ones.
        """
        arguments = self._arguments(params, memory, indices, jax.random.key(0), 0, held_out, None)
        shapes = jax.eval_shape(lambda *given: given, *arguments)
        return self._compiled(self.playing(team, held_out), plan, sampling, memory_config), shapes

    def _rollout(self, team: Team, plan: Plan, sampling: Sampling, memory_config: MemoryConfig | None) -> Callable:
        return jax.jit(make_rollout(team, self.env, plan, sampling, memory_config))

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
        rollout = self._compiled(self.playing(team, held_out), plan, sampling, memory_config)
        with use_mesh(None if self.layout is None else self.layout.mesh):
            tree = to_host(rollout(*self._arguments(params, memory, indices, key, version, held_out, assignment)))
        check_seats(self.env, tree)
        check_choices(plan, team, tree)
        decode = team.models[0].tokenizer.decode

        def prompt(row: int) -> str:
            node = tree.steps.node[row]
            return decode(tree.nodes.tokens[node, : tree.nodes.length[node]])

        completion = lambda row: decode(tree.steps.tokens[row, : tree.steps.length[row]])
        return self._watched(RolloutResult(tree, prompt, completion, [], None), held_out)

    def demonstrations(self, team, n, seed, context, *, min_fitting=0.0):
        rows = array_demonstrations(self.task, seed, n, context)
        return {
            r: Demonstrations(d["tokens"], d["length"], d["completion"], d["completion_length"])
            for r, d in rows.items()
        }

    def lessons(self, team, played, rows):
        """The prompt without what memory had put in front, the completion without its stop id, a separator."""
        # A few sizes, so that few programs are compiled: the number of known rewards differs between steps.
        padded = np.concatenate([rows, np.zeros((coarse(len(rows), 32) - len(rows),), rows.dtype)])
        ids, length = to_host(lesson_program(self, team, played.tree, padded))
        return ids[: len(rows)], length[: len(rows)], [""] * len(rows)


@functools.partial(jax.jit, static_argnames=("runner", "team"))
def lesson_program(runner: ArrayEnvRunner, team: Team, tree: Tree, rows: Array) -> tuple[jax.Array, jax.Array]:
    """`array_lessons` as a program: the entries of ``runner``.

    Args:
        runner: Runner of the rollout.
        team: Roles and models.
        tree: The rollout.
        rows: Rows of the table of completions [n].
    """
    return array_lessons(team, tree, rows, runner.entry_tokens)


def array_lessons(team: Team, tree: Tree, rows: Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Memory entries of completions, in a compiled program.

    Args:
        team: Roles and models; their tokenizer has a separator.
        tree: The rollout.
        rows: Rows of the table of completions [n].
        size: Tokens of an entry; longer ones are cut.

    Returns:
        Ids [n, size] and lengths [n]: the prompt without memory, the completion without its stop id, a separator.
    """
    tokenizer = team.models[0].tokenizer
    node = tree.steps.node[rows]
    prompts, length, added = tree.nodes.tokens[node], tree.nodes.length[node], tree.nodes.retrieved.added[node]
    here = jnp.arange(prompts.shape[1])
    asked = (here >= added[:, None]) & (here < length[:, None])
    tokens, count = tree.steps.tokens[rows], tree.steps.length[rows]
    answered = (jnp.arange(tokens.shape[1]) < count[:, None]) & ~jnp.isin(tokens, jnp.array(tokenizer.stop_ids))
    end = jnp.full((len(rows), 1), tokenizer.SEP, tokens.dtype)
    ids = jnp.concatenate([prompts, tokens, end], axis=1)
    used = jnp.concatenate([asked, answered, jnp.ones_like(end, bool)], axis=1)
    order = jnp.argsort(~used, axis=1, stable=True)
    ids = jnp.where(jnp.take_along_axis(used, order, 1), jnp.take_along_axis(ids, order, 1), 0)
    ids = jnp.pad(ids, ((0, 0), (0, max(0, size - ids.shape[1]))))[:, :size]
    return ids.astype(jnp.int32), jnp.minimum(used.sum(1), size).astype(jnp.int32)


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
                got = scheduler.play(team, params, self.pool(), chosen, key, settings, self.cfg.lanes)
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


def make_env_runner(cfg: EnvConfig, task: Environment | None = None, *, seed: int | None = None) -> EnvRunner:
    """The runner of an environment.

    Args:
        cfg: Names the environment, and says how it is played.
        task: The environment itself; None: the one that ``cfg`` names.
        seed: That of the run, which tasks differ by unless ``cfg.args`` have a seed; None: the environment's default.

    Raises:
        ConfigError: The environment lacks something, or does not go with ``cfg``.
    """
    if task is None:
        return _runner_of(cfg, cfg.environment(seed))
    check(task, "env")
    runner = _runner_of(cfg, task)
    runner.given = True
    return runner


def _runner_of(cfg: EnvConfig, task: Environment) -> EnvRunner:
    """The runner of a checked environment."""
    if isinstance(task, HostTask):
        return HostEnvRunner(task, cfg)
    if cfg.protocol != "together":
        raise ConfigError(f"config.env.protocol: expected 'together' with the array environment {task.env.name!r}")
    return ArrayEnvRunner(task)


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
