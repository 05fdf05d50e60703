"""Meshes and rules: where every parameter lives, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmarl_llm.distributed import heads, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh, use_mesh
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.models.lora import init_lora
from jaxmarl_llm.models.value_head import init_head
from jaxmarl_llm.training.optimizers import Optimizer, make_optimizer

MESHES = {"8x1x1": (8, 1, 1), "1x8x1": (1, 8, 1), "2x2x2": (2, 2, 2)}


def arch(family="qwen2", **extra):
    """One layer whose every axis divides into 8."""
    return Config(
        264, 64, 128, 1, 8, 8, 8, family=family, attention_bias=family == "qwen2", qk_norm=family == "qwen3", **extra
    )


def mesh_of(name):
    return make_mesh(MeshConfig(*MESHES[name]))


def shapes(cfg):
    return jax.eval_shape(make_policy(cfg).init, jax.random.key(0))


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda s: isinstance(s, P))
    return {"/".join(sharding.names_of(path)): leaf for path, leaf in leaves}


LAYER = {
    "input_layernorm/scale": P(None, None),
    "post_attention_layernorm/scale": P(None, None),
    "self_attn/q_proj/kernel": P(None, "fsdp", "tensor"),
    "self_attn/k_proj/kernel": P(None, "fsdp", "tensor"),
    "self_attn/v_proj/kernel": P(None, "fsdp", "tensor"),
    "self_attn/o_proj/kernel": P(None, "tensor", "fsdp"),
    "mlp/gate_proj/kernel": P(None, "fsdp", "tensor"),
    "mlp/up_proj/kernel": P(None, "fsdp", "tensor"),
    "mlp/down_proj/kernel": P(None, "tensor", "fsdp"),
}
BIASES = {f"self_attn/{x}_proj/bias": P(None, "tensor") for x in "qkv"}
NORMS = {f"self_attn/{x}_norm/scale": P(None, None) for x in "qk"}
TOP = {"embed/embedding": P("tensor", "fsdp"), "norm/scale": P(None)}
HEAD = {"lm_head/kernel": P("fsdp", "tensor")}


def layers(*parts):
    return {f"layers/{k}": v for part in parts for k, v in part.items()}


GOLDEN = {
    ("qwen2", True): layers(LAYER, BIASES) | TOP,
    ("qwen2", False): layers(LAYER, BIASES) | TOP | HEAD,
    ("qwen3", True): layers(LAYER, NORMS) | TOP,
    ("qwen3", False): layers(LAYER, NORMS) | TOP | HEAD,
    ("llama", False): layers(LAYER) | TOP | HEAD,
}


@pytest.mark.parametrize("family,tied", GOLDEN)
def test_golden_specs_of_parameters(family, tied):
    tree = shapes(arch(family, tie_embeddings=tied))
    assert by_path(sharding.param_specs(tree)) == GOLDEN[family, tied]
    assert by_path(sharding.param_specs({"agents": {"a": {"params": tree}}})) == {
        f"agents/a/params/{k}": v for k, v in GOLDEN[family, tied].items()
    }


def test_golden_specs_of_adapters():
    tree = jax.eval_shape(lambda k: init_lora(k, make_policy(arch()).init(k), 4), jax.random.key(0))
    column = {"a": P(None, "fsdp", None), "b": P(None, None, "tensor")}
    row = {"a": P(None, "tensor", None), "b": P(None, None, "fsdp")}
    expected = {f"self_attn/{m}_proj/{x}": column[x] for m in "qkv" for x in "ab"}
    expected |= {f"mlp/{m}_proj/{x}": column[x] for m in ("gate", "up") for x in "ab"}
    expected |= {f"{m}_proj/{x}": row[x] for m in ("self_attn/o", "mlp/down") for x in "ab"}
    assert by_path(sharding.param_specs(tree)) == expected


def test_specs_of_heads_snapshots_and_optimizer_states():
    tree = shapes(arch())
    head = jax.eval_shape(lambda k: init_head(k, 64, 8), jax.random.key(0))
    assert set(by_path(sharding.param_specs({"value": head})).values()) == {P(), P(None), P(None, None)}
    ring = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), tree)
    assert by_path(sharding.param_specs({"ring": ring})) == {
        f"ring/{k}": P(None, *v) for k, v in GOLDEN["qwen2", True].items()
    }
    for name, mirrors in {"adamw": ("mu", "nu"), "lion": ("mu",)}.items():
        state = by_path(sharding.param_specs(jax.eval_shape(make_optimizer(Optimizer(name=name)).init, tree)))
        for mirror in mirrors:
            mine = {k.split(f"/{mirror}/")[1]: v for k, v in state.items() if f"/{mirror}/" in k}
            assert mine == GOLDEN["qwen2", True]
        assert {v for k, v in state.items() if k.endswith("count")} == {P()}
    factored = jax.eval_shape(make_optimizer(Optimizer(name="adafactor")).init, shapes(arch()))
    sharding.check_divides(mesh_of("2x2x2"), factored, sharding.param_specs(factored))


@pytest.mark.parametrize("name", MESHES)
def test_parameters_are_cut(name):
    """Every device holds its share and no more: a sharding in which nothing is sharded would show here."""
    tree, (_, fsdp, tensor) = make_policy(arch(tie_embeddings=False)).init(jax.random.key(0)), MESHES[name]
    placed = by_path(sharding.place(mesh_of(name), tree))
    shard = {k: v.addressable_shards[0].data.shape for k, v in placed.items()}
    assert shard["layers/self_attn/q_proj/kernel"] == (1, 64 // fsdp, 64 // tensor)
    assert shard["layers/mlp/down_proj/kernel"] == (1, 128 // tensor, 64 // fsdp)
    assert shard["embed/embedding"] == (264 // tensor, 64 // fsdp)
    assert shard["lm_head/kernel"] == (64 // fsdp, 264 // tensor)
    assert shard["layers/self_attn/q_proj/bias"] == (1, 64 // tensor)
    assert shard["norm/scale"] == (64,)
    for key, leaf in by_path(tree).items():
        np.testing.assert_array_equal(np.asarray(placed[key]), leaf)


def test_mesh_from_configuration_or_devices():
    assert dict(make_mesh(MeshConfig()).shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(MeshConfig(-1, 2, 2)).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(MeshConfig(1, -1, 2)).shape) == {"data": 1, "fsdp": 4, "tensor": 2}
    assert make_mesh(MeshConfig(1, 1, 1), jax.devices()[:1]).size == 1


@pytest.mark.parametrize(
    "cfg,message",
    [
        (MeshConfig(3), "config.mesh: 8 devices cannot be data=3 x fsdp=1 x tensor=1"),
        (MeshConfig(-1, 3), "config.mesh: 8 devices cannot be data=-1 x fsdp=3 x tensor=1"),
        (MeshConfig(4), "config.mesh: 8 devices cannot be data=4"),
        (MeshConfig(2, 2, 4), "config.mesh: 8 devices cannot be"),
        (MeshConfig(1, 0), "config.mesh.fsdp: expected >= 1"),
        (MeshConfig(-1, -1), "config.mesh: expected -1 on one axis at most, got it on data and fsdp"),
    ],
)
def test_bad_meshes(cfg, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        make_mesh(cfg)


def test_what_does_not_divide_is_named():
    mesh = make_mesh(MeshConfig(1, 1, 8))
    with pytest.raises(ConfigError, match=r"parameter embed/embedding \(260, 64\): 260 does not .* 8 parts .* tensor"):
        sharding.shardings(mesh, {"embed": {"embedding": jnp.zeros((260, 64))}})
    with pytest.raises(ConfigError, match=r"parameter mlp/down_proj/kernel .*: 60 does not .* fsdp"):
        sharding.shardings(mesh_of("1x8x1"), {"mlp": {"down_proj": {"kernel": jnp.zeros((1, 128, 60))}}})
    with pytest.raises(ConfigError, match=r"config\.mesh\.tensor: 3 key/value heads of solver neither .* 8 parts"):
        heads.check_heads(8, "solver", 24, 3)
    with pytest.raises(ConfigError, match=r"config\.mesh\.tensor: 12 query heads of solver"):
        heads.check_heads(8, "solver", 12, 8)
    heads.check_heads(8, "solver", 8, 2)  # each is copied four times


def test_collisions_and_unknown_leaves_are_refused():
    with pytest.raises(ConfigError, match="'rows' and 'embed' would both lie on axis 'fsdp'"):
        sharding.spec("rows", None, "embed")
    with pytest.raises(ConfigError, match="'heads' and 'vocab' would both lie on axis 'tensor'"):
        sharding.spec("heads", "vocab")
    with pytest.raises(ConfigError, match="no rule for parameter layers/q_proj/weight"):
        sharding.param_specs({"layers": {"q_proj": {"weight": jnp.zeros((2, 2))}}})
    with pytest.raises(ConfigError, match="no rule for parameter layers/mlp/gate/weight"):
        sharding.param_specs({"layers": {"mlp": {"gate": {"weight": jnp.zeros((2, 2))}}}})


def test_simulated_devices_are_waited_for():
    """Or more programs are launched than the devices have threads for, and one with collectives waits for ever."""
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 400, lambda i, y: y @ y / jnp.abs(y @ y).max(), x).sum())
    mesh = mesh_of("8x1x1")
    x = jax.device_put(jnp.ones((256, 256)), jax.sharding.NamedSharding(mesh, P("data")))
    with use_mesh(mesh):
        jax.block_until_ready(slow(x))  # compiled
        assert sharding.settle((slow(x), None))[0].is_ready()
        assert jax.eval_shape(lambda y: sharding.settle(slow(y)), x).shape == ()
