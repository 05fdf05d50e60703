"""One task of a host environment, played once before anything is compiled.

`envs.trials` has checked types before, without a pool. Here the worker processes, their time limit and the team's
tokenizers take part, and a failure is reported as one of the run.
"""

from __future__ import annotations

from jaxmarl_llm.errors import RunError
from jaxmarl_llm.messages import Action, HostEnv
from jaxmarl_llm.rollout.env_pool import Failure, raised
from jaxmarl_llm.rollout.env_runner import EnvRunner
from jaxmarl_llm.rollout.failures import RolloutFailure, one_line
from jaxmarl_llm.rollout.host_runner import HostEnvRunner
from jaxmarl_llm.rollout.tables import checked, reward_row
from jaxmarl_llm.runs.health import Health
from jaxmarl_llm.telemetry.failures_file import NAME
from jaxmarl_llm.types import Team

TEXTS = ("", "1", "A few words.")  # what every role says, in one task after another


def try_tasks(env_runner: EnvRunner, team: Team, health: Health, *, required: bool = True) -> None:
    """Play the first turn of the first training task. Where it fails, show that, and try the next one.

    env_runner: with a host environment; array environments were tried when they were made. team: whose tokenizers give
    the ids of the texts. health: shows failures. required: False accepts that every task fails.

    Raises RunError where the first tasks all fail, one for each of `TEXTS`.
    """
    if not isinstance(env_runner, HostEnvRunner):
        return
    failures = []
    for task, text in enumerate(TEXTS[: env_runner.size]):
        failure = _try(env_runner, team, task, text)
        if failure is None:
            return
        health.report([failure])
        failures.append(failure)
    if required:
        raise RunError(
            f"environment {env_runner.env.name!r}: all {len(failures)} tasks that were tried before anything was "
            f"compiled failed in {failures[0].call}: {one_line(failures[0].message)}; {NAME} has all of it"
        )


def _try(env_runner: HostEnvRunner, team: Team, task: int, text: str) -> RolloutFailure | None:
    """The failure of the first turn of a task in which every role says ``text``; None without one."""
    pool = env_runner.pool()
    env: HostEnv = pool.env
    (state,) = pool.map("reset", [(0, env_runner.tasks[task])], [task])
    if isinstance(state, Failure):
        return RolloutFailure("reset", 0, (), task, f"{state.kind}: {state.message}", state.trace)
    try:
        actions = {role: _action(team, role, text) for role in env.observe(state)}
    except Exception as error:  # the environment is the user's program: anything may be wrong with it
        told = raised(error)
        return RolloutFailure("observe", 0, (), task, f"{told.kind}: {told.message}", told.trace)
    (got,) = pool.map("step", [(0, state, actions)], [task])
    result = checked(got)
    _, problem = reward_row(result, team, env.components)
    if problem is None:
        return None
    return RolloutFailure("step", 0, tuple(actions), task, problem, result.trace if isinstance(result, Failure) else "")


def _action(team: Team, role: str, text: str) -> Action:
    tokenizer = team.model_of(team.role_index(role)).tokenizer
    return Action(text, (*tokenizer.encode(text), tokenizer.stop_ids[0]))
