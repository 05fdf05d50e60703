"""The page of failures names tests that exist, and says what the command writes."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from experiments import reliability

ROOT = Path(__file__).parents[2]
ROWS = [row for rows in reliability.PARTS.values() for row in rows]


@functools.cache
def functions(file):
    """Names of the tests of a file."""
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_rows_are_numbered_and_have_a_test_or_a_reason():
    assert [row.number for row in ROWS] == list(range(1, 66))
    for row in ROWS:
        assert bool(row.tests) != bool(row.reason) and len(set(row.tests)) == len(row.tests), row.number
        assert row.verdict in (reliability.HOLDS, reliability.PART, reliability.NOT), row.number
        assert row.verdict != reliability.NOT or row.reason, row.number


def test_every_test_of_a_row_exists():
    for row in ROWS:
        for node in row.tests:
            file, _, name = node.partition("::")
            assert (ROOT / "tests" / file).is_file() and name in functions(file), node


def test_rows_are_written_in_short_sentences():
    for row in ROWS:
        for sentence in re.split(r"(?<=\.)\s", f"{row.scenario} {row.happens} {row.reason}"):
            assert len(sentence.split()) <= 25, sentence


def test_the_page_in_the_repository_is_what_the_command_writes():
    assert (ROOT / "docs/reliability.md").read_text() == reliability.page()
