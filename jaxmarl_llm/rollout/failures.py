"""What a rollout says of a call of the environment that gave no valid result."""

from __future__ import annotations

from typing import NamedTuple


class RolloutFailure(NamedTuple):
    """A state that could not be made, or a joint action whose reward is invalid.

    Attributes:
        call: Function of the environment: ``reset``, ``observe`` or ``step``.
        turn: From 0.
        roles: Those that had acted; empty where none had.
        task: Position among the tasks of the rollout; in a `RolloutResult`, among all tasks of its kind.
        message: One line.
        trace: The traceback of an exception, from the user's first line on.
    """

    call: str
    turn: int
    roles: tuple[str, ...]
    task: int
    message: str
    trace: str = ""

    def __str__(self) -> str:
        who = f"role{'s' * (len(self.roles) > 1)} {', '.join(self.roles)}, " if self.roles else ""
        return f"{self.call}, {who}turn {self.turn}, task {self.task}: {one_line(self.message)}"


def one_line(text: str) -> str:
    """``text`` with every run of white space as one space."""
    return " ".join(text.split())
