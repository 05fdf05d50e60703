"""`fit`: trains a recipe to its last step with checkpoints. Calling it again resumes the run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax

from jaxmarl_llm.config import diff, from_dict, to_dict
from jaxmarl_llm.distributed import deadlines, processes, signals
from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.runs import preflight
from jaxmarl_llm.runs.ahead import LONG, Ahead
from jaxmarl_llm.runs.alarms import Alarms
from jaxmarl_llm.runs.best import FOLDER, BestStep
from jaxmarl_llm.runs.files import RunFiles, check_shared, one_writer, without_shared
from jaxmarl_llm.runs.health import Health
from jaxmarl_llm.runs.phases import Recipe, with_weights
from jaxmarl_llm.runs.recorder import CHANGEABLE, EvaluationRecorder, Recorder
from jaxmarl_llm.runs.trial import try_tasks
from jaxmarl_llm.runs.versions import commit_of, versions
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.storage.workdir import Workdir
from jaxmarl_llm.telemetry.evaluations_file import EvaluationsFile
from jaxmarl_llm.telemetry.forecast import Schedule
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.telemetry.report import episodes_markdown, report
from jaxmarl_llm.telemetry.rollouts_writer import RolloutsFolder
from jaxmarl_llm.training.config import BaseConfig
from jaxmarl_llm.types import TrainState


class Callback(Protocol):
    """Function of a user's own that sees every step of a run."""

    def __call__(self, step: int, state: TrainState, metrics: Mapping[str, float], /) -> None:
        """See a step. An exception ends the run; the step is saved before.

        Args:
            step: Number of the step, as in metrics.jsonl.
            state: State after it. The next step reuses the memory of its arrays: copy what is kept.
            metrics: Metrics of the step, those of an evaluation included.
        """
        ...


def fit(
    cfg: BaseConfig,
    recipe: Recipe,
    workdir: str | Path,
    *,
    allow_config_change: Sequence[str] = (),
    break_lock: bool = False,
    callbacks: Sequence[Callback] = (),
) -> TrainState:
    """Train to the last step, from the newest checkpoint in ``workdir`` if one exists.

    cfg: configuration of the run. recipe: made from ``cfg`` by a module of `recipes`. workdir: folder of the run, or a
    URL in an object store (`storage.workdir`). allow_config_change: configuration keys that may differ from those of
    the checkpoint. break_lock: take the workdir from another run that holds its lock (`storage.lock`). callbacks:
    functions that are called after every step, in this order, in every process (`Callback`). Returns the last state.

    Writes metrics.jsonl, evaluations.jsonl, TensorBoard events, checkpoints/, rollouts/, config.json and versions.json.
    At the end it writes report.png and episodes.md. Failures of a host environment go to failures.jsonl. SIGTERM and
    Ctrl-C save the step in progress and end with SystemExit (`distributed.signals`).
    """
    folder, cfg = Workdir(workdir), with_weights(cfg, recipe.env_runner)
    with (
        processes.watchdog(cfg.run.deadlines),
        signals.listening(),
        one_writer(folder, break_lock) as lock,
        contextlib.ExitStack() as savers,
    ):

        def opened(keep: int, **more: Any) -> Checkpointer:
            saver = Checkpointer(folder.url, keep=keep, **more)
            savers.callback(saver.close)  # waits for a save in progress, also after an error
            return saver

        with deadlines.stage("save"):
            check_shared(folder)
            saver = opened(cfg.run.keep)
            best_saver = opened(1, name=FOLDER) if cfg.best_metric is not None else None
        return _fit(cfg, recipe, RunFiles(folder, lock, saver, best_saver), allow_config_change, callbacks)


