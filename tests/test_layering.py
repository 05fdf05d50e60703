"""A module imports only from its own room and from rooms before it; recipes import no recipe."""

import ast
from pathlib import Path

import pytest

from experiments.studies import house

ROOT = Path(__file__).parent.parent
# Modules and folders of jaxmarl_llm in the order of imports, which is the order to read them in.
ROOMS = (
    "_lazy",
    "_version",
    "errors",
    "json_files",
    "messages",
    "kernels",
    "types",
    "config",
    "sandbox",
    "data",
    "credit",
    "distributed",
    "generation",
    "storage",
    "telemetry",
    "viewer",
    "models",
    "agents",
    "envs",
    "rollout",
    "training",
    "costs",
    "runs",
    "recipes",
    "configs",
    "cli",
)
FACE = ("__init__", "__main__")  # what a user imports or runs: may import anything


def files() -> list[Path]:
    return house.files(ROOT)


def room(path: Path) -> str:
    return house.room(path, ROOT)


def imported(path: Path) -> set[str]:
    """Full names of what a file imports from this project, function-level imports included."""
    found = house.imported(ast.parse(path.read_text()))
    assert not any(name.startswith(".") for name in found), f"{path}: relative import"
    return {name for name in found if name.split(".")[0] in ("jaxmarl_llm", "experiments", "tests", "kernels")}


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_module_imports_only_from_rooms_before_its_own(path):
    here = room(path)
    for name in imported(path):
        parts = name.split(".")
        assert parts[0] == "jaxmarl_llm" and len(parts) > 1, f"{path} imports {name}"
        there = "_version" if parts[1] == "__version__" else parts[1]
        if here not in FACE:
            assert there == here or ROOMS.index(there) < ROOMS.index(here), f"{path} imports {name}, of a later room"


def test_every_module_is_in_a_room():
    assert {room(p) for p in files()} == {*ROOMS, *FACE}


def test_every_room_says_what_lives_there():
    for folder in [*ROOT.glob("jaxmarl_llm/*/"), ROOT / "kernels"]:
        if folder.name != "__pycache__":
            text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
            assert len(text.split()) >= 8, f"{folder}/__init__.py: expected two sentences about what lives here"


def test_no_circle_of_imports_within_a_room():
    """Modules of one room may use each other, in one direction."""
    names = {}
    for path in files():
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join(parts if parts[0] == "jaxmarl_llm" else ("jaxmarl_llm", *parts)).removesuffix(".__init__")] = (
            path
        )
    graph = {}
    for name, path in names.items():
        found = imported(path)
        graph[name] = {n if n in names else n.rpartition(".")[0] for n in found} & set(names) - {name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_recipes_are_short_and_import_no_recipe():
    for path in set(ROOT.glob("jaxmarl_llm/recipes/*.py")) - {ROOT / "jaxmarl_llm/recipes/__init__.py"}:
        assert len(path.read_text().splitlines()) <= 250, f"{path} is longer than a recipe may be"
        assert not [n for n in imported(path) if n.startswith("jaxmarl_llm.recipes")], path
