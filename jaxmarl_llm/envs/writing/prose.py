"""Signs of running English text, without a model: does a text end, and do neighbouring words fit?

Used by the strict writing reward against shuffled words, lists of keywords, and texts that were cut. The rules are few
and one-sided. Human summaries almost never break them; a text that keeps them may still be bad.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import pairwise

WORD = re.compile(r"\b\w+\b")
SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
_ENDED = re.compile(r"[.!?][\])}\"'\u2019\u201d]*\s*\Z")  # the end of a last sentence
_CLAUSE = re.compile(r"[.!?,;:()\[\]\"\u2013\u2014]|\s-+\s|\n")  # no rule reaches across one of these

_DETERMINERS = "a an the every its their our your my"
_PREPOSITIONS = "of for with in on at by from into between via"
_VERBS = "is are was were be been has have had do does did can will should could may would"
_NO_NOUN = f"{_PREPOSITIONS} {_VERBS} to and or but than that who it they we he she i as if because not"
_RULES = (  # words, and words that cannot follow them within a clause
    (_DETERMINERS, f"{_DETERMINERS} {_NO_NOUN} this these those which"),
    ("a an the", "using also however when while where each how without through they them thus us then like"),
    ("a an", "such both all other several"),
    (_PREPOSITIONS, f"of for with on at by from into to and or but as if because than we they he she i {_VERBS}"),
    (_PREPOSITIONS, "also however thus then like"),
    ("and or", "and or but of such than however been"),
    ("is are was were", "is are was were of and or has have can will we they which be than"),
    ("be been", "and or we that is are was for this which can be it has have"),
    ("has have", "of and or is are was for our by which we"),
    ("to", "to of is are was were and or for with in by from has had we on can using than however been"),
    (
        "can will should could may",
        "a an the of for with on at by from to and or but than that is are was were this our",
    ),
    ("that", "of to from be than been however then like"),
    ("which", "of and or that on by as from be than which"),
    ("we they", "of and or the a an to that is this by be it such these for with from our which"),
    ("it", "of and or the an our are these such that this"),
    ("this these", "of and or the a an to that we for with our by as from it such be"),
    ("such", "of and or the to in on is for with this our by are which can be"),
    ("each several many some any other most same", "the a an to that we our is are with this"),
    ("using", "of to and or we in that for on is with by are which as from can be using"),
    ("not", "of and or we that is are our which can"),
    ("than", "of and or we can are is which be"),
    ("when while where how", "of and or for with by as from"),
    ("without through during across within under about", "of to and or we in for with on is by as"),
)
_FORBIDDEN = frozenset((a, b) for words, after in _RULES for a in words.split() for b in after.split())
_OPEN = frozenset(f"{_DETERMINERS} {_PREPOSITIONS} and or than is are".split())  # they cannot end a sentence

FUNCTION = frozenset(  # function words, beside the stopwords and connectives of the reward
    f"{_DETERMINERS} {_VERBS} {_NO_NOUN} this these those which using within without might must able also either "
    "neither both among across per upon onto toward towards whether though yet still even ever never much many several "
    "another itself themselves ourselves cannot rather quite often usually always already just like unlike along no s t"
    .split()
)  # fmt: skip


def ended(text: str) -> bool:
    """Whether the last sentence of ``text`` ends with a full stop, an exclamation mark or a question mark.

    Closing brackets and quotation marks may follow the sign.
    """
    return _ENDED.search(text) is not None


def misfits(text: str) -> int:
    """Number of words of ``text`` that break a rule: a forbidden neighbour, or the end of a sentence.

    Examples: "the of", "with are", "and of", and a sentence that ends with "the".
    """
    text = text.lower()
    count = 0
    for clause in _CLAUSE.split(text):
        words = WORD.findall(clause)
        count += sum(pair in _FORBIDDEN for pair in pairwise(words))
    for sentence in SENTENCE.split(text):
        count += (WORD.findall(sentence) or [""])[-1] in _OPEN
    return count


def neighbours(text: str, source: str) -> float:
    """Share of the pairs of adjacent words of ``text`` that are adjacent in ``source`` too; 0.0 without a pair."""
    words, given = WORD.findall(text.lower()), WORD.findall(source.lower())
    pairs, known = list(pairwise(words)), set(pairwise(given))
    return sum(pair in known for pair in pairs) / max(1, len(pairs))


FEWEST_JOINTS = 3  # pairs from which on a share of changed joints says something


def changed_joints(text: str, source: str, functions: Collection[str]) -> float:
    """Share of the source's pairs of content words in ``text`` that other function words join, in [0, 1].

    A copied text whose function words were exchanged has a large share. 0.0 with fewer than `FEWEST_JOINTS` pairs.

    Args:
        text: A text of one role.
        source: The text that it was written from.
        functions: Words that are no content words.
    """
    own, given = _joints(text, functions), _joints(source, functions)
    both = [pair for pair in own if pair in given and (own[pair] | given[pair]) != {()}]
    if len(both) < FEWEST_JOINTS:
        return 0.0
    return sum(not own[pair] <= given[pair] for pair in both) / len(both)


def _joints(text: str, functions: Collection[str]) -> dict[tuple[str, str], set[tuple[str, ...]]]:
    """Adjacent content words -> the function words between them, at each place."""
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    before, between = "", list[str]()
    for word in WORD.findall(text.lower()):
        if word in functions:
            between.append(word)
            continue
        if before:
            found.setdefault((before, word), set()).add(tuple(between))
        before, between = word, []
    return found
