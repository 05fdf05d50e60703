"""Command that evaluates the newest checkpoint of a run on held-out tasks:

    jaxmarl-llm evaluate --workdir=runs/demo [--out=FILE.json] [--mesh=1,1,1]
    jaxmarl-llm evaluate --workdir=runs/pair --partner=runs/other --relay=2 --solo=runs/solo

It prints success and the mean of each reward component, for episodes sampled as in training and for greedy episodes.
``--best`` takes the step that ``run.best`` kept in place of the newest.
The configuration is that of the checkpoint, except for devices: ``--mesh`` selects devices of this machine. With
``--partner`` or ``--solo``, it also prints a table of mixed teams and of the gap to a single agent (`cli.partners`).
``--solo`` may name the run itself if its environment has a form for one agent.
"""

import json
import logging as python_logging
from pathlib import Path

from absl import flags, logging

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.cli.trained_run import open_run
from jaxmarl_llm.errors import ConfigError

flags.DEFINE_string("partner", None, "Folder of another run with the same roles, whose models take some seats.")
flags.DEFINE_integer("relay", 0, "First turns in which the partner plays the first seat.", lower_bound=0)
flags.DEFINE_string("solo", None, "Folder of a run whose first model plays alone, the reference of the gap.")
flags.DEFINE_string("out", None, "Also write the figures to this JSON file.")


def partner_figures(cfg, recipe, state, flag_values):
    """Figures of mixed teams that the flags request (`partners.figures`); empty without such flags.

    cfg, recipe, state: results of `open_run`. flag_values: the parsed flags; ``partner``, ``relay`` and ``solo`` are
    read. Raises ConfigError for ``relay`` without ``partner``, and for runs that cannot play together.
    """
    from jaxmarl_llm.cli import partners

    if flag_values.relay and not flag_values.partner:
        raise ConfigError("--relay: expected a --partner that plays the first turns")
    asked = {name: flag_values[name].value for name in ("partner", "solo") if flag_values[name].value}
    if not asked:
        return {}
    opened, sides = [], {"run": partners.without_memory(cfg, recipe, state, "workdir")}
    try:
        for name, folder in asked.items():
            other, made, trained = open_run(folder, name)
            opened.append(made.env_runner)
            sides[name] = partners.without_memory(other, made, trained, name)
        if "solo" in sides:
            sides["solo"] = partners.single_agent(sides["solo"])
            opened.append(sides["solo"].env_runner)
        arms = partners.evaluate_arms(sides["run"], sides.get("partner"), sides.get("solo"), flag_values.relay)
    finally:
        for env_runner in opened:
            env_runner.close()
    return partners.figures(arms)


def main(cfg, workdir, flag_values):
    """Evaluate the run in ``workdir`` and print the figures.

    cfg: not read; the configuration is that of the checkpoint. flag_values: the parsed flags.
    """
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger().setLevel(python_logging.WARNING)
    if flag_values.out and not Path(flag_values.out).absolute().parent.is_dir():
        raise ConfigError(f"--out: {flag_values.out}: there is no folder {Path(flag_values.out).absolute().parent}")
    cfg, recipe, state = open_run(workdir, mesh=flag_values.mesh, best=flag_values.best)
    try:
        teams = partner_figures(cfg, recipe, state, flag_values)
        figures = {"step": int(state.step), **recipe.evaluate(state)}
    finally:
        recipe.env_runner.close()
    for key, value in figures.items():
        print(f"{key:28} {value:.4f}" if isinstance(value, float) else f"{key:28} {value}")
    if teams:
        from jaxmarl_llm.cli import partners

        print("\n" + partners.table(teams))
        figures["teams"] = teams
    if flag_values.out:
        Path(flag_values.out).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    config_flags.run(main, required=("workdir",), takes_config=False)
