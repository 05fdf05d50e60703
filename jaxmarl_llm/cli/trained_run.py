"""A trained run, as `evaluate`, `export`, `play` and `chat` open it, with the flags --best and --mesh."""

import dataclasses

from absl import flags
from etils import epath

from jaxmarl_llm.cli import config_flags

flags.DEFINE_bool("best", False, "Take the step that run.best kept, and not the newest.")
flags.DEFINE_list("mesh", "1,1,1", "Devices along data, fsdp and tensor; -1 on one axis means the remaining devices.")


def open_run(workdir, flag="workdir", mesh=("1", "1", "1"), best=False, step=None):
    """Configuration, recipe and state of the newest checkpoint of a run.

    workdir: folder of the run. flag: name of the flag in messages, or RUN for an argument without one. mesh: three
    numbers of devices, as in ``--mesh``. best: of the best step, which a run with ``run.best`` keeps. step: of this
    step; None: the newest.
    Raises ConfigError without a readable checkpoint.
    """
    from jaxmarl_llm.config import from_dict
    from jaxmarl_llm.distributed.meshes import MeshConfig
    from jaxmarl_llm.errors import ConfigError
    from jaxmarl_llm.generation.engine import EngineConfig
    from jaxmarl_llm.runs import loop
    from jaxmarl_llm.storage.checkpoint import Checkpointer

    if len(mesh) != 3 or not all(size.removeprefix("-").isdigit() for size in mesh):
        raise ConfigError(f"--mesh: expected three numbers as in 1,8,1, got {','.join(mesh)!r}")
    name, shown = "best" if best else "checkpoints", flag if flag == "RUN" else f"--{flag}"
    if not (epath.Path(workdir) / name).is_dir():
        told = "no best step; train with --config.run.best=eval/return" if best else "no checkpoints; train first"
        raise ConfigError(f"{shown}: {workdir} holds {told}")
    saver = Checkpointer(workdir, read_only=True, name=name)  # the run may still write
    try:
        if step is not None and step not in (kept := saver.steps()):
            raise ConfigError(
                f"--step={step}: {workdir}/{name} holds no such step; it holds {', '.join(map(str, kept))}"
            )
        meta = saver.read_meta(step)
        if meta is None:
            raise ConfigError(f"{shown}: {workdir}/{name} holds no readable step")
        module = config_flags.recipe_module(meta["config"]["recipe"])
        data, fsdp, tensor = map(int, mesh)
        here = {"mesh": MeshConfig(data, fsdp, tensor), "engine": EngineConfig()}  # this process samples
        cfg = dataclasses.replace(from_dict(module.Config, meta["config"]), **here)
        recipe = module.make(cfg)
        state = loop.restore(saver, recipe, meta, learning=False, at=step)[0]
    finally:
        saver.close()
    return cfg, recipe, state
