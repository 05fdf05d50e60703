"""The pictures of docs/viewer.md, taken in Chromium from a run that `make demo` made:

python -m experiments.viewer.pictures --run=runs/demo [--step=171] [--out=docs/pictures]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from experiments.viewer.browser import Browser
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.viewer.data import open_run, task_rows
from jaxmarl_llm.viewer.page import write_page


def twice(files: Mapping[int, Path]) -> str:
    """Place that compares the task whose reward changed most between two steps; two first tasks if none is there twice.

    Args:
        files: Number and file of each step.
    """
    seen: dict[int, list[tuple[float, int, int]]] = {}
    for step, path in files.items():
        for row in task_rows(rollouts.read_file(path)):
            seen.setdefault(row["number"], []).append((row["reward"] or 0.0, step, row["task"]))
    pairs = [(found[0], found[-1]) for found in seen.values() if len(found) > 1]
    fallback = (0.0, min(files), 0), (0.0, max(files), 0)
    one, two = max(pairs, key=lambda pair: abs(pair[1][0] - pair[0][0]), default=fallback)
    return f"view=compare&run=0&step={one[1]}&task={one[2]}&run2=0&step2={two[1]}&task2={two[2]}"


def places(rollout: rollouts.Rollout, compared: str) -> dict[str, tuple[str, tuple[int, int]]]:
    """Picture -> place in the page, and size of the page: of the completion that was farthest from its group.

    Args:
        rollout: The step of the pictures.
        compared: Place of the comparison.
    """
    known = [step for step in rollout.steps if step.advantage is not None]
    if not known:
        raise ConfigError(f"{rollout.path}: no completion has an advantage")
    best = max(known, key=lambda step: abs(step.advantage or 0))
    node = next(node for node in rollout.nodes if node.node == best.node)
    at = f"run=0&step={rollout.header.step}&task={node.task}"
    return {
        "tree": (at, (900, 940)),
        "group": (f"{at}&node={node.node}", (1240, 560)),
        "transcript": (f"{at}&node={node.node}&sample={best.step}", (1240, 1000)),
        "memory": ("run=0&view=memory", (1100, 700)),
        "compare": (compared, (1240, 380)),
    }


def main(given: Any) -> None:
    """Take the pictures. ``given``: the parsed arguments."""
    run = open_run(given.run)
    files = rollouts.files(given.run)
    compared = "view=compare&run=0" if rollouts.by_split(given.run)[rollouts.HELD_OUT] else twice(files)
    step = list(files)[min(3, len(files) - 1)] if given.step is None else given.step
    with tempfile.TemporaryDirectory() as folder, Browser() as tab:
        page = Path(folder) / "view.html"
        write_page([run], page, 64)
        for name, (place, size) in places(rollouts.read_file(files[step]), compared).items():
            tab.resize(*size)
            tab.open(page, place)
            tab.js("document.activeElement.blur()")
            tab.settle()
            tab.picture(path := given.out / f"viewer_{name}.png")
            Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
        assert tab.problems == [], tab.problems


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m experiments.viewer.pictures")
    parser.add_argument("--run", required=True)
    parser.add_argument("--step", type=int)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    main(parser.parse_args())
