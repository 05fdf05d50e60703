"""Evaluation of mixed teams on held-out tasks: pairs, mixed pairs, relays, a single agent, and the gaps between them.

`cli.evaluate` uses it for ``--partner`` and ``--solo``. Source: The Collaboration Gap, arXiv 2511.02687. An arm is one
assignment of models to seats:

    pair            the run's own models in all seats
    partner         the models of the other run in all seats
    pair+partner    the run's own model in the first seat, the partner's models in the others
    partner+pair    the partner's model in the first seat, the run's own models in the others
    relay(K)        pair, but the partner's model has the first seat for the first K turns (relay inference)
    solo            the first model of the solo run alone; the gap of each other arm is relative to this arm

Intervals are 95 % over tasks (normal distribution). The interval of a gap assumes that both arms are independent, even
if their tasks are the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmarl_llm.agents.team import make_team, with_partner
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.env_runner import EnvRunner
from jaxmarl_llm.rollout.make_runner import make_env_runner
from jaxmarl_llm.training.evaluation import by_task
from jaxmarl_llm.types import Team, TrainState


class OpenRun(NamedTuple):
    """A run that is ready for evaluation. ``cfg``: its configuration. ``state``: its newest checkpoint."""

    cfg: Any
    team: Team
    env_runner: EnvRunner
    state: TrainState


def without_memory(cfg: Any, recipe: Any, state: TrainState, flag: str) -> OpenRun:
    """Opened run. Raises ConfigError for a run with memory, which mixed teams do not support.

    cfg, recipe, state: results of `cli.trained_run.open_run`. flag: name of the flag in the message.
    """
    if jax.tree.leaves(state.memory):
        raise ConfigError(f"--{flag}: {cfg.recipe} on {cfg.env.name!r} plays with a memory; expected a run without one")
    return OpenRun(cfg, recipe.team, recipe.env_runner, state)


def single_agent(run: OpenRun) -> OpenRun:
    """The run's first model alone, in the form of its environment for one agent.

    run: an opened run. With one role it is returned as it is. The caller closes the environment runner of the result if
    it is a new one. Raises ConfigError without such a form.
    """
    if len(run.team.roles) == 1:
        return run
    if "agents" not in getattr(getattr(run.cfg.env.module, "Config", None), "__dataclass_fields__", {}):
        raise ConfigError(
            f"--solo: environment {run.cfg.env.name!r} has no form for one agent; expected a run with one role"
        )
    env = dataclasses.replace(run.cfg.env, args={**run.cfg.env.args, "agents": 1})
    env_runner = make_env_runner(env)
    overrides = {role: b for role, b in run.cfg.team.overrides.items() if role in env_runner.env.roles}
    cfg = dataclasses.replace(run.cfg, env=env, team=dataclasses.replace(run.cfg.team, overrides=overrides))
    return OpenRun(cfg, make_team(cfg.team, env_runner.env.roles), env_runner, run.state)


def seat_assignments(seats: int, turns: int, relay: int) -> dict[str, np.ndarray]:
    """Arm -> which run has each seat: 0 the run itself, 1 the partner. Shape [A] seats, or [M A] turns and seats.

    seats: A. turns: M. relay: turns of the relay arm; 0 leaves this arm out.
    """
    first = (np.arange(seats) == 0).astype(np.int32)
    out = {"partner": np.ones(seats, np.int32), "pair+partner": 1 - first, "partner+pair": first}
    if relay:
        out[f"relay({relay})"] = (np.arange(turns) < relay)[:, None] * first
    return out


def evaluate_arms(
    run: OpenRun, partner: OpenRun | None, solo: OpenRun | None, relay: int
) -> dict[str, dict[str, np.ndarray]]:
    """Arm -> figure -> value of each held-out task. Figures are reward components and ``return``, their weighted sum.

    run, partner, solo: opened runs; None leaves their arms out. relay: turns of the relay arm. Raises ConfigError when
    the environments differ.
    """
    arms = {"pair": by_task(*run)}
    if partner is not None:
        team, params = with_partner(run.team, run.state.params, partner.team, partner.state.params)
        mixed = run._replace(team=team, state=run.state.replace(params=params))
        for name, assignment in seat_assignments(len(team.roles), run.env_runner.env.max_turns, relay).items():
            arms[name] = by_task(*mixed, assignment=assignment)
    if solo is not None:
        if solo.cfg.env.name != run.cfg.env.name:
            raise ConfigError(f"--solo: expected a run of {run.cfg.env.name!r}, got one of {solo.cfg.env.name!r}")
        arms["solo"] = by_task(*solo)
    weights = run.cfg.reward
    return {name: {**got, "return": sum(w * got[c] for c, w in weights.items())} for name, got in arms.items()}


def mean(values: np.ndarray) -> tuple[float, float]:
    """Mean of ``values`` [n] and half-width of its 95 % interval. Values that are NaN are left out.

    Without known values both are NaN. With one the half-width is NaN.
    """
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return (float(known.mean()) if len(known) else float("nan")), float("nan")
    return float(known.mean()), float(1.96 * known.std(ddof=1) / len(known) ** 0.5)


def figures(arms: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Arm -> figure -> (mean, half-width of the interval).

    arms: result of `evaluate_arms`. The additional figure ``gap`` is solo minus this arm, of the accuracy, or of the
    return if there is no accuracy.
    """
    out = {name: {figure: mean(values) for figure, values in got.items()} for name, got in arms.items()}
    if "solo" in out:
        of = "accuracy" if "accuracy" in out["solo"] else "return"
        top, wide = out["solo"][of]
        for name in [n for n in out if n != "solo"]:
            value, half = out[name][of]
            out[name]["gap"] = top - value, float(np.hypot(wide, half))
    return out


def table(found: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """Text table, a row for each arm. ``found``: result of `figures`."""
    names = list(dict.fromkeys(figure for got in found.values() for figure in got))
    cell = lambda pair: f"{pair[0]:.3f} ± {pair[1]:.3f}" if pair else ""
    rows = [["", *names], *([arm, *(cell(got.get(n)) for n in names)] for arm, got in found.items())]
    return "\n".join("  ".join(f"{text:16}" for text in row).rstrip() for row in rows)
