"""Checkpoints: every byte comes back, or the step before does; nothing damaged loads silently."""

import functools
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmarl_llm.agents import memory
from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.distributed.meshes import MeshConfig, make_mesh
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.storage.checkpoint import Checkpointer, meta_checksum
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.types import TrainState

# When a read fails Orbax closes its event loop under the other reads, which then complain from their own threads.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
MEMORY = MemoryConfig(capacity=4, retrieve=2)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make_state(step):
    key = jax.random.key(step)
    w = lambda i: jax.random.normal(jax.random.fold_in(key, i), (48, 48))
    agents = {
        "master": {"params": {"w": w(0), "half": jnp.arange(-7, 8).astype(jnp.bfloat16) * step / 3}},
        "helper": {"lora": {"a": w(1)[0], "b": jnp.array([0.0, -0.0, jnp.inf, 1e-40], jnp.float32)}},
    }
    optimizers = {name: OPTIMIZER.init(params) for name, params in agents.items()}
    store = memory.init(MEMORY, dim=4, max_ids=6, max_bytes=12)
    store = store.replace(key=w(2)[:4, :4], text=store.text.at[1].set(65 + step), used=store.used.at[1].set(True))
    counters = {"updates": jnp.int32(7 * step), "bad": jnp.bool_(step % 2), "seen": jnp.uint32(2**32 - 1 - step)}
    return TrainState(jnp.int32(step), key, {"shared": {}, "agents": agents}, optimizers, {"master": store}, counters)


def make_meta(step):
    return {"step": step, "config": {"lr": 0.1, "sizes": [4, 4], "name": None}, "cursor": [step, 2 * step]}


@functools.cache
def like():
    return make_state(0)


@functools.cache
def good(step):
    return digests(make_state(step))


@pytest.fixture(scope="module", autouse=True)
def unchecked():
    """Orbax fills trees with placeholders, which are no arrays: shape annotations are not executed here."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
    gc.collect()  # what failed reads left behind complains here, and not in a later file


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run that has saved steps 1, 2, 3 and keeps the last two. Read-only: tests work on copies."""
    workdir = tmp_path_factory.mktemp("saved")
    with_saver(workdir, lambda saver: [saver.save(s, make_state(s), make_meta(s)) for s in (1, 2, 3)])
    return workdir


@pytest.fixture
def run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def with_saver(workdir, work, **options):
    saver = Checkpointer(workdir, **options)
    try:
        return work(saver)
    finally:
        saver.close()


def restore(workdir):
    return with_saver(workdir, lambda saver: saver.restore(like()))


def files_of(workdir, step):
    return sorted(f for f in (workdir / "checkpoints" / str(step)).rglob("*") if f.is_file())


def assert_is(got, step, what=""):
    """The state and the meta of ``step``, bit for bit."""
    state, meta, at = got
    assert at == step, what
    assert digests(state) == good(step), what
    assert {name: meta[name] for name in make_meta(step)} == make_meta(step), what


def assert_fell_back(workdir, what=""):
    assert_is(restore(workdir), 2, what)
    assert (workdir / "corrupt" / "3").is_dir(), what
    assert not (workdir / "checkpoints" / "3").exists(), what


# --- save and restore ----------------------------------------------------------


def test_every_leaf_comes_back_byte_for_byte(run):
    got, _, step = restore(run)
    assert step == 3
    want = make_state(3)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert jax.random.uniform(got.key) == jax.random.uniform(want.key)
    dtypes = {str(x.dtype) for x in jax.tree.leaves(want)}
    assert dtypes >= {"bfloat16", "float32", "int32", "uint32", "uint8", "bool", "key<fry>"}
    assert_is((got, restore(run)[1], step), 3)


def test_restores_into_shapes_alone(run):
    other = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=other), like())
    got = with_saver(run, lambda saver: saver.restore(shapes))
    assert_is(got, 3)
    assert got[0].params["agents"]["master"]["params"]["w"].devices() == {jax.devices()[1]}


