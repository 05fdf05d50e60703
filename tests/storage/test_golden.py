"""Checkpoints that earlier versions wrote are read: every array is what that version wrote, and training goes on.

`python -m experiments.data.make_golden` makes the files of a version.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments.data import make_golden
from jaxmarl_llm import __version__
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.recipes import joyagents_r1
from jaxmarl_llm.runs import loop
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.telemetry.metrics_file import read_metrics

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = sorted(path.stem for path in GOLDEN.glob("*.zip"))


@pytest.fixture(params=VERSIONS)
def version(request):
    return request.param


@pytest.fixture
def workdir(version, tmp_path):
    with zipfile.ZipFile(GOLDEN / f"{version}.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path


def test_this_version_has_a_checkpoint():
    assert __version__ in VERSIONS, "run: python -m experiments.data.make_golden"


def test_every_array_is_what_the_version_wrote(version, workdir):
    """Its configuration is read too, and gives a recipe whose state has the same leaves."""
    cfg = from_dict(joyagents_r1.Config, json.loads((workdir / "config.json").read_text()))
    recipe, saver = joyagents_r1.make(cfg), Checkpointer(workdir, read_only=True)
    meta = saver.read_meta()
    loop._check_same(cfg, meta, ())
    state, step = loop.restore(saver, recipe, meta)
    saver.close()
    got, kept = make_golden.arrays(state), np.load(GOLDEN / f"{version}.npz")
    assert step == meta["step"] == int(state.step) == recipe.total_steps
    assert got.keys() == set(kept.files) and len(got) > 50
    for path, array in got.items():
        assert (array.dtype, array.shape, array.tobytes()) == (
            kept[path].dtype,
            kept[path].shape,
            kept[path].tobytes(),
        ), path
    moments = [a for path, a in got.items() if ".mu" in path or ".nu" in path]
    assert any(a.any() for a in moments) and all(store.used.any() for store in state.memory.values())


@pytest.mark.slow
def test_a_run_goes_on_from_it(workdir):
    """One more step with `fit`, in the workdir that the version left."""
    cfg = from_dict(joyagents_r1.Config, json.loads((workdir / "config.json").read_text()) | {"steps": 3})
    recipe = joyagents_r1.make(cfg)
    state = loop.fit(cfg, recipe, workdir)
    assert int(state.step) == recipe.total_steps == 33
    assert [row["step"] for row in read_metrics(workdir)] == list(range(1, 34))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
