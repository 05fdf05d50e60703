"""A run that is killed with -9 and goes on, beside the same run undisturbed: what tests of a resume compare."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax

from jaxmarl_llm.config import to_dict
from jaxmarl_llm.runs import loop
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.types import TrainState
from tests.test_layering import ROOT

SECONDS = 240  # of a process, at most


def killed_and_whole(recipe, cfg, folder: Path) -> tuple[Path, TrainState]:
    """Train ``cfg`` undisturbed in folder/whole, and killed and resumed in folder/run; both end with the same bits.

    Args:
        recipe: Module of the recipe.
        cfg: Its configuration, with six steps and a checkpoint every three.
        folder: An empty folder.

    Returns:
        The workdir of the killed run, and the state that the undisturbed run ends with.
    """
    whole = loop.fit(cfg, recipe.make(cfg), folder / "whole")
    config, run = folder / "config.py", folder / "run"
    config.write_text(
        "from ml_collections import ConfigDict\nfrom jaxmarl_llm.config import from_dict, to_dict\n"
        f"from {recipe.__name__} import Config\n"
        f"def get_config(variant=''):\n    return ConfigDict(to_dict(from_dict(Config, {to_dict(cfg)!r})))\n"
    )
    command = [sys.executable, "-m", "experiments.train", f"--config={config}", f"--workdir={run}"]
    command += [f"--compilation_cache={jax.config.jax_compilation_cache_dir}"]
    env, quiet = {**os.environ, "JAX_PLATFORMS": "cpu"}, subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=quiet, stderr=quiet)
    saved, deadline = run / "checkpoints" / "3", time.time() + SECONDS
    while time.time() < deadline and process.poll() is None and not saved.exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert saved.exists() and not (run / "checkpoints" / "6").exists()
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 and "resumed" in done.stdout, done.stderr[-2000:]
    got = Checkpointer(run).restore(loop.without_shared(whole))
    assert got is not None and got[2] == 6 and digests(got[0]) == digests(loop.without_shared(whole))
    return run, whole
