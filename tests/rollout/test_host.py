"""Host rollouts: their tables, keys, counts and failures; and an array environment played as it plays itself."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.assign import Credit, assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.envs.dispatch import array as dispatch
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv, Message
from jaxmarl_llm.models import decoder, decoder_config
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.rollout import plans
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostFrontier, HostSettings, PlayedAction, play
from jaxmarl_llm.rollout.tables import Costs, NodeRow, Rows, StepRow, TransitionRow, make_tables
from jaxmarl_llm.types import Model, Role, Team

pytestmark = pytest.mark.usefixtures("numpy_tables")

KEY = jax.random.key(3)
BYTES = ByteTokenizer()
EOS = BYTES.EOS
CONFIG = decoder_config.Config(264, 16, 24, 1, 2, 1, 8)


@functools.cache
def policy(bias=()):
    """A random model; ``bias``: (ids, logit) pairs are added, so that a random model ends, or says something."""
    base, extra = decoder.make_policy(CONFIG), np.zeros(264, np.float32)
    for ids, value in bias:
        extra[list(ids)] += value
    return base._replace(unembed=lambda variables, hidden: base.unembed(variables, hidden) + extra)


STOPS = ((EOS,), 3.5)  # a completion of 4 tokens is truncated about half of the time


@functools.cache
def make_team(*roles, shared=True, max_new_tokens=4, bias=(STOPS,)):
    names = ["m" if shared else role for role in roles]
    models = tuple(Model(name, policy(bias), BYTES) for name in dict.fromkeys(names))
    return Team(tuple(Role(role, name, max_new_tokens) for role, name in zip(roles, names)), models)


@functools.cache
def make_params(team, seed=0):
    init = jax.jit(decoder.make_policy(CONFIG).init)
    keys = jax.random.split(jax.random.key(seed), len(team.models))
    return {"shared": {}, "agents": {m.name: {"params": init(k)} for m, k in zip(team.models, keys)}}


def go(env, team, tasks, plan, key=KEY, max_prompt=256, params=None, **options):
    with EnvPool(lambda: env, workers=0) as pool:
        params = make_params(team) if params is None else params
        return play(team, params, pool, tasks, key, HostSettings(plan, Sampling(), max_prompt, **options))


def raw(ids):
    return (Message("raw", "", tuple(ids)),)


def counter(turns, pay=None, ends=None):
    """One role; the state is (task, turns taken). ``pay(seed, state)`` is the reward; ``ends(state)``: over early."""

    def step(seed, state, actions):
        assert set(actions) == {"a"}
        after = (state[0], state[1] + 1)
        value = 1.0 if pay is None else pay(seed, state)
        return after, {"a": {"accuracy": value}}, after[1] == turns or (ends is not None and ends(after))

    observe = lambda state: {"a": raw([65 + state[1], 48 + state[0] % 10])}
    judge = lambda state: {"a": {"accuracy": 10.0 * state[1]}}
    return HostEnv("counter", ("a",), turns, ("accuracy",), lambda seed, task: (task, 0), observe, step, judge)


def talk(turns, together, log=None):
    """Roles a and b speak in turn, or both each turn; a prompt shows all that was said, as each role sees it."""
    roles = ("a", "b")

    def reset(seed, task):
        return (task, ())

    def observe(state):
        task, said = state
        prompts = {}
        for role in roles if together else (roles[len(said) % 2],):
            prompt = [Message("system", f"you are {role}"), Message("user", task)]
            for turn in said:
                for owner, action in turn:
                    heard = Message("user", action.text, action.ids, owner)
                    prompt.append(action.message(owner) if owner == role else heard)
            prompts[role] = tuple(prompt)
        if log is not None:
            log.append(("observe", state))
        return prompts

    def step(seed, state, actions):
        if log is not None:
            log.append(("step", state))
        state = (state[0], (*state[1], tuple(sorted(actions.items()))))
        return state, {r: {"accuracy": float(len(a.ids))} for r, a in actions.items()}, len(state[1]) == turns

    return HostEnv("talk", roles, turns, ("accuracy",), reset, observe, step)


def ids_of(tree, row):
    return tuple(tree.steps.tokens[row, : tree.steps.length[row]].tolist())


def prompt_of(tree, node):
    return tuple(tree.nodes.tokens[node, : tree.nodes.length[node]].tolist())


def paths(tree):
    """A name for each played transition, in any order of the table: (task, places among siblings from the root)."""
    moves, name, born = tree.transitions, {-1: ()}, {}
    for j in np.flatnonzero(moves.played):
        parent, task = int(moves.parent[j]), int(moves.task[j])
        order = born.get((parent, task), 0)
        born[parent, task] = order + 1
        name[int(j)] = (*(name[parent] or (task,)), order)
    del name[-1]
    return name


def lines(tree):
    """All that was played, by path: (prompt, ids, log-probs, rewards, done, valid) of single-seat transitions."""
    out, moves = {}, tree.transitions
    for j, path in paths(tree).items():
        row = int(moves.steps[j, 0])
        assert tree.steps.valid[row] and tree.nodes.valid[tree.steps.node[row]]
        rewards = {c: v[j].tolist() for c, v in moves.rewards.items()}
        logprobs = tree.steps.logprobs[row, : tree.steps.length[row]]
        out[path] = (prompt_of(tree, tree.steps.node[row]), ids_of(tree, row), logprobs, rewards,
                     bool(moves.done[j]), bool(moves.valid[j]), bool(tree.steps.truncated[row]))  # fmt: skip
    return out


def assert_consistent(got, team, tasks):
    tree = got.tree
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    n, c, j = (int(x.sum()) for x in (nodes.valid, steps.valid, moves.played))
    assert nodes.valid[:n].all() and steps.valid[:c].all() and moves.played[:j].all()
    assert len(got.records) == c == tree.counts.sequences
    assert (steps.node[:c] < n).all() and set(steps.node[:c]) == set(range(n))
    assert (np.diff(steps.node[:c]) >= 0).all()  # siblings stand together
    for node in range(n):
        up, turn = int(nodes.parent[node]), int(nodes.turn[node])
        assert (up == -1) == (turn == 0)
        if up >= 0:
            assert moves.turn[up] == turn - 1 and moves.task[up] == nodes.task[node] and not moves.done[up]
        assert nodes.model[node] == team.model_index(int(nodes.role[node]))
        assert 0 <= nodes.task[node] < tasks
    taken = []
    for k in range(j):
        up, seats = int(moves.parent[k]), [int(s) for s in moves.steps[k] if s >= 0]
        assert up < k and (up == -1) == (moves.turn[k] == 0)
        assert up == -1 or (moves.turn[up] == moves.turn[k] - 1 and moves.task[up] == moves.task[k])
        for s in seats:
            at = int(steps.node[s])
            assert (nodes.parent[at], nodes.turn[at], nodes.task[at]) == (up, moves.turn[k], moves.task[k])
        taken += seats
    assert sorted(taken) == list(range(c))  # each step has its transition
    span = np.arange(steps.tokens.shape[1])
    np.testing.assert_array_equal(steps.loss_mask, span < steps.length[:, None])
    assert (steps.length[:c] >= 1).all() and not steps.length[c:].any()
    assert not steps.logprobs[~steps.loss_mask].any() and (steps.logprobs[steps.loss_mask] < 0).all()
    for row in range(c):
        ids, record = ids_of(tree, row), got.records[row]
        assert record.action.ids == ids and record.action.truncated == steps.truncated[row] == (ids[-1] != EOS)
        assert record.role == team.roles[nodes.role[steps.node[row]]].name
        assert prompt_of(tree, steps.node[row]) == tuple(BYTES.render(record.prompt, record.role))
        assert EOS not in ids[:-1]
        assert record.action.text == BYTES.decode(ids)
    width = np.bincount(steps.node[:c], minlength=n)
    counts = tree.counts
    assert counts.branch_sequences == width[width > 1].sum()
    assert 0 < counts.prompt_tokens <= nodes.length[:n].sum()  # exactly: test_prefixes
    assert counts.completion_tokens == steps.length[:c].sum()
    assert counts.env_calls == j and counts.invalid == (moves.played & ~moves.valid).sum()


# --- tables and prompts ----------------------------------------------------------


@pytest.mark.parametrize(("shared", "together"), [(False, True), (True, False)], ids=["separate", "shared"])
def test_tables_are_consistent(shared, together):
    team = make_team("a", "b", shared=shared)
    got = go(talk(3, together), team, ["x", "yy"], plans.node_wise(2), version=7)
    assert_consistent(got, team, 2)
    assert got.failures == [] and got.cut_tokens == 0
    assert (got.tree.steps.version[got.tree.steps.valid] == 7).all()
    assert got.tree.transitions.steps.shape[1] == (2 if together else 1)
    moves = got.tree.transitions
    for j in np.flatnonzero(moves.played):  # the g-th sample of each seat, and its own length as reward of each role
        place = [int(s) - int(np.flatnonzero(got.tree.steps.node == got.tree.steps.node[s])[0]) for s in moves.steps[j]]
        assert len(set(place)) == 1
        for s in moves.steps[j]:
            role = got.tree.nodes.role[got.tree.steps.node[s]]
            assert moves.rewards["accuracy"][j, role] == got.tree.steps.length[s]
        assert moves.done[j] == (moves.turn[j] == 2)


def test_token_in_token_out():
    """What a role sampled stands in its later prompts as ids: also bytes that are no text, and unused ids."""
    team = make_team("a", "b")
    got = go(talk(5, False), team, ["x", "yy"], plans.flat(2))
    tree, names = got.tree, paths(got.tree)
    by_path = {path: int(tree.transitions.steps[j, 0]) for j, path in names.items()}
    compared = odd = 0
    for path, row in by_path.items():
        if len(path) < 4:  # (task, g, 0): nothing of its own before
            continue
        before = by_path[path[:-2]]
        prompt, earlier = prompt_of(tree, tree.steps.node[row]), prompt_of(tree, tree.steps.node[before])
        assert prompt[: len(earlier)] == earlier
        ids = ids_of(tree, before)
        assert prompt[len(earlier) : len(earlier) + len(ids)] == ids
        spoken = ids if ids[-1] == EOS else (*ids, EOS)
        assert prompt[len(earlier) : len(earlier) + len(spoken)] == spoken  # the template's end, not doubled
        assert prompt[len(earlier) + len(spoken)] == BYTES.ROLES["user"]
        compared += 1
        odd += list(ids[:-1]) != BYTES.encode(BYTES.decode(ids[:-1]))
    assert compared == 2 * 2 * 3 and odd >= 4  # re-encoding the text would have shown


def test_prompts_are_fixed_before_anyone_speaks():
    team, log = make_team("a", "b", shared=False), []
    env = talk(2, True, log)
    one = go(env, team, ["x", "y"], plans.flat(2))
    base = make_params(team)
    other = {"shared": {}, "agents": {**base["agents"], "b": make_params(team, seed=1)["agents"]["b"]}}
    two = go(env, team, ["x", "y"], plans.flat(2), params=other)

    def said(got, role, turn):
        at = got.tree.nodes.role[got.tree.steps.node], got.tree.nodes.turn[got.tree.steps.node]
        rows = np.flatnonzero(got.tree.steps.valid & (at[0] == role) & (at[1] == turn))
        return [(prompt_of(got.tree, got.tree.steps.node[r]), ids_of(got.tree, r)) for r in rows]

    assert said(one, 1, 0) != said(two, 1, 0)  # b says other things,
    assert said(one, 0, 0) == said(two, 0, 0)  # which a does not know in the same turn
    assert [p for p, _ in said(one, 0, 1)] != [p for p, _ in said(two, 0, 1)]  # but in the next
    for got in (one, two):
        for record in got.records:
            assert len(record.prompt) in (2, 4)  # system, task, and both moves of the turn before
    kinds = [kind for kind, _ in log]
    assert kinds == 2 * (["observe"] * 2 + ["step"] * 4 + ["observe"] * 4 + ["step"] * 4)


def test_a_prompt_that_is_too_long_is_cut_and_counted():
    team = make_team("a", "b")
    task = "0123456789" * 10
    got = go(talk(1, True), team, [task, "short"], plans.flat(2), max_prompt=40)
    lengths = got.tree.nodes.length[got.tree.nodes.valid].tolist()
    whole = [len(BYTES.render(got.records[row].prompt, got.records[row].role)) for row in (0, 2)]
    assert lengths[:2] == [40, 40] and max(lengths[2:]) < 40 and min(whole) > 100
    assert got.cut_tokens == sum(whole) - 80 and got.cut_prompts == {"a": 1, "b": 1}
    assert go(talk(1, True), team, [task], plans.flat(2), max_prompt=200).cut_tokens == 0


# --- the pieces of a turn --------------------------------------------------------


def test_a_turn_in_its_pieces():
    env, team = talk(2, True), make_team("a", "b")
    with EnvPool(lambda: env, workers=0) as pool:
        frontier = HostFrontier(team, make_params(team), pool, HostSettings(plans.flat(2), Sampling(), 256))
        frontier.reset(["x", "yy"], KEY)
        assert [(s.task, s.parent, s.state) for s in frontier.states] == [(0, -1, ("x", ())), (1, -1, ("yy", ()))]

        seats = frontier.observe()
        assert [[seat.role for seat in own] for own in seats] == [[0, 1], [0, 1]]
        assert [own[1].prompt[1].text for own in seats] == ["x", "yy"] and frontier.rows == Rows()

        samples = frontier.request_completions(seats)
        assert [[(seat.role, seat.first_step, len(seat.completions)) for seat in own] for own in samples] == [
            [("a", 0, 2), ("b", 2, 2)], [("a", 4, 2), ("b", 6, 2)]]  # fmt: skip
        assert [row.role for row in frontier.rows.nodes] == [0, 1, 0, 1]
        assert [row.node for row in frontier.rows.steps] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [record.action.ids for record in frontier.records] == [row.ids for row in frontier.rows.steps]
        assert frontier.rows.transitions == []

        played = frontier.step(samples)
        assert [(p.place, p.transition) for p in played] == [(0, 0), (0, 1), (1, 2), (1, 3)]
        assert [row.steps for row in frontier.rows.transitions] == [[0, 2], [1, 3], [4, 6], [5, 7]]
        spoken = [action for _, action in played[3].state[1][0]]
        assert [action.ids for action in spoken] == [frontier.rows.steps[5].ids, frontier.rows.steps[7].ids]
        assert frontier.env_calls == 4 and frontier.turn == 0

        frontier.advance(played)
        assert [(s.task, s.parent, s.branch.turn) for s in frontier.states] == [
            (0, 0, 1),
            (0, 1, 1),
            (1, 2, 1),
            (1, 3, 1),
        ]
        assert [s.state for s in frontier.states] == [p.state for p in played] and frontier.turn == 1
        assert len({s.key.tobytes() for s in frontier.states}) == 4

        frontier.play_turn()
        assert frontier.states == [] and frontier.turn == 2
        whole = play(team, make_params(team), pool, ["x", "yy"], KEY, HostSettings(plans.flat(2), Sampling(), 256))
    got = frontier.result()
    assert got.records == whole.records and got.failures == whole.failures == []
    chex.assert_trees_all_equal(got.tree, whole.tree)


def test_advance_follows_the_best_valid_joint_action():
    env, team = counter(3), make_team("a")
    plan = plans.handoff(3)._replace(reward=(("accuracy", 1.0),))
    with EnvPool(lambda: env, workers=0) as pool:
        for values, valid, followed in (
            ((1.0, 3.0, 2.0), (True, True, True), [1]),
            ((1.0, 3.0, 2.0), (True, False, True), [2]),
            ((2.0, 2.0, 1.0), (True, True, True), [0]),
        ):
            frontier = HostFrontier(team, {}, pool, HostSettings(plan, Sampling(), 256))
            frontier.reset([7], KEY)
            rewards = [np.full((1, 1), value, np.float32) for value in values]
            rows = [TransitionRow([i], -1, 0, 0, rewards[i], False, valid[i]) for i in range(3)]
            frontier.rows.transitions += rows
            frontier.advance([PlayedAction(0, i, (7, 1), np.zeros(2, np.uint32)) for i in range(3)])
            assert [s.parent for s in frontier.states] == followed


def test_tables_of_rows():
    team = make_team("a", "b")
    rows = Rows(
        [NodeRow([7, 8, 9], 1, 0, 2, 0, -1), NodeRow([5], 0, 0, 2, 1, 0)],
        [StepRow(0, (3, EOS), np.float32([-1, -2]), False, 0), StepRow(0, (4,), np.float32([-3]), True, 1),
         StepRow(1, (6,), np.float32([-4]), True, 0)],
        [TransitionRow([0], -1, 2, 0, np.float32([[1, 2], [3, 4]]), False, True),
         TransitionRow([1], -1, 2, 0, np.zeros((2, 2), np.float32), True, False)],
    )  # fmt: skip
    tree = make_tables(team, ("speed", "style"), rows, 5, Costs(11, 12, 13))
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    assert nodes.tokens.shape == (16, 32) and nodes.tokens[0, :4].tolist() == [7, 8, 9, 0]
    assert [x[:3].tolist() for x in (nodes.length, nodes.role, nodes.task, nodes.turn, nodes.parent, nodes.valid)] == [
        [3, 1, 0], [1, 0, 0], [2, 2, 0], [0, 1, 0], [-1, 0, -1], [True, True, False]]  # fmt: skip
    assert steps.tokens.shape == (16, 4) and steps.tokens[:2, :2].tolist() == [[3, EOS], [4, 0]]
    assert steps.loss_mask[:2].sum(1).tolist() == [2, 1] and steps.logprobs[0].tolist() == [-1, -2, 0, 0]
    assert steps.source[:2].tolist() == [0, 1] and (steps.version == 5).all()
    assert moves.rewards["style"][0].tolist() == [3, 4] and moves.steps[:3, 0].tolist() == [0, 1, -1]
    assert moves.played[:3].tolist() == [True, True, False] and moves.valid[:3].tolist() == [True, False, False]
    assert {name: int(value) for name, value in vars(tree.counts).items()} == {
        "sequences": 3, "branch_sequences": 2, "prompt_tokens": 11, "completion_tokens": 4, "env_calls": 12,
        "invalid": 1, "launches": 13,
    }  # fmt: skip


# --- plans -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "sequences", "branch", "leaves", "launches"),
    [
        (plans.flat(4), 4 * 4, 4, 4, 4),
        (plans.node_wise(4), 16 + 3 * (3 + 2 + 1), 16, 13, 4),  # the base and the alternatives go together
        (plans.node_wise(4, "local"), 16, 16, 4, 4),  # those of the last turn
        (plans.product(4), 4 + 16 + 64 + 256, 340, 256, 4),
        (plans.product((3, 2, 1, 2)), 27, 21, 12, 4),
        (plans.single(), 4, 0, 1, 4),
    ],
    ids=lambda x: x.name if isinstance(x, plans.Plan) else "",
)
def test_counts_of_plans(plan, sequences, branch, leaves, launches):
    team = make_team("a")
    got = go(counter(4), team, [7], plan)
    counts, moves = got.tree.counts, got.tree.transitions
    assert_consistent(got, team, 1)
    assert (counts.sequences, counts.branch_sequences, counts.env_calls) == (sequences, branch, sequences)
    assert counts.launches == launches and counts.invalid == 0
    assert (moves.played & moves.done).sum() == leaves
    if plan.local:  # scored by the verifier, after the move
        np.testing.assert_array_equal(moves.rewards["accuracy"][:16, 0], 10.0 * (1 + moves.turn[:16]))


def test_a_turn_is_one_launch_for_each_model():
    env, tasks = talk(3, True), ["x", "y"]
    separate, shared = make_team("a", "b", shared=False), make_team("a", "b")
    launches = lambda team, plan: int(go(env, team, tasks, plan).tree.counts.launches)
    assert launches(shared, plans.node_wise(2)) == 3
    assert launches(separate, plans.node_wise(2)) == 2 * 3
    assert launches(separate, plans.flat(2)) == 2 * 3


def test_sizes_of_each_turn():
    got = go(counter(3), make_team("a"), [1, 2], plans.node_wise((3, 1, 2), "local"))
    nodes, steps = got.tree.nodes, got.tree.steps
    width = np.bincount(steps.node[steps.valid], minlength=6)
    assert [(int(t), int(w)) for t, w in zip(nodes.turn[nodes.valid], width)] == [
        (0, 3), (0, 3), (1, 1), (1, 1), (2, 2), (2, 2)]  # fmt: skip


def test_what_is_done_is_not_played_on():
    got = go(counter(4, ends=lambda state: state[1] > state[0]), make_team("a"), [0, 1, 2, 9], plans.flat(2))
    moves = got.tree.transitions
    turns = [moves.turn[moves.played & (moves.task == t)].max() + 1 for t in range(4)]
    assert turns == [1, 2, 3, 4]
    assert got.tree.counts.sequences == 2 * sum(turns) and (moves.played & moves.done).sum() == 8


def test_a_local_plan_needs_a_verifier():
    with pytest.raises(ValueError, match="local verifier"):
        go(counter(2)._replace(verify=None), make_team("a"), [1], plans.node_wise(2, "local"))


def test_a_plan_that_ranks_needs_a_reward_that_is_paid():
    for reward, message in (((), "rank needs a reward"), ((("speed", 1.0),), "rank reads the reward 'speed'")):
        with pytest.raises(ConfigError, match=f"{message}; environment 'counter' pays accuracy"):
            go(counter(2), make_team("a"), [1], plans.handoff(2)._replace(reward=reward))


# --- keys ------------------------------------------------------------------------


def same(a, b):
    """Equal prompts, tokens, rewards and ends; log-probs up to the rounding of another batch."""
    assert a.keys() == b.keys()
    pairs = [(a[path], b[path]) for path in a]
    return all(x[:2] == y[:2] and np.allclose(x[2], y[2], atol=1e-5) and x[3:] == y[3:] for x, y in pairs)


def test_equal_keys_play_the_same_and_others_do_not():
    env, team = counter(3, pay=lambda seed, state: float(seed % 1_000_003)), make_team("a")
    one, two = (lines(go(env, team, [1, 2], plans.node_wise(2)).tree) for _ in range(2))
    assert same(one, two)
    third = lines(go(env, team, [1, 2], plans.node_wise(2), key=jax.random.key(4)).tree)
    assert not any(x[1] == y[1] and x[3] == y[3] for x, y in zip(one.values(), third.values()))
    # All environment draws differ, as do nearly all completions.
    assert len({x[3]["accuracy"][0] for x in one.values()}) >= len(one) - 1
    assert len({x[1] for x in one.values()}) > len(one) / 2


def test_a_task_does_not_depend_on_its_batch():
    env, team = counter(3, pay=lambda seed, state: float(seed % 1_000_003)), make_team("a")
    plan = plans.node_wise(2)
    five = lines(go(env, team, [4, 5, 6, 7, 8], plan).tree)
    alone = lines(go(env, team, [4], plan).tree)
    assert same(alone, {path: x for path, x in five.items() if path[0] == 0})
    others = lines(go(env, team, [1, 2, 3, 7], plan).tree)
    assert same(*({path: x for path, x in got.items() if path[0] == 3} for got in (five, others)))
    assert not same(*({p[1:]: x for p, x in five.items() if p[0] == t} for t in (0, 1)))


# --- what goes wrong -------------------------------------------------------------

BAD = {
    "none": None,
    "nan": math.nan,
    "inf": math.inf,
    "minus inf": -math.inf,
    "bool": True,
    "str": "1.0",
    "list": [1.0],
    "too large for float32": 1e300,
    "too large for float": 10**400,
}
BROKEN = ("component", "role", "raise", "no rewards", "a number", "flat", "no result", "short result")


def faulty(turns=1):
    """Pays 5 or 7; where ``bad(seed)``, a task's fault happens instead."""
    bad = lambda seed: seed % 3 == 0

    def step(seed, state, actions):
        task, turn = state
        value: object = 5.0 + 2.0 * (seed % 2)
        rewards: object = {"a": {"accuracy": value}}
        if bad(seed):
            if task == "raise":
                raise RuntimeError("lost the database")
            shapes = {
                "component": {"a": {"accuracy": 1.0, "speed": 1.0}},
                "role": {"nobody": {"accuracy": 1.0}},
                "no rewards": None,
                "a number": 1.0,
                "flat": {"a": 1.0},
            }
            if task == "no result":
                return None
            if task == "short result":
                return (task, turn + 1), rewards
            if task == "numpy":
                rewards = {"a": {"accuracy": np.float32(6.0)}}
            else:
                rewards = shapes[task] if task in shapes else {"a": {"accuracy": BAD[task]}}
        return (task, turn + 1), rewards, turn + 1 == turns

    def reset(seed, task):
        if task == "no reset":
            raise OSError("cannot open")
        return (task, 0)

    return HostEnv("faulty", ("a",), turns, ("accuracy",), reset, lambda s: {"a": raw([65 + s[1]])}, step)


