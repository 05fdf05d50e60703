"""Length of sentences: at most 25 words, on the pages of the documentation and in docstrings.

A sentence ends with ``.``, ``?`` or ``!`` before a space, and with its block. A block is a paragraph, an item of a list
or a quotation. Abbreviations of `SHORT` end no sentence. A colon or a semicolon ends none either.

A word is a part between spaces that has a letter or a digit. A piece of code between backticks is one word. Of a link
only the text counts. Left out are headings, tables, pictures, code blocks and parts that a command writes between two
marks. A block that begins with four spaces is code. The history in `docs/log.md` is left out too.

Docstrings are those of modules, classes and functions, private ones included. Comments are not read. In a docstring an
entry of a list of names begins a block too, for example an argument.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layering import ROOT, files

MOST = 25  # words
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "log.md")]
SHORT = re.compile(r"(?:^|[\s(])(?:Dr|al|e\.g|i\.e|vs)\.$")

FENCE = re.compile(r"^( *)```.*?^\1``` *$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- (\w+)(?:: begin)? -->.*?<!-- (?:/\1|\1: end) -->", re.DOTALL)
BORDER = r"^ *=+(?: +=+)+ *$"  # of a table in a docstring
TABLE = re.compile(rf"{BORDER}.*?{BORDER}.*?{BORDER}", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
LEFT_OUT = re.compile(r" *(?:#|\||<!--|!\[)")
END = re.compile(r"""[.?!][)"'*_]*(?=\s|$)""")

ITEM = re.compile(r" *(?:[-*+]|\d+\.) +|> ?")
# "name: text", "name   text" in columns, or "name(a, b) -> result".
ENTRY = r" *(?:[-\w*`.]+(?:, [-\w*`.]+)*: |\S+(?:, \S+)* {2,}(?=[^\s=])|\w+\(.*?\) -> )"
ITEM_OR_ENTRY = re.compile(f"{ITEM.pattern}|{ENTRY}")


def blocks(page: str, new_block: re.Pattern[str]) -> list[tuple[int, str]]:
    """First line and text of each block of prose, in the order of the page. ``new_block``: the mark that begins one."""
    for part in (FENCE, GENERATED, TABLE):
        page = part.sub(lambda found: "\n" * found[0].count("\n"), page)
    found: list[tuple[int, str]] = []
    text, start = "", 0
    for number, line in enumerate([*page.splitlines(), ""], 1):
        mark = new_block.match(line)
        if text and (mark or not line.strip() or LEFT_OUT.match(line)):
            found.append((start, text))
            text = ""
        code = not text and not mark and line.startswith("    ")
        if line.strip() and not LEFT_OUT.match(line) and not code:
            start = start if text else number
            text = f"{text} {line[mark.end() :] if mark else line.strip()}".strip()
    return found


def sentences(text: str) -> list[str]:
    """Sentences of one block, with code as one word and links as their text."""
    text = LINK.sub(r"\1", PICTURE.sub("", CODE.sub("CODE", text)))
    found, begin = [], 0
    for end in END.finditer(text):
        part = text[begin : end.end()].strip()
        if not SHORT.search(part):
            found.append(part)
            begin = end.end()
    return [s for s in [*found, text[begin:].strip()] if s]


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", part)) for part in sentence.split())


def long(page: str, new_block: re.Pattern[str] = ITEM) -> list[str]:
    """Sentences of more than `MOST` words, one line each, with the line where their block begins."""
    every = [(line, s) for line, text in blocks(page, new_block) for s in sentences(text)]
    return [f"{line}: {words(s)} words: {s}" for line, s in every if words(s) > MOST]


def docstrings(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Name and docstring of a module, and of every class and function in it. Statements alone are visited."""
    documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    if documented and (text := ast.get_docstring(node)):
        yield getattr(node, "name", "module"), text
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, part, [])
        for child in inner if isinstance(inner, list) else []:  # the body of a lambda is no list
            yield from docstrings(child)


def long_in_docstrings(source: str) -> list[str]:
    """Long sentences of all docstrings of a file, one line each; lines count from the docstring's first."""
    return [f"{name}: {line}" for name, text in docstrings(ast.parse(source)) for line in long(text, ITEM_OR_ENTRY)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_sentences_of_a_page_are_short(page: Path):
    assert long(page.read_text()) == []


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_sentences_of_docstrings_are_short(path: Path):
    assert long_in_docstrings(path.read_text()) == []


@pytest.mark.parametrize(
    ("page", "line"),
    [
        ("# Title\n\nShort one. {long}", 3),
        ("Text:\n\n- one\n- two\n  and {long}.\n- three", 4),
        ("> {long}?", 1),
        ("| a |\n| --- |\n| b |\n{long}!", 4),
        ("<!-- table -->\nx\n<!-- /table -->\n\n```bash\ny\n```\n\n*{long}.* Short.", 9),
        ("{long} et al. [write a recipe](write_a_recipe.md): `one piece of code`", 1),
    ],
)
def test_a_long_sentence_is_found(page: str, line: int):
    sentence = " ".join(["word"] * (MOST + 1))
    (found,) = long(page.format(long=sentence))
    assert found.startswith(f"{line}: ")


@pytest.mark.parametrize(
    "page",
    [
        "{most}. Another sentence.",
        "{most}\n\nanother block",
        "- {most}\n- another item",
        "# {most} in a heading",
        "| {most} | in a table |",
        "```\n{most} in code\n```",
        "Output:\n\n    {most} in code",
        "<!-- rows: begin -->\n{most} in generated text\n<!-- rows: end -->",
        "{most} = – ![a picture with text](docs/picture.png)",
    ],
)
def test_no_long_sentence_is_found(page: str):
    assert long(page.format(most=" ".join(["word"] * MOST))) == []


def test_code_is_one_word_and_a_link_is_its_text():
    (only,) = sentences("The `code of three` and [a link](there.md#part) by Yu et al. end here")
    assert words(only) == 11


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ('"""{long}."""', "module"),
        ('class C:\n    """Short.\n\n    {long}\n    """', "C"),
        ('def f(x):\n    """Short.\n\n    Args:\n        x: {long}\n            of it.\n    """', "f"),
        ('def f():\n    def inner():\n        """{long}."""', "inner"),
        ('"""Short.\n\n=== ===\na   b\n=== ===\nc   d\n=== ===\n\n{long}\n"""', "module"),
    ],
)
def test_a_long_sentence_of_a_docstring_is_found(source: str, name: str):
    (found,) = long_in_docstrings(source.format(long=" ".join(["word"] * (MOST + 1))))
    assert found.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "source",
    [
        "# {most} in a comment",
        'x = """{most} in a text that is no docstring"""',
        'def f(x, y):\n    """Short.\n\n    Args:\n        x: {most}\n        y: {most}\n    """',
        '"""Short.\n\none     {most}\ntwo     {most}\n"""',
        '"""Short.\n\n=== ===\na   {most} and\n    more\n=== ===\nc   d\n=== ===\n"""',
    ],
)
def test_no_long_sentence_of_a_docstring_is_found(source: str):
    assert long_in_docstrings(source.format(most=" ".join(["word"] * MOST))) == []
