"""The exceptions that end a run with one line instead of a traceback."""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input from the user: one line that names the key, file or role and what would be right. Exit code 2."""


class RunError(RuntimeError):
    """A run that cannot go on, though its input is well-formed: one line that says why. Exit code 1."""
