"""Public docstrings: every public function and class has one, and a function's docstring names its arguments.

An argument that several functions of a module share may be named in the docstring of the module, as ``argument``.
"""

import ast
import re

import pytest

from tests.test_layering import ROOT, files

# Arguments that mean the same everywhere.
EVERYWHERE = {
    "self": "the object itself",
    "cls": "the class itself",
}
BEGINS_BADLY = re.compile(r"(What|How|Where|Of|As|With|On|In|Is|Are|Does|Do|Can|Has|None|It|They|This|Those|These)\b")
# A docstring may refer to the arguments of another function.
SAME = re.compile(r"[Aa]rguments(?: and results)? are those of `([\w.]+)`")


def public(tree: ast.Module) -> list[ast.FunctionDef | ast.ClassDef]:
    nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return [n for n in nodes if not n.name.startswith("_")]


def arguments(function: ast.FunctionDef) -> list[str]:
    a = function.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return [x.arg for x in every if x.arg not in EVERYWHERE and not x.arg.startswith("_")]


def referred(text: str) -> set[str]:
    """Words of the docstring of the function whose arguments a docstring refers to, as the pattern `SAME` has it."""
    found: set[str] = set()
    for name in SAME.findall(text):
        named = DOCSTRINGS.get(name.rpartition(".")[2])
        assert named, f"a docstring refers to the arguments of `{name}`, which has none"
        found |= set(re.findall(r"\w+", named))
    return found


# Functions of several modules with one meaning, which is documented at one place.
DOCUMENTED_ONCE = {"get_config": "jaxmarl_llm/cli/config_flags.py"}


def variant(name: str, tree: ast.Module) -> bool:
    """Whether the docstring of a module of configurations lists a variant of this name."""
    return re.search(rf"^(\w+, )*{name}\b", ast.get_docstring(tree) or "", re.MULTILINE) is not None


def faults(source: str) -> list[str]:
    """Faults of one module, one line each."""
    tree = ast.parse(source)
    shared = set(re.findall(r"``(\w+)``", ast.get_docstring(tree) or ""))
    found = []
    for node in public(tree):
        text = ast.get_docstring(node)
        if text is None and (node.name in DOCUMENTED_ONCE or variant(node.name, tree)):
            continue
        if text is None:
            found.append(f"{node.lineno}: {node.name} has no docstring")
            continue
        if BEGINS_BADLY.match(text):
            found.append(f"{node.lineno}: {node.name} begins with {text.split()[0]!r}, not with a verb or a noun")
        if isinstance(node, ast.FunctionDef):
            words = shared | set(re.findall(r"\w+", text)) | referred(text)
            missing = [name for name in arguments(node) if name not in words]
            if missing:
                found.append(f"{node.lineno}: {node.name} does not name {', '.join(missing)}")
    return found


DOCSTRINGS: dict[str, str] = {}
for _file in files():
    for _node in public(ast.parse(_file.read_text())):
        DOCSTRINGS[_node.name] = DOCSTRINGS.get(_node.name, "") + (ast.get_docstring(_node) or "")


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_public_docstrings_name_every_argument(path):
    assert faults(path.read_text()) == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("def f(): pass", "no docstring"),
        ("class C: pass", "no docstring"),
        ("def f(a, *, b):\n    'Apply ``a``.'", "name b"),
        ("def f(a, **more):\n    'Apply ``a``.'", "name more"),
        ("'Module about a.'\ndef f(a):\n    'Apply it.'", "name a"),
        ("class C:\n    'What it holds.'", "begins with 'What'"),
    ],
)
def test_a_fault_is_found(source, fault):
    (found,) = faults(source)
    assert fault in found


@pytest.mark.parametrize(
    "source",
    [
        "def _f(a): pass",
        "def f(a, *, b):\n    'Apply ``a`` to b.'",
        "'Module. ``a`` is shared.'\ndef f(a):\n    'Apply.'",
        "def f(q, k):\n    'Apply. Arguments are those of `tree_attention`.'",
    ],
)
def test_no_fault_is_found(source):
    assert faults(source) == []
