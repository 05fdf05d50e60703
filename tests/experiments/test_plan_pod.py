"""Compiled for TPUs without one: sizes follow from the sharding rules, counts from shapes, advice from what is full."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import pytest

from experiments.tpu import compile_ahead, plan_pod
from experiments.tpu import report as pods
from jaxmarl_llm.agents.team import Backbone
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.costs import hlo
from jaxmarl_llm.costs import model as costs
from jaxmarl_llm.costs.known_shapes import architecture, shape_only
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.generate import sample_completions
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import decoder
from jaxmarl_llm.models.batch_invariant import invariant

JOY = "experiments/configs/joyagents_r1.py"
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot (libtpu)")

# A loop of 3 rounds around a product, a slice of stacked weights and collectives over 4 devices; and a loop that may
# end before its 7 rounds.
PROGRAM = """HloModule test, num_partitions=4

%slice.1 (param_0.1: bf16[3,8,16], param_1.1: s32[]) -> bf16[8,16] {
  %param_0.1 = bf16[3,8,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1.1 = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %cut = bf16[1,8,16]{2,1,0} dynamic-slice(%param_0.1, %param_1.1, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %b = bf16[8,16]{1,0} bitcast(%cut)
}

%body (p: (s32[], bf16[4,8], bf16[3,8,16])) -> (s32[], bf16[4,8], bf16[3,8,16]) {
  %p = (s32[]{:T(128)}, bf16[4,8]{1,0}, bf16[3,8,16]{2,1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %w = bf16[3,8,16]{2,1,0} get-tuple-element(%p), index=2
  %layer = bf16[8,16]{1,0} fusion(%w, %i), kind=kLoop, calls=%slice.1
  %gathered = bf16[8,64]{1,0:S(1)} all-gather(%layer), channel_id=1, replica_groups=[1,4]<=[4], dimensions={1}
  %y = f32[4,64]{1,0:S(1)} convolution(%x, %gathered), dim_labels=bf_io->bf
  %sum = f32[4,64]{1,0:S(1)} all-reduce(%y), channel_id=2, replica_groups=mesh['a'=2,'b'=2] {'b'}, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, bf16[4,8]{1,0}, bf16[3,8,16]{2,1,0}) tuple(%i, %x, %w)
}

%bounded (q: (s32[], bf16[4,8], bf16[3,8,16])) -> pred[] {
  %three = s32[]{:T(128)} constant(3)
  %q = (s32[]{:T(128)}, bf16[4,8]{1,0}, bf16[3,8,16]{2,1,0}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %less = pred[]{:T(512)} compare(%j, %three), direction=LT
}

%early (q.1: (s32[], pred[])) -> pred[] {
  %seven = s32[]{:T(128)} constant(7)
  %q.1 = (s32[]{:T(128)}, pred[]) parameter(0)
  %j.1 = s32[]{:T(128)} get-tuple-element(%q.1), index=0
  %done = pred[]{:T(512)} get-tuple-element(%q.1), index=1
  %less.1 = pred[]{:T(512)} compare(%j.1, %seven), direction=LT
  ROOT %go = pred[]{:T(512)} and(%less.1, %done)
}

%token (r: (s32[], pred[])) -> (s32[], pred[]) {
  %r = (s32[]{:T(128)}, pred[]) parameter(0)
  %k = s32[]{:T(128)} get-tuple-element(%r), index=0
  %f = pred[]{:T(512)} get-tuple-element(%r), index=1
  %m = f32[2,5]{1,0:S(1)} broadcast(%k), dimensions={}
  %n = f32[5,3]{1,0:S(1)} broadcast(%k), dimensions={}
  %d = f32[2,3]{1,0:S(1)} dot(%m, %n), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t.1 = (s32[]{:T(128)}, pred[]) tuple(%k, %f)
}

ENTRY %main (a: (s32[], bf16[4,8], bf16[3,8,16]), c: (s32[], pred[])) -> (s32[], pred[]) {
  %a = (s32[]{:T(128)}, bf16[4,8]{1,0}, bf16[3,8,16]{2,1,0}) parameter(0)
  %c = (s32[]{:T(128)}, pred[]) parameter(1)
  %loop = (s32[]{:T(128)}, bf16[4,8]{1,0}, bf16[3,8,16]{2,1,0}) while(%a), condition=%bounded, body=%body
  ROOT %loop.1 = (s32[]{:T(128)}, pred[]) while(%c), condition=%early, body=%token
}
"""


def test_a_program_is_counted_as_often_as_it_runs():
    product, dot = 2 * 4 * 8 * 64, 2 * 2 * 5 * 3
    # A layer of 256 bytes is read, written and gathered (twice read, once written), x is read; i is 4 bytes.
    moved = 256 + 4 + 256 + 256 + 64
    sent = {"all-gather": 3 * (3 / 4) * 1024, "all-reduce": 3 * 2 * (1 / 2) * 1024}
    before, whole = hlo.count(PROGRAM, 4, early=0), hlo.count(PROGRAM, 4)
    assert before.flops == 3 * product and whole.flops == 3 * product + 7 * dot
    assert hlo.count(PROGRAM, 4, early=1).flops == 3 * product + dot
    assert before.bytes == 3 * moved
    assert whole.collectives == sent


def test_a_loop_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="loop"):
        hlo.count(PROGRAM.replace("direction=LT", "direction=NE"), 4)
    with pytest.raises(ValueError, match="no entry"):
        hlo.parse("nothing")


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
    assert work.models[0].config.num_kv_heads % cfg.mesh.tensor == 0
    assert shape_only(bare) == bare


def test_what_the_compiler_says_of_too_little_memory_is_read():
    said = "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 32.50G of 15.75G hbm."
    assert compile_ahead.needs(said) == int(32.5 * 2**30)
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


def test_search_proposes_meshes_that_can_be_and_puts_those_that_fit_first():
    bare, plan, work, _ = plan_pod.prepare(
        config_flags.load(f"{JOY}:qwen2_5_7b", [("team.parameter_sharing", "shared")])
    )
    found = plan_pod.proposals(bare, plan, work, "v6e:16x16")
    for p in found:
        data, fsdp, tensor = map(int, p["mesh"].split(","))
        assert data * fsdp * tensor == 256 and 4 % tensor == 0 and 3584 % fsdp == 0
    fits = [p["fits"] for p in found]
    assert fits[0] and not fits[-1] and fits == sorted(fits, reverse=True)
    # All parameters on every chip, 7.6e9 x (2 + 2 x 2) bytes beside float32 gradients, are too many.
    assert not next(p for p in found if p["mesh"] == "256,1,1")["fits"]
    seconds = [p["seconds"] for p in found if p["fits"]]
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
        "step": {"total": 12.0, "bottleneck": "decode: memory"},
        "versions": {"jax": "1", "libtpu": "2"},
        "date": "2026-11-22",
    }
    too_large = {k: v for k, v in row.items() if k != "step"} | {"fits": False, "stages": {}, "advice": "--flag"}
    doc = tmp_path / "pods.md"
    doc.write_text(f"before {pods.BEGIN} old {pods.END} after")
    rows = [row, too_large, row | {"rows": 1}, row | {"rows": 1, "chips": 8}]
    pods.write(json.loads(json.dumps(rows)), doc)
    text = doc.read_text()
    assert text.startswith("before ") and text.endswith(" after") and " old " not in text
    assert "| joy, 5 x 3.0B separate | v5e:2x2 (16 GB) | 1 x 2 x 2 | 2.00 | 1.00 | 3.00 | 1.00 | 9.00 | 12.3 |" in text
    assert "12 s | decode: memory |" in text and "does not fit | --flag |" in text
    assert "| 8 | 1 x 2 x 2 |" in text and (tmp_path / "results" / "pods.png").stat().st_size > 1000


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
    assert [group for _, group in parts] == [1, 2]  # alternatives and the base in one launch
    dense = 2 * (kernels - 512 * 64)
    assert stages["prefill"]["flops"] == n * p * (dense + 4 * 64 * p) / 4
    token = lanes * (dense + 4 * 64 * (p + r - 1) + 2 * 512 * 64) / 4
    # Beside it the running sum inside a block of the inverse CDF, a triangular product, on each half of the rows.
    assert stages["decode"]["flops"] == token + lanes / 2 * 2 * 256**2
    # Generation sends no parameters, the update gathers and reduces them: the embedding alone is 512 x 64 of them.
    assert stages["decode"]["collectives"].get("all-gather", 0) < 512 * 64 / 2
    assert sum(stages["accumulate"]["collectives"].values()) > 512 * 64
    again = plan_pod.measure(tiny, "again", "v5e:2x2", "1,2,2", None, ("rollout", "accumulate"), [row])
    assert again["stages"] == row["stages"]


@needs_libtpu
def test_invariant_generation_on_four_chips(tiny):
    """Each chip generates for its own rows with whole weights: these are gathered, and no sum goes over chips."""
    arch = tiny.team.backbone
    cfg = decoder.Config(
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
    small = costs.CHIPS["v5e"]._replace(memory=4_000_000.0)
    monkeypatch.setitem(costs.CHIPS, "v5e", small)
    monkeypatch.setattr(compile_ahead, "compile_stages", lambda *args: pytest.fail("compiled"))
    row = plan_pod.measure(tiny, "tiny", "v5e:2x2", "4,1,1", None, ())
    assert not row["fits"] and "--config.mesh.data=1 --config.mesh.fsdp=4" in row["advice"]
    with pytest.raises(ConfigError, match="key/value heads"):
        plan_pod.measure(tiny, "tiny", "v5e:2x2", "1,1,4", None, ())


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
