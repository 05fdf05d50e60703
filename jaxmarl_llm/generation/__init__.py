"""Sampling completions: distributions to sample from, prefill once and decode groups, and a cache of prefixes.

A policy is a bundle of functions here (`types.Policy`); no model is known by name.
"""
