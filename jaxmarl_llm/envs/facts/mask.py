"""The protocol `mask` of facts: plan, search, summary, update and answer, as in M-ASK (arXiv 2605.26646).

A team keeps steps, a chain of facts that leads to an answer. The plan has tentative ones, because the planner reads no
fact. A round of search, summary, update and answer brings facts that were found. The roles act in a fixed order

    turn  role         prompt                      completion
    0     planner      Pa12>                       a1xx2b   steps, at most two
    1     answerer     Ga1xx2b|a12>                b        the answer
    2     searcher     Qa1xx2b|a12>                a1,*2    queries, see `facts.search`; or . which ends the episode
    3     summarizer   Sd3ea1cc2xf1d|a12>          a1c,c2x  documents that it keeps, as quotes in any order
    4     updater      Ua1xx2b|a12|a1cc2x>         1        where the summary goes, see below
    5     answerer     Ga1cc2x|a12>                x        the answer
    6     searcher     Qa1cc2x|a12|a1,*2>          .        ends the episode

A completion ends with eos. A plan has one or two steps of three characters: a letter, a digit and a letter. Its last
character is its answer. Others read its first six characters, where ? stands for what is neither a letter a-z nor a
digit, and fills the last step. Documents and quotes are those of the protocol `pipeline`: `pipeline.ask` and
`pipeline.select`. An update is

    a     add: the summary's facts go behind the steps
    k     the summary's facts take the place of step k and of all behind it; k is 1, or 2 where there are two steps

A searcher whose history is in the prompt has searched before. The second search can only end: an episode has room for
one round. An answer is compared character by character, as in `pipeline`. The answer of the last answerer counts.

Out of form are

    planner     anything but one or two steps
    searcher    a rewriter's completion that is out of form in `pipeline`; anything but . in the second search, which
                ends the episode too
    summarizer  a selector's completion that is out of form in `pipeline`
    updater     anything but a, 1, or 2 where there are two steps; it counts as a
    answerer    anything but one character

and every completion without eos. Rewards, where a role's own is what only the role that acts is paid:

    f1         of the last answer, to all roles at the last turn
    em         1 if the last answer is the gold one alone, to all roles at the last turn
    score      its own: F1 of the answer of a plan or of an answerer
    evidence   its own: share of the gold path's facts among the documents (searcher), the summary (summarizer) or the
               new steps (updater)
    invalid    its own: -1 for a completion out of form
    format     its own: 1 for a completion in form
    turns      its own: 1

The F1 of answers along an episode says what a search, a summary and an update were worth: see `credit.differences`.

Shared arguments: ``config`` has the settings of tasks, and ``settings`` those of this protocol. ``key`` is a PRNG key,
and ``state`` the state of an episode. ``tokens`` [1 R] are completions, and ``length`` [1] their numbers of tokens. Of
one completion, ``said`` [R] are the tokens, ``ended`` [] says whether it has an eos, and ``size`` [] counts the tokens
without eos. ``seed`` determines what is drawn, ``n`` is a number of tasks, and ``held_out`` the side of the split. D is
the number of documents, K that of a summary's facts, and S that of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from string import ascii_lowercase, digits

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs.array_env import (
    UNREADABLE,
    ArrayEnv,
    Observation,
    completion_end,
    encoded,
    join,
    readable_part,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.facts import pipeline
from jaxmarl_llm.envs.facts.mask_samples import demonstrations
from jaxmarl_llm.envs.facts.mask_settings import (
    ADD,
    CLOSING,
    COMPONENTS,
    END_OF_SEARCH,
    MARKS,
    ORDER,
    PLANNED,
    PLANNER,
    ROLES,
    SEARCHER,
    SUMMARIZER,
    UPDATER,
    Settings,
    prompt_length,
)
from jaxmarl_llm.envs.facts.pipeline import LONGEST, NONE, evidence, score
from jaxmarl_llm.envs.facts.protocol import Protocol
from jaxmarl_llm.envs.facts.search import ALPHABET, COMMA
from jaxmarl_llm.envs.facts.tasks import TaskConfig
from jaxmarl_llm.envs.prompt_grammar import Piece, prompt_row

PLAN = 3 * PLANNED  # characters of a plan


class State(struct.PyTreeNode):
    """An episode so far. Documents and the summary's facts are places in the list of facts, or NONE."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    steps: Int[Array, " 3S"]  # bytes
    number: Int[Array, ""]  # of steps
    queries: Int[Array, " Q"]  # of the search, as prompts show them
    queries_size: Int[Array, ""]
    documents: Int[Array, " D"]
    summary: Int[Array, " K"]
    f1: Float[Array, ""]  # of the last answer
    right: Bool[Array, ""]  # whether the last answer is the gold one
    done: Bool[Array, ""]


