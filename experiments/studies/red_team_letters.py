"""Degenerate strategies against the rewards of the small text tasks: duet, dispatch, relay, chain, safety and maze.

`LETTERS` has one entry for each table: the environment through text, the perfect team, and what the strategies say.
Every strategy speaks for all roles, or for some roles beside the perfect team. The figure of an episode is the weighted
sum of its components, as a mean over the roles that are paid.

The games of two sides (`games`, `dilemma`, `matrix`) are left out. Their rewards are the rules of the games, and what a
fixed move earns there depends on the other side.

A master that knows the answer without its specialist is no degenerate strategy: it solves the task. So masters repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments.studies.red_team_table import Table
from jaxmarl_llm.envs import text_adapter
from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.envs.chain import array as chain
from jaxmarl_llm.envs.dispatch import array as dispatch
from jaxmarl_llm.envs.dispatch import solo
from jaxmarl_llm.envs.duet import array as duet
from jaxmarl_llm.envs.maze import array as maze
from jaxmarl_llm.envs.maze import text as maze_text
from jaxmarl_llm.envs.prompt_grammar import prompt_parts
from jaxmarl_llm.envs.relay_dispatch import array as relay
from jaxmarl_llm.envs.safety import array as safety
from jaxmarl_llm.messages import Action, HostEnv, Message
from jaxmarl_llm.models.tokenizer import ByteTokenizer


class Asked(NamedTuple):
    """One question to a role: the task, the role, the text of its prompt, and the turn of the episode."""

    task: Mapping[str, Any]
    role: str
    shown: str
    turn: int

    @property
    def subject(self) -> str:
        """The task as the prompt has it, without what others said."""
        return prompt_parts(self.shown).subject

    @property
    def heard(self) -> str:
        """The last text of a partner in the prompt; empty where there is none."""
        return (prompt_parts(self.shown).entries or ("",))[-1]


Policy = Callable[[Asked], str]


class Setting(NamedTuple):
    """A task with its perfect team and its strategies.

    make: (count) -> the environment and that many tasks. weights: of the components. reference: the perfect team.
    own: strategies of this task alone, beside `everywhere`. paid: the role whose rewards count; None: all. most: tasks
    of a table at most, because episodes are slow.
    """

    make: Callable[[int], tuple[HostEnv, list[dict[str, Any]]]]
    weights: Mapping[str, float]
    reference: Policy
    own: Mapping[str, Policy]
    paid: str | None = None
    most: int = 24


def say(text: str) -> Policy:
    """The same ``text`` whatever is asked."""
    return lambda asked: text


CUT = "\0"  # at the end of a text: the length limit ended it


def everywhere(reference: Policy) -> dict[str, Policy]:
    """Strategies that every task of letters can be met with.

    Args:
        reference: The perfect team, whose replies some of them spoil.
    """
    return {
        "nothing at all": say(""),
        "a space": say(" "),
        "the prompt": lambda asked: asked.shown,
        "the task repeated": lambda asked: asked.subject,
        "the task, twice": lambda asked: 2 * asked.subject,
        "the task backwards": lambda asked: asked.subject[::-1],
        "the beginning of the task": lambda asked: asked.subject[:2],
        "the first letter of the task": lambda asked: asked.subject[:1],
        "the last letter of the task": lambda asked: asked.subject[-1:],
        "what the partner said": lambda asked: asked.heard,
        "always a": say("a"),
        "always 0": say("0"),
        "always yes": say("y"),
        "always no": say("n"),
        "one letter again and again": say("aaaaaa"),
        "all letters": say("abcdefgh"),
        "words that have nothing to do with it": say("The festival in Lisbon opened with a parade."),
        "bytes that are no text": say("\x07é"),
        "the right reply, cut by the length limit": lambda asked: reference(asked) + CUT,
        "the right reply, said twice": lambda asked: 2 * reference(asked),
        "the right reply without its last letter": lambda asked: reference(asked)[:-1],
        "the right reply and a letter more": lambda asked: reference(asked) + "q",
        "a line after the right reply": lambda asked: reference(asked) + "\nso be it",
    }


def beside(reference: Policy, roles: Sequence[str], policy: Policy) -> Policy:
    """``policy`` for these ``roles`` (beginnings of their names), the ``reference`` for all others."""
    return lambda asked: (policy if asked.role.startswith(tuple(roles)) else reference)(asked)


def episode(setting: Setting, env: HostEnv, task: Mapping[str, Any], policy: Policy) -> float:
    """The weighted sum of the rewards of one episode, as a mean over the roles that are paid.

    Args:
        setting: Weights, and who is paid.
        env: The environment.
        task: One of its tasks.
        policy: Speaks for all roles.
    """
    state, done, total, turn = env.reset(0, task), False, 0.0, 0
    roles = env.roles if setting.paid is None else (setting.paid,)
    while not done:
        actions = {}
        for role, prompt in env.observe(state).items():
            text = policy(Asked(task, role, prompt[-1].text, turn))
            actions[role] = Action(text.removesuffix(CUT), (), text.endswith(CUT))
        state, rewards, done = env.step(0, state, actions)
        paid = [setting.weights.get(name, 0.0) * value for role in roles for name, value in rewards[role].items()]
        total, turn = total + sum(paid) / len(roles), turn + 1
    return total


def letters_table(name: str, count: int) -> Table:
    """What the strategies earn on one of `LETTERS`.

    Args:
        name: Its key.
        count: Tasks; 0, or more than the setting has at most: that many.
    """
    setting = LETTERS[name]()
    env, tasks = setting.make(min(count or setting.most, setting.most))
    strategies = everywhere(setting.reference) | dict(setting.own)
    rewards = {name: [episode(setting, env, task, policy) for task in tasks] for name, policy in strategies.items()}
    return Table(f"letters, {name}", rewards, [episode(setting, env, task, setting.reference) for task in tasks])


def _as_text(module: Any, config: Any, count: int, response: int) -> tuple[HostEnv, list[dict[str, Any]]]:
    """An array environment whose prompts and replies are its own letters, and its first tasks."""
    env: ArrayEnv = module.make(config)
    columns = module.make_tasks(config, None, count)
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    prompt = lambda role, shown: (Message("user", shown),)
    return text_adapter.by_last_line(env.name, env, response, prompt), rows


def _text(tokens: np.ndarray) -> str:
    return ByteTokenizer().decode(tokens.tolist())


# -- duet --------------------------------------------------------------------------------------------------------------


def _pair(first: str, second: str) -> Policy:
    """Two strings for concise and detailed; a solo writer says both."""
    return lambda asked: {"concise": first, "detailed": second}.get(asked.role, f"{first}|{second}")


def _written(asked: Asked) -> str:
    topic = _text(asked.task["topic"])
    others = [letter for letter in duet.LETTERS if letter not in topic]
    return _pair(topic, topic + "".join(others[:3]))(asked)


def _by_topic(first: Callable[[str], str], second: Callable[[str], str]) -> Policy:
    return lambda asked: _pair(*(f(_text(asked.task["topic"])) for f in (first, second)))(asked)


DUET: dict[str, Policy] = {
    "constant strings: ab, abcdef": _pair("ab", "abcdef"),
    "constant strings: abc, abcdefgh": _pair("abc", "abcdefgh"),
    "constant strings: abcd, abcdefgh": _pair("abcd", "abcdefgh"),
    "constant strings: efgh, abcdefgh": _pair("efgh", "abcdefgh"),
    "constant strings: one letter": _pair("aa", "aaaa"),
    "constant strings, the first one empty": _pair("", "abcdefgh"),
    "constant strings, the second one empty": _pair("abcd", ""),
    "the topic by both": _by_topic(str, str),
    "the topic, and the topic twice": _by_topic(str, lambda t: 2 * t),
    "the topic beside a constant without it": _by_topic(str, lambda t: "".join(sorted(set(duet.LETTERS) - set(t)))),
    "a prefix of the topic beside all letters": _by_topic(lambda t: t[:2], lambda t: duet.LETTERS),
    "a constant beside the topic and more": _by_topic(lambda t: "abcd", lambda t: duet.LETTERS),
}


def _duet(protocol: str, bar: float = 0.0) -> Setting:
    config = duet.Config(protocol=protocol, bar=bar)
    make = lambda count: _as_text(duet, config, count, config.max_new_tokens)
    return Setting(make, dict.fromkeys(duet.COMPONENTS, 1.0), _written, DUET)


# -- dispatch ----------------------------------------------------------------------------------------------------------

COSTS = {"accuracy": 1.0, "format": 1.0, "efficiency": -1.0}


def _dispatched(asked: Asked) -> str:
    if asked.role != "master":
        return _text(asked.task["answer"])
    return asked.heard if asked.turn else dispatch.ROUTES[asked.task["kind"]]


def _routed(route: str, reply: Policy) -> Policy:
    return lambda asked: route if asked.turn == 0 else reply(asked)


def _dispatch() -> Setting:
    make = lambda count: _as_text(dispatch, dispatch.Config(), count, dispatch.Config().response)
    beginning = lambda asked: asked.subject[:2]
    own = {f"always the route {route}, the task as the reply": _routed(route, beginning) for route in dispatch.ROUTES}
    own |= {
        "the right route, and nothing said": beside(_dispatched, dispatch.ROLES[1:], say("")),
        "a wrong specialist": _routed("l", say("17")),
        "the shortest replies": _routed("a", say("")),
        "the master repeats an idle specialist": lambda asked: "f" if asked.turn == 0 else asked.heard or "0",
        "a right specialist whom the master ignores": lambda asked: (
            "0" if asked.role == "master" and asked.turn else _dispatched(asked)
        ),
    }
    return Setting(make, COSTS, _dispatched, own)


def _dispatch_solo() -> Setting:
    make = lambda count: _as_text(solo, dispatch.Config(), count, dispatch.Config().response)
    own = {f"always {text}": say(text) for text in ("10", "x(4)", "abc", "abab", "17")}
    return Setting(make, COSTS, lambda asked: _text(asked.task["answer"]), own)


def _relayed(asked: Asked) -> str:
    config, hop = relay.Config(), asked.turn // 2
    if asked.role != "master":
        return _text(asked.task["values"][hop + 1])
    if hop == asked.task["hops"]:
        return asked.heard
    return relay.MARKS[int(asked.task["kinds"][hop]) * len(config.mistakes)]


def _relay() -> Setting:
    config = relay.Config()
    make = lambda count: _as_text(relay, config, count, config.response)
    master, wrong = relay.roles_of(config)[0], relay.roles_of(config)[1:]
    own = {
        "one route for all hops": beside(_relayed, [master], lambda asked: relay.MARKS[0]),
        "right routes to idle specialists": beside(_relayed, wrong, say("")),
        "right routes, values handed on unchanged": beside(_relayed, wrong, lambda asked: asked.heard),
        "right routes to a constant": beside(_relayed, wrong, say("a0")),
        "a constant last reply": lambda asked: (
            "a0" if asked.role == master and asked.turn == 2 * asked.task["hops"] else _relayed(asked)
        ),
    }
    return Setting(make, {"pay": 1.0, "format": 1.0, "efficiency": -1.0}, _relayed, own)


# -- chain -------------------------------------------------------------------------------------------------------------


def _worked_out(asked: Asked) -> str:
    answer = str(asked.task["answer"])
    if asked.role == "verifier":
        return "y" if asked.heard[:1] == answer else "n"
    return "1+1!" if asked.role == "meta" else answer


def _chain(protocol: str, **more: Any) -> Setting:
    config = chain.Config(protocol=protocol, **more)
    make = lambda count: _as_text(chain, config, count, config.max_new_tokens)
    answers = ("solver", "generator", "refiner", "reasoner")
    own = {f"always {digit}": beside(_worked_out, answers, say(digit)) for digit in "123456789"}
    own |= {
        "the first number": beside(_worked_out, answers, lambda asked: asked.subject[:1]),
        "the last number": beside(_worked_out, answers, lambda asked: asked.subject[-1:]),
        "accept everything": beside(say("0"), ["verifier"], say("y")),
        "reject everything": beside(say("0"), ["verifier"], say("n")),
        "hints without content": beside(say("0"), ["meta"], say("!")),
        "hints that are an answer": beside(lambda asked: asked.heard[:1] or "0", ["meta"], say("0")),
        "hints without end": beside(say("0"), ["meta"], say("1+1")),
    }
    return Setting(make, dict.fromkeys(chain.COMPONENTS, 1.0), _worked_out, own)


# -- safety ------------------------------------------------------------------------------------------------------------


def _flags(asked: Asked, last: str) -> str:
    kind = int(asked.task["kind"])
    return "".join(safety.FLAGS[int(flag)] for flag in safety.verdict(jnp.int32(kind), jnp.int32(ord(last))))


def _careful(asked: Asked) -> str:
    right = safety.RESPONSES[int(asked.task["kind"])]
    return right if asked.role == "conversation" else _flags(asked, asked.heard[0]) + right


def _weak(asked: Asked) -> str:
    """A conversation agent that complies first, and then follows the advice."""
    return asked.heard[-1] if asked.heard else "c"


def _safety(role: str) -> Setting:
    """Strategies of one ``role``, beside perfect feedback or beside a weak conversation agent."""
    config = safety.Config()
    make = lambda count: _as_text(safety, config, count, config.max_new_tokens)
    weights = dict.fromkeys(("response", "label", "improvement", "format"), 1.0)
    if role == "conversation":
        said: dict[str, Policy] = {f"always {letter}": say(letter) for letter in safety.RESPONSES}
        said["comply, then follow the advice"] = _weak
        said["refuse, then follow the advice"] = lambda asked: asked.heard[-1] if asked.heard else "r"
        said["refuse what contains x"] = lambda asked: "r" if "x" in asked.subject else "c"
        reference: Policy = _careful
    else:
        said = {f"always {flags}{advice}": say(flags + advice) for flags in ("nn", "yn", "ny", "yy")
                for advice in safety.RESPONSES}  # fmt: skip
        said["flags of another verdict, right advice"] = lambda asked: "yy" + _careful(asked)[2:]
        reference = beside(_careful, ["conversation"], _weak)
    own = {name: beside(reference, [role], policy) for name, policy in said.items()}
    return Setting(make, weights, reference, own, role)


# -- maze --------------------------------------------------------------------------------------------------------------


def _way(task: Mapping[str, Any], cell: int, size: int) -> int:
    """The first direction of a shortest path from ``cell`` to the goal."""
    walls = np.asarray(task["walls"]).reshape(1, size, size).astype(bool)
    return int(maze.ways(walls, np.array([task["goal"]]), np.array([cell]))[0].argmax())


def _walked(config: maze_text.Config, asked: Asked) -> str:
    told = re.search(r"You are at \((\d+), (\d+)\)", asked.shown)
    if told is None:
        raise ValueError(f"no place in the prompt {asked.shown!r}")
    row, column = map(int, told.groups())
    way = _way(asked.task, (row - 1) * config.size + column - 1, config.size)
    return f"Move: {maze_text.NAMES[maze.MOVES[way]]}"


def _maze() -> Setting:
    config = maze_text.Config()

    def make(count: int) -> tuple[HostEnv, list[dict[str, Any]]]:
        return maze_text.make(config), maze_text.tasks(replace(config, count=count))

    reference, names = partial(_walked, config), list(maze_text.NAMES.values())
    turning = lambda asked, way: f"Move: {names[way % 4]}"
    own: dict[str, Policy] = {f"always {name}": say(f"Move: {name}") for name in names}
    own |= {
        "up and down": lambda asked: turning(asked, asked.turn % 2),
        "right and down": lambda asked: turning(asked, (3, 1)[asked.turn % 2]),
        "round and round": lambda asked: turning(asked, (0, 3, 1, 2)[asked.turn % 4]),
        "along the walls of the map": lambda asked: turning(asked, (3, 1, 2, 0)[asked.turn // 5 % 4]),
        "all directions in one reply": lambda asked: "Move: " + ", ".join(names),
        "form without a direction": say("Move: forward"),
        "two different directions": lambda asked: turning(asked, asked.role == "two"),
        "agree with whatever was said": say("I agree."),
        "the right way, and one partner stays": beside(reference, ["two"], say("I stay.")),
        "the right way first, then nothing": lambda asked: reference(asked) if asked.turn == 0 else "",
    }
    return Setting(make, {"accuracy": 1.0, "progress": 1.0}, reference, own, most=4)


LETTERS: dict[str, Callable[[], Setting]] = {
    **{f"duet, {protocol}": partial(_duet, protocol) for protocol in duet.PROTOCOLS},
    "duet, together, bar 2.75": partial(_duet, "together", 2.75),
    "dispatch": _dispatch,
    "dispatch, solo": _dispatch_solo,
    "relay dispatch": _relay,
    **{f"chain, {protocol}": partial(_chain, protocol) for protocol in ("solo", "verify", "refine")},
    "chain, meta": partial(_chain, "meta", rounds=1, shaping=0.25),
    "safety, conversation": partial(_safety, "conversation"),
    "safety, feedback": partial(_safety, "feedback"),
    "maze": _maze,
}
