"""Prompts of host environments as messages, for recorded rollouts: what a role saw, and what it did not see."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxmarl_llm.envs.chat import quotes
from jaxmarl_llm.messages import Message, Prompt
from jaxmarl_llm.rollout.host_runner import HostEnvRunner
from jaxmarl_llm.training.algorithm import StepParts, StepResult


class PromptReader:
    """The messages of the prompts of one step. Array environments have no messages, so every answer is empty.

    step: Parts of the training step. result: Result of the step, on the host.
    """

    def __init__(self, step: StepParts, result: StepResult):
        self._step, self._tree = step, result.tree
        host = None if result.played is None else result.played.records
        self._records = [] if host is None else host.records
        self._first: dict[int, int] = {}  # node -> its first completion
        steps = result.tree.steps
        for s in np.flatnonzero(steps.valid)[: len(self._records)].tolist():
            self._first.setdefault(int(steps.node[s]), s)
        runner = step.env_runner
        self._hears = runner.task.hears if isinstance(runner, HostEnvRunner) else quotes

    def _prompt(self, node: int) -> Prompt:
        """Messages of a prompt; none where they are not known. A raw message has the text of its ids."""
        if node not in self._first:
            return ()
        decode = self._step.team.model_of(int(self._tree.nodes.role[node])).tokenizer.decode
        text = lambda m: m.text if m.speaker != "raw" or m.ids is None else decode(m.ids)
        return tuple(m._replace(text=text(m)) for m in self._records[self._first[node]].prompt)

    def messages(self, node: int) -> tuple[tuple[str, str, str], ...]:
        """Speaker, owner or "", and text of each message of a prompt.

        Args:
            node: Row of the table of nodes.
        """
        return tuple((m.speaker, m.owner or "", m.text) for m in self._prompt(node))

    def cut_tokens(self, node: int) -> int:
        """Tokens that the limit of the prompt's length left out.

        Args:
            node: Row of the table of nodes.
        """
        if not (prompt := self._prompt(node)):
            return 0
        nodes, team = self._tree.nodes, self._step.team
        role = int(nodes.role[node])
        whole = team.model_of(role).tokenizer.render(prompt, team.roles[role].name)
        return max(0, len(whole) - int(nodes.length[node]))

    def unseen(self, node: int) -> tuple[int, ...]:
        """Completions on the way to a prompt that the prompt does not tell.

        A prompt tells a completion that it quotes, or of which the environment says that the role hears it.

        Args:
            node: Row of the table of nodes.
        """
        if not (prompt := self._prompt(node)):
            return ()
        reader = self._step.team.roles[self._tree.nodes.role[node]].name
        return tuple(s for s in self._before(node) if not self._told(reader, prompt, s))

    def _before(self, node: int) -> Iterator[int]:
        """Completions of the joint actions that led to a prompt, the last one first."""
        moves, at = self._tree.transitions, int(self._tree.nodes.parent[node])
        while at >= 0:
            yield from (int(s) for s in moves.steps[at] if s >= 0)
            at = int(moves.parent[at])

    def _told(self, reader: str, prompt: Prompt, step: int) -> bool:
        said = self._records[step]
        text, role = said.action.text, said.role
        if _contains(prompt, text) and quotes(reader, prompt, role, text):
            return True
        try:
            return self._hears is not quotes and bool(self._hears(reader, prompt, role, text))
        except Exception:  # a function that only readers of rollouts need never stops training
            return False


def _contains(prompt: tuple[Message, ...], text: str) -> bool:
    """Whether a message has ``text``: far cheaper than `quotes`, which looks at ends of words too."""
    return any(text.strip() in message.text for message in prompt)
