"""Runs whose folder is in an object store, here another folder: what is there is what a run on this machine leaves."""

from __future__ import annotations

import os
import shutil

import pytest
from etils import epath

from jaxmarl_llm.config import from_dict
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.runs import loop
from jaxmarl_llm.storage import workdir
from jaxmarl_llm.storage.checkpoint import Checkpointer
from jaxmarl_llm.storage.workdir import Workdir
from jaxmarl_llm.telemetry.metrics_file import read_metrics

URL = "gs://bucket/run"
SMALL = {
    "steps": 4,
    "batch": 4,
    "group": 2,
    "env": {"name": "matrix", "eval_tasks": 4},
    "reward": {"payoff": 1.0},
    "team": {"max_new_tokens": 1, "remat": False, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}},
    "sft": {"steps": 0},
    "run": {"checkpoint_every": 2, "eval_every": 0, "eval_greedy": False, "log_every": 100, "tensorboard": True},
}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A folder in the place of the bucket, for files and for checkpoints."""
    monkeypatch.setattr(workdir, "_open", lambda url: epath.Path(tmp_path / "store"))
    monkeypatch.setattr(workdir.tempfile, "gettempdir", lambda: str(tmp_path / "here"))
    monkeypatch.setattr(loop, "Checkpointer", lambda url, keep: Checkpointer(tmp_path / "store", keep=keep))
    return tmp_path / "store"


def fit(steps, url=URL):
    cfg = from_dict(magrpo.Config, {**SMALL, "steps": steps})
    return loop.fit(cfg, magrpo.make(cfg), url)


def test_a_run_in_a_store_goes_on_on_another_machine(store, tmp_path):
    fit(3)
    assert [row["step"] for row in read_metrics(store)] == [1, 2, 3]
    assert (store / "config.json").exists() and (store / "report.png").exists() and (store / "checkpoints").is_dir()
    assert list((store / "tensorboard").iterdir())
    shutil.rmtree(tmp_path / "here")  # another machine has nothing
    fit(4)
    assert [row["step"] for row in read_metrics(store)] == [1, 2, 3, 4]
    assert not (Workdir(URL).local / "checkpoints").exists()


def test_what_ended_a_run_is_in_the_store(store):
    """The lines since the last checkpoint tell why."""
    cfg = from_dict(magrpo.Config, {**SMALL, "run": {**SMALL["run"], "checkpoint_every": 100, "max_bad_steps": 2}})
    recipe = magrpo.make(cfg)
    step = recipe.step
    recipe.step = lambda *args: (lambda new, metrics: (new, {**metrics, "bad": 1.0}))(*step(*args))
    with pytest.raises(FloatingPointError, match=r"2 steps in a row .* there is no checkpoint$"):
        loop.fit(cfg, recipe, URL)
    assert [row["count/skipped"] for row in read_metrics(store)] == [1, 2]


def test_what_another_run_left_here_goes(store, tmp_path):
    folder = Workdir(URL)
    assert str(os.getuid()) in folder.local.parent.name
    folder.local.mkdir(parents=True)
    (folder.local / "old.txt").write_text("")
    store.mkdir()
    (store / "metrics.jsonl").write_text("")
    folder.fetch()
    assert [path.name for path in folder.local.iterdir()] == ["metrics.jsonl"]


def test_a_folder_is_itself(tmp_path):
    folder = Workdir(tmp_path / "run")
    assert folder.local == tmp_path / "run" and folder.url == str(tmp_path / "run")
    folder.fetch()
    folder.push()
    assert not (tmp_path / "run").exists()


def test_a_store_that_cannot_be_opened_says_so():
    with pytest.raises(ConfigError, match=r"--workdir: cannot open 'nowhere://bucket/run': "):
        Workdir("nowhere://bucket/run")


@pytest.mark.parametrize("scheme,extra", [("gs", "gcs"), ("s3", "s3")])
def test_a_store_without_its_client_names_the_extra(scheme, extra, monkeypatch):
    def missing(*_, **__):
        raise ImportError("Please install its client")

    monkeypatch.setattr(workdir.epath, "Path", missing)
    with pytest.raises(ConfigError, match=rf"Please install its client; pip install 'jaxmarl_llm\[{extra}\]'$"):
        Workdir(f"{scheme}://bucket/run")
