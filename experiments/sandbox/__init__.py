"""Attacks on the sandbox, and its speed: hostile programs, and verdicts on reference solutions.

Every hostile program has to end with one of the verdicts that its entry states.
"""
