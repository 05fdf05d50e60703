"""Held-out tasks: none is a training task of any seed or in a demonstration; the error where a side is empty."""

import dataclasses
import json
import re
import shutil
from unittest import mock

import jax
import numpy as np
import pytest

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.data import code_tasks, loaders
from jaxmarl_llm.envs import contract, registry, splits
from jaxmarl_llm.envs.dilemma import array as dilemma
from jaxmarl_llm.envs.dispatch import array as dispatch
from jaxmarl_llm.envs.maze import array as maze
from jaxmarl_llm.envs.registry import EnvConfig
from jaxmarl_llm.envs.relay_dispatch import array as relay
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from tests.test_config_fields import SPECS
from tests.test_layering import ROOT

ONE_GAME = {"matrix", "games", "games_text", "dilemma", "dilemma_text"}  # the last two where the game is ipd
# environment -> its arguments, and the column of a task that makes the task itself (None: all of it)
GENERATED = {
    "chain": ({}, "question"),
    "chain_text": ({}, "question"),
    "chain_coach": ({}, "question"),
    "safety": ({}, "text"),
    "safety_text": ({}, "text"),
    "duet": ({}, "topic"),
    "consult": ({}, "answers"),
    "consult_text": ({}, "answers"),
    "dilemma": ({"game": "split"}, "hands"),
    "dilemma_text": ({"game": "split"}, "hands"),
    "maze": ({}, "walls"),
    "maze_text": ({}, "walls"),
    "programs": ({}, "shown"),
    "build": ({}, "query"),
    "segments": ({}, "question"),
    "facts": ({}, "facts"),
    "defer": ({}, "question"),
    "debate": ({}, "trials"),
    "dispatch": ({}, "query"),
    "dispatch_solo": ({}, "query"),
    "relay_dispatch": ({}, "meaning"),
}
# data set -> its splits in the samples of the package, and the field that makes a task itself
DATA = {
    "gsm8k": (("train", "test"), "question"),
    "bfcl": (("train", "test"), "question"),
    "hotpotqa": (("train", "test"), "question"),
    "taubench_retail": (("train", "test"), "instruction"),
    "scitldr": (("train", "test"), "text"),
}


def tasks_of(environment, side):
    """Tasks as dictionaries of numpy arrays."""
    got = getattr(environment, side)
    if isinstance(environment, contract.HostTask):
        return list(got)
    return [{k: v[i] for k, v in got.items()} for i in range(len(next(iter(got.values()))))]


def contents(tasks, column):
    return {np.asarray(task[column]).tobytes() for task in tasks}


def test_every_environment_is_here_or_has_a_data_set():
    real = {
        "assistant",
        "call_team",
        "call_team_solo",
        "coding",
        "writing",
        "facts_text",
        "programs_text",
        "reference_game",
        "reference_game_solo",
        "two_writers",
        "two_writers_solo",
    }
    assert set(registry.MODULES) - real == {*GENERATED, *ONE_GAME}
    assert set(DATA) == set(loaders._READERS)


@pytest.mark.parametrize("name", GENERATED)
def test_no_held_out_task_is_a_training_task_of_any_seed(name):
    args, column = GENERATED[name]
    made = [EnvConfig(name, args, workers=0).environment(seed) for seed in (0, 1, 2)]
    for one in made:
        held_out = tasks_of(one, "held_out")
        if name.startswith("dispatch"):
            held_out = [task for task in held_out if task["kind"] != dispatch.LOOKUP]
        assert len(held_out) > 100
        for other in made:
            assert not contents(held_out, column) & contents(tasks_of(other, "tasks"), column)
    first, second = (contents(tasks_of(one, "tasks"), column) for one in made[:2])
    # The coach writes the questions of training; tests/envs/test_coach.py has their sides.
    assert first != second or name == "chain_coach", "the tasks of two seeds are the same"


def of_chain(role, asked):
    shown = re.search(r"\d([+-]\d)+", asked)
    return shown and [f"{[*map(int, re.findall(r'[0-9]', shown[0]))]}{re.sub('[0-9]', '', shown[0])}"]


def of_dispatch(role, asked):
    return None if "cap?" in asked else re.split(r"[|>]", asked[1:])[:1]


def of_duet(role, asked):
    return [np.sort(np.array([*asked[1:4].encode()], np.int32)).tobytes()]


def of_hands(role, own, other, last):
    """Both tasks of two rounds in which a role had these hands: the other's last hand is not shown."""
    own, other, last = (dilemma.HANDS.index(hand[0]) for hand in (own, other, last))
    deals = [[[own, other], [last, hidden]] for hidden in range(3) if hidden != last]
    return [np.array(d, np.int32)[:, :: 1 if role == "first" else -1].tobytes() for d in deals]


def of_dilemma(role, asked):
    shown = re.match(r"[12]([rps])([rps])..,([rps])", asked)
    return shown and of_hands(role, *shown.groups())


