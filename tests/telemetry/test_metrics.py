"""The log of a run: each step once whatever happens, backends that may fail, figures and episodes that can be read."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
import types

import numpy as np
import pytest
from rich.console import Console

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import logger as metrics
from jaxmarl_llm.telemetry import metrics_file
from jaxmarl_llm.telemetry import report as report_module
from jaxmarl_llm.telemetry.backends import AGENT_COLUMNS, Panel, TensorBoard, sparkline
from jaxmarl_llm.telemetry.completion_table import COLUMNS
from jaxmarl_llm.telemetry.keys import KEYS, is_documented
from jaxmarl_llm.telemetry.logger import Logger, throughput
from jaxmarl_llm.telemetry.metrics_file import read_metrics
from jaxmarl_llm.telemetry.report import episodes_markdown, report


def make(workdir, resume_step=None, total_steps=10, tensorboard=False, terminal=False, **options):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)
    return Logger(
        workdir, resume_step=resume_step, total_steps=total_steps, tensorboard=tensorboard, console=console, **options
    )


def shown(logger):
    return logger._panel._console.file.getvalue()


def lines(workdir):
    return (workdir / "metrics.jsonl").read_text().splitlines()


def test_lines_are_json_and_floats_exact(tmp_path):
    with make(tmp_path) as logger:
        logger.log(1, {"reward/total": 0.1 + 0.2, "count/sequences": np.int32(7), "agent/a/kl": np.float32(0.5)})
    assert lines(tmp_path)[0].startswith('{"step": 1, "reward/total": 0.30000000000000004, "count/sequences": 7, ')
    row = json.loads(lines(tmp_path)[0])
    assert row["agent/a/kl"] == 0.5 and row["time/step"] > 0 and "nonfinite_metrics" not in row


def test_nonfinite_values_are_null_and_counted(tmp_path):
    with make(tmp_path) as logger:
        logger.log(1, {"a": math.nan, "b": np.float32("-inf"), "reward/total": math.inf, "c": 1})
        with pytest.raises(TypeError, match="d: a metric is a number, got str"):
            logger.log(2, {"d": "x"})
    row = json.loads(lines(tmp_path)[0], parse_constant=pytest.fail)
    assert [row[k] for k in ("a", "b", "reward/total", "c")] == [None, None, None, 1]
    assert row["nonfinite_metrics"] == 3
    assert "reward –" in shown(logger)


def test_line_is_on_disk_before_the_next_step(tmp_path):
    logger = make(tmp_path)
    logger.log(1, {"a": 1.0})
    assert len(lines(tmp_path)) == 1  # without close: the process may be killed here
    with pytest.raises(ValueError, match="step 1 was logged after step 1"):
        logger.log(1, {"a": 2.0})


def test_resume_writes_each_step_once(tmp_path):
    with make(tmp_path) as logger:
        for step in range(1, 7):
            logger.log(step, {"reward/total": step, "x": math.nan})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "rewa')  # the machine died here
    kept = lines(tmp_path)[:4]
    with make(tmp_path, resume_step=4) as logger:
        with pytest.raises(ValueError, match="step 4 was logged after step 4"):
            logger.log(4, {})
        for step in range(5, 9):
            logger.log(step, {"reward/total": 10 * step})
    assert [json.loads(line)["step"] for line in lines(tmp_path)] == list(range(1, 9))
    assert lines(tmp_path)[:4] == kept  # to the byte
    assert json.loads(lines(tmp_path)[4])["reward/total"] == 50
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]
    with make(tmp_path, resume_step=0):  # a checkpoint of the initial state
        assert lines(tmp_path) == []


def test_new_run_keeps_the_old_file_aside(tmp_path):
    for value in (1.0, 2.0):
        with make(tmp_path) as logger:
            logger.log(1, {"a": value})
    assert '"a": 2.0' in lines(tmp_path)[0] and len(lines(tmp_path)) == 1
    assert '"a": 1.0' in (tmp_path / "metrics.jsonl.old").read_text()


def test_damaged_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n3\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:2: not a JSON object"):
        make(tmp_path, resume_step=2)
    assert len(lines(tmp_path)) == 3  # untouched


class FullDisk:
    """A file that takes half of what is written and fails, as a full disk does."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        self.file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")


