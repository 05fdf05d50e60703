"""Exact gradient quality of sampling plans on chains of up to ten turns, with tasks that differ:

    python -m experiments.studies.exact_sampling [--seeds=12] [--out=docs/results/exact_sampling.json]

Nothing is sampled but the games: a policy with logits N(0, 1) and the payoffs of a set of tasks, by seed. Every figure
is enumerated (`exact_chains`). Each plan is taken at its own best size of a group. The result is the number of tokens
that a plan needs for the quality that flat has at a budget of tokens. It writes --out and a section of
docs/complexity.md (`exact_report`).

A part of the payoff's variance is drawn anew for each task, the rest is common to all tasks. The kinds of payoffs are
those of `PAYOFFS`. Moves cost one token each; prompts cost nothing here.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from experiments.studies import exact_chains
from experiments.studies.exact_chains import Chain, Quality, Table
from jaxmarl_llm.cli import config_flags

flags.DEFINE_integer("seeds", 12, "Seeds 0 to N-1.", lower_bound=2)
flags.DEFINE_string("out", "docs/results/exact_sampling.json", "JSON file of every figure.")

DOC = Path("docs/complexity.md")
BEGIN, END = "<!-- exact -->", "<!-- /exact -->"
FLAT, CONTINUED = "flat", "node-wise continued"
TURNS = (1, 2, 3, 4, 6, 8, 10)
SHARES = (0.0, 0.25, 0.5)  # of the payoff's variance that is drawn for each task
MOVES, TASKS = 2, 16
BUDGET = 4096  # sampled tokens of a batch; a plan whose one task takes more is left out
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
BY_TURN = f"{CONTINUED}, sizes by turn"
COSTS: dict[str, Callable[[Quality], int]] = {"sampled": lambda q: q.sampled, "updated": lambda q: q.updated}


def random_payoff(rng: np.random.Generator, turns: int) -> Table:
    """An independent uniform payoff of each of the 2^turns sequences."""
    return rng.random(MOVES**turns)


def additive(rng: np.random.Generator, turns: int) -> Table:
    """A sum over turns of uniform parts, each of which depends on the moves up to its turn."""
    from experiments.studies.enumerable_games import graded

    return graded(rng, turns, MOVES)["payoff"].astype(float)


def sparse(rng: np.random.Generator, turns: int) -> Table:
    """1 for one of the 2^turns sequences, 0 for all others."""
    return np.eye(MOVES**turns)[rng.integers(MOVES**turns)]


def opening(rng: np.random.Generator, turns: int) -> Table:
    """Uniform payoffs of which the first move alone decides three quarters of the variance."""
    return 0.75**0.5 * np.repeat(rng.random(MOVES), MOVES ** (turns - 1)) + 0.25**0.5 * random_payoff(rng, turns)


PAYOFFS = {"random": random_payoff, "additive": additive, "sparse": sparse, "opening": opening}


def drawn(seed: int, kind: str, share: float, turns: int) -> Chain:
    """The chain of one seed: one policy, and `TASKS` tasks.

    Args:
        seed: Of the policy and of the payoffs. Equal seeds have equal policies and equal common parts of payoffs.
        kind: Key of `PAYOFFS`.
        share: Part of the payoff's variance that is drawn anew for each task.
        turns: Number of turns k.
    """
    rng = np.random.default_rng([seed, turns])
    logits = [rng.normal(size=(MOVES**t, MOVES)) for t in range(turns)]
    common = PAYOFFS[kind](rng, turns)
    own = np.stack([PAYOFFS[kind](rng, turns) for _ in range(TASKS)])
    return exact_chains.make_chain(logits, (1 - share) ** 0.5 * common + share**0.5 * own)


class Best(NamedTuple):
    """A plan at its best sizes of groups: tokens for the quality aimed at, the sizes, and its quality there."""

    tokens: float
    sizes: list[int]
    quality: Quality


def curve(chain: Chain, aim: Table, plan: exact_chains.Plan) -> list[Best]:
    """Quality of a plan at each of `SIZES` whose one task is within the budget; tokens are not known yet (NaN).

    Args:
        chain: Policy and payoffs.
        aim: Exact gradient of each task [B D].
        plan: Estimator with one size for all groups.
    """
    out: list[Best] = []
    for size in SIZES:
        found = exact_chains.quality(plan(chain, size), aim)
        if found.sampled > BUDGET:
            break
        out.append(Best(float("nan"), [size], found))
    return out


def cheapest(found: Sequence[Best], aligned: float, cost: str) -> Best | None:
    """The point of a curve that needs the fewest tokens; None for an empty curve.

    Args:
        found: Points of one plan.
        aligned: Squared cosine to reach (`Quality.aligned`).
        cost: Tokens that count, a key of `COSTS`.
    """
    priced = [x._replace(tokens=x.quality.needed(aligned) * COSTS[cost](x.quality)) for x in found]
    return min(priced, key=lambda x: x.tokens, default=None)


def by_turn(chain: Chain, aim: Table, start: Best, aligned: float, cost: str) -> Best:
    """Node-wise continued with a size for each turn, by steps of one turn's size to the next in `SIZES`.

    The search ends where no such step saves tokens, so the result is a local optimum.

    Args:
        chain: Policy and payoffs.
        aim: Exact gradient of each task [B D].
        start: The best point with one size for all turns.
        aligned: Squared cosine to reach.
        cost: Key of `COSTS`.
    """
    here = start._replace(sizes=start.sizes * chain.turns)
    while True:
        found = []
        for t, step in ((t, step) for t in range(chain.turns) for step in (-1, 1)):
            at = SIZES.index(here.sizes[t]) + step
            if 0 <= at < len(SIZES):
                sizes = [*here.sizes[:t], SIZES[at], *here.sizes[t + 1 :]]
                found.append(Best(0.0, sizes, exact_chains.quality(exact_chains.continued(chain, sizes), aim)))
        better = cheapest(found, aligned, cost)
        if better is None or better.tokens >= here.tokens:
            return here
        here = better


def compared(chain: Chain) -> dict[str, dict[str, Best]]:
    """Every plan at its best for each cost: cost -> plan -> `Best`; without plans that exceed the budget.

    The quality aimed at is that of flat with its best size at the budget, where flat has the same two costs.
    """
    aim = exact_chains.gradient(chain)
    curves = {name: curve(chain, aim, plan) for name, plan in exact_chains.PLANS.items()}
    flat = min((x.quality for x in curves[FLAT]), key=lambda q: q.noise * q.sampled)
    aligned = flat.aligned(BUDGET / flat.sampled)
    out: dict[str, dict[str, Best]] = {}
    for cost in COSTS:
        found = {name: cheapest(points, aligned, cost) for name, points in curves.items()}
        out[cost] = {name: x for name, x in found.items() if x is not None}
        if chain.turns > 1:
            out[cost][BY_TURN] = by_turn(chain, aim, out[cost][CONTINUED], aligned, cost)
    return out


def summary(seeds: Sequence[Best]) -> dict[str, Any]:
    """One plan over seeds: tokens as multiples of flat's by seed (None: never), and medians of the rest.

    The medians: sizes, ``across``, the share of the mean gradient that is orthogonal to the exact one; ``noise``,
    sampled tokens at which the standard deviation is as long as the mean; ``snr``, squared mean over variance of 1,000
    sampled tokens.

    Args:
        seeds: The plan at its best for each seed.
    """
    noise = [x.quality.noise * x.quality.sampled for x in seeds]
    rounded = lambda x: float(f"{x:.4g}")
    return {
        "ratio": [rounded(x.tokens / BUDGET) if np.isfinite(x.tokens) else None for x in seeds],
        "sizes": [statistics.median(sizes) for sizes in zip(*(x.sizes for x in seeds))],
        "across": rounded(statistics.median(x.quality.across for x in seeds)),
        "noise": rounded(statistics.median(noise)),
        "snr": rounded(statistics.median(1000 / x for x in noise)),
    }


def run(seeds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All rows of the record: one for each kind of payoff, share, number of turns, cost and plan.

    Args:
        seeds: Number of seeds.
        say: Called with one line for each setting.
    """
    rows: list[dict[str, Any]] = []
    for kind in PAYOFFS:
        for share in SHARES:
            for turns in TURNS:
                found = [compared(drawn(seed, kind, share, turns)) for seed in range(seeds)]
                for cost in COSTS:
                    for name in found[0][cost]:
                        told = summary([x[cost][name] for x in found])
                        rows.append({"payoff": kind, "share": share, "turns": turns, "cost": cost, "plan": name} | told)
                say(f"{kind}, share {share}, {turns} turns: {len(found[0]['sampled'])} plans")
    return rows


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    """Writes the record and the section of the page.

    Args:
        cfg: Not used.
        workdir: Not used.
        flag_values: ``seeds`` and ``out``.
    """
    from experiments.studies import exact_report
    from experiments.studies.common import origin, replace_section

    out = Path(flag_values.out)
    replace_section(DOC.read_text(), BEGIN, END, "")  # has the marks, before minutes go into it
    clock = time.process_time()
    rows = run(flag_values.seeds, lambda line: print(line, flush=True))
    record = origin() | {
        "cpu_seconds": round(time.process_time() - clock),
        "seeds": flag_values.seeds,
        "tasks": TASKS,
        "moves": MOVES,
        "budget": BUDGET,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in rows]
    head = json.dumps(record | {"rows": []}, indent=1).removesuffix("[]\n}")
    out.write_text(head + "[\n" + ",\n".join(lines) + "\n]}\n")
    section = "\n".join(exact_report.section(record))
    DOC.write_text(replace_section(DOC.read_text(), BEGIN, END, section))
    print(section)


if __name__ == "__main__":
    config_flags.run(main, required=())
