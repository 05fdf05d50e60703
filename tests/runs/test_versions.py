"""The commit of the folder that a run was started in."""

import subprocess

import pytest

from jaxmarl_llm.runs import versions
from jaxmarl_llm.runs.versions import commit_of


@pytest.fixture
def checkout(tmp_path):
    """A checkout with one commit, and a function that runs git in it."""

    def git(*words):
        who = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false")
        ran = subprocess.run(["git", "-C", str(tmp_path), *who, *words], capture_output=True, text=True, check=True)
        return ran.stdout.strip()

    git("init", "-q")
    (tmp_path / "mine.py").write_text("one = 1\n")
    git("add", "mine.py")
    git("commit", "-qm", "one")
    return tmp_path, git


def test_changes_of_tracked_files_show_beside_the_commit(checkout):
    folder, git = checkout
    head = git("rev-parse", "HEAD")
    assert len(head) == 40 and commit_of(folder) == head
    (folder / "runs").mkdir()
    (folder / "runs" / "metrics.jsonl").write_text("{}\n")  # not tracked: what a run writes is no change
    assert commit_of(folder / "runs") == head
    (folder / "mine.py").write_text("one = 2\n")
    assert commit_of(folder) == f"{head}+changes"


def test_without_a_checkout_a_commit_or_git_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) is None
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert commit_of(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert commit_of(tmp_path) is None


def test_git_that_does_not_answer_ends_no_run(checkout, monkeypatch):
    monkeypatch.setattr(versions, "SECONDS", 0.0)
    assert commit_of(checkout[0]) is None
