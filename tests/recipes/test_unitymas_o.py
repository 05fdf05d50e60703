"""UnityMAS-O: rewards of real rollouts, partial sharing and its resume, workflows, bad input."""

import dataclasses
import inspect
import re

import jax
import numpy as np
import pytest

from jaxmarl_llm.agents.team import Backbone, TeamConfig, make_team
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.configs import unitymas_o as configs
from jaxmarl_llm.configs.unitymas_o import VARIANTS, get_config, split, tiny
from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.credit.differences import PayRecords, PayTeam
from jaxmarl_llm.credit.rules import Sizes
from jaxmarl_llm.envs.programs import array as programs
from jaxmarl_llm.envs.programs import reflect
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import unitymas_o
from jaxmarl_llm.runs.loop import fit
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry.logger import Logger
from jaxmarl_llm.training.config import SFT, RunConfig
from jaxmarl_llm.training.optimizers import Optimizer
from tests.envs.test_programs import EVERY, row
from tests.envs.test_programs_reflect import compiled, drawn_words, share
from tests.recipes.test_fidelity import Table

SMALL = Backbone(hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8)
CONFIG = unitymas_o.Config()


def team(**changes):
    return TeamConfig(backbone=SMALL, critic="head", max_new_tokens=6, remat=False, **changes)


def config(**changes):
    base = unitymas_o.Config(
        steps=2,
        batch=4,
        group=2,
        team=team(),
        env=EnvConfig("facts", {"protocol": "mask", "tasks": 32, "copying": 0.0}, eval_tasks=4),
        optimizer=Optimizer(learning_rate=3e-2),
        sft=SFT(steps=20, batch=32, samples=64, optimizer=Optimizer(learning_rate=2e-2)),
        run=RunConfig(checkpoint_every=1, eval_every=0, tensorboard=False, max_logprob_diff=0),
    )
    return dataclasses.replace(base, **changes)


@pytest.mark.slow
def test_records_of_a_rollout_are_paid_by_their_episode():
    """Scores are drawn, because an untrained team earns none. Each episode is walked by hand, for both forms of pay."""
    cfg = config(team=team(parameter_sharing="shared"), reward={"invalid": 0.5})
    recipe = unitymas_o.make(cfg)
    step, state = recipe.phases[-1].step, recipe.init(0)
    play = recipe.env_runner.play
    tree = play(step.players, state.params, {}, range(4), step.plan, jax.random.key(1), cfg.sampling, None).tree
    moves, rng = tree.transitions, np.random.default_rng(0)
    drawn = {name: rng.random(moves.rewards["score"].shape).astype(np.float32) for name in ("score", "f1")}
    last = (moves.turn == 6)[:, None]
    drawn["f1"] = np.where(last, drawn["f1"][:, :1], 0)  # of all roles, at the last turn
    tree = tree.replace(transitions=moves.replace(rewards={**moves.rewards, **drawn}))
    rules = [unitymas_o.algorithm(dataclasses.replace(cfg, pay=pay)).credit for pay in unitymas_o.PAYS]
    own, shared = (assign(rule, tree, weights=cfg.reward, sizes=step.sizes(cfg.batch)) for rule in rules)
    above, ends = moves.parent, np.flatnonzero(moves.valid & (moves.turn == 6))
    assert len(ends) == 4 * cfg.group and not np.asarray(moves.rewards["invalid"]).all()
    for end in ends:
        path = [end]
        while above[path[0]] >= 0:
            path.insert(0, above[path[0]])
        roles = tree.nodes.role[tree.steps.node[moves.steps[path, 0]]]
        score = [drawn["score"][j, role] for j, role in zip(path, roles)]
        form = [0.5 * moves.rewards["invalid"][j, role] for j, role in zip(path, roles)]
        change = score[5] - score[1]
        want = [score[0], score[1], change, change, change, score[5], 0.0]
        rows = moves.steps[path, 0]
        np.testing.assert_allclose(own.returns[rows], np.add(want, form), atol=1e-5)
        np.testing.assert_allclose(shared.returns[rows], drawn["f1"][end, 0] + form, atol=1e-5)


