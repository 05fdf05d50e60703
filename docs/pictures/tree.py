"""Draw docs/pictures/tree.png: the tree of one episode, sampled node by node.

    python docs/pictures/tree.py

Three turns with four samples each. The first sample of a node carries the base trajectory on, the others are played to
the end. Two groups are selected for the update.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

INK, MUTED, GROUP, CHOSEN = "#1f2328", "#8a929b", "#eef1f4", "#fdebd3"
ROLES = {"master": "#0072B2", "lookup": "#009E73"}
ORANGE = "#D55E00"
# (role, [(text of a sample, return)], selected). A base sample's return is the mean of the next group.
TURNS = (
    ("master", [("ask lookup", 0.6), ("ask lookup", 0.9), ("answer 7", 0.1), ("ask code", 0.3)], True),
    ("lookup", [("k = 12", 1.0), ("k = 5", 0.3), ("k = 12", 0.9), ("none", 0.2)], True),
    ("master", [("answer 12", 1.0), ("answer 12", 1.0), ("answer 12", 1.0), ("answer 12", 1.0)], False),
)
STEP, LANE, TOP = 5.2, 1.0, 3.5  # between turns, between samples, height of the base trajectory


def node(axes, x, y, role, turn):
    """A decision point: one role, one prompt."""
    axes.add_patch(
        FancyBboxPatch(
            (x - 0.75, y - 0.42), 1.5, 0.84, boxstyle="round,pad=0.02,rounding_size=0.15", fc=ROLES[role], ec="none"
        )
    )
    axes.text(x, y + 0.1, role, color="white", ha="center", va="center", fontsize=10.5, weight="bold")
    axes.text(x, y - 0.2, f"node, turn {turn}", color="white", ha="center", va="center", fontsize=7.5)


def sample(axes, x, y, text, value, base):
    """A step: one completion sampled at a node, with its return."""
    axes.add_patch(
        FancyBboxPatch(
            (x - 0.62, y - 0.27), 1.24, 0.54, boxstyle="round,pad=0.02,rounding_size=0.1",
            fc="white", ec=INK if base else MUTED, lw=1.6 if base else 0.9,
        )
    )  # fmt: skip
    axes.text(x, y + 0.06, text, ha="center", va="center", fontsize=8.5, color=INK)
    axes.text(x, y - 0.15, f"R = {value:.1f}", ha="center", va="center", fontsize=7, color=MUTED)


def line(axes, start, end, base):
    axes.plot(*zip(start, end), color=INK if base else MUTED, lw=1.8 if base else 1.0, zorder=0)


def draw(path: Path) -> None:
    figure, axes = plt.subplots(figsize=(11.5, 4.7))
    for turn, (role, samples, selected) in enumerate(TURNS):
        x, column = turn * STEP, turn * STEP + 2.25
        low = TOP - LANE * (len(samples) - 1)
        axes.add_patch(
            FancyBboxPatch(
                (column - 0.85, low - 0.45), 1.7, TOP - low + 0.9, boxstyle="round,pad=0.02,rounding_size=0.15",
                fc=CHOSEN if selected else GROUP, ec=ORANGE if selected else "none", lw=1.2, zorder=-2,
            )
        )  # fmt: skip
        spread = "large variance: selected" if selected else "variance 0: left out"
        axes.text(
            column, low - 0.72, f"group of G = 4\n{spread}", ha="center", va="top", fontsize=8.5,
            color=ORANGE if selected else MUTED,
        )  # fmt: skip
        node(axes, x, TOP, role, turn)
        for i, (text, value) in enumerate(samples):
            y = TOP - LANE * i
            line(axes, (x + 0.77, TOP), (column - 0.64, y), i == 0)
            sample(axes, column, y, text, value, i == 0)
            right = x + STEP - 0.77
            if turn == len(TURNS) - 1:
                continue
            if i == 0:
                line(axes, (column + 0.64, y), (right, y), True)
                continue
            line(axes, (column + 0.64, y), (column + 1.15, y), False)  # a continuation: played to the end, not trained
            axes.plot([column + 1.2, column + 1.34, column + 1.48], [y] * 3, ".", color=MUTED, ms=3)
    axes.text(-0.75, TOP + 1.0, "Node-wise sampling", fontsize=13, weight="bold", color=INK, va="center")
    axes.text(
        3.25, TOP + 1.0,
        "4 + 4 + 4 = 12 compared samples   (sampling every joint path: 4 x 4 x 4 = 64 leaves)",
        fontsize=10.5, color=INK, va="center",
    )  # fmt: skip
    axes.text(-0.75, 2.2, "thick:\nbase trajectory", fontsize=8.5, color=INK, va="top")
    axes.text(-0.75, 1.35, "thin:\nalternatives,\nplayed to the end", fontsize=8.5, color=MUTED, va="top")
    axes.text(
        -0.75, -0.95, "R of a base sample: mean of the group behind it (0.6 = mean of 1.0, 0.3, 0.9, 0.2).   "
        "A model without a selected group stays unchanged to the bit.", fontsize=9, color=INK, va="center",
    )  # fmt: skip
    axes.set_xlim(-0.95, 2 * STEP + 3.25)
    axes.set_ylim(-1.25, TOP + 1.35)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(path, dpi=130, bbox_inches="tight", facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    draw(Path(__file__).with_suffix(".png"))