def _fit(
    cfg: BaseConfig,
    recipe: Recipe,
    files: RunFiles,
    allow_config_change: Sequence[str],
    callbacks: Sequence[Callback],
) -> TrainState:
    """Resume or start a run, train it to the last step, and write its report. Arguments as in `fit`."""
    passes = None if recipe.env_runner.array else preflight.epochs(cfg, recipe.env_runner.size)
    folder, saver = files.folder, files.saver
    primary = processes.index() == 0  # the other processes write only their parts of checkpoints
    if primary:
        folder.local.mkdir(parents=True, exist_ok=True)
        folder.fetch()
    health = Health(folder.local, cfg.run.max_invalid, primary=primary)
    try:
        if saver.steps()[-1:] < [recipe.total_steps]:
            with deadlines.stage("rollout"):
                recipe.env_runner.open()
            with deadlines.stage("reward"):
                try_tasks(recipe.env_runner, recipe.team, health, required=cfg.run.max_invalid < 1)
        with deadlines.stage("save"):
            state, resumed, backbone, best = _resume(cfg, recipe, saver, allow_config_change)
        made_with = {**versions(), "commit": commit_of(Path.cwd()) if primary else None}
        if primary:
            (folder.local / "config.json").write_text(json.dumps(to_dict(cfg), indent=1))
            (folder.local / "versions.json").write_text(json.dumps(made_with, indent=1))
        logger = Logger(
            folder.local,
            resume_step=resumed,
            total_steps=recipe.total_steps,
            schedule=schedule_of(cfg, recipe),
            interval=cfg.run.log_every,
            tensorboard=cfg.run.tensorboard,
            wandb_project=cfg.run.wandb_project,
            trackio_project=cfg.run.trackio_project,
            config=to_dict(cfg),
            primary=primary,
        )
        with logger:
            health.say = logger.print
            if resumed is not None:
                logger.print(f"resumed {folder} at step {resumed}")
            if passes is not None:
                logger.print(passes)
            health.watch(recipe.env_runner, int(state.step))
            _record(cfg, recipe, folder.local if primary else None, resumed, logger, made_with["commit"])
            state, code = _train(cfg, recipe, files, logger, health, best, state, backbone, callbacks)
            with deadlines.stage("save"):
                _finish(recipe, files, logger, best, int(state.step), code)
            health.close()
    finally:
        if recipe.rollouts is not None:
            recipe.rollouts.drop()
        recipe.env_runner.watcher = recipe.env_runner.evaluations = recipe.recorder = None
        if primary:  # also after a failure: the last lines of the metrics show the reason
            with deadlines.stage("save"):
                folder.push()
    with deadlines.stage("save"):
        processes.all_gather(None)  # wait for process 0, which may need longer than the others would wait at the exit
    if code:
        raise SystemExit(code)
    return state


def _record(
    cfg: BaseConfig, recipe: Recipe, workdir: Path | None, resumed: int | None, logger: Logger, commit: str | None
) -> None:
    """Record rollouts and evaluations of ``recipe`` in ``workdir`` from now on.

    workdir: None in processes other than the first. resumed: as `_resume` returns it. commit: of versions.json.
    """
    folder, table, runner = None, None, recipe.env_runner
    if workdir is not None:
        folder = RolloutsFolder(workdir, cfg.run.rollouts, resumed, logger.print, logger.log_completions)
        table = EvaluationsFile(workdir, runner.contents(range(runner.held_out_size), True), resumed)
    if cfg.run.rollouts.every:
        recipe.recorder = Recorder(cfg, folder, commit)
    runner.evaluations = EvaluationRecorder(cfg, recipe.team, runner, folder, table, commit)


def _resume(
    cfg: BaseConfig, recipe: Recipe, saver: Checkpointer, allow_config_change: Sequence[str]
) -> tuple[TrainState, int | None, str, BestStep]:
    """State to continue from: of the newest intact checkpoint, or a new one if no step was saved.

    Returns the state, the step of the checkpoint (None for a new run), the fingerprint of the frozen backbone, and the
    best step so far.
    """
    meta = saver.read_meta()
    if meta is not None:
        _check_same(cfg, meta, allow_config_change)
        state, resumed = restore(saver, recipe, meta)
        own = (saver.read_meta(resumed) if resumed != meta["step"] else meta) or {}
        best = BestStep(cfg.best_metric, cfg.run.patience, own.get("best"))
        return state, resumed, meta["backbone"], best  # `restore` has compared the fingerprint
    if steps := saver.steps():
        raise ConfigError(f"{saver.root}: no usable checkpoint: the meta of steps {steps} cannot be read")
    state = recipe.init(0)
    return state, None, fingerprint_of(state.params["shared"]), BestStep(cfg.best_metric, cfg.run.patience)


