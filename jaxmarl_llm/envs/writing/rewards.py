"""Rewards of the writing tasks: five additive components of two texts, no model and no reference text needed.

Levels, each counted only if those before it were reached (MAGRPO, arXiv 2508.04652; bands of the authors' public code):

    words        0.5 if both texts have a permitted number of words, otherwise the whole reward is 0
    ratio        length of the second text over that of the first: 1 inside a band, linear at its sides
    unique       0.5 for the ratio of their numbers of distinct words, likewise
    transitions  0.4 t, C of 12 categories of connectives found: t = min(1, 0.4 + 0.05 (C - 1)), 0 if C = 0
    jaccard      0.6 min(J, cap) / cap, J the Jaccard index of their sets of words without stopwords, 1 if both are
                 empty

Values at the outer edge of a band are reached with credit 0, so the next level counts; beyond it they are not. The sum
is at most 2.98.

``mode="parity"`` is the official rule with its faults. It counts characters of the raw text, and distinct words with
stopwords. Phrases are found anywhere in the text ("as" in "wasted"). They are those of TLDR in the second text, and of
arXiv in both, joined by a space.
Official: the levels, bands, caps and the numbers of categories (12) and stopwords (106). Reconstructed for this
project: which phrases and stopwords these are. So parity is exact on the published examples, and elsewhere in all but
the last two components. These are exact with the authors' lists in `Lists`. A ratio with an empty denominator ends the
count.

``mode="strict"`` keeps the levels and measures what is harder to fake. A word is *backed* when the source, title
included, has a word with the same first five letters. Function words are stopwords, words of connectives and
`prose.FUNCTION`. Any other word that is not backed is *invented*.

Lengths and numbers of words are those of the distinct content words, so repetition and filler do not make a text
longer. Of the second text only backed words count. The first text is measured with and without its invented words, and
the lower pay counts, so an invented word never improves a ratio. For the least number of words, words that are neither
backed nor stopwords count as far as others match them. A connective counts as a whole word or phrase, not next to
another one, in a sentence with other words, one category a sentence. It loses with each repetition, and all lose where
more than half of a text's sentences have one.

The sum is multiplied by `guards`. One guard pays nothing for a text that did not end. Another one pays nothing where
half of a text's content words or fewer are backed. The guards' limits were set on human summaries of SciTLDR's training
split; summaries that copy a sentence lose up to half. What strict cannot see: fluent false text made of words of the
source, a few connectives too many, and whether a summary names what matters. ROUGE to a human summary shows part of
that; it is logged and never rewarded (`rouge`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs.writing import prose
from jaxmarl_llm.envs.writing.prose import SENTENCE, WORD

COMPONENTS = ("words", "ratio", "unique", "transitions", "jaccard")
MODES = ("strict", "parity")
LONGEST = 20  # letters of a word that count towards a length in strict mode
STEM = 5  # letters in which a word must agree with one of the source

TRANSITIONS: Mapping[str, tuple[str, ...]] = {
    "addition": ("and", "also", "moreover", "furthermore", "in addition", "additionally", "besides"),
    "contrast": ("however", "but", "whereas", "in contrast", "on the other hand", "instead"),
    "concession": ("although", "even though", "nevertheless", "nonetheless", "despite"),
    "cause": ("because", "since", "as", "due to", "owing to"),
    "result": ("therefore", "thus", "hence", "so", "consequently", "as a result", "accordingly"),
    "condition": ("if", "unless", "provided that", "otherwise"),
    "example": ("for example", "for instance", "such as", "in particular", "namely"),
    "order": ("first", "second", "third", "next", "finally", "lastly"),
    "time": ("meanwhile", "afterwards", "previously", "subsequently", "eventually", "while"),
    "comparison": ("similarly", "likewise", "in the same way", "compared to", "equally"),
    "emphasis": ("indeed", "in fact", "notably", "above all", "especially"),
    "summary": ("in summary", "in conclusion", "overall", "to conclude", "in short"),
}
_STOPPED = """
    a an the this that these those i me my we us our you your he him his she her it its they them their who whom which
    what where when why how all any both each few more most other some such no nor not only own same than too very and
    but or if while because as until of at by for with about against between into through during before after above
    below to from up down in out on off over under again then once here there is are was were be been being have has
    had do does did can will should
