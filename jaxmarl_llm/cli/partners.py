"""What it costs to play in company: solo, pair, mixed pairs, relay and the gaps between them, on held-out tasks.

What `experiments.evaluate` adds with ``--partner`` and ``--solo`` (The Collaboration Gap, arXiv 2511.02687):

    pair            the run's own models in all seats        partner  those of the other run in all seats
    pair+partner    the first seat is the run's own, the others are the partner's; partner+pair the other way round
    relay(K)        pair, but the partner plays the first seat for the first K turns (relay inference)
    solo            the solo run's first model alone, and the gap of each of the above to it

Intervals are 95 % over tasks (normal); those of a gap take both sides as independent, whether or not their tasks are
the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmarl_llm.arena import Arena, make_arena
from jaxmarl_llm.diagnose import by_task
from jaxmarl_llm.team import make_team, with_partner
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.types import Team, TrainState


class Side(NamedTuple):
    """A run that was opened, ready to play."""

    cfg: Any
    team: Team
    arena: Arena
    state: TrainState


def side(cfg: Any, recipe: Any, state: TrainState, flag: str) -> Side:
    if jax.tree.leaves(state.memory):
        raise ConfigError(f"--{flag}: {cfg.recipe} on {cfg.env.name!r} plays with a memory; expected a run without one")
    return Side(cfg, recipe.team, recipe.arena, state)


def alone(run: Side) -> Side:
    """The run's first model alone, in the one-agent form of its environment. Close its arena when it is another one."""
    if len(run.team.roles) == 1:
        return run
    if "agents" not in getattr(run.cfg.env.module.Config, "__dataclass_fields__", {}):
        raise ConfigError(
            f"--solo: environment {run.cfg.env.name!r} has no form for one agent; expected a run with one role"
        )
    env = dataclasses.replace(run.cfg.env, args={**run.cfg.env.args, "agents": 1})
    arena = make_arena(env)
    overrides = {role: b for role, b in run.cfg.team.overrides.items() if role in arena.env.roles}
    cfg = dataclasses.replace(run.cfg, env=env, team=dataclasses.replace(run.cfg.team, overrides=overrides))
    return Side(cfg, make_team(cfg.team, arena.env.roles), arena, run.state)


def casts(seats: int, turns: int, relay: int) -> dict[str, np.ndarray]:
    """Who plays which seat, [A] or [M A]: 1 the partner."""
    first = (np.arange(seats) == 0).astype(np.int32)
    out = {"partner": np.ones(seats, np.int32), "pair+partner": 1 - first, "partner+pair": first}
    if relay:
        out[f"relay({relay})"] = (np.arange(turns) < relay)[:, None] * first
    return out


def played(run: Side, partner: Side | None, solo: Side | None, relay: int) -> dict[str, dict[str, np.ndarray]]:
    """Arm -> component, and ``return`` -> value of each held-out task."""
    arms = {"pair": by_task(*run)}
    if partner is not None:
        team, params = with_partner(run.team, run.state.params, partner.team, partner.state.params)
        mixed = run._replace(team=team, state=run.state.replace(params=params))
        for name, cast in casts(len(team.roles), run.arena.env.max_turns, relay).items():
            arms[name] = by_task(*mixed, cast=cast)
    if solo is not None:
        if solo.cfg.env.name != run.cfg.env.name:
            raise ConfigError(f"--solo: expected a run of {run.cfg.env.name!r}, got one of {solo.cfg.env.name!r}")
        arms["solo"] = by_task(*solo)
    weights = run.cfg.reward
    return {name: {**got, "return": sum(w * got[c] for c, w in weights.items())} for name, got in arms.items()}


def mean(values: np.ndarray) -> tuple[float, float]:
    """Mean and half of its 95 % interval; values that are unknown are left out."""
    known = values[~np.isnan(values)]
    if len(known) < 2:
        return (float(known.mean()) if len(known) else float("nan")), float("nan")
    return float(known.mean()), float(1.96 * known.std(ddof=1) / len(known) ** 0.5)


def figures(arms: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Arm -> figure -> (mean, half-width). ``gap``: solo minus this arm, of the accuracy where there is one."""
    out = {name: {figure: mean(values) for figure, values in got.items()} for name, got in arms.items()}
    if "solo" in out:
        of = "accuracy" if "accuracy" in out["solo"] else "return"
        top, wide = out["solo"][of]
        for name in [n for n in out if n != "solo"]:
            value, half = out[name][of]
            out[name]["gap"] = top - value, float(np.hypot(wide, half))
    return out


def table(found: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    names = list(dict.fromkeys(figure for got in found.values() for figure in got))
    cell = lambda pair: f"{pair[0]:.3f} ± {pair[1]:.3f}" if pair else ""
    rows = [["", *names], *([arm, *(cell(got.get(n)) for n in names)] for arm, got in found.items())]
    return "\n".join("  ".join(f"{text:16}" for text in row).rstrip() for row in rows)
