"""Configurations of recipes: each file has ``get_config(variant)`` and names its variants.

``experiments.train`` reads one of them with ``--config=experiments/configs/FILE.py:variant``.
"""
