"""Rollouts whose states do not wait for each other are those of `host.play`: table by table, also with slow calls."""

import importlib
import random
import time

import jax
import numpy as np
import pytest

from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.engine import EngineConfig
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.messages import HostEnv
from jaxmarl_llm.rollout import choices, host, scheduler
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings
from jaxmarl_llm.rollout.make_runner import make_env_runner
from jaxmarl_llm.rollout.plans import Branch, Plan, flat, grow
from tests import toys
from tests.rollout.test_launches import CASES, TASKS, chat, team_of

pytestmark = pytest.mark.usefixtures("numpy_tables")


def both(
    plan, how, *, turns=2, limits=(5, 5), sampling=Sampling(), ends=False, recall=None, env=None, workers=0, lanes
):
    """The rollout of `host.play` and that of the scheduler."""
    team, params = team_of(how, limits)
    settings = HostSettings(plan, sampling, max_prompt=256, recall=recall)
    make = (lambda: chat(turns, ends)) if env is None else env
    with EnvPool(make, workers=workers) as pool:
        asked = team, params, pool, list(range(TASKS)), jax.random.key(1), settings
        return host.play(*asked), scheduler.play(*asked, lanes)


def check_equal(one, other):
    for table in ("nodes", "steps", "transitions"):
        mine, theirs = vars(getattr(one.tree, table)), vars(getattr(other.tree, table))
        for name in mine.keys() - {"logprobs"}:
            jax.tree.map(np.testing.assert_array_equal, mine[name], theirs[name])
    np.testing.assert_allclose(one.tree.steps.logprobs, other.tree.steps.logprobs, atol=1e-5)
    assert one.records == other.records and one.failures == other.failures
    assert (one.cut_tokens, one.cut_prompts, one.unplayed) == (other.cut_tokens, other.cut_prompts, other.unplayed)
    assert int(one.tree.counts.env_calls) == int(other.tree.counts.env_calls)


# With 4 lanes requests wait for a slot, with 64 none does.
EVERY = [(case, 4) for case in CASES] + [("node-wise", 64), ("flat", 64)]


@pytest.mark.parametrize(("case", "lanes"), EVERY)
def test_tables_are_those_of_turns(case, lanes):
    plan, how, options = CASES[case]
    slots = team_of(how, (1, 1))[0].models[0].policy.decode_slots
    assert (slots is None) == (how == "invariant")  # which is sampled by launches of what waits
    one, other = both(plan, how, **options, lanes=lanes)
    check_equal(one, other)
    read = other.tree.nodes.length[other.tree.nodes.valid].sum()
    assert 0 < int(other.tree.counts.prompt_tokens) < read  # prefixes are reused


def test_a_plan_that_grows_chooses_as_with_turns():
    one, other = both(grow(4, choices.uniform(), (("accuracy", 1.0),)), "shared", turns=4, lanes=4)
    check_equal(one, other)
    parents = one.tree.transitions.parent[one.tree.transitions.played]
    assert (parents >= 0).any() and (parents < 0).sum() > TASKS, "all expansions go on from one state"


def judged():
    """The verifier pays by what was said last, the environment by its length."""
    verify = lambda state: {"a": {"accuracy": float(sum(map(sum, state[1][-1])) % 7)}}
    return chat(3)._replace(verify=verify)


def test_a_plan_that_follows_the_best_by_the_verifier_follows_it():
    best = lambda b, j: Branch(b.turn + 1, True) if j == 0 else None
    plan = Plan("best", lambda b: 4, best, local=True, rank=True, reward=(("accuracy", 1.0),))
    check_equal(*both(plan, "shared", env=judged, turns=3, lanes=8))


def slow_and_broken():
    """Steps sleep, by their seed; some raise, some pay nothing that is known, and some states cannot be observed."""
    plain = chat(3)

    def step(seed, state, actions):
        rng = random.Random(seed)
        time.sleep(rng.choice((0.0, 0.0, 0.05)))
        what = rng.random()
        if what < 0.15:
            raise ValueError("no step")
        after, rewards, done = plain.step(seed, state, actions)
        return after, ({"a": {"unknown": 1.0}} if what < 0.3 else rewards), done

    def observe(state):
        if len(state[1]) == 2 and sum(map(sum, state[1][-1])) % 3 == 0:
            raise KeyError("no view")
        return plain.observe(state)

    def reset(seed, task):
        if task == 1:
            raise RuntimeError("no task")
        return plain.reset(seed, task)

    return HostEnv("broken", plain.roles, 3, plain.components, reset, observe, step, plain.verify)


