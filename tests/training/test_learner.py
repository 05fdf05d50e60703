"""The update: packing, micro-batches, shared prompts, masks, untouched models, skipped steps, supervised steps."""

import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmarl_llm.credit.assign import Credit, assign
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling, score
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.training import learner as learner_module
from jaxmarl_llm.training.learner import make_learner, update, update_models
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer, make_optimizer
from jaxmarl_llm.training.order import shuffled
from jaxmarl_llm.training.packing import pack
from tests import toys

SAMPLING, OPTIMIZER = Sampling(0.8), Optimizer(learning_rate=1e-2)
TURNS = 2


@pytest.fixture(scope="module")
def played():
    team = toys.team()
    rollout = jax.jit(make_rollout(team, toys.relay(TURNS), flat(4), SAMPLING))
    params = toys.params(team)
    tree = jax.device_get(rollout(params, {}, toys.relay_tasks(3), jax.random.key(0), 0))
    rule = Credit(group="task_role", normalise="none")
    credited = jax.device_get(assign(rule, tree, weights=(("accuracy", 1.0),), sizes=Sizes(TURNS, 3, 2)))
    return team, params, tree, credited


def learner(loss=Loss(), optimizer=OPTIMIZER):
    return make_learner(toys.policy(), loss, optimizer, SAMPLING)


def gradient(batches, own, loss=Loss()):
    total = None
    for batch in batches:
        total, *_ = learner(loss).accumulate(own, None, batch, total)
    return total


def batches_of(played, micro_tokens=4096, loss=Loss(), model=0, trained=None, **extra):
    _, _, tree, credited = played
    trained = credited.valid if trained is None else trained
    return pack(tree, model, credited.advantage, trained, loss, micro_tokens=micro_tokens, **extra)


@pytest.mark.parametrize("aggregate", ["token", "sequence", "sum"])
def test_any_split_into_micro_batches_gives_the_same_gradient(played, aggregate):
    own, loss = played[1]["agents"]["a"], Loss(aggregation=aggregate)
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

    chex.assert_trees_all_close(gradient(batches_of(played), own), jax.grad(dense)(own), rtol=1e-4, atol=1e-6)