def test_one_agent_or_the_memory_alone_onto_a_mesh(run):
    """What is asked for is placed and checked; nothing else is read."""
    state, mesh = like(), make_mesh(MeshConfig(data=2, fsdp=4, tensor=1))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    cut = jax.ShapeDtypeStruct((48, 48), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
    master = state.params["agents"]["master"]
    one = {"w": cut, "half": place(master["params"]["half"])}
    asked = {"params": {"agents": {"master": {"params": one}}}, "memory": state.memory, "step": state.step}
    got, _, step = with_saver(run, lambda saver: saver.restore(asked, part=True))
    assert step == 3 and got["params"]["agents"]["master"]["params"]["w"].addressable_shards[0].data.shape == (12, 48)
    true = make_state(3)
    wanted = {
        "params": {"agents": {"master": true.params["agents"]["master"]}},
        "memory": true.memory,
        "step": true.step,
    }
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(wanted))
    path = run / "checkpoints" / "3" / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["sha256"][".memory['master'].text"] = "0" * 64
    path.write_text(json.dumps({**meta, "seal": meta_checksum(meta)}))
    with pytest.raises(ConfigError, match=r"checksum of \['memory'\]\['master'\]\.text differs"):
        with_saver(run, lambda saver: saver.restore(asked, 3, part=True))


def test_digests_see_values_dtype_shape_and_place():
    x = jnp.arange(4, dtype=jnp.int32)
    one = digests({"x": x})
    assert list(one) == ["['x']"]
    assert one == digests({"x": np.asarray(x)})
    others = [x.at[3].set(0), x.astype(jnp.uint32), x.reshape(2, 2), jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32))]
    assert len({d for o in others for d in digests({"x": o}).values()} | set(one.values())) == 5
    assert digests({"x": jnp.float32(0.0)}) != digests({"x": jnp.float32(-0.0)})
    assert digests({"k": jax.random.key(1)}) != digests({"k": jax.random.key(2)})


def test_keeps_the_last_steps(run):
    assert with_saver(run, lambda saver: saver.steps()) == [2, 3]
    assert with_saver(run, lambda saver: (saver.save(4, make_state(4), {}), saver.wait(), saver.steps())[-1]) == [3, 4]
    assert with_saver(run, lambda s: (s.save(5, make_state(5), {}), s.wait(), s.steps())[-1], keep=1) == [5]


def test_a_fresh_directory_has_nothing(tmp_path):
    assert with_saver(tmp_path, lambda saver: (saver.restore(like()), saver.read_meta(), saver.steps())) == (
        None,
        None,
        [],
    )


def test_a_given_step_is_restored_or_refused(run):
    assert_is(with_saver(run, lambda saver: saver.restore(like(), 2)), 2)
    shutil.rmtree(run / "checkpoints" / "2" / "state")
    with pytest.raises(ConfigError, match="step 2"):
        with_saver(run, lambda saver: saver.restore(like(), 2))
    assert (run / "checkpoints" / "2").is_dir() and not (run / "corrupt").exists()  # asked for, hence left alone


def test_read_meta(run):
    meta = with_saver(run, lambda saver: saver.read_meta())
    assert {name: meta[name] for name in make_meta(3)} == make_meta(3)
    (run / "checkpoints" / "3" / "meta" / "metadata").unlink()
    assert with_saver(run, lambda saver: saver.read_meta())["cursor"] == [2, 4]
    shutil.rmtree(run / "checkpoints" / "2" / "state" / "d")  # arrays are not read
    assert with_saver(run, lambda saver: saver.read_meta())["cursor"] == [2, 4]


def test_save_returns_before_it_is_on_disk_and_close_waits(tmp_path):
    big = {"x": np.random.default_rng(0).normal(size=(6_000_000,)).astype(np.float32)}
    saver = Checkpointer(tmp_path)
    saver.save(1, big, {})
    assert not (tmp_path / "checkpoints" / "1").exists()
    before = digests(big)
    big["x"][:] = 0  # saved is what was given, whatever happens to it while it is written
    saver.close()
    assert (tmp_path / "checkpoints" / "1").is_dir()
    assert digests(with_saver(tmp_path, lambda s: s.restore(big))[0]) == before


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nan_is_refused_and_the_step_before_stays(run, dtype):
    state = make_state(4)
    state.params["agents"]["helper"]["lora"]["b"] = jnp.array([1.0, jnp.nan], dtype)

    def work(saver):
        with pytest.raises(FloatingPointError, match=r"checkpoint 4: .*'b'.* NaN"):
            saver.save(4, state, make_meta(4))
        saver.wait()
        assert saver.steps() == [2, 3]
        return saver.restore(like())

    assert_is(with_saver(run, work), 3)


def test_a_save_compiles_nothing(tmp_path):
    """A compilation would wait for those in other threads, and would repeat for every shape of the state."""
    state = {"odd": jax.device_put(np.ones((3, 1, 7), np.float32)), "more": jax.device_put(np.ones(11, np.float32))}
    compiled = []
    listen = lambda event, duration, **_: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with_saver(tmp_path, lambda saver: saver.save(1, state, {}))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


# --- damage ----------------------------------------------------------------------


