"""Length of sentences: at most 25 words on the pages of the documentation.

A sentence ends with ``.``, ``?`` or ``!`` before a space, and with its block. A block is a paragraph, an item of a list
or a quotation. Abbreviations of `SHORT` end no sentence. A colon or a semicolon ends none either.

A word is a part between spaces that has a letter or a digit. A piece of code between backticks is one word. Of a link
only the text counts. Headings, tables, code blocks, pictures and parts that a command writes between two marks are left
out, and so is the history in `docs/log.md`. A block that begins with four spaces is code.
"""

import re
from pathlib import Path

import pytest

from tests.test_layering import ROOT

MOST = 25  # words
PAGES = [ROOT / "README.md", *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name != "log.md")]
SHORT = ("Dr.", "al.", "e.g.", "i.e.", "vs.", "St.")

FENCE = re.compile(r"^( *)```.*?^\1``` *$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- (\w+)(?:: begin)? -->.*?<!-- (?:/\1|\1: end) -->", re.DOTALL)
CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
LINK = re.compile(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
NEW_BLOCK = re.compile(r" *(?:[-*+]|\d+\.) +|> ?")
LEFT_OUT = re.compile(r" *(?:#|\||<!--|!\[)")
END = re.compile(r"""[.?!][)"'*_]*(?=\s|$)""")


def blocks(page: str) -> list[tuple[int, str]]:
    """First line and text of each block of prose, in the order of the page."""
    blank = lambda found: "\n" * found[0].count("\n")
    found: list[tuple[int, str]] = []
    text, start = "", 0
    for number, line in enumerate([*GENERATED.sub(blank, FENCE.sub(blank, page)).splitlines(), ""], 1):
        mark = NEW_BLOCK.match(line)
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
        if not part.endswith(SHORT):
            found.append(part)
            begin = end.end()
    return [s for s in [*found, text[begin:].strip()] if s]


def words(sentence: str) -> int:
    return sum(bool(re.search(r"\w", part)) for part in sentence.split())


def long(page: str) -> list[str]:
    """Sentences of more than `MOST` words, one line each, with the line where their block begins."""
    every = [(line, s) for line, text in blocks(page) for s in sentences(text)]
    return [f"{line}: {words(s)} words: {s}" for line, s in every if words(s) > MOST]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_sentences_of_a_page_are_short(page: Path):
    assert long(page.read_text()) == []


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