def assert_left_out(got, group):
    """Invalid exactly where the seed was bad, and no statistic knows of it."""
    tree = got.tree
    moves, steps = tree.transitions, tree.steps
    valid = moves.valid[:group]
    assert 0 < valid.sum() < group  # both kinds
    assert tree.counts.invalid == (~valid).sum() == len(got.failures)
    values = moves.rewards["accuracy"][:group, 0]
    assert set(values[valid]) <= {5.0, 7.0} and moves.played[:group].all() and moves.done[:group].all()
    credit = assign(Credit(normalise="none"), tree, weights=(("accuracy", 1.0),), sizes=Sizes(1, 1, 1))
    np.testing.assert_array_equal(np.asarray(credit.valid)[:group], valid)
    assert int(credit.stats.count[0]) == valid.sum()
    assert float(credit.stats.mean[0]) == pytest.approx(values[valid].mean())
    assert float(credit.stats.low[0]) >= 5.0
    want = np.where(valid, values - values[valid].mean(), 0.0)
    np.testing.assert_allclose(np.asarray(credit.advantage)[:group], want, atol=1e-6)
    assert np.isfinite(np.asarray(jax.tree.leaves(tree.transitions.rewards))).all() and steps.valid[:group].all()


@pytest.mark.parametrize("fault", [*BAD, *BROKEN])
def test_what_cannot_be_computed_is_invalid_and_never_zero(fault):
    got = go(faulty(), make_team("a"), [fault], plans.flat(12))
    assert_left_out(got, 12)
    text = {"raise": "RuntimeError: lost the database", "component": "'speed'", "none": "None", "nan": "nan"}
    assert all(text.get(fault, "") in str(failure) and "\n" not in str(failure) for failure in got.failures)
    assert {(f.call, f.turn, f.roles, f.task) for f in got.failures} == {("step", 0, ("a",), 0)}
    traces = {f.trace for f in got.failures}
    assert all("in step\n" in t and "env_pool" not in t for t in traces) if fault == "raise" else traces == {""}


