"""How claims are decided and recorded: an effect of nothing does not hold, an unfinished statement is refused."""

import ast
import importlib
import json
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import systems
from experiments.claims import FAILS, HOLDS, OPEN, Claim, Finding, decide
from jaxmarl_llm.errors import ConfigError
from tests.test_layering import ROOT

AGAINST = {"control": "the other arm", "budget": "10 steps, both arms"}
BETTER = Claim("X", "one arm is better", "one minus the other", 0.0, **AGAINST)


@pytest.mark.parametrize("seeds", [5, 20])
def test_an_effect_of_nothing_holds_in_one_of_forty_experiments(seeds):
    """The upper half of a 95 % interval; the median above 0 would hold in half of them."""
    effects = np.random.default_rng(seeds).normal(size=(4000, seeds))
    verdicts = [decide(BETTER, row) for row in effects]
    assert 0.015 < verdicts.count(HOLDS) / 4000 < 0.035
    assert 0.015 < verdicts.count(FAILS) / 4000 < 0.035


@pytest.mark.parametrize(
    "delta, effect, verdict",
    [
        (0.0, [1.0, 1.1, 0.9], HOLDS),
        (2.0, [1.0, 1.1, 0.9], FAILS),
        (0.9, [1.0, 1.1, 0.9], OPEN),
        (-0.02, [0.0, 0.0, 0.0], HOLDS),  # no worse by more than 0.02
        (0.0, [0.0, 0.0, 0.0], OPEN),  # nothing is not more than nothing
        (0.0, [1.0, np.nan, 0.9], FAILS),
        (0.0, [1.0], OPEN),  # one seed has no interval
    ],
)
def test_verdicts(delta, effect, verdict):
    assert decide(Claim("L", "a", "b", delta, **AGAINST), effect) == verdict


def test_counts_have_to_be_right_in_every_seed():
    exact = Claim("U", "all of them", "1 where it is so", 1.0, **AGAINST)
    assert decide(exact, [1.0, 1.0]) == HOLDS and decide(exact, [1.0, 0.0]) == FAILS


@pytest.mark.parametrize(
    "broken",
    [
        ("Q", "a", "b", 0.0, "c", "d"),
        ("L", "", "b", 0.0, "c", "d"),
        ("L", "a", "b", float("nan"), "c", "d"),
        ("L", "a", "b", 0.0, "", "d"),
        ("L", "a", "b", 0.0, "c", ""),
    ],
)
def test_a_claim_that_is_not_whole_is_refused(broken):
    with pytest.raises(ConfigError, match="a text, an effect, a finite delta, a control and a budget"):
        Claim(*broken)


@pytest.mark.parametrize("name", systems.known())
def test_every_system_states_its_claims(name):
    module = importlib.import_module(f"experiments.claims.{name}")
    kinds = [claim.kind for claim in module.CLAIMS.values()]
    assert "L" in kinds and module.SEEDS >= 5 and module.STATUS in ("reproduced", "mechanism implemented")
    assert (ROOT / module.GOLDEN).is_file()


class Module:
    CLAIMS = {"better": BETTER}  # noqa: RUF012
    STATUS, GOLDEN = "reproduced", "tests/experiments/test_claims.py"


def test_findings_are_those_of_the_claims():
    rows = systems.checked("a", Module, [Finding("better", [1.0, 1.2], {"arm": [2.0, 2.2]})])
    assert rows[0]["verdict"] == OPEN and rows[0]["delta"] == 0.0 and rows[0]["values"] == [1.0, 1.2]
    for findings in ([], [Finding("worse", [1.0], {})]):
        with pytest.raises(ValueError, match=r"a: findings .* are not of the claims \['better'\]"):
            systems.checked("a", Module, findings)