def test_padding_and_masked_tokens_change_nothing(played):
    own = played[1]["agents"]["a"]
    for batch in batches_of(played):
        dirty = batch.replace(
            completions=np.where(batch.weights > 0, batch.completions, 99),
            sampler_logprobs=np.where(batch.weights > 0, batch.sampler_logprobs, np.nan),
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
        assert got.metrics["logprob_diff"] <= 1e-5


def test_log_probs_of_an_update_are_those_before_its_first_epoch(played):
    loss, own = Loss(epochs=2), jax.tree.map(jnp.copy, played[1]["agents"]["a"])
    kit, batches = learner(loss, Optimizer(learning_rate=0.1)), batches_of(played, loss=loss)
    before = [np.asarray(kit.score(own, None, batch)) for batch in batches]
    got = update(kit, loss, own, None, kit.init(own), batches)
    after = [np.asarray(kit.score(got.own, None, batch)) for batch in batches]
    for batch, first, later, handed in zip(batches, before, after, got.logprobs, strict=True):
        trained = batch.weights > 0
        np.testing.assert_allclose(np.asarray(handed)[trained], first[trained], atol=1e-5)
        assert np.abs(later - first)[trained].max() > 1e-2


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

    chex.assert_trees_all_close(got, jax.grad(nll)(own), rtol=1e-4, atol=1e-6)


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
    own, loss = played[1]["agents"]["a"], Loss(objective="dpo", aggregation="sum", beta=2.0)
    reference, kit = jax.tree.map(lambda x: 0.9 * x, own), learner(loss)
    whole = batches_of(played, loss=loss)
    side = [np.sign(b.advantages[..., 0]) for b in whole]
    at = [np.argwhere((s[:, :, None] > 0) & (s[:, None, :] < 0)) for s in side]
    assert sum(map(len, at)) > 2
    pairs = []
    for batch, rows in zip(whole, at):
        if len(rows):
            two = lambda x, rows=rows: x[rows[:, :1], rows[:, 1:]]
            grids = {k: two(getattr(batch, k)) for k in ("completions", "weights", "advantages", "sampler_logprobs")}
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


# A user's loss


USER_LOSS = """
import jax.numpy as jnp
from jaxmarl_llm.training.losses import loss_properties

def imitate(loss, logprobs, entropy, data):
    # Half the squared distance of a completion's summed log-prob from that of the reference; couples its tokens.
    kept = lambda x: jnp.where(data.weights > 0, x, 0.0)
    distance = kept(logprobs - data.reference).sum(-1) - 1.0
    weight = data.weights.max(-1)
    value = (weight * distance**2).sum() / 2 - loss.entropy_coef * (data.weights * kept(entropy)).sum()
    return value, {"weight": weight.sum(), "distance": (weight * distance**2).sum()}

in_groups = loss_properties(needs_reference=True)(lambda *args: imitate(*args))
in_tokens = loss_properties(unit="token", needs_reference=True)(lambda *args: imitate(*args))
imitate.unit, imitate.needs_reference = "sequence", True
"""


@pytest.fixture
def user_loss(tmp_path, monkeypatch):
    """``name -> Loss`` of a module in a temporary folder on sys.path. The name of the module is new each time."""
    module = f"user_loss_{abs(hash(tmp_path))}"
    (tmp_path / f"{module}.py").write_text(USER_LOSS)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda name: Loss(objective=f"{module}:{name}", aggregation="sum", entropy_coef=0.05)
    sys.modules.pop(module, None)


def test_a_user_loss_trains(played, user_loss):
    loss, own = user_loss("imitate"), jax.tree.map(jnp.copy, played[1]["agents"]["a"])
    kit, reference = learner(loss, Optimizer(learning_rate=3e-3)), jax.tree.map(jnp.copy, own)
    state, distance = kit.init(own), []
    for _ in range(8):
        out = update(kit, loss, own, None, state, batches_of(played, loss=loss), reference=reference)
        own, state = out.own, out.opt_state
        distance.append(out.metrics["distance"])
        assert out.metrics["ok"] == 1.0 and np.isfinite(out.metrics["nll"])
    assert distance[0] == pytest.approx(1.0, rel=1e-5) and distance[-1] < 0.5 * distance[0]
    with pytest.raises(ValueError, match="needs the reference"):
        update(kit, loss, own, None, state, batches_of(played, loss=loss))


def test_the_gradient_of_a_user_loss_by_finite_differences(played, user_loss):
    """Along a random direction, and equal whether completions or whole groups are its units."""
    loss, own = user_loss("imitate"), played[1]["agents"]["a"]
    rng = np.random.default_rng(0)
    way = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), own)
    kit = learner(loss)
    batches = [b.replace(reference=kit.score(own, None, b) - 0.3) for b in batches_of(played, loss=loss)]
    at = lambda t: jax.tree.map(lambda x, d: np.asarray(x) + np.float32(t) * d, own, way)
    value = lambda t: sum(float(kit.accumulate(at(t), None, b, None)[1]["loss"]) for b in batches)
    step = 4e-3
    difference = (value(step) - value(-step)) / (2 * step)
    sequences = gradient(batches, own, loss)
    slope = sum(float(np.vdot(g, d)) for g, d in zip(jax.tree.leaves(sequences), jax.tree.leaves(way), strict=True))
    assert abs(slope) > 0.1 and slope == pytest.approx(difference, rel=1e-2)
    chex.assert_trees_all_close(gradient(batches, own, user_loss("in_groups")), sequences, rtol=1e-4, atol=1e-6)


def test_rows_are_cut_into_the_units_that_a_loss_declares(played, user_loss):
    """A loss that couples tokens but declares tokens as its units is another loss."""
    own, loss = played[1]["agents"]["a"], user_loss("in_tokens")
    batch = batches_of(played, loss=loss)[0]
    batch = batch.replace(reference=np.zeros_like(batch.weights))
    value = lambda name: float(learner(user_loss(name)).accumulate(own, None, batch, None)[1]["loss"])
    assert value("in_groups") == pytest.approx(value("imitate"), rel=1e-5)
    assert abs(value("in_tokens") - value("imitate")) > 0.1


# Programs and reports


