"""Files of a run on disk: checkpoints, data sets, and the working directory.

All arrays carry a checksum, and reading verifies it.
"""
