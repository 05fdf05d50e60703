"""The command line of every entry point: ``--config=FILE.py[:variant] --config.key=value --workdir=DIR``.

A config file is Python with one function::

    from ml_collections import ConfigDict
    from jaxmarl_llm.config import one_of, to_dict
    from jaxmarl_llm.recipes.magrpo import Config

    def get_config(variant: str = "") -> ConfigDict:
        one_of("variant", variant, ["", "large"])
        config = ConfigDict(to_dict(Config()))
        config.optimizer.learning_rate = 3e-6
        return config

Every config has a top-level string ``recipe``: the module whose ``Config`` dataclass it is, in ``jaxmarl_llm.recipes``
when the name has no dot, anywhere importable when it has. Overrides are read by that dataclass's annotations rather
than by the type of the present value, because a ``ConfigDict`` cannot know what ``None`` or a tuple stands for. They
are accepted in every form that ml_collections accepts (``--config.k=v``, ``--config.k v``, ``--config.flag``,
``--noconfig.flag``, ``--config.agents[0].lr=v``), also inside a ``--flagfile``.

Whatever is wrong with flags or config ends with one line ``error: ...`` and exit code 2, before ``main`` is entered.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict

from jaxmarl_llm import config as config_lib
from jaxmarl_llm.text import ConfigError

FLAGS = flags.FLAGS
OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)

flags.DEFINE_string("config", None, "Config file, with an optional variant: FILE.py[:variant].")
flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, metrics, samples. Resumed when it has any.")
flags.DEFINE_bool("print_config", False, "Print the resolved config and exit.")


def run(main: Callable[[Any, str | None, flags.FlagValues], int | None], *, required=("config", "workdir")) -> NoReturn:
    """Parse the command line, build the config, and exit with what ``main(cfg, workdir, flags)`` returns.

    ``required`` names the flags that must be given (flags an entry point defines itself included); ``cfg`` and
    ``workdir`` are None when they are neither required nor given. A ``ConfigError`` from ``main`` also ends with one
    line and exit code 2, an interrupt from the keyboard with one line and exit code 130.
    """

    def enter(built: Any) -> int | None:
        cfg, workdir = built
        return main(cfg, workdir, FLAGS)

    try:
        app.run(enter, flags_parser=functools.partial(_parse, required=required))
    except ConfigError as error:
        _end(f"error: {error}", 2)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    raise AssertionError("app.run always exits")


def verb(known: Sequence[str]) -> str:
    """The first argument, taken off the command line: what an entry point of several commands is to do."""
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    if given not in known:
        what = f"unknown command {given!r}" if given and not given.startswith("-") else "no command given"
        _end(f"error: {what}; {config_lib.nearest(given, known)}", 2)
    del sys.argv[1]
    return given


def load(spec: str, overrides: Sequence[tuple[str, str]] = ()) -> Any:
    """The config dataclass of ``FILE.py[:variant]`` with ``(dotted key, text)`` overrides. Usable from a notebook."""
    mapping = _read(spec)
    cls = _config_class(spec, mapping.get("recipe"))
    for path, text in overrides:
        if path == "recipe":
            raise ConfigError("config.recipe: fixed by the config file; choose another file with --config")
        mapping = config_lib.override(cls, mapping, path, text)
    return config_lib.from_dict(cls, mapping)


def _parse(argv: Sequence[str], required: Sequence[str]) -> tuple[Any, str | None]:
    """absl's flags parser: everything that can be wrong is found here, cheapest first."""
    try:
        expanded = FLAGS.read_flags_from_files(list(argv[1:]))
        rest, overrides = _split_overrides(expanded)
        positional = FLAGS([argv[0], *rest])[1:]
    except flags.UnrecognizedFlagError as error:
        hint = config_lib.nearest(f"--{error.flagname}", [f"--{name}" for name in _own_flags()], "known flags:")
        raise ConfigError(f"--{error.flagname}: unknown flag; {hint}") from None
    except flags.Error as error:
        raise ConfigError(str(error).removeprefix("ERROR:: ")) from None
    if positional:
        raise ConfigError(f"unexpected argument {positional[0]!r}; flags begin with --")
    wanted = [name for name in required if name != "workdir" or not FLAGS.print_config]
    for name in wanted + ["config"] * bool(overrides or FLAGS.print_config):
        if FLAGS[name].value in (None, ""):
            raise ConfigError(f"--{name}: required but not given ({FLAGS[name].help})")
    cfg = load(FLAGS.config, overrides) if FLAGS.config else None
    if FLAGS.print_config:
        print("\n".join(f"{key} = {value!r}" for key, value in config_lib.flatten(cfg).items()))
        sys.exit(0)
    if FLAGS.workdir:
        _check_workdir(FLAGS.workdir)
    return cfg, FLAGS.workdir


