"""Attention kernels: causal, groups that share a prompt, and trees of sequences."""
