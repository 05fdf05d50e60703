"""Evaluate a run's newest checkpoint on held-out tasks:

    python -m experiments.evaluate --workdir=runs/demo [--out=FILE.json] [--mesh=1,1,1]
    python -m experiments.evaluate --workdir=runs/pair --partner=runs/other --relay=2 --solo=runs/solo

Prints success and mean reward components of episodes sampled as in training and of greedy ones. The configuration is
the one the checkpoint was trained with, but for the devices: ``--mesh`` says which of this machine's are used. With
``--partner`` or ``--solo`` also a table of who plays with whom, and of the gap to one agent alone (experiments/gap.py);
``--solo`` may be the run itself where its environment has a form for one agent.
"""

import dataclasses
import json
import logging as python_logging
from pathlib import Path

from absl import flags, logging
from etils import epath

from experiments import cli

flags.DEFINE_string("partner", None, "Folder of another run of the same roles: its models take seats of this one's.")
flags.DEFINE_integer("relay", 0, "Turns for which the partner plays the first seat; then its own model.", lower_bound=0)
flags.DEFINE_string("solo", None, "Folder of a run whose first model plays alone; what the gap is measured from.")
flags.DEFINE_string("out", None, "Also write the figures to this JSON file.")
flags.DEFINE_list("mesh", "1,1,1", "Devices along data, fsdp and tensor; -1 on one of them: those that remain.")


def open_run(workdir, flag="workdir", mesh=("1", "1", "1")):
    """(config, recipe, state) of the newest checkpoint in ``workdir``, on ``mesh``; without one a ConfigError that
    names ``flag``.
    """
    from jaxmarl_llm import loop
    from jaxmarl_llm.checkpoint import Checkpointer
    from jaxmarl_llm.config import from_dict
    from jaxmarl_llm.meshes import MeshConfig
    from jaxmarl_llm.text import ConfigError

    if len(mesh) != 3 or not all(size.removeprefix("-").isdigit() for size in mesh):
        raise ConfigError(f"--mesh: expected three numbers as in 1,8,1, got {','.join(mesh)!r}")
    if not (epath.Path(workdir) / "checkpoints").is_dir():
        raise ConfigError(f"--{flag}: {workdir} holds no checkpoints; train first")
    saver = Checkpointer(workdir, read_only=True)  # the run may be going on
    try:
        meta = saver.read_meta()
        if meta is None:
            raise ConfigError(f"--{flag}: {workdir}/checkpoints holds no readable step")
        module = cli.recipe_module(meta["config"]["recipe"])
        cfg = dataclasses.replace(from_dict(module.Config, meta["config"]), mesh=MeshConfig(*map(int, mesh)))
        recipe = module.make(cfg)
        state = loop.restore(saver, recipe, meta, learning=False)[0]
    finally:
        saver.close()
    return cfg, recipe, state


def company(cfg, recipe, state, flag_values):
    """The figures of `gap` that the flags ask for."""
    from experiments import gap
    from jaxmarl_llm.text import ConfigError

    if flag_values.relay and not flag_values.partner:
        raise ConfigError("--relay: expected a --partner that plays the first turns")
    asked = {name: flag_values[name].value for name in ("partner", "solo") if flag_values[name].value}
    if not asked:
        return {}
    opened, sides = [], {"run": gap.side(cfg, recipe, state, "workdir")}
    try:
        for name, folder in asked.items():
            other, made, trained = open_run(folder, name)
            opened.append(made.arena)
            sides[name] = gap.side(other, made, trained, name)
        if "solo" in sides:
            sides["solo"] = gap.alone(sides["solo"])
            opened.append(sides["solo"].arena)
        arms = gap.played(sides["run"], sides.get("partner"), sides.get("solo"), flag_values.relay)
    finally:
        for arena in opened:
            arena.close()
    return gap.figures(arms)


def main(cfg, workdir, flag_values):
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger().setLevel(python_logging.WARNING)
    cfg, recipe, state = open_run(workdir, mesh=flag_values.mesh)
    try:
        teams = company(cfg, recipe, state, flag_values)
        figures = {"step": int(state.step), **recipe.evaluate(state)}
    finally:
        recipe.arena.close()
    for key, value in figures.items():
        print(f"{key:28} {value:.4f}" if isinstance(value, float) else f"{key:28} {value}")
    if teams:
        from experiments import gap

        print("\n" + gap.table(teams))
        figures["teams"] = teams
    if flag_values.out:
        Path(flag_values.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    cli.run(main, required=("workdir",))
