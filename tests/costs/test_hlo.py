"""Counts of programs that libtpu compiled (tests/costs/dumps), against closed forms computed by hand."""

import gzip
import importlib.util
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.costs import hlo, hlo_text, kernel_flops
from jaxmarl_llm.costs.hlo_loops import Frame, trips

DUMPS = Path(__file__).parent / "dumps"
MB = 2**20


def program(name):
    return gzip.decompress((DUMPS / f"{name}.hlo.gz").read_bytes()).decode()


def counted(name, devices=4, **options):
    return hlo.count(program(name), devices, kernels=kernel_flops.TPU, **options)


def changed(name, old, new, number=1):
    """A program with the first ``number`` of ``old`` replaced, which must be there."""
    text = program(name)
    assert text.count(old) >= number
    return text.replace(old, new, number)


def scalars(found, expected):
    """Bytes by hand leave out counters of loops and other scalars: below 600 bytes in these programs."""
    return expected <= found.bytes < expected + 600


# ---- FLOPs and loops ------------------------------------------------------------------------------------------------


def test_a_product_has_2mnk_flops_and_moves_its_matrices_once():
    found = counted("product")
    assert found.flops == 2 * 256 * 512 * 384
    assert found.bytes == 2 * (256 * 512 + 512 * 384 + 256 * 384) and found.collectives == {}


def test_a_batched_product_counts_no_padding_of_the_batch_dimension():
    found = counted("batched")
    assert found.flops == 8 * 2 * 256 * 512 * 128
    assert found.bytes == 8 * (2 * 256 * 128 + 2 * 512 * 128 + 4 * 256 * 512)


def test_a_scan_runs_its_body_as_often_as_it_has_rows():
    found = counted("scan")
    assert found.flops == 7 * 2 * 256 * 512 * 512
    assert scalars(found, 7 * 2 * 512 * 512 + 2 * 2 * 256 * 512)


def test_a_loop_that_may_end_early_counts_its_bound_or_what_is_asked():
    """From 2 by 3 to 20: 6 rounds. A round has one branch or none, the condition reads x once more than the body."""
    once = 2 * 256 * 512 * 512
    before, two, whole = (counted("early", early=n) for n in (0, 2, None))
    assert (before.flops, two.flops, whole.flops) == (once, 3 * once, 7 * once)
    assert counted("early", early=100) == whole
    x, w = 2 * 256 * 512, 2 * 512 * 512
    # x and w are read, the product is written; w is fetched once more for the loop; the condition reads the product.
    assert scalars(before, x + w + x + w + x)
    assert scalars(whole._replace(bytes=whole.bytes - before.bytes), 6 * (x + x + x))


def test_of_two_branches_the_larger_counts():
    branch = re.compile(r"branch_computations=\{%region_1\.1, (%region_2\.2)\}")
    text = branch.sub(r"branch_computations={\1, \1}", program("early"))
    assert text != program("early") and hlo.count(text, 4) == counted("early")


@pytest.mark.parametrize("start", [0, 2])
def test_constants_of_nested_loops_are_found_through_loops_and_fusions(start):
    """JAX on the CPU writes the number of rounds; without it the constants say the same."""

    def run(x):
        inner = lambda i, x: jnp.sin(x @ x) * i
        return jax.lax.fori_loop(start, 9, lambda i, x: jax.lax.fori_loop(1, 6, inner, x + i), x)

    text = jax.jit(run).lower(jnp.ones((8, 8))).compile().as_text()
    bare = re.sub(r'"known_trip_count":\{"n":"\d+"\},?', "", text)
    assert bare != text
    assert hlo.count(text, 1).flops == hlo.count(bare, 1).flops == (9 - start) * 5 * 2 * 8**3


def test_trips_of_a_loop():
    module = hlo_text.parse(program("early"))
    (loop,) = (i for i in module.entry.instructions.values() if i.op == "while")
    assert trips(module, Frame(module.entry), loop) == (6, False)


