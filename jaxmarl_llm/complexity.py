"""What a rollout and its update cost, before anything runs: counts, tokens, cache bytes, FLOPs, seconds.

A plan's shape does not depend on samples (plans.py), so its cost is a walk over its branches: `levels` asks the plan's
own ``width`` and ``follow`` and multiplies, and no plan has a case of its own. Nothing here compiles or allocates; a
product of 10^100 leaves is counted as fast as a flat plan. Letters: k turns, G samples a node, W seats that act at
once, B tasks.

Counts are exact. Lengths, who takes a seat and whether an episode ends may be uncertain: they are given as
probabilities, and what is counted is then the exact expectation. Sums (sequences, tokens, calls) are linear, so their
expectation needs no independence; the longest of n completions, which ends a launch, takes n independent ones:

    E[max] = sum over t >= 0 of 1 - F(t)^n          (not the mean: 8 completions of 1 or 9 tokens take 9, not 5)

Where allocations depend on what is uncertain (padding, cache, launches of a host rollout) the largest possible is
meant.

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
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Copies of the trained parameters in an optimizer's state; adafactor's factors are a fraction of one.
MOMENTS = {"adamw": 2, "adam": 2, "lion": 1, "sgd": 0, "adafactor": 0}
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
    ``stacked``: all models of a launch in one, see rollout.make_rollout.
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
    prompt_tokens: float  # prefilled, each node once
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
        for n, speaker in _acting(level, work):
            read = n * mean(speaker.prompt_at(level.branch.turn))
            prompts, unshared = prompts + read, unshared + read * level.group
            tokens += n * level.group * mean(speaker.response)
    started = launches(plan, work)
    steps = sum(longest(launch.samples) for launch in started)
    return Counts(sequences, branch, prompts, tokens, calls, len(started), nodes, unshared, steps)


def _acting(level: Level, work: Workload) -> Iterable[tuple[float, Speaker]]:
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

    array: at each branch one for each model that may act at its turn. host: at each turn one for each model and number
    of samples that really occur, rows padded to ``bucket(rows, 4)`` and prompts to ``bucket(longest, 32)``.
    """
    out: list[Launch] = []
    widest = max(s.max_new for s in work.speakers)
    host: dict[tuple[int, int, int], list[tuple[Level, list[int], Mapping[int, float]]]] = {}
    for level in levels(plan, work):
        t, rows = level.branch.turn, level.slots * work.seats
        seats = work.turns[t].seats
        of_model = lambda seat, m: [r for r in seat if work.speakers[r].model == m]
        able = sorted({work.speakers[r].model for seat in seats for r in seat})
        if work.engine == "array":
            said = [tuple(x for s in seats for x in _samples(level, s, of_model(s, m), work)) for m in able]
            if work.stacked:
                said, able = [sum(said, ())], able[:1]
            out += [Launch(t, m, rows, level.group, work.width, widest, x) for m, x in zip(able, said)]
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


class Trained(NamedTuple):
    """Expected size of an update's batch."""

    sequences: float
    prompt_tokens: float  # each trained node's prompt once
    completion_tokens: float
    unshared_prompt_tokens: float
    flops: float  # of one epoch


def trained(
    plan: Plan, work: Workload, *, groups: bool = False, most: int | None = None, remat: bool = True
) -> Trained:
    """What an update on the tree goes through: every completion, or with ``groups`` those with siblings alone.

    ``most``: at most so many nodes, and then those that cost most are counted: which are selected depends on rewards.
    FLOPs: forward, twice that backward, and the trunk once more with ``remat``; the head's logits are made
    again in any case. Padding of micro-batches is not counted.
    """
    rows: list[tuple[float, float, float, float, float, float]] = []
    for level in levels(plan, work):
        if groups and level.group < 2:
            continue
        for n, speaker in _acting(level, work):
            p, r, g = mean(speaker.prompt_at(level.branch.turn)), mean(speaker.response), level.group
            weights = work.models[speaker.model]
            c, per = weights.config, token_flops(weights)
            pairs = mean(speaker.prompt_at(level.branch.turn), 2) + g * (p * r + mean(speaker.response, 2))
            trunk = per * (p + g * r) + attention_flops(c) * pairs
            head = 2 * c.hidden_size * c.vocab_size * g * r
            rows.append((n, g, p, g * r, g * p, trunk * (4 if remat else 3) + head * 4))
    rows.sort(key=lambda row: -(row[2] + row[3]))
    left: float = math.inf if most is None else most
    total = [0.0] * 5
    for n, *costs in rows:
        n = min(n, left)
        left -= n
        total = [t + n * c for t, c in zip(total, costs)]
    return Trained(*total)


