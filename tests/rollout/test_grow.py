"""Trees that grow: the same tokens in both engines, plans that growth repeats, what a choice sees, bad choices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.returns import returns_to_go
from jaxmarl_llm.envs.dilemma import array as dilemma
from jaxmarl_llm.envs.programs import array as programs
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout import choices, plans
from jaxmarl_llm.rollout.array import layout, make_rollout, table_rows
from jaxmarl_llm.rollout.growth import try_choice
from jaxmarl_llm.rollout.make_runner import make_env_runner
from jaxmarl_llm.rollout.plans import grow
from jaxmarl_llm.training import finite
from jaxmarl_llm.types import Model, Role, Team
from tests.rollout.test_host import BYTES, EOS, as_host, go, lines, make_params, policy

pytestmark = pytest.mark.usefixtures("numpy_tables")

KEY, TASKS, ATTEMPTS = jax.random.key(5), 3, 5
REWARD = (("tests", 1.0),)
CONFIG = programs.Config(tasks=8, protocol="refine", attempts=ATTEMPTS)


@functools.cache
def writers(models=2):
    """Models that all play the one role, and say things that are programs, or nearly so."""
    bias = ((range(264), -30.0), (b"abdghimn", 30.0), ((EOS,), 31.0))
    names = tuple(f"m{i}" for i in range(models))
    return Team((Role("coder", "m0", 5, co_players=names[1:]),), tuple(Model(n, policy(bias), BYTES) for n in names))


@functools.cache
def noisy():
    """Programs whose tests are drawn from the key of the step: some are not known, and some end the episode."""
    env = programs.make(CONFIG)

    def step(key, state, tokens, length):
        after, rewards, done = env.step(key, state, tokens, length)
        chance = jax.random.uniform(key)
        tests = jnp.where(chance < 0.15, jnp.nan, chance)
        return after, {**rewards, "tests": tests[None]}, done | (chance > 0.75)

    return env._replace(step=step)


@functools.cache
def compiled(env, team, plan):
    return jax.jit(make_rollout(team, env, plan, Sampling()))


def tasks_of(n=TASKS):
    return programs.make_tasks(CONFIG, n=n)


def played(env, plan, team, tasks, key=KEY):
    """An array rollout and a host rollout, on the host."""
    params = make_params(team)
    array = jax.device_get(compiled(env, team, plan)(params, None, tasks, key, jnp.int32(0)))
    size = len(jax.tree.leaves(tasks)[0])
    host = go(as_host(env), team, [jax.tree.map(lambda x, i=i: x[i], tasks) for i in range(size)], plan, key)
    return array, host


def unpadded(table):
    """A table with 0 behind the tokens of each row."""
    if not hasattr(table, "tokens"):
        return table
    inside = np.arange(table.tokens.shape[1]) < table.length[:, None]
    return table.replace(tokens=np.where(inside, table.tokens, 0))


def assert_same_rows(array, host):
    """Every row of the tables in the same place, apart from padding and rounding."""
    for name in ("nodes", "steps", "transitions"):
        ours, theirs = (unpadded(getattr(tree, name)) for tree in (array, host))
        used = ours.played if name == "transitions" else ours.valid
        size = int(used.sum())
        assert used[:size].all() and size == int((theirs.played if name == "transitions" else theirs.valid).sum())
        for path, x in jax.tree_util.tree_leaves_with_path(ours):
            y = functools.reduce(lambda at, k: at[k.key] if hasattr(k, "key") else getattr(at, k.name), path, theirs)
            width = min(x.shape[1], y.shape[1]) if x.ndim > 1 else None  # prompts are padded to other lengths
            a, b = (z[:size] if width is None else z[:size, :width] for z in (x, y))
            where = f"{name}{jax.tree_util.keystr(path)}"
            if np.issubdtype(x.dtype, np.floating):
                np.testing.assert_allclose(a, b, atol=1e-5, err_msg=where)
            else:
                np.testing.assert_array_equal(a, b, err_msg=where)


CHOOSE = [choices.root(2), choices.last(2), choices.uniform(2), choices.best(2), choices.thompson(2)]


@pytest.mark.parametrize("choose", CHOOSE, ids=lambda c: c.__name__)
def test_both_engines_grow_the_same_tree(choose):
    """Token for token, with rewards that are not known, episodes that end, and two models that play one role."""
    team, plan = writers(), grow(ATTEMPTS, choose, REWARD)
    array, host = played(noisy(), plan, team, tasks_of())
    assert_same_rows(array, host.tree)
    moves, nodes = array.transitions, array.nodes
    assert moves.played.sum() == TASKS * ATTEMPTS == array.counts.sequences == array.counts.env_calls
    assert 0 < array.counts.invalid == host.tree.counts.invalid
    assert set(nodes.model.tolist()) == {0, 1} and moves.done.sum() > 2
    up = moves.parent
    assert (up < np.arange(len(up))).all() and not moves.done[up[up >= 0]].any()  # real parents, none at an end
    assert (moves.task[up[up >= 0]] == moves.task[up >= 0]).all()
    np.testing.assert_array_equal(moves.turn, np.repeat(np.arange(ATTEMPTS), TASKS))


def test_siblings_differ_and_prompts_show_the_parent():
    """Children of one state have one prompt and keys of their own; a prompt shows the program before it."""
    array, _ = played(noisy(), grow(ATTEMPTS, choices.root(2), REWARD), writers(), tasks_of())
    said = [tuple(row[:size]) for row, size in zip(array.steps.tokens, array.steps.length)]
    assert len(set(said)) > 8
    tree, _ = played(noisy(), grow(ATTEMPTS, choices.last(2), REWARD), writers(), tasks_of())
    shown = 0
    for j, up in enumerate(tree.transitions.parent):
        prompt = BYTES.decode(tree.nodes.tokens[j, : tree.nodes.length[j]])
        if up < 0:
            assert "|" not in prompt
            continue
        before = tree.steps.tokens[up, : tree.steps.length[up]]
        text = BYTES.decode(before[:-1]) if before[-1] == EOS and len(before) > 1 else "?"
        assert f"|{text}" in prompt
        shown += 1
    assert shown > 4


@functools.cache
def refine():
    return programs.make(CONFIG)


def test_always_the_root_is_the_first_turn_of_flat():
    team = writers(1)
    grown, host = played(refine(), grow(ATTEMPTS, choices.root(), REWARD), team, tasks_of())
    assert_same_rows(grown, host.tree)
    flat, _ = played(refine(), plans.flat(ATTEMPTS), team, tasks_of())
    ours = lines(grown)
    assert len(ours) == TASKS * ATTEMPTS and set(grown.transitions.parent) == {-1}
    theirs = {path: line for path, line in lines(flat).items() if len(path) == 2}
    for path, line in ours.items():
        assert line[:2] == theirs[path][:2] and line[3] == theirs[path][3], path


def test_always_the_last_is_the_episode_of_flat():
    team = writers(1)
    grown, host = played(refine(), grow(ATTEMPTS, choices.last(), REWARD), team, tasks_of())
    assert_same_rows(grown, host.tree)
    chain, _ = played(refine(), plans.flat(1), team, tasks_of())
    without = lambda tree: tree.replace(counts=None)
    chex.assert_trees_all_close(without(grown), without(chain), atol=1e-6)


def test_seats_that_act_at_once():
    """Both players of a game speak at every expansion, and the choice goes back to earlier rounds."""
    env = dilemma.make(dilemma.Config(rounds=4))
    bias = ((range(264), -30.0), (b"CD", 30.0), ((EOS,), 25.0))
    team = Team(tuple(Role(r, "m", 1) for r in env.roles), (Model("m", policy(bias), BYTES),))
    tasks = dilemma.make_tasks(dilemma.Config(rounds=4))
    tasks = jax.tree.map(lambda x: np.asarray(x[:TASKS]), tasks)
    array, host = played(env, grow(env.max_turns, choices.uniform(), (("payoff", 1.0),)), team, tasks)
    assert array.transitions.steps.shape[1] == 2 and len(set(array.transitions.parent.tolist())) > 3
    assert_same_rows(array, host.tree)


def test_layout_and_returns_of_a_grown_tree():
    """Rows are where `layout` says. Returns average over real children, the expansion's number as turn."""
    env, plan = noisy(), grow(ATTEMPTS, choices.uniform(2), REWARD)
    array, _ = played(env, plan, writers(), tasks_of())
    (block,) = layout(plan, env, TASKS)
    nodes, steps = block.rows()
    assert nodes.tolist() == list(range(TASKS * ATTEMPTS)) == steps[:, 0].tolist()
    assert tuple(map(int, table_rows(plan, env, TASKS))) == (TASKS * ATTEMPTS,) * 3
    moves = array.transitions
    got, known = returns_to_go(
        moves.rewards["tests"], moves.parent, moves.turn, moves.valid, max_turns=env.max_turns, discount=0.9
    )

    def value(j):
        below = [value(i) for i in np.flatnonzero(moves.parent == j)]
        fine = [v for v in below if v is not None]
        if not moves.valid[j] or (below and not fine):
            return None
        return moves.rewards["tests"][j, 0] + 0.9 * (np.mean(fine) if fine else 0.0)

    want = [value(j) for j in range(len(moves.parent))]
    assert [v is not None for v in want] == known.tolist()
    np.testing.assert_allclose(got[known, 0], [v for v in want if v is not None], atol=1e-5)


