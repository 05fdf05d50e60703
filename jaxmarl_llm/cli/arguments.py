"""Command lines of the commands that take no configuration: argparse, with errors in one line and exit code 2."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from jaxmarl_llm.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """A parser that says what is wrong in one line.

    Args:
        command: Name behind ``jaxmarl-llm``.
        about: Text at the top of ``--help``.
    """

    def __init__(self, command: str, about: str | None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(f"jaxmarl-llm {command}", description=inspect.cleandoc(about or ""), formatter_class=layout)

    def error(self, message: str) -> NoReturn:
        """End with one line and exit code 2."""
        end(f"{message}; see {self.prog} --help")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add --greedy and --temperature, of which one may be given. ``parser``: parser of the command line."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--greedy", action="store_true", help="models take the most likely token")
    group.add_argument("--temperature", type=float, help="of the models; default: that of training")


def run(parser: Parser, main: Callable[[Any], int | None], arguments: Sequence[str] | None = None) -> NoReturn:
    """Exit with what ``main(parsed arguments)`` returns; a ``ConfigError`` ends with one line and exit code 2.

    Args:
        parser: Parser of the command line.
        main: The command.
        arguments: The command line without its program; None: that of this process.
    """
    try:
        code = main(parser.parse_args(arguments))
        sys.stdout.flush()
        sys.exit(code)
    except ConfigError as error:
        end(str(error))
    except BrokenPipeError:
        _unread()


def show(text: str) -> None:
    """Print ``text``. Exit with code 0 where its reader has ended, as `| head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _unread()


def _unread() -> NoReturn:
    """Exit with code 0 where nobody reads the output any more. The interpreter's own flush at the exit is silent."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def end(message: str) -> NoReturn:
    """End with the line ``error: message`` and exit code 2."""
    print("error:", " ".join(message.split()), file=sys.stderr, flush=True)
    sys.exit(2)
