"""Command line of every entry point: ``--config=NAME[:variant] --config.key=value --workdir=DIR``.

NAME is a shipped configuration (``--list`` prints them), such as ``joyagents_r1``, or a file ``FILE.py``. A config file
is Python with one function::

    from ml_collections import ConfigDict
    from jaxmarl_llm.config import one_of, to_dict
    from jaxmarl_llm.recipes.magrpo import Config

    def get_config(variant: str = "") -> ConfigDict:
        one_of("variant", variant, ["", "large"])
        config = ConfigDict(to_dict(Config()))
        config.optimizer.learning_rate = 3e-6
        return config

Every config has a top-level string ``recipe``. It names the module that defines the config's dataclass ``Config``. A
name without a dot is a module of ``jaxmarl_llm.recipes``; a name with a dot is any importable module.

Overrides are read by the annotations of that dataclass and not by the type of the present value. A ``ConfigDict``
cannot know what ``None`` or a tuple stands for. They are accepted in every form that ml_collections accepts
(``--config.k=v``, ``--config.k v``, ``--config.flag``, ``--noconfig.flag``, ``--config.agents[0].lr=v``), also inside a
``--flagfile``.

Anything wrong with flags or config ends with one line ``error: ...`` and exit code 2, before ``main`` is entered.
``--help`` prints the flags and every configuration key with its explanation, and ends with exit code 0.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict

from jaxmarl_llm import config as config_lib
from jaxmarl_llm.cli import arguments, catalogue, explain
from jaxmarl_llm.errors import ConfigError, RunError

FLAGS = flags.FLAGS
HELP = ("-h", "-help", "--help", "--helpshort", "-?", "--?")
OF_CONFIG = ("config", "list", "print_config")  # flags of commands that take a configuration
OF_RUN = "Folder of a trained run, which is also taken as the argument RUN."
OVERRIDE = re.compile(r"--?(no)?config\.([^=]+)(?:=(.*))?", re.DOTALL)

flags.DEFINE_string("config", None, "Shipped configuration NAME[:variant], or a config file FILE.py[:variant].")
flags.DEFINE_bool("list", False, "Print the shipped configurations and exit.")
flags.DEFINE_string("workdir", None, "Folder of the run: checkpoints, metrics, samples. Resumed when it has any.")
flags.DEFINE_bool("print_config", False, "Print the resolved config and exit.")


def run(
    main: Callable[[Any, str | None, flags.FlagValues], int | None],
    *,
    required: Sequence[str] = ("config", "workdir"),
    takes_config: bool = True,
) -> NoReturn:
    """Parse the command line, build the config, and exit with what ``main(cfg, workdir, flags)`` returns.

    ``main`` is the entry point's function. ``cfg`` and ``workdir`` are None when they are neither required nor given.
    ``required`` names the flags that must be given; flags that the entry point defines itself may be among them. A
    ``ConfigError`` from ``main`` also ends with one line and exit code 2, a ``RunError`` with one line and exit code 1.
    An interrupt from the keyboard ends with one line and exit code 130. ``--help`` prints the docstring of main's
    module and the flags. ``takes_config``: False for a command whose configuration is that of a run. It refuses the
    flags of a configuration, and its ``--help`` does not list them. The folder of the run may be its one argument.
    """

    def enter(built: Any) -> int | None:
        cfg, workdir = built
        return main(cfg, workdir, FLAGS)

    try:
        about = inspect.cleandoc(main.__globals__.get("__doc__") or "")
        app.run(
            enter, flags_parser=functools.partial(_parse, required=required, about=about, takes_config=takes_config)
        )
    except ConfigError as error:
        _end(f"error: {error}", 2)
    except RunError as error:
        _end(f"error: {error}", 1)
    except KeyboardInterrupt:
        _end("interrupted", 130)
    raise AssertionError("app.run always exits")


def verb(known: Sequence[str]) -> str:
    """Take the first argument off the command line and return it: the command of an entry point that has several.

    ``known``: the commands there are. ``--help`` in its place lists them and ends with exit code 0.
    """
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    if given in HELP:
        print(f"commands: {', '.join(known)}")
        sys.exit(0)
    if given not in known:
        what = f"unknown command {given!r}" if given and not given.startswith("-") else "no command given"
        _end(f"error: {what}; {config_lib.nearest(given, known)}", 2)
    del sys.argv[1]
    return given


def load(spec: str, overrides: Sequence[tuple[str, str]] = ()) -> Any:
    """Build the config dataclass of a config file. Usable from a notebook.

    ``spec``: ``NAME[:variant]`` or ``FILE.py[:variant]``. ``overrides``: pairs (dotted key without ``config.``, text
    of the value). Another ``env.name`` leaves out the ``env.args`` of the file, whatever the order of the pairs.
    """
    mapping = _read(spec)
    cls = _config_class(spec, mapping.get("recipe"))
    for path, text in sorted(overrides, key=lambda pair: pair[0] != "env.name"):
        if path == "recipe":
            raise ConfigError("config.recipe: fixed by the config file; choose another file with --config")
        before = mapping.get("env") or {}
        mapping = config_lib.override(cls, mapping, path, text)
        if path == "env.name" and before.get("name") != text and before.get("args"):
            _warn_of_args(before.get("name", ""), text, ", ".join(before["args"]))
            mapping = {**mapping, "env": {**mapping["env"], "args": {}}}
    return config_lib.from_dict(cls, mapping)


@functools.cache
def _warn_of_args(old: str, new: str, names: str) -> None:
    """Warn once a process that the arguments ``names`` of environment ``old`` are left out for environment ``new``."""
    logging.warning("config.env.args: %s of environment %r left out, because config.env.name is %r", names, old, new)


def _parse(
    argv: Sequence[str], required: Sequence[str], about: str, takes_config: bool = True
) -> tuple[Any, str | None]:
    """Parse the flags, as absl's ``flags_parser``. All input errors are found here, those cheapest to find first."""
    if any(arg in HELP for arg in argv[1:]):
        arguments.show(_usage(about, takes_config))
        arguments.show(_explained(argv[1:]) if "config" in required else "")
        sys.exit(0)
    if any(arg in ("--list", "-list") for arg in argv[1:]):
        arguments.show(catalogue.config_list())
        sys.exit(0)
    try:
        expanded = FLAGS.read_flags_from_files(list(argv[1:]))
        rest, overrides = _split_overrides(expanded)
        positional = FLAGS([argv[0], *rest])[1:]
    except flags.UnrecognizedFlagError as error:
        hint = config_lib.nearest(f"--{error.flagname}", [f"--{name}" for name in _own_flags()], "known flags:")
        raise ConfigError(f"--{error.flagname}: unknown flag; {hint}") from None
    except SystemExit:  # --helpfull and --helpxml of absl, which ends with 1
        sys.exit(0)
    except flags.Error as error:
        raise ConfigError(str(error).removeprefix("ERROR:: ")) from None
    if positional and not takes_config:
        if FLAGS.workdir:
            raise ConfigError(
                f"RUN: {positional[0]!r} and --workdir={FLAGS.workdir} are given; expected one of the two"
            )
        FLAGS["workdir"].value = positional.pop(0)
    if positional:
        raise ConfigError(f"unexpected argument {positional[0]!r}; flags begin with --")
    if not takes_config and (given := [name for name in OF_CONFIG if FLAGS[name].value] + ["config"] * bool(overrides)):
        raise ConfigError(f"--{given[0]}: not a flag of this command; the configuration is that of the run")
    wanted = [name for name in required if name != "workdir" or not FLAGS.print_config]
    for name in wanted + ["config"] * bool(overrides or FLAGS.print_config):
        if FLAGS[name].value in (None, ""):
            raise ConfigError(f"--{name}: required but not given ({_help_of(name, takes_config)})")
    cfg = load(FLAGS.config, overrides) if FLAGS.config else None
    if FLAGS.print_config:
        arguments.show("\n".join(f"{key} = {value!r}" for key, value in config_lib.flatten(cfg).items()))
        sys.exit(0)
    if FLAGS.workdir and takes_config:
        _check_workdir(FLAGS.workdir)
    return cfg, FLAGS.workdir


