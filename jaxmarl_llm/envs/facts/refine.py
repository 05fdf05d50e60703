"""The protocol `refine` of facts: an actor searches and answers, a refiner accepts the trace or cuts it.

    actor    Ta12>                        a1      a query, see `facts.search`
    actor    Ta12>a1:a1c>                 *3      a query that returns nothing
    actor    Ta12>a1:a1c>*3:>             =f      an answer
    refiner  Ta12>a1:a1c>*3:>=f|          2       cut before search 2; y accepts
    actor    Ta12>a1:a1c>                 *2      goes on from the prefix that was kept
    actor    Ta12>a1:a1c>*2:c2x>          =x      this answer is final

A completion ends with eos. `facts.trace` says what a segment of the actor is, and how a trace is shown. One turn of the
actor is one segment. The trace has at most S = ``searches`` searches. After the first answer the refiner reads the
whole trace, once. Before each search the state of the trace is kept. A cut before search k puts that state back, value
by value. So the actor reads, token for token, the prompt that it read before search k.

An episode has at most T = min(8, 2 S + 3) turns. A first trace of n searches takes n + 1 turns, and the refiner one. So
T - n - 2 turns are left after a cut: with S = 3 these are 5, 4, 3 for n = 1, 2, 3. The segment behind S searches has to
be an answer, and so has the segment at the last turn. Any other segment there ends the trace without an answer.

``second="whole"`` is a control. The actor always draws a second trace from the question on, as if the refiner had cut
before search 1. The refiner then reads both, and writes 1 or 2, the trace that is kept:

    refiner  Ta12>a1:a1c>*3:>=f>a1:a1c>*2:c2x>=x|       2

The actor has as many turns for the second trace as after a cut: T - n - 2.

Out of form are

    actor    a malformed segment; a query where the segment has to be an answer
    refiner  anything but y or the number of a search of the trace; anything but 1 or 2 in the control

A refiner out of form keeps the first trace.

Rewards. The final trace is the first one, or what the actor made of it after a cut. A role's own is what only the role
that acts is paid.

    em            1 if the final answer is the gold one, to all roles at the last turn
    density       em times the share of searches with evidence in the final trace, to all roles at the last turn
    evidence      its own: 1 for a search with evidence (actor)
    cut           its own: k of a cut before search k, else 0 (refiner); in the control 1 for the second trace
    first_em      its own: what em of the first trace would have been (refiner)
    first_miss    its own: the first search of the first trace without evidence, from 1; 0 for none (refiner)
    dropped_from  its own: the first turn that the final trace leaves out, see below (refiner)
    dropped_to    its own: the turn behind the last one that the final trace leaves out (refiner)
    format        its own: 1 for a completion in form
    turns         its own: 1

So R = em (1 + mean of u) is em + density, where u is 1 for a search with evidence. The final trace leaves out the turns
from ``dropped_from`` to before ``dropped_to``. Both are 0 where a refiner accepts.

Shared arguments: ``config`` has the settings of tasks, and ``settings`` those of this protocol. ``key`` is a PRNG key,
and ``state`` the state of an episode. ``tokens`` [1 R] are completions, and ``length`` [1] their numbers of tokens.
``seed`` and ``rng`` (NumPy) determine what is drawn. ``n`` is the number of samples of a role, and ``held_out`` the
side of the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    join,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.facts import exercises, tasks
from jaxmarl_llm.envs.facts.protocol import Protocol
from jaxmarl_llm.envs.facts.tasks import QUESTION, Task, TaskConfig
from jaxmarl_llm.envs.facts.text_trace import TextTrace, demonstrated_trace, good_cut
from jaxmarl_llm.envs.facts.trace import (
    SEARCH,
    SEGMENT,
    Trace,
    answer_pieces,
    answered,
    density,
    empty,
    first_miss,
    read_segment,
    search_pieces,
    searched,
)
from jaxmarl_llm.envs.prompt_grammar import BAR, END, Piece

ROLES = ("actor", "refiner")
ACTOR, REFINER = range(2)
COMPONENTS = (
    "em", "density", "evidence", "cut", "first_em", "first_miss", "dropped_from", "dropped_to", "format", "turns",
)  # fmt: skip
FORMS = ("cut", "whole")
MARK = "T"
ACCEPT = "y"
KEEPS = ("1", "2")  # of the refiner in the control: the first trace, the second one
TURN_LIMIT = 8  # turns of the longest episode
MOST_SEARCHES = 4
RESPONSE = SEGMENT + 1
FIRST, SECOND, JUDGED = range(3)  # stages: who acts is the actor, the actor again, the refiner


@dataclass(frozen=True)
class Settings:
    """The settings of traces and demonstrations."""

    searches: int = 3  # S, the searches of a trace at most
    second: str = "cut"  # what is drawn again: from the cut on (cut), or always the whole trace (whole), a control
    # Probabilities of mistakes in demonstrations.
    relation_error_rate: float = 0.3  # a query asks for another relation
    answer_error_rate: float = 0.2  # the answer is another entity of the trace
    judgement_error_rate: float = 0.4  # the refiner's choice is drawn at random

    def check(self, path: str) -> None:
        checks.in_range(path, self, 1, MOST_SEARCHES, "searches")
        one_of(f"{path}.second", self.second, FORMS)
        checks.probabilities(path, self, "relation_error_rate", "answer_error_rate", "judgement_error_rate")

    @property
    def turns(self) -> int:
        """T, the most turns of an episode."""
        return min(TURN_LIMIT, 2 * self.searches + 3)

    @property
    def last_segment(self) -> int:
        """The last turn of the actor."""
        return self.turns - (1 if self.second == "cut" else 2)

    @property
    def actors(self) -> tuple[tuple[int, ...], ...]:
        """The roles that may act at each turn."""
        first, second = range(self.searches + 1), range(3 if self.second == "cut" else 1, self.last_segment + 1)
        judged = range(1, self.searches + 2) if self.second == "cut" else range(2, self.turns)
        acts = lambda turn: (ACTOR,) * (turn in first or turn in second) + (REFINER,) * (turn in judged)
        return tuple(acts(turn) for turn in range(self.turns))


@struct.dataclass
class State:
    """An episode so far. Its fields have equal shapes at every turn."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    stage: Int[Array, ""]  # FIRST, SECOND or JUDGED
    trace: Trace  # that the actor goes on with
    earlier: Trace  # the trace before search i + 1, for i below S; arrays begin with S
    first: Trace  # the first trace as it ended
    done: Bool[Array, ""]


