"""Ablations of JoyAgents-R1 on `dispatch` at equal numbers of sampled tokens:

    python -m experiments.studies.ablations --out=docs/results/ablations.json [--seeds=5] [--steps=200]

For each seed, stage 0 runs once, and every variant starts from its parameters. The single agent has its own stage 0 of
equal length. A variant trains until it has decoded as many tokens as the reference in ``--steps`` steps. Both are
evaluated on the same 256 held-out tasks.

The command prints a table of means with 95 % intervals (Student's t over seeds) and writes every figure. A second call
runs only the variants that are not in the file.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags, logging

from experiments.studies.common import interval, origin, train
from jaxmarl_llm.cli import config_flags

FLAGS = flags.FLAGS
flags.DEFINE_string("out", "docs/results/ablations.json", "Where the figures go.")
flags.DEFINE_integer("seeds", 5, "Seeds 0 to N-1.")
flags.DEFINE_integer("steps", 200, "RL steps of the reference; they set the token budget.")

VARIANTS: dict[str, dict[str, Any]] = {
    "node-wise, all groups, memory": {},
    "node-wise, top-1 group of a task": {"top_k": 1},
    "node-wise, top-2 groups of a task": {"top_k": 2},
    "node-wise, no memory": {"use_memory": False},
    "flat (groups by role and turn)": {"plan": "flat", "group": 8, "credit.group": "task_role_turn"},
    "node-wise, advantages / std": {"credit.normalise": "std"},
}
# One model that answers alone (`dispatch_solo`): GRPO as published, and without its division by the std.
SOLO: dict[str, dict[str, Any]] = {
    "single agent, GRPO": {},
    "single agent, GRPO without / std": {"credit.normalise": "none"},
}
REFERENCE = next(iter(VARIANTS))


def figures(got: dict) -> dict:
    """Figures of a variant's training: counts, seconds of RL, and success before and after RL."""
    row = {k: got[k] for k in ("tokens", "steps", "sequences", "model_updates", "seconds")}
    success = ("eval/success", "eval/success_greedy")
    return row | {f"{k}/{when}": got[when][k] for when in ("before", "after") for k in success}


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
    from jaxmarl_llm.config import replace_path

    out = Path(FLAGS.out)
    data = json.loads(out.read_text()) if out.exists() else {"results": {}}
    results = data["results"]
    for seed in range(FLAGS.seeds):
        base = config_flags.load("experiments/configs/joyagents_r1.py:tiny", [("seed", str(seed))])
        solo = dataclasses.replace(
            config_flags.load("experiments/configs/grpo.py:tiny", [("seed", str(seed))]), steps=FLAGS.steps
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
            got["recipe"].env_runner.close()
            row = results.setdefault(name, {})[str(seed)] = figures(got)
            print(
                f"seed {seed} {name}: {row['eval/success/before']:.3f} -> {row['eval/success/after']:.3f} "
                f"({row['steps']} steps, {row['seconds']:.0f} s)",
                flush=True,
            )
            data |= origin()
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(data, indent=1))
    print(table(results))


if __name__ == "__main__":
    config_flags.run(lambda *_: main([]), required=())
