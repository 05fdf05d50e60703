"""Iterated social dilemmas of two players with opposed rewards, as an array environment and as text.

Both players act at once in each round of the prisoner's dilemma or of Trust-and-Split, and each is paid its own payoff.
"""
