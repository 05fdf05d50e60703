"""The split maze of The Collaboration Gap (arXiv 2511.02687) in JAX: a map in parts, and moves that all must agree on.

A maze is ``size`` x ``size`` cells, each a wall with probability ``walls``. Start and goal are two free cells. A maze
is kept when a shortest path between them has ``shortest`` to ``longest`` moves. Each agent sees its own random share
of the cells (the shares partition them, as equal as can be); all know position, goal and border. At every turn all name
a direction at once. When all name the same one the team moves there, unless a wall is there. An episode has at most
``moves`` turns.

There is no master: an agent hears the last replies of its partners alone, by ``topology``

    complete  of all others         ring    of its two neighbours (one where there are two agents)
    random    of one other, drawn anew for each turn and agent when an episode starts, from the reset's key

With one agent (solo) the share is everything. With ``view`` full each of several agents sees everything: these two
settings separate the cost of the split from the cost of agreeing. Mazes depend on seed, size, walls, shortest and
longest, not on the agents.

    prompt     1@.#?...cb=RD2D>   own number; the map from the position on, rows and columns wrapped around, with one
                                  row and one column of walls for the border: @ . # ? G(oal). Then the goal's offset
                                  down and right (a is 1 - size), and the outcome of the last turn (- none yet, +
                                  moved, = no agreement, # a wall). Then own last reply, partners' numbers and last
                                  replies
    reply      UDLR and at most ``message`` bytes more, for partners to hear. Anything else is shown as ? and agrees
               with nothing

Team rewards: ``accuracy`` is 1 at the goal. ``progress`` is the share of the shortest path that is covered, at least 0.
It is paid as it changes. Its sum is that of the last cell, the paper's weighted outcome. ``agreement``, paid at the
end, is the share of turns with one direction.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[A R] are completions, and ``length`` [A] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples of a role, and ``held_out`` the side of the split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

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
    all_seats,
    encoded,
    readable_part,
    samples,
    task_draws,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.prompt_grammar import prompt_row
from jaxmarl_llm.envs.splits import empty_side, is_held_out
from jaxmarl_llm.errors import ConfigError

ROLES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TOPOLOGIES = ("complete", "ring", "random")
VIEWS = ("split", "full")
COMPONENTS = ("accuracy", "progress", "agreement")
MOVES = "UDLR"
DELTA = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # row and column of each of MOVES
CELLS = ".#?"  # free, wall, not seen
OUTCOMES = "-+=#"  # of the last turn: none yet, moved, no agreement, a wall
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"  # bytes of a message
BLOCK, BLOCKS = 512, 200  # mazes drawn at once; the number of draws among which one maze must fit


@dataclass(frozen=True)
class Config:
    """The settings of mazes, team and demonstrations."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    size: int = 6  # cells of a side
    walls: float = 0.3  # share of cells that are walls
    shortest: int = 7  # least moves of the shortest path
    longest: int = 9  # most moves of the shortest path
    moves: int = 20  # turns
    agents: int = 2  # agents that must agree
    view: str = "split"  # split: each agent sees a part; full: all of it
    topology: str = "complete"  # who hears whom: complete, ring or random
    message: int = 0  # bytes after the direction
    skill: float = 0.8  # share of demonstrators who take the shortest way as they see it, others any direction
    defer: float = 0.0  # share of demonstrators who after a turn without agreement repeat what they heard first

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        checks.in_range(path, self, 2, 12, "size")
        checks.at_least(path, self, 1, "longest")
        if not 1 <= self.shortest <= self.longest:
            checks.refuse(path, "shortest", f"1 to longest={self.longest}", self.shortest)
        checks.in_range(path, self, 1, checks.MOST_ROUNDS, "moves")
        checks.in_range(path, self, 1, len(ROLES), "agents")
        one_of(f"{path}.view", self.view, VIEWS)
        one_of(f"{path}.topology", self.topology, TOPOLOGIES)
        checks.in_range(path, self, 0, checks.MOST_TEXT, "message")
        checks.probabilities(path, self, "walls", "skill", "defer")

    @property
    def max_new_tokens(self) -> int:
        """The number of tokens of the longest well-formed completion."""
        return 1 + self.message

    @property
    def heard(self) -> int:
        """The number of partners that an agent hears at a turn."""
        others = self.agents - 1
        return {"complete": others, "ring": min(others, 2), "random": min(others, 1)}[self.topology]


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 1 + (config.size + 1) ** 2 + 3 + config.max_new_tokens + config.heard * (1 + config.max_new_tokens) + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion, sep."""
    return prompt_length(config) + config.max_new_tokens + 1


@struct.dataclass
class State:
    """An episode so far, with M = ``moves``, A = ``agents``, K = ``heard`` and T = ``max_new_tokens``."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    partners: Int[Array, "M A K"]  # whom each agent hears before each turn
    cell: Int[Array, ""]  # where the team is
    replies: Int[Array, "A T"]  # the last ones, as partners hear them
    reply_length: Int[Array, " A"]
    outcome: Int[Array, ""]  # of the last turn, index into OUTCOMES
    agreed: Int[Array, ""]  # turns
    turn: Int[Array, ""]
    done: Bool[Array, ""]


