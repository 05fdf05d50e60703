"""AFM: the loss mask of a written trace, harvested episodes read back to the same ids, the phases, bad input."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.configs.afm import VARIANTS, alone, get_config, tiny
from jaxmarl_llm.agents.team import Backbone, TeamConfig, init_params, make_team
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.envs.facts import array as facts
from jaxmarl_llm.envs.facts import tags
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.models import scripted
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.recipes import afm
from jaxmarl_llm.rollout.array import make_rollout
from jaxmarl_llm.rollout.env_runner import Demonstrations
from jaxmarl_llm.rollout.plans import single
from jaxmarl_llm.runs.compiled import make_program
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.algorithm import unequal_groups
from jaxmarl_llm.training.config import SFT, Offline
from jaxmarl_llm.training.harvest import Said, as_sequence, paths
from jaxmarl_llm.training.learner import make_learner
from jaxmarl_llm.training.optimizers import Optimizer
from jaxmarl_llm.training.supervised import SFT_LOSS, Supervised
from jaxmarl_llm.types import Role, Team
from tests.envs.facts_episodes import texts_of
from tests.envs.test_facts_tags import Twin, play, shown
from tests.recipes.test_fidelity import Table

pytestmark = pytest.mark.usefixtures("numpy_tables")

BYTES = ByteTokenizer()
AGENT = "agent"
FORMS = {players: facts.Config(protocol="tags", tags=tags.Settings(players=players)) for players in tags.PLAYERS}
N = 48


def ids(text):
    """Tokens of a text in which / is eos."""
    return np.array([BYTES.EOS if c == "/" else ord(c) for c in text], np.int32)


# -- one sequence ------------------------------------------------------------------------------------------------------

TRACE = [
    ("Da12>", "Pa1,*2/"),
    ("La12>Pa1,*2/", "Sa1/"),
    ("La12>Pa1,*2/Sa1/a1c>", "S*2/"),
    ("Wa12>Pa1,*2/Sa1/a1c>S*2/c2x>", "Ax/"),
]


def written(trace):
    return [Said(k, ids(prompt), ids(said)) for k, (prompt, said) in enumerate(trace)]


def test_the_loss_mask_of_a_written_trace():
    prompt, said, learned = as_sequence(written(TRACE), ids("G"))
    assert shown(prompt, 99) == "Ga12>"
    assert shown(said, 99) == "Pa1,*2/Sa1/a1c>S*2/c2x>Ax/"
    assert "".join("01"[x] for x in learned.tolist()) == "11111111111000011110000111"


FAULTS = {
    "another completion": [*TRACE[:1], ("La12>Pa1,*2/", "Sa2/"), *TRACE[2:]],
    "another observation": [*TRACE[:2], ("La12>Pa1,*2/Sa1/a1d>", "S*2/"), TRACE[3]],
    "a shorter end": [*TRACE[:3], ("Wa12>", "Ax/")],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_prompts_that_do_not_show_what_was_before_are_refused(fault):
    with pytest.raises(ConfigError, match=r"^harvest: a prompt of the path does not show what was read and written"):
        as_sequence(written(FAULTS[fault]), ids("G"))


def speak(tokens, length):
    """A script of all roles: the perfect segment; but a wrong answer where the question names relation 1."""
    here = jnp.arange(len(tokens)) < length
    hops = jnp.argmax(tokens == ord(">")) - 2
    first, second = [ord("*"), tokens[3]], [tokens[1], tokens[2]]
    searches = (here & (tokens == ord("S"))).sum()
    two = hops == 2
    end = jnp.int32(BYTES.EOS)
    comma = [jnp.where(two, ord(","), end), ord("*"), tokens[3], end]
    plan = jnp.array([ord("P"), *second, *comma])
    search = jnp.array([ord("S"), *jnp.where(searches == 0, jnp.array(second), jnp.array(first)), end, 0, 0, 0])
    wrong = (tokens[1:4] == ord("1")).any()
    answer = jnp.array([ord("A"), jnp.where(wrong, ord("z"), tokens[length - 2]), end, 0, 0, 0, 0])
    planned = (here & (tokens == ord("P"))).any()
    return jnp.where(planned, jnp.where(searches < hops, search, answer), plan)


@functools.cache
def played(players):
    """An episode of a scripted team, or of a scripted agent, on each task."""
    model = scripted.make_model("m", speak, 7, BYTES)
    team = Team(tuple(Role(role, "m", 7) for role in tags.ROLES), (model,))
    rollout = jax.jit(make_rollout(team, facts.make(FORMS[players]), single(), Sampling()))
    params = {"shared": {}, "agents": {"m": {}}}
    return jax.device_get(rollout(params, {}, facts.make_tasks(FORMS[players], n=N), jax.random.key(0), 0))


def rows_of(told):
    return [
        (told.tokens[k, : told.length[k]], told.completions[k, :n], told.loss_mask[k, :n])
        for k, n in enumerate(told.completion_length)
    ]


def segments(prompt, said, learned):
    """A sequence as turns (prompt, segment): a segment is a run of learned tokens behind an observation, up to eos."""
    whole, out, at = np.concatenate([prompt, said]), [], len(prompt)
    while at < len(whole):
        if not learned[at - len(prompt)]:
            at += 1
            continue
        end = at + int(np.argmax(whole[at:] == BYTES.EOS)) + 1
        out.append((whole[:at], whole[at:end]))
        at = end
    return out


def test_right_episodes_read_back_to_the_same_ids():
    """The agent's environment, told the segments of a harvested sequence, asks with the ids of the sequence."""
    cfg, rows, tree = FORMS["agent"], facts.make_tasks(FORMS["team"], n=N), played("team")
    known, tasks = texts_of(rows), tree.transitions.task[afm.right(tree)]
    good = [i for i in range(N) if "1" not in known[i].question]
    assert 0 < len(good) < N and sorted(tasks.tolist()) == good
    told = rows_of(afm.sequences(tree))
    turns, twins, at = [segments(*row) for row in told], [Twin(known[i], cfg.tags) for i in tasks], [0] * len(good)
    text = lambda segment: shown(segment, len(segment) - 1)
    speak = lambda turn, prompts: [(text(own[min(turn, len(own) - 1)][1]), True) for own in turns]
    for k, _, prompt, said, length, pay, done in play(cfg, {name: x[tasks] for name, x in rows.items()}, speak, 7):
        asked, segment = turns[k][at[k]]
        assert (prompt, shown(said, length)) == (shown(asked, 99), shown(segment, 99))
        twins[k].act(text(segment), True)
        at[k] += 1
        assert not done or pay["em"][tags.AGENT] == 1
    assert at == [len(own) for own in turns]
    for i, twin, own, (prompt, said, learned) in zip(tasks, twins, turns, told, strict=True):
        assert shown(prompt, 99) == f"G{known[i].question}>"
        assert shown(np.concatenate([prompt, said]), 99) == "G" + twin.text
        assert learned.sum() == sum(len(segment) for _, segment in own)


