"""Shipped configurations, one module for each recipe: `--config=NAME:variant` finds them in any folder.

A module has `VARIANTS`, the names of its configurations, and `get_config(variant)`. Its docstring describes each.
"""
