"""Whole training runs that are killed with signal 9 and resumed, compared with an unbroken run."""
