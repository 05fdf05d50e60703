"""JoyAgents-R1's mechanisms on `relay_dispatch`, where each can win or lose:

    python -m experiments.studies.mechanisms                       the page, from the recorded arms
    python -m experiments.studies.mechanisms --run=all --seeds=20  run what is not recorded yet, the pilot first
    python -m experiments.studies.mechanisms --run=pilot           group sizes of both plans, on seeds 100 and 101

An arm is the configuration `joyagents_r1.py:harder` with one mechanism changed. All arms of a seed start from the same
parameters after stage 0, and have the same tasks, held-out tasks and keys. Held-out success is measured at eleven
places of a run. The primary figure is the area under this curve, divided by the length of the run. A contrast is the
paired difference of two arms over seeds. Holm's correction holds for the family of all contrasts.

Records go to docs/results/mechanisms.json after every arm, the table to docs/mechanisms.md. An arm that is recorded
with the same settings and seeds is not run again.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.claims import FAILS, HOLDS, OPEN, Claim, Finding, arms, minus
from experiments.configs.joyagents_r1 import harder
from experiments.studies.common import interval, origin, read_record
from experiments.studies.paired import LEVEL, area, detectable, holm, p_value
from jaxmarl_llm.agents.memory import Memory
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import fingerprint, replace_path
from jaxmarl_llm.credit.rules import GroupRelative, PerCompletion, ReturnToGo, Sizes, chain
from jaxmarl_llm.credit.selection import top_k_variance
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import joyagents_r1
from jaxmarl_llm.rollout.array import layout
from jaxmarl_llm.rollout.keys import TASKS, fold, stream
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.compiled import make_evaluation, task_data
from jaxmarl_llm.training.drivers import RunData, TracedDriver, blocks_of
from jaxmarl_llm.training.learner import Batch, Learner
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.training.train_step import TrainStep
from jaxmarl_llm.types import Array, Model, Params, TrainState, Tree

PLACES = 10  # parts of a run: success is measured before the first one and after each
K = 5
GROUP = {"node_wise": 4, "flat": 8}  # G of each plan
PILOT_SEEDS = (100, 101)
PILOT_GROUPS = {"node_wise": (2, 4, 6), "flat": (4, 8, 16)}
DELTA = 0.02


@dataclass(frozen=True)
class Arm:
    """What an arm changes in the reference.

    Attributes:
        changes: Dotted key of the configuration -> value.
        random_groups: K groups of each task are drawn at random among those with a variance.
        shuffled: The keys of each role's memory entries are permuted when entries are read.
        tokens: The arm takes as many steps as sample the tokens of the reference. Otherwise as many steps as it.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    random_groups: bool = False
    shuffled: bool = False
    tokens: bool = False


REFERENCE = "reference"
ALL_GROUPS: dict[str, Any] = {"selected_groups": None}
FLAT: dict[str, Any] = {**ALL_GROUPS, "plan": "flat"}
ARMS = {
    REFERENCE: Arm(),  # node-wise, top-5 groups by variance, memory, advantages / std: the paper's
    "random groups": Arm(ALL_GROUPS, random_groups=True),
    "all groups": Arm(ALL_GROUPS),
    "no memory": Arm({"use_memory": False}),
    "shuffled memory": Arm(shuffled=True),
    "no std": Arm({"credit.normalise": "none"}),
    "flat, equal tokens": Arm({**FLAT, "group": GROUP["flat"]}, tokens=True),
    "flat, equal updates": Arm({**FLAT, "group": GROUP["node_wise"]}),
}


BUDGET = "1000 supervised steps; RL steps of 8 tasks as many as the table says"


def _claim(text: str, one: str, other: str) -> Claim:
    effect = f"area under the held-out success curve, {one} minus {other}"
    return Claim("X", text, effect, DELTA, control=f"{other}, from the same parameters", budget=BUDGET)


# Contrast -> the two arms. The plans are compared with all groups trained on.
CONTRASTS = {
    "plan, equal tokens": ("all groups", "flat, equal tokens"),
    "plan, equal updates": ("all groups", "flat, equal updates"),
    "selection, random": (REFERENCE, "random groups"),
    "selection, all": (REFERENCE, "all groups"),
    "memory, off": (REFERENCE, "no memory"),
    "memory, shuffled": (REFERENCE, "shuffled memory"),
    "std": (REFERENCE, "no std"),
}
TEXTS = {
    "plan, equal tokens": "node-wise sampling beats flat sampling of the same number of tokens",
    "plan, equal updates": "node-wise sampling beats flat sampling with the same number of updates on as many samples",
    "selection, random": "the 5 groups of largest variance beat 5 random ones",
    "selection, all": "the 5 groups of largest variance beat all groups",
    "memory, off": "memory beats no memory",
    "memory, shuffled": "memory beats a memory with permuted keys",
    "std": "division by the standard deviation beats none",
}
CLAIMS = {name: _claim(TEXTS[name], *pair) for name, pair in CONTRASTS.items()}


