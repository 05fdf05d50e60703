"""Search-R2 on `facts` (protocol `refine`): cuts against whole second traces, where cuts lie, and EM alone.

Arms, with the tasks and keys of the same seeds:

- ``cut``: the refiner accepts the first trace, or cuts it and the actor goes on from there. R = EM (1 + mean u).
- ``em``: the same from the same parameters, with R = EM.
- ``whole``: the actor always draws a second whole trace, and the refiner keeps one of the two. R is that of ``cut``.
  The refiner reads and writes otherwise. So this arm has a stage 0 of its own, from demonstrators who err as often.

Equal tokens: the tokens that actor and refiner sample in RL are counted, and EM is measured ten times during RL. The
EM of both arms is read at the smaller of the two totals, by linear interpolation. In an evaluation an episode of
``whole`` has more tokens than one of ``cut``, which favours the control.

EM is that of one episode of each held-out question, sampled as in training. A cut on a wrong trace counts where the
trace has a search without evidence. Its early share is the share of such cuts at or before the first search without
evidence. The share of uniform cuts is the mean, over the same traces, of the share of their searches up to that one. A
refiner that always cuts before search 1 has an early share of 1. So the share of cuts exactly at the first search
without evidence is shown too, and nothing is claimed of it.

Calibrated on seeds 100 to 102, before any run of the claims' seeds. With 100 RL steps EM ends at .98 or more, and 97
% of the first traces are right (40 % before RL). So nothing is left for a refiner, and RL has 10 steps. Then EM is
.802 .787 .815 (cut), .795 .781 .815 (EM alone) and .833 .795 .828 (whole, which has 1.3 times the tokens). Effects:
``refines`` .028 .041 .028, ``early`` .175 .268 .154, ``uniform`` .260 .242 .105, ``density`` .008 .006 .000. Deltas
are those of the plan of this system. So ``density`` is expected to fail.

    python -m experiments.claims.search_r2       figures of the calibration seeds, 100 to 102
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, calibrate, minus
from experiments.configs.search_r2 import em_alone, tiny, whole
from experiments.studies.phase_runs import after_stage_0, read_stage
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.recipes.search_r2 import Config, make
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.keys import EVALUATION, stream
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.training.drivers import RunData
from jaxmarl_llm.types import Params, TrainState

GOLDEN = "tests/recipes/test_search_r2.py"
STATUS = "mechanism implemented"  # what counts as evidence is inferred
SEEDS = 10
PARTS = 10  # of RL, with an evaluation behind each
FACTS = ("em", "density", "cut", "first_em", "first_miss", "dropped_to", "turns")
BUDGET = (
    f"{tiny().sft.steps} supervised steps; {tiny().steps} RL steps of {tiny().batch} questions, groups of "
    f"{tiny().group}, in each arm"
)
ARMS: dict[str, Config] = {"cut": tiny(), "em": em_alone(), "whole": whole()}
CLAIMS = {
    "refines": Claim(
        "L",
        "cuts reach a higher EM than whole second traces do with as many sampled tokens",
        "held-out EM at equal tokens of RL, cuts minus whole second traces",
        0.03,
        control="a whole second trace in every episode, of which the refiner keeps one",
        budget=f"{BUDGET}; EM is read at the smaller number of sampled tokens",
    ),
    "early": Claim(
        "L",
        "at least 70 % of the cuts on wrong traces lie at or before the first search without evidence",
        "share of held-out cuts on wrong traces minus 0.7",
        0.0,
        control="the fixed share 0.7",
        budget=BUDGET,
    ),
    "uniform": Claim(
        "L",
        "cuts on wrong traces lie at or before the first search without evidence more often than uniform cuts",
        "share of held-out cuts on wrong traces minus that of uniform cuts on the same traces",
        0.15,
        control="cuts drawn uniformly from the searches of the same traces",
        budget=BUDGET,
    ),
    "density": Claim(
        "X",
        "with the share of searches with evidence in the reward EM is higher",
        "held-out EM, EM (1 + mean u) minus EM alone",
        0.02,
        control="EM alone, from the same parameters",
        budget=BUDGET,
    ),
}


class Curve(NamedTuple):
    """The training of an arm: figures of held-out episodes by name, and sampled tokens.

    Attributes:
        tokens: Tokens that were sampled in RL before each evaluation [PARTS + 1 seeds].
        em: Held-out EM at it [PARTS + 1 seeds].
        facts: Components of the held-out episodes at the end: name -> [seeds questions].
        length: Tokens of a held-out episode at the end [seeds].
    """

    tokens: np.ndarray
    em: np.ndarray
    facts: Mapping[str, np.ndarray]
    length: np.ndarray


def player(cfg: Config) -> Callable[..., tuple[Mapping[str, np.ndarray], np.ndarray]]:
    """(params, seeds, tasks) -> components of one episode of each held-out task, and tokens of an episode.

    Args:
        cfg: The configuration of an arm.
    """
    recipe = make(cfg)
    env = recipe.env_runner.env
    assert isinstance(env, ArrayEnv)
    rollout = make_rollout(recipe.team, env, single(), cfg.sampling)

    def play(params: Params, seed: jax.Array, tasks: dict) -> tuple[dict[str, jax.Array], jax.Array]:
        tree = rollout(params, {}, tasks, jax.random.fold_in(stream(seed, EVALUATION), 0), jnp.int32(0))
        moves, count = tree.transitions, len(tasks["answer"])
        of_task = lambda paid: jax.ops.segment_sum(jnp.where(moves.valid, paid, 0.0), moves.task, count)
        facts = {name: of_task(moves.rewards[name].max(1)) for name in FACTS}
        return facts, jnp.asarray(tree.counts.completion_tokens / count)

    mapped = jax.jit(jax.vmap(play))
    return lambda *inputs: jax.device_get(mapped(*inputs))


def trained(cfg: Config, seeds: list[int], begun: TrainState, data: RunData) -> Curve:
    """Train an arm, and evaluate it before RL and behind each part of it.

    Args:
        cfg: The configuration of the arm.
        seeds: Lanes of one program.
        begun: States after stage 0.
        data: Tasks of the seeds.
    """
    which, recipe, play = jnp.array(seeds), make(cfg), player(cfg)
    run = read_stage(recipe.phases[-1], lambda result: result.tree.counts.completion_tokens)
    facts, length = play(begun.params, which, data.held_out)
    tokens, em, state = [np.zeros(len(seeds))], [facts["em"].mean(1)], begun
    for steps in np.array_split(np.arange(cfg.steps), PARTS):
        state, sampled = run(which, data, state, jnp.asarray(steps))
        facts, length = play(state.params, which, data.held_out)
        tokens.append(tokens[-1] + np.asarray(sampled, np.float64).sum(1))
        em.append(facts["em"].mean(1))
    return Curve(np.stack(tokens), np.stack(em), facts, length)


def at_equal_tokens(one: Curve, other: Curve) -> tuple[np.ndarray, np.ndarray]:
    """EM of two arms [seeds] at the smaller of their numbers of sampled tokens.

    Args:
        one: An arm.
        other: Another arm with the same seeds.
    """
    budget = np.minimum(one.tokens[-1], other.tokens[-1])
    of = lambda arm: [np.interp(budget[s], arm.tokens[:, s], arm.em[:, s]) for s in range(len(budget))]
    return np.array(of(one)), np.array(of(other))


def cut_shares(facts: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Shares of cuts on wrong first traces that have a search without evidence: name -> [seeds].

    ``early``: at or before the first such search. ``uniform``: the same of uniform cuts. ``exact``: at it. A seed
    without such a cut has nan, and no claim holds with it.

    Args:
        facts: Components of episodes [seeds questions].
    """
    cut, miss, searches = (np.asarray(facts[name], np.float64) for name in ("cut", "first_miss", "dropped_to"))
    counts = (cut > 0) & (miss > 0) & (facts["first_em"] == 0)
    searches = np.maximum(searches - 1, 1)  # a trace of n searches takes n + 1 turns
    of = lambda share: np.array([row[own].mean() if own.any() else np.nan for row, own in zip(share, counts)])
    return {"early": of(cut <= miss), "uniform": of(miss / searches), "exact": of(cut == miss)}


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    for cfg in ARMS.values():
        cfg.check("config")
    got: dict[str, Curve] = {}
    begun = after_stage_0(make(ARMS["cut"]), seeds)
    for name, cfg in ARMS.items():
        got[name] = trained(cfg, seeds, *(begun if name != "whole" else after_stage_0(make(cfg), seeds)))
        means = {key: np.round(values.mean(1), 3).tolist() for key, values in got[name].facts.items()}
        curve = np.round(got[name].em, 3).T.tolist()
        sampled = got[name].tokens[-1].astype(int).tolist()
        say(f"search_r2, {name}: {means}; EM {curve}; tokens {sampled}, {np.round(got[name].length, 2)} an episode")
    ours, control = at_equal_tokens(got["cut"], got["whole"])
    shares = cut_shares(got["cut"].facts)
    say(f"search_r2, cuts on wrong traces: { {k: np.round(v, 3).tolist() for k, v in shares.items()} }")
    end = {name: curve.em[-1] for name, curve in got.items()}
    evidence = {name: got[name].facts["density"].mean(1) / np.maximum(end[name], 1e-12) for name in ("cut", "em")}
    before = {"after stage 0": got["cut"].em[0]}
    return [
        Finding("refines", minus(ours, control), arms("EM at equal tokens", {"cut": ours, "whole": control})),
        Finding("early", (shares["early"] - 0.7).tolist(), arms("share", shares)),
        Finding("uniform", minus(shares["early"], shares["uniform"]), arms("share", shares)),
        Finding(
            "density",
            minus(end["cut"], end["em"]),
            arms("EM", before | end) | arms("searches with evidence, where EM is 1", evidence),
        ),
    ]


if __name__ == "__main__":
    calibrate(run)