def watched(seen):
    """Names the root, and shows what a choice is given."""

    def choose(key, parents, players, rewards, n):
        own = jax.random.key_data(key)
        jax.debug.callback(lambda *x: seen.append([np.asarray(y) for y in x]), parents, players, rewards, n, own)
        return -1, 0

    return choose


def test_what_a_choice_is_given():
    """Expansions in order; from n on nothing; rewards that are not known are NaN, others the weighted team reward.

    No two choices of a rollout have one key.
    """
    seen, team = [], writers()
    host = go(as_host(noisy()), team, [jax.tree.map(lambda x: x[0], tasks_of())],
              grow(ATTEMPTS, watched(seen), (("tests", 2.0),)))  # fmt: skip
    jax.effects_barrier()
    mine = [row for row in seen if row[3] == ATTEMPTS - 1 and row[0][0] == -1][-1]  # no padding; the trial was first
    moves = host.tree.transitions
    paid = np.where(moves.valid, 2 * moves.rewards["tests"][:, 0], np.nan)[: ATTEMPTS - 1]
    np.testing.assert_array_equal(mine[0], [-1] * (ATTEMPTS - 1) + [-2])
    np.testing.assert_array_equal(mine[1], [0] * (ATTEMPTS - 1) + [-1])
    np.testing.assert_allclose(mine[2], [*paid, np.nan], rtol=1e-6)
    keys = {(int(row[3]), *row[4].tolist()) for row in seen[-4 * ATTEMPTS :]}  # four rows: one task, and padding
    assert len({key[1:] for key in keys}) == len(keys) >= ATTEMPTS


