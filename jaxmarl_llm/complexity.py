"""What a plan samples, before anything runs: sequences, decision points, calls, tokens, launches; `costs` has the rest.

A plan's shape does not depend on samples (plans.py), so its cost is a walk over its branches: `levels` asks the plan's
own ``width`` and ``follow`` and multiplies, and no plan has a case of its own. Nothing here compiles or allocates; a
product of 10^100 leaves is counted as fast as a flat plan. Letters: k turns, G samples a node, W seats that act at
once, B tasks.

Counts are exact. Lengths, who takes a seat and whether an episode ends may be uncertain: they are given as
probabilities, and what is counted is then the exact expectation. Sums (sequences, tokens, calls) are linear, so their
expectation needs no independence; the longest of n completions, which ends a launch, takes n independent ones:

    E[max] = sum over t >= 0 of 1 - F(t)^n          (not the mean: 8 completions of 1 or 9 tokens take 9, not 5)

Where what is uncertain decides (launches of a host rollout) the largest possible is meant. Prompts are taken to share
nothing: where those of a host rollout begin alike, it sends fewer tokens than ``prompt_tokens`` (`prefixes`).

The closed forms (`flat_counts`, ...) are the formulas of the field, derived in their docstrings. They are witnesses:
nothing is computed with them but tests and tables.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxmarl_llm.generate import bucket
from jaxmarl_llm.lora import TARGETS
from jaxmarl_llm.plans import ROOT, Branch, Plan
from jaxmarl_llm.qwen import Config
from jaxmarl_llm.text import ConfigError

Lengths = Mapping[int, float]  # tokens -> probability
LARGEST = 10**200  # states of a turn: beyond, expectations would leave the range of a float
MANY = 1 << 60  # completions: more have the same longest one
FOLLOWED = 1 << 12  # joint actions of one state that are asked for one by one


class Weights(NamedTuple):
    """One model's parameters: a full copy, or with ``rank`` an adapter over a base that all such models share."""

    config: Config
    rank: int = 0
    targets: tuple[str, ...] = TARGETS
    extra: int = 0  # float32 numbers beside them, of a value head


class Speaker(NamedTuple):
    """A role: its model (index), its prompts, one distribution a turn (the last holds on), and its completions."""

    model: int
    prompt: tuple[Lengths, ...]
    response: Lengths  # at least 1 token, the stop id; at most ``max_new``
    max_new: int

    def prompt_at(self, turn: int) -> Lengths:
        return self.prompt[min(turn, len(self.prompt) - 1)]


class Turn(NamedTuple):
    """Who acts: for each seat, role -> probability (0: may act, and never does); how likely a joint action ends it."""

    seats: tuple[Mapping[int, float], ...]
    ends: float = 0.0


class Workload(NamedTuple):
    """What a plan is played on.

    ``engine``: array (rectangles, empty seats and finished episodes included) or host (live nodes, padded to buckets).
    ``width``: prompt columns of an array rollout, what memory adds included; unused by host ones.
    ``seats``: of the array environment, more than a turn's own where some stay empty.
    ``stacked``: all models of a launch in one, see `Team.stacked`.
    """

    turns: tuple[Turn, ...]
    speakers: tuple[Speaker, ...]
    models: tuple[Weights, ...]
    tasks: int = 1
    engine: str = "host"
    width: int = 0
    seats: int = 1
    stacked: bool = False


def uniform(*roles: int) -> dict[int, float]:
    return {r: 1 / len(roles) for r in roles}


def mean(lengths: Lengths, power: int = 1) -> float:
    return sum(p * n**power for n, p in lengths.items())


