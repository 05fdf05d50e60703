"""OPTAGENT on `debate`: the edited graphs against the fixed complete graph and the best fixed ring, and reflections.

Speakers and meta-roles are scripted: these are claims about the loop of debates, reflections and edits, and not about a
language model in it. Nothing is trained. Arms have the same tasks and first answers, seed by seed.

- ``edited``: 12 debates, each with a reflection and an edit, from the complete graph with weights of 1.
- ``withheld``: the same, but act sees ... in place of every reflection. It then keeps the graph, as its script says.
- ``complete``, ``ring``: fixed graphs. The ring is the best of the 12 rings for all trials of the seed.

A figure is the share of trial questions whose vote is right, over 256 held-out tasks of 16 trials. Trial questions are
held out, the questions of the edits are not. One of four speakers is right with probability .95, the others with .5,
among 3 answers. Which speaker is the expert differs between tasks.

`experiments.studies.debate_graphs` has exact figures, as means over the place of the expert. The complete graph has
.7625, and so has every ring. The best possible rule has .95 for one who knows the expert, and .7625 for one who does
not. So .1875 can be won in each claim, and .05 is less than half of it.

Calibrated on seeds 100, 101, 102. Figures are in this order.

- Vote accuracy of ``edited``: .925 .915 .901; of ``complete``: .774 .758 .765.
- The best ring has the figure of the complete graph. On both, the vote is the most frequent first answer. So has
  ``withheld``, whose graph stays the complete one.
- Practice debates with a right vote, of 12: 9.96 9.87 9.96. Edges of the last graph: 8.0 8.0 8.2, of 12 at first.
- So the effects were .151 .157 .136 of accuracy in all three claims.
- An earlier script of act followed the first speaker where its prompt showed no reflection. Then ``withheld`` had .635
  .625 .634, below the complete graph, and the third effect was .291 .290 .267. That control was too weak.

    python -m experiments.claims.optagent       the calibration seeds, 100 to 102, in a minute on one core
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import CALIBRATION, Claim, Finding, arms, minus
from experiments.studies.debate_graphs import rings
from jaxmarl_llm.envs.debate.array import Config, first_graph, make, make_tasks, trial_accuracy
from jaxmarl_llm.envs.debate.scripts import parameters, scripted_team
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array import make_rollout, start
from jaxmarl_llm.rollout.keys import EVALUATION, stream
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.types import PyTree

GOLDEN = "tests/envs/test_debate.py"
STATUS = "mechanism implemented"
SEEDS = 5
TASKS = 256  # held-out tasks of a seed
BUDGET = "no training, speakers and meta-roles are scripted; 256 tasks of 12 debates, each with an edit, then 16 trials"
CLAIMS = {
    "complete": Claim(
        "L",
        "with scripted meta-roles, vote accuracy on held-out questions is at least 0.05 above the fixed complete graph",
        "held-out vote accuracy, edited graph minus complete graph",
        0.05,
        control="the complete graph with weights of 1",
        budget=BUDGET,
    ),
    "ring": Claim(
        "L",
        "with scripted meta-roles, vote accuracy on held-out questions is at least 0.05 above the best fixed ring",
        "held-out vote accuracy, edited graph minus best ring of the seed",
        0.05,
        control="the best directed ring, found by enumeration on the trials themselves",
        budget=BUDGET,
    ),
    "reflections": Claim(
        "X",
        "scripted meta-roles without reflections reach a vote accuracy that is lower by at least 0.05",
        "held-out vote accuracy, with reflections minus reflections withheld from act",
        0.05,
        control="act is shown ... in place of every reflection",
        budget=f"{BUDGET}, in each arm",
    ),
}
FACTS = ("practice", "kept", "edges", "impossible", "unclear")


def player(config: Config) -> Callable[[PyTree, jax.Array], dict[str, jax.Array]]:
    """(tasks, key) -> mean return of each component over episodes of the scripted meta-roles.

    Args:
        config: Settings of the environment.
    """
    team = scripted_team(config)
    rollout = make_rollout(team, make(config), single(), Sampling())

    def play(tasks: PyTree, key: jax.Array) -> dict[str, jax.Array]:
        moves = rollout(parameters(team), {}, tasks, key, jnp.int32(0)).transitions
        return {name: values[:, 0].sum() / TASKS for name, values in moves.rewards.items()}

    return jax.jit(play)


def fixed(config: Config) -> Callable[[PyTree, jax.Array, jax.Array], jax.Array]:
    """(tasks, key, graphs [n S S]) -> accuracy [n] of fixed graphs on the trials that `player` has with that key.

    Args:
        config: Settings of the environment.
    """

    def measure(tasks: PyTree, key: jax.Array, graphs: jax.Array) -> jax.Array:
        states = start(make(config), tasks, key).state
        of = lambda graph: jax.vmap(lambda state: trial_accuracy(config, state, graph))(states).mean()
        return jax.vmap(of)(graphs)

    return jax.jit(measure)


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    config = Config()
    config.check("config.env.args")
    edited, withheld = (player(dataclasses.replace(config, withhold=hides)) for hides in (False, True))
    measure = fixed(config)
    graphs = jnp.asarray(np.stack([first_graph(config), *rings(len(config.accuracies))]))
    got: dict[str, list[float]] = {name: [] for name in ("edited", "withheld", "complete", "ring")}
    for seed in seeds:
        tasks = make_tasks(config, seed, TASKS, held_out=True)
        key = stream(seed, EVALUATION)
        ours, blind = jax.device_get((edited(tasks, key), withheld(tasks, key)))
        complete, *of_rings = np.asarray(measure(tasks, key, graphs)).tolist()
        row = (float(ours["accuracy"]), float(blind["accuracy"]), complete, max(of_rings))
        for values, value in zip(got.values(), row, strict=True):
            values.append(value)
        facts = ", ".join(f"{name} {ours[name]:.2f}" for name in FACTS)
        say(f"optagent, seed {seed}: " + ", ".join(f"{k} {v[-1]:.3f}" for k, v in got.items()) + f"; {facts}")
    shown = lambda *names: arms("vote accuracy", {name: got[name] for name in names})
    against = {"complete": "complete", "ring": "ring", "reflections": "withheld"}
    return [
        Finding(claim, minus(got["edited"], got[control]), shown("edited", control))
        for claim, control in against.items()
    ]


def main() -> None:
    """Print the arms of the calibration seeds."""
    for finding in run(CALIBRATION, lambda line: print(line, flush=True)):
        print(finding.claim, np.round(finding.effect, 3).tolist())


if __name__ == "__main__":
    main()
