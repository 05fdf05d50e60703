"""Log-probs of an update by completion: weights, padding rows, batches without completions, two updates."""

from __future__ import annotations

import numpy as np

from jaxmarl_llm.training.learner import Batch
from jaxmarl_llm.training.learner_logprobs import LearnerLogprobs


def batch(weights, rows):
    weights = np.float32(weights)
    n, g, r = weights.shape
    none = np.zeros((n, g, r), np.float32)
    ids = np.zeros((n, g, r), np.int32)
    return Batch(
        ids[:, 0], np.ones(n, np.int32), ids, weights, none, none, rows=None if rows is None else np.array(rows)
    )


def test_tokens_without_a_weight_are_unknown_and_padding_is_no_row():
    seen = LearnerLogprobs()
    values = -1.0 - np.arange(12, dtype=np.float32).reshape(3, 2, 2)  # a row more than the batch: padding of a mesh
    seen.add("m", [batch([[[1, 0.5], [0, 0]], [[0, 0.1], [2, 0]]], [[7, 0], [4, 9]])], [values])
    found = seen.by_row()
    assert list(found) == [7, 4, 9]  # row 0 is padding of its group
    np.testing.assert_array_equal(found[7], [-1, -2])
    np.testing.assert_array_equal(found[4], [np.nan, -6])
    np.testing.assert_array_equal(found[9], [-7, np.nan])


def test_the_first_update_of_a_step_counts_and_critics_have_no_rows():
    seen = LearnerLogprobs()
    one, other = np.full((1, 1, 2), -1.0, np.float32), np.full((1, 1, 2), -2.0, np.float32)
    seen.add("a", [batch([[[1, 1]]], [[3]]), batch([[[1, 1]]], None)], [one, one])
    seen.add("a", [batch([[[1, 1]]], [[3]]), batch([[[1, 1]]], [[5]])], [other, other])
    assert {row: values.tolist() for row, values in seen.by_row().items()} == {3: [-1, -1], 5: [-2, -2]}
