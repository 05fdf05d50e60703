"""Control groups: where one can be made, its limits, and a run without any."""

import os
import shutil
from unittest import mock

import pytest

from jaxmarl_llm.sandbox import cgroups, jails
from jaxmarl_llm.sandbox import judge as sandbox
from jaxmarl_llm.sandbox.judge import Limits, Test, judge

REFUSALS = {tier: sandbox.examine(tier) for tier in sandbox.TIERS}
WORKING = [tier for tier in sandbox.TIERS if not REFUSALS[tier]]


def tree(root, controllers):
    """Folders like those of the kernel: {group: controllers that it passes on}."""
    for name, passed_on in controllers.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "cgroup.subtree_control").write_text(passed_on)
    return root


def test_the_nearest_group_that_passes_both_controllers_on(tmp_path):
    root = tree(tmp_path, {"": "cpu memory pids", "a": "memory pids", "a/b": "memory", "a/b/c": ""})
    assert cgroups.nearest(root, "/a/b/c") == root / "a"
    assert cgroups.nearest(root, "/a/b") == root / "a" and cgroups.nearest(root, "/elsewhere") == root
    assert cgroups.nearest(tree(tmp_path / "none", {"": "cpu", "a": ""}), "/a") is None
    with mock.patch.object(os, "access", lambda path, mode: path == root):  # others are not writable
        assert cgroups.nearest(root, "/a/b/c") == root


def test_limits_are_written_and_the_group_is_removed(tmp_path, monkeypatch):
    root = tree(tmp_path, {"": "memory pids"})
    monkeypatch.setattr(cgroups, "parent", lambda: root)
    group = cgroups.limited(123, 1 << 28, 16)
    assert group.folder.parent == root
    assert {f.name: f.read_text() for f in group.folder.iterdir()} == {
        "memory.max": str(1 << 28),
        "memory.swap.max": "0",
        "pids.max": "16",
        "cgroup.procs": "123",
    }
    assert not group.out_of_memory()
    (group.folder / "memory.events").write_text("low 0\noom 3\noom_kill 1\n")
    assert group.out_of_memory()
    for file in group.folder.iterdir():  # the kernel's files go with their folder
        file.unlink()
    group.close()
    assert not group.folder.exists()


def test_without_a_group_the_other_limits_hold_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cgroups, "parent", lambda: None)
    assert cgroups.limited(1, 1, 1) is None
    monkeypatch.setattr(cgroups, "parent", lambda: tmp_path / "absent")
    assert cgroups.limited(1, 1, 1) is None
    root = tree(tmp_path, {"": "memory pids"})
    monkeypatch.setattr(cgroups, "parent", lambda: root)
    with mock.patch.object(cgroups.Group, "add", side_effect=OSError), mock.patch.object(cgroups, "BURIAL", 0.0):
        assert cgroups.limited(1, 1, 1) is None


@pytest.mark.skipif(not WORKING, reason=f"no tier works here: {REFUSALS}")
def test_a_jail_is_moved_into_its_group(tmp_path, monkeypatch):
    root = tree(tmp_path, {"": "memory pids"})
    monkeypatch.setattr(cgroups, "parent", lambda: root)
    monkeypatch.setattr(cgroups, "BURIAL", 0.0)
    jail = jails.Jail(WORKING[0], Limits(memory_mb=200, tmp_mb=10, threads=7))
    (folder,) = [path for path in root.iterdir() if path.is_dir()]
    assert (folder / "cgroup.procs").read_text() == str(jail.pid) != str(jail._process.pid) or WORKING[0] != "bwrap"
    assert (folder / "memory.max").read_text() == str(274 << 20) and (folder / "pids.max").read_text() == "7"
    (folder / "memory.events").write_text("oom_kill 1")
    os.kill(jail.pid, 9)
    with pytest.raises(jails.Stopped, match="oom: more memory than its control group allows"):
        jail.ask("load", "x = 1", seconds=5.0)
    jail.close()
    shutil.rmtree(folder)


@pytest.mark.skipif(cgroups.parent() is None or not WORKING, reason="no control group can be made here")
def test_memory_that_rlimits_do_not_count_is_limited():
    program = """
import os
def f():
    pipes = [os.pipe() for _ in range(25)]
    for _, end in pipes:
        os.set_blocking(end, False)
        try:
            while True: os.write(end, bytes(65536))
        except BlockingIOError: pass
    return 1
"""
    with mock.patch.object(jails, "KERNEL_MB", -95):
        report = judge(program, [Test("f()", ("f",))], Limits(memory_mb=100, tmp_mb=0))
    assert report.tests == ("oom",)