def test_a_numpy_number_is_a_number():
    got = go(faulty(), make_team("a"), ["numpy"], plans.flat(12))
    assert got.tree.counts.invalid == 0 and set(got.tree.transitions.rewards["accuracy"][:12, 0]) == {5.0, 6.0, 7.0}


def test_a_failure_ends_its_episode_and_no_other():
    got = go(faulty(3), make_team("a"), ["raise"], plans.flat(12))
    moves = got.tree.transitions
    failed = moves.played & ~moves.valid
    assert failed.sum() == len(got.failures) > 0 and moves.done[failed].all()
    parents = set(moves.parent[moves.played])
    assert not parents & set(np.flatnonzero(failed))
    ended = moves.played & moves.done
    assert ended.sum() == 12 and (moves.turn[ended & moves.valid] == 2).all() and (ended & moves.valid).any()
    assert any(failure.turn == 0 for failure in got.failures)


def test_an_invalid_reward_does_not_end_the_episode():
    got = go(faulty(3), make_team("a"), ["nan"], plans.flat(12))
    moves = got.tree.transitions
    assert moves.played.sum() == 36 and 0 < got.tree.counts.invalid < 36


def test_a_reset_that_fails_leaves_its_task_out():
    got = go(faulty(), make_team("a"), ["none", "no reset", "none"], plans.flat(2))
    assert set(got.tree.nodes.task[got.tree.nodes.valid]) == {0, 2}
    assert sum("OSError: cannot open" in str(failure) for failure in got.failures) == 1
    assert [(f.call, f.task, f.roles) for f in got.failures if f.call == "reset"] == [("reset", 1, ())]
    assert got.unplayed == 1
    nothing = go(faulty(), make_team("a"), ["no reset"], plans.flat(2))
    assert nothing.tree.counts.sequences == 0 and not nothing.tree.nodes.valid.any() and len(nothing.failures) == 1


