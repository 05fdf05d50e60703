"""Claims about systems: each is stated and committed before its run, and decided by an interval over paired seeds.

A module has ``GOLDEN`` (its test file), ``STATUS``, ``SEEDS`` (their number), ``CLAIMS`` ({name: `Claim`}) and
``run(seeds, say) -> [Finding]`` with one finding for each claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from experiments.studies.common import student
from jaxmarl_llm.errors import ConfigError

CALIBRATION = [100, 101, 102]  # seeds that claims are prepared on; no claim is decided by them


@dataclass(frozen=True)
class Claim:
    """What is claimed, fixed before the run.

    Attributes:
        kind: ``U`` (a count or an exact figure), ``L`` (learns, against a control) or ``X`` (an ingredient taken out).
        text: One sentence.
        effect: The statistic: one value a seed. Both arms of a difference have the same seed, tasks and keys.
        delta: The smallest effect worth having; below 0: the worst loss that is still called no loss.
        control: What the effect is measured against.
        budget: Training of each arm: steps, and tasks or samples a step.
    """

    kind: str
    text: str
    effect: str
    delta: float
    control: str
    budget: str

    def __post_init__(self) -> None:
        words = (self.text, self.effect, self.control, self.budget)
        if self.kind not in ("U", "L", "X") or not np.isfinite(self.delta) or not all(words):
            wanted = "a kind U, L or X, a text, an effect, a finite delta, a control and a budget"
            raise ConfigError(f"claim {self.text!r}: expected {wanted}")


class Finding(NamedTuple):
    """What a run found on one claim.

    Attributes:
        claim: Its name.
        effect: The statistic of each seed.
        figures: The arms: label -> one value a seed.
    """

    claim: str
    effect: list[float]
    figures: dict[str, list[float]]


HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"


def decide(claim: Claim, effect: Any) -> str:
    """Whether the 95 % interval of the mean effect over seeds (Student's t) lies above delta.

    Below delta the claim does not hold. An interval around delta decides nothing: more seeds would. A claim of kind
    ``U`` is no estimate: every value has to reach delta.
    """
    values = np.asarray(effect, float)
    if not np.isfinite(values).all():
        return FAILS
    if claim.kind == "U":
        return HOLDS if (values >= claim.delta).all() else FAILS
    mean, half = student(values)
    if mean - half > claim.delta:
        return HOLDS
    return FAILS if mean + half < claim.delta else OPEN


def minus(a: Any, b: Any) -> list[float]:
    """The paired difference of two arms, by seed."""
    return (np.asarray(a, float) - np.asarray(b, float)).tolist()


def arms(label: str, values: Mapping[str, Any]) -> dict[str, list[float]]:
    """Figures of several arms: ``label, arm`` -> one value a seed."""
    return {f"{label}, {name}": np.asarray(x, float).tolist() for name, x in values.items()}


def calibrate(run: Callable[[list[int], Callable[[str], None]], list[Finding]]) -> None:
    """Print the arms and the effects of the calibration seeds. ``run``: of a module of claims."""
    for finding in run(CALIBRATION, lambda line: print(line, flush=True)):
        print(finding.claim, np.round(finding.effect, 3).tolist())
