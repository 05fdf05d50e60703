"""Play an environment in the terminal, to see what a role sees and what a reward pays:

    jaxmarl-llm play capitals:make                            you are every role
    jaxmarl-llm play chain_text --role=solver --say=checker=ok  you are the solver, the checker always says ok
    jaxmarl-llm play runs/try --role=solver                   you are the solver, trained models are the others
    jaxmarl-llm play runs/try --watch                         the trained team plays alone
    jaxmarl-llm play dilemma_text --hot-seat                  a person for each role, at one terminal

The argument is a run where it is a folder or has a slash, else an environment. --workdir=RUN names a run, too.

Before each completion the prompt is shown as that role sees it. After each joint action the rewards are shown by role
and component. Write one line; `\\n` in it is a line break. The end of input (Ctrl-D) ends the game. `--task` is the
number of a task, or a task of your own in JSON. Models of a run that trains with a memory read it.

With `--hot-seat` several people take turns at one terminal, one for each `--role`. Each person sees the prompts of the
own role alone: the screen is cleared before the keyboard goes to another person. Rewards are shown at the end.

An array environment shows its prompts as text, without tokens that are no characters. What you write is encoded and
ends with the end token. Its tasks have numbers only. `jaxmarl-llm view` shows what its trained models wrote.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmarl_llm.cli import arguments
from jaxmarl_llm.cli.episodes import Player, Show, TrainedTeam, play, printable
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

LONGEST = 64  # tokens that a role of an array environment may write


class Ended(Exception):
    """The end of the input."""


def main(given: Any) -> int:
    """Play one task. ``given``: the parsed arguments."""
    if given.workdir is None and given.env is not None and _is_run(given.env):
        given.env, given.workdir = None, given.env
    if (given.env is None) == (given.workdir is None):
        raise ConfigError("expected an environment, or a run as RUN or --workdir=RUN, one of the two")
    env, tasks, trained = _open_run(given) if given.workdir else _open_env(given.env, given.task)
    players, people = _players(env.roles, given, trained)
    if given.hot_seat and len(people) < 2:
        raise ConfigError(f"--hot-seat: expected two people or more, got {len(people)}; name their roles with --role")
    show = HotSeat(people) if given.hot_seat else Everything(env.roles)
    try:
        play(env, _task(tasks, given.task), players, given.seed, show)
    except Ended:
        print("\nended")
    return 0


def _is_run(name: str) -> bool:
    """Whether an argument is the folder of a run, and no environment."""
    from jaxmarl_llm.envs.registry import MODULES

    return name not in MODULES and ("/" in name or Path(name).is_dir())


class Everything(Show):
    """Prints what every role reads and writes, and the rewards."""

    def __init__(self, roles: Sequence[str]) -> None:
        """``roles``: of the environment."""
        self._roles = roles

    def reads(self, turn: int, role: str, prompt: Prompt, entries: list[str]) -> None:
        _print_prompt(turn, role, prompt)

    def says(self, turn: int, role: str, text: str) -> None:
        print(f"--- {role} says\n{printable(text)}")

    def paid(self, rewards: Rewards) -> None:
        print("--- rewards")
        for role in self._roles:
            paid = rewards.get(role, {}).items()
            shown = ", ".join(f"{name} {round(x, 6) if isinstance(x, float) else x}" for name, x in paid)
            print(f"{role}: {shown or 'none'}")

    def end(self, sums: Mapping[str, Mapping[str, float]]) -> None:
        _print_sums(sums)


class HotSeat(Show):
    """Shows a person the prompts of the own role alone, and everybody the sums of the rewards at the end."""

    def __init__(self, people: Collection[str]) -> None:
        """``people``: roles that people play."""
        self._people = people
        self._seated = ""

    def reads(self, turn: int, role: str, prompt: Prompt, entries: list[str]) -> None:
        if role not in self._people:
            return
        if role != self._seated:
            _clear()
            print(f"--- pass the keyboard to {role}, and press Enter: ", end="", flush=True)
            if not sys.stdin.readline():
                raise Ended
            _clear()
            self._seated = role
        _print_prompt(turn, role, prompt)

    def end(self, sums: Mapping[str, Mapping[str, float]]) -> None:
        _clear()
        _print_sums(sums)


def _clear() -> None:
    """Clear the screen and what was scrolled off it; where the output is no terminal, print as many empty lines."""
    lines = "\n" * shutil.get_terminal_size().lines
    print("\x1b[H\x1b[2J\x1b[3J" if sys.stdout.isatty() else lines, end="", flush=True)


def _print_prompt(turn: int, role: str, prompt: Prompt) -> None:
    print(f"--- turn {turn}, {role} reads")
    print(printable("\n".join(f"[{message.speaker}] {message.text}" for message in prompt)))


def _print_sums(sums: Mapping[str, Mapping[str, float]]) -> None:
    print("--- sums")
    for role, own in sums.items():
        shown = (f"{name} {'unknown' if math.isnan(value) else f'{value:g}'}" for name, value in own.items())
        print(f"{role}: {', '.join(shown)}")


def _players(roles: Sequence[str], given: Any, trained: Player | None) -> tuple[dict[str, Player], list[str]]:
    """Who plays which role: people those of ``--role``, scripts those of ``--say``, ``trained`` the others.

    Returns the players, and the roles that people play.
    """
    said: dict[str, str] = {}
    for text in given.say:
        role, equals, line = text.partition("=")
        if not equals:
            raise ConfigError(f"--say={text}: expected ROLE=TEXT")
        said[role] = line.replace("\\n", "\n")
    for flag, names in (("--role", given.role), ("--say", said)):
        if unknown := [name for name in names if name not in roles]:
            raise ConfigError(f"{flag}={unknown[0]}: no such role; the roles are {', '.join(roles)}")
    if given.watch and (trained is None or given.role):
        raise ConfigError("--watch: expected --workdir=RUN and no --role")
    person = set(given.role) or (set() if given.watch else set(roles) - set(said) if trained is None else set())
    if trained is not None and not person and not given.watch:
        raise ConfigError("--workdir: expected --role=ROLE, the role that you play, or --watch")
    players: dict[str, Player] = {}
    for role in roles:
        if role in said:
            players[role] = Player(lambda role, prompt, turn: _action(said[role]))
        elif role in person:
            players[role] = Player(lambda role, prompt, turn: _action(_asked(role)))
        elif trained is not None:
            players[role] = trained
        else:
            raise ConfigError(f"--role: nobody plays {role!r}; expected it in --role or --say, or a --workdir")
    return players, [role for role in roles if role in person and role not in said]


def _asked(role: str) -> str:
    """One line of the person, with its line breaks."""
    print(f"--- you are {role}: ", end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise Ended
    return line.removesuffix("\n").replace("\\n", "\n")


def _action(text: str) -> Action:
    """A completion without a model: its ids are bytes."""
    return Action(text, tuple(text.encode()))


def _task(tasks: Sequence[Any], given: str) -> Any:
    """The task that ``--task`` names: a number, or the task itself in JSON."""
    if given.isdigit():
        if int(given) >= len(tasks):
            raise ConfigError(f"--task={given}: expected a number below {len(tasks)}, or a task in JSON")
        return tasks[int(given)]
    try:
        return json.loads(given)
    except ValueError:
        raise ConfigError(f"--task={given:.80}: expected a number, or a task in JSON") from None


def _open_env(name: str, task: str) -> tuple[HostEnv, Sequence[Any], None]:
    """An environment with its training tasks. ``task``: the flag; a task of an array environment is a number."""
    from jaxmarl_llm.envs.contract import ArrayTask
    from jaxmarl_llm.envs.registry import EnvConfig
    from jaxmarl_llm.envs.text_adapter import by_last_line, rows_of

    config = EnvConfig(name)
    config.check("env")
    opened = config.environment()
    if not isinstance(opened, ArrayTask):
        return opened.make(), opened.tasks, None
    if not task.isdigit():
        raise ConfigError(f"--task={task:.80}: expected a number: the tasks of an array environment are arrays")
    as_it_is = lambda role, shown: (Message("user", shown),)
    return by_last_line(name, opened.env, LONGEST, as_it_is), rows_of(opened.tasks), None


def _open_run(given: Any) -> tuple[HostEnv, Sequence[Any], Player]:
    """The environment of a run with its held-out tasks, and its trained models as players."""
    temperature = 0.0 if given.greedy else given.temperature
    team = TrainedTeam(given.workdir, "workdir", best=given.best, temperature=temperature)
    return team.env, team.task.held_out, team.player(given.seed)


if __name__ == "__main__":
    parser = arguments.Parser("play", __doc__)
    parser.add_argument("env", nargs="?", metavar="ENV|RUN", help="an environment, or the folder of a trained run")
    parser.add_argument("--workdir", metavar="RUN", help="a trained run, whose models play the other roles")
    parser.add_argument("--best", action="store_true", help="the best step of the run instead of the newest")
    arguments.add_sampling(parser)
    parser.add_argument("--role", action="append", default=[], help="role that you play; may be given several times")
    parser.add_argument("--say", action="append", default=[], metavar="ROLE=TEXT", help="what a role always says")
    parser.add_argument("--watch", action="store_true", help="the trained team plays alone")
    parser.add_argument("--hot-seat", action="store_true", help="several people at one terminal, who see no other role")
    parser.add_argument("--task", default="0", help="number of a task, or a task in JSON")
    parser.add_argument("--seed", type=int, default=0, help="seed of the environment and of the models")
    arguments.run(parser, main)
