"""The closed list of specialists of `call_team`, and the rule that says which one owns a function.

The rule reads the name of a function and its description, and the data set that the function comes from. It never reads
a query, an argument's value or an answer. Functions of tau-bench retail belong to ``trade``. For all others it counts
stems: a word of the name counts 2, a word of the description counts 1, and each stem of a specialist counts once. The
largest sum wins, and the earlier specialist in the list wins a tie. A function without any stem belongs to ``office``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SPECIALISTS: Mapping[str, str] = {  # name -> what the master reads about it
    "maths": "numbers, statistics, physics, biology",
    "places": "weather, maps, travel, hotels, food",
    "trade": "money, prices, stocks, shops, orders",
    "culture": "games, sports, music, art, history",
    "office": "accounts, health, law, files, devices",
}
_STEMS: Mapping[str, str] = {
    "maths": (
        "math maths geometr algebra calculus equation quadratic triangle circle circumference "
        "rectangle area angle vector matrix probabilit binomial dice statistic regression distribution "
        "hypothesis ttest integr derivative factor factorial gcd lcm hcf prime power sum sort array histogram sine "
        "average velocity speed acceleration kinematic displacement magnet electr capacit resonant frequency energy "
        "entropy thermo heat density pressure molecul atom dna gene genetic cell protein biolog species evolution "
        "mutation neuron brain ecolog population wildlife forest bacteria physics chemi science scientif discover "
        "multiply chi random bmi cagr similarity fitness clock slope carbon emission gas numeric "
        "integer weight growth"
    ),
    "places": (
        "weather forecast humidity precipitation temperature air uv climate location nearby nearest locate city cities "
        "hotel room flight travel trip itinerary route routing direction map driving distance traffic ride taxi "
        "parking park restaurant cuisine sushi food beer recipe cooking meal diet vegan nutrition grocer hospital "
        "mountain coordinate geograph "
        "country countries capital timezone zone library libraries nurser"
    ),
    "trade": (
        "price pricing stock currency exchange bank invest interest financ fund dividend market order purchase "
        "shop store buy sale sales tax revenue profit compan cost budget portfolio loan credit npv roi payment product "
        "inventory walmart brand auction worth equity economic gdp cash return deposit balance items"
    ),
    "culture": (
        "game chess poker card deck sport player team soccer football basketball cricket nba nfl athlete league "
        "match scoring music song melody chord concert instrument guitar artist album art artwork painting paint "
        "sculpture museum exhibition movie film theater genre book publication history historical president monarch "
        "king war battle religio religion pope zodiac celebrit invention event news "
        "color"
    ),
    "office": (
        "user account password token login database record query sql file command controller todo task agenda "
        "alarm reminder meeting schedul email message chat contact employee project service api device bluetooth "
        "volume appliance patient doctor health symptom registration appointment emergency medical law legal lawsuit "
        "court case crime criminal lawyer felon contract translat language text string image document dictionary "
        "calculator search speech scene switch register profile person personalit psych version telemetry "
        "classif answer"
    ),
}


def _words(text: str) -> frozenset[str]:
    """The words of ``text`` in small letters. Names in camel case are parted."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text)
    return frozenset(re.findall(r"[a-z]+", parted.lower()))


def _hits(words: frozenset[str], stems: frozenset[str]) -> int:
    return sum(any(w == s or (len(s) > 3 and w.startswith(s)) for w in words) for s in stems)


_OWN = {name: frozenset(stems.split()) for name, stems in _STEMS.items()}


def owner(name: str, description: str, source: str) -> str:
    """The specialist that owns a function.

    Args:
        name: Of the function.
        description: What upstream says that the function does; "" where upstream says nothing.
        source: Data set: bfcl, apibank or retail.

    Returns:
        A name of `SPECIALISTS`.
    """
    if source == "retail":
        return "trade"
    named, told = _words(name), _words(description)
    points = {s: 2 * _hits(named, stems) + _hits(told, stems) for s, stems in _OWN.items()}
    best = max(points, key=points.__getitem__)
    return best if points[best] else "office"
