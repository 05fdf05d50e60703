"""Log-probs that the update of a step computed, by completion: what a rollouts file compares with the sampler's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmarl_llm.distributed.sharding import to_host
from jaxmarl_llm.training.learner import Batch


class LearnerLogprobs:
    """Log-probs of the trained completions of one step, as the losses of its first epoch had them.

    They stay where they are, on devices, until `by_row` is called. A completion that several updates of the step train
    has the log-probs of the first one.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Batch, Any]] = []

    def add(self, model: str, batches: Sequence[Batch], logprobs: Sequence[Any]) -> None:
        """Take the log-probs of an update, as ``keep`` of `learner.update_models`.

        Args:
            model: Name of the updated model; rows of the table of steps name its completions already.
            batches: Its micro-batches, on the host. Those without ``rows`` are left out.
            logprobs: Log-probs of each micro-batch [N G R]; rows beyond the batch's are padding.
        """
        self._parts += [part for part in zip(batches, logprobs, strict=True) if part[0].rows is not None]

    def by_row(self) -> dict[int, np.ndarray]:
        """Row of the table of steps -> log-probs [R] of its tokens, NaN where a token was not trained.

        A collective where log-probs are on devices of other processes.
        """
        found: dict[int, np.ndarray] = {}
        for (batch, _), values in zip(self._parts, to_host([values for _, values in self._parts]), strict=True):
            weights = np.asarray(batch.weights)
            known = np.where(weights > 0, values[: len(weights)], np.nan)
            for place in zip(*np.nonzero((weights > 0).any(-1)), strict=True):
                found.setdefault(int(np.asarray(batch.rows)[place]), known[place])
        return found
