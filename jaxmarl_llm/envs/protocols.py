"""Who hears whom, around a host environment whose roles act at once: the baselines that MAGRPO is compared with.

    together    as the environment is: both at once, nobody hears anybody (untrained, the naive concatenation)
    sequential  one role after the other; a later one reads what earlier ones wrote in this turn (pipeline)
    discussion  all at once, then all again after reading the others' first drafts; the second drafts count (one round)
    solo        one agent, ``solo``, plays every role in turn and reads what it wrote before (one model alone)

The environment itself is stepped once all its roles have spoken; drafts before that earn nothing. A role's own drafts
are carried as the ids that were sampled, so no token is encoded twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxmarl_llm.config import one_of
from jaxmarl_llm.text import Action, ConfigError, HostEnv, Message, Prompt, Rewards

PROTOCOLS = ("together", "sequential", "discussion", "solo")


@dataclass(frozen=True)
class State:
    inner: Any
    drafts: tuple[tuple[str, Action], ...] = ()  # of this turn of the environment, in the order spoken
    done: bool = False


def wrap(env: HostEnv, protocol: str) -> HostEnv:
    """``env`` under another protocol. Every role must act on every turn of ``env``."""
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
    prompts = env.observe(state.inner)
    if protocol == "discussion":
        if not state.drafts:
            return dict(prompts)
        return {role: (*prompt, *_discussed(role, state.drafts)) for role, prompt in prompts.items()}
    role = env.roles[len(state.drafts)]
    if role not in prompts:
        raise ValueError(f"{role!r} does not act now: protocols need every role on every turn")
    heard = tuple(Message("user", f"Written by {by}:\n{said.text}") for by, said in state.drafts)
    return {"solo" if protocol == "solo" else role: (*prompts[role], *heard)}


def _discussed(role: str, drafts: tuple[tuple[str, Action], ...]) -> tuple[Message, ...]:
    own = dict(drafts)[role]
    others = "\n".join(f"Written by {by}:\n{said.text}" for by, said in drafts if by != role)
    mine = own.message(role) if own.ids else Message("assistant", own.text)
    return mine, Message("user", f"{others}\nWrite your final text.")


def _step(
    env: HostEnv, protocol: str, seed: int, state: State, actions: Mapping[str, Action]
) -> tuple[State, Rewards, bool]:
    if protocol == "discussion" and not state.drafts:
        return replace(state, drafts=tuple((role, actions[role]) for role in env.roles)), {}, False
    if protocol == "discussion":
        spoken = dict(actions)
    else:
        role = env.roles[len(state.drafts)]
        drafts = (*state.drafts, (role, actions["solo" if protocol == "solo" else role]))
        if len(drafts) < len(env.roles):
            return replace(state, drafts=drafts), {}, False
        spoken = dict(drafts)
    inner, rewards, done = env.step(seed, state.inner, spoken)
    if protocol == "solo":
        rewards = {"solo": rewards[env.roles[0]]}
    return State(inner, done=done), rewards, done