def _help_of(name: str, takes_config: bool) -> str:
    """The help text of a flag. ``takes_config``: as in `run`; without it --workdir is a run that is there."""
    return OF_RUN if name == "workdir" and not takes_config else str(FLAGS[name].help)


def given_overrides() -> list[tuple[str, str]]:
    """Pairs of a key, without ``config.``, and the text of its value, as the command line of this process has them."""
    return _split_overrides(FLAGS.read_flags_from_files(sys.argv[1:]))[1]


def _usage(about: str, takes_config: bool) -> str:
    """The text of ``--help``: ``about``, then a line for each flag of this file and of the entry point.

    ``takes_config``: as in `run`.
    """
    lines = [about, "", "flags:"]
    if takes_config:
        lines.append("  --config.KEY=VALUE: Another value for one key of the config; see --print_config.")
    for name in _own_flags():
        if name in OF_CONFIG and not takes_config:
            continue
        flag = FLAGS[name]
        shown = f"--[no]{name}" if flag.boolean else f"--{name}"
        default = "" if flag.default in (None, []) else f" (default: {flag.default})"
        lines.append(f"  {shown}: {_help_of(name, takes_config)}{default}")
    return "\n".join([*lines, "  --helpfull: All flags, those of absl included."])


def _explained(args: Sequence[str]) -> str:
    """The keys of the configuration that ``--config`` among ``args`` names, with their explanations.

    Without ``--config`` these are the keys that every recipe has.
    """
    rest, overrides = _split_overrides([arg for arg in args if arg not in HELP])
    given = [arg.split("=", 1)[1] for arg in rest if re.match("--?config=", arg)]
    given += [after for arg, after in itertools.pairwise(rest) if arg in ("--config", "-config")]
    if given:
        return f"keys of {given[-1]}:\n{explain.table(load(given[-1], overrides))}"
    from jaxmarl_llm.training.config import BaseConfig

    head = "keys of every recipe (with --config=NAME --help: the keys and values of that configuration):"
    return f"{head}\n{explain.table(BaseConfig(recipe='NAME'))}"


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
    shipped = catalogue.config_files()
    file = shipped.get(name, Path(name))
    if not file.is_file():
        if file.suffix != ".py" and file.parent == Path():
            raise ConfigError(f"--config: no shipped configuration {name!r}; {config_lib.nearest(name, shipped)}")
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