@pytest.mark.parametrize("workers", [0, 2])
def test_failures_and_slow_calls_are_those_of_turns(workers):
    one, other = both(flat(4), "shared", env=slow_and_broken, workers=workers, lanes=8)
    check_equal(one, other)
    told = {failure.call for failure in one.failures}
    assert told == {"reset", "step", "observe"} and one.unplayed == 1


class Watched(EnvPool):
    """A pool that writes down the order in which calls begin."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.begun = []

    def submit(self, method, args):
        self.begun.append((args[1][0], len(args[1][1])))  # task, turn
        return super().submit(method, args)


def one_is_slow():
    """The first step of task 0 takes a second."""
    plain = chat(3)

    def step(seed, state, actions):
        time.sleep(1.0 if state[0] == 0 and not state[1] else 0.0)
        return plain.step(seed, state, actions)

    return HostEnv("slow", plain.roles, 3, plain.components, plain.reset, plain.observe, step, plain.verify)


def test_a_state_does_not_wait_for_others():
    """Task 1 is over before the first step of task 0 is, although they began together."""
    team, params = team_of("shared", (1, 1))  # completions of one token: both tasks are sampled at once
    settings = HostSettings(flat(1), Sampling(), max_prompt=256)
    with Watched(one_is_slow, workers=2) as pool:
        asked = team, params, pool, [0, 1], jax.random.key(1), settings
        scheduler.play(*asked, 8)  # compiles
        pool.begun.clear()
        scheduler.play(*asked, 8)
        order = pool.begun
    assert order.index((1, 2)) < order.index((0, 1)), order


def piecemeal():
    """Steps that are over one after the other."""
    plain = chat(3)

    def step(seed, state, actions):
        time.sleep(0.01)
        return plain.step(seed, state, actions)

    return plain._replace(step=step)


def test_steps_that_end_soon_are_waited_for(monkeypatch):
    """The four steps of a state end one after the other. None is a state that goes on, but the next one ends soon."""
    monkeypatch.setattr(scheduler, "PATIENCE", 1e4)
    one, other = both(flat(4), "shared", turns=3, limits=(1, 1), env=piecemeal, workers=1, lanes=64)
    check_equal(one, other)
    assert int(other.tree.counts.launches) == 3, "a launch for each turn"


def test_several_processes_are_refused_in_one_line(monkeypatch):
    monkeypatch.setattr(scheduler.processes, "count", lambda: 2)
    with pytest.raises(ConfigError, match=r"config\.env\.lanes: expected 0 with several processes"):
        scheduler.check_alone("config.env.lanes")


def test_the_setting_of_an_environment_reaches_its_rollouts():
    """Rollouts of a configured environment are equal; the counts of launches tell which way they were played."""
    trees = []
    for lanes in (0, 1):
        runner = make_env_runner(EnvConfig("chain_text", {"tasks": 8}, workers=0, lanes=lanes), seed=0)
        team = toys.team(runner.env.roles, 4, shared=True)
        played = runner.play(team, toys.params(team), {}, [0, 1], flat(3), jax.random.key(2), Sampling(), None)
        trees.append(played.tree)
    one, other = trees
    np.testing.assert_array_equal(one.steps.tokens, other.steps.tokens)
    np.testing.assert_array_equal(one.transitions.parent, other.transitions.parent)
    assert int(one.counts.launches) == runner.env.max_turns < int(other.counts.launches)


def test_an_engine_has_a_loop_of_its_own():
    grpo = importlib.import_module("jaxmarl_llm.recipes.grpo")
    engine = EngineConfig({"team": "http://127.0.0.1:1"}, weights="weights")
    cfg = grpo.Config(env=EnvConfig("chain_text", lanes=4), engine=engine, steps=1, reward={"accuracy": 1.0})
    with pytest.raises(ConfigError, match=r"config\.env\.lanes: expected 0 with config\.engine\.urls, got 4"):
        cfg.check("config")
