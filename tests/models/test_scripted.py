"""Scripted policies: completions of ragged prompts, their probability, and both rollouts beside a language model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.envs.debate import array as debate
from jaxmarl_llm.envs.debate import scripts
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.generate import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import scripted
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.types import POLICY, SCRIPTED, Model, Role, Team
from tests.rollout.test_grow import assert_same_rows
from tests.rollout.test_host import BYTES, EOS, as_host, go, policy

pytestmark = pytest.mark.usefixtures("numpy_tables")

SIZE = 4
OWN = {"params": {}}


def counted(tokens, length):
    """The first token twice, then the number of tokens; one token alone where the prompt has one."""
    text = jnp.stack([tokens[0], tokens[0], length, EOS])
    return jnp.where(length == 1, jnp.array([tokens[0], EOS, 7, 7]), text)


MODEL = scripted.make_model("echo", counted, SIZE, BYTES)
PROMPTS = [[65, 66, 67], [70], [80, 81]]
SAID = [[65, 65, 3, EOS], [70, EOS], [80, 80, 2, EOS]]


def prompts(width):
    rows = np.full((len(PROMPTS), width), 9, np.int32)
    for row, ids in zip(rows, PROMPTS):
        row[: len(ids)] = ids
    return rows, np.array([len(ids) for ids in PROMPTS], np.int32)


def said(most, width=5):
    keys = jax.random.split(jax.random.key(0), (3, 2))
    rows = prompts(width)
    return generate(
        MODEL.policy,
        OWN,
        *rows,
        keys,
        np.ones(3, bool),
        max_new_tokens=most,
        stop_ids=(EOS,),
        pad_id=BYTES.PAD,
        sampling=Sampling(),
    )


def test_completions_are_those_of_the_script():
    """For prompts of several lengths, for every sample, with log-probability 0."""
    out = said(SIZE)
    for n, want in enumerate(SAID):
        for g in range(2):
            assert out.tokens[n, g, : out.length[n, g]].tolist() == want
    assert not out.truncated.any() and not np.asarray(out.logprobs).any()


def test_completions_are_cut_at_the_limit_of_their_role():
    out = said(2)
    assert out.length.tolist() == [[2, 2]] * 3 and out.truncated.tolist() == [[True] * 2, [False] * 2, [True] * 2]


def test_a_completion_is_scored_as_sure_and_any_other_as_impossible():
    rows = prompts(3)
    completions = np.stack([[[65, 65, 3, EOS, 0], [65, 66, 3, EOS, 0]]] * 3).astype(np.int32)
    logits = MODEL.policy.unembed(OWN, MODEL.policy.hidden(OWN, *rows, completions))[0]
    logprob = jax.nn.log_softmax(logits)
    assert logprob[0, [0, 1, 2, 3], [65, 65, 3, EOS]].tolist() == [0.0] * 4
    assert logprob[1, 1, 66] < -1e5 and logprob[1, 1, 65] == 0
    assert jnp.isnan(logits[:, 4]).all() and not jnp.isnan(logits[:, :4]).any()  # behind what the script says


@pytest.mark.parametrize("name", ("size", "vocab_size"))
def test_bad_sizes(name):
    with pytest.raises(ConfigError, match=rf"^scripted: {name}: expected at least 1, got 0$"):
        scripted.Config(**{"script": counted, "size": 2, "vocab_size": 264, name: 0})


def test_both_engines_play_a_script_beside_a_language_model():
    """The same rows; steps of the script have a source of their own."""
    config = debate.Config(practice=2, trials=2, rounds=1, accuracies=(0.9, 0.5), tasks=4)
    env, tasks = debate.make(config), debate.make_tasks(config)
    reflect = scripted.make_model("reflect", scripts.scripts(config)["reflect"], debate.RESPONSE, BYTES)
    writer = policy(((range(264), -30.0), (b"adkw129", 30.0), ((EOS,), 31.0)))
    team = Team((Role("reflect", "reflect", 5), Role("act", "act", 5)), (reflect, Model("act", writer, BYTES)))
    params = {"shared": {}, "agents": {"reflect": OWN, "act": {"params": writer.init(jax.random.key(1))}}}
    key, plan = jax.random.key(5), single()
    array = jax.device_get(jax.jit(make_rollout(team, env, plan, Sampling()))(params, None, tasks, key, jnp.int32(0)))
    rows = [jax.tree.map(lambda x, i=i: x[i], tasks) for i in range(4)]
    host = go(as_host(env), team, rows, plan, key, params=params)
    assert_same_rows(array, host.tree)
    steps = array.steps
    role = array.nodes.role[steps.node]
    assert set(steps.source[steps.valid & (role == 0)].tolist()) == {SCRIPTED}
    assert set(steps.source[steps.valid & (role == 1)].tolist()) == {POLICY}
    assert (array.transitions.rewards["unclear"] == 0).all()
