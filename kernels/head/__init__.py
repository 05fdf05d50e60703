"""Kernels of the output head: log-probs, losses and samples without the logits of a whole batch."""