# -- what arms change --------------------------------------------------------------------------------------------------


def random_groups(k: int, num_tasks: int) -> Callable[[Array, Tree, Array], Array]:
    """`Algorithm.select_steps` that keeps the steps of k random nodes of each task, of those with a trained step."""

    def select(key: Array, tree: Tree, trained: Array) -> Array:
        nodes = tree.nodes.task.shape[0]
        able = jax.ops.segment_max(jnp.asarray(trained).astype(jnp.int32), tree.steps.node, nodes) > 0
        score = jax.random.uniform(key, (nodes,), minval=0.1, maxval=1.0)
        chosen = top_k_variance(score, able, k, scope=tree.nodes.task, num_scopes=num_tasks)
        return trained & chosen[tree.steps.node]

    return select


def by_task_and_turn(tree: Tree, sizes: Sizes) -> tuple[Array, int]:
    """Groups of a flat plan: the completions of one turn of a task, whichever role made them."""
    node = tree.steps.node
    ids = tree.nodes.task[node] * sizes.max_turns + tree.nodes.turn[node]
    return ids, sizes.num_tasks * sizes.max_turns


def permuted(store: Memory, key: jax.Array) -> Memory:
    """A memory in which the keys of the used entries are exchanged at random: they say nothing of the entries."""
    draws = jax.random.uniform(key, store.used.shape)
    order = jnp.argsort(jnp.where(store.used, draws, jnp.inf))
    place = jnp.argsort(~store.used, stable=True)  # used slots first, as in ``order``
    return replace(store, key=store.key.at[place].set(store.key[order]))


def permuted_stores(stores: Mapping[str, Memory], key: jax.Array) -> dict[str, Memory]:
    """`permuted` for each role's memory."""
    return {name: permuted(store, jax.random.fold_in(key, i)) for i, (name, store) in enumerate(stores.items())}


@dataclass(frozen=True)
class Driver(TracedDriver):
    """A `TracedDriver` of a step whose rollout is there already.

    Its updates leave out nodes behind alternatives, which are never trained on.

    Attributes:
        tree: The rollout; None: it is played.
    """

    tree: Tree | None = None

    def play(
        self, step: TrainStep, state: TrainState, params: Params, tasks: Array, key: jax.Array, assignment: Any
    ) -> tuple[Tree, None]:
        if self.tree is not None:
            return self.tree, None
        return super().play(step, state, params, tasks, key, assignment)

    def lay_out(
        self, step: TrainStep, tree: Tree, played: None, advantage: Array, trained: Array, targets: Mapping[str, Any]
    ) -> dict[str, list[Batch]]:
        """Micro-batches of base trajectories alone."""
        whole = super().lay_out(step, tree, played, advantage, trained, targets)
        out: dict[str, list[Batch]] = {}
        for name, batches in whole.items():
            roles = {r for r, role in enumerate(step.team.roles) if name in role.players}
            blocks = [block for block, _ in blocks_of(step, roles)]
            out[name] = [batch for block, batch in zip(blocks, batches, strict=True) if block.branch.trunk]
        return out

    def optimize(
        self,
        models: tuple[Model, ...],
        learners: Mapping[str, Learner],
        loss: Loss,
        state: TrainState,
        batches: Mapping[str, list[Batch]],
    ) -> tuple[TrainState, dict[str, dict[str, Any]]]:
        """As `TracedDriver.optimize`. Micro-batches of one shape are joined, so that few are compiled."""
        joined: dict[str, list[Batch]] = {}
        for name, some in batches.items():
            alike: dict[tuple[int, ...], list[Batch]] = {}
            for batch in some:
                if jnp.ndim(batch.length) == 1:  # no stack
                    batch = jax.tree.map(lambda x: x[None], batch)
                alike.setdefault((batch.tokens.shape[2], *batch.completions.shape[2:]), []).append(batch)
            joined[name] = [jax.tree.map(lambda *rows: jnp.concatenate(rows, 1), *some) for some in alike.values()]
        return super().optimize(models, learners, loss, state, joined)