def test_an_observation_that_fails_ends_its_episode():
    env = faulty(2)

    def observe(state):
        if state == ("unseen", 1):
            raise LookupError("no page")
        return env.observe(state)

    reset = lambda seed, task: (task, 0)
    step = lambda seed, state, actions: ((state[0], state[1] + 1), {"a": {"accuracy": 1.0}}, state[1] == 1)
    got = go(env._replace(reset=reset, observe=observe, step=step), make_team("a"), ["seen", "unseen"], plans.flat(2))
    turns = got.tree.transitions.turn, got.tree.transitions.task
    assert got.tree.counts.invalid == 2 and got.tree.transitions.done[:4].tolist() == [False, False, True, True]
    last = [turns[0][got.tree.transitions.played & (turns[1] == t)].max() for t in (0, 1)]
    assert last == [1, 0] and any("LookupError: no page" in str(f) for f in got.failures)
    assert {(f.call, f.turn, f.task, f.roles) for f in got.failures} == {("observe", 1, 1, ("a",))}
    assert got.unplayed == 0 and all("in observe\n" in f.trace for f in got.failures)


# --- the same environment as arrays and as Python --------------------------------


@functools.cache
def noisy():
    """Dispatch with draws from the keys of reset and step in its rewards."""
    env = dispatch.make(dispatch.Config(tasks=8))

    def step(key, state, tokens, length):
        inner, luck = state
        after, rewards, done = env.step(key, inner, tokens, length)
        chance = jax.random.uniform(key) + 2 * luck
        return (after, luck), {**rewards, "efficiency": rewards["efficiency"] + chance}, done

    return env._replace(
        reset=lambda key, task: (env.reset(key, task), jax.random.uniform(key)),
        observe=lambda state: env.observe(state[0]),
        step=step,
        verify=lambda state: {"accuracy": env.verify(state[0])["accuracy"] + state[1]},  # the rest stays as it was
    )


