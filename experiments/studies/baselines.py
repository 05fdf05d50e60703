"""MAGRPO and its baselines at equal numbers of sampled tokens, in one table:

    python -m experiments.studies.baselines --config=experiments/configs/magrpo.py:tiny \\
        [--seeds=3] [--out=F.json --plot=F.png]

`--config` is any MAGRPO configuration. The team trains as configured. One model alone (GRPO, protocol `solo`) trains
until it has sampled as many tokens.

Untrained baselines start after stage 0, if the configuration has one. They are: one model alone; concatenation (the
untrained team); a sequential pipeline; one round of discussion; and the majority vote of `--votes` concatenations. The
vote takes the most frequent text of each writer, the first one in a tie.

Returns are means over held-out tasks and seeds with 95 % bootstrap intervals over both. Tokens and seconds are those of
one task. A second call runs only what is not in --out.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags, logging

from experiments.studies.baseline_protocols import (
    CONCAT,
    DISCUSSION,
    OURS,
    SEQUENTIAL,
    SOLO,
    SOLO_TRAINED,
    VOTE,
    alone,
    plot,
    table,
    under,
    vote,
)
from experiments.studies.common import origin, read_record, task_returns, train
from jaxmarl_llm.cli import config_flags

flags.DEFINE_integer("seeds", 3, "Seeds: the configuration's, and those after it.", lower_bound=1)
flags.DEFINE_integer("votes", 5, "Samples of each writer in the majority vote.", lower_bound=1)
flags.DEFINE_string("out", None, "JSON file of every figure; resumed from.")
flags.DEFINE_string("plot", None, "PNG of returns with intervals.")


def main(cfg, workdir, flag_values):
    import jax

    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(Path("runs/.jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    out = Path(flag_values.out) if flag_values.out else None
    results: dict[str, list[dict]] = read_record(out, {"results?": dict}).get("results", {})
    first = cfg.seed

    def measured(name: str, cfg: Any, recipe: Any, state: Any, trained: int, votes: int = 0) -> None:
        play = (lambda: vote(cfg, recipe, state, votes)) if votes else (lambda: task_returns(cfg, recipe, state)[:2])
        play()  # compiles
        clock = time.time()
        returns, tokens = play()
        row = {"returns": returns.tolist(), "tokens": tokens / len(returns), "trained": trained}
        results.setdefault(name, []).append({**row, "seconds": (time.time() - clock) / len(returns)})
        print(f"seed {cfg.seed} {name}: {np.nanmean(returns):.3f}", flush=True)

    def started(cfg: Any) -> tuple[Any, Any]:
        """Recipe of a configuration, and its state after stage 0."""
        got = train(cfg, None, None, 0)
        return got["recipe"], got["state"]

    for seed in range(first, first + flag_values.seeds):
        if len(results.get(OURS, [])) > seed - first:
            continue
        for runs in results.values():  # what an interrupted seed left
            del runs[seed - first :]
        seeded = dataclasses.replace(cfg, seed=seed)
        for name, protocol in ((SEQUENTIAL, "sequential"), (DISCUSSION, "discussion")):
            chosen = under(seeded, protocol)
            recipe, state = started(chosen)
            measured(name, chosen, recipe, state, 0)
            recipe.env_runner.close()
        recipe, state = started(seeded)
        measured(CONCAT, seeded, recipe, state, 0)
        measured(VOTE.format(flag_values.votes), seeded, recipe, state, 0, flag_values.votes)
        recipe.env_runner.close()
        ours = train(seeded, state.params, None, seeded.steps)
        single = alone(seeded)
        recipe, state = started(single)
        measured(SOLO, single, recipe, state, 0)
        recipe.env_runner.close()
        theirs = train(single, state.params, ours["tokens"], 0)
        measured(SOLO_TRAINED, single, theirs["recipe"], theirs["state"], theirs["tokens"])
        measured(OURS, seeded, ours["recipe"], ours["state"], ours["tokens"])
        for got in (ours, theirs):
            got["recipe"].env_runner.close()
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({**origin(), "results": results}))
    print(table(results))
    if flag_values.plot:
        plot(results, flag_values.plot)
        print(f"wrote {flag_values.plot}")


if __name__ == "__main__":
    config_flags.run(main, required=("config",))
