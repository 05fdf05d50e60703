"""The protocol `tags` of facts: segments with tags, by one agent or by a team of planner, searcher and answerer.

An episode is one sequence of segments and observations. A segment is a tag, a text and eos, which is shown as / here:

    Pa1,*2/      plan: the queries to come, see `facts.search`
    Sa1/         search: one query; what it returns is the observation behind it, a1c>
    Ax/          answer: one letter; the episode ends

One segment is one completion. With ``players="agent"`` one role writes all of them:

    agent     Ga12>                              Pa1,*2/
    agent     Ga12>Pa1,*2/                       Sa1/
    agent     Ga12>Pa1,*2/Sa1/a1c>               S*2/
    agent     Ga12>Pa1,*2/Sa1/a1c>S*2/c2x>       Ax/

So a prompt is the one before it, its completion and the observation, token for token. A whole episode is one sequence.
The agent may answer at any time, without a plan too. With ``players="team"`` three roles write the same sequence. Each
reads all of it behind a mark of its own, D, L or W:

    planner   Da12>                              Pa1,*2/
    searcher  La12>Pa1,*2/                       Sa1/
    searcher  La12>Pa1,*2/Sa1/a1c>               S*2/
    answerer  Wa12>Pa1,*2/Sa1/a1c>S*2/c2x>       Ax/

The searcher acts once for each query of the plan, and then the answerer acts. A search need not be that of the plan.
All four roles are roles of the environment in both forms, so that one set of models can play either.

The grammar: a plan has 1 to S = ``searches`` well-formed queries. There are at most ``plans`` plans and S searches in
an episode. A role of the team writes its own kind of segment. A segment outside of the grammar ends the episode without
an answer, and so does a completion without eos. An episode has at most ``plans`` + S + 1 turns.

Rewards, where a role's own is what only the role that acts is paid:

    em        1 if the answer is the gold one, to all roles at the last turn
    format    1 if the episode ended with an answer, so that all segments are in the grammar, to all roles at its end
    searches  its own: 1 for a search
    evidence  its own: 1 for a search that returns a fact of the gold path
    turns     its own: 1

Shared arguments: ``config`` has the settings of tasks, and ``settings`` those of this protocol. ``key`` is a PRNG key,
and ``state`` the state of an episode. ``tokens`` [1 R] are completions, and ``length`` [1] their numbers of tokens.
``seed`` and ``rng`` (NumPy) determine what is drawn. ``n`` is the number of tasks or of samples of a role, and
``held_out`` the side of the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from string import ascii_lowercase

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    EOS,
    PAD,
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
from jaxmarl_llm.envs.facts.search import COMMA, RESULTS, last_entity, read_queries, search
from jaxmarl_llm.envs.facts.tasks import QUESTION, Task, TaskConfig
from jaxmarl_llm.envs.facts.text_trace import demonstrated_trace
from jaxmarl_llm.envs.facts.trace import NONE, has_evidence
from jaxmarl_llm.envs.prompt_grammar import END

ROLES = ("planner", "searcher", "answerer", "agent")
PLANNER, SEARCHER, ANSWERER, AGENT = range(4)
MARKS = "DLWG"  # of the roles, before what they read
PLAN, SEARCH, ANSWER = TAGS = "PSA"  # in the order of the roles that write them
CLOSE = "/"  # eos in texts of demonstrators
COMPONENTS = ("em", "format", "searches", "evidence", "turns")
PLAYERS = ("agent", "team")
MOST_PLANS, MOST_SEARCHES = 2, 4
SEARCH_SEGMENT, ANSWER_SEGMENT = 4, 3  # tokens, eos included
OBSERVATION = 3 * RESULTS + 1


def plan_segment(searches: int) -> int:
    """Tokens of the longest plan, eos included. ``searches``: its queries."""
    return 1 + 3 * searches


@dataclass(frozen=True)
class Settings:
    """The settings of players, segments and demonstrations."""

    players: str = "agent"  # who plays: one agent, or the team
    plans: int = 1  # of an episode at most
    searches: int = 3  # of an episode at most, by the agent and by the team alike
    # Probabilities of mistakes in demonstrations of the team.
    hop_error_rate: float = 0.2  # the second hop is not planned
    relation_error_rate: float = 0.3  # a query asks for another relation
    answer_error_rate: float = 0.3  # the answer is another entity of the trace
    agent_error_rate: float = 0.7  # each of these mistakes, in demonstrations of the agent

    def check(self, path: str) -> None:
        one_of(f"{path}.players", self.players, PLAYERS)
        checks.in_range(path, self, 1, MOST_PLANS, "plans")
        checks.in_range(path, self, 1, MOST_SEARCHES, "searches")
        checks.probabilities(path, self, "hop_error_rate", "relation_error_rate")
        checks.probabilities(path, self, "answer_error_rate", "agent_error_rate")

    @property
    def actors(self) -> tuple[tuple[int, ...], ...]:
        """The roles that may act at each turn."""
        if self.players == "agent":
            return ((AGENT,),) * (self.plans + self.searches + 1)
        between = ((SEARCHER, ANSWERER),) * (self.searches - 1)
        return (PLANNER,), (SEARCHER,), *between, (ANSWERER,)

    @property
    def text(self) -> int:
        """L, the tokens of the longest sequence without its answer."""
        longest = SEARCH_SEGMENT - 1 + OBSERVATION  # a query of two characters returns one fact, one of one up to three
        return QUESTION + 1 + self.plans * plan_segment(self.searches) + self.searches * longest


class State(struct.PyTreeNode):
    """An episode so far."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    role: Int[Array, ""]  # who acts
    text: Int[Array, " L"]  # the sequence so far, from the question on
    size: Int[Array, ""]  # its tokens
    plans: Int[Array, ""]
    searches: Int[Array, ""]
    left: Int[Array, ""]  # queries of the plan that the searcher has not come to
    last: Int[Array, ""]  # byte of the entity that * stands for in the next query, or NONE
    done: Bool[Array, ""]


