"""The notebooks: their form, their links, and the sizes that two of them promise. `make notebooks` runs them."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.test_prose import long
from tests.test_layering import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Notebook -> tag of its cells, and the most lines of code in them.
MOST = {"04_your_own_task": ("task", 20), "05_the_loop_by_hand": ("loop", 60)}


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_form(path):
    """Outputs are not stored, because figures and times differ between machines."""
    code = cells(path, "code")
    assert json.loads(path.read_text())["metadata"]["kernelspec"]["name"] == "python3"
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert source(code[0]).startswith("# In a hosted notebook: %pip install -q jaxmarl_llm\n")
    assert source(cells(path, "markdown")[0]).startswith("# ")
    assert [line for cell in cells(path, "markdown") for line in long(source(cell))] == []


def test_the_readme_links_every_notebook():
    linked = re.findall(r"\]\(notebooks/([^)]+)\.ipynb\)", (ROOT / "README.md").read_text())
    assert len(NOTEBOOKS) > 5 and sorted(linked) == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("name", MOST)
def test_lines_of_code(name):
    tag, most = MOST[name]
    tagged = [c for c in cells(ROOT / f"notebooks/{name}.ipynb", "code") if tag in c["metadata"].get("tags", ())]
    lines = [line for cell in tagged for line in source(cell).splitlines() if line.strip()]
    assert most / 2 < len(lines) <= most
