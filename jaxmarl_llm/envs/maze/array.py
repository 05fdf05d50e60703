"""The split maze of The Collaboration Gap (arXiv 2511.02687) in JAX: a map in parts, and moves that all must agree on.

A maze is ``size`` x ``size`` cells, each a wall with probability ``walls``. Start and goal are two free cells; the maze
is taken when a shortest path between them has ``shortest`` to ``longest`` moves. Each agent sees its own random share
of the cells (the shares partition them, as equal as can be); all know position, goal and border. At every turn all name
a direction at once; when all name the same one the team moves there, unless a wall is there. ``moves`` turns at most.

There is no master: an agent hears the last replies of its partners alone, by ``topology``

    complete  of all others         ring    of its two neighbours (one where there are two agents)
    random    of one other, drawn anew for each turn and agent when an episode starts, from the reset's key

With one agent (solo) the share is everything, and with ``view`` full each of several sees everything: what the split
costs, and what agreeing alone costs. Mazes depend on seed, size, walls, shortest and longest, not on who plays them.

    prompt     1@.#?...cb=RD2D>   own number; the map from the position on, rows and columns wrapped around, with one
                                  row and one column of walls for the border: @ . # ? G(oal); the goal's offset down
                                  and right (a is 1 - size); what came of the last turn (- none yet, + moved, = no
                                  agreement, # a wall); own last reply; partners' numbers and last replies
    reply      UDLR and at most ``message`` bytes more, for partners to hear. Anything else is shown as ? and agrees
               with nothing

Team rewards: ``accuracy`` 1 at the goal; ``progress`` the share of the shortest path that is covered, at least 0, paid
as it changes (its sum is that of the last cell, the paper's weighted outcome). ``agreement``, paid at the end: the
share of turns with one direction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs.arrays import encoded, join, samples
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer
from jaxmarl_llm.types import ArrayEnv, Observation

PAD, EOS = ByteTokenizer.PAD, ByteTokenizer.EOS
ROLES = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TOPOLOGIES = ("complete", "ring", "random")
VIEWS = ("split", "full")
COMPONENTS = ("accuracy", "progress", "agreement")
MOVES = "UDLR"
DELTA = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])  # row and column of each of MOVES
CELLS = ".#?"  # free, wall, not seen
OUTCOMES = "-+=#"  # of the last turn: none yet, moved, no agreement, a wall
BLOCK, BLOCKS = 512, 200  # mazes drawn at once; so often until one must have been found


@dataclass(frozen=True)
class Config:
    seed: int = 0  # of the training tasks
    tasks: int = 1024
    size: int = 6
    walls: float = 0.3
    shortest: int = 7
    longest: int = 9
    moves: int = 20  # turns
    agents: int = 2
    view: str = "split"
    topology: str = "complete"
    message: int = 0  # bytes after the direction
    skill: float = 0.8  # demonstrators who take the shortest way as they see it, others any direction
    defer: float = 0.0  # demonstrators who after a turn without agreement repeat what they heard first

    def __post_init__(self):
        one_of("maze: view", self.view, VIEWS)
        one_of("maze: topology", self.topology, TOPOLOGIES)
        if not 1 <= self.agents <= len(ROLES):
            raise ConfigError(f"maze: agents: expected 1 to {len(ROLES)}, got {self.agents}")
        if not 2 <= self.size <= 12:
            raise ConfigError(f"maze: size: expected 2 to 12, got {self.size}")
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(f"maze: shortest: expected 1 to longest={self.longest}, got {self.shortest}")
        for name in ("walls", "skill", "defer"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"maze: {name}: expected a probability, got {getattr(self, name)}")
        if self.tasks < 1 or self.moves < 1 or self.message < 0:
            raise ConfigError("maze: expected tasks, moves >= 1 and message >= 0")

    @property
    def max_new(self) -> int:
        return 1 + self.message

    @property
    def heard(self) -> int:
        """Partners that an agent hears at a turn."""
        others = self.agents - 1
        return {"complete": others, "ring": min(others, 2), "random": min(others, 1)}[self.topology]


def prompt_length(config: Config) -> int:
    return 1 + (config.size + 1) ** 2 + 3 + config.max_new + config.heard * (1 + config.max_new) + 1


def entry_length(config: Config) -> int:
    """The longest memory entry: a prompt, a completion, sep."""
    return prompt_length(config) + config.max_new + 1


@struct.dataclass
class State:
    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    partners: Int[Array, "M A K"]  # whom each agent hears before each turn
    cell: Int[Array, ""]  # where the team is
    said: Int[Array, "A T"]  # last replies as partners hear them
    heard: Int[Array, "A"]  # their lengths
    outcome: Int[Array, ""]  # of the last turn, index into OUTCOMES
    agreed: Int[Array, ""]  # turns
    turn: Int[Array, ""]
    done: Bool[Array, ""]


def partners(config: Config, key: jax.Array) -> Int[Array, "M A K"]:
    """Whom each agent hears before each turn; ``key`` matters to random alone."""
    n, k = config.agents, config.heard
    shape = (config.moves, n, k)
    if config.topology == "random" and n > 1:
        return (jnp.arange(n)[:, None] + jax.random.randint(key, shape, 1, n)) % n
    steps = np.arange(1, n) if config.topology == "complete" else np.array([-1, 1])[:k] % max(n, 1)
    of = np.sort((np.arange(n)[:, None] + steps) % n, axis=1)
    return jnp.broadcast_to(jnp.asarray(of, jnp.int32), shape)


def make(config: Config) -> ArrayEnv:
    """Only whom an agent hears is random, with topology random: steps do not use their key."""
    N, S, T, P = config.agents, config.size, config.max_new, prompt_length(config)
    cells, outcomes, directions = encoded(CELLS), encoded(OUTCOMES), encoded(MOVES)
    edge = jnp.pad(jnp.zeros((S, S), jnp.int32), ((0, 1), (0, 1)), constant_values=1)
    team = lambda value: jnp.full(N, value, jnp.float32)

    def reset(key: jax.Array, task: dict) -> State:
        task, zero = {name: jnp.asarray(x, jnp.int32) for name, x in task.items()}, jnp.int32(0)
        said = jnp.full((N, T), PAD, jnp.int32).at[:, 0].set(ord("-"))
        of = partners(config, key)
        return State(task, of, task["start"], said, jnp.ones(N, jnp.int32), zero, zero, zero, jnp.bool_(False))

    def observe(state: State) -> Observation:
        task = state.task
        here, goal = jnp.array([state.cell // S, state.cell % S]), jnp.array([task["goal"] // S, task["goal"] % S])
        offset = ord("a") + S - 1 + goal - here
        of = state.partners[jnp.minimum(state.turn, config.moves - 1)]

        def look(seat: int) -> tuple[jax.Array, jax.Array]:
            seen = jnp.bool_(config.view == "full") | (task["owner"] == seat)
            board = edge.at[:S, :S].set(jnp.where(seen, task["walls"], 2).reshape(S, S))
            shown = cells[board].at[goal[0], goal[1]].set(ord("G")).at[here[0], here[1]].set(ord("@"))
            shown = jnp.roll(shown, (-here[0], -here[1]), (0, 1)).reshape(-1)
            pieces: list = [(encoded(str(seat + 1)), 1), (shown, len(shown)), (offset, 2)]
            pieces += [(outcomes[state.outcome][None], 1), (state.said[seat], state.heard[seat])]
            for k in range(config.heard):
                who = of[seat, k]
                pieces += [((ord("1") + who)[None], 1), (state.said[who], state.heard[who])]
            return join([*pieces, (encoded(">"), 1)], P)

        rows, lengths = zip(*(look(seat) for seat in range(N)), strict=True)
        return Observation(
            jnp.arange(N, dtype=jnp.int32), jnp.stack(rows), jnp.stack(lengths), jnp.full(N, ~state.done)
        )

    def step(key: jax.Array, state: State, tokens: Int[Array, "W R"], length: Int[Array, "W"]):
        task = state.task
        hits = (tokens[:, :1] == directions) & (length[:, None] > 0)
        named, move = hits.any(1), jnp.argmax(hits, axis=1)
        agree = named.all() & (move == move[0]).all()
        row, column = state.cell // S + jnp.asarray(DELTA)[move[0], 0], state.cell % S + jnp.asarray(DELTA)[move[0], 1]
        inside = (row >= 0) & (row < S) & (column >= 0) & (column < S)
        to = jnp.clip(row, 0, S - 1) * S + jnp.clip(column, 0, S - 1)
        goes = agree & inside & (task["walls"][to] == 0)
        cell = jnp.where(goes, to, state.cell)
        outcome = jnp.where(goes, 1, jnp.where(agree, 3, 2)).astype(jnp.int32)
        said, heard = spoken(tokens, length, T)
        reached = cell == task["goal"]
        done = reached | (state.turn + 1 >= config.moves)
        agreed = state.agreed + agree
        after = State(task, state.partners, cell, said, heard, outcome, agreed, state.turn + 1, done)
        covered = lambda at: jnp.maximum(0.0, 1.0 - task["distance"][at] / task["distance"][task["start"]])
        rewards = {
            "accuracy": team(1.0 * reached),
            "progress": team(covered(cell) - covered(state.cell)),
            "agreement": team(done * agreed / after.turn),
        }
        after = jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, after)
        return after, jax.tree.map(lambda r: jnp.where(state.done, 0.0, r), rewards), after.done

    actors = (tuple(range(N)),) * config.moves
    return ArrayEnv("maze", ROLES[:N], N, config.moves, COMPONENTS, actors, reset, observe, step)


def spoken(tokens: Int[Array, "W R"], length: Int[Array, "W"], most: int) -> tuple[Int[Array, "W T"], Int[Array, "W"]]:
    """Replies as partners hear them: a direction or ?, then letters and digits up to eos, T = ``most`` bytes in all;
    other bytes as ?.
    """
    cut = tokens[:, :most]
    cut = jnp.pad(cut, ((0, 0), (0, most - cut.shape[1])), constant_values=EOS)
    stop = (cut == EOS) | (jnp.arange(most) >= length[:, None])
    size = jnp.maximum(jnp.where(stop.any(1), jnp.argmax(stop, axis=1), most), 1).astype(jnp.int32)
    plain = ((cut >= ord("a")) & (cut <= ord("z"))) | ((cut >= ord("A")) & (cut <= ord("Z")))
    plain |= (cut >= ord("0")) & (cut <= ord("9"))
    plain &= (jnp.arange(most) > 0) | jnp.isin(cut, encoded(MOVES))
    text = jnp.where(plain & ~stop, cut, ord("?"))
    return jnp.where(jnp.arange(most) < size[:, None], text, PAD).astype(jnp.int32), size


def distances(walls: Bool[np.ndarray, "*b n n"], goal: Int[np.ndarray, "*b"]) -> Int[np.ndarray, "*b n n"]:
    """Moves from every cell to ``goal`` (a cell's number), -1 where there is no way; all mazes at once."""
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
    """``count`` mazes before any is turned down: walls [B n n], start, goal [B], distance [B n n] to the goal.
    ``fits`` [B]: those whose shortest path is of a wanted length.
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


def mazes(rng: np.random.Generator, config: Config, count: int) -> dict[str, np.ndarray]:
    """The first ``count`` fitting mazes; the first of more are the same. ConfigError where none is found."""
    found: list[dict[str, np.ndarray]] = []
    have = 0
    while have < count:
        got = draw(rng, config, BLOCK)
        found.append({name: x[got["fits"]] for name, x in got.items() if name != "fits"})
        have += int(got["fits"].sum())
        if len(found) == BLOCKS and not have:
            raise ConfigError(
                f"maze: shortest: none of {BLOCK * BLOCKS} mazes of size={config.size}, walls={config.walls:g} has a "
                f"shortest path of {config.shortest} to {config.longest}; expected shorter paths or fewer walls"
            )
    return {name: np.concatenate([f[name] for f in found])[:count] for name in found[0]}


def owners(rng: np.random.Generator, config: Config, count: int) -> Int[np.ndarray, "B S"]:
    """Which agent sees which cell: equal shares, all splits as likely."""
    cells = np.arange(config.size**2) % config.agents
    return rng.permuted(np.tile(cells, (count, 1)), axis=1).astype(np.int32)


def make_tasks(config: Config, seed: int | None = None, n: int | None = None) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``): walls, owner and distance [n S],
    start and goal [n], with cells numbered row by row.
    """
    seed, n = config.seed if seed is None else seed, config.tasks if n is None else n
    got = mazes(np.random.default_rng([seed, 1]), config, n)
    rows = {name: x.reshape(n, -1) if x.ndim > 1 else x for name, x in got.items()}
    rows["owner"] = owners(np.random.default_rng([seed, 2]), config, n)
    return {name: x.astype(np.int32) for name, x in rows.items()}


def ways(walls: Bool[np.ndarray, "B n n"], goal: Int[np.ndarray, "B"], cell: Int[np.ndarray, "B"]) -> np.ndarray:
    """Directions [B 4] that begin a shortest path from ``cell`` to the goal; none where there is no path."""
    n, rows = walls.shape[-1], np.arange(len(walls))
    padded = np.pad(distances(walls, goal), ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    at = np.stack([cell // n, cell % n], 1)[:, None] + 1
    to = at + DELTA
    next_to, here = padded[rows[:, None], to[..., 0], to[..., 1]], padded[rows, at[:, 0, 0], at[:, 0, 1]]
    return (next_to >= 0) & (next_to == here[:, None] - 1)


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Players in random places who go by their own part of the map: a cell they do not see passes for free.

    A share of ``skill`` takes a shortest way (any of them; any direction where there seems to be none) and goes on to
    tell it in the message, others say one direction and no more. What was said before is drawn at random. Where it was
    no agreement a share of ``defer`` say what their first partner said instead.
    """
    env, out = make(config), {}
    observe = jax.jit(jax.vmap(env.observe))
    for seat in range(config.agents):
        states, plans = scenes(config, seed, n, seat)
        seen = jax.device_get(observe(states))
        prompts = [row[:size].tolist() for row, size in zip(seen.tokens[:, seat], seen.length[:, seat], strict=True)]
        completions = [[*plan.encode(), EOS][: config.max_new] for plan in plans]
        out[ROLES[seat]] = samples(prompts, completions, prompt_length(config), config.max_new)
    return out


def scenes(config: Config, seed: int, n: int, seat: int) -> tuple[State, list[str]]:
    """``n`` states (leading axis n), and what a demonstrator in ``seat`` says there."""
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
        heard = np.asarray(states.said)[np.arange(n), first, 0].tolist()
        gives = ((np.asarray(states.outcome) == OUTCOMES.index("=")) & (rng.random(n) < config.defer)).tolist()
        plans = [chr(h) if g else plan for plan, h, g in zip(plans, heard, gives, strict=True)]
    return states, plans


def _plans(
    rng: np.random.Generator, config: Config, walls: np.ndarray, goal: np.ndarray, cell: np.ndarray
) -> list[str]:
    n, at = len(cell), cell.copy()
    plans, going = [""] * n, rng.random(n) < config.skill
    for i in range(config.max_new):
        good = ways(walls, goal, at)
        move = np.argmax(np.where(good, rng.random((n, 4)), -1), axis=1)
        lost = ~good.any(1) | ~going
        if i == 0:
            move = np.where(lost, rng.integers(0, 4, n), move)
        speaks = ~lost | (i == 0)
        plans = [p + MOVES[m] * s for p, m, s in zip(plans, move, speaks.tolist(), strict=True)]
        going &= ~lost
        to = at + DELTA[move] @ np.array([config.size, 1])
        at = np.where(going, to, at)
    return plans


def _placed(rng: np.random.Generator, config: Config, states: State, cell: np.ndarray) -> State:
    """States with the team elsewhere and something said before, but for every fourth, where nothing was."""
    n, N, T = len(cell), config.agents, config.max_new
    later = rng.random(n) < 0.75
    letters = np.frombuffer(MOVES.encode(), np.uint8)[rng.integers(0, 4, (n, N, T))]
    size = rng.integers(1, T + 1, (n, N))
    said = np.where(np.arange(T) < size[..., None], letters, PAD)
    same = (letters[..., 0] == letters[:, :1, 0]).all(1)
    outcome = np.where(same, np.where(rng.random(n) < 0.7, 1, 3), 2)
    keep = lambda new, old: jnp.where(later.reshape(-1, *[1] * (new.ndim - 1)), jnp.asarray(new, jnp.int32), old)
    return replace(
        states,
        cell=jnp.asarray(cell, jnp.int32),
        said=keep(said, states.said),
        heard=keep(size, states.heard),
        outcome=keep(outcome, states.outcome),
    )


def walks(rng: np.random.Generator, tasks: dict[str, np.ndarray], moves: int) -> Float[np.ndarray, "N"]:
    """Progress [n] of a walker who takes any legal move, ``moves`` of them at most: 1 where it reaches the goal."""
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
