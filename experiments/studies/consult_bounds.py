"""What the best possible doctor of `consult` reaches, exactly, by seed:

    python -m experiments.studies.consult_bounds --seeds=100,101,102

The doctor knows the table of the seed and the probabilities of wrong and unknown answers. Its policy maximises the mean
return over patients, by dynamic programming over all 4^10 sets of answers heard. Figures are means over the budgets:
right diagnoses, turns, and questions that are answered unknown. The demonstrator of stage 0 is beside it, simulated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import app, flags

from jaxmarl_llm.envs.consult import array as consult

HEARD = 4  # of a symptom: not asked, no, yes, unknown
PATIENTS = 4000  # of the simulated demonstrator


class Play(NamedTuple):
    """Means over patients. ``value``: return. ``accuracy``: right diagnoses. ``turns``. ``unknown``: answers."""

    value: float
    accuracy: float
    turns: float
    unknown: float


def likelihood(config: consult.Config) -> np.ndarray:
    """Probability of a diagnosis together with the answers heard [8, 4, ..., 4], one axis for each symptom."""
    of, rows = consult.table(config), []
    for row in of.symptoms:
        joint = np.full((), 1 / len(of.symptoms))
        for has, vague in zip(row, of.vague, strict=True):
            unknown = config.unknown * vague
            yes = (1 - unknown) * (1 - config.noise if has else config.noise)
            joint = joint[..., None] * np.array([1.0, 1 - unknown - yes, yes, unknown])
        rows.append(joint)
    return np.stack(rows).astype(np.float32)


def diagnosis_value(config: consult.Config, joint: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean reward of the best diagnosis after each set of answers, and the probability that it is right.

    Both are weighed by the probability of the answers. ``joint``: see `likelihood`.
    """
    agrees = np.zeros(joint.shape, np.int8)
    for d, row in enumerate(consult.table(config).symptoms):
        for s, has in enumerate(row):
            shape = [1] * len(row)
            shape[s] = HEARD
            agrees[d] += np.array([0, 1 - has, has, 0], np.int8).reshape(shape)
    best, right = np.full(joint.shape[1:], -1.0, np.float32), np.zeros(joint.shape[1:], np.float32)
    for named in range(len(joint)):
        level = agrees >= agrees[named]
        rivals = level.sum(0, dtype=np.int8) - 1  # without the named one
        worth = consult.RIGHT * joint[named]
        for truth in range(len(joint)):
            if truth != named:
                worth = worth + joint[truth] * np.maximum(consult.RIGHT - 1 - (rivals - level[truth]), 0)
        better = worth > best
        best, right = np.where(better, worth, best), np.where(better, joint[named], right)
    return best, right


def best_doctor(config: consult.Config, turn_rewards: float = 1.0) -> Play:
    """The doctor of highest mean return; of equal returns the one with the fewest turns.

    Args:
        config: Settings of the environment; ``budgets`` are the turns.
        turn_rewards: Weight of the rewards of questions.
    """
    joint = likelihood(config)
    mass, symptoms = joint.sum(0), joint.ndim - 1
    value, right = diagnosis_value(config, joint)
    named = np.stack([value, right, mass, np.zeros_like(mass)])  # the four figures of `Play`
    now, of_budget = named, []
    for left in range(1, config.turns + 1):
        if left > 1:
            now = _with_a_question(named, now, mass, symptoms, turn_rewards)
        if left >= config.budgets[0]:
            of_budget.append(now.reshape(len(now), -1)[:, 0])  # nothing was heard yet
    return Play(*np.mean(of_budget, axis=0).tolist())


def _with_a_question(
    named: np.ndarray, later: np.ndarray, mass: np.ndarray, symptoms: int, weight: float
) -> np.ndarray:
    """The figures [4, ...] with one more turn: a diagnosis now, or the best question and ``later``."""
    best = named.copy()
    for s in range(symptoms):
        ask: list[int | slice] = [slice(None)] * symptoms
        ask[s] = 0
        before = tuple(ask)
        asked = later.take([1, 2, 3], axis=1 + s).sum(1 + s)
        unknown = mass.take(3, axis=s)
        asked[0] += weight * (mass[before] - 2 * unknown)  # 1 for an answer, -1 for unknown
        asked[2] += mass[before]
        asked[3] += unknown
        old = best[(slice(None), *before)]
        ahead = asked[0] - 1e-6 * asked[2] > old[0] - 1e-6 * old[2]
        best[(slice(None), *before)] = np.where(ahead, asked, old)
    return best


def demonstrator(config: consult.Config) -> Play:
    """The demonstrator of stage 0, over simulated training patients; ``value`` is left out (NaN)."""
    rng, of = np.random.default_rng(0), consult.table(config)
    figures = np.zeros(3)
    for _ in range(PATIENTS):
        diagnosis, answers, budget = patient = consult.drawn(rng, config, of)
        moves = [move for _, move in consult.consultation(rng, config, of, patient)]
        questions = {move for move in moves if move in consult.SYMPTOMS}
        unknown = sum(answers[consult.SYMPTOMS.index(move)] == consult.UNKNOWN for move in questions)
        figures += (moves[-1] == consult.DIAGNOSES[diagnosis], len(moves), unknown)
    return Play(np.nan, *(figures / PATIENTS).tolist())


def main(argv: Sequence[str]) -> None:
    for seed in map(int, flags.FLAGS.seeds):
        config = consult.Config(seed=seed)
        for name, play in {
            "all rewards": best_doctor(config),
            "turn rewards off": best_doctor(config, 0.0),
            "demonstrator": demonstrator(config),
        }.items():
            line = f"accuracy {play.accuracy:.3f}, turns {play.turns:.2f}, unknown {play.unknown:.2f}"
            sys.stdout.write(f"seed {seed}, {name}: {line}\n")


if __name__ == "__main__":
    flags.DEFINE_list("seeds", ["100", "101", "102"], "Seeds of the tables.")
    app.run(main)
