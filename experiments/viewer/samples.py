"""Rollouts that no run wrote: hostile texts, and trees of a given size. The tests and the measurements show them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.telemetry.rollouts_writer import encode

Paid = dict[str, tuple[float | None, ...]]
ROLES = ("a", "</script><b>")
HOSTILE = (
    "</script><script>document.title='broken'</script>", "<!--<script>", "]]>",
    "<img src=x onerror=document.title='broken'>",
    "\u2028\u2029", "\u202eabc", "\x1b[2J\x00", "\U0001f600 \ud83d", "${1}`\\\"'", "&lt;/script&gt;", "", "x" * 5000,
    "<!-- data -->", "</SCRIPT >",
)  # fmt: skip


def header(step: int = 31, **more: Any) -> rollouts.Header:
    """The header of a file. ``step``: its number. ``more``: other fields."""
    return rollouts.Header(
        rollouts.SCHEMA, step, 11, "f" * 64, "grpo", 0, "toy </script>", "product(2)", ROLES, ("m", "other"),
        ("pay", "form"),
        {"pay": 1.0, "form": 0.5}, ("m",), 4, 2, {}, {},
    )._replace(**more)  # fmt: skip


def written(folder: Path, rows: list[rollouts.Row], *steps: int, **more: Any) -> Path:
    """Write files of a run.

    Args:
        folder: Workdir of the run.
        rows: The rows of every file.
        *steps: Number of each file; none: 31.
        **more: Fields of the header.
    """
    (folder / "rollouts").mkdir(parents=True, exist_ok=True)
    for step in steps or (31,):
        made = header(step, **more)
        path = folder / "rollouts" / f"{rollouts.PREFIX[made.split]}-{step:08}.jsonl.zst"
        path.write_bytes(encode(made, rows))
    return folder


def completion(
    number: int, node: int, text: str, returns: float | None, mean: float, **more: Any
) -> rollouts.Completion:
    """A completion whose advantage is its return around the mean of its group.

    Args:
        number: Row of the table of steps.
        node: Its prompt.
        text: The text.
        returns: Its return; None: unknown.
        mean: Of the group.
        **more: Other fields.
    """
    known = returns is not None
    gap = None if returns is None else returns - mean
    values: dict[str, Any] = {
        "token_ids": (5, 6), "logprobs": (-1.0, None), "truncated": False, "source": "policy", "version": 3,
        "returns": returns, "advantage": gap, "group": node if known else -1,
        "valid": known, "selected": known, "trained": known, "why": "trained" if known else "no_return", **more,
    }  # fmt: skip
    return rollouts.Completion(step=number, node=node, text=text, **values)


def hostile_rows() -> list[rollouts.Row]:
    """Two tasks: one of roles at once with every pair played, one of a role alone; every text is hostile."""
    rows: list[rollouts.Row] = [rollouts.Task(0, 70), rollouts.Task(1, 71)]
    for n, (role, task) in enumerate(((0, 0), (1, 0), (0, 1))):
        rows.append(rollouts.Node(n, task, 0, ROLES[role], "m", -1, (1, 2), HOSTILE[n], (3,), (0.5,)))
        rows.append(rollouts.Group(n, task, ROLES[role], 0, 4, 1.5, 1.25, 0.0, 3.0, True))
        rows.append(rollouts.MemoryEvent("read", ROLES[role], 3, n, 0.5, HOSTILE[n + 3], 1.0, 0.2))
    for s in range(12):
        more = {"source": ("policy", "frozen", "scripted", "expert")[s % 4], "truncated": s % 3 == 0}
        lost = s == 11
        rows.append(completion(s, s // 4, HOSTILE[s], None if lost else float(s % 4), 1.5, **more))
    pairs = [(i, 4 + j) for i in range(4) for j in range(4)]
    for j, steps in enumerate([*pairs, *((8 + k, -1) for k in range(4))]):
        valid, task = j != 19, int(j > 15)
        paid: Paid = (
            {"pay": (float(j), 1.0), "form": (1.0, 0.0)} if valid else {"pay": (None, None), "form": (None, None)}
        )
        rows.append(rollouts.Transition(j, task, 0, -1, steps, paid, True, valid))
    rows.append(rollouts.MemoryEvent("written", "a", 1, -1, None, HOSTILE[0], 1.0, 0.7))
    rows.append(rollouts.Failure(71, "step", 0, ("a",), HOSTILE[3]))
    return rows


def tree_rows(nodes: int, group: int = 4, turns: int = 4, tasks: int = 1) -> list[rollouts.Row]:
    """A tree whose prompts each stand behind a completion of the turn before.

    Args:
        nodes: Prompts.
        group: Completions of each.
        turns: Turns; a turn has about four times the prompts of the turn before.
        tasks: Tasks that share the prompts.
    """
    draw = random.Random(0)
    rows: list[rollouts.Row] = [rollouts.Task(t, t) for t in range(tasks)]
    before: list[tuple[int, int]] = [(-1, t) for t in range(tasks)]
    n = s = 0
    for turn in range(turns):
        count = (nodes - n) if turn == turns - 1 else max(tasks, nodes // 4 ** (turns - turn))
        after = []
        for k in range(count):
            parent, task = before[k * len(before) // count]
            role, returns = ROLES[turn % 2], [round(draw.gauss(1, 1), 3) for _ in range(group)]
            mean = sum(returns) / group
            rows.append(
                rollouts.Node(n, task, turn, role, "m", parent, (1,) * 20, f"prompt {n} of turn {turn}", (), ())
            )
            var = sum((r - mean) ** 2 for r in returns) / group
            rows.append(rollouts.Group(n, task, role, turn, group, mean, var, min(returns), max(returns), True))
            for value in returns:
                rows.append(completion(s, n, f"answer {s}", value, mean))
                rows.append(
                    rollouts.Transition(
                        s, task, turn, parent, (s,), {"pay": (value, value), "form": (0.0, 0.0)}, False, True
                    )
                )
                after.append((s, task))
                s += 1
            n += 1
        before = after
    return rows


def held_out_rows(said: str, *contents: str) -> list[rollouts.Row]:
    """Held-out tasks that an evaluation played: two turns of two roles each.

    Args:
        said: Begin of every completion.
        *contents: Hash of the content of each task.
    """
    rows: list[rollouts.Row] = []
    for task, content in enumerate(contents):
        rows.append(rollouts.Task(task, task, content))
        for turn in range(2):
            k, value = 2 * task + turn, float(task + turn)
            rows.append(rollouts.Node(k, task, turn, ROLES[turn], "m", k - 1 if turn else -1, (1,), content, (), ()))
            more = {"advantage": None, "group": -1, "selected": False, "trained": False, "why": rollouts.HELD_OUT}
            rows.append(completion(k, k, f"{said} {k}", value, 0.0, **more))
            paid: Paid = {"pay": (value, value), "form": (0.0, 0.0)}
            rows.append(rollouts.Transition(k, task, turn, k - 1 if turn else -1, (k, -1), paid, turn == 1, True))
    return rows


def aligned_rows(group: int = 4) -> list[rollouts.Row]:
    """One task of two roles at once, whose completions are paired in order. ``group``: completions of each."""
    rows: list[rollouts.Row] = [rollouts.Task(0, 0)]
    for n, role in enumerate(ROLES):
        rows.append(rollouts.Node(n, 0, 0, role, "m", -1, (1,), f"prompt of {role}", (), ()))
        rows.append(rollouts.Group(n, 0, role, 0, group, 1.5, 1.25, 0.0, 3.0, True))
    for s in range(2 * group):
        rows.append(completion(s, s // group, f"answer {s}", float(s % group), 1.5))
    for k in range(group):
        paid: Paid = {"pay": (float(k), float(k)), "form": (0.0, 0.0)}
        rows.append(rollouts.Transition(k, 0, 0, -1, (k, group + k), paid, True, True))
    return rows
