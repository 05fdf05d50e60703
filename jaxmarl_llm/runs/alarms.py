"""Lines about metrics that go wrong while a run goes on, each with what to change.

An alarm compares the mean of the newest steps with that of the first ones after a start. It changes nothing in a run.
Pretrained models have stricter alarms. They lose diversity and hit the length limit while a reward still rises.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping

import numpy as np

FEW = 10  # steps of a mean
MANY = 50  # steps over which one component must dominate
COLLAPSED = 0.1  # of the entropy of the first steps
LONGER = 2.0  # times the length of the first steps
CUT = 0.9  # share of completions that the length limit ended
CUT_PRETRAINED = 0.2
FAR = 1.0  # nats per token between policy and reference
DOMINANT = 0.8  # share of a component in the variance of the reward
FLAT = 0.02  # of success, between the two halves of `MANY` steps
EQUAL = 0.5  # share of groups whose rewards are equal
UNSOLVED = 0.8  # share of the newest steps without any success

# Kind of an alarm -> what to change.
ADVICE = {
    "entropy": "lower config.optimizer.learning_rate, or raise config.loss.kl_coef or config.loss.entropy_coef",
    "length": "pay for short texts, or lower config.team.max_new_tokens",
    "truncated": "raise config.team.max_new_tokens, or pay only for texts that end",
    "kl": "raise config.loss.kl_coef, or lower config.optimizer.learning_rate",
    "component": "lower the weight of the component in config.reward, or pay it with success alone",
    "unsolved": "choose easier tasks, a longer stage 0 or a larger model, or pay form with success alone",
    "equal": "raise config.group or config.sampling.temperature, or choose tasks that are neither solved nor hopeless",
    "silent": "read episodes: the reward is likely higher without the role; raise config.loss.entropy_coef",
}


class Alarms:
    """Reads the metrics of every training step and says each alarm once.

    Entropy, length, truncation and equal groups alarm only while the reward is no higher than in the first steps. A
    solved task has low entropy and equal groups as well. With pretrained models entropy, truncation and equal groups
    alarm in any case. Two alarms more are then read: a role that is no longer called, and steps without success.

    Args:
        say: Prints one line.
        pretrained: Whether a model of the team began with weights that were trained elsewhere.
    """

    def __init__(self, say: Callable[[str], None] = print, *, pretrained: bool = False):
        self._say, self._pretrained = say, pretrained
        self._first: dict[str, list[float]] = collections.defaultdict(list)
        self._last: dict[str, collections.deque[float]] = collections.defaultdict(
            lambda: collections.deque(maxlen=MANY)
        )
        self._seen = 0  # RL steps
        self._called: dict[str, int] = {}  # key of the length of a role -> the last RL step that had it
        self._told: set[str] = set()

    def see(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in one step.

        Args:
            step: Its number, for the lines.
            metrics: Of `telemetry.keys`; a step without ``reward/total`` is no RL step and is left out.
        """
        if not np.isfinite(metrics.get("reward/total", np.nan)):
            return
        self._seen += 1
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
        if self._pretrained:
            self._unsolved(step)
            self._silent(step)

    def _agent(self, step: int, key: str, role: str, name: str) -> None:
        """Alarms about one metric of a role."""
        strict = self._pretrained
        if name == "length":
            self._called[key] = self._seen
        if len(self._last[key]) < (FEW if name == "kl" or strict else 2 * FEW):
            return
        now, then = self._recent(key), float(np.mean(self._first[key]))
        worse = self._recent("reward/total") <= float(np.mean(self._first["reward/total"]))
        why = "the reward is no higher" if worse and len(self._last[key]) >= 2 * FEW else ""
        if name == "entropy" and (worse or strict) and now < COLLAPSED * then:
            told = f"step {step}: entropy of role {role!r} fell from {then:.3g} to {now:.3g} nats per token"
            self._once(key, "entropy", told, why)
        if name == "length" and worse and now > LONGER * then:
            told = f"step {step}: completions of role {role!r} grew from {then:.3g} to {now:.3g} tokens"
            self._once(key, "length", told, why)
        if name == "truncated" and ((strict and now > CUT_PRETRAINED) or (worse and now > CUT)):
            told = f"step {step}: the length limit ends {now:.0%} of the completions of role {role!r}"
            self._once(key, "truncated", told, why)
        if name == "zero_variance" and (worse or strict) and now > EQUAL:
            told = f"step {step}: {now:.0%} of the groups of role {role!r} have equal rewards"
            self._once(key, "equal", told, why)
        if name == "kl" and now > FAR:
            self._once(key, "kl", f"step {step}: role {role!r} is {now:.3g} nats per token from the reference policy")

    def _component(self, step: int, key: str, name: str) -> None:
        """Alarm about a component that makes up the reward while success stays the same."""
        shares, success = self._last[key], np.array(self._last["success"])
        if name == "accuracy" or len(shares) < MANY or len(success) < MANY or min(shares) <= DOMINANT:
            return
        if success[MANY // 2 :].mean() - success[: MANY // 2].mean() < FLAT:
            told = f"step {step}: component {name!r} has {np.mean(shares):.0%} of the variance of the reward for {MANY}"
            self._once(key, "component", f"{told} steps", "success is no higher")

    def _unsolved(self, step: int) -> None:
        """Alarm about steps without success whose reward varies: only components beside success still do."""
        success, total = list(self._last["success"])[-FEW:], list(self._last["reward/total"])[-FEW:]
        if len(success) < FEW or max(total) - min(total) <= 0:
            return
        without = sum(value == 0 for value in success)
        if without >= UNSOLVED * FEW:
            told = (
                f"step {step}: {without} of {FEW} steps have no success, so nearly all that varies is other components"
            )
            self._once("success", "unsolved", told)

    def _silent(self, step: int) -> None:
        """Alarm about roles that played before, and have not for some steps."""
        for key, last in self._called.items():
            if self._seen - last >= FEW:
                role = key.split("/", 1)[1].rsplit("/", 1)[0]
                self._once(f"{key}, absent", "silent", f"step {step}: role {role!r} has not played for {FEW} steps")

    def _recent(self, key: str) -> float:
        """Mean of the newest steps."""
        return float(np.mean(list(self._last[key])[-FEW:]))

    def _once(self, key: str, kind: str, told: str, why: str = "") -> None:
        """Say a line and what to change, and that the line will not be said again. ``kind``: a key of `ADVICE`."""
        if key not in self._told:
            self._told.add(key)
            because = f", and {why}" if why else ""
            self._say(f"{told}{because}: {ADVICE[kind]} (said once; {key} in metrics.jsonl)")


def replay(rows: Iterable[Mapping[str, float]], *, pretrained: bool) -> list[str]:
    """The lines that a run with these metrics says.

    Args:
        rows: Metrics of its steps, with ``step``, as `telemetry.metrics_file.read_metrics` returns them.
        pretrained: As of `Alarms`.
    """
    lines: list[str] = []
    alarms = Alarms(lines.append, pretrained=pretrained)
    for row in rows:
        alarms.see(int(row["step"]), {key: value for key, value in row.items() if value is not None})
    return lines
