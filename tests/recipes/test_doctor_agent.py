"""DoctorAgent-RL: golden returns, a slow twin of the advantages, the clip, no gradient from the patient's tokens."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.configs.doctor_agent import fixed, no_turns
from jaxmarl_llm.envs.consult import array as consult
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.recipes import doctor_agent
from jaxmarl_llm.training import losses
from jaxmarl_llm.training.learner import Batch, make_learner
from jaxmarl_llm.training.optimizers import Optimizer
from tests import toys
from tests.recipes.test_fidelity import Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

CONFIG = doctor_agent.Config()
BYTES, EOS, PAD = ByteTokenizer(), ByteTokenizer.EOS, ByteTokenizer.PAD
DOCTOR = 0


def table_of(episodes):
    """Chains (task, [{component: reward} of each turn]) as tables, whose turns alternate between the episodes."""
    table, last = Table(consult.COMPONENTS), [-1] * len(episodes)
    for turn in range(max(len(pays) for _, pays in episodes)):
        for e, (task, pays) in enumerate(episodes):
            if turn < len(pays):
                last[e] = table.act(DOCTOR, task, turn, last[e], **pays[turn])
    order = [(e, turn) for turn in range(8) for e, (_, pays) in enumerate(episodes) if turn < len(pays)]
    return table, order


SEEN = [{"valid": 1}] * 3 + [{"unknown": -1}, {"repeated": -2}, {"diagnosis": 5, "accuracy": 1, "turns": 1}]
LATE = [{"valid": 1}, {"valid": 1, "exhausted": -5}]


@pytest.mark.parametrize(
    "weights, first, second",
    [
        (CONFIG.reward, 5, -3),
        (no_turns().reward, 5, -5),
        ({**CONFIG.reward, "exhausted": 0.0}, 5, 2),
        ({**CONFIG.reward, "diagnosis": 0.5}, 2.5, -3),
    ],
    ids=["all", "turn rewards off", "budget free", "half a diagnosis"],
)
def test_golden_returns(weights, first, second):
    """3 - 1 - 2 + 5 = 5 for each of six turns, 2 - 5 = -3 for each of two. An episode counts once: -1 and 1."""
    table, order = table_of([(0, SEEN), (0, LATE)])
    returns, advantage = table.credit(doctor_agent.algorithm(CONFIG).credit, **weights)
    of = {0: first, 1: second}
    np.testing.assert_array_equal(returns, [of[e] for e, _ in order])
    np.testing.assert_allclose(advantage, [1.0 if e == 0 else -1.0 for e, _ in order], atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_ragged_consultations_are_those_of_a_slow_twin(seed):
    rng = np.random.default_rng(seed)
    pay = lambda: {name: float(rng.integers(-3, 4)) for name in ("valid", "exhausted", "diagnosis")}
    episodes = [(task, [pay() for _ in range(rng.integers(1, 6))]) for task in range(4) for _ in range(6)]
    table, order = table_of(episodes)
    returns, advantage = table.credit(doctor_agent.algorithm(CONFIG).credit, **CONFIG.reward)
    whole = [sum(sum(turn.values()) for turn in pays) for _, pays in episodes]
    for (e, _), got_return, got in zip(order, returns, advantage, strict=True):
        group = np.array([whole[other] for other in range(len(episodes)) if episodes[other][0] == episodes[e][0]])
        assert got_return == whole[e]
        assert got == pytest.approx((whole[e] - group.mean()) / group.std(), abs=1e-4)


def test_a_ratio_counts_from_0_8_to_1_28():
    """Per token: the value of the objective at ratios within and beyond the clip, and where its gradient is 0."""
    ratios, signs = np.array([0.5, 1.1, 1.27, 1.5]), np.array([1.0, -1.0])
    new = jnp.asarray(np.log(np.tile(ratios, 2)), jnp.float32)
    gain = jnp.asarray(np.repeat(signs, 4), jnp.float32)
    loss = dataclasses.replace(CONFIG.loss, entropy_coef=0.0)

    def value(x):
        one = jnp.ones_like(x)
        return losses.row_loss(loss, x, x * 0, losses.RowData(one, gain, x * 0, x * 0, None))[0]

    want = [0.5, 1.1, 1.27, 1.28, -0.8, -1.1, -1.27, -1.5]  # min(ratio * A, clipped * A)
    assert float(value(new)) == pytest.approx(-sum(want), abs=1e-5)
    slope = np.asarray(jax.grad(value)(new))
    np.testing.assert_allclose(slope, [-0.5, -1.1, -1.27, 0, 0, 1.1, 1.27, 1.5], atol=1e-5)
    assert CONFIG.group == 8 and CONFIG.loss.entropy_coef == 1e-3


PROMPTS = ["D4>", "D3c>", "D2cp>", "D1cpA>"]  # yes, unknown, no
SAID = ["c", "f", "a", "Y"]


@pytest.mark.slow
def test_what_the_patient_says_carries_no_gradient():
    """The gradient of an update is that of the doctor's tokens in whole sequences, whatever the other targets are.

    The witness runs prompt and completion through the model as one sequence, with a target at every place. Targets at
    places that the doctor did not write are drawn at random. With the patient's answers as targets that count, the
    gradient is another one.
    """
    policy, gain = toys.policy(), np.array([1.0, -0.5, 2.0, 0.25], np.float32)
    own = {"params": policy.init(jax.random.key(0))}
    n, p = len(PROMPTS), 16
    tokens, size = np.full((n, p), PAD, np.int32), np.array([len(text) for text in PROMPTS], np.int32)
    whole, doctor, patient = np.full((n, p + 2), PAD, np.int32), np.zeros((n, p + 2)), np.zeros((n, p + 2))
    for i, (shown, said) in enumerate(zip(PROMPTS, SAID, strict=True)):
        tokens[i, : size[i]] = whole[i, : size[i]] = list(shown.encode())
        whole[i, size[i] : size[i] + 2] = [ord(said), EOS]
        doctor[i, size[i] : size[i] + 2] = 1
        patient[i, 2 : size[i] - 1] = 1
    assert patient.sum() == 6 and doctor.sum() == 8
    completions = np.array([[[ord(said), EOS]] for said in SAID], np.int32)
    each = np.broadcast_to(gain[:, None, None], completions.shape)
    batch = Batch(tokens, size, completions, np.full(each.shape, 1 / 8, np.float32), each, 0 * each)
    loss = dataclasses.replace(CONFIG.loss, entropy_coef=0.0)
    learner = make_learner(policy, loss, Optimizer(), Sampling())
    got = learner.accumulate(own, None, batch, None)[0]

    @jax.jit
    def witness(own, targets, counted):
        def value(own):
            hidden = policy.hidden(own, whole[:, :1], jnp.ones(n, jnp.int32), whole[:, None, 1:])
            logprobs = jax.nn.log_softmax(policy.unembed(own, hidden[:, 0]))
            chosen = jnp.take_along_axis(logprobs, targets[:, 1:, None], axis=-1)[..., 0]
            return -jnp.sum(chosen * counted[:, 1:] * gain[:, None]) / 8

        return jax.grad(value)(own)

    rng = np.random.default_rng(0)
    for _ in range(3):
        targets = np.where(doctor > 0, whole, rng.integers(256, size=whole.shape))
        chex.assert_trees_all_close(got, witness(own, targets, doctor), rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(got, witness(own, whole, doctor + patient), rtol=1e-2, atol=1e-3)


def test_bad_configurations():
    with pytest.raises(ConfigError, match=r"^config\.group: expected >= 2 \(a group compares samples\), got 1$"):
        doctor_agent.Config(group=1).check("config")
    with pytest.raises(ConfigError, match="pays no 'advice'"):
        doctor_agent.make(dataclasses.replace(fixed(), reward={"advice": 1.0}))
