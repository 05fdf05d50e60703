"""Figures of the papers' tables: estimators by enumeration, rewards of a last turn, and a table from kept samples."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.studies import paper_tables
from jaxmarl_llm.configs.magrpo import PAPER_RUNS
from jaxmarl_llm.envs.coding.pass_at_k import best_of_k, pass_at_k
from jaxmarl_llm.errors import ConfigError


@pytest.mark.parametrize("values", [[0, 1, 1, 0, 1, 0], [0.5, -0.5, 1.5, 1.5, 0.0], [2.0]], ids=str)
def test_the_best_of_k_is_the_mean_over_all_subsets(values):
    for k in range(1, len(values) + 1):
        subsets = [max(some) for some in itertools.combinations(values, k)]
        assert best_of_k(values, k) == pytest.approx(np.mean(subsets), abs=1e-12)


def test_the_best_of_k_passes_or_fails_as_pass_at_k():
    for right in range(16):
        for k in paper_tables.KS:
            assert best_of_k([1] * right + [0] * (15 - right), k) == pytest.approx(pass_at_k(15, right, k), abs=1e-12)
    for k in (0, 4):
        with pytest.raises(ValueError, match=f"best_of_k: expected 1 <= k <= n, got k={k} and n=3"):
            best_of_k([1, 2, 3], k)


def test_the_estimate_from_fifteen_samples_has_no_bias():
    """The mean over all outcomes of n samples with three rewards is the expected best of k fresh ones."""
    rewards, chances, n, k = (0.0, 1.0, 1.5), (0.5, 0.3, 0.2), 5, 3
    expect = lambda count, f: sum(
        math.prod(chances[i] for i in some) * f([rewards[i] for i in some])
        for some in itertools.product(range(3), repeat=count)
    )
    assert expect(n, lambda values: best_of_k(values, k)) == pytest.approx(expect(k, max), abs=1e-12)
    assert expect(n, lambda values: max(values[:k])) == pytest.approx(expect(k, max), abs=1e-12)  # the authors' form
    assert expect(n, max) > expect(k, max) + 0.05


def moves(rows):
    """Transitions of rows (task, parent, played, valid, reward of two roles)."""
    task, parent, played, valid, reward = (np.array(column) for column in zip(*rows))
    return SimpleNamespace(task=task, parent=parent, played=played, valid=valid, rewards={"tests": reward})


def test_an_episode_is_worth_its_last_valid_turn():
    found = paper_tables.last_rewards(
        moves([
            (0, -1, True, True, (0.1, 0.1)),  # goes on
            (0, -1, True, True, (0.2, 0.4)),  # ended early
            (0, -1, True, True, (0.3, 0.3)),  # goes on, to a turn without a verdict
            (1, -1, True, True, (0.5, 0.5)),
            (1, -1, False, False, (9.0, 9.0)),  # padding
            (0, 0, True, True, (0.6, 0.8)),
            (0, 2, True, False, (9.0, 9.0)),
        ]),
        3,
    )  # fmt: skip
    assert [task["tests"] for task in found] == [pytest.approx([0.3, 0.7]), [0.5], []]


def test_figures_are_shares_of_the_largest_rewards():
    task = {"structure": [1.0, 0.6], "syntax": [0.5, 0.0], "tests": [1.0, 0.0], "cooperation": [1.5, -0.5]}
    task["accuracy"] = [1.0, 0.0]
    found = paper_tables.figures("coding", [task])
    assert found["return"] == pytest.approx(100 * (4.0 + 0.1) / 2 / 4)
    assert [found[k] for k in ("structure", "syntax", "tests")] == pytest.approx([80, 50, 50])
    assert [found["cooperation"], found["coop@1"]] == pytest.approx([100 * (1.5 - 0.5) / 2 / 1.5] * 2)
    assert found["pass@1"] == 50 and math.isnan(found["pass@3"]) and math.isnan(found["coop@10"])
    text = {"words": [0.5], "ratio": [1.0], "unique": [0.25], "transitions": [0.2], "jaccard": [0.6], "rouge1": [9.0]}
    wrote = paper_tables.figures("writing", [text, {name: [] for name in text}])
    assert wrote == pytest.approx({"return": 85.0, "structure": 87.5, "coherence": 50.0, "consistency": 100.0})


def test_runs_are_named_by_their_environment():
    for name in PAPER_RUNS:
        from jaxmarl_llm.cli import config_flags

        env = config_flags.load(f"magrpo:{name}").env
        assert paper_tables.run_name(env.name, env.args) == name
    assert set(paper_tables.PUBLISHED) < set(PAPER_RUNS)
    for env, args in (("duet", {}), ("writing", {"task": "tldr", "max_turns": 2}), ("coding", {"benchmark": "own"})):
        with pytest.raises(ConfigError, match=r"^RUN: environment '.*' with .* is none of the paper's: tldr, arxiv"):
            paper_tables.run_name(env, args)


def test_the_command_prints_kept_samples_beside_the_published_figures(tmp_path, capsys):
    task = {"structure": [1.0] * 15, "syntax": [0.5] * 15, "tests": [1.0] * 15, "cooperation": [1.5] * 15}
    for seed, right in enumerate((3, 6)):
        solved = {**task, "accuracy": [1.0] * right + [0.0] * (15 - right)}
        record = {"run": "humaneval", "env": "coding", "step": 1000, "samples": 15, "tasks": [solved]}
        folder = tmp_path / str(seed)
        folder.mkdir()
        (folder / paper_tables.FILE).write_text(json.dumps(record))
    given = [str(tmp_path / str(seed)) for seed in (0, 1)]
    assert paper_tables.main(paper_tables.parser().parse_args(given)) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    head, ours, first, second = lines[0], *lines[2:]
    assert ours[0] == "| `humaneval`, 2 runs" and ours[1] == "100.000 ± 0.000"
    assert ours[head.index("pass@1")].startswith(f"{100 * (3 + 6) / 2 / 15:.3f} ± ")
    assert first[1] == "86.7" and second[1] == "83.7" and second[head.index("tests")] == "61.6"
    assert all(row[head.index("pass@1")] == "" for row in (first, second))  # nobody published it
    with pytest.raises(ConfigError, match=r"^--samples: .* has 15 of each task, not 4; delete it$"):
        paper_tables.main(paper_tables.parser().parse_args([*given, "--samples=4"]))
    with pytest.raises(ConfigError, match=r"^--samples: expected at least 1, got 0$"):
        paper_tables.main(paper_tables.parser().parse_args([*given, "--samples=0"]))