def test_no_flipped_bit_loads_silently(saved, tmp_path):
    """Two flips in each file of the newest step, and more in random places: it loads as it was, or as step 2."""
    rng, outcomes = random.Random(0), {2: 0, 3: 0}
    names = [f.relative_to(saved) for f in files_of(saved, 3)]
    payload = [n for n in names if n.parent.name == "d" or n.name in ("metadata", "process_0")]
    for number, name in enumerate([*names, *names, *rng.choices(payload, k=40)]):
        work = tmp_path / str(number)
        shutil.copytree(saved, work)
        content = bytearray((work / name).read_bytes())
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        content[place] ^= 1 << bit
        (work / name).write_bytes(content)
        what = f"{name}: byte {place} of {len(content)}, bit {bit}"
        try:
            got = restore(work)
        except Exception as error:
            pytest.fail(f"{what}: restore let {type(error).__name__} through: {error}")
        assert_is(got, got[2], what)
        assert (work / "corrupt" / "3").is_dir() == (got[2] == 2), what
        outcomes[got[2]] += 1
        shutil.rmtree(work)
    assert sum(outcomes.values()) >= 60 and outcomes[2] >= 10  # most flips are in bytes that are read


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("meta/metadata", b'"sha256"', b'"sha25v"'),  # no digests
        ("meta/metadata", b"[3, 6]", b"[7, 6]"),  # well-formed, and wrong
        ("meta/metadata", b'"step": 3', b'"step": 1'),
        ("meta/metadata", b'"cursor"', b'"cursos"'),
        ("state/array_metadatas/process_0", b'"param_name"', b'"param_namf"'),
        ("state/_METADATA", b'"tree_metadata"', b'"tree_metadatb"'),
    ],
)
def test_damage_that_is_still_json(run, file, old, new):
    path = run / "checkpoints" / "3" / file
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
    assert_fell_back(run)


def test_truncated_deleted_or_zeroed_files(saved, tmp_path):
    damage = {
        "truncated": lambda f: f.write_bytes(f.read_bytes()[: f.stat().st_size // 2]),
        "empty": lambda f: f.write_bytes(b""),
        "zeroed": lambda f: f.write_bytes(bytes(f.stat().st_size)),
        "deleted": lambda f: f.unlink(),
    }
    read = {"manifest.ocdbt", "metadata"}  # of which there is one, or which hold what cannot be had elsewhere
    for number, (name, how) in enumerate((f.relative_to(saved), h) for f in files_of(saved, 3) for h in damage):
        work = tmp_path / str(number)
        shutil.copytree(saved, work)
        damage[how](work / name)
        try:
            got = restore(work)
        except Exception as error:
            pytest.fail(f"{name} {how}: restore let {type(error).__name__} through: {error}")
        assert_is(got, got[2], f"{name} {how}")
        if name.name in read and "ocdbt.process_0" not in name.parts:
            assert got[2] == 2, f"{name} {how}"
        assert (work / "corrupt" / "3").is_dir() == (got[2] == 2)
        shutil.rmtree(work)


@pytest.mark.parametrize("part", ["state", "meta", "state/d"])
def test_missing_directories(run, part):
    shutil.rmtree(run / "checkpoints" / "3" / part)
    assert_fell_back(run)


@pytest.mark.parametrize("part", ["", "state", "meta", "state/d"])
def test_empty_directories(run, part):
    target = run / "checkpoints" / "3" / part
    shutil.rmtree(target)
    target.mkdir()
    assert_is(restore(run), 2)
    assert not (run / "checkpoints" / "3").exists()


def test_a_step_in_the_folder_of_another_is_not_restored(run):
    """Two steps whose folders were swapped, and one whose folder was renamed."""
    folder = run / "checkpoints"
    (folder / "3").rename(folder / "x")
    (folder / "2").rename(folder / "3")
    (folder / "x").rename(folder / "2")
    with pytest.raises(ConfigError, match=r"step 3 \(it holds step 2: .* step 2 \(it holds step 3"):
        restore(run)
    assert sorted(p.name for p in (run / "corrupt").iterdir()) == ["2", "3"]


def test_the_meta_of_a_step_names_that_step(tmp_path):
    with_saver(tmp_path, lambda saver: saver.save(5, {"x": np.ones(2)}, {"step": 4}))
    assert with_saver(tmp_path, lambda saver: saver.read_meta())["step"] == 5


def test_reading_beside_a_run_warns_of_nothing(tmp_path, caplog):
    from absl import logging as absl_logging

    (tmp_path / "checkpoints").mkdir()
    level = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.WARNING)
    try:
        Checkpointer(tmp_path, read_only=True).close()
        assert (absl_logging.get_verbosity(), caplog.messages) == (absl_logging.WARNING, [])
    finally:
        absl_logging.set_verbosity(level)


@pytest.mark.parametrize("read_only", [False, True])
def test_checkpoints_that_are_a_file_are_one_line(tmp_path, read_only):
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoints is a file, expected the folder"):
        Checkpointer(tmp_path, read_only=read_only)


def test_life_goes_on_after_a_fallback(run):
    (run / "checkpoints" / "3" / "state" / "manifest.ocdbt").write_bytes(b"")
    keep = Checkpointer(run)
    assert_is(keep.restore(like()), 2)
    keep.save(3, make_state(3), make_meta(3))
    keep.wait()
    assert_is(keep.restore(like()), 3)
    keep.close()
    # The same step again: the first corrupt copy is kept beside the second.
    (run / "checkpoints" / "3" / "state" / "manifest.ocdbt").write_bytes(b"")
    assert_fell_back(run)
    assert sorted(p.name for p in (run / "corrupt").iterdir()) == ["3", "3.1"]


def test_no_good_step_is_an_error_that_names_what_was_tried(run):
    for step in (2, 3):
        (run / "checkpoints" / str(step) / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"(?s)step 3 \(.*step 2 \(") as caught:
        restore(run)
    assert str(run) in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(p.name for p in (run / "corrupt").iterdir()) == ["2", "3"]


def test_a_wrong_checksum_is_named(run):
    path = run / "checkpoints" / "3" / "meta" / "metadata"
    digest = good(3)[".step"].encode()
    assert digest in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(digest, digest[::-1]))
    with pytest.raises(ConfigError, match="step 3"):
        with_saver(run, lambda saver: saver.restore(like(), 3))
    assert_fell_back(run)


