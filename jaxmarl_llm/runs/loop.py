"""`fit`: a recipe's run to its last step, checkpointed, and resumed by calling it again."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath

from jaxmarl_llm import __version__, deadlines, processes
from jaxmarl_llm.checkpoint import Checkpointer, digests
from jaxmarl_llm.config import diff, from_dict, to_dict
from jaxmarl_llm.metrics import Logger
from jaxmarl_llm.phases import Recipe
from jaxmarl_llm.report import episodes_markdown, report
from jaxmarl_llm.stages import BaseConfig
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import TrainState
from jaxmarl_llm.workdir import Workdir


def fit(
    cfg: BaseConfig,
    recipe: Recipe,
    workdir: str | Path,
    *,
    allow_config_change: Sequence[str] = (),
) -> TrainState:
    """Train to the last step, from the newest checkpoint in ``workdir`` when there is one.

    Writes metrics.jsonl, TensorBoard events, checkpoints/, config.json, and at the end report.png and episodes.md. A
    ``workdir`` in an object store is fine: see workdir.py.
    """
    folder = Workdir(workdir)
    with processes.within(cfg.run.deadlines):
        with deadlines.stage("save"):
            _check_shared(folder)
            saver = Checkpointer(folder.url, keep=cfg.run.keep)
        try:
            return _fit(cfg, recipe, folder, saver, allow_config_change)
        finally:
            saver.close()  # waits for a save that is under way, whatever ended the run


def _fit(
    cfg: BaseConfig, recipe: Recipe, folder: Workdir, saver: Checkpointer, allow_config_change: Sequence[str]
) -> TrainState:
    workdir = folder.local
    with deadlines.stage("save"):
        meta = saver.read_meta()
        if meta is not None:
            _check_same(cfg, meta, allow_config_change)
        elif steps := saver.steps():
            raise ConfigError(f"{saver.root}: no usable checkpoint: the meta of steps {steps} cannot be read")
        if meta is None:
            state, resumed = recipe.init(0), None
            backbone = fingerprint_of(state.params["shared"])
        else:
            state, resumed = restore(saver, recipe, meta)
            backbone = meta["backbone"]  # which restore has compared
    primary = processes.index() == 0  # the others play and learn, and write nothing but their parts of checkpoints
    if primary:
        workdir.mkdir(parents=True, exist_ok=True)
        folder.fetch()
        (workdir / "config.json").write_text(json.dumps(to_dict(cfg), indent=1))

    bad, step, stopping = 0, int(state.step), False
    save = lambda: saver.save(step, _without_shared(state), _meta(cfg, step, backbone))
    logger = Logger(
        workdir,
        resume_step=resumed,
        total_steps=recipe.total_steps,
        interval=cfg.run.log_every,
        tensorboard=cfg.run.tensorboard,
        wandb_project=cfg.run.wandb_project,
        primary=primary,
    )
    try:
        with logger:
            if resumed is not None:
                logger.print(f"resumed {folder} at step {resumed}")
            deadlines.at(step)
            while step < recipe.total_steps and not stopping:
                with deadlines.stage("rollout"):
                    extra = recipe.evaluate(state) if _evaluates(cfg, step) else {}
                with deadlines.stage("update"):
                    state, metrics = recipe.step(state, logger)
                step += 1
                deadlines.at(step)
                state = state.replace(step=state.step + 1)
                bad = bad + 1 if metrics.pop("bad", 0.0) else 0
                skipped = state.counters["skipped"] + int(bad > 0)
                state = state.replace(counters={**state.counters, "skipped": skipped})
                if step == recipe.total_steps:
                    with deadlines.stage("rollout"):
                        extra |= {f"final/{k.removeprefix('eval/')}": v for k, v in recipe.evaluate(state).items()}
                logger.log(step, {**metrics, **extra, "count/skipped": float(skipped)})
                _check_numbers(cfg, step, bad, metrics, saver)
                with deadlines.stage("save"):
                    stopping = processes.stop_asked() and step < recipe.total_steps
                    if stopping or step % cfg.run.checkpoint_every == 0 or step == recipe.total_steps:
                        save()
                        if primary:
                            folder.push()
                release_programs()
            with deadlines.stage("save"):
                saver.wait()
                if stopping:
                    logger.print(f"SIGTERM: saved step {step}; run the same command again to go on")
                elif primary and (workdir / "metrics.jsonl").exists() and recipe.total_steps:
                    report(workdir)
                    episodes_markdown(recipe.episodes(), workdir / "episodes.md")
                    logger.print(f"wrote report.png and episodes.md to {folder}")
    finally:
        if primary:  # also when the run failed: the last lines of the metrics tell why
            with deadlines.stage("save"):
                folder.push()
    with deadlines.stage("save"):
        processes.everyone(None)  # process 0 may take longer than the others would wait when they leave
    if stopping:
        raise SystemExit(processes.AGAIN)
    return state


def _check_numbers(cfg: BaseConfig, step: int, bad: int, metrics: Mapping[str, float], saver: Checkpointer) -> None:
    """FloatingPointError after too many bad steps in a row, or when sampler and learner are apart."""
    if bad >= cfg.run.max_bad_steps:
        saver.wait()
        kept = [f"the last checkpoint is that of step {n}" for n in saver.steps()[-1:]] or ["there is no checkpoint"]
        raise FloatingPointError(
            f"step {step}: {bad} steps in a row had a loss or gradient that is not finite; stopped; {kept[0]}"
        )
    gap = metrics.get("logprob_gap", 0.0)
    if cfg.run.max_logprob_gap and gap > cfg.run.max_logprob_gap:
        raise FloatingPointError(
            f"step {step}: sampler and learner log-probs differ by {gap:.3g} > run.max_logprob_gap="
            f"{cfg.run.max_logprob_gap:g}; the update would be biased"
        )


def _check_shared(folder: Workdir) -> None:
    """ConfigError when what process 0 writes into the workdir is not there for all."""
    if processes.count() == 1:
        return
    workdir = epath.Path(folder.url)

    def write() -> str:
        workdir.mkdir(parents=True, exist_ok=True)
        name = f".of_process_0_{uuid.uuid4().hex}"
        (workdir / name).write_text("")
        return name

    mark = workdir / processes.first(write)
    blind = [k for k, sees in enumerate(processes.everyone(mark.exists())) if not sees]
    if processes.index() == 0:
        mark.unlink()
    if blind:
        raise ConfigError(
            f"--workdir: process {blind[0]} does not see what process 0 writes to {workdir}; it has to be one folder "
            "that all hosts have mounted"
        )


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


def restore(
    saver: Checkpointer, recipe: Recipe, meta: Mapping[str, Any], *, learning: bool = True
) -> tuple[TrainState, int]:
    """The newest good state and its step. The frozen backbone is made anew and must be the one trained on.

    ``learning``: False leaves the optimizer states as they begin, unread: for what evaluates or exports.
    """
    newest = recipe.init(int(meta["step"]))
    shared = newest.params["shared"]
    if meta["backbone"] != fingerprint_of(shared):
        raise ConfigError(f"{saver.root.parent}: the shared backbone is not the one this run was trained on")
    if learning:

        def like(step: int) -> TrainState:
            """An earlier step may be of another phase, with other optimizers."""
            return _without_shared(newest if step == int(meta["step"]) else recipe.init(step))

        got = saver.restore(like)
    else:
        saved = _without_shared(newest)
        part = {name: getattr(saved, name) for name in ("step", "key", "params", "memory", "counters")}
        got = saver.restore({name: tree for name, tree in part.items() if jax.tree.leaves(tree)}, part=True)
    if got is None:
        raise ConfigError(f"{saver.root}: no checkpoint")
    state = got[0] if learning else saved.replace(**got[0])
    return state.replace(params={**state.params, "shared": shared}), got[2]


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
