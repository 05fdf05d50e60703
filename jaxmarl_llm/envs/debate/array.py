"""Debate: two meta-roles edit the graph of who hears whom, after each debate of four speakers. All in JAX.

Reflect reads the transcript of a debate, and says which edge helped or hurt. Act reads the reflections, and edits one
edge. The next debate has the edited graph. After the last edit the graph is tried on further questions.

    turn  role     prompt                                               a good completion (each ends with eos)
    0     reflect  R47+85|ab|aabbaaabaaaaaaaa|111111111111>             -31: what speaker 1 heard from 3 hurt
    1     act      A|111111111111|-31>                                  w219: speaker 1 hears 2 with weight 9
    2     reflect  R20+31|cc|cbcccccccccccccc|111911111111|-31w219>     -23
    3     act      A|111911111111|-31w219-23>                           d42: speaker 2 no longer hears 4

Behind the question are the right answer and the vote. Then come the answers of the speakers: the first ones, and those
after each round. The digits are the weights of all edges, by speaker: 1 to 2, 1 to 3, 1 to 4, 2 to 1, and so on. An
edge from i to j means that j hears i. Weight 0 is no edge. Behind the last bar is the memory: reflections and edits of
the episode, the last ``memory`` ones of each. With ``withhold`` act sees ... in place of every reflection.

Completions of reflect

    +ij  the edge from i to j helped            -ij  it hurt

A reflection on an edge that is not there is unclear, and so is any other completion. It is shown as ???.

Completions of act

    aijw  add the edge from i to j with weight w, 1 to 9
    wijw  give the edge from i to j another weight w
    dij   drop the edge; shown as dij.
    k     keep the graph; shown as k...

An edit is impossible when it adds an edge that is there, or drops or reweights one that is not. It is also impossible
when the weight is the present one, or when a speaker is not there or is named twice. So is any other completion. An
impossible edit leaves the graph as it is, and is shown as ????. It is a fact, and no reward is invalid for it.

A question has a right answer among 3. A speaker's first answer is right with its planted accuracy, else each wrong
answer is as likely. In each of the 3 rounds all speakers answer again at once. A speaker takes the answer with the
largest support. Support is weight 1 for its own answer, and the weight of the edge for each answer that it hears. Of
equal ones it keeps its own, or takes the first letter. The vote after the last round is the most frequent answer, of
equal ones the first letter. Which speaker has which accuracy differs between tasks, and no prompt shows it.

Practice questions, which the meta-roles see, are training questions in every task. Trial questions are held-out ones in
held-out tasks. Rewards, at the last action unless said otherwise

    accuracy    share of trial questions whose vote is right
    practice    1 at a reflection on a debate whose vote was right
    unclear     1 at a reflection that is unclear
    impossible  1 at an edit that is impossible
    kept        1 at an edit that keeps the graph
    edges       number of edges

A weight of 0, or none, makes a component a fact that is logged. First answers are drawn anew in each episode, and
everything else is deterministic.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``graph``
[S S] are weights, from row to column. ``tokens`` [1 R] are completions, and ``length`` [1] their numbers of tokens.
``seed`` and ``rng`` (NumPy) determine tasks, ``n`` is their number, and ``held_out`` the side of the split. S is the
number of speakers, K the number of answers, Q that of practice questions, and V that of trial questions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    ArrayEnv,
    Observation,
    encoded,
    task_draws,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.debate.edits import EDIT, MOST_WEIGHT, REFLECTION, ZERO, read_edit, read_reflection
from jaxmarl_llm.envs.prompt_grammar import Piece, prompt_row
from jaxmarl_llm.envs.splits import draw_task

ROLES = ("reflect", "act")
REFLECT, ACT = range(2)
COMPONENTS = ("accuracy", "practice", "unclear", "impossible", "kept", "edges")
LETTER = ord("a")
OWN = 1  # support of a speaker's own answer
MOST_SPEAKERS, MOST_ANSWERS = 6, 9
QUESTION = 5  # tokens of a question: 47+85
ENTRY = REFLECTION + EDIT  # tokens of an entry of memory
RESPONSE = EDIT + 1  # R: an edit and eos
HIDDEN = "..."


@dataclass(frozen=True)
class Config:
    """The settings of questions, speakers and memory."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    accuracies: tuple[float, ...] = (0.95, 0.5, 0.5, 0.5)  # of the speakers, in an order that each task draws
    answers: int = 3  # that a question may have
    rounds: int = 3  # of a debate, after the first answers
    practice: int = 12  # questions, each with a reflection and an edit
    trials: int = 16  # questions on which the last graph is tried
    memory: int = 12  # reflections and edits that a prompt shows, at most
    withhold: bool = False  # act is not shown reflections
    # Edges of the first graph: (from, to, weight), speakers counted from 1. None: all of them, with weight 1.
    edges: tuple[tuple[int, int, int], ...] | None = None

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        if not 2 <= len(self.accuracies) <= MOST_SPEAKERS or not all(0 <= x <= 1 for x in self.accuracies):
            checks.refuse(path, "accuracies", f"2 to {MOST_SPEAKERS} probabilities in [0, 1]", self.accuracies)
        checks.in_range(path, self, 2, MOST_ANSWERS, "answers")
        for name, most in (("rounds", 9), ("practice", 64), ("trials", 256), ("memory", 64)):
            checks.in_range(path, self, 1, most, name)
        speakers, seen = len(self.accuracies), set[tuple[int, int]]()
        for edge in self.edges or ():
            start, to, weight = edge
            if start == to or not {start, to} <= set(range(1, speakers + 1)):
                checks.refuse(path, "edges", f"edges between two different speakers of 1 to {speakers}", edge)
            if not 1 <= weight <= MOST_WEIGHT:
                checks.refuse(path, "edges", f"weights of 1 to {MOST_WEIGHT}", edge)
            if (start, to) in seen:
                checks.refuse(path, "edges", "each edge once", edge)
            seen.add((start, to))


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt, which is one of reflect."""
    speakers = len(config.accuracies)
    transcript, graph = speakers * (config.rounds + 1), speakers * (speakers - 1)
    return 1 + QUESTION + 3 + 1 + transcript + 1 + graph + 1 + _shown(config) + 1


def _shown(config: Config) -> int:
    """Tokens of the longest memory that a prompt shows."""
    return min(config.memory, config.practice) * ENTRY


def first_graph(config: Config) -> Int[np.ndarray, "S S"]:
    """The graph before the first edit."""
    speakers = len(config.accuracies)
    if config.edges is None:
        return np.ones((speakers, speakers), np.int32) - np.eye(speakers, dtype=np.int32)
    graph = np.zeros((speakers, speakers), np.int32)
    for start, to, weight in config.edges:
        graph[start - 1, to - 1] = weight
    return graph


class State(struct.PyTreeNode):
    """An episode so far.

    Attributes:
        task: one row of make_tasks
        practice: first answers of the speakers to each practice question
        trials: first answers of the speakers to each trial question
        graph: weights of the edges, from row to column
        memory: reflection and edit after each practice question, as tokens; 0 where there is none yet
        turn: number of the turn
        done: whether the episode has ended
    """

    task: dict[str, Int[Array, "..."]]
    practice: Int[Array, "Q S"]
    trials: Int[Array, "V S"]
    graph: Int[Array, "S S"]
    memory: Int[Array, "Q E"]
    turn: Int[Array, ""]
    done: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Keys decide the first answers."""
    return ArrayEnv(
        name="debate",
        roles=ROLES,
        seats=1,
        max_turns=2 * config.practice,
        components=COMPONENTS,
        actors=((REFLECT,), (ACT,)) * config.practice,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    own = jax.tree.map(jnp.int32, dict(task))
    right = right_answers(config, jnp.concatenate([own["practice"], own["trials"]]))
    first = first_answers(config, key, own["speaker"], right)
    memory = jnp.zeros((config.practice, ENTRY), jnp.int32)
    practice, trials = first[: config.practice], first[config.practice :]
    graph = jnp.asarray(first_graph(config))
    return State(own, practice, trials, graph, memory, jnp.int32(0), jnp.bool_(False))


def right_answers(config: Config, questions: Int[Array, "n 2"]) -> Int[Array, " n"]:
    """The right answer to each of ``questions`` [n 2]: the sum of its two numbers, modulo K."""
    return questions.sum(-1) % config.answers


def first_answers(config: Config, key: Array, speaker: Int[Array, " S"], right: Int[Array, " n"]) -> Int[Array, "n S"]:
    """Draw the first answers of the speakers to n questions.

    ``speaker``: place in ``accuracies`` of each speaker [S]. ``right``: right answer to each question [n].
    """
    luck = jax.random.uniform(key, (len(right), len(speaker)))
    chance = jnp.array(config.accuracies)[speaker][None]
    others = config.answers - 1
    beyond = (luck - chance) / jnp.maximum(1 - chance, 1e-6)  # uniform in [0, 1) where the answer is wrong
    step = 1 + jnp.clip(jnp.floor(beyond * others), 0, others - 1).astype(jnp.int32)
    return (right[:, None] + jnp.where(luck < chance, 0, step)) % config.answers


def debate(
    graph: Int[Array, "S S"], first: Int[Array, " S"], answers: int, rounds: int
) -> tuple[Int[Array, "T S"], Int[Array, ""]]:
    """The answers of all speakers, first ones included, and the vote.

    ``first``: first answers [S]. ``answers``: K. ``rounds``: rounds after the first answers, T - 1 of them.
    """
    now, said = first, [first]
    for _ in range(rounds):
        given = jax.nn.one_hot(now, answers, dtype=jnp.int32)
        support = OWN * given + graph.T @ given
        own = jnp.take_along_axis(support, now[:, None], 1)[:, 0]
        now = jnp.where(own == support.max(1), now, jnp.argmax(support, 1))
        said.append(now)
    return jnp.stack(said), jnp.argmax(jax.nn.one_hot(now, answers, dtype=jnp.int32).sum(0))


def trial_accuracy(config: Config, state: State, graph: Int[Array, "S S"]) -> Float[Array, ""]:
    """The share of the trial questions of ``state`` whose vote on ``graph`` is right."""
    votes = jax.vmap(lambda first: debate(graph, first, config.answers, config.rounds)[1])(state.trials)
    return (votes == right_answers(config, state.task["trials"])).mean()


def observe(config: Config, state: State) -> Observation:
    """The prompt of the role whose turn it is."""
    reflects = state.turn % 2 == 0
    tokens, length = jax.lax.cond(reflects, partial(_reflect_prompt, config), partial(_act_prompt, config), state)
    role = jnp.where(reflects, REFLECT, ACT).astype(jnp.int32)
    return Observation(role[None], tokens[None], length[None], ~state.done[None])


def _question(config: Config, state: State) -> Int[Array, ""]:
    """The number of the practice question in progress."""
    return jnp.minimum(state.turn // 2, config.practice - 1)


def _reflect_prompt(config: Config, state: State) -> tuple[Array, Array]:
    at = _question(config, state)
    transcript, vote = debate(state.graph, state.practice[at], config.answers, config.rounds)
    numbers = state.task["practice"][at]
    digits = ZERO + jnp.stack([numbers // 10, numbers % 10], 1).reshape(-1)
    asked = jnp.concatenate([digits[:2], encoded("+"), digits[2:]])
    known = LETTER + jnp.stack([right_answers(config, numbers[None])[0], vote])
    said = LETTER + transcript.reshape(-1)
    entries = [(1, [_whole(piece)]) for piece in (known, said, _weights(state.graph))]
    return prompt_row("R", [_whole(asked)], [*entries, (1, [_memory(config, state, 0)])], prompt_length(config))


def _act_prompt(config: Config, state: State) -> tuple[Array, Array]:
    shown = _memory(config, state, REFLECTION)
    return prompt_row("A", [], [(1, [_whole(_weights(state.graph))]), (1, [shown])], prompt_length(config))


def _whole(tokens: Int[Array, " T"]) -> Piece:
    return tokens, len(tokens)


def _weights(graph: Int[Array, "S S"]) -> Int[Array, " T"]:
    """The weights of all edges as digits, by speaker."""
    return ZERO + graph[~np.eye(len(graph), dtype=bool)]


def _memory(config: Config, state: State, more: int) -> Piece:
    """The last entries of memory, and the first ``more`` tokens of the one in progress."""
    entries, at = state.memory, _question(config, state)
    if more and config.withhold:
        hidden = jnp.broadcast_to(encoded(HIDDEN), (config.practice, REFLECTION))
        entries = jnp.concatenate([hidden, entries[:, REFLECTION:]], axis=1)
    full = config.memory - (more > 0)  # whole entries: one place is for the entry in progress
    start = jnp.maximum(at - full, 0)
    size = _shown(config)
    row = jnp.pad(entries.reshape(-1), (0, size))
    return jax.lax.dynamic_slice_in_dim(row, start * ENTRY, size), (at - start) * ENTRY + more


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a reflection or an edit, the rewards of the turn, and whether the episode has finished."""
    reflects, at = state.turn % 2 == 0, _question(config, state)
    reflection, clear = read_reflection(state.graph, tokens[0], length[0])
    edit = read_edit(state.graph, tokens[0], length[0])
    graph = jnp.where(reflects, state.graph, edit.graph)
    entry = state.memory[at]
    entry = jnp.where(reflects, entry.at[:REFLECTION].set(reflection), entry.at[REFLECTION:].set(edit.shown))
    over = state.turn + 1 >= 2 * config.practice
    _, vote = debate(state.graph, state.practice[at], config.answers, config.rounds)
    right = vote == right_answers(config, state.task["practice"][at][None])[0]
    amounts = {
        "accuracy": over * trial_accuracy(config, state, graph),
        "practice": 1.0 * (reflects & right),
        "unclear": 1.0 * (reflects & ~clear),
        "impossible": 1.0 * (~reflects & ~edit.possible),
        "kept": 1.0 * (~reflects & edit.keeps),
        "edges": 1.0 * over * (graph > 0).sum(),
    }
    memory = state.memory.at[at].set(entry)
    after = state.replace(graph=graph, memory=memory, turn=state.turn + 1, done=over)
    return unless_finished(state, after, {name: to_all(ROLES, amounts[name]) for name in COMPONENTS})


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``). ``held_out``: the side of the split.

    They are speaker [n S], the place in ``accuracies`` of each speaker, practice [n Q 2] and trials [n V 2]. A question
    is two numbers of 0 to 99, and the questions of a task differ.
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    rows = [_task(rng, config, held_out) for _ in range(count)]
    return {name: np.array([row[name] for row in rows], np.int32) for name in rows[0]}


def _task(rng: np.random.Generator, config: Config, held_out: bool) -> dict[str, np.ndarray]:
    speaker = rng.permutation(len(config.accuracies))
    asked: dict[str, None] = {}  # texts of questions, in the order in which they are asked
    for most, side in ((config.practice, False), (config.practice + config.trials, held_out)):
        while len(asked) < most:
            asked[draw_task(lambda: question_text(rng.integers(100, size=2)), str, side)] = None
    numbers = [[int(x) for x in text.split("+")] for text in asked]
    return dict(
        speaker=speaker, practice=np.array(numbers[: config.practice]), trials=np.array(numbers[config.practice :])
    )


def question_text(numbers: Int[np.ndarray, "2"]) -> str:
    """The text of a question. ``numbers``: the two numbers that are added."""
    return "+".join(f"{x:02d}" for x in numbers)