@functools.cache
def as_host(env):
    """The array environment behind the face of a Python one."""
    reset, observe, step = (jax.jit(f) for f in (env.reset, env.observe, env.step))
    key_of = lambda seed: jax.random.wrap_key_data(jnp.array([seed >> 32, seed & 0xFFFFFFFF], jnp.uint32))
    by_role = lambda rewards: {r: {c: float(v[i]) for c, v in rewards.items()} for i, r in enumerate(env.roles)}

    def host_observe(state):
        seen = jax.device_get(observe(state))
        rows = [s for s in range(env.seats) if seen.active[s]]
        return {env.roles[seen.role[s]]: raw(seen.tokens[s, : seen.length[s]].tolist()) for s in rows}

    def host_step(seed, state, actions):
        seen = jax.device_get(observe(state))
        tokens, length = np.full((env.seats, 7), BYTES.PAD, np.int32), np.zeros(env.seats, np.int32)
        for s in range(env.seats):
            ids = actions[env.roles[seen.role[s]]].ids
            tokens[s, : len(ids)], length[s] = ids, len(ids)
        after, rewards, done = step(key_of(seed), state, tokens, length)
        return after, by_role(rewards), bool(done)

    return HostEnv(
        env.name, env.roles, env.max_turns, env.components, lambda seed, task: reset(key_of(seed), task),
        host_observe, host_step, env.verify and (lambda state: by_role(jax.jit(env.verify)(state))),
    )  # fmt: skip


