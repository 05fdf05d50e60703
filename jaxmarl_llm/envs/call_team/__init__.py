"""A master routes a query to one of five specialists, who writes one function call (the setting of JoyAgents-R1).

The reward is the match of the call's arguments alone.
"""