def test_a_state_that_cannot_be_observed_is_closed():
    """The next expansion begins at the state before it. A task whose root fails is left out, once."""
    team = writers(1)
    env = as_host(noisy())

    def observe(state):
        if state == "root fails":
            raise LookupError("no page")
        if int(state.turn) == 1:
            raise LookupError("no second page")
        return env.observe(state)

    reset = lambda seed, task: task if task == "root fails" else env.reset(seed, task)
    rows = ["root fails", jax.tree.map(lambda x: x[0], tasks_of())]
    got = go(env._replace(observe=observe, reset=reset), team, rows, grow(ATTEMPTS, choices.last(), REWARD))
    moves = got.tree.transitions
    count = int(moves.played.sum())
    assert got.unplayed == 1 and sum(f.task == 0 for f in got.failures) == 1
    # expansion 0 at the root, 1 fails behind it, 2 at the root again, and so on
    failures = [f.turn for f in got.failures if f.task == 1]
    assert set(moves.parent[:count]) == {-1} and set(moves.task[:count]) == {1}
    assert sorted([*moves.turn[:count], *failures]) == list(range(ATTEMPTS)) and len(failures) >= 1


# Bad input


def later(key, parents, players, rewards, n):
    return n, 0


def stranger(key, parents, players, rewards, n):
    return -1, 2


def rarely(key, parents, players, rewards, n):
    """Wrong only for a reward that the trial does not draw."""
    return jnp.where((rewards > 1).any(), n + 3, -1), 0


def raises(key, parents, players, rewards, n):
    raise KeyError("no such thing")


BAD = [
    (later, r"^plan grow\(5, later\): choose before expansion 0: expected -1 \(the root\) and player 0 to 1 of "
            r"'coder', got expansion 0 and player 0$"),
    (stranger, r"^plan grow\(5, stranger\): .* player 0 to 1 of 'coder', got expansion -1 and player 2$"),
    (raises, r"^plan grow\(5, raises\): choose: expected two integers, \(parent, player\), but it raised KeyError"),
    (lambda *x: 0.5, r"choose: expected two integers, \(parent, player\), got float32\[\]$"),
    (lambda *x: (jnp.zeros(2, int), 0), r"choose: expected two integers, .*, got int32\[2\], int32\[\]$"),
]  # fmt: skip