"""
STOPWORDS = frozenset(WORD.findall(_STOPPED))
WEAK = ("and", "as", "if", "so")  # these join words more often than sentences; strict mode passes over them


class Lists(NamedTuple):
    """Connectives and stopwords."""

    transitions: Mapping[str, Sequence[str]] = TRANSITIONS  # category -> phrases, lower-case
    stopwords: Collection[str] = STOPWORDS


class Spec(NamedTuple):
    """One task's levels. A band (a, b, c, d) pays 1 on [b, c] and is linear on [a, b) and (c, d]."""

    limits: tuple[int, int]  # words of each text
    ratio: tuple[float, float, float, float]
    unique: tuple[float, float, float, float]
    cap: float  # of the Jaccard index
    both: bool  # are connectives searched in both texts, or in the second only?
    reworded: bool  # does strict mode want the first text in its own words?


class Levels(NamedTuple):
    """Levels of a pair of texts that were reached."""

    values: dict[str, float]  # component -> value, of the levels up to the first that was not reached
    ratio: float  # second over first length; NaN if not measured
    unique: float


TLDR = Spec((8, 256), (1.1, 1.6, 3.2, 5.0), (1.3, 2.0, math.inf, math.inf), 0.03, False, True)
ARXIV = {
    "paper": Spec((128, 256), (0.8, 1.0, 1.3, 1.5), (0.5, 0.7, 1.3, 1.7), 0.23, True, False),
    "2026": Spec(
        (128, 256), (0.8, 1.3, 1.6, 2.0), (0.5, 0.7, 1.3, 1.7), 0.23, True, False
    ),  # public code since January 2026
}


def tldr(
    c1: str,
    c2: str,
    *,
    mode: str = "strict",
    source: str = "",
    limits: tuple[int, int] = TLDR.limits,
    lists: Lists = Lists(),
    truncated: bool = False,
) -> dict[str, float]:
    """Components of a concise (c1) and a detailed (c2) summary of ``source``. Arguments are those of `score`.

    ``limits``: words of each text.
    """
    spec = TLDR._replace(limits=limits)
    return score(spec, c1, c2, mode=mode, source=source, lists=lists, truncated=truncated)


def arxiv(
    c1: str,
    c2: str,
    band: str = "paper",
    *,
    mode: str = "strict",
    source: str = "",
    limits: tuple[int, int] = ARXIV["paper"].limits,
    lists: Lists = Lists(),
    truncated: bool = False,
) -> dict[str, float]:
    """Components of background (c1) and method (c2) written from the abstract ``source``.

    ``band``: a key of ARXIV. ``limits``: words of each text. Other arguments are those of `score`.
    """
    spec = ARXIV[one_of("band", band, ARXIV)]._replace(limits=limits)
    return score(spec, c1, c2, mode=mode, source=source, lists=lists, truncated=truncated)


def score(
    spec: Spec,
    c1: str,
    c2: str,
    *,
    mode: str = "strict",
    source: str = "",
    lists: Lists = Lists(),
    truncated: bool = False,
) -> dict[str, float]:
    """All five components; 0.0 for those that were not reached.

    Args:
        spec: Levels of the task.
        c1: Text of the first role.
        c2: Text of the second role.
        mode: ``strict``, or ``parity`` for the official rule.
        source: Text that both roles read, title included. Only strict mode uses it.
        lists: Connectives and stopwords.
        truncated: Whether the length limit ended one of the texts. Strict mode then pays nothing.
    """
    one_of("mode", mode, MODES)
    factor = 1.0
    if mode == "strict":
        factor = math.prod(guards(spec, c1, c2, source, lists=lists, truncated=truncated).values())
    if not factor:
        return dict.fromkeys(COMPONENTS, 0.0)
    values = levels(spec, c1, c2, mode=mode, source=source, lists=lists).values
    return {name: factor * values.get(name, 0.0) for name in COMPONENTS}


