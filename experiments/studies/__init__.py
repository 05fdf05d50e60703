"""Studies: ablations, baselines, mechanisms, gradient estimators, rewards under attack, and sampling complexity.

Each study is a command whose figures a page of the documentation shows.
"""
