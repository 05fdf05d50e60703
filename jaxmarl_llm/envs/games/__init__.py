"""Kuhn poker, tic-tac-toe and mini-Hanabi in self-play, as an array environment and as text.

Two players move in turn by one letter, and each is paid the payoff of its game at the end.
"""