def levels(spec: Spec, c1: str, c2: str, *, mode: str = "strict", source: str = "", lists: Lists = Lists()) -> Levels:
    """The levels, without the guards. Arguments are those of `score`."""
    low, high = spec.limits
    strict, values, u = mode == "strict", {"words": 0.0}, math.nan
    texts = [_essence(c, source, lists) if strict else _raw(c, lists) for c in (c1, c2)]
    if not all(low <= t.words and len(c.split()) <= high for t, c in zip(texts, (c1, c2))):
        return Levels(values, math.nan, math.nan)
    values["words"] = 0.5
    firsts = [texts[0], *([_whole(c1, lists)] if strict else [])]  # strict: with its invented words too
    q, paid = _least(spec.ratio, [(texts[1].length, first.length) for first in firsts])
    values["ratio"] = paid or 0.0
    if paid is None:
        return Levels(values, q, u)
    u, paid = _least(spec.unique, [(len(texts[1].distinct), len(first.distinct)) for first in firsts])
    values["unique"] = 0.5 * (paid or 0.0)
    if paid is None:
        return Levels(values, q, u)
    searched = (c1, c2) if spec.both else (c2,)
    values["transitions"] = 0.4 * _paid(
        _linked(searched, source, lists) if strict else _found(" ".join(searched), lists)
    )
    values["jaccard"] = 0.6 * min(jaccard(texts[0].content, texts[1].content), spec.cap) / spec.cap
    return Levels(values, q, u)


def _least(
    edges: tuple[float, float, float, float], fractions: Sequence[tuple[int, int]]
) -> tuple[float, float | None]:
    """The ratio of ``fractions`` (second, first) that a band pays least, and that pay; NaN where first is 0."""
    found = [(second / first if first else math.nan) for second, first in fractions]
    paid = [(q, band(q, edges)) for q in found]
    return min(paid, key=lambda pair: -1.0 if pair[1] is None else pair[1])


def band(x: float, edges: tuple[float, float, float, float]) -> float | None:
    """The share in [0, 1] that x earns, or None outside [a, d] of ``edges`` (a, b, c, d); NaN is outside."""
    a, b, c, d = edges
    if b <= x <= c:
        return 1.0
    if a <= x < b:
        return (x - a) / (b - a)
    return 1.0 - (x - c) / (d - c) if c < x <= d else None


def guards(
    spec: Spec, c1: str, c2: str, source: str = "", *, lists: Lists = Lists(), truncated: bool = False
) -> dict[str, float]:
    """Factors in [0, 1] of strict mode, 1 for ordinary writing; each is that of the worse text.

    Arguments are those of `score`.
    Numbers in brackets are where a factor is 0 and where it is 1, linear between.

    ended       1 if neither text is truncated and both end with a full stop, exclamation or question mark, otherwise 0
    repetition  share of the words left without connectives and repeated trigrams (0.5 to 0.8), and distinct words over
                words (0.2 to 0.35)
    prose       of the words left without connectives and repetition: share of function words (0.05 to 0.2). Also the
                share of words that break a rule of `prose.misfits` (0.04 to 0.01)
    partner     trigrams of content words that the two share, over those of the shorter text (0.4 to 0.1)
    prompt      copying: share of the source's content words that the text has (0.9 to 0.7), so that part of a source
                may be quoted. 1 without a source
    faithful    share of the text's content words that are backed (0.5 to 0.7). 1 without a source
    order       pairs of adjacent words that are adjacent in the source (0.02 to 0.12). 1 without a source
    joints      share of `prose.changed_joints` (0.7 to 0.5): copies with exchanged function words. 1 without a source
    reworded    0.5 to 1, of the first text where ``spec.reworded``: share of such pairs among its backed content
                words (0.8 to 0.5). A short summary in the source's own words is half of what was asked for.
                Function words and invented words are left out of both texts, so exchanging them changes nothing. 1
                without a source
    """
    texts = (c1, c2)
    words = [WORD.findall(c.lower()) for c in texts]
    kept = [_kept(w, lists) for w in words]
    said = [[w for w in k if w not in lists.stopwords] for k in kept]
    grams = [_trigrams(w) for w in said]
    functions = _functions(lists)
    out = {
        "ended": float(not truncated and all(map(prose.ended, texts))),
        "repetition": min(
            min(_ramp(len(k) / len(w), 0.5, 0.8), _ramp(len(set(w)) / len(w), 0.2, 0.35)) if w else 0.0
            for w, k in zip(words, kept)
        ),
        "prose": min(
            min(_ramp(_share(k, functions), 0.05, 0.2), 1.0 - _ramp(prose.misfits(c) / len(k), 0.01, 0.04))
            if k
            else 0.0
            for k, c in zip(kept, texts)
        ),
        "partner": 1.0 - _ramp(_share(*sorted(grams, key=len)), 0.1, 0.4),
        "prompt": 1.0,
        "faithful": 1.0,
        "order": 1.0,
        "joints": 1.0,
        "reworded": 1.0,
    }
    if source.strip():
        given, begins = _content(source, lists), _begins(source)
        out["prompt"] = 1.0 - _ramp(max(_share(given, set(w)) for w in said), 0.7, 0.9)
        out["faithful"] = _ramp(min(backed(c, begins, lists) for c in texts), 0.5, 0.7)
        out["order"] = _ramp(min(prose.neighbours(c, source) for c in texts), 0.02, 0.12)
        out["joints"] = 1.0 - _ramp(max(prose.changed_joints(c, source, functions) for c in texts), 0.5, 0.7)
        if spec.reworded:
            own, theirs = ([w for w in x if w not in functions] for x in (words[0], WORD.findall(source.lower())))
            backed_words = " ".join(w for w in own if w[:STEM] in begins)
            out["reworded"] = 1.0 - 0.5 * _ramp(prose.neighbours(backed_words, " ".join(theirs)), 0.5, 0.8)
    return out


