"""Mutations: each is of source that is there once, and the command tells a test that fails from one that does not."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.studies import mutations
from experiments.studies.mutations import MUTATIONS, Mutation
from jaxmarl_llm.errors import ConfigError
from tests.runs.test_drivers import CASES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_is_of_source_that_is_there_once(mutation):
    source = (ROOT / mutation.file).read_text()
    assert source.count(mutation.before) == 1
    after = source.replace(mutation.before, mutation.after)
    assert ast.dump(ast.parse(after)) != ast.dump(ast.parse(source))


def test_the_tests_of_mutations_exist():
    text = (ROOT / mutations.TESTS).read_text()
    for mutation in MUTATIONS:
        name, _, case = mutation.test.partition("[")
        assert f"def {name}(" in text and (not case or case[:-1] in CASES)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of one function and one test."""
    for name, text in {
        "jaxmarl_llm/sums.py": "def add(a, b):\n    return a + b\n",
        "tests/test_sums.py": "from jaxmarl_llm.sums import add\ndef test_add():\n    assert add(2, 2) == 4, 'sum'\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir()
        path.write_text(text)
    monkeypatch.setattr(mutations, "TESTS", "tests/test_sums.py")
    monkeypatch.setattr(mutations, "__file__", str(tmp_path / "experiments/studies/mutations.py"))
    return tmp_path


@pytest.mark.parametrize(
    ("after", "code", "shown"),
    [
        ("a - b", 0, "| failed: 0 == 4 |"),
        ("a * b", 1, "| passed |"),
        ("a + c", 1, "| exit code 1: "),  # fails otherwise than in an assertion
    ],
)
def test_a_mutation_has_to_fail_an_assertion(checkout, monkeypatch, capsys, after, code, shown):
    mutation = Mutation("sums", "jaxmarl_llm/sums.py", "a + b", after, "test_add")
    monkeypatch.setattr(mutations, "MUTATIONS", (mutation,))
    assert mutations.main(SimpleNamespace(only="")) == code
    out = capsys.readouterr().out
    assert "Without a mutation the tests passed." in out and shown in out
    assert "a + b" in (checkout / mutation.file).read_text()  # the checkout itself stays as it is


def test_bytecode_of_the_source_before_is_not_used(checkout, monkeypatch):
    """A mutation of equal size, written in the same second as what was there, is what runs."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    path, test = checkout / "jaxmarl_llm/sums.py", ["tests/test_sums.py::test_add"]
    assert mutations.outcome(checkout, test) == "passed"
    assert not list(checkout.rglob("jaxmarl_llm/**/*.pyc"))
    stamp = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("a + b", "a - b"))
    os.utime(path, ns=(stamp, stamp))
    assert mutations.outcome(checkout, test) == "failed: 0 == 4"


def test_tests_that_fail_without_a_mutation_are_no_proof(checkout, monkeypatch, capsys):
    (checkout / "jaxmarl_llm/sums.py").write_text("def add(a, b):\n    return a + b + 1\n")
    monkeypatch.setattr(mutations, "MUTATIONS", (Mutation("m", "jaxmarl_llm/sums.py", "+ 1", "+ 2", "test_add"),))
    assert mutations.main(SimpleNamespace(only="")) == 1
    assert "Without a mutation the tests failed: 5 == 4." in capsys.readouterr().out


def test_source_that_is_not_there_once_is_one_line(checkout):
    mutation = Mutation("m", "jaxmarl_llm/sums.py", "b", "c", "test_add")
    with pytest.raises(ConfigError, match=r"sums\.py: expected 'b' once, and it is there 2 times"):
        with mutations.mutated(checkout, mutation):
            pass
