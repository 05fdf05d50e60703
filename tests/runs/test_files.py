"""A run is the one writer of its workdir, from its first moment to its last save."""

from __future__ import annotations

import pytest

from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.storage.lock import NAME, locked
from tests.runs.test_best import fit, kept, shared, without_a_figure  # noqa: F401  # fixtures
from tests.storage.test_lock import write


def test_a_workdir_that_another_run_holds_is_refused_and_left_as_it_is(shared, tmp_path):  # noqa: F811
    with locked(tmp_path), pytest.raises(ConfigError, match=r"has one writer: .*--break_lock"):
        fit(shared, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_whose_lock_is_broken_saves_nothing_more(shared, tmp_path):  # noqa: F811
    seen = []

    class Values(dict):
        def __missing__(self, step):
            seen.append(step)
            if step == 3:
                write(tmp_path, host="node7", process=5)
            return 0.0

    with pytest.raises(RunError, match=r"was broken, and is held by process 5 on node7 since"):
        fit(shared, tmp_path, values=Values())
    assert seen == [0, 1, 2, 3] and list(kept(tmp_path, "checkpoints")) == [2]
    assert (tmp_path / NAME).exists()  # the other's