@functools.cache
def dispatchers():
    """One model for the master and one for the specialists, both inclined to say things that dispatch understands."""
    bias = ((range(264), -30.0), (b"alft0123456789", 30.0), (b"alft", 1.5), ((EOS,), 32.5))
    roles = tuple(Role(r, "master" if r == "master" else "specialist", 7) for r in dispatch.ROLES)
    return Team(roles, tuple(Model(name, policy(bias), BYTES) for name in ("master", "specialist")))


@pytest.mark.parametrize(
    "plan",
    [plans.flat(3), plans.node_wise(3), plans.node_wise(3, "local"), plans.product(3), plans.product((2, 3, 2))],
    ids=lambda p: p.name,
)
def test_host_and_array_rollouts_are_the_same(plan):
    team, env = dispatchers(), noisy()
    params, tasks = make_params(team), dispatch.make_tasks(dispatch.Config(tasks=8), n=5)
    key = jax.random.key(2)
    rollout = jax.jit(make_rollout(team, env, plan, Sampling()))
    array = jax.device_get(rollout(params, None, tasks, key, jnp.int32(5)))
    rows = [jax.tree.map(lambda x, i=i: x[i], tasks) for i in range(5)]
    host = go(as_host(env), team, rows, plan, key, version=5)
    assert host.failures == []
    ours, theirs = lines(host.tree), lines(array)
    assert ours.keys() == theirs.keys() and len(ours) > 12
    for path, (prompt, ids, logprobs, rewards, *flags) in ours.items():
        other = theirs[path]
        assert (prompt, ids, flags) == (other[0], other[1], list(other[4:])), path
        np.testing.assert_allclose(logprobs, other[2], atol=1e-5)
        assert rewards.keys() == other[3].keys()
        for component, value in rewards.items():
            np.testing.assert_allclose(value, other[3][component], atol=1e-6)
    for name in ("sequences", "branch_sequences", "completion_tokens", "env_calls", "invalid"):
        assert getattr(host.tree.counts, name) == getattr(array.counts, name), name
    assert host.tree.counts.prompt_tokens <= array.counts.prompt_tokens  # which prefills every prompt in full
    turns = host.tree.transitions.turn[host.tree.transitions.played]
    assert set(turns.tolist()) == {0, 1, 2} and len({tuple(x[3]["efficiency"]) for x in ours.values()}) > 6
