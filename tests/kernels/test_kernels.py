"""What every kernel with forms for accelerators must do: each form gives the values and gradients of a dense reference,
lowers for its platform and is compiled for TPUs, all on a machine that has only a CPU; what auto takes; bad input."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxmarl_llm.distributed import meshes
from jaxmarl_llm.kernels import pallas_triton
from jaxmarl_llm.kernels.attention import group_decode_pallas, tree_pallas
from jaxmarl_llm.kernels.attention.causal import causal_attention
from jaxmarl_llm.kernels.attention.group import group_attention
from jaxmarl_llm.kernels.attention.group_decode import group_decode_attention
from jaxmarl_llm.kernels.attention.tree import tree_attention
from jaxmarl_llm.kernels.head.head import Head
from jaxmarl_llm.kernels.head.sample import head_sample
from jaxmarl_llm.kernels.quantized import VALUES, quantize_vectors
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from tests.kernels import test_group_attention as test_group_attention
from tests.kernels import test_tree_attention as test_tree_attention

FORMS = ("xla", "gpu", "tpu")
DTYPES = st.sampled_from([jnp.float32, jnp.bfloat16])
FEW = settings(max_examples=2)  # beside the examples


def agree(form: Callable[[str], Callable], reference: Callable, args: tuple, seed: int = 0) -> None:
    """Outputs and gradients of each form against those of the reference, which computes in float32.

    The error allowed is a share of the largest entry: rounding of the dtype, a few times.
    """
    pull = np.random.default_rng(seed).normal(size=args[0].shape).astype(np.float32)

    @jax.jit
    def all_forms(args: tuple) -> list:
        def both(f: Callable, args: tuple) -> list:
            out, back = jax.vjp(f, *args)
            return [out, *back(pull.astype(out.dtype))]

        exact = tuple(x.astype(jnp.float32) for x in args)
        return [both(reference, exact), *(both(form(impl), args) for impl in FORMS)]

    want, *got = all_forms(args)
    share = 2e-5 if args[0].dtype == jnp.float32 else 2e-2
    for impl, outputs in zip(FORMS, got):
        for i, (x, y) in enumerate(zip(outputs, want, strict=True)):
            assert x.dtype == args[0].dtype and x.shape == y.shape
            bound = share * max(1.0, np.abs(y).max(initial=0.0))
            np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=bound, rtol=0, err_msg=f"{impl}, output {i}")


# ------------------------------------------------------------------------------------------------------- the decode


def of_decode(rng, n, g, p, s, share, kv, h, dtype, t=None):
    """Arguments with ragged lengths (0 among them where a row has own keys), and rubbish in slots that do not count."""
    t = int(rng.integers(-1 if p else 0, s)) if t is None else t
    array = lambda *dims: rng.normal(0, 1.5, dims).astype(np.float32)
    length = rng.integers(0 if t >= 0 else 1, p + 1, n).astype(np.int32)
    pk, pv, ok, ov = array(n, p, kv, h), array(n, p, kv, h), array(n, g, s, kv, h), array(n, g, s, kv, h)
    for x in (pk, pv):
        x[np.arange(p) >= length[:, None]] = 1e4
    for x in (ok, ov):
        x[:, :, t + 1 :] = 1e4
    return [jnp.asarray(x, dtype) for x in (array(n, g, 1, share * kv, h), pk, pv, ok, ov)], length, t


@FEW
@given(
    n=st.integers(1, 3),
    g=st.integers(1, 4),
    p=st.integers(0, 700),
    s=st.integers(1, 70),
    share=st.integers(1, 4),
    kv=st.integers(1, 3),
    h=st.sampled_from([8, 24, 64, 128]),
    dtype=DTYPES,
)
@example(n=2, g=1, p=40, s=0, share=3, kv=1, h=64, dtype=jnp.float32)  # no suffix; a group of one
@example(n=1, g=3, p=0, s=5, share=2, kv=2, h=64, dtype=jnp.float32)  # no prefix
@example(n=2, g=9, p=600, s=70, share=8, kv=2, h=64, dtype=jnp.bfloat16)  # several parts, several blocks of rows
@pytest.mark.parametrize("whole", [0, group_decode_pallas.WHOLE])
def test_decode(whole, n, g, p, s, share, kv, h, dtype):
    """On GPU in parts, and in one operation; keys of both are beyond one block."""
    with mock.patch.object(group_decode_pallas, "WHOLE", whole):
        check_decode(n, g, p, s, share, kv, h, dtype)


def check_decode(n, g, p, s, share, kv, h, dtype):
    args, length, t = of_decode(np.random.default_rng(p + s), n, g, p, s, share, kv, h, dtype)

    def form(impl):
        of = partial(group_decode_attention, impl=impl, interpret=True)
        return lambda q, pk, pv, ok, ov: of(q, pk, pv, length, ok, ov, t)

    reference = lambda q, pk, pv, ok, ov: test_group_attention.dense(q, pk, pv, length, ok, ov, t)
    agree(form, reference, tuple(args))


@pytest.mark.parametrize("impl, whole", [("gpu", 0), ("gpu", 1024), ("tpu", 0)])
def test_decode_never_reads_the_prefix_behind_its_length(impl, whole, monkeypatch):
    (q, pk, pv, ok, ov), length, t = of_decode(np.random.default_rng(0), 3, 2, 600, 5, 2, 2, 64, jnp.float32)
    behind = np.arange(600) >= length[:, None]
    assert behind.any()
    monkeypatch.setattr(group_decode_pallas, "WHOLE", whole)
    run = jax.jit(partial(group_decode_attention, impl=impl, interpret=True))
    broken = [jnp.where(behind[..., None, None], jnp.nan, x) for x in (pk, pv)]
    out = run(q, *broken, length, ok, ov, t)
    np.testing.assert_array_equal(out, run(q, pk, pv, length, ok, ov, t))


def test_decode_gives_no_number_where_there_is_none():
    """Row 0 has no key; a slot and a length beyond the caches, which only the data tells."""
    (q, pk, pv, ok, ov), _, _ = of_decode(np.random.default_rng(0), 2, 2, 6, 4, 2, 2, 8, jnp.float32)
    for impl in ("auto", "gpu", "tpu"):  # whoever asks for xla sees to it
        run = jax.jit(partial(group_decode_attention, impl=impl, interpret=True))
        of = lambda length, t, run=run: np.isnan(run(q, pk, pv, np.array(length), ok, ov, t)).all((1, 2, 3, 4)).tolist()
        assert of([0, 6], -1) == [True, False], impl
        assert of([0, 7], 3) == [False, True], impl
        assert of([1, 6], 4) == [True, True], impl
        assert of([0, 6], 3) == [False, False], impl


# ------------------------------------------------------------------------------------------------------ the training


@FEW
@given(
    n=st.integers(1, 2),
    g=st.integers(1, 4),
    p=st.integers(0, 200),
    r=st.integers(1, 80),
    share=st.integers(1, 3),
    kv=st.integers(1, 2),
    h=st.sampled_from([8, 24, 64, 128]),
    dtype=DTYPES,
)
@example(n=2, g=5, p=150, r=50, share=2, kv=2, h=64, dtype=jnp.float32)
@example(n=1, g=1, p=20, r=1, share=1, kv=1, h=16, dtype=jnp.bfloat16)
def test_training(n, g, p, r, share, kv, h, dtype):
    (_, *caches), length, _ = of_decode(np.random.default_rng(p + r), n, g, p, r, share, kv, h, dtype, t=r - 1)
    q = jnp.asarray(np.random.default_rng(1).normal(0, 1.5, (n, g, r, share * kv, h)), dtype)
    block = {"gpu": 32, "tpu": 128, "xla": None}

    def form(impl):
        of = partial(group_attention, impl=impl, interpret=True, block=block[impl])
        return lambda q, pk, pv, ok, ov: of(q, pk, pv, length, ok, ov)

    reference = lambda q, pk, pv, ok, ov: test_group_attention.dense(q, pk, pv, length, ok, ov, 0)
    agree(form, reference, (q, *caches))


# ------------------------------------------------------------------------------------------------------- the prompt


@FEW
@given(b=st.integers(1, 2), blocks=st.integers(1, 3), share=st.integers(1, 3), h=st.sampled_from([8, 64]), dtype=DTYPES)
@example(b=1, blocks=2, share=2, h=64, dtype=jnp.float32)
def test_prompt(b, blocks, share, h, dtype):
    t, rng = 128 * blocks, np.random.default_rng(blocks)
    array = lambda heads: jnp.asarray(rng.normal(0, 1.5, (b, t, heads, h)), dtype)
    form = lambda impl: partial(causal_attention, impl=impl, interpret=True)
    reference = lambda *x: test_tree_attention.dense(*x, np.tri(t, dtype=bool)[None])
    agree(form, reference, (array(2 * share), array(2), array(2)))


# --------------------------------------------------------------------------------------------------------- the tree


def dense_tree(q, k, v, end):
    i, j = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])
    see = (j <= i) & (i < end[:, None, :])
    return test_tree_attention.dense(q, k, v, see | (end == 0)[..., None])  # padding sees anything, and is not asked


@FEW
@given(
    b=st.integers(1, 2),
    t=st.integers(1, 300),
    spare=st.integers(0, 150),
    join=st.sampled_from([0.5, 0.9, 0.99]),
    share=st.integers(1, 3),
    kv=st.integers(1, 2),
    h=st.sampled_from([8, 24, 64, 128]),
    dtype=DTYPES,
)
@example(b=2, t=400, spare=20, join=0.98, share=2, kv=2, h=64, dtype=jnp.float32)
@example(b=1, t=300, spare=0, join=1.0, share=1, kv=1, h=16, dtype=jnp.bfloat16)  # one sequence: causal attention
def test_tree(b, t, spare, join, share, kv, h, dtype):
    rng = np.random.default_rng(t + spare)
    end = np.stack([test_tree_attention.forest(rng, t, spare, join)[1] for _ in range(b)])
    array = lambda heads: jnp.asarray(rng.normal(0, 1.5, (b, t + spare, heads, h)), dtype)
    real = (end > 0)[..., None, None]

    def form(impl):
        of = partial(tree_attention, impl=impl, interpret=True, block={"gpu": 32, "tpu": 128, "xla": None}[impl])
        return lambda *x: jnp.where(real, of(*x, end), 0)

    agree(form, lambda *x: jnp.where(real, dense_tree(*x, end), 0), (array(share * kv), array(kv), array(kv)))


def test_tree_visits_the_blocks_that_are_seen():
    """Of [prompt of 4 blocks | 8 responses of 2]: 10 pairs in the prompt, 4 + 3 a response. And any forest."""
    rng, size = np.random.default_rng(0), 16
    p, r, g = 4 * size, 2 * size, 8
    fork = np.concatenate([np.full(p, p + g * r), p + r * (1 + np.arange(g)).repeat(r)])
    visits = jax.jit(tree_pallas.visits, static_argnums=(1, 2))
    (_, count), (_, back) = visits(fork[None], size, p + g * r)
    assert count.sum() == back.sum() == 10 + g * (2 * 4 + 3)
    (_, count), (_, back) = visits(fork[None], size, g * r)  # the responses alone ask
    assert count.sum() == back.sum() == g * (2 * 4 + 3) and count.shape == (1, 2 * g) and back.shape == (1, 4 + 2 * g)
    for t, spare, before in ((200, 30, 0), (200, 30, 45), (37, 0, 5), (5, 60, 0)):
        _, end = test_tree_attention.forest(rng, t, spare, 0.97)
        i, j = np.arange(t + spare)[:, None], np.arange(t + spare)
        pairs = np.argwhere((j <= i) & (i < end) & (i >= before)) - [before, 0]
        lists, pairs = visits(end[None], size, t + spare - before), pairs // size
        for (order, count), side in zip(lists, (0, 1)):
            for block, row in enumerate(order[0]):
                # Whether one of a block's keys is seen by one of the queries; a block that is all padding by none.
                assert (
                    row[: count[0, block]].tolist() == np.unique(pairs[pairs[:, side] == block][:, 1 - side]).tolist()
                )


def test_tree_padding_gets_zeros_and_no_gradient():
    end = np.zeros((1, 140), np.int32)
    end[:, :100] = 100
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 140, 2, 8)), jnp.float32)
    for impl in ("gpu", "tpu"):
        of = partial(tree_attention, end=end, impl=impl, interpret=True)
        out, back = jax.jit(lambda *x, of=of: (of(*x), jax.vjp(of, *x)[1](jnp.ones_like(x[0]))))(x, x, x)
        for y in (out, *back):
            assert not np.asarray(y)[:, 100:].any() and np.asarray(y)[:, 1:100].any((2, 3)).all()


# ---------------------------------------------------------------------------------------------- lowered, compiled


def shape(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)


@dataclasses.dataclass(frozen=True)
class Program:
    call: Callable[..., Any]  # (arguments, impl)
    arguments: tuple
    name: str  # of its Pallas calls, an expression
    absent: str  # what must not be in memory, as it stands in the program


def programs(dtype=jnp.bfloat16, n=4, g=8, p=2048, s=256, heads=14, kv=2, h=64, tokens=2048, dim=896, vocab=151_936):
    of, ints = partial(shape, dtype=dtype), partial(shape, dtype=jnp.int32)
    caches = of(n, p, kv, h), of(n, p, kv, h), ints(n), of(n, g, s, kv, h), of(n, g, s, kv, h), ints()
    quantized = lambda form: [
        jax.eval_shape(partial(quantize_vectors, dtype=VALUES[form]), x) if x.ndim > 3 else x for x in caches
    ]
    trained = of(2, tokens, heads, h), of(2, tokens, kv, h), of(2, tokens, kv, h), ints(2, tokens)
    responses = of(n, g, s, heads, h), *caches[:5]
    loss = lambda q, k, v, end, impl: tree_attention(q, k, v, end, impl=impl).astype(jnp.float32).sum()
    of_prompt = lambda *x, impl: causal_attention(*x, impl=impl).astype(jnp.float32).sum()
    of_group = lambda *x, impl: group_attention(*x, impl=impl).astype(jnp.float32).sum()
    draw = lambda hidden, weight, u, impl: head_sample(hidden, Head(weight, used=vocab - 99), u, impl=impl)
    by_column = lambda *x, impl: head_sample(x[0], Head(x[1], False), x[2], impl=impl)
    drawn = of(n, g, dim), of(vocab, dim), shape(n, g, dtype=jnp.float32)
    columns = drawn[0], of(dim, vocab), drawn[2]
    no_logits = f"x{vocab}xf32>"
    return {
        "decode": Program(
            lambda *x, impl: group_decode_attention(*x, impl=impl), (of(n, g, 1, heads, h), *caches), "group_decode",
            f"x{p}xf32>",
        ),
        **{
            f"decode, {form}": Program(
                lambda *x, impl: group_decode_attention(*x, impl=impl), (of(n, g, 1, heads, h), *quantized(form)),
                "group_decode", f"x{heads // kv}x1x{p}xf32>",
            )
            for form in VALUES
        },
        "training": Program(
            jax.grad(of_group, (0, 1, 2, 4, 5)), responses, "tree_attention", f"x{s}x{p}xf32>"
        ),
        "prompt": Program(
            jax.grad(of_prompt, (0, 1, 2)),
            trained[:3],
            "tree_attention|splash_mha",
            f"{tokens}x{tokens}xf32>",
        ),
        "tree": Program(jax.grad(loss, (0, 1, 2)), trained, "tree_attention", f"x128x{tokens}xf32>"),
        "head": Program(draw, drawn, "head_block_stats", no_logits),
        "head, columns": Program(by_column, columns, "head_block_stats", no_logits),
    }  # fmt: skip


def lowered(call, arguments, platform, **options):
    """The program as text. From JAX 0.11 on Triton asks which GPU it lowers for."""
    context = contextlib.nullcontext()
    if platform == "cuda" and hasattr(jax.sharding, "AbstractDevice"):
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
        context = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    with context:
        traced = jax.jit(partial(call, **options)).trace(*arguments)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # from JAX 0.11
@pytest.mark.parametrize("name", programs())
@pytest.mark.parametrize("impl, platform", [("gpu", "cuda"), ("tpu", "tpu")])
def test_pallas_forms_lower(name, impl, platform):
    program = programs()[name]
    if (name, impl) in [(f"decode, {form}", "gpu") for form in VALUES]:
        with pytest.raises(ValueError, match="impl 'gpu' does not take quantized caches"):
            lowered(program.call, program.arguments, platform, impl=impl)
        return
    text = lowered(program.call, program.arguments, platform, impl=impl)
    assert {"gpu": "triton", "tpu": "tpu_custom_call"}[impl] in text and re.search(program.name, text)
    assert program.absent not in text
    assert name == "head" or program.absent in lowered(program.call, program.arguments, platform, impl="xla")


AHEAD_OF_TIME = """
import re
import sys
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from test_kernels import programs

