"""Arms and claims of the study of JoyAgents-R1's mechanisms, and how an arm is run on a few seeds at once.

An arm is the configuration `joyagents_r1.py:harder` with one mechanism changed. The command, the decisions and the page
are in `experiments.studies.mechanisms`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim
from experiments.configs.joyagents_r1 import harder
from experiments.studies.mechanism_changes import Driver, by_task_and_turn, permuted_stores, random_groups
from experiments.studies.paired import LEVEL, area
from jaxmarl_llm.config import fingerprint, replace_path
from jaxmarl_llm.credit.rules import GroupRelative, PerCompletion, ReturnToGo, chain
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.envs.relay_dispatch.array import LEAST_HOPS
from jaxmarl_llm.recipes import joyagents_r1
from jaxmarl_llm.rollout.array import layout
from jaxmarl_llm.rollout.keys import TASKS, fold, stream
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.compiled import make_evaluation, task_data
from jaxmarl_llm.storage import dataset
from jaxmarl_llm.training.drivers import RunData
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.types import Array, Params, TrainState, Tree

PLACES = 10  # stretches of a run: success is measured before the first one and after each
K = 5
GROUP = {"node_wise": 4, "flat": 8}  # G of each plan: the one with the largest area of the pilot (--run=pilot)
PILOT_GROUPS = {"node_wise": (2, 4, 8), "flat": (4, 8, 16)}
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
    REFERENCE: Arm(),  # node-wise, top-5 groups by variance, memory, advantages / std: the paper's, without R_E
    "random groups": Arm(ALL_GROUPS, random_groups=True),
    "all groups": Arm(ALL_GROUPS),
    "no memory": Arm({"use_memory": False}),
    "shuffled memory": Arm(shuffled=True),
    "no std": Arm({"credit.normalise": "none"}),
    "cost of tokens": Arm({"reward.efficiency": -1.0}),  # R_A + R_F - R_E: the paper's
    "flat, equal tokens": Arm({**FLAT, "group": GROUP["flat"]}, tokens=True),
    "flat, equal updates": Arm({**FLAT, "group": GROUP["node_wise"]}),
}


def pilot_arms() -> dict[str, Arm]:
    """Both plans with each of their group sizes, at the tokens of `budget`."""
    changes: dict[str, dict[str, Any]] = {"node_wise": ALL_GROUPS, "flat": FLAT}
    return {
        f"{plan}, G = {g}": Arm({**changes[plan], "group": g}, tokens=True)
        for plan, sizes in PILOT_GROUPS.items()
        for g in sizes
    }


# -- claims ------------------------------------------------------------------------------------------------------------

# Contrast -> the two arms, and the claim that the first beats the second. The plans are compared with all groups.
CONTRASTS = {
    "plan, equal tokens": ("all groups", "flat, equal tokens"),
    "plan, equal updates": ("all groups", "flat, equal updates"),
    "selection, random": (REFERENCE, "random groups"),
    "selection, all": (REFERENCE, "all groups"),
    "memory, off": (REFERENCE, "no memory"),
    "memory, shuffled": (REFERENCE, "shuffled memory"),
    "std": (REFERENCE, "no std"),
    "cost of tokens": (REFERENCE, "cost of tokens"),
}
TEXTS = {
    "plan, equal tokens": "node-wise sampling beats flat sampling of the same number of tokens",
    "plan, equal updates": "node-wise sampling beats flat sampling with the same number of updates on as many samples",
    "selection, random": "the 5 groups of largest variance beat 5 random ones",
    "selection, all": "the 5 groups of largest variance beat all groups",
    "memory, off": "memory beats no memory",
    "memory, shuffled": "memory beats a memory with permuted keys",
    "std": "division by the standard deviation beats none",
    "cost of tokens": "a reward without a cost of tokens beats one with it, both divided by the standard deviation",
}
STEPS = {**dict.fromkeys(ARMS, 200), "flat, equal tokens": 410}  # of RL; what `config_of` computes


def _claim(name: str) -> Claim:
    one, other = CONTRASTS[name]
    return Claim(
        "X",
        TEXTS[name],
        effect=f"area under the held-out success curve, by seed: {one} minus {other}",
        delta=DELTA,
        control=f"{other}: the same parameters after stage 0, tasks and keys",
        budget=f"300 supervised steps; {STEPS[one]} RL steps of 8 tasks ({one}) and {STEPS[other]} ({other})",
    )


CLAIMS = {name: _claim(name) for name in CONTRASTS}


def claims_version() -> str:
    """Checksum of all claims, of their arms and of the level of the tests: a record is of one version of them."""
    stated = [(name, claim, [(arm, ARMS[arm]) for arm in CONTRASTS[name]]) for name, claim in CLAIMS.items()]
    return hashlib.sha256(repr((LEVEL, PLACES, K, stated)).encode()).hexdigest()[:12]


# -- configurations ----------------------------------------------------------------------------------------------------


def budget() -> joyagents_r1.Config:
    """The configuration whose G and steps set the tokens of the study, whichever G the pilot chose."""
    return replace(harder(), selected_groups=K, micro_tokens=2**30)  # one micro-batch a block, see `Driver`


def base() -> joyagents_r1.Config:
    """The configuration of the reference."""
    return config_of(Arm({"group": GROUP["node_wise"]}, tokens=True), budget())


def sequences(cfg: joyagents_r1.Config) -> float:
    """Completions of a task in a step: the mean over the numbers of hops, of episodes that are played to their end."""
    settings: Any = cfg.env.build()
    env = cfg.env.module.make(settings)
    assert isinstance(env, ArrayEnv)
    blocks = layout(joyagents_r1.make_plan(cfg), env, 1)
    each = [(turn, b.nodes // len(b.turns) * b.group) for b in blocks for turn in b.turns]
    played = [sum(n for turn, n in each if turn <= 2 * (LEAST_HOPS + i)) for i in range(len(settings.hops))]
    return float(np.average(played, weights=settings.hops))


def config_of(arm: Arm, reference: joyagents_r1.Config) -> joyagents_r1.Config:
    """The configuration of an arm, with its number of steps: a multiple of PLACES.

    Args:
        arm: What changes.
        reference: Its steps and its completions are those that the arm's are equal to.
    """
    cfg = reference
    for path, value in arm.changes.items():
        cfg = replace_path(cfg, path, value)
    scale = sequences(reference) / sequences(cfg) if arm.tokens else 1.0
    cfg = replace(cfg, steps=PLACES * max(1, round(reference.steps * scale / PLACES)))
    cfg.check("config")
    return cfg


def settings_of(arm: Arm, reference: joyagents_r1.Config) -> str:
    """Checksum of what an arm is run with."""
    stated = (fingerprint(config_of(arm, reference)), arm.random_groups, arm.shuffled, PLACES, K)
    return hashlib.sha256(repr(stated).encode()).hexdigest()[:12]


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


# -- stage 0 -----------------------------------------------------------------------------------------------------------


class Start(NamedTuple):
    """What all arms of some seeds begin with. Leading axes count seeds."""

    seeds: jax.Array
    data: RunData  # without demonstrations
    params: Params


def start(reference: joyagents_r1.Config, seeds: Sequence[int], work: Path) -> Start:
    """Tasks of the seeds, and their parameters after stage 0, which is run for the seeds that ``work`` has not.

    Args:
        reference: The configuration of the reference.
        seeds: Of the runs.
        work: Folder with one data set a seed. Parameters are always read from it, so a later part has the same bits.

    Raises:
        ConfigError: A data set is damaged, or of another configuration.
    """
    folders, about = {seed: work / f"stage_0_seed_{seed}" for seed in seeds}, {"reference": fingerprint(reference)}
    missing = [seed for seed, folder in folders.items() if not folder.exists()]
    if missing:
        learned = jax.tree.leaves(stage_0(reference, missing))
        for row, seed in enumerate(missing):
            columns = {str(i): np.asarray(leaf)[row, None] for i, leaf in enumerate(learned)}
            dataset.save(folders[seed], about, {"params": columns})
    rows = [dataset.load(folder, about)["params"] for folder in folders.values()]
    recipe = recipe_of(replace(reference, sft=replace(reference.sft, steps=0)))
    form = jax.tree.structure(jax.eval_shape(lambda: recipe.initial(0, 0).params))
    leaves = [jnp.concatenate([row[str(i)] for row in rows]) for i in range(len(rows[0]))]
    return Start(jnp.array(seeds), task_data(recipe, seeds), jax.tree.unflatten(form, leaves))


def stage_0(reference: joyagents_r1.Config, seeds: Sequence[int]) -> Params:
    """Parameters of the seeds after stage 0, with a leading axis of seeds. ``reference``: the configuration."""
    recipe = recipe_of(reference)
    taught = recipe.phases[0]

    def learn(seed: jax.Array, data: RunData) -> Params:
        def step(state: TrainState, i: jax.Array) -> tuple[TrainState, None]:
            state, _ = taught.step(Driver(seed, data), state, i)
            return state.replace(step=state.step + 1), None

        return jax.lax.scan(step, recipe.initial(seed, 0), jnp.arange(taught.steps))[0].params

    return jax.jit(jax.vmap(learn))(jnp.array(seeds), task_data(recipe, seeds))


# -- running an arm ----------------------------------------------------------------------------------------------------


class Curves(NamedTuple):
    """What an arm measured.

    Attributes:
        success: Held-out success at each place [seeds, PLACES + 1].
        tokens: Decoded tokens of a run [seeds].
        hit: Share of prompts with a memory entry, in the last stretch of a run [seeds]; 0 without memory.
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
    """Run an arm on the seeds of ``begin``: PLACES stretches, and an evaluation before the first and after each."""
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
