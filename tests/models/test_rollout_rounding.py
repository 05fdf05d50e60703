"""How far rounding moves the log-probs of a pretrained model. ``pytest -s -m real_weights`` prints the gaps."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.generation.generate import generate
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.kernels.quantized import VALUES
from jaxmarl_llm.messages import Message
from jaxmarl_llm.models import decoder, hf_weights, rollout_cache, rollout_weights
from jaxmarl_llm.models.tokenizer import HFTokenizer

SMOLLM2 = Path(__file__).parents[2] / "weights" / "smollm2"
TOPICS = ("rivers", "bread", "the Moon", "chess", "glass", "bees", "bridges", "salt")


@pytest.mark.real_weights
@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="no weights/smollm2: run `make weights`")
def test_log_probs_of_smollm2_stay_near():
    """Gaps of sampled tokens between the rollout and the policy of training, in nats."""
    params, config = hf_weights.load(SMOLLM2)
    tokenizer, policy = HFTokenizer(SMOLLM2), decoder.make_policy(config)
    rows = [tokenizer.render((Message("user", f"Tell me about {topic}."),), "me") for topic in TOPICS]
    length = np.array([len(row) for row in rows])
    tokens = np.array([[*row, *[0] * (length.max() - len(row))] for row in rows])
    keys = jax.random.split(jax.random.key(0), (len(rows), 2))
    ends = {"stop_ids": tokenizer.stop_ids, "pad_id": tokenizer.pad_id, "max_new_tokens": 48}

    def gaps(policy_of, params_of):
        drawn = policy_of(policy), {"params": params_of(params)}
        out = generate(*drawn, tokens, length, keys, np.ones(len(rows), bool), sampling=Sampling(), **ends)
        hidden = policy.hidden({"params": params}, jnp.asarray(tokens), jnp.asarray(length), out.tokens)
        every = jax.nn.log_softmax(policy.unembed({"params": params}, hidden))
        own = np.take_along_axis(np.asarray(every), np.asarray(out.tokens)[..., None], -1)[..., 0]
        return np.abs(own - out.logprobs)[np.arange(48) < np.asarray(out.length)[..., None]]

    same, found = (lambda x: x), {}
    found["same"] = gaps(same, same)
    for form in VALUES:
        found[f"weights {form}"] = gaps(same, rollout_weights.FORMS[form])
        found[f"cache {form}"] = gaps(rollout_cache.FORMS[form], same)
    for name, gap in found.items():
        print(f"{name}: mean {gap.mean():.4f}, 99 % {np.quantile(gap, 0.99):.3f}, max {gap.max():.3f}, n {gap.size}")
    assert found["same"].max() < 1e-3
    for name in found.keys() - {"same"}:
        assert 1e-3 < found[name].mean() < 0.2