@pytest.mark.parametrize("trial", range(6))
def test_flops_of_convolutions_against_one_of_ones(trial):
    """The sum of a convolution of ones is the number of its multiply-adds."""
    rng = np.random.default_rng(trial)
    groups, batches = [(1, 1), (2, 1), (1, 3)][trial % 3]
    options = {
        "window_strides": tuple(map(int, rng.integers(1, 4, 2))),
        "padding": [tuple(map(int, rng.integers(0, 4, 2))) for _ in range(2)],
        "lhs_dilation": tuple(map(int, rng.integers(1, 4, 2))),
        "rhs_dilation": tuple(map(int, rng.integers(1, 3, 2))),
        "feature_group_count": groups,
        "batch_group_count": batches,
    }
    x, w = np.ones((3, 4 * groups, 7, 9), np.float32), np.ones((6, 4, 2, 3), np.float32)
    apply = lambda x, w: jax.lax.conv_general_dilated(x, w, **options)
    attributes = jax.jit(apply).lower(x, w).compiler_ir("hlo").as_hlo_text()
    line = next(line for line in attributes.splitlines() if " convolution(" in line)
    out = apply(x, w)
    text = re.sub(r"= f32\[[\d,]*\]\{[\d,]*\} convolution\(([\w.]+), ([\w.]+)\)", r"= TYPE convolution(%\1, %\2)", line)
    left, right = re.search(r"convolution\(%([\w.]+), %([\w.]+)\)", text).groups()
    shape = lambda a: f"f32[{','.join(map(str, a.shape))}]"
    i = hlo_text.parse_instruction(text.replace("TYPE", shape(out)), 1)
    given = {
        name: hlo_text.parse_instruction(f"  %{name} = {shape(a)} parameter({k})", 1)
        for k, (name, a) in enumerate(((left, x), (right, w)))
    }
    assert hlo.product_flops(i, hlo_text.Computation("c", given | {i.name: i}, 1)) == 2 * float(out.sum()) > 0


# ---- collectives ----------------------------------------------------------------------------------------------------


def test_every_collective_sends_what_the_ring_of_its_participants_sends():
    """Four of eight chips, rows of 256 float32: 128 summed, 256 gathered, 512 scattered, 1024 exchanged, 2048 moved."""
    found, row = counted("collectives", 8), 4 * 256
    assert found.collectives == {
        "all-gather": 3 * 256 * row,
        "all-reduce": 2 * 3 / 4 * 128 * row,
        "all-to-all": 3 / 4 * 1024 * row,
        "collective-permute": 2048 * row,
        "reduce-scatter": 3 / 4 * 512 * row,
    }
    assert found.sent == sum(found.collectives.values())
    # Read: all operands. Written: sum and scatter once; the others leave VMEM by a copy.
    assert found.bytes == row * (128 + 256 + 512 + 1024 + 2048 + 128 + 128 + 1024 + 1024 + 2048)


def test_groups_of_every_form_have_their_size():
    for form in ("[2,4]<=[8]", "mesh['a'=2,'b'=4] {'b'}"):
        text = program("collectives").replace("replica_groups={{0,1,2,3},{4,5,6,7}}", f"replica_groups={form}")
        assert hlo.count(text, 8) == counted("collectives", 8) and form in text
    everyone = program("collectives").replace("replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_groups={}")
    assert hlo.count(everyone, 8).collectives["all-gather"] == 7 * 256 * 4 * 256


def test_a_permute_to_itself_sends_nothing():
    text = re.sub(r"source_target_pairs=\{.*?\}\}", "source_target_pairs={{0,0},{1,1}}", program("collectives"))
    assert hlo.count(text, 8).collectives["collective-permute"] == 0


@pytest.mark.parametrize("kind", ["v5e", "v6e"])
def test_weights_that_are_cut_are_gathered_twice_and_their_gradients_scattered(kind):
    """v5e: chains of fusions that hold the gather; both: an all-reduce and a slice in a fusion. Weights of 4 MB."""
    text, found = program(f"gathered_{kind}"), counted(f"gathered_{kind}")
    assert "all-reduce-scatter" in text and ("AsyncCollectiveStart" in text) == (kind == "v5e")
    layers, weight = 4, 4 * MB
    assert found.flops == layers * 2 * 3 * 2 * 1024 * 1024 * 2048  # two products, each thrice, on 1024 rows
    assert found.collectives == {
        "all-gather": layers * 2 * 2 * 3 / 4 * weight,
        "reduce-scatter": layers * 2 * 3 / 4 * weight,
    }
    # The parts of this chip are read twice, its gradients written once, x is read; all else stays in VMEM.
    assert scalars(found, layers * 2 * 3 * weight / 4 + 2 * 1024 * 1024)


