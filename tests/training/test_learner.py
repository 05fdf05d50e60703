"""The update: packing, micro-batches, shared prompts, masks, untouched models, skipped steps, supervised steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from jaxmarl_llm.checkpoint import digests
from jaxmarl_llm.credit import Credit, assign
from jaxmarl_llm.losses import Loss
from jaxmarl_llm.optimizers import Optimizer, make_optimizer
from jaxmarl_llm.packing import pack
from jaxmarl_llm.plans import flat
from jaxmarl_llm.rollout import make_rollout
from jaxmarl_llm.sampling import Sampling, score
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.train import make_learner, task_order, update, update_models

SAMPLING, OPTIMIZER = Sampling(0.8), Optimizer(learning_rate=1e-2)
TURNS = 2


@pytest.fixture(scope="module")
def played():
    team = toys.team()
    rollout = jax.jit(make_rollout(team, toys.relay(TURNS), flat(4), SAMPLING))
    params = toys.params(team)
    tree = jax.device_get(rollout(params, {}, toys.relay_tasks(3), jax.random.key(0), 0))
    rule = Credit(group="task_role", scale="none")
    credited = jax.device_get(
        assign(rule, tree, weights=(("accuracy", 1.0),), max_turns=TURNS, num_tasks=3, num_roles=2)
    )
    return team, params, tree, credited


def learner(loss=Loss(), optimizer=OPTIMIZER):
    return make_learner(toys.policy(), loss, optimizer, SAMPLING)


def gradient(batches, own, loss=Loss()):
    total = None
    for batch in batches:
        total, metrics, gap = learner(loss).accumulate(own, None, batch, total)
    return total


def batches_of(played, micro_tokens=4096, loss=Loss(), model=0, trained=None, **extra):
    _, _, tree, credited = played
    trained = credited.valid if trained is None else trained
    return pack(tree, model, credited.advantage, trained, loss, micro_tokens=micro_tokens, **extra)


@pytest.mark.parametrize("aggregate", ["token", "sequence", "sum"])
def test_any_split_into_micro_batches_gives_the_same_gradient(played, aggregate):
    own, loss = played[1]["agents"]["a"], Loss(aggregate=aggregate)
    whole, split = batches_of(played, 4096, loss), batches_of(played, 1, loss)
    assert len(split) > len(whole) >= 1
    a, b = gradient(whole, own, loss), gradient(split, own, loss)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(x)  # single entries cancel to less than float32 resolves


def test_gradient_of_a_group_equals_that_of_repeated_prompts(played):
    """A prompt that went once through the trunk against one row per sample, differentiated densely."""
    team, params, tree, credited = played
    own, steps, nodes = params["agents"]["a"], tree.steps, tree.nodes
    rows = np.flatnonzero(credited.valid & (nodes.model[steps.node] == 0) & (steps.loss_mask.any(-1)))
    mask = steps.loss_mask[rows]
    policy = toys.policy()

    def dense(own):
        at = steps.node[rows]
        hidden = policy.hidden(own, nodes.tokens[at], nodes.length[at], steps.tokens[rows][:, None])
        logprob, _ = score(policy.unembed(own, hidden[:, 0]), jnp.asarray(steps.tokens[rows]), SAMPLING)
        return -jnp.sum(jnp.where(mask, logprob * credited.advantage[rows][:, None], 0.0)) / mask.sum()

    for x, y in zip(jax.tree.leaves(jax.grad(dense)(own)), jax.tree.leaves(gradient(batches_of(played), own))):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_padding_and_masked_tokens_change_nothing(played):
    own = played[1]["agents"]["a"]
    for batch in batches_of(played):
        dirty = batch.replace(
            completions=np.where(batch.weights > 0, batch.completions, 99),
            behaviour=np.where(batch.weights > 0, batch.behaviour, np.nan),
            advantages=np.where(batch.weights > 0, batch.advantages, np.nan),
        )
        clean, spoilt = (learner().accumulate(own, None, b, None)[0] for b in (batch, dirty))
        assert digests(clean) == digests(spoilt)


def test_ratio_is_exactly_one_at_the_first_inner_step(played):
    """Figures are of the last epoch: the first, or one whose parameters a rate of 0 has left as they were."""
    team, params, tree, credited = played
    for epochs, rate in ((1, 1e-3), (2, 0.0)):
        loss = Loss(epochs=epochs)
        own = jax.tree.map(jnp.copy, params["agents"]["a"])
        kit = learner(loss, Optimizer(learning_rate=rate))
        got = update(kit, loss, own, None, kit.init(own), batches_of(played, loss=loss))
        assert got.metrics["ratio"] == pytest.approx(1.0, abs=1e-6) and got.metrics["clip_fraction"] == 0.0
        assert got.metrics["approx_kl"] == pytest.approx(0.0, abs=1e-12)  # two programs, two roundings
        assert got.metrics["logprob_gap"] <= 1e-5


def test_models_without_a_trained_step_stay_byte_equal(played):
    team, params, tree, credited = played
    kits = {m.name: learner() for m in team.models}
    params = jax.tree.map(jnp.copy, params)
    states = {m.name: kits[m.name].init(params["agents"][m.name]) for m in team.models}
    before = digests((params["agents"]["b"], states["b"]))
    role = tree.nodes.role[tree.steps.node]
    batches = {
        m.name: batches_of(played, model=i, trained=credited.valid & (role == 0)) for i, m in enumerate(team.models)
    }
    moved = digests(params["agents"]["a"])
    params, states, metrics = update_models(team.models, kits, Loss(), params, states, batches)
    assert set(metrics) == {"a"}
    assert digests((params["agents"]["b"], states["b"])) == before
    assert digests(params["agents"]["a"]) != moved


def test_no_trained_step_no_change(played):
    team, params, tree, credited = played
    none = np.zeros_like(credited.valid)
    assert batches_of(played, trained=none) == []


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_step_that_is_not_finite_is_skipped(played, poison):
    own = jax.tree.map(jnp.copy, played[1]["agents"]["a"])
    kit = learner()
    state = kit.init(own)
    before = digests((own, state))
    batches = [
        b.replace(advantages=np.where(b.weights > 0, poison, 0.0).astype(np.float32)) for b in batches_of(played)
    ]
    got = update(kit, Loss(), own, None, state, batches)
    assert got.metrics["ok"] == 0.0 and digests((got.own, got.opt_state)) == before


def test_supervised_step_has_the_gradient_of_the_likelihood(played):
    own, policy = played[1]["agents"]["a"], toys.policy()
    batch = batches_of(played)[0]
    expert = batch.replace(advantages=np.ones_like(batch.advantages))
    got = gradient([expert], own, Loss(clip_low=None))

    def nll(own):
        hidden = policy.hidden(own, batch.tokens, batch.length, batch.completions)
        logprob, _ = score(policy.unembed(own, hidden), jnp.asarray(batch.completions), SAMPLING)
        return -jnp.sum(jnp.where(batch.weights > 0, batch.weights * logprob, 0.0))

    for x, y in zip(jax.tree.leaves(jax.grad(nll)(own)), jax.tree.leaves(got)):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_pack_keeps_every_trained_token_once(played):
    team, params, tree, credited = played
    for micro in (1, 64, 4096):
        seen = sum(int((b.weights > 0).sum()) for b in batches_of(played, micro))
        rows = credited.valid & (tree.nodes.model[tree.steps.node] == 0)
        assert seen == tree.steps.loss_mask[rows].sum()
        assert sum(float(b.weights.sum()) for b in batches_of(played, micro)) == pytest.approx(1.0, abs=1e-5)


def test_reference_kl_pulls_back(played):
    """With advantages 0 the KL term alone acts, and its gradient vanishes where policy and reference agree."""
    own = played[1]["agents"]["a"]
    loss = Loss(kl_coef=0.5)
    kit = learner(loss)
    batches = [b.replace(advantages=np.zeros_like(b.advantages)) for b in batches_of(played)]
    copy = lambda: jax.tree.map(jnp.copy, own)
    same = update(kit, loss, copy(), None, kit.init(own), batches, reference=own)
    assert same.metrics["grad_norm"] == pytest.approx(0.0, abs=1e-5)
    other = jax.tree.map(lambda x: x + 0.05, own)
    away = update(kit, loss, copy(), None, kit.init(own), batches, reference=other)
    assert away.metrics["grad_norm"] > 1e-3 and away.metrics["ref_kl"] > 0
    with pytest.raises(ValueError, match="reference"):
        update(kit, loss, copy(), None, kit.init(own), batches)


def test_preferences_within_a_group_are_those_of_its_pairs(played):
    """DPO on the four samples of a node as they were packed, and on a group of two for every pair of them."""
    own, loss = played[1]["agents"]["a"], Loss(objective="dpo", aggregate="sum", beta=2.0)
    reference, kit = jax.tree.map(lambda x: 0.9 * x, own), learner(loss)
    whole = batches_of(played, loss=loss)
    side = [np.sign(b.advantages[..., 0]) for b in whole]
    at = [np.argwhere((s[:, :, None] > 0) & (s[:, None, :] < 0)) for s in side]
    assert sum(map(len, at)) > 2
    pairs = []
    for batch, rows in zip(whole, at):
        if len(rows):
            two = lambda x, rows=rows: x[rows[:, :1], rows[:, 1:]]
            grids = {k: two(getattr(batch, k)) for k in ("completions", "weights", "advantages", "behaviour")}
            pairs.append(batch.replace(tokens=batch.tokens[rows[:, 0]], length=batch.length[rows[:, 0]], **grids))
    copy = lambda: jax.tree.map(jnp.copy, own)
    a, b = (update(kit, loss, copy(), None, kit.init(own), x, reference=reference) for x in (whole, pairs))
    assert a.metrics["grad_norm"] == pytest.approx(b.metrics["grad_norm"], rel=1e-4) and a.metrics["grad_norm"] > 1e-3
    for name in ("loss", "margin", "accuracy"):
        assert a.metrics[name] == pytest.approx(b.metrics[name], rel=1e-4, abs=1e-6), name
    same = update(kit, loss, copy(), None, kit.init(own), pairs, reference=own)
    weight = sum(float(x.weights.max(-1).sum()) for x in pairs)
    assert same.metrics["loss"] == pytest.approx(weight * np.log(2), rel=1e-5)
    with pytest.raises(ValueError, match="reference"):
        update(kit, loss, copy(), None, kit.init(own), whole)


def test_schedules_and_clipping_are_optax():
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 10.0)}
    tx = make_optimizer(
        Optimizer(name="sgd", learning_rate=1.0, schedule="linear", warmup=2, steps=6, max_grad_norm=1.0)
    )
    state, sizes = tx.init(params), []
    for _ in range(7):
        step, state = tx.update(grads, state, params)
        sizes.append(float(optax.tree.norm(step)))
    np.testing.assert_allclose(sizes, [0, 0.5, 1, 0.75, 0.5, 0.25, 0], atol=1e-6)
    with pytest.raises(ConfigError, match=r"x\.schedule"):
        Optimizer(schedule="step").check("x")


def test_task_order_is_a_function_of_seed_and_position():
    whole = list(task_order(3, 10, 0, 35))
    assert list(task_order(3, 10, 17, 9)) == whole[17:26]
    assert all(sorted(whole[i : i + 10]) == list(range(10)) for i in (0, 10, 20))
    assert whole[:10] != whole[10:20] and list(task_order(4, 10, 0, 10)) != whole[:10]
