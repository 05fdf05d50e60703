"""Checkpoints onto a mesh: every device reads its own part, and no host holds the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors

from jaxmarl_llm.distributed import sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.models import hf_weights
from jaxmarl_llm.models.decoder import make_policy
from jaxmarl_llm.models.decoder_config import Config

ROOT = Path(__file__).parents[2]


def random_params(cfg, dtype=np.float32):
    rng = np.random.default_rng(0)
    tree = jax.eval_shape(make_policy(cfg).init, jax.random.key(0))
    return jax.tree.map(lambda x: rng.standard_normal(x.shape, np.float32).astype(dtype), tree)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 8, 1), (2, 2, 2)], ids=str)
def test_every_device_gets_its_part(mesh, dtype, tmp_path, monkeypatch):
    """The parts are those of the whole, and no tensor that is cut is read as a whole."""
    cfg = Config(264, 64, 128, 2, 8, 8, 8, tie_embeddings=False, dtype=np.dtype(dtype).name)
    params = random_params(cfg, dtype)
    hf_weights.save(tmp_path / "model", params, cfg, max_shard_bytes=60_000)
    read, opened, sizes, whole = hf_weights.Safetensors.read, safetensors.safe_open, {}, set()

    class Handle:
        def __init__(self, *args, **kwargs):
            self.file = opened(*args, **kwargs)

        def get_tensor(self, name):
            whole.add(name)
            return self.file.get_tensor(name)

        def get_slice(self, name):
            return self.file.get_slice(name)

    monkeypatch.setattr(safetensors, "safe_open", Handle)

    def spy(self, name, index):
        part = read(self, name, index)
        sizes.setdefault(name, []).append(part.size)
        return part

    monkeypatch.setattr(hf_weights.Safetensors, "read", spy)
    where = sharding.shardings(make_mesh(MeshConfig(*mesh)), params)
    loaded, _ = hf_weights.load(tmp_path / "model", dtype=dtype, sharding=where)
    chex.assert_trees_all_equal(loaded, params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == where
    for leaf in hf_weights.leaves(cfg):
        array = loaded
        for key in leaf.path:
            array = array[key]
        part = array.addressable_shards[0].data.size // (len(leaf.names) if leaf.stacked else 1)
        for name in leaf.names:
            assert sizes[name] == [part] * (int(np.prod(leaf.shape)) // part), name  # each part once, replicas share
            assert (name in whole) == (part == np.prod(leaf.shape)), name


CHILD = """
import json, sys
from pathlib import Path
import jax
from jaxmarl_llm.distributed import meshes, sharding
from jaxmarl_llm.models import hf_weights as weights
from jaxmarl_llm.models.decoder import make_policy

def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))

path, mesh = Path(sys.argv[1]), meshes.make_mesh(meshes.MeshConfig(1, 8, 1))
where = sharding.shardings(mesh, jax.eval_shape(make_policy(weights.read_config(path)).init, jax.random.key(0)))
# One array on every device: what the runtime itself takes is there before.
jax.block_until_ready([jax.device_put(jax.numpy.zeros(8), d) for d in jax.devices()])
import safetensors
Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts here
before = status("VmRSS")
params, _ = weights.load(path, sharding=where)
peak = status("VmHWM") - before
on = [s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards]
share = sum(s.data.nbytes for x in jax.tree.leaves(params) for s in x.addressable_shards if s.device.id == 0)
print(json.dumps({"peak": peak, "devices": sum(on), "share": share}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's memory figures of a process")
def test_peak_host_memory_of_a_sharded_load(tmp_path):
    """Four files of 50 MB onto 8 devices: at most 1.3 of the largest file and one device's share beside the devices.

    The fake devices keep their arrays in the memory of the host: those bytes are taken off what is measured, mapped
    pages of the files are not.
    """
    cfg = Config(8192, 512, 2048, 11, 8, 8, 64, family="llama", attention_bias=False, tie_embeddings=True)
    hf_weights.save(tmp_path / "model", random_params(cfg), cfg, max_shard_bytes=52_000_000)
    files = [f.stat().st_size for f in (tmp_path / "model").glob("*.safetensors")]
    assert len(files) == 4 and sum(files) > 190e6
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "model")], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["devices"] < 1.02 * sum(files) and got["share"] < 0.13 * sum(files)
    host = got["peak"] - got["devices"]
    print(f"host {host / 1e6:.0f} MB; largest file {max(files) / 1e6:.0f} MB, share {got['share'] / 1e6:.0f} MB")
    assert host <= 1.3 * max(files) + got["share"], got
