"""The games of `games` through chat prompts, for host models: the same rules, rewards and roles.

A reply's last letter that stands alone is the action; ``format`` is paid where the reply is that letter and nothing
else. A reply without one, or with one that is not legal, is illegal and ends the game: no reply raises.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs import games
from jaxmarl_llm.envs.array_text import board, check_tasks, task_rows
from jaxmarl_llm.envs.prompts import entry, with_memory
from jaxmarl_llm.text import Action, HostEnv, Message, Prompt, Rewards
from jaxmarl_llm.tokenizer import ByteTokenizer

__all__ = ["Config", "action_of", "demonstrations", "make", "prompt", "strategy", "tasks", "with_memory"]
RULES = {
    "kuhn_poker": "Kuhn poker: one card each of J < Q < K, one chip in the pot each. b bets a chip, or calls a bet; "
    "p passes, or folds to a bet. The position is your card and the moves so far.",
    "tic_tac_toe": "Tic-tac-toe on the cells a to i, row by row. The position is the board: x your stones, "
    "o the other's.",
    "hanabi": "Hanabi. The position is your partner's cards (colour, rank); what you were told of yours (? not yet); "
    "and as digits each firework's height, information tokens, lives and cards left. In order, the letters discard "
    "one of your cards, play one, tell your partner's cards of a colour, tell those of a rank.",
}
ALONE = re.compile(r"(?<![A-Za-z])[a-z](?![A-Za-z])")


@dataclass(frozen=True)
class Config(games.Config):
    split: str = "train"  # train or test: games are dealt by the rollout's seed, the tasks differ in the game alone
    count: int = 0  # 0: as many as ``tasks``

    def __post_init__(self):
        super().__post_init__()
        check_tasks("games_text", self)

    @property
    def board(self) -> games.Config:
        """The array environment's configuration: one token an action."""
        names = games.Config.__dataclass_fields__
        return games.Config(**{name: getattr(self, name) for name in names} | {"response": 1})


def prompt(game: str, letters: str, position: str) -> Prompt:
    """``position`` as `games` shows it: the player's number, what it sees, ``>``."""
    seat = games.SEATS[position[0] == "2"]
    rules = f"{RULES[game]} You are the {seat} player. Answer with one letter of {' '.join(letters)}."
    return Message("system", rules), Message("user", f"Position: {position[1:-1]}")


def action_of(text: str) -> str:
    """The letter a reply names; ``?`` for none."""
    return (ALONE.findall(text) or ["?"])[-1]


def make(config: Config) -> HostEnv:
    env, rules = games.make(config.board), games.rules(config.board)
    play = board(env, 1)

    def observe(state: games.State) -> dict[str, Prompt]:
        game = int(state.game)
        return {r: prompt(config.games[game], rules[game].letters, p) for r, p in play.look(state).items()}

    def step(seed: int, state: games.State, actions: Mapping[str, Action]) -> tuple[games.State, Rewards, bool]:
        ((role, action),) = actions.items()
        letter = action_of(action.text)
        after, paid, done = play.step(state, [letter.encode()])
        paid[role]["format"] *= float(action.text.strip() == letter)
        return after, paid, done

    return HostEnv("games_text", env.roles, env.max_turns, games.COMPONENTS, play.reset, observe, step)


def tasks(config: Config) -> list[dict[str, Any]]:
    return task_rows(games.make_tasks, config)


def demonstrations(config: Config, tasks: Any, memory: Sequence[str] = ()) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion): random players' positions and legal actions, as in `games`."""
    rules, decode, out = games.rules(config.board), ByteTokenizer().decode, []
    for i, (role, rows) in enumerate(games.demonstrations(config.board, config.seed, 64).items()):
        for ids, length, said in zip(rows["tokens"], rows["length"], rows["completion"], strict=True):
            shown = prompt(config.games[i // 2], rules[i // 2].letters, decode(ids[:length]))
            out.append((role, with_memory(shown, memory), chr(said[0])))
    return out


def strategy(role: str, shown: Prompt, action: Action, rewards: Any) -> str:
    return entry(role, sum(rewards.values()), shown[1].text, action)