def words_of_round(rng, task):
    """Completions of an episode. Half of the programs are right on some hidden examples, and not on all shown ones."""
    hidden, shown = task["hidden"].tolist(), task["shown"].tolist()
    partly = [program for program in EVERY[:584] if share(program, hidden) > 0 and share(program, shown) < 1]
    for turn, said in enumerate(drawn_words(rng, task)):
        yield (str(rng.choice(partly)), True) if turn % 2 and rng.random() < 0.5 else said


@pytest.mark.usefixtures("numpy_tables")
@pytest.mark.parametrize("seed", range(3))
def test_records_of_the_code_workflow_are_paid_by_their_round(seed):
    """Random episodes of `programs` with reflection, which end at a program that is right on the shown examples.

    The twin: planner and coder_i get R_i - R_(i-1), reflection_i gets R_(i+1) - R_i, and R is counted by hand.
    """
    cfg, rng, table, (env, step, _) = configs.code(), np.random.default_rng(seed), Table(reflect.COMPONENTS), compiled()
    columns = programs.make_tasks(programs.Config(**cfg.env.args), seed, 10)
    wanted, rounds, key, earlier = [], set(), jax.random.key(0), 0
    for number in range(10):
        task = {name: column[number] for name, column in columns.items()}
        state, parent, done, rates, own = env.reset(key, task), -1, False, [], []
        for turn, (text, ends) in enumerate(words_of_round(rng, task)):
            role = env.actors[turn][0]
            state, paid, done = step(key, state, *row(text, ends))
            pay = {name: float(values[role]) for name, values in paid.items()}
            parent = table.act(role, number, turn, parent, **pay)
            own.append((role, len(rates), pay["invalid"]))
            proper = ends and re.fullmatch("[abdghimn]{1,4}", text)
            rates += [share(text if proper else "", task["hidden"].tolist())] if role == reflect.CODER else []
            if done:
                break
        assert done
        rounds.add(len(rates))
        earlier += any(rates[:-1])
        before = [0.0, *rates]
        wanted += [before[i + 1] - before[i] + cfg.reward["invalid"] * form for _, i, form in own]
    assert len(rounds) > 2 and earlier > 2
    rule = unitymas_o.algorithm(cfg).credit
    got = assign(rule, table.tree(), weights=cfg.reward, sizes=Sizes(8, 10, 3))
    np.testing.assert_allclose(got.returns[: len(wanted)], wanted, atol=1e-5)
    assert np.asarray(got.valid[: len(wanted)]).all()


def test_the_critic_and_the_metrics_read_one_rule():
    made = unitymas_o.algorithm(CONFIG)
    assert made.critic.paid == made.credit.rules[0] == PayRecords("score", (4,), (0, 4), "config.score")
    assert unitymas_o.algorithm(configs.team()).critic.paid == PayTeam("f1", "config.team_reward")
    code = unitymas_o.algorithm(configs.code()).critic.paid
    assert (code.score, code.scored, code.absolute) == ("score", (1,), ())


def test_ppo_on_records():
    loss = CONFIG.loss
    assert (loss.clip_low, loss.clip_high) == (0.2, 0.2) and loss.value_coef > 0 and loss.kl_coef == 0
    assert CONFIG.credit.discount == 0 and CONFIG.reward == {"invalid": 1.0}


@pytest.mark.slow
def test_two_roles_on_one_model_train_and_resume_to_the_bit(tmp_path):
    """Rewriter and selector share a model, and the generator has its own. Both models learn."""
    env = EnvConfig("facts", {"protocol": "pipeline", "tasks": 32, "copying": 0.0}, eval_tasks=4)
    cfg = config(
        env=env, pay="team", reward={"penalty": 1.0}, team=team(models={"rewriter": "reader", "selector": "reader"})
    )
    cfg.check("config")
    recipe = unitymas_o.make(cfg)
    assert [model.name for model in recipe.team.models] == ["reader", "generator"]
    begin = recipe.init(0)
    start = {name: digests(own) for name, own in begin.params["agents"].items()}
    whole = fit(cfg, recipe, tmp_path / "whole")
    assert set(start) == {"reader", "generator"}
    assert all(digests(own) != start[name] for name, own in whole.params["agents"].items())
    part = dataclasses.replace(cfg, steps=1)
    fit(part, unitymas_o.make(part), tmp_path / "parts")
    resumed = fit(cfg, unitymas_o.make(cfg), tmp_path / "parts", allow_config_change=["steps"])
    assert digests(whole) == digests(resumed)


