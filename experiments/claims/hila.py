"""HILA on `defer`: the learned choices against the best fixed one, and the outer loop against none.

All figures are of held-out questions, and choices are the most probable ones, unless they are called sampled.

Inner loop alone (``hila:tiny``). The accuracy of creating is planted. The loop weighs all choices of a menu alike. With
its KL to random choices, it leaves some probability to every choice of positive advantage. The worth of sampled choices
is shown beside that of chosen ones.

`experiments.studies.defer_bounds` enumerates all choices. The best fixed choice is to defer, of worth .70. The oracle
takes peer 1, peer 2, create and defer by type, of worth .85. So .15 can be won, and .07 is less than half of it. The
control is the best fixed choice for the seed's own held-out questions. Worth is the mean return of the choices under
the planted accuracies, so it has no sampling error of peers. The choice of a type is that of most of its questions.

Calibrated on seeds 100, 101, 102, whose figures are in this order: 100 x 64 supervised at 3e-3, then 100 RL steps of 64
questions at 1e-3. The oracle's choice is that of at least .99 .98 .94 of the questions of each type. Worth of chosen
choices is above .70 by .150 .153 .134. Return of sampled episodes is above .70 by .09 .07 .05: on the third type create
has probability .57 .59 .56, and defer .39 .38 .39.

With ``menu_weights="by_policy"`` a step follows the exact gradient of the return. On the same seeds the choices are the
oracle's on 4 2 3 types after 100 steps, when the policy first defers everywhere, and on 4 4 4 after 200. Each choice is
then that of all questions of its type. Weighted alike, 200 steps have 4 4 4 too.

Outer loop (``hila:outer`` against ``hila:inner``). The creator is a model of its own. Stage 0 teaches it three types,
and of the last one it knows nothing. Both arms begin with the same 100 steps of the inner loop. After these the chooser
defers the last type. Deferral is the mean probability of deferring, as choices are sampled in the outer loop.

What can be won, by `experiments.studies.defer_bounds`: the oracle defers .25 of the questions before the creator is
taught the last type, and none afterwards. The calibrated policy defers .33, so deferral can fall by all of it, and the
arms can differ by .33. Both deltas are below half of that. Accuracy of the oracle is .975 before and after.

Calibrated with 250 x 64 supervised at 3e-3, then 250 RL steps of 64 questions at 2e-3, which falls to 0.

- Deferral is .34 .32 .33 before, .20 .20 .22 with the outer loop, and .34 .33 .35 without. It falls by .41 .37 .35.
- Accuracy is .95 .95 .95 before, .96 .97 .96 with, and .94 .95 .95 without.
- The creator is right on .09 .08 .10 of the last type before, and on 1.0 .99 .99 after 150 steps of imitation.
- With the outer loop the most probable choice is to defer on no question; without, on .25 .22 .26.

    python -m experiments.claims.hila       the calibration seeds, 100 to 102
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims import CALIBRATION, Claim, Finding, arms, minus
from experiments.configs.hila import inner, outer, tiny
from experiments.studies.defer_bounds import best, worth
from experiments.studies.phase_runs import after_stage_0, stage
from jaxmarl_llm.credit.menus import completion_logprobs
from jaxmarl_llm.envs.defer import array
from jaxmarl_llm.envs.defer.array import CHOICES, CREATE, DEFER, TYPES
from jaxmarl_llm.envs.defer.array import Config as Defer
from jaxmarl_llm.recipes.hila import Config, make, make_plan
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.training.drivers import RunData
from jaxmarl_llm.types import Params, TrainState

GOLDEN = "tests/recipes/test_hila.py"
STATUS = "mechanism implemented"  # peers, expert and questions are planted
SEEDS = 5
BUDGET = f"{tiny().sft.steps} supervised steps; {tiny().steps} RL steps of {tiny().batch} questions"
EXACT = 2 * tiny().steps  # RL steps with the exact gradient
INNER = 100  # steps of the inner loop, before the outer loop begins
PART = 50  # steps of one program
OUTER_BUDGET = (
    f"{outer().sft.steps} supervised steps; {INNER} RL steps of {outer().batch} questions without the outer loop, then "
    f"{outer().steps - INNER} of each arm"
)
CLAIMS = {
    "oracle": Claim(
        "U",
        "the choice is that of the cost-aware oracle on all four types",
        "types on which it is",
        float(len(TYPES)),
        control="none: a count",
        budget=BUDGET,
    ),
    "worth": Claim(
        "L",
        "accuracy minus costs is above that of the best fixed choice by at least 0.07",
        "mean return of the choices on held-out questions, minus that of the best fixed choice",
        0.07,
        control="the best fixed choice, found by enumeration",
        budget=BUDGET,
    ),
    "exact": Claim(
        "U",
        "with the exact gradient the choice is that of the cost-aware oracle on all four types",
        f"types on which it is after {EXACT} steps, choices weighted by the policy",
        float(len(TYPES)),
        control="none: a count",
        budget=f"{tiny().sft.steps} supervised steps; {EXACT} RL steps of {tiny().batch} questions",
    ),
    "falls": Claim(
        "L",
        "with the outer loop deferral falls by at least 0.3 of its first value",
        "probability of deferring a held-out question: first minus last value, over the first",
        0.3,
        control="the same policy before the outer loop begins",
        budget=OUTER_BUDGET,
    ),
    "accuracy": Claim(
        "L",
        "the outer loop costs at most 0.02 of accuracy",
        "accuracy of sampled choices on held-out questions, with the outer loop minus without",
        -0.02,
        control="no outer loop, from the same parameters",
        budget=OUTER_BUDGET,
    ),
    "outer": Claim(
        "X",
        "without the outer loop the probability of deferring is higher by at least 0.1",
        "probability of deferring a held-out question, without the outer loop minus with it",
        0.1,
        control="no outer loop, from the same parameters",
        budget=OUTER_BUDGET,
    ),
}


def choices_of(cfg: Config, params: Params, data: RunData) -> np.ndarray:
    """Probability of each choice at each held-out question [seeds, questions, choices].

    Args:
        cfg: The configuration.
        params: Parameters of the seeds.
        data: Their tasks.
    """
    rollout = make_rollout(make(cfg).team, array.make(Defer(**cfg.env.args)), make_plan(cfg), cfg.sampling)

    def one(params: Params, tasks: dict) -> jax.Array:
        tree = rollout(params, {}, tasks, jax.random.key(0), jnp.int32(0))
        count = len(tasks["type"]) * len(CHOICES)  # the first rows are those of the menus
        return jnp.exp(completion_logprobs(tree))[:count].reshape(-1, len(CHOICES))

    return np.asarray(jax.jit(jax.vmap(one))(params, data.held_out), float)


def taken_of(chosen: np.ndarray, types: np.ndarray) -> np.ndarray:
    """Share of each choice among the questions of each type [seeds, types, choices].

    Args:
        chosen: Choices [seeds, questions].
        types: Types of the questions.
    """
    count = np.zeros((len(chosen), len(TYPES), len(CHOICES)))
    for seed, (of, choice) in enumerate(zip(types, chosen, strict=True)):
        np.add.at(count[seed], (of, choice), 1)
    return count / count.sum(2, keepdims=True)


def types_right(cfg: Config, chance: np.ndarray, types: np.ndarray) -> tuple[list[float], list[float]]:
    """Number of types on which most questions have the oracle's choice, and its smallest share, one value a seed.

    Args:
        cfg: The configuration.
        chance: Probability of each choice [seeds, questions, choices].
        types: Types of the questions [seeds, questions].
    """
    taken = taken_of(chance.argmax(2), types)
    own = [CHOICES.index(choice) for choice in best(Defer(**cfg.env.args), cfg.reward).of_type]
    right = [float((rows.argmax(1) == own).sum()) for rows in taken]
    return right, taken[:, np.arange(len(TYPES)), own].min(1).tolist()


def inner_loop(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    """Findings on the inner loop alone, whose menus are weighted alike, and by the policy.

    Args:
        seeds: Lanes of one program.
        say: Prints a line.
    """
    configs = {"alike": tiny(), "exact": dataclasses.replace(tiny(), menu_weights="by_policy")}
    start, data = after_stage_0(make(tiny()), seeds)
    types, chances, found = np.asarray(data.held_out["type"]), {}, {}
    for name, cfg in configs.items():
        cfg.check("config")
        recipe, state = make(cfg), start
        run = stage(recipe, recipe.phases[-1])
        for end in (cfg.steps, EXACT):
            state = run(jnp.array(seeds), data, state, jnp.arange(end - cfg.steps, end))
            chances[name, end] = choices_of(cfg, state.params, data)
            found[name, end] = types_right(cfg, chances[name, end], types)
            say(f"hila, {name}, {end} steps: types {found[name, end][0]}, smallest share {found[name, end][1]}")
    cfg, environment, chance = tiny(), Defer(**tiny().env.args), chances["alike", tiny().steps]
    table = worth(environment, cfg.reward)
    earned = np.array([table[t, c].mean() for t, c in zip(types, chance.argmax(2), strict=True)])
    sampled = np.array([(p * table[t]).sum(1).mean() for t, p in zip(types, chance, strict=True)])
    shares = [np.bincount(t, minlength=len(TYPES)) / len(t) for t in types]
    fixed = np.array([best(environment, cfg.reward, share.tolist()).fixed_worth for share in shares])
    figures = arms("worth", {"chosen": earned, "sampled": sampled, "best fixed choice": fixed})
    (right, share), (exact, its_share) = found["alike", cfg.steps], found["exact", EXACT]
    others = {f"{name}, {end} steps": of for (name, end), (of, _) in found.items() if (name, end) != ("exact", EXACT)}
    return [
        Finding("oracle", right, {"smallest share of a type": share}),
        Finding("worth", minus(earned, fixed), figures),
        Finding("exact", exact, {"smallest share of a type": its_share, **arms("types", others)}),
    ]


def figures_of(cfg: Config, params: Params, data: RunData) -> dict[str, np.ndarray]:
    """Figures of a policy that also creates, one value a seed.

    ``deferral``: the mean probability of deferring. ``accuracy``: of sampled choices; peers and expert count with their
    planted accuracies. ``deferral, chosen`` and ``accuracy, chosen``: of the most probable choices. ``created``: the
    accuracy of creating on each type [seeds, types].

    Args:
        cfg: The configuration.
        params: Parameters of the seeds.
        data: Their tasks.
    """
    environment = Defer(**cfg.env.args)
    rollout = make_rollout(make(cfg).team, array.make(environment), make_plan(cfg), cfg.sampling)

    def one(params: Params, tasks: dict) -> tuple[jax.Array, jax.Array]:
        tree = rollout(params, {}, tasks, jax.random.key(0), jnp.int32(0))
        count = len(tasks["type"]) * len(CHOICES)  # the first rows are those of the menus
        parent, earned = tree.transitions.parent, tree.transitions.rewards["accuracy"][:, 0]
        behind = jnp.zeros(count).at[jnp.where(parent >= 0, parent, count)].add(earned, mode="drop")
        shape = (-1, len(CHOICES))
        return jnp.exp(completion_logprobs(tree))[:count].reshape(shape), behind.reshape(shape)[:, CREATE]

    chance, created = (np.asarray(x, float) for x in jax.jit(jax.vmap(one))(params, data.held_out))
    types, chosen = np.asarray(data.held_out["type"]), chance.argmax(2)
    right = np.array([environment.peer_1, environment.peer_2, environment.creator, environment.expert]).T[types]
    right[..., CREATE] = created
    return {
        "deferral": chance[..., DEFER].mean(1),
        "accuracy": (chance * right).sum(2).mean(1),
        "deferral, chosen": (chosen == DEFER).mean(1),
        "accuracy, chosen": np.take_along_axis(right, chosen[..., None], 2)[..., 0].mean(1),
        "created": np.array([[c[t == of].mean() for of in range(len(TYPES))] for t, c in zip(types, created)]),
    }


def outer_loop(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    """Findings on the outer loop: both arms go on from the same steps of the inner loop.

    Args:
        seeds: Lanes of one program.
        say: Prints a line.
    """
    configs = {"with": outer(), "without": inner()}
    for cfg in configs.values():
        cfg.check("config")
    recipes = {name: make(cfg) for name, cfg in configs.items()}
    runs = {name: stage(recipe, recipe.phases[-1]) for name, recipe in recipes.items()}
    start, data = after_stage_0(recipes["without"], seeds)

    def after(name: str, state: TrainState, first: int, end: int) -> TrainState:
        for step in range(first, end, PART):
            state = runs[name](jnp.array(seeds), data, state, jnp.arange(step, step + PART))
        return state

    begun = after("without", start, 0, INNER)
    states = {"before": begun, **{name: after(name, begun, INNER, configs[name].steps) for name in configs}}
    seen = {name: figures_of(outer(), state.params, data) for name, state in states.items()}
    for name, figures in seen.items():
        for figure, values in figures.items():
            say(f"hila, outer loop, {name}, {figure}: {values.round(3).tolist()}")
    words = {name: f"{name} the outer loop" for name in seen}
    of = lambda figure: arms(figure, {words[name]: own[figure] for name, own in seen.items()})
    last_type = {words[name]: own["created"][:, -1] for name, own in seen.items()}
    first, last, kept = (seen[name]["deferral"] for name in ("before", "with", "without"))
    gained = minus(seen["with"]["accuracy"], seen["without"]["accuracy"])
    return [
        Finding("falls", ((first - last) / first).tolist(), of("deferral") | arms("created, last type", last_type)),
        Finding("accuracy", gained, of("accuracy") | of("accuracy, chosen")),
        Finding("outer", minus(kept, last), of("deferral, chosen")),
    ]


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    return [*inner_loop(seeds, say), *outer_loop(seeds, say)]


def main() -> None:
    """Print the arms of the calibration seeds."""
    for finding in run(CALIBRATION, lambda line: print(line, flush=True)):
        print(finding.claim, np.round(finding.effect, 3).tolist())


if __name__ == "__main__":
    main()
