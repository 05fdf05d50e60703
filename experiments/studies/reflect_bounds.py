"""What teams of perfect roles and of demonstrators reach on the protocol `reflect` of programs, by playing episodes:

    python -m experiments.studies.reflect_bounds

A role is perfect where its demonstrator plants no mistakes. Roles read the shown examples alone. So a perfect team
passes the hidden tests that the first of the shortest programs for the shown examples passes. Tasks are those of the
workflow `code` of the recipe `unitymas_o`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from jaxmarl_llm.configs.unitymas_o import code
from jaxmarl_llm.envs.programs.array import Config
from jaxmarl_llm.envs.programs.language import code_of, results
from jaxmarl_llm.envs.programs.reflect import CODER, DEMONSTRATORS, PERFECT, Settings, Team, episode
from jaxmarl_llm.envs.programs.tasks import drawn, shown_text

TEAMS: dict[str, Team] = {
    "perfect": PERFECT,
    "perfect planner": DEMONSTRATORS._replace(sketch=PERFECT.sketch),
    "perfect coder": DEMONSTRATORS._replace(program=PERFECT.program, again=PERFECT.again),
    "perfect reflector": DEMONSTRATORS._replace(hint=PERFECT.hint),
    "demonstrators": DEMONSTRATORS,
}


class Reached(NamedTuple):
    """Means over tasks.

    Attributes:
        first: Share of the hidden tests that the first program passes.
        last: Share that the last program passes.
        programs: Programs of an episode.
    """

    first: float
    last: float
    programs: float


def reached(config: Config, team: Team, episodes: int = 2000, seed: int = 0) -> Reached:
    """What a team reaches on training tasks.

    Args:
        config: Settings of the environment.
        team: Who plays.
        episodes: Number of tasks.
        seed: Of tasks and mistakes.
    """
    rng, rows = np.random.default_rng(seed), []
    for _ in range(episodes):
        task = drawn(rng, config)
        written = [reply for role, _, reply in episode(rng, config, shown_text(task), team) if role == CODER]
        passed = [(results()[code_of(p), task.hidden[:, 0]] == task.hidden[:, 1]).mean() for p in written]
        rows.append((passed[0], passed[-1], len(written)))
    return Reached(*np.mean(rows, axis=0).tolist())


def main() -> None:
    """Print what each team reaches, with one to three reflections."""
    lengths = code().env.args["lengths"]
    for name, team in TEAMS.items():
        for reflections in (1, 2, 3):
            config = Config(protocol="reflect", lengths=lengths, reflect=Settings(reflections=reflections))
            got = reached(config, team)
            tests = f"hidden tests of the first program {got.first:.3f}, of the last {got.last:.3f}"
            print(f"{name:17} {reflections} reflections: {tests}; {got.programs:.2f} programs")


if __name__ == "__main__":
    main()
