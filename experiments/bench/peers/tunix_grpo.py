"""Driver of google-tunix: its sampler alone, or its GRPO learner; one prompt, G completions of exactly R tokens."""

import os
import random

from drive import SPEC, Turns, prompt, words

os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # isort: skip
import numpy as np
import optax
from flax import nnx
from tunix.generate import sampler
from tunix.models.llama3 import model as llama3
from tunix.models.qwen2 import model as qwen2
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

hf, group, response, length = SPEC["hf"], SPEC["group"], SPEC["response"], SPEC["prompt"]
shape = {
    "num_layers": hf["num_hidden_layers"],
    "vocab_size": hf["vocab_size"],
    "embed_dim": hf["hidden_size"],
    "hidden_dim": hf["intermediate_size"],
    "num_heads": hf["num_attention_heads"],
    "head_dim": hf["head_dim"],
    "num_kv_heads": hf["num_key_value_heads"],
    "rope_theta": int(hf["rope_theta"]),
    "norm_eps": hf["rms_norm_eps"],
}
family, Net, tied = {
    "llama": (llama3, llama3.Llama3, "weight_tying"),
    "qwen2": (qwen2, qwen2.Qwen2, "use_tied_embedding"),
}[hf["model_type"]]
net = Net(family.ModelConfig(**shape, **{tied: True}), rngs=nnx.Rngs(0))
# Its initial MLP is zero, and products with zeros take the time of others: XLA does not look at values.
tokenizer, text = words(hf["vocab_size"]), prompt(length, hf["vocab_size"])
never = [-1]  # as end of text


def sample():
    """Driver of the sampler alone."""
    cache = sampler.CacheConfig(length + response, shape["num_layers"], shape["num_kv_heads"], shape["head_dim"])
    draw = sampler.Sampler(net, tokenizer, cache)
    while True:
        turns.begin()
        out = draw([text] * group, response, max_prompt_length=length, temperature=1.0, top_p=1.0, eos_tokens=never)
        assert all(len(said) == response for said in out.tokens)
        turns.end()


def learn():
    """Driver of whole steps."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
    role = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=net,
        tokenizer=tokenizer,
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adamw(1e-6, weight_decay=0.01), eval_every_n_steps=10**6, max_steps=10**6
            ),
            rollout_config=RolloutConfig(
                max_tokens_to_generate=response,
                max_prompt_length=length,
                kv_cache_size=length + response,
                temperature=1.0,
                eos_tokens=never,
            ),
        ),
    )
    score = lambda prompts, completions, **_: [random.random() for _ in completions]
    learner = GRPOLearner(cluster, GRPOConfig(num_generations=group, beta=0.0), score)
    settle = lambda: jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
    learner.train(turns.items({"prompts": np.array([text])}, settle))


turns = Turns("google-tunix", "jax", "flax")
{"sample": sample, "learn": learn}[SPEC["what"]]()