# --- what is no damage --------------------------------------------------------------


def failing(error):
    """`restore` of a run whose arrays cannot be read now."""

    def work(saver):
        original = saver._manager.restore

        def restore(step, args):
            if "state" in args:
                raise error
            return original(step, args=args)

        saver._manager.restore = restore
        return saver.restore(like())

    return work


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("no room"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory allocating 8 bytes"),
        ConnectionResetError(104, "reset by peer"),
        PermissionError(13, "expired"),
        OSError(116, "Stale file handle"),
        ValueError("UNAVAILABLE: error reading gs://bucket/run/checkpoints/3"),
    ],
)
def test_what_says_nothing_about_the_files_moves_nothing(run, error):
    with pytest.raises(type(error), match=str(error.args[-1])):
        with_saver(run, failing(error))
    assert not (run / "corrupt").exists()
    assert_is(restore(run), 3)


def test_an_error_of_the_files_moves_the_step(run):
    assert_is(with_saver(run, failing(ValueError("DATA_LOSS: error reading a chunk"))), 2)
    assert sorted(p.name for p in (run / "corrupt").iterdir()) == ["3"]


def test_a_state_of_another_structure_is_refused_by_leaf_and_nothing_moves(run):
    state = make_state(0)
    sgd = optax.sgd(1e-3, momentum=0.9)
    other = state.replace(opt_state={n: sgd.init(p) for n, p in state.params["agents"].items()})
    with pytest.raises(ConfigError, match=r"step 3 holds no \.opt_state\['helper'\]\[0\]\.trace"):
        with_saver(run, lambda saver: saver.restore(other))
    with pytest.raises(ConfigError, match=r"step 3 also holds \.counters\['bad'\]"):
        with_saver(run, lambda saver: saver.restore(state.replace(counters={"updates": jnp.int32(0)})))
    wider = state.replace(counters={**state.counters, "seen": jnp.zeros((3,), jnp.uint32)})
    with pytest.raises(ConfigError, match=r"\.counters\['seen'\] as uint32 \(1,\), expected uint32 \(3,\)"):
        with_saver(run, lambda saver: saver.restore(wider))
    assert not (run / "corrupt").exists()
    assert_is(restore(run), 3)


def test_each_step_is_restored_into_the_structure_it_has(tmp_path):
    """Step 1 has other leaves than step 2, which is damaged."""
    trees = {1: {"x": np.arange(3.0)}, 2: {"x": np.ones((2, 2)), "y": np.array(2.0)}}
    with_saver(tmp_path, lambda saver: [saver.save(step, tree, {}) for step, tree in trees.items()])
    assert with_saver(tmp_path, lambda saver: saver.restore(trees.get))[2] == 2
    (tmp_path / "checkpoints" / "2" / "state" / "manifest.ocdbt").write_bytes(b"")
    state, _, step = with_saver(tmp_path, lambda saver: saver.restore(trees.get))
    assert step == 1 and digests(state) == digests(trees[1])


