"""Menus of array rollouts: nodes whose siblings are a given list of completions (`plans.menu`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxmarl_llm.envs.array_env import ArrayEnv
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.generation.decoding import Completions
from jaxmarl_llm.generation.sampling import Sampling
from jaxmarl_llm.generation.scoring import scored_menu
from jaxmarl_llm.models.tokenizer import Tokenizer
from jaxmarl_llm.rollout.plans import Branch, Plan
from jaxmarl_llm.types import Model, Nodes, Params, Role, Team


def menu_ids(choices: tuple[str, ...], model: Model, role: Role) -> list[list[int]]:
    """Token ids of each choice, with a stop id behind it where ``role.max_new_tokens`` has room.

    Args:
        choices: Texts of the menu.
        model: Model that reads them.
        role: Role that chooses.

    Raises:
        ConfigError: A choice is not text of the model's vocabulary, or is longer than ``role.max_new_tokens``.
    """
    tokenizer: Tokenizer = model.tokenizer
    size, most, rows = getattr(model.policy.config, "vocab_size", None), role.max_new_tokens, []
    for choice in choices:
        ids = tokenizer.encode(choice)
        if tokenizer.decode(ids) != choice or any(size is not None and i >= size for i in ids):
            raise ConfigError(
                f"plan.menu: expected text in the vocabulary of model {model.name!r}, which plays {role.name!r}, "
                f"got {choice!r}"
            )
        if len(ids) > most:
            raise ConfigError(
                f"plan.menu: expected at most max_new_tokens={most} tokens for role {role.name!r}, got {choice!r} of "
                f"{len(ids)}"
            )
        rows.append([*ids, *tokenizer.stop_ids[: most > len(ids)]])
    return rows


def menu_of(choices: tuple[str, ...], model: Model, role: Role, response: int) -> Completions:
    """The completions of a menu for one model, with a leading axis of 1 and log-probs of 0.

    Arguments are those of `menu_ids`, and ``response``: R, the columns of the result.
    """
    rows = menu_ids(choices, model, role)
    tokens = np.full((1, len(rows), response), model.tokenizer.pad_id, np.int32)
    for row, ids in zip(tokens[0], rows, strict=True):
        row[: len(ids)] = ids
    length = np.array([[len(ids) for ids in rows]], np.int32)
    stopped = np.array([[ids[-1] in model.tokenizer.stop_ids for ids in rows]])
    return Completions(jnp.asarray(tokens), jnp.asarray(length), jnp.zeros(tokens.shape), jnp.asarray(~stopped))


def score_menu(
    team: Team,
    params: Params,
    nodes: Nodes,
    seats: int,
    choices: tuple[str, ...],
    acting: Mapping[int, Sequence[tuple[int, Sequence[int]]]],
    sampling: Sampling,
) -> Completions:
    """The completions of a menu at every node, with log-probs under the node's own model.

    Args:
        team: Roles and models.
        params: Parameters of the team.
        nodes: Prompts of N seats. The seats of a state follow each other.
        seats: W, the seats of a state.
        choices: Texts of the menu.
        acting: Models that may act, each with the roles that it may play and the seats of these.
        sampling: The distribution that log-probs are of.
    """
    n, response = len(nodes.length), max(role.max_new_tokens for role in team.roles)
    every = np.arange(n).reshape(-1, seats)
    shape, nothing = (n, len(choices), response), jnp.zeros((n, len(choices)), jnp.int32)
    out = Completions(jnp.zeros(shape, jnp.int32), nothing, jnp.zeros(shape), nothing > 0)
    for m, roles in acting.items():
        for role, own in roles:
            model, at = team.models[m], jnp.asarray(every[:, list(own)].reshape(-1))
            mine = ((nodes.model == m) & (nodes.role == role))[at]
            menu = menu_of(choices, model, team.roles[role], response)
            rows = (nodes.tokens[at], nodes.length[at], nodes.valid[at] & mine)
            made = scored_menu(model.policy, model.variables(params), *rows, menu, sampling)
            where = jnp.where(mine, at, n)
            out = jax.tree.map(lambda old, new, where=where: old.at[where].set(new, mode="drop"), out, made)
    return out


def check_menus(plan: Plan, team: Team, env: ArrayEnv) -> None:
    """Raise ConfigError where a role that acts cannot choose from the menu of its turn.

    Args:
        plan: Plan of sampling.
        team: Roles and models.
        env: Array environment.
    """
    for turn in range(env.max_turns):
        choices = plan.choices(Branch(turn, True))
        if choices and team.batch_models:
            raise ConfigError(f"config.team.batch_models: expected False with plan {plan.name}, got True")
        for role in sorted(set(env.actors[turn])) if choices else ():
            for player in team.players(role):
                menu_ids(choices, team.models[player], team.roles[role])
