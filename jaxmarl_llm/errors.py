"""The one exception that stands for bad input from the user."""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input from the user: one line that names the key, file or role and what would be right. Exit code 2."""