def test_the_sequence_of_the_team_is_that_of_an_agent_who_writes_alike():
    """Both forms of the environment lead to the same ids and the same mask."""
    for a, b in zip(*(rows_of(afm.sequences(played(players))) for players in tags.PLAYERS), strict=True):
        for one, other in zip(a, b, strict=True):
            np.testing.assert_array_equal(one, other)


def test_nothing_right_is_refused():
    tree = played("team")
    moves = dataclasses.replace(tree.transitions, rewards={"em": 0 * tree.transitions.rewards["em"]})
    with pytest.raises(ConfigError, match=r"^harvest: no path of the rollout is kept"):
        afm.sequences(dataclasses.replace(tree, transitions=moves))


def test_the_reward_that_keeps_an_episode_is_its_last_one():
    tree = played("team")
    assert all(path[-1].role == tags.ANSWERER for path in paths(tree, afm.right(tree)))


# -- what the mask does to an update -----------------------------------------------------------------------------------

SMALL = Backbone(hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)


@functools.cache
def learner():
    team = make_team(TeamConfig(backbone=SMALL, max_new_tokens=7, remat=False), (AGENT,))
    params = init_params(TeamConfig(backbone=SMALL, max_new_tokens=7, remat=False), team, jax.random.key(1))
    return team, params["agents"][AGENT], make_learner(team.models[0].policy, SFT_LOSS, Optimizer(), Sampling())


