"""The notebooks: their form, their links, and the sizes that two of them promise. `make notebooks` runs them."""

import json
import re
import tempfile
from pathlib import Path

import pytest

from experiments.notebooks import FIGURE, differences, printed
from tests.docs.test_prose import long
from tests.test_layering import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 400_000
# Notebook -> tag of its cells, and the most lines of code in them.
MOST = {"04_your_own_task": ("task", 20), "05_the_loop_by_hand": ("loop", 60)}
INSTALL = """\
import importlib.util
from glob import glob

# In a hosted notebook upload the wheel first. `pip wheel --no-deps .` in a checkout makes it.
package = (glob("jaxmarl_llm-*.whl") + ["jaxmarl_llm"])[0]
if importlib.util.find_spec("jaxmarl_llm") is None:
    %pip install -q {package}"""


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def source(cell: dict) -> str:
    return "".join(cell["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_form(path):
    """Outputs are stored, as `python -m experiments.notebooks --store` writes them: small, without times or paths."""
    code = cells(path, "code")
    assert json.loads(path.read_text())["metadata"]["kernelspec"]["name"] == "python3"
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shown = [text for cell in code for text in printed(cell)]
    assert shown and path.stat().st_size < MOST_BYTES and not any(tempfile.gettempdir() in text for text in shown)
    assert path.stem.startswith("00") or FIGURE in shown
    assert source(code[0]) == INSTALL
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


def notebook(*shown, tags=()):
    outputs = [{"output_type": "stream", "name": "stdout", "text": text} for text in shown]
    return {"cells": [{"cell_type": "code", "metadata": {"tags": list(tags)}, "source": "", "outputs": outputs}]}


def test_an_output_that_differs_is_found():
    picture = {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "<Figure size 1>"}}
    other = {"output_type": "display_data", "data": {"image/png": "BBBB", "text/plain": "<Figure size 2>"}}
    drawn, again, none = notebook(), notebook(), notebook()
    drawn["cells"][0]["outputs"], again["cells"][0]["outputs"] = [picture], [other]
    assert differences(notebook("a"), notebook("a")) == differences(drawn, again) == []
    assert differences(notebook("a"), notebook("b")) == ["code cell 0: ['a'] is now ['b']"]
    assert len(differences(drawn, none)) == len(differences(notebook("a"), notebook("a", "b"))) == 1
    assert differences(notebook("ab"), notebook("a", "b")) == []
    assert differences(notebook("1 s"), notebook("2 s", tags=["varies"])) == []
