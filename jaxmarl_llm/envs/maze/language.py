"""Moves, consent and refusal in free text about a maze: what `maze_text` reads replies and dialogues with.

Every pattern is linear in the text, nothing here raises, and only the first LONGEST characters are read.
"""

from __future__ import annotations

import re

LONGEST = 20_000
WORDS = {
    "U": "up upward upwards north northward",
    "D": "down downward downwards south southward",
    "L": "left leftward leftwards west westward",
    "R": "right rightward rightwards east eastward",
}
ARROWS = dict(zip("↑⬆⇑🡑↓⬇⇓🡓←⬅⇐🡐→➡⇒🡒", "U" * 4 + "D" * 4 + "L" * 4 + "R" * 4, strict=True))
LETTER = {word: move for move, words in WORDS.items() for word in words.split()} | ARROWS
CELL = r"[(\[] ?([0-9]{1,3}) ?[,;] ?([0-9]{1,3}) ?[)\]]"
# An arrow before a cell only points to it.
NAMED = "|".join(word for words in WORDS.values() for word in words.split())
TOKEN = re.compile(rf"(?:->|=>|[→➡⇒]) ?(?=[(\[])|{CELL}|\b({NAMED})\b|([{''.join(ARROWS)}])", re.IGNORECASE)
LETTERS = re.compile(r"[\s\"'`*]{0,9}([UDLR](?:[\s,]{0,2}[UDLR]){0,63}|[udlr])[\s\"'`*.!]{0,9}")
TAG = re.compile(r"\bmoves?\b[ *_`]{0,4}[:=]([^\n]{0,200})", re.IGNORECASE)
# Words of direction that are none.
IDIOMS = re.compile(
    r"\b(?:you(?:'re| are)|that(?:'s| is)|all|exactly|quite|alright) right\b"
    r"|\bright (?:now|away|here|there|answer|way|choice)\b|, ?right ?(?=\?)"
    r"|\b(?:moves?|steps?|turns?|cells?|is|are|what's|nothing|options?) left\b|\bleft (?:to|over|out)\b"
    r"|\b(?:set|end|ends|ended|give|sum|speed|mixed|catch) up\b|\bup (?:to|until)\b"
    r"|\b(?:write|slow|break|note|narrow) down\b",
    re.IGNORECASE,
)
CLAUSE = re.compile(r"[.;!?\n]|,(?! ?[0-9])|\b(?:so|but|and|then|therefore|because|hence|instead)\b", re.IGNORECASE)
# A clause with one of these tells what there is, or what not to do.
TELLS = re.compile(
    r"\b(?:walls?|blocked|obstacles?|see|sees|seen|shows?|unknown|free|open|clear|visible|hidden|border|edge|am at"
    r"|are at|is at|we're at|i'm at|goal is|not|never|avoid|cannot|no)\b|n't\b",
    re.IGNORECASE,
)
AGREES = re.compile(
    r"\b(?:ok|okay|yes|yep|yeah|agree|agreed|sure|sounds good|deal|confirm|confirmed|perfect|go ahead|do it|do that"
    r"|same here|works for me|you(?:'re| are) right|that(?:'s| is) right)\b|[👍✅✓✔]",
    re.IGNORECASE,
)
REFUSES = re.compile(r"\b(?:no|nope|disagree|wait|stop|not|cannot|don't|can't|won't|blocked|wall)\b", re.IGNORECASE)


def proposals(text: str, cell: int, size: int) -> list[str]:
    """The moves that ``text`` proposes from ``cell`` on, in order, as letters of UDLR. ``size``: cells of a side.

    The moves are those behind the last ``Move:`` that has any, else those of the whole text. Moves are letters alone,
    words and arrows. Cells (row, column), from 1 on, are moves if they are next to the cell after the moves before
    them. Clauses that only tell or forbid do not count.
    """
    text = text[:LONGEST].replace("’", "'")
    for line in reversed(TAG.findall(text)):
        found = _letters(line) or _tokens(line, cell, size)
        if found:
            return found
    found = _letters(text)
    if found:
        return found
    clauses = CLAUSE.split(IDIOMS.sub(" ", text))
    return _tokens(" . ".join(clause for clause in clauses if not TELLS.search(clause)), cell, size)


def agrees(text: str) -> bool:
    """Whether ``text`` says yes, and not no."""
    text = text[:LONGEST].replace("’", "'")
    return bool(AGREES.search(text)) and not REFUSES.search(text)


def refuses(text: str) -> bool:
    """Whether ``text`` refuses a proposal."""
    return bool(REFUSES.search(text[:LONGEST].replace("’", "'")))


def _letters(text: str) -> list[str]:
    """Letters of a text that is nothing else, such as R or R, R, D."""
    match = LETTERS.fullmatch(text[:300])
    return re.findall("[UDLR]", match[1].upper()) if match else []


def _tokens(text: str, cell: int, size: int) -> list[str]:
    out = []
    row, column = divmod(cell, size)
    for match in TOKEN.finditer(text):
        one, two, word, arrow = match.groups()
        if one is not None:
            step = int(one) - 1 - row, int(two) - 1 - column
            move = {(-1, 0): "U", (1, 0): "D", (0, -1): "L", (0, 1): "R"}.get(step)
        else:
            move = LETTER.get((word or arrow or "").lower())
        if move is None:
            continue
        out.append(move)
        row, column = row + (move == "D") - (move == "U"), column + (move == "R") - (move == "L")
    return out
