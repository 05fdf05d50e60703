"""The study of stale rollouts: arms differ in what they say, and the table decides by all seeds alone."""

import dataclasses
import re

import numpy as np
import pytest

from experiments.claims import FAILS, HOLDS, OPEN
from experiments.studies import staleness
from jaxmarl_llm.config import fingerprint
from jaxmarl_llm.errors import ConfigError


def part(name, area, first=0):
    """A recorded part of an arm."""
    seeds = list(range(first, first + len(area)))
    figures = {"seeds": seeds, "area": list(area), "last": list(area), "minutes": 1.0}
    settings = fingerprint(staleness.configuration(staleness.ARMS[name]))
    return {**figures, "settings": settings, "date": "2026-11-28", "commit": "abc", "machine": "a CPU"}


def test_arms_differ_in_staleness_and_its_weight_alone():
    reference = staleness.configuration(staleness.ARMS[staleness.NOW])
    assert reference.staleness == 0 and reference.loss.tis_clip is None
    seen = set()
    for changes in staleness.ARMS.values():
        cfg = staleness.configuration(changes)
        seen.add((cfg.staleness, cfg.loss.tis_clip))
        back = dataclasses.replace(cfg, staleness=0, loss=dataclasses.replace(cfg.loss, tis_clip=None))
        assert back == reference
    assert seen == {(0, None), (1, 2.0), (1, None), (staleness.FAR, 2.0), (staleness.FAR, None)}


@pytest.mark.parametrize(
    "seeds, gain, verdict", [(20, 0.0, HOLDS), (19, 0.0, OPEN), (20, -0.1, FAILS), (20, -0.02, OPEN)]
)
def test_a_claim_is_decided_by_its_interval_with_all_seeds(seeds, gain, verdict):
    noise = np.random.default_rng(0).normal(0, 0.01, seeds)
    area = np.linspace(0.3, 0.5, seeds)
    half = seeds // 2
    stale = area + gain + noise - noise.mean()
    done = {
        staleness.NOW: [part(staleness.NOW, area[half:], half), part(staleness.NOW, area[:half])],
        staleness.ONE_WEIGHED: [part(staleness.ONE_WEIGHED, stale)],
    }
    if seeds == 19:  # seeds of one arm alone change nothing
        done[staleness.ONE_WEIGHED].append(part(staleness.ONE_WEIGHED, [9.0], 50))
    (row,) = re.findall(r"\| rollouts one step behind.*", staleness.table(done))
    assert f"**{verdict}**" in row and f"| {gain:.3f} ±" in row.replace("-0.000", "0.000")


def test_a_record_of_another_configuration_is_refused():
    done = {staleness.ONE: [part(staleness.ONE, [0.1])]}
    staleness.check(done, "here")
    done[staleness.ONE][0]["settings"] = "another"
    with pytest.raises(ConfigError, match="here: 1 step behind: recorded with another configuration"):
        staleness.check(done, "here")
    with pytest.raises(ConfigError, match="here: no arm 'two'"):
        staleness.check({"two": []}, "here")


@pytest.mark.slow
def test_an_arm_is_measured_by_seed():
    """With two steps of a tiny form: the curve has a value a step, and seeds differ."""
    cfg = staleness.configuration(staleness.ARMS[staleness.ONE_WEIGHED])
    tiny = dataclasses.replace(cfg, steps=2, batch=2, group=2, sft=dataclasses.replace(cfg.sft, steps=2, batch=2))
    tiny = dataclasses.replace(tiny, env=dataclasses.replace(cfg.env, eval_tasks=4))
    both = staleness.measure(tiny, [3, 4])
    assert both["seeds"] == [3, 4] and np.shape(both["curve"]) == (2, 2) and len(both["last"]) == 2
    np.testing.assert_allclose(both["area"], np.mean(both["curve"], axis=1), atol=1e-4)
    assert both["settings"] == fingerprint(tiny)