# Workflows


def test_workflows_are_configurations():
    """Each is at most 60 lines, on one recipe; roles and components are those of its environment."""
    for variant in VARIANTS:
        cfg = from_dict(unitymas_o.Config, get_config(variant).to_dict())
        cfg.check("config")
        few = dataclasses.replace(cfg.env, args={**cfg.env.args, "tasks": 8}, eval_tasks=4)
        recipe = unitymas_o.make(dataclasses.replace(cfg, env=few, batch=4, sft=SFT(steps=1, samples=4)))
        assert recipe.env_runner.env.name == cfg.env.name and cfg.team.critic == "head"
        assert len(inspect.getsource(getattr(configs, variant)).splitlines()) <= 60
    assert dataclasses.replace(configs.team(), pay="records") == tiny()
    made = make_team(split().team, split().env.roles())
    assert [role.players[0] for role in made.roles] == ["answerer", "searcher", "summarizer", "updater", "answerer"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["split", "pipeline", "verify", "code"])
def test_every_workflow_takes_two_steps(variant, tmp_path):
    """All models move in RL, by finite steps."""
    base = getattr(configs, variant)()
    small = dataclasses.replace(base.team, backbone=SMALL, max_new_tokens=min(base.team.max_new_tokens, 6))
    args = {**base.env.args, "tasks": 32}
    cfg = config(
        **{name: getattr(base, name) for name in ("pay", "score", "scored", "absolute", "team_reward", "reward")},
        env=dataclasses.replace(base.env, args=args, eval_tasks=4),
        team=small,
        sft=SFT(steps=0),
    )
    cfg.check("config")
    recipe = unitymas_o.make(cfg)
    state = recipe.init(0)
    start = {name: digests(own) for name, own in state.params["agents"].items()}
    with Logger(tmp_path, resume_step=None, total_steps=2, primary=False) as logger:
        for _ in range(recipe.total_steps):
            state, metrics = recipe.step(state, logger)
    assert all(digests(own) != start[name] for name, own in state.params["agents"].items())
    assert all(np.isfinite(metrics[f"critic/{model.name}/value"]) for model in recipe.team.models)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params["agents"]))


BAD = [
    ({"pay": "role"}, r"^config\.pay: .*'role'"),
    ({"scored": ()}, r"^config\.scored: expected one or several roles, got none$"),
    ({"scored": ("solver",)}, r"^config\.scored: no role 'solver' in environment 'facts', whose roles are planner, "),
    ({"absolute": ("judge",)}, r"^config\.absolute: no role 'judge' in environment 'facts', whose roles are planner, "),
    ({"env": EnvConfig("chain")}, r"^config\.scored: no role 'answerer' in environment 'chain'"),
    ({"team": dataclasses.replace(CONFIG.team, critic="none")}, r"^config\.team\.critic: expected head or separate"),
    ({"loss": dataclasses.replace(CONFIG.loss, value_coef=0.0)}, r"^config\.loss\.value_coef: expected > 0"),
    ({"gae_lambda": 1.5}, r"^config\.gae_lambda: expected"),
]


@pytest.mark.parametrize("change, message", BAD, ids=[m for _, m in BAD])
def test_bad_configurations(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        dataclasses.replace(CONFIG, **change).check("config")
    assert "\n" not in str(error.value)


UNKNOWN = [
    ({"score": "bleu"}, r"^config\.score: the environment pays no 'bleu'; it pays "),
    ({"pay": "team", "team_reward": "bleu"}, r"^config\.team_reward: the environment pays no 'bleu'; it pays "),
    ({"reward": {"bleu": 1.0}}, r"^config\.reward: environment 'facts' pays no 'bleu'; it pays f1"),
    ({"team": team(models={"planer": "answerer"})}, r"^config\.team\.models: unknown role 'planer'"),
]


@pytest.mark.parametrize("change, message", UNKNOWN, ids=[m for _, m in UNKNOWN])
def test_what_the_environment_does_not_have_ends_in_one_line(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        unitymas_o.make(dataclasses.replace(CONFIG, **change))
    assert "\n" not in str(error.value)
