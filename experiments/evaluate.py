"""Evaluate a run's newest checkpoint on held-out tasks:

    python -m experiments.evaluate --workdir=runs/demo [--out=FILE.json] [--mesh=1,1,1]

Prints success and mean reward components of episodes sampled as in training and of greedy ones. The configuration is
the one the checkpoint was trained with, but for the devices: ``--mesh`` says which of this machine's are used.
"""

import dataclasses
import importlib
import json
import logging as python_logging
from pathlib import Path

from absl import flags, logging

from experiments import cli

flags.DEFINE_string("out", None, "Also write the figures to this JSON file.")
flags.DEFINE_list("mesh", "1,1,1", "Devices along data, fsdp and tensor; -1 on one of them: those that remain.")


def open_run(workdir, mesh=("1", "1", "1")):
    """(config, recipe, state) of the newest checkpoint in ``workdir``, on ``mesh``; ConfigError when there is none."""
    from jaxmarl_llm import loop
    from jaxmarl_llm.checkpoint import Checkpointer
    from jaxmarl_llm.config import from_dict
    from jaxmarl_llm.sharding import MeshConfig
    from jaxmarl_llm.text import ConfigError

    if len(mesh) != 3 or not all(size.removeprefix("-").isdigit() for size in mesh):
        raise ConfigError(f"--mesh: expected three numbers as in 1,8,1, got {','.join(mesh)!r}")
    if not (Path(workdir) / "checkpoints").is_dir():
        raise ConfigError(f"--workdir: {workdir} holds no checkpoints; train first")
    saver = Checkpointer(workdir)
    try:
        meta = saver.read_meta()
        if meta is None:
            raise ConfigError(f"--workdir: {workdir}/checkpoints holds no readable step")
        module = importlib.import_module(f"jaxmarl_llm.recipes.{meta['config']['recipe']}")
        cfg = dataclasses.replace(from_dict(module.Config, meta["config"]), mesh=MeshConfig(*map(int, mesh)))
        recipe = module.make(cfg)
        state = loop.restore(saver, recipe, meta)[0]
    finally:
        saver.close()
    return cfg, recipe, state


def main(cfg, workdir, flag_values):
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger().setLevel(python_logging.WARNING)
    cfg, recipe, state = open_run(workdir, flag_values.mesh)
    try:
        figures = {"step": int(state.step), **recipe.evaluate(state)}
    finally:
        recipe.arena.close()
    for key, value in figures.items():
        print(f"{key:28} {value:.4f}" if isinstance(value, float) else f"{key:28} {value}")
    if flag_values.out:
        Path(flag_values.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    cli.run(main, required=("workdir",))
