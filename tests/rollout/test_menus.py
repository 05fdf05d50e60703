"""Menus: the siblings of a node are given, and the policy scores them. Experts answer in place of models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.credit.menus import MenuRelative
from jaxmarl_llm.credit.rules import PerCompletion, ReturnToGo, Sizes, chain
from jaxmarl_llm.envs.array_env import EOS
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.rollout.array import make_rollout, segments
from jaxmarl_llm.rollout.plans import flat, menu
from jaxmarl_llm.types import EXPERT, POLICY
from jaxmarl_llm.types import MENU as FROM_MENU
from tests import toys

B, K = 3, 4
CHOICES = ("1", "2", "cc", "ddd")
MENU = menu(CHOICES, turn=1)
ANSWER = [72, EOS]


def with_expert(turn):
    """The relay, in which an expert answers at ``turn`` in place of role a. To task 1 it answers nothing."""
    env = toys.relay(K)

    def observe(state):
        seen = env.observe(state)
        length = jnp.where(state.start == 66, 0, len(ANSWER))
        own = jnp.where(state.turn == turn, length, -1)
        return seen.replace(expert=jnp.array([ANSWER], jnp.int32), expert_length=own[None])

    return env._replace(observe=observe)


ENV = with_expert(2)


@pytest.fixture(scope="module")
def played():
    team = toys.team()
    rollout = jax.jit(make_rollout(team, ENV, MENU, Sampling(0.8)))
    return jax.device_get(rollout(toys.params(team), {}, toys.relay_tasks(B), jax.random.key(0), 7))


def rows(tree, turn):
    return np.flatnonzero(tree.nodes.turn[tree.steps.node] == turn)


def test_the_siblings_of_a_node_are_the_menu(played):
    steps, at = played.steps, rows(played, 1)
    assert (steps.source[at] == FROM_MENU).all() and steps.valid[at].all() and len(at) == B * len(CHOICES)
    for row, choice in zip(at, CHOICES * B):
        ids = [*choice.encode(), EOS][:3]  # the last one has no room for eos
        assert steps.tokens[row, : steps.length[row]].tolist() == ids
        assert steps.loss_mask[row].sum() == len(ids) and steps.truncated[row] == (choice == "ddd")
    assert (steps.source[rows(played, 0)] == POLICY).all() and len(rows(played, 0)) == B


def test_the_scores_of_a_menu_are_those_of_a_forward_pass(played):
    """The whole sequence through the trunk as one prompt: nothing of groups, caches or kernels of the head."""
    nodes, steps, team = played.nodes, played.steps, toys.team()
    policy, variables = team.models[1].policy, toys.params(team)["agents"]["b"]
    one = jax.jit(lambda ids, size: policy.hidden(variables, ids, size, jnp.zeros((1, 1, 1), jnp.int32))[0, 0, 0])
    total = np.zeros(B)
    for row in rows(played, 1):
        n, size = steps.node[row], steps.length[row]
        ids = [*nodes.tokens[n, : nodes.length[n]], *steps.tokens[row, :size]]
        for t in range(size):
            until = nodes.length[n] + t
            hidden = one(np.pad(ids[:until], (0, 8 - until))[None], until[None])
            logits = np.asarray(policy.unembed(variables, hidden), np.float64) / 0.8
            want = logits[ids[nodes.length[n] + t]] - np.log(np.exp(logits).sum())
            assert abs(want - steps.logprobs[row, t]) < 1e-5
        assert (steps.logprobs[row, size:] == 0).all()
        total[played.nodes.task[n]] += np.exp(steps.logprobs[row].sum())
    assert ((total > 0) & (total < 1)).all()  # no choice is the beginning of another one


def test_an_expert_writes_what_no_policy_gradient_sees(played):
    """The answer stands in the table, and moved the environment. Without an answer neither step nor reward is valid."""
    steps, moves, at = played.steps, played.transitions, rows(played, 2)
    silent = played.nodes.task[steps.node[at]] == 1
    assert (steps.source[at] == EXPERT).all() and not steps.loss_mask[at].any() and (steps.logprobs[at] == 0).all()
    assert (steps.valid[at] == ~silent).all() and (steps.length[at] == np.where(silent, 0, 2)).all()
    assert (steps.tokens[at[~silent], :2] == ANSWER).all() and not steps.truncated[at].any()
    of_expert = moves.turn == 2
    assert (moves.valid[of_expert] == (moves.task[of_expert] != 1)).all() and moves.played[of_expert].all()
    assert played.counts.invalid == len(CHOICES)
    shown = played.nodes.tokens[(played.nodes.turn == 3) & (played.nodes.task != 1), 0]
    assert (shown == 65 + ANSWER[0] % 2).all()


def test_a_menu_of_a_scan_is_of_its_own_turn():
    kinds = segments(MENU, toys.relay(8), B)
    assert not any(segment.repeats > 1 and 1 in segment.turns for segment in kinds)


def test_advantages_of_a_menu_are_within_it(played):
    rule = chain(ReturnToGo(), PerCompletion(), MenuRelative())
    got = assign(rule, toys.paid(played), weights={"accuracy": 1.0}, sizes=Sizes(K, B, 2))
    at = rows(played, 1)
    returns, advantage = (np.asarray(x)[at].reshape(B, -1) for x in (got.returns, got.advantage))
    keep = np.array([0, 2])  # where the expert answered
    np.testing.assert_allclose(advantage[keep], returns[keep] - returns[keep].mean(1, keepdims=True), atol=1e-6)
    assert np.ptp(returns[keep], axis=1).max() > 0.1 and not advantage[1].any()
    assert not np.asarray(got.advantage)[rows(played, 0)].any()


BAD = [
    (lambda: menu(("1",)), r"^plan\.menu: expected at least two choices, none of them empty, got \('1',\)$"),
    (lambda: menu(("1", "")), r"^plan\.menu: expected at least two choices, none of them empty, got \('1', ''\)$"),
    (lambda: menu(("1", "2", "1")), r"^plan\.menu: expected choices that differ, got '1' twice$"),
    (lambda: menu(CHOICES, turn=-1), r"^plan\.turn: expected >= 0, got -1$"),
    (lambda: play(menu(("1", "long"))), r"^plan\.menu: expected at most max_new_tokens=3 tokens for role 'a', got "),
    (
        lambda: play(menu(("1", "\udcff"))),
        r"^plan\.menu: expected text in the vocabulary of model 'a', which plays 'a'",
    ),
    (
        lambda: menu(CHOICES).check(toys.text_game(toys.matrix.Config())),
        r"^plan menu\(1,2,cc,ddd\): expected an array ",
    ),
]


def play(plan):
    return make_rollout(toys.team(), toys.relay(K), plan, Sampling())


@pytest.mark.parametrize("bad, message", BAD, ids=[m for _, m in BAD])
def test_bad_menus(bad, message):
    with pytest.raises(ConfigError, match=message) as error:
        bad()
    assert "\n" not in str(error.value)


def test_an_expert_whose_answer_does_not_fit():
    team = toys.team(max_new_tokens=1)
    rollout = make_rollout(team, ENV, flat(1), Sampling())
    message = r"^config\.team\.max_new_tokens: expected at least 2, the tokens of an expert's answer in environment 're"
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(rollout, toys.params(team), {}, toys.relay_tasks(B), jax.random.key(0), 7)