def _split_overrides(args: list[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate ``--config.key=value`` from the flags that absl knows."""
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    queue = list(args)
    while queue:
        arg = queue.pop(0)
        match = OVERRIDE.fullmatch(arg)
        if arg == "--":
            return rest + [arg] + queue, overrides
        if match is None:
            rest.append(arg)
            continue
        negated, path, text = match.groups()
        if negated:
            if text is not None:
                raise ConfigError(f"--noconfig.{path}: takes no value")
            text = "false"
        elif text is None:  # a flag by itself is true, unless a value follows
            text = queue.pop(0) if queue and not queue[0].startswith("--") else "true"
        overrides.append((path, text))
    return rest, overrides


def _read(spec: str) -> dict[str, Any]:
    """What ``get_config(variant)`` of the config file returns, as nested dictionaries."""
    name, _, variant = spec.partition(":")
    file = Path(name)
    if not file.is_file():
        siblings = [str(path) for path in file.parent.glob("*.py")] if file.parent.is_dir() else []
        hint = f"; {config_lib.nearest(name, siblings)}" if siblings else f": {str(file.parent)!r} has no config files"
        raise ConfigError(f"--config: no file {name!r}{hint}")
    module_name = f"_config_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, file)
    if module_spec is None or module_spec.loader is None:
        raise ConfigError(f"--config: {name!r} is not a Python file (.py)")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module  # dataclasses look their module up
    try:
        module_spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise ConfigError("defines no get_config(variant)")
        if variant and not inspect.signature(module.get_config).parameters:
            raise ConfigError(f"unknown variant {variant!r}; get_config() takes none")
        config = module.get_config(variant) if variant else module.get_config()
        if not isinstance(config, (ConfigDict, Mapping)):
            raise ConfigError(f"get_config() returned {type(config).__name__}, not a ConfigDict")
        return config.to_dict() if isinstance(config, ConfigDict) else dict(config)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except Exception as error:  # a config file is the user's program: anything may be wrong with it
        raise ConfigError(f"{name}{_line(error, file)}: {type(error).__name__}: {error}") from error


def _line(error: Exception, file: Path) -> str:
    """``:12``, the line of the config file that failed. (A SyntaxError names its line itself.)"""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file.absolute()]
    return f":{lines[-1]}" if lines else ""


def recipe_module(recipe: str) -> Any:
    """The module of a configuration's ``recipe``, imported."""
    return importlib.import_module(_module_name(recipe))


def _module_name(recipe: str) -> str:
    return recipe if "." in recipe else f"jaxmarl_llm.recipes.{recipe}"


def _config_class(spec: str, recipe: Any) -> type:
    """The ``Config`` dataclass of a recipe, imported only now."""
    if not isinstance(recipe, str) or not recipe:
        raise ConfigError(f"{spec}: config.recipe: expected the name of a recipe, got {recipe!r}")
    module = _module_name(recipe)
    try:
        found = importlib.util.find_spec(module)
    except (ModuleNotFoundError, ValueError):  # a parent package is missing, or the name is not one
        found = None
    if found is None:
        folder = Path(config_lib.__file__).parent / "recipes"
        known = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
        raise ConfigError(f"{spec}: config.recipe: no recipe {recipe!r}; {config_lib.nearest(recipe, known)}")
    cls = getattr(recipe_module(recipe), "Config", None)
    if cls is None:
        raise ConfigError(f"{spec}: config.recipe: {module} defines no Config")
    return cls


def _check_workdir(workdir: str) -> None:
    """Make the folder and write a file into it, so that a full or read-only disk shows now, not at the first save."""
    if "://" in workdir:
        return  # object storage: the checkpointer opens it
    try:
        os.makedirs(workdir, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(f"--workdir: cannot write to {workdir!r}: {error.strerror or error}") from error


def _own_flags() -> list[str]:
    """Flags of this file and of the entry point, without those absl brings along."""
    return sorted(
        name
        for module, defined in FLAGS.flags_by_module_dict().items()
        if not module.startswith("absl")
        for name in (flag.name for flag in defined)
    )


def _end(line: str, code: int) -> NoReturn:
    print(" ".join(line.split()), file=sys.stderr, flush=True)
    sys.exit(code)