# ---- the model ------------------------------------------------------------------------------------------------------


def kernels(cfg: Config) -> dict[str, tuple[int, int]]:
    """[in, out] of each matrix of a layer."""
    d, f, q, kv = cfg.hidden_size, cfg.intermediate_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    heads = {"q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d)}
    return {**heads, "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d)}


def parameters(cfg: Config) -> int:
    """Numbers in ``make_policy(cfg).init``: embedding, layers, last norm, and a head where it is not tied."""
    layer = sum(a * b for a, b in kernels(cfg).values()) + 2 * cfg.hidden_size
    layer += (cfg.num_heads + 2 * cfg.num_kv_heads) * cfg.head_dim if cfg.attention_bias else 0
    layer += 2 * cfg.head_dim if cfg.qk_norm else 0
    embedding = cfg.vocab_size * cfg.hidden_size
    return embedding * (1 if cfg.tie_embeddings else 2) + cfg.num_layers * layer + cfg.hidden_size


def adapter_parameters(weights: Weights) -> int:
    """r (in + out) a target and layer."""
    shapes = kernels(weights.config)
    return weights.config.num_layers * weights.rank * sum(sum(shapes[t]) for t in weights.targets)


def own_bytes(weights: Weights) -> int:
    """Trained parameters of one model. Adapters and value heads are float32."""
    if weights.rank:
        return 4 * (adapter_parameters(weights) + weights.extra)
    return ITEMSIZE[weights.config.dtype] * parameters(weights.config) + 4 * weights.extra


def base_bytes(models: Sequence[Weights]) -> int:
    """The frozen base of adapters, once for each architecture."""
    return sum(ITEMSIZE[c.dtype] * parameters(c) for c in {w.config for w in models if w.rank})


def token_flops(weights: Weights) -> int:
    """Multiplications and additions of one token in all matrices of the trunk: 2 in out each (adapters too)."""
    c = weights.config
    dense = c.num_layers * sum(2 * a * b for a, b in kernels(c).values())
    return dense + 2 * (adapter_parameters(weights) if weights.rank else 0)


def attention_flops(cfg: Config) -> int:
    """Of one query token and one key position, all layers: 2 H for the score and 2 H for the value, each head."""
    return 4 * cfg.num_layers * cfg.num_heads * cfg.head_dim


def cache_bytes(launch: Launch, cfg: Config, *, shared: bool = True) -> int:
    """Keys and values of a launch: 2 L K H for each of N P prompt and N G S own slots, S = max(R - 1, 1): the last
    token is not read again. Not ``shared``: N G (P + S), as if every sample had its prompt to itself.
    """
    own = launch.group * max(launch.response - 1, 1)
    slots = launch.rows * ((launch.prompt if shared else launch.group * launch.prompt) + own)
    return slots * 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * ITEMSIZE[cfg.dtype]


def logits_bytes(launch: Launch, cfg: Config) -> int:
    """float32 logits of one token of every sample, once."""
    return 4 * launch.rows * launch.group * cfg.vocab_size


class Work(NamedTuple):
    """What a launch computes, padding included: it is computed too."""

    prefill: float  # FLOPs
    decode: float  # FLOPs, heads included
    prefill_bytes: float  # read at least: weights once, the prompts' cache written
    step_bytes: float  # read at least for one token of each sample: weights, cache
    steps: float  # expected tokens of the longest completion


def work_of(launch: Launch, weights: Weights) -> Work:
    """Matrix products alone. T steps draw T tokens (N G heads each) and go through the trunk T - 1 times."""
    c, n, lanes = weights.config, launch.rows, launch.rows * launch.group
    steps, own = longest(launch.samples), max(launch.response - 1, 1)
    per, pair = token_flops(weights), attention_flops(c)
    prefill = n * launch.prompt * (per + pair * launch.prompt)
    head = 2 * c.hidden_size * c.vocab_size
    decode = lanes * (steps * head + max(steps - 1, 0) * (per + pair * (launch.prompt + own)))
    size = base_bytes([weights]) + own_bytes(weights) if weights.rank else own_bytes(weights)
    cache = cache_bytes(launch, c)
    return Work(prefill, decode, size + cache, size + cache, steps)


# ---- memory ---------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """Bytes a run holds, at least: activations, tables and what the compiler adds are not in it."""

    base: int  # frozen
    own: int  # trained, all models
    optimizer: int
    copies: int  # reference policy and past policies
    cache: int  # of the largest launch
    unshared_cache: int  # of the same, had every sample its prompt to itself
    logits: int  # of the largest launch
    gradient: int  # float32, of the largest model, two while micro-batches are added up

    @property
    def least(self) -> int:
        """The higher of generation and update."""
        held = self.base + self.own + self.optimizer + self.copies
        return held + max(self.cache + self.logits, self.gradient)


def memory(plan: Plan, work: Workload, *, optimizer: str = "adamw", copies: int = 0) -> Memory:
    """``copies``: of all trained parameters that are kept beside them."""
    started = launches(plan, work)
    of = lambda launch: work.models[launch.model].config
    top = max(started, key=lambda x: cache_bytes(x, of(x)) + logits_bytes(x, of(x)))
    own = [own_bytes(w) for w in work.models]
    numbers = max(adapter_parameters(w) if w.rank else parameters(w.config) for w in work.models)
    return Memory(
        base_bytes(work.models),
        sum(own),
        MOMENTS[optimizer] * sum(own),
        copies * sum(own),
        cache_bytes(top, of(top)),
        cache_bytes(top, of(top), shared=False),
        logits_bytes(top, of(top)),
        2 * 4 * numbers,
    )


# ---- time -----------------------------------------------------------------------------------------------------------


class Chip(NamedTuple):
    flops: float  # bfloat16 without sparsity, per second
    bandwidth: float  # bytes per second
    memory: float  # bytes
    source: str


CHIPS = {
    "v5e": Chip(197e12, 819e9, 16e9, "cloud.google.com/tpu/docs/v5e"),
    "v5p": Chip(459e12, 2765e9, 95e9, "cloud.google.com/tpu/docs/v5p"),
    "v6e": Chip(918e12, 1638e9, 32e9, "cloud.google.com/tpu/docs/v6e"),
    "a100": Chip(312e12, 2039e9, 80e9, "NVIDIA A100 datasheet, SXM 80 GB"),
    "h100": Chip(989e12, 3.35e12, 80e9, "NVIDIA H100 datasheet, SXM"),
    "h200": Chip(989e12, 4.8e12, 141e9, "NVIDIA H200 datasheet, SXM"),
}


def roofline(chip: Chip, plan: Plan, work: Workload, update: Trained) -> tuple[float, float]:
    """Seconds of rollout and update on one chip at its full peak: what no implementation can be faster than.

    Each part takes the longer of its FLOPs over the peak and its bytes over the bandwidth; environments take none.
    """
    play = 0.0
    for launch in launches(plan, work):
        w = work_of(launch, work.models[launch.model])
        play += max(w.prefill / chip.flops, w.prefill_bytes / chip.bandwidth)
        play += max(w.decode / chip.flops, w.steps * w.step_bytes / chip.bandwidth)
    return play, update.flops / chip.flops


FEATURES = ("launch", "decode step", "sequence", "prefill FLOP", "decode FLOP")


def features(plan: Plan, work: Workload) -> list[float]:
    """What the time of a rollout is made of, in the order of FEATURES."""
    seen = counts(plan, work)
    done = [work_of(launch, work.models[launch.model]) for launch in launches(plan, work)]
    flops = sum(w.prefill for w in done), sum(w.decode for w in done)
    return [float(seen.launches), float(seen.decode_steps), float(seen.sequences), *map(float, flops)]


class Calibration(NamedTuple):
    """Seconds for one of each of FEATURES on one machine; ``spread``: how far repeats lay apart."""

    seconds: tuple[float, ...]
    spread: float  # the largest (longest - shortest) / median of one setting's repeats
    stable: bool

    def predict(self, parts: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(self.seconds, parts))


UNSTABLE = 0.25  # spread of repeats above which a machine is called unstable


def calibrate(parts: Sequence[Sequence[float]], repeats: Sequence[Sequence[float]]) -> Calibration:
    """Non-negative least squares of each setting's shortest repeat on its features [settings, 5], errors relative.

    Other programs only add time, hence the shortest. Repeats that lie apart show them: ``stable`` is then False.
    """
    import numpy as np
    from scipy.optimize import nnls

    if min(len(r) for r in repeats) < 3 or len(parts) < len(FEATURES):
        raise ConfigError(f"calibration: expected {len(FEATURES)} settings or more, of 3 repeats or more")
    best = np.array([min(r) for r in repeats])
    x = np.array(parts, float) / best[:, None]
    scale = np.maximum(x.max(0), 1e-300)
    found, _ = nnls(x / scale, np.ones(len(best)))
    spread = float(max((max(r) - min(r)) / np.median(r) for r in repeats))
    return Calibration(tuple(float(v) for v in found / scale), spread, spread <= UNSTABLE)


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
