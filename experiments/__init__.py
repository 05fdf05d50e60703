"""Experiments: the entry point for training, configurations, claims, studies, benchmarks, and plans for TPU pods.

This folder is not installed with the package. Each command runs from the root of the repository.
"""
