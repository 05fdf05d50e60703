"""MAGRPO's published coding reward, rule by rule, faults included, so that its numbers can be reproduced.

Source: the reward functions of LLM_Collab_Code_Generation (August 2025 to February 2026). Everything is read as text.
These known faults are kept on purpose. A comment or string with ``aux(`` is a call. ``return `` in a comment makes a
function complete. Of a test that goes over several lines only the first counts, so that it fails. A wrapper of three
lines is no wrapper. The deduction for an ignored result asks for ``aux (x)`` with one space and one character, which
nobody writes. ``coding_rewards.strict`` is the reward to train with.

Shared arguments: ``text`` is a completion, ``main``, ``aux`` and ``function`` are definitions cut out of it.
"""

from __future__ import annotations

import re

from jaxmarl_llm.envs.coding.analysis.syntax import compiles, parse

MAX_CODE = 1 << 16  # characters of a completion; a longer one is read as empty, to bound the time (upstream: no limit)
_HEADER = re.compile(r"^\s*def\s+\w+\s*\(")
_QUOTES = ('"""', "'''")
_CODE_SIGNS = ("def ", "return ", "if ", "for ", "while ", "=", "(", ")", "[", "]")


def _inside(line: str, margin: int) -> bool:
    return line.startswith(" " * (margin + 1)) or line.startswith("\t")


def clean(text: str) -> str:
    """All function definitions in a completion, as upstream cuts them out.

    Fences are removed. A definition goes from ``def`` on as long as lines are blank, indented further, or begin a
    docstring at any depth.
    """
    if len(text) > MAX_CODE:
        return ""
    text = re.sub(r"```python\s*\n?", "", text)
    lines = re.sub(r"```\s*\n?", "", text).split("\n")
    blocks: list[list[str]] = []
    inside, margin, i = False, 0, 0
    while i < len(lines):
        line, bare = lines[i], lines[i].strip()
        if _HEADER.match(line):
            blocks.append([line])
            inside, margin = True, len(line) - len(line.lstrip())
        elif inside and (not bare or _inside(line, margin)):
            blocks[-1].append(line)
        elif inside and bare.startswith(_QUOTES):
            blocks[-1].append(line)
            if not (bare.endswith(bare[:3]) and len(bare) > 3):
                i += 1
                while i < len(lines):
                    blocks[-1].append(lines[i])
                    if bare[:3] in lines[i]:
                        break
                    i += 1
        else:
            inside = False
        i += 1
    joined = "\n\n".join("\n".join(block) for block in blocks)
    kept = "\n".join(line for line in joined.split("\n") if not _prose(line)).strip()
    return kept if re.search(r"def\s+\w+\s*\(", kept) else ""


def _prose(line: str) -> bool:
    """A sentence: a capital, small letters, a full stop, and no sign of code."""
    bare = line.strip()
    if not bare or bare.startswith(("#", *_QUOTES)) or any(sign in line for sign in _CODE_SIGNS):
        return False
    return re.match(r"^[A-Z][a-z].*[.!?:]$", bare) is not None


def extract(text: str, name: str) -> str:
    """The last definition of ``name``, up to the first line that is not indented further; '' if there is none."""
    found: list[str] = []
    inside, margin = False, 0
    for line in clean(text).split("\n"):
        if re.match(rf"^(\s*)def\s+{re.escape(name)}\s*\(", line):
            found, inside, margin = [line], True, len(line) - len(line.lstrip())
        elif inside:
            if line.strip() and not _inside(line, margin):
                break
            found.append(line)
    return "\n".join(found).strip()


def has_return(function: str) -> bool:
    """Whether the text of a function has a return."""
    return re.search(r"return\s+", function) is not None


def imports(prompt: str) -> str:
    """Import lines of ``prompt``, each once."""
    lines = [line.strip() for line in prompt.split("\n")]
    found = [x for x in lines if re.match(r"^from\s+[\w\.]+\s+import\s+.*$|^import\s+[\w\.,\s]+$", x)]
    return "\n".join(dict.fromkeys(found))


def program(prompt: str, aux: str, main: str) -> str:
    """One program of the imports of ``prompt``, aux and main."""
    return "\n\n".join(part for part in (imports(prompt), clean(aux), clean(main)) if part)


def asserts(test: str, entry_point: str) -> list[str]:
    """The single lines in ``check`` that begin with ``assert`` and name the candidate, each once, renamed.

    ``test``: text with ``check``. ``entry_point``: new name of the candidate.
    """
    check = re.search(r"def check\(candidate\):(.*?)(?=\n\ndef|\Z)", test, re.DOTALL)
    lines = [line.strip() for line in check[1].strip().split("\n")] if check else []
    found = [x for x in lines if re.match(r"assert\s+", x) and "candidate" in x]
    return [x.replace("candidate", entry_point) for x in dict.fromkeys(found)]


def calls_aux(main: str) -> bool:
    """Whether main calls aux."""
    return re.search(r"\baux\s*\(", main) is not None


def is_wrapper(main: str) -> bool:
    """Whether main only wraps aux.

    That is: one line that returns something with aux in it, or an assignment from aux and its return, or nothing at
    all.
    """
    lines, doc = [], False
    for line in (x.strip() for x in main.split("\n")):
        if not line:
            continue
        if line.startswith(_QUOTES):
            doc = not (line.endswith(line[:3]) and len(line) > 3)
        elif doc:
            doc = not any(q in line for q in _QUOTES)
        elif not line.startswith(("#", "def ")):
            lines.append(line)
    if len(lines) == 1:
        return lines[0].startswith("return ") and "aux" in lines[0]
    if len(lines) == 2:
        assigned = re.search(r"(\w+)\s*=\s*aux\s*\(", lines[0])
        return assigned is not None and lines[1] == f"return {assigned[1]}"
    return not lines


def ignores_result(main: str) -> bool:
    """Upstream's rule whether main ignores the result of aux.

    Only ``aux (x)``: one space, one character, alone on its line, with at most one sign after it.
    """
    lines = [line.strip() for line in main.split("\n")]
    return any(re.search(r"^aux\s\([^)]\)(;?\s)?$", x) for x in lines if not x.startswith("#"))


def parses(source: str) -> bool:
    """Whether ``source`` parses."""
    return parse(source) is not None


def runnable(line: str) -> bool:
    """Whether the assert ``line`` can be run at all.

    The first line of a longer one cannot, which upstream counts as failed.
    """
    return compiles(line)
