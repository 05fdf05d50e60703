"""The protocol `inspect` of facts: a planner asks, a solver answers, and an inspector may have the work done again.

    planner    P|a12>                     a1,*2   queries, see `facts.search`
    solver     Sa1cc2x|a12>               x       the answer
    inspector  Ia1cc2x|a12|a1,*2|x>       p       what happens next, one letter

A completion ends with eos. The solver reads the facts that the queries return, in the order of the search. There are
``documents`` of them at most. The inspector reads these facts, the question, the queries and the answer. With
``trace=False`` it reads the question alone: Ia12>. Its letters are

    p    pass: the episode ends with this answer
    w    rewrite: what was found is dropped, and the planner asks anew; then the solver answers
    e    expand: the planner reads what was found, Pa1c|a12>, and its queries add to it; then the solver answers
    r    retry: the solver answers again

An expansion continues the search. So a * in its first query stands for what the query before it led to.

There are at most ``interventions`` rewrites, expansions and retries. After an answer the inspector is asked while one
of them is left. The answer behind the last one stands. So an episode has at most 2 + 3 ``interventions`` turns. Roles
that may act, by turn, are (`actors`)

    one    P  S  I  P,S  S
    two    P  S  I  P,S  S,I  P,S,I  P,S  S

Out of form are

    planner    more than four queries, more than 11 characters, or a malformed query. The first four queries still run
    solver     anything but one character. The inspector reads the first two
    inspector  anything but one of the four letters; it counts as a pass

and every completion without eos. Rewards, where a role's own is what only the role that acts is paid:

    em             1 if the last answer is the gold one, to all roles at the last turn
    before         1 if the first answer is the gold one, to all roles at the turn of that answer
    change         em of the last answer minus that of the first, to the inspector at the last turn, whoever acts there
    interventions  1 for each intervention, to the inspector at the turn of it
    passed_right   1 if the first inspection passes a right answer, to all roles at that turn
    evidence       its own: share of the gold path's facts among those that the solver will read (planner)
    format         its own: 1 for a completion in form
    turns          its own: 1

Shared arguments: ``config`` has the settings of tasks, and ``settings`` those of this protocol. ``key`` is a PRNG key,
and ``state`` the state of an episode. ``tokens`` [1 R] are completions, and ``length`` [1] their numbers of tokens. Of
one completion, ``said`` [R] are the tokens, ``ended`` [] says whether it has an eos, and ``size`` [] counts the tokens
without eos. ``seed`` determines what is drawn, ``n`` is a number of tasks, and ``held_out`` the side of the split. D is
the number of documents, and Q that of the queries' characters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from string import ascii_lowercase, digits

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs.array_env import (
    ArrayEnv,
    Observation,
    completion_end,
    encoded,
    join,
    readable_part,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.facts import tasks
from jaxmarl_llm.envs.facts.inspection_samples import demonstrations
from jaxmarl_llm.envs.facts.inspection_settings import (
    ANSWER,
    COMPONENTS,
    INSPECTOR,
    LETTERS,
    MARKS,
    PLANNER,
    ROLES,
    SOLVER,
    Settings,
    prompt_length,
    queries_length,
)
from jaxmarl_llm.envs.facts.pipeline import LONGEST, NONE, evidence, score
from jaxmarl_llm.envs.facts.protocol import Protocol
from jaxmarl_llm.envs.facts.roles import QUERIES
from jaxmarl_llm.envs.facts.search import ALPHABET, COMMA, last_entity, read_queries, search
from jaxmarl_llm.envs.facts.tasks import FACTS, TaskConfig
from jaxmarl_llm.envs.prompt_grammar import prompt_row


def actors(interventions: int) -> tuple[tuple[int, ...], ...]:
    """The roles that may act at each turn. ``interventions``: of an episode, at most."""
    places, out = {(PLANNER, interventions)}, []  # who acts, and how many interventions are left
    while places:
        out.append(tuple(sorted({role for role, _ in places})))
        behind: set[tuple[int, int]] = set()
        for role, left in places:
            if role == PLANNER:
                behind.add((SOLVER, left))
            elif role == INSPECTOR:
                behind |= {(PLANNER, left - 1), (SOLVER, left - 1)}
            elif left:
                behind.add((INSPECTOR, left))
        places = behind
    return tuple(out)


class State(struct.PyTreeNode):
    """An episode so far. Facts that were found are places in the list of facts, or NONE."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    role: Int[Array, ""]  # who acts
    found: Int[Array, " D"]  # in the order of the search
    last: Int[Array, ""]  # the entity that the last query led to, -1 for none
    queries: Int[Array, " Q"]  # that found them
    queries_size: Int[Array, ""]
    answer: Int[Array, "2"]
    answer_size: Int[Array, ""]
    right: Bool[Array, ""]  # whether the last answer is the gold one
    before: Bool[Array, ""]  # whether the first answer is
    used: Int[Array, ""]  # interventions
    done: Bool[Array, ""]


def make(config: TaskConfig, settings: Settings) -> ArrayEnv:
    """The environment of the settings."""
    turns = actors(settings.interventions)
    return ArrayEnv(
        name="facts",
        roles=ROLES,
        seats=1,
        max_turns=len(turns),
        components=COMPONENTS,
        actors=turns,
        reset=partial(reset, settings),
        observe=partial(observe, settings),
        step=partial(step, settings),
    )


