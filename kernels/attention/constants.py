"""Constants that the attention kernels share."""

NEG = -1e30  # a masked score. Finite, so that no NaN arises; a row always sees its own slot 0
