"""Every test runs on CPU, with 8 fake devices, and shape annotations executed."""

import gc
import os
import shutil

os.environ["JAX_PLATFORMS"] = "cpu"
# Hundreds of small programs: compiling them is most of the time, running them is not (the older emitters of fusions
# compile in half the time). In the environment, so that processes which tests start compile alike, to the bit.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
    ]
)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax
import jaxtyping
import pytest
from hypothesis import settings

from tests.slow import is_slow, listed

# The import hook checks annotated shapes with beartype, in the tests only. Modules that define tables are left out:
# tables travel as jax and as numpy arrays, and the hook would refuse the second when it checks their constructors.
CHECKED = ("training.losses", "generation.sampling", "credit.selection", "models.lora")
jaxtyping.install_import_hook([f"jaxmarl_llm.{m}" for m in CHECKED], "beartype.beartype")

# Tracing makes many objects that live on, and jaxlib has work of its own at each collection: a tenth of the tests' time
# with Python's thresholds.
gc.set_threshold(20_000, 20, 20)

settings.register_profile("repository", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("repository")


CACHE_BYTES = 4 * 2**30


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs that several tests share are compiled once, by whichever worker comes first.

    The folder is JAXMARL_TEST_CACHE, which `make` keeps from one session to the next, or one of this session.
    """
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAXMARL_TEST_CACHE") or str(base / "jax_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_sessionstart(session):
    """A kept folder of compiled programs that has grown beyond CACHE_BYTES begins anew."""
    kept = os.environ.get("JAXMARL_TEST_CACHE", "")
    files = [file for file in os.scandir(kept) if file.is_file()] if os.path.isdir(kept) else []
    if "PYTEST_XDIST_WORKER" not in os.environ and sum(file.stat().st_size for file in files) > CACHE_BYTES:
        shutil.rmtree(kept)


@pytest.fixture(scope="module")
def numpy_tables():
    """For modules whose tables are numpy arrays, which the executed annotations do not know."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Between modules, before a worker holds as many memory maps as Linux allows; see loop.release_programs."""
    yield
    from jaxmarl_llm.runs.loop import release_programs

    release_programs(share=0.2)


# Files are handed out whole (--dist loadfile): the long ones first, so that no worker waits for the last.
LONGEST = (
    "scan",
    "drivers",
    "mechanisms",
    "split",
    "processes",
    "loop",
    "critic",
    "magrpo",
    "baselines",
    "assistant_run",
    "array",
    "host",
    "sandbox",
    "generate",
)


def pytest_collection_modifyitems(items):
    known = listed()
    for item in items:
        if is_slow(item.nodeid, known):
            item.add_marker(pytest.mark.slow)
    rank = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(LONGEST)))
