"""What ships with the package, by name: configurations, recipes and environments. Read from files, without imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
VARIANT = re.compile(r"([a-z0-9_]+(?:, [a-z0-9_]+)*)(?:  +(\S.*))?$")


def config_files() -> dict[str, Path]:
    """Name of each shipped configuration module -> its file."""
    return {path.stem: path for path in sorted((PACKAGE / "configs").glob("[!_]*.py"))}


def variants(file: Path) -> dict[str, str]:
    """Variant of a configuration file -> what the docstring of the file says of it.

    The docstring has a line ``Variants:``. Each entry begins at the margin, and its other lines are indented.
    """
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in docstring(file).partition("Variants:\n")[2].splitlines():
        if not line.startswith(" ") and (entry := VARIANT.match(line)):
            names = entry[1].split(", ")
            found |= {name: [entry[2] or ""] for name in names}
        elif line.startswith("     "):
            for name in names:
                found[name].append(line.strip())
        elif line.strip():
            names = []
    return {name: " ".join(" ".join(lines).split()) for name, lines in found.items()}


def recipes() -> dict[str, str]:
    """Name of each recipe -> the first line of its docstring."""
    files = sorted((PACKAGE / "recipes").glob("[!_]*.py"))
    return {path.stem: docstring(path).partition("\n")[0] for path in files}


def environments() -> dict[str, str]:
    """Name of each environment -> the first sentence of its docstring."""
    from jaxmarl_llm.envs.registry import MODULES

    files = {name: PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py") for name, module in MODULES.items()}
    return {name: first_sentence(docstring(file)) for name, file in files.items()}


def docstring(file: Path) -> str:
    """The docstring of a Python file; empty without one."""
    return ast.get_docstring(ast.parse(file.read_text())) or ""


def first_sentence(text: str) -> str:
    """First sentence of ``text``, on one line: up to a full stop at a word's end, an empty line, or a final colon."""
    return re.split(r"(?<=\w\w)\.(?:\s|$)|\n\n|:\n", text, maxsplit=1)[0].replace("\n", " ")


def config_list() -> str:
    """Every shipped configuration with its variants, for ``--list``."""
    lines = ["shipped configurations, as --config=NAME:variant:"]
    for name, file in config_files().items():
        lines += [f"  {f'{name}:{variant}':34} {text}" for variant, text in variants(file).items()]
    return "\n".join(lines)
