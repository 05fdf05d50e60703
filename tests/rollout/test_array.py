"""Array rollouts: counts against closed forms, structure of the tables, decode = forward, invalid rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.assign import Credit, assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling, score
from jaxmarl_llm.rollout.array import layout, make_rollout
from jaxmarl_llm.rollout.keys import fold
from jaxmarl_llm.rollout.make_runner import make_env_runner
from jaxmarl_llm.rollout.plans import Branch, flat, handoff, node_wise, product, single
from jaxmarl_llm.rollout.recall import prepend
from tests import toys

K, G, B = 4, 4, 3


RELAY, POISONED = toys.relay(K), toys.relay(K, poison=2)
ROLLOUTS = {}


def rollout_of(plan, env=RELAY, sampling=Sampling(), shared=False):
    """Compiled once: plans of equal name are equal."""
    key = plan.name, id(env), sampling, shared
    if key not in ROLLOUTS:
        ROLLOUTS[key] = jax.jit(make_rollout(toys.team(shared=shared), env, plan, sampling))
    return ROLLOUTS[key]


def play(plan, *, env=RELAY, sampling=Sampling(), batch=B, seed=0):
    team = toys.team()
    rollout = rollout_of(plan, env, sampling)
    return jax.device_get(rollout(toys.params(team), {}, toys.relay_tasks(batch), jax.random.key(seed), 7)), team


def leaves(tree):
    parents = set(tree.transitions.parent[tree.transitions.valid].tolist())
    return sum(int(j) not in parents for j in np.flatnonzero(tree.transitions.valid))


CASES = [
    # plan, sequences, at branching nodes, environment calls, leaves: per task, for k = 4 turns and G = 4
    (flat(G), G * K, G, G * K, G),
    (node_wise(G, "local"), K * G, K * G, K * G, K * (G - 1) + 1),
    (node_wise(G), K * G + (G - 1) * (3 + 2 + 1), K * G, K * G + (G - 1) * 6, K * (G - 1) + 1),
    (product(G), 4 + 16 + 64 + 256, 4 + 16 + 64 + 256, 340, G**K),
    # a width for each turn: 3 + 3 * 2 + 6 * 1 + 6 * 2; those of the third turn have no siblings
    (product((3, 2, 1, 2)), 27, 3 + 6 + 12, 27, 12),
    # alternatives at turns 0, 1, 2 have 3, 2, 1 turns left: 1 * 3 + 2 * 2 + 3 * 1
    (node_wise((2, 3, 4)), 13 + 10, 13, 13 + 10, 1 + 2 + 3 + 4),
    (single(), K, 0, K, 1),
]


@pytest.mark.parametrize("plan,sequences,branch,calls,ends", CASES, ids=[c[0].name for c in CASES])
def test_counts_equal_closed_forms(plan, sequences, branch, calls, ends):
    tree, _ = play(plan)
    counts = tree.counts
    assert counts.sequences == B * sequences == tree.steps.valid.sum()
    assert counts.branch_sequences == B * branch
    assert counts.env_calls == B * calls == tree.transitions.played.sum()
    assert leaves(tree) == B * ends
    assert counts.prompt_tokens == tree.nodes.length[tree.nodes.valid].sum() == 3 * tree.nodes.valid.sum()
    assert counts.completion_tokens == tree.steps.length[tree.steps.valid].sum()


def test_node_wise_is_16_where_product_is_256():
    """JoyAgents-R1: G_1 + ... + G_k samples instead of G_1 ... G_k, counted from the tree (k = 4, G = 4, one task)."""
    ours, _ = play(node_wise(G, "local"))
    naive, _ = play(product(G))
    first = lambda tree: tree.nodes.task[tree.steps.node] == 0
    assert int((ours.steps.valid & first(ours)).sum()) == 16
    assert leaves(naive) == 256 * B


@pytest.mark.parametrize("plan", [flat(G), node_wise(G), product(G)], ids=lambda p: p.name)
def test_tables_are_consistent(plan):
    tree, team = play(plan)
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    for j in np.flatnonzero(moves.valid):
        s = moves.steps[j, 0]
        n = steps.node[s]
        assert nodes.turn[n] == moves.turn[j] and nodes.task[n] == moves.task[j] and nodes.parent[n] == moves.parent[j]
        assert nodes.role[n] == moves.turn[j] % 2 == nodes.model[n]
        if moves.parent[j] >= 0:
            up = moves.parent[j]
            assert moves.turn[up] == moves.turn[j] - 1 and moves.task[up] == moves.task[j]
            # the prompt shows what the parent's step really was
            assert nodes.tokens[n, 0] == 65 + steps.tokens[moves.steps[up, 0], 0] % 2
    assert (steps.version == 7).all() and set(np.unique(moves.done[moves.turn == K - 1])) == {True}
    assert (steps.loss_mask.sum(1) == steps.length).all()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=40, top_p=0.9)], ids=["plain", "filtered"])
def test_recorded_logprobs_are_the_learners(sampling):
    tree, team = play(node_wise(G), sampling=sampling)
    nodes, steps = tree.nodes, tree.steps
    params = toys.params(team)
    for m, model in enumerate(team.models):
        rows = np.flatnonzero(steps.valid & (nodes.model[steps.node] == m))
        at = steps.node[rows]
        v = model.variables(params)
        hidden = model.policy.hidden(v, nodes.tokens[at], nodes.length[at], steps.tokens[rows][:, None])
        logprob, _ = score(model.policy.unembed(v, hidden[:, 0]), jnp.asarray(steps.tokens[rows]), sampling)
        gap = np.abs(np.where(steps.loss_mask[rows], logprob - steps.logprobs[rows], 0.0))
        assert gap.max() <= 1e-5


def test_samples_depend_on_their_place_alone():
    """Task i of a small batch is task i of a large one; the other key gives other tokens."""
    small, _ = play(flat(G), batch=2)
    large, _ = play(flat(G), batch=5)
    other, _ = play(flat(G), batch=2, seed=1)

    def tokens(tree, task):
        rows = tree.steps.valid & (tree.nodes.task[tree.steps.node] == task)
        return tree.steps.tokens[rows]

    for task in range(2):
        np.testing.assert_array_equal(tokens(small, task), tokens(large, task))
        assert (tokens(small, task) != tokens(other, task)).any()


def test_a_reward_that_is_not_finite_is_invalid_and_never_zero():
    tree, team = play(node_wise(G), env=POISONED)
    moves = tree.transitions
    bad = moves.played & (moves.task == 0) & (moves.turn == 2)
    assert bad.any() and not moves.valid[bad].any() and tree.counts.invalid == bad.sum()
    credited = assign(Credit(normalise="none"), tree, weights=(("accuracy", 1.0),), sizes=Sizes(K, B, 2))
    rows = moves.steps[bad, 0]
    assert not np.asarray(credited.valid)[rows].any()
    assert (np.asarray(credited.advantage)[rows] == 0).all()
    # what leads only to invalid transitions has no return either; the other tasks are untouched
    clean, _ = play(node_wise(G))
    ref = assign(Credit(normalise="none"), clean, weights=(("accuracy", 1.0),), sizes=Sizes(K, B, 2))
    others = tree.nodes.task[tree.steps.node] != 0
    np.testing.assert_array_equal(np.asarray(credited.advantage)[others], np.asarray(ref.advantage)[others])


def test_local_plan_scores_by_the_verifier():
    tree, _ = play(node_wise(G, "local"))
    moves = tree.transitions
    total = {}
    for j in np.flatnonzero(moves.valid):
        token = tree.steps.tokens[moves.steps[j, 0], 0]
        before = total.get(int(moves.parent[j]), 0.0)
        total[int(j)] = before + float(token % 2) + 0.01 * moves.turn[j]
        assert moves.rewards["accuracy"][j, 0] == pytest.approx(total[int(j)], abs=1e-6)


def test_a_shared_model_plays_as_its_copies_do():
    separate, team = play(flat(G))
    same = toys.params(team)
    same["agents"]["b"] = same["agents"]["a"]
    rollout = rollout_of(flat(G))
    copies = jax.device_get(rollout(same, {}, toys.relay_tasks(B), jax.random.key(0), 7))
    shared = {"shared": {}, "agents": {"team": same["agents"]["a"]}}
    rollout = rollout_of(flat(G), shared=True)
    joint = jax.device_get(rollout(shared, {}, toys.relay_tasks(B), jax.random.key(0), 7))
    np.testing.assert_array_equal(copies.steps.tokens, joint.steps.tokens)
    assert (copies.steps.tokens != separate.steps.tokens).any()


def test_prepend_closes_gaps():
    entries = jnp.array([[[1, 2, 0], [3, 0, 0]], [[9, 9, 9], [4, 5, 6]]])
    got = prepend(entries, jnp.array([[2, 1], [0, 3]]), jnp.array([[7, 8, 0], [7, 0, 0]]), jnp.array([2, 1]))
    assert got[0, :5].tolist() == [1, 2, 3, 7, 8] and got[1, :4].tolist() == [4, 5, 6, 7]


def test_keys_fold_along_a_path():
    key = jax.random.key(3)
    direct = jax.random.fold_in(jax.random.fold_in(key, 5), 2)
    path = fold(jnp.broadcast_to(key, (4,)), jnp.arange(2, 6), 2)
    assert (jax.random.key_data(path[3]) == jax.random.key_data(direct)).all()


def test_a_seat_taken_by_another_role_than_announced_is_an_error():
    """The program asks a model only for the seats that ``actors`` gives it."""
    env_runner = make_env_runner(EnvConfig("matrix", eval_tasks=2))
    team, key = toys.team(env_runner.env.roles), jax.random.key(0)
    play = lambda: env_runner.play(team, toys.params(team), {}, [0, 1], flat(2), key, Sampling(), None)
    assert (play().tree.steps.length > 0).all()
    env_runner.env = env_runner.env._replace(actors=((1, 0),) * env_runner.env.max_turns)
    env_runner._compiled.cache_clear()
    with pytest.raises(ValueError, match=r"'matrix', turn 0: seat 0 was taken by '.*', but actors\[0\] is \(1, 0\)"):
        play()


BLIND = RELAY._replace(verify=None)
PAID = (("accuracy", 1.0),)
LACKS = [
    (node_wise(2, "local"), BLIND, r"plan node_wise\(2, local\): environment 'relay' has no local verifier"),
    (handoff(2), RELAY, r"plan handoff\(2, aligned, best\): rank needs a reward; environment 'relay' pays accuracy"),
    (product(2)._replace(stop_above=1.0), RELAY, r"plan product\(2\): stop_above needs a reward"),
    (handoff(2)._replace(reward=(*PAID, ("speed", 1.0))), RELAY, "rank reads the reward 'speed'; environment 'relay'"),
    (flat(2)._replace(stop_above=1.0, reward=(("speed", 1.0),)), RELAY, "stop_above reads the reward 'speed'"),
    (
        product((4, 2)),
        RELAY,
        r"^plan\.group: expected one width for each of the 4 turns of environment 'relay', got 2: product\(\(4, 2\)\)$",
    ),
]


@pytest.mark.parametrize("plan,env,message", LACKS, ids=[m for _, _, m in LACKS])
def test_a_plan_that_asks_for_what_the_environment_lacks(plan, env, message):
    with pytest.raises(ConfigError, match=message):
        plan.check(env)
    with pytest.raises(ConfigError, match=message):
        make_rollout(toys.team(), env, plan, Sampling())


def test_a_plan_is_asked_only_for_what_it_reads():
    for plan in (node_wise(2), flat(2)._replace(reward=(("speed", 1.0),)), handoff(2, best=False)):
        plan.check(BLIND)
    for plan in (node_wise(2, "local"), handoff(2)._replace(reward=PAID, stop_above=0.5)):
        plan.check(RELAY)


@pytest.mark.parametrize("widths", [(), (4, 0), (-1, 2), 0], ids=str)
def test_bad_widths_of_a_product(widths):
    with pytest.raises(ConfigError, match=r"^plan\.group: expected widths >= 1, one or one for each turn, got "):
        product(widths)


def test_equal_widths_are_the_plan_of_one_width():
    for joint in ("aligned", "cross"):
        one, each = product(2, joint), product((2,) * K, joint)
        assert layout(one, RELAY, B) == layout(each, RELAY, B) and len(layout(one, RELAY, B)) == K
        assert one.actions(Branch(1, True), 2) == each.actions(Branch(1, True), 2)
    assert [product((4, 3)).width(Branch(turn, True)) for turn in (0, 1)] == [4, 3]


@pytest.mark.parametrize("bad", [lambda: node_wise(4, "later")])
def test_plan_errors(bad):
    with pytest.raises(ConfigError, match="continue"):
        bad()
