"""Shared parts of experiments that compare systems: training to a token budget, returns of tasks, intervals."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxmarl_llm.cli import config_flags


def make(cfg: Any) -> Any:
    return config_flags.recipe_module(cfg.recipe).make(cfg)


def _without_folders(argument: str) -> str:
    """``argument`` of a command, with the last name alone of an absolute path."""
    name, equals, value = argument.rpartition("=")
    return name + equals + (Path(value).name if value.startswith("/") else value)


def origin() -> dict[str, str]:
    """Origin of figures: command, date, commit, version of JAX, and machine.

    Of an absolute path in the command only the last name is kept: it says nothing of the figures.
    """
    import jax

    module = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "command": " ".join(["python -m", module.removesuffix(".__main__"), *map(_without_folders, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
        "commit": done.stdout.strip(),
        "jax": jax.__version__,
        "machine": f"{processor()}, {jax.devices()[0].device_kind}",
    }


Parts = list[dict[str, Any]]  # of an arm: what was recorded of some seeds each
CODE = ("experiments", "jaxmarl_llm", "kernels", "tests")  # what decides the figures of a record


def stated_in(*paths: str) -> str:
    """The commit that last changed any of ``paths``, which state claims and budgets.

    Raises:
        ConfigError: Code or claims have changes that are not committed.
    """
    from jaxmarl_llm.errors import ConfigError

    git = lambda *words: subprocess.run(["git", *words], capture_output=True, text=True).stdout.strip()
    if changed := git("status", "--porcelain", "--untracked-files=all", "--", *CODE):
        file = changed.splitlines()[0].split(maxsplit=1)[1]
        raise ConfigError(
            f"--run: {file} has changes that are not committed; claims and code are committed before a run"
        )
    return git("log", "-1", "--format=%h", "--", *paths)


def processor() -> str:
    """Model name of this machine's processor, from Linux."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def train(cfg: Any, params: Any, budget: int | None, steps: int, say: Any = None) -> dict:
    """Train by RL for ``steps`` steps, or until ``budget`` tokens were decoded.

    params: initial parameters; None runs stage 0 first. Returns the recipe, its last state, the parameters at the start
    of RL, counts, seconds of RL, and evaluations before and after RL. The caller closes ``recipe.env_runner``.
    """
    import jax
    import jax.numpy as jnp

    from jaxmarl_llm.telemetry.logger import Logger

    recipe = make(cfg)
    state = recipe.init(0)
    logger = Logger(".", resume_step=None, total_steps=0, primary=False)
    if params is not None:
        state = state.replace(params=jax.tree.map(jnp.copy, params), step=jnp.int32(cfg.sft.steps))
    else:
        while int(state.step) < cfg.sft.steps:
            state, _ = recipe.step(state, logger)
    start = jax.tree.map(jnp.copy, state.params)
    tokens = done = sequences = updates = 0
    before = recipe.evaluate(state)
    clock = time.time()
    while done < steps if budget is None else tokens < budget:
        state, metrics = recipe.step(state, logger)
        tokens += int(metrics["count/completion_tokens"])
        sequences += int(metrics["count/sequences"])
        updates += sum(int(v) for k, v in metrics.items() if k.endswith("/updated"))
        done += 1
        if say is not None:
            say(done, tokens, metrics)
    seconds = time.time() - clock
    return {
        "recipe": recipe,
        "state": state,
        "params": start,
        "tokens": tokens,
        "steps": done,
        "sequences": sequences,
        "model_updates": updates,
        "seconds": seconds,
        "before": before,
        "after": recipe.evaluate(state),
    }


def student(values: Any) -> tuple[float, float]:
    """Mean and half-width of the 95 % interval of a mean over seeds (Student's t); NaN for one value."""
    from jaxmarl_llm.telemetry.comparison import interval as of_mean

    return of_mean(values)


