"""Lazy exports of the package: what `import jaxmarl_llm` gives, and what it does not import."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxmarl_llm
from jaxmarl_llm import credit, recipes
from jaxmarl_llm._lazy import lazy_exports

ROOT = Path(__file__).parent.parent
WITHOUT_JAX = (
    "jaxmarl_llm",
    "jaxmarl_llm.messages",
    "jaxmarl_llm.errors",
    "jaxmarl_llm.config",
    "jaxmarl_llm.sandbox.judge",
    "jaxmarl_llm.recipes",
    "jaxmarl_llm.credit",
    "jaxmarl_llm.rollout.env_pool",
    "jaxmarl_llm.envs.assistant.env",
    "jaxmarl_llm.envs.coding.env",
    "jaxmarl_llm.envs.writing.env",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_modules_of_worker_processes_do_not_import_jax():
    code = f"""
import importlib, sys
for name in {WITHOUT_JAX}:
    importlib.import_module(name)
    if "jax" in sys.modules:
        print(name)
        break
"""
    assert run(code) == ""


@pytest.mark.parametrize("package", [jaxmarl_llm, credit, recipes], ids=lambda p: p.__name__)
def test_every_export_exists_and_is_listed(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(package.__all__) <= set(dir(package))
    listed = run(f"import {package.__name__} as p; print(sorted(set(dir(p)) - set(vars(p))))")
    assert listed == str(sorted(set(package.__all__) - {"__version__"}))  # none is imported before its use


def test_every_recipe_is_exported():
    files = {path.stem for path in ROOT.glob("jaxmarl_llm/recipes/*.py")} - {"__init__"}
    assert files == set(recipes.__all__)


def test_exports_are_the_objects_of_their_modules():
    from jaxmarl_llm.rollout import plans
    from jaxmarl_llm.runs.loop import fit

    assert jaxmarl_llm.fit is fit and jaxmarl_llm.plans is plans
    assert credit.assign.Credit is credit.Credit  # the module, which has a function of the same name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jaxmarl_llm' has no attribute 'fitt'"):
        jaxmarl_llm.fitt  # noqa: B018 the attribute is what is tested
    load, _ = lazy_exports("jaxmarl_llm", {"Missing": "jaxmarl_llm.errors"}, {})
    with pytest.raises(AttributeError, match="Missing"):
        load("Missing")
