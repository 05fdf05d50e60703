"""Who plays with whom: casts by turn in both engines, partners from another run, solo, and the gap between them."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig, with_partner
from jaxmarl_llm.cli import evaluate, partners
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.recipes import magrpo
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.env_pool import EnvPool
from jaxmarl_llm.rollout.host import HostSettings, play
from jaxmarl_llm.rollout.plans import flat
from jaxmarl_llm.runs import loop
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.types import FROZEN, POLICY
from tests import toys

KEY = jax.random.key(0)
PRISONERS = matrix.Config(game="prisoners", rounds=2)
TINY = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
# Relay: nobody, the first seat for one turn, both seats for one turn, the second seat throughout.
RELAY = np.zeros((4, 2, 2), np.int32)
RELAY[1, :1, 0] = RELAY[2, :1] = RELAY[3, :, 1] = 1


@functools.cache
def company():
    own = toys.team(matrix.ROLES, 1, True)
    scaled = jax.tree.map(lambda x: 1.7 * x, toys.params(own, 1))
    return with_partner(own, toys.params(own, 0), own, scaled)


@functools.cache
def rollout():
    return jax.jit(make_rollout(company()[0], matrix.make(PRISONERS), flat(2), Sampling()))


@functools.cache
def rolled(how):
    casts = {"turns": RELAY, "none": None, "own": RELAY * 0, "tasks": RELAY[:, 0], "partner": RELAY * 0 + 1}
    tasks, assignment = {"game": np.zeros(4, np.int32)}, casts[how]
    given = None if assignment is None else jnp.array(assignment)
    return jax.device_get(rollout()(company()[1], {}, tasks, KEY, jnp.int32(0), given))


def test_a_cast_may_depend_on_the_turn():
    """Every step is by the model that the assignment names at its turn; what opponent models play is frozen."""
    tree = rolled("turns")
    n = tree.nodes
    want = RELAY[n.task, n.turn, n.role]
    team, _ = company()
    assert [m.name for m in team.models] == ["team", "team-partner"] and team.roles[0].opponent_models == (
        "team-partner",
    )
    np.testing.assert_array_equal(n.model, want)
    np.testing.assert_array_equal(tree.steps.source, np.where(want[tree.steps.node], FROZEN, POLICY))
    first = n.turn == 0  # equal prompts and keys: samples are those of the model alone
    for who, alone in ((0, "own"), (1, "partner")):
        rows = (first & (want == who))[tree.steps.node]
        np.testing.assert_array_equal(tree.steps.tokens[rows], rolled(alone).steps.tokens[rows])
        np.testing.assert_allclose(tree.steps.logprobs[rows], rolled(alone).steps.logprobs[rows], atol=1e-5)
    assert not np.allclose(rolled("own").steps.logprobs, rolled("partner").steps.logprobs, atol=1e-3)
    np.testing.assert_array_equal(digests(rolled("own").steps), digests(rolled("none").steps))


@pytest.mark.parametrize("how", ("turns", "tasks"))
def test_both_engines_cast_alike_by_turn(how):
    team, params = company()
    assignment = RELAY if how == "turns" else RELAY[:, 0]
    with EnvPool(functools.partial(toys.text_game, PRISONERS), workers=0) as pool:
        settings = HostSettings(flat(2), Sampling(), max_prompt=16, assignment=assignment)
        host = play(team, params, pool, range(4), KEY, settings).tree

    def table(tree):
        n, s = tree.nodes, tree.steps
        return sorted(
            (int(n.task[k]), int(n.turn[k]), int(n.role[k]), int(n.model[k]), int(s.source[c]),
             n.tokens[k, : n.length[k]].tolist(), s.tokens[c, : s.length[c]].tolist())
            for c in np.flatnonzero(s.valid) for k in [s.node[c]]
        )  # fmt: skip

    assert table(rolled(how)) == table(host) and len(table(host)) == 4 * 2 * 2 * 2
    assert {row[3] for row in table(host)} == {0, 1}


def test_a_partner_must_fit():
    own = toys.team(matrix.ROLES, 1, True)
    params = toys.params(own)
    with pytest.raises(ConfigError, match="partner: expected a team with the roles first, second, got a, b"):
        with_partner(own, params, toys.team(), toys.params(toys.team()))
    team, both = with_partner(own, params, own, params)
    with pytest.raises(ConfigError, match="has the name of an opponent model, 'team-partner'"):
        with_partner(team, both, own, params)
    model = dataclasses.replace(own.models[0], base="backbone", tokenizer=toys.TOKENIZER)
    lora = dataclasses.replace(own, models=(model,))
    team, both = with_partner(lora, {"shared": {"backbone": 1}, "agents": {"team": 2}}, lora,
                              {"shared": {"backbone": 3}, "agents": {"team": 4}})  # fmt: skip
    assert team.models[1].base == "backbone-partner" and team.models[0].base == "backbone"
    assert both == {"shared": {"backbone": 1, "backbone-partner": 3}, "agents": {"team": 2, "team-partner": 4}}

    class Other(type(toys.TOKENIZER)):
        name = "other"

    deaf = dataclasses.replace(own, models=(dataclasses.replace(own.models[0], tokenizer=Other()),))
    with pytest.raises(ConfigError, match="role 'first': expected an opponent model with the tokenizer"):
        with_partner(own, params, deaf, params)


def test_seat_assignments_of_the_arms():
    got = {name: assignment.tolist() for name, assignment in partners.seat_assignments(2, 3, 2).items()}
    assert got == {
        "partner": [1, 1],
        "pair+partner": [0, 1],
        "partner+pair": [1, 0],
        "relay(2)": [[1, 0], [1, 0], [0, 0]],
    }
    without_relay = partners.seat_assignments(3, 3, 0)
    assert "relay(0)" not in without_relay and without_relay["pair+partner"].tolist() == [0, 1, 1]


def test_figures_and_gaps_by_hand():
    found = partners.figures(
        {
            "pair": {"accuracy": np.array([0.0, 1.0, np.nan, 0.0, 1.0])},
            "solo": {"accuracy": np.array([1.0, 1.0, 1.0, 0.0])},
        }
    )
    half = lambda x: 1.96 * np.std(x, ddof=1) / len(x) ** 0.5
    pair, solo = half([0, 1, 0, 1]), half([1, 1, 1, 0])
    assert found["pair"]["accuracy"] == pytest.approx((0.5, pair)) and "gap" not in found["solo"]
    assert found["pair"]["gap"] == pytest.approx((0.25, (pair**2 + solo**2) ** 0.5))
    lines = partners.table(found).split("\n")
    assert lines[0].split() == ["accuracy", "gap"] and lines[1].startswith("pair              0.500 ± 0.566")
    only = partners.figures({"pair": {"return": np.array([1.0, 2.0])}, "solo": {"return": np.array([4.0, 4.0])}})
    assert only["pair"]["gap"][0] == 2.5  # of the return where nothing is an accuracy


# The command


def config(seed=0, **args):
    return magrpo.Config(
        seed=seed,
        steps=0,
        batch=4,
        group=2,
        team=TeamConfig(parameter_sharing="shared", backbone=TINY, max_new_tokens=1, remat=False),
        env=EnvConfig("maze", {"size": 3, "shortest": 2, "longest": 3, "moves": 2, "tasks": 16, **args}, eval_tasks=24),
        reward={"accuracy": 1.0, "progress": 1.0},
        sft=SFT(steps=60, batch=32, samples=256),
        run=RunConfig(tensorboard=False),
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "report", lambda workdir: None)  # nothing to draw
        for name, cfg in {"a": config(), "b": config(seed=1)}.items():
            loop.fit(cfg, magrpo.make(cfg), folder / name)
    return folder


class Flags(dict):
    """What absl gives: ``flags.relay``, and ``flags["relay"].value``."""

    def __init__(self, **given):
        values = {
            "env": None,
            "partner": None,
            "solo": None,
            "relay": 0,
            "eval_tasks": None,
            "out": None,
            "mesh": ["1", "1", "1"],
            "best": False,
            **given,
        }
        super().__init__({k: type("Flag", (), {"value": v})() for k, v in values.items()})
        self.__dict__.update(values)


@pytest.mark.slow
def test_evaluate_reports_pairs_relay_solo_and_gaps(runs, tmp_path, capsys):
    out = tmp_path / "figures.json"
    flags = Flags(partner=str(runs / "b"), solo=str(runs / "b"), relay=1, out=str(out))
    evaluate.main(None, str(runs / "a"), flags)
    printed, figures = capsys.readouterr().out, json.loads(out.read_text())
    teams = figures["teams"]
    assert list(teams) == ["pair", "partner", "pair+partner", "partner+pair", "relay(1)", "solo"]
    assert all(line in printed for line in ("relay(1) ", "eval/success", "gap"))
    for name, got in teams.items():
        assert set(got) == {"accuracy", "progress", "agreement", "return"} | ({"gap"} if name != "solo" else set())
        assert got["return"][0] == pytest.approx(got["accuracy"][0] + got["progress"][0])
        if name != "solo":
            assert got["gap"][0] == pytest.approx(teams["solo"]["accuracy"][0] - got["accuracy"][0])
    # The pair is what the run's own evaluation plays; the partner's pair plays the same mazes with its own models.
    cfg, recipe, state = evaluate.open_run(str(runs / "a"))
    assert teams["pair"]["progress"][0] == pytest.approx(figures["eval/progress"])
    agents = evaluate.open_run(str(runs / "b"))[2].params["agents"]
    other = partners.OpenRun(
        cfg, recipe.team, recipe.env_runner, state.replace(params={**state.params, "agents": agents})
    )
    assert teams["partner"]["progress"][0] == pytest.approx(partners.by_task(*other)["progress"].mean())
    assert len({round(got["progress"][0], 6) for got in teams.values()}) > 2


def test_a_run_plays_alone_itself(runs):
    cfg, recipe, state = evaluate.open_run(str(runs / "a"))
    run = partners.without_memory(cfg, recipe, state, "solo")
    lone = partners.single_agent(run)
    assert lone.cfg.env.args["agents"] == 1 and [r.name for r in lone.team.roles] == ["one"]
    assert partners.by_task(*lone)["accuracy"].shape == (24,) and partners.single_agent(lone) is lone
    np.testing.assert_array_equal(lone.env_runner.held_out["walls"], run.env_runner.held_out["walls"])


def test_what_cannot_be_compared_is_one_line(runs, tmp_path):
    run = str(runs / "a")
    for flags, message in (
        (Flags(relay=2), "--relay: expected a --partner"),
        (Flags(partner=str(tmp_path)), "--partner: .* holds no checkpoints"),
        (Flags(solo=str(tmp_path)), "--solo: .* holds no checkpoints"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate.main(None, run, flags)
    cfg, recipe, state = evaluate.open_run(run)
    with pytest.raises(ConfigError, match="--partner: magrpo on 'maze' plays with a memory"):
        partners.without_memory(cfg, recipe, state.replace(memory={"one": jnp.zeros(3)}), "partner")
    duet = partners.OpenRun(dataclasses.replace(cfg, env=EnvConfig("duet")), recipe.team, recipe.env_runner, state)
    with pytest.raises(ConfigError, match="--solo: environment 'duet' has no form for one agent"):
        partners.single_agent(duet)
    with pytest.raises(ConfigError, match="--solo: expected a run of 'maze', got one of 'duet'"):
        partners.evaluate_arms(partners.without_memory(cfg, recipe, state, "workdir"), None, duet, 0)
