"""The recipes, one for each published system, and the configurations that ship for each:

jaxmarl-llm recipes           all of them
jaxmarl-llm recipes NAME      one: what it does, and every configuration key with its default and its meaning
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxmarl_llm.cli import arguments, catalogue


def main(given: Any) -> None:
    """Print the recipes, or one of them. ``given``: the parsed arguments."""
    if given.name is None:
        files = catalogue.config_files()
        for name, text in catalogue.recipes().items():
            shipped = ", ".join(catalogue.variants(files[name])) if name in files else "none"
            print(f"{name:20} {text}\n{'':20} configurations: {shipped}")
        return
    from jaxmarl_llm.cli import config_flags, explain
    from jaxmarl_llm.config import one_of
    from jaxmarl_llm.errors import ConfigError

    if not {".", ":"} & set(given.name):
        one_of("recipes: NAME", given.name, list(catalogue.recipes()))
    module = config_flags.recipe_module(given.name)
    if not dataclasses.is_dataclass(getattr(module, "Config", None)):
        raise ConfigError(f"recipes: {given.name} is no recipe: it defines no dataclass Config")
    print(f"{(module.__doc__ or '').strip()}\n\nkeys of its configuration:\n{explain.table(module.Config())}")


if __name__ == "__main__":
    parser = arguments.Parser("recipes", __doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="a recipe: one of ours, or an importable module")
    arguments.run(parser, main)
