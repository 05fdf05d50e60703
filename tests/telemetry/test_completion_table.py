"""Tables of completions in TensorBoard and W&B: what they show, and that texts stay text."""

from __future__ import annotations

import html
import re

from tensorboardX.proto.event_pb2 import Event

from jaxmarl_llm.telemetry.completion_table import COLUMNS, LARGEST, LONGEST, markdown, table_of
from jaxmarl_llm.telemetry.rollouts import Completion, Node
from jaxmarl_llm.telemetry.rollouts_writer import RolloutsConfig, RolloutsFolder
from tests.telemetry.test_metrics import fake_tracker, make
from tests.telemetry.test_rollouts import example

HOSTILE = "a | b\n<script>x</script> `c` **d** \ud800\x1b[31m"


def node(number, task, prompt="Q?", role="solver"):
    return Node(number, task, 0, role, role, -1, (1,), prompt, (), ())


def completion(number, at, text, value=0.5, why="trained"):
    return Completion(number, at, (1,), text, (-0.5,), False, "policy", 0, value, value, 0, True, True, True, why)


ROWS = [
    node(0, 1),
    node(1, 0, "x" * LONGEST + "end"),
    completion(0, 0, HOSTILE),
    completion(1, 1, "y", None, "no_return"),
]


def test_rows_go_task_by_task_with_the_ends_of_prompts():
    first, second = table_of(ROWS).rows
    assert first == (0, 0, "solver", "…" + "x" * (LONGEST - 3) + "end", "y", None, None, "no_return")
    assert second[:4] == (1, 0, "solver", "Q?") and second[5:] == (0.5, 0.5, "trained")
    assert second[4] == HOSTILE.replace("\ud800", "?")


def test_texts_are_no_markup():
    lines = markdown(table_of(ROWS)).split("\n")
    assert len(lines) == 4 and lines[0] == f"| {' | '.join(COLUMNS)} |"
    cells = lines[3].removeprefix("| ").removesuffix(" |").split(" | ")
    assert len(cells) == len(COLUMNS) and cells[5] == "0.5"
    assert not re.search(r"[<>*`|\x1b]", cells[4])
    shown = html.unescape(cells[4].replace("&#27;", "ESC"))  # a browser shows no character 27 either
    assert shown == HOSTILE.replace("\ud800", "?").replace("\n", "⏎").replace("\x1b", "ESC")


def test_a_large_tree_is_cut_and_says_so():
    many = [node(0, 0), *(completion(i, 0, str(i)) for i in range(LARGEST + 3))]
    text = markdown(table_of(many))
    assert text.endswith(f"\n\n{LARGEST} of {LARGEST + 3} completions.") and text.count("\n| ") == LARGEST + 1


def test_both_backends_show_the_steps_whose_rollouts_are_kept(tmp_path, monkeypatch):
    calls = fake_tracker(monkeypatch)
    config = {"recipe": "grpo", "seed": 3, "env": {"name": "chain"}}
    with make(tmp_path, tensorboard=True, wandb_project="p", config=config) as logger:
        folder = RolloutsFolder(tmp_path, RolloutsConfig(), None, seen=logger.log_completions)
        header, rows = example(7)
        folder.write(header, iter(rows))
        logger.log(7, {"success": 0.5})
        full = RolloutsFolder(tmp_path / "full", RolloutsConfig(max_mb=1e-6), None, seen=logger.log_completions)
        full.write(*example(8))  # not kept, so not shown
    (opened,) = (options for name, *options in calls if name == "init")
    assert opened[0]["config"] == config and opened[0]["tags"] == ["grpo", "chain"]
    (logged,) = (call[1] for call in calls if call[0] == "log" and "completions" in call[1])
    expected = [list(row) for row in table_of(rows).rows]
    assert logged == {"step": 7, "completions": ("table", list(COLUMNS), expected)} and expected
    data = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    texts = []
    while data:  # records of length (8 bytes), checksum (4), event, checksum (4)
        size = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + size])
        texts += [(event.step, v.tensor.string_val[0].decode()) for v in event.summary.value if "text" in v.tag]
        data = data[16 + size :]
    assert texts == [(7, markdown(table_of(rows)))]
