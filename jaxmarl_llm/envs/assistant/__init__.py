"""A master answers users' queries with four specialists that have tools (the setting of JoyAgents-R1), as text.

One role acts at each turn, first the master, then the specialist that it delegates to; all roles are paid for the
final answer.
"""