def test_the_end_of_a_chain_is_known_by_its_custom_call_too():
    """A chain without fusions in the middle, whose end has no configuration of a chain."""
    parts = program("gathered_v5e").split("\n}\n")
    bare = [
        re.sub(r'"async_collective_fusion_config":\{[^}]*\},', "", p) if "CollectiveDone" in p else p for p in parts
    ]
    text = "\n}\n".join(bare)
    assert len(text) < len(program("gathered_v5e"))
    assert hlo.count(text, 4) == counted("gathered_v5e")


def test_a_reduce_scatter_of_several_arrays_is_one():
    text = changed("gathered_v6e", "all-reduce-scatter", "all-reduce-scatter", 2)
    assert hlo.count(text, 4).collectives.keys() == {"all-gather", "reduce-scatter"}
    whole = """HloModule m
%all-reduce-scatter (a: f32[8,4], b: f32[16]) -> (f32[2,4], f32[4]) {
  %a = f32[8,4] parameter(0)
  %b = f32[16] parameter(1)
  %r = (f32[8,4], f32[16]) all-reduce(%a, %b), channel_id=1, replica_groups={}, to_apply=%add
  %x = f32[8,4] get-tuple-element(%r), index=0
  %y = f32[16] get-tuple-element(%r), index=1
  %k = s32[] constant(0)
  %m = f32[2,4] dynamic-slice(%x, %k, %k), dynamic_slice_sizes={2,4}
  %n = f32[4] dynamic-slice(%y, %k), dynamic_slice_sizes={4}
  ROOT %t = (f32[2,4], f32[4]) tuple(%m, %n)
}

ENTRY %main (a: f32[8,4], b: f32[16]) -> (f32[2,4], f32[4]) {
  %a = f32[8,4] parameter(0)
  %b = f32[16] parameter(1)
  ROOT %f = (f32[2,4], f32[4]) fusion(%a, %b), kind=kCustom, calls=%all-reduce-scatter
}
"""
    found = hlo.count(whole, 4)
    assert found.collectives == {"reduce-scatter": 3 / 4 * 4 * 48} and found.bytes == 4 * (48 + 12)
    with pytest.raises(hlo.HloError, match=r"line 5 .*all-reduce-scatter fusion of this form has no rule"):
        hlo.count(whole.replace("s32[] constant(0)", "s32[] constant(1)").replace("f32[2,4]", "f32[4,4]"), 4)
    # Not in a fusion, the sum is made whole before it is cut.
    called = whole.replace("all-reduce-scatter", "steps").replace("fusion(", "call(").replace("calls=", "to_apply=")
    assert hlo.count(called, 4).collectives == {"all-reduce": 2 * 3 / 4 * 4 * 48}
    plain = whole.replace("%all-reduce-scatter", "%fused").replace("tuple(%m, %n)", "tuple(%x, %y)")
    plain = plain.replace("f32[2,4], f32[4]", "f32[8,4], f32[16]")
    assert hlo.count(plain, 4).collectives == {"all-reduce": 2 * 3 / 4 * 4 * 48}


# ---- bytes ----------------------------------------------------------------------------------------------------------


def test_a_prefetch_in_slices_reads_the_slices():
    """Four weights of 32 MB, two of which come to VMEM in eight slices each, in each of five rounds."""
    text = program("prefetch")
    assert len(re.findall(r" async-start\(", text)) == 8
    assert scalars(counted("prefetch"), 5 * 4 * 32 * MB + 2 * 2 * 16 * 2048)
    assert counted("prefetch").flops == 5 * 4 * 2 * 16 * 2048 * 8192


def test_rows_are_read_and_updated_without_the_whole():
    """128 rows of 512 bfloat16: read, written as a result, read and written by the sum; and six columns of a cache."""
    rows, column, cache, ids = 2 * 128 * 512, 2 * 64 * 2048, 2 * 64 * 1024 * 2048, 4 * 128
    assert scalars(counted("rows"), 4 * rows + ids + 6 * 2 * column + 2 * 2 * cache)


