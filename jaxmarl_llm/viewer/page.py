"""One page of HTML that needs neither network nor server: template, style, script, and the steps as compressed text.

Texts of models are only in the data. The index is JSON whose ``<`` is escaped; a step is gzip in base64, which has no
``<``. The page permits one script, by its hash, and no connection.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.resources
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.viewer import data
from jaxmarl_llm.viewer.data import Run, Step

# The scripts in the order of their use. They share one function scope.
SCRIPTS = (
    *("core", "model", "brush", "charts", "runs", "tasks", "step", "layout", "draw", "tree", "group"),
    *("tokens", "transcript", "sample", "task"),
    *("memory", "compare", "search", "main"),
)
MARK = "<!-- data -->"


def write_page(runs: Sequence[Run], out: Path, max_mb: float) -> list[list[Step]]:
    """Write a page with as many steps as fit. One step at a time and the page are in memory.

    Args:
        runs: The runs.
        out: The file. It is written under another name and then renamed.
        max_mb: MB of the steps in the page. The runs share it equally.

    Returns:
        Steps and evaluations of each run that the page holds.

    Raises:
        ConfigError: The newest step or evaluation of a run does not fit, a file is damaged, or ``out`` cannot be
            written.
    """
    room = max_mb * 1e6 / len(runs)
    chosen = [_fitting(run, room) for run in runs]
    held = [list(steps) for steps in chosen]
    head, tail = shell().split(MARK)
    partial = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "w", encoding="ascii", newline="\n") as file:
            file.write(head)
            file.write(f'<script type="application/json" id="index">{escaped(data.index(runs, held))}</script>\n')
            for r, steps in enumerate(chosen):
                for step, text in steps.items():
                    file.write(f'<script type="text/plain" data-step="{r}.{step}">{text}</script>\n')
            file.write(tail)
        os.replace(partial, out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return held


def _fitting(run: Run, room: float) -> dict[Step, str]:
    """Steps and evaluations of a run as text of the page. Evaluations take at most half of the ``room`` in bytes."""
    sizes = {step: path.stat().st_size for step, path in run.files().items()}
    evaluations: dict[Step, int] = {step: size for step, size in sizes.items() if isinstance(step, str)}
    steps = {step: size for step, size in sizes.items() if step not in evaluations}
    held = _evenly(run, evaluations, room / 2 if steps else room)
    return {**_evenly(run, steps, room - sum(map(len, held.values()))), **held}


def _evenly(run: Run, sizes: Mapping[Step, int], room: float) -> dict[Step, str]:
    """Steps of ``sizes`` as text of the page, evenly chosen so that they fit into ``room`` bytes, in their order."""
    steps = list(sizes)
    if not steps:
        return {}
    count, made = len(steps), {steps[-1]: _text(run, steps[-1])}
    growth = len(made[steps[-1]]) / sizes[steps[-1]]  # bytes in the page for each byte of a file: a first guess
    while count > 1 and growth * sum(sizes[s] for s in kept_steps(steps, count)) > room:
        count -= max(1, count // 50)
    while True:
        wanted = kept_steps(steps, count)
        made = {step: text for step, text in made.items() if step in wanted}
        total = sum(map(len, made.values()))
        for step in [step for step in reversed(wanted) if step not in made]:  # the newest first
            text = _text(run, step)
            total += len(text)
            if total > room:
                break
            made[step] = text
        if set(made) == set(wanted) and total <= room:
            return {step: made[step] for step in wanted}
        if count == 1:
            newest = steps[-1] if isinstance(steps[-1], str) else f"step {steps[-1]}"
            raise ConfigError(f"--max-mb: {newest} of {run.given} needs {total / 1e6:.2f} MB in the page")
        count = min(count - 1, max(1, int(count * room / max(total, 1))))


def _text(run: Run, step: Step) -> str:
    return base64.b64encode(data.read_step(run, step)).decode()


def kept_steps(steps: Sequence[Step], count: int) -> list[Step]:
    """``count`` of the ``steps``, evenly, with the first and the newest; one: the newest.

    Args:
        steps: Steps in order.
        count: How many are kept, from 1.
    """
    last = len(steps) - 1
    if count <= 1:
        return list(steps[-1:])
    return list(steps) if count > last else [steps[round(i * last / (count - 1))] for i in range(count)]


def escaped(value: Any) -> str:
    """``value`` as JSON of ASCII that cannot end its script element.

    Args:
        value: A value of JSON.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def live_page() -> bytes:
    """The page that a server sends: it asks for the index and for steps."""
    return shell().replace(MARK, "").encode()


@functools.cache
def shell() -> str:
    """The page with `MARK` where the data belongs."""
    folder = importlib.resources.files("jaxmarl_llm.viewer") / "assets"
    script = "".join(_script(folder))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = "".join(folder.joinpath(f"{name}.css").read_text("utf-8") for name in ("page", "views"))
    parts = {"style": style, "script": script, "digest": digest}
    text = folder.joinpath("page.html").read_text("utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    assert text.isascii() and text.count(MARK) == 1
    return text


def _script(folder: Any) -> Iterator[str]:
    """The one script of the page, in pieces."""
    yield '"use strict";(() => {\n'
    for name in SCRIPTS:
        yield folder.joinpath(f"{name}.js").read_text("utf-8")
    yield "})();\n"