def partners(config: Config, key: jax.Array) -> Int[Array, "M A K"]:
    """Agents that each agent hears before each turn; ``key`` matters to the random topology alone."""
    n, k = config.agents, config.heard
    shape = (config.moves, n, k)
    if config.topology == "random" and n > 1:
        return (jnp.arange(n)[:, None] + jax.random.randint(key, shape, 1, n)) % n
    steps = np.arange(1, n) if config.topology == "complete" else np.array([-1, 1])[:k] % max(n, 1)
    of = np.sort((np.arange(n)[:, None] + steps) % n, axis=1)
    return jnp.broadcast_to(jnp.asarray(of, jnp.int32), shape)


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``.

    Only whom an agent hears is random, with the random topology: steps do not use their key.
    """
    N = config.agents
    return ArrayEnv(
        name="maze",
        roles=ROLES[:N],
        seats=N,
        max_turns=config.moves,
        components=COMPONENTS,
        actors=(tuple(range(N)),) * config.moves,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: jax.Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    N, zero = config.agents, jnp.int32(0)
    rows = {name: jnp.asarray(x, jnp.int32) for name, x in task.items()}
    replies = jnp.full((N, config.max_new_tokens), PAD, jnp.int32).at[:, 0].set(ord(OUTCOMES[0]))
    of = partners(config, key)
    return State(rows, of, rows["start"], replies, jnp.ones(N, jnp.int32), zero, zero, zero, jnp.bool_(False))


def _map(config: Config, state: State, seat: int) -> Int[Array, " C"]:
    """The map as the agent in ``seat`` sees it, C = (size + 1)^2 bytes from the position on, and the goal's offset."""
    S, task = config.size, state.task
    here, goal = jnp.array([state.cell // S, state.cell % S]), jnp.array([task["goal"] // S, task["goal"] % S])
    seen = jnp.bool_(config.view == "full") | (task["owner"] == seat)
    edge = jnp.pad(jnp.zeros((S, S), jnp.int32), ((0, 1), (0, 1)), constant_values=1)
    board = edge.at[:S, :S].set(jnp.where(seen, task["walls"], 2).reshape(S, S))
    shown = encoded(CELLS)[board].at[goal[0], goal[1]].set(ord("G")).at[here[0], here[1]].set(ord("@"))
    shown = jnp.roll(shown, -here, (0, 1)).reshape(-1)
    return jnp.concatenate([shown, ord("a") + S - 1 + goal - here])


def observe(config: Config, state: State) -> Observation:
    """The prompts of all agents."""
    of = state.partners[jnp.minimum(state.turn, config.moves - 1)]

    def prompt(seat: int) -> tuple[Int[Array, " P"], Int[Array, ""]]:
        shown = _map(config, state, seat)
        pieces: list = [(shown, len(shown)), (encoded(OUTCOMES)[state.outcome][None], 1)]
        pieces.append((state.replies[seat], state.reply_length[seat]))
        for k in range(config.heard):
            who = of[seat, k]
            pieces += [((ord("1") + who)[None], 1), (state.replies[who], state.reply_length[who])]
        return prompt_row(str(seat + 1), pieces, (), prompt_length(config))

    return all_seats((prompt(seat) for seat in range(config.agents)), ~state.done)


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "A R"], length: Int[Array, " A"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a turn, its rewards, and whether the episode has finished."""
    task, S, roles = state.task, config.size, ROLES[: config.agents]
    hits = (tokens[:, :1] == encoded(MOVES)) & (length[:, None] > 0)
    named, move = hits.any(1), jnp.argmax(hits, axis=1)
    agree = named.all() & (move == move[0]).all()
    row, column = state.cell // S + jnp.asarray(DELTA)[move[0], 0], state.cell % S + jnp.asarray(DELTA)[move[0], 1]
    inside = (row >= 0) & (row < S) & (column >= 0) & (column < S)
    to = jnp.clip(row, 0, S - 1) * S + jnp.clip(column, 0, S - 1)
    goes = agree & inside & (task["walls"][to] == 0)
    cell = jnp.where(goes, to, state.cell)
    replies, reply_length = heard(tokens, length, config.max_new_tokens)
    reached = cell == task["goal"]
    done = reached | (state.turn + 1 >= config.moves)
    after = State(
        task=task,
        partners=state.partners,
        cell=cell,
        replies=replies,
        reply_length=reply_length,
        outcome=jnp.where(goes, 1, jnp.where(agree, 3, 2)).astype(jnp.int32),
        agreed=state.agreed + agree,
        turn=state.turn + 1,
        done=done,
    )
    covered = lambda at: jnp.maximum(0.0, 1.0 - task["distance"][at] / task["distance"][task["start"]])
    rewards = {
        "accuracy": to_all(roles, 1.0 * reached),
        "progress": to_all(roles, covered(cell) - covered(state.cell)),
        "agreement": to_all(roles, done * after.agreed / after.turn),
    }
    return unless_finished(state, after, rewards)


def heard(tokens: Int[Array, "W R"], length: Int[Array, " W"], most: int) -> tuple[Int[Array, "W T"], Int[Array, " W"]]:
    """Replies as partners hear them, and their lengths: a direction or ?, then letters and digits up to eos.

    A reply has T = ``most`` bytes at most; other bytes are heard as ?.
    """
    first = jnp.arange(most) == 0

    def allowed(cut: Int[Array, "W T"]) -> Bool[Array, "W T"]:
        return jnp.isin(cut, encoded(ALPHABET)) & (~first | jnp.isin(cut, encoded(MOVES)))

    return readable_part(tokens, length, most, allowed, least=1)


def distances(walls: Bool[np.ndarray, "*b n n"], goal: Int[np.ndarray, "*b"]) -> Int[np.ndarray, "*b n n"]:
    """The number of moves from every cell to ``goal``, -1 where there is no way; all mazes at once.

    walls: True where a cell is a wall
    goal: the number of the goal's cell, row by row
    """
    n = walls.shape[-1]
    out = np.where(np.arange(n * n).reshape(n, n) == np.asarray(goal)[..., None, None], 0, -1).astype(np.int32)
    front, steps = out == 0, 0
    while front.any():
        near, steps = np.zeros_like(front), steps + 1
        near[..., 1:, :] |= front[..., :-1, :]
        near[..., :-1, :] |= front[..., 1:, :]
        near[..., :, 1:] |= front[..., :, :-1]
        near[..., :, :-1] |= front[..., :, 1:]
        front = near & ~walls & (out < 0)
        out[front] = steps
    return out


def draw(rng: np.random.Generator, config: Config, count: int) -> dict[str, np.ndarray]:
    """``count`` random mazes: walls [B n n], start and goal [B], distance [B n n] to the goal, and ``fits`` [B].

    ``fits`` is True for a maze whose shortest path has a wanted length.
    """
    n = config.size
    walls = rng.random((count, n, n)) < config.walls
    # Two different free cells, each pair as likely: the free ones of a random order come first.
    order = np.argsort(np.where(walls.reshape(count, -1), 2.0, rng.random((count, n * n))), axis=1)
    start, goal = order[:, 0], order[:, 1]
    distance = distances(walls, goal)
    away = np.take_along_axis(distance.reshape(count, -1), start[:, None], 1)[:, 0]
    fits = (away >= config.shortest) & (away <= config.longest) & ((~walls).sum((1, 2)) >= 2)
    return {"walls": walls, "start": start, "goal": goal, "distance": distance, "fits": fits}


def on_side(got: dict[str, np.ndarray], held_out: bool) -> Bool[np.ndarray, " B"]:
    """Whether each of the mazes ``got`` lies on a side of the split. Walls, start and goal make a maze itself."""
    content = (w.tobytes() + bytes([s, g]) for w, s, g in zip(got["walls"], got["start"], got["goal"], strict=True))
    return np.array([is_held_out(c) == held_out for c in content], bool)


def mazes(rng: np.random.Generator, config: Config, count: int, held_out: bool = False) -> dict[str, np.ndarray]:
    """The first ``count`` fitting mazes of a side of the split, as in `draw`; a larger count begins with the same ones.

    Raises ConfigError where none is found.
    """
    found: list[dict[str, np.ndarray]] = []
    have = seen = 0
    while have < count:
        got = draw(rng, config, BLOCK)
        fitting = {name: x[got["fits"]] for name, x in got.items() if name != "fits"}
        mine = on_side(fitting, held_out)
        found.append({name: x[mine] for name, x in fitting.items()})
        have += int(mine.sum())
        seen += len(mine)
        if len(found) == BLOCKS and seen and not have:
            raise empty_side(held_out, seen)
        if len(found) == BLOCKS and not have:
            raise ConfigError(
                f"{checks.ARGS}.shortest: expected shorter paths or fewer walls, got a shortest path of "
                f"{config.shortest} to {config.longest}, which none of {BLOCK * BLOCKS} mazes has with "
                f"size={config.size} and walls={config.walls:g}"
            )
    return {name: np.concatenate([f[name] for f in found])[:count] for name in found[0]}


def owners(rng: np.random.Generator, config: Config, count: int) -> Int[np.ndarray, "B S"]:
    """The agent that sees each cell, in ``count`` mazes: equal shares, all splits as likely."""
    cells = np.arange(config.size**2) % config.agents
    return rng.permuted(np.tile(cells, (count, 1)), axis=1).astype(np.int32)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``): walls, owner and distance [n S],
    start and goal [n], with cells numbered row by row. ``held_out``: the side of the split.
    """
    rng, n = task_draws(config, seed, n, 1, held_out)
    got = mazes(rng, config, n, held_out)
    rows = {name: x.reshape(n, -1) if x.ndim > 1 else x for name, x in got.items()}
    rows["owner"] = owners(task_draws(config, seed, n, 2, held_out)[0], config, n)
    return {name: x.astype(np.int32) for name, x in rows.items()}


def ways(walls: Bool[np.ndarray, "B n n"], goal: Int[np.ndarray, " B"], cell: Int[np.ndarray, " B"]) -> np.ndarray:
    """Whether each direction begins a shortest path from ``cell`` to ``goal``, [B 4]; all False without a path.

    ``walls``: walls of each maze [B n n].
    """
    n, rows = walls.shape[-1], np.arange(len(walls))
    padded = np.pad(distances(walls, goal), ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    at = np.stack([cell // n, cell % n], 1)[:, None] + 1
    to = at + DELTA
    next_to, here = padded[rows[:, None], to[..., 0], to[..., 1]], padded[rows, at[:, 0, 0], at[:, 0, 1]]
    return (next_to >= 0) & (next_to == here[:, None] - 1)


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Players in random places who know their own part of the map: samples of each role, as in `array_env.samples`.

    A cell that a player does not see counts as free. A share ``skill`` takes a shortest way, and writes the rest of it
    in the message. It is any of the shortest ways, or any direction where there seems to be none. The others write one
    direction and no more. Earlier replies are drawn at random. Where these did not agree, a share ``defer`` repeats the
    first partner's reply instead. ``context`` is not used.
    """
    env, out = make(config), {}
    observe = jax.jit(jax.vmap(env.observe))
    for seat in range(config.agents):
        states, plans = scenes(config, seed, n, seat)
        seen = jax.device_get(observe(states))
        prompts = [row[:size].tolist() for row, size in zip(seen.tokens[:, seat], seen.length[:, seat], strict=True)]
        completions = [[*plan.encode(), EOS][: config.max_new_tokens] for plan in plans]
        out[ROLES[seat]] = samples(prompts, completions, prompt_length(config), config.max_new_tokens)
    return out


def scenes(config: Config, seed: int, n: int, seat: int) -> tuple[State, list[str]]:
    """``n`` states (leading axis n), and the reply of a demonstrator in ``seat`` to each."""
    rng = np.random.default_rng([seed, 4, seat])
    got = mazes(rng, config, n)
    owner = owners(rng, config, n)
    reachable = got["distance"].reshape(n, -1) > 0
    cell = np.argmax(np.where(reachable, rng.random(reachable.shape), -1), axis=1)
    known = (owner == seat) | (config.view == "full")
    walls = (got["walls"].reshape(n, -1) & known).reshape(got["walls"].shape)
    plans = _plans(rng, config, walls, got["goal"], cell)
    task = {name: x.reshape(n, -1) if x.ndim > 1 else x for name, x in got.items()} | {"owner": owner}
    states = jax.jit(jax.vmap(make(config).reset))(jax.random.split(jax.random.key(seed), n), task)
    states = _placed(rng, config, states, cell)
    if config.heard:
        first = np.asarray(states.partners)[:, 0, seat, 0]
        told = np.asarray(states.replies)[np.arange(n), first, 0].tolist()
        defers = ((np.asarray(states.outcome) == OUTCOMES.index("=")) & (rng.random(n) < config.defer)).tolist()
        plans = [chr(t) if d else plan for plan, t, d in zip(plans, told, defers, strict=True)]
    return states, plans


def _plans(
    rng: np.random.Generator, config: Config, walls: np.ndarray, goal: np.ndarray, cell: np.ndarray
) -> list[str]:
    """The replies of demonstrators at each ``cell``, given the ``walls`` that they see; see `demonstrations`."""
    n, at = len(cell), cell.copy()
    plans, going = [""] * n, rng.random(n) < config.skill
    for i in range(config.max_new_tokens):
        good = ways(walls, goal, at)
        move = np.argmax(np.where(good, rng.random((n, 4)), -1), axis=1)
        lost = ~good.any(1) | ~going
        if i == 0:
            move = np.where(lost, rng.integers(0, 4, n), move)
        written = ~lost | (i == 0)
        plans = [p + MOVES[m] * w for p, m, w in zip(plans, move, written.tolist(), strict=True)]
        going &= ~lost
        to = at + DELTA[move] @ np.array([config.size, 1])
        at = np.where(going, to, at)
    return plans


def _placed(rng: np.random.Generator, config: Config, states: State, cell: np.ndarray) -> State:
    """The ``states`` with the team at ``cell`` and random earlier replies; about every fourth has no such replies."""
    n, N, T = len(cell), config.agents, config.max_new_tokens
    later = rng.random(n) < 0.75
    letters = np.frombuffer(MOVES.encode(), np.uint8)[rng.integers(0, 4, (n, N, T))]
    size = rng.integers(1, T + 1, (n, N))
    replies = np.where(np.arange(T) < size[..., None], letters, PAD)
    same = (letters[..., 0] == letters[:, :1, 0]).all(1)
    outcome = np.where(same, np.where(rng.random(n) < 0.7, 1, 3), 2)
    keep = lambda new, old: jnp.where(later.reshape(-1, *[1] * (new.ndim - 1)), jnp.asarray(new, jnp.int32), old)
    return replace(
        states,
        cell=jnp.asarray(cell, jnp.int32),
        replies=keep(replies, states.replies),
        reply_length=keep(size, states.reply_length),
        outcome=keep(outcome, states.outcome),
    )


def walks(rng: np.random.Generator, tasks: dict[str, np.ndarray], moves: int) -> Float[np.ndarray, " N"]:
    """The progress [n] of a random walker, 1 where it reaches the goal.

    tasks: as `make_tasks` returns them
    moves: the most legal moves of a walk
    """
    n, count = int(len(tasks["walls"][0]) ** 0.5), len(tasks["start"])
    free = np.pad(tasks["walls"].reshape(-1, n, n) == 0, ((0, 0), (1, 1), (1, 1)))
    rows, at = np.arange(count), np.stack([tasks["start"] // n, tasks["start"] % n], 1) + 1
    goal = np.stack([tasks["goal"] // n, tasks["goal"] % n], 1) + 1
    for _ in range(moves):
        to = at[:, None] + DELTA
        legal = free[rows[:, None], to[..., 0], to[..., 1]]
        pick = np.argmax(np.where(legal, rng.random((count, 4)), -1), axis=1)
        at = np.where(legal.any(1, keepdims=True) & (at != goal).any(1, keepdims=True), to[rows, pick], at)
    here = (at - 1) @ np.array([n, 1])
    away = tasks["distance"][rows, here] / tasks["distance"][rows, tasks["start"]]
    return np.maximum(0.0, 1.0 - away)