def prompt_length(settings: Settings) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 1 + settings.text


def make(config: TaskConfig, settings: Settings) -> ArrayEnv:
    """The environment of the settings."""
    return ArrayEnv(
        name="facts",
        roles=ROLES,
        seats=1,
        max_turns=len(settings.actors),
        components=COMPONENTS,
        actors=settings.actors,
        reset=partial(reset, settings),
        observe=partial(observe, settings),
        step=partial(step, settings),
    )


def reset(settings: Settings, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    row, zero = jax.tree.map(jnp.int32, dict(task)), jnp.int32(0)
    text, size = join([(row["question"], row["question_length"]), (encoded(END), 1)], settings.text)
    role = jnp.int32(AGENT if settings.players == "agent" else PLANNER)
    return State(row, role, text, size, zero, zero, zero, jnp.int32(NONE), jnp.bool_(False))


def observe(settings: Settings, state: State) -> Observation:
    """The prompt of the role that acts."""
    tokens, length = join([(encoded(MARKS)[state.role][None], 1), (state.text, state.size)], prompt_length(settings))
    return Observation(state.role[None], tokens[None], length[None], ~state.done[None])


def step(
    settings: Settings, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    said, (ended, size) = tokens[0], completion_end(tokens[0], length[0])
    text = jnp.append(said[1:], PAD)  # of the segment, behind its tag
    queries = read_queries(text, size - 1, settings.searches)
    fits = (
        queries.clean & (queries.number <= settings.searches) & (state.plans < settings.plans),
        queries.clean & (queries.number == 1) & (state.searches < settings.searches),
        (size == 2) & jnp.isin(text[0], encoded(ascii_lowercase)),
    )
    may = (state.role == AGENT) | (state.role == jnp.arange(len(TAGS)))
    plans, asks, answers = ended & (size >= 2) & (said[0] == encoded(TAGS)) & may & jnp.stack(fits)
    proper = plans | asks | answers
    results = asks & search(state.task["facts"], queries.text[0], queries.size[0], state.last)
    places = jnp.nonzero(results, size=RESULTS, fill_value=NONE)[0]
    found = [(state.task["facts"][place], 3 * (place >= 0)) for place in places]
    segment = said, (size + 1) * proper
    row, count = join([(state.text, state.size), segment, *found, (encoded(END), 1 * asks)], settings.text)
    left = jnp.where(plans, queries.number, state.left - asks)
    role = state.role if settings.players == "agent" else jnp.where(left > 0, SEARCHER, ANSWERER)
    after = State(
        task=state.task,
        role=role.astype(jnp.int32),
        text=row,
        size=count,
        plans=state.plans + plans,
        searches=state.searches + asks,
        left=left,
        last=jnp.where(asks, last_entity(state.task["facts"], results), state.last),
        done=answers | ~proper,
    )
    own = jnp.arange(len(ROLES)) == state.role
    rewards = {
        "em": to_all(ROLES, answers & (text[0] == state.task["answer"])),
        "format": to_all(ROLES, answers),
        "searches": 1.0 * (own & asks),
        "evidence": 1.0 * (own & has_evidence(state.task, results)),
        "turns": 1.0 * own,
    }
    return unless_finished(state, after, rewards)


def make_tasks(
    config: TaskConfig, settings: Settings, seed: int | None = None, n: int | None = None, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks drawn from ``seed``: the columns of `tasks.rows`."""
    return tasks.rows(config, seed, n, held_out)[0]


# -- demonstrations ----------------------------------------------------------------------------------------------------


def demonstrated(
    rng: np.random.Generator, settings: Settings, task: Task, hop: float, relation: float, answer: float
) -> list[tuple[str, str]]:
    """An episode of a demonstrator: what stands before each segment, without a mark, and the segment without eos.

    Args:
        rng: Draws the mistakes.
        settings: The number of searches.
        task: The task of the episode.
        hop: Probability that the second hop is not planned.
        relation: Probability that a query asks for another relation.
        answer: Probability that the answer is another entity of the trace.
    """
    searches = 1 if rng.random() < hop else settings.searches
    trace = demonstrated_trace(rng, task, searches, relation, answer)
    said = [(PLAN + COMMA.join(trace.queries), "")]
    said += [(SEARCH + query, "".join(facts) + END) for query, facts in zip(trace.queries, trace.results, strict=True)]
    text, out = task.question + END, []
    for segment, observation in [*said, (ANSWER + trace.answer, "")]:
        out.append((text, segment))
        text += segment + CLOSE + observation
    return out


def demonstrations(config: TaskConfig, settings: Settings, seed: int, n: int) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens, length [n], completion, completion_length [n].

    Prompts and completions are as wide as the longest ones of their role, and of exercises. The samples of the team are
    turns of one episode on a training task. The agent's is a turn of another episode on this task. Searcher and agent
    have one of their turns, drawn at random. The share ``config.copying`` of the samples of a role are exercises in
    place of its own.
    """
    rng = np.random.default_rng([seed, 2])
    rates = settings.hop_error_rate, settings.relation_error_rate, settings.answer_error_rate
    pairs: list[list[tuple[str, str]]] = []
    for _ in range(n):
        task = tasks.drawn(rng, config)
        plan, *searches, answer = demonstrated(rng, settings, task, *rates)
        own = demonstrated(rng, settings, task, *(settings.agent_error_rate,) * len(rates))
        turns = plan, searches[rng.integers(len(searches))], answer, own[rng.integers(len(own))]
        said = [(mark + before, segment) for mark, (before, segment) in zip(MARKS, turns, strict=True)]
        pairs.append(exercises.with_exercises(rng, config.copying, task, said))
    plan_size, reads = plan_segment(settings.searches), prompt_length(settings)
    prompts = 1 + QUESTION + 1, reads, reads, reads
    sizes = plan_size, SEARCH_SEGMENT, ANSWER_SEGMENT, plan_size
    samples = exercises.as_samples(config.copying, ROLES, pairs, prompts, sizes)
    with_eos = lambda tokens: np.where(tokens == ord(CLOSE), EOS, tokens)
    return {role: {**rows, "tokens": with_eos(rows["tokens"])} for role, rows in samples.items()}


PROTOCOL = Protocol(make, make_tasks, demonstrations, prompt_length, plan_segment(MOST_SEARCHES))
