"""The papers' runs fit on the four machines of docs/paper_runs.md, and the page has the table of today's forms."""

import pytest

from experiments.studies import paper_meshes
from tests.test_config_fields import ROOT


@pytest.mark.parametrize("machine", paper_meshes.MACHINES)
@pytest.mark.parametrize("run", paper_meshes.RUNS)
def test_every_run_of_a_paper_fits(run, machine):
    found = paper_meshes.row(run, machine)
    assert found.proposal.fits and found.proposal.memory.peak <= found.machine.chip.memory, found.flags
    if run.startswith("magrpo"):
        assert not found.changes, "a run of MAGRPO fits as it is configured"


def test_changes_of_a_run_are_tried_from_the_least_on():
    tried = list(paper_meshes.settings(4))
    lora = {"team.parameter_sharing": "lora"}
    assert tried == [{}, {"batch": 2}, {"batch": 1}, lora, lora | {"batch": 2}, lora | {"batch": 1}]
    found = paper_meshes.row("joyagents_r1:qwen2_5_3b", "h100:1")
    assert found.changes["team.parameter_sharing"] == "lora" and found.flags.startswith("--config.mesh.data=1 ")
    changes = f"--config.team.parameter_sharing=lora --config.batch={found.changes['batch']}"
    assert found.flags.endswith(f"{changes} --config.optimizer.offload=true")


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "paper_runs.md").read_text()
    kept = page[page.index(paper_meshes.BEGIN) : page.index(paper_meshes.END)]
    assert paper_meshes.table() in kept, "python -m experiments.studies.paper_meshes writes it"