def test_full_disk_costs_no_step_and_warns_once(tmp_path, monkeypatch, caplog):
    with make(tmp_path) as logger:
        logger.log(1, {"a": 1.0})
        with monkeypatch.context() as patch:
            patch.setattr(metrics_file, "open", lambda path, mode: FullDisk(path.open(mode)), raising=False)
            logger.log(2, {"a": 2.0})
            logger.log(3, {"a": 3.0})
        logger.log(4, {"a": 4.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "metrics.jsonl fails" in caplog.text and "No space left" in caplog.text


def test_tensorboard_events_and_purge_on_resume(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    for resume, steps in ((None, (1, 2, 3)), (1, (2,))):
        with make(tmp_path, resume, tensorboard=True) as logger:
            for step in steps:
                logger.log(step, {"success": 0.5, "bad": math.nan})
    events = []
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:  # records of length (8 bytes), checksum (4), event, checksum (4)
            size = int.from_bytes(data[:8], "little")
            events.append(Event.FromString(data[12 : 12 + size]))
            data = data[16 + size :]
    scalars = [(e.step, v.tag) for e in events for v in e.summary.value]
    assert scalars.count((2, "success")) == 2 and (3, "time/step") in scalars
    assert not any(tag == "bad" for _, tag in scalars)
    assert [e.step for e in events if e.HasField("session_log")] == [
        2
    ]  # the start: earlier events from 2 on are hidden


def fake_tracker(monkeypatch, name="wandb", fails=False):
    """Calls of a module ``name`` with the interface of W&B, which Trackio has too."""
    calls = []

    class Run:
        def define_metric(self, *args, **options):
            calls.append(("metric", args))

        def log(self, row, **step):
            if fails:
                raise ConnectionError("500")
            calls.append(("log", row, *step.values()))

        def finish(self):
            calls.append(("finish",))

    module = types.ModuleType(name)
    module.Table = lambda columns, data: ("table", columns, data)
    module.init = lambda **options: calls.append(("init", options)) or Run()
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_wandb_continues_the_same_run(tmp_path, monkeypatch):
    calls = fake_tracker(monkeypatch)
    for resume in (None, 1):
        with make(tmp_path, resume, wandb_project="p") as logger:
            logger.log(5, {"a": 1.0, "b": math.nan})
    opened = next(options for name, options in calls if name == "init")
    assert (opened["project"], opened["name"], opened["config"], opened["tags"]) == ("p", tmp_path.name, {}, [])
    ids = [options["id"] for name, options in (c for c in calls if c[0] == "init")]
    assert len(ids) == 2 and ids[0] == ids[1] == (tmp_path / "wandb_id.txt").read_text().strip()
    logged = [call[1] for call in calls if call[0] == "log"]
    assert logged[0]["step"] == 5 and logged[0]["a"] == 1.0 and "b" not in logged[0]
    assert calls[-1] == ("finish",)
    with make(tmp_path / "other", wandb_project="p", run_id="mine"):
        assert (tmp_path / "other" / "wandb_id.txt").read_text() == "mine\n"


def test_trackio_continues_the_same_run(tmp_path, monkeypatch):
    calls = fake_tracker(monkeypatch, "trackio")
    for resume in (None, 5):
        with make(tmp_path, resume, trackio_project="p", config={"seed": 3}) as logger:
            logger.log_completions(6, [])
            logger.log(6, {"a": 1.0, "b": math.nan})
    opened = [call[1] for call in calls if call[0] == "init"]
    assert len(opened) == 2 and opened[0] == opened[1]
    stored = (tmp_path / "trackio_run.txt").read_text().strip()
    assert stored.startswith(tmp_path.name + "-") and len(stored) == len(tmp_path.name) + 7
    assert opened[0] == {"project": "p", "name": stored, "config": {"seed": 3}, "resume": "allow", "embed": False}
    (shown, logged), (last,) = calls[1:3], calls[-1:]
    assert shown == ("log", {"completions": ("table", list(COLUMNS), [])}, 6)
    assert logged[2] == 6 and logged[1]["a"] == 1.0 and not {"b", "step"} & set(logged[1])
    assert last == ("finish",)


def test_failing_backend_warns_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    fake_tracker(monkeypatch, fails=True)
    with make(tmp_path, wandb_project="p") as logger:
        for step in (1, 2, 3):
            logger.log(step, {"a": 1.0})
    assert len(lines(tmp_path)) == 3
    assert [r.getMessage() for r in caplog.records] == ["W&B fails, training goes on: ConnectionError('500')"]


def test_wandb_that_is_not_installed_is_said_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb is not installed"):
        make(tmp_path, wandb_project="p")
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match="trackio is not installed"):
        make(tmp_path, trackio_project="p")
    with pytest.raises(ConfigError, match="gs://bucket/run"):
        make("gs://bucket/run")


def test_other_hosts_write_nothing(tmp_path):
    with make(tmp_path / "run", primary=False, tensorboard=True) as logger:
        with logger.stage("rollout"), logger.first("rollout"):
            pass
        assert "time/rollout" in logger.log(1, {"a": 1.0})
    assert not (tmp_path / "run").exists()


def test_stages_add_up_and_start_again_each_step(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    with make(tmp_path, total_steps=100) as logger:
        for _ in range(2):
            with logger.stage("rollout"), logger.first("generate"):
                clock[0] += 1.5
        with pytest.raises(KeyError), logger.stage("reward"):
            clock[0] += 0.5
            raise KeyError
        first = logger.log(1, {"count/completion_tokens": 300, "count/prompt_tokens": 50})
        clock[0] += 2.0
        second = logger.log(2, {})
        clock[0] += 2.0
        logger.log(3, {})
    assert {k: v for k, v in first.items() if k[:4] in ("time", "spee")} == {
        "time/rollout": 3.0, "time/reward": 0.5, "time/step": 3.5,
        "speed/rollout": 100.0, "speed/reward": 600.0, "speed/step": 100.0,
    }  # fmt: skip
    assert second == {"time/step": 2.0}
    assert shown(logger).startswith("compiling generate…\ncompiled generate in 1.5 s\n")
    assert shown(logger).count("compil") == 2
    assert "step 3/100  2 s/step eta 3m" in shown(logger)  # the median step: the slow first one does not count


def test_plain_lines_at_the_interval_and_at_the_end(tmp_path):
    with make(tmp_path, total_steps=7, interval=3) as logger:
        for step in range(1, 8):
            logger.log(step, {"reward/total": 0.834, "success": 0.71, "eval/success_greedy": 0.5})
    seen = shown(logger).splitlines()
    assert [line.split()[1] for line in seen] == ["3/7", "6/7", "7/7"]
    assert seen[0].startswith("step 3/7 reward 0.834 success 0.71 eval/success_greedy 0.5 ")
    assert seen[2].endswith("eta 0s") and len(lines(tmp_path)) == 7


def test_panel_on_a_terminal(tmp_path):
    row = {
        "success": 0.25, "agent/solver/entropy": 1.5, "agent/solver/updated": 1.0, "agent/critic/memory_size": 12,
        "agent/critic/memory_hit": 0.4, "count/completion_tokens": 100,
    }  # fmt: skip
    with make(tmp_path, terminal=True) as logger:
        for step in (1, 2, 3):
            logger.log(step, {"reward/total": step / 4, **row})
    last = shown(logger).rpartition("╭─")[2]
    assert "step 3/10" in last and "reward 0.75  ▁▅█" in last and "success 0.25" in last
    solver, critic = (next(x for x in last.splitlines() if name in x).split() for name in ("solver", "critic"))
    assert solver[1:-1] == ["solver", "–", "100%", "1.50", "–", "–", "–"]
    assert critic[1:-1] == ["critic", "–", "–", "–", "–", "12", "40%"]
    assert "tokens/s" in last


def test_panel_that_fails_does_not_stop_training(tmp_path, monkeypatch, caplog):
    with make(tmp_path, terminal=True) as logger:
        monkeypatch.setattr(logger._panel, "_update", lambda *_: 1 / 0)
        logger.log(1, {})
        logger.log(2, {})
    assert len(lines(tmp_path)) == 2 and len(caplog.records) == 1


class Remembers:
    """A backend of a user's own; ``broken``: the step whose write fails."""

    def __init__(self, broken=0):
        self.rows, self.broken, self.closed = [], broken, 0

    def write(self, step, metrics):
        if step == self.broken:
            raise ConnectionError("no route")
        self.rows.append((step, dict(metrics)))

    def close(self):
        self.closed += 1


def test_a_backend_of_your_own(tmp_path):
    mine, other = Remembers(), Remembers()
    with make(tmp_path, backends=[mine, other]) as logger:
        written = logger.log(3, {"reward/total": 0.5, "x": math.nan})
        assert mine.rows == [(3, written)] and written["x"] is None and not mine.closed
    assert other.rows == mine.rows and mine.closed == other.closed == 1
    assert json.loads(lines(tmp_path)[0]) == {"step": 3, **written}


def test_a_backend_of_your_own_that_fails_is_named_once(tmp_path, caplog):
    mine, other = Remembers(broken=2), Remembers()
    with make(tmp_path, backends=[mine, other]) as logger:
        for step in (1, 2, 3):
            logger.log(step, {"a": 1.0})
    assert [step for step, _ in mine.rows] == [1, 3] and mine.closed == 1
    assert [step for step, _ in other.rows] == [1, 2, 3] and len(lines(tmp_path)) == 3
    assert [r.getMessage() for r in caplog.records] == [
        "Remembers fails, training goes on: ConnectionError('no route')"
    ]


def test_other_hosts_leave_your_backend_alone(tmp_path):
    mine = Remembers()
    with make(tmp_path, primary=False, backends=[mine]) as logger:
        logger.log(1, {"a": 1.0})
    assert mine.rows == [] and mine.closed == 0


def test_a_backend_that_does_not_open_is_left_out(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(TensorBoard, "__init__", lambda *_: 1 / 0)
    with make(tmp_path, tensorboard=True) as logger:
        logger.log(1, {})
        logger.log(2, {})
    assert len(lines(tmp_path)) == 2 and ["TensorBoard fails" in r.getMessage() for r in caplog.records] == [True]


def test_the_panel_is_a_backend_by_itself():
    console = Console(file=io.StringIO(), width=80, color_system=None)
    panel = Panel(console, 4, interval=2)
    for step in (1, 2, 3, 4):
        panel.write(step, {"reward/total": 1.0, "time/step": 2.0})
    panel.close()
    assert [line[:8] for line in console.file.getvalue().splitlines()] == ["step 2/4", "step 4/4"]


# --- keys ------------------------------------------------------------------------


def test_keys_are_documented_or_not():
    known = ("reward/social", "agent/a b/ratio", "eval/accuracy_majority@5", "memory/x/lo", "sft/nll", "sft/m/nll")
    unknown = ("reward", "reward/a/b", "agent/a/colour", "agents/a/kl", "success_greedy", "time/eval", "x", "")
    assert [key for key in known if not is_documented(key)] == []
    assert [key for key in unknown if is_documented(key)] == []
    assert all(KEYS.values())


def test_panel_and_report_read_documented_keys():
    assert all(is_documented(f"agent/someone/{key}") for key, _ in AGENT_COLUMNS.values())
    assert [key for key in full_row(10) if not is_documented(key)] == ["step", "unknown/key"]


def test_throughput():
    counts = {"completion_tokens": 100, "prompt_tokens": 300}
    assert throughput(counts, {"rollout": 2.0, "update": 4.0, "reward": 0.0}) == {
        "speed/rollout": 50.0,
        "speed/update": 100.0,
    }
    assert throughput({"count/completion_tokens": 10}, {"time/step": 2.0}) == {"speed/step": 5.0}
    assert throughput({}, {"step": 1.0}) == {}


def test_sparkline():
    assert sparkline([0, 1, 2]) == "▁▅█" and sparkline([3, 3]) == "▁▁" and sparkline([]) == ""


def write_rows(workdir, rows):
    workdir.mkdir(exist_ok=True)
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def titles(figure):
    return [axis.get_title(loc="left") for axis in figure.axes]


def full_row(step):
    row = {"step": step, "reward/total": math.sin(step / 9), "reward/format": 0.2, "success": 0.5, "unknown/key": 1.0}
    for role, shift in (("solver", 0.0), ("critic", 0.1)):
        for key in ("reward", "variance", "zero_variance", "entropy", "length", "selected", "updated", "truncated"):
            row[f"agent/{role}/{key}"] = shift + step % 3 / 4
        for key in ("grad_norm", "kl", "clip_fraction"):
            row[f"agent/{role}/{key}"] = shift + step % 2
    for key in ("memory_size", "memory_hit"):  # one agent alone has a memory
        row[f"agent/critic/{key}"] = None if step == 5 else step % 7
    for turn in (0, 1):
        row |= {f"node/{turn}/{key}": turn / 2 for key in ("variance", "zero_variance", "selected")}
    row |= {f"time/{key}": 1.0 for key in ("rollout", "reward", "update", "memory", "step")}
    row |= {"speed/rollout": 100.0, "speed/step": 50.0}
    row |= {"critic/solver/loss": 0.1, "critic/solver/explained_variance": 0.9, "scheme/decorator": 1.0}
    row |= {"count/invalid_share": 0.1, "sft/solver/nll": 1.0, "dpo/solver/accuracy": 0.6}
    if step % 10 == 0:
        row |= {"eval/success_greedy": 0.4, "eval/length": 90}
    return row


def test_report_draws_every_panel_and_breaks_at_gaps(tmp_path):
    write_rows(tmp_path, [full_row(step) for step in range(1, 61) if not 20 < step < 31])
    figure = report(tmp_path)
    assert titles(figure) == [title for title, *_ in report_module.PANELS]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    reward = figure.axes[0]
    assert [text.get_text() for text in reward.get_legend().get_texts()] == ["total", "format"]
    strong = next(line for line in reward.lines if line.get_label() == "total")
    xs, ys = (np.asarray(data, float) for data in (strong.get_xdata(), strong.get_ydata()))
    assert xs[np.isnan(ys)].tolist() == [25.5]  # nothing is drawn across the steps that are missing
    by_title = dict(zip(titles(figure), figure.axes))
    memory = next(line for line in by_title["Memory"].lines if line.get_label() == "critic")
    assert np.isnan(np.asarray(memory.get_ydata(), float)).sum() == 2  # the gap, and the null of step 5
    entropy = next(line for line in by_title["Entropy"].lines if line.get_label() == "critic")
    assert entropy.get_color() == memory.get_color()
    assert not any(label == "step" for label in by_title["Time of a step"].get_legend_handles_labels()[1])


def test_share_of_invalid_rewards_is_no_reward(tmp_path):
    """Files of earlier versions call it a reward."""
    rows = [{"step": s, "reward/total": 1.0, f"{'reward' if s < 3 else 'count'}/invalid_share": 0.5} for s in range(5)]
    write_rows(tmp_path, rows)
    figure = report(tmp_path, None)
    assert titles(figure) == ["Reward", "Joint actions without a valid reward"]
    assert [line.get_label() for line in figure.axes[0].lines] == ["total"]
    assert list(figure.axes[1].lines[-1].get_xdata()) == [0, 1, 2, 3, 4]


def test_equal_curves_of_an_evaluation_are_one_line(tmp_path):
    rows = [{"step": s, "success": s / 9, "eval/accuracy": s / 8, "eval/success": s / 8} for s in range(1, 5)]
    rows[-1] |= {"eval/success_greedy": 0.7, "agent/a/reward": 0.1, "agent/b/reward": 0.1}
    write_rows(tmp_path, rows)
    figure = report(tmp_path, None)
    legends = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in figure.axes]
    assert legends[0] == ["success", "eval/accuracy = eval/success", "eval/success greedy"]
    assert legends[1] == ["a", "b"]  # agents stay apart


def test_title_names_the_phases_of_a_run(tmp_path):
    title = lambda rows: (write_rows(tmp_path / "run", rows), report(tmp_path / "run", None)._suptitle.get_text())[1]
    one = [{"step": s, "reward/total": 1.0} for s in range(31, 61)]
    assert title(one) == "run · steps 31 to 60"
    sft = [{"step": s, "sft/nll": 1.0, "sft/m/nll": 1.0} for s in range(1, 31)]
    assert title(sft + one) == "run · steps 1 to 30 supervised fine-tuning, 31 to 60 reinforcement learning"


def test_report_of_the_first_rows(tmp_path):
    write_rows(tmp_path, [full_row(step) for step in range(1, 21)])
    figure = report(tmp_path, max_rows=2)
    assert titles(figure) == [title for title, *_ in report_module.PANELS[:6]]
    figure.canvas.draw()
    height = figure.bbox.height
    for axis in figure.axes:  # nothing is cut off
        assert axis.get_tightbbox().y1 <= height and axis.get_tightbbox().y0 >= 0


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"step": 1, "reward/total": 1.0}], ["Reward"]),
        ([{"step": s, "success": None, "time/step": 1.0} for s in range(3)], ["Tasks solved"]),
        ([{"step": 1}, {"step": 2, "agent/a/kl": 0.0}, {"step": 9}], ["KL divergence"]),
        ([{"step": 1, "time/rollout": None}], ["Time of a step"]),
    ],
)
def test_report_without_the_optional_keys(tmp_path, rows, expected):
    write_rows(tmp_path / "run", rows)
    figure = report(tmp_path / "run", tmp_path / "elsewhere.png")
    assert titles(figure) == expected and (tmp_path / "elsewhere.png").is_file()
    assert not (tmp_path / "run" / "report.png").exists()