def fused(parameters, body, result, operands):
    """A program of one fusion. parameters, operands: of the fusion, name -> type. body: its instructions."""
    lines = [f"  %{name} = {kind} parameter({k})" for k, (name, kind) in enumerate(parameters.items())]
    inner = "\n".join([*lines, *(f"  {line}" for line in body)])
    outer = "\n".join(f"  %{name} = {kind} parameter({k})" for k, (name, kind) in enumerate(operands.items()))
    given = ", ".join(f"%{name}" for name in operands)
    return f"""HloModule m
%inner (p: f32[1]) -> f32[1] {{
{inner}
}}

ENTRY %main (a: f32[1]) -> f32[1] {{
{outer}
  ROOT %f = {result} fusion({given}), kind=kLoop, calls=%inner
}}
"""


@pytest.mark.parametrize(
    ("body", "result", "moved"),
    [
        # A slice behind an elementwise operation: rows of p; the index is 4 bytes.
        (
            [
                "%c = f32[64,8] negate(%p)",
                "%s = f32[2,8] dynamic-slice(%c, %i, %i), dynamic_slice_sizes={2,8}",
                "ROOT %r = f32[2,8] add(%s, %s)",
            ],
            "f32[2,8]",
            4 * (16 + 16 + 1),
        ),
        # Two slices, and one that is used by all.
        (
            [
                "%s = f32[2,8] dynamic-slice(%p, %i, %i), dynamic_slice_sizes={2,8}",
                "%t = f32[4,8] slice(%p), slice={[0:4], [0:8]}",
                "ROOT %r = (f32[2,8], f32[4,8]) tuple(%s, %t)",
            ],
            "(f32[2,8], f32[4,8])",
            4 * (2 * (16 + 32) + 1),
        ),
        (
            ["%s = f32[2,8] slice(%p), slice={[0:2], [0:8]}", "ROOT %r = (f32[64,8], f32[2,8]) tuple(%n, %s)"],
            "(f32[64,8], f32[2,8])",
            4 * (512 + 512 + 16),
        ),
        # p is handed through: neither read nor written. q is read and doubled.
        (["%d = f32[16] add(%q, %q)", "ROOT %r = (f32[64,8], f32[16]) tuple(%p, %d)"], "(f32[64,8], f32[16])", 4 * 32),
        # An update of a parameter writes the update, also behind a bitcast and beside another result.
        (
            [
                "%b = f32[512] bitcast(%p)",
                "%u = f32[512] dynamic-update-slice(%b, %q, %i)",
                "%v = f32[64,8] bitcast(%u)",
                "%d = f32[16] add(%q, %q)",
                "ROOT %r = (f32[64,8], f32[16]) tuple(%v, %d)",
            ],
            "(f32[64,8], f32[16])",
            4 * (16 + 16 + 16 + 1),
        ),
        # An update of something that is computed reads and writes the whole.
        (
            [
                "%b = f32[512] bitcast(%p)",
                "%n = f32[512] negate(%b)",
                "ROOT %u = f32[512] dynamic-update-slice(%n, %q, %i)",
            ],
            "f32[512]",
            4 * (512 + 16 + 512 + 1),
        ),
        # An updated parameter that is used further is computed whole.
        (
            [
                "%b = f32[512] bitcast(%p)",
                "%u = f32[512] dynamic-update-slice(%b, %q, %i)",
                "ROOT %n = f32[512] negate(%u)",
            ],
            "f32[512]",
            4 * (512 + 16 + 512 + 1),
        ),
        # A reduction reads all, whatever its size.
        (["ROOT %r = f32[] reduce(%p, %i), dimensions={0,1}, to_apply=%add"], "f32[]", 4 * (512 + 1 + 1)),
    ],
)
def test_a_fusion_moves_what_it_uses(body, result, moved):
    """Parameters in main memory: p of 512 numbers, q of 16, i of 1."""
    kinds = {"p": "f32[64,8]", "q": "f32[16]", "i": "s32[]"}
    if "tuple(%n" in body[-1]:
        body = ["%n = f32[64,8] negate(%p)", *body]
    assert hlo.count(fused(kinds, body, result, kinds), 1).bytes == moved


