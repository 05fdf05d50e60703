"""Rule-following meta-roles of `debate`, as scripts of `models.scripted`. They read their prompt, and nothing else.

Trust in a speaker is the number of reflections in the prompt that one of its edges helped, minus those that one hurt.
Edges are those that the speaker is heard by.

Reflect looks at the speakers whose first answer was wrong. It says that the heaviest edge of the most trusted one hurt.
Where none was wrong, it says that the heaviest edge of the most trusted speaker helped. Of equal ones the first counts,
and a speaker that nobody hears does not. Where nobody hears anybody, the completion is empty, which is unclear.

The leader of act is the most trusted speaker, of equal ones the first. Its edit is the first that there is of these. Of
equal ones the edge that prompts show first counts. Where there is none, or no reflection in the prompt, act keeps the
graph.

1. Drop an edge of another speaker that is heavier than 1.
2. Give an edge of the leader weight 9, or add it with weight 9.
3. Drop an edge that lets the leader hear another speaker.

Shared argument: ``config`` has the settings of the environment.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmarl_llm.envs.array_env import EOS, PAD, encoded
from jaxmarl_llm.envs.debate.array import ENTRY, QUESTION, RESPONSE, ROLES, Config
from jaxmarl_llm.envs.debate.edits import MOST_WEIGHT, REFLECTION, ZERO
from jaxmarl_llm.models.scripted import Script, make_model
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.types import Role, Team

BYTES = ByteTokenizer()


def scripts(config: Config) -> dict[str, Script]:
    """The script of each role."""
    speakers = len(config.accuracies)
    others = ~np.eye(speakers, dtype=bool)

    def parts(tokens: Array, length: Array, sizes: tuple[int, ...]) -> list[Array]:
        """Parts of a prompt of these sizes, each behind one character, and the memory with PAD behind it."""
        row = jnp.where(jnp.arange(len(tokens)) < length - 1, tokens, PAD)
        row = jnp.pad(row, (0, sum(sizes) + len(sizes) + ENTRY * config.memory), constant_values=PAD)
        out, at = [], 1
        for size in sizes:
            out.append(row[at : at + size])
            at += size + 1
        return [*out, row[at : at + ENTRY * config.memory]]

    def weights(digits: Array) -> Int[Array, "S S"]:
        return jnp.zeros((speakers, speakers), jnp.int32).at[np.nonzero(others)].set(digits - ZERO)

    def signs(memory: Array) -> Int[Array, " Q"]:
        first = memory.reshape(-1, ENTRY)[:, 0]
        return (first == ord("+")).astype(jnp.int32) - (first == ord("-"))

    def trust(memory: Array) -> Int[Array, " S"]:
        entries = memory.reshape(-1, ENTRY)[:, :REFLECTION]
        return (signs(memory)[:, None] * jax.nn.one_hot(entries[:, 1] - ZERO - 1, speakers, dtype=jnp.int32)).sum(0)

    def said(*tokens: Array | int) -> Int[Array, " R"]:
        row = jnp.stack([jnp.asarray(x, jnp.int32) for x in tokens])
        return jnp.pad(row, (0, RESPONSE - len(tokens)), constant_values=EOS)

    def reflect(tokens: Array, length: Array) -> Array:
        transcript = speakers * (config.rounds + 1)
        _, known, answers, digits, memory = parts(tokens, length, (QUESTION, 2, transcript, speakers * (speakers - 1)))
        graph, least = weights(digits), jnp.iinfo(jnp.int32).min
        score = jnp.where(graph.any(1), trust(memory), least)
        wrong = (answers[:speakers] != known[0]) & graph.any(1)
        hurts = wrong.any()
        of = jnp.argmax(jnp.where(hurts & ~wrong, least, score))
        sign = jnp.where(hurts, ord("-"), ord("+"))
        text = said(sign, ZERO + 1 + of, ZERO + 1 + jnp.argmax(graph[of]))
        return jnp.where(graph.any(), text, EOS)

    def act(tokens: Array, length: Array) -> Array:
        _, digits, memory = parts(tokens, length, (0, speakers * (speakers - 1)))
        graph, score = weights(digits), trust(memory)
        leads = jnp.arange(speakers) == jnp.argmax(score)
        own, into = leads[:, None] & others, leads[None] & others
        rules = (~own & (graph > 1), own & (graph < MOST_WEIGHT), into & (graph > 0))
        urgent = jnp.stack([(3 - k) * rule for k, rule in enumerate(rules)]).max(0)
        place = jnp.argmax(urgent)
        start, to = place // speakers, place % speakers
        edge = (ZERO + 1 + start, ZERO + 1 + to)
        sets = said(jnp.where(graph[start, to] == 0, ord("a"), ord("w")), *edge, ZERO + MOST_WEIGHT)
        text = jnp.where(leads[start], sets, said(ord("d"), *edge))
        edits = signs(memory).any() & (urgent.max() > 0)
        return jnp.where(edits, text, said(encoded("k")[0]))

    return dict(zip(ROLES, (reflect, act), strict=True))


def scripted_team(config: Config) -> Team:
    """A team whose two roles are played by the scripts."""
    own = scripts(config)
    models = tuple(make_model(name, own[name], RESPONSE, BYTES) for name in ROLES)
    return Team(tuple(Role(name, name, RESPONSE) for name in ROLES), models)


def parameters(team: Team) -> dict[str, dict]:
    """Parameters of a scripted team, which are empty. ``team``: of `scripted_team`."""
    return {"shared": {}, "agents": {model.name: {"params": {}} for model in team.models}}