def backed(text: str, begins: Collection[str], lists: Lists = Lists()) -> float:
    """Share of the distinct content words of ``text`` that are backed, in [0, 1]; 0.0 without a content word.

    Args:
        text: A text of one role.
        begins: First five letters of each word of the source.
        lists: Connectives and stopwords. These, and other function words, are no content words.
    """
    content = _content(text, lists) - _functions(lists)
    return sum(w[:STEM] in begins for w in content) / len(content) if content else 0.0


def jaccard(a: set[str], b: set[str]) -> float:
    """Jaccard index |a & b| / |a | b| of the sets ``a`` and ``b``; 1.0 if both are empty, as officially."""
    return len(a & b) / len(a | b) if a | b else 1.0


# -- measures ----------------------------------------------------------------------------------------------------------


class _Measured(NamedTuple):
    words: int
    length: int
    distinct: set[str]
    content: set[str]  # in lower case, without stopwords


def _raw(text: str, lists: Lists) -> _Measured:
    distinct = set(WORD.findall(text.lower()))
    return _Measured(len(text.split()), len(text), distinct, distinct - set(lists.stopwords))


def _essence(text: str, source: str, lists: Lists) -> _Measured:
    kept = _kept(WORD.findall(text.lower()), lists)
    content = _content(text, lists)
    begins = _begins(source)
    backed = {w for w in content if w[:STEM] in begins} if begins else content
    words = min(len(kept), len(text.split()))
    if begins:  # at most half may be neither stopwords nor the source's
        words = min(words, 2 * sum(w[:STEM] in begins or w in lists.stopwords for w in kept))
    return _Measured(words, sum(min(len(w), LONGEST) for w in backed), backed, content)


def _whole(text: str, lists: Lists) -> _Measured:
    """As `_essence`, with the invented words."""
    content = _content(text, lists)
    return _Measured(0, sum(min(len(w), LONGEST) for w in content), content, content)


def _functions(lists: Lists) -> frozenset[str]:
    """Function words: stopwords, words of connectives, and others."""
    return _function_words(frozenset(lists.stopwords), tuple((c, tuple(p)) for c, p in lists.transitions.items()))


@lru_cache(maxsize=8)
def _function_words(stopwords: frozenset[str], transitions: tuple[tuple[str, tuple[str, ...]], ...]) -> frozenset[str]:
    joining = (word for _, phrases in transitions for phrase in phrases for word in WORD.findall(phrase))
    return stopwords | prose.FUNCTION | frozenset(joining)


def _begins(source: str) -> set[str]:
    return {w[:STEM] for w in WORD.findall(source.lower())}


def _found(text: str, lists: Lists) -> float:
    """Categories with a phrase anywhere in the text, inside words too."""
    text = text.lower()
    return float(sum(any(p in text for p in phrases) for phrases in lists.transitions.values()))


