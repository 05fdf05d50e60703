"""The wheel, and checkouts that share one environment: every checkout imports its own modules and kernels."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.test_notebooks import INSTALL

ROOT = Path(__file__).parent.parent


def run(*command, cwd, **environment):
    """Output of a command. It must succeed."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "", **environment}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def clones(tmp_path_factory):
    """Two clones of this repository."""
    folder = tmp_path_factory.mktemp("clones").resolve()
    for name in ("one", "two"):
        run("git", "clone", "--quiet", "--shared", str(ROOT), str(folder / name), cwd=folder)
    return folder / "one", folder / "two"


@pytest.fixture(scope="module")
def wheel(clones, tmp_path_factory):
    """The wheel of the first clone, built without the network."""
    out = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    run(*build, "-w", str(out), ".", cwd=clones[0])
    (path,) = out.glob("*.whl")
    return path


def test_each_checkout_imports_its_own_kernels(clones):
    for clone in clones:
        found = run(sys.executable, "-c", "import jaxmarl_llm.kernels as k; print(k.__file__)", cwd=clone)
        assert found == str(clone / "jaxmarl_llm" / "kernels" / "__init__.py")
        assert Path(found).resolve() == clone / "kernels" / "__init__.py"  # through the link of this clone


def test_make_demo_resumes_and_deletes_nothing():
    commands = run("make", "--no-print-directory", "-n", "demo", "SEED=3", "DEMO=runs/other", cwd=ROOT)
    assert "--workdir=runs/other --config.seed=3" in commands and "A new run: make demo DEMO=" in commands
    assert not {"rm", "-rf"} & set(commands.split())


@pytest.mark.slow
def test_the_wheel_has_every_module_and_data_file(clones, wheel):
    tracked = run("git", "ls-files", "jaxmarl_llm", "kernels", cwd=clones[0]).splitlines()
    expected = {f"jaxmarl_llm/{path}" if path.startswith("kernels/") else path for path in tracked}
    expected.remove("jaxmarl_llm/kernels")  # the link to kernels/
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = next(archive.read(n).decode() for n in names if n.endswith("entry_points.txt"))
    assert {n for n in names if n.startswith("jaxmarl_llm/")} == expected
    assert {"jaxmarl_llm/py.typed", "jaxmarl_llm/data/fixtures/gsm8k/LICENSE"} <= names
    assert {n.split("/")[0] for n in names} == {"jaxmarl_llm", f"{wheel.name.split('-py3')[0]}.dist-info"}
    assert "jaxmarl-llm = jaxmarl_llm.cli.main:main" in entry_points
    assert any(n.endswith("dist-info/licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_the_first_cell_of_the_notebooks_installs_the_wheel_beside_them(wheel, tmp_path):
    """Run by IPython in a process that finds no jaxmarl_llm. It goes to a folder of its own, without dependencies."""
    shutil.copy(wheel, tmp_path)
    hide = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: f(n) if n != 'jaxmarl_llm' else None"
    (tmp_path / "cell.ipy").write_text(f"{hide}\n{INSTALL}\n")
    site = tmp_path / "site"
    settings = {"PIP_TARGET": str(site), "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1", "IPYTHONDIR": str(tmp_path)}
    run(sys.executable, "-m", "IPython", "cell.ipy", cwd=tmp_path, **settings)
    assert (site / "jaxmarl_llm" / "__init__.py").exists()
    (tmp_path / "cell.ipy").write_text(INSTALL)  # the package is there
    run(sys.executable, "-m", "IPython", "cell.ipy", cwd=tmp_path, **settings | {"PIP_TARGET": str(tmp_path / "again")})
    assert not (tmp_path / "again").exists()


@pytest.mark.slow
def test_the_installed_command_runs_in_an_empty_folder(wheel, tmp_path):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    run(*install, "--target", str(site), str(wheel), cwd=empty)
    text = run(str(site / "bin" / "jaxmarl-llm"), "--help", cwd=empty, PYTHONPATH=str(site))
    assert "train" in text and "evaluate" in text
    code = "import jaxmarl_llm; print(jaxmarl_llm.__file__)"
    where = run(sys.executable, "-c", code, cwd=empty, PYTHONPATH=str(site))
    assert where == str(site / "jaxmarl_llm" / "__init__.py")