def check(work: Workload) -> None:
    """Raises ConfigError for what no rollout can be: no turns, probabilities that do not add up, empty completions."""
    if not work.turns:
        raise ConfigError("turns: expected at least 1, got 0: an episode without a turn samples nothing")
    if work.engine not in ("array", "host"):
        raise ConfigError(f"engine: expected array or host, got {work.engine!r}")
    if work.tasks < 1:
        raise ConfigError(f"tasks: expected at least 1, got {work.tasks}")
    for t, turn in enumerate(work.turns):
        if not turn.seats or (work.engine == "array" and len(turn.seats) > work.seats):
            raise ConfigError(f"turn {t}: expected 1 to {work.seats} seats, got {len(turn.seats)}")
        if not 0 <= turn.ends <= 1:
            raise ConfigError(f"turn {t}: ends: expected a probability, got {turn.ends}")
        for seat in turn.seats:
            _adds_up(f"turn {t}: seat", seat, 0, len(work.speakers) - 1)
    for r, speaker in enumerate(work.speakers):
        if not 0 <= speaker.model < len(work.models):
            raise ConfigError(f"role {r}: model: expected below {len(work.models)}, got {speaker.model}")
        # The stop id is sampled too, so no completion is empty.
        _adds_up(f"role {r}: response", speaker.response, 1, speaker.max_new)
        for prompt in speaker.prompt:
            _adds_up(f"role {r}: prompt", prompt, 1, work.width if work.engine == "array" else None)


def _adds_up(name: str, chances: Mapping[int, float], low: int, high: int | None) -> None:
    for value, p in chances.items():
        if value < low or (high is not None and value > high):
            raise ConfigError(f"{name}: expected values from {low} to {'any' if high is None else high}, got {value}")
        if not 0 <= p <= 1:
            raise ConfigError(f"{name}: {value} has probability {p}")
    if abs(sum(chances.values()) - 1) > 1e-9:
        raise ConfigError(f"{name}: probabilities add up to {float(sum(chances.values())):g}, expected 1")


class Level(NamedTuple):
    """All states of one branch of the plan."""

    branch: Branch
    states: float  # where the episode goes on, all tasks; expected
    slots: int  # the most there may be: what an array rollout allocates
    group: int
    actions: int  # joint actions of one state


def levels(plan: Plan, work: Workload) -> list[Level]:
    """The walk: states of a branch times joint actions that are played on are the states of the next.

    Time and memory are those of the plan's branches (one or two a turn), not of its states.
    """
    check(work)
    out: list[Level] = []
    frontier: dict[Branch, tuple[float, int]] = {ROOT: (work.tasks, work.tasks)}
    for turn in work.turns:
        reached: dict[Branch, tuple[float, int]] = {}
        seats = len(turn.seats)
        wide = work.seats if work.engine == "array" else seats
        for branch, (states, slots) in frontier.items():
            group = plan.width(branch)
            if group < 1:
                raise ConfigError(f"plan {plan.name}: expected at least 1 sample at turn {branch.turn}, got {group}")
            if slots > LARGEST:
                raise ConfigError(f"plan {plan.name}: more than 10^200 states at turn {branch.turn}; lower its group")
            out.append(Level(branch, states, slots, group, joint_actions(plan, group, seats)))
            live = followed(plan, branch, joint_actions(plan, group, seats))
            for to, count in followed(plan, branch, joint_actions(plan, group, wide)).items():
                a, b = reached.get(to, (0, 0))
                on = states * live.get(to, 0)  # an int stays one, of any size, where nothing ends early
                reached[to] = a + (on * (1 - turn.ends) if turn.ends else on), b + slots * count
        frontier = reached
    return out


def joint_actions(plan: Plan, group: int, seats: int) -> int:
    """``len(plan.actions(branch, seats))`` without making them."""
    return group**seats if plan.joint == "cross" else group


@functools.lru_cache(maxsize=1024)
def followed(plan: Plan, branch: Branch, actions: int) -> dict[Branch, int]:
    """How many of a state's joint actions lead to which branch.

    Beyond the first 4,096 all must lead where the last one does, which holds for every plan of plans.py (they tell
    apart the first from the others); ConfigError otherwise.
    """
    out: dict[Branch, int] = {}
    for j in range(min(actions, FOLLOWED)):
        to = plan.follow(branch, j)
        if to is not None:
            out[to] = out.get(to, 0) + 1
    if actions > FOLLOWED:
        to = plan.follow(branch, actions - 1)
        if to != plan.follow(branch, FOLLOWED - 1):
            raise ConfigError(f"plan {plan.name}: {actions} joint actions of one state are too many to ask one by one")
        if to is not None:
            out[to] += actions - FOLLOWED
    return out


