"""MARSHAL on mini-Hanabi: self-play where there is a partner.

The model plays with itself. 1024 games of each seed, sampled as in training.
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.claims import Claim, Finding, minus
from experiments.studies.board_games import train

GOLDEN = "tests/envs/test_games.py"
STATUS = "mechanism implemented"
SEEDS = 5
BUDGET = "1500 supervised and 500 RL steps of 128 games"
CLAIMS = {
    "hanabi": Claim(
        "L",
        "mini-Hanabi: self-play raises the score by at least 0.2 fireworks over stage 0",
        "score after minus before",
        0.2,
        control="the model after stage 0",
        budget=BUDGET,
    ),
}


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    from experiments.configs.marshal import hanabi

    score = [seen["won"][:, 0, :, 0].mean(-1) for seen in train(hanabi(), seeds, ((True, True),))]
    say(f"mini-Hanabi score: {score[0].round(3)} -> {score[1].round(3)}")
    return [Finding("hanabi", minus(score[1], score[0]), {"before": score[0].tolist(), "after": score[1].tolist()})]
