"""Adapters for what people already have: reward functions, games and tasks of other libraries, as host environments.

Each adapter is one module, and imports the other library only where it is used.
"""
