"""Lazy exports of a package (PEP 562): a name is imported from its module when it is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(
    package: str, objects: Mapping[str, str], modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Functions ``__getattr__`` and ``__dir__`` of a package.

    package: its ``__name__``. objects: exported name of a function or class -> full name of the module that defines it.
    modules: exported name of a module -> its full name.
    """
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        """Import an exported name, and store it in the package."""
        if name in modules:
            namespace[name] = importlib.import_module(modules[name])
        elif name in objects:
            namespace[name] = getattr(importlib.import_module(objects[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return namespace[name]

    def names() -> list[str]:
        """Sorted names of the package, exports included."""
        return sorted({*namespace, *objects, *modules})

    return load, names
