"""A whole training run on an array environment as one pure function of its seed: jit it, vmap it over seeds.

The steps are those that `loop.fit` takes from the host, with the same tasks in the same order and the same keys. Here
they are scanned, so that eight seeds of a small game take the time of one. Nothing is logged or saved on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.agents.team import make_team
from jaxmarl_llm.credit.returns import returns_to_go
from jaxmarl_llm.distributed.meshes import MeshConfig
from jaxmarl_llm.envs.contract import Environment
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array import layout, make_rollout
from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner
from jaxmarl_llm.rollout.keys import EVALUATION, stream
from jaxmarl_llm.rollout.make_runner import make_env_runner
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.runs.phases import Recipe
from jaxmarl_llm.training import finite
from jaxmarl_llm.training.algorithm import StepParts, StepResult
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.training.drivers import RunData, TracedDriver
from jaxmarl_llm.training.train_step import TrainStep
from jaxmarl_llm.types import Params, PyTree, TrainState, Tree


class Program(NamedTuple):
    """A run as one function.

    Attributes:
        run: (seed [], data=None) -> (state, {name: [steps]}), pure. ``data``: tasks and demonstrations in place of the
            recipe's own, see `task_data`. Figures of the last phase: a reward component (mean over tasks and roles),
            and ``component/role`` for each role. Of each model: ``grad_norm/model`` (first epoch, not clipped),
            ``clip_fraction/model`` (last epoch), and ``kl/model`` to the reference where there is one. Also
            ``memory/...``.
        tokens_per_step: Decoded tokens of a step, at most.
    """

    run: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    tokens_per_step: int


def make_program(recipe: Recipe) -> Program:
    """The run of a recipe as one program; ``cfg.run`` is unused, except ``debug``. The seed replaces ``cfg.seed``.

    With ``run.debug`` the program holds checks, which chex reads: ``chex.chexify(jax.jit(run), async_check=False)``
    raises an AssertionError at the first value that is not finite. Without chexify, tracing the program is an error.

    Without ``data`` the tasks and demonstrations are those of ``recipe``, whatever the seed.

    Raises:
        ConfigError: The environment is not an array environment, a phase needs the host, or a mesh is configured. Or
            generation is batch-invariant, whose bits change where it is mapped over seeds.
    """
    cfg, env_runner = recipe.cfg, recipe.env_runner
    if not isinstance(env_runner, ArrayEnvRunner):
        raise ConfigError(f"config.env.name: {cfg.env.name!r}: a run compiled as a whole needs an array environment")
    _refuse({"mesh": cfg.mesh != MeshConfig(data=1), "team.batch_invariant": cfg.team.batch_invariant})
    for phase in recipe.phases:
        if phase.steps and phase.on_host:
            raise ConfigError(f"config.recipe: {cfg.recipe}: {phase.on_host}; use fit")

    def run(seed: jax.Array, data: RunData | None = None) -> tuple[TrainState, dict[str, jax.Array]]:
        state, driver = recipe.initial(seed, 0), TracedDriver(seed, data, cfg.run.debug)
        figures: dict[str, jax.Array] = {}
        for number, phase in enumerate(recipe.phases):
            if not phase.steps:
                continue
            if number:
                state = recipe.begin(phase, state)

            def step(state: TrainState, i: jax.Array, phase: Any = phase) -> tuple[TrainState, dict[str, jax.Array]]:
                before = state
                state, result = phase.step(driver, state, i)
                if driver.debug:
                    finite.check_parameters(state.params["agents"], finite.number_of(before))
                seen = _figures(phase.step, result) if isinstance(result, StepResult) else {}
                return state.replace(step=state.step + 1), seen

            state, figures = jax.lax.scan(step, state, jnp.arange(phase.steps))
        return state, figures

    last = recipe.phases[-1].step
    sampled = 0
    if isinstance(last, TrainStep):
        sampled = sum(b.nodes * b.group for b in layout(last.plan, env_runner.env, cfg.batch))
    return Program(run, sampled * max(r.max_new_tokens for r in recipe.team.roles))


def task_data(recipe: Recipe, seeds: Sequence[int]) -> RunData:
    """Tasks, held-out tasks and demonstrations of runs that differ in the seed, with a leading axis of seeds.

    ``vmap(program.run)(seeds, task_data(recipe, seeds))`` are the runs that `fit` does with each seed. A recipe that
    was made with an environment object keeps the object's tasks for every seed. Its demonstrations are drawn by seed.

    Args:
        recipe: On an array environment.
        seeds: Of the runs.
    """
    cfg, rows = recipe.cfg, []
    own = recipe.env_runner
    for seed in seeds:
        runner = own if own.given else make_env_runner(cfg.env, seed=seed)
        assert isinstance(runner, ArrayEnvRunner)
        taught = runner.demonstrations(recipe.team, cfg.sft.samples, seed, recipe.context) if cfg.sft.steps else {}
        rows.append(RunData(runner.tasks, runner.held_out, taught))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def make_evaluation(
    cfg: BaseConfig,
    sampling: Sampling | None = None,
    memory: MemoryConfig | None = None,
    env: Environment | None = None,
) -> Callable[..., dict[str, jax.Array]]:
    """(params, seed [], held_out=None, stores=None, of=None) -> {name: []}: mean returns, named as in `Program`.

    The held-out tasks are those of ``cfg``, or ``held_out``; ``of`` [n] bool: the mean of these tasks alone. One
    episode is played for each task. The function is pure: jit it, vmap it over seeds.

    Args:
        cfg: Configuration of the run.
        sampling: How episodes are drawn; None: as in training.
        memory: Prompts have entries of ``stores``; None: no entries.
        env: The environment object that the recipe was made with; None: the environment of ``cfg``.

    Raises:
        ConfigError: Generation is batch-invariant, as in `make_program`.
    """
    _refuse({"team.batch_invariant": cfg.team.batch_invariant})
    env_runner = make_env_runner(cfg.env, env, seed=cfg.seed)
    assert isinstance(env_runner, ArrayEnvRunner)
    team = make_team(cfg.team, env_runner.env.roles)
    rollout = make_rollout(team, env_runner.env, single(), sampling or cfg.sampling, memory)

    def run(
        params: Params, seed: jax.Array, held_out: PyTree = None, stores: PyTree = None, of: Any = None
    ) -> dict[str, jax.Array]:
        tasks = jax.tree.map(jnp.asarray, env_runner.held_out if held_out is None else held_out)
        tree = rollout(params, stores or {}, tasks, jax.random.fold_in(stream(seed, EVALUATION), 0), jnp.int32(0))
        return mean_returns(tree, [r.name for r in team.roles], env_runner.env.max_turns, of)

    return run


def _refuse(beyond: dict[str, bool]) -> None:
    for name, asked in beyond.items():
        if asked:
            raise ConfigError(f"config.{name}: a run compiled as a whole has none; use fit, or jaxmarl-llm train")


def _figures(step: StepParts, result: StepResult) -> dict[str, jax.Array]:
    roles, turns = [r.name for r in step.team.roles], step.env_runner.env.max_turns
    out = mean_returns(result.tree, roles, turns)
    for model, seen in result.updated.items():
        for name in ("grad_norm", "clip_fraction", "ref_kl"):
            if name in seen:
                out[f"{name.removeprefix('ref_')}/{model}"] = seen[name]
    return out | dict(result.metrics)


def mean_returns(tree: Tree, roles: list[str], max_turns: int, of: Any = None) -> dict[str, jax.Array]:
    """Mean over tasks of each component's undiscounted return: over roles, and of each role.

    Args:
        tree: The rollout.
        roles: Names of the roles, in their order in the tables.
        max_turns: Number of turns of the longest episode.
        of: Tasks that count [n], bool; None: all.

    Returns:
        Scalars by ``component`` (mean over roles) and ``component/role``. Episodes of unknown return are left out.
    """
    moves, out = tree.transitions, {}
    for name, rewards in moves.rewards.items():
        values, ok = returns_to_go(rewards, moves.parent, moves.turn, moves.valid, max_turns=max_turns)
        root = ok & (moves.parent < 0) & (True if of is None else jnp.asarray(of)[moves.task])
        mean = jnp.where(root[:, None], values, 0.0).sum(0) / jnp.maximum(root.sum(), 1)
        out[name] = mean.mean()
        out |= {f"{name}/{role}": mean[i] for i, role in enumerate(roles)}
    return out
