"""Learning from a tree: configuration, losses, optimizers, the learner, critics, and the steps that recipes compose.

Evaluation and the metrics of a step are here too.
"""
