"""Entry point `jaxmarl-llm COMMAND [flags]`: one command for all that a user runs. Also `python -m jaxmarl_llm`."""

from __future__ import annotations

import os
import runpy
import sys

from jaxmarl_llm._version import __version__
from jaxmarl_llm.cli import arguments, catalogue

COMMANDS = {
    "plan": "predict what a step of training costs, before it runs",
    "train": "train a recipe, or resume a run",
    "evaluate": "play the held-out tasks with a trained team",
    "export": "write a trained agent as a Hugging Face folder",
    "summary": "print what a run reached",
    "sweep": "train many settings of a configuration, and compare them",
    "compare": "compare runs: configurations, held-out results in pairs, curves",
    "view": "show the rollouts of runs as a page: trees, groups, credit, transcripts, memories",
    "play": "play an environment in the terminal: you, scripts, or the models of a run",
    "chat": "ask a trained team a question, and read who says what to whom",
    "envs": "list the environments, or describe one",
    "recipes": "list the recipes and their configurations, or describe one",
    "doctor": "say what this machine has, and what to install",
    "fetch_weights": "fetch the weights of SmolLM2-135M",
}


def main() -> None:
    """Run the command that the first argument names, as `python -m` runs it. Exit code 2 for an unknown command.

    The current folder becomes importable, for a dotted ``recipe`` of the user's own.
    """
    given = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if given in ("-h", "-help", "--help", "help"):
        commands = [f"  {name:14} {what}" for name, what in COMMANDS.items()]
        more = ["  jaxmarl-llm COMMAND --help   flags and configuration keys of a command"]
        more += ["  jaxmarl-llm --list           shipped configurations"]
        more += ["  jaxmarl-llm --version        version of the package"]
        arguments.show("\n".join(["usage: jaxmarl-llm COMMAND [flags]", "", *commands, "", *more]))
        return
    if given == "--list":
        arguments.show(catalogue.config_list())
        return
    if given == "--version":
        arguments.show(f"jaxmarl_llm {__version__}")
        return
    if given not in COMMANDS:
        print(f"error: unknown command {given!r}; choose from {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    sys.argv = [f"jaxmarl-llm {given}", *sys.argv[2:]]
    runpy.run_module(f"jaxmarl_llm.cli.{given}", run_name="__main__", alter_sys=False)