def test_an_asynchronous_collective_reads_and_writes_once():
    """Three fusions share the operand of 8 numbers, the result of 32, and flags in another memory."""
    text = """HloModule m
%start (p: f32[8]) -> (f32[8], f32[32], u32[]) {
  %p = f32[8] parameter(0)
  %g = f32[32] all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}
  ROOT %c = (f32[8], f32[32], u32[]{:S(2)}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%middle (p: f32[8], o: f32[32], s: u32[], x: f32[16]) -> (f32[16], f32[8], f32[32], f32[32], u32[]) {
  %p = f32[8] parameter(0)
  %o = f32[32] parameter(1)
  %s = u32[]{:S(2)} parameter(2)
  %x = f32[16] parameter(3)
  %g = f32[32] all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}, backend_config={"CHAIN":{}}
  %y = f32[16] add(%x, %x)
  ROOT %t = (f32[16], f32[8], f32[32], f32[32], u32[]{:S(2)}) tuple(%y, %p, %o, %g, %s)
}

%done (p: f32[8], o: f32[32], s: u32[]) -> f32[32] {
  %p = f32[8] parameter(0)
  %o = f32[32] parameter(1)
  %s = u32[]{:S(2)} parameter(2)
  %g = f32[32] all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}, backend_config={"CHAIN":{}}
  ROOT %c = f32[32] custom-call(%p, %o, %g, %s), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (a: f32[8], x: f32[16]) -> f32[32] {
  %a = f32[8] parameter(0)
  %x = f32[16] parameter(1)
  %f = (f32[8], f32[32], u32[]{:S(2)}) fusion(%a), kind=kCustom, calls=%start
  %p = f32[8] get-tuple-element(%f), index=0
  %o = f32[32] get-tuple-element(%f), index=1
  %s = u32[]{:S(2)} get-tuple-element(%f), index=2
  %m = (f32[16], f32[8], f32[32], f32[32], u32[]{:S(2)}) fusion(%p, %o, %s, %x), kind=kOutput, calls=%middle
  %q = f32[8] get-tuple-element(%m), index=1
  %r = f32[32] get-tuple-element(%m), index=2
  %u = u32[]{:S(2)} get-tuple-element(%m), index=4
  ROOT %d = f32[32] fusion(%q, %r, %u), kind=kCustom, calls=%done
}
""".replace("CHAIN", "async_collective_fusion_config")
    found = hlo.count(text, 4)
    assert found.bytes == 4 * (8 + 32 + 2 * 16) and found.collectives == {"all-gather": 3 * 4 * 8}


@pytest.mark.parametrize(
    ("body", "kind", "moved"),
    [
        (
            """%s = (f32[8]{0}, f32[32]{0}) all-gather-start(%a), replica_groups={}, dimensions={0}
  ROOT %d = f32[32]{0} all-gather-done(%s)""",
            "all-gather",
            8 + 32,
        ),
        (
            """%s = f32[8]{0} all-reduce-start(%a), replica_groups={}, to_apply=%add
  ROOT %d = f32[8]{0} all-reduce-done(%s)""",
            "all-reduce",
            8 + 8,
        ),
        (
            """%s = ((f32[8]{0}), f32[32]{0}, u32[]{:S(2)}) async-start(%a), calls=%wrapped
  %u = ((f32[8]{0}), f32[32]{0}, u32[]{:S(2)}) async-update(%s)
  ROOT %d = f32[32]{0} async-done(%u)""",
            "all-gather",
            8 + 32,
        ),
    ],
)
def test_a_start_and_its_end_count_once(body, kind, moved):
    text = f"""HloModule m
%wrapped (p: f32[8]) -> f32[32] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %g = f32[32]{{0}} all-gather(%p), replica_groups={{}}, dimensions={{0}}
}}

ENTRY %main (a: f32[8]) -> f32[32] {{
  %a = f32[8]{{0}} parameter(0)
  {body}
}}
"""
    found = hlo.count(text, 4)
    assert found.collectives == {kind: {"all-gather": 3.0, "all-reduce": 1.5}[kind] * 4 * 8}
    assert found.bytes == 4 * moved


def test_a_named_asynchronous_slice_moves_the_slice():
    text = """HloModule m
ENTRY %main (a: f32[1024]) -> f32[16] {
  %a = f32[1024] parameter(0)
  %s = ((f32[1024]), f32[16]{0:S(1)}, u32[]{:S(2)}) slice-start(%a), slice={[0:16]}
  ROOT %d = f32[16]{0:S(1)} slice-done(%s)
}
"""
    assert hlo.count(text, 1).bytes == 4 * 16
    assert hlo.count(text.replace(":S(1)", ""), 1).bytes == 2 * 4 * 16


