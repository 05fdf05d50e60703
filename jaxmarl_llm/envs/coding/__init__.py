"""Two programmers write one Python program for HumanEval, MBPP or CoopHumanEval, as text.

A helper writes an auxiliary function and a main programmer the entry point at once. Both are paid for structure,
syntax, passed tests and cooperation.
"""
