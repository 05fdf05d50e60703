"""Roles of `programs`, who acts when, and what `reflect` pays, for the array form and the text form. Without JAX."""

from __future__ import annotations

ROLES = {  # in the order of their first turns
    "plan": ("planner", "coder"),
    "solo": ("coder",),
    "refine": ("coder",),
    "reflect": ("planner", "coder", "reflector"),
}
MARKS = {"planner": "P", "coder": "C", "reflector": "R"}  # first characters of prompts of the array form
REFLECT_COMPONENTS = ("tests", "first", "score", "invalid", "turns")
MOST_REFLECTIONS = 3  # of an episode of eight turns


def order(protocol: str, attempts: int, reflections: int) -> tuple[str, ...]:
    """The role that acts at each turn.

    Args:
        protocol: A protocol of ROLES.
        attempts: Programs of an episode, with protocol refine.
        reflections: Hints of an episode at most, with protocol reflect.
    """
    if protocol == "refine":
        return ROLES[protocol] * attempts
    if protocol == "reflect":
        return "planner", "coder", *("reflector", "coder") * reflections
    return ROLES[protocol]
