"""The games of `games` through chat prompts, for host models: the same rules, rewards and roles.

The action is the last letter of a reply that stands alone. ``format`` is paid where the reply is that letter and
nothing else. A reply without an action, or with one that is not legal, is illegal and ends the game: no reply raises.

Shared argument: ``config`` has the settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.chat import entry, with_memory
from jaxmarl_llm.envs.games import array as games
from jaxmarl_llm.envs.games.array import same_tasks
from jaxmarl_llm.envs.prompt_grammar import prompt_parts
from jaxmarl_llm.envs.text_adapter import board, sample_texts, task_rows
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

__all__ = ["Config", "action_of", "demonstrations", "make", "prompt", "same_tasks", "strategy", "tasks", "with_memory"]
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
    """The settings of `games`, and which of its tasks are played."""

    split: str = "train"  # train or test: games are dealt by the rollout's seed, the tasks differ in the game alone
    count: int = 0  # 0: as many as ``tasks``

    def check(self, path: str) -> None:
        super().check(path)
        checks.split_and_count(path, self)

    @property
    def board(self) -> games.Config:
        """The array environment's configuration: one token an action."""
        names = games.Config.__dataclass_fields__
        return games.Config(**{name: getattr(self, name) for name in names} | {"response": 1})


def prompt(game: str, letters: str, position: str) -> Prompt:
    """The chat prompt of a player.

    game: the game's name
    letters: the letters of its actions
    position: the player's prompt in `games`
    """
    mark, seen, _ = prompt_parts(position, bar="")  # a position may hold bars of its own
    seat = games.SEATS[mark == "2"]
    rules = f"{RULES[game]} You are the {seat} player. Answer with one letter of {' '.join(letters)}."
    return Message("system", rules), Message("user", f"Position: {seen}")


def action_of(text: str) -> str:
    """The letter that the reply ``text`` names; ``?`` for none."""
    return (ALONE.findall(text) or ["?"])[-1]


def make(config: Config) -> HostEnv:
    """The environment of ``config``."""
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
    """The tasks of the configured split, as rows of `games`' tasks."""
    return task_rows(games.make_tasks, config)


def demonstrations(config: Config, tasks: Sequence) -> list[tuple[str, Prompt, str]]:
    """(role, prompt, completion): random players' positions and legal actions, as in `games`.

    The number of ``tasks`` is not used: there are at most 64 samples of each role.
    """
    rules, roles, out = games.rules(config.board), games.roles_of(config.board), []
    for role, shown, letter in sample_texts(games.demonstrations(config.board, config.seed, 64)):
        game = roles.index(role) // 2
        out.append((role, prompt(config.games[game], rules[game].letters, shown), letter))
    return out


def strategy(role: str, shown: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample: the prompt ``shown`` to ``role``, its ``action`` and the sum of its ``rewards``."""
    return entry(role, sum(rewards.values()), shown[1].text, action)