def gradient(told):
    """Gradient of one supervised step on all rows of ``told``, as one vector."""
    team, own, learn = learner()
    count, caught = len(told.length), {}
    driver = SimpleNamespace(seed=0, host=np.asarray, optimize=lambda *inputs: caught.update(inputs[-1]) or (None, {}))
    Supervised(team, {AGENT: learn}, count).step(driver, None, 0, {AGENT: told})
    [batch] = caught[AGENT]
    return np.concatenate([np.ravel(g) for g in jax.tree.leaves(learn.accumulate(own, None, batch, None)[0])])


def padded(rows):
    size = np.array([len(row) for row in rows], np.int32)
    out = np.zeros((len(rows), size.max()), np.int32)
    for place, row in zip(out, rows, strict=True):
        place[: len(row)] = row
    return out, size


def test_a_masked_sequence_teaches_what_its_turns_teach():
    """The gradient of whole sequences is that of single turns, each with all that stands before it as its prompt."""
    told = afm.sequences(played("team"))
    told = Demonstrations(*(x[:6] for x in told))
    turns = [turn for row in rows_of(told) for turn in segments(*row)]
    apart = Demonstrations(*padded([prompt for prompt, _ in turns]), *padded([said for _, said in turns]))
    one, other = gradient(told), gradient(apart)
    assert np.abs(one).max() > 1e-3
    np.testing.assert_allclose(one, other, atol=1e-5)
    unmasked = gradient(told._replace(loss_mask=None))
    assert np.abs(one - unmasked).max() > 1e-3


def test_a_mask_of_ones_is_no_mask():
    told = Demonstrations(*(x[:4] for x in afm.sequences(played("team"))))
    ones = told._replace(loss_mask=np.ones(told.completions.shape, bool))
    np.testing.assert_array_equal(gradient(ones), gradient(told._replace(loss_mask=None)))


# -- credit ------------------------------------------------------------------------------------------------------------


def test_an_episode_counts_once_and_equal_groups_are_left_out():
    """Rewards 1, 0, 0, 1 over episodes of 4, 2, 3 and 5 turns: every completion has +1 or -1. Equal ones have 0."""
    table, turns = Table(("em",)), [4, 2, 3, 5]
    for task, rewards in enumerate([(1, 0, 0, 1), (1, 1, 1, 1)]):
        for size, em in zip(turns, rewards, strict=True):
            parent = -1
            for turn in range(size):
                pay = {"em": {role: float(em) for role in range(3)}} if turn == size - 1 else {}
                table.nodes.append((2, task, turn, parent))
                table.steps.append(len(table.nodes) - 1)
                parent = table.move([len(table.steps) - 1], task, turn, parent, pay)
    algorithm = afm.algorithm(afm.Config())
    _, advantage = table.credit(algorithm.credit, **algorithm.reward)
    want = [1] * 4 + [-1] * 5 + [1] * 5 + [0] * 14
    np.testing.assert_allclose(advantage, want, atol=1e-5)
    assert algorithm.select is unequal_groups and math.isclose(sum(want), 4)


# -- the run -----------------------------------------------------------------------------------------------------------


def config(**changes):
    args = {"protocol": "tags", "tasks": 64, "copying": 0.0, "two_hops": 0.0}
    base = afm.Config(
        steps=2,
        source_steps=2,
        batch=4,
        group=3,
        harvested=48,
        imitation=Offline(2, 8),
        team=TeamConfig(backbone=SMALL, max_new_tokens=5, remat=False),
        env=EnvConfig("facts", args, eval_tasks=4),
        reward={"em": 1.0, "format": 0.1},
        optimizer=Optimizer(learning_rate=1e-2),
        sft=SFT(steps=120, batch=32, samples=512, optimizer=Optimizer(learning_rate=1e-2)),
    )
    return dataclasses.replace(base, **changes)


def logger_of(path):
    return Logger(path, resume_step=None, total_steps=200, tensorboard=False)


