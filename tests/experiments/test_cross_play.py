"""Cross-play: a state with roles of several runs, the record, intervals, and the page."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.studies import cross_play, real_text, text_teams
from experiments.studies.text_teams import Arm, TextTeam
from jaxmarl_llm.agents.team import make_team
from jaxmarl_llm.config import replace_path
from jaxmarl_llm.configs import magrpo
from jaxmarl_llm.errors import ConfigError

ROLES = ("speaker", "listener")


def tiny():
    cfg = magrpo.reference_game_tiny()
    team = dataclasses.replace(cfg.team, parameter_sharing="lora", lora_rank=2)
    return dataclasses.replace(cfg, team=team)


TEAM = TextTeam(tiny, "chosen", text_teams._claim("x", 0.05), {"team": Arm()}, crossed=ROLES)


@functools.cache
def states():
    """The team, and a state of each of two runs over one backbone: every number of a run's roles is its own."""
    cfg = tiny()
    recipe = real_text.make(cfg)
    first = recipe.init(0)
    recipe.env_runner.close()
    filled = lambda role, number: jax.tree.map(lambda x: jnp.full_like(x, number), first.params["agents"][role])
    made = {
        seed: first.replace(
            params={**first.params, "agents": {role: filled(role, 10 * seed + i) for i, role in enumerate(ROLES)}},
            memory={role: jnp.full(3, 10 * seed + i) for i, role in enumerate(ROLES)},
        )
        for seed in (1, 2)
    }
    return make_team(cfg.team, cfg.env.roles()), made


def test_each_role_comes_whole_from_its_own_run():
    """Adapter and memory of the speaker are of run 1, and those of the listener of run 2."""
    team, runs = states()
    state = cross_play.mixed(team, {"speaker": runs[1], "listener": runs[2]})
    for role, number in (("speaker", 10), ("listener", 21)):
        leaves = jax.tree.leaves((state.params["agents"][role], state.memory[role]))
        assert len(leaves) > 8 and all((np.asarray(leaf) == number).all() for leaf in leaves), role
    assert set(state.params["agents"]) == set(state.memory) == set(ROLES)
    assert state.params["shared"] is runs[1].params["shared"]
    bare = cross_play.mixed(team, {role: run.replace(memory={}) for role, run in zip(ROLES, runs.values())})
    assert bare.memory == {}


def test_runs_that_cannot_be_mixed_are_refused():
    team, runs = states()
    changed = jax.tree.map(lambda x: x + 1, runs[2].params["shared"])
    other = runs[2].replace(params={**runs[2].params, "shared": changed})
    copied = runs[2].replace(params={**runs[2].params, "shared": jax.tree.map(jnp.copy, runs[2].params["shared"])})
    cross_play.mixed(team, {"speaker": runs[1], "listener": copied})
    one = make_team(dataclasses.replace(tiny().team, parameter_sharing="shared"), ROLES)
    for by, given, said in (
        (team, {"speaker": runs[1], "listener": other}, "cross-play: the runs have different backbones"),
        (team, {"speaker": runs[1]}, "cross-play: expected states of speaker, listener, got speaker"),
        (one, {"speaker": runs[1], "listener": runs[2]}, "config.team.parameter_sharing: expected lora"),
    ):
        with pytest.raises(ConfigError) as error:
            cross_play.mixed(by, given)
        assert str(error.value).startswith(said) and "\n" not in str(error.value)


def recorded(seeds, tasks=4):
    """A record of the arm `team`: a run of seed s reached s after stage 0 and s + 0.5 after RL on every task."""
    own = {str(s): {"stage 0": {"chosen": [float(s)] * tasks}} for s in seeds}
    after = {str(s): {"RL": {"chosen": [s + 0.5] * tasks}} for s in seeds}
    return {"starts": {"start": own}, "arms": {"team": after}}


def test_all_ordered_pairs_are_played_once_and_kept(monkeypatch, tmp_path):
    """The configuration is of the speaker's seed. What is recorded is neither read nor played again."""
    team, runs = states()
    read, played, saved = [], [], []
    monkeypatch.setattr(
        cross_play, "loaded", lambda name, t, seed, place, work, data: read.append((seed, place)) or runs[seed]
    )

    def measure(cfg, state):
        numbers = [int(jax.tree.leaves(state.params["agents"][role])[0].ravel()[0]) for role in ROLES]
        played.append((cfg.seed, *numbers))
        return {"chosen": [float(len(played))]}, []

    monkeypatch.setattr(real_text, "measure", measure)
    done = recorded((1, 2))
    cross_play.run("tiny", TEAM, done, tmp_path, lambda: saved.append(1))
    assert read == [(s, place) for place in ("stage 0", "RL") for s in (1, 2)] and len(saved) == 4
    assert played == [(1, 10, 21), (2, 20, 11)] * 2
    assert done["cross_play"] == {
        "stage 0": {"1-2": {"chosen": [1.0]}, "2-1": {"chosen": [2.0]}},
        "RL": {"1-2": {"chosen": [3.0]}, "2-1": {"chosen": [4.0]}},
    }
    del done["cross_play"]["RL"]["2-1"]
    cross_play.run("tiny", TEAM, done, tmp_path, lambda: saved.append(1))
    assert played[4:] == [(2, 20, 11)] and len(saved) == 5 and len(read) == 6


