"""The environments:

    jaxmarl-llm envs              all of them
    jaxmarl-llm envs NAME         one: rules, roles, turns, reward components, and the keys of --config.env.args

NAME is one of ours, or package.module of your own.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from jaxmarl_llm.cli import arguments, catalogue


def main(given: Any) -> None:
    """Print the environments, or one of them. ``given``: the parsed arguments."""
    if given.name is None:
        for name, text in catalogue.environments().items():
            print(f"{name:16} {text}")
        return
    from jaxmarl_llm.cli import explain
    from jaxmarl_llm.envs.contract import ArrayTask
    from jaxmarl_llm.envs.registry import EnvConfig

    config = EnvConfig(given.name)
    config.check("env")
    module, task = config.module, config.environment()
    env, kind = (task.env, "array") if isinstance(task, ArrayTask) else (task.make(), "host")
    taught = "none" if task.demonstrations is None else "yes (stage 0)"
    print(f"{(module.__doc__ or '').strip()}\n")
    print(f"{kind} environment; roles: {', '.join(env.roles)}; at most {env.max_turns} turns")
    print(f"reward components: {', '.join(env.components)}; demonstrations: {taught}")
    print(f"free text (jaxmarl-llm chat): {'yes' if getattr(task, 'ask', None) else 'no'}")
    if isinstance(module, ModuleType):
        arguments_of = explain.table(module.Config(), prefix="config.env.args")
        print(f"\nkeys of its arguments:\n{arguments_of}")


if __name__ == "__main__":
    parser = arguments.Parser("envs", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="an environment")
    arguments.run(parser, main)
