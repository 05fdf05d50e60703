"""The best choices of `defer`: figures by hand, and worth against the mean return of played choices."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import defer_bounds
from jaxmarl_llm.envs.defer import array as defer
from jaxmarl_llm.envs.defer.array import CHOICES, Config

REWARD = {"accuracy": 1.0, "create": -0.1, "defer": -0.3}


def test_the_best_choices():
    """.95 .95 .8 .7 by type; to defer always is worth 1 - .3; to create earns .8 where to defer earns .7."""
    found = defer_bounds.best(Config(), REWARD)
    assert found.of_type == ("1", "2", "c", "d") and found.fixed == "d"
    assert [found.worth, found.fixed_worth, found.margin] == pytest.approx([0.85, 0.7, 0.1])


def test_other_costs_and_shares_have_other_best_choices():
    free = defer_bounds.best(Config(), {"accuracy": 1.0})
    assert free.of_type == ("d",) * 4 and free.worth == pytest.approx(1.0)
    first = defer_bounds.best(Config(), REWARD, (1.0, 0.0, 0.0, 0.0))
    assert first.fixed == "1" and first.worth == first.fixed_worth == pytest.approx(0.95)
    tied = defer_bounds.best(Config(creator=(0.6, 0.6, 0.8, 0.2)), REWARD)
    assert tied.margin == pytest.approx(0.0)


def test_worth_is_the_mean_return_of_played_choices():
    config = dataclasses.replace(Config(), expert=(0.9, 0.8, 1.0, 0.5))
    env, n = defer.make(config), 6000
    tasks = {k: jnp.asarray(v) for k, v in defer.make_tasks(config, n=n).items()}

    def play(key, task, token):
        _, paid, _ = env.step(key, env.reset(key, task), token[None, None], jnp.ones(1, jnp.int32))
        return sum(weight * paid[c][0] for c, weight in REWARD.items())

    every = jax.jit(jax.vmap(play, in_axes=(0, 0, None)))
    of, keys = np.asarray(tasks["type"]), jax.random.split(jax.random.key(0), n)
    for k, choice in enumerate(CHOICES):
        paid = np.asarray(every(keys, tasks, jnp.int32(ord(choice))))
        mean = [paid[of == t].mean() for t in range(4)]
        np.testing.assert_allclose(mean, defer_bounds.worth(config, REWARD)[:, k], atol=0.05)


def test_the_command(capsys):
    defer_bounds.main()
    assert capsys.readouterr().out.splitlines() == [
        "best fixed choice: d, 0.7000",
        "by type + - * /: 1 2 c d, 0.8500",
        "to be won: 0.1500; smallest margin 0.1000",
        "creator of stage 0: 1 2 c d, 0.8750; deferral 0.25",
        "creator always right: 1 2 c c, 0.9250; deferral 0.00",
    ]
