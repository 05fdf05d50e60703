"""Stale rollouts are those of an earlier state. A rollout that a thread plays ahead changes nothing."""

import dataclasses
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.agents.snapshots import Past
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.text_task import TextTask
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import grpo, malt
from jaxmarl_llm.rollout.keys import TASKS, stream
from jaxmarl_llm.runs import phases
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.keys import is_documented
from jaxmarl_llm.training.config import SFT
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.training.train_step import policy_update
from tests.training.relay import RUN, SMALL, make, steps

FAST = Optimizer(name="sgd", learning_rate=2.0, max_grad_norm=0.0)
MEMORY = MemoryConfig(capacity=8, retrieve=1, warmup=1, min_similarity=-1.0)
PARTS = {"plain": {}, "memory": {"memory": MEMORY, "memory_reward": {"accuracy": 1.0}}}


@pytest.mark.parametrize("kind, staleness", [("plain", 0), ("plain", 1), ("plain", 3), ("memory", 1), ("memory", 2)])
def test_a_step_plays_with_the_parameters_and_memories_of_an_earlier_one(kind, staleness, tmp_path):
    """The tokens of step i are those that the test's own copies of step max(i - staleness, 0) say."""
    recipe = make(PARTS[kind], staleness=staleness, optimizer=FAST, steps=5)
    cfg, step, state = recipe.cfg, recipe.phases[-1].step, recipe.init(0)
    kept, differ = [], 0
    for i in range(5):
        kept.append(jax.tree.map(np.array, (state.params["agents"], state.memory)))
        state, (result,), (seen,) = steps(recipe, tmp_path, 1, state)
        key = jax.random.fold_in(state.key, i)
        order = shuffled(stream(cfg.seed, TASKS), recipe.env_runner.size, i * cfg.batch, cfg.batch)
        tasks = np.asarray(order).tolist()

        def said(at, tasks=tasks, key=key):
            agents, memory = kept[at]
            params = {"shared": {}, "agents": agents}
            own = step.players, params, memory, tasks, step.plan, key, cfg.sampling, step.algorithm.memory
            return step.env_runner.play(*own).tree

        sampler = max(i - staleness, 0)
        tree = said(sampler)
        np.testing.assert_array_equal(result.tree.steps.tokens, tree.steps.tokens)
        np.testing.assert_array_equal(result.tree.nodes.tokens, tree.nodes.tokens)
        assert set(result.tree.steps.version.tolist()) == {sampler}
        assert seen.get("staleness", 0) == i - sampler
        differ += i > sampler and not np.array_equal(said(i).steps.logprobs, tree.steps.logprobs)
    assert differ == (4 if staleness else 0)  # what is compared can differ: each update changed something
    assert kind == "plain" or result.tree.nodes.retrieved.slots.max() >= 0  # entries were read
    assert ("stale" in state.params) == ("staleness" in seen) == bool(staleness) and is_documented("staleness")


def test_a_phase_begins_with_the_parameters_that_the_phase_before_it_left(tmp_path):
    """Not with those of initialisation: the first step of RL samples from what stage 0 taught."""
    cfg = make(staleness=2, optimizer=FAST).cfg
    taught = SFT(steps=2, batch=4, optimizer=FAST, samples=16)
    env = EnvConfig("matrix", {"rounds": 1}, eval_tasks=4)
    recipe = grpo.make(dataclasses.replace(cfg, sft=taught, env=env, reward={"payoff": 1.0}))
    state, _, _ = steps(recipe, tmp_path, 2)
    own = jax.tree.map(np.array, state.params["agents"])
    state, (result,), _ = steps(recipe, tmp_path, 1, state)
    assert result.tree.steps.version.tolist() == [2] * len(result.tree.steps.version)
    for age in ("1", "2"):
        assert digests(state.params["stale"][age]) == digests(own)


def ended(recipe, folder, count=4):
    """The digests of the state after some steps, and the tokens of each."""
    state, results, metrics = steps(recipe, folder, count)
    return digests(state), [result.tree.steps.tokens for result in results], metrics


def test_overlap_changes_no_bit(tmp_path):
    ahead, alone = (make(staleness=2, optimizer=FAST, loss=Loss(tis_clip=2.0)) for _ in range(2))
    assert ahead.rollouts is not None
    begun, begin = [], ahead.rollouts.begin
    ahead.rollouts.begin = lambda inputs, play: (begun.append(inputs[0]), begin(inputs, play))
    alone.rollouts = None
    (one, tokens, seen), (other, others, _) = ended(ahead, tmp_path), ended(alone, tmp_path)
    assert one == other and all(np.array_equal(a, b) for a, b in zip(tokens, others, strict=True))
    assert begun == [1, 2, 3]  # of all steps but the first; nothing is begun after the last one
    assert seen[-1]["agent/a/importance_weight"] != pytest.approx(1, abs=1e-4)
    assert seen[0]["agent/a/importance_weight"] == pytest.approx(1, abs=1e-4)


def test_a_run_that_was_stopped_goes_on_to_the_bit(tmp_path):
    """The rollout that was in progress is played again, with parameters of the checkpoint."""
    whole = fit((recipe := make(staleness=2, optimizer=FAST)).cfg, recipe, tmp_path / "whole")
    short = make(staleness=2, optimizer=FAST, steps=3)
    fit(short.cfg, short, tmp_path / "parts")
    recipe = make(staleness=2, optimizer=FAST)
    parts = fit(recipe.cfg, recipe, tmp_path / "parts", allow_config_change=["steps"])
    assert digests(parts) == digests(whole)


