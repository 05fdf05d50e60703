"""Which environments there are, and the configuration that names one.

Our own environments register themselves: every folder beside this file with a module named in `FORMS`. Any other
environment is named by a dotted name, see envs/contract.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxmarl_llm.config import (
    COUNT_LIMIT,
    ROW_LIMIT,
    at_least,
    from_dict,
    load_module,
    load_object,
    nearest,
    one_of,
    positive,
)
from jaxmarl_llm.envs.contract import Environment, check, made_by, need, of_module, roles_of
from jaxmarl_llm.envs.protocols import PROTOCOLS
from jaxmarl_llm.envs.trials import called
from jaxmarl_llm.errors import ConfigError

FORMS = {"array": "", "env": "", "text": "_text", "solo": "_solo", "coach": "_coach"}  # module -> ending of the name

WORKER_LIMIT = 2**12  # processes of one machine
TASK_LIMIT = 2**20  # tasks of one environment, all made before the first step; also of any other count in its args


def _modules() -> dict[str, str]:
    """Name of each of our environments -> its module."""
    here, found = Path(__file__).parent, {}
    for folder in pkgutil.iter_modules([str(here)]):
        for form, ending in FORMS.items():
            if folder.ispkg and (here / folder.name / f"{form}.py").is_file():
                found[folder.name + ending] = f"jaxmarl_llm.envs.{folder.name}.{form}"
    return found


MODULES = _modules()


@dataclass(frozen=True)
class EnvConfig:
    """Names an environment, and says how it is played.

    ``name`` is one of ours, or a dotted name: ``package.module``, or ``package.module:function``.
    """

    name: str = "dispatch"  # one of ours (jaxmarl-llm envs), package.module, or package.module:function
    args: dict[str, Any] = field(default_factory=dict)  # fields of the module's Config, or arguments of the function
    workers: int = 2  # processes of a host environment; 0: in this process, without timeouts
    timeout: float = 20.0  # seconds for one call of a host environment
    max_prompt: int = 1024  # tokens; longer prompts of a host environment are cut and counted
    lanes: int = 0  # samples of a model in the decoding loop of a host environment, see rollout/scheduler; 0: by turns
    eval_tasks: int = 256  # held-out tasks, at most
    protocol: str = "together"  # of a host environment: who hears whom, see envs/protocols.py

    def check(self, path: str) -> None:
        if self.name not in MODULES and not {".", ":"} & set(self.name):
            close = nearest(self.name, MODULES)
            known = close if close.startswith("did you mean") else "`jaxmarl-llm envs` lists ours"
            hint = f"{known}, or name your own as package.module or package.module:function"
            raise ConfigError(f"{path}.name: no environment {self.name!r}; {hint}")
        at_least(f"{path}.workers", self.workers, 0, WORKER_LIMIT)
        positive(f"{path}.timeout", self.timeout)
        at_least(f"{path}.lanes", self.lanes, 0, TASK_LIMIT)
        at_least(f"{path}.eval_tasks", self.eval_tasks, 1, TASK_LIMIT)
        at_least(f"{path}.max_prompt", self.max_prompt, 16, ROW_LIMIT)
        one_of(f"{path}.protocol", self.protocol, PROTOCOLS)
        built = self.build(f"{path}.args")
        for key, value in vars(built).items() if isinstance(self.module, ModuleType) else ():
            if isinstance(value, int):
                largest = COUNT_LIMIT if key.endswith("seed") else TASK_LIMIT
                at_least(f"{path}.args.{key}", value, int(key == "tasks"), largest)

    @property
    def module(self) -> Any:
        """The module, or the function of a dotted name with a colon."""
        if self.name in MODULES:
            return importlib.import_module(MODULES[self.name])
        load = load_object if ":" in self.name else load_module
        return load("config.env.name", self.name)

    def build(self, path: str = "config.env.args", seed: int | None = None) -> Any:
        """The module's own ``Config``, checked; for a function its arguments.

        Args:
            path: Name of the arguments in messages.
            seed: That of the run: the value of ``seed`` where the arguments have none and the environment takes one.
        """
        module, args = self.module, self.args
        if not isinstance(module, ModuleType):
            signature = self._signature(module)
            if seed is not None and "seed" in signature.parameters:
                args = {"seed": seed, **args}
            try:
                signature.bind(**args)
            except TypeError as error:
                raise ConfigError(f"{path}: {self.name}: {error}") from None
            return args
        if not hasattr(module, "Config"):
            need(module, "make", f"config.env.name: {self.name}", "a module with Config and make(config)")
            raise ConfigError(f"config.env.name: {self.name}: has no Config; expected a frozen dataclass")
        if not (isinstance(module.Config, type) and dataclasses.is_dataclass(module.Config)):
            raise ConfigError(f"config.env.name: {self.name}: Config is no dataclass; expected a frozen dataclass")
        if seed is not None and "seed" in {f.name for f in dataclasses.fields(module.Config)}:
            args = {"seed": seed, **args}
        return called(f"config.env.name: {self.name}", "Config", lambda: from_dict(module.Config, args, path))

    def _signature(self, function: Any) -> inspect.Signature:
        """The arguments of the function that ``name`` names; ConfigError where it is none."""
        expected = "expected a function that returns an ArrayTask or a HostTask"
        if not callable(function):
            raise ConfigError(f"config.env.name: {self.name}: {expected}, got {type(function).__name__}")
        try:
            return inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config.env.name: {self.name}: {expected}: {error}") from None

    def roles(self) -> tuple[str, ...]:
        """Names of the roles of the environment. Where a module makes it, no task is drawn or read."""
        module = self.module
        if not isinstance(module, ModuleType):
            return roles_of(self.environment())
        return tuple(made_by(module, self.build()).roles)

    def environment(self, seed: int | None = None) -> Environment:
        """The environment with its tasks, tried on the first of them. ``seed``: see `build`."""
        module, built = self.module, self.build(seed=seed)
        if isinstance(module, ModuleType):
            task = of_module(module, built, self.eval_tasks)
        else:
            task = called("config.env.name", self.name, lambda: module(**built))
        check(task, self.name, ours=self.name in MODULES)
        return task
