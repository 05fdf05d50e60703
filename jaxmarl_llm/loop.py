"""A recipe's run: its state, its step with stage 0 before it, and `fit`, resumed by calling it again."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh

from jaxmarl_llm import __version__, memory, past, sharding
from jaxmarl_llm.arena import Arena, Played, make_arena
from jaxmarl_llm.checkpoint import Checkpointer, digests
from jaxmarl_llm.config import diff, from_dict, to_dict
from jaxmarl_llm.credit import Credited, Weights
from jaxmarl_llm.diagnose import diagnose, episodes_of, evaluate
from jaxmarl_llm.memory import MemoryConfig
from jaxmarl_llm.metrics import Logger
from jaxmarl_llm.plans import Plan
from jaxmarl_llm.report import episodes_markdown, report
from jaxmarl_llm.sampling import Sampling
from jaxmarl_llm.sharding import MeshConfig
from jaxmarl_llm.stages import PAST, PICK, SFT_LOSS, ActorCritic, BaseConfig, Run, appraise, credit, learn, offline_step
from jaxmarl_llm.team import init_params, make_team, with_past
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import Learner, Optimizer, make_learner, task_order
from jaxmarl_llm.types import Params, PyTree, Team, TrainState, Tree


class Improved(NamedTuple):
    """What a recipe made of a rollout."""

    state: TrainState
    credited: Credited
    selected: np.ndarray  # groups [K]
    updated: Mapping[str, Mapping[str, float]]  # model -> metrics of its update; absent: not updated
    metrics: Mapping[str, float]  # anything else, by the naming scheme of metrics.py


Improve = Callable[[Run, TrainState, Played, int, Logger], Improved]


class Recipe(NamedTuple):
    """A recipe ready to run. ``init(step)`` is the state's structure at ``step`` (its values at step 0); ``step`` takes
    the state one step on; ``evaluate`` and ``episodes`` read it.
    """

    team: Team
    arena: Arena
    total_steps: int
    init: Callable[[int], TrainState]
    step: Callable[[TrainState, Logger], tuple[TrainState, dict[str, float]]]
    evaluate: Callable[[TrainState], dict[str, float]]
    episodes: Callable[[], list[list[dict]]]


class Phase(NamedTuple):
    """Consecutive steps of a run, with one optimizer a model that is fresh at the first of them.

    ``step(state, i, logger)`` takes the state one step on, i counted within the phase. ``begin(agents)`` is what the
    parameters hold beside the agents from the phase's first step on.
    """

    steps: int
    learners: Mapping[str, Learner]  # by model
    step: Callable[[TrainState, int, Logger], tuple[TrainState, dict[str, float]]]
    begin: Callable[[Params], Params] = lambda agents: {}


def open_arena(cfg: BaseConfig) -> tuple[Arena, Team]:
    """The environment and team of a configuration; ConfigError for a reward that the environment does not pay."""
    arena = make_arena(cfg.env)
    unknown = sorted(set(cfg.reward) - set(arena.env.components))
    if unknown:
        raise ConfigError(
            f"config.reward: environment {arena.env.name!r} pays no {unknown[0]!r}; it pays "
            f"{', '.join(arena.env.components)}"
        )
    return arena, make_team(cfg.team, arena.env.roles)


def open_mesh(cfg: BaseConfig, team: Team) -> Mesh | None:
    """The mesh of a configuration, None for one device; ConfigError when a model does not fit it."""
    if cfg.mesh == MeshConfig(data=1):
        if jax.device_count() > 1:
            logging.info("config.mesh: 1 of %d devices is used; data=-1 takes all", jax.device_count())
        return None
    mesh = sharding.make_mesh(cfg.mesh)
    if mesh.size == 1:
        return None
    for model in team.models:
        arch = model.policy.config
        sharding.check_heads(mesh, model.name, arch.num_heads, arch.num_kv_heads)
        tree = {model.name: jax.eval_shape(model.policy.init, jax.random.key(0))}
        sharding.check_divides(mesh, tree, sharding.param_specs(tree))
    return mesh


def settled(mesh: Mesh | None, state: TrainState) -> TrainState:
    """``state`` where it lives: parameters and optimizer states by the rules, all else on every device."""
    if mesh is None:
        return state
    everywhere = {
        k: jax.device_put(getattr(state, k), sharding.whole(mesh)) for k in ("step", "key", "memory", "counters")
    }
    placed = {k: sharding.place(mesh, getattr(state, k)) for k in ("params", "opt_state")}
    return state.replace(**everywhere, **placed)


def make_phases(
    cfg: BaseConfig,
    team: Team,
    arena: Arena,
    phases: Sequence[Phase],
    *,
    context: int = 0,
    stores: Callable[[], PyTree] = dict,
    evaluate: Callable[[TrainState], dict[str, float]],
    episodes: Callable[[], list[list[dict]]] = list,
) -> Recipe:
    """Stage 0 for ``sft.steps``, then ``phases`` one after the other. ``stores()``: empty memories by role.

    ``context``: memory entries in demonstrations. ConfigError when the models do not fit the mesh of the configuration.
    """
    mesh = open_mesh(cfg, team)
    tutors = {m.name: make_learner(m.policy, SFT_LOSS, cfg.sft.optimizer, Sampling()) for m in team.models}
    data = arena.demonstrations(team, cfg.sft.samples, cfg.seed, context) if cfg.sft.steps else {}

    def teach(state: TrainState, i: int, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        with logger.first("supervised update"), logger.stage("update"):
            return offline_step(team, tutors, SFT_LOSS, data, cfg.sft, cfg.seed, state, i, name="sft")

    phases = [Phase(cfg.sft.steps, tutors, teach), *phases]
    starts = [sum(p.steps for p in phases[:k]) for k in range(len(phases))]

    def phase_of(step: int) -> int:
        """The phase of the step after ``step`` ones; the last phase beyond the end."""
        return next((k for k, p in enumerate(phases) if starts[k] <= step < starts[k] + p.steps), len(phases) - 1)

    def optimizers(phase: Phase, agents: Params) -> PyTree:
        return {m.name: phase.learners[m.name].init(agents[m.name]) for m in team.models}

    def init(step: int) -> TrainState:
        params = init_params(cfg.team, team, jax.random.key(cfg.seed))
        for phase in phases:
            params |= phase.begin(params["agents"])
        last = phases[phase_of(max(step - 1, 0))]  # a state is as its last step left it
        state = TrainState(
            step=jnp.int32(0),
            key=jax.random.key(cfg.seed),
            params=params,
            opt_state=optimizers(last, params["agents"]),
            memory=stores(),
            counters={"skipped": jnp.int32(0)},
        )
        return settled(mesh, state)

    def step(state: TrainState, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        now = int(state.step)
        k = phase_of(now)
        if now and now == starts[k]:
            agents = state.params["agents"]
            params = {**state.params, **phases[k].begin(agents)}
            state = state.replace(params=params, opt_state=optimizers(phases[k], agents))
        state, metrics = phases[k].step(state, now - starts[k], logger)
        return settled(mesh, state), metrics

    def there(function: Callable) -> Callable:
        """``function`` on the mesh of the run."""

        def call(*args: Any) -> Any:
            with sharding.on(mesh):
                return function(*args)

        return call

    total = sum(p.steps for p in phases)
    return Recipe(team, arena, total, there(init), there(step), there(evaluate), episodes)


def make_recipe(
    cfg: BaseConfig,
    plan: Plan,
    improve: Improve,
    memory_config: MemoryConfig | None = None,
    critic_optimizer: Optimizer | None = None,
) -> Recipe:
    """Stage 0, then for ``cfg.steps``: play a batch of tasks by ``plan``, ``improve`` on it.

    A loss that refers to another policy refers to the one that stage 0 ends with, kept as ``params["reference"]``.
    """
    arena, team = open_arena(cfg)
    if cfg.credit.scale == "std" and cfg.credit.centre != "mean":
        logging.warning(
            "config.credit.centre=%s has no effect with credit.scale=std: standardised advantages have mean 0",
            cfg.credit.centre,
        )
    plan.check(arena.env)
    if cfg.past.size and memory_config is not None:
        raise ConfigError("config.past.size: expected 0 with a memory: past policies have none")
    company = with_past(team) if cfg.past.size else team
    playing = {role.model for role in team.roles}
    chosen = {m.name: cfg.optimizer if m.name in playing else critic_optimizer or cfg.optimizer for m in team.models}
    learners = {m.name: make_learner(m.policy, cfg.loss, chosen[m.name], cfg.sampling) for m in team.models}
    run = Run(team, arena, learners)
    latest: dict[str, Any] = {}

    def stores() -> dict[str, memory.Memory]:
        if memory_config is None:
            return {}
        return {
            role.name: memory.init(
                memory_config,
                dim=team.model_of(i).policy.config.hidden_size,
                max_ids=arena.entry_tokens,
                max_bytes=arena.entry_bytes,
            )
            for i, role in enumerate(team.roles)
        }

    def begin(agents: Params) -> Params:
        """The reference policy, an empty ring of past ones."""
        out: Params = {}
        if cfg.loss.refers:
            out["reference"] = jax.tree.map(jnp.copy, agents)
        if cfg.past.size:
            out["past"] = past.init({role.model: agents[role.model] for role in team.roles}, cfg.past.size)
        return out

    def step(state: TrainState, i: int, logger: Logger) -> tuple[TrainState, dict[str, float]]:
        now, tasks = int(state.step), list(task_order(cfg.seed, arena.size, i * cfg.batch, cfg.batch))
        with logger.first(f"rollout {plan.name}"), logger.stage("rollout"):
            key = jax.random.fold_in(state.key, now)
            params, cast = state.params, None
            if cfg.past.size:
                own, seats = jax.random.split(jax.random.fold_in(key, PAST))
                params = {**params, "agents": past.draw(params["past"], params["agents"], own)}
                cast = past.cast(seats, len(tasks), len(team.roles), cfg.past.share)
            played = arena.play(
                company, params, state.memory, tasks, plan, key, cfg.sampling, memory_config, version=now, cast=cast
            )
        done = improve(run, state, played, len(tasks), logger)
        if cfg.past.size and (i + 1) % cfg.past.every == 0:
            params = done.state.params
            ring = past.push(params["past"], {name: params["agents"][name] for name in params["past"]["ring"]})
            done = done._replace(state=done.state.replace(params={**params, "past": ring}))
        latest.update(played=played, credited=done.credited, selected=done.selected)
        seen = diagnose(cfg, team, arena, played, done.credited, done.selected, done.updated)
        return done.state, {**seen, **done.metrics}

    return make_phases(
        cfg,
        team,
        arena,
        [Phase(cfg.steps, learners, step, begin)],
        context=0 if memory_config is None else memory_config.retrieve,
        stores=stores,
        evaluate=lambda state: evaluate(cfg, team, arena, state, memory_config),
        episodes=lambda: episodes_of(team, **latest, count=cfg.run.episodes) if latest else [],
    )


def improve_groups(
    cfg: BaseConfig,
    *,
    drop_equal: bool = False,
    learns: Callable[[int], Any] | None = None,
    weigh: Callable[[int], Weights] | None = None,
    pick: Callable[[jax.Array, Tree, Any], Any] | None = None,
) -> Improve:
    """Credit every step by ``cfg.credit`` and update every model on all of them.

    ``drop_equal``: groups of equal returns are left out of the loss and of its mean (DAPO's filter); otherwise they
    count as the zeros they are. ``learns``: RL step -> which roles learn [A] (None: all); a model of none of them stays
    as it is, optimizer state included. ``weigh``: RL step -> reward weights (None: ``cfg.reward``, which figures of the
    whole reward use in any case). ``pick``: (key, tree, credited steps [C]) -> those of them that are trained [C]
    (None: all), as `selection.one_round`; the others stay in the statistics of their groups.
    """
    draw = None if pick is None else jax.jit(pick)

    def improve(run: Run, state: TrainState, played: Played, tasks: int, logger: Logger) -> Improved:
        now = int(state.step) - cfg.sft.steps
        with logger.stage("reward"):
            weights = cfg.reward if weigh is None else weigh(now)
            credited = credit(cfg, run.team, run.arena, played, tasks, weights)
            selected = credited.stats.variance > 0 if drop_equal else credited.stats.count > 0
        with logger.first("update"), logger.stage("update"):
            trained = credited.valid & selected[credited.group]
            if draw is not None:
                key = jax.random.fold_in(jax.random.fold_in(state.key, int(state.step)), PICK)
                trained = trained & np.asarray(draw(key, played.tree, trained))
            if learns is not None:
                nodes = played.tree.nodes
                trained = trained & np.asarray(learns(now))[nodes.role[played.tree.steps.node]]
            state, updated = learn(run.team, run.learners, cfg, state, played, credited.advantage, trained)
        return Improved(state, credited, selected, updated, {})

    return improve


def improve_critic(cfg: ActorCritic) -> Improve:
    """Actor-critic: advantages by the team's critics (GAE), every model and critic updated."""

    def improve(run: Run, state: TrainState, played: Played, tasks: int, logger: Logger) -> Improved:
        with logger.first("critic"), logger.stage("reward"):
            credited = credit(cfg, run.team, run.arena, played, tasks, cfg.reward)
            gain, has, appraisals, metrics = appraise(cfg, run, state, played)
            credited = credited.replace(advantage=gain, valid=has)
        with logger.first("update"), logger.stage("update"):
            state, updated = learn(run.team, run.learners, cfg, state, played, gain, has, appraisals)
        metrics |= {f"critic/{n}/loss": m["value_loss"] for n, m in updated.items() if "value_loss" in m}
        return Improved(state, credited, np.ones(len(credited.group_task), bool), updated, metrics)

    return improve


def fit(
    cfg: BaseConfig,
    recipe: Recipe,
    workdir: str | Path,
    *,
    allow_config_change: Sequence[str] = (),
) -> TrainState:
    """Train to the last step, from the newest checkpoint in ``workdir`` when there is one.

    Writes metrics.jsonl, TensorBoard events, checkpoints/, config.json, and at the end report.png and episodes.md.
    """
    workdir = Path(workdir)
    saver = Checkpointer(workdir, keep=cfg.run.keep)
    try:
        return _fit(cfg, recipe, workdir, saver, allow_config_change)
    finally:
        saver.close()  # waits for a save that is under way, whatever ended the run


def _fit(
    cfg: BaseConfig, recipe: Recipe, workdir: Path, saver: Checkpointer, allow_config_change: Sequence[str]
) -> TrainState:
    meta = saver.read_meta()
    if meta is not None:
        _check_same(cfg, meta, allow_config_change)
    if meta is None:
        state, resumed = recipe.init(0), None
    else:
        state, resumed = restore(saver, recipe, meta)
    backbone = fingerprint_of(state.params["shared"])
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(to_dict(cfg), indent=1))
    save = lambda: saver.save(int(state.step), _without_shared(state), _meta(cfg, int(state.step), backbone))
    with Logger(
        workdir,
        resume_step=resumed,
        total_steps=recipe.total_steps,
        interval=cfg.run.log_every,
        tensorboard=cfg.run.tensorboard,
        wandb_project=cfg.run.wandb_project,
    ) as logger:
        if resumed is not None:
            logger.print(f"resumed {workdir} at step {resumed}")
        bad = 0
        while int(state.step) < recipe.total_steps:
            step = int(state.step)
            extra = recipe.evaluate(state) if _evaluates(cfg, step) else {}
            state, metrics = recipe.step(state, logger)
            step += 1
            state = state.replace(step=jnp.int32(step))
            bad = bad + 1 if metrics.pop("bad", 0.0) else 0
            skipped = state.counters["skipped"] + int(bad > 0)
            state = state.replace(counters={**state.counters, "skipped": skipped})
            if step == recipe.total_steps:
                extra |= {f"final/{k.removeprefix('eval/')}": v for k, v in recipe.evaluate(state).items()}
            logger.log(step, {**metrics, **extra, "count/skipped": float(skipped)})
            if bad >= cfg.run.max_bad_steps:
                raise FloatingPointError(
                    f"step {step}: {bad} steps in a row had a loss or gradient that is not finite; stopped. "
                    f"The last good checkpoint is step {saver.steps()[-1:] or 'none'}"
                )
            gap = metrics.get("logprob_gap", 0.0)
            if cfg.run.max_logprob_gap and gap > cfg.run.max_logprob_gap:
                raise FloatingPointError(
                    f"step {step}: sampler and learner log-probs differ by {gap:.3g} > run.max_logprob_gap="
                    f"{cfg.run.max_logprob_gap:g}; the update would be biased"
                )
            if step % cfg.run.checkpoint_every == 0 or step == recipe.total_steps:
                save()
            release_programs()
        saver.wait()
        if (workdir / "metrics.jsonl").exists() and recipe.total_steps:
            report(workdir)
            episodes_markdown(recipe.episodes(), workdir / "episodes.md")
            logger.print(f"wrote {workdir / 'report.png'} and {workdir / 'episodes.md'}")
    return state


