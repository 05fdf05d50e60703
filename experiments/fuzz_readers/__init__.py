"""Fuzzing of every reader of files: a seed and a number name a mutated file, which loads or ends in one line."""
