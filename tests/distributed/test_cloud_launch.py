"""Launchers for clouds, with clients that answer as gcloud, xpk and JobSet do: late states, restarts after codes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "experiments" / "launch"
CLIENTS = Path(__file__).parent / "fake_clients"
RUN = {"CONFIG": "experiments/configs/joyagents_r1.py:tiny", "WORKDIR": "/nowhere/team"}
SLICE = RUN | {"NAME": "team", "ZONE": "zone", "TYPE": "v5litepod-16", "WAIT": "1", "PATIENCE": "5"}
XPK = SLICE | {"CLUSTER": "cluster", "PROJECT": "project", "IMAGE": "image"}
TRAINED = "python -m experiments.train --config=experiments/configs/joyagents_r1.py:tiny --workdir=/nowhere/team"


class Cloud:
    """A cloud whose answers are the files of ``folder`` (fake_clients/gcloud)."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.client("quick/sleep", "")  # nothing of the cloud takes time
        self.client("bin/xpk", f'exec {sys.executable} {CLIENTS / "xpk.py"} "$@"')
        self.answers(queue=["-"], node=["-"], new=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], ssh=[0], scp=[0])

    def client(self, name, body):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def answers(self, **files):
        for name, lines in files.items():
            (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def run(self, script, env, *args, quick=True):
        """(exit code, calls of gcloud or xpk without the first word, stderr)."""
        (self.folder / "calls").write_text("")
        path = f"{self.folder / 'quick'}:" * quick + f"{self.folder / 'bin'}:{CLIENTS}:{os.environ['PATH']}"
        given = {"PATH": path, "CLOUD": str(self.folder), "HOME": str(self.folder), **env}
        done = subprocess.run(
            ["bash", LAUNCH / script, *args], env=given, cwd=self.folder, capture_output=True, text=True, timeout=60
        )
        calls = (self.folder / "calls").read_text().splitlines()
        return done.returncode, calls, done.stderr


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def verbs(calls):
    """What is done to slices, in order; looks at them are left out."""
    words = [call.split() for call in calls if call.startswith("gcloud")]
    return [f"{w[3]} {w[4]}" for w in words if w[4] != "describe"]


ROUND = ["tpu-vm scp", "tpu-vm ssh"]


def test_a_preemption_that_the_queue_sees_late_is_another_round(cloud):
    """ssh drops first. The queue still says ACTIVE twice, then that the slice is being taken away."""
    cloud.answers(queue=["ACTIVE", "ACTIVE", "ACTIVE", "SUSPENDING", "SUSPENDED"], node=["READY"], ssh=[255, 0])
    code, calls, _ = cloud.run("queued_resources.sh", SLICE | {"SPOT": "1"}, "--config.seed=1")
    assert code == 0
    assert verbs(calls) == [*ROUND, "queued-resources delete", "queued-resources create", *ROUND]
    (created,) = [call for call in calls if "queued-resources create" in call]
    assert "--spot" in created and "--accelerator-type=v5litepod-16" in created


def test_a_run_that_was_told_to_end_goes_on_on_another_slice(cloud):
    """75 comes while the slice is ACTIVE; the next round meets machines that are gone, which scp says."""
    cloud.answers(queue=["ACTIVE"] * 4 + ["SUSPENDED"], node=["READY"], ssh=[75, 0], scp=[0, 1, 0])
    code, calls, _ = cloud.run("queued_resources.sh", SLICE)
    recreated = ["queued-resources delete", "queued-resources create"]
    assert code == 0 and verbs(calls) == [*ROUND, "tpu-vm scp", *recreated, *ROUND]


def test_machines_that_are_gone_are_not_made_beside_the_queue(cloud):
    cloud.answers(queue=["ACTIVE", "ACTIVE", "SUSPENDED"], node=["PREEMPTED"])
    code, calls, error = cloud.run("queued_resources.sh", SLICE)
    assert code == 0 and "expected a slice that is READY, found PREEMPTED" in error
    assert verbs(calls) == ["queued-resources delete", "queued-resources create", *ROUND]


def test_a_lost_connection_alone_starts_the_run_again(cloud):
    cloud.answers(queue=["ACTIVE"], node=["READY"], ssh=[255, 0])
    code, calls, _ = cloud.run("queued_resources.sh", SLICE)
    assert code == 0 and verbs(calls) == [*ROUND, *ROUND]


def test_a_run_that_fails_on_a_slice_that_is_well_is_not_repeated(cloud):
    cloud.answers(queue=["ACTIVE"], node=["READY"], ssh=[1])
    code, calls, error = cloud.run("queued_resources.sh", SLICE)
    assert code == 1 and "a slice that is well" in error and verbs(calls) == ROUND
    assert len([call for call in calls if "queued-resources describe" in call]) == 1 + 6  # PATIENCE, a look each WAIT
    cloud.answers(ssh=[2])
    code, calls, error = cloud.run("queued_resources.sh", SLICE)
    assert code == 2 and "the input is wrong" in error and verbs(calls) == ROUND
    cloud.answers(ssh=[75])
    code, calls, error = cloud.run("queued_resources.sh", SLICE | {"ROUNDS": "3"})
    assert code == 1 and "gave up after 3 rounds" in error and verbs(calls) == ROUND * 3


def test_an_interface_that_does_not_answer_is_no_missing_slice(cloud):
    cloud.answers(queue=["!", "!", "ACTIVE"], node=["READY"])
    code, calls, error = cloud.run("queued_resources.sh", SLICE)
    assert code == 0 and verbs(calls) == ROUND and "UNAVAILABLE" in error
    cloud.answers(node=["!"])
    code, calls, error = cloud.run("tpu_vm.sh", SLICE)
    assert code == 1 and not verbs(calls) and "team: the slice is UNKNOWN" in error


def test_a_request_that_fails_is_made_again_and_not_for_ever(cloud):
    cloud.answers(new=["WAITING_FOR_RESOURCES", "FAILED"])
    code, calls, error = cloud.run("queued_resources.sh", SLICE | {"ROUNDS": "2"})
    assert code == 1 and "gave up after 2 rounds" in error
    assert verbs(calls) == ["queued-resources create", "queued-resources delete"] * 2


@pytest.mark.parametrize(
    "node,done",
    [
        ("READY", ROUND),
        ("-", ["tpu-vm create", *ROUND]),
        ("PREEMPTED", ["tpu-vm delete", "tpu-vm create", *ROUND]),
        ("CREATING", []),
    ],
)
def test_a_slice_is_made_where_there_is_none(cloud, node, done):
    cloud.answers(node=[node])
    code, calls, _ = cloud.run("tpu_vm.sh", SLICE | {"SPOT": "1"}, "--config.seed=1")
    assert code == (0 if done else 1) and verbs(calls) == done
    assert all("--spot" in call for call in calls if "tpu-vm create" in call)
    if done:
        assert all("--worker=all" in call for call in calls if "scp" in call or "ssh" in call)
        assert (
            f"    exec bash jaxmarl_llm/experiments/launch/on_host.sh {TRAINED} --config.seed=1  --zone=zone" in calls
        )


@pytest.fixture
def host(cloud):
    """A checkout on a host, whose environment is that of the fake clients."""
    folder = cloud.folder / "checkout"
    (folder / "experiments/launch").mkdir(parents=True)
    shutil.copy(LAUNCH / "on_host.sh", folder / "experiments/launch")
    (folder / ".venv/bin").mkdir(parents=True)
    shutil.copy(CLIENTS / "pip", folder / ".venv/bin")
    (folder / ".venv/bin/activate").write_text("")
    env = {"PATH": f"{CLIENTS}:{os.environ['PATH']}", "CLOUD": str(cloud.folder), "HOME": str(cloud.folder)}

    def start():
        command = ["bash", folder / "experiments/launch/on_host.sh", *TRAINED.split()]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)

    # Tests that were started with nohup ignore SIGHUP, and so would what they start.
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield cloud, folder, start
    signal.signal(signal.SIGHUP, hangup)
    if (folder / "train.pid").exists():  # of a test that failed
        subprocess.run(["bash", "-c", f"kill -9 $(cat {folder / 'train.pid'}) 2>/dev/null"])


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_host_says_what_the_run_says_and_ends_as_it_ends(host):
    cloud, _, start = host
    cloud.answers(saved=[""])
    out, _ = (run := start()).communicate(timeout=30)
    assert (run.returncode, out) == (0, "resumed\n")
    cloud.answers(code=[75])
    (run := start()).communicate(timeout=30)
    assert run.returncode == 75
    calls = (cloud.folder / "calls").read_text().splitlines()
    assert calls == ["pip install --quiet -e .[tpu,hf,gcs]", TRAINED] * 2