def release_programs(share: float = 0.5) -> bool:
    """Forget compiled programs when they hold more than ``share`` of the memory maps that Linux allows a process.

    On CPU every compiled kernel is a few maps; a long host run meets hundreds of shapes, and beyond vm.max_map_count
    (65,530 by default) the compiler crashes the process. Programs still needed come back from the compilation cache.
    """
    maps, limit = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
    if jax.default_backend() != "cpu" or not maps.exists() or not limit.exists():
        return False
    if maps.read_bytes().count(b"\n") <= share * int(limit.read_text()):
        return False
    jax.clear_caches()
    return True


def restore(saver: Checkpointer, recipe: Recipe, meta: Mapping[str, Any]) -> tuple[TrainState, int]:
    """The newest good state and its step. The frozen backbone is made anew and must be the one trained on."""
    like = recipe.init(int(meta["step"]))
    shared = like.params["shared"]
    if meta["backbone"] != fingerprint_of(shared):
        raise ConfigError(f"{saver.root.parent}: the shared backbone is not the one this run was trained on")
    got = saver.restore(_without_shared(like))
    if got is None:
        raise ConfigError(f"{saver.root}: no checkpoint")
    return got[0].replace(params={**got[0].params, "shared": shared}), got[2]


def _evaluates(cfg: BaseConfig, step: int) -> bool:
    """Before the first RL step, and every ``eval_every`` steps of RL."""
    rl = step - cfg.sft.steps
    return rl == 0 or (rl > 0 and cfg.run.eval_every > 0 and rl % cfg.run.eval_every == 0)


