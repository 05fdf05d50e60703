"""The social dilemmas of `dilemma` as a game of chat: the same rounds and payoffs, for models that read and write.

A reply's move is the only word of ``C``, ``D``, ``cooperate`` and ``defect`` in it (prisoner's dilemma), or the only
whole number from 0 to 10 (Trust-and-Split), in any sentence; anything else is illegal, and pays as in `dilemma`:
without two moves a round of the prisoner's dilemma pays nothing, an illegal claim claims nothing. Messages are heard
as written, up to ``MESSAGE`` characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxmarl_llm.envs.dilemma import COINS, ILLEGAL, ROLES, Config, payoffs
from jaxmarl_llm.envs.matrix import COMPONENTS, GAMES, MOVES
from jaxmarl_llm.text import Action, HostEnv, Message, Prompt

MESSAGE = 500  # characters, as in the paper
HANDS = ("rock", "paper", "scissors")  # each beats the one before it
NONE = "nothing legal"
IPD = (
    "You play a repeated game with another player. In each of {rounds} rounds both of you choose C or D at once. "
    "You earn 3 each for C and C, 1 each for D and D; who plays D against C earns 5, the other one 0. "
    "Answer with C or D alone."
)
SPLIT = (
    "You share {coins} coins with another player in each of {rounds} rounds. Each of you holds a different hand, rock, "
    "paper or scissors, that only you see. A coin is worth 10 to the one whose hand wins and 1 to the other. You both "
    "name how many coins you claim, 0 to {coins}, at once; if the claims add up to more than {coins} the coins are "
    "split in proportion."
)


class State(NamedTuple):
    hands: tuple[tuple[int, int], ...]  # of each round; empty for the prisoner's dilemma
    moves: tuple[tuple[str, str], ...] = ()  # of the rounds played
    words: tuple[str, str] | None = None  # this round's messages


def move_of(game: str, text: str) -> str:
    """The legal move in a reply, ``C``, ``D`` or a number, or NONE."""
    if game == "ipd":
        found = {w[0].upper() for w in re.findall(r"\b(?:cooperate|defect|C|D)\b", text, re.IGNORECASE)}
    else:
        whole = re.findall(r"(?<![0-9.,-])[0-9]{1,3}(?![0-9]|[.,][0-9])", text)
        alone = len(re.findall(r"[0-9]+", text)) == 1
        found = {str(int(n)) for n in whole if alone and int(n) <= COINS}
    return found.pop() if len(found) == 1 else NONE


def host(config: Config) -> HostEnv:
    """Tasks are those of `dilemma.make_tasks`, one by one: for Trust-and-Split {"hands": [rounds, 2]}."""
    ipd = config.game == "ipd"
    talks = not ipd and config.message > 0

    def reset(seed: int, task: Mapping[str, Any]) -> State:
        return State(() if ipd else tuple((int(a), int(b)) for a, b in task["hands"]))

    def asked(state: State, me: int) -> str:
        lines = []
        for at, moves in enumerate(state.moves):
            held = "" if ipd else f" with {HANDS[state.hands[at][me]]} against {HANDS[state.hands[at][1 - me]]}"
            lines.append(f"Round {at + 1}{held}: you chose {moves[me]}, the other player {moves[1 - me]}.")
        lines.append(f"Now round {len(state.moves) + 1}.")
        if not ipd:
            lines.append(f"Your hand is {HANDS[state.hands[len(state.moves)][me]]}.")
            if state.words is not None:
                lines.append(f"You said: {state.words[me]}\nThe other player said: {state.words[1 - me]}")
            silent = talks and state.words is None
            lines.append("Send the other player a short message." if silent else "How many coins do you claim?")
        return "\n".join(lines)

    def observe(state: State) -> dict[str, Prompt]:
        rules = (IPD if ipd else SPLIT).format(rounds=config.rounds, coins=COINS)
        return {r: (Message("system", rules), Message("user", asked(state, i))) for i, r in enumerate(ROLES)}

    def step(seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, dict, bool]:
        texts = [actions[role].text for role in ROLES]
        if talks and state.words is None:
            said = tuple(t[:MESSAGE] for t in texts)
            return state._replace(words=(said[0], said[1])), {r: {} for r in ROLES}, False
        one, two = (move_of(config.game, t) for t in texts)
        paid: tuple[float, ...] = (0.0, 0.0)
        if ipd and NONE not in (one, two):
            paid = GAMES["prisoners"][2 * MOVES.index(one) + MOVES.index(two)]
        elif not ipd:
            claims = [ILLEGAL if m == NONE else int(m) for m in (one, two)]
            paid = tuple(np.asarray(payoffs(np.array(state.hands[len(state.moves)]), np.array(claims))).tolist())
        rewards = {r: {"payoff": float(paid[i]), "social": float(sum(paid))} for i, r in enumerate(ROLES)}
        if ipd:
            for role, move in zip(ROLES, (one, two)):
                rewards[role]["cooperation"] = (move == "C") / config.rounds
        after = State(state.hands, (*state.moves, (one, two)))
        return after, rewards, len(after.moves) >= config.rounds

    components = (*COMPONENTS, "cooperation") if ipd else COMPONENTS
    return HostEnv("dilemma_text", ROLES, config.rounds * (1 + talks), components, reset, observe, step)