def test_another_state_is_not_served_what_was_begun(tmp_path):
    recipe = make(staleness=1, optimizer=FAST)
    first, _, _ = steps(recipe, tmp_path)
    copied = jax.tree.map(jnp.array, first)
    (number, _), _ = recipe.rollouts._begun
    assert number == 1
    doubled = jax.tree.map(lambda x: 2 * x, first.params["stale"])
    other = copied.replace(params={**copied.params, "stale": doubled})
    _, (result,), _ = steps(recipe, tmp_path, 1, other)
    again = make(staleness=1, optimizer=FAST)
    again.rollouts = None
    other = copied.replace(params={**jax.tree.map(jnp.array, first.params), "stale": doubled})
    _, (wanted,), _ = steps(again, tmp_path, 1, other)
    np.testing.assert_array_equal(result.tree.steps.logprobs, wanted.tree.steps.logprobs)


class Meeting:
    """A reward and an update that wait for each other. ``played``: rewards so far, four a step."""

    def __init__(self):
        self.played, self.updating = [], threading.Event()
        self.begun, self.waited = threading.Event(), []

    def reward(self, task, texts):
        if len(self.played) == 4:  # the first one of the second step
            self.begun.set()
            self.waited.append(self.updating.wait(20))
        self.played.append(task["n"])
        if len(self.played) > 8:
            raise ValueError("the third step has no reward")
        return {"reward": float(len(texts["a"]) % 2)}

    def update(self, step, driver, state, batches):
        self.updating.set()
        self.waited.append(self.begun.wait(20))
        return policy_update(step, driver, state, batches)


def text_recipe(meeting, **changes):
    base = {"steps": 3, "batch": 2, "group": 2, "team": make().cfg.team, "sft": SFT(steps=0), "run": RUN}
    cfg = grpo.Config(**base, env=EnvConfig("text", workers=0), reward={"reward": 1.0}, staleness=1, **changes)
    algorithm = dataclasses.replace(grpo.algorithm(cfg), update=meeting.update)
    env = TextTask([{"n": n} for n in range(12)], {"a": "{n}"}, meeting.reward)
    recipe = phases.make_recipe(cfg, grpo.make_plan(cfg), algorithm, env=env)
    meeting.played.clear()  # the environment has tried its reward
    return recipe


def test_the_next_rollout_is_played_while_a_step_updates(tmp_path):
    """And its watcher sees it at its own step, failures included."""
    meeting = Meeting()
    recipe, seen = text_recipe(meeting), []
    recipe.env_runner.watcher = lambda played, held_out: seen.append((threading.current_thread(), len(played.failures)))
    state, _, _ = steps(recipe, tmp_path)
    assert meeting.waited and all(meeting.waited), "the update did not meet the next rollout"
    assert [failures for _, failures in seen] == [0]
    recipe.rollouts.wait()
    assert len(meeting.played) == 8 and len(seen) == 1
    steps(recipe, tmp_path, 2, state)
    assert [failures for _, failures in seen] == [0, 0, 4]
    assert {thread for thread, _ in seen} == {threading.main_thread()}


def test_an_evaluation_waits_for_the_rollout_in_progress(tmp_path):
    recipe = make(staleness=1)
    state, _, _ = steps(recipe, tmp_path)
    free = threading.Event()
    recipe.rollouts.begin((9, ()), lambda: free.wait(20))
    evaluated = []
    run = recipe.evaluator
    recipe.evaluator = lambda state: (evaluated.append(free.is_set()), run(state))[1]
    threading.Timer(0.2, free.set).start()
    recipe.evaluate(state)
    assert evaluated == [True]


def test_an_error_of_the_thread_reaches_the_step_that_takes_the_rollout(tmp_path):
    recipe = make(staleness=1)
    inputs = (3, (jnp.arange(2),))

    def fail():
        raise ConfigError("the environment is away")

    recipe.rollouts.begin(inputs, fail)
    with pytest.raises(ConfigError, match="the environment is away"):
        recipe.rollouts.take(inputs, lambda: "played anew")
    assert recipe.rollouts.take(inputs, lambda: "played anew") == "played anew"
    recipe.rollouts.begin(inputs, lambda: threading.current_thread().daemon)
    assert recipe.rollouts.take(inputs, lambda: None) is False  # at the end of the interpreter it is not cut off


def test_the_policy_moves_on_without_an_alarm_for_the_sampler(tmp_path):
    """The difference of log-probs has the policy's own change in it, so ``max_logprob_diff`` does not end the run."""
    strict = dataclasses.replace(RUN, max_logprob_diff=1e-3)
    recipe = make(staleness=1, optimizer=FAST, run=strict, loss=Loss(tis_clip=2.0))
    fit(recipe.cfg, recipe, tmp_path / "run")
    assert "logprob_diff" in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"staleness": -1}, "config.staleness: expected >= 0"),
        ({"staleness": 17}, "config.staleness: expected <= 16"),
        ({"staleness": 1, "past": Past(size=2)}, "config.past.size: expected 0 with config.staleness"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(make().cfg, **changes).check("config")


def test_a_recipe_with_phases_of_its_own_has_no_stale_rollouts():
    cfg = dataclasses.replace(malt.Config(), team=dataclasses.replace(make().cfg.team, backbone=SMALL), staleness=1)
    with pytest.raises(ConfigError, match=r"config\.staleness: expected 0: recipe malt"):
        malt.make(cfg)
