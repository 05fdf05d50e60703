"""Where sharing the prompt pays: generation over prompt lengths and numbers of samples, beside transformers.

With one sample nothing is shared. With a prompt that is short beside the completions, hardly anything is.
"""

from __future__ import annotations

from collections.abc import Iterator

from experiments.bench import Row, Suite, decode

# Prompt tokens, new tokens.
LENGTHS = {"cpu": ((32, 128), (256, 64), (2048, 64)), "tiny": ((8, 8), (16, 8))}
GROUPS = {"cpu": (1, 4, 16), "tiny": (1, 2)}


def run(suite: Suite) -> Iterator[Row]:
    """A row for each prompt length and number of samples."""
    shape = "tiny" if suite.tiny else "7m"
    others = (decode.HF, decode.HF_SHARED)
    for p, r in LENGTHS[suite.name]:
        for group in GROUPS[suite.name]:
            yield decode.case(suite, shape, group, p, r, others, {}, part="sweep")
