"""One prompt or one completion of a rollout in the terminal: transcript, arithmetic of the advantage, and tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.telemetry.rollouts import Completion, Node, Rollout, Transition

CLOSE = 1e-4  # relative difference of two numbers that are shown as equal


class SampleView:
    """A prompt, and one of its completions, as parts that `rich` prints.

    rollout: The rows. node: Number of the prompt; None: that of ``sample``. sample: Number of the completion; None: all
    completions of the prompt, without their tokens.

    Raises ConfigError where a number is not there, or the completion is not one of the prompt.
    """

    def __init__(self, rollout: Rollout, node: int | None, sample: int | None):
        self.rollout = rollout
        self.steps = {step.step: step for step in rollout.steps}
        self.nodes = {row.node: row for row in rollout.nodes}
        self.moves = {move.transition: move for move in rollout.transitions}
        self.groups = {group.group: group for group in rollout.groups}
        if sample is not None and sample not in self.steps:
            raise ConfigError(f"--sample: {rollout.path} has no completion {sample}; {_range(list(self.steps))}")
        number = self.steps[sample].node if sample is not None and node is None else node
        if number not in self.nodes:
            raise ConfigError(f"--node: {rollout.path} has no prompt {number}; {_range(list(self.nodes))}")
        self.node: Node = self.nodes[number]
        if sample is not None and self.steps[sample].node != number:
            raise ConfigError(f"--sample: completion {sample} belongs to node {self.steps[sample].node}, not {number}")
        self.sample = None if sample is None else self.steps[sample]

    def parts(self) -> Iterator[Any]:
        """Title, what the role saw, what was played before, and completions or one completion."""
        node, header = self.node, self.rollout.header
        player = node.role if node.model == node.role else f"{node.role} ({node.model})"
        title = f"step {header.step} · task {node.task} · turn {node.turn} · {player} · node {node.node}"
        yield _line(title if self.sample is None else f"{title} · completion {self.sample.step}", "bold")
        cut = f", {node.cut_tokens} more were cut from its middle" if node.cut_tokens else ""
        yield _line(f"{node.role} saw {len(node.prompt_ids)} tokens{cut}", "bold")
        for speaker, owner, text in node.messages:
            yield from _turn(f"{owner} ({speaker})" if owner else speaker, text)
        if not node.messages:
            yield from _turn("prompt", node.prompt)
        yield from self._memory("read", node.node, -1)
        yield from self._before()
        if self.sample is not None:
            yield from self._completion(self.sample)
            return
        yield _line("completions", "bold")
        for step in self.rollout.steps:
            if step.node == node.node:
                yield from _turn(f"{step.step}", step.text)
                yield _line(f"{'':>16}{'; '.join(self.arithmetic(step))}", "dim")

    def _before(self) -> Iterator[Any]:
        """The line of play that led to the prompt."""
        line: list[Transition] = []
        at = self.moves.get(self.node.parent)
        while at is not None:
            line.insert(0, at)
            at = self.moves.get(at.parent)
        if line:
            yield _line("played before", "bold")
        for move in line:
            for number in move.steps:
                if number >= 0:
                    hidden = number in self.node.unseen
                    role = self.nodes[self.steps[number].node].role
                    who = f"{role}, not seen" if hidden else role
                    yield from _turn(who, self.steps[number].text, "dim" if hidden else "")

    def _memory(self, event: str, node: int, completion: int) -> Iterator[Any]:
        """Entries of one event, of a prompt or of a completion; -1: of none."""
        for row in self.rollout.memory:
            if row.event == event and (row.node, row.completion) == (node, completion):
                yield from _turn(f"memory {event}", f"slot {row.slot}: {row.text}")

    def _completion(self, step: Completion) -> Iterator[Any]:
        """One completion: its text, its reward, its advantage, its entries of memory, and its tokens."""
        yield _line(f"{self.node.role} wrote", "bold")
        yield from _turn(str(step.step), step.text)
        yield _line("reward by component", "bold")
        for move in self.rollout.transitions:
            if step.step in move.steps:
                yield _line(f"{'':>16}joint action {move.transition}: {self._reward(move)}")
        yield _line("advantage", "bold")
        for text in self.arithmetic(step):
            yield _line(f"{'':>16}{text}")
        for event in ("written", "refreshed"):
            yield from self._memory(event, -1, step.step)
        yield _line(f"tokens: {len(step.token_ids)}{', cut off by the length limit' * step.truncated}", "bold")
        yield _tokens(step)

    def _reward(self, move: Transition) -> str:
        """Value, weight and product of each paid component."""
        if not move.valid:
            return "no valid reward: unknown, not 0"
        header, out = self.rollout.header, []
        for name, weight in header.weights.items():
            value = move.rewards[name][header.roles.index(self.node.role)]
            paid = None if value is None or weight is None else value * weight
            out.append(f"{name} {_number(value)} × {_number(weight)} = {_number(paid)}")
        return ", ".join(out)

    def arithmetic(self, step: Completion) -> list[str]:
        """How the advantage of a completion came from its return, in sentences.

        Args:
            step: The completion.
        """
        group = self.groups.get(step.group)
        if group is None or step.returns is None or group.mean is None:
            return [f"no return is known, so there is no advantage · {step.why}"]
        gap, std = step.returns - group.mean, math.sqrt(max(0.0, group.variance or 0.0))
        out = [f"return {_number(step.returns)} − group mean {_number(group.mean)} = {_number(gap, True)}"]
        if step.advantage is not None:
            if _close(gap, step.advantage):
                out.append("the advantage is this difference")
            elif std > 0 and _close(gap / std, step.advantage):
                out.append(f"divided by the standard deviation of the group, {_number(std)}")
            else:
                factor = f", {_number(step.advantage / gap)} times the difference" if gap else ""
                out.append(f"the credit rule made it {_number(step.advantage, True)}{factor}")
        return [*out, f"advantage {_number(step.advantage, True)} · {step.why}"]


def _tokens(step: Completion) -> Any:
    """A table: a row for each token with its piece of text, its id, and its log-probs."""
    from rich.table import Table
    from rich.text import Text

    table, learner = Table(box=None, pad_edge=False), bool(step.learner_logprobs)
    for name in ("token", "text", "id", "log-prob", *["update − sampler"] * learner):
        table.add_column(name, justify="left" if name == "text" else "right", no_wrap=name != "text")
    pieces = zip(step.pieces, step.shown_tokens) if step.pieces else [("", "")] * len(step.token_ids)
    for k, ((piece, shown), token) in enumerate(zip(pieces, step.token_ids, strict=True)):
        style = "" if piece == shown else "italic"  # a name
        text = f"“{printable(shown)}”" if shown and piece == shown else printable(shown)
        row: list[Any] = [str(k), Text(text, style=style), str(token), _number(step.logprobs[k])]
        if learner:
            new, old = step.learner_logprobs[k], step.logprobs[k]
            row.append(_number(None if new is None or old is None else new - old, True))
        table.add_row(*row)
    return table


def _turn(who: str, text: str, style: str = "") -> Iterator[Any]:
    """A speaker and a text: one line of the terminal for each line of the text."""
    for k, line in enumerate(text.split("\n")):
        yield _line(f"{who if k == 0 else '':>16} {line}", style)


def _line(text: str, style: str = "") -> Any:
    """A line that `rich` shows as it is."""
    from rich.text import Text

    return Text(printable(text), style=style)


def printable(text: str) -> str:
    """Write escapes for line ends and for everything else that may not reach a terminal.

    Args:
        text: Any text.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= CLOSE * max(1e-2, abs(a), abs(b))


def _range(numbers: Sequence[int]) -> str:
    return f"its numbers are {min(numbers)} to {max(numbers)}" if numbers else "it has none"


def _number(value: float | None, sign: bool = False) -> str:
    """A number with four digits; – where it is unknown."""
    return "–" if value is None else f"{value:+.4g}" if sign else f"{value:.4g}"
