"""The table of ablations: differences are paired by seed, corrected over all rows, and of unseen queries."""

import numpy as np
import pytest

from experiments.studies import ablations
from experiments.studies.paired import holm, p_value


def results(**arms):
    """Variant -> seed -> figures, from success on unseen queries by seed."""
    rest = dict.fromkeys(("tokens", "steps", "sequences", "model_updates", "seconds"), 1)
    shown = {f"{k}/{when}": 0.5 for k in ablations.SHOWN for when in ("before", "after")}
    names = {"reference": ablations.REFERENCE}
    return {
        names.get(name, name): {str(i): {**rest, **shown, f"{ablations.FIGURE}/after": x} for i, x in enumerate(values)}
        for name, values in arms.items()
    }


def test_contrasts_are_paired_and_corrected():
    rng = np.random.default_rng(0)
    base = rng.random(6)
    arms = {"worse": base - 0.3 + 0.001 * rng.random(6), "same": base + 0.0001 * rng.random(6), "noisy": rng.random(6)}
    got = ablations.contrasts(results(reference=base, **arms))
    assert {name: c["verdict"] for name, c in got.items()} == {
        "worse": "worse",
        "same": "no difference of 0.02",
        "noisy": "not decided",
    }
    p = {name: p_value(x - base, 0.02 * np.sign((x - base).mean())) for name, x in arms.items()}
    assert {name: c["holm"] for name, c in got.items()} == pytest.approx(holm(p))
    close = {name: base + shift + rng.normal(0, 0.05, 6) for name, shift in (("a", -0.06), ("b", -0.09), ("c", 0.08))}
    p = {name: p_value(x - base, 0.02 * np.sign((x - base).mean())) for name, x in close.items()}
    adjusted = {name: c["holm"] for name, c in ablations.contrasts(results(reference=base, **close)).items()}
    assert adjusted == pytest.approx(holm(p)) and max(adjusted[name] - p[name] for name in p) > 0.01
    assert got["noisy"]["detectable"] > got["worse"]["detectable"] > got["same"]["detectable"] > 0


def test_an_effect_of_nothing_is_seldom_called_one(monkeypatch):
    """Of 400 families of three rows without any effect, at most 5 % have a row that is called better or worse."""
    monkeypatch.setattr(ablations, "detectable", lambda *_: 0.0)  # slow, and not asked here
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(400):
        base = rng.normal(0.5, 0.1, 5)
        arms = {f"arm {i}": base + rng.normal(0, 0.05, 5) for i in range(3)}
        got = ablations.contrasts(results(reference=base, **arms))
        wrong += any(c["verdict"] in ("better", "worse") for c in got.values())
    assert wrong / 400 < 0.08


def test_the_table_has_the_difference_beside_the_row():
    lines = ablations.table(results(reference=[0.9, 0.8, 0.85], without=[0.6, 0.5, 0.55])).splitlines()
    assert lines[2].startswith(f"| {ablations.REFERENCE} | 0.850 ± 0.124 |  |  |  |")
    assert "| -0.300 ± 0.000 | worse (p 0) | 0.000 |" in lines[3]
