"""The social dilemmas of `dilemma` through chat prompts, for host models: the same rounds, payoffs and tasks.

A reply's move is the only word of ``C``, ``D``, ``cooperate`` and ``defect`` in it (prisoner's dilemma), or the only
whole number from 0 to 10 (Trust-and-Split), in any sentence; anything else is illegal, and pays as in `dilemma`:
without two moves a round of the prisoner's dilemma pays nothing, an illegal claim claims nothing. Messages are heard
as written, up to ``message`` characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jaxmarl_llm.envs import dilemma
from jaxmarl_llm.envs.array_text import board, check_tasks, spoken, task_rows
from jaxmarl_llm.envs.dilemma import CLAIMS, COINS, HIGH, LOW, ROLES
from jaxmarl_llm.envs.prompts import asked, entry, with_memory
from jaxmarl_llm.text import Action, ConfigError, HostEnv, Message, Prompt, Rewards

__all__ = ["Config", "demonstrations", "make", "move_of", "prompt", "strategy", "tasks", "with_memory"]
HANDS = dict(zip(dilemma.HANDS, ("rock", "paper", "scissors"), strict=True))
NONE = "nothing legal"
MOVES = {str(coins): CLAIMS[coins] for coins in range(COINS + 1)} | {
    "C": "C",
    "D": "D",
    NONE: "?",
}  # a reply's -> shown
NAMES = {shown: move for move, shown in MOVES.items()}
FIGURES = ("social", "cooperation")  # components to look at, which a player is not paid
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
    message: int = 500  # split: characters of a message that are heard; 0: no messages, one turn a round
    split: str = "train"  # train or test: other hands
    count: int = 0  # 0: as many as ``tasks``

    def __post_init__(self):
        super().__post_init__()
        check_tasks("dilemma_text", self)
        if self.response != 1:
            raise ConfigError(f"dilemma_text: response: expected 1 (replies are of any length), got {self.response}")

    @property
    def board(self) -> dilemma.Config:
        """The array environment's configuration: a message is a turn there, its text is kept here."""
        return replace(self, message=min(self.message, 1))


class State(NamedTuple):
    inner: Any  # of `dilemma`
    words: tuple[str, ...] = ()  # this round's messages


def move_of(game: str, text: str) -> str:
    """The legal move in a reply, ``C``, ``D`` or a number, or NONE."""
    if game == "ipd":
        found = {w[0].upper() for w in re.findall(r"\b(?:cooperate|defect|C|D)\b", text, re.IGNORECASE)}
    else:
        whole = re.findall(r"(?<![0-9.,-])[0-9]{1,3}(?![0-9]|[.,][0-9])", text)
        alone = len(re.findall(r"[0-9]+", text)) == 1
        found = {str(int(n)) for n in whole if alone and int(n) <= COINS}
    return found.pop() if len(found) == 1 else NONE


def prompt(config: Config, shown: str, words: Sequence[str] = ()) -> Prompt:
    """``shown`` as in `dilemma`, but for the messages: what was said and heard this round, or nothing yet."""
    seen = shown[1:-1].partition(":")[0]
    if config.game == "ipd":
        past = [seen[i : i + 2] for i in range(0, len(seen), 2)]
        lines = [f"Round {i + 1}: {_chosen(*moves)}" for i, moves in enumerate(past)]
        lines.append(f"Now round {len(past) + 1}.")
        return _chat(IPD, config, lines)
    *past, hand = seen.split(",")
    lines = [f"Earlier, with {HANDS[p[0]]} against {HANDS[p[1]]}: {_chosen(*p[2:])}" for p in past]
    lines.append(f"Now your hand is {HANDS[hand]}.")
    if words:
        lines.append(f"You said: {words[0]}\nThe other player said: {words[1]}")
    talks = config.message > 0 and not words
    lines.append("Send the other player a short message." if talks else "How many coins do you claim?")
    return _chat(SPLIT, config, lines)


def _chosen(own: str, other: str) -> str:
    return f"you chose {NAMES[own]}, the other player {NAMES[other]}."


def _chat(rules: str, config: Config, lines: Sequence[str]) -> Prompt:
    return Message("system", rules.format(rounds=config.rounds)), Message("user", "\n".join(lines))


def make(config: Config) -> HostEnv:
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
    return task_rows(dilemma.make_tasks, config)


def demonstrations(config: Config, tasks: Sequence, memory: Sequence[str] = ()) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion): those of `dilemma`, as many for each role as there are tasks. A message is a hand's
    name.
    """
    out = []
    for role, shown, said in spoken(dilemma.demonstrations(config.board, config.seed, len(tasks))):
        words = [HANDS[letter] for letter in shown.removesuffix(">").split(":")[1:]]
        asking = with_memory(prompt(config, shown, words), memory)
        out.append((role, asking, HANDS[said] if said in HANDS else NAMES[said]))
    return out


def strategy(role: str, shown: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    own = sum(value for component, value in rewards.items() if component not in FIGURES)
    return entry(role, own, asked(shown), action)
