"""Counts of the house: modules, rooms, imports between rooms, long functions, classes and files.

    python -m experiments.studies.house [--root=FOLDER]

The counts are over ``jaxmarl_llm/`` and ``kernels/`` of a checkout. A room is a module or a folder directly in
``jaxmarl_llm/``, and ``kernels``. An arrow is a pair of rooms of which the first imports from the second. Lines of a
function are those from ``def`` to its end.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxmarl_llm.cli import arguments

LONG_FUNCTION, LONG_FILE = 80, 400  # lines


class Module(NamedTuple):
    """A module of the package.

    Attributes:
        room: Its room.
        lines: Its lines.
        tree: Its syntax.
    """

    room: str
    lines: int
    tree: ast.Module


def files(root: Path) -> list[Path]:
    """Every module of a checkout once: ``kernels/`` by its own name and not through the link in the package.

    Args:
        root: Folder of the checkout.
    """
    inside = (p for p in root.glob("jaxmarl_llm/**/*.py") if p.relative_to(root).parts[1] != "kernels")
    return sorted([*inside, *root.glob("kernels/**/*.py")])


def room(path: Path, root: Path) -> str:
    """Room of a module.

    Args:
        path: The module.
        root: Folder of the checkout.
    """
    parts = path.relative_to(root).with_suffix("").parts
    return "kernels" if parts[0] == "kernels" else parts[1]


def modules(root: Path) -> Iterator[Module]:
    """Modules of a checkout.

    Args:
        root: Folder of the checkout.
    """
    for path in files(root):
        text = path.read_text()
        yield Module(room(path, root), text.count("\n"), ast.parse(text))


def imported(tree: ast.Module) -> set[str]:
    """Full names that a module imports, inside functions too. A relative name begins with dots.

    Args:
        tree: Syntax of the module.
    """
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def rooms_of(names: set[str]) -> set[str]:
    """Rooms of full names.

    Args:
        names: As `imported` returns them.
    """
    return {name.split(".")[1] for name in names if name.startswith("jaxmarl_llm.")}


def counts(root: Path) -> dict[str, str]:
    """What is counted -> the count.

    Args:
        root: Folder of a checkout.
    """
    found = list(modules(root))
    faces = {"__init__", "__main__"}
    rooms = {module.room for module in found} - faces
    arrows = {
        (m.room, to) for m in found if m.room in rooms for to in rooms_of(imported(m.tree)) & rooms if to != m.room
    }
    functions: list[tuple[int, str]] = []
    classes: list[tuple[int, str]] = []
    for module in found:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((_lines(node), node.name))
            elif isinstance(node, ast.ClassDef):
                classes.append((_lines(node), node.name))
    lengths = [module.lines for module in found]
    long = sum(lines > LONG_FUNCTION for lines, _ in functions)
    over = sum(lines > LONG_FILE for lines in lengths)
    return {
        "modules directly in jaxmarl_llm/": str(len(list(root.glob("jaxmarl_llm/*.py")))),
        "rooms, arrows": f"{len(rooms)}, {len(arrows)}",
        f"functions longer than {LONG_FUNCTION} lines": f"{long} of {len(functions):,}",
        "ten longest functions, in lines": _longest(functions, 10),
        "longest classes, in lines": _longest(classes, 3),
        f"files above {LONG_FILE} lines": f"{over} of {len(found)} (at most {max(lengths)})",
    }


def _lines(node: Any) -> int:
    return node.end_lineno - node.lineno + 1


def _longest(sizes: list[tuple[int, str]], count: int) -> str:
    return ", ".join(f"`{name}` {lines}" for lines, name in sorted(sizes, reverse=True)[:count])


def main(given: Any) -> int:
    """Print a row for each count of the checkout ``given.root``."""
    print("| count | |\n| --- | --- |")
    for name, count in counts(Path(given.root)).items():
        print(f"| {name} | {count} |")
    return 0


if __name__ == "__main__":
    parser = arguments.Parser("house", __doc__)
    parser.add_argument("--root", default=".", help="folder of a checkout")
    arguments.run(parser, main)
