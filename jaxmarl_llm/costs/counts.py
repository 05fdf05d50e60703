"""Counts of what a plan samples, before it runs: sequences, nodes, environment calls, tokens and launches.

`costs.model` computes memory and time from these counts. The shape of a plan does not depend on samples
(`rollout.plans`). So `turn_states` walks over the branches of a plan, calls its ``width`` and ``follow``, and
multiplies. No plan has special code here. The functions compile and allocate nothing: a product with 10^100 leaves is
counted as fast as a flat plan. Symbols: k turns, G samples of a node, W seats that act at the same time, B tasks.

Counts are exact. Lengths, the roles of seats, and the end of an episode may be uncertain. They are given as
probabilities, and the result is then the exact expectation. Sums (sequences, tokens, calls) are linear, so their
expectation needs no independence. The longest of n completions, which ends a launch, assumes n independent completions:

    E[max] = sum over t >= 0 of 1 - F(t)^n          (not the mean: 8 completions of 1 or 9 tokens take 9, not 5)

The number of launches of a host rollout depends on uncertain events; the count is the largest possible number. Prompts
are assumed to share no prefix. Where prompts of a host rollout start alike, it sends fewer tokens than
``prompt_tokens`` (`generation.prefix_cache`). `LaunchRows.fresh` counts the prompts that cannot be cached, for a lower
bound.

The closed forms (`flat_counts` and others) are formulas derived in their docstrings. Only tests and tables use them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.buckets import bucket
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.lora import TARGETS
from jaxmarl_llm.rollout.plans import ROOT, Branch, Plan

Lengths = Mapping[int, float]  # tokens -> probability
MAX_STATES = 10**200  # of one turn; expectations of more would exceed the range of a float
MAX_COMPLETIONS = 1 << 60  # more completions have the same expected maximum
MAX_ENUMERATED = 1 << 12  # joint actions of one state that are followed one by one


class ModelSize(NamedTuple):
    """Size of one model's parameters.

    config: architecture. rank: 0 for a full copy; otherwise the rank of a LoRA adapter over a base that all such models
    share. targets: layers with an adapter. extra: float32 parameters of a value head. rollout_weights: form of the
    weights that a training rollout reads (`models.rollout_weights`). rollout_cache: form of the keys and values that it
    caches (`models.rollout_cache`).
    """

    config: Config
    rank: int = 0
    targets: tuple[str, ...] = TARGETS
    extra: int = 0
    rollout_weights: str = "same"
    rollout_cache: str = "same"


class RoleLengths(NamedTuple):
    """Lengths of one role's prompts and completions.

    model: index of the role's model. prompt: length distribution of the prompt in each turn; the last one holds for all
    later turns. response: length distribution of a completion, from 1 token (the stop id) to
    ``max_new_tokens``, the limit.
    """

    model: int
    prompt: tuple[Lengths, ...]
    response: Lengths
    max_new_tokens: int

    def prompt_at(self, turn: int) -> Lengths:
        """Length distribution of the prompt in ``turn``."""
        return self.prompt[min(turn, len(self.prompt) - 1)]


class Turn(NamedTuple):
    """One turn of an episode.

    seats: for each seat, role -> probability that the role acts there (0: allowed, but never happens). ends:
    probability that a joint action ends the episode.
    """

    seats: tuple[Mapping[int, float], ...]
    ends: float = 0.0


class Workload(NamedTuple):
    """Environment and team that a plan runs on.

    turns, roles, models: their sizes. tasks: number of tasks B.
    engine: "array" computes full rectangles, with empty seats and finished episodes; "host" computes the live nodes,
    padded to buckets.
    width: prompt columns of an array rollout, including text from memory; a host rollout does not use it.
    seats: seats of the array environment; more than the seats of a turn where some stay empty.
    batch_models: one launch computes all models, see `Team.batch_models`.
    join_adapters: a turn of a host rollout is one launch for all models, adapters of one backbone.
    """

    turns: tuple[Turn, ...]
    roles: tuple[RoleLengths, ...]
    models: tuple[ModelSize, ...]
    tasks: int = 1
    engine: str = "host"
    width: int = 0
    seats: int = 1
    batch_models: bool = False
    join_adapters: bool = False


def uniform(*roles: int) -> dict[int, float]:
    """Equal probability for each of ``roles``."""
    return {r: 1 / len(roles) for r in roles}


def mean(lengths: Lengths, power: int = 1) -> float:
    """Expectation of a length with distribution ``lengths``, to the given ``power``."""
    return sum(p * n**power for n, p in lengths.items())


def check(work: Workload) -> None:
    """Raise ConfigError where ``work`` is impossible, such as no turns, wrong probabilities, or empty completions."""
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
            _adds_up(f"turn {t}: seat", seat, 0, len(work.roles) - 1)
    for r, role in enumerate(work.roles):
        if not 0 <= role.model < len(work.models):
            raise ConfigError(f"role {r}: model: expected below {len(work.models)}, got {role.model}")
        # The stop id is a sampled token, so no completion is empty.
        _adds_up(f"role {r}: response", role.response, 1, role.max_new_tokens)
        for prompt in role.prompt:
            _adds_up(f"role {r}: prompt", prompt, 1, work.width if work.engine == "array" else None)


def check_lengths(name: str, lengths: Lengths, most: int) -> None:
    """Raise ConfigError unless ``lengths`` is a distribution over 1 to ``most`` tokens. name: begin of the message."""
    _adds_up(name, lengths, 1, most)


def _adds_up(name: str, chances: Mapping[int, float], low: int, high: int | None) -> None:
    """Raise ConfigError unless ``chances`` is a distribution over values from ``low`` to ``high`` (None: no limit)."""
    for value, p in chances.items():
        if value < low or (high is not None and value > high):
            raise ConfigError(f"{name}: expected values from {low} to {'any' if high is None else high}, got {value}")
        if not 0 <= p <= 1:
            raise ConfigError(f"{name}: {value} has probability {p}")
    if abs(sum(chances.values()) - 1) > 1e-9:
        raise ConfigError(f"{name}: probabilities add up to {float(sum(chances.values())):g}, expected 1")


class TurnStates(NamedTuple):
    """All states of one branch of the plan at one turn.

    states: expected number of states where the episode continues, over all tasks. slots: largest possible number, which
    an array rollout allocates. group: samples G of a node. actions: joint actions of one state.
    """

    branch: Branch
    states: float
    slots: int
    group: int
    actions: int


def turn_states(plan: Plan, work: Workload) -> list[TurnStates]:
    """States of every branch of ``plan`` at every turn of ``work``.

    The states of a branch, times the joint actions that continue, are the states of the next branch. Time and memory
    grow with the number of branches (one or two in a turn), not with the number of states. Raises ConfigError for an
    impossible workload or plan.
    """
    check(work)
    out: list[TurnStates] = []
    frontier: dict[Branch, tuple[float, int]] = {ROOT: (work.tasks, work.tasks)}
    for turn in work.turns:
        reached: dict[Branch, tuple[float, int]] = {}
        seats = len(turn.seats)
        wide = work.seats if work.engine == "array" else seats
        for branch, (states, slots) in frontier.items():
            group = plan.width(branch)
            if group < 1:
                raise ConfigError(f"plan {plan.name}: expected at least 1 sample at turn {branch.turn}, got {group}")
            if slots > MAX_STATES:
                raise ConfigError(f"plan {plan.name}: more than 10^200 states at turn {branch.turn}; lower its group")
            out.append(TurnStates(branch, states, slots, group, joint_actions(plan, group, seats)))
            live = branch_counts(plan, branch, joint_actions(plan, group, seats))
            for to, count in branch_counts(plan, branch, joint_actions(plan, group, wide)).items():
                a, b = reached.get(to, (0, 0))
                on = states * live.get(to, 0)  # stays an int of any size where no episode ends early
                reached[to] = a + (on * (1 - turn.ends) if turn.ends else on), b + slots * count
        frontier = reached
    return out


def joint_actions(plan: Plan, group: int, seats: int) -> int:
    """Number of joint actions of one state: ``len(plan.actions(branch, seats))``, without a list of them.

    group: samples of a seat.
    """
    return group**seats if plan.joint == "cross" else group


@functools.lru_cache(maxsize=1024)
def branch_counts(plan: Plan, branch: Branch, actions: int) -> dict[Branch, int]:
    """Number of a state's joint actions that lead to each next branch of ``plan``.

    branch: the branch of the state. actions: number of its joint actions. After the first 4,096, all actions must lead
    to the branch of the last one; otherwise ConfigError. Every plan of `rollout.plans` does so, because these plans
    distinguish only the first action from the others.
    """
    out: dict[Branch, int] = {}
    for j in range(min(actions, MAX_ENUMERATED)):
        to = plan.follow(branch, j)
        if to is not None:
            out[to] = out.get(to, 0) + 1
    if actions > MAX_ENUMERATED:
        to = plan.follow(branch, actions - 1)
        if to != plan.follow(branch, MAX_ENUMERATED - 1):
            raise ConfigError(f"plan {plan.name}: {actions} joint actions of one state are too many to ask one by one")
        if to is not None:
            out[to] += actions - MAX_ENUMERATED
    return out


class Counts(NamedTuple):
    """Expected counts of one rollout. The first six have the names of `types.Counts`.

    sequences: sampled completions. branch_sequences: those at nodes where the plan branches. prompt_tokens: prefilled
    tokens, each node once; an upper bound for host rollouts. completion_tokens: decoded tokens. env_calls: steps of
    environments. launches: executions of a generation program. nodes: decision points. unshared_prompt_tokens:
    prefilled tokens if every sample had a prompt of its own. decode_steps: sum over launches; each launch ends with its
    longest completion.
    """

    sequences: float
    branch_sequences: float
    prompt_tokens: float
    completion_tokens: float
    env_calls: float
    launches: int
    nodes: float
    unshared_prompt_tokens: float
    decode_steps: float


class LaunchRows(NamedTuple):
    """Nodes of one role in one seat and one branch, in a part of a launch.

    nodes: expected number, live and played by this launch's model. most: largest possible number. prompt, response:
    length distributions. fresh: expected number of nodes whose whole prompt certainly goes through the model. Of the
    other nodes the prefix cache of a host rollout may hold all but the last prompt token.
    """

    nodes: float
    most: int
    prompt: Lengths
    response: Lengths
    fresh: float


class LaunchPart(NamedTuple):
    """Prompts of a launch that have equally many samples.

    group: G samples of a prompt. rows: N allocated prompts. computed: expected number of rows that the program
    computes, padding included: all of an array rollout, and the live ones of a host rollout. members: expected rows,
    for each role, seat and branch.
    """

    group: int
    rows: int
    computed: float
    members: tuple[LaunchRows, ...]


class Launch(NamedTuple):
    """One execution of a generation program.

    turn, model: indices. prompt: P prompt columns. response: R, the limit of new tokens. parts: its prompts, in parts
    with equally many samples. All parts decode together.
    """

    turn: int
    model: int
    prompt: int
    response: int
    parts: tuple[LaunchPart, ...]

    @property
    def rows(self) -> int:
        """Allocated prompts of all parts."""
        return sum(part.rows for part in self.parts)

    @property
    def members(self) -> tuple[tuple[int, LaunchRows], ...]:
        """G and the expected rows, for each role, seat and branch of all parts."""
        return tuple((part.group, member) for part in self.parts for member in part.members)

    @property
    def samples(self) -> tuple[tuple[float, Lengths], ...]:
        """Expected number of completions and their length distribution, for each of ``members``."""
        return tuple((member.nodes * group, member.response) for group, member in self.members)


def counts(plan: Plan, work: Workload) -> Counts:
    """Expected counts of one rollout of ``plan`` on ``work``."""
    sequences: float = 0  # an int of any size, or an expectation
    branch: float = 0
    calls: float = 0
    nodes: float = 0
    prompts = unshared = tokens = 0.0
    for level in turn_states(plan, work):
        turn = work.turns[level.branch.turn]
        nodes += level.states * len(turn.seats)
        here = level.states * len(turn.seats) * level.group
        sequences += here
        branch += here if level.group > 1 else 0
        calls += level.states * level.actions
        for n, index in acting(level, work):
            role = work.roles[index]
            read = n * mean(role.prompt_at(level.branch.turn))
            prompts, unshared = prompts + read, unshared + read * level.group
            tokens += n * level.group * mean(role.response)
    started = launches(plan, work)
    steps = sum(longest(launch.samples) for launch in started)
    return Counts(sequences, branch, prompts, tokens, calls, len(started), nodes, unshared, steps)


def acting(level: TurnStates, work: Workload) -> Iterable[tuple[float, int]]:
    """Expected number of nodes of each role in ``level``, and the role's index. With probability 1, an int stays one.

    work: the workload. A role that may take several seats comes once for each seat.
    """
    for seat in work.turns[level.branch.turn].seats:
        for index, p in seat.items():
            yield (level.states if p == 1 else level.states * p), index


def longest(samples: Sequence[tuple[float, Lengths]]) -> float:
    """Expected length of the longest of independent completions: E[max] = sum over t of 1 - prod_i F_i(t)^n_i.

    samples: number n_i and length distribution F_i of completions. Exact where the numbers n_i are certain.
    """
    pooled: dict[int, tuple[float, Lengths]] = {}
    for n, lengths in samples:
        if n > 0:
            pooled[id(lengths)] = min(pooled.get(id(lengths), (0, lengths))[0] + n, MAX_COMPLETIONS), lengths
    values = sorted({0, *(v for _, lengths in pooled.values() for v, p in lengths.items() if p > 0)})
    total, below = 0.0, dict.fromkeys(pooled, 0.0)
    for at, after in itertools.pairwise(values):
        below = {i: min(f + pooled[i][1].get(at, 0.0), 1.0) for i, f in below.items()}
        total += (after - at) * (1 - math.prod(below[i] ** n for i, (n, _) in pooled.items()))
    return total


def launches(plan: Plan, work: Workload) -> list[Launch]:
    """Executions of generation programs in one rollout of ``plan`` on ``work``.

    Engine "array": at each branch, one launch for each model that may act in this turn, with the seats it may take.
    Engine "host": at each turn, one launch for each model, with a part for each number of samples that occurs. With
    ``join_adapters`` it is one launch for all models, which has the index of the first one. The rows
    of a part are padded to ``bucket(rows, 4)`` and all prompts to ``bucket(longest, 32)``. Every node is in the
    ``members`` of the launch of the model that plays it, and in no other. So the nodes of all launches add up to
    `Counts.nodes`. R is the largest limit of the roles that a launch may have.
    """
    levels = turn_states(plan, work)
    return _array_launches(levels, work) if work.engine == "array" else _host_launches(levels, work)


def _roles_of(seat: Mapping[int, float], model: int, work: Workload) -> list[int]:
    """The roles of ``model`` that may act in ``seat``."""
    return [r for r in seat if work.roles[r].model == model]


def _limit(roles: Iterable[int], work: Workload) -> int:
    """The largest number of new tokens of a completion of ``roles``."""
    return max(work.roles[r].max_new_tokens for r in roles)


def _array_launches(levels: Sequence[TurnStates], work: Workload) -> list[Launch]:
    """`launches` of an array rollout."""
    out: list[Launch] = []
    for level in levels:
        t, seats = level.branch.turn, work.turns[level.branch.turn].seats
        able = sorted({work.roles[r].model for seat in seats for r in seat})
        of_model = {m: [(seat, _roles_of(seat, m, work)) for seat in seats] for m in able}
        parts = {m: tuple(x for s, own in of_model[m] for x in _rows(level, s, own, work)) for m in able}
        taken = {m: sum(bool(own) for _, own in of_model[m]) for m in able}
        limit = {m: _limit((r for _, own in of_model[m] for r in own), work) for m in able}
        if len(seats) != work.seats:
            taken = dict.fromkeys(able, work.seats)
        if work.batch_models:
            first = able[0]
            parts, limit = {first: sum(parts.values(), ())}, {first: max(limit.values())}
            able, taken = [first], {first: work.seats}
        for m in able:
            rows = level.slots * taken[m]
            out.append(Launch(t, m, work.width, limit[m], (LaunchPart(level.group, rows, rows, parts[m]),)))
    return out


def _host_launches(levels: Sequence[TurnStates], work: Workload) -> list[Launch]:
    """`launches` of a host rollout."""
    # (turn, first model of the launch) -> group -> where roles of its models may act
    found: dict[tuple[int, int], dict[int, list[tuple[TurnStates, list[int], Mapping[int, float]]]]] = {}
    first = lambda r: 0 if work.join_adapters else work.roles[r].model
    for level in levels:
        t, seats = level.branch.turn, work.turns[level.branch.turn].seats
        for seat in seats if level.states else ():
            able = [r for r in sorted(seat) if seat[r] > 0]
            for m in sorted(set(map(first, able))):
                roles = [r for r in able if first(r) == m]
                found.setdefault((t, m), {}).setdefault(level.group, []).append((level, roles, seat))
    out: list[Launch] = []
    begun: set[int] = set()  # models that have sampled
    for (t, m), by_group in sorted(found.items()):
        present = {r for places in by_group.values() for _, mine, _ in places for r in mine}
        prompt = max(n for r in present for n, p in work.roles[r].prompt_at(t).items() if p > 0)
        parts = []
        for group, places in sorted(by_group.items()):
            members = tuple(x for level, mine, seat in places for x in _rows(level, seat, mine, work))
            most = sum(level.slots for level, _, _ in places)
            rows, live = bucket(most, 4), sum(member.nodes for member in members)
            parts.append(LaunchPart(group, rows, rows if live == most else rows * (live / most), members))
        models = {work.roles[r].model for r in present}
        if begun.isdisjoint(models):
            parts = _mark_fresh(parts, work.tasks)
        begun |= models
        out.append(Launch(t, m, bucket(prompt, 32), _limit(present, work), tuple(parts)))
    return out


def _rows(level: TurnStates, seat: Mapping[int, float], roles: Sequence[int], work: Workload) -> list[LaunchRows]:
    """The expected nodes of each of ``roles`` in one seat. Those of a host rollout are taken to be cached."""
    out = []
    for r in roles:
        nodes = level.states if seat[r] == 1 else level.states * seat[r]
        role = work.roles[r]
        fresh = nodes if work.engine == "array" else 0
        out.append(LaunchRows(nodes, level.slots, role.prompt_at(level.branch.turn), role.response, fresh))
    return out


def _mark_fresh(parts: Sequence[LaunchPart], tasks: int) -> list[LaunchPart]:
    """The parts of a model's first launch, with the number of prompts that no prefix cache can hold.

    Nothing of a task is cached before the model's first turn, so at least one prompt of each task goes through the
    model. A task has a node of a member with a probability of nodes / most or more. Only one member is counted, the one
    with the most tokens, because the prompts of several members may begin alike.
    """
    out, chance = list(parts), lambda member: member.nodes / member.most
    places = [(i, j) for i, part in enumerate(parts) for j in range(len(part.members))]
    tokens = {(i, j): chance(parts[i].members[j]) * mean(parts[i].members[j].prompt) for i, j in places}
    i, j = max(places, key=lambda place: tokens[place])
    members = list(parts[i].members)
    members[j] = members[j]._replace(fresh=min(tasks * chance(members[j]), members[j].nodes))
    out[i] = parts[i]._replace(members=tuple(members))
    return out


# ---- closed forms ---------------------------------------------------------------------------------------------------


class ClosedFormCounts(NamedTuple):
    """Counts of one task with k turns and W seats. The fields are those of `Counts`; leaves: ends of episodes."""

    sequences: int
    branch_sequences: int
    nodes: int
    env_calls: int
    leaves: int


def product_counts(k: int, group: int | Sequence[int], seats: int = 1, *, crossed: bool = False) -> ClosedFormCounts:
    """Counts of a product plan.

    k: turns. group: samples G, or the samples G_1 ... G_k of each turn. seats: W. crossed: J = G^W joint actions of a
    state instead of J = G. All joint actions continue, so turn t has S_t = J_1 ... J_(t-1) states:

    nodes  W sum S_t;  sequences  W sum G_t S_t;  calls  sum J_t S_t;  leaves  J_1 ... J_k

    With equal samples the sum of S_t is (J^k - 1) / (J - 1).
    """
    sizes = [group] * k if isinstance(group, int) else list(group)
    if len(sizes) != k:
        raise ValueError(f"group: expected {k} sizes, one for each turn, got {len(sizes)}")
    total, branched, nodes, calls, states = 0, 0, 0, 0, 1
    for size in sizes:
        samples = seats * size * states
        total, branched = total + samples, branched + samples * (size > 1)
        nodes, states = nodes + seats * states, states * (size**seats if crossed else size)
        calls += states
    return ClosedFormCounts(total, branched, nodes, calls, states)


def flat_counts(k: int, group: int, seats: int = 1) -> ClosedFormCounts:
    """Counts of a flat plan: G episodes share only their first state.

    k: turns. group: G. seats: W. Each seat has G k sequences and 1 + G (k - 1) nodes.
    """
    branch = seats * group if group > 1 else 0
    return ClosedFormCounts(seats * group * k, branch, seats * (1 + group * (k - 1)), group * k, group)


def handoff_counts(k: int, group: int, seats: int = 1, *, crossed: bool = False) -> ClosedFormCounts:
    """Counts of a hand-off plan: one state in each turn, and one of its J joint actions continues.

    k: turns. group: samples G. seats: W. crossed: J = G^W instead of J = G. Each seat has k nodes with G samples. The
    environment steps all J joint actions.
    """
    j = group**seats if crossed else group
    n = seats * group * k
    return ClosedFormCounts(n, n if group > 1 else 0, seats * k, j * k, k * (j - 1) + 1)


def node_wise_counts(sizes: Sequence[int], seats: int = 1, *, local: bool = False) -> ClosedFormCounts:
    """Counts of a node-wise plan.

    sizes: G_1 ... G_k samples of the nodes of the base trajectory. seats: W. local: alternatives end after their turn.
    The base trajectory has k nodes with G_i samples, and one sample of each is its own continuation.

    local      G_1 + ... + G_k samples on k nodes. (The product plan has G_1 * ... * G_k leaves.)
    continue   each of the G_i - 1 alternatives of turn i continues for k - i turns with one sample each:
               sum G_i + sum (G_i - 1)(k - i). With equal sizes that is k G + (G - 1) k (k - 1) / 2: linear in G,
               quadratic in k
    """
    k = len(sizes)
    branch = seats * sum(g for g in sizes if g > 1)
    tails = 0 if local else sum((g - 1) * (k - i) for i, g in enumerate(sizes, 1))
    total = sum(sizes) + tails
    return ClosedFormCounts(seats * total, branch, seats * (k + tails), total, sum(g - 1 for g in sizes) + 1)