def make(config: TaskConfig, settings: Settings) -> ArrayEnv:
    """The environment of the settings."""
    return ArrayEnv(
        name="facts",
        roles=ROLES,
        seats=1,
        max_turns=len(ORDER),
        components=COMPONENTS,
        actors=tuple((role,) for role in ORDER),
        reset=partial(reset, settings),
        observe=partial(observe, settings),
        step=partial(step, settings),
    )


def reset(settings: Settings, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    zero, row = jnp.int32(0), lambda size, fill=0: jnp.full(size, fill, jnp.int32)
    return State(
        task=jax.tree.map(jnp.int32, dict(task)),
        turn=zero,
        steps=row(3 * settings.steps),
        number=zero,
        queries=row(LONGEST),
        queries_size=zero,
        documents=row(settings.documents, NONE),
        summary=row(settings.kept, NONE),
        f1=jnp.float32(0),
        right=jnp.bool_(False),
        done=jnp.bool_(False),
    )


def observe(settings: Settings, state: State) -> Observation:
    """The prompt of the role that acts."""
    role, task = acting(state), state.task
    asked: Piece = (task["question"], task["question_length"])
    plans, reads = role == PLANNER, role == SUMMARIZER
    facts_at = lambda places, shown: [(task["facts"][place], 3 * (shown & (place >= 0))) for place in places]
    subject: list[Piece] = [(asked[0], asked[1] * plans), (state.steps, 3 * state.number * ~(plans | reads))]
    subject += facts_at(state.documents, reads)
    entries: list[tuple[Array | int, Sequence[Piece]]] = [
        (~plans, [asked]),
        ((role == SEARCHER) & (state.turn == CLOSING), [(state.queries, state.queries_size)]),
        (role == UPDATER, facts_at(state.summary, True)),
    ]
    tokens, length = prompt_row(encoded(MARKS)[role], subject, entries, prompt_length(settings))
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


def acting(state: State) -> Int[Array, ""]:
    """The role that acts."""
    return jnp.array(ORDER, jnp.int32)[jnp.minimum(state.turn, CLOSING)]


def step(
    settings: Settings, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    said, (ended, size) = tokens[0], completion_end(tokens[0], length[0])
    role = acting(state)
    moves = [partial(move, settings) for move in (plan, look, summarize, update, answer)]
    after, proper, worth, found = jax.lax.switch(role, moves, state, said, ended, size)
    after = after.replace(turn=state.turn + 1)
    own = jnp.arange(len(ROLES)) == role
    rewards = {
        "f1": to_all(ROLES, jnp.where(after.done, after.f1, 0.0)),
        "em": to_all(ROLES, after.done & after.right),
        "score": own * worth,
        "evidence": own * found,
        "invalid": -1.0 * (own & ~proper),
        "format": 1.0 * (own & proper),
        "turns": 1.0 * own,
    }
    return unless_finished(state, after, rewards)


Moved = tuple[State, Bool[Array, ""], Float[Array, ""], Float[Array, ""]]  # state, form, score, evidence
NOTHING = 0.0


def plan(settings: Settings, state: State, said: Array, ended: Array, size: Array) -> Moved:
    """The state after a planner's completion, its form, the score of its answer, and no evidence."""
    here = jnp.arange(PLAN)
    text = said[jnp.minimum(here, len(said) - 1)]
    is_letter, is_digit = (jnp.isin(text, encoded(kind)) for kind in (ascii_lowercase, digits))
    inside = here < size
    fits = jnp.where(here % 3 == 1, is_digit, is_letter) | ~inside
    proper = ended & (size > 0) & (size <= PLAN) & (size % 3 == 0) & fits.all()
    shown = jnp.where(inside & (is_letter | is_digit), text, UNREADABLE)
    number = (jnp.minimum(size, PLAN) + 2) // 3
    last = said[jnp.maximum(size - 1, 0)]
    right = ended & (size > 0) & (last == state.task["answer"])
    after = state.replace(steps=state.steps.at[:PLAN].set(shown), number=number)
    return after, proper, 1.0 * right, jnp.float32(NOTHING)


def look(settings: Settings, state: State, said: Array, ended: Array, size: Array) -> Moved:
    """The state after a searcher's completion, its form, no score, and its evidence."""
    ends, closing = ended & (size == 1) & (said[0] == ord(END_OF_SEARCH)), state.turn == CLOSING
    asked = pipeline.ask(settings.reading, state.task, said, ended, size)
    text, count = readable_part(
        said[None], (size + ended)[None], LONGEST, lambda text: jnp.isin(text, encoded(ALPHABET + COMMA))
    )
    after = state.replace(documents=asked.places, queries=text[0], queries_size=count[0], done=ends | closing)
    found = jnp.where(after.done, 0.0, evidence(state.task["path"], asked.places))
    return after, ends | (asked.proper & ~closing), jnp.float32(NOTHING), found


def summarize(settings: Settings, state: State, said: Array, ended: Array, size: Array) -> Moved:
    """The state after a summarizer's completion, its form, no score, and its evidence."""
    kept = pipeline.select(settings.reading, state.task, state.documents, said, ended, size)
    found = evidence(state.task["path"], kept.places)
    return state.replace(summary=kept.places), kept.proper, jnp.float32(NOTHING), found


def update(settings: Settings, state: State, said: Array, ended: Array, size: Array) -> Moved:
    """The state after an updater's completion, its form, no score, and the evidence of the new steps."""
    k, brief = said[0] - ord("0"), ended & (size == 1)
    replaces = brief & (k >= 1) & (k <= state.number)
    left = jnp.where(replaces, k - 1, state.number)
    added = [(state.task["facts"][place], 3 * (place >= 0)) for place in state.summary]
    steps, count = join([(state.steps, 3 * left), *added], 3 * settings.steps)
    number = count // 3
    there = (jnp.arange(settings.steps) < number)[:, None]
    facts = jnp.where(there, steps.reshape(-1, 3), UNREADABLE)
    same = (state.task["facts"][state.task["path"]][:, None] == facts).all(-1).any(1)
    hops = state.task["path"] >= 0
    after = state.replace(steps=steps, number=number)
    return after, replaces | (brief & (said[0] == ord(ADD))), jnp.float32(NOTHING), (hops & same).sum() / hops.sum()


def answer(settings: Settings, state: State, said: Array, ended: Array, size: Array) -> Moved:
    """The state after an answerer's completion, its form, its score, and no evidence."""
    f1, right = score(state.task["answer"], said, ended, size)
    return state.replace(f1=f1, right=right), ended & (size == 1), f1, jnp.float32(NOTHING)


def make_tasks(
    config: TaskConfig, settings: Settings, seed: int | None = None, n: int | None = None, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks drawn from ``seed``: those of the protocol `pipeline`."""
    return pipeline.make_tasks(config, settings.reading, seed, n, held_out)


PROTOCOL = Protocol(make, make_tasks, demonstrations, prompt_length, pipeline.RESPONSE)