def _paid(categories: float) -> float:
    """The official amount for a whole number of categories, linear below 1."""
    return min(1.0, 0.4 * categories if categories < 1 else 0.4 + 0.05 * (categories - 1))


def _linked(texts: Iterable[str], source: str, lists: Lists) -> float:
    """Categories well used, after discounts. A sentence is one with at least five other words, of the source."""
    begins = _begins(source)
    used: Counter[str] = Counter()
    credited: set[str] = set()
    seen: set[tuple[str, ...]] = set()
    share = 1.0
    for text in texts:
        before, carrying = len(seen), 0
        for sentence in SENTENCE.split(text):
            words = WORD.findall(sentence.lower())
            found = _connectives(words, lists)
            used.update(category for _, _, category in found)
            rest = tuple(w for w in _plain(words, lists) if not begins or w[:STEM] in begins)
            if len(rest) < 5 or rest in seen:
                continue
            seen.add(rest)
            carrying += bool(found)
            credited |= _first(found, len(words), credited)
        own = len(seen) - before
        if carrying > (allowed := max(1.0, own / 2)):
            share = min(share, (own - carrying) / (own - allowed))
    spare = max(1.0, (len(seen) - 1) / 2)
    return share * sum(max(0.0, 1 - (used[c] - 1) / spare) for c in sorted(credited))


def _first(found: Sequence[tuple[int, int, str]], length: int, credited: set[str]) -> set[str]:
    """The first category of a sentence that is new and stands three words from its neighbours, if there is one."""
    stops, starts = [-9, *(stop for _, stop, _ in found)], [*(start for start, _, _ in found[1:]), length + 9]
    for k, (start, stop, category) in enumerate(found):
        if start - stops[k] >= 3 and starts[k] - stop >= 3 and category not in credited:
            return {category}
    return set()


def _connectives(words: Sequence[str], lists: Lists) -> list[tuple[int, int, str]]:
    """Whole phrases in a list of words, the longest first: (start, stop, category)."""
    table, longest = _table(tuple((c, tuple(p)) for c, p in lists.transitions.items()))
    found, i = [], 0
    while i < len(words):
        most = min(longest.get(words[i], 0), len(words) - i)
        size = next((n for n in range(most, 0, -1) if tuple(words[i : i + n]) in table), 0)
        if size:
            found.append((i, i + size, table[tuple(words[i : i + size])]))
        i += size or 1
    return found


@lru_cache(maxsize=8)
def _table(
    transitions: tuple[tuple[str, tuple[str, ...]], ...],
) -> tuple[dict[tuple[str, ...], str], dict[str, int]]:
    """Phrase -> category, and first word -> length of the longest phrase that begins so."""
    table = {tuple(WORD.findall(p)): category for category, phrases in transitions for p in phrases if p not in WEAK}
    table.pop((), None)  # a phrase without a word
    longest: dict[str, int] = {}
    for phrase in table:
        longest[phrase[0]] = max(longest.get(phrase[0], 0), len(phrase))
    return table, longest


def _plain(words: Sequence[str], lists: Lists) -> list[str]:
    """The words without connectives."""
    inside = {i for start, stop, _ in _connectives(words, lists) for i in range(start, stop)}
    return [w for i, w in enumerate(words) if i not in inside]


def _kept(words: Sequence[str], lists: Lists) -> list[str]:
    """The words without connectives and without trigrams that were there before."""
    words = _plain(words, lists)
    seen: set[tuple[str, ...]] = set()
    again: set[int] = set()
    for i in range(len(words) - 2):
        gram = tuple(words[i : i + 3])
        if gram in seen:
            again.update((i, i + 1, i + 2))
        seen.add(gram)
    return [w for i, w in enumerate(words) if i not in again]


def _content(text: str, lists: Lists) -> set[str]:
    """Its distinct words without stopwords and connectives."""
    return set(_plain(WORD.findall(text.lower()), lists)) - set(lists.stopwords)


def _trigrams(words: Sequence[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def _share(a: Collection, b: Collection) -> float:
    """Share of a's members that are in b; 0.0 for an empty a."""
    return sum(x in b for x in a) / len(a) if a else 0.0


def _ramp(x: float, low: float, high: float) -> float:
    """0 up to low, 1 from high, linear between."""
    return min(1.0, max(0.0, (x - low) / (high - low)))