def _without_shared(state: TrainState) -> TrainState:
    """The frozen backbone is a function of the configuration; its fingerprint is saved instead."""
    return state.replace(params={k: v for k, v in state.params.items() if k != "shared"})


@functools.lru_cache(maxsize=1)
def _versions() -> dict[str, str]:
    import jaxlib

    return {
        "jaxmarl_llm": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
    }


def _meta(cfg: BaseConfig, step: int, backbone: str) -> dict[str, Any]:
    return {"step": step, "config": to_dict(cfg), "versions": _versions(), "backbone": backbone}


def fingerprint_of(tree: Any) -> str:
    """One SHA-256 for a tree of arrays."""
    return hashlib.sha256(json.dumps(digests(tree), sort_keys=True).encode()).hexdigest()


# What may differ between the runs that make up one: none of it changes a computed value, a mesh but for rounding.
FREE = ("config.steps", "config.run.", "config.env.workers", "config.env.timeout", "config.mesh")


def _check_same(cfg: BaseConfig, meta: Mapping[str, Any], allowed: Sequence[str]) -> None:
    changed = diff(from_dict(type(cfg), meta["config"]), cfg)
    changed = [c for c in changed if not c.startswith(FREE) and c.split(":")[0].removeprefix("config.") not in allowed]
    if changed:
        raise ConfigError(
            f"the workdir holds a run with another configuration: {'; '.join(changed)}; use a new --workdir, or "
            f"--allow_config_change={','.join(c.split(':')[0].removeprefix('config.') for c in changed)}"
        )
