"""Protocols around a host environment whose roles act at once: who reads whose text. The baselines of MAGRPO.

    together    the environment itself: all at once, no role reads another (untrained, the naive concatenation)
    sequential  one role after the other; a later one reads the texts of earlier ones in this turn (pipeline)
    discussion  all at once, then all again after reading the others' first drafts; the second drafts count (one round)
    solo        one agent, ``solo``, acts for every role in turn and reads its earlier texts (one model alone)

The environment itself is stepped once all its roles have written. Drafts before that earn nothing. A role's own drafts
are kept as the ids that were sampled, so no token is encoded twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs.chat import reply_message
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards

PROTOCOLS = ("together", "sequential", "discussion", "solo")


@dataclass(frozen=True)
class State:
    """An episode so far. ``inner`` is the environment's own state."""

    inner: Any
    drafts: tuple[tuple[str, Action], ...] = ()  # of this turn of the environment, in the order written
    done: bool = False


def wrap(env: HostEnv, protocol: str) -> HostEnv:
    """``env`` under ``protocol``, one of PROTOCOLS. Every role must act on every turn of ``env``."""
    one_of("protocol", protocol, PROTOCOLS)
    if protocol == "together":
        return env
    if len(env.roles) < 2:
        raise ConfigError(f"protocol {protocol!r}: environment {env.name!r} has one role; expected several")
    rounds = 2 if protocol == "discussion" else len(env.roles)
    return env._replace(
        name=f"{env.name} ({protocol})",
        roles=("solo",) if protocol == "solo" else env.roles,
        max_turns=rounds * env.max_turns,
        reset=lambda seed, task: State(env.reset(seed, task)),
        observe=partial(_observe, env, protocol),
        step=partial(_step, env, protocol),
        verify=None,
    )


def _observe(env: HostEnv, protocol: str, state: State) -> dict[str, Prompt]:
    """The prompts of the roles that write now: those of ``env``, and the texts that they read."""
    prompts = env.observe(state.inner)
    if protocol == "discussion":
        if not state.drafts:
            return dict(prompts)
        return {role: (*prompt, *_discussed(role, state.drafts)) for role, prompt in prompts.items()}
    role = env.roles[len(state.drafts)]
    if role not in prompts:
        raise ValueError(f"{role!r} does not act now: protocols need every role on every turn")
    read = tuple(Message("user", f"Written by {by}:\n{draft.text}") for by, draft in state.drafts)
    return {"solo" if protocol == "solo" else role: (*prompts[role], *read)}


def _discussed(role: str, drafts: tuple[tuple[str, Action], ...]) -> tuple[Message, ...]:
    """The messages before the second draft of ``role``: its own first draft, and the drafts of the others."""
    own = dict(drafts)[role]
    others = "\n".join(f"Written by {by}:\n{draft.text}" for by, draft in drafts if by != role)
    return reply_message(role, own), Message("user", f"{others}\nWrite your final text.")


def _step(
    env: HostEnv, protocol: str, seed: int, state: State, actions: Mapping[str, Action]
) -> tuple[State, Rewards, bool]:
    """A step of the protocol. It steps ``env`` once all roles have written the drafts that count."""
    if protocol == "discussion" and not state.drafts:
        return replace(state, drafts=tuple((role, actions[role]) for role in env.roles)), {}, False
    if protocol == "discussion":
        final = dict(actions)
    else:
        role = env.roles[len(state.drafts)]
        drafts = (*state.drafts, (role, actions["solo" if protocol == "solo" else role]))
        if len(drafts) < len(env.roles):
            return replace(state, drafts=drafts), {}, False
        final = dict(drafts)
    inner, rewards, done = env.step(seed, state.inner, final)
    if protocol == "solo":
        rewards = {"solo": rewards[env.roles[0]]}
    return State(inner, done=done), rewards, done