SIZES = [
    {},
    dict(dtype=jnp.float32, n=1, g=5, p=700, s=1, h=128, heads=9, kv=3, tokens=384, dim=72, vocab=300),
]
for topology in ("v5e:2x2", "v5p:2x2x1", "v6e:2x2"):
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    there = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device))
    for sizes in SIZES if topology == "v5e:2x2" else SIZES[:1]:
        for name, program in programs(**sizes).items():
            arguments = jax.tree.map(there, program.arguments)
            lower = lambda impl: jax.jit(lambda *x: program.call(*x, impl=impl)).lower(*arguments)
            assert re.search(program.name, lower("tpu").as_text())
            memory = lambda impl: lower(impl).compile().memory_analysis().temp_size_in_bytes
            used = memory("tpu")
            if topology == "v5e:2x2" and not sizes and name in ("decode", "training", "prompt"):
                portable = memory("xla")
                print(f"{name}: {used / 1e6:.1f} MB, portable {portable / 1e6:.1f} MB", file=sys.stderr)
                assert name == "decode" or 4 * used < portable  # no scores
    print(topology)
"""


@pytest.mark.slow
def test_pallas_forms_compile_for_tpus():
    """Ahead of time, by the TPU's own compiler and without a TPU, in a process of its own."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs libtpu: install jax[tpu], which works on machines without a TPU")
    env = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([os.path.dirname(__file__), env.get("PYTHONPATH", "")])
    ran = subprocess.run([sys.executable, "-c", AHEAD_OF_TIME], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout.split() == ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"], ran.stderr[-2000:]


# ------------------------------------------------------------------------------------------------------ what is taken


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")  # from JAX 0.11
@pytest.mark.parametrize(
    "name, few",
    [
        ("decode", {"p": 255}),
        *((f"decode, {form}", {"p": 255}) for form in VALUES),
        ("tree", {"tokens": 1023}),
        ("training", {"p": 511, "s": 64}),
        ("prompt", {"tokens": 896}),
        ("head", {"vocab": 16_000}),
    ],
)
def test_auto_is_the_platform_of_the_program(name, few):
    """Not the backend of this process. Short prefixes and rows, and heads a form does not take, are portable."""

    def taken(platform, **sizes):
        program = programs(**sizes)[name]
        text = lowered(program.call, program.arguments, platform, impl="auto")
        return "tpu_custom_call" in text or "triton" in text

    on_gpu = {"decode": {}, "tree": {"tokens": 4096}}  # what was measured there to be faster, and from which size
    assert taken("tpu") and not taken("cpu")
    assert not taken("cuda", **few) and taken("cuda", **on_gpu.get(name, {})) == (name in on_gpu)
    assert not taken("tpu", **few) and (name == "head" or not taken("tpu", h=12))


def test_auto_on_cpu_is_the_portable_form_to_the_bit():
    args, length, t = of_decode(np.random.default_rng(0), 1, 2, 300, 5, 2, 2, 64, jnp.float32)
    q, pk, pv, ok, ov = args
    run = lambda impl: jax.jit(partial(group_decode_attention, impl=impl))(q, pk, pv, length, ok, ov, t)
    np.testing.assert_array_equal(run("auto"), run("xla"))


def test_the_model_takes_them_and_on_a_mesh_all_but_that_of_decoding():
    cfg = Config(64, 32, 32, 1, 4, 2, 8)
    policy = make_policy(cfg, remat=True)
    variables = {"params": jax.eval_shape(policy.init, jax.random.key(0))}
    layers = jax.eval_shape(policy.unstack, variables)
    ints = partial(shape, dtype=jnp.int32)
    cache = ((shape(8, 256, 2, 8, dtype=jnp.float32),) * 2,)
    suffix = jax.eval_shape(lambda x: policy.init_suffix(x, 2, 4), cache)
    decode = policy.decode, (layers, [ints(8, 2)], [cache], [ints(8)], [suffix], ints())
    prompt = policy.prefill, (variables, ints(8, 1024), ints(8))
    train = policy.hidden, (variables, ints(8, 512), ints(8), ints(8, 2, 257))
    trees = policy.hidden_tree, (variables, ints(8, 1024), ints(8, 1024), ints(8, 1024))
    mesh = meshes.make_mesh(meshes.MeshConfig(data=8), jax.devices())
    for call, arguments in (prompt, decode, train, trees):
        taken = lambda call=call, arguments=arguments: lowered(lambda *x: call(*x), arguments, "tpu")
        assert "tpu_custom_call" in taken()
        with meshes.use_mesh(mesh):
            assert ("tpu_custom_call" in taken()) == (call is not policy.decode)


# --------------------------------------------------------------------------------------------------------- bad input


def test_a_form_that_cannot_do_what_is_asked_says_so():
    def ask(name, impl, **sizes):
        program = programs(**sizes)[name]
        return jax.eval_shape(partial(program.call, impl=impl), *program.arguments)

    for name in ("decode", "training", "prompt", "tree", "head"):
        also = {"prompt": ", tpu or cudnn", "training": " or tpu"}
        has = "auto, xla, gpu" + also.get(name, ", tpu or mosaic")
        with pytest.raises(ValueError, match=f"impl is {has}, not 'cuda'"):
            ask(name, "cuda")
        with mock.patch.object(pallas_triton, "triton", None):
            with pytest.raises(ValueError, match=r"impl 'gpu' (needs a JAX with|does not take hidden states)"):
                ask(name, "gpu")
            assert ask(name, "auto") is not None
    with pytest.raises(ValueError, match="impl 'cudnn' needs a GPU in this process; auto and xla do"):
        ask("prompt", "cudnn")
    with pytest.raises(ValueError, match="impl 'tpu' does not take 2000 tokens; auto and xla do"):
        ask("prompt", "tpu", tokens=2000)
    for name in ("decode", "training", "prompt", "tree"):
        for impl in ("gpu", "tpu"):
            for size in (12, 264):
                with pytest.raises(
                    ValueError, match=f"impl '{impl}' does not take heads of size {size}; auto and xla do"
                ):
                    ask(name, impl, h=size)
    (q, pk, pv, ok, ov), length, _ = of_decode(np.random.default_rng(0), 2, 2, 6, 4, 2, 2, 8, jnp.float32)
    with pytest.raises(ValueError, match="impl 'tpu' is for training alone: as many queries as own keys, offset 0"):
        group_attention(q, pk, pv, length, ok, ov, 3, impl="tpu")
    q, k, end = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 4, 2, 8)), np.full((1, 4), 4)
    for impl, block in (("gpu", 48), ("tpu", 64)):
        with pytest.raises(ValueError, match=f"impl '{impl}' does not take blocks of {block}"):
            tree_attention(q, k, k, end, impl=impl, block=block)
        with pytest.raises(Exception, match="Only interpret mode is supported on CPU"):  # not on this machine
            tree_attention(q, k, k, end, impl=impl)
        with pytest.raises(Exception, match="Only interpret mode is supported on CPU"):
            cache = jnp.ones((1, 2, 3, 2, 8))
            group_decode_attention(jnp.ones((1, 2, 1, 2, 8)), k, k, np.array([4]), cache, cache, 0, impl=impl)