# -- running an arm ----------------------------------------------------------------------------------------------------


def base(steps: int | None = None) -> joyagents_r1.Config:
    """The configuration of the reference. ``steps``: of RL, instead of its own."""
    cfg = harder()
    micro = 2**30  # tokens: one micro-batch a block, see `Driver`
    cfg = replace(cfg, selected_groups=K, group=GROUP["node_wise"], micro_tokens=micro)
    return cfg if steps is None else replace(cfg, steps=steps)


def sequences(cfg: joyagents_r1.Config) -> int:
    """Completions of a task in a step, at most."""
    env = cfg.env.module.make(cfg.env.build())
    assert isinstance(env, ArrayEnv)
    blocks = layout(joyagents_r1.make_plan(cfg), env, 1)
    return int(sum(b.nodes * b.group for b in blocks))


def config_of(arm: Arm, reference: joyagents_r1.Config) -> joyagents_r1.Config:
    """The configuration of an arm, with its number of steps: a multiple of PLACES."""
    cfg = reference
    for path, value in arm.changes.items():
        cfg = replace_path(cfg, path, value)
    scale = sequences(reference) / sequences(cfg) if arm.tokens else 1.0
    cfg = replace(cfg, steps=PLACES * max(1, round(reference.steps * scale / PLACES)))
    cfg.check("config")
    return cfg


def recipe_of(cfg: joyagents_r1.Config, random: bool = False) -> phases.Recipe:
    """The recipe of a configuration. ``random``: see `Arm.random_groups`."""
    algorithm = joyagents_r1.algorithm(cfg)
    if random:
        algorithm = replace(algorithm, select_steps=random_groups(K, cfg.batch))
    if cfg.plan == "flat":
        compare = GroupRelative(by_task_and_turn, cfg.credit.baseline, cfg.credit.normalise, cfg.credit.ddof)
        algorithm = replace(algorithm, credit=chain(ReturnToGo(cfg.credit.discount), PerCompletion(), compare))
    return phases.make_recipe(cfg, joyagents_r1.make_plan(cfg), algorithm)


SHUFFLE = 2**30 + 2  # stream of a run's key, beside those of rollout/keys.py


class Start(NamedTuple):
    """What all arms of some seeds begin with. Leading axes count seeds."""

    seeds: jax.Array
    data: RunData  # without demonstrations
    params: Params


def start(reference: joyagents_r1.Config, seeds: Sequence[int]) -> Start:
    """Tasks of the seeds, and their parameters after stage 0."""
    recipe = recipe_of(reference)
    data, which = task_data(recipe, seeds), jnp.array(seeds)
    taught = recipe.phases[0]

    def learn(seed: jax.Array, data: RunData) -> Params:
        def step(state: TrainState, i: jax.Array) -> tuple[TrainState, None]:
            state, _ = taught.step(Driver(seed, data), state, i)
            return state.replace(step=state.step + 1), None

        return jax.lax.scan(step, recipe.initial(seed, 0), jnp.arange(taught.steps))[0].params

    return Start(which, data._replace(demonstrations={}), jax.jit(jax.vmap(learn))(which, data))


class Curves(NamedTuple):
    """What an arm measured.

    Attributes:
        success: Held-out success at each place [seeds, PLACES + 1].
        tokens: Decoded tokens of a run [seeds].
        hit: Share of prompts with a memory entry, in the last part of a run [seeds]; 0 without memory.
    """

    success: np.ndarray
    tokens: np.ndarray
    hit: np.ndarray


class Programs(NamedTuple):
    """An arm as pure functions of one seed: mapped over seeds and compiled by `play`.

    Playing and learning are two programs. The first takes minutes to compile, and is that of most arms.

    Attributes:
        first: (seed, params) -> the state behind stage 0.
        sample: (seed, data, state, i) -> the rollout of step i.
        learn: (seed, data, state, tree, i) -> the state behind step i, decoded tokens, share of prompts with an entry.
        success: (seed, data, state) -> success on the held-out tasks.
        shuffle: (state, i) -> the state with permuted memories; None: memories are read as they are.
    """

    first: Callable[..., TrainState]
    sample: Callable[..., Tree]
    learn: Callable[..., tuple[TrainState, Array, Array]]
    success: Callable[..., jax.Array]
    shuffle: Callable[..., TrainState] | None