def test_claims_are_committed_before_they_are_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "experiments" / "claims"
    folder.mkdir(parents=True)

    def git(*words):
        call = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(call, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (folder / "mine.py").write_text("CLAIMS = {}")
    with pytest.raises(ConfigError, match=r"experiments/claims/mine\.py has changes that are not committed"):
        systems.claimed_in("mine")
    git("add", "-A")
    git("commit", "-qm", "a claim")
    assert systems.claimed_in("mine") == git("log", "-1", "--format=%h")
    (folder / "mine.py").write_text("CLAIMS = {1: 2}")
    with pytest.raises(ConfigError, match="not committed"):
        systems.claimed_in("mine")
    git("commit", "-qam", "another claim")
    (tmp_path / "jaxmarl_llm").mkdir()
    (tmp_path / "jaxmarl_llm" / "code.py").write_text("changed = True")
    with pytest.raises(ConfigError, match=r"jaxmarl_llm/code\.py has changes"):
        systems.claimed_in("mine")


def test_the_commit_of_a_recorded_claim_is_older_than_its_run():
    """Both commits are in the history, the claim's before the run's."""
    if not (ROOT / ".git").exists():
        pytest.skip("no history: the tests run outside a checkout")
    file = ROOT / "docs/results/systems.json"
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    assert git("merge-base", "--is-ancestor", "HEAD", "HEAD~1").returncode == 1  # the check can fail
    for name, record in systems.recorded(file).items():
        done = git("merge-base", "--is-ancestor", record["claims_commit"], record["commit"])
        assert done.returncode == 0, f"{name}: {record['claims_commit']} {record['commit']} {done.stderr}"
        assert git("merge-base", "--is-ancestor", record["commit"], "HEAD").returncode == 0, name


def test_the_readme_counts_the_recorded_claims():
    findings = [f for r in systems.recorded(ROOT / "docs/results/systems.json").values() for f in r["findings"]]
    verdicts = [decide(systems.claim_of(f), f["values"]) for f in findings]
    holds, fails, undecided = map(verdicts.count, (HOLDS, FAILS, OPEN))
    said = f"Of {len(verdicts)} recorded claims {holds} hold, {fails} do not and {undecided} are not decided."
    assert said in (ROOT / "README.md").read_text()


def test_no_text_says_that_a_recorded_system_was_not_run():
    rows = (ROOT / "docs/what_works.md").read_text().splitlines()
    for name in systems.recorded(ROOT / "docs/results/systems.json"):
        recipe = ROOT / f"jaxmarl_llm/recipes/{name}.py"
        texts = [row for row in rows if row.startswith(f"| `{name}`")]
        texts += [ast.get_docstring(ast.parse(recipe.read_text())) or ""] if recipe.exists() else []
        for text in texts:
            said = re.search(r"no run was recorded|(nothing|none) is claimed|not run\b", " ".join(text.split()), re.I)
            assert said is None, f"{name}: {said}"


RECORD = {
    "status": "reproduced",
    "golden": {"file": "tests/x.py", "holds": False},
    "claims_commit": "abc",
    "findings": [],
    "seeds": 3,
    "minutes": 1.5,
    "date": "2026-01-01",
    "commit": "def",
}


def test_what_another_process_records_meanwhile_is_kept(tmp_path, monkeypatch):
    file, (mine, other) = tmp_path / "systems.json", systems.known()[:2]
    by_medians = {key: value for key, value in RECORD.items() if key != "claims_commit"}

    def record(name, seeds, say):
        file.write_text(json.dumps({other: RECORD, "old": by_medians}))
        return {**RECORD, "minutes": 2.5}

    monkeypatch.setattr(systems, "record", record)
    given = SimpleNamespace(records=str(file), page=str(tmp_path / "systems.md"), run=[mine], seeds=None)
    systems.main(None, None, given)
    found = json.loads(file.read_text())
    assert set(found) == {mine, other} and found[mine]["minutes"] == 2.5
    assert (tmp_path / "systems.md").read_text().count("claims `abc`") == 2


def test_the_table_shows_the_effect_beside_delta():
    rows = systems.checked("a", Module, [Finding("better", [1.0, 1.1, 0.9], {"arm": [2.0, 2.2, 2.1]})])
    lines = systems.table({systems.known()[0]: {**RECORD, "findings": rows}}).splitlines()
    assert "**does not hold** | 3 seeds, 1.5 min, 2026-01-01, `def`; claims `abc` |" in lines[2]
    assert "| the other arm; 10 steps, both arms | one minus the other: 1.000 ± 0.248 | 0 | holds |" in lines[3]
    assert lines[3].endswith("| arm 2.100 ± 0.248 |")
    assert lines[4].endswith("not recorded yet | | | | | |")
