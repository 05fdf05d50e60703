"""What `experiments.study` writes of its records: one table, one figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

Row = dict[str, Any]
COLOURS = {
    "flat": "#009E73",
    "product": "#D55E00",
    "product crossed": "#E69F00",
    "hand-off best": "#CC79A7",
    "hand-off first": "#999999",
    "node-wise local": "#0072B2",
    "node-wise continued": "#56B4E9",
}


def over(seeds: Sequence[Row], of: Callable[[Row], float]) -> tuple[float, float]:
    """Mean over seeds and half-width of its 95 % interval (Student's t)."""
    x = np.array([of(row) for row in seeds])
    half = student.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5 if len(x) > 1 else np.nan
    return float(x.mean()), float(half)


def ratio(seeds: Sequence[Row], of: Callable[[Row], float]) -> str:
    """Geometric mean over seeds and its 95 % interval."""
    mean, half = over(seeds, lambda row: float(np.log(of(row))))
    return f"{np.exp(mean):.2f} ({np.exp(mean - half):.2f} to {np.exp(mean + half):.2f})"


def shown(seeds: Sequence[Row], of: Callable[[Row], float], digits: int = 3) -> str:
    mean, half = over(seeds, of)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def section(record: Row, figure: Path) -> list[str]:
    seeds = record["seeds"]
    plans = seeds[0]["plans"]
    at = lambda cell, arm, name: lambda row: row["plans"][cell][arm][name]
    lines = [
        f"`{record['command']}`, {record['date']}, commit `{record['commit']}`, {record['machine']}, "
        f"{len(seeds)} seeds of {record['batches']} batches, {record['minutes']} min.",
        "",
        "| game, plan, G | advantage | scale ÷ derived | bias² | own bias² | noise, tokens | ÷ flat, same G | cosine |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell, arms in plans.items():
        game, plan, g = cell.split("/")
        for arm in arms:
            if arm == "std" and (g != "4" or plan not in ("flat", "node-wise continued", "node-wise local")):
                continue
            own = "own_scale" in arms[arm]
            flat = f"{game}/flat/{g}"
            versus = lambda row, c=cell, a=arm, f=flat: row["plans"][c][a]["noise"] / row["plans"][f]["mean"]["noise"]
            cells = [
                f"{game}, {plan}, {g}",
                arm,
                shown(seeds, at(cell, arm, "own_scale")) if own else "",
                shown(seeds, at(cell, arm, "bias")),
                shown(seeds, at(cell, arm, "own_bias")) if own else "",
                shown(seeds, at(cell, arm, "noise"), 0),
                ratio(seeds, versus) if (cell, arm) != (flat, "mean") else "1",
                shown(seeds, at(cell, arm, "cosine")),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    equal = seeds[0]["equal"]
    groups = list(dict.fromkeys(key.split()[1] for key in equal))
    lines += ["", f"| groups without a variance, measured (p^G + (1-p)^G) | {' | '.join(f'G = {g}' for g in groups)} |"]
    lines.append(f"|{' --- |' * (1 + len(groups))}")
    for p in dict.fromkeys(key.split()[0] for key in equal):
        share = lambda g, p=p: shown(seeds, lambda row: row["equal"][f"{p} {g}"])
        law = lambda g, p=float(p): p ** int(g) + (1 - p) ** int(g)
        lines.append(f"| p = {p} | " + " | ".join(f"{share(g)} ({law(g):.3f})" for g in groups) + " |")
    lines += [
        "",
        "| verdicts, noise | σ | ρ(variance, worth) | precision | captured | captured, std | of turns 0, 1, 2 |",
    ]
    lines.append(f"|{' --- |' * 7}")
    for name, sigmas in seeds[0]["noise"].items():
        for sigma in sigmas:
            of = lambda key, arm="mean", n=name, s=sigma: lambda row: row["noise"][n][s][arm][key]
            turns = ", ".join(f"{over(seeds, of(f'turn {t}'))[0]:.2f}" for t in range(3))
            cells = [name, sigma, *(shown(seeds, of(key), 2) for key in ("spearman", "precision", "captured"))]
            lines.append(f"| {' | '.join(cells)} | {shown(seeds, of('captured', 'std'), 2)} | {turns} |")
    return [*lines, "", f"![estimators of sampling plans]({figure.name})"]


def draw(seeds: Sequence[Row], path: Path) -> None:
    """Noise and cosine by plan and G, selection by K, and selection under noise; bars are 95 % intervals over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 4, figsize=(17, 4), constrained_layout=True)
    get = lambda cell, arm, name: over(seeds, lambda row: row["plans"][cell][arm][name])
    plans = seeds[0]["plans"]
    for ax, name in ((axes[0], "noise"), (axes[1], "cosine")):
        for plan, colour in COLOURS.items():
            groups = [g for g in (2, 4, 8) if f"line/{plan}/{g}" in plans]
            if groups:
                y = np.array([get(f"line/{plan}/{g}", "mean", name) for g in groups])
                ax.errorbar(groups, y[:, 0], y[:, 1], fmt="o-", color=colour, label=plan, capsize=3)
        ax.set(xscale="log", xlabel="samples G (game line)", xticks=(2, 4, 8), xticklabels=(2, 4, 8))
        ax.minorticks_off()
    axes[0].set(yscale="log", ylabel="tokens at which noise = gradient")
    axes[1].set(ylabel="cosine of a batch to the exact gradient")
    for plan in ("node-wise continued", "node-wise local"):
        cell = f"line/{plan}/4"
        for arm, style in (("mean", "o-"), ("std", "s--")):
            y = np.array([get(cell, f"{arm} top {k}", "cosine") for k in (1, 2, 3)])
            label = f"{plan}, {'A' if arm == 'mean' else 'A / std'}"
            axes[2].errorbar((1, 2, 3), y[:, 0], y[:, 1], fmt=style, color=COLOURS[plan], label=label, capsize=3)
    axes[2].set(xlabel="K of 3 groups of a task, by variance", ylabel="cosine", xticks=(1, 2, 3))
    for i, (name, sigmas) in enumerate(seeds[0]["noise"].items()):
        for arm, style in (("mean", "o-"), ("std", "s--")):
            y = np.array([over(seeds, lambda row: row["noise"][name][s][arm]["captured"]) for s in sigmas])
            label = f"{name.removeprefix('line/')}, {'A' if arm == 'mean' else 'A / std'}"
            x = [float(s) for s in sigmas]
            axes[3].errorbar(x, y[:, 0], y[:, 1], fmt=style, color=f"C{i}", label=label, capsize=3)
    axes[3].axhline(0, color="grey", lw=0.8)
    axes[3].set(xlabel="noise of verdicts σ (payoffs: 0.29)", ylabel="worth captured: 0 random, 1 oracle")
    for ax in axes:
        ax.legend(fontsize=7)
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=110)
    plt.close(fig)
