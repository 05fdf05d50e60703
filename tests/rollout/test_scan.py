"""Turns of an array rollout that are one scan: equal to the turns played one by one, and no longer a program."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents import memory as memories
from jaxmarl_llm.agents.team import Backbone, TeamConfig
from jaxmarl_llm.envs.array_env import EOS
from jaxmarl_llm.envs.chain import array as chain
from jaxmarl_llm.envs.dilemma import array as dilemma
from jaxmarl_llm.envs.dispatch import array as dispatch
from jaxmarl_llm.envs.games import array as games
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.envs.maze import array as maze
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.safety import array as safety
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.rollout import array, array_turn
from jaxmarl_llm.rollout.keys import PLAY
from jaxmarl_llm.rollout.plans import flat, handoff, node_wise, product, single
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.types import Model, Role, Team
from tests import toys

B = 2
TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
RECALL = memories.MemoryConfig(capacity=4, retrieve=2)
ENVS = {
    "matrix": (matrix, matrix.Config()),
    "split": (dilemma, dilemma.Config(game="split", rounds=3, message=2)),
    "ipd": (dilemma, dilemma.Config(rounds=4)),
    "games": (games, games.Config(games=("tic_tac_toe",))),
    "several games": (games, games.Config(games=("kuhn_poker", "hanabi"), turns=7)),
    "maze": (maze, maze.Config(moves=4, message=1)),
    "chain": (chain, chain.Config(rounds=3)),
    "safety": (safety, safety.Config(rounds=3)),
    "dispatch": (dispatch, dispatch.Config()),
}


def well_formed(env):
    """``env`` as an untrained team can play it to the end: completions are put into a form that it can read."""
    if env.name == "games":
        read = lambda state, tokens: 97 + tokens % 9
    elif env.name == "safety":
        letters = jnp.array(list(safety.RESPONSES.encode()))

        def read(state, tokens):
            letter = letters[tokens[0, 0] % len(letters)]
            response, feedback = [letter, EOS, EOS, EOS], [ord("y"), ord("n"), letter, EOS]
            return jnp.where(state.turn % 2 == 0, jnp.array(response), jnp.array(feedback))[None]

    elif env.name == "dilemma" and env.verify is None:
        env = env._replace(verify=lambda state: {"payoff": state.turn * jnp.ones(2)})
        read = lambda state, tokens: tokens
    else:
        return env
    return env._replace(step=lambda key, state, tokens, length: env.step(key, state, read(state, tokens), length))


def ranked(plan, **changes):
    return plan._replace(reward=(("payoff", 1.0),), **changes)


# environment, plan, parameters of the team, whether with memory, whether with an assignment by turn; the segments
# (first turn, period, repeats) that are scanned
CASES = {
    "split": ("split", flat(2), "separate", False, False, [(1, 1, 5)]),
    "split-shared": ("split", single(), "shared", False, False, [(0, 1, 6)]),
    "split-lora": ("split", flat(2), "lora", False, True, [(1, 1, 5)]),
    "split-stacked": ("split", flat(2), "stacked", False, False, [(1, 1, 5)]),
    "split-memory": ("split", flat(2), "shared", True, False, [(1, 1, 5)]),
    "ipd-crossed": ("ipd", ranked(handoff(2, "cross")), "separate", False, False, [(0, 1, 4)]),
    "ipd-stops": ("ipd", ranked(flat(3), stop_above=1.0), "shared", False, False, [(1, 1, 3)]),
    "ipd-two-branches": ("ipd", node_wise((2, 1)), "shared", False, False, [(1, 1, 3)]),
    "ipd-local": ("ipd", node_wise(2, "local"), "shared", False, False, [(0, 1, 4)]),
    "games": ("games", flat(2), "separate", False, True, [(1, 2, 4)]),
    "several-games": ("several games", single(), "shared", False, False, [(0, 2, 3)]),
    "maze": ("maze", flat(2), "separate", False, False, [(1, 1, 3)]),
    "chain": ("chain", handoff(2, best=False), "separate", False, False, [(0, 2, 2)]),
    "safety": ("safety", flat(2), "separate", True, False, [(1, 2, 3)]),
}
COMPUTED = (".steps.logprobs", ".nodes.retrieved.similarity", ".nodes.retrieved.query")
# Where the frontier differs from turn to turn, nothing is scanned.
UNROLLED = {
    "matrix": ("matrix", flat(3), "separate", False, False, []),
    "ipd-continued": ("ipd", node_wise(2), "shared", False, False, []),
    "ipd-product": ("ipd", product(2), "shared", False, False, []),
    "dispatch": ("dispatch", flat(2), "separate", True, False, []),
}


@functools.cache
def team_of(roles, max_new_tokens, how):
    """A team and its parameters. ``separate`` and ``stacked``: a model for each role; ``shared``: one for all roles;
    ``lora``: an adapter for each role. Every role has one opponent model, the model of the next role or ``other``.
    """
    policy = toys.policy()
    names = ["team" if how == "shared" else role for role in roles] + ["other"]
    base = "base" if how == "lora" else None
    models = tuple(Model(name, policy, toys.TOKENIZER, base) for name in dict.fromkeys(names))
    parts = tuple(Role(role, names[i], max_new_tokens, ("other",)) for i, role in enumerate(roles))
    team = Team(parts, models, batch_models=how == "stacked")
    own = {m.name: policy.init(jax.random.key(i)) for i, m in enumerate(models)}
    if base is None:
        return team, {"shared": {}, "agents": {name: {"params": p} for name, p in own.items()}}
    whole = own[models[0].name]
    adapters = {m.name: init_lora(jax.random.key(i), whole, 2) for i, m in enumerate(models)}
    moved = {name: {"lora": jax.tree.map(lambda x: x + 0.1, adapter)} for name, adapter in adapters.items()}
    return team, {"shared": {"base": whole}, "agents": moved}


def stores(team, config):
    """A memory of two entries for each role."""
    dim, out = 16, {}
    for i, role in enumerate(team.roles):
        store = memories.init(config, dim=dim, max_ids=5, max_bytes=8)
        keys = jax.random.normal(jax.random.key(i), (config.capacity, dim))
        out[role.name] = store.replace(
            key=keys / jnp.linalg.norm(keys, axis=1, keepdims=True),
            ids=store.ids + 70 + i,
            length=store.length + jnp.arange(config.capacity) + 1,
            used=store.used | (jnp.arange(config.capacity) < 2),
        )
    return out


def case(name):
    """What a case gives to `make_rollout`, and what it gives to the rollout."""
    env_name, plan, how, recalls, casts, _ = {**CASES, **UNROLLED}[name]
    module, config = ENVS[env_name]
    env = well_formed(module.make(config))
    team, params = team_of(env.roles, getattr(config, "max_new_tokens", getattr(config, "response", 2)), how)
    remembers = dataclasses.replace(RECALL, min_similarity=-1.0) if recalls else None
    memory = stores(team, remembers) if recalls else {}
    tasks = jax.tree.map(lambda x: jnp.asarray(x[:B]), module.make_tasks(config))
    assignment = np.random.default_rng(0).integers(0, 2, (B, env.max_turns, len(env.roles))) if casts else None
    given = (
        params,
        memory,
        tasks,
        jax.random.key(5),
        jnp.int32(3),
        None if assignment is None else jnp.array(assignment, jnp.int32),
    )
    return (team, env, plan, Sampling(), remembers), given


def one_by_one(plan, env, batch):
    """What `segments` returns where no turns are scanned."""
    return [array.Segment(turn, 1, 1) for turn in range(len(array.frontiers(plan, env, batch)))]


def columns(tree):
    """Every column of a tree by its name, as a numpy array."""
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree_util.tree_flatten_with_path(tree)[0]}


@pytest.mark.parametrize("name", CASES)
def test_scanned_turns_are_the_turns_played_one_by_one(name, monkeypatch):
    """Every column and every count to the bit; but what a model computes in floating point to the last places, which
    the compiler may round otherwise in a loop. And the episodes do not end before the scan.
    """
    made, given = case(name)
    scanned = columns(jax.device_get(jax.jit(array.make_rollout(*made))(*given)))
    monkeypatch.setattr(array, "segments", one_by_one)
    unrolled = columns(jax.device_get(jax.jit(array.make_rollout(*made))(*given)))
    assert list(scanned) == list(unrolled)
    for column, values in scanned.items():
        assert values.dtype == unrolled[column].dtype, column
        if column in COMPUTED:
            np.testing.assert_allclose(values, unrolled[column], rtol=1e-6, atol=1e-6, err_msg=column)
        else:
            np.testing.assert_array_equal(values, unrolled[column], err_msg=column)
    turn, played = scanned[".transitions.turn"], scanned[".transitions.played"]
    assert (np.diff(turn) >= 0).all() and turn[played].max() > CASES[name][-1][0][0]
    assert scanned[".steps.logprobs"].any() and len(np.unique(scanned[".steps.tokens"])) > 3


@pytest.mark.parametrize("name", [*CASES, *UNROLLED])
def test_what_is_scanned(name):
    """The segments cover every turn once, in order."""
    (_, env, plan, *_), _ = case(name)
    found = array.segments(plan, env, B)
    assert [tuple(s) for s in found if s.repeats > 1] == {**CASES, **UNROLLED}[name][-1]
    turns = [s.first + i for s in found for i in range(s.period * s.repeats)]
    assert turns == list(range(env.max_turns))


def test_turns_that_fill_no_period_are_played_one_by_one():
    """Actors 0 | 1 2 1 2 1 2 | 1 | 0."""
    env = toys.relay(9)._replace(actors=tuple((a,) for a in (0, 1, 2, 1, 2, 1, 2, 1, 0)))
    assert array.segments(single(), env, 1) == [
        array.Segment(0, 1, 1), array.Segment(1, 2, 3), array.Segment(7, 1, 1), array.Segment(8, 1, 1)
    ]  # fmt: skip


def test_a_plan_that_plays_nothing_on_ends_the_tables():
    plan = flat(2)._replace(name="first turn", follow=lambda branch, action: None)
    rollout = jax.jit(array.make_rollout(toys.team(), toys.relay(4), plan, Sampling()))
    tree = rollout(toys.params(toys.team()), {}, toys.relay_tasks(B), jax.random.key(0), 0)
    assert len(tree.nodes.role) == B and len(tree.steps.node) == 2 * B and int(tree.counts.launches) == 1


@pytest.mark.parametrize("name", ["split", "ipd-two-branches", "games", "safety"])
def test_blocks_are_the_rows_of_scanned_turns(name):
    """Blocks share no row, and together they have every row. ``rows`` of some seats are the nodes of these seats."""
    (team, env, plan, sampling, memory), given = case(name)
    tree = jax.eval_shape(array.make_rollout(team, env, plan, sampling, memory), *given)
    blocks = array.layout(plan, env, B)
    nodes, steps = (np.concatenate([b.rows()[i].reshape(-1) for b in blocks]) for i in range(2))
    assert sorted(nodes.tolist()) == list(range(len(tree.nodes.role)))
    assert sorted(steps.tolist()) == list(range(len(tree.steps.node)))
    walk, row = array.frontiers(plan, env, B), 0
    of_row = {int(n): b for b in blocks for n in b.rows()[0]}
    for turn, frontier in enumerate(walk):
        for branch, states in frontier.items():
            for i in range(states * env.seats):
                block = of_row[row + i]
                assert turn in block.turns and block.branch.trunk == branch.trunk
                assert env.actors[block.branch.turn] == env.actors[turn]
            row += states * env.seats
    for block in blocks:
        for seat in range(env.seats):
            mine, theirs = block.rows([seat])
            assert (mine % env.seats == seat).all() and len(mine) == block.nodes // env.seats
            np.testing.assert_array_equal(theirs, block.rows()[1][np.isin(block.rows()[0], mine)])


def lowered(name, turns):
    """The text of a rollout of ``turns`` turns, before the compiler."""
    if name == "games":
        module, config = games, games.Config(games=("hanabi",), turns=turns)
    else:
        module, config = dilemma, dilemma.Config(rounds=turns)
    env = module.make(config)
    team, params = team_of(env.roles, 1, "separate")
    tasks = jax.tree.map(lambda x: jnp.asarray(x[:B]), module.make_tasks(config))
    rollout = jax.jit(array.make_rollout(team, env, flat(2), Sampling()))
    assert env.max_turns == turns
    return rollout.lower(params, {}, tasks, jax.random.key(0), jnp.int32(0)).as_text()


@pytest.mark.parametrize("name", ["dilemma", "games"])
def test_the_program_does_not_grow_with_the_turns(name):
    short, long = (len(lowered(name, turns).splitlines()) for turns in (8, 128))
    assert abs(long - short) <= 0.05 * short


def test_a_whole_run_does_not_grow_with_turns_or_tasks():
    """Rollout, credit and update of a compiled run, with as many micro-batches as the update then has."""

    def lines(rounds, batch):
        cfg = magrpo.Config(
            group=2,
            steps=2,
            batch=batch,
            micro_tokens=1024,
            team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=1, remat=False),
            env=EnvConfig("dilemma", {"tasks": 32, "rounds": rounds}),
            sft=SFT(steps=2, batch=4, samples=8),
            reward={"payoff": 1.0},
        )
        return len(jax.jit(make_program(magrpo.make(cfg)).run).lower(jnp.int32(0)).as_text().splitlines())

    short = lines(8, 4)
    for rounds, batch in ((128, 4), (8, 32)):
        assert abs(lines(rounds, batch) - short) <= 0.05 * short


def test_an_episode_of_a_hundred_turns():
    """A hundred turns of the relay: prompts show what was really sampled at the turn before."""
    rollout = jax.jit(array.make_rollout(toys.team(), toys.relay(100), flat(2), Sampling()))
    tree = jax.device_get(rollout(toys.params(toys.team()), {}, toys.relay_tasks(B), jax.random.key(0), 0))
    nodes, steps, moves = tree.nodes, tree.steps, tree.transitions
    assert tree.counts.env_calls == 100 * 2 * B == moves.played.sum() and nodes.turn.max() == 99
    later = np.flatnonzero(nodes.turn > 0)
    before = steps.tokens[moves.steps[nodes.parent[later], 0], 0]
    np.testing.assert_array_equal(nodes.tokens[later, 0], 65 + before % 2)
    np.testing.assert_array_equal(moves.turn[nodes.parent[later]], nodes.turn[later] - 1)
    np.testing.assert_array_equal(moves.done, moves.turn == 99)


def test_a_second_rollout_of_the_same_shapes_is_not_traced():
    made, (params, memory, tasks, key, version, assignment) = case("split")
    rollout = jax.jit(chex.assert_max_traces(array.make_rollout(*made), n=1))
    trees = [rollout(params, memory, tasks, jax.random.fold_in(key, i), version + i, assignment) for i in range(2)]
    assert (trees[0].steps.tokens != trees[1].steps.tokens).any()


def test_a_compiled_run_learns_the_same_from_scanned_turns(monkeypatch):
    """One batch for all turns of a scan, or one for each turn: the parameters are equal to rounding."""
    cfg = magrpo.Config(
        group=2,
        steps=2,
        batch=4,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=1, remat=False),
        env=EnvConfig("dilemma", {"tasks": 4, "rounds": 4}),
        optimizer=Optimizer(name="sgd", learning_rate=0.3, max_grad_norm=0.0),  # Adam turns rounding into steps
        sft=SFT(steps=10, batch=16, samples=32, optimizer=Optimizer(learning_rate=3e-2)),
        reward={"payoff": 1.0},
    )
    state, seen = jax.jit(make_program(magrpo.make(cfg)).run)(jnp.int32(0))
    monkeypatch.setattr(array, "segments", one_by_one)
    twin, other = jax.jit(make_program(magrpo.make(cfg)).run)(jnp.int32(0))
    for a, b in zip(jax.tree.leaves((state.params, seen)), jax.tree.leaves((twin.params, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert (seen["grad_norm/team"] > 0).all()


# --- pieces of a turn ----------------------------------------------------------------------------------------------


def reached(values, valid):
    """Four joint actions of one state that pay ``values``; those that are not ``valid`` are without a finite reward."""
    good = jnp.array([valid])
    stepped = array_turn.Stepped(None, None, {"pay": jnp.array([values])[..., None]}, ~good & False, good | True, good)
    number = jnp.arange(4)[None]
    return stepped, array_turn.Reached(10 * number, number, 100 + number, number == 9)


def test_ranks_and_stops():
    plan = flat(4)._replace(reward=(("pay", 1.0),))
    stepped, before = reached([1.0, 3.0, 0.0, 2.0], [True, True, False, True])
    assert array_turn.rank_or_stop(plan, stepped, before) is before
    best = array_turn.rank_or_stop(plan._replace(rank=True), stepped, before)
    assert best.key.tolist() == [[1, 3, 0, 2]] and best.state.tolist() == [[10, 30, 0, 20]]
    assert best.parent.tolist() == [[101, 103, 100, 102]] and not best.done.any()
    for above, stops in ((1.9, True), (2.0, False)):  # the mean of the three that are valid is 2
        ended = array_turn.rank_or_stop(plan._replace(stop_above=above), stepped, before)
        assert ended.done.tolist() == [[stops] * 4] and ended.key.tolist() == before.key.tolist()


def test_models_that_may_act_and_their_seats():
    """A role's opponent models may act only where there is an assignment."""
    team, _ = team_of(("first", "second"), 2, "separate")
    spec = lambda env: array_turn.RolloutSpec(team, env, flat(2), Sampling(), None)
    both, turns = matrix.make(matrix.Config()), toys.relay(2)
    assert array_turn.acting_models(spec(both), 0, False) == {0: [0], 1: [1]}
    assert array_turn.acting_models(spec(both), 0, True) == {0: [0], 1: [1], 2: [0, 1]}
    assert array_turn.acting_models(spec(turns), 1, False) == {1: [0]}


def test_keys_of_samples_are_folded_along_the_path():
    states = jax.random.split(jax.random.key(0), 2)
    keys = array_turn.sample_keys(states, jnp.array([0, 1, 1, 0]), 3)
    path = (PLAY, 1, 2)  # the second state, its first seat, whose role is 1, the last sample
    want = functools.reduce(jax.random.fold_in, path, states[1])
    assert keys.shape == (4, 3) and (jax.random.key_data(keys[2, 2]) == jax.random.key_data(want)).all()
