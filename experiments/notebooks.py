"""Execute the notebooks, and keep or compare their outputs:

    python -m experiments.notebooks                            compare the printed text with what is stored
    python -m experiments.notebooks --store                    write the outputs into the notebooks
    python -m experiments.notebooks --only=04_your_own_task    some of them

Text is compared, and that figures are there; pixels are not. A cell with the tag `varies` prints times, which are not
compared. Samples are equal on one kind of processor only, so `make notebooks` runs the notebooks without comparing.
Exit code 1 where an output differs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from absl import flags

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.config import one_of

FOLDER = Path(__file__).parents[1] / "notebooks"
SECONDS = 900  # of one cell, at most
FIGURE = "<figure>"
# Of the kernels, as of `make notebooks`.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"}


def executed(path: Path) -> Any:
    """The notebook at ``path`` with the outputs of a new kernel, without times and standard error."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS, record_timing=False, resources={"metadata": {"path": FOLDER}}).execute()
    for cell in code_cells(notebook):
        cell["outputs"] = [o for o in cell["outputs"] if o.get("name") != "stderr"]
        for output in cell["outputs"]:
            output.get("metadata", {}).clear()
    notebook["metadata"] = {"kernelspec": notebook["metadata"]["kernelspec"], "language_info": {"name": "python"}}
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    """The cells of ``notebook`` that hold code."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: Any) -> list[str]:
    """What the outputs of a cell show: their text, or FIGURE for a picture. Pieces of one stream are one text."""
    shown: list[str] = []
    stream = False
    for output in cell["outputs"]:
        data = output.get("data", {})
        text = "".join(FIGURE if "image/png" in data else output.get("text") or data.get("text/plain", ""))
        if stream and output["output_type"] == "stream":
            shown[-1] += text
        else:
            shown.append(text)
        stream = output["output_type"] == "stream"
    return shown


def differences(stored: Any, new: Any) -> list[str]:
    """One line for each cell of ``new`` whose outputs are not those of ``stored``."""
    found = []
    for number, (old, cell) in enumerate(zip(code_cells(stored), code_cells(new), strict=True)):
        was, now = printed(old), printed(cell)
        if "varies" in cell["metadata"].get("tags", ()):
            was, now = [str(len(was))], [str(len(now))]
        if was != now:
            found.append(f"code cell {number}: {was!r:.300} is now {now!r:.300}")
    return found


def main(cfg: object, workdir: str | None, flag_values: flags.FlagValues) -> int:
    """Run the command. Returns 1 where an output differs."""
    import nbformat

    os.environ.update(ENVIRONMENT)
    names = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    problems = 0
    for name in [one_of("--only", name, names) for name in flag_values.only] or names:
        path = FOLDER / f"{name}.ipynb"
        new = executed(path)
        if flag_values.store:
            nbformat.write(new, path)
            print(f"{name}: stored, {path.stat().st_size} bytes", flush=True)
            continue
        lines = differences(nbformat.read(path, as_version=4), new)
        problems += len(lines)
        print(f"{name}: {'as stored' if not lines else '; '.join(lines)}", flush=True)
    return min(problems, 1)


if __name__ == "__main__":
    flags.DEFINE_bool("store", False, "Write the outputs into the notebooks.")
    flags.DEFINE_list("only", [], "Notebooks; default: all.")
    config_flags.run(main, required=())
