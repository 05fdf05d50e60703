"""Lines about metrics that go wrong while a run goes on: entropy, length, distance to the reference, one component.

An alarm compares the mean of the newest steps with that of the first ones after a start. It changes nothing in a run.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping

import numpy as np

FEW = 10  # steps of a mean
MANY = 50  # steps over which one component must dominate
COLLAPSED = 0.1  # of the entropy of the first steps
LONGER = 2.0  # times the length of the first steps
CUT = 0.9  # share of completions that the length limit ended
FAR = 1.0  # nats per token between policy and reference
DOMINANT = 0.8  # share of a component in the variance of the reward
FLAT = 0.02  # of success, between the two halves of `MANY` steps


class Alarms:
    """Reads the metrics of every training step and says each alarm once.

    Entropy, length and truncation alarm only while the reward is no higher than in the first steps. A solved task has
    low entropy as well.

    Args:
        say: Prints one line.
    """

    def __init__(self, say: Callable[[str], None] = print):
        self._say = say
        self._first: dict[str, list[float]] = collections.defaultdict(list)
        self._last: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=MANY)
        )
        self._told: set[str] = set()

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in one step.

        Args:
            step: Its number, for the lines.
            metrics: Of `telemetry.keys`; a step without ``reward/total`` is no RL step and is left out.
        """
        if not np.isfinite(metrics.get("reward/total", np.nan)):
            return
        for key, value in metrics.items():
            if np.isfinite(value):
                self._last[key].append(float(value))
                if len(self._first[key]) < FEW:
                    self._first[key].append(float(value))
        for key in metrics:
            kind, _, rest = key.partition("/")
            if kind == "agent":
                self._agent(step, key, *rest.rsplit("/", 1))
            elif kind == "reward_variance":
                self._component(step, key, rest)

    def _agent(self, step: int, key: str, role: str, name: str) -> None:
        """Alarms about one metric of a role."""
        if len(self._last[key]) < 2 * FEW and name != "kl":
            return
        now, then = self._recent(key), float(np.mean(self._first[key]))
        worse = self._recent("reward/total") <= float(np.mean(self._first["reward/total"]))
        if name == "entropy" and worse and now < COLLAPSED * then:
            self._once(key, f"step {step}: entropy of role {role!r} fell from {then:.3g} to {now:.3g} nats per token")
        if name == "length" and worse and now > LONGER * then:
            self._once(key, f"step {step}: completions of role {role!r} grew from {then:.3g} to {now:.3g} tokens")
        if name == "truncated" and worse and now > CUT:
            self._once(key, f"step {step}: the length limit ends {now:.0%} of the completions of role {role!r}")
        if name == "kl" and len(self._last[key]) >= FEW and now > FAR:
            self._once(key, f"step {step}: role {role!r} is {now:.3g} nats per token from the reference policy", "")

    def _component(self, step: int, key: str, name: str) -> None:
        """Alarm about a component that makes up the reward while success stays the same."""
        shares, success = self._last[key], np.array(self._last["success"])
        if name == "accuracy" or len(shares) < MANY or len(success) < MANY or min(shares) <= DOMINANT:
            return
        if success[MANY // 2 :].mean() - success[: MANY // 2].mean() < FLAT:
            told = f"step {step}: component {name!r} has {np.mean(shares):.0%} of the variance of the reward for {MANY}"
            self._once(key, f"{told} steps", "success is no higher")

    def _recent(self, key: str) -> float:
        """Mean of the newest steps."""
        return float(np.mean(list(self._last[key])[-FEW:]))

    def _once(self, key: str, told: str, why: str = "the reward is no higher") -> None:
        """Say a line, and that it will not be said again."""
        if key not in self._told:
            self._told.add(key)
            self._say(f"{told}{f', and {why}' if why else ''} (said once; {key} in metrics.jsonl)")
