"""Table and figure of docs/pods.md, from the rows of `experiments.tpu.plan_pod`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experiments.studies.common import figure_beside, replace_section
from jaxmarl_llm.costs import hlo

BEGIN, END = "<!-- aot: begin -->", "<!-- aot: end -->"
HEAD = (
    "| team | slice | mesh d x f x t (blocks x parts) | parameters | optimizer | rollout copy | cache | peak rollout | "
    "peak update | sent, one decode step | sent, one micro-batch | step | bound by |"
)
OLD = " \u2020"  # behind figures of an older counter
OLD_NOTE = (
    "\u2020 An older version of the counter made this row. Its memory is the compiler's and stands. Its FLOPs, bytes,\n"
    "bytes sent and seconds are not current."
)
RATIOS_HEAD = (
    "| team | slice | useful / compiled FLOPs: prefill | decode | micro-batch | GB of a decoded token | "
    "weights + cache | ratio | decode steps x ms | rows filled |"
)


def is_old(row: dict[str, Any]) -> bool:
    """Whether another version of the counter made the row."""
    return row.get("counter") != hlo.VERSION


def sent(stage: dict[str, Any]) -> float:
    return float(sum(stage["collectives"].values()))


def team(row: dict[str, Any]) -> str:
    return f"{row['config']}, {row['models']} x {row['parameters'] / 1e9:.1f}B {row['share']}"


def line(row: dict[str, Any]) -> str:
    """One row of the table, in GB and seconds. It says what was not compiled, what does not fit, and what is old."""
    stages, held, peaks = row["stages"], row["held"], row["peaks"]
    gb = lambda x: f"{x / 1e9:.2f}" if x < 1e10 else f"{x / 1e9:.1f}"
    peak = lambda name: gb(peaks[name]) if name in peaks else "-"
    moved = lambda name: gb(sent(stages[name])) if name in stages and stages[name]["compiled"] else "-"
    update = "apply" if peaks.get("apply", 0) > peaks.get("accumulate", 0) else "accumulate"
    step = row.get("step")
    layout = f" ({row['rollout'][0]} x {row['rollout'][1]})" if row.get("rollout") else ""
    cells = [
        team(row) + (OLD if is_old(row) else ""),
        f"{row['topology']} ({row['capacity'] / 1e9:.0f} GB)",
        " x ".join(map(str, row["mesh"][:3])) + "".join(f" x context {c}" for c in row["mesh"][3:]) + layout,
        *(gb(held[k]) for k in ("parameters", "optimizer", "rollout copy")),
        gb(row["cache"]),
        peak("prefill"),
        peak(update),
        moved("decode"),
        moved("accumulate"),
        f"{step['total']:.0f} s" if step else "does not fit" if not row["fits"] else "-",
        step["bottleneck"] if step else row["advice"],
    ]
    return "| " + " | ".join(cells) + " |"


def table(rows: list[dict[str, Any]]) -> str:
    """Table of the rows of whole teams, without those of weak scaling."""
    plain = [r for r in rows if r["rows"] is None]
    rule = "|" + " --- |" * HEAD.count(" | ") + " --- |"
    return "\n".join([HEAD, rule, *map(line, plain)])


def ratios_table(rows: list[dict[str, Any]]) -> str:
    """Table of what the programs of whole teams do beside what they need. Rows of an older counter are left out."""
    lines = [RATIOS_HEAD, "|" + " --- |" * RATIOS_HEAD.count(" | ") + " --- |"]
    for row in rows:
        if row["rows"] is not None or is_old(row) or "ratios" not in row:
            continue
        found, step = row["ratios"], row.get("step")
        programs = ("prefill", "decode", "accumulate")
        useful = [f"{found['useful'][k]:.2f}" if k in found["useful"] else "-" for k in programs]
        token, least = found.get("token_bytes"), found.get("least_token_bytes")
        read = [f"{token / 1e9:.2f}", f"{least / 1e9:.2f}", f"{token / least:.2f}"] if token else ["-"] * 3
        times = f"{step['decode_steps']:,.0f} x {1e3 * step['decode_step_seconds']:.2f}" if step else "-"
        filled = f"{step['filled']:.2f}" if step else "-"
        lines.append("| " + " | ".join([team(row), row["topology"], *useful, *read, times, filled]) + " |")
    return "\n".join(lines)


def weak(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of weak scaling by number of chips: one row of nodes for each part, so the work grows with the slice."""
    return sorted((r for r in rows if r["rows"] is not None), key=lambda r: r["chips"])


def weak_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| chips | mesh | TFLOP decode | TFLOP update | GB peak rollout | GB peak update | GB sent decode | "
        "GB sent update |",
        "|" + " --- |" * 8,
    ]
    for r in weak(rows):
        s, p = r["stages"], r["peaks"]
        flops = (s["decode"]["flops"] / 1e12, s["accumulate"]["flops"] / 1e12)
        memory = (p["prefill"] / 1e9, p["accumulate"] / 1e9, sent(s["decode"]) / 1e9, sent(s["accumulate"]) / 1e9)
        cells = [
            str(r["chips"]) + (OLD if is_old(r) else ""),
            " x ".join(map(str, r["mesh"])),
            *(f"{x:.4g}" for x in (*flops, *memory)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw weak scaling: FLOPs, memory and collective bytes of a chip against chips, relative to the smallest slice."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = weak(rows)
    chips, old = [r["chips"] for r in found], OLD if any(map(is_old, found)) else ""
    series = {
        "FLOPs, update": [r["stages"]["accumulate"]["flops"] for r in found],
        "FLOPs, decode": [r["stages"]["decode"]["flops"] for r in found],
        "peak memory, update": [r["peaks"]["accumulate"] for r in found],
        "peak memory, rollout": [r["peaks"]["prefill"] for r in found],
        "bytes sent, update": [sent(r["stages"]["accumulate"]) for r in found],
    }
    drawn, axes = plt.subplots(figsize=(7, 4))
    for name, values in series.items():
        axes.plot(chips, [v / values[0] for v in values], marker="o", label=name, ls="--" if "sent" in name else "-")
    axes.axhspan(0.9, 1.1, color="0.92")
    axes.set_xscale("log", base=2)
    axes.set_xticks(chips, [str(c) for c in chips])
    axes.set_ylim(0)
    axes.set_xlabel("chips")
    axes.set_ylabel(f"of a chip, relative to {chips[0]} chips")
    axes.set_title(f"Weak scaling, {found[0]['config']} on {found[0]['topology'].partition(':')[0]}{old}")
    axes.legend(fontsize=8)
    drawn.tight_layout()
    drawn.savefig(path, dpi=120)
    plt.close(drawn)


def write(rows: list[dict[str, Any]], doc: Path) -> None:
    """Replace the text between the marks of ``doc``; draw the figure in results/ beside it if there is weak scaling."""
    versions = sorted({f"jax {r['versions']['jax']}, libtpu {r['versions']['libtpu']}" for r in rows})
    dates = sorted({r["date"] for r in rows})
    parts = [f"{'; '.join(versions)}; compiled {' to '.join(sorted({dates[0], dates[-1]}))}.", table(rows)]
    parts += [OLD_NOTE] if any(map(is_old, rows)) else []
    parts += [ratios_table(rows)] if any("ratios" in r and not is_old(r) for r in rows) else []
    if weak(rows):
        path, link = figure_beside(doc)
        figure(rows, path)
        parts += [f"![weak scaling]({link})", weak_table(rows)]
    doc.write_text(replace_section(doc.read_text(), BEGIN, END, "\n" + "\n\n".join(parts) + "\n"))