def reset(settings: Settings, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    zero, no, text = jnp.int32(0), jnp.bool_(False), lambda size: jnp.zeros(size, jnp.int32)
    return State(
        task=jax.tree.map(jnp.int32, dict(task)),
        role=jnp.int32(PLANNER),
        found=jnp.full(settings.documents, NONE, jnp.int32),
        last=jnp.int32(-1),
        queries=text(queries_length(settings)),
        queries_size=zero,
        answer=text(ANSWER),
        answer_size=zero,
        right=no,
        before=no,
        used=zero,
        done=no,
    )


def observe(settings: Settings, state: State) -> Observation:
    """The prompt of the role that acts."""
    inspects = state.role == INSPECTOR
    reads, asked = ~inspects | settings.trace, (state.task["question"], state.task["question_length"])
    facts = [(state.task["facts"][place], 3 * (reads & (place >= 0))) for place in state.found]
    subject = [*facts, (asked[0], asked[1] * ~reads)]
    trace = [(state.queries, state.queries_size)], [(state.answer, state.answer_size)]
    entries = [(reads, [asked]), *((inspects & reads, pieces) for pieces in trace)]
    tokens, length = prompt_row(encoded(MARKS)[state.role], subject, entries, prompt_length(settings))
    return Observation(state.role[None], tokens[None], length[None], ~state.done[None])


def step(
    settings: Settings, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    said, (ended, size) = tokens[0], completion_end(tokens[0], length[0])
    moves = [partial(move, settings) for move in (plan, answer, inspect)]
    after, proper = jax.lax.switch(state.role, moves, state, said, ended, size)
    first, own = state.used == 0, jnp.arange(len(ROLES)) == state.role
    inspector = jnp.arange(len(ROLES)) == INSPECTOR
    change = 1.0 * after.right - 1.0 * after.before
    passed = (state.role == INSPECTOR) & first & after.done
    rewards = {
        "em": to_all(ROLES, after.done & after.right),
        "before": to_all(ROLES, (state.role == SOLVER) & first & after.right),
        "change": inspector * jnp.where(after.done, change, 0.0),
        "interventions": inspector * 1.0 * (after.used - state.used),
        "passed_right": to_all(ROLES, passed & state.right),
        "evidence": own * jnp.where(state.role == PLANNER, evidence(state.task["path"], after.found), 0.0),
        "format": 1.0 * (own & proper),
        "turns": 1.0 * own,
    }
    return unless_finished(state, after, rewards)


def plan(settings: Settings, state: State, said: Array, ended: Array, size: Array) -> tuple[State, Bool[Array, ""]]:
    """The state after a planner's completion, and whether the completion is in form."""
    queries, found, last = read_queries(said, size, QUERIES), state.found, state.last
    for i in range(QUERIES):
        results = queries.proper[i] & search(state.task["facts"], queries.text[i], queries.size[i], last)
        last = jnp.where(i < queries.number, last_entity(state.task["facts"], results), last)
        new = results & ~(jnp.arange(FACTS)[:, None] == found).any(1)
        at = jnp.where(new, (found >= 0).sum() + jnp.cumsum(new) - 1, settings.documents)
        found = found.at[at].set(jnp.arange(FACTS), mode="drop")
    old, text = state.queries_size, shown(said, ended, size, LONGEST, ALPHABET + COMMA)
    pieces = [(state.queries, old), (encoded(COMMA), jnp.int32((old > 0) & (text[1] > 0))), text]
    row, count = join(pieces, queries_length(settings))
    after = state.replace(role=jnp.int32(SOLVER), found=found, last=last, queries=row, queries_size=count)
    return after, ended & (size <= LONGEST) & (queries.number <= QUERIES) & queries.clean


def answer(settings: Settings, state: State, said: Array, ended: Array, size: Array) -> tuple[State, Bool[Array, ""]]:
    """The state after a solver's completion, and whether the completion is in form."""
    _, right = score(state.task["answer"], said, ended, size)
    text, length = shown(said, ended, size, ANSWER, ascii_lowercase + digits)
    after = state.replace(
        role=jnp.int32(INSPECTOR),
        answer=text,
        answer_size=length,
        right=right,
        before=jnp.where(state.used == 0, right, state.before),
        done=state.used == settings.interventions,
    )
    return after, ended & (size == 1)


def shown(said: Array, ended: Array, size: Array, most: int, allowed: str) -> tuple[Array, Array]:
    """The part of a completion that others read [T], and its length []: see `array_env.readable_part`.

    ``most``: T. ``allowed``: characters that are shown as they are.
    """
    readable = lambda text: jnp.isin(text, encoded(allowed))
    text, length = readable_part(said[None], (size + ended)[None], most, readable)
    return text[0], length[0]


def inspect(settings: Settings, state: State, said: Array, ended: Array, size: Array) -> tuple[State, Bool[Array, ""]]:
    """The state after an inspector's completion, and whether the completion is in form."""
    proper = ended & (size == 1)
    passes, rewrites, expands, retries = proper & (said[0] == encoded(LETTERS))
    again = rewrites | expands | retries
    after = state.replace(
        role=jnp.where(retries, SOLVER, PLANNER).astype(jnp.int32),
        found=jnp.where(rewrites, NONE, state.found),
        last=jnp.where(rewrites, -1, state.last),
        queries_size=jnp.where(rewrites, 0, state.queries_size),
        used=state.used + again,
        done=~again,
    )
    return after, passes | again


def make_tasks(
    config: TaskConfig, settings: Settings, seed: int | None = None, n: int | None = None, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks drawn from ``seed``: the columns of `tasks.rows`."""
    return tasks.rows(config, seed, n, held_out)[0]


PROTOCOL = Protocol(make, make_tasks, demonstrations, prompt_length, LONGEST + 1)
