"""Table and figure of the records of `experiments.studies.gradient_quality`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.studies.common import student

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
    return student([of(row) for row in seeds])


def ratio(seeds: Sequence[Row], of: Callable[[Row], float]) -> str:
    """Geometric mean over seeds and its 95 % interval."""
    mean, half = over(seeds, lambda row: float(np.log(of(row))))
    return f"{np.exp(mean):.2f} ({np.exp(mean - half):.2f} to {np.exp(mean + half):.2f})"


def shown(seeds: Sequence[Row], of: Callable[[Row], float], digits: int = 3) -> str:
    mean, half = over(seeds, of)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def across(found: dict[str, float], which: str = "bias") -> float:
    """Share of the mean gradient's squared length that is orthogonal to the exact gradient: a squared sine."""
    return found[which] / (1 + found[which])


def noise(found: dict[str, float]) -> float:
    """Number of sampled tokens at which the standard deviation of the gradient equals its mean."""
    return found["noise"] / (1 + found["bias"])


def section(record: Row, figure: str) -> list[str]:
    """Lines of the section. ``figure``: link from the page to the picture."""
    seeds = record["seeds"]
    head = (
        f"`{record['command']}`, {record['date']}, commit `{record['commit']}`, {record['machine']}, "
        f"{len(seeds)} seeds of {record['batches']} batches, {record['minutes']} min. "
        "Means over seeds ± 95 % (Student's t)."
    )
    picture = f"![estimators of sampling plans]({figure})"
    return [head, "", *_plans(seeds), "", *_top_k(seeds), "", *_equal(seeds), "", *_noisy(seeds), "", picture]


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table: the names of its columns, and its rows."""
    line = lambda cells: f"| {' | '.join(cells)} |"
    return [line(names), f"|{' --- |' * len(names)}", *map(line, rows)]


def _plans(seeds: Sequence[Row]) -> list[str]:
    rows, plans = [], seeds[0]["plans"]
    for cell, arms in plans.items():
        game, plan, g = cell.split("/")
        flat = f"{game}/flat/{g}"
        for arm, label in (("mean", "A"), ("std", "A / std"), ("none", "R")):
            if arm not in arms or (arm != "mean" and g != "4"):
                continue
            of = lambda f, c=cell, a=arm: lambda row: f(row["plans"][c][a])
            own = "own_scale" in arms[arm]
            versus = lambda row, c=cell, a=arm, b=flat: noise(row["plans"][c][a]) / noise(row["plans"][b]["mean"])
            rows.append(
                [
                    f"{game}, {plan}, {g}",
                    label,
                    shown(seeds, of(lambda f: f["own_scale"])) if own else "",
                    shown(seeds, of(lambda f: across(f, "own_bias")), 4) if own else "",
                    shown(seeds, of(across), 4),
                    shown(seeds, of(noise), 0),
                    ratio(seeds, versus) if (cell, arm) != (flat, "mean") else "1",
                    shown(seeds, of(lambda f: f["cosine"])),
                ]
            )
    names = ["game, plan, G", "advantage", "scale ÷ derived", "across own aim", "across the gradient", "noise, tokens"]
    return table([*names, "÷ flat of A, same G", "cosine at 256 tokens"], rows)


def _top_k(seeds: Sequence[Row]) -> list[str]:
    rows = []
    for cell, arms in seeds[0]["plans"].items():
        for arm, label in (("mean", "A"), ("std", "A / std")):
            for k in (1, 2, 3):
                if (name := f"{arm} top {k}") not in arms:
                    continue
                of = lambda f, c=cell, a=name: lambda row: f(row["plans"][c][a])
                every = lambda row, c=cell, a=arm: row["plans"][c][a]
                change = lambda row, c=cell, a=name, every=every: row["plans"][c][a]["cosine"] - every(row)["cosine"]
                trained = lambda f: noise(f) * f["updated"] / f["tokens"]
                rows.append(
                    [
                        cell.replace("/", ", "),
                        label,
                        f"{k} of 3",
                        shown(seeds, of(across)),
                        shown(seeds, of(noise), 0),
                        shown(seeds, of(trained), 0),
                        shown(seeds, of(lambda f: f["cosine"])),
                        shown(seeds, change),
                    ]
                )
    names = ["game, plan, G", "advantage", "K", "across the gradient", "noise, sampled tokens", "noise, updated tokens"]
    return table([*names, "cosine", "less that of all groups"], rows)


def _equal(seeds: Sequence[Row]) -> list[str]:
    equal = seeds[0]["equal"]
    groups, chances = (list(dict.fromkeys(key.split()[i] for key in equal)) for i in (1, 0))
    law = lambda p, g: float(p) ** int(g) + (1 - float(p)) ** int(g)
    share = lambda p, g: shown(seeds, lambda row: row["equal"][f"{p} {g}"])
    rows = [[f"p = {p}", *(f"{share(p, g)} ({law(p, g):.3f})" for g in groups)] for p in chances]
    return table(["groups without a variance (p^G + (1 - p)^G)", *(f"G = {g}" for g in groups)], rows)


def _noisy(seeds: Sequence[Row]) -> list[str]:
    rows, sigmas = [], ("0.0", "0.2", "0.8")
    for name in seeds[0]["noise"]:
        cell, noisy = name.rsplit(" ", 1)
        of = lambda s, key, arm="mean", n=name: lambda row: row["noise"][n][s][arm][key]
        each = lambda key, arm="mean", of=of: [shown(seeds, of(s, key, arm), 2) for s in sigmas]
        turn = [f"{over(seeds, of(s, 'turn 1'))[0]:.2f}" for s in sigmas]
        join = ", ".join
        found = (join(each("spearman")), join(each("precision")), join(each("captured")), join(each("captured", "std")))
        rows.append([cell.replace("/", ", "), noisy, *found, join(turn)])
    names = ["game, plan, G", "noisy verifiers", "rank correlation at σ = 0, 0.2, 0.8", "of the best third", "captured"]
    return table([*names, "captured, A / std", "taken at turn 1"], rows)


def draw(seeds: Sequence[Row], path: Path) -> None:
    """Draw noise and cosine by plan and G, selection by K, and selection under noise. Bars are 95 % intervals over
    seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 4, figsize=(17, 4), constrained_layout=True)
    get = lambda cell, arm, of: over(seeds, lambda row: float(of(row["plans"][cell][arm])))
    plans, cosine, same = seeds[0]["plans"], lambda found: found["cosine"], lambda x: x
    for ax, of, back in ((axes[0], lambda found: np.log(noise(found)), np.exp), (axes[1], cosine, same)):
        for plan, colour in COLOURS.items():
            groups = [g for g in (2, 4, 8) if f"line/{plan}/{g}" in plans]
            if groups:
                y = np.array([get(f"line/{plan}/{g}", "mean", of) for g in groups])
                low, mid, high = (back(y @ (1, side)) for side in (-1, 0, 1))
                ax.errorbar(groups, mid, (mid - low, high - mid), fmt="o-", color=colour, label=plan, capsize=3)
        ax.set(xscale="log", xlabel="samples G (game line, A)", xticks=(2, 4, 8), xticklabels=(2, 4, 8))
        ax.minorticks_off()
    axes[0].set(yscale="log", ylabel="tokens at which noise = gradient")
    axes[1].set(ylabel="cosine of a batch to the exact gradient")
    for plan in ("node-wise continued", "node-wise local"):
        cell = f"line/{plan}/4"
        for arm, style in (("mean", "o-"), ("std", "s--")):
            y = np.array([get(cell, f"{arm} top {k}", cosine) for k in (1, 2, 3)])
            label = f"{plan}, {'A' if arm == 'mean' else 'A / std'}"
            axes[2].errorbar((1, 2, 3), y[:, 0], y[:, 1], fmt=style, color=COLOURS[plan], label=label, capsize=3)
    axes[2].set(xlabel="K of 3 groups of a task, by variance", ylabel="cosine", xticks=(1, 2, 3))
    for i, (name, sigmas) in enumerate(seeds[0]["noise"].items()):
        noise = [row["noise"][name] for row in seeds]
        captured = [student([row[s]["mean"]["captured"] for row in noise]) for s in sigmas]
        y, x = np.array(captured), [float(s) for s in sigmas]
        axes[3].errorbar(x, y[:, 0], y[:, 1], fmt="o-", color=f"C{i}", label=name.replace("/4", ","), capsize=3)
    axes[3].axhline(0, color="grey", lw=0.8)
    axes[3].set(
        xlabel="noise σ of one verifier or all (payoffs: 0.29)",
        ylabel="worth captured: 0 random, 1 oracle",
    )
    for ax in axes:
        ax.legend(fontsize=7)
        ax.spines[["top", "right"]].set_visible(False)
    fig.savefig(path, dpi=110)
    plt.close(fig)
