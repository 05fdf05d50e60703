"""Search-R2: golden rewards and advantages, what a cut leaves out of an update, a slow twin, bad input."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs.search_r2 import VARIANTS, em_alone, get_config, tiny, whole
from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import refine
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import search_r2
from jaxmarl_llm.training.drivers import HostDriver
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree
from tests.envs.facts_episodes import encode, texts_of
from tests.envs.test_facts_refine import R, Twin, config, play, some_segment

pytestmark = pytest.mark.usefixtures("numpy_tables")

CONFIG = search_r2.Config()
BATCH, GROUP = 12, 8


# -- rewards -----------------------------------------------------------------------------------------------------------


def script(task, evidence, right):
    """Completions of an actor whose searches return facts on the gold path (1) or beside it (0), and the refiner's."""
    beside = next(fact for fact in task.facts if fact not in task.path)
    return [*((task.path[0] if u == "1" else beside)[:2] for u in evidence), f"={task.answer if right else 'z'}", "y"]


GOLDEN = [("1011", True, 1.75), ("0000", True, 1.0), ("1011", False, 0.0), ("1111", True, 2.0), ("", True, 1.0)]


@pytest.mark.parametrize("evidence, right, want", GOLDEN)
def test_golden_rewards(evidence, right, want):
    """EM 1 and u 1011: 1.75; u 0000: 1; EM 0: 0. By the environment and the weights of the recipe, for both roles."""
    cfg = config(searches=4)
    rows = facts.make_tasks(cfg, n=96)
    scripts = [script(task, evidence, right) for task in texts_of(rows)]
    total = np.zeros((96, 2))
    for *_, pay, _ in play(cfg, rows, lambda turn, prompts: [((s + ["y"] * 9)[turn], True) for s in scripts]):
        total += sum(weight * np.asarray(pay[name]) for name, weight in CONFIG.reward.items())
    np.testing.assert_allclose(total, want, atol=1e-6)


def test_the_final_trace_is_paid_and_not_the_first_one():
    """A wrong search without evidence is cut: 2 instead of 0, and 1 for EM alone."""
    cfg = config(searches=4, two_hops=0.0)
    rows = facts.make_tasks(cfg, n=96)
    said = [["zz", "=z", "1", t.question, f"={t.answer}", *"yyyy"] for t in texts_of(rows)]
    paid = {"em": 0.0, "density": 0.0, "first_em": 0.0}
    for *_, pay, _ in play(cfg, rows, lambda turn, prompts: [(s[turn], True) for s in said]):
        paid = {name: paid[name] + pay[name].max(1) for name in paid}
    assert (paid["em"] + paid["density"] == 2).all() and not paid["first_em"].any()
    assert em_alone().reward == {"em": 1.0} and CONFIG.reward == {"em": 1.0, "density": 1.0}


# -- credit and updates, on tables of random episodes ------------------------------------------------------------------


