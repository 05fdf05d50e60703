"""The page beside other libraries: what our column names exists, and each phrase about another one has a source."""

import re

import pytest

from jaxmarl_llm.cli.main import COMMANDS
from tests.test_layering import ROOT

PAGE = (ROOT / "docs/peers.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
TABLE = [row for row in ROWS if len(row) == 9]
LIBRARIES, BODY = TABLE[0][2:], [row for row in TABLE[1:] if not row[0].startswith("---")]
SOURCES = {
    part.partition("\n")[0]: dict(re.findall(r"^- ([^:]+): (.+)$", part, re.MULTILINE))
    for part in PAGE.partition("\n## Sources\n")[2].split("\n### ")[1:]
}
SOURCE = re.compile(r"\[[^\]]+\]\(https://github\.com/[\w.-]+/[\w.-]+/(?:blob|tree)/[0-9a-f]{40}/[\w./-]+\)")


def named(cell: str) -> tuple[list[str], list[str]]:
    """What a cell of our column names, and which of these do not exist."""
    links = re.findall(r"\]\(([^)]+)\)", cell)
    code = re.findall(r"`([^`]+)`", cell)
    commands = [found for text in code if (found := re.match(r"jaxmarl-llm (\w+)((?: --\w+)*)$", text))]
    targets = [found[1] for text in code if (found := re.match(r"make (\w+)$", text))]
    files = [text for text in code if re.match(r"[\w.]+/", text)]
    absent = [link for link in links if not (ROOT / "docs" / link).is_file()]
    for command in commands:
        source = ROOT / f"jaxmarl_llm/cli/{command[1]}.py"
        known = command[1] in COMMANDS and source.is_file()
        flags = command[2].split() if known else []
        absent += [] if known else [command[0]]
        absent += [flag for flag in flags if f'"{flag.removeprefix("--")}"' not in source.read_text()]
    absent += [target for target in targets if f"\n{target}:" not in (ROOT / "Makefile").read_text()]
    for text in files:
        file, _, test = text.partition("::")
        fine = (ROOT / file).is_file() and (not test or f"def {test}(" in (ROOT / file).read_text())
        absent += [] if fine else [text]
    return [*links, *(command[0] for command in commands), *targets, *files], absent


def test_the_table_is_whole():
    assert LIBRARIES == ["TRL", "verl", "Tunix", "NeMo-RL", "CoMLRL", "PettingLLMs", "verifiers/prime-rl"]
    assert len(BODY) == 19 and len({row[0] for row in BODY}) == 19
    assert list(SOURCES) == LIBRARIES


@pytest.mark.parametrize("row", BODY, ids=lambda row: row[0])
def test_our_column_names_what_exists(row):
    mentioned, absent = named(row[1])
    assert mentioned and not absent, f"{row[0]}: {row[1]}: names {mentioned}, of which these do not exist: {absent}"


@pytest.mark.parametrize(
    "cell, absent",
    [
        ("[a](no_page.md)", "no_page.md"),
        ("`jaxmarl-llm trian`", "jaxmarl-llm trian"),
        ("`jaxmarl-llm export --adaptors`", "--adaptors"),
        ("`make dmeo`", "dmeo"),
        ("`docker/Dockerfile.amd`", "docker/Dockerfile.amd"),
        ("`tests/runs/test_loop.py::test_nothing`", "tests/runs/test_loop.py::test_nothing"),
    ],
)
def test_what_does_not_exist_is_found(cell, absent):
    assert named(cell)[1] == [absent]


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_phrase_about_another_library_has_a_source(library):
    """A phrase stands for files at a commit; `not found` alone stands for none."""
    phrases = {row[0]: row[2 + LIBRARIES.index(library)] for row in BODY}
    assert set(SOURCES[library]) == {name for name, phrase in phrases.items() if phrase != "not found"}
    for name, links in SOURCES[library].items():
        assert SOURCE.sub("", links).strip(", ") == "", f"{library}, {name}: {links}"
