"""Lazy exports of the package: what `import jaxmarl_llm` gives, and what it does not import."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxmarl_llm
from jaxmarl_llm import credit, recipes
from jaxmarl_llm._lazy import lazy_exports
from tests.test_layering import ROOMS

ROOT = Path(__file__).parent.parent
PACKAGES = [f"jaxmarl_llm.{room}" for room in ROOMS if (ROOT / "jaxmarl_llm" / room).is_dir()]
WITHOUT_JAX = (
    "jaxmarl_llm",
    *PACKAGES,
    "jaxmarl_llm.messages",
    "jaxmarl_llm.errors",
    "jaxmarl_llm.config",
    "jaxmarl_llm.sandbox.judge",
    "jaxmarl_llm.rollout.env_pool",
    "jaxmarl_llm.envs.assistant.env",
    "jaxmarl_llm.envs.call_team.env",
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


@pytest.mark.parametrize("name", ["jaxmarl_llm", *PACKAGES])
def test_every_export_exists_and_is_listed(name):
    package = importlib.import_module(name)
    exports = set(package.__all__)
    assert len(exports) == len(package.__all__)
    assert len(exports) >= 5
    for export in exports:
        assert getattr(package, export) is not None
    assert exports <= set(dir(package))


def test_no_export_is_imported_before_its_use():
    code = f"""
import importlib
for name in {["jaxmarl_llm", *PACKAGES]}:
    package = importlib.import_module(name)
    others = {PACKAGES}
    early = {{n for n in vars(package) if n in package.__all__ and f"{{name}}.{{n}}" not in others}}
    assert early <= {{"__version__"}}, (name, early)
    assert set(package.__all__) <= set(dir(package)), name
"""
    run(code)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_module_keeps_its_name(name):
    """An import of a module also sets the name in its package, so no function or class may have that name."""
    package = importlib.import_module(name)
    for export in {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__):
        assert package.__getattr__(export) is importlib.import_module(f"{name}.{export}")


@pytest.mark.parametrize("name", ["jaxmarl_llm", *PACKAGES])
def test_type_checkers_see_every_export(name):
    package = importlib.import_module(name)
    tree = ast.parse(Path(package.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    seen = {alias.name for node in block.body for alias in node.names}
    assert seen == set(package.__all__) - {"__version__"}


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
