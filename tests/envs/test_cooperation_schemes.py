"""Cooperation schemes on examples written by hand, at least four of each with variations."""

import pytest

from jaxmarl_llm.envs.coding import cooperation_schemes
from jaxmarl_llm.envs.coding.analysis.flow import flow
from jaxmarl_llm.envs.coding.analysis.syntax import parse
from jaxmarl_llm.envs.coding.cooperation_schemes import classify, count

AUX = "def aux(x):\n    return x * 2\n"
EXAMPLES = {
    "fallback": [
        "def f(x):\n    try:\n        return aux(x)\n    except Exception:\n        return x + x",
        "def f(x):\n    r = aux(x)\n    if r is None:\n        return sum([x, x])\n    return r",
        "def f(x):\n    return aux(x) or x + x",
        "def f(x):\n    r = aux(x)\n    if not isinstance(r, int):\n        r = x + x\n    return r",
        "def own(x):\n    return x + x\n\ndef f(x):\n    got = aux(x)\n    return own(x) if got is None else got",
    ],
    "decorator": [
        "def f(x):\n    return aux(x) + 1",
        "def f(x):\n    r = aux(x)\n    if r is None:\n        return []\n    return sorted(r)",
        "def f(x):\n    first, second = aux(x)\n    return first",
        "def f(x):\n    r = aux(x)\n    r.sort()\n    return r",
        "def f(x):\n    return f'{aux(x)} items'",
        "def f(x):\n    r = aux(x)\n    if r < 0:\n        return -r\n    return r",
    ],
    "coordinator": [
        "def f(x):\n    return aux(x) + aux(x + 1)",
        "def f(xs):\n    return [aux(x) for x in xs]",
        "def f(xs):\n    total = 0\n    for x in xs:\n        total += aux(x)\n    return total",
        "def f(xs):\n    return max(map(aux, xs))",
        "def f(a, b):\n    left = aux(a)\n    right = aux(b)\n    return left if left > right else right",
        "def f(xs):\n    return sorted(xs, key=lambda x: aux(x))",
    ],
    "strategy_filter": [
        "def f(xs):\n    return [x for x in xs if aux(x)]",
        "def f(n, x, y):\n    if aux(n):\n        return x\n    return y",
        "def f(n):\n    while not aux(n):\n        n += 1\n    return n",
        "def f(xs):\n    return list(filter(aux, xs))",
        "def f(xs):\n    out = []\n    for x in xs:\n        if aux(x):\n            out.append(x * x)\n    return out",
        "def f(n):\n    mode = aux(n)\n    if mode == 'even':\n        return n // 2\n    return 3 * n + 1",
    ],
    "trivial_unused": [
        "def f(x):\n    return x + x",
        "def f(x):\n    # aux(x)\n    return x + x",
        "def f(x):\n    aux(x)\n    return x + x",
        "def f(x):\n    r = aux(x)\n    return x + x",
        "def f(x, aux=abs):\n    return aux(x) + 1",
        "def f(x):\n    if False:\n        return aux(x)\n    return x + x",
    ],
    "trivial_wrapper": [
        "def f(x):\n    return aux(x)",
        "def f(x):\n    '''doc'''\n    r = aux(x)\n    s = r\n    return s",
        "def f(x):\n    if not x:\n        return 0\n    return aux(x)",
        "def f(x):\n    r = aux(x)\n    if r is None:\n        return []\n    return r",
        "def f(xs):\n    out = []\n    for v in aux(xs):\n        out.append(v)\n    return out",
        "def f(x):\n    if aux(x):\n        return True\n    else:\n        return False",
    ],
    "other": [
        "",
        "def g(x):\n    return aux(x)",
        "f = lambda x: aux(x)",
        "def f(x:\n    return aux(x)",
        "async def f(x):\n    return aux(x)",
    ],
}  # fmt: skip


@pytest.mark.parametrize("scheme", EXAMPLES)
def test_examples(scheme):
    assert len(EXAMPLES[scheme]) >= 4
    for main in EXAMPLES[scheme]:
        assert classify(AUX, main, "f") == scheme, main
        assert classify(f"```python\n{AUX}```", f"Here:\n```python\n{main}\n```\n", "f") == scheme, main


EMPTY = ["", "no code", "def aux(x):\n    pass", "def aux(x):\n    return", "def aux(x):\n    return x",
         "def aux(x):\n    '''doc'''\n    return None", "def aux():\n    return 0", "def helper(x):\n    return x * 2",
         "class aux:\n    pass", "def aux(x:\n    return x * 2"]  # fmt: skip


@pytest.mark.parametrize("helper", EMPTY, ids=range(len(EMPTY)))
def test_empty_helpers(helper):
    for main in ("def f(x):\n    return aux(x) + 1", "def f(x):\n    return x", ""):
        assert classify(helper, main, "f") == "trivial_empty"


def test_every_scheme_has_examples_and_is_counted():
    pairs = [(AUX, main, "f") for mains in EXAMPLES.values() for main in mains] + [(e, "", "f") for e in EMPTY]
    counts = count(pairs)
    assert tuple(counts) == cooperation_schemes.SCHEMES and sum(counts.values()) == len(pairs)
    assert counts == {k: len(v) for k, v in EXAMPLES.items()} | {"trivial_empty": len(EMPTY)}
    assert count([]) == dict.fromkeys(cooperation_schemes.SCHEMES, 0)


def test_flow_is_bounded():
    wide = "def f(x):\n" + "".join(f"    if x > {i}:\n        y{i} = aux(x)\n" for i in range(40))
    wide += "    return " + " + ".join(f"y{i}" for i in range(40))
    assert flow(parse(wide), "f", "aux") is None or flow(parse(wide), "f", "aux").used
    chain = "".join(f"def g{i}(x):\n    return g{i + 1}(x) + g{i + 1}(x)\n" for i in range(30))
    found = flow(parse(f"{chain}def g30(x):\n    return aux(x)\ndef f(x):\n    return g0(x)\n"), "f", "aux")
    assert found is None or not found.used  # beyond the depth that is followed
    assert flow(parse("def f(x):\n    return f(x - 1) + aux(x)"), "f", "aux").used
    assert flow(parse("def f(x):\n    return g(x)\ndef g(x):\n    return f(x)"), "f", "aux").used is False
    assert flow(parse("x = 1"), "f", "aux") is None