class Counts(NamedTuple):
    """Expected counts of one rollout. The first seven are those of `types.Counts`, by the same names."""

    sequences: float  # sampled completions
    branch_sequences: float  # of which at nodes where the plan branches
    prompt_tokens: float  # prefilled, each node once: the most that host rollouts send
    completion_tokens: float  # decoded
    env_calls: float
    launches: int  # generation programs started
    nodes: float  # decision points
    unshared_prompt_tokens: float  # prefilled if every sample had its prompt to itself
    decode_steps: float  # of all launches one after the other: each ends with its longest completion


class Launch(NamedTuple):
    """One generation program: allocated shape, and who speaks in it."""

    turn: int
    model: int
    rows: int  # N
    group: int  # G
    prompt: int  # P
    response: int  # R, the most tokens
    samples: tuple[tuple[float, Lengths], ...]  # expected number of completions, their lengths


def counts(plan: Plan, work: Workload) -> Counts:
    sequences: float = 0  # an int of any size, or an expectation
    branch: float = 0
    calls: float = 0
    nodes: float = 0
    prompts = unshared = tokens = 0.0
    for level in levels(plan, work):
        turn = work.turns[level.branch.turn]
        nodes += level.states * len(turn.seats)
        here = level.states * len(turn.seats) * level.group
        sequences += here
        branch += here if level.group > 1 else 0
        calls += level.states * level.actions
        for n, speaker in acting(level, work):
            read = n * mean(speaker.prompt_at(level.branch.turn))
            prompts, unshared = prompts + read, unshared + read * level.group
            tokens += n * level.group * mean(speaker.response)
    started = launches(plan, work)
    steps = sum(longest(launch.samples) for launch in started)
    return Counts(sequences, branch, prompts, tokens, calls, len(started), nodes, unshared, steps)


def acting(level: Level, work: Workload) -> Iterable[tuple[float, Speaker]]:
    """Expected nodes of each role at a level; a probability of 1 leaves an int an int."""
    for seat in work.turns[level.branch.turn].seats:
        for role, p in seat.items():
            yield (level.states if p == 1 else level.states * p), work.speakers[role]


def longest(samples: Sequence[tuple[float, Lengths]]) -> float:
    """E[max] of independent completions: sum over t of 1 - prod_i F_i(t)^n_i. Exact where the n_i are certain."""
    pooled: dict[int, tuple[float, Lengths]] = {}
    for n, lengths in samples:
        if n > 0:
            pooled[id(lengths)] = min(pooled.get(id(lengths), (0, lengths))[0] + n, MANY), lengths
    values = sorted({0, *(v for _, lengths in pooled.values() for v, p in lengths.items() if p > 0)})
    total, below = 0.0, dict.fromkeys(pooled, 0.0)
    for at, after in itertools.pairwise(values):
        below = {i: min(f + pooled[i][1].get(at, 0.0), 1.0) for i, f in below.items()}
        total += (after - at) * (1 - math.prod(below[i] ** n for i, (n, _) in pooled.items()))
    return total


