"""What the text forms of array environments share: the array environment played on the host, its tasks one by one.

A text form (`chain_text`, `dilemma_text`, `games_text`) has no rules of its own: it puts what the array environment
shows into words, and replies into its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs.arrays import HELD_OUT, pack
from jaxmarl_llm.text import Action, ConfigError, HostEnv, Prompt, Rewards
from jaxmarl_llm.tokenizer import ByteTokenizer
from jaxmarl_llm.types import ArrayEnv

SPLITS = ("train", "test")


class Board(NamedTuple):
    """An array environment as plain functions over states of numpy arrays, which pickle.

    reset(seed, task) -> state
    look(state) -> {role: what its prompt says}, of the roles that act now
    step(state, said) -> (state, rewards, done), with the token ids that each seat says
    """

    reset: Callable[[int, Mapping[str, Any]], Any]
    look: Callable[[Any], dict[str, str]]
    step: Callable[[Any, Sequence[Sequence[int]]], tuple[Any, dict[str, dict[str, float]], bool]]


def board(env: ArrayEnv, response: int) -> Board:
    """``env`` with completions of R = ``response`` tokens; longer ones are cut. Only its resets may be random."""
    start, see, move, decode = jax.jit(env.reset), jax.jit(env.observe), jax.jit(env.step), ByteTokenizer().decode

    def reset(seed: int, task: Mapping[str, Any]) -> Any:
        return jax.device_get(start(jax.random.key(seed % 2**31), task))

    def look(state: Any) -> dict[str, str]:
        seen = jax.device_get(see(state))
        seats = zip(seen.role, seen.tokens, seen.length, seen.active, strict=True)
        return {env.roles[role]: decode(tokens[:length]) for role, tokens, length, active in seats if active}

    def step(state: Any, said: Sequence[Sequence[int]]) -> tuple[Any, dict[str, dict[str, float]], bool]:
        tokens, length = pack([row[:response] for row in said], response)
        after, rewards, done = jax.device_get(move(jax.random.key(0), state, tokens, length))
        paid = {role: {c: float(v[i]) for c, v in rewards.items()} for i, role in enumerate(env.roles)}
        return after, paid, bool(done)

    return Board(reset, look, step)


def last_line(action: Action) -> list[int]:
    """The last line of a reply as tokens, spaces around it left out, ended unless the reply was cut off."""
    line = action.text.rstrip("\n").rpartition("\n")[2].strip()
    return [*ByteTokenizer().encode(line), *([] if action.truncated else [ByteTokenizer.EOS])]


def by_last_line(name: str, env: ArrayEnv, response: int, prompt: Callable[[str, str], Prompt]) -> HostEnv:
    """``env`` through ``prompt`` (role, what its prompt says); the last line of each reply is what a role says.

    Nothing longer than ``response`` tokens may be well-formed: what is cut is without its end.
    """
    play = board(env, response)

    def observe(state: Any) -> dict[str, Prompt]:
        return {role: prompt(role, shown) for role, shown in play.look(state).items()}

    def step(seed: int, state: Any, actions: Mapping[str, Action]) -> tuple[Any, Rewards, bool]:
        return play.step(state, [last_line(action) for action in actions.values()])

    return HostEnv(name, env.roles, env.max_turns, env.components, play.reset, observe, step)


def spoken(samples: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """(role, what its prompt says, completion) of every demonstration of an array environment."""
    decode = ByteTokenizer().decode
    for role, rows in samples.items():
        columns = (rows[k] for k in ("tokens", "length", "completion"))
        for ids, length, reply in zip(*columns, strict=True):
            yield role, decode(ids[:length]), decode(reply)


def check_tasks(name: str, config: Any) -> None:
    """ConfigError, starting with the environment's ``name``, unless split and count are usable."""
    one_of(f"{name}: split", config.split, SPLITS)
    if config.count < 0:
        raise ConfigError(f"{name}: count: expected >= 0 (0: as many as tasks), got {config.count}")


def task_rows(make_tasks: Callable[..., Mapping[str, Any]], config: Any) -> list[dict[str, Any]]:
    """The tasks of the array environment one by one, from ``config`` with split and count; the test split is its
    held-out tasks.
    """
    columns = make_tasks(config, config.seed + HELD_OUT * (config.split == "test"), config.count or config.tasks)
    names, values = list(columns), list(columns.values())
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