# ---- kernels --------------------------------------------------------------------------------------------------------


def test_causal_kernels_count_the_blocks_that_they_compute():
    """1024 tokens in blocks of 512: 3 of 4. Of 2 rows, 4 heads, 128: 2 products forward; 3 and 4 in the gradient."""
    block = 2 * 2 * 4 * 512 * 512 * 128
    assert counted("splash").flops == 3 * 3 * (2 + 3 + 4) * block
    with pytest.raises(hlo.HloError, match=r"line \d+ .*kernel 'splash_mha_\w+' has neither an estimate"):
        hlo.count(program("splash"), 1)
    # The text of a kernel goes over several lines; nothing behind it is lost: the loop over layers is read to its end.
    assert len(hlo_text.parse(program("splash")).computations) == program("splash").count(") -> ")


def test_the_authors_estimate_counts():
    found = hlo.count(program("estimated"), 1)
    assert (found.flops, found.bytes) == (12345, 2 * 4 * 512 * 512)


def test_every_kernel_has_a_closed_form():
    seen = {}

    def recorded(name):
        return lambda kernel: seen.setdefault(name, []).append(kernel_flops.TPU[name](kernel)) or 0.0

    hlo.count(program("kernels"), 1, kernels={name: recorded(name) for name in kernel_flops.TPU})
    pairs = 2 * 4 * (1024 * 1025 // 2) * 128  # rows, heads, causal pairs, size of a head
    assert sorted(seen.pop("tree_attention")) == [2 * products * pairs for products in (2, 3, 4)]
    # 3 prompts, 2 heads of keys, and for each 8 samples of 2 heads; 512 keys.
    assert seen == {
        "group_decode": [2 * 2 * 3 * 2 * 16 * 512 * 128],
        "head_block_stats": [2 * 32 * 16384 * 256],
    }


# ---- what has no rule raises ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("scan", " tanh(", " lgamma(", "opcode lgamma has no rule"),
        ("product", " convolution(", " ragged-dot(", "opcode ragged-dot has no rule"),
        ("prefetch", 'custom_call_target="ConcatBitcast"', 'custom_call_target="Matmul"', "'Matmul' has no rule"),
        ("scan", "direction=LT", "direction=NE", "does not compare a counter with a constant"),
        ("scan", "= bf16[256,512]", "= bf17[256,512]", r"type bf17\[256,512\] has no rule"),
        ("product", "= bf16[256,512]", "= bf16[<=256,512]", r"type bf16\[<=256,512\] has no rule"),
        ("collectives", "replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_groups={{0,1},{2,3,4}}", "replica groups"),
        ("collectives", "replica_groups={{0,1,2,3},{4,5,6,7}}", "iota=1", "replica groups"),
        ("collectives", " all-to-all(", " ragged-all-to-all(", "opcode ragged-all-to-all has no rule"),
        ("gathered_v5e", '"AsyncCollectiveStart"', '"AllocateBuffer"', "no fusion starts the asynchronous collective"),
        ("product", "dim_labels=bf_io->bf", "labels=none", "without dim_labels"),
        ("batched", "stride=7", "step=7", "step has no rule"),
        ("batched", "size=8", "size=9", "differ from those of the kernel"),
        ("splash", "}}, metadata=", "}, metadata=", "expected an instruction"),
        ("product", "\n}\n", "\nfree text\n}\n", "expected an instruction: free text"),
        ("product", "\n\nENTRY", "\n\nfree text\n\nENTRY", "expected the head of a computation"),
        ("product", "calls=%fused_computation", "calls=%other", "expected one known computation"),
        ("product", "%copy-done)", "%copy-gone)", r"operand copy-gone is not in computation main\.1"),
        ("product", "ROOT %convolution", "%convolution", "has 0 roots"),
        ("product", "ENTRY ", "", "no entry computation"),
    ],
)
def test_what_has_no_rule_is_refused_with_its_line(name, old, new, said):
    text = changed(name, old, new, 1 if old != '"AsyncCollectiveStart"' else 3)
    with pytest.raises(hlo.HloError, match=rf"^line \d+ of the compiled program: .*{said}"):
        hlo.count(text, 8, kernels=kernel_flops.TPU)


