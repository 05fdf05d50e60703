"""Compiled for TPUs without one: sizes follow from the sharding rules, counts from shapes, advice from what is full."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from experiments.tpu import compile_ahead, plan_pod
from experiments.tpu import report as pods
from experiments.tpu.ratios import ratios
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.costs import hlo
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.chips import CHIPS
from jaxmarl_llm.costs.counts import ModelSize
from jaxmarl_llm.costs.known_shapes import architecture, shape_only
from jaxmarl_llm.costs.meshes import proposals
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.generate import sample_completions
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import decoder, decoder_config
from jaxmarl_llm.models.batch_invariant import invariant

JOY = "experiments/configs/joyagents_r1.py"
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot (libtpu)")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-Coder-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-7B", 7_615_616_512),
        ("Qwen/Qwen2.5-32B-Instruct", 32_763_876_352),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
    ],
)
def test_public_shapes_have_the_published_number_of_parameters(name, parameters):
    assert costs.parameters(architecture(Backbone(path=name))) == parameters


def test_an_unknown_model_and_an_unknown_topology_are_named():
    with pytest.raises(ConfigError, match=r"Qwen9-1B.*known: Qwen2.5-0.5B"):
        architecture(Backbone(path="Qwen/Qwen9-1B"))
    with pytest.raises(ConfigError, match=r"unknown topology 'v5e:3x3'; known: v5e:1x1.*v5p:8x8x8"):
        compile_ahead.devices("v5e:3x3")
    assert [compile_ahead.chips(t) for t in ("v5e:16x16", "v5p:8x8x8", "v6e:2x4")] == [256, 512, 8]


@pytest.mark.parametrize(
    "spec", [f"{JOY}:qwen2_5_{n}b" for n in (3, 7, 32)] + ["experiments/configs/magrpo.py:qwen3_1_7b"]
)
def test_configurations_at_scale_need_no_files(spec):
    cfg = config_flags.load(spec)
    bare, _, work, _ = plan_pod.prepare(cfg)
    assert bare.team.backbone.path is None and bare.env.max_prompt == cfg.env.max_prompt
    assert work.models[0].config == architecture(cfg.team.backbone)
    heads, parts = work.models[0].config.num_kv_heads, cfg.mesh.tensor
    assert heads % parts == 0 or parts % heads == 0  # each head on one device, or copied equally often
    assert shape_only(bare) == bare


def test_what_the_compiler_says_of_too_little_memory_is_read():
    said = "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 32.50G of 15.75G hbm."
    assert compile_ahead.needs(said) == int(32.5 * 2**30)
    said = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (44.57G) exceeds available HBM (31.24G). HLO module: jit_rollout."
    )
    assert compile_ahead.needs(said) == int(44.57 * 2**30)
    assert compile_ahead.needs("INTERNAL: something else") is None


# ---- judgement ------------------------------------------------------------------------------------------------------

GB = 10**9
HELD = {"parameters": 2 * GB, "optimizer": GB, "rollout copy": 3 * GB}
SHAPE = {"parts": ((8, 1),), "prompt": 2048, "response": 512, "micro": 8, "micro_group": 8}


def judged(peaks, *, held=None, mesh=(1, 4, 1), room=16 * GB, micro=8, **team):
    cfg = config_flags.load(f"{JOY}:qwen2_5_3b")
    cfg = dataclasses.replace(cfg, team=dataclasses.replace(cfg.team, **team))
    arch = architecture(cfg.team.backbone)
    shape = SHAPE | {"micro": micro}
    row = {"peaks": peaks, "capacity": room, "held": held or HELD, "mesh": mesh, "chips": 4, "shape": shape}
    return plan_pod.advice(cfg, row | {"parameters": 10**8}, arch)


def test_advice_names_the_flag_that_frees_what_is_full():
    much = HELD | {"optimizer": 13 * GB}
    # The cache: 6 GB are fixed, 10 of 20 GB of it have room.
    assert judged({"prefill": 26 * GB, "accumulate": 5 * GB}).endswith("--config.batch=32")
    assert judged({"prefill": 5 * GB, "accumulate": 26 * GB}, remat=False).endswith("--config.team.remat=true")
    # 3.2 GB are fixed: 12.8 of 22.8 GB of two nodes have room, which is one.
    assert judged({"accumulate": 26 * GB}).endswith(f"--config.micro_tokens={2048 + 8 * 512}")
    assert judged({"accumulate": 26 * GB}, micro=4).endswith("--config.mesh.tensor=2")
    assert judged({"accumulate": 26 * GB}, micro=2, mesh=(1, 2, 2)).endswith("lower")
    # Resident alone is too much: cut further, share, or take another slice.
    assert judged({"resident": 18 * GB}, held=much, mesh=(4, 1, 1)).endswith(
        "--config.mesh.data=1 --config.mesh.fsdp=4"
    )
    # Cut along fsdp, generation has a copy beside: 15 GB of whole parameters stay, so cut along tensor.
    whole = {"parameters": 15 * GB, "optimizer": 10 * GB, "rollout copy": 0}
    assert judged({"resident": 25 * GB}, held=whole, mesh=(4, 1, 1)).endswith("--config.mesh.tensor=2")
    assert judged({"resident": 18 * GB}, held=much).endswith("--config.mesh.tensor=2")
    assert judged({"resident": 18 * GB}, held=much, mesh=(1, 2, 2)).endswith("--config.team.parameter_sharing=lora")
    assert "--topology" in judged({"resident": 18 * GB}, held=much, mesh=(1, 2, 2), parameter_sharing="shared")


@needs_libtpu
def test_a_fourth_number_of_a_mesh_is_context(tiny):
    shape = lambda given: dict(compile_ahead.mesh_for(tiny, given, "v5e:2x2").shape)
    assert shape("-1,1,1,2") == {"data": 2, "fsdp": 1, "context": 2, "tensor": 1}
    assert shape("1,2,2") == {"data": 1, "fsdp": 2, "tensor": 2}
    with pytest.raises(ConfigError, match=r"--mesh: expected data,fsdp,tensor\[,context\]"):
        shape("1,2,1,2,1")


def test_search_proposes_meshes_that_can_be_and_puts_those_that_fit_first():
    bare, plan, work, _ = plan_pod.prepare(
        config_flags.load(f"{JOY}:qwen2_5_7b", [("team.parameter_sharing", "shared")])
    )
    found = proposals(bare, plan, work, CHIPS["v6e"], 256)
    for p in found:
        data, fsdp, tensor = p.mesh
        assert data * fsdp * tensor == 256 and 4 % tensor == 0 and 3584 % fsdp == 0
    fits = [p.fits for p in found]
    assert fits[0] and not fits[-1] and fits == sorted(fits, reverse=True)
    # All parameters on every chip, 7.6e9 x (2 + 2 x 2) bytes beside float32 gradients, are too many.
    assert not next(p for p in found if p.mesh == (256, 1, 1)).fits
    seconds = [p.seconds for p in found if p.fits]
    assert seconds == sorted(seconds)


def test_rows_become_a_table_and_a_figure(tmp_path):
    stage = {"collectives": {"all-gather": 2e9}, "compiled": True, "flops": 1e12, "roofline": 1.0, "bound": "network"}
    row = {
        "config": "joy",
        "topology": "v5e:2x2",
        "chips": 4,
        "mesh": [1, 2, 2],
        "rows": None,
        "share": "separate",
        "models": 5,
        "parameters": 3e9,
        "capacity": 16e9,
        "held": HELD,
        "cache": 1e9,
        "peaks": {"prefill": 9e9, "accumulate": 12.34e9},
        "stages": {name: stage for name in ("prefill", "decode", "accumulate", "apply")},
        "fits": True,
        "advice": "",
        "step": {
            "total": 12.0,
            "bottleneck": "decode: memory",
            "decode_steps": 38400.0,
            "decode_step_seconds": 0.00393,
            "filled": 0.5,
        },
        "ratios": {
            "useful": {"prefill": 0.95, "decode": 0.9, "accumulate": 0.78},
            "token_bytes": 5e9,
            "least_token_bytes": 4e9,
        },
        "counter": hlo.VERSION,
        "versions": {"jax": "1", "libtpu": "2"},
        "date": "2026-11-22",
    }
    too_large = {k: v for k, v in row.items() if k != "step"} | {"fits": False, "stages": {}, "advice": "--flag"}
    doc = tmp_path / "pods.md"
    doc.write_text(f"before {pods.BEGIN} old {pods.END} after")
    old = row | {"config": "old", "counter": hlo.VERSION - 1}
    unmarked = {k: v for k, v in row.items() if k != "counter"} | {"config": "older"}
    rows = [row, too_large, old, unmarked, row | {"rows": 1}, old | {"rows": 1, "chips": 8}]
    pods.write(json.loads(json.dumps(rows)), doc)
    text = doc.read_text()
    assert text.startswith("before ") and text.endswith(" after") and " old " not in text
    assert "| joy, 5 x 3.0B separate | v5e:2x2 (16 GB) | 1 x 2 x 2 | 2.00 | 1.00 | 3.00 | 1.00 | 9.00 | 12.3 |" in text
    # Rows of an older counter carry a dagger, and their ratios are not shown.
    assert all(f"| {name}, 5 x 3.0B separate \u2020 | v5e" in text for name in ("old", "older"))
    assert "separate | v5e:2x2 | 0.95 | 0.90 | 0.78 | 5.00 | 4.00 | 1.25 | 38,400 x 3.93 | 0.50 |" in text
    assert text.count("38,400") == 1 and text.count("\n\u2020 An older version") == 1
    pods.write([row], doc)
    assert "\u2020" not in doc.read_text()
    assert "12 s | decode: memory |" in text and "does not fit | --flag |" in text
    assert (
        "| 4 | 1 x 2 x 2 |" in text
        and "| 8 \u2020 | 1 x 2 x 2 |" in text
        and (tmp_path / "results" / "pods.png").stat().st_size > 1000
    )


# ---- libtpu ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    sizes = {"batch": "4", "micro_tokens": "64", "team.backbone.num_layers": "1", "team.backbone.vocab_size": "512"}
    return config_flags.load(f"{JOY}:tiny", [*sizes.items(), ("team.backbone.dtype", "bfloat16"), ("group", "2")])


@needs_libtpu
def test_a_team_on_four_chips(tiny):
    """Parameters: D=64 F=192 Q=4 K=2 H=16 V=512, one layer; kernels in four parts, biases in two, norms whole."""
    row = plan_pod.measure(tiny, "tiny", "v5e:2x2", "1,2,2", None, ("rollout", "accumulate"))
    kernels = 512 * 64 + 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 192
    own = 2 * (kernels // 4 + (64 + 32 + 32) // 2 + 3 * 64)
    assert row["held"]["parameters"] == 5 * own
    # AdamW in float32: two moments and the master copy; its count, and that of its schedule.
    assert row["held"]["optimizer"] == 5 * (3 * 2 * own + 2 * 4)
    assert row["held"]["rollout copy"] == 5 * 2 * (kernels // 2 + (64 + 32 + 32) // 2 + 3 * 64)
    stages = row["stages"]
    assert set(stages) == {"prefill", "decode", "accumulate"} and row["fits"]
    # Of the prompts' products a chip does a quarter: half of the rows, half of the heads and units.
    parts, p, r = (row["shape"][k] for k in ("parts", "prompt", "response"))
    n, lanes = sum(nodes for nodes, _ in parts), sum(nodes * group for nodes, group in parts)
    assert len(parts) == 1  # an array rollout launches the base and the alternatives apart
    dense = 2 * (kernels - 512 * 64)
    assert stages["prefill"]["flops"] == n * p * (dense + 4 * 64 * p) / 4
    token = lanes * (dense + 4 * 64 * (p + r - 1) + 2 * 512 * 64) / 4
    # Beside it the running sum inside a block of the inverse CDF, a triangular product, on each half of the rows.
    assert stages["decode"]["flops"] == token + lanes / 2 * 2 * 256**2
    # Generation sends no parameters, the update gathers and reduces them: the embedding alone is 512 x 64 of them.
    assert stages["decode"]["collectives"].get("all-gather", 0) < 512 * 64 / 2
    assert sum(stages["accumulate"]["collectives"].values()) > 512 * 64
    # Useful is the triangle of a causal mask; a decoded token reads layers, head and cache at least once.
    done = row["ratios"]
    assert done["useful"]["prefill"] == pytest.approx((dense + 4 * 64 * (p + 1) / 2) / (dense + 4 * 64 * p))
    assert 0.5 < done["useful"]["accumulate"] < 1 and 0 < done["useful"]["decode"] < 1
    read = 2 * (kernels + 64 + 32 + 32 + 3 * 64)
    assert done["least_token_bytes"] == read / 2 + row["cache"]
    assert done["token_bytes"] == stages["decode"]["bytes"]
    again = plan_pod.measure(tiny, "again", "v5e:2x2", "1,2,2", None, ("rollout", "accumulate"), [row])
    assert again["stages"] == row["stages"]


def test_useful_flops_are_those_of_real_nodes():
    """D=4 F=6 Q=2 K=1 H=2 V=8, one layer: by hand, on 2 chips that share the heads."""
    cfg = decoder_config.Config(8, 4, 6, 1, 2, 1, 2)
    weights = ModelSize(cfg)
    shape = compile_ahead.Shape(parts=((8, 2), (4, 3)), prompt=3, response=2, micro=4, micro_group=2)
    stage = compile_ahead.Stage("", 0, 0, 0, 0, True, flops=1000.0, bytes=500.0)
    dense, pair, head = 2 * (2 * 4 * 4 + 2 * 4 * 2 + 3 * 4 * 6), 4 * 2 * 2, 2 * 4 * 8
    found = ratios(
        weights, ((3, 2), (1, 1), (1, 3)), shape, 2, 2, 100.0, dict.fromkeys(("prefill", "decode", "accumulate"), stage)
    )
    prefill = 5 * (3 * dense + (1 + 2 + 3) * pair)
    decode = 10 * (dense + head + pair * (4 + 5) / 2)  # the first token sees 4 keys, the second 5
    sample = dense + head * 2 + pair * 4  # the last token is not read: one token through the layers, 4 keys
    update = 3 * 4 * (3 * dense + 6 * pair + 2 * sample)
    for name, flops in (("prefill", prefill), ("decode", decode), ("accumulate", update)):
        assert found["useful"][name] == pytest.approx(flops / 2 / 1000), name
    biases = (2 + 2 * 1) * 2 if cfg.attention_bias else 0
    numbers = dense // 2 + biases + 3 * 4 + 8 * 4  # kernels, norms, head
    assert found["least_token_bytes"] == costs.ITEMSIZE[cfg.dtype] * numbers / 2 + 100
    assert found["token_bytes"] == 500.0


@needs_libtpu
def test_invariant_generation_on_four_chips(tiny):
    """Each chip generates for its own rows with whole weights: these are gathered, and no sum goes over chips."""
    arch = tiny.team.backbone
    cfg = decoder_config.Config(
        512, arch.hidden_size, arch.intermediate_size, 2, arch.num_heads, arch.num_kv_heads, arch.head_dim
    )
    policy, n, g = invariant(decoder.make_policy(cfg)), 8, 2
    mesh = meshes.make_mesh(meshes.MeshConfig(2, 1, 2), compile_ahead.devices("v5e:2x2"))
    rows = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.rows(mesh))

    def run(variables, tokens, length, keys, active):
        given = tokens, length, jax.random.wrap_key_data(keys), active
        fixed = {"max_new_tokens": 8, "stop_ids": (1,), "pad_id": 0, "sampling": Sampling(), "keep": False}
        return sample_completions(policy, variables, *given, **fixed)

    prompts = rows((n, 64), jnp.int32), rows((n,), jnp.int32), rows((n, g, 2), jnp.uint32), rows((n,), jnp.bool_)
    params = compile_ahead.placed(mesh, {"params": jax.eval_shape(policy.init, jax.random.key(0))})
    with meshes.use_mesh(mesh):
        _, text = compile_ahead.compile_text(jax.jit(run).lower(params, *prompts))
    assert "all-gather" in text and "all-reduce" not in text and "reduce-scatter" not in text


def test_what_invariant_generation_costs_is_not_told():
    cfg = config_flags.load(f"{JOY}:tiny", [("team.batch_invariant", "true")])
    with pytest.raises(
        ConfigError, match=r"^config\.team\.batch_invariant: expected false: its loops .* run as often as lengths ask"
    ):
        compile_ahead.team_of(cfg, meshes.make_mesh(meshes.MeshConfig(8)), [], 0, "array")


@pytest.fixture
def compiled(monkeypatch):
    """How often programs were compiled; none is."""
    stage, seen = compile_ahead.Stage("", 0, 0, 0, 0, True, 1.0, 1.0, {}), []
    stages = dict.fromkeys(("prefill", "accumulate", "apply"), stage)
    monkeypatch.setattr(compile_ahead, "compile_stages", lambda *args: seen.append(1) or stages)
    return seen


@needs_libtpu
def test_stages_that_are_taken_over_keep_their_date_and_are_of_this_version(tiny, compiled):
    made = lambda *known: plan_pod.measure(tiny, "tiny", "v5e:2x2", "1,2,2", None, (), known)
    row = made()
    assert made(row | {"date": "2026-01-01"})["date"] == "2026-01-01" and len(compiled) == 1
    other = row | {"date": "2026-01-01", "versions": {**row["versions"], "libtpu": "0"}}
    assert made(other)["date"] == row["date"] != other["date"] and len(compiled) == 2
    counted = row | {"date": "2026-01-01", "counter": hlo.VERSION - 1}
    assert made(counted)["date"] == row["date"] and made(counted)["counter"] == hlo.VERSION and len(compiled) == 4


def test_a_row_takes_the_place_of_the_row_with_its_key():
    rows = [{"key": "a", "counter": 1}, {"key": "b"}]
    plan_pod.replace(rows, {"key": "a", "counter": 2})
    plan_pod.replace(rows, {"key": "c"})
    assert rows == [{"key": "a", "counter": 2}, {"key": "b"}, {"key": "c"}]


@needs_libtpu
def test_an_offloaded_optimizer_is_on_no_chip_while_it_generates(tiny, compiled):
    away = dataclasses.replace(tiny, optimizer=dataclasses.replace(tiny.optimizer, offload=True))
    kept, gone = (plan_pod.measure(cfg, "tiny", "v5e:2x2", "1,2,2", None, ()) for cfg in (tiny, away))
    less = {name: kept["peaks"][name] - gone["peaks"][name] for name in kept["peaks"]}
    moments = kept["held"]["optimizer"]
    assert less == {"prefill": moments, "accumulate": moments * 4 // 5, "apply": moments * 4 // 5}
    assert plan_pod.resident(tiny, HELD) == 6 * GB and plan_pod.resident(away, HELD) == 5 * GB


@needs_libtpu
def test_what_cannot_fit_is_not_compiled(tiny, monkeypatch):
    small = CHIPS["v5e"]._replace(memory=4_000_000.0)
    monkeypatch.setitem(CHIPS, "v5e", small)
    monkeypatch.setattr(compile_ahead, "compile_stages", lambda *args: pytest.fail("compiled"))
    row = plan_pod.measure(tiny, "tiny", "v5e:2x2", "4,1,1", None, ())
    assert not row["fits"] and "--config.mesh.data=1 --config.mesh.fsdp=4" in row["advice"]
    backbone = dataclasses.replace(tiny.team.backbone, num_heads=6)
    other = dataclasses.replace(tiny, team=dataclasses.replace(tiny.team, backbone=backbone))
    with pytest.raises(ConfigError, match="6 query heads"):
        plan_pod.measure(other, "tiny", "v5e:2x2", "1,1,4", None, ())


@needs_libtpu
@pytest.mark.slow
def test_a_chip_does_and_holds_the_same_on_a_larger_slice(tiny):
    """Weak scaling, 4 to 16 chips: data grows, fsdp and tensor stay, a node for each part of the rows."""
    small, large = (
        plan_pod.measure(tiny, "", t, "-1,2,2", 1, ("rollout", "accumulate")) for t in ("v5e:2x2", "v5e:4x4")
    )
    assert large["mesh"] == [4, 2, 2] and large["shape"]["parts"] == tuple(
        (4 * n, g) for n, g in small["shape"]["parts"]
    )
    sent = lambda row: sum(row["stages"]["accumulate"]["collectives"].values())
    for name in ("prefill", "decode", "accumulate"):
        a, b = small["stages"][name], large["stages"][name]
        assert b["flops"] <= 1.1 * a["flops"] and a["flops"] <= 1.1 * b["flops"], name
        assert b["least"] <= 1.1 * a["least"], name
    # Gradients are added up over data: (n - 1) / n of twice their size, in float32, comes to what was sent before.
    gradient = 8 * small["parameters"] / 4
    assert sent(large) <= sent(small) + 1.25 * gradient
