"""The social dilemmas of `dilemma` through chat prompts, for host models: the same rounds, payoffs and tasks.

In the prisoner's dilemma the move of a reply is its only word among ``C``, ``D``, ``cooperate`` and ``defect``. In
Trust-and-Split it is the only whole number from 0 to 10. The move may stand in any sentence. Anything else is illegal
and pays as in `dilemma`. Without two moves a round of the prisoner's dilemma pays nothing, and an illegal claim claims
nothing. Messages are heard as written, up to ``message`` characters.

Shared argument: ``config`` has the settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.chat import asked, entry, with_memory
from jaxmarl_llm.envs.dilemma import array as dilemma
from jaxmarl_llm.envs.dilemma.array import BAR, CLAIMS, COINS, COMMA, HIGH, LOW, ROLES, same_tasks
from jaxmarl_llm.envs.prompt_grammar import prompt_parts
from jaxmarl_llm.envs.text_adapter import board, sample_texts, task_rows
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = ["Config", "demonstrations", "make", "move_of", "prompt", "same_tasks", "strategy", "tasks", "with_memory"]
HANDS = dict(zip(dilemma.HANDS, ("rock", "paper", "scissors"), strict=True))
NONE = "nothing legal"
# The move of a reply -> its byte in prompts.
MOVES = {str(coins): CLAIMS[coins] for coins in range(COINS + 1)} | {"C": "C", "D": "D", NONE: "?"}
NAMES = {shown: move for move, shown in MOVES.items()}
FIGURES = ("social", "cooperation")  # components for the log, which a player is not paid
IPD = (
    "You play a repeated game with another player. In each of {rounds} rounds both of you choose C or D at once. "
    "You earn 3 each for C and C, 1 each for D and D; who plays D against C earns 5, the other one 0. "
    "Answer with C or D alone."
)
SPLIT = (
    f"You share {COINS} coins with another player in each of {{rounds}} rounds. Each of you holds a different hand, "
    "rock, paper or scissors, that only you see. "
    f"A coin is worth {HIGH:g} to the one whose hand wins and {LOW:g} to the other. You both name how many coins you "
    f"claim, 0 to {COINS}, at once; if the claims add up to more than {COINS} the coins are split in proportion."
)


@dataclass(frozen=True)
class Config(dilemma.Config):
    """The settings of `dilemma`, and which of its tasks are played."""

    message: int = 500  # split: characters of a message that are heard; 0: no messages, one turn a round
    split: str = "train"  # train or test: other hands
    count: int = 0  # 0: as many as ``tasks``

    def check(self, path: str) -> None:
        super().check(path)
        checks.split_and_count(path, self)
        if self.response != 1:
            checks.refuse(path, "response", "1 (replies are of any length)", self.response)

    @property
    def board(self) -> dilemma.Config:
        """The array environment's configuration: a message is a turn there, its text is kept here."""
        return replace(self, message=min(self.message, 1))


class State(NamedTuple):
    """An episode so far."""

    inner: Any  # of `dilemma`
    words: tuple[str, ...] = ()  # this round's messages


def move_of(game: str, text: str) -> str:
    """The legal move in the reply ``text`` in ``game``: ``C``, ``D`` or a number, or NONE."""
    if game == "ipd":
        found = {w[0].upper() for w in re.findall(r"\b(?:cooperate|defect|C|D)\b", text, re.IGNORECASE)}
    else:
        whole = re.findall(r"(?<![0-9.,-])[0-9]{1,3}(?![0-9]|[.,][0-9])", text)
        alone = len(re.findall(r"[0-9]+", text)) == 1
        found = {str(int(n)) for n in whole if alone and int(n) <= COINS}
    return found.pop() if len(found) == 1 else NONE


def prompt(config: Config, shown: str, words: Sequence[str] = ()) -> Prompt:
    """The chat prompt of a player.

    shown: its prompt in `dilemma`, whose messages are not used
    words: its own message of this round and the other player's; empty before they are sent
    """
    seen = prompt_parts(shown, BAR).subject
    if config.game == "ipd":
        past = [seen[i : i + 2] for i in range(0, len(seen), 2)]
        lines = [f"Round {i + 1}: {_chosen(*moves)}" for i, moves in enumerate(past)]
        lines.append(f"Now round {len(past) + 1}.")
        return _chat(IPD, config, lines)
    *past, hand = seen.split(COMMA)
    lines = [f"Earlier, with {HANDS[p[0]]} against {HANDS[p[1]]}: {_chosen(*p[2:])}" for p in past]
    lines.append(f"Now your hand is {HANDS[hand]}.")
    if words:
        lines.append(f"You said: {words[0]}\nThe other player said: {words[1]}")
    talks = config.message > 0 and not words
    lines.append("Send the other player a short message." if talks else "How many coins do you claim?")
    return _chat(SPLIT, config, lines)


def _chosen(own: str, other: str) -> str:
    """The moves of a past round in words, from their bytes."""
    return f"you chose {NAMES[own]}, the other player {NAMES[other]}."


def _chat(rules: str, config: Config, lines: Sequence[str]) -> Prompt:
    """The prompt with ``rules`` as its system message and ``lines`` as its user message."""
    return Message("system", rules.format(rounds=config.rounds)), Message("user", "\n".join(lines))


def make(config: Config) -> HostEnv:
    """The environment of ``config``."""
    env = dilemma.make(config.board)
    play, talks = board(env, 1), config.game == "split" and config.message > 0

    def reset(seed: int, task: Mapping[str, Any]) -> State:
        return State(play.reset(seed, task))

    def observe(state: State) -> dict[str, Prompt]:
        heard = {role: state.words[::order] for role, order in zip(ROLES, (1, -1), strict=True)}
        return {role: prompt(config, shown, heard[role]) for role, shown in play.look(state.inner).items()}

    def step(seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
        texts = [actions[role].text for role in ROLES]
        first = talks and not state.words
        moves = [NONE if first else move_of(config.game, text) for text in texts]
        inner, rewards, done = play.step(state.inner, [MOVES[move].encode() for move in moves])
        return State(inner, tuple(text[: config.message] for text in texts) if first else ()), rewards, done

    return HostEnv("dilemma_text", ROLES, env.max_turns, env.components, reset, observe, step)


def tasks(config: Config) -> list[dict[str, Any]]:
    """The tasks of the configured split, as rows of `dilemma`'s tasks."""
    return task_rows(dilemma.make_tasks, config)


def demonstrations(config: Config, tasks: Sequence) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion): those of `dilemma`, as many for each role as there are tasks.

    A message is a hand's name.
    """
    out = []
    for role, shown, reply in sample_texts(dilemma.demonstrations(config.board, config.seed, len(tasks))):
        words = [HANDS[letter] for letter in prompt_parts(shown, BAR).entries]
        out.append((role, prompt(config, shown, words), HANDS[reply] if reply in HANDS else NAMES[reply]))
    return out


def strategy(role: str, shown: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample: the prompt ``shown`` to the role, its ``action`` and its own payoff.

    ``rewards``: the components of the sample.
    """
    own = sum(value for component, value in rewards.items() if component not in FIGURES)
    return entry(role, own, asked(shown), action)