def test_shapes_that_do_not_fit_and_caches_that_are_too_small():
    (q, pk, pv, ok, ov), length, _ = of_decode(np.random.default_rng(0), 2, 2, 6, 4, 2, 2, 8, jnp.float32)
    for bad in (
        (q[:, :, :, :3], pk, pv, length, ok, ov),
        (q, pk[:1], pv, length, ok, ov),
        (q, pk, pv, length[:1], ok, ov),
        (q, pk, pv, length, ok[:, :1], ov[:, :1]),
        (jnp.concatenate([q, q], 2), pk, pv, length, ok, ov),
    ):
        with pytest.raises(ValueError, match=r"shapes do not fit \[N G 1 Q H\]"):
            group_decode_attention(*bad, 0)
    for t in (4, -2):
        with pytest.raises(ValueError, match=f"the suffix cache has 4 slots, no slot {t}"):
            group_decode_attention(q, pk, pv, length, ok, ov, t)
    with pytest.raises(ValueError, match="there are no keys: prefix and suffix are both empty"):
        group_decode_attention(q, pk[:, :0], pv[:, :0], length, ok[:, :, :0], ov[:, :, :0], -1)
    x, end = jnp.ones((1, 4, 2, 8)), np.full((1, 4), 4)
    for bad in ((x, x[:, :3], x[:, :3], end), (x, x, x, end[:, :3]), (x[:, :, :1], x, x, end)):
        with pytest.raises(ValueError, match=r"shapes do not fit \[B S Q H\]"):
            tree_attention(*bad)


def test_parts_do_not_depend_on_how_the_keys_are_cut():
    """Each part's maximum, sum and values in float32, merged, against one softmax."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(0, 0.5, s), jnp.float32) for s in ((1, 1, 3, 16), (1, 900, 1, 16), (1, 900, 1, 16))
    )
    top, total, out = group_decode_pallas.parts(q, k, v, jnp.array([850]), impl="gpu", interpret=True)
    assert top.shape == (1, 4, 1, 3) and total.dtype == jnp.float32
    score = np.asarray(q[0, 0]) @ np.asarray(k[0, :850, 0]).T
    np.testing.assert_allclose(top.max(1)[0, 0], score.max(-1), rtol=1e-5)
    scale = np.exp(top - top.max(1, keepdims=True))
    weight = np.exp(score - score.max(-1, keepdims=True))
    np.testing.assert_allclose((total * scale).sum(1)[0, 0], weight.sum(-1), rtol=1e-4)
    np.testing.assert_allclose((out * scale[..., None]).sum(1)[0, 0], weight @ np.asarray(v[0, :850, 0]), rtol=1e-3)
