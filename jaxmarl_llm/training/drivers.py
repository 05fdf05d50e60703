"""The two drivers of a training step: from the host, and inside a compiled program."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.agents import memory
from jaxmarl_llm.credit.advantages import step_episodes
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.generation.buckets import coarse
from jaxmarl_llm.rollout.array import Block, layout, make_rollout
from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner, array_lessons
from jaxmarl_llm.rollout.env_runner import Demonstrations, RolloutResult
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.algorithm import Played, StepParts, StepResult
from jaxmarl_llm.training.critic import stacks_of_rows
from jaxmarl_llm.training.finite import check_traced_choices, number_of, update_check
from jaxmarl_llm.training.learner import Batch, Learner, NodeTargets, Scored, optimize, update_models
from jaxmarl_llm.training.learner_logprobs import LearnerLogprobs
from jaxmarl_llm.training.losses import Loss, aggregation_weights
from jaxmarl_llm.training.overlap import NextRollout
from jaxmarl_llm.training.packing import pack
from jaxmarl_llm.training.stale import inputs_of
from jaxmarl_llm.types import Array, Model, Params, PyTree, TrainState, Tree

update_memory = jax.jit(memory.update, static_argnames=("config",))


@dataclass(frozen=True)
class HostDriver:
    """Runs the parts of a step as programs of their own, with tables on the host.

    Only trained completions are sent to the learner, packed into micro-batches of few shapes.

    Attributes:
        seed: Seed of the run.
        logger: Times the stages.
        debug: See `algorithm.Driver`.
        logprobs: Takes the log-probs that the update computes; None: nobody reads them.
        record: Takes a rollout that no step of RL played, with the parts of a step that describe it; None: nobody reads
            it. The recorder of the run sees steps of RL by itself.
        rollouts: Plays rollouts ahead; None: each step plays its own.
        more: Whether another step of the phase follows, whose rollout may be played ahead.
    """

    seed: int
    logger: Logger
    debug: bool = False
    logprobs: LearnerLogprobs | None = None
    record: Callable[[StepParts, StepResult], None] | None = None
    rollouts: NextRollout | None = None
    more: bool = False

    @contextlib.contextmanager
    def stage(self, name: str, first: str | None = None) -> Any:
        with self.logger.first(first) if first else contextlib.nullcontext(), self.logger.stage(name):
            yield

    def host(self, x: Any) -> Any:
        return sharding.to_host(x)

    def demonstrations(self, own: Mapping[str, Demonstrations]) -> Mapping[str, Demonstrations]:
        return own

    def play(
        self,
        step: StepParts,
        state: TrainState,
        params: Params,
        tasks: Array,
        key: jax.Array,
        assignment: Any,
    ) -> tuple[Tree, RolloutResult]:
        played = step.env_runner.play(
            step.players,
            params,
            state.memory,
            tasks.tolist(),
            step.plan,
            key,
            step.cfg.sampling,
            step.algorithm.memory,
            version=int(state.step),
            assignment=assignment,
        )
        return played.tree, played

    def take(self, state: TrainState, play: Callable[[], Played]) -> Played:
        return play() if self.rollouts is None else self.rollouts.take(inputs_of(state), play)

    def begin(self, state: TrainState, play: Callable[[], Played]) -> None:
        if self.rollouts is not None and self.more:
            self.rollouts.begin(inputs_of(state), play)

    def lay_out(
        self,
        step: StepParts,
        tree: Tree,
        played: RolloutResult,
        advantage: Array,
        trained: Array,
        targets: Mapping[str, Any],
        imitation: Array | None = None,
    ) -> dict[str, list[Batch]]:
        # The prompts of array environments are all short: one shape. Others come in buckets.
        host_env = played.records is not None
        smallest = (64, 16) if host_env else (tree.nodes.tokens.shape[1], tree.steps.tokens.shape[1])
        cfg, out = step.cfg, {}
        for i, m in enumerate(step.team.models):
            target = targets.get(m.name)
            if target is not None and not any(m.name in role.players for role in step.team.roles):
                out[m.name] = target.batches(cfg.micro_tokens)
                continue
            with meshes.model_mesh(m.name):
                out[m.name] = pack(
                    tree,
                    i,
                    np.asarray(advantage),
                    np.asarray(trained),
                    cfg.loss,
                    micro_tokens=cfg.micro_tokens,
                    smallest=smallest,
                    values=None if target is None else target.of_nodes(),
                    trees=host_env and m.policy.hidden_tree is not None,
                    parts=sharding.row_parts(),
                    imitation=None if imitation is None else np.asarray(imitation),
                )
        return out

    def optimize(
        self,
        models: tuple[Model, ...],
        learners: Mapping[str, Learner],
        loss: Loss,
        state: TrainState,
        batches: Mapping[str, list[Batch]],
    ) -> tuple[TrainState, dict[str, dict[str, Any]]]:
        reference = state.params.get("reference")
        inspect = update_check(number_of(state)) if self.debug else None
        keep = None if self.logprobs is None else self.logprobs.add
        params, opt_state, metrics = update_models(
            models, learners, loss, state.params, state.opt_state, batches, reference, inspect, keep
        )
        return state.replace(params=params, opt_state=opt_state), metrics

    def remember(
        self, step: StepParts, state: TrainState, tree: Tree, played: RolloutResult, signal: Array, valid: Array
    ) -> tuple[TrainState, dict[str, Any]]:
        stores, metrics = dict(state.memory), dict[str, Any]()
        role_of = tree.nodes.role[tree.steps.node]
        for index, role in enumerate(step.team.roles):
            rows = np.flatnonzero(valid & (role_of == index))
            if len(rows):
                ids, length, texts = step.env_runner.lessons(step.team, played, rows)
                store, size = stores[role.name], coarse(len(rows), 32)
                text = np.stack([memory.encode_text(t, store.text.shape[1]) for t in texts])
                samples = _samples(store, tree, rows, ids, length, text, signal, np.ones(len(rows), bool))
                pad = lambda x, size=size: np.concatenate([x, np.zeros((size - len(x), *x.shape[1:]), x.dtype)])
                samples = jax.tree.map(pad, samples)
                stores[role.name], seen = update_memory(step.algorithm.memory, store, samples, state.step)
                metrics |= {f"memory/{role.name}/{k}": float(v) for k, v in seen.items()}
                metrics[f"agent/{role.name}/memory_hit"] = float(seen["hit"])
            metrics[f"agent/{role.name}/memory_size"] = float(memory.size(stores[role.name]))
        return state.replace(memory=stores), metrics

    def when(self, condition: Any, function: Callable[[Any], Any], operand: Any) -> Any:
        return function(operand) if condition else operand


class RunData(NamedTuple):
    """Data of a run: training tasks, held-out tasks and demonstrations. Seeds of one program may differ in them.

    Attributes:
        tasks: Training tasks: a pytree of arrays.
        held_out: Held-out tasks: a pytree of arrays.
        demonstrations: Samples of stage 0 by role.
    """

    tasks: PyTree
    held_out: PyTree
    demonstrations: Mapping[str, Demonstrations]


@dataclass(frozen=True)
class TracedDriver:
    """Runs the parts of a step inside one compiled program, on an array environment.

    Every completion that a model may have made is sent to the learner; those that are not trained weigh 0. Batches
    are stacks [K ...] of K micro-batches of one shape, see `scanned`.

    Attributes:
        seed: Seed of the run; may be traced, and mapped over by vmap.
        data: Training tasks and demonstrations in place of the recipe's own; may be traced.
        debug: See `algorithm.Driver`.
    """

    seed: jax.Array | int
    data: RunData | None = None
    debug: bool = False

    def stage(self, name: str, first: str | None = None) -> AbstractContextManager[Any]:
        return jax.named_scope(name)

    def host(self, x: Any) -> Any:
        return jax.tree.map(jnp.asarray, x)  # a rule may return numpy

    def demonstrations(self, own: Mapping[str, Demonstrations]) -> Mapping[str, Demonstrations]:
        return own if self.data is None else self.data.demonstrations

    def play(
        self,
        step: StepParts,
        state: TrainState,
        params: Params,
        tasks: Array,
        key: jax.Array,
        assignment: Any,
    ) -> tuple[Tree, None]:
        env_runner = step.env_runner
        assert isinstance(env_runner, ArrayEnvRunner)  # `runs.compiled` has checked
        team = env_runner.playing(step.players, held_out=False)
        rollout = make_rollout(team, env_runner.env, step.plan, step.cfg.sampling, step.algorithm.memory)
        source = env_runner.tasks if self.data is None else self.data.tasks
        batch = jax.tree.map(lambda t: jnp.asarray(t)[tasks], source)
        parts = env_runner.formed({k: params[k] for k in ("shared", "agents")}, held_out=False)
        tree = rollout(parts, state.memory, batch, key, state.step, assignment)
        if self.debug:
            check_traced_choices(step.plan, tree, number_of(state))
        return tree, None

    def take(self, state: TrainState, play: Callable[[], Played]) -> Played:
        return play()

    def begin(self, state: TrainState, play: Callable[[], Played]) -> None:
        """Nothing: one program has no threads."""

    def lay_out(
        self,
        step: StepParts,
        tree: Tree,
        played: None,
        advantage: Array,
        trained: Array,
        targets: Mapping[str, Any],
        imitation: Array | None = None,
    ) -> dict[str, list[Batch]]:
        cfg, team, moves, out = step.cfg, step.team, tree.transitions, {}
        episode = None
        if cfg.loss.reads_episodes:
            episode = step_episodes(moves.steps, moves.parent, num_steps=len(trained))
        for m, model in enumerate(team.models):
            roles = {r for r, role in enumerate(team.roles) if model.name in role.players}
            target = targets.get(model.name)
            if target is not None and not roles:
                out[model.name] = target.batches(cfg.micro_tokens)
                continue
            mine = trained & (tree.nodes.model[tree.steps.node] == m)
            counted = mine.astype(jnp.float32)
            weights = aggregation_weights(
                tree.steps.loss_mask, counted, cfg.loss.aggregation, cfg.loss.loss_length, episode
            )
            own = (
                None
                if imitation is None
                else jnp.where((tree.nodes.model[tree.steps.node] == m)[:, None], imitation, 0)
            )
            learns = mine if own is None else mine | (own > 0).any(-1)
            values = None if target is None else _of_trained(tree, learns, target.of_nodes())
            out[model.name] = []
            for block, seats in blocks_of(step, roles):
                out[model.name] += _rectangle(tree, advantage, weights, block, seats, values, own, cfg.micro_tokens)
        return out

    def optimize(
        self,
        models: tuple[Model, ...],
        learners: Mapping[str, Learner],
        loss: Loss,
        state: TrainState,
        batches: Mapping[str, list[Batch]],
    ) -> tuple[TrainState, dict[str, dict[str, Any]]]:
        params, agents, states = state.params, dict(state.params["agents"]), dict(state.opt_state)
        metrics: dict[str, dict[str, Any]] = {}
        for model in models:
            if not batches.get(model.name):
                continue
            name, shared = model.name, params["shared"].get(model.base)
            reference = params.get("reference", {}).get(name)
            before, stacks = (agents[name], states[name]), stacked(batches[name])
            report = update_check(number_of(state))(name) if self.debug else None
            learner = scanned(learners[name])
            done = optimize(learner, loss, *_between(before, shared), stacks, reference, report)
            # A model without a trained token stays as it is, optimizer state included.
            learns = functools.reduce(jnp.logical_or, [_weighs(b) for b in stacks])
            agents[name], states[name] = _where(learns, (done.own, done.opt_state), before)
            metrics[name] = done.metrics
        return state.replace(params={**params, "agents": agents}, opt_state=states), metrics

    def remember(
        self, step: StepParts, state: TrainState, tree: Tree, played: None, signal: Array, valid: Array
    ) -> tuple[TrainState, dict[str, Any]]:
        stores, config = dict(state.memory), step.algorithm.memory
        metrics: dict[str, Any] = {}
        assert config is not None
        role_of = tree.nodes.role[tree.steps.node]
        for index, role in enumerate(step.team.roles):
            blocks = [b.rows(seats)[1].reshape(-1) for b, seats in blocks_of(step, {index})]
            rows = np.sort(np.concatenate(blocks))
            store = stores[role.name]
            ids, length = array_lessons(step.team, tree, rows, step.env_runner.entry_tokens)
            text = jnp.zeros((len(rows), store.text.shape[1]), jnp.uint8)
            mine = (valid & (role_of == index))[rows]
            samples = _samples(store, tree, rows, ids, length, text, signal, mine)
            after, seen = memory.update(config, store, samples, state.step)
            # The memory of a role that did not act stays as it is: its time passes at its next update.
            stores[role.name] = _where(mine.any(), after, store)
            metrics |= {f"memory/{role.name}/{k}": v for k, v in seen.items()}
        return state.replace(memory=stores), metrics

    def when(self, condition: Any, function: Callable[[Any], Any], operand: Any) -> Any:
        return jax.lax.cond(condition, function, lambda x: x, operand)


Driver = HostDriver | TracedDriver


def stacked(batches: Sequence[Batch]) -> list[Batch]:
    """Stack ``batches``, micro-batches, with a leading axis [K ...]: those of one shape are one stack, in their order.

    Batches that are stacks already stay as they are.
    """
    stacks = [batch for batch in batches if jnp.ndim(batch.length) == 2]
    alike: dict[tuple, list[Batch]] = {}
    for batch in batches:
        if jnp.ndim(batch.length) == 2:
            continue
        alike.setdefault(tuple(jnp.shape(x) for x in jax.tree.leaves(batch)), []).append(batch)
    return stacks + [jax.tree.map(lambda *rows: jnp.stack(rows), *some) for some in alike.values()]


def scanned(learner: Learner) -> Learner:
    """Make from ``learner`` one whose functions take stacks of micro-batches, as `stacked` makes them.

    A stack is one loop of the program. So the size of a program does not depend on the number of micro-batches. Metrics
    are sums over a stack, and gaps are its largest, as for one micro-batch. Log-probs are not kept.
    """

    def score(own: Params, shared: Params | None, stack: Batch) -> jax.Array:
        return jax.lax.map(lambda batch: learner.score(own, shared, batch), stack)

    def accumulate(own: Params, shared: Params | None, stack: Batch, gradient: PyTree | None) -> tuple:
        if gradient is None:
            gradient = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), own)

        def add(gradient: PyTree, batch: Batch) -> tuple[PyTree, tuple]:
            gradient, seen, scored = learner.accumulate(own, shared, batch, gradient)
            return gradient, (seen, scored.gap)

        gradient, (seen, gaps) = jax.lax.scan(add, gradient, stack)
        return gradient, jax.tree.map(lambda x: x.sum(0), seen), Scored(gaps.max(), None)

    return learner._replace(score=score, accumulate=accumulate)


def _between(before: tuple[Params, Any], shared: Params | None) -> tuple[Params, Params | None, Any]:
    return before[0], shared, before[1]


def _where(condition: jax.Array, after: PyTree, before: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), after, before)


def _of_trained(tree: Tree, trained: Array, values: NodeTargets) -> NodeTargets:
    """Value targets of the nodes that have a trained step; the weight of the others is 0, as in `packing.pack`.

    Args:
        tree: The rollout.
        trained: Whether each step is trained [C].
        values: Targets of all nodes.
    """
    nodes = jnp.zeros(len(tree.nodes.role), bool).at[tree.steps.node].max(trained & tree.steps.loss_mask.any(-1))
    return values.replace(weight=jnp.where(nodes, values.weight, 0.0))


def _weighs(batch: Batch) -> jax.Array:
    """Whether a batch trains anything."""
    imitates = False if batch.imitation is None else jnp.any(batch.imitation > 0)
    values = False if batch.values is None else jnp.any(batch.values.weight > 0)
    return jnp.any(batch.weights > 0) | values | imitates


def _samples(
    store: memory.Memory, tree: Tree, rows: Any, ids: Any, length: Any, text: Any, signal: Any, valid: Any
) -> memory.Samples:
    """What a role did at the completions ``rows``, as its memory takes it."""
    read, nodes = tree.nodes.retrieved, tree.steps.node[rows]
    return memory.Samples(
        keys=read.query[nodes][:, : store.key.shape[1]],
        ids=ids,
        length=length,
        text=text,
        reward=signal[rows].astype(np.float32),
        retrieved=read.slots[nodes],
        similarity=read.similarity[nodes],
        valid=valid,
    )


def array_env(step: StepParts) -> ArrayEnv:
    """The environment of ``step``, whose rollouts are programs."""
    assert isinstance(step.env_runner.env, ArrayEnv)
    return step.env_runner.env


def blocks_of(step: StepParts, roles: set[int]) -> list[tuple[Block, list[int]]]:
    """Blocks of the rollout of ``step`` in which one of ``roles`` may act, each with the seats that it may take."""
    env = array_env(step)
    blocks = layout(step.plan, env, step.cfg.batch)
    return [(b, seats) for b in blocks if (seats := env.seats_of(b.branch.turn, roles))]


def _rectangle(
    tree: Tree,
    advantage: Array,
    weights: jax.Array,
    block: Block,
    seats: list[int],
    values: Any,
    imitation: Array | None,
    micro_tokens: int,
) -> list[Batch]:
    """Stacks [K ...] of micro-batches of the nodes of ``seats`` of a block, see `scanned`.

    A micro-batch has at most ``micro_tokens`` trunk tokens where possible.
    """
    nodes, steps = block.rows(seats)
    size = tree.nodes.tokens.shape[1] + block.group * tree.steps.tokens.shape[1]
    out = []
    for some in stacks_of_rows(len(nodes), micro_tokens // size):
        grid = lambda x, at=steps[some]: x[at].reshape(*at.shape, -1)
        w, own = grid(weights), nodes[some]
        out.append(
            Batch(
                tree.nodes.tokens[own],
                tree.nodes.length[own],
                grid(tree.steps.tokens),
                w,
                jnp.broadcast_to(grid(advantage), w.shape),
                grid(tree.steps.logprobs),
                values=None if values is None else jax.tree.map(lambda x, own=own: x[own], values),
                imitation=None if imitation is None else grid(imitation),
            )
        )
    return out