def programs(arm: Arm, cfg: joyagents_r1.Config) -> Programs:
    """The programs of an arm with configuration ``cfg``."""
    recipe = recipe_of(replace(cfg, sft=replace(cfg.sft, steps=0)), arm.random_groups)  # stage 0 is over
    phase = recipe.phases[-1]
    step: Any = phase.step
    score = make_evaluation(cfg, memory=cfg.memory if cfg.use_memory else None)

    def first(seed: jax.Array, params: Params) -> TrainState:
        state = recipe.initial(seed, 0).replace(params=params, step=jnp.int32(cfg.sft.steps))
        return recipe.begin(phase, state)

    def sample(seed: jax.Array, data: RunData, state: TrainState, i: jax.Array) -> Tree:
        key = jax.random.fold_in(state.key, state.step)
        tasks = shuffled(stream(seed, TASKS), step.env_runner.size, i * cfg.batch, cfg.batch)
        return Driver(seed, data).play(step, state, state.params, tasks, key, None)[0]

    def learn(
        seed: jax.Array, data: RunData, state: TrainState, tree: Tree, i: jax.Array
    ) -> tuple[TrainState, Array, Array]:
        state, _ = step(Driver(seed, data, tree=tree), state, i)
        nodes = tree.nodes
        hit = ((nodes.retrieved.slots >= 0).any(-1) & nodes.valid).sum() / nodes.valid.sum()
        return state.replace(step=state.step + 1), tree.counts.completion_tokens, hit

    def success(seed: jax.Array, data: RunData, state: TrainState) -> jax.Array:
        return score(state.params, seed, data.held_out, state.memory)["accuracy"]

    def shuffle(state: TrainState, i: jax.Array) -> TrainState:
        return state.replace(memory=permuted_stores(state.memory, fold(state.key, SHUFFLE, i)))

    return Programs(first, sample, learn, success, shuffle if arm.shuffled else None)