def of_dilemma_text(role, asked):
    shown = re.match(r"Earlier, with (\w+) against (\w+): .*\nNow your hand is (\w+)", asked)
    return shown and of_hands(role, *shown.groups())


def of_relay(role, asked):
    """The first hop of a master's task of two hops, both of which it sees."""
    shown = re.fullmatch(r"Q([^;|]+);([^;|]+)\|(\w\d)>", asked) if role == "master" else None
    return shown and [f"{shown[3]} {SPELLED[shown[1]]} {SPELLED[shown[2]]}"]


SPELLED = {  # operation in any spelling -> in the first one
    relay.spell(kind, argument, spelling): relay.spell(kind, argument, 0)
    for kind, arguments in enumerate(relay.ARGUMENTS)
    for argument in range(len(arguments))
    for spelling in range(3)
}
# environment -> its arguments, and the tasks that a prompt of a role may be of; None: no task is shown
CONTENT = {
    "chain": ({}, of_chain),
    "chain_text": ({}, of_chain),
    "chain_coach": ({}, of_chain),
    "safety": ({}, lambda role, asked: [asked[1:7]]),
    "safety_text": ({}, lambda role, asked: re.findall(r"Request: (\w+)", asked)),
    "duet": ({}, of_duet),
    "dilemma": ({"game": "split", "rounds": 2}, of_dilemma),
    "dilemma_text": ({"game": "split", "rounds": 2}, of_dilemma_text),
    "programs": ({}, lambda role, asked: [asked[1:9]]),
    "build": ({}, lambda role, asked: [asked[1:8]]),
    "segments": ({}, of_chain),
    "defer": ({}, lambda role, asked: [asked[1:5]]),
    "dispatch": ({}, of_dispatch),
    "dispatch_solo": ({}, of_dispatch),
    "relay_dispatch": ({"hops": (1, 0, 0, 0)}, of_relay),
}


def prompts_of(environment):
    """(role, prompt) of demonstrations; of a chat its last message."""
    if isinstance(environment, contract.HostTask):
        return [(role, prompt[-1].text) for role, prompt, _ in environment.demonstrations(environment.tasks)]
    text, rows = ByteTokenizer().decode, environment.demonstrations(0, 300, 0)
    return [(role, text(ids[:n])) for role, d in rows.items() for ids, n in zip(d["tokens"], d["length"], strict=True)]


def test_every_generated_environment_is_looked_at():
    """Prompts of a maze do not show where the team began, and those of consult and facts a part of the task.

    Debate has no demonstrations.
    """
    elsewhere = {"maze", "maze_text", "consult", "consult_text", "facts", "debate"}
    assert {*CONTENT, *elsewhere} == set(GENERATED)


@pytest.mark.parametrize("name", CONTENT)
def test_no_demonstration_shows_a_held_out_task(name):
    """The lookups of dispatch are on both sides."""
    args, content = CONTENT[name]
    made = EnvConfig(name, {"tasks": 300, **args}, eval_tasks=8, workers=0).environment(0)
    shown = [tasks for role, asked in prompts_of(made) if (tasks := content(role, asked))]
    assert len(shown) > 50 and not [tasks for tasks in shown if all(map(splits.is_held_out, tasks))]


def test_demonstrations_of_mazes_are_of_training_tasks():
    """Those of the text form are of the same scenes."""
    for seat in (0, 1):
        tasks = jax.device_get(maze.scenes(maze.Config(), 0, 200, seat)[0].task)
        rows = {"walls": tasks["walls"].astype(bool), "start": tasks["start"], "goal": tasks["goal"]}
        assert maze.on_side(rows, False).all() and not maze.on_side(rows, True).any()


SHARED_DATA = ROOT.parent / "shared" / "data"  # whole data sets, where somebody has them


@pytest.mark.parametrize("whole", [False, True], ids=["samples", "whole"])
@pytest.mark.parametrize("name", DATA)
def test_no_sample_of_a_data_set_is_in_two_splits(name, whole):
    """Not even with other case, spacing or punctuation."""
    if whole and not SHARED_DATA.is_dir():
        pytest.skip(f"no folder {SHARED_DATA} with whole data sets")
    parts, field = DATA[name]
    folder = SHARED_DATA if whole else None
    rows = [{plain(task[field]) for task in loaders.load(name, split=part, data_dir=folder)[0]} for part in parts]
    for i, one in enumerate(rows):
        for other in rows[i + 1 :]:
            assert one and other and not one & other


def plain(text):
    return "".join(c for c in text.lower() if c.isalnum())