@pytest.mark.slow
def test_phases_of_a_run(tmp_path):
    """Who learns in which phase, to the bit; and a state in the middle of imitation goes on to the same bits."""
    cfg = config()
    cfg.check("config")
    recipe = afm.make(cfg)
    names = [phase.name for phase in recipe.phases]
    assert names == ["stage 0", "source team", "imitation", "training"]
    moved, states = {name: set() for name in names}, {}
    state = recipe.init(0)
    with logger_of(tmp_path / "run") as logger:
        for step in range(recipe.total_steps):
            name = names[recipe.phase_of(step)]
            before = {role: digests(state.params["agents"][role]) for role in tags.ROLES}
            if step == recipe.starts[2] + 1:
                states[step] = jax.tree.map(jnp.copy, state)
            state, metrics = recipe.step(state, logger)
            moved[name] |= {role for role in tags.ROLES if digests(state.params["agents"][role]) != before[role]}
            if name == "imitation":
                assert 0 < metrics["data/agent/episodes"] < 48 and metrics["data/agent/learned_tokens"] > 0
        figures = recipe.evaluate(state)
    assert {"eval/em", "eval/source_em"} <= set(figures)
    assert moved["stage 0"] == set(tags.ROLES)
    assert moved["source team"] == set(tags.ROLES[: tags.AGENT])
    assert moved["imitation"] == {AGENT} and moved["training"] == {AGENT}
    [(step, again)] = states.items()
    resumed = afm.make(cfg)
    with logger_of(tmp_path / "resumed") as logger:
        for _ in range(step, recipe.total_steps):
            again, _ = resumed.step(again, logger)
    assert digests(again.params["agents"]) == digests(state.params["agents"])


@pytest.mark.slow
def test_a_source_team_that_is_never_right_ends_the_run_in_one_line(tmp_path):
    recipe = afm.make(config(sft=SFT(steps=0), source_steps=0, harvested=8))
    with logger_of(tmp_path) as logger, pytest.raises(ConfigError) as error:
        recipe.step(recipe.init(0), logger)
    assert str(error.value) == (
        "config.source_steps: none of the 8 episodes that the source team played is right, so no episode is kept for "
        "imitation; expected more steps of it, or of sft"
    )


def test_a_compiled_run_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^config\.recipe: afm: what its source team played becomes sequences on"):
        make_program(afm.make(config(sft=SFT(steps=0))))


BAD = [
    ({"group": 1}, r"^config\.group: expected >= 2, got 1$"),
    ({"source_steps": -1}, r"^config\.source_steps: expected >= 0, got -1$"),
    ({"harvested": 0}, r"^config\.harvested: expected >= 1, got 0$"),
    ({"staleness": 1}, r"^config\.staleness: expected 0, got 1: two teams play in phases of their own$"),
    ({"env": EnvConfig("facts")}, r"^config\.env: no role 'planner' in environment 'facts', whose roles are rewriter"),
    ({"env": EnvConfig("facts", {"protocol": "tags", "tags": {"searches": 9}})}, r"^config\.env\.args\.tags\.searches"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        config(**change).check("config")
    assert "\n" not in str(error.value)


def test_an_agent_without_a_model_of_its_own():
    team = TeamConfig(backbone=SMALL, max_new_tokens=5, parameter_sharing="shared")
    with pytest.raises(
        ConfigError, match=r"^config\.team: expected a model of its own for agent, which planner shares$"
    ):
        afm.make(config(team=team, sft=SFT(steps=0)))


def test_variants_are_configurations():
    for variant in VARIANTS:
        cfg = from_dict(afm.Config, get_config(variant).to_dict())
        cfg.check("config")
        assert cfg.credit.group == "task" and cfg.credit.normalise == "std" and cfg.loss.clip_low == 0.2
        assert cfg.team.max_new_tokens == tags.plan_segment(cfg.env.build().tags.searches)
        assert (cfg.imitation.steps > 0) == (variant != "alone")
    same = dataclasses.replace(alone(), imitation=tiny().imitation, source_steps=tiny().source_steps)
    assert same == tiny()  # the control differs in what comes before RL alone
