"""Rollouts as files: what a run writes against its own tables, resumed runs, limits, and files that are wrong."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zstandard

from jaxmarl_llm.agents.memory import MemoryConfig
from jaxmarl_llm.config import from_dict
from jaxmarl_llm.credit.assign import assign, standard_rule
from jaxmarl_llm.envs.contract import HostTask
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.recipes import grpo, magrpo
from jaxmarl_llm.rollout.plans import product
from jaxmarl_llm.runs import loop, phases, recorder
from jaxmarl_llm.storage.checksums import digests
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.telemetry.evaluations_file import read_evaluations
from jaxmarl_llm.telemetry.metrics_file import read_metrics
from jaxmarl_llm.telemetry.rollouts import RolloutsConfig
from jaxmarl_llm.telemetry.rollouts_writer import RolloutsFolder, encode, shortest
from jaxmarl_llm.training import rollout_rows
from jaxmarl_llm.training.algorithm import Algorithm, Played, unequal_groups
from tests.faulty import TASKS, Make
from tests.telemetry.test_metrics import fake_tracker

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "schema-1"
TEAM = {"max_new_tokens": 2, "remat": False, "backbone": {"hidden_size": 16, "num_layers": 1, "head_dim": 4}}
STAGE_0 = 40  # enough that completions are moves, whose rewards differ
RUN = {
    "checkpoint_every": STAGE_0 + 2,
    "eval_every": 2,
    "eval_greedy": False,
    "log_every": 100,
    "tensorboard": False,
    "max_logprob_gap": 0,
}
ARRAY = {
    "steps": 4,
    "batch": 3,
    "group": 3,
    "team": TEAM,
    "env": {"name": "matrix", "args": {"rounds": 2, "response": 2}, "eval_tasks": 2},
    "reward": {"payoff": 1.0},
    "optimizer": {"learning_rate": 0.02},
    "sft": {"steps": STAGE_0, "batch": 16, "samples": 64, "optimizer": {"learning_rate": 0.05}},
    "run": {**RUN, "rollouts": {"every": 1, "tasks": 3}},
}
EVALUATED: dict = {}  # workdir -> batches of its evaluations
MEMORY = MemoryConfig(capacity=4, retrieve=1, warmup=2, min_similarity=-1.0, z=0.5)


def array_config(**rollout_settings):
    settings = {"every": 1, "tasks": 3, **rollout_settings}
    return from_dict(magrpo.Config, {**ARRAY, "run": {**RUN, "rollouts": settings}})


def drawn(key, tree, trained):
    """A third of the completions is left out."""
    return jnp.arange(len(trained)) % 3 > 0


def array_recipe(cfg):
    """Seats at once, a tree, a memory, groups and steps that are left out, and a role that learns in even steps."""
    algorithm = Algorithm(
        standard_rule(cfg.credit),
        lambda rl_step: {"payoff": 1.0 + rl_step, "social": 0.1},
        select=unequal_groups,
        select_steps=drawn,
        trainable_roles=lambda rl_step: jnp.array([True, rl_step % 2 == 0]),
        memory=MEMORY,
        memory_reward=(("payoff", 1.0),),
    )
    return phases.make_recipe(cfg, product(cfg.group), algorithm)


@pytest.fixture(scope="module", autouse=True)
def without_a_figure():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "report", lambda workdir: None)  # most of the time of a run as small as these
        yield


class SeenEvaluations(recorder.EvaluationRecorder):
    """Keeps the batches that it is called with."""

    batches: ClassVar[list] = []

    def batch(self, *given):
        self.batches.append(given)
        super().batch(*given)


class Seen(recorder.Recorder):
    """Keeps what it is called with."""

    calls: ClassVar[list] = []

    def __call__(self, *given):
        self.calls.append(given)
        super().__call__(*given)


def fit(recipe, cfg, workdir, kind=recorder.Recorder, calls=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Seen, "calls", [] if calls is None else calls)
        patch.setattr(SeenEvaluations, "batches", [])
        patch.setattr(loop, "Recorder", kind)
        patch.setattr(loop, "EvaluationRecorder", SeenEvaluations)
        state = loop.fit(cfg, dataclasses.replace(recipe, cfg=cfg), workdir)
        EVALUATED[workdir] = SeenEvaluations.batches
        return state


@pytest.fixture(scope="module")
def made():
    """One recipe for all runs, so that its programs are compiled once."""
    return array_recipe(array_config())


@pytest.fixture(scope="module")
def straight(made, tmp_path_factory):
    """(workdir, last state, calls of the recorder) of four steps without a stop, every step and task written."""
    workdir, calls = tmp_path_factory.mktemp("straight"), []
    state = fit(made, array_config(), workdir, Seen, calls)
    return workdir, state, calls


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """(workdir, calls) of two steps of a host environment, half of whose rewards fail, against past policies."""
    cfg = from_dict(
        grpo.Config,
        {
            **ARRAY, "steps": 2, "batch": 8, "group": 2, "reward": {"accuracy": 1.0}, "sft": {"steps": 0},
            "env": {"name": "tests.faulty", "workers": 0, "max_prompt": 40},
            "past": {"size": 1, "every": 1, "fraction": 0.5},
            "run": {
                **RUN, "max_invalid": 1.0, "max_epochs": 0, "wandb_project": "p", "rollouts": {"every": 1, "tasks": 8}
            },
        },
    )  # fmt: skip
    recipe = grpo.make(cfg, env=HostTask(Make("raise", 0.5), list(range(TASKS)), [TASKS, TASKS + 1]))
    workdir, calls = tmp_path_factory.mktemp("host"), []
    with pytest.MonkeyPatch.context() as patch:
        told = fake_tracker(patch)
        fit(recipe, cfg, workdir, Seen, calls)
    (workdir / "told.json").write_text(json.dumps(told))
    return workdir, calls


def bytes_of(workdir, pattern="*"):
    return {path.name: path.read_bytes() for path in sorted((workdir / "rollouts").glob(pattern))}


# ----------------------------------------------------------------------------------- what is written is what was played


def runs(straight, host):
    """(rollout, call of the recorder) of every recorded step."""
    workdir, _, calls = straight
    return [
        *zip(rollouts.read(workdir), calls, strict=True),
        *zip(rollouts.read(host[0]), host[1], strict=True),
    ]


def test_every_completion_is_there_once_with_its_text_and_log_probs(straight, host):
    for rollout, (step, number, rl_step, _, _, result) in runs(straight, host):
        assert (rollout.header.step, rollout.header.rl_step) == (number, rl_step + 1)
        assert number == rl_step + 1 + step.cfg.sft.steps
        tree = result.tree
        assert [row.step for row in rollout.steps] == np.flatnonzero(tree.steps.valid).tolist()
        assert [row.node for row in rollout.nodes] == np.flatnonzero(tree.nodes.valid).tolist()
        assert [row.transition for row in rollout.transitions] == np.flatnonzero(tree.transitions.played).tolist()
        for row in rollout.steps:
            length = tree.steps.length[row.step]
            assert row.node == tree.steps.node[row.step] and row.truncated == tree.steps.truncated[row.step]
            assert list(row.token_ids) == tree.steps.tokens[row.step, :length].tolist()
            node = next(n for n in rollout.nodes if n.node == row.node)
            assert node.model == step.players.models[tree.nodes.model[row.node]].name
            tokenizer = next(m for m in step.players.models if m.name == node.model).tokenizer
            assert row.text == tokenizer.decode(row.token_ids) == "".join(row.pieces)
            assert len(row.pieces) == len(row.token_ids) and all(row.shown_tokens)
            if row.token_ids[-1] in tokenizer.stop_ids:
                assert (row.pieces[-1], row.shown_tokens[-1]) == ("", "<eos>")
            assert np.array_equal(np.float32(row.logprobs), tree.steps.logprobs[row.step, :length])
            assert row.version == number - 1 and len(row.token_ids) > 0
        for row in rollout.nodes:
            assert list(row.prompt_ids) == tree.nodes.tokens[row.node, : tree.nodes.length[row.node]].tolist()
            assert (row.turn, row.parent) == (tree.nodes.turn[row.node], tree.nodes.parent[row.node])
        assert [row.number for row in rollout.tasks] == result.tasks.tolist()


def test_advantages_are_those_of_the_credit_rule(straight, host):
    for rollout, (step, _, rl_step, _, _, result) in runs(straight, host):
        weights = {"payoff": 1.0 + rl_step, "social": 0.1} if "payoff" in rollout.header.components else {"accuracy": 1}
        assert rollout.header.weights == pytest.approx(weights)
        credited = jax.device_get(
            assign(step.algorithm.credit, result.tree, weights=weights, sizes=step.sizes(step.cfg.batch))
        )
        columns = rollout.to_numpy()["step"]
        valid = credited.valid[columns["step"]]
        assert np.array_equal(columns["valid"], valid) and valid.any()
        for name, table in (("advantage", credited.advantage), ("returns", credited.returns)):
            assert np.array_equal(np.isnan(columns[name]), ~valid)
            assert np.nansum(columns[name]) == pytest.approx(np.float64(table[credited.valid]).sum(), abs=1e-4)
            assert np.array_equal(columns[name][valid].astype(np.float32), table[columns["step"]][valid])
        for group in rollout.groups:
            own = credited.returns[credited.valid & (credited.group == group.group)]
            assert group.size == len(own) > 0 and group.mean == pytest.approx(own.mean(), abs=1e-5)
            assert (group.low, group.high) == pytest.approx((own.min(), own.max()))
        assert {g.group for g in rollout.groups} == set(credited.group[credited.valid])


def test_the_update_hands_over_its_log_probs_of_what_it_trained(straight, host):
    """The sampler is the witness: nothing was trained in between, so both computed the same numbers."""
    for workdir, calls in ((straight[0], straight[2]), host):
        logged = {row["step"]: row["logprob_diff"] for row in read_metrics(workdir) if "logprob_diff" in row}
        for rollout, (_, number, *_) in zip(rollouts.read(workdir), calls, strict=True):
            gaps = []
            for row in rollout.steps:
                assert len(row.learner_logprobs) == (len(row.token_ids) if row.trained else 0)
                gaps.extend(np.float32(a) - np.float32(b) for a, b in zip(row.learner_logprobs, row.logprobs))
            largest = np.abs(gaps).max()
            assert largest < 1e-5 and largest == np.float32(logged[number])  # every task is in the file


def test_a_sampler_that_reports_other_log_probs_is_seen_token_by_token(made, straight, tmp_path):
    step = made.phases[-1].step

    def play(step, once, tasks, key, rl_step, state):
        """Log-probs that are too low by 0.001 for each token before, and by 0.01 for each completion before."""
        tree, played = once(tasks, key)
        seen = np.asarray(tree.steps.logprobs)
        off = 1e-3 * np.arange(seen.shape[1]) + 1e-2 * np.arange(len(seen))[:, None]
        steps = tree.steps.replace(logprobs=(seen - off).astype(np.float32))
        return Played(tree.replace(steps=steps), played, tasks, {})

    algorithm = dataclasses.replace(step.algorithm, play=play)
    phase = made.phases[-1]._replace(step=dataclasses.replace(step, algorithm=algorithm))
    fit(dataclasses.replace(made, phases=(made.phases[0], phase)), array_config(), tmp_path)
    first, honest = next(rollouts.read(tmp_path)), next(rollouts.read(straight[0]))
    seen = 0
    for row, right in zip(first.steps, honest.steps, strict=True):
        assert row.token_ids == right.token_ids
        if row.trained:
            gap = np.float64(row.learner_logprobs) - np.float64(row.logprobs)
            assert gap == pytest.approx(1e-3 * np.arange(len(gap)) + 1e-2 * row.step, abs=1e-5)
            assert row.learner_logprobs == right.learner_logprobs  # what the sampler says changes no pass
            seen += 1
    assert seen > 5
    logged = {row["step"]: row["logprob_diff"] for row in read_metrics(tmp_path) if "logprob_diff" in row}
    gaps = [x - y for row in first.steps for x, y in zip(row.learner_logprobs, row.logprobs)]
    assert logged[first.header.step] == pytest.approx(max(gaps), abs=1e-6)


def test_weights_and_biases_has_the_configuration_and_the_completions_of_each_kept_step(host):
    told = json.loads((host[0] / "told.json").read_text())
    (opened,) = (options for name, *options in told if name == "init")
    assert opened[0]["config"] == json.loads((host[0] / "config.json").read_text())
    assert opened[0]["tags"] == ["grpo", "tests.faulty"] and opened[0]["name"] == host[0].name
    logged = {
        row["step"]: row["completions"] for name, row in (c for c in told if c[0] == "log") if "completions" in row
    }
    for step in rollouts.read(host[0]):
        _, columns, rows = logged.pop(step.header.step)
        texts = sorted(row[columns.index("completion")] for row in rows)
        assert texts == sorted(completion.text for completion in step.steps)
    assert not logged


def test_an_evaluation_says_how_many_tasks_were_held_out(host):
    assert [row.get("count/held_out") for row in read_metrics(host[0])] == [2.0, 2.0]  # before step 1, after step 2


def test_rewards_are_by_role_and_component_and_unknown_where_they_are_invalid(straight, host):
    unknown = 0
    for rollout, (*_, result) in runs(straight, host):
        moves, columns = result.tree.transitions, rollout.to_numpy()["transition"]
        for row in rollout.transitions:
            j = row.transition
            assert list(row.steps) == moves.steps[j].tolist() and row.parent == moves.parent[j]
            assert (row.done, row.valid) == (moves.done[j], moves.valid[j])
            unknown += not row.valid
            for name, paid in moves.rewards.items():
                assert row.rewards[name] == (pytest.approx(paid[j].tolist()) if row.valid else (None,) * paid.shape[1])
                assert np.isnan(columns[f"rewards/{name}"][rollout.transitions.index(row)]).all() == (not row.valid)
    assert unknown > 3


def test_why_a_completion_is_trained_or_not(straight, host):
    every = set()
    for rollout, (step, _, rl_step, _, _, result) in runs(straight, host):
        credited, nodes = result.credited, {node.node: node for node in rollout.nodes}
        for row in rollout.steps:
            s, node = row.step, nodes[row.node]
            every.add(row.why)
            assert row.selected == bool(credited.valid[s] and result.selected[credited.group[s]])
            own = node.model in {m.name for m in step.team.models}
            assert row.trained == (bool(result.trained[s]) and own) == (row.why == "trained")
            assert (row.source == "frozen") == (not own) == (row.why == "opponent")
            if row.why == "no_return":
                assert not credited.valid[s] and row.group == -1
            if row.why == "group_not_selected":
                assert not result.selected[row.group]
            if row.why == "role_not_trainable":
                assert node.role == "second" and rl_step % 2 == 1
            if row.why == "not_drawn":
                assert s % 3 == 0
    assert every == {"trained", "opponent", "no_return", "group_not_selected", "role_not_trainable", "not_drawn"}


def test_memory_events_take_the_memory_of_before_to_that_of_after(straight):
    workdir, _, calls = straight
    count, seen = 0, set()
    for rollout, (_, _, _, before, after, result) in zip(rollouts.read(workdir), calls, strict=True):
        for role in rollout.header.roles:
            events = [e for e in rollout.memory if e.role == role and e.event != "read"]
            slots = {j for j in range(MEMORY.capacity) if before[role].used[j]}
            slots |= {e.slot for e in events if e.event in ("written", "refreshed")}
            slots -= {e.slot for e in events if e.event == "removed"}
            assert slots == set(np.flatnonzero(after[role].used))
            for event in events:
                assert event.event in ("written", "refreshed", "removed")
                alike = before[role].used[event.slot] and np.dot(
                    before[role].key[event.slot], after[role].key[event.slot]
                ) >= np.float32(MEMORY.refresh_similarity)
                assert (event.event == "refreshed") == (alike and event.event != "removed")
                if event.event != "removed":
                    count += 1
                    seen.add(event.event)
                    source = next(row for row in rollout.steps if row.step == event.completion)
                    node = next(row for row in rollout.nodes if row.node == source.node)
                    assert node.role == role and event.text.endswith(source.text)
                    assert node.prompt.endswith(event.text.removesuffix(source.text))
                    assert event.weight == pytest.approx(float(after[role].weight[event.slot])) and event.text
        reads = [e for e in rollout.memory if e.event == "read"]
        read = result.tree.nodes.retrieved.slots
        assert len(reads) == (read[result.tree.nodes.valid] >= 0).sum()
        assert [e.slot for e in reads] == [slot for n in rollout.nodes for slot in n.memory_slots]
        assert all(read[e.node, 0] == e.slot and before[e.role].used[e.slot] for e in reads)
    assert count > 2 and reads and seen == {"written", "refreshed"}


def test_prompts_of_a_host_environment_are_messages(straight, host):
    for row in (node for rollout in rollouts.read(host[0]) for node in rollout.nodes):
        assert row.messages == (("raw", "", row.prompt),) and row.cut_tokens == 0 and row.unseen == ()
    assert {node.messages for rollout in rollouts.read(straight[0]) for node in rollout.nodes} == {()}


def test_failures_of_a_host_environment(host):
    workdir, calls = host
    for rollout, (*_, result) in zip(rollouts.read(workdir), calls, strict=True):
        assert len(rollout.failures) == len(result.played.failures) > 0
        numbers = {task.number for task in rollout.tasks}
        for failure in rollout.failures:
            assert failure.number in numbers and failure.roles == ("solver",) and failure.call == "step"
            assert "my reward has a bug" in failure.message
        invalid = [row for row in rollout.transitions if not row.valid]
        assert len(invalid) == len(rollout.failures)


def test_kept_tasks_are_the_first_ones_and_whole(made, straight, tmp_path):
    _, _, calls = straight
    step, number, rl_step, before, after, result = calls[-1]
    logprobs = result.logprobs.by_row()
    kept = list(rollout_rows.rows(step, result, rl_step, 2, before, after, logprobs))
    whole = list(rollout_rows.rows(step, result, rl_step, 3, before, after, logprobs))
    nodes = {row.node for row in whole if isinstance(row, rollouts.Node) and row.task < 2}
    for kind in (rollouts.Task, rollouts.Node, rollouts.Transition):
        assert [r for r in kept if isinstance(r, kind)] == [r for r in whole if isinstance(r, kind) and r.task < 2]
    steps = [r for r in whole if isinstance(r, rollouts.Completion)]
    assert [r for r in kept if isinstance(r, rollouts.Completion)] == [r for r in steps if r.node in nodes] != steps
    header = rollout_rows.header(step, result, number, rl_step, 2)
    path = tmp_path / "step-00000001.jsonl.zst"
    path.write_bytes(encode(header, kept))
    assert rollouts.read_file(path).header.tasks == 2  # every name of a row leads to a row


# ------------------------------------------------------------------------------------------------------ held-out tasks


def test_held_out_episodes_are_those_that_the_evaluations_played(straight, host):
    evaluated = 0
    for workdir, steps in ((straight[0], [STAGE_0, STAGE_0 + 2, STAGE_0 + 4]), (host[0], [0, 2])):
        batches, logged = EVALUATED[workdir], read_metrics(workdir)
        table = read_evaluations(workdir)
        assert [row.step for row in table.rows] == steps == list(rollouts.files(workdir, "held_out"))
        for rollout, (state, suffix, numbers, played), row in zip(
            rollouts.read(workdir, "held_out"), batches, table.rows, strict=True
        ):
            header, tree = rollout.header, played.tree
            assert (header.split, header.step, suffix) == ("held_out", int(state.step), "") and header.updated == ()
            assert [task.number for task in rollout.tasks] == list(numbers) == [0, 1] and header.batch == 2
            assert tuple(task.content for task in rollout.tasks) == table.tasks
            assert [s.step for s in rollout.steps] == np.flatnonzero(tree.steps.valid).tolist() != []
            for said in rollout.steps:
                assert list(said.token_ids) == tree.steps.tokens[said.step, : tree.steps.length[said.step]].tolist()
                assert (said.why, said.advantage, said.group) == ("held_out", None, -1)
                assert not said.trained and not said.selected and said.version == header.step
            # The metric is the witness of returns: a mean over roles and tasks of what the first turn brought.
            metric = next(
                r[key]
                for key in ("eval/return", "final/return")
                for r in logged
                if r["step"] == header.step + (key == "eval/return") and key in r
            )
            first = {node.node: node.task for node in rollout.nodes if node.turn == 0}
            known = [s.returns for s in rollout.steps if s.node in first and s.returns is not None]
            assert (metric is None) == (not known)
            if known:
                assert np.mean(known) == pytest.approx(metric, abs=1e-5)
                assert np.mean([v for v in row.values["return"] if v is not None]) == pytest.approx(metric, abs=1e-5)
                evaluated += 1
    assert evaluated >= 3


def test_a_header_has_the_commit_of_the_run(straight):
    commit = json.loads((straight[0] / "versions.json").read_text())["commit"]
    for split in ("train", "held_out"):
        assert {rollout.header.commit for rollout in rollouts.read(straight[0], split)} == {commit}


def test_equal_tasks_have_one_content_and_others_have_others(straight, host):
    contents = {task.number: task.content for rollout in rollouts.read(host[0]) for task in rollout.tasks}
    assert len(set(contents.values())) == len(contents) > 8 and all(len(c) == 16 for c in contents.values())
    (one,) = {task.content for rollout in rollouts.read(straight[0]) for task in rollout.tasks}  # one matrix game
    assert one and set(read_evaluations(straight[0]).tasks) == {one}


def test_batches_of_an_evaluation_are_one_file_whose_rows_have_different_numbers(made, straight, tmp_path):
    state, _, _, played = EVALUATED[straight[0]][0]
    cfg = array_config(eval_tasks=3)
    runner = types.SimpleNamespace(
        env=made.env_runner.env, held_out_size=6, contents=lambda numbers, held_out: [f"c{n}" for n in numbers]
    )
    folder = RolloutsFolder(tmp_path, cfg.run.rollouts, None)
    seen = recorder.EvaluationRecorder(cfg, made.team, runner, folder, None)
    for suffix in ("", "_greedy"):
        for numbers in ((0, 1), (2, 3), (4, 5)):
            seen.batch(state, suffix, numbers, played)
    seen.end(state, {})
    (rollout,) = rollouts.read(tmp_path, "held_out")  # every name of a row leads to a row
    assert [(t.task, t.number, t.content) for t in rollout.tasks] == [(0, 0, "c0"), (1, 1, "c1"), (2, 2, "c2")]
    (whole,) = (r for r in rollouts.read(straight[0], "held_out") if r.header.step == rollout.header.step)

    def spoken(of, task):
        nodes = {n.node: n for n in of.nodes if n.task == task}
        return [(nodes[s.node].prompt, s.text, s.returns) for s in of.steps if s.node in nodes]

    assert [spoken(rollout, task) for task in (0, 1, 2)] == [spoken(whole, task) for task in (0, 1, 0)]
    assert len(spoken(whole, 0)) == 4 and spoken(whole, 0) != spoken(whole, 1)
    parents = {n.node: n.parent for n in rollout.nodes if n.task == 2 and n.turn > 0}
    moves = {m.transition: m for m in rollout.transitions}
    assert parents and {moves[p].task for p in parents.values()} == {2}


def test_evaluations_alone_are_written_and_full_folders_take_none(tmp_path):
    header, rows = example(7)
    held_out, said = header._replace(split="held_out"), []
    folder = RolloutsFolder(tmp_path, RolloutsConfig(every=0), None, said.append, lambda *seen: said.append(seen))
    folder.write(held_out, rows)
    assert said == [] and list(rollouts.files(tmp_path, "held_out")) == [7]  # tables of completions are of training
    with pytest.raises(ConfigError, match=r"no files step-N.*rollouts.every above 0"):
        rollouts.files(tmp_path)
    (file,) = rollouts.files(tmp_path, "held_out").values()
    assert rollouts.files(file) == {7: file}
    size = file.stat().st_size
    folder = RolloutsFolder(tmp_path, RolloutsConfig(max_mb=1.5 * size / 1e6), 7, said.append)
    folder.write(header._replace(step=8), rows)
    assert folder.full and list(rollouts.by_split(tmp_path)["train"]) == []
    RolloutsFolder(tmp_path, RolloutsConfig(), 6)  # the evaluation after step 7 will run again
    with pytest.raises(ConfigError, match=r"no files eval-N.*rollouts.eval_tasks above 0"):
        rollouts.read(tmp_path, "held_out")


# ---------------------------------------------------------------------------------------- nothing changes but the files


def test_a_run_without_rollouts_has_the_same_parameters_to_the_bit(made, straight, tmp_path):
    state = fit(made, array_config(every=0, eval_tasks=0), tmp_path)
    assert digests(loop.without_shared(state)) == digests(loop.without_shared(straight[1]))
    assert not (tmp_path / "rollouts").exists()


def test_every_second_step_is_written(made, straight, tmp_path):
    fit(made, array_config(every=2), tmp_path)
    files = bytes_of(tmp_path, "step-*")
    assert list(files) == [f"step-{STAGE_0 + n:08}.jsonl.zst" for n in (1, 3)]
    assert files == {name: raw for name, raw in bytes_of(straight[0]).items() if name in files}


class Killed(recorder.Recorder):
    """Ends the run after its third RL step, which is written and not saved."""

    def __call__(self, *given):
        super().__call__(*given)
        if given[1] == STAGE_0 + 3:
            raise RuntimeError("killed")


def test_a_resumed_run_writes_the_same_bytes(made, straight, tmp_path):
    with pytest.raises(RuntimeError, match="killed"):
        fit(made, array_config(), tmp_path, Killed)
    third = tmp_path / "rollouts" / f"step-{STAGE_0 + 3:08}.jsonl.zst"
    assert third.read_bytes() == bytes_of(straight[0])[third.name]
    third.write_bytes(b"of another time")
    again = tmp_path / "rollouts" / f"eval-{STAGE_0 + 2:08}.jsonl.zst"  # the checkpoint is older than this evaluation
    assert again.read_bytes() == bytes_of(straight[0])[again.name]
    again.write_bytes(b"of another time")
    for name in ("step-00000099.jsonl.zst", "eval-00000099.jsonl.zst"):
        (third.parent / name).write_bytes(b"")
    table = tmp_path / "evaluations.jsonl"
    assert len(table.read_bytes().splitlines()) == 3
    table.write_bytes(table.read_bytes() + b'{"step":99,"return":[0,0]}\n{"step":1')
    fit(made, array_config(), tmp_path)
    assert bytes_of(tmp_path) == bytes_of(straight[0])
    assert table.read_bytes() == (straight[0] / table.name).read_bytes()


def test_the_fingerprint_is_that_of_what_is_computed(straight):
    first = next(rollouts.read(straight[0]))
    of = lambda cfg: recorder.fingerprint(cfg)
    assert first.header.fingerprint == of(array_config()) == of(array_config(every=7))
    assert of(array_config()) == of(dataclasses.replace(array_config(), steps=9))
    assert of(array_config()) != of(dataclasses.replace(array_config(), seed=1))


# ----------------------------------------------------------------------------------------------------------- the folder


def example(step=1, texts=("a", "ß\ud800\n")):
    """A small rollout: two nodes of one task, three completions, a number that is not finite."""
    header = rollouts.Header(
        rollouts.SCHEMA, step, step, "f" * 64, "grpo", 0, "toy", "flat(2)", ("a", "b"), ("m", "n"), ("pay",),
        {"pay": 1.0}, ("m",), 4, 1, {}, {},
    )  # fmt: skip
    messages = (("system", "", "h"), ("user", "b", "i"))
    node = rollouts.Node(0, 0, 0, "a", "m", -1, (1, 2), "hi", (3,), (0.5,), messages, 1)
    said = rollouts.Completion(
        0, 0, (5, 6), texts[0], (-1.5, None), False, "policy", 0, 1.0, 0.5, 0, True, True, True, "trained",
        (), (len(texts[0]), 0), ("<eos>",),
    )  # fmt: skip
    rows = [
        rollouts.Task(0, 7),
        node,
        node._replace(node=1, parent=0, turn=1, role="b", memory_slots=(), memory_similarity=(), unseen=(0,)),
        said,
        said._replace(
            step=1,
            text=texts[1],
            returns=None,
            advantage=None,
            group=-1,
            valid=False,
            why="no_return",
            token_chars=(0, len(texts[1])),
            token_names=("\\xc3",),
        ),
        said._replace(step=2, node=1),
        rollouts.Transition(0, 0, 0, -1, (0, -1), {"pay": (1.0, 0.1)}, False, True),
        rollouts.Transition(1, 0, 0, -1, (1, -1), {"pay": (None, None)}, True, False),
        rollouts.Transition(2, 0, 1, 0, (2, -1), {"pay": (0.0, 0.0)}, True, True),
        rollouts.Group(0, 0, "a", 0, 1, 1.0, 0.0, 1.0, 1.0, True),
        rollouts.MemoryEvent("read", "a", 3, 0, 0.5, "entry", 1.0, 0.2),
        rollouts.MemoryEvent("refreshed", "a", 3, -1, None, "entry", 1.0, 0.2, 0),
        rollouts.Failure(7, "step", 0, ("a",), "no reward"),
    ]
    return header, rows


def stored(folder, step=1):
    path = folder / f"step-{step:08}.jsonl.zst"
    path.write_bytes(encode(*example(step)))
    return path


def test_what_is_written_is_read(tmp_path):
    header, rows = example(texts=("a", "ß\n"))
    (tmp_path / "rollouts").mkdir()
    path = tmp_path / "rollouts" / "step-00000001.jsonl.zst"
    path.write_bytes(encode(header, rows))
    for place in (tmp_path, path.parent, path):
        (read,) = rollouts.read(place)
        assert [row for table in read.tables.values() for row in table] == rows
        assert read.header.rows == {kind: len(table) for kind, table in read.tables.items()}
        assert read.header._replace(rows={}, columns={}) == header
        assert read.header.columns["step"][:2] == ("step", "node")
    lines = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).splitlines()
    assert json.loads(lines[4])["logprobs"] == [-1.5, None] and len(lines) == 1 + len(rows)


def test_files_of_the_first_schema_are_read(tmp_path):
    """A file of a run of the last commit that wrote schema 1, 602f749, with `array_config()` of this module."""
    rollout = rollouts.read_file(GOLDEN / "rollouts" / "step-00000041.jsonl.zst")
    assert rollout.header.schema == 1 and "learner_logprobs" not in rollout.header.columns["step"]
    assert (len(rollout.steps), sum(row.trained for row in rollout.steps)) == (72, 48)
    assert {row.learner_logprobs for row in rollout.steps} == {()}
    assert [len(column) for column in rollout.to_numpy()["step"]["learner_logprobs"]] == [0] * 72
    rows = [row for table in rollout.tables.values() for row in table]
    path = tmp_path / "step-00000041.jsonl.zst"
    path.write_bytes(encode(rollout.header, rows))  # the same rows as a file of today
    again = rollouts.read_file(path)
    assert again.header.schema == rollouts.SCHEMA and again.tables == rollout.tables
    copy = tmp_path / "step-00000001.jsonl.zst"
    copy.write_bytes((GOLDEN / "rollouts" / "step-00000041.jsonl.zst").read_bytes())
    rewritten(copy, put(0, schema=2))
    with pytest.raises(ConfigError, match="key 'learner_logprobs' is missing"):
        rollouts.read_file(copy)


def test_files_of_the_second_schema_are_read(tmp_path):
    """A file of a run of the last commit that wrote schema 2, 851b1bf, with `array_config()` of this module."""
    rollout = rollouts.read_file(GOLDEN.with_name("schema-2") / "rollouts" / "step-00000041.jsonl.zst")
    header = rollout.header
    assert (header.schema, header.split, header.commit) == (2, "train", None) and "content" not in header.columns[
        "task"
    ]
    assert [task.content for task in rollout.tasks] == ["", "", ""] and len(rollout.steps) == 72
    assert sum(bool(row.learner_logprobs) for row in rollout.steps) == 48
    assert {row.pieces for row in rollout.steps} == {()} and {row.messages for row in rollout.nodes} == {()}
    copy = tmp_path / "step-00000001.jsonl.zst"
    copy.write_bytes(rollout.path.read_bytes())
    rewritten(copy, put(0, schema=3))
    with pytest.raises(ConfigError, match="key 'split' is missing"):
        rollouts.read_file(copy)


def test_half_of_a_surrogate_pair_ends_no_run(tmp_path):
    assert rollouts.read_file(stored(tmp_path)).steps[1].text == "ß?\n"


def test_float32_is_read_as_it_was():
    values = np.array([0.1, -2.5e-8, 1 / 3, np.nan, np.inf, 3e38], np.float32)
    short = shortest(values)
    assert short[3:5] == (None, None) and short[0] == 0.1
    assert np.array_equal(np.float32([x for x in short if x is not None]), values[np.isfinite(values)])


def test_the_folder_is_bounded_and_says_so_once(tmp_path):
    size, said = len(encode(*example(1))), []
    cfg = RolloutsConfig(1, 1, max_mb=3.5 * size / 1e6)
    folder = RolloutsFolder(tmp_path, cfg, None, said.append)
    for step in range(1, 7):
        folder.write(*example(step))
    assert list(rollouts.files(tmp_path)) == [1, 2, 3] and len(said) == 1
    assert "max_mb" in said[0] and "step 4" in said[0]
    assert not list((tmp_path / "rollouts").glob(".*"))
    assert sum(path.stat().st_size for path in rollouts.files(tmp_path).values()) <= cfg.max_mb * 1e6
    # Resumed behind the first step that found no room: full; before it: written anew; with more room: written on.
    small = (example(6)[0], example(6)[1][:1])
    for resumed, limit, expected in ((5, cfg.max_mb, [1, 2, 3]), (5, 1.0, [1, 2, 3, 6]), (1, cfg.max_mb, [1, 6])):
        RolloutsFolder(tmp_path, dataclasses.replace(cfg, max_mb=limit), resumed, said.append).write(*small)
        assert list(rollouts.files(tmp_path)) == expected


def test_a_new_run_leaves_the_files_of_an_old_one_aside(tmp_path):
    (tmp_path / "rollouts").mkdir()
    stored(tmp_path / "rollouts", 5)
    RolloutsFolder(tmp_path, RolloutsConfig(), None).write(*example(1))
    assert list(rollouts.files(tmp_path)) == [1] and list(rollouts.files(tmp_path / "rollouts.old")) == [5]


def test_a_folder_that_cannot_be_written_never_stops_training(tmp_path):
    (tmp_path / "rollouts").write_text("a file")
    said = []
    folder = RolloutsFolder(tmp_path, RolloutsConfig(), 0, said.append)
    folder.write(*example(1))
    folder.write(*example(2))
    assert len(said) == 1 and "cannot be written, the run goes on" in said[0]


# --------------------------------------------------------------------------------------------------------- wrong files


def rewritten(path, change):
    """The file with its lines, as Python values, changed."""
    text = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).decode()
    rows = [json.loads(line) for line in text.splitlines()]
    rows = change(rows) or rows
    raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(raw))


def put(line, **values):
    return lambda rows: rows[line].update(values)


WRONG = {
    "a newer schema": (put(0, schema=4), "schema 4 is newer than 3"),
    "a schema of no version": (put(0, schema=0), "key 'schema': expected 1 to 3, found 0"),
    "a schema of text": (put(0, schema="1"), "key 'schema': expected an integer, found \"1\""),
    "an unknown split": (put(0, split="test"), "key 'split': expected train or held_out, found \"test\""),
    "no header": (lambda rows: rows[1:], "expected the header"),
    "an empty object": (lambda rows: [{}], "expected the header"),
    "a missing row": (lambda rows: rows[:-1], "truncated: 0 of 1 rows of kind 'failure'"),
    "a row too many": (lambda rows: [*rows, rows[-1]], "more rows of kind 'failure' than the 1"),
    "an unknown kind": (put(2, kind="nodes"), "key 'kind': expected task, node, step"),
    "a missing key": (lambda rows: rows[4].pop("text") and None, "key 'text' is missing"),
    "a wrong type": (put(4, token_ids=[1, "2"]), "key 'token_ids': expected a list, each an integer"),
    "a bool for an int": (put(2, node=True), "key 'node': expected an integer, found true"),
    "a huge integer": (put(2, node=2**63), "key 'node': expected an integer"),
    "a number for a flag": (put(4, valid=1), "key 'valid': expected true or false, found 1"),
    "lists of two lengths": (put(4, logprobs=[]), "'token_ids' and 'logprobs'"),
    "learner log-probs of another length": (
        put(4, learner_logprobs=[-1.0]),
        "key 'learner_logprobs': expected an empty",
    ),
    "pieces of another length": (put(4, token_chars=[2, 0]), "key 'token_chars': expected the characters"),
    "pieces of other tokens": (put(4, token_chars=[1]), "key 'token_chars': expected the characters"),
    "a piece below nothing": (put(4, token_chars=[2, -1]), "key 'token_chars': expected the characters"),
    "names without pieces": (put(4, token_chars=[]), "key 'token_chars': expected the characters"),
    "a name too many": (put(4, token_names=["<eos>", "<eos>"]), "key 'token_names': expected a name for each"),
    "a message of two texts": (put(2, messages=[["user", "b"]]), "key 'messages': expected three texts"),
    "a lost completion of an entry": (put(12, completion=9), "memory refreshed: there is no step 9"),
    "a lost completion before a prompt": (put(3, unseen=[9]), "node 1: there is no step 9"),
    "an unknown role": (put(2, role="c"), "key 'role': expected one of"),
    "an unknown model": (put(2, model="c"), "key 'model': expected one of"),
    "rewards of one role": (put(7, rewards={"pay": [1.0]}), "key 'rewards'"),
    "a lost node": (put(4, node=9), "step 0: there is no node 9"),
    "a lost step": (put(7, steps=[8]), "transition 0: there is no step 8"),
    "its own parent": (put(9, parent=2), "key 'parent': expected an earlier transition"),
    "one number twice": (put(5, step=0), "two rows of kind 'step' have one number"),
    "no object": (lambda rows: [*rows, 5], "expected an object, found 5"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_line_that_names_it(case, tmp_path):
    change, said = WRONG[case]
    path = stored(tmp_path)
    rewritten(path, lambda rows: None)
    rollouts.read_file(path)  # the way of writing is not what is wrong
    rewritten(path, change)
    with pytest.raises(ConfigError) as caught:
        list(rollouts.read(path))
    message = str(caught.value)
    assert message.startswith(str(path)) and said in message and "\n" not in message


def test_truncated_damaged_and_missing_files(tmp_path):
    path = stored(tmp_path)
    raw = path.read_bytes()
    for size in (0, 3, 20, len(raw) // 2, len(raw) - 30):
        path.write_bytes(raw[:size])
        with pytest.raises(ConfigError, match=r"truncated|damaged") as caught:
            rollouts.read_file(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    for change in (b"{}\n", raw[:30] + bytes([raw[30] ^ 255]) + raw[31:]):
        path.write_bytes(change)
        with pytest.raises(ConfigError, match="damaged or not compressed"):
            rollouts.read_file(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        rollouts.read_file(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty/rollouts: no files step-N.*is this the workdir.*compiled as one"):
        rollouts.read(tmp_path / "empty")  # before the first step is asked for


def test_one_step_is_read_at_a_time(tmp_path):
    stored(tmp_path, 1)
    stored(tmp_path, 2).write_bytes(b"no rollout")
    steps = rollouts.read(tmp_path)
    assert next(steps).header.step == 1
    with pytest.raises(ConfigError, match="step-00000002"):
        next(steps)


def test_columns_of_numpy_and_pandas(tmp_path, monkeypatch):
    rollout = rollouts.read_file(stored(tmp_path))
    columns = rollout.to_numpy()
    assert columns["step"]["token_ids"][0].tolist() == [5, 6] and np.isnan(columns["step"]["returns"][1])
    assert columns["node"]["messages"][0].tolist() == [["system", "", "h"], ["user", "b", "i"]]
    assert columns["step"]["valid"].dtype == bool and columns["node"]["role"].tolist() == ["a", "b"]
    assert columns["transition"]["rewards/pay"].shape == (3, 2) and "rewards" not in columns["transition"]
    assert np.isnan(columns["step"]["logprobs"][0][1])
    if importlib.util.find_spec("pandas"):
        frames = rollout.to_pandas()
        assert frames["transition"]["rewards/pay/b"].tolist()[0] == 0.1
        assert frames["step"].query("valid").advantage.sum() == 1.0
        assert frames["failure"].message.tolist() == ["no reward"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="data frames need pandas; pip install pandas"):
        rollout.to_pandas()


def test_the_page_documents_every_column_and_setting():
    page = (ROOT / "docs" / "rollouts.md").read_text()
    named, kind = {}, ""
    for first, column in re.findall(r"^\| (`\w+`)? ?\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE):
        kind = first.strip("`") or kind
        named.setdefault(kind, []).extend(re.findall(r"\w+", column))
    assert {k: tuple(v) for k, v in named.items()} == {k: cls._fields for k, cls in rollouts.KINDS.items()}
    header = re.findall(r"`(\w+)`", page.partition("| header |")[2].partition("| kind |")[0])
    assert header == list(rollouts.Header._fields)
    values = re.findall(r"^\| `(\w+)` \| [^|]+ \|$", page.partition("`why` is the first")[2], re.MULTILINE)
    assert set(values) == {
        rollouts.OPPONENT,
        rollouts.EXPERT,
        rollouts.NO_RETURN,
        rollouts.GROUP_NOT_SELECTED,
        "trained",
        rollouts.HELD_OUT,
    } | {
        rollouts.ROLE_NOT_TRAINABLE,
        rollouts.NOT_DRAWN,
    }
    for key, value in dataclasses.asdict(RolloutsConfig()).items():
        assert f"| `run.rollouts.{key}` | {value:g} |" in page


def test_the_reader_needs_no_jax():
    code = "import sys, jaxmarl_llm.telemetry.rollouts; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [({"every": -1}, ">= 0"), ({"tasks": 0}, ">= 1"), ({"eval_tasks": -1}, ">= 0"), ({"max_mb": 0}, "> 0")],
)
def test_settings_are_checked(change, said):
    (key,) = change
    with pytest.raises(ConfigError, match=f"config.run.rollouts.{key}: expected {said}"):
        array_config(**change)
