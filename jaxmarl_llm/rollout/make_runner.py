"""`make_env_runner`: the runner of an environment, for array or for host environments."""

from __future__ import annotations

from jaxmarl_llm.envs.contract import Environment, HostTask, check
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.rollout.array_runner import ArrayEnvRunner
from jaxmarl_llm.rollout.env_runner import EnvRunner
from jaxmarl_llm.rollout.host_runner import HostEnvRunner


def make_env_runner(cfg: EnvConfig, task: Environment | None = None, *, seed: int | None = None) -> EnvRunner:
    """The runner of an environment.

    Args:
        cfg: Names the environment, and says how it is played.
        task: The environment itself; None: the one that ``cfg`` names.
        seed: That of the run, which tasks differ by unless ``cfg.args`` have a seed; None: the environment's default.

    Raises:
        ConfigError: The environment lacks something, or does not go with ``cfg``.
    """
    if task is None:
        return _runner_of(cfg, cfg.environment(seed))
    check(task, "env")
    runner = _runner_of(cfg, task)
    runner.given = True
    return runner


def _runner_of(cfg: EnvConfig, task: Environment) -> EnvRunner:
    """The runner of a checked environment."""
    if isinstance(task, HostTask):
        return HostEnvRunner(task, cfg)
    if cfg.protocol != "together":
        raise ConfigError(f"config.env.protocol: expected 'together' with the array environment {task.env.name!r}")
    return ArrayEnvRunner(task)