def _train(
    cfg: BaseConfig,
    recipe: Recipe,
    files: RunFiles,
    logger: Logger,
    health: Health,
    best: BestStep,
    state: TrainState,
    backbone: str,
    callbacks: Sequence[Callback],
) -> tuple[TrainState, int]:
    """Train from ``state`` to the last step, until a signal, or until the metric of ``best`` improves no more.

    backbone: fingerprint of the frozen backbone, for the checkpoints. callbacks: see `fit`. Returns the last state, and
    the exit code that a signal asked for before the last step; 0 without one.
    """

    def save(state: TrainState, is_best: bool = False) -> None:
        with logger.stage("save"):
            step = int(state.step)
            files.save(step, state, _meta(cfg, step, backbone, best.record()), best=is_best)

    bad, idle, silent, step, code, done = 0, 0, 0, int(state.step), 0, best.exhausted
    alarms = Alarms(logger.print, pretrained=cfg.team.pretrained)
    deadlines.set_step(step)
    first, early, long = step, step < cfg.sft.steps, recipe.total_steps - step >= LONG
    with Ahead() as ahead:
        if early:
            ahead.begin(recipe.ahead(state, rollouts=True, updates=long))
        while step < recipe.total_steps and not done and not code:
            extra = {}
            if _evaluates(cfg, step):
                with logger.stage("evaluation", deadline="rollout"):
                    extra = recipe.evaluate(state)
            best.see(extra, step, functools.partial(save, state, True))
            with deadlines.stage("update"):
                state, metrics = recipe.step(state, logger)
            if step == first and long and not early:
                ahead.begin(recipe.ahead(state, rollouts=False, updates=True))
            if ahead.busy:  # the steps to come have all cores, and a time that the first ones show
                with logger.first("programs of RL"), logger.stage("compile"):
                    ahead.wait()
            step += 1
            deadlines.set_step(step)
            bad = bad + 1 if metrics.pop("bad", 0.0) else 0
            idle = idle + 1 if metrics.pop("idle", 0.0) else 0
            silent = _unanswered(silent, metrics)
            state = _counted(state, bad > 0)
            done = step == recipe.total_steps or best.exhausted
            if done:
                with logger.stage("evaluation", deadline="rollout"):
                    final = recipe.evaluate(state)
                best.see(final, step, functools.partial(save, state, True), last=True)
                extra |= {f"final/{k.removeprefix('eval/')}": v for k, v in final.items()}
            if extra:
                extra["count/held_out"] = float(recipe.env_runner.held_out_size)
            logger.log(step, {**metrics, **extra, "count/skipped": float(state.counters["skipped"])})
            alarms.see(step, metrics)
            _check_numbers(cfg, step, bad, metrics, files.saver)
            _check_idle(cfg, step, idle, files.saver)
            _check_experts(cfg, step, silent, files.saver)
            health.end_step(step, last=done, kept=functools.partial(_kept, files.saver))
            _call(callbacks, step, state, {**metrics, **extra}, save)
            with deadlines.stage("save"):
                code = processes.stop_asked() * (not done)
                if done and processes.index() == 0:
                    _write_episodes(recipe, files.folder.local / "episodes.md")
                if code or done or step % cfg.run.checkpoint_every == 0:
                    save(state)
                    if processes.index() == 0:
                        files.folder.push()
            release_programs()
    return state, code


def _call(
    callbacks: Sequence[Callback],
    step: int,
    state: TrainState,
    metrics: Mapping[str, float],
    save: Callable[[TrainState], None],
) -> None:
    """Call what the user gave to `fit`. Where one raises, the step is saved before the error goes on."""
    try:
        for callback in callbacks:
            callback(step, state, metrics)
    except Exception:  # of any kind: it is the user's own, and goes on
        save(state)
        raise