@functools.cache
def played(second):
    """`GROUP` random episodes of each of `BATCH` tasks as tables, and for each episode (task, its completions, R, those
    of them that a slow twin leaves out)."""
    cfg, rng = config(second=second), np.random.default_rng(0)
    rows = {name: x.repeat(GROUP, axis=0) for name, x in facts.make_tasks(cfg, n=BATCH).items()}
    twins = [Twin(task, cfg.refine) for task in texts_of(rows)]
    nodes, steps, moves, said = [], [], [], {}
    own, values, parent = [[] for _ in twins], [0.0] * len(twins), [-1] * len(twins)
    paid = {name: [] for name in refine.COMPONENTS}

    def speak(turn, prompts):
        said[turn] = [some_segment(rng, twin.task, prompt) for twin, prompt in zip(twins, prompts)]
        return said[turn]

    for turn, (seen, _, _, _, pay, _) in enumerate(play(cfg, rows, speak)):
        tokens, length = encode(said[turn], R)
        for i, twin in enumerate(twins):
            if twin.done:
                continue
            if turn or i % GROUP == 0:  # episodes of a task share their first node
                nodes.append((seen.tokens[i, 0], seen.length[i, 0], seen.role[i, 0], i // GROUP, turn, parent[i]))
            own[i].append(len(steps))
            steps.append((len(nodes) - 1, tokens[i], length[i, 0], not said[turn][i][1]))
            moves.append((parent[i], i // GROUP, turn))
            parent[i] = len(moves) - 1
            for name, value in pay.items():
                paid[name].append(value[i])
            of_twin = twin.act(*said[turn][i])
            values[i] += of_twin["em"] + of_twin["density"]
    tree = tree_of(nodes, steps, moves, {name: np.stack(rows) for name, rows in paid.items()})
    left_out = [steps[slice(*twin.cut_turns)] for twin, steps in zip(twins, own)]
    return tree, list(zip([i // GROUP for i in range(len(twins))], own, values, left_out, strict=True))


def tree_of(nodes, steps, moves, rewards):
    """Tables of rows: (prompt, length, role, task, turn, parent), (node, tokens, length, truncated) and (parent, task,
    turn)."""
    of = lambda columns: [np.array(column) for column in zip(*columns, strict=True)]
    prompts, lengths, role, task, turn, parent = of(nodes)
    node, tokens, size, truncated = of(steps)
    n, c = len(nodes), len(steps)
    zero, mask = np.zeros(c, np.int32), np.arange(tokens.shape[1]) < size[:, None]
    logprobs = np.where(mask, -1.0 - np.arange(c)[:, None] % 3, 0.0).astype(np.float32)
    up, where, when = of(moves)
    leaf = ~np.isin(np.arange(c), up)
    table = Nodes(prompts, lengths, role, 0 * role, task, turn, parent, Retrieval.empty(n), np.ones(n, bool))
    said = Steps(node, tokens, size, mask, logprobs, truncated, zero, zero, np.ones(c, bool))
    ones = np.ones(c, bool)
    joint = Transitions(np.arange(c)[:, None], up, where, when, rewards, leaf, ones, ones)
    return Tree(table, said, joint, Counts(*[np.int32(0)] * 7))


SIZES = Sizes(8, BATCH, 2)


@pytest.mark.parametrize("second", refine.FORMS)
def test_advantages_and_trained_completions_are_those_of_a_slow_twin(second):
    """A = (R - mean) / std over the episodes of a question, each counted once. What was cut off is not trained."""
    tree, episodes = played(second)
    got = assign(search_r2.algorithm(CONFIG).credit, tree, weights=CONFIG.reward, sizes=SIZES)
    trained = np.asarray(search_r2.final_trace(None, tree, got.valid))
    left_out, lengths, unequal = 0, set(), 0
    for task, steps, value, dropped in episodes:
        alike = np.array([v for other, _, v, _ in episodes if other == task])
        want = (value - alike.mean()) / (alike.std() + 1e-6) if alike.std() else 0.0
        np.testing.assert_allclose(np.asarray(got.returns)[steps], value, atol=1e-6)
        np.testing.assert_allclose(np.asarray(got.advantage)[steps], want, atol=1e-4)
        assert trained[steps].tolist() == [c not in dropped for c in steps]
        left_out += len(dropped)
        lengths.add(len(steps))
        unequal += want != 0
    assert sum(len(steps) for _, steps, *_ in episodes) == len(trained)
    assert left_out > 60 and len(lengths) > 3 and unequal > 40


def configuration(**changes):
    """The recipe with a small model."""
    small = Backbone(hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
    base = dict(
        batch=BATCH,
        group=GROUP,
        team=TeamConfig(parameter_sharing="shared", backbone=small, max_new_tokens=3, remat=False),
        env=EnvConfig("facts", {"protocol": "refine", "tasks": BATCH}, eval_tasks=4),
        optimizer=Optimizer(name="adam", learning_rate=1e-2),
    )
    return search_r2.Config(**(base | changes))


def scrambled(tree, rows, seed):
    """The tree with other tokens, lengths, log-probs and truncation in the completions ``rows``."""
    rng, steps = np.random.default_rng(seed), tree.steps
    tokens, logprobs, length, truncated = (
        x.copy() for x in (steps.tokens, steps.logprobs, steps.length, steps.truncated)
    )
    tokens[rows] = rng.integers(97, 123, size=tokens[rows].shape)
    logprobs[rows] = -5 * rng.random(logprobs[rows].shape)
    length[rows] = rng.integers(1, 4, size=len(rows))
    truncated[rows] = rng.random(len(rows)) < 0.5
    mask = np.arange(tokens.shape[1]) < length[:, None]
    said = steps.replace(tokens=tokens, logprobs=logprobs, length=length, truncated=truncated, loss_mask=mask)
    return tree.replace(steps=said)


@functools.cache
def made():
    return search_r2.make(configuration())


def updated(tree):
    """Parameters before and after the update of a training step on ``tree``, and the advantages."""
    recipe = made()
    step, driver = recipe.phases[-1].step, HostDriver(0, None)
    state = recipe.begin(recipe.phases[-1], recipe.init(0))
    before = jax.tree.map(np.array, state.params["agents"])
    credited = driver.host(step.assign(tree, step.algorithm.reward))
    selected = driver.host(step.algorithm.select(credited, BATCH))
    trained = step.trained(driver, credited, selected, tree, jax.random.key(0), 0)
    batches = driver.lay_out(step, tree, types.SimpleNamespace(records=None), credited.advantage, trained, {})
    after, _ = driver.optimize(step.team.models, step.learners, step.cfg.loss, state, batches)
    return before, jax.tree.map(np.array, after.params["agents"]), credited.advantage


def test_completions_that_were_cut_off_change_no_gradient_and_no_advantage():
    """To the bit, whatever the cut-off completions say. As many other completions do change the gradient."""
    tree, episodes = played("cut")
    dropped = np.array([c for *_, left_out in episodes for c in left_out])
    kept = np.array([c for _, steps, *_ in episodes for c in steps if c not in dropped])
    before, params, gain = updated(tree)
    moved = lambda a, b: max(float(np.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))
    assert moved(params, before) > 1e-3 and len(dropped) > 60 and np.abs(gain).max() > 1
    for seed in range(2):
        _, other, other_gain = updated(scrambled(tree, dropped, seed))
        assert moved(other, params) == 0 and np.array_equal(other_gain, gain)
    assert moved(updated(scrambled(tree, kept[: len(dropped)], 0))[1], params) > 1e-4


# -- configurations ----------------------------------------------------------------------------------------------------


def test_grpo_with_one_model_for_both_roles():
    assert (CONFIG.credit.group, CONFIG.credit.stats_over, CONFIG.credit.normalise) == ("task", "episodes", "std")
    assert (CONFIG.loss.clip_low, CONFIG.loss.clip_high, CONFIG.loss.kl_coef) == (0.2, 0.2, 0.0)
    assert CONFIG.team.parameter_sharing == "shared" and search_r2.make_plan(CONFIG).name == "flat(8)"


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(search_r2.Config, get_config(variant).to_dict())
        assert ("density" in cfg.reward) == (variant != "em_alone")
        assert (cfg.env.args["refine"].get("second") == "whole") == (variant == "whole")
    args = {**whole().env.args, "refine": {}}
    assert dataclasses.replace(whole(), env=dataclasses.replace(whole().env, args=args)) == tiny()


BAD = [
    ({"group": 1}, r"^config\.group: expected >= 2 \(a group compares samples\), got 1"),
    ({"env": EnvConfig("facts")}, r"^config\.env: no role 'actor' in environment 'facts', whose roles are rewriter"),
    ({"env": EnvConfig("chain")}, r"^config\.env: no role 'actor' in environment 'chain', whose roles are solver"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        dataclasses.replace(CONFIG, **change).check("config")
    assert "\n" not in str(error.value)


def test_what_only_the_environment_shows():
    """A reward that the environment does not pay, and an environment that tells nothing of what a cut leaves out."""
    with pytest.raises(ConfigError, match=r"^config\.reward: environment 'facts' pays no 'f1'; it pays em, density"):
        search_r2.make(configuration(reward={"f1": 1.0}))
    task = configuration().env.environment(0)
    told = lambda rewards: {name: rewards[name] for name in ("em", "density")}
    step = lambda *args: (lambda state, rewards, done: (state, told(rewards), done))(*task.env.step(*args))
    silent = dataclasses.replace(task, env=task.env._replace(components=("em", "density"), step=step))
    with pytest.raises(ConfigError, match=r"^config\.env: the environment pays no 'dropped_from'; it pays em, density"):
        search_r2.make(configuration(), env=silent)
