"""Every test runs on CPU, with 8 fake devices, and shape annotations executed."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jaxtyping
import pytest
from hypothesis import settings

# The import hook checks annotated shapes with beartype, in the tests only. Modules that define tables are left out:
# tables travel as jax and as numpy arrays, and the hook would refuse the second when it checks their constructors.
CHECKED = ("losses", "sampling", "selection", "lora")
jaxtyping.install_import_hook([f"jaxmarl_llm.{m}" for m in CHECKED], "beartype.beartype")

settings.register_profile("repository", deadline=None, derandomize=True, max_examples=30)
settings.load_profile("repository")


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """Programs that several tests share are compiled once a session."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.getbasetemp() / "jax_cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
