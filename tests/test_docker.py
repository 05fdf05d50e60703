"""The container files: instructions parse, copied files exist, extras exist, and root runs on TPUs alone."""

import configparser
import fnmatch
import json
import re
import shlex
from pathlib import Path

import pytest

from jaxmarl_llm.cli.main import COMMANDS

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
KNOWN = ("FROM", "RUN", "COPY", "USER", "WORKDIR", "ENV", "ENTRYPOINT", "CMD")


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of a container file, with continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


def of(path: Path, name: str) -> list[str]:
    return [rest for known, rest in instructions(path) if known == name]


def extras() -> set[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return set(setup["options.extras_require"])


def test_there_is_one_file_for_each_platform():
    assert [path.suffix for path in FILES] == [".cpu", ".gpu", ".tpu"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_instructions(path):
    names = [name for name, _ in instructions(path)]
    assert set(names) <= set(KNOWN) and names[0] == "FROM"
    assert re.fullmatch(r"[\w./-]+:[\w.-]+", of(path, "FROM")[0]) and "latest" not in of(path, "FROM")[0]
    if path.suffix == ".tpu":  # the devices of TPUs belong to root
        assert "USER" not in names
    else:
        assert of(path, "USER") == ["user"] and names.index("USER") > max(i for i, n in enumerate(names) if n == "RUN")
    assert json.loads(of(path, "ENTRYPOINT")[0]) == ["jaxmarl-llm"]
    assert json.loads(of(path, "CMD")[0])[0] in COMMANDS
    assert all(re.fullmatch(r"\w+=\S+", pair) for line in of(path, "ENV") for pair in shlex.split(line))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_copied_files_exist_and_are_not_ignored(path):
    copied = [source for line in of(path, "COPY") for source in line.split()[:-1]]
    ignored = (ROOT / ".dockerignore").read_text().split()
    for source in copied:
        assert (ROOT / source).exists(), source
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in ignored), source
    # the package is a folder with a link to kernels/, which has to be beside it
    assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "jaxmarl_llm", "kernels"} <= set(copied)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_commands_leave_no_caches_and_name_extras_that_exist(path):
    runs = of(path, "RUN")
    for words in map(shlex.split, runs):
        assert words and ("pip" not in words or "--no-cache-dir" in words)
        assert "apt-get" not in words or words[-3:] == ["rm", "-rf", "/var/lib/apt/lists/*"]
        assert words.count("install") == 0 or "-y" in words or "pip" in words
    (wanted,) = re.findall(r"/src\[([\w,]+)\]", " ".join(runs))
    assert set(wanted.split(",")) <= extras()
    platform = {".cpu": set(), ".gpu": {"cuda"}, ".tpu": {"tpu"}}[path.suffix]
    assert {"cuda", "tpu"} & set(wanted.split(",")) == platform


def test_the_image_for_tpus_has_what_the_launchers_run():
    """`python -m experiments.train --config=experiments/configs/...` in the working folder."""
    path = ROOT / "docker/Dockerfile.tpu"
    assert "experiments /work/experiments" in of(path, "COPY") and of(path, "WORKDIR") == ["/work"]
    for launcher in ("xpk.sh", "kubernetes/jobset.yaml"):
        text = (ROOT / "experiments/launch" / launcher).read_text()
        assert "docker/Dockerfile.tpu" in text and "python -m experiments.train" in text


def test_the_page_on_installation_has_every_extra():
    page = (ROOT / "docs/install.md").read_text()
    listed = {
        name for line in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", line)
    }
    assert listed == extras()
