"""Ablations of JoyAgents-R1 on `dispatch` at equal numbers of sampled tokens:

    python -m experiments.studies.ablations --out=docs/results/ablations.json [--seeds=5] [--steps=200]

For each seed, stage 0 runs once, and every variant starts from its parameters. The single agent has its own stage 0 of
equal length. A variant trains until it has decoded as many tokens as the reference in ``--steps`` steps. Both are
evaluated on the same 256 held-out tasks.

Unseen queries and lookups are evaluated apart; the primary figure is success on unseen queries. A row's difference from
the reference is paired by seed, with a 95 % interval (Student's t). Its p-value has Holm's correction over all rows.
Detectable: the smallest distance from delta = 0.02 that the seeds find with probability 0.8 at level 0.05 / rows.

The command prints the table and writes every figure. A second call runs only the variants that are not in the file.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags, logging

from experiments.claims import minus
from experiments.studies.common import interval, origin, read_record, train
from experiments.studies.paired import LEVEL, detectable, holm, p_value
from jaxmarl_llm.cli import config_flags

FLAGS = flags.FLAGS
# Other entry points, imported in the same process by tests, have flags of these names.
flags.DEFINE_string("out", "docs/results/ablations.json", "Where the figures go.", allow_override=True)
flags.DEFINE_integer("seeds", 5, "Seeds 0 to N-1.", allow_override=True)
flags.DEFINE_integer("steps", 200, "RL steps of the reference; they set the token budget.", allow_override=True)

VARIANTS: dict[str, dict[str, Any]] = {
    "node-wise, all groups, memory": {},
    "node-wise, top-1 group of a task": {"selected_groups": 1},
    "node-wise, top-2 groups of a task": {"selected_groups": 2},
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
DELTA = 0.02  # the smallest difference worth having, of success
FIGURE = "eval/success@unseen"  # the primary figure: held-out queries that no seed trains on
SHOWN = (FIGURE, "eval/success@seen", "eval/success_greedy@unseen")


def figures(got: dict) -> dict:
    """Figures of a variant's training: counts, seconds of RL, and success before and after RL.

    Args:
        got: The result of `common.train`.
    """
    row = {k: got[k] for k in ("tokens", "steps", "sequences", "model_updates", "seconds")}
    return row | {f"{k}/{when}": got[when][k] for when in ("before", "after") for k in SHOWN}


def columns(results: dict, name: str, key: str, seeds: list[str]) -> list[float]:
    """One figure of a variant, by seed."""
    return [results[name][seed][key] for seed in seeds]


def contrasts(results: dict) -> dict[str, dict]:
    """Every other variant minus the reference, paired by seed, with Holm's correction over all of them.

    Args:
        results: Variant -> seed -> figures.

    Returns:
        Variant -> effect by seed, p after correction, and the difference that the seeds could have found. ``verdict``
        is the sign of a difference that is at least `DELTA`, that none is, or that nothing is decided.
    """
    effects = {}
    for name in results:
        seeds = sorted(set(results[name]) & set(results[REFERENCE]), key=int)
        if name != REFERENCE and seeds:
            key = f"{FIGURE}/after"
            effects[name] = minus(columns(results, name, key, seeds), columns(results, REFERENCE, key, seeds))
    # Whether a difference is larger than delta: two one-sided questions, of which the nearer one is asked.
    sides = {name: DELTA * (1 if np.mean(x) > 0 else -1) for name, x in effects.items()}
    adjusted = holm({name: p_value(x, sides[name]) for name, x in effects.items()})
    out = {}
    for name, x in effects.items():
        beyond = abs(np.mean(x)) > DELTA
        sure = "better" if np.mean(x) > 0 else "worse"
        verdict = "not decided" if adjusted[name] > LEVEL else (sure if beyond else "no difference of 0.02")
        spread = float(np.std(x, ddof=1)) if len(x) > 1 else float("nan")
        found = detectable(spread, len(x), LEVEL / len(effects))
        out[name] = {"effect": x, "holm": adjusted[name], "verdict": verdict, "detectable": found}
    return out


def table(results: dict) -> str:
    """The page's table: a row for each variant, with its paired difference from the reference."""
    lines = [
        "| variant | unseen, sampled | minus the first row | | detectable | unseen, greedy | lookups, sampled | "
        "RL steps | tokens decoded | model updates |",
        "|" + " --- |" * 10,
    ]
    against = contrasts(results)
    for name, seeds in results.items():
        rows = list(seeds.values())
        mean = lambda key, rows=rows: f"{np.mean([r[key] for r in rows]):,.0f}"
        cells = ["", "", ""]
        if name in against:
            c = against[name]
            cells = [interval(c["effect"]), f"{c['verdict']} (p {c['holm']:.2g})", f"{c['detectable']:.3f}"]
        of = lambda key, rows=rows: interval([r[f"{key}/after"] for r in rows])
        lines.append(
            f"| {name} | {of(FIGURE)} | {' | '.join(cells)} | {of(SHOWN[2])} | {of(SHOWN[1])} | {mean('steps')} | "
            f"{mean('tokens')} | {mean('model_updates')} |"
        )
    first = list(results[REFERENCE].values())
    lines += [
        "",
        f"After stage 0 (all team variants): unseen {interval([r[f'{FIGURE}/before'] for r in first])}, lookups "
        f"{interval([r[f'{SHOWN[1]}/before'] for r in first])}; {len(first)} seeds.",
    ]
    return "\n".join(lines)


def main(argv) -> None:
    import jax

    jax.config.update("jax_compilation_cache_dir", str(Path("runs/.jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    logging.set_verbosity(logging.WARNING)
    from jaxmarl_llm.config import replace_path

    out = Path(FLAGS.out)
    data = {"results": {}, **read_record(out, {"results?": dict})}
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
                f"seed {seed} {name}: {row[f'{FIGURE}/before']:.3f} -> {row[f'{FIGURE}/after']:.3f} "
                f"({row['steps']} steps, {row['seconds']:.0f} s)",
                flush=True,
            )
            data |= origin()
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(data, indent=1))
    print(table(results))


if __name__ == "__main__":
    config_flags.run(lambda *_: main([]), required=())
