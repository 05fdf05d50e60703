"""Devices that sample and do not train: the run is that of one device, and rollouts touch no training device."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmarl_llm.distributed import meshes
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.text_task import TextTask
from jaxmarl_llm.recipes import joyagents_r1, magrpo
from jaxmarl_llm.rollout import env_runner
from jaxmarl_llm.telemetry.logger import Logger
from tests.distributed import test_sharded_runs as runs

STALE = {"staleness": 1, "loss": {"tis_clip": 2.0}}
# Training on four devices and on one; sampling on the others, cut along tensor or not.
CUTS = {
    "4 train, 4 sample": {"data": 2, "fsdp": 2, "rollout_devices": 4, "rollout_tensor": 2},
    "1 trains, 1 samples": {"data": 1, "rollout_devices": 1},
}
CASES = {"array": magrpo, "array, memory": joyagents_r1, "text, memory": joyagents_r1, "text, lanes": joyagents_r1}


def make(case, **changes):
    """The recipe of a case, one step behind."""
    recipe = CASES[case]
    if case.startswith("array"):
        return recipe.make(runs.config(recipe, None, **STALE, **changes))
    cfg = runs.config(recipe, None, **STALE, **changes)
    lanes = 8 if case == "text, lanes" else 0
    env = EnvConfig("text", workers=0, max_prompt=64, eval_tasks=2, lanes=lanes)
    remembers = dataclasses.replace(cfg.memory, min_similarity=-1.0)
    cfg = dataclasses.replace(cfg, env=env, reward={"reward": 1.0}, memory_reward={"reward": 1.0}, memory=remembers)
    reward = lambda task, texts: {"reward": float(len(texts["a"]) % 2)}
    return recipe.make(cfg, env=TextTask([{"n": n} for n in range(40)], {"a": "{n}"}, reward))


def played(recipe, folder, count=2):
    """The tokens of each step, the last state, and the devices that its parameters are on."""
    tokens, state = [], recipe.init(0)
    recipe.recorder = lambda *of: tokens.append(of[-1].tree.steps.tokens)
    with Logger(folder, resume_step=None, total_steps=count, primary=False) as logger:
        for _ in range(count):
            state, _ = recipe.step(state, logger)
    where = {d for leaf in jax.tree.leaves(state.params["agents"]) for d in leaf.devices()}
    return tokens, jax.tree.map(lambda x: np.asarray(x, float), (state.params["agents"], state.memory)), where


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Case -> what its run on one device, one step behind, played and learned."""
    found = {}

    def of(case):
        if case not in found:
            found[case] = played(make(case), tmp_path_factory.mktemp("alone"))
        return found[case]

    return of


@pytest.mark.parametrize(
    "case, cut",
    [("array", "4 train, 4 sample"), ("array, memory", "1 trains, 1 samples"), ("text, memory", "4 train, 4 sample")]
    + [pytest.param("text, lanes", "4 train, 4 sample", marks=pytest.mark.slow)],
)
def test_a_run_whose_rollouts_have_devices_of_their_own_is_that_of_one_device(case, cut, alone, tmp_path, monkeypatch):
    """Samples equal, parameters to rounding. Rollouts are on the last devices, and parameters on none of them."""
    expected, wanted, _ = alone("text, memory" if case == "text, lanes" else case)
    made = make(case, mesh=CUTS[cut])
    own, others = set(jax.devices()[-CUTS[cut]["rollout_devices"] :]), set()
    moved = env_runner.to_rollout

    def seen(mesh, params):
        out = moved(mesh, params)
        others.update(d for leaf in jax.tree.leaves(out) for d in leaf.devices())
        return out

    monkeypatch.setattr(env_runner, "to_rollout", seen)
    assert made.rollouts is not None  # they are played ahead
    tokens, learned, where = played(made, tmp_path)
    assert others == own and not where & own
    for a, b in zip(tokens, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    for got, right, most in zip(learned, wanted, (1e-4, 1e-5), strict=True):
        jax.tree.map(lambda a, b, most=most: np.testing.assert_allclose(a, b, rtol=0, atol=most), got, right)


def test_evaluations_are_played_there_too(tmp_path):
    recipe = magrpo.make(runs.config(magrpo, None, mesh=CUTS["4 train, 4 sample"]))
    one = magrpo.make(runs.config(magrpo, None))
    assert recipe.rollouts is None  # without staleness a rollout waits for the update
    assert recipe.evaluate(recipe.init(0)) == pytest.approx(one.evaluate(one.init(0)), abs=1e-6)


def test_the_last_devices_sample():
    cfg = meshes.MeshConfig(data=-1, rollout_devices=3)
    train, sample = meshes.parted(cfg)
    assert [d.id for d in train] == [0, 1, 2, 3, 4] and [d.id for d in sample] == [5, 6, 7]
    assert meshes.parted(meshes.MeshConfig())[1] == []
