"""Rollouts of runs as a page, or in the terminal:

    jaxmarl-llm view RUN [RUN...]                   write the page RUN/view.html, which needs no network and no server
    jaxmarl-llm view RUN [RUN...] --serve           serve the page on 127.0.0.1; new steps appear while a run trains
    jaxmarl-llm view RUN --text                     print the first task of the newest step that was written
    jaxmarl-llm view RUN --text --step=31 --task=2  print the third task of step 31
    jaxmarl-llm view RUN --text --node=5            print a prompt: what its role saw, and its completions
    jaxmarl-llm view RUN --text --sample=9          print a completion: its advantage step by step, and its tokens
    jaxmarl-llm view RUN --text --held-out          print the first held-out task of the newest evaluation

RUN is a workdir, or one file of its folder rollouts/. A page also has the episodes that `jaxmarl-llm evaluate` wrote to
RUN/evaluate; --text takes that folder as RUN. A tree shows every turn, the completions of each prompt with
reward, return and advantage, and why a completion was trained or not.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxmarl_llm.cli import arguments
from jaxmarl_llm.cli.view_sample import SampleView, printable
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry import rollouts
from jaxmarl_llm.telemetry.rollouts import Completion, Group, Node, Rollout, Transition
from jaxmarl_llm.viewer.data import open_runs
from jaxmarl_llm.viewer.page import write_page
from jaxmarl_llm.viewer.serve import Server

WIDTH = 160  # columns where the output is no terminal


def main(given: Any) -> int:
    """Write the page, serve it, or print one task. ``given``: the parsed arguments."""
    wrong = {
        "--text": given.serve and given.text and "--serve",
        "--out": given.out is not None and (given.serve or given.text) and ("--serve" if given.serve else "--text"),
    }
    for flag, other in wrong.items():
        if other:
            arguments.end(f"{flag} and {other} cannot be given together")
    if given.port is not None and not given.serve:
        arguments.end("--port belongs to --serve")
    of_text = (given.step, given.task, given.node, given.sample, given.held_out or None)
    if not given.text and any(x is not None for x in of_text):
        arguments.end("--step, --task, --node, --sample and --held-out belong to --text; a page has every step")
    if given.task is not None and (given.node is not None or given.sample is not None):
        arguments.end("--task: a --node or a --sample is of one task already")
    if given.text:
        if len(given.run) > 1:
            arguments.end(f"--text: expected one run, got {len(given.run)}")
        return text(given)
    runs = open_runs(given.run)
    if given.serve:
        return serve(Server(runs, 0 if given.port is None else given.port))
    if not 0 < given.max_mb < float("inf"):
        arguments.end(f"--max-mb: expected a number above 0, got {given.max_mb}")
    out = Path(given.out) if given.out else runs[0].folder / "view.html"
    held = write_page(runs, out, given.max_mb)
    for run, steps in zip(runs, held, strict=True):
        if (there := len(run.files())) > len(steps):
            print(f"{run.given}: {len(steps)} of {there} steps fit; a larger --max-mb keeps more", file=sys.stderr)
    print(out)
    return 0


def serve(server: Server) -> int:
    """Answer until the user interrupts. ``server``: it listens already."""
    print(f"{server.url}  (Ctrl+C ends it)", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def text(given: Any) -> int:
    """Print one task, prompt or completion of a step or an evaluation. ``given``: the parsed arguments."""
    found = rollouts.by_split(given.run[0])
    alone = found[rollouts.HELD_OUT] and not found[rollouts.TRAIN]
    split = rollouts.HELD_OUT if given.held_out or alone else rollouts.TRAIN
    rollout, task = chosen(given.run[0], given.step, split), given.task or 0
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    if given.node is not None or given.sample is not None:
        for part in SampleView(rollout, given.node, given.sample).parts():
            console.print(part)
        return 0
    if task not in (there := [row.task for row in rollout.tasks]):
        raise ConfigError(f"--task: expected one of {there}, which {rollout.path} has, got {task}")
    for part in TaskView(rollout, task, given.chars).parts():
        console.print(part, no_wrap=True, overflow="ellipsis")
    return 0


def chosen(run: str, step: int | None, split: str = rollouts.TRAIN) -> Rollout:
    """The rollout of a step of a run, or of an evaluation.

    Args:
        run: Workdir or file.
        step: Number of the step; None: the newest.
        split: ``train``, or ``held_out`` for an evaluation.
    """
    found = rollouts.files(run, split)
    if step is not None and step not in found:
        there = [str(number) for number in found]
        shown = ", ".join(there if len(there) <= 12 else [*there[:6], "...", *there[-5:]])
        raise ConfigError(f"--step: step {step} was not written to {run}; there are {shown}")
    return rollouts.read_file(found[list(found)[-1] if step is None else step])


class TaskView:
    """One task of a rollout as parts that `rich` prints.

    rollout: The rows. task: Position of the task in the batch. chars: Most characters of a text.
    """

    def __init__(self, rollout: Rollout, task: int, chars: int):
        self.rollout, self.task, self.chars = rollout, task, chars
        self.steps = {step.step: step for step in rollout.steps}
        self.groups = {group.group: group for group in rollout.groups}
        self.nodes: dict[int, list[Node]] = collections.defaultdict(list)  # by transition that led there
        self.siblings: dict[int, list[Completion]] = collections.defaultdict(list)  # by node
        self.moves: dict[int, list[Transition]] = collections.defaultdict(list)  # by transition before
        for node in rollout.nodes:
            if node.task == task:
                self.nodes[node.parent].append(node)
        for step in rollout.steps:
            self.siblings[step.node].append(step)
        for move in rollout.transitions:
            if move.task == task:
                self.moves[move.parent].append(move)
        self.role_of = {node.node: node.role for node in rollout.nodes}

    def parts(self) -> Iterator[Any]:
        """Title, tree, failures and transcript."""
        header = self.rollout.header
        number = next(task.number for task in self.rollout.tasks if task.task == self.task)
        held_out = header.split == rollouts.HELD_OUT
        when = "evaluation after step" if held_out else "step"
        title = f"{when} {header.step} (RL step {header.rl_step}) · task {self.task} of {header.tasks}"
        kind = "held-out" if held_out else "training"
        yield self.plain(f"{title} ({kind} task {number}) · {header.environment} · {header.plan}", style="bold")
        weights = ", ".join(f"{name} {_number(weight)}" for name, weight in header.weights.items())
        yield self.plain(f"reward: {weights} · updated: {', '.join(header.updated) or 'no model'}", style="dim")
        yield self.tree()
        for failure in self.rollout.failures:
            if failure.number == number:
                roles = f" of {', '.join(failure.roles)}" if failure.roles else ""
                told = f"failure: {failure.call}{roles}, turn {failure.turn}: {self.cut(failure.message)}"
                yield self.plain(told, style="red")
        yield self.plain("transcript of the first line of play", style="bold")
        yield from map(self.plain, self.transcript())

    def tree(self) -> Any:
        """The tree of turns. A joint action without siblings continues at its own level."""
        from rich.tree import Tree

        root = Tree("start")
        todo = [(root, -1)]
        while todo:
            place, parent = todo.pop()
            nodes, moves, lines = self.nodes[parent], self.moves[parent], {}
            paid = {step: move for move in moves for step in move.steps} if len(nodes) == 1 else {}
            for node in nodes:
                branch = place.add(self.node_line(node))
                for event in self.rollout.memory:
                    if event.event == "read" and event.node == node.node:
                        branch.add(self.plain(f"memory {event.slot} ({_number(event.similarity)}): {event.text}"))
                for step in self.siblings[node.node]:
                    lines[step.step] = branch.add(self.step_line(step, node.role, paid.get(step.step)))
            for move in moves:
                after = lines.get(max(move.steps, default=-1)) if len(nodes) == 1 else place.add(self.move_line(move))
                if self.nodes[move.transition]:
                    todo.append((place if len(moves) == 1 or after is None else after, move.transition))
        return root

    def node_line(self, node: Node) -> Any:
        """Turn, role, player and groups of a prompt."""
        groups = [self.groups[g] for g in dict.fromkeys(s.group for s in self.siblings[node.node] if s.group >= 0)]
        player = node.role if node.model == node.role else f"{node.role} ({node.model})"
        facts = [f"turn {node.turn}", player, f"node {node.node}", *map(_group, groups)]
        return self.plain(f"{' · '.join(facts)} · {self.cut(node.prompt, tail=True)}", style="bold")

    def step_line(self, step: Completion, role: str, move: Transition | None) -> Any:
        """One completion. ``move``: its transition, where one role acts."""
        facts = [f"{'●' if step.trained else '○'} {step.step}"]
        if move is not None:
            facts.append(self.reward(move, role))
        facts += [f"return {_number(step.returns)}", f"advantage {_number(step.advantage, sign=True)}", step.why]
        facts += ["cut off"] * step.truncated
        style = "green" if step.trained else "" if step.valid else "red"
        return self.plain(f"{' · '.join(facts)} · {self.cut(step.text)}", style=style)

    def move_line(self, move: Transition) -> Any:
        """A joint action of several roles."""
        who = " + ".join(str(step) for step in move.steps if step >= 0)
        paid = [f"{self.role(step)}: {self.reward(move, self.role(step))}" for step in move.steps if step >= 0]
        return self.plain(f"joint action {who} · {' · '.join(paid)}", style="cyan" if move.valid else "red")

    def role(self, step: int) -> str:
        return self.role_of[self.steps[step].node]

    def reward(self, move: Transition, role: str) -> str:
        """The weighted reward of a role."""
        if not move.valid:
            return "invalid"
        header = self.rollout.header
        pairs = [(w, move.rewards[name][header.roles.index(role)]) for name, w in header.weights.items()]
        known = [w * value for w, value in pairs if w is not None and value is not None]
        return f"reward {_number(sum(known) if len(known) == len(pairs) else None)}"

    def transcript(self) -> Iterator[str]:
        """The first line of play: who said what."""
        for node in self.nodes[-1][:1]:
            yield f"{'prompt':>12} {self.cut(node.prompt, tail=True)}"
        here = self.moves[-1][:1]
        while here:
            for step in here[0].steps:
                if step >= 0:
                    yield f"{self.role(step):>12} {self.cut(self.steps[step].text)}"
            here = self.moves[here[0].transition][:1]

    def cut(self, text: str, tail: bool = False) -> str:
        """``text`` in quotes, on one line, with at most ``chars`` characters. ``tail``: the last ones are shown."""
        text = printable(text)
        if len(text) > self.chars:
            text = f"…{text[-self.chars :]}" if tail else f"{text[: self.chars]}…"
        return f"“{text}”"

    def plain(self, text: str, style: str = "") -> Any:
        """A line that `rich` shows as it is."""
        from rich.text import Text

        return Text(printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _group(group: Group) -> str:
    chosen = "selected" if group.selected else "not selected"
    return f"group {group.group}: mean {_number(group.mean)}, variance {_number(group.variance)}, {chosen}"


def _number(value: float | None, sign: bool = False) -> str:
    """A number with three digits; – where it is unknown."""
    return "–" if value is None else f"{value:+.3g}" if sign else f"{value:.3g}"


def parser() -> arguments.Parser:
    """The command line."""
    parser = arguments.Parser("view", __doc__)
    parser.add_argument("run", metavar="RUN", nargs="+", help="workdir of a run, or a file of its folder rollouts/")
    parser.add_argument("--out", metavar="FILE", help="the page; default: view.html in the first run")
    parser.add_argument("--max-mb", type=float, default=32, metavar="N", help="MB of steps in a page; default: 32")
    parser.add_argument("--serve", action="store_true", help="serve the page on 127.0.0.1 and write no file")
    parser.add_argument("--port", type=int, metavar="N", help="port of --serve; default: one that is free")
    parser.add_argument("--text", action="store_true", help="print one task")
    parser.add_argument("--step", type=int, metavar="N", help="step, as in metrics.jsonl; default: the newest written")
    parser.add_argument("--held-out", action="store_true", help="print an evaluation; --step: completed steps")
    parser.add_argument("--task", type=int, metavar="K", help="position of the task in the step; default: 0")
    parser.add_argument("--node", type=int, metavar="N", help="print a prompt: its number, as the tree shows it")
    parser.add_argument("--sample", type=int, metavar="N", help="print a completion: its number, as the tree shows it")
    parser.add_argument("--chars", type=int, default=60, metavar="N", help="most characters of a text; default: 60")
    return parser


if __name__ == "__main__":
    arguments.run(parser(), main)
