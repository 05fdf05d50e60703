"""Nouns of the host world: what a Python environment shows, hears and returns. Free of JAX, so workers start fast.

An environment here is a bundle of pure functions over immutable states. So a decision can be sampled again by stepping
its saved state again, without replay or deep copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Message(NamedTuple):
    """One message of a prompt.

    ``speaker`` is the chat template's role: ``system``, ``user``, ``assistant`` or ``tool``. The value ``raw`` means
    that ``ids`` are spliced into the prompt as they are, without a template. ``ids`` are the token ids that were really
    sampled. They are used (token-in, token-out) when ``owner``, the role that said it, shares the reader's tokenizer.
    Otherwise the text is encoded.
    """

    speaker: str
    text: str
    ids: tuple[int, ...] | None = None
    owner: str | None = None


Prompt = tuple[Message, ...]
Rewards = Mapping[str, Mapping[str, float]]  # role -> component -> value


class Action(NamedTuple):
    """One completion. ``ids`` include the stop id when one was sampled; ``text`` does not show it.

    ``truncated`` is True when the length limit ended the completion.
    """

    text: str
    ids: tuple[int, ...]
    truncated: bool = False

    def message(self, owner: str) -> Message:
        """This action as the assistant's turn in its owner's later prompts."""
        return Message("assistant", self.text, self.ids, owner)


class HostEnv(NamedTuple):
    """A Python environment. All functions are pure; ``state`` is immutable, picklable and small.

    reset(seed, task) -> state
    observe(state) -> {role: prompt}: the roles that act now. Several roles act simultaneously: their prompts are
        fixed before anyone speaks.
    step(seed, state, {role: action}) -> (state, rewards, done): the joint action. Rewards are by role, then by
        component. A component that is absent counts as 0.0. A value that is None or not finite makes the transition
        invalid, as does raising. An invalid transition is left out of every statistic, and counted.
    verify(state) -> rewards, or None: a local verdict on an unfinished state, for plans that do not play on.
    seconds: longest time of a step that an action can cause. The pool's timeout must be longer, else the action decides
        that its step has no reward.
    """

    name: str
    roles: tuple[str, ...]
    max_turns: int
    components: tuple[str, ...]
    reset: Callable[[int, Any], Any]
    observe: Callable[[Any], Mapping[str, Prompt]]
    step: Callable[[int, Any, Mapping[str, Action]], tuple[Any, Rewards, bool]]
    verify: Callable[[Any], Rewards] | None = None
    seconds: float = 0.0
