"""Quality of the gradients of sampling plans:

    python -m experiments.studies.gradient_quality [--seeds=10] [--out=docs/results/study.json]

It uses games that are small enough to enumerate, tabular policies drawn from N(0, 1), and their exact policy gradients
(`enumerable_games`). The estimated gradients come from the project's own rollout, credit, selection and loss
(`gradient_estimators`).

For each plan it measures bias, variance at equal sampled tokens, and cosine; selection of the K groups of largest
variance; the share of groups without a variance; and how well selection by variance finds the best groups when verdicts
are noisy. A second call runs only seeds that are not in --out. It writes --out, a figure beside it, and a section of
docs/complexity.md.

The worth of a group is the derivative of the exact objective along the gradient of this group's own term, ``<1/G sum_g
A_g grad log pi(a_g), grad J>``. That is the gain of a small step on this group alone, with its advantages.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxmarl_llm.cli import config_flags

flags.DEFINE_integer("seeds", 10, "Seeds 0 to N-1.", lower_bound=2)
flags.DEFINE_string("out", "docs/results/study.json", "JSON file of every figure; resumed from.")

DOC = Path("docs/complexity.md")
BEGIN, END = "<!-- study -->", "<!-- /study -->"
BATCHES = 256  # of each plan and seed
GRADED = ("line/flat/4", "line/node-wise local/4", "line/node-wise continued/4")  # played for graded payoffs as well
RANKED = ("line/node-wise local/4", "line/node-wise continued/4", "graded/node-wise local/4")
SIGMAS = (0.0, 0.1, 0.2, 0.4, 0.8)  # payoffs are uniform in [0, 1]: their standard deviation is 0.29
NOISY = {"one": (0, 1, 0), "all": (1, 1, 1)}  # verifiers, by turn
SUCCESS, GROUPS, TASKS = (0.05, 0.1, 0.3, 0.5), (2, 4, 8, 16), 2048


def run_seed(seed: int, say: Any) -> dict[str, Any]:
    """All figures of one seed, which has its own policies, payoffs and samples."""
    import jax

    from experiments.studies import gradient_estimators
    from experiments.studies.enumerable_games import graded, line

    out: dict[str, Any] = {"seed": seed, "plans": {}, "noise": {}, "equal": {}}
    root = jax.random.key(seed)
    cells = gradient_estimators.cells()
    for i, c in enumerate(cells):
        rng = np.random.default_rng([seed, c.game.turns])
        logits, task = rng.normal(size=(len(c.game.prompts), c.game.moves)), c.game.tasks(rng)
        key, kinds = jax.random.fold_in(root, i), {c.name: task}
        if c.name in GRADED:
            kinds[c.name.replace("line", "graded")] = graded(rng)
        for name, task in kinds.items():
            found = out["plans"][name] = gradient_estimators.measured(c, logits, task, key, BATCHES)
            say(f"seed {seed} {name}: {gradient_estimators.shown(found['mean'])}")
            for pattern, turns in NOISY.items() if name in RANKED else ():
                if pattern == "one" and not c.plan.local:  # only the end is judged: there is one verifier
                    continue
                for sigma in SIGMAS:
                    noisy = {**task, "noise": np.float32(sigma) * np.array(turns, np.float32)}
                    found = gradient_estimators.ranking(c, logits, noisy, jax.random.fold_in(key, 1), BATCHES)
                    out["noise"].setdefault(f"{name} {pattern}", {})[str(sigma)] = found
    game = line(turns=1, moves=2)
    for g in GROUPS:
        for i, p in enumerate(SUCCESS):
            key = jax.random.fold_in(root, 1000 + 10 * g + i)
            out["equal"][f"{p} {g}"] = gradient_estimators.equal_groups(game, g, p, key, TASKS)
    return out


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    import jax

    from experiments.studies.common import origin, read_record, replace_section

    jax.config.update("jax_compilation_cache_dir", str(Path("runs/.jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    out = Path(flag_values.out)
    replace_section(DOC.read_text(), BEGIN, END, "")  # has the marks, before minutes go into it
    record: dict[str, Any] = {"minutes": 0.0, "seeds": [], **read_record(out, {"minutes": float, "seeds": list})}
    done = {row["seed"] for row in record["seeds"]}
    todo = [seed for seed in range(flag_values.seeds) if seed not in done]
    print(f"{len(done)} seeds in {out}, {len(todo)} to run", flush=True)
    for seed in todo:
        clock = time.time()
        found = run_seed(seed, lambda line: print(line, flush=True))
        seeds = sorted([*record["seeds"], found], key=lambda row: row["seed"])
        minutes = round(record["minutes"] + (time.time() - clock) / 60, 1)
        record = {**origin(), "minutes": minutes, "batches": BATCHES, "seeds": seeds}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1))
    from experiments.studies import gradient_report

    figure = out.with_suffix(".png")
    gradient_report.draw(record["seeds"], figure)
    link = Path(os.path.relpath(figure, DOC.parent)).as_posix()
    lines = "\n".join(gradient_report.section(record, link))
    DOC.write_text(replace_section(DOC.read_text(), BEGIN, END, lines))
    print(lines)


if __name__ == "__main__":
    config_flags.run(main, required=())