def play(arm: Arm, reference: joyagents_r1.Config, begin: Start) -> Curves:
    """Run an arm on the seeds of ``begin``: PLACES parts, and an evaluation before the first and after each."""
    cfg = config_of(arm, reference)
    one = programs(arm, cfg)
    seeds, data = begin.seeds, begin.data
    sample = jax.jit(jax.vmap(one.sample, (0, 0, 0, None)))
    learn = jax.jit(jax.vmap(one.learn, (0, 0, 0, 0, None)), donate_argnums=2)
    success = jax.jit(jax.vmap(one.success))
    read = (lambda state, i: state) if one.shuffle is None else jax.jit(jax.vmap(one.shuffle, (0, None)))
    state = jax.jit(jax.vmap(one.first))(seeds, begin.params)
    curve, tokens, hits = [success(seeds, data, read(state, -1))], [], []
    for i in range(cfg.steps):
        tree = sample(seeds, data, read(state, i), jnp.int32(i))
        state, spent, hit = learn(seeds, data, state, tree, jnp.int32(i))
        tokens.append(spent)
        hits.append(hit)
        if (i + 1) % (cfg.steps // PLACES) == 0:
            curve.append(success(seeds, data, read(state, -1 - i)))
    last = np.stack(hits[-(cfg.steps // PLACES) :]).mean(0)
    return Curves(np.stack(curve, 1), np.stack(tokens).sum(0), last)


def figures(curves: Curves) -> dict[str, list]:
    """What is recorded of an arm: the curve, its area, decoded tokens and the share of prompts with an entry."""
    success = curves.success.astype(float)
    return {
        "curve": success.round(4).tolist(),
        "area": [area(row, range(PLACES + 1)) for row in success],
        "tokens": curves.tokens.astype(int).tolist(),
        "hit": curves.hit.astype(float).round(4).tolist(),
    }


def measure(arm: Arm, reference: joyagents_r1.Config, starts: Sequence[Start]) -> dict[str, Any]:
    """The record of an arm on the seeds of all ``starts``."""
    clock = time.time()
    got = [play(arm, reference, begin) for begin in starts]
    curves = Curves(*(np.concatenate(columns) for columns in zip(*got, strict=True)))
    minutes = round((time.time() - clock) / 60, 1)
    steps = config_of(arm, reference).steps
    return {**figures(curves), "steps": steps, "minutes": minutes, **settings(arm, reference, starts), **origin()}


def settings(arm: Arm, reference: joyagents_r1.Config, starts: Sequence[Start] | Sequence[int]) -> dict[str, Any]:
    """What a recorded arm has to have been run with. ``starts``: or the seeds."""
    seeds = [int(s) for x in starts for s in (x.seeds if isinstance(x, Start) else [x])]
    return {"settings": [fingerprint(config_of(arm, reference)), repr(arm), PLACES, K], "seeds": seeds}


# -- decisions ---------------------------------------------------------------------------------------------------------


def findings(records: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    """The contrasts of which both arms are recorded."""
    out = []
    for name, pair in CONTRASTS.items():
        if all(arm in records for arm in pair):
            one, other = (records[arm]["area"] for arm in pair)
            out.append(Finding(name, minus(one, other), arms("area", dict(zip(pair, (one, other), strict=True)))))
    return out


def decisions(found: Sequence[Finding]) -> dict[str, dict[str, Any]]:
    """What each contrast shows, with Holm's correction over all of CONTRASTS, recorded or not.

    A contrast holds, or does not hold, where its mean differs from delta at LEVEL after the correction.
    """
    p = {f.claim: p_value(f.effect, CLAIMS[f.claim].delta) for f in found}
    adjusted = holm({**dict.fromkeys(CONTRASTS, 1.0), **p})
    out = {}
    for f in found:
        x, claim = np.asarray(f.effect, float), CLAIMS[f.claim]
        side = HOLDS if x.mean() > claim.delta else FAILS
        spread = float(x.std(ddof=1)) if len(x) > 1 else np.nan
        out[f.claim] = {
            "verdict": side if adjusted[f.claim] <= LEVEL else OPEN,
            "p": p[f.claim],
            "holm": adjusted[f.claim],
            "p_of_nothing": p_value(f.effect),
            "detectable": detectable(spread, len(x), LEVEL / len(CONTRASTS)),
        }
    return out


INTRO = """# The mechanisms of JoyAgents-R1 where they can win or lose

`python -m experiments.studies.mechanisms --run=all --seeds=20` measures what is not recorded and writes this page.

The environment is `relay_dispatch` in the form of `experiments/configs/joyagents_r1.py:harder`.

- A master routes a query of 4 or 5 hops to eight specialists. Each specialist reads the last answer.
- An episode has 9 or 11 turns. Accuracy is paid at the end alone.
- A node is a group. A task has at least 9 groups, so a selection of K = 5 leaves groups out.
- High stakes are rare, so the memory's 97.5 % threshold lies inside the range of rewards.
- Every operation has three spellings, so a memory entry of the same text is rare.
- The eight specialists share one model of 27 thousand parameters. Each has a memory of its own.

An arm changes one mechanism of the reference: node-wise sampling, 5 groups by variance, memory, advantages divided by
the standard deviation. All arms of a seed start from the same parameters, with the same tasks and keys. The primary
figure is the area under the curve of held-out success, measured at eleven places of a run. Held-out tasks are tasks
that no seed trains on.

- Flat sampling compares the completions of one turn of a task. It trains on all groups, as its partner here does.
- Equal tokens: the flat arm has its own G and as many steps as sample the same number of completions.
- Equal updates: the flat arm has the same G and the same number of steps, so an update has as many samples.
- Shuffled memory: the keys of a role's entries are permuted whenever they are read.
- Effect: the paired difference of two areas, one value a seed, with a 95 % interval (Student's t).
- A claim holds when the effect is above delta, after Holm's correction over all contrasts at level 0.05. It does not
  hold when the effect is below delta. Otherwise nothing is decided.
- Detectable: the smallest distance from delta that these seeds find with probability 0.8 at level 0.05 / 7.
"""


def page(records: Mapping[str, Any]) -> str:
    """The page: the contrasts, then the arms, then the pilot runs."""
    done = records.get("arms", {})
    lines = ["| claim | effect | delta | p, corrected | | detectable |", "| --- | --- | --- | --- | --- | --- |"]
    found = {f.claim: f for f in findings(done)}
    decided = decisions(list(found.values()))
    for name, claim in CLAIMS.items():
        if name not in found:
            lines.append(f"| {claim.text} | not recorded yet | {claim.delta:g} | | | |")
            continue
        d = decided[name]
        verdict = d["verdict"] if d["verdict"] == HOLDS else f"**{d['verdict']}**"
        effect = interval(found[name].effect)
        lines.append(
            f"| {claim.text} | {effect} | {claim.delta:g} | {d['holm']:.3g} | {verdict} | {d['detectable']:.3f} |"
        )
    lines += ["", "## Arms", "", *arm_table(done)]
    if records.get("pilot"):
        lines += ["", f"## Group sizes, on seeds {', '.join(map(str, PILOT_SEEDS))}", "", *arm_table(records["pilot"])]
    return "\n".join([INTRO, "## Decisions", "", *lines, ""])


def arm_table(done: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One row an arm."""
    if not done:
        return ["No arm is recorded yet."]
    lines = [
        "| arm | area | success, first | success, last | steps | tokens decoded | prompts with an entry | run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, r in done.items():
        begin, end = (interval(np.array(r["curve"])[:, place].tolist()) for place in (0, -1))
        where = f"{len(r['seeds'])} seeds, {r['minutes']} min, {r['date']}, `{r['commit']}`"
        lines.append(
            f"| {name} | {interval(r['area'])} | {begin} | {end} | {r['steps']} | {np.mean(r['tokens']):,.0f} | "
            f"{np.mean(r['hit']):.2f} | {where} |"
        )
    return lines


def stated() -> str:
    """The commit that last changed this file. ConfigError for changes that are not committed."""
    file = str(Path(__file__).relative_to(Path.cwd())) if Path(__file__).is_relative_to(Path.cwd()) else __file__
    git = lambda *words: subprocess.run(["git", *words, "--", file], capture_output=True, text=True).stdout.strip()
    if git("status", "--porcelain"):
        raise ConfigError(f"--run: {file} has changes that are not committed; claims are committed before a run")
    return git("log", "-1", "--format=%h")


def pilot_arms() -> dict[str, Arm]:
    """Both plans with each of their group sizes, at the tokens of the reference."""
    changes: dict[str, dict[str, Any]] = {"node_wise": ALL_GROUPS, "flat": FLAT}
    return {
        f"{plan}, G = {g}": Arm({**changes[plan], "group": g}, tokens=True)
        for plan, sizes in PILOT_GROUPS.items()
        for g in sizes
    }


def run(
    wanted: Mapping[str, Arm],
    seeds: Sequence[int],
    together: int,
    reference: joyagents_r1.Config,
    done: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Run the arms that ``done`` does not hold with these settings and seeds; ``save`` after each."""
    same = lambda name, arm: settings(arm, reference, seeds).items() <= done.get(name, {}).items()
    missing = {name: arm for name, arm in wanted.items() if not same(name, arm)}
    if not missing:
        return
    starts = [start(reference, seeds[i : i + together]) for i in range(0, len(seeds), together)]
    for name, arm in missing.items():
        done[name] = measure(arm, reference, starts)
        print(f"{name}: area {interval(done[name]['area'])} ({done[name]['minutes']} min)", flush=True)
        save()


def main(cfg: Any, workdir: str | None, flag_values: flags.FlagValues) -> None:
    jax.config.update("jax_compilation_cache_dir", str(Path("runs/.jax_cache").absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    file = Path(flag_values.records)
    records = read_record(file, {"arms?": dict})

    def save() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        records["decisions"] = decisions(findings(records.get("arms", {})))
        file.write_text(json.dumps(records, indent=1))
        Path(flag_values.page).write_text(page(records))

    for name in flag_values.run:
        if name not in ("all", "pilot", *ARMS):
            raise ConfigError(f"--run: no arm {name!r}; expected all, pilot or one of {'; '.join(ARMS)}")
    names = ARMS if "all" in flag_values.run else [name for name in ARMS if name in flag_values.run]
    seeds = list(range(flag_values.seeds))
    if flag_values.run:
        records["claims_commit"] = stated()
    if {"pilot", "all"} & set(flag_values.run):
        run(pilot_arms(), PILOT_SEEDS, len(PILOT_SEEDS), base(), records.setdefault("pilot", {}), save)
    run({name: ARMS[name] for name in names}, seeds, flag_values.together, base(), records.setdefault("arms", {}), save)
    Path(flag_values.page).write_text(page(records))
    print(page(records))


if __name__ == "__main__":
    flags.DEFINE_list("run", [], "Arms to run; all: the pilot and every one; pilot: the group sizes.")
    flags.DEFINE_integer("seeds", 20, "Seeds 0 to N-1.", lower_bound=2)
    flags.DEFINE_integer("together", 5, "Seeds of one program: more take more memory.", lower_bound=1)
    flags.DEFINE_string("records", "docs/results/mechanisms.json", "JSON file of the records.")
    flags.DEFINE_string("page", "docs/mechanisms.md", "Markdown file of the page, written after every arm.")
    config_flags.run(main, required=())
