"""Agents: a team from a configuration, the adaptive memory of each role, and snapshots of past policies.

A team says which model plays which role.
"""