def test_a_run_outlives_its_connection_and_the_next_one_ends_it_first(host):
    cloud, folder, start = host
    first = start()
    until((cloud.folder / "started").exists)
    os.killpg(first.pid, signal.SIGHUP)  # ssh is gone
    first.communicate(timeout=30)
    pid = int((folder / "train.pid").read_text())
    os.kill(pid, 0)  # it is there
    out, _ = (second := start()).communicate(timeout=30)
    assert (second.returncode, out) == (0, "resumed\n") and (cloud.folder / "saved").exists()
    assert (folder / "train.log.1").read_text() == "trains\nsaved\n"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_number_that_another_process_has_now_is_left_alone(host):
    cloud, folder, start = host
    other = subprocess.Popen(["sleep", "60"])
    (folder / "train.pid").write_text(str(other.pid))
    cloud.answers(saved=[""])
    start().communicate(timeout=30)
    assert other.poll() is None
    other.kill()
    other.wait()


def test_an_image_with_an_old_python_gets_one_from_uv(host):
    """Every python3 here is 3.10; then pip brings uv, and uv the environment."""
    cloud, folder, start = host
    venv = shutil.copytree(folder / ".venv", cloud.folder / "made")
    shutil.rmtree(folder / ".venv")
    for name in ("python3", "python3.11", "python3.12", "python3.13"):
        old = "import sys; sys.version_info = (3, 10, 12); exec(sys.argv[1])"
        checks = f'[ "$1" != -c ] || exec {sys.executable} -c "{old}" "$2"'
        note = f'echo "{name} $*" >>"$CLOUD/calls"'
        cloud.client(f"bin/{name}", f'{note}\n{checks}\n[ "$2" != uv ] || cp -r {venv} .venv')
    cloud.answers(saved=[""])
    env = {"PATH": f"{cloud.folder / 'bin'}:{CLIENTS}:{os.environ['PATH']}", "CLOUD": str(cloud.folder)}
    script = folder / "experiments/launch/on_host.sh"
    done = subprocess.run(["bash", script, *TRAINED.split()], env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "resumed\n"), done.stderr
    calls = (cloud.folder / "calls").read_text().splitlines()
    assert "python3 -m pip install --quiet --user uv" in calls
    assert "python3 -m uv venv --quiet --clear --seed --python 3.12 .venv" in calls


