"""The curriculum: its formula by hand, its counts by loops, its draws by enumeration, its steps to the bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.keys import is_documented
from jaxmarl_llm.training.curriculum import Curriculum, Rates, learnability, mixed
from tests.training.relay import BATCH, GROUP, TASKS, make, steps


def rates(tried, solved):
    return Rates(jnp.float32(jnp.array(tried)), jnp.float32(jnp.array(solved)))


def test_learnability_by_hand():
    of = lambda tried, solved, prior: float(learnability(rates([tried], [solved]), prior)[0])
    assert of(0, 0, (1.0, 1.0)) == pytest.approx(1 / 4)  # p = 1/2
    assert of(8, 8, (1.0, 1.0)) == pytest.approx(0.09)  # p = 9/10
    assert of(8, 4, (1.0, 1.0)) == pytest.approx(1 / 4)  # p = 5/10
    assert of(3, 0, (2.0, 1.0)) == pytest.approx(2 / 9)  # p = 2/6


def counted(results, bound, decay):
    """Rates after some steps, by loops over completions."""
    tried, solved = np.zeros(TASKS), np.zeros(TASKS)
    for result in results:
        nodes, table = result.tree.nodes, result.tree.steps
        new = {}
        for c in range(len(table.valid)):
            node = table.node[c]
            if table.valid[c] and result.credited.valid[c] and nodes.parent[node] == -1:
                number = int(result.tasks[nodes.task[node]])
                new.setdefault(number, []).append(result.credited.returns[c] > bound)
        for number, outcomes in new.items():
            tried[number] = decay * tried[number] + len(outcomes)
            solved[number] = decay * solved[number] + sum(outcomes)
    return tried, solved


def test_counts_are_those_of_loops_over_completions(tmp_path):
    recipe = make({"play": Curriculum(bound=0.9, decay=0.5)})
    state, results, metrics = steps(recipe, tmp_path, 4)
    tried, solved = counted(results, 0.9, 0.5)
    np.testing.assert_allclose(state.kept["curriculum"].tried, tried, rtol=1e-6)
    np.testing.assert_allclose(state.kept["curriculum"].solved, solved, rtol=1e-6)
    assert 0 < solved.sum() < tried.sum() and tried.max() > GROUP  # some succeed, and a task was tried again
    before, _ = counted(results[:-1], 0.9, 0.5)
    assert metrics[-1]["curriculum/tried"] == pytest.approx(np.mean(before > 0))
    p = np.float64(1 + counted(results[:-1], 0.9, 0.5)[1]) / (2 + before)
    assert metrics[-1]["curriculum/learnability"] == pytest.approx((p * (1 - p))[results[-1].tasks].mean(), rel=1e-5)
    assert all(is_documented(name) for name in metrics[-1] if name.startswith("curriculum/"))


@given(
    worth=st.lists(st.floats(1e-3, 0.25), min_size=5, max_size=9),
    drawn=st.integers(1, 5),
    seed=st.integers(0, 2**31 - 1),
)
def test_no_task_is_twice_in_a_batch_and_the_others_stay(worth, drawn, seed):
    tasks = np.random.default_rng(seed).permutation(len(worth))[:5].astype(np.int32)
    got = np.asarray(mixed(jax.random.key(seed), jnp.float32(np.array(worth)), tasks, drawn))
    np.testing.assert_array_equal(got[: 5 - drawn], tasks[: 5 - drawn])
    assert len(set(got.tolist())) == 5 and got.min() >= 0 and got.max() < len(worth)


def test_chances_are_in_proportion_to_the_learnability():
    """Frequencies of pairs drawn without replacement, against their chances by enumeration."""
    worth = np.array([0.25, 0.09, 0.16, 0.01, 0.2])
    draws = 4000
    keys = jax.random.split(jax.random.key(0), draws)
    stay = jnp.array([4, 0, 0], jnp.int32)  # task 4 stays
    got = np.asarray(jax.vmap(lambda key: mixed(key, jnp.float32(worth), stay, 2))(keys))
    assert (got[:, 0] == 4).all()
    left = worth[:4].sum()
    for i, j in itertools.permutations(range(4), 2):
        chance = worth[i] / left * worth[j] / (left - worth[i])
        seen = np.mean((got[:, 1] == i) & (got[:, 2] == j))
        assert abs(seen - chance) < 5 * np.sqrt(chance * (1 - chance) / draws) + 1e-9, (i, j)


def test_a_share_of_0_is_the_plain_step_to_the_bit(tmp_path):
    state, results, _ = steps(make({"play": Curriculum(share=0.0)}), tmp_path, 2)
    plain, others, _ = steps(make(), tmp_path, 2)
    assert digests(state.params) == digests(plain.params) and digests(state.opt_state) == digests(plain.opt_state)
    for ours, theirs in zip(results, others, strict=True):
        np.testing.assert_array_equal(ours.tasks, theirs.tasks)
    assert float(state.kept["curriculum"].tried.sum()) == 2 * BATCH * GROUP and plain.kept == {}


def test_the_share_of_a_batch_follows_the_rates(tmp_path):
    """Only two tasks have a chance that counts: both are drawn, unless the order has them already."""
    recipe = make({"play": Curriculum(share=0.5)})
    tried = np.full(TASKS, 1e6)
    tried[[2, 7]] = 0
    state = recipe.init(0).with_kept({"curriculum": rates(tried, np.zeros(TASKS))})
    _, results, _ = steps(recipe, tmp_path, state=state)
    _, plain, _ = steps(make(), tmp_path)
    np.testing.assert_array_equal(results[0].tasks[:2], plain[0].tasks[:2])
    assert {2, 7} <= set(results[0].tasks.tolist())


@pytest.mark.slow
def test_a_resumed_run_is_equal_to_the_bit_and_counts_no_held_out_task(tmp_path):
    """`fit` evaluates before each step and at the end; each step tries BATCH tasks GROUP times."""

    def run(count, folder):
        recipe = make({"play": Curriculum()}, steps=count)
        return fit(recipe.cfg, recipe, folder)

    straight = run(4, tmp_path / "straight")
    run(2, tmp_path / "twice")
    assert digests(straight) == digests(run(4, tmp_path / "twice"))
    assert float(straight.kept["curriculum"].tried.sum()) == 4 * BATCH * GROUP


@pytest.mark.slow
def test_a_compiled_run_draws_the_same_tasks(tmp_path):
    recipe = make({"play": Curriculum()})
    state, results, _ = steps(recipe, tmp_path, 4)
    compiled, figures = jax.jit(make_program(recipe).run)(recipe.cfg.seed)
    np.testing.assert_array_equal(compiled.kept["curriculum"].tried, state.kept["curriculum"].tried)
    np.testing.assert_array_equal(compiled.kept["curriculum"].solved, state.kept["curriculum"].solved)
    assert len({tuple(result.tasks.tolist()) for result in results}) > 1
    assert np.asarray(figures["curriculum/tried"]).shape == (4,)


def test_bad_settings_are_refused_in_one_line():
    for settings, line in {
        ("share", 1.5): r"^Curriculum.share: expected in \[0, 1\], got 1.5$",
        ("prior", (0.0, 1.0)): r"^Curriculum.prior: expected > 0, got 0.0$",
        ("prior", (1.0,)): r"^Curriculum.prior: expected two numbers above 0, got \(1.0,\)$",
        ("decay", -0.1): r"^Curriculum.decay: expected in \[0, 1\], got -0.1$",
    }.items():
        with pytest.raises(ConfigError, match=line):
            Curriculum(**dict([settings]))
    with pytest.raises(ConfigError, match=r"^config.batch: expected <= 12 with a curriculum, .* got 16$"):
        make({"play": Curriculum()}, batch=16).init(0)