@pytest.mark.parametrize("choose, message", BAD, ids=[c.__name__ + m[-12:] for c, m in BAD])
def test_a_bad_choice_is_one_line_before_a_run(choose, message):
    plan = grow(ATTEMPTS, choose, REWARD)
    with pytest.raises(ConfigError, match=message) as error:
        make_rollout(writers(), noisy(), plan, Sampling())
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=message):
        go(as_host(noisy()), writers(), ["a"], plan)


def generous():
    env = programs.make(CONFIG)

    def step(key, state, tokens, length):
        after, rewards, done = env.step(key, state, tokens, length)
        return after, {**rewards, "tests": rewards["tests"] + 2}, done

    return env._replace(step=step)


def test_a_choice_that_is_wrong_during_a_run():
    """The host engine stops at it. The array engine does not play that expansion, and the runner raises."""
    plan, env, team = grow(ATTEMPTS, rarely, REWARD), generous(), writers()
    try_choice(plan, team)
    wanted = r"^plan grow\(5, rarely\): choose before expansion 1: expected -1 \(the root\) to 0 and player 0 to 1 of "
    tasks = tasks_of(2)
    with pytest.raises(ConfigError, match=wanted + "'coder', got expansion 4 and player 0$"):
        go(as_host(env), team, [jax.tree.map(lambda x: x[0], tasks)], plan)
    tree = jax.device_get(compiled(env, team, plan)(make_params(team), None, tasks, KEY, jnp.int32(0)))
    assert tree.transitions.played.tolist() == [True] * 2 + [False] * 8 and tree.counts.sequences == 2
    assert (tree.transitions.parent == -1).all() and not tree.nodes.valid[2:].any()
    checked = jax.jit(lambda tree: (finite.check_traced_choices(plan, tree, 7), tree)[1])
    program = chex.chexify(checked, async_check=False)
    with pytest.raises(AssertionError, match=r"step 7: plan grow\(5, rarely\): 8 of 10 choices name no expansion"):
        program(tree)
    runner = make_env_runner(EnvConfig("programs", {"protocol": "refine", "attempts": ATTEMPTS, "tasks": 8}))
    runner.env = env
    with pytest.raises(ConfigError, match=wanted + "'coder', got another choice$"):
        runner.play(team, make_params(team), None, [0, 1], plan, KEY, Sampling(), None)


def test_bad_plans():
    with pytest.raises(ConfigError, match=r"^plan\.expansions: expected >= 1, got 0$"):
        grow(0, choices.root())
    with pytest.raises(ConfigError, match=r"^plan\.choose: expected a function \(key, parents, players, rewards, n\)"):
        grow(3, lambda key, parents: (0, 0))
    env = noisy()
    for plan, message in (
        (grow(4, choices.root(), REWARD), r"^plan\.expansions: expected 5, the number of turns of .*'programs', got 4"),
        (grow(ATTEMPTS, choices.root()), r"^plan grow\(5, root\): choose needs a reward; environment 'programs' pays"),
        (grow(ATTEMPTS, choices.root(), (("gold", 1.0),)), r"choose reads the reward 'gold'; environment 'programs'"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan.check(env)
        with pytest.raises(ConfigError, match=message):
            plan.check(as_host(env))
    two = programs.make(programs.Config())
    with pytest.raises(ConfigError, match=r"expected the same roles at every turn of environment 'programs'"):
        grow(2, choices.root(), REWARD).check(two)
    unequal = Team((Role("a", "m0", 5), Role("b", "m0", 5, ("m1",))), writers().models)
    with pytest.raises(ConfigError, match=r"^plan grow\(5, root\): expected 1 models of role 'b', as many as of role"):
        try_choice(grow(ATTEMPTS, choices.root(), REWARD), unequal)
    plan = grow(ATTEMPTS, choices.root(), REWARD)
    with pytest.raises(ConfigError, match=r"^plan grow\(5, root\): expected no assignment: choose names the players$"):
        go(as_host(env), writers(), ["a"], plan, assignment=np.zeros((1, 1), int))
    with pytest.raises(ConfigError, match="expected no assignment"):
        compiled(env, writers(), plan)(make_params(writers()), None, tasks_of(), KEY, 0, np.zeros((3, 1), int))


def test_equal_arguments_make_equal_plans():
    assert grow(4, choices.thompson(2), REWARD) == grow(4, choices.thompson(2), REWARD)
    assert grow(4, choices.thompson(2), REWARD) != grow(4, choices.thompson(1), REWARD)
    assert grow(3, choices.best()).name == "grow(3, best)"
