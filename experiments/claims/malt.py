"""MALT on `chain` (a generator, a verifier, a refiner): what training on its own labelled tree brings, and its labels.

Arms of a seed: ``single`` (stage 0 of one model alone), ``untrained`` (stage 0 of the team), and from that very team
``trained`` and ``random labels``, each also before its preferences (``imitation alone``). Accuracy on 512 held-out
questions, one episode each, sampled as in training; beside it the vote of three. The settings are those of
`experiments/configs/malt.py`.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, minus
from experiments.configs import malt as configs
from jaxmarl_llm.recipes import grpo, malt
from jaxmarl_llm.runs import phases
from jaxmarl_llm.storage import dataset as offline
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.evaluation import majority
from jaxmarl_llm.types import TrainState

GOLDEN = "tests/recipes/test_malt.py"
STATUS = "mechanism implemented"
SEEDS = 5
BUDGET = "500 supervised steps; 150 of imitation and 100 of preferences on the trees of 512 tasks"
CLAIMS = {
    "samples": Claim(
        "U",
        "every task of the data set has exactly 3, 9 and 27 samples",
        "1 where it has",
        1.0,
        control="none: a count",
        budget=BUDGET,
    ),
    "learns": Claim(
        "L",
        "the trained team passes the untrained one by at least 0.05 of held-out accuracy",
        "held-out accuracy, trained minus untrained",
        0.05,
        control="the team after stage 0",
        budget=BUDGET,
    ),
    "team": Claim(
        "L",
        "the untrained team passes a single model by at least 0.02",
        "held-out accuracy, untrained team minus single model",
        0.02,
        control="one model alone after its own stage 0 of as many steps",
        budget=BUDGET,
    ),
    "labels": Claim(
        "X",
        "the labels carry the gain: with random labels it is smaller by at least 0.05",
        "held-out accuracy, trained minus trained with random labels",
        0.05,
        control="random labels, from the same parameters",
        budget=BUDGET,
    ),
    "preferences": Claim(
        "X",
        "preferences (DPO) bring more than imitation alone",
        "held-out accuracy, after preferences minus after imitation",
        0.01,
        control="the same run before its preferences",
        budget=BUDGET,
    ),
}


def advance(recipe: phases.Recipe, state: TrainState, steps: int, folder: Path) -> TrainState:
    with Logger(folder, resume_step=None, total_steps=steps, primary=False) as logger:
        while int(state.step) < steps:
            state, _ = recipe.step(state, logger)
    return state


def accuracies(recipe: phases.Recipe, cfg: malt.Config, state: TrainState) -> dict[str, float]:
    """Of one episode, and of the vote."""
    seen = recipe.evaluate(state) | majority(cfg, recipe.team, recipe.env_runner, state, cfg.votes)
    return {"one": seen["eval/accuracy"], "vote": seen[f"eval/accuracy_majority@{cfg.votes}"]}


def samples(folder: Path, cfg: malt.Config) -> set[tuple[int, ...]]:
    """Numbers of generations, verdicts and refinements of a task that occur in a data set."""
    assert cfg.tasks is not None  # `configs.tiny` limits them
    tables = offline.load(folder, malt.source(cfg)).values()
    return {*zip(*(np.bincount(t["task"][t["node"]], minlength=cfg.tasks).tolist() for t in tables), strict=True)}


def arms_of(seed: int) -> tuple[dict[str, dict[str, float]], set[tuple[int, ...]]]:
    """Accuracies of every arm, and the samples of a task."""
    cfg = dataclasses.replace(configs.tiny(), seed=seed)
    control = dataclasses.replace(cfg, labels="random")
    alone = dataclasses.replace(configs.solo(), seed=seed)
    out, recipe, solo = {}, malt.make(cfg), grpo.make(alone)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        single = advance(solo, solo.init(0), alone.sft.steps, root)
        out["single"] = accuracies(solo, cfg, single)
        start = advance(recipe, recipe.init(0), cfg.sft.steps, root)
        out["untrained"] = accuracies(recipe, cfg, start)
        for name, arm in (("trained", cfg), ("random labels", control)):
            other, state = malt.make(arm), jax.tree.map(jnp.copy, start)  # a step donates what it updates
            state = advance(other, state, cfg.sft.steps + cfg.imitation.steps, root / name)
            out[f"{name}, imitation alone"] = accuracies(recipe, cfg, state)
            out[name] = accuracies(recipe, cfg, advance(other, state, other.total_steps, root / name))
        return out, samples(root / "trained" / "data", cfg)


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    one: dict[str, list[float]] = {}
    vote: dict[str, list[float]] = {}
    counted: list[bool] = []
    for seed in seeds:
        arms, sizes = arms_of(seed)
        for name, seen in arms.items():
            one.setdefault(name, []).append(seen["one"])
            vote.setdefault(f"{name}, vote of 3", []).append(seen["vote"])
        counted.append(sizes == {(3, 9, 27)})
        shown = "; ".join(f"{name} {seen['one']:.3f} (vote {seen['vote']:.3f})" for name, seen in arms.items())
        say(f"malt, seed {seed}: {shown}; samples of a task {sorted(sizes)}")
    of = lambda *names: (
        {f"held-out accuracy, {name}": one[name] for name in names}
        | {f"held-out accuracy, {name}, vote of 3": vote[f"{name}, vote of 3"] for name in names}
    )
    ahead = lambda a, b: minus(one[a], one[b])
    return [
        Finding("samples", [float(x) for x in counted], {"seeds in which it has": [float(x) for x in counted]}),
        Finding("learns", ahead("trained", "untrained"), of("untrained", "trained")),
        Finding("team", ahead("untrained", "single"), of("single", "untrained")),
        Finding("labels", ahead("trained", "random labels"), of("trained", "random labels")),
        Finding("preferences", ahead("trained", "trained, imitation alone"), of("trained, imitation alone", "trained")),
    ]
