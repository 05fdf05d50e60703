"""Ablations of JoyAgents-R1 on `dispatch` at equal sampled tokens:

    python -m experiments.ablations --out=docs/ablations.json [--seeds=5] [--steps=200]

For each seed stage 0 runs once, and every variant starts from its parameters (the single agent has its own stage 0 of
equal length). A variant trains until it has decoded as many tokens as the reference did in ``--steps`` steps, then both
are evaluated on the same 256 held-out tasks. Prints a table of means with 95 % intervals (Student's t over seeds) and
writes every figure. Resumes: variants already in the file are not run again.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import app, flags, logging

FLAGS = flags.FLAGS
flags.DEFINE_string("out", "docs/ablations.json", "Where the figures go.")
flags.DEFINE_integer("seeds", 5, "Seeds 0 to N-1.")
flags.DEFINE_integer("steps", 200, "RL steps of the reference; they set the token budget.")

VARIANTS: dict[str, dict[str, Any]] = {
    "node-wise, all groups, memory": {},
    "node-wise, top-1 group of a task": {"top_k": 1},
    "node-wise, top-2 groups of a task": {"top_k": 2},
    "node-wise, no memory": {"use_memory": False},
    "flat (groups by role and turn)": {"plan": "flat", "group": 8, "credit.group": "task_role_turn"},
    "node-wise, advantages / std": {"credit.scale": "std"},
}
# One model that answers alone (`dispatch_solo`): GRPO as published, and without its division by the std.
SOLO: dict[str, dict[str, Any]] = {
    "single agent, GRPO": {},
    "single agent, GRPO without / std": {"credit.scale": "none"},
}
REFERENCE = next(iter(VARIANTS))


def train(cfg, params, budget: int | None, steps: int) -> dict:
    """RL from ``params`` for ``steps`` steps, or until ``budget`` tokens were decoded."""
    import importlib

    import jax
    import jax.numpy as jnp

    from jaxmarl_llm.metrics import Logger

    recipe = importlib.import_module(f"jaxmarl_llm.recipes.{cfg.recipe}").make(cfg)
    state = recipe.init(0)
    logger = Logger(".", resume_step=None, total_steps=0, primary=False)
    if params is not None:
        state = state.replace(params=jax.tree.map(jnp.copy, params), step=jnp.int32(cfg.sft.steps))
    else:
        while int(state.step) < cfg.sft.steps:
            state, _ = recipe.step(state, logger)
            state = state.replace(step=state.step + 1)
    start = jax.tree.map(jnp.copy, state.params)
    before, tokens, done, sequences, updates = recipe.evaluate(state), 0, 0, 0, 0
    clock = time.time()
    while done < steps if budget is None else tokens < budget:
        state, metrics = recipe.step(state, logger)
        state = state.replace(step=state.step + 1)
        tokens += int(metrics["count/completion_tokens"])
        sequences += int(metrics["count/sequences"])
        updates += sum(int(v) for k, v in metrics.items() if k.endswith("/updated"))
        done += 1
    after = recipe.evaluate(state)
    pick = ("eval/success", "eval/success_greedy")
    return {
        "params": start,
        "tokens": tokens,
        "steps": done,
        "sequences": sequences,
        "model_updates": updates,
        "seconds": time.time() - clock,
        **{k + "/before": before[k] for k in pick},
        **{k + "/after": after[k] for k in pick},
    }


def interval(values: list[float]) -> str:
    from scipy.stats import t

    x = np.array(values)
    if len(x) < 2:
        return f"{x.mean():.3f}"
    half = t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5
    return f"{x.mean():.3f} ± {half:.3f}"


def table(results: dict) -> str:
    lines = [
        "| variant | success, sampled | success, greedy | RL steps | tokens decoded | model updates |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, seeds in results.items():
        rows = list(seeds.values())
        mean = lambda key, rows=rows: f"{np.mean([r[key] for r in rows]):,.0f}"
        lines.append(
            f"| {name} | {interval([r['eval/success/after'] for r in rows])} | "
            f"{interval([r['eval/success_greedy/after'] for r in rows])} | {mean('steps')} | {mean('tokens')} | "
            f"{mean('model_updates')} |"
        )
    first = list(results[REFERENCE].values())
    lines += [
        "",
        f"After stage 0 (all team variants): sampled {interval([r['eval/success/before'] for r in first])}, "
        f"greedy {interval([r['eval/success_greedy/before'] for r in first])}; {len(first)} seeds.",
    ]
    return "\n".join(lines)


def main(argv) -> None:
    import jax

    jax.config.update("jax_compilation_cache_dir", str(Path("runs/.jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    logging.set_verbosity(logging.WARNING)
    from experiments import cli
    from jaxmarl_llm.config import replace_path

    out = Path(FLAGS.out)
    data = json.loads(out.read_text()) if out.exists() else {"results": {}}
    results = data["results"]
    for seed in range(FLAGS.seeds):
        base = cli.load("experiments/configs/joyagents_r1.py:tiny", [("seed", str(seed))])
        solo = dataclasses.replace(
            cli.load("experiments/configs/grpo.py:tiny", [("seed", str(seed))]), steps=FLAGS.steps
        )
        missing = [n for n in [*VARIANTS, *SOLO] if str(seed) not in results.get(n, {})]
        if not missing:
            continue
        reference = train(base, None, None, FLAGS.steps)
        for name in missing:
            if name == REFERENCE:
                got = reference
            else:
                cfg, start = (solo, None) if name in SOLO else (base, reference["params"])
                for path, value in {**VARIANTS, **SOLO}[name].items():
                    cfg = replace_path(cfg, path, value)
                got = train(cfg, start, reference["tokens"], 0)
            results.setdefault(name, {})[str(seed)] = {k: v for k, v in got.items() if k != "params"}
            print(
                f"seed {seed} {name}: {got['eval/success/before']:.3f} -> {got['eval/success/after']:.3f} "
                f"({got['steps']} steps, {got['seconds']:.0f} s)",
                flush=True,
            )
            commit = subprocess.run(
                ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
            )
            data |= {
                "command": f"python -m experiments.ablations --seeds={FLAGS.seeds} --steps={FLAGS.steps}",
                "date": time.strftime("%Y-%m-%d"),
                "commit": commit.stdout.strip(),
                "jax": jax.__version__,
                "machine": f"{platform.processor() or platform.machine()}, CPU",
            }
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(data, indent=1))
    print(table(results))


if __name__ == "__main__":
    app.run(main)
