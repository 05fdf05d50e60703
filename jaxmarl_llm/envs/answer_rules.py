"""The field's own answer rules for text: question answering and mathematics. Pure, thread safe, without signals.

Sources. Question answering: SQuAD v1.1's normalisation and the yes/no rule of the official HotpotQA evaluation.
Mathematics: exact rational comparison first, then math-verify with its alarms switched off (SIGALRM works in the main
thread only). A filter before it refuses text on which a computer-algebra system could hang. Function calls have their
own rules in ``calls.py``, whose names are available here as well.

All functions return a verdict for any text; they raise only on a malformed gold answer.
"""

from __future__ import annotations

import logging
import re
import string
from collections import Counter
from fractions import Fraction

from jaxmarl_llm.envs.assistant.function_calls import Call, call_score, gold_calls, matched_calls, parse_call, same_call

__all__ = [
    "Call",
    "call_score",
    "exact_match",
    "final_answer",
    "gold_calls",
    "matched_calls",
    "math_equal",
    "normalize_answer",
    "parse_call",
    "same_call",
    "token_f1",
]

_PUNCTUATION = frozenset(string.punctuation)

# -- question answering ------------------------------------------------------------------------------------------------


def normalize_answer(text: str) -> str:
    """Bring ``text`` to lower case, without punctuation and articles, with single spaces (SQuAD v1.1)."""
    text = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, gold: str) -> bool:
    """Whether ``prediction`` and ``gold`` are equal after `normalize_answer`."""
    return normalize_answer(prediction) == normalize_answer(gold)


def token_f1(prediction: str, gold: str) -> float:
    """Token F1 of ``prediction`` and ``gold`` in [0, 1] (HotpotQA).

    If either is yes, no or noanswer, anything but equality scores 0.
    """
    p, g = normalize_answer(prediction), normalize_answer(gold)
    if p != g and {p, g} & {"yes", "no", "noanswer"}:
        return 0.0
    p_tokens, g_tokens = p.split(), g.split()
    same = sum((Counter(p_tokens) & Counter(g_tokens)).values())
    if not same:
        return float(p == g)
    return 2 * same / (len(p_tokens) + len(g_tokens))


# -- mathematics -------------------------------------------------------------------------------------------------------

MAX_MATH = 200  # characters of an answer that are looked at; longer ones are wrong
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\$|\\\$)?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_MARK = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)\s*:?", re.I)
_SAFE = frozenset(
    re.findall(
        r"\w+",
        "frac dfrac tfrac sqrt pi cdot times div left right text mathrm mathbf circ infty theta alpha beta pm leq geq "
        "le ge in cup cap sin cos tan log ln exp begin end pmatrix quad",
    )
)


def final_answer(text: str) -> str:
    r"""Result that the solution ``text`` states; '' where there is none.

    In this order: the last ``\boxed{}``, the line after the last ``####`` or ``answer:``, a bare formula as it is, the
    last number. Only the last 4,000 characters are read.
    """
    text = text[-4000:]
    at = text.rfind("\\boxed{")
    if at >= 0:
        start, depth = at + 7, 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if not depth:
                return text[start:i].strip()
        return ""
    marks = [m.end() for m in _MARK.finditer(text)]
    hashes = text.rfind("####")
    if hashes >= 0:
        marks.append(hashes + 4)
    if marks:
        return text[max(marks) :].strip().split("\n")[0].strip()
    if len(text) <= MAX_MATH and not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text):
        return text.strip()  # a bare formula, without a word of prose
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else ""


def _rational(text: str) -> Fraction | None:
    """The number that ``text`` states, with or without a unit in words; None if it states none or several."""
    text = text.replace("−", "-").replace("\\$", "").replace("$", "").replace("\\%", "").replace("%", "")
    text = re.sub(r"\\[,;! ]|\*\*(?=\s|$)|^\*\*", "", text).strip().rstrip(".")
    if "=" in text:
        text = text.rsplit("=", 1)[1]
    found = re.findall(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s*/\s*\d+)?", text)
    if len(found) != 1 or re.search(r"[\\^*+(){}\[\]]", text.replace(found[0], "", 1)):
        return None
    rest = text.replace(found[0], "", 1)
    if re.search(r"\d", rest) or re.search(r"(?:^|\W)[-/](?:\W|$)", rest):
        return None
    if not re.fullmatch(r"[-+]?(\d{1,3}(,\d{3})+|\d*)(\.\d+)?(\s*/\s*\d+)?", found[0]):
        return None  # commas that do not group thousands
    try:
        return Fraction(found[0].replace(",", "").replace(" ", ""))
    except (ValueError, ZeroDivisionError):
        return None


def _tame(text: str) -> bool:
    """True if a computer-algebra system finishes on ``text``: short, shallow, known commands, small powers."""
    if len(text) > MAX_MATH or "!" in text or re.search(r"\d{16}", text):
        return False
    depth = deepest = 0
    for c in text:
        depth += (c in "{([") - (c in "})]")
        deepest = max(deepest, depth)
    if deepest > 6 or any(c not in _SAFE for c in re.findall(r"\\([A-Za-z]+)", text)):
        return False
    power = 1
    for _, inside, bare in re.findall(r"(\^|\*\*)\s*(?:[{(]([^{}()]*)[})]|(-?\w))?", text):
        exponent = inside or bare
        if not exponent or "^" in exponent or "**" in exponent or not re.fullmatch(r"-?[\w/ .]{1,6}", exponent):
            return False
        power *= max([int(n) for n in re.findall(r"\d+", exponent)] + [1])
    return power <= 1000


def math_equal(prediction: str, gold: str) -> bool:
    """Whether the answer that ``prediction`` states is equal to ``gold``. ``prediction`` may be a whole solution.

    Two different numbers after an answer mark are no answer, so hedging does not pay.
    """
    if not gold.strip():
        raise ValueError("math_equal: empty gold answer")
    answer, reference = final_answer(prediction), gold.strip()
    if re.search(r"####|\\boxed\{", gold):  # the gold answer may be a whole solution as well
        reference = final_answer(gold)
    if len(answer) > MAX_MATH or not answer:
        return False
    if answer == reference:
        return True
    p, g = _rational(answer), _rational(reference)
    if p is not None and g is not None:
        return p == g
    if not (_tame(answer) and _tame(reference)):
        return False
    from math_verify import parse, verify  # takes a second to import, and most answers are plain numbers

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its alarms are off, which is the point
    ours, theirs = (parse(f"${t.strip().strip('$').rstrip('.')}$", parsing_timeout=0) for t in (answer, reference))
    return bool(ours and theirs) and bool(verify(theirs, ours, timeout_seconds=0))