def test_report_of_nothing_says_so(tmp_path):
    for content, message in ((None, "no such file"), ("", "no step"), ('{"step": 1, "x": 2}\n', "no key")):
        if content is not None:
            (tmp_path / "metrics.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=message):
            report(tmp_path, None)


def test_running_mean_keeps_what_is_missing():
    values = [1.0, 3.0, math.nan, 5.0]
    assert report_module._running_mean(values, 1)[:2] == [2.0, 3.0]
    assert math.isnan(report_module._running_mean(values, 1)[2])


def test_episodes_markdown(tmp_path):
    attack = "before\n```\n# not a heading\n`````\nafter\x1b[31m\ud800"
    turns = [
        {"turn": 0, "role": "solver", "prompt": attack, "completion": "x" * 600,
         "rewards": {"correct": 1, "style": None}, "advantage": -0.25, "selected": True},
        {"role": "critic", "completion": ""},
    ]  # fmt: skip
    episodes_markdown([turns, []], tmp_path / "episodes.md", limit=100)
    text = (tmp_path / "episodes.md").read_text()
    assert "### Turn 0 · solver · advantage -0.250 · selected\n\nRewards: correct **1**, style **invalid**\n" in text
    assert "### Turn 1 · critic\n" in text and text.count("Prompt:") == 1
    assert "``````text\nbefore\n```\n# not a heading\n`````\nafter\\x1b[31m\\ud800\n``````\n" in text
    assert f"{'x' * 50}\n[… 500 characters left out …]\n{'x' * 50}\n```" in text
    assert "## Episode 2" in text


def test_the_report_begins_with_what_the_run_reached(tmp_path):
    rows = [
        {"step": 10, "eval/success": 0.52, "eval/return": 1.0},
        {"step": 20, "eval/success": None, "reward/total": 0.7},
        {"step": 30, "final/success": 0.969, "final/return": 2.0},
    ]
    write_rows(tmp_path / "mine", rows)
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"recipe": "grpo", "seed": 3}))
    first, second = report(tmp_path / "mine", None)._suptitle.get_text().split("\n")
    assert first == "success on held-out tasks: 0.52 → 0.97"
    assert second.startswith("mine · recipe grpo · seed 3 · steps")
    for commit, shown in {"a" * 40: "aaaaaaa", f"{'b' * 40}+changes": "bbbbbbb+changes"}.items():
        (tmp_path / "mine" / "versions.json").write_text(json.dumps({"commit": commit}))
        _, second = report(tmp_path / "mine", None)._suptitle.get_text().split("\n")
        assert f" · seed 3 · commit {shown} · " in second
    (tmp_path / "mine" / "versions.json").write_text(json.dumps({"commit": None}))
    assert "commit" not in report(tmp_path / "mine", None)._suptitle.get_text()
    rows[2]["count/held_out"] = 256.0
    write_rows(tmp_path / "counted", rows)
    first, _ = report(tmp_path / "counted", None)._suptitle.get_text().split("\n")
    assert first == "success on 256 held-out tasks: 0.52 → 0.97 ± 0.02"  # 1.96 sqrt(0.969 * 0.031 / 256) = 0.0212
    del rows[2]["count/held_out"]
    without = [{k: v for k, v in row.items() if not k.endswith("success")} for row in rows]
    write_rows(tmp_path / "other", without)
    assert report(tmp_path / "other", None)._suptitle.get_text().startswith("return on held-out tasks: 1.00 → 2.00\n")
    write_rows(tmp_path / "one", without[:1])  # one evaluation changed nothing
    assert report(tmp_path / "one", None)._suptitle.get_text().startswith("one · ")
