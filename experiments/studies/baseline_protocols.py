"""Parts of `experiments.studies.baselines`: protocols at equal token budgets, majority vote, table and plot."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from experiments.studies.common import bootstrap, task_returns

SOLO, SOLO_TRAINED = "one model alone", "one model alone, GRPO"
CONCAT, SEQUENTIAL, DISCUSSION = "naive concatenation", "sequential pipeline", "one-round discussion"
VOTE, OURS = "majority vote of {}", "MAGRPO"


def under(cfg: Any, protocol: str) -> Any:
    """Copy of a configuration with another protocol. The protocol `solo` allows longer completions."""
    env = cfg.env
    made = env.build()
    if hasattr(made, "protocol"):  # an array environment has its own
        env = dataclasses.replace(env, args={**env.args, "protocol": protocol})
        team = dataclasses.replace(cfg.team, max_new_tokens=env.build().max_new_tokens)
        return dataclasses.replace(cfg, env=env, team=team)
    return dataclasses.replace(cfg, env=dataclasses.replace(env, protocol=protocol))


def alone(cfg: Any) -> Any:
    """GRPO configuration of one model: advantage over the standard deviation of its group, and PPO clipping."""
    from jaxmarl_llm.recipes import grpo

    base = under(cfg, "solo")
    theirs = {f.name for f in dataclasses.fields(grpo.Config)} - {"recipe", "credit", "loss"}
    return grpo.Config(**{name: getattr(base, name) for name in theirs})


def vote(cfg: Any, recipe: Any, state: Any, votes: int) -> tuple[np.ndarray, int]:
    """Return of each held-out task for the most frequent of ``votes`` texts of every writer. Only for tasks of one
    turn.
    """
    import jax

    from jaxmarl_llm.errors import ConfigError
    from jaxmarl_llm.rollout.env_pool import Failure
    from jaxmarl_llm.rollout.plans import flat
    from jaxmarl_llm.training.evaluation import most_frequent

    if recipe.env_runner.env.max_turns != 1:
        raise ConfigError("majority vote: expected an environment of one turn")
    _, tokens, played = task_returns(cfg, recipe, state, flat(votes))
    tree, env_runner = played.tree, recipe.env_runner
    moves = tree.transitions
    count = int(moves.task[moves.played].max()) + 1
    chosen = []  # of each task: the step of every seat
    for task in range(count):
        rows = moves.steps[moves.played & (moves.task == task)]
        said = lambda s: tuple(tree.steps.tokens[s, : tree.steps.length[s]])
        chosen.append([int(rows[most_frequent([said(s) for s in seat]), w]) for w, seat in enumerate(rows.T)])
    if env_runner.array:
        tasks = jax.tree.map(lambda x: x[:count], env_runner.held_out)
        steps = np.array(chosen)
        one = lambda task, said, size: env_runner.env.step(
            jax.random.key(0), env_runner.env.reset(jax.random.key(0), task), said, size
        )[1]
        rewards = jax.vmap(one)(tasks, tree.steps.tokens[steps], tree.steps.length[steps])
        return np.asarray(sum(w * rewards[c].mean(1) for c, w in cfg.reward.items())), tokens
    states = env_runner.pool().map("reset", [(0, task) for task in env_runner.held_out[:count]])
    action = lambda s: (played.records.records[s].role, played.records.records[s].action)
    calls = [(0, state, dict(action(s) for s in seats)) for state, seats in zip(states, chosen)]
    out = np.full(count, np.nan)
    for i, result in enumerate(env_runner.pool().map("step", calls)):
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