def launches(plan: Plan, work: Workload) -> list[Launch]:
    """Every generation program of a rollout.

    array: at each branch one for each model that may act at its turn, with the seats that it may take. host: at each
    turn one for each model and number of samples that really occur, rows padded to ``bucket(rows, 4)`` and prompts to
    ``bucket(longest, 32)``.
    """
    out: list[Launch] = []
    widest = max(s.max_new for s in work.speakers)
    host: dict[tuple[int, int, int], list[tuple[Level, list[int], Mapping[int, float]]]] = {}
    for level in levels(plan, work):
        t, seats = level.branch.turn, work.turns[level.branch.turn].seats
        of_model = lambda seat, m: [r for r in seat if work.speakers[r].model == m]
        able = sorted({work.speakers[r].model for seat in seats for r in seat})
        if work.engine == "array":
            said = [tuple(x for s in seats for x in _samples(level, s, of_model(s, m), work)) for m in able]
            taken = [sum(bool(of_model(s, m)) for s in seats) if len(seats) == work.seats else work.seats for m in able]
            if work.stacked:
                said, able, taken = [sum(said, ())], able[:1], [work.seats]
            out += [
                Launch(t, m, level.slots * n, level.group, work.width, widest, x)
                for m, n, x in zip(able, taken, said, strict=True)
            ]
        elif level.states:
            for seat in seats:
                for m in able:
                    roles = [r for r in of_model(seat, m) if seat[r] > 0]
                    if roles:
                        host.setdefault((t, m, level.group), []).append((level, roles, seat))
    for (t, m, group), members in sorted(host.items()):
        present = {r for _, mine, _ in members for r in mine}
        prompt = max(n for r in present for n, p in work.speakers[r].prompt_at(t).items() if p > 0)
        limit = max(work.speakers[r].max_new for r in present)
        samples = tuple(x for level, mine, seat in members for x in _samples(level, seat, mine, work))
        rows = bucket(sum(level.slots for level, _, _ in members), 4)
        out.append(Launch(t, m, rows, group, bucket(prompt, 32), limit, samples))
    return out


def _samples(
    level: Level, seat: Mapping[int, float], roles: Sequence[int], work: Workload
) -> tuple[tuple[float, Lengths], ...]:
    return tuple((level.states * level.group * seat[r], work.speakers[r].response) for r in roles)


# ---- closed forms ---------------------------------------------------------------------------------------------------


class Closed(NamedTuple):
    """Of one task of k turns with W seats."""

    sequences: int
    branch_sequences: int
    nodes: int
    env_calls: int
    leaves: int


def product_counts(k: int, group: int, seats: int = 1, *, crossed: bool = False) -> Closed:
    """A state has J joint actions, J = G aligned and G^W crossed, all played on, so turn t has J^(t-1) states:

    states  S = 1 + J + ... + J^(k-1) = (J^k - 1) / (J - 1);  nodes W S;  sequences W G S;  calls J S;  leaves J^k
    """
    j = group**seats if crossed else group
    states = k if j == 1 else (j**k - 1) // (j - 1)
    n = seats * group * states
    return Closed(n, n if group > 1 else 0, seats * states, j * states, j**k)


def flat_counts(k: int, group: int, seats: int = 1) -> Closed:
    """G episodes that share their first state alone: G k sequences a seat, 1 + G (k - 1) nodes a seat."""
    branch = seats * group if group > 1 else 0
    return Closed(seats * group * k, branch, seats * (1 + group * (k - 1)), group * k, group)


def handoff_counts(k: int, group: int, seats: int = 1, *, crossed: bool = False) -> Closed:
    """One state a turn: k nodes a seat, G samples at each; of J joint actions all are played and one goes on."""
    j = group**seats if crossed else group
    n = seats * group * k
    return Closed(n, n if group > 1 else 0, seats * k, j * k, k * (j - 1) + 1)


def node_wise_counts(sizes: Sequence[int], seats: int = 1, *, local: bool = False) -> Closed:
    """Sizes G_1 ... G_k. The base trajectory has k nodes of G_i samples, of which one is its own continuation:

    local      G_1 + ... + G_k samples on k nodes. The product has G_1 * ... * G_k leaves.
    continue   each of the G_i - 1 alternatives of turn i is played on for k - i turns, one sample each:
               sum G_i + sum (G_i - 1)(k - i), with equal sizes k G + (G - 1) k (k - 1) / 2: linear in G, quadratic in k
    """
    k = len(sizes)
    branch = seats * sum(g for g in sizes if g > 1)
    tails = 0 if local else sum((g - 1) * (k - i) for i, g in enumerate(sizes, 1))
    total = sum(sizes) + tails
    return Closed(seats * total, branch, seats * (k + tails), total, sum(g - 1 for g in sizes) + 1)
