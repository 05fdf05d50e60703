"""MARSHAL on tic-tac-toe: self-play where opponents differ.

Games against a player who takes any legal action, evenly, as first and as second player; an illegal action is a loss.
1024 games of each seed and seat, sampled as in training.

The five seeds take more than an hour on one core (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable

from experiments.claims import Claim, Finding
from experiments.studies.board_games import not_lost, train

GOLDEN = "tests/envs/test_games.py"
STATUS = "mechanism implemented"
SEEDS = 5
BUDGET = "1500 supervised and 1500 RL steps of 128 games"
CLAIMS = {
    "tic_tac_toe": Claim(
        "L",
        "tic-tac-toe: at least 0.9 of games against a random player are not lost",
        "share of games not lost, mean of both seats, minus 0.9",
        0.0,
        control="the fixed share 0.9",
        budget=BUDGET,
    ),
}


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    from experiments.configs.marshal import tic_tac_toe

    before, after = (not_lost(seen) for seen in train(tic_tac_toe(), seeds, ((True, False), (False, True))))
    say(f"tic-tac-toe, not lost to a random player, as first and second: {before.round(3)} -> {after.round(3)}")
    shown = {
        "before": before.mean(1).tolist(),
        "after": after.mean(1).tolist(),
        "after, first player": after[:, 0].tolist(),
        "after, second player": after[:, 1].tolist(),
    }
    return [Finding("tic_tac_toe", (after.mean(1) - 0.9).tolist(), shown)]