def prompt_lengths(settings: Settings) -> tuple[int, int]:
    """The numbers of tokens of the longest prompts of actor and refiner."""
    begin = len(MARK) + QUESTION + len(END)
    ended = SEGMENT + 1  # an answer, and what stands behind it
    searches, traces = settings.searches, 1
    if settings.second == "whole":
        searches, traces = min(2 * searches, settings.turns - 3), 2
    return begin + SEARCH * settings.searches, begin + SEARCH * searches + ended * traces


def prompt_length(settings: Settings) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return max(prompt_lengths(settings))


def make(config: TaskConfig, settings: Settings) -> ArrayEnv:
    """The environment of the settings."""
    return ArrayEnv(
        name="facts",
        roles=ROLES,
        seats=1,
        max_turns=settings.turns,
        components=COMPONENTS,
        actors=settings.actors,
        reset=partial(reset, settings),
        observe=partial(observe, settings),
        step=partial(step, settings),
    )


def reset(settings: Settings, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    none = empty(settings.searches)
    earlier = jax.tree.map(lambda x: jnp.stack([x] * settings.searches), none)
    row = jax.tree.map(jnp.int32, dict(task))
    return State(row, jnp.int32(0), jnp.int32(FIRST), none, earlier, none, jnp.bool_(False))


def observe(settings: Settings, state: State) -> Observation:
    """The prompt of the role that acts."""
    task, judges = state.task, state.stage == JUDGED
    pieces: list[Piece] = [(encoded(MARK), 1), (task["question"], task["question_length"]), (encoded(END), 1)]
    if settings.second == "whole":
        pieces += [*search_pieces(task, state.first, judges), *answer_pieces(state.first, judges)]
        pieces += [(encoded(END), 1 * judges)]
    pieces += [*search_pieces(task, state.trace), *answer_pieces(state.trace, judges), (encoded(BAR), 1 * judges)]
    tokens, length = join(pieces, prompt_length(settings))
    role = jnp.where(judges, REFINER, ACTOR)
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


class Act(NamedTuple):
    """Result of an actor's completion.

    Attributes:
        trace: The trace after it.
        ends: Whether the trace has ended.
        evidence: Whether the completion is a search with evidence.
        proper: Whether the completion is in form.
    """

    trace: Trace
    ends: Bool[Array, ""]
    evidence: Bool[Array, ""]
    proper: Bool[Array, ""]


class Verdict(NamedTuple):
    """Result of a refiner's completion.

    Attributes:
        cut: As the reward of that name; 0 keeps the first trace.
        proper: Whether the completion is in form.
    """

    cut: Int[Array, ""]
    proper: Bool[Array, ""]


def step(
    settings: Settings, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    act, verdict = acted(settings, state, tokens[0], length[0]), judged(settings, state, tokens[0], length[0])
    judges = state.stage == JUDGED
    after = advance(settings, state, act, verdict)
    right = lambda trace: 1.0 * (trace.answer == state.task["answer"])
    begin, end = dropped(settings, state, verdict.cut)
    em = after.done * right(after.trace)
    of_refiner = {
        "cut": verdict.cut,
        "first_em": right(state.first),
        "first_miss": first_miss(state.first),
        "dropped_from": begin,
        "dropped_to": end,
    }
    own = jnp.arange(len(ROLES)) == jnp.where(judges, REFINER, ACTOR)
    rewards = {
        "em": to_all(ROLES, em),
        "density": to_all(ROLES, em * density(after.trace)),
        "evidence": 1.0 * (own & ~judges & act.evidence),
        **{name: jnp.where(own & judges, 1.0 * value, 0.0) for name, value in of_refiner.items()},
        "format": 1.0 * (own & jnp.where(judges, verdict.proper, act.proper)),
        "turns": 1.0 * own,
    }
    return unless_finished(state, after, rewards)


def acted(settings: Settings, state: State, said: Int[Array, " R"], length: Int[Array, ""]) -> Act:
    """Result of a completion of the actor.

    Args:
        settings: The number of searches and of turns.
        state: The state before it.
        said: The completion.
        length: Its number of tokens.
    """
    segment, trace = read_segment(said, length), state.trace
    last = (trace.number >= settings.searches) | (state.turn >= settings.last_segment)
    ends = segment.answers | last
    after = _either(ends, answered(trace, segment), searched(state.task, trace, segment))
    evidence = ~ends & after.evidence[jnp.minimum(trace.number, settings.searches - 1)]
    return Act(after, ends, evidence, segment.answers | (segment.query & ~last))


def judged(settings: Settings, state: State, said: Int[Array, " R"], length: Int[Array, ""]) -> Verdict:
    """Result of a completion of the refiner.

    Args:
        settings: What the refiner chooses from.
        state: The state before it.
        said: The completion.
        length: Its number of tokens.
    """
    ended, size = completion_end(said, length)
    is_letter = lambda letter: ended & (size == 1) & (said[0] == ord(letter))
    if settings.second == "whole":
        keeps_first, keeps_second = map(is_letter, KEEPS)
        return Verdict(1 * keeps_second, keeps_first | keeps_second)
    k = said[0] - ord("0")
    cuts = ended & (size == 1) & (k >= 1) & (k <= state.first.number)
    return Verdict(jnp.where(cuts, k, 0), cuts | is_letter(ACCEPT))


def advance(settings: Settings, state: State, act: Act, verdict: Verdict) -> State:
    """The state after the completion of the role that acts. ``act`` and ``verdict``: what the completion does."""
    judges, cuts = state.stage == JUDGED, verdict.cut > 0
    keep = lambda all_, now: all_.at[state.trace.number].set(now, mode="drop")
    earlier = _either(judges, state.earlier, jax.tree.map(keep, state.earlier, state.trace))
    first_ends, second_ends = ((state.stage == stage) & act.ends for stage in (FIRST, SECOND))
    first = _either(first_ends, act.trace, state.first)
    if settings.second == "whole":
        drawn = _either(first_ends, empty(settings.searches), act.trace)
        chosen = _either(cuts, state.trace, state.first)
        stage, done = jnp.where(second_ends, JUDGED, jnp.where(first_ends, SECOND, state.stage)), judges
    else:
        drawn = act.trace
        before_cut = jax.tree.map(lambda x: x[jnp.maximum(verdict.cut - 1, 0)], state.earlier)
        chosen = _either(cuts, before_cut, state.first)
        stage = jnp.where(judges & cuts, SECOND, jnp.where(first_ends, JUDGED, state.stage))
        done = (judges & ~cuts) | second_ends
    trace = _either(judges, chosen, drawn)
    return State(state.task, state.turn + 1, stage, trace, earlier, first, done)


def dropped(settings: Settings, state: State, cut: Int[Array, ""]) -> tuple[Array, Array]:
    """The turns [begin, end) that the final trace leaves out. ``state``: before the refiner's turn. ``cut``: its."""
    if settings.second == "whole":
        second = state.first.number + 1  # the turn at which the second trace begins
        return jnp.where(cut > 0, 0, second), jnp.where(cut > 0, second, state.turn)
    return jnp.maximum(cut - 1, 0), jnp.where(cut > 0, state.turn, 0)


def _either(condition: Bool[Array, ""], yes: Trace, no: Trace) -> Trace:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def make_tasks(
    config: TaskConfig, settings: Settings, seed: int | None = None, n: int | None = None, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks drawn from ``seed``: the columns of `tasks.rows`."""
    return tasks.rows(config, seed, n, held_out)[0]


# -- demonstrations ----------------------------------------------------------------------------------------------------


def demonstrated_choice(rng: np.random.Generator, settings: Settings, task: Task, *shown: TextTrace) -> str:
    """The completion of a refiner that reads the traces ``shown`` of ``task``, with the mistakes of ``settings``."""
    options: tuple[str, ...]
    if settings.second == "whole":
        options, right = KEEPS, int([trace.answer == task.answer for trace in shown] == [False, True])
    else:
        options = (ACCEPT, *map(str, range(1, len(shown[0].queries) + 1)))
        right = good_cut(task, shown[0])
    errs = rng.random() < settings.judgement_error_rate
    return options[rng.integers(len(options)) if errs else right]


def demonstrations(config: TaskConfig, settings: Settings, seed: int, n: int) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens, length [n], completion, completion_length [n].

    Prompts and completions are as wide as the longest ones of their role, and of exercises. Each pair is of one episode
    on a training task: one segment of its first trace, drawn at random, and the refiner's turn. A segment behind a cut
    has the prompt of a first trace, so it needs no samples of its own. The share ``config.copying`` of the samples of a
    role are exercises in place of its own.
    """
    rng = np.random.default_rng([seed, 2])
    pairs: list[list[tuple[str, str]]] = []
    for _ in range(n):
        task = tasks.drawn(rng, config)
        rates = settings.searches, settings.relation_error_rate, settings.answer_error_rate
        shown = [demonstrated_trace(rng, task, *rates) for _ in range(1 + (settings.second == "whole"))]
        segments, asked = shown[0].segments(), MARK + task.question + END
        before, segment = segments[rng.integers(len(segments))]
        read = asked + END.join(trace.whole() for trace in shown) + BAR
        said = [(asked + before, segment), (read, demonstrated_choice(rng, settings, task, *shown))]
        pairs.append(exercises.with_exercises(rng, config.copying, task, said))
    return exercises.as_samples(config.copying, ROLES, pairs, prompt_lengths(settings), (RESPONSE,) * len(ROLES))


PROTOCOL = Protocol(make, make_tasks, demonstrations, prompt_length, RESPONSE)
