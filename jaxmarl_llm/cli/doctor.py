"""What this machine has, and what to install:

    jaxmarl-llm doctor [--workdir=DIR]

It prints the versions, the devices that JAX sees, memory, the tier of the sandbox and free disk space. It also lists
the extras, and other libraries that an adapter or an option uses. A line on a missing package has its command. Exit
code 1: something is wrong, and a line that begins with ``problem`` says what.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmarl_llm.cli import arguments

# extra of setup.cfg -> its packages as they are imported, and what it is for
EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "cuda": (("jax_cuda13_plugin",), "NVIDIA GPUs"),
    "tpu": (("libtpu",), "TPUs"),
    "hf": (("datasets", "huggingface_hub"), "data sets and models of the Hugging Face hub"),
    "gguf": (("gguf",), "GGUF files"),
    "wandb": (("wandb",), "config.run.wandb_project"),
    "trackio": (("trackio",), "config.run.trackio_project"),
    "gcs": (("gcsfs",), "workdirs, weights and data at gs://"),
    "s3": (("s3fs",), "workdirs, weights and data at s3://"),
    "games": (("pgx", "jaxmarl"), "environment games"),
    "pettingzoo": (("pettingzoo",), "envs.adapters.pettingzoo"),
}
PLATFORMS: Mapping[str, str] = {"cuda": "gpu", "tpu": "tpu"}  # extra of an accelerator -> platform as JAX names it
# library without an extra, as it is imported -> what uses it, and the command that installs it
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "textarena": ("envs.adapters.textarena", "pip install textarena"),
    "verifiers": ("envs.adapters.verifiers", "pip install 'verifiers<0.4'"),
    "inspect_ai": ("envs.adapters.inspect_ai", "pip install inspect-ai"),
    "openenv": ("clients of envs.adapters.openenv", "pip install openenv"),
    "vllm": ("an engine of config.engine.urls, here or on another machine", "pip install vllm"),
    "sglang": ("an engine of config.engine.urls, here or on another machine", "pip install sglang"),
    "pandas": ("data frames of rollouts", "pip install pandas"),
}
GIB = 2**30
LEAST_DISK = 2  # GiB free, below which checkpoints of a small run may not fit


def versions() -> Iterator[str]:
    """Lines on the software."""
    from jaxmarl_llm import __version__

    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "transformers")}
    yield f"jaxmarl_llm  {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield f"packages     {', '.join(f'{name} {version}' for name, version in found.items())}"


def devices() -> Iterator[str]:
    """Lines on the devices that JAX sees, and on accelerators of this machine that it does not see."""
    import jax

    from jaxmarl_llm.runs.preflight import host_memory

    try:
        seen = jax.devices()
    except RuntimeError as error:
        yield f"problem      JAX finds no device: {' '.join(str(error).split())[:200]}"
        return
    kinds = {f"{d.platform} ({d.device_kind})": sum(o.device_kind == d.device_kind for o in seen) for d in seen}
    yield f"devices      {', '.join(f'{count} x {kind}' for kind, count in kinds.items())}"
    stats = seen[0].memory_stats() or {}
    if stats.get("bytes_limit"):
        yield f"memory       {stats['bytes_limit'] / GIB:.1f} GiB of each device"
    yield f"memory       {host_memory() / GIB:.1f} GiB of this machine, {os.cpu_count()} cores"
    if seen[0].platform == "cpu":
        yield from unused(os.environ.get("JAX_PLATFORMS", ""))


def unused(platforms: str, root: Path = Path("/")) -> Iterator[str]:
    """Lines on accelerators of this machine, where JAX sees CPUs alone.

    Args:
        platforms: Value of JAX_PLATFORMS, which may forbid them.
        root: Root of the file system.
    """
    present = {
        "cuda": (root / "proc/driver/nvidia/version").exists() or (root / "dev/nvidia0").exists(),
        "tpu": (root / "dev/accel0").exists() or (root / "dev/vfio/0").exists(),
    }
    for extra, there in present.items():
        if there and platforms == "cpu":
            yield f"accelerator  {EXTRAS[extra][1]} are here and JAX_PLATFORMS=cpu hides them"
        elif there:
            yield f"problem      {EXTRAS[extra][1]} are here and JAX does not see them: {install(extra)}"


def sandbox() -> Iterator[str]:
    """The line on the jail for generated programs."""
    from jaxmarl_llm.sandbox import judge

    try:
        yield f"sandbox      {judge.probe()}"
    except judge.SandboxUnavailable as error:
        yield f"sandbox      none (environment coding): {' '.join(str(error).split())}"


def platforms() -> set[str]:
    """Platforms of the devices that JAX sees, as JAX names them; none where it finds no device."""
    import jax

    try:
        return {device.platform for device in jax.devices()}
    except RuntimeError:
        return set()


def extras(seen: Collection[str]) -> Iterator[str]:
    """A line on each extra of the package. The package of an accelerator does not make a device.

    Args:
        seen: Platforms that JAX sees, see `platforms`.
    """
    for extra, (modules, purpose) in EXTRAS.items():
        state = "installed" if all(map(_found, modules)) else install(extra)
        if state == "installed" and extra in PLATFORMS:
            sees = "" if PLATFORMS[extra] in seen else "no "
            state = f"{', '.join(modules)} is installed, and JAX sees {sees}{purpose}"
        yield f"extra        {extra:11} {purpose}: {state}"


def libraries() -> Iterator[str]:
    """A line on each library that the package can use and has no extra for."""
    for module, (purpose, command) in LIBRARIES.items():
        yield f"library      {module:11} {purpose}: {'installed' if _found(module) else command}"


def _found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def disk(workdir: str) -> Iterator[str]:
    """Lines on the folder of a run: free space, and whether it can be written. ``workdir``: it need not exist."""
    place = Path(workdir).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / GIB
    yield f"disk         {free:.1f} GiB free for {workdir}"
    if free < LEAST_DISK:
        yield f"problem      less than {LEAST_DISK} GiB are free for {workdir}: name another folder with --workdir"
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        yield f"problem      cannot write to {place}: {error.strerror or error}"


def install(extra: str) -> str:
    """The command that installs an extra. ``extra``: its name in `EXTRAS`."""
    return f"pip install 'jaxmarl_llm[{extra}]'"


def main(given: Any) -> int:
    """Print what this machine has. ``given``: the parsed arguments. Returns 1 where there is a problem."""
    wrong = 0
    for part in (versions(), devices(), sandbox(), extras(platforms()), libraries(), disk(given.workdir)):
        for line in part:
            print(line, flush=True)
            wrong += line.startswith("problem")
    return int(wrong > 0)


if __name__ == "__main__":
    parser = arguments.Parser("doctor", __doc__)
    parser.add_argument("--workdir", default="runs", metavar="DIR", help="folder of runs (%(default)s)")
    arguments.run(parser, main)
