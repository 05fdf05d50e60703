"""Attacks on the sandbox and its speed: hostile programs, and verdicts on reference solutions."""
