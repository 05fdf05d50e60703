"""Environments: a folder a task, with `array.py` (pure JAX), `text.py` or `env.py` (Python over text), `solo.py`.

The registry finds them; an environment of a user's own is named by its dotted module instead.
"""
