"""Matrix games of several rounds whose exact values are known, as an array environment.

Two players move at once in each round, and each is paid by the payoff table: its own payoff or the sum of both.
"""