def _write_episodes(recipe: Recipe, path: Path) -> None:
    """Write the last episodes to ``path``, before the last save: afterwards no run has these episodes again.

    A run that was resumed after its last rollout has none, and what is there stays.
    """
    episodes = recipe.episodes()
    if episodes or not path.exists():
        episodes_markdown(episodes, path)


def _counted(state: TrainState, skipped: bool) -> TrainState:
    """``state`` with one more skipped step, if ``skipped``: a gradient was not finite."""
    counters = {**state.counters, "skipped": state.counters["skipped"] + int(skipped)}
    return state.replace(counters=counters)


def _finish(recipe: Recipe, files: RunFiles, logger: Logger, best: BestStep, step: int, code: int) -> None:
    """Wait for the last checkpoint. Then write the report, or say how to continue a stopped run.

    step: number of the last step. code: exit code that a signal asked for; 0 at the end of the run.
    """
    files.saver.wait()
    folder = files.folder
    if code:
        logger.print(f"{signals.NAMES[code]}: saved step {step}; run the same command again to go on")
        return
    if best.exhausted:
        logger.print(f"ended after step {step}: no better {best.metric} in {best.waited} evaluations")
    if best.metric is not None:
        logger.print(str(best))
    if processes.index() == 0 and (folder.local / "metrics.jsonl").exists() and recipe.total_steps:
        report(folder.local)
        logger.print(f"wrote report.png and episodes.md to {folder}")


def _kept(saver: Checkpointer) -> str:
    """The newest checkpoint, for a message that ends the run. Completes a save in progress first."""
    saver.wait()
    return next((f"the last checkpoint is that of step {n}" for n in saver.steps()[-1:]), "there is no checkpoint")


def _check_numbers(cfg: BaseConfig, step: int, bad: int, metrics: Mapping[str, float], saver: Checkpointer) -> None:
    """Raise FloatingPointError after too many bad steps in a row, or for a large gap between sampler and learner.

    step: completed steps. bad: bad steps in a row. metrics: of this step; "logprob_diff" is the difference between the
    log-probabilities of the sampler and the learner. saver: completes its save first.
    """
    if bad >= cfg.run.max_bad_steps:
        raise FloatingPointError(
            f"step {step}: {bad} steps in a row had a loss or gradient that is not finite; stopped; {_kept(saver)}"
        )
    gap = metrics.get("logprob_diff", 0.0)
    if cfg.run.max_logprob_diff and not cfg.staleness and gap > cfg.run.max_logprob_diff:
        raise FloatingPointError(
            f"step {step}: sampler and learner log-probs differ by {gap:.3g} > run.max_logprob_diff="
            f"{cfg.run.max_logprob_diff:g}; the update would be biased"
        )


def _check_idle(cfg: BaseConfig, step: int, idle: int, saver: Checkpointer) -> None:
    """Raise RunError after ``run.max_bad_steps`` steps in a row that trained nobody, where the update counts them.

    step: completed steps. idle: such steps in a row. saver: completes its save first.
    """
    if idle >= cfg.run.max_bad_steps:
        raise RunError(
            f"step {step}: {idle} steps in a row trained nobody: no completion was selected; stopped; {_kept(saver)}"
        )


def _unanswered(silent: int, metrics: dict[str, float]) -> int:
    """Steps in a row in which experts were asked and none answered. Takes the step's own out of ``metrics``.

    silent: such steps before this one. A step that asks no expert does not count.
    """
    unanswered = metrics.pop("unanswered", None)
    return silent if unanswered is None else silent + 1 if unanswered else 0


def _check_experts(cfg: BaseConfig, step: int, silent: int, saver: Checkpointer) -> None:
    """Raise RunError after ``run.max_bad_steps`` steps in a row in which experts were asked and none answered.

    step: completed steps. silent: such steps in a row. saver: completes its save first.
    """
    if silent >= cfg.run.max_bad_steps:
        raise RunError(
            f"step {step}: in {silent} steps in a row no expert answered, where experts were asked; stopped; "
            f"{_kept(saver)}"
        )


