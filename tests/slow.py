"""Which tests are slow: those of tests/slow.txt, besides the ones that carry the mark themselves.

    python -m pytest ... --junitxml=build/tests.xml; python -m tests.slow build/tests.xml

rewrites the list from a measured run. `make test` leaves slow tests out, `make check` runs them.
"""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

LIST = Path(__file__).with_suffix(".txt")
SECONDS = 5.0  # set-up included; about half of it on faster cores


def listed() -> set[str]:
    """Node ids; one of a file or of a test with parameters stands for all that begin with it."""
    lines = (line.strip() for line in LIST.read_text().splitlines())
    return {line.split(None, 1)[1] for line in lines if line and not line.startswith("#")}


def is_slow(node: str, known: set[str]) -> bool:
    file, _, test = node.partition("::")
    return bool({node, f"{file}::{test.partition('[')[0]}", file} & known)


def measured(report: Path) -> dict[str, float]:
    """Seconds of every test of a JUnit report, by node id."""
    out = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.get("classname"):
            file = case.get("classname").replace(".", "/") + ".py"
            out[f"{file}::{case.get('name')}"] = float(case.get("time"))
    return out


def main(report: str) -> None:
    known, seconds = listed(), measured(Path(report))
    kept = [line for line in LIST.read_text().splitlines() if line.strip() and line.split(None, 1)[-1] not in seconds]
    slow = [f"{s:.0f} {node}" for node, s in seconds.items() if s >= SECONDS]
    rows = [line for line in kept if not line.startswith("#")] + slow
    rows.sort(key=lambda row: -float(row.split()[0]))
    LIST.write_text("\n".join([*(line for line in kept if line.startswith("#")), *rows]) + "\n")
    print(f"{len(slow)} slow tests of {len(seconds)}; {len(known)} were listed")


if __name__ == "__main__":
    main(sys.argv[1])
