"""The pages of the documentation: their Python blocks run, their links and file names exist, every room has a page."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_layering import ROOMS, ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)")
FILE = re.compile(r"(?<![\w/.])(?:jaxmarl_llm|kernels|experiments|tests)/[\w/.-]+\.(?:py|sh|yaml|sbatch)\b")


def blocks(page: Path) -> str:
    """All Python blocks of a page as one program: a later block may use the names of an earlier one."""
    return "\n".join(BLOCK.findall(page.read_text()))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path):
    """In a process and a folder of their own; the process inherits the CPU and the compiler flags of the tests."""
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{blocks(page)}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    if page.name == "README.md":
        last = json.loads((tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()[-1])
        assert last["reward/payoff"] > 8  # of 10: the two agents learn to yield


def test_the_readme_has_an_example():
    assert blocks(ROOT / "README.md").count("fit(") == 1


def test_links_of_the_readme_lead_to_files():
    """`make docs` checks the links of the other pages."""
    found = [link for link in LINK.findall((ROOT / "README.md").read_text()) if "://" not in link]
    assert len(found) > 5 and not [link for link in found if not (ROOT / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_a_page_names_exist(page):
    named = set(FILE.findall(page.read_text())) - {"experiments/configs/FILE.py"}
    assert not sorted(name for name in named if not (ROOT / name).exists())


def test_every_room_has_a_page_in_the_api_reference():
    rooms = [room for room in ROOMS if not room.startswith("_")]
    pages = {page.stem: page.read_text() for page in (ROOT / "docs/api").glob("*.md")}
    assert set(pages) == {*rooms, "index"}
    for room in rooms:
        assert f"::: jaxmarl_llm.{room}\n" in pages[room] and f"]({room}.md)" in pages["index"]
        assert f"api/{room}.md" in (ROOT / "mkdocs.yml").read_text()
        assert f"`{room}`" in (ROOT / "docs/design.md").read_text()