@pytest.mark.parametrize("name", code_tasks.BENCHMARKS)
@pytest.mark.parametrize("whole", [False, True], ids=["samples", "whole"])
def test_no_programming_problem_is_in_two_splits(name, whole):
    if whole and not SHARED_DATA.is_dir():
        pytest.skip(f"no folder {SHARED_DATA} with whole data sets")
    if name == "coophumaneval" and not whole:
        pytest.skip("coophumaneval has no licence file and does not ship")
    folder = SHARED_DATA if whole else None
    rows = {part: code_tasks.load_code(name, data_dir=folder, split=part)[0] for part in ("train", "test")}
    one, other = ({plain(task["prompt"]) for task in some} for some in rows.values())
    assert one and other and not one & other


def test_a_training_row_that_is_also_in_test_is_left_out_and_counted(tmp_path):
    """With other spacing; and tasks that differ in their id alone are one task."""
    folder = tmp_path / "gsm8k"
    shutil.copytree(loaders.FIXTURES / "gsm8k", folder)
    row = json.loads((folder / "test.jsonl").read_text().splitlines()[0])
    before, _ = loaders.load("gsm8k", split="train", data_dir=tmp_path)
    with (folder / "train.jsonl").open("a") as file:
        file.write("\n" + json.dumps({**row, "question": f"  {row['question'].upper()} "}) + "\n")
    after, source = loaders.load("gsm8k", split="train", data_dir=tmp_path)
    assert len(after) == len(before) and source.endswith("without 1 that are also in test")
    one, same = {"id": "a", "question": "q"}, {"id": "b", "question": "q"}
    assert splits.shared([one], [same, {"id": "a", "question": "r"}]).tolist() == [True, False]


def shipped():
    """The environments of shipped configurations, each once, with the name of the first that has it."""
    found = {}
    for spec in SPECS:
        cfg = config_flags.load(spec)
        found.setdefault(repr((cfg.env, cfg.seed)), pytest.param(cfg, id=spec.split("/")[-1]))
    return list(found.values())


@pytest.mark.parametrize("cfg", shipped())
def test_the_held_out_tasks_of_shipped_configurations_are_unseen(cfg):
    """`contract.check` refuses an overlap; nothing but one game and what a part names ``seen`` is let through."""
    if "/" in cfg.env.args.get("data", "") or cfg.env.name == "coding":
        return  # not in the package, or needs a sandbox; `DATA` and tests/envs/test_coding.py have their splits
    with mock.patch.object(registry, "check", wraps=contract.check) as checked:
        made = cfg.env.environment(cfg.seed)
    checked.assert_called_once()
    assert made.same_tasks == (cfg.env.name in ONE_GAME and cfg.env.args.get("game") != "split")
    if isinstance(made, contract.ArrayTask):
        assert ("seen" in made.parts) == cfg.env.name.startswith("dispatch")


def test_an_overlap_is_refused():
    made = EnvConfig("chain", {"tasks": 32}).environment(0)
    spoilt = dataclasses.replace(
        made, held_out={k: np.concatenate([v[:3], made.tasks[k][:2]]) for k, v in made.held_out.items()}
    )
    with pytest.raises(ConfigError, match="held_out: 2 of 5 held-out tasks are also training tasks"):
        contract.check(spoilt, "chain")
    contract.check(dataclasses.replace(spoilt, same_tasks=True), "chain")
    seen = {"seen": np.arange(5) >= 3}
    contract.check(dataclasses.replace(spoilt, parts=seen), "chain")


def test_a_side_without_tasks_is_an_error():
    side = splits.is_held_out("the only task")
    assert splits.draw_task(lambda: "the only task", str, side) == "the only task"
    with pytest.raises(
        ConfigError, match=r"^config\.env\.args: expected settings with more different tasks: .* empty$"
    ):
        splits.draw_task(lambda: "the only task", str, not side)


def test_the_share_of_held_out_contents():
    marks = [splits.is_held_out(f"task {i}") for i in range(4000)]
    assert abs(np.mean(marks) - splits.HELD_OUT_SHARE) < 0.02


def test_unseen_and_seen_queries_of_dispatch_are_evaluated_apart():
    cfg = config_flags.load(next(spec for spec in SPECS if spec.endswith("joyagents_r1.py:tiny")))
    made = cfg.env.environment(cfg.seed)
    assert set(made.parts) == {"seen", "unseen"} and made.parts["seen"].sum() > 20
    assert (made.parts["seen"] == (made.held_out["kind"] == dispatch.LOOKUP)).all()


def test_held_out_tasks_that_are_all_known_are_refused():
    with pytest.raises(ConfigError, match=r"'dispatch': held_out: all 256 held-out tasks are in the part 'seen'"):
        EnvConfig("dispatch", {"mixture": (0, 1, 0, 0)}).environment(0)
    made = EnvConfig("dispatch", {"mixture": (0, 1, 0, 0.1)}).environment(0)
    with pytest.raises(ConfigError, match="parts: seen: expected one bool for each of 256 held-out tasks"):
        contract.check(dataclasses.replace(made, parts={"seen": np.ones(3, bool)}), "dispatch")