def test_models_of_one_architecture_share_programs(played, monkeypatch):
    """Two traces of a shape, without and with a gradient to add to, whatever the number of models and steps."""
    loss = Loss(clip_high=0.123)  # of no other test: the learner is made here
    chex.clear_trace_counter()
    monkeypatch.setattr(learner_module, "accumulate", chex.assert_max_traces(learner_module.accumulate, n=2))
    batch, agents = batches_of(played, loss=loss)[0], played[1]["agents"]
    kits = [make_learner(toys.policy(), loss, OPTIMIZER, SAMPLING) for _ in agents]
    assert kits[0] is kits[1]
    for kit, own in zip(kits, agents.values(), strict=True):
        total = None
        for _ in range(3):
            total, *_ = kit.accumulate(own, None, batch, total)
    other = batch.replace(completions=np.pad(batch.completions, ((0, 0), (0, 1), (0, 0))))
    with pytest.raises(AssertionError, match="traced > 2 times"):
        kits[0].accumulate(agents["a"], None, other, None)


def test_a_skipped_step_names_the_first_quantity_that_is_not_finite(played, caplog):
    own, kit = played[1]["agents"]["a"], learner()
    batches = batches_of(played, 1)
    run = lambda bs: [kit.accumulate(own, None, b, None) for b in bs]
    report = lambda out, total: learner_module.first_not_finite([m for _, m, _ in out], [s.gap for *_, s in out], total)
    fine = run(batches)
    assert len(fine) > 1 and report(fine, fine[0][0]) is None
    nan = lambda x: np.full_like(x, np.nan)
    unscored = [batches[0], batches[1].replace(sampler_logprobs=nan(batches[1].sampler_logprobs))]
    assert report(run(unscored), fine[0][0]) == "log-probs of micro-batch 1"
    unpaid = [batches[0].replace(advantages=nan(batches[0].advantages)), *unscored[1:]]
    assert report(run(unpaid), fine[0][0]) == "loss of micro-batch 0"
    spoilt = jax.tree.map(lambda x: x, fine[0][0])
    spoilt["params"]["norm"]["scale"] = spoilt["params"]["norm"]["scale"].at[0].set(np.inf)
    assert report(fine, spoilt) == "gradient of params/norm/scale"

    team, params, _, _ = played
    params = jax.tree.map(jnp.copy, params)
    kits, states = {m.name: kit for m in team.models}, {n: kit.init(p) for n, p in params["agents"].items()}
    with caplog.at_level("WARNING", logger="absl"):
        update_models(team.models, kits, Loss(), params, states, {"a": batches, "b": unpaid})
    (line,) = [r.getMessage() for r in caplog.records if "not finite" in r.getMessage()]
    assert line.startswith("model b: optimizer step skipped, first not finite: ") and "of micro-batch 0" in line


def test_schedules_and_clipping_are_optax():
    params, grads = {"w": jnp.ones(3)}, {"w": jnp.full(3, 10.0)}
    tx = make_optimizer(
        Optimizer(name="sgd", learning_rate=1.0, schedule="linear", warmup_steps=2, total_steps=6, max_grad_norm=1.0)
    )
    state, sizes = tx.init(params), []
    for _ in range(7):
        step, state = tx.update(grads, state, params)
        sizes.append(float(optax.tree.norm(step)))
    np.testing.assert_allclose(sizes, [0, 0.5, 1, 0.75, 0.5, 0.25, 0], atol=1e-6)
    with pytest.raises(ConfigError, match=r"x\.schedule"):
        Optimizer(schedule="step").check("x")


def test_the_order_of_tasks_is_a_function_of_key_and_position():
    order = lambda seed, *where: shuffled(jax.random.key(seed), 10, *where).tolist()
    whole = order(3, 0, 35)
    assert order(3, 17, 9) == whole[17:26]
    assert all(sorted(whole[k : k + 10]) == list(range(10)) for k in (0, 10, 20))
    assert whole[:10] != whole[10:20] and order(4, 0, 10) != whole[:10]
    traced = jax.jit(lambda start: shuffled(jax.random.key(3), 10, start, 9))(17)
    assert traced.tolist() == whole[17:26]
    # Seeds are lanes of one program, and a step touches one epoch or two.
    lanes = jax.vmap(lambda seed, start: shuffled(jax.random.key(seed), 10, start, 3), in_axes=(0, None))
    seeds = jnp.arange(3)
    assert all(lanes(seeds, k)[i].tolist() == order(i, k, 3) for k in (7, 8, 9, 10) for i in range(3))
    assert [lanes(jnp.array([3]), k)[0].tolist() for k in (7, 9, 10)] == [whole[7:10], whole[9:12], whole[10:13]]
