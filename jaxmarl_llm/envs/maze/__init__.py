"""Agents that each see a part of a maze walk through it together, as an array environment and as text.

All agents name a direction at once and move when they agree, and all are paid for progress and for reaching the goal.
"""
