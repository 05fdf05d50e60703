"""Digests of blocks: those of the values by hand, damage is found on every layout, and no array is gathered."""

from __future__ import annotations

import hashlib
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.storage import checksums
from jaxmarl_llm.storage.checksums import block_digests, damaged, digests

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
VALUES = {
    "cut": RNG.normal(size=(16, 6)).astype(np.float32),
    "half": RNG.normal(size=(4, 8)).astype(jnp.bfloat16),
    "scalar": np.int32(3),
    "whole": np.arange(5, dtype=np.uint32),
}
LAYOUTS = {  # mesh, axes of cut and half
    "one": None,
    "fsdp": ((1, 8, 1), P("fsdp"), P(None, "fsdp")),
    "both": ((2, 2, 2), P("fsdp", "tensor"), P("data")),
    "copied": ((8, 1, 1), P(), P()),
}


def placed(layout, **changes):
    """The values on the devices of a layout."""
    values = VALUES | changes | {"key": jax.random.key(7)}
    if LAYOUTS[layout] is None:
        return jax.tree.map(jnp.asarray, values)
    sizes, *axes = LAYOUTS[layout]
    mesh = make_mesh(MeshConfig(*sizes))
    where = dict(zip(("cut", "half"), axes))
    return {name: jax.device_put(x, NamedSharding(mesh, where.get(name, P()))) for name, x in values.items()}


def by_hand(x, shape):
    return hashlib.sha256(f"{x.dtype} {shape} ".encode() + np.ascontiguousarray(x).tobytes()).hexdigest()


def test_a_leaf_that_is_cut_has_one_digest_for_each_block():
    found, cut, half = block_digests(placed("both")), VALUES["cut"], VALUES["half"]
    blocks = {(i, j): cut[i : i + 8, j : j + 3] for i in (0, 8) for j in (0, 3)}
    assert found["['cut']"] == {f"{i}:{i + 8},{j}:{j + 3}": by_hand(x, (8, 3)) for (i, j), x in blocks.items()}
    assert found["['half']"] == {f"{i}:{i + 2},0:8": by_hand(half[i : i + 2], (2, 8)) for i in (0, 2)}
    whole = {path: digest for path, digest in found.items() if path not in ("['cut']", "['half']")}
    assert whole == {path: digests(placed("one"))[path] for path in whole} and len(whole) == 3
    assert whole["['scalar']"] == by_hand(VALUES["scalar"], (1,))  # as checkpoints of earlier versions have it


@pytest.mark.parametrize("layout", ["one", "copied"])
def test_a_leaf_that_is_whole_has_one_digest_as_before(layout):
    assert block_digests(placed(layout)) == digests(placed("one"))
    assert block_digests(VALUES) == {path: d for path, d in digests(placed("one")).items() if path != "['key']"}


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("restored", LAYOUTS)
def test_one_changed_value_is_found_on_every_layout(saved, restored):
    recorded = block_digests(placed(saved))
    assert damaged(placed(restored), recorded) == []
    for name in ("cut", "half", "whole"):
        wrong = VALUES[name].copy()
        wrong.flat[-2] += 1
        assert damaged(placed(restored, **{name: wrong}), recorded) == [f"['{name}']"]
    assert damaged(placed(restored, half=VALUES["half"].astype(np.float32)), recorded) == ["['half']"]
    rest = {path: digest for path, digest in recorded.items() if path != "['cut']"}
    assert damaged(placed(restored), rest) == ["['cut']"]  # nothing was recorded of it
    if isinstance(recorded["['cut']"], dict):
        first = next(iter(recorded["['cut']"]))
        assert damaged(placed(restored), recorded | {"['cut']": {first: "0" * 64}}) == ["['cut']"]


def test_no_more_than_a_block_is_read_on_the_layout_of_the_saved_tree(monkeypatch):
    sizes, original = [], checksums.pieces
    monkeypatch.setattr(checksums, "pieces", lambda x: sizes.append(np.size(x)) or original(x))
    tree = placed("fsdp")
    assert damaged(tree, block_digests(tree)) == []
    assert sorted(sizes) == sorted([1, 5, 2, *[2 * 6] * 8, *[4] * 8] * 2)


# Two processes with one device each. Whoever brings an array together ends.
TWO = """
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxmarl_llm.distributed import processes, sharding
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.storage import checksums
from jaxmarl_llm.storage.checksums import block_digests, damaged, digests

address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, process)
mesh = make_mesh(MeshConfig(data=1, fsdp=2))
values = np.arange(24, dtype=np.float32).reshape(4, 6)
where = lambda axes: {"x": NamedSharding(mesh, axes), "n": sharding.whole(mesh)}
cut = lambda x, axes: sharding.put({"x": x, "n": np.int32(1)}, where(axes))
saved, gather = cut(values, P("fsdp")), sharding._everywhere

def refuse(*_):
    raise AssertionError("an array is brought together")

sharding._everywhere, hashed, original = refuse, [], checksums._digest
checksums._digest = lambda *args, **more: hashed.append(1) or original(*args, **more)
recorded = block_digests(saved | {"also": saved["n"]})
assert sum(processes.all_gather(len(hashed))) == 4  # two blocks, and two leaves that both processes hold
recorded.pop("['also']")
slices, jax.lax.slice = jax.lax.slice, refuse
assert set(recorded["['x']"]) == {"0:2,0:6", "2:4,0:6"}, recorded
assert damaged(saved, recorded) == []
spoilt = values.copy()
spoilt[3, 5] = np.nan  # in the part of process 1
try:
    block_digests(cut(spoilt, P("fsdp")))
except FloatingPointError as error:
    assert str(error) == "['x'] holds NaN"
else:
    raise AssertionError("NaN of one process is not known to both")
spoilt[3, 5] = 0
assert damaged(cut(spoilt, P("fsdp")), recorded) == ["['x']"] * process
sharding._everywhere, jax.lax.slice = gather, slices
for axes in (P(None, "fsdp"), P()):
    assert damaged(cut(values, axes), recorded) == []
    found = processes.all_gather(damaged(cut(spoilt, axes), recorded))
    assert sum(found, []) == ["['x']"], found
whole = digests(saved)
assert damaged(saved, whole) == []
assert sum(processes.all_gather(damaged(cut(spoilt, P("fsdp")), whole)), []) == ["['x']"]
print("agreed")
"""


def test_two_processes_hash_what_they_hold_and_agree(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "two.py").write_text(TWO)
    env = {"PATH": "", "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, tmp_path / "two.py", address]
    started = [
        subprocess.Popen([*command, str(i)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert all("agreed" in text for text in said), said