def test_a_reader_moves_makes_and_cleans_up_nothing(run):
    """Beside a trainer that is saving step 4 when step 3 turns out to be damaged."""
    (run / "checkpoints" / "3" / "state" / "manifest.ocdbt").write_bytes(b"")
    (run / "checkpoints" / "4.orbax-checkpoint-tmp").mkdir()
    before = sorted(run.rglob("*"))
    assert_is(with_saver(run, lambda saver: saver.restore(like()), read_only=True), 2)
    assert sorted(run.rglob("*")) == before


# --- a disk that takes no more -----------------------------------------------------

REFUSED = """
import resource, sys
import numpy as np
from jaxmarl_llm.storage.checkpoint import Checkpointer

saver = Checkpointer(sys.argv[1], keep=1)
state = lambda step: {"x": np.random.default_rng(step).normal(size=100_000)}
saver.save(1, state(1), {})
saver.wait()
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # no file may be larger
saver.save(2, state(2), {})
try:
    saver.wait()
except ValueError as error:
    print(error)
other = Checkpointer(sys.argv[1], read_only=True)
print(other.steps(), np.array_equal(other.restore(state(0))[0]["x"], state(1)["x"]))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
saver.save(3, state(3), {})
saver.close()
"""


def test_a_save_that_the_disk_refuses_is_an_error_and_costs_no_step(tmp_path):
    """In the background, with keep=1: the step before stays, and a later save works. The limit is that of a process."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", REFUSED, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    error, steps = done.stdout.splitlines()
    assert f"{tmp_path}/checkpoints/2" in error and "File too large" in error
    assert steps == "[1] True"
    shape = {"x": np.zeros(100_000)}
    state, _, step = with_saver(tmp_path, lambda saver: saver.restore(shape))
    assert step == 3 and np.array_equal(state["x"], np.random.default_rng(3).normal(size=100_000))
    assert not (tmp_path / "corrupt").exists()


@pytest.mark.parametrize("name", ["two words", "Ünïcode ✓", "a'b\"c$d"])
def test_a_workdir_may_have_any_name(tmp_path, name):
    tree = {"x": np.arange(3.0)}
    with_saver(tmp_path / name, lambda saver: saver.save(1, tree, make_meta(1)))
    state, meta, step = with_saver(tmp_path / name, lambda saver: saver.restore(tree))
    assert (tmp_path / name / "checkpoints" / "1").is_dir()
    assert step == 1 and meta["config"] == make_meta(1)["config"] and digests(state) == digests(tree)


# --- kill ------------------------------------------------------------------------

VICTIM = """
import sys
import numpy as np
from jaxmarl_llm.storage.checkpoint import Checkpointer

saver = Checkpointer(sys.argv[1])
like = {"x": np.zeros((200_000,), np.float32), "step": np.zeros((), np.int32)}
got = saver.restore(like)
step = 0 if got is None else got[2]
assert got is None or (got[0]["x"] == step).all() and got[0]["step"] == step
print("start", step, flush=True)
while True:
    step += 1
    saver.save(step, {"x": np.full((200_000,), step, np.float32), "step": np.int32(step)}, {"step": step})
    saver.wait()
    print("saved", step, flush=True)
"""


def test_kill_during_saves_loses_no_acknowledged_step(tmp_path):
    """Each process resumes what the one before left, and is killed at a random time, mostly inside a save."""
    rng, acknowledged = random.Random(1), 0
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", VICTIM, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=env,
            stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        with child:
            assert child.stdout is not None
            word, step = child.stdout.readline().split()
            assert word == "start" and int(step) >= acknowledged
            child.stdout.readline()  # the first save, which is slow
            time.sleep(rng.uniform(0.05, 0.4))
            child.send_signal(signal.SIGKILL)
            lines = child.stdout.read().split("\n")
        acknowledged = max([int(step) + 1, *(int(line.split()[1]) for line in lines[:-1])])
    shapes = {"x": np.zeros((200_000,), np.float32), "step": np.zeros((), np.int32)}
    saver = Checkpointer(tmp_path)
    state, meta, step = saver.restore(shapes)
    assert step >= acknowledged >= 4 and meta["step"] == step == state["step"]
    assert (state["x"] == step).all()
    assert not (tmp_path / "corrupt").exists()
    saver.save(step + 1, state, meta)
    saver.close()
    left = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    assert left == {str(step), str(step + 1)}  # nothing half-written