def interval(values: list[float]) -> str:
    mean, half = student(values)
    return f"{mean:.3f}" if np.isnan(half) else f"{mean:.3f} ± {half:.3f}"


def read_record(file: Path | str | None, form: dict[str, Any] | None = None) -> dict[str, Any]:
    """Read a JSON record that a study keeps; empty without the file.

    file: the record. form: types of its keys, as for `json_files.check`. Raises ConfigError.
    """
    from jaxmarl_llm import json_files

    if not file or not Path(file).exists():
        return {}
    found = json_files.read_object(Path(file), nan=True)
    json_files.check(found, form or {}, str(file))
    return found


def replace_section(text: str, begin: str, end: str, lines: str) -> str:
    """Copy of ``text`` with ``lines`` between two marks. Raises ConfigError without the marks."""
    from jaxmarl_llm.errors import ConfigError

    if begin not in text or end not in text:
        raise ConfigError(f"no section between {begin} and {end} to write to")
    return text[: text.index(begin)] + "\n".join([begin, lines, end]) + text[text.index(end) + len(end) :]


def figure_beside(doc: Path) -> tuple[Path, str]:
    """The picture of a page: results/PAGE.png beside the page (its folder is made), and its link from the page."""
    figure = doc.parent / "results" / f"{doc.stem}.png"
    figure.parent.mkdir(parents=True, exist_ok=True)
    return figure, f"results/{figure.name}"


def bootstrap(values: np.ndarray, seed: int = 0, draws: int = 2000) -> tuple[float, float, float]:
    """Mean and 95 % interval of values [seeds, tasks] by a percentile bootstrap over both axes. NaN marks a missing
    value.
    """
    rng = np.random.default_rng(seed)
    seeds, tasks = values.shape
    means = np.empty(draws)
    for i in range(draws):
        rows, columns = rng.integers(0, seeds, seeds), rng.integers(0, tasks, tasks)
        means[i] = np.nanmean(values[np.ix_(rows, columns)])
    low, high = np.nanpercentile(means, [2.5, 97.5])
    return float(np.nanmean(values)), float(low), float(high)


def task_returns(cfg: Any, recipe: Any, state: Any, plan: Any = None, count: int = 256) -> tuple[np.ndarray, int, Any]:
    """Return of each held-out task, number of decoded tokens, and the rollouts.

    A return is the mean over the task's episodes, NaN without a scored episode. plan: sampling plan; by default one
    episode a task.
    """
    import jax

    from jaxmarl_llm.rollout.plans import single
    from jaxmarl_llm.training.step_metrics import episode_values

    env_runner = recipe.env_runner
    size = len(jax.tree.leaves(env_runner.held_out)[0]) if env_runner.array else len(env_runner.held_out)
    indices = range(min(size, count))
    key = jax.random.fold_in(jax.random.key(cfg.seed), 2**31 - 1)
    played = env_runner.play(
        recipe.team, state.params, state.memory, indices, plan or single(), key, cfg.sampling, None, held_out=True
    )
    moves = played.tree.transitions
    reward = sum(w * moves.rewards[c].mean(1) for c, w in cfg.reward.items())
    total, roots = episode_values(moves, reward)
    out = np.full(len(indices), np.nan)
    for task in range(len(indices)):
        mine = roots & (moves.task == task)
        if mine.any():
            out[task] = total[mine].mean()
    return out, int(played.tree.counts.completion_tokens), played


def seeds_of(parts: Parts) -> list[int]:
    """The recorded seeds of an arm, in the order of the record."""
    return [seed for part in parts for seed in part["seeds"]]


def column(parts: Parts, key: str) -> list[Any]:
    """One figure of an arm, by seed, in the order of the record."""
    return [value for part in parts for value in part[key]]


def write(file: Path, text: str) -> None:
    """Write a whole file or leave the old one, whenever the process is stopped."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.tmp")
    partial.write_text(text)
    os.replace(partial, file)
