"""Freed memory stays: the temporaries of a program that runs again are not new pages."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource
from jaxmarl_llm.runs import allocator as heap
{settings}
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.sort(x[:, None] * x[None], axis=1).sum())
x = jnp.arange(4096.0)
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc, whose allocator this is about")
@pytest.mark.skipif(HUGE.exists() and "[always]" in HUGE.read_text(), reason="needs pages of 4 KB to count")
def test_a_program_that_runs_again_maps_no_new_pages():
    """64 MB of temporaries at least, 4 KB a page; without the setting most of them are mapped at every run."""

    def faults(settings):
        program = [sys.executable, "-c", PROGRAM.format(settings=settings)]
        return int(subprocess.run(program, capture_output=True, text=True, check=True).stdout)

    assert faults("heap.retain()") < 1_000
    assert faults("") > 16_000 and faults("heap.retain(); heap.release()") > 16_000
