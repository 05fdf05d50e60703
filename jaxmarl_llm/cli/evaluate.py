"""Command that evaluates the newest checkpoint of a run on held-out tasks:

    jaxmarl-llm evaluate runs/demo [--out=FILE.json] [--mesh=1,1,1]
    jaxmarl-llm evaluate runs/demo --env=more_capitals:make
    jaxmarl-llm evaluate runs/pair --partner=runs/other --relay=2 --solo=runs/solo

It prints success and the mean of each reward component, for episodes sampled as in training and for greedy episodes.
``--best`` takes the step that ``run.best`` kept in place of the newest.

``--env`` names another environment: module:function of your own, or one of ours. Its roles are roles of the run, all or
some of them, and each keeps its model and its memory. A reward component has the weight of the run, and 1 where the run
has none.

Episodes of the first ``--eval_tasks`` held-out tasks, as they are sampled in training, become rollouts in the folder
evaluate/ of the run, which `jaxmarl-llm view` shows. With ``--env`` the folder has that name too. Files that training
wrote stay as they are.

The configuration is that of the checkpoint, except for devices: ``--mesh`` selects devices of this machine. With
``--partner`` or ``--solo``, it also prints a table of mixed teams and of the gap to a single agent (`cli.partners`).
``--solo`` may name the run itself if its environment has a form for one agent.
"""

import contextlib
import dataclasses
import json
import logging as python_logging
import sys
from pathlib import Path

from absl import flags, logging

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.cli.trained_run import open_run
from jaxmarl_llm.errors import ConfigError

flags.DEFINE_string(
    "env", None, "Another environment, whose held-out tasks are played: module:function, or one of ours."
)
flags.DEFINE_string("partner", None, "Folder of another run with the same roles, whose models take some seats.")
flags.DEFINE_integer("relay", 0, "First turns in which the partner plays the first seat.", lower_bound=0)
flags.DEFINE_string("solo", None, "Folder of a run whose first model plays alone, the reference of the gap.")
flags.DEFINE_integer(
    "eval_tasks", None, "Held-out tasks whose episodes are written; default: run.rollouts.eval_tasks.", lower_bound=0
)
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


@contextlib.contextmanager
def recorded(cfg, team, runner, workdir, env=None):
    """Write episodes of the first held-out tasks that ``runner`` evaluates here to the folder evaluate/ of a run.

    cfg: configuration of the run, whose ``run.rollouts.eval_tasks`` tasks are written. team: roles and models. runner:
    runner of the environment. workdir: folder of the run; one in an object store gets nothing. env: name of the
    environment where it is not that of the run. Prints the folder to stderr.
    """
    from jaxmarl_llm import json_files
    from jaxmarl_llm.runs.recorder import EvaluationRecorder
    from jaxmarl_llm.telemetry import rollouts
    from jaxmarl_llm.telemetry.rollouts_writer import RolloutsFolder

    if "://" in str(workdir) or not cfg.run.rollouts.eval_tasks:
        yield
        return
    versions = Path(workdir) / "versions.json"
    commit = json_files.read_object(versions).get("commit") if versions.is_file() else None
    place = rollouts.evaluated_folder(workdir, env)
    said: list[str] = []
    without_limit = dataclasses.replace(cfg.run.rollouts, max_mb=float("inf"))
    folder = RolloutsFolder(place, without_limit, sys.maxsize, said.append)  # no file of another step is deleted
    runner.evaluations = EvaluationRecorder(cfg, team, runner, folder, None, commit)
    try:
        yield
    finally:
        runner.evaluations = None
    print("\n".join(said) or f"episodes in {place}: jaxmarl-llm view {workdir}", file=sys.stderr)


def another_environment(cfg, recipe, state, name, workdir):
    """Figures of the run's models on the held-out tasks of another environment, as ``recipe.evaluate`` names them.

    cfg, recipe, state: results of `open_run`. name: of the environment, as in ``config.env.name``. workdir: folder of
    the run, which gets episodes, see `recorded`. Raises ConfigError where the environment has a fault, or a role that
    the run lacks.
    """
    from jaxmarl_llm.distributed import meshes
    from jaxmarl_llm.rollout.make_runner import make_env_runner
    from jaxmarl_llm.training.config import OTHERS, weights_of
    from jaxmarl_llm.training.evaluation import evaluate
    from jaxmarl_llm.training.train_step import TrainStep

    named = dataclasses.replace(cfg.env, name=name, args={})
    try:
        named.check("config.env")
        runner = make_env_runner(named, seed=cfg.seed)
    except ConfigError as error:
        raise ConfigError(f"--env={name}: {error}") from None
    try:
        roles = {role.name: role for role in recipe.team.roles}
        if strange := [role for role in runner.env.roles if role not in roles]:
            raise ConfigError(
                f"--env={name}: its role {strange[0]!r} is no role of the run, whose roles are {', '.join(roles)}"
            )
        steps = [phase.step for phase in recipe.phases if isinstance(phase.step, TrainStep)]
        memory = steps[-1].algorithm.memory if steps else None
        if memory is not None and (runner.array or recipe.env_runner.array):
            raise ConfigError(f"--env={name}: the run has a memory, which only text environments may read elsewhere")
        team = dataclasses.replace(recipe.team, roles=tuple(roles[role] for role in runner.env.roles), critics=())
        runner.layout = recipe.env_runner.layout
        paid = {component: weight for component, weight in cfg.reward.items() if component in runner.env.components}
        weights = weights_of({**paid, OTHERS: 1.0}, runner.env.components)
        with meshes.use_mesh(recipe.mesh):
            there = dataclasses.replace(cfg, env=named, reward=weights)
            with recorded(there, team, runner, workdir, name):
                return {"env": name, **evaluate(there, team, runner, state, memory)}
    finally:
        runner.close()


def with_tasks(cfg, tasks):
    """``cfg`` with ``run.rollouts.eval_tasks`` of ``tasks``; None: that of the run."""
    if tasks is None:
        return cfg
    rollouts = dataclasses.replace(cfg.run.rollouts, eval_tasks=tasks)
    return dataclasses.replace(cfg, run=dataclasses.replace(cfg.run, rollouts=rollouts))


def main(cfg, workdir, flag_values):
    """Evaluate the run in ``workdir`` and print the figures.

    cfg: not read; the configuration is that of the checkpoint. flag_values: the parsed flags.
    """
    logging.set_verbosity(logging.WARNING)
    python_logging.getLogger().setLevel(python_logging.WARNING)
    if flag_values.out and not Path(flag_values.out).absolute().parent.is_dir():
        raise ConfigError(f"--out: {flag_values.out}: there is no folder {Path(flag_values.out).absolute().parent}")
    for name in ("partner", "solo"):
        if flag_values.env and flag_values[name].value:
            raise ConfigError(f"--env: expected no --{name}: mixed teams play the environment of the run")
    cfg, recipe, state = open_run(workdir, mesh=flag_values.mesh, best=flag_values.best)
    try:
        teams = partner_figures(cfg, recipe, state, flag_values)
        cfg = with_tasks(cfg, flag_values.eval_tasks)
        if flag_values.env:
            found = another_environment(cfg, recipe, state, flag_values.env, workdir)
        else:
            with recorded(cfg, recipe.team, recipe.env_runner, workdir):
                found = recipe.evaluate(state)
        figures = {"step": int(state.step), **found}
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