def test_the_line_of_an_error_is_that_of_the_text():
    text = changed("scan", " tanh(", " lgamma(")
    number = 1 + next(k for k, line in enumerate(text.splitlines()) if " lgamma(" in line)
    with pytest.raises(hlo.HloError, match=rf"^line {number} of"):
        hlo.count(text, 1)


def test_a_loop_that_does_not_start_at_a_constant_is_refused():
    text = re.sub(r"(%copy\.\d+ = s32\[\]\{:T\(128\)\}) copy\(%constant[\w.]*\)", r"\1 partition-id()", program("scan"))
    assert text != program("scan")
    with pytest.raises(hlo.HloError, match=r"does not count from a constant by a constant step"):
        hlo.count(text, 1)


def test_text_that_is_no_program_is_refused():
    with pytest.raises(hlo.HloError, match=r"line 1 .*expected the head of a computation: nothing"):
        hlo_text.parse("nothing")
    with pytest.raises(hlo.HloError, match="no entry"):
        hlo_text.parse("HloModule m\n")
    cut = program("product").rpartition("}")[0]
    with pytest.raises(hlo.HloError, match=r"computation main\.1 does not end"):
        hlo_text.parse(cut)


# ---- parsing --------------------------------------------------------------------------------------------------------


def test_types_layouts_and_attributes_are_parsed():
    text = (
        "  ROOT %a.1 = ((bf16[2,3]{1,0:T(8,128)(2,1)S(1)}), /*index=1*/pred[], s4[8]{0:S(5)}) async-start(%b, %c.2), "
        "calls=%d, slice={[0:1], [2:3]}, metadata={op_name=\"f(x, y=\\\"}\\\")\"}, replica_groups=mesh['a'=2] {'a'}"
    )
    i = hlo_text.parse_instruction(text, 3)
    assert (i.name, i.root, i.op, i.operands, i.line) == ("a.1", True, "async-start", ("b", "c.2"), 3)
    assert i.type[0] == (hlo_text.Array("bf16", (2, 3), 1),) and [a.space for a in i.result] == [1, 0, 5]
    assert [a.bytes for a in i.result] == [12, 1, 4] and i.result[1].elements == 1
    assert i.attributes["metadata"] == '{op_name="f(x, y=\\"}\\")"}' and i.called("calls") == ["d"]
    assert i.integers("slice") == (0, 1, 2, 3) and i.attributes["replica_groups"] == "mesh['a'=2] {'a'}"


def test_an_instruction_ends_where_its_brackets_and_strings_end():
    text = """HloModule m
ENTRY %main () -> f32[2] {
  %a = f32[2] custom-call(), custom_call_target="two
} lines", frontend_attributes={x={
"y":"}"
}}, metadata={op_name="a"}
  ROOT %b = f32[2] negate(%a)
}
"""
    found = hlo_text.parse(text).entry.instructions
    assert list(found) == ["a", "b"] and (found["a"].line, found["b"].line) == (3, 7)
    assert found["a"].attributes["custom_call_target"] == '"two\n} lines"'
    assert found["a"].attributes["metadata"] == '{op_name="a"}'


def test_every_dump_is_small_and_has_a_program_that_makes_it():
    from tests.costs.dumps import make

    files = {path.name.removesuffix(".hlo.gz"): path for path in DUMPS.glob("*.gz")}
    assert files.keys() == make.PROGRAMS.keys() and max(p.stat().st_size for p in files.values()) < 60_000
    assert make.cut_folders('1 "/home/me/tests/costs/a.py" "body":"TUz" "/x/site-packages/jax/b.py"') == (
        '1 "tests/costs/a.py" "body":"" "site-packages/jax/b.py"'
    )
    assert not any('"/' in program(name) for name in files)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra aot (libtpu)")
def test_this_libtpu_writes_programs_that_count_the_same():
    from experiments.tpu import compile_ahead
    from tests.costs.dumps import make

    _, text = compile_ahead.compile_text(make.PROGRAMS["gathered_v5e"]())
    found = hlo.count(text, 4)
    assert found[::2] == counted("gathered_v5e")[::2]
