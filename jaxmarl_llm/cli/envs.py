"""The environments:

    jaxmarl-llm envs                    all of them
    jaxmarl-llm envs NAME               one: rules, roles, turns, reward components, keys of --config.env.args
    jaxmarl-llm envs module:function    one of your own: also its tasks, first prompts, and what a trial is paid

NAME is one of ours, or package.module of your own. The trial plays the first training task. Each role writes its
demonstration, or the empty text where there is none. Array environments of your own show the number of tasks alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxmarl_llm.cli import arguments, catalogue
from jaxmarl_llm.cli.episodes import Player, Show, play, printable
from jaxmarl_llm.messages import Action, HostEnv, Prompt, Rewards


def main(given: Any) -> None:
    """Print the environments, or one of them. ``given``: the parsed arguments."""
    if given.name is None:
        for name, text in catalogue.environments().items():
            print(f"{name:16} {text}")
        return
    from jaxmarl_llm.cli import explain
    from jaxmarl_llm.envs.contract import ArrayTask
    from jaxmarl_llm.envs.registry import MODULES, EnvConfig

    config = EnvConfig(given.name)
    config.check("env")
    module, task = config.module, config.environment()
    env, kind = (task.env, "array") if isinstance(task, ArrayTask) else (task.make(), "host")
    taught = "none" if task.demonstrations is None else "yes (stage 0)"
    print(f"{_about(module)}\n")
    print(f"{kind} environment; roles: {', '.join(env.roles)}; at most {env.max_turns} turns")
    print(f"reward components: {', '.join(env.components)}; demonstrations: {taught}")
    print(f"free text (jaxmarl-llm chat): {'yes' if getattr(task, 'ask', None) else 'no'}")
    if given.name not in MODULES:
        print(f"tasks: {_count(task.tasks)} of training, {_count(task.held_out)} held out")
        if isinstance(env, HostEnv):
            print(_trial(env, task))
    if isinstance(module, ModuleType):
        arguments_of = explain.table(module.Config(), prefix="config.env.args")
        print(f"\nkeys of its arguments:\n{arguments_of}")


def _about(module: Any) -> str:
    """The docstring of a module, or of a function, or of the module of a function without one."""
    own = inspect.getdoc(module) if isinstance(module, ModuleType) or inspect.isroutine(module) else None
    return (own or getattr(inspect.getmodule(module), "__doc__", None) or "").strip()


def _count(tasks: Any) -> int:
    """Number of tasks: length of a list, or leading axis of the arrays of a tree."""
    import jax

    return len(tasks) if isinstance(tasks, (list, tuple)) else len(jax.tree.leaves(tasks)[0])


class Trial(Show):
    """Collects the first prompt of each role, and the sums of rewards.

    Attributes:
        prompts: Role -> its first prompt.
        sums: Role -> component -> sum over the episode; None where a reward was None, which makes an action invalid.
    """

    def __init__(self) -> None:
        self.prompts: dict[str, Prompt] = {}
        self.sums: dict[str, dict[str, float | None]] = {}

    def reads(self, turn: int, role: str, prompt: Prompt, entries: list[str]) -> None:
        self.prompts.setdefault(role, prompt)

    def paid(self, rewards: Rewards) -> None:
        for role, own in rewards.items():
            sums = self.sums.setdefault(role, {})
            for component, value in own.items():
                before = sums.get(component, 0.0)
                sums[component] = None if value is None or before is None else before + float(value)


def _trial(env: HostEnv, task: Any) -> str:
    """Lines about an episode of the first training task: the first prompts, what roles wrote, what was paid."""
    from jaxmarl_llm.envs.trials import in_words

    texts: Mapping[str, str] = {}
    if task.demonstrations is not None:
        texts = {role: text for role, _, text in reversed(list(task.demonstrations(task.tasks[:1])))}
    write = Player(lambda role, prompt, turn: Action(texts.get(role, ""), tuple(texts.get(role, "").encode())))
    trial, raised = Trial(), None
    try:
        play(env, task.tasks[0], dict.fromkeys(env.roles, write), 0, trial)
    except Exception as error:  # of the user's functions
        raised = in_words(error)
    lines = ["", "the first prompt of each role, on the first training task:"]
    for role in env.roles:
        shown = "\n".join(f"[{message.speaker}] {message.text}" for message in trial.prompts.get(role, ()))
        lines += [f"--- {role} reads", printable(shown) or "nothing: it does not act in the trial"]
    lines += ["", "paid on this task, by role and component:"]
    for role in env.roles:
        paid = ", ".join(
            f"{name} {value if value is None else round(value, 6)}" for name, value in trial.sums.get(role, {}).items()
        )
        lines.append(f"{role} wrote {printable(texts.get(role, ''))!r:.80}: {paid or 'nothing'}")
    if any(value is None for own in trial.sums.values() for value in own.values()):
        lines.append("a reward of None makes the joint action invalid")
    return "\n".join(lines + ([f"the trial raised {raised}; such joint actions are invalid"] if raised else []))


if __name__ == "__main__":
    parser = arguments.Parser("envs", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="one of ours, package.module, or module:function")
    arguments.run(parser, main)