def test_missing_runs_are_named_with_the_command(tmp_path):
    for seeds in ((), (0,)):
        with pytest.raises(ConfigError, match=rf"^--run: expected two recorded seeds .* got {len(seeds)}; .*=tiny"):
            cross_play.run("tiny", TEAM, recorded(seeds), tmp_path, pytest.fail)
    (tmp_path / "seed_0" / "start" / "checkpoints").mkdir(parents=True)  # of a run that was stopped at once
    for place, folder in (("stage 0", "start"), ("RL", "team")):
        with pytest.raises(ConfigError) as error:
            cross_play.loaded("tiny", TEAM, 0, place, tmp_path / "tiny", None)
        assert str(error.value).startswith(f"--work: {tmp_path}/tiny/seed_0/{folder} holds no finished run; ")
        command = f"real_text --team=tiny --run=team --seeds=1 --work={tmp_path} "
        assert command in str(error.value) and "\n" not in str(error.value)
    assert not cross_play._finished(tmp_path / "seed_0" / "start", 2)
    with pytest.raises(ConfigError, match=r"^--team: team 'a' has no roles to cross; expected one of reference_game$"):
        cross_play.crossed_roles("a", dataclasses.replace(TEAM, crossed=None))


@pytest.mark.slow
def test_a_finished_run_is_read_and_an_unfinished_one_is_not_continued(tmp_path):
    """Stage 0 of one step of two is no finished run. The state that is read is the one that training left."""
    short = dataclasses.replace(TEAM, config=lambda: replace_path(replace_path(tiny(), "sft.steps", 1), "sft.batch", 2))
    longer = dataclasses.replace(TEAM, config=lambda: replace_path(short.config(), "sft.steps", 2))
    folder = tmp_path / "tiny" / "seed_0" / "start"
    state = real_text.begun(text_teams.configuration(short, Arm(), 0), folder)
    read = cross_play.loaded("tiny", short, 0, "stage 0", tmp_path / "tiny", None)
    for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(read.params), strict=True):
        np.testing.assert_array_equal(one, other)
    for team, place in ((longer, "stage 0"), (short, "RL")):
        with pytest.raises(ConfigError, match="holds no finished run"):
            cross_play.loaded("tiny", team, 0, place, tmp_path / "tiny", None)


def test_an_interval_draws_seeds_and_tasks():
    """Pairs of one speaker are alike: more tasks do not make the interval narrow, and few tasks make it wide."""
    pairs = {(i, j): np.full(500, float(i)) for i in range(3) for j in range(3) if i != j}
    mean, low, high = cross_play.interval(pairs)
    assert (mean, low, high) == (1, 0.5, 1.5)  # two seeds of three, drawn together
    rng = np.random.default_rng(0)
    noisy = {pair: rng.normal(0, 1, 40) for pair in ((0, 1), (1, 0))}
    mean, low, high = cross_play.interval(noisy)
    assert mean == pytest.approx(np.mean([*noisy.values()])) and 0.2 < high - low < 0.8
    assert cross_play.interval({pair: np.full(5, 2.0) for pair in noisy}) == (2.0, 2.0, 2.0)


def test_the_page_has_a_line_for_each_place():
    """A pair is compared with the speaker's own seed, task by task: a loss that is equal on all tasks has no spread."""
    done = recorded((0, 2))
    rows = {0: np.array([0.0, 1.0, 0.0, 1.0]), 2: np.array([0.0, 0.0, 1.0, 1.0])}
    done["arms"]["team"] = {str(s): {"RL": {"chosen": row.tolist()}} for s, row in rows.items()}
    done["cross_play"] = {"RL": {"0-2": {"chosen": (rows[0] - 0.25).tolist()}}}  # the other pair is still missing
    text = cross_play.section("tiny", TEAM, done)
    assert "| stage 0 | not recorded yet | | | |" in text
    line = next(line for line in text.split("\n") if line.startswith("| RL |"))
    same, crossed, lost, pairs = (cell.strip() for cell in line.split("|")[2:-1])
    assert same.startswith("0.500 (0.") and crossed.startswith("0.250 (") and pairs == "1"
    assert lost == "-0.250 (-0.250 to -0.250)"
    assert "The speaker of one seed with the listener of another" in text


def test_the_command_refuses_before_it_plays_and_writes_its_own_section(tmp_path, monkeypatch):
    monkeypatch.setattr(cross_play, "run", lambda *given: pytest.fail("a pair was played"))
    monkeypatch.setattr(cross_play, "TEAMS", {"tiny": TEAM, "other": dataclasses.replace(TEAM, crossed=None)})
    page = tmp_path / "page.md"
    page.write_text("<!-- tiny -->\n<!-- /tiny -->\n")
    files = {"records": str(tmp_path / "records.json"), "page": str(page), "work": "work", "data": None}
    flags = lambda team, run: types.SimpleNamespace(team=team, run=run, **files)
    for team, said in (
        ("tyny", "--team: no team 'tyny'; did you mean 'tiny'"),
        ("other", "--team: team 'other' has no roles to cross; expected one of tiny"),
        ("tiny", "no section between <!-- tiny cross-play -->"),
    ):
        with pytest.raises(ConfigError) as error:
            cross_play.main(None, None, flags(team, True))
        assert str(error.value).startswith(said)
    page.write_text("<!-- tiny -->\nkept\n<!-- /tiny -->\n<!-- tiny cross-play -->\nold\n<!-- /tiny cross-play -->\n")
    cross_play.main(None, None, flags("tiny", False))
    assert "old" not in page.read_text() and "kept" in page.read_text()
    assert page.read_text().count("not recorded yet") == 2
