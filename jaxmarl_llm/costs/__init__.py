"""Cost of a plan before it runs: counts of samples and tokens, memory and time of models, and analysis of HLO.

Tests compare the counts with those that real rollouts record.
"""
