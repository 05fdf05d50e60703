"""Whole runs: phases of a recipe, the training loop with checkpoints and resuming, and runs compiled as one program.

The memory check before a run and the settings of the C allocator are here too.
"""