def test_a_workload_that_is_told_to_end_saves_and_is_started_again(cloud):
    """xpk gives SIGTERM to a shell around the command, and restarts after some codes only.

    Shells before bash 5.1 stay there as a process, and end without telling the command, unless it begins with exec.
    """
    cloud.answers(term=[""])
    code, calls, _ = cloud.run("xpk.sh", XPK, "--config.seed=1", quick=False)
    assert code == 0 and (cloud.folder / "saved").exists()
    assert (cloud.folder / "pods").read_text().split() == ["75", "0"]
    assert calls[0].startswith("xpk workload delete --workload=team ")
    assert calls[1].startswith("xpk workload create --workload=team ") and "--num-slices=1" in calls[1]
    assert f"--command=exec {TRAINED} --config.seed=1" in calls[1]
    assert calls[2:] == [f"{TRAINED} --config.seed=1"] * 2


@pytest.mark.parametrize("exit_code,pods", [(2, 1), (1, 1), (137, 3), (75, 3)])
def test_a_workload_is_started_again_where_that_helps(cloud, exit_code, pods):
    cloud.answers(code=[exit_code])
    code, calls, _ = cloud.run("xpk.sh", XPK | {"RESTARTS": "2", "SLICES": "2", "STORAGE": "runs"}, quick=False)
    assert code == 0 and (cloud.folder / "pods").read_text().split() == [str(exit_code)] * pods
    assert "--num-slices=2" in calls[1] and "--storage=runs" in calls[1]


def after(jobset, exit_code):
    """What JobSet does when a pod ends with ``exit_code``: the rules of the pod, then those of the set."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job, policy = replicated["template"]["spec"], jobset["spec"]["failurePolicy"]
    reason = "BackoffLimitExceeded" if job["backoffLimit"] == 0 else None
    (container,) = job["template"]["spec"]["containers"]
    for rule in job["podFailurePolicy"]["rules"]:
        on = rule["onExitCodes"]
        assert on["containerName"] == container["name"] and set(rule) == {"action", "onExitCodes"}
        if (exit_code in on["values"]) == (on["operator"] == "In"):
            reason = {"FailJob": "PodFailurePolicy"}[rule["action"]]
            break
    actions = [rule["action"] for rule in policy["rules"] if reason in rule["onJobFailureReasons"]]
    return (actions or ["RestartJobSet"])[0]


def test_a_jobset_starts_again_where_that_helps_and_keeps_the_run():
    jobset = yaml.safe_load((LAUNCH / "kubernetes" / "jobset.yaml").read_text())
    assert {code: after(jobset, code) for code in (1, 2, 130)} == dict.fromkeys((1, 2, 130), "FailJobSet")
    assert {after(jobset, code) for code in (75, 134, 137, 143)} == {"RestartJobSet"}
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (volume,), (mount,) = pod["volumes"], pod["containers"][0]["volumeMounts"]
    assert volume == {"name": mount["name"], "persistentVolumeClaim": {"claimName": "$CLAIM"}}
    head = (LAUNCH / "kubernetes" / "jobset.yaml").read_text()
    assert f"WORKDIR={mount['mountPath']}/" in head  # the example writes to what is mounted


def test_a_managed_job_refuses_the_disk_of_its_machine(cloud):
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"] == {"recover_on_exit_codes": [75]}  # any other code ends it
    activate = cloud.folder / ".venv/bin/activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("")
    cloud.answers(saved=[""])
    run = cloud.folder / "run"
    run.write_text(task["run"])
    code, calls, error = cloud.run(run, RUN)
    assert code == 2 and not calls and error.startswith("error: WORKDIR: expected a URL, as s3://BUCKET/team, got /now")
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    code, calls, _ = cloud.run(run, RUN | {"WORKDIR": "s3://runs/team", "ARGS": "--config.seed=1"} | nodes)
    place = "--process=1 --config.mesh.data=-1 --coordinator=10.0.0.1:8476 --processes=2"
    assert code == 0 and calls == [f"{TRAINED.replace('/nowhere/team', 's3://runs/team')} {place} --config.seed=1"]
