"""How do helper and main share the work? A classifier of the cooperation schemes that MAGRPO's authors describe.

``classify`` reads the syntax trees (`code_flow`) and gives the first of these that holds:

    trivial_empty     the helper defines no aux that returns something it worked out: none, ``pass``, one constant or
                      its own argument
    trivial_unused    main does not call aux, or its value neither reaches nor decides what main returns
    trivial_wrapper   main returns aux's value unchanged, at most with guards around constants
    fallback          aux does the core; where its value is missing or fails a check, main works the answer out itself
    strategy_filter   aux's value is not returned: it decides a branch, or which items are kept
    coordinator       main puts several values of aux together: calls at several places, or in a loop
    decorator         main makes one value of aux into the answer
    other             main has no entry point, or is beyond analysis

The four schemes are named in the paper (arXiv 2508.04652, the section on cooperation schemes) without definitions;
these are ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxmarl_llm.envs.coding.analysis import syntax as code_ast
from jaxmarl_llm.envs.coding.analysis.values import Kind
from jaxmarl_llm.envs.coding.rewards import AUX, cooperation, works

SCHEMES = (
    "fallback", "decorator", "coordinator", "strategy_filter", "other",
    "trivial_empty", "trivial_unused", "trivial_wrapper",
)  # fmt: skip


def classify(helper_source: str, main_source: str, entry_point: str) -> str:
    """Cooperation scheme of a joint action: one of ``SCHEMES``.

    ``helper_source`` and ``main_source`` are completions: code, with or without fences and prose. ``entry_point``: name
    of the function that main writes.
    """
    helper, main = code_ast.code_of(helper_source), code_ast.code_of(main_source)
    if not (code_ast.parse(helper) and code_ast.defined(helper, AUX) and works(helper)):
        return "trivial_empty"
    found = cooperation(main, entry_point)
    if found is None:
        return "other"
    if not found.used:
        return "trivial_unused"
    if found.wrapper:
        return "trivial_wrapper"
    returned = any(o.kind >= Kind.ELEM for o in found.called)
    own = any(o.kind == Kind.OTHER and o.decided for o in found.called)
    several = found.sites > 1 or found.repeated
    if own and returned and not several:
        return "fallback"
    if not returned:
        return "strategy_filter"
    if several:
        return "coordinator"
    return "decorator" if any(o.kind in (Kind.ELEM, Kind.DERIVED) for o in found.called) else "other"


def count(pairs: Iterable[tuple[str, str, str]]) -> dict[str, int]:
    """Number of each scheme among ``pairs`` of (helper, main, entry point). Every scheme is a key, for logging."""
    counts = dict.fromkeys(SCHEMES, 0)
    for helper, main, entry_point in pairs:
        counts[classify(helper, main, entry_point)] += 1
    return counts
