"""The page of rollouts at a given size: bytes, and times to write, to show and to scroll it.

    python -m experiments.bench.viewer [--nodes=10000] [--rounds=5]

One task with four completions at each prompt, in Chromium without a window and without a graphics card. The first
picture is there when the tree has been drawn. It counts from the start of the load. A frame is one scroll by 150 pixels
and the drawing behind it, in milliseconds of the page's own work.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.viewer.browser import Browser
from experiments.viewer.samples import tree_rows, written
from jaxmarl_llm.viewer.data import open_run
from jaxmarl_llm.viewer.page import write_page

DRAWN = "document.querySelectorAll('.treebox [data-step]').length"
# Each round: time from the start of the load to the frame after the tree is there.
PAINT = """new Promise((done) => { const look = () => document.querySelector('.treebox [data-step]')
  ? setTimeout(() => done(performance.now())) : requestAnimationFrame(look); look(); })"""
SCROLL = """(async () => { const box = document.querySelector('.treebox'), times = []; for (let i = 0; i < 200; i++) {
  const frame = await new Promise((done) => { box.scrollTop += 150; requestAnimationFrame(() => {
    const from = performance.now(); setTimeout(() => done(performance.now() - from)); }); });
  times.push(frame); } return times; })()"""


def main(given: Any) -> None:
    """Measure, and print one line for each figure. ``given``: the parsed arguments."""
    with tempfile.TemporaryDirectory() as name, Browser() as tab:
        run, page = open_run(written(Path(name), tree_rows(given.nodes))), Path(name) / "view.html"
        begin = time.perf_counter()
        write_page([run], page, 64)
        print(f"page: {page.stat().st_size / 1e6:.2f} MB, written in {time.perf_counter() - begin:.2f} s")
        paints, frames = [], []
        for _ in range(given.rounds):
            tab.call("Page.navigate", url="about:blank")
            tab.call("Page.navigate", url=f"{page.as_uri()}#run=0&step=31&task=0")
            tab.wait("document.readyState === 'complete'")
            paints.append(tab.js(PAINT))
            frames += tab.js(SCROLL)
        print(f"first picture: {statistics.median(paints):.0f} ms ({min(paints):.0f} to {max(paints):.0f})")
        frames.sort()
        print(
            f"frame: median {statistics.median(frames):.1f} ms, 99 of 100 within {frames[len(frames) * 99 // 100]:.1f}"
        )
        print(f"completions: {4 * given.nodes}, of which {tab.js(DRAWN)} are drawn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m experiments.bench.viewer")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args())
