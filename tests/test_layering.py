"""A module imports only from lower layers, recipes import no recipe, and nothing imports an experiment."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    0: ["text", "types", "_version", "kernels"],
    1: [
        "config",
        "advantages",
        "selection",
        "losses",
        "sampling",
        "memory",
        "lora",
        "tokenizer",
        "plans",
        "credit",
        "past",
        "sandbox",
        "sharding",
        "meshes",
        "optimizers",
        "deadlines",
        "meeting",
        "processes",
    ],
    2: ["qwen", "invariant", "tabular", "generate", "envs", "data"],
    3: [
        "rollout",
        "rollout_host",
        "speakers",
        "prefixes",
        "host_tables",
        "workers",
        "train",
        "packing",
        "checkpoint",
        "offline",
        "weights",
        "weight_files",
        "metrics",
        "workdir",
        "report",
        "value",
        "complexity",
        "costs",
    ],
    4: ["team", "arena"],
    5: ["workload", "stages", "diagnose", "phases", "loop", "compiled"],
    6: ["recipes"],
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names}


def room(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return "kernels" if relative.parts[0] == "kernels" else relative.with_suffix("").parts[1]


def imported(path: Path) -> set[str]:
    """Full names of what a file imports from this project, function-level imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("jaxmarl_llm", "experiments", "tests", "kernels")}


FILES = sorted([*ROOT.glob("jaxmarl_llm/**/*.py"), *ROOT.glob("kernels/*.py")])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_from_lower_layers(path):
    here = room(path)
    if here == "__init__":
        assert imported(path) <= {"jaxmarl_llm._version", "jaxmarl_llm._version.__version__"}
        return
    for name in imported(path):
        parts = name.split(".")
        assert parts[0] == "jaxmarl_llm", f"{path} imports {name}"
        if len(parts) < 2 or parts[1] in ("__version__",):
            continue
        if parts[1] == here and here in ("kernels", "envs", "data"):
            continue
        low = LAYER[parts[1]] < LAYER[here]
        same = LAYER[parts[1]] == LAYER[here] and here != "recipes"
        assert low or same, f"{path} (layer {LAYER[here]}) imports {name} (layer {LAYER[parts[1]]})"


def test_layers_have_no_cycle_inside():
    """Modules of one layer may use each other, in one direction."""
    graph = {p: {n.split(".")[1] for n in imported(p) if n.count(".")} for p in FILES}
    rooms: dict[str, set[str]] = {}
    for path, names in graph.items():
        rooms.setdefault(room(path), set()).update(names - {room(path)})
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join((*trail, name))}"
        if name in done:
            return
        for other in rooms.get(name, ()):
            visit(other, (*trail, name))
        done.add(name)

    for name in rooms:
        visit(name, ())


def test_every_module_has_a_layer():
    assert {room(p) for p in FILES} - {"__init__"} <= set(LAYER)


def test_recipes_are_short_and_import_no_recipe():
    for path in ROOT.glob("jaxmarl_llm/recipes/*.py"):
        assert len(path.read_text().splitlines()) <= 250, f"{path} is longer than a recipe may be"
        assert not [n for n in imported(path) if n.startswith("jaxmarl_llm.recipes")], path
