"""The lock of a workdir: one writer, whose end is noticed, on this host and on others."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from etils import epath

from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.storage import lock
from jaxmarl_llm.storage.lock import NAME, WorkdirLock, locked, this_process

ROOT = Path(__file__).parents[2]
HOLD = "import sys, time, pathlib; from jaxmarl_llm.storage.lock import WorkdirLock\n"
HOLD += "WorkdirLock(pathlib.Path(sys.argv[1])).acquire(); print('held', flush=True); time.sleep(600)"


def write(folder, **changes):
    """A lock as another holder would have left it."""
    holder = dataclasses.replace(this_process(), **changes)
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(dataclasses.asdict(holder)))
    return holder


@pytest.fixture
def other():
    """(folder) -> a process that holds its lock."""
    started = []

    def start(folder):
        process = subprocess.Popen([sys.executable, "-c", HOLD, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(params=["folder", "store"])
def folder(request, tmp_path):
    return tmp_path if request.param == "folder" else epath.Path(tmp_path)


def test_one_holder_at_a_time_and_nothing_is_left(folder):
    with locked(folder) as held:
        held.check()
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"held by process {os.getpid()} on .* since 20.*--break_lock"):
                WorkdirLock(folder).acquire()
    assert list(folder.iterdir()) == []
    with locked(folder):
        pass


def test_a_living_process_is_refused_and_a_dead_one_followed(other, tmp_path):
    process = other(tmp_path)
    with pytest.raises(ConfigError, match=f"held by process {process.pid} on") as error:
        WorkdirLock(tmp_path).acquire()
    assert "\n" not in str(error.value)
    process.kill()  # and not reaped: a zombie has ended
    deadline = time.monotonic() + 30
    while lock._started(process.pid) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    with locked(tmp_path) as held:
        assert held._read().process == os.getpid()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux")
def test_an_id_that_another_process_has_now_is_no_holder(tmp_path):
    write(tmp_path, process=os.getppid(), started=1)
    with locked(tmp_path):
        pass


def test_another_host_is_refused_however_old_and_broken_by_the_flag(folder, tmp_path):
    write(tmp_path, host="node7", process=1, taken="2026-01-02 03:04:05 +0000", machine="its own")
    os.utime(tmp_path / NAME, (0, 0))
    with pytest.raises(ConfigError, match=r"process 1 on node7 since 2026-01-02 03:04:05 \+0000; .*--break_lock$"):
        WorkdirLock(folder).acquire()
    with locked(folder, break_lock=True) as held:
        held.check()
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_was_restarted_is_followed_unless_the_lock_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SILENCE", 0.5)
    write(tmp_path, machine="the boot before")
    with locked(tmp_path):
        pass
    write(tmp_path, machine="another container")
    ended = threading.Event()

    def touch():
        while not ended.wait(0.05):
            os.utime(tmp_path / NAME)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with pytest.raises(ConfigError, match="has one writer"):
            WorkdirLock(tmp_path).acquire()
    finally:
        ended.set()
        toucher.join()


def test_a_holder_touches_its_lock_and_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "REFRESH", 0.02)
    with locked(tmp_path):
        os.utime(tmp_path / NAME, (0, 0))
        deadline = time.monotonic() + 20
        while (tmp_path / NAME).stat().st_mtime == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / NAME).stat().st_mtime > 0
        write(tmp_path, host="node7")
        os.utime(tmp_path / NAME, (0, 0))
        time.sleep(0.2)
        assert (tmp_path / NAME).stat().st_mtime == 0


def test_a_holder_whose_lock_was_broken_says_who_has_it(folder, tmp_path):
    with locked(folder) as held:
        (tmp_path / NAME).unlink()
        held.check()  # removed by hand: it is made again
        assert (tmp_path / NAME).exists()
        write(tmp_path, host="node7", process=5)
        with pytest.raises(RunError, match="is held by process 5 on node7 since"):
            held.check()
    assert (tmp_path / NAME).exists()  # the other's stays


def test_without_hard_links_the_file_is_made_exclusively(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    with locked(tmp_path):
        with pytest.raises(ConfigError, match="has one writer"):
            WorkdirLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_was_lost_counts(tmp_path, monkeypatch):
    link = os.link

    def twice(*paths):
        link(*paths)
        link(*paths)

    monkeypatch.setattr(os, "link", twice)
    with locked(tmp_path) as held:
        held.check()


def test_a_lock_that_was_made_while_a_dead_one_is_removed_stays(tmp_path):
    write(tmp_path, process=os.getppid(), started=1)
    mine = WorkdirLock(tmp_path)
    dead = mine._read()
    living = write(tmp_path, host="node7")
    mine._remove(dead)
    assert mine._read() == living and [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json"])
def test_a_lock_that_cannot_be_read_is_refused(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(ConfigError, match="names no holder"):
        WorkdirLock(tmp_path).acquire()
    with locked(tmp_path, break_lock=True):
        pass


def test_a_lock_is_held_from_the_moment_that_its_file_is_there(tmp_path, monkeypatch):
    """Another thread of the process comes just after the file was made."""
    first, refused = WorkdirLock(tmp_path), []
    create = first._create

    def created():
        assert create()
        with pytest.raises(ConfigError) as caught:
            WorkdirLock(tmp_path).acquire()
        refused.append(caught.value)
        return True

    monkeypatch.setattr(first, "_create", created)
    first.acquire()
    assert len(refused) == 1
    first.check()
    first.release()


def test_many_at_once_are_one(tmp_path):
    """Threads of one process race for the lock of a dead holder."""
    write(tmp_path, process=os.getppid(), started=1)
    got, start = [], threading.Barrier(8)

    def race():
        mine = WorkdirLock(tmp_path)
        start.wait()
        try:
            mine.acquire()
            got.append(mine)
        except ConfigError:
            pass

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    for mine in got:
        mine.check()
        mine.release()


def test_a_workdir_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        WorkdirLock(tmp_path / "taken" / "run").acquire()


def test_a_workdir_that_leads_to_itself_is_one_line(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match="cannot write to") as error:
        WorkdirLock(tmp_path / "loop").acquire()
    assert "\n" not in str(error.value)
