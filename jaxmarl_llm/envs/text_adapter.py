"""The array environments on the host, task by task: what their text forms share.

A text form (`chain_text`, `consult_text`, `games_text`) has no rules of its own. It puts the prompts of the array
environment into words, and replies into its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxmarl_llm.envs.array_env import EOS, ArrayEnv, pack
from jaxmarl_llm.messages import Action, HostEnv, Prompt, Rewards
from jaxmarl_llm.models.tokenizer import ByteTokenizer


class Board(NamedTuple):
    """An array environment as plain functions over states of numpy arrays, which pickle.

    reset: reset(seed, task) -> state
    look: look(state) -> {role: the text of its prompt}, of the roles that act now
    step: step(state, completions, seed=0) -> (state, rewards, done), with the token ids of each seat's completion
    """

    reset: Callable[[int, Mapping[str, Any]], Any]
    look: Callable[[Any], dict[str, str]]
    step: Callable[..., tuple[Any, dict[str, dict[str, float]], bool]]


def board(env: ArrayEnv, response: int) -> Board:
    """``env`` with completions of R = ``response`` tokens; longer ones are cut."""
    start, see, move, decode = jax.jit(env.reset), jax.jit(env.observe), jax.jit(env.step), ByteTokenizer().decode

    def reset(seed: int, task: Mapping[str, Any]) -> Any:
        return jax.device_get(start(jax.random.key(seed % 2**31), task))

    def look(state: Any) -> dict[str, str]:
        seen = jax.device_get(see(state))
        seats = zip(seen.role, seen.tokens, seen.length, seen.active, strict=True)
        return {env.roles[role]: decode(tokens[:length]) for role, tokens, length, active in seats if active}

    def step(
        state: Any, completions: Sequence[Sequence[int]], seed: int = 0
    ) -> tuple[Any, dict[str, dict[str, float]], bool]:
        tokens, length = pack([row[:response] for row in completions], response)
        after, rewards, done = jax.device_get(move(jax.random.key(seed % 2**31), state, tokens, length))
        paid = {role: {c: float(v[i]) for c, v in rewards.items()} for i, role in enumerate(env.roles)}
        return after, paid, bool(done)

    return Board(reset, look, step)


def last_line(action: Action) -> list[int]:
    """The last line of the reply ``action`` as tokens, without the spaces around it.

    An eos follows, unless the length limit cut the reply off.
    """
    line = action.text.rstrip("\n").rpartition("\n")[2].strip()
    return [*ByteTokenizer().encode(line), *([] if action.truncated else [EOS])]


def by_last_line(name: str, env: ArrayEnv, response: int, prompt: Callable[[str, str], Prompt]) -> HostEnv:
    """``env`` as a host environment that reads the last line of each reply.

    name: the environment's name
    response: tokens of a completion; nothing longer may be well-formed, because a cut completion has no end
    prompt: prompt(role, text of its prompt in ``env``) -> the chat prompt
    """
    play = board(env, response)

    def observe(state: Any) -> dict[str, Prompt]:
        return {role: prompt(role, shown) for role, shown in play.look(state).items()}

    def step(seed: int, state: Any, actions: Mapping[str, Action]) -> tuple[Any, Rewards, bool]:
        return play.step(state, [last_line(action) for action in actions.values()], seed)

    return HostEnv(name, env.roles, env.max_turns, env.components, play.reset, observe, step)


def sample_texts(samples: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """(role, text of the prompt, completion) of every demonstration of an array environment.

    ``samples``: role -> tokens, length and completion, as in `array_env.samples`.
    """
    decode = ByteTokenizer().decode
    for role, rows in samples.items():
        columns = (rows[k] for k in ("tokens", "length", "completion"))
        for ids, length, reply in zip(*columns, strict=True):
            yield role, decode(ids[:length]), decode(reply)


def task_rows(make_tasks: Callable[..., Mapping[str, Any]], config: Any) -> list[dict[str, Any]]:
    """The tasks of an array environment one by one.

    make_tasks: of the array environment's module
    config: has ``split``, ``count``, ``seed`` and ``tasks``; the test split is the held-out tasks
    """
    return rows_of(make_tasks(config, None, config.count or config.tasks, held_out=config.split == "test"))


def rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tasks one by one. ``columns``: arrays of tasks by name, as an array environment has them."""
    names, values = list(columns), list(columns.values())
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]