def release_programs(share: float = 0.5) -> bool:
    """Forget compiled programs when they hold more than ``share`` of the memory maps that Linux allows a process.

    On CPU, every compiled kernel needs a few maps, and a long host run compiles hundreds of shapes. Beyond
    vm.max_map_count (65,530 by default), the compiler crashes the process. A program that is needed again comes from
    the compilation cache. Returns whether programs were forgotten.
    """
    maps, limit = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
    if jax.default_backend() != "cpu" or not maps.exists() or not limit.exists():
        return False
    if maps.read_bytes().count(b"\n") <= share * int(limit.read_text()):
        return False
    jax.clear_caches()
    return True


def restore(
    saver: Checkpointer, recipe: Recipe, meta: Mapping[str, Any], *, learning: bool = True, at: int | None = None
) -> tuple[TrainState, int]:
    """Newest intact state and its step.

    saver: the checkpoints. recipe: gives the structure of the state, and the frozen backbone, which is not saved. meta:
    metadata of the newest step; ConfigError unless its fingerprint is that of the backbone. learning: False does not
    read optimizer states and returns new ones, for evaluation and export. at: the step to read in place of the newest.
    """
    newest = recipe.init(int(meta["step"]))
    shared = newest.params["shared"]
    if meta["backbone"] != fingerprint_of(shared):
        raise ConfigError(f"{saver.root.parent}: the shared backbone is not the one this run was trained on")
    if learning:

        def like(step: int) -> TrainState:
            """Structure of the state at ``step``, which may be of another phase with other optimizers."""
            return without_shared(newest if step == int(meta["step"]) else recipe.init(step))

        got = saver.restore(like, at)
    else:
        saved = without_shared(newest)
        part = {name: getattr(saved, name) for name in ("step", "key", "params", "memory", "counters")}
        got = saver.restore({name: tree for name, tree in part.items() if jax.tree.leaves(tree)}, at, part=True)
    if got is None:
        raise ConfigError(f"{saver.root}: no checkpoint")
    state = got[0] if learning else saved.replace(**got[0])
    return state.replace(params={**state.params, "shared": shared}), got[2]


def schedule_of(cfg: BaseConfig, recipe: Recipe) -> Schedule:
    """Phases, evaluations and saves of a run, before it begins.

    Args:
        cfg: Configuration of the run.
        recipe: Made of ``cfg``.
    """
    ends = [start + p.steps for start, p in zip(recipe.starts, recipe.phases, strict=True)]
    named = tuple((p.name, end) for p, end in zip(recipe.phases, ends, strict=True) if p.steps)
    return Schedule(
        named or (("training", 0),),
        lambda step: _evaluates(cfg, step),
        lambda step: step > 0 and step % cfg.run.checkpoint_every == 0,
    )


def _evaluates(cfg: BaseConfig, step: int) -> bool:
    """Whether to evaluate before ``step``: before the first RL step, and every ``eval_every`` RL steps."""
    rl = step - cfg.sft.steps
    return rl == 0 or (rl > 0 and cfg.run.eval_every > 0 and rl % cfg.run.eval_every == 0)


def _meta(cfg: BaseConfig, step: int, backbone: str, best: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Metadata of the checkpoint of ``step``. backbone: fingerprint of the frozen one. best: record of `BestStep`."""
    meta = {"step": step, "config": to_dict(cfg), "versions": versions(), "backbone": backbone}
    return meta if best is None else {**meta, "best": best}


def fingerprint_of(tree: Any) -> str:
    """SHA-256 of the arrays in ``tree``, with their dtypes, shapes and paths."""
    return hashlib.sha256(json.dumps(digests(tree), sort_keys=True).encode()).hexdigest()


def _check_same(cfg: BaseConfig, meta: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raise ConfigError when ``cfg`` differs from the configuration in ``meta``, except for the keys ``allowed``."""
    changed = diff(from_dict(type(cfg), meta["config"]), cfg)
    key = lambda change: change.split(":")[0].removeprefix("config.")
    changed = [c for c in changed if not c.startswith(CHANGEABLE) and key(c) not in allowed]
    if changed:
        raise ConfigError(
            f"the workdir holds a run with another configuration: {'; '.join(changed)}; use a new --workdir, or "
            f"--allow_config_change={','.join(map(key, changed))}"
        )
