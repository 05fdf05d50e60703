"""Runner of an array environment: a rollout is one compiled program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.distributed.meshes import use_mesh
from jaxmarl_llm.distributed.sharding import current, put_whole, to_host
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.envs.contract import ArrayTask, array_demonstrations
from jaxmarl_llm.envs.splits import content_hash
from jaxmarl_llm.generation.buckets import coarse
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array import check_seats, make_rollout
from jaxmarl_llm.rollout.env_runner import Demonstrations, EnvRunner, RolloutResult
from jaxmarl_llm.rollout.growth import check_choices
from jaxmarl_llm.rollout.plans import Plan
from jaxmarl_llm.types import Array, Params, PyTree, Team, Tree


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
