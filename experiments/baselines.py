"""MAGRPO and its baselines at equal sampled tokens, one table:

    python -m experiments.baselines --config=experiments/configs/magrpo.py:tiny [--seeds=3] [--out=F.json --plot=F.png]

`--config` is any MAGRPO configuration. The team is trained as it says, and one model alone (GRPO, the protocol `solo`)
until it has sampled as many tokens. Untrained (after stage 0, if there is one): one model alone, the naive
concatenation (the team as it starts), a sequential pipeline, one round of discussion, and the majority vote of
`--votes` concatenations (each writer's most frequent text; ties to the first). Returns are means over held-out tasks
and seeds with 95 % bootstrap intervals over both; tokens and seconds are those of playing one task. Resumes: what is in
--out is not run again.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags, logging

from experiments import cli
from experiments.budget import bootstrap, origin, task_returns, train

flags.DEFINE_integer("seeds", 3, "Seeds: the configuration's, and those after it.", lower_bound=1)
flags.DEFINE_integer("votes", 5, "Samples of each writer in the majority vote.", lower_bound=1)
flags.DEFINE_string("out", None, "JSON file of every figure; resumed from.")
flags.DEFINE_string("plot", None, "PNG of returns with intervals.")

SOLO, SOLO_TRAINED = "one model alone", "one model alone, GRPO"
CONCAT, SEQUENTIAL, DISCUSSION = "naive concatenation", "sequential pipeline", "one-round discussion"
VOTE, OURS = "majority vote of {}", "MAGRPO"


def under(cfg: Any, protocol: str) -> Any:
    """The same configuration with its environment under another protocol; the solo one writes longer completions."""
    env = cfg.env
    made = env.build()
    if hasattr(made, "protocol"):  # an array environment has its own
        env = dataclasses.replace(env, args={**env.args, "protocol": protocol})
        team = dataclasses.replace(cfg.team, max_new=env.build().max_new)
        return dataclasses.replace(cfg, env=env, team=team)
    return dataclasses.replace(cfg, env=dataclasses.replace(env, protocol=protocol))


def alone(cfg: Any) -> Any:
    """GRPO of one model: the advantage over the std of its group, PPO's clip (idle on fresh samples)."""
    from jaxmarl_llm.recipes import grpo

    base = under(cfg, "solo")
    theirs = {f.name for f in dataclasses.fields(grpo.Config)} - {"recipe", "credit", "loss"}
    return grpo.Config(**{name: getattr(base, name) for name in theirs})


def most_frequent(texts: list[Any]) -> int:
    """Index of the first of the most frequent texts."""
    counts = collections.Counter(texts)
    return max(range(len(texts)), key=lambda i: (counts[texts[i]], -i))


def vote(cfg: Any, recipe: Any, state: Any, votes: int) -> tuple[np.ndarray, int]:
    """Return of each held-out task when every writer's most frequent text of ``votes`` is taken. One-turn tasks."""
    import jax

    from jaxmarl_llm.plans import flat
    from jaxmarl_llm.text import ConfigError
    from jaxmarl_llm.workers import Failure

    if recipe.arena.env.max_turns != 1:
        raise ConfigError("majority vote: expected an environment of one turn")
    _, tokens, played = task_returns(cfg, recipe, state, flat(votes))
    tree, arena = played.tree, recipe.arena
    moves = tree.transitions
    count = int(moves.task[moves.played].max()) + 1
    chosen = []  # of each task: the step of every seat
    for task in range(count):
        rows = moves.steps[moves.played & (moves.task == task)]
        said = lambda s: tuple(tree.steps.tokens[s, : tree.steps.length[s]])
        chosen.append([int(rows[most_frequent([said(s) for s in seat]), w]) for w, seat in enumerate(rows.T)])
    if arena.array:
        tasks = jax.tree.map(lambda x: x[:count], arena.held_out)
        steps = np.array(chosen)
        one = lambda task, said, size: arena.env.step(
            jax.random.key(0), arena.env.reset(jax.random.key(0), task), said, size
        )[1]
        rewards = jax.vmap(one)(tasks, tree.steps.tokens[steps], tree.steps.length[steps])
        return np.asarray(sum(w * rewards[c].mean(1) for c, w in cfg.reward.items())), tokens
    states = arena.pool().map("reset", [(0, task) for task in arena.held_out[:count]])
    action = lambda s: (played.records.records[s].role, played.records.records[s].action)
    calls = [(0, state, dict(action(s) for s in seats)) for state, seats in zip(states, chosen)]
    out = np.full(count, np.nan)
    for i, result in enumerate(arena.pool().map("step", calls)):
        if not isinstance(result, Failure):
            by_role = list(result[1].values())
            out[i] = np.mean([sum(w * r.get(c, 0.0) for c, w in cfg.reward.items()) for r in by_role])
    return out, tokens


def table(results: dict[str, list[dict]]) -> str:
    lines = [
        "| system | return | 95 % interval | tokens a task | seconds a task | tokens sampled in training |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, runs in results.items():
        mean, low, high = bootstrap(np.array([r["returns"] for r in runs], float))
        average = lambda key, runs=runs: float(np.mean([r[key] for r in runs]))
        lines.append(
            f"| {name} | {mean:.3f} | {low:.3f} to {high:.3f} | {average('tokens'):.1f} | "
            f"{average('seconds'):.4f} | {average('trained'):,.0f} |"
        )
    seeds = max(len(r) for r in results.values())
    return "\n".join([*lines, "", f"{seeds} seeds, {len(next(iter(results.values()))[0]['returns'])} held-out tasks."])


def plot(results: dict[str, list[dict]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stats = [bootstrap(np.array([r["returns"] for r in runs], float)) for runs in results.values()]
    mean, low, high = (np.array(column) for column in zip(*stats, strict=True))
    fig, ax = plt.subplots(figsize=(7, 0.45 * len(results) + 1), constrained_layout=True)
    ax.barh(list(results), mean, xerr=[mean - low, high - mean], color="#0072B2", capsize=3)
    ax.invert_yaxis()
    ax.set_xlabel("return on held-out tasks")
    ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(cfg, workdir, flag_values):
    import jax

    logging.set_verbosity(logging.WARNING)
    jax.config.update("jax_compilation_cache_dir", str(Path("runs/.jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    out = Path(flag_values.out) if flag_values.out else None
    results: dict[str, list[dict]] = json.loads(out.read_text())["results"] if out and out.exists() else {}
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
        """The recipe and its state after stage 0."""
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
            recipe.arena.close()
        recipe, state = started(seeded)
        measured(CONCAT, seeded, recipe, state, 0)
        measured(VOTE.format(flag_values.votes), seeded, recipe, state, 0, flag_values.votes)
        recipe.arena.close()
        ours = train(seeded, state.params, None, seeded.steps)
        single = alone(seeded)
        recipe, state = started(single)
        measured(SOLO, single, recipe, state, 0)
        recipe.arena.close()
        theirs = train(single, state.params, ours["tokens"], 0)
        measured(SOLO_TRAINED, single, theirs["recipe"], theirs["state"], theirs["tokens"])
        measured(OURS, seeded, ours["recipe"], ours["state"], ours["tokens"])
        for got in (ours, theirs):
            got["recipe"].arena.close()
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({**origin(), "results": results}))
    print(table(results))
    if flag_values.plot:
        plot(results, flag_values.plot)
        print(f"wrote {flag_values.plot}")


if __name__ == "__main__":
    cli.run(main, required=("config",))