def _line(error: BaseException, file: Path) -> str:
    """``:12``, the line of ``file`` that failed. Empty for a SyntaxError, which names its line itself."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file.absolute()]
    return f":{lines[-1]}" if lines else ""


def recipe_module(recipe: str) -> Any:
    """Import the module that ``recipe`` of a configuration names. A ``ConfigError`` shows why it cannot be imported.

    ``recipe``: a module of ``jaxmarl_llm.recipes``, or the name of any other importable module.
    """
    name = _module_name(recipe)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a recipe is the user's program: anything may be wrong with it
        spec = sys.modules[name].__spec__ if name in sys.modules else _spec_of(name)
        file = Path(spec.origin) if spec is not None and spec.origin else None
        where = f" ({file}{_line(error, file)})" if file else ""
        raise ConfigError(f"config.recipe: importing {name}{where} failed: {type(error).__name__}: {error}") from error


def _spec_of(module: str) -> Any:
    """The import system's description of ``module``; None when there is none or a parent package fails."""
    try:
        return importlib.util.find_spec(module)
    except (Exception, SystemExit):
        return None


def _module_name(recipe: str) -> str:
    """The module of a recipe: one of ours, else any importable module of that name."""
    ours = f"jaxmarl_llm.recipes.{recipe}"
    outside = "." in recipe or (_spec_of(ours) is None and recipe.isidentifier() and _spec_of(recipe) is not None)
    return recipe if outside else ours


def _config_class(spec: str, recipe: Any) -> type:
    """Import a recipe and return its ``Config`` dataclass. ``spec``: the config file, for messages."""
    if not isinstance(recipe, str) or not recipe:
        raise ConfigError(f"{spec}: config.recipe: expected the name of a recipe, got {recipe!r}")
    module = _module_name(recipe)
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:  # a parent package is missing, or a module that a parent package imports
        found = error.name is None or not f"{module}.".startswith(f"{error.name}.")
    except ValueError:  # the name is none of a module
        found = False
    except (Exception, SystemExit):  # a parent package fails: recipe_module says how
        found = True
    if not found:
        folder = Path(config_lib.__file__).parent / "recipes"
        known = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
        raise ConfigError(f"{spec}: config.recipe: no recipe {recipe!r}; {config_lib.nearest(recipe, known)}")
    try:
        imported = recipe_module(recipe)
    except ConfigError as error:
        raise ConfigError(f"{spec}: {error}") from error
    cls = getattr(imported, "Config", None)
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ConfigError(f"{spec}: config.recipe: {module} is no recipe: it defines no dataclass Config")
    return cls


def _check_workdir(workdir: str) -> None:
    """Make the folder and write a file into it: a full or read-only disk is reported now and not at the first save."""
    if "://" in workdir:
        return  # object storage: the checkpointer opens it
    try:
        os.makedirs(workdir, exist_ok=True)
        with tempfile.TemporaryFile(dir=workdir) as file:
            file.write(b"x")
    except OSError as error:
        raise ConfigError(f"--workdir: cannot write to {workdir!r}: {error.strerror or error}") from error


def _own_flags() -> list[str]:
    """Names of the flags of this file and of the entry point, without those that absl defines."""
    return sorted(
        name
        for module, defined in FLAGS.flags_by_module_dict().items()
        if not module.startswith("absl")
        for name in (flag.name for flag in defined)
    )


def _end(line: str, code: int) -> NoReturn:
    print(" ".join(line.split()), file=sys.stderr, flush=True)
    sys.exit(code)
