"""What differs between the workdirs of two runs that should be equal, and what a killed run left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from jaxmarl_llm.telemetry.metrics_file import read_metrics

TIMES = ("time/", "speed/")
FOLDERS = ("checkpoints", "best")
WHOLE = ("config.json", "episodes.md", "evaluations.jsonl", "data/*", "rollouts/*")  # files that are equal to the byte
# metrics.jsonl.old is none: a run that was killed before its first checkpoint starts anew, and keeps it.
LEFT_OVER = re.compile(r"\.orbax-checkpoint-tmp|^run\.lock|^corrupt$|\.tmp$")


def restored(step: Path) -> Any:
    """The arrays of a checkpoint as they are on disk, without the checks of `Checkpointer`. step: its folder."""
    import jax
    import orbax.checkpoint as ocp

    reader = ocp.PyTreeCheckpointer()
    tree = reader.metadata(step / "state").item_metadata.tree
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    found = reader.restore(step / "state", restore_args=plain)
    reader.close()
    return found


def arrays(step: Path) -> dict[str, np.ndarray]:
    """`restored` by path."""
    import jax

    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(restored(step))}


def metrics(workdir: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without times."""
    rows = read_metrics(workdir, allow_empty=True)
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


def rollouts(workdir: Path) -> dict[str, set[str]]:
    """Different lines of each file of rollouts. A killed run plays some rollouts again, which gives the same lines."""
    return {file.stem: set(file.read_text().splitlines()) for file in sorted(workdir.glob("rollouts*.txt"))}


def differences(expected: Path, got: Path) -> list[str]:
    """Differences of ``got`` from ``expected``, both workdirs; empty if there is none."""
    return [*_checkpoints(expected, got), *_metrics(expected, got), *_rollouts(expected, got), *_files(expected, got)]


def _is_step(folder: Path) -> bool:
    return folder.name.isdigit()


def _number(folder: Path) -> int:
    return int(folder.name)


def _checkpoints(expected: Path, got: Path) -> list[str]:
    found = []
    for folder in FOLDERS:
        last = [sorted(filter(_is_step, (path / folder).glob("*")), key=_number)[-1:] for path in (expected, got)]
        names = [[step.name for step in steps] for steps in last]
        if names[0] != names[1]:
            found.append(f"{folder}: newest step {names[1]}, expected {names[0]}")
            continue
        for a, b in zip(*last, strict=True):
            ours, theirs = arrays(a), arrays(b)
            if ours.keys() != theirs.keys():
                found.append(f"{folder}/{b.name}: other arrays: {sorted(ours.keys() ^ theirs.keys())[:3]}")
                continue
            for path, array in ours.items():
                other = theirs[path]
                if (array.dtype, array.shape, array.tobytes()) != (other.dtype, other.shape, other.tobytes()):
                    found.append(f"{folder}/{b.name}: {path} differs")
    return found


def _metrics(expected: Path, got: Path) -> list[str]:
    rows, others = metrics(expected), metrics(got)
    steps = [row["step"] for row in others]
    if steps != list(range(1, len(rows) + 1)):
        return [f"metrics.jsonl: steps {steps}, expected 1 to {len(rows)} once each"]
    found = []
    for row, other in zip(rows, others, strict=True):
        # Compared as text: a float is written with all its digits.
        wrong = [k for k in sorted(row.keys() | other.keys()) if json.dumps(row.get(k)) != json.dumps(other.get(k))]
        found += [f"metrics.jsonl: step {row['step']}: {key} differs" for key in wrong[:2]]
    return found


def _rollouts(expected: Path, got: Path) -> list[str]:
    ours, theirs = rollouts(expected), rollouts(got)
    if ours.keys() != theirs.keys():
        return [f"rollouts of {sorted(theirs)}, expected of {sorted(ours)}"]
    found = []
    for name, own in ours.items():
        wrong = sorted(own ^ theirs[name], key=lambda line: int(line.split()[0]))
        found += [f"{name}: step {line.split()[0]}, {line.split()[1]}: differs" for line in wrong[:2]]
    return found


def _files(expected: Path, got: Path) -> list[str]:
    found = []
    for pattern in WHOLE:
        for file in sorted(expected.glob(pattern)):
            other = got / file.relative_to(expected)
            if file.is_file() and (not other.exists() or other.read_bytes() != file.read_bytes()):
                found.append(f"{other.relative_to(got)}: differs")
    names = [p.relative_to(got) for folder in (".", *FOLDERS, "data") for p in (got / folder).glob("*")]
    return found + [f"left over: {name}" for name in names if LEFT_OVER.search(name.name)]
