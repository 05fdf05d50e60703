"""Meshes over several TPU slices, compiled by libtpu for slices that are not there: data lies between slices."""

from __future__ import annotations

import functools
import importlib.util
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config
from jaxmarl_llm.training.learner import Batch, make_learner
from jaxmarl_llm.training.losses import Loss
from jaxmarl_llm.training.optimizers import Optimizer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the extra aot (libtpu), which describes slices"
)
QUIET = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}


@functools.cache
def two_slices():
    """Devices of two v5e slices of 8 chips."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", num_slices=2).devices


@pytest.mark.parametrize(
    "sizes,context,shape",
    [
        ((-1, 4, 2), 1, (2, 4, 2)),
        ((-1, 2, 2), 1, (4, 2, 2)),
        ((16, 1, 1), 1, (16, 1, 1)),
        ((-1, 2, 1), 4, (2, 2, 4, 1)),
    ],
)
def test_each_slice_has_whole_rows_of_the_data_axis(sizes, context, shape):
    mesh = make_mesh(MeshConfig(*sizes, context=context), two_slices())
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices)
    assert mesh.devices.shape == shape and len(set(mesh.devices.flat)) == 16
    by_row = slices.reshape(shape[0], -1)
    assert (by_row == by_row[:, :1]).all() and by_row[:, 0].tolist() == sorted(by_row[:, 0])
    assert np.bincount(slices.ravel()).tolist() == [8, 8]


def test_what_does_not_fit_into_a_slice_is_one_line():
    with pytest.raises(ConfigError) as error:
        make_mesh(MeshConfig(1, 8, 2), two_slices())
    assert str(error.value) == (
        "config.mesh.data: expected a multiple of 2, the number of slices, got 1: fsdp=8 and tensor=2 stay within a "
        "slice of 8 devices"
    )
    with pytest.raises(
        ConfigError, match=r"got 1: fsdp=1 and context=16 and tensor=1 stay within a slice of 8 devices"
    ):
        make_mesh(MeshConfig(1, 1, 1, context=16), two_slices())
    with pytest.raises(ConfigError, match=r"expected slices of one size, found slices of \[4, 8\] devices"):
        make_mesh(MeshConfig(-1, 2, 2), two_slices()[:12])
    one = make_mesh(MeshConfig(1, 4, 2), two_slices()[:8])  # within one slice every mesh is as before
    assert one.devices.shape == (1, 4, 2)


def accumulated(mesh):
    """Compiled gradient of a small policy on ``mesh``, and the number of values of each weight on a device."""
    arch = Config(264, 64, 128, 1, 8, 8, 8, family="qwen3", attention_bias=False, qk_norm=True, tie_embeddings=False)
    policy = make_policy(arch)
    shape = lambda *dims, dtype=jnp.float32: jax.ShapeDtypeStruct(dims, dtype, sharding=sharding.rows(mesh))
    ids = functools.partial(shape, dtype=jnp.int32)
    rows = Batch(ids(8, 6), ids(8), ids(8, 2, 4), *(shape(8, 2, 4) for _ in range(3)))
    own = {"params": jax.eval_shape(policy.init, jax.random.key(0))}
    places = sharding.shardings(mesh, own)
    sizes = {math.prod(where.shard_shape(x.shape)) for x, where in zip(jax.tree.leaves(own), jax.tree.leaves(places))}
    own = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), own, places)
    learner = make_learner(policy, Loss(clip_low=None), Optimizer(name="sgd"), Sampling())
    with meshes.use_mesh(mesh):
        return learner.accumulate.lower(own, None, rows, None).compile().as_text(), sizes


SENT = re.compile(r"= \(\w+\[([\d,]*)\].* send\(.*_xla_megascale_transfer_type=\"(\w+)\"")  # to the other slice


def test_no_weight_passes_between_slices():
    """Weights that are cut over fsdp are gathered within a slice; sums pass between slices, and hidden states."""
    text, weights = accumulated(make_mesh(MeshConfig(-1, 4, 2), two_slices()))
    sent = [(kind, math.prod(map(int, shape.split(",")))) for shape, kind in SENT.findall(text)]
    hidden = 14 * 64  # of one row: 6 tokens of the prompt and 2 x 4 sampled ones
    assert hidden not in weights
    assert "ALL_REDUCE" in dict(sent) and {size for kind, size in sent if kind != "ALL_REDUCE"} <= {hidden}
    assert "all-gather" in text
