"""AFM on `facts` (protocol `tags`): what RL adds to imitation, the agent against its source team, and no imitation.

Phases of the arm ``afm``: stage 0, RL of the source team, imitation of the team's right episodes, RL of the agent. The
arm ``alone`` has the RL of the agent from the parameters of stage 0, with the same tasks, keys and steps. EM is that of
one episode of each held-out question, sampled as in training. Team and agent may search three times.

Tokens of an episode are what the models of its roles read and write. A prompt that continues what its role has read and
written costs the tokens that are new (`experiments.studies.tag_bounds`). A team whose roles are right on every question
has 53.2 tokens an episode. An agent who writes the same has 53 % fewer, because each role of the team reads the
sequence anew. Without the plan, which the agent may leave out, it is 63 %. So the delta of ``tokens`` is below half of
what can be won. The claim says that the agent does not lengthen its episodes, and little else. Completions alone are
shown too: there the agent has nothing to save but the plan.

EM can be 1: a perfect player is always right. Demonstrators of the team reach .43, and those of the agent .065. A right
answer of the source team is also all that the agent imitates.

Calibrated on seeds 100 to 102: the supervised steps, 4,000 after 1,500, the steps of imitation, 20 after 200, and the
RL steps of the agent, 120 after 60. The deltas are those of the plan of this system, made before any run. After 200
steps of imitation nothing is left to RL. Held-out EM by seed:

    team     after stage 0            .355 .385 .408
             after RL                 .879 .971 .984
    agent    after stage 0            .053 .041 .064   60 RL steps .432 .480 .285   120 .734 .756 .508
             5 steps of imitation     .203 .199 .160
             10                       .441 .506 .264
             20                       .811 .734 .535   60 RL steps .977 .877 .744   120 .990 .924 .799
             40                       .922 .881 .764
             200                      .979 1.00 1.00   60 RL steps .992 1.00 1.00

The team has 53.3 53.4 53.1 tokens an episode, and the agent 25.6 25.3 25.1 after 200 steps and RL. With 1,500
supervised steps one run of seed 100 was stopped before its first figure. Other numbers of steps than 200 and 60 were
run by a script that is not kept, and that did what this module does. Three seeds take about 40 minutes on one core.

    python -m experiments.studies.tag_bounds   the figures above
    python -m experiments.claims.afm           the calibration seeds, 100 to 102
    python -m experiments.systems --run=afm    the claims
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import Claim, Finding, arms, calibrate, minus
from experiments.configs.afm import tiny
from experiments.studies.phase_runs import after_stage_0, begun, read_stage, stage
from experiments.studies.tag_bounds import Turn, tokens_read
from jaxmarl_llm.envs.contract import ArrayTask
from jaxmarl_llm.recipes.afm import AGENT, ROLES, Config, form, make, sequences
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.env_runner import Demonstrations
from jaxmarl_llm.rollout.keys import EVALUATION, TASKS, stream
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.runs.phases import Recipe
from jaxmarl_llm.training.drivers import RunData, TracedDriver
from jaxmarl_llm.training.harvest import paths
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.training.supervised import Supervised
from jaxmarl_llm.types import TrainState, Tree

GOLDEN = "tests/recipes/test_afm.py"
STATUS = "mechanism implemented"  # the objective, the team's training and the filter of episodes are inferred
SEEDS = 5
BUDGET = (
    f"{tiny().sft.steps:,} supervised steps; {tiny().source_steps} RL steps of the source team, "
    f"{tiny().harvested:,} of its episodes, {tiny().imitation.steps} steps of imitation; {tiny().steps} RL steps of "
    f"the agent; {tiny().batch} questions in a step of RL, groups of {tiny().group}"
)
CLAIMS = {
    "rl": Claim(
        "L",
        "after imitation RL raises the agent's held-out EM by at least 0.10",
        "held-out EM of the agent, after RL minus after imitation",
        0.10,
        control="the same agent after imitation",
        budget=BUDGET,
    ),
    "tokens": Claim(
        "L",
        "the agent reads and writes at least 30 % fewer tokens an episode than its source team",
        "1 minus tokens of a held-out episode, agent / source team",
        0.30,
        control="the source team after its RL, with the same searches allowed",
        budget=BUDGET,
    ),
    "level": Claim(
        "L",
        "the agent is right about as often as its source team",
        "held-out EM, agent after RL minus source team after its RL",
        -0.02,
        control="the source team after its RL, with the same searches allowed",
        budget=BUDGET,
    ),
    "imitation": Claim(
        "X",
        "without imitation the same RL steps lead to an EM that is lower by at least 0.10",
        "held-out EM after RL, with imitation minus without",
        0.10,
        control="the same RL steps from the parameters of stage 0, with the same tasks and keys",
        budget=f"{BUDGET}; the control: stage 0 and the RL of the agent",
    ),
}


class Played(NamedTuple):
    """Figures of held-out episodes, one value a seed.

    Attributes:
        em: Share of right answers.
        tokens: That roles read and write in an episode.
        sampled: Those of completions alone.
        searches: Of an episode.
        format: Share of episodes that end with an answer.
    """

    em: np.ndarray
    tokens: np.ndarray
    sampled: np.ndarray
    searches: np.ndarray
    format: np.ndarray


def figures_of(tree: Tree) -> tuple[float, ...]:
    """The figures of `Played` of one seed. ``tree``: one episode of each question, on the host."""
    moves = tree.transitions
    ends = np.asarray(moves.valid & moves.done)
    episodes: list[list[Turn]] = [[(s.role, s.prompt, s.completion) for s in path] for path in paths(tree, ends)]
    count, paid = len(episodes), {name: np.where(moves.valid, x.max(1), 0.0).sum() for name, x in moves.rewards.items()}
    tokens = sum(map(tokens_read, episodes))
    sampled = sum(len(said) for episode in episodes for _, _, said in episode)
    return tuple(float(x / count) for x in (paid["em"], tokens, sampled, paid["searches"], paid["format"]))


def player(cfg: Config, recipe: Recipe, players: str) -> Callable[..., Tree]:
    """(params, seeds, tasks, keys) -> one episode of each task, of "team" or "agent", on the host [seeds ...].

    Args:
        cfg: The configuration.
        recipe: Its recipe, whose team plays.
        players: Who plays.
    """
    task = form(cfg, players).environment(cfg.seed)
    assert isinstance(task, ArrayTask)
    rollout = make_rollout(recipe.team, task.env, single(), cfg.sampling)
    play = jax.jit(jax.vmap(lambda params, tasks, key: rollout(params, {}, tasks, key, jnp.int32(0))))
    return lambda *inputs: jax.device_get(play(*inputs))


def of_seed(tree: Tree, s: int) -> Tree:
    """The tables of seed ``s``, the leading axis of ``tree``."""
    return jax.tree.map(lambda x: x[s], tree)


def told(tree: Tree, seeds: int, count: int) -> Demonstrations:
    """The sequences of each seed with a leading axis of seeds. Right episodes are repeated up to ``count`` rows.

    Args:
        tree: Episodes of the source team [seeds ...].
        seeds: Number of seeds.
        count: Rows of a seed.
    """
    own = [sequences(of_seed(tree, s)) for s in range(seeds)]
    widest = [max(x.shape[-1] for x in column) for column in zip(*own, strict=True)]

    def rows(x: Any, width: int) -> np.ndarray:
        wide = x if x.ndim == 1 else np.pad(x, ((0, 0), (0, width - x.shape[1])))
        return wide[np.arange(count) % len(wide)]

    padded = [[rows(x, width) for x, width in zip(d, widest, strict=True)] for d in own]
    return Demonstrations(*map(np.stack, zip(*padded, strict=True)))


def imitated(recipe: Recipe, which: jax.Array, data: Demonstrations, states: TrainState) -> TrainState:
    """States after the phase of imitation. The steps are those of the recipe.

    Args:
        recipe: Its third phase is imitation.
        which: Seeds.
        data: Sequences of each seed.
        states: States at the begin of the phase.
    """
    cfg = recipe.cfg
    assert isinstance(cfg, Config)
    imitation = Supervised(recipe.team, recipe.phases[2].learners, cfg.imitation.batch)

    def run(seed: jax.Array, rows: Demonstrations, state: TrainState) -> TrainState:
        driver = TracedDriver(seed)

        def step(state: TrainState, i: jax.Array) -> tuple[TrainState, None]:
            state, _ = imitation.step(driver, state, i, {ROLES[AGENT]: rows})
            return state.replace(step=state.step + 1), None

        return jax.lax.scan(step, state, jnp.arange(cfg.imitation.steps))[0]

    return jax.jit(jax.vmap(run))(which, jax.tree.map(jnp.asarray, data), states)


def trained(recipe: Recipe, which: jax.Array, data: RunData, states: TrainState) -> tuple[TrainState, Any]:
    """States after RL of the agent, and sampled tokens of each step [seeds steps].

    Args:
        recipe: Its last phase is RL of the agent.
        which: Seeds.
        data: Tasks of the seeds.
        states: States before the phase.
    """
    phase = recipe.phases[-1]
    run = read_stage(phase, lambda result: result.tree.counts.completion_tokens)
    return run(which, data, begun(recipe, phase, states), jnp.arange(phase.steps))


def compare(cfg: Config, seeds: Sequence[int], say: Callable[[str], None]) -> dict[str, Played]:
    """Figures of the held-out episodes after each phase, and of the arm without imitation, by name.

    Args:
        cfg: The configuration.
        seeds: Lanes of one program.
        say: Prints a line.
    """
    cfg.check("config")
    recipe, which, out = make(cfg), jnp.array(seeds), {}
    taught, data = after_stage_0(recipe, seeds)
    play = {players: player(cfg, recipe, players) for players in ("team", "agent")}
    count = min(cfg.harvested or recipe.env_runner.size, recipe.env_runner.size)
    evaluation = jax.vmap(lambda seed: jax.random.fold_in(stream(seed, EVALUATION), 0))(which)

    def seen(name: str, players: str, state: TrainState) -> None:
        tree = play[players](state.params, data.held_out, evaluation)
        out[name] = Played(*np.transpose([figures_of(of_seed(tree, s)) for s in range(len(seeds))]))
        shown = ", ".join(f"{key} {np.round(x, 3).tolist()}" for key, x in out[name]._asdict().items())
        say(f"afm, {name}: held-out {shown}")

    seen("team, stage 0", "team", taught)
    seen("agent, stage 0", "agent", taught)
    own = recipe.phases[1]
    source = stage(recipe, own)(which, data, begun(recipe, own, taught), jnp.arange(cfg.source_steps))
    seen("team", "team", source)
    order = jax.vmap(lambda seed: shuffled(stream(seed, TASKS), recipe.env_runner.size, 0, count))(which)
    tasks = jax.tree.map(lambda x: np.stack([rows[i] for rows, i in zip(x, np.asarray(order))]), data.tasks)
    keys = jax.vmap(jax.random.fold_in)(source.key, source.step)
    rows = told(play["team"](source.params, tasks, keys), len(seeds), count)
    middle = imitated(recipe, which, rows, begun(recipe, recipe.phases[2], source))
    seen("agent, imitation", "agent", middle)
    for name, state in {"agent": middle, "alone": taught.replace(step=middle.step)}.items():
        end, sampled = trained(recipe, which, data, state)
        seen(name, "agent", end)
        say(f"afm, {name}: {np.asarray(sampled, np.int64).sum(1).tolist()} tokens sampled in RL")
    return out


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    got = compare(tiny(), seeds, say)
    em = arms("held-out EM", {name: played.em for name, played in got.items()})
    ends = {name: got[name] for name in ("team", "agent")}
    sizes = arms("tokens", {name: played.tokens for name, played in ends.items()})
    sizes |= arms("sampled tokens", {name: played.sampled for name, played in ends.items()})
    asked = arms("searches", {name: played.searches for name, played in ends.items()})
    return [
        Finding("rl", minus(got["agent"].em, got["agent, imitation"].em), em),
        Finding("tokens", (1 - got["agent"].tokens / got["team"].tokens).tolist(), sizes | asked),
        Finding("level", minus(got["agent"].em, got["team"].em), em),
        Finding("imitation", minus(got["agent"].em, got["alone"].em), em),
    ]


if __name__ == "__main__":
    calibrate(run)
