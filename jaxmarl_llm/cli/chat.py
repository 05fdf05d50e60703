"""Ask a trained team, and read who says what to whom:

    jaxmarl-llm chat runs/try                       type a line; the team works on it; /quit ends
    jaxmarl-llm chat runs/try --prompts             also what every role reads
    jaxmarl-llm chat runs/try --say=questions.txt   the lines of a file in place of the terminal

A line becomes a task of the run's own environment, without an answer, so no rewards are shown. `\\n` in it is a line
break. Every line is a new task: the team does not remember earlier lines. A message goes to the roles whose next
prompts quote it, and to the environment where nobody reads it. On the last turn it goes to you.

An environment says in its function `ask` how a line becomes a task. Without `ask`, play its own tasks:
jaxmarl-llm play --workdir=RUN --watch.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from jaxmarl_llm.cli import arguments
from jaxmarl_llm.cli.episodes import Show, TrainedTeam, play, printable
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.envs.trials import in_words
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Prompt

QUIT = "/quit"


def main(given: Any) -> int:
    """Answer every line. Exit code 0 at the end of the input. ``given``: the parsed arguments."""
    if (Path(given.run) / "team.json").is_file():
        raise ConfigError(f"RUN: {given.run} is an export, which has no environment; expected the folder of the run")
    script = None if given.say is None else _script(given.say)
    temperature = 0.0 if given.greedy else given.temperature
    team = TrainedTeam(given.run, "RUN", best=given.best, step=given.step, temperature=temperature)
    name = team.cfg.env.name
    if team.task.ask is None:
        raise ConfigError(
            f"RUN: {given.run}: its environment {name!r} takes no free text, because it has no `ask`; play its own "
            f"tasks: jaxmarl-llm play --workdir={given.run} --watch"
        )
    show = Transcript(team.task, Console(highlight=False, soft_wrap=True), given.prompts)
    for seed, line in enumerate(_typed() if script is None else _echoed(script), given.seed):
        try:
            task = team.task.ask(line)
        except ConfigError as error:  # what a person typed can be typed again
            if script is not None:
                raise
            print(f"error: {error}")
            continue
        _answer(team, task, seed, show)
    return 0


def _answer(team: TrainedTeam, task: Any, seed: int, show: Show) -> None:
    """Play the task of one line. What the environment raises becomes one line."""
    try:
        play(team.env, task, dict.fromkeys(team.env.roles, team.player(seed)), seed, show)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"environment {team.cfg.env.name!r}: a task that its `ask` made cannot be played: {in_words(error)}"
        ) from error


class Transcript(Show):
    """Prints each message with its speaker and its receivers, and the last messages as the answer.

    Args:
        task: The environment, whose ``hears`` says who reads a message.
        console: Where it is printed.
        prompts: Whether to print what every role reads.
    """

    def __init__(self, task: HostTask, console: Console, prompts: bool) -> None:
        self._hears, self._console, self._prompts = task.hears, console, prompts
        self._said: list[tuple[str, str]] = []  # (speaker, text) of the turn that was played last
        self._before: list[tuple[int, str, str, set[str]]] = []  # (turn, speaker, text, roles that were named)

    def turn(self, turn: int, prompts: Mapping[str, Prompt]) -> None:
        if turn == 0:
            self._before.clear()
        earlier = list(self._before)
        self._print(turn - 1, prompts)
        for reader, prompt in prompts.items():
            for spoken, speaker, text, named in earlier:
                if reader not in named and self._hears(reader, prompt, speaker, text):
                    named.add(reader)
                    self._aside(f"{reader} reads what {speaker} said on turn {spoken + 1}")

    def reads(self, turn: int, role: str, prompt: Prompt, entries: list[str]) -> None:
        for entry in entries:
            self._aside(f"{role} remembers: {' '.join(entry.split())}")
        if self._prompts:
            self._aside(f"{role} reads:\n" + "\n".join(f"[{message.speaker}] {message.text}" for message in prompt))

    def says(self, turn: int, role: str, text: str) -> None:
        self._said.append((role, text))
        self._turn = turn

    def end(self, sums: Mapping[str, Mapping[str, float]]) -> None:
        last = list(self._said)
        if last:
            self._print(self._turn, None)
        for role, text in last:
            self._console.print(_plain(f"answer{f' of {role}' if len(last) > 1 else ''}: {text}"), style="bold")

    def _print(self, turn: int, prompts: Mapping[str, Prompt] | None) -> None:
        """Print the messages of a turn. ``prompts``: what is read next; None: the person reads them."""
        for speaker, text in self._said:
            readers = [
                role
                for role, prompt in (prompts or {}).items()
                if role != speaker and self._hears(role, prompt, speaker, text)
            ]
            shown = "you" if prompts is None else ", ".join(readers) or "environment"
            self._console.print(_plain(f"turn {turn + 1}  {speaker} -> {shown}: {text}"))
            self._before.append((turn, speaker, text, {speaker, *readers}))
        self._said = []

    def _aside(self, text: str) -> None:
        self._console.print(_plain("        " + text.replace("\n", "\n        ")), style="dim")


def _plain(text: str) -> Text:
    return Text(printable(text))


def _typed() -> Iterator[str]:
    """What a person types, until the end of the input or /quit."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # the keys that edit a line
    while True:
        try:
            line = input("you: ")
        except EOFError:
            print()
            return
        if line.strip() == QUIT:
            return
        if line.strip():
            yield line.replace("\\n", "\n")


def _script(file: str) -> list[str]:
    """Lines of a file."""
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--say={file}: {why}; expected a text file, one line for each question") from None


def _echoed(script: list[str]) -> Iterator[str]:
    """Lines of a script as if they were typed."""
    for line in script:
        if line.strip() == QUIT:
            return
        if line.strip():
            print(f"you: {line}")
            yield line.replace("\\n", "\n")


if __name__ == "__main__":
    parser = arguments.Parser("chat", __doc__)
    parser.add_argument("run", metavar="RUN", help="folder of a trained run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="of this checkpoint instead of the newest")
    which.add_argument("--best", action="store_true", help="the best step of the run instead of the newest")
    arguments.add_sampling(parser)
    parser.add_argument("--say", metavar="FILE", help="lines of a file in place of the terminal")
    parser.add_argument("--prompts", action="store_true", help="show what every role reads")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples of the first line")
    try:
        arguments.run(parser, main)
    except KeyboardInterrupt:
        print()
        sys.exit(130)
