"""Games that are small enough to enumerate, with exact policy gradients, for `experiments.studies.gradient_quality`.

    line     three roles act in turn and see all earlier moves (0>, 1a>, 2ac>); a move is a, b or c
    matrix   two rounds of the game chicken with simultaneous moves (`envs.matrix`), rewarded by the social sum

In ``line``, the last move is rewarded by ``payoff[moves]``, drawn for each joint trajectory, or by `graded`, a sum over
moves. The local verifier scores a move by the best payoff that remains possible. So it is correct for a perfect team,
but not for the current one. Verdicts and payoffs can be noisy.

The exact objective and gradient are sums over all joint trajectories in float64 NumPy. They use none of the project's
code for rollout, credit or loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from jaxmarl_llm.envs.array_env import ArrayEnv, Observation
from jaxmarl_llm.envs.matrix import array as matrix
from jaxmarl_llm.models import tabular
from jaxmarl_llm.models.tokenizer import ByteTokenizer
from jaxmarl_llm.types import Model, PyTree, Role, Team

BYTES = ByteTokenizer()
LETTERS = "abc"


class Game(NamedTuple):
    """An enumerable game. A history is a tuple of joint actions; each is a tuple of move indices, one for each seat.

    prompt(history, seat): the prompt of a seat. pay(task, history): team reward of the last joint action of a history.
    judge(task, history): local verdict on the last joint action. tasks(rng): arrays of one task. component: the reward
    that counts.
    """

    name: str
    env: ArrayEnv
    team: Team
    seats: int
    turns: int
    moves: int
    component: str
    prompt: Callable[[tuple, int], str]
    pay: Callable[[PyTree, tuple], float]
    judge: Callable[[PyTree, tuple], float] | None
    tasks: Callable[[np.random.Generator], PyTree]

    @property
    def prompts(self) -> list[str]:
        """Prompts of the table's rows, by turn, history and seat."""
        return [
            self.prompt(history, seat)
            for t in range(self.turns)
            for history in self.histories(t)
            for seat in range(self.seats)
        ]

    def histories(self, turns: int) -> list[tuple]:
        return list(itertools.product(itertools.product(range(self.moves), repeat=self.seats), repeat=turns))


class Exact(NamedTuple):
    value: float  # expected return
    gradient: Float[np.ndarray, "K D"]  # of the value to the logits
    turn: Int[np.ndarray, " K"]  # the turn at which each row is asked


def exact(
    game: Game,
    logits: Float[np.ndarray, "K D"],
    task: PyTree,
    local: Callable[[PyTree, tuple], float] | None = None,
) -> Exact:
    """Expected return and its gradient: ``sum_h p(h) R(h) sum_t grad log pi(a_t | s_t)`` over all trajectories h.

    local: R(h) is the reward of each move itself, given the history up to it. The "gradient" is then a sum of
    gradients, one for each move's own reward. In general it is not the gradient of any objective.
    """
    logits = np.asarray(logits, np.float64)
    row = {text: i for i, text in enumerate(game.prompts)}
    log_pi = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    value, gradient, turn = 0.0, np.zeros_like(logits), np.zeros(len(row), int)
    for history in game.histories(game.turns):
        total = sum(game.pay(task, history[: t + 1]) for t in range(game.turns))
        said = [
            (t, row[game.prompt(history[:t], seat)], move)
            for t, joint in enumerate(history)
            for seat, move in enumerate(joint)
        ]
        p = np.exp(sum(log_pi[r, move] for _, r, move in said))
        value += p * total
        for t, r, move in said:
            turn[r] = t
            weight = p * (total if local is None else local(task, history[: t + 1]))
            gradient[r] -= weight * np.exp(log_pi[r])
            gradient[r, move] += weight
    return Exact(float(value), gradient, turn)


def team(env: ArrayEnv, prompts: list[str], letters: str) -> Team:
    """Team in which all roles share one table, so the gradient is one vector."""
    rows = tuple(tuple(text.encode()) for text in prompts)
    policy = tabular.make_policy(tabular.Config(rows, tuple(letters.encode()), BYTES.vocab_size))
    return Team(tuple(Role(r, "table", 1) for r in env.roles), (Model("table", policy, BYTES),))


def params(logits: Array) -> PyTree:
    return {"shared": {}, "agents": {"table": {"params": {"logits": logits}}}}


@struct.dataclass
class Line:
    task: dict[str, Array]  # payoff [moves^turns], noise [turns]
    said: Int[Array, " M"]  # moves; those from ``turn`` on are not made yet
    turn: Int[Array, ""]
    error: Float[Array, ""]  # of the last verdict or payoff


def line(turns: int = 3, moves: int = 3) -> Game:
    names, size = tuple(f"role{t}" for t in range(turns)), turns + 1

    def prompt(history: tuple, seat: int) -> str:
        return f"{len(history)}{''.join(LETTERS[a] for (a,) in history)}>"

    def index(said: Array, count: int) -> Array:
        """Index of the first ``count`` moves, as digits in base ``moves``."""
        return sum((said[t] * moves ** (count - 1 - t) for t in range(count)), start=jnp.int32(0))

    def reset(key: Array, task: dict[str, Array]) -> Line:
        return Line(task, jnp.zeros(turns, jnp.int32), jnp.int32(0), jnp.float32(0))

    def observe(state: Line) -> Observation:
        row = jnp.concatenate([48 + state.turn[None], 97 + state.said])
        end = 1 + state.turn
        at = jnp.arange(size)
        row = jnp.where(at < end, row[:size], jnp.where(at == end, ord(">"), BYTES.pad_id))
        return Observation(state.turn[None], row[None].astype(jnp.int32), (end + 1)[None], jnp.array([True]))

    def step(key: Array, state: Line, tokens: Int[Array, "W R"], length: Int[Array, " W"]):
        here = jnp.arange(turns) == state.turn
        after = Line(
            state.task,
            jnp.where(here, tokens[0, 0] - 97, state.said),
            state.turn + 1,
            jnp.sum(jnp.where(here, state.task["noise"], 0.0)) * jax.random.normal(key),
        )
        over = after.turn >= turns
        pay = jnp.where(over, state.task["payoff"][index(after.said, turns)] + after.error, 0.0)
        return after, {"pay": jnp.full(turns, pay)}, over

    def verify(state: Line) -> dict[str, Array]:
        best = [state.task["payoff"].reshape(moves**t, -1).max(1)[index(state.said, t)] for t in range(1, turns + 1)]
        return {"pay": jnp.full(turns, jnp.stack(best)[state.turn - 1] + state.error)}

    def pay(task: PyTree, history: tuple) -> float:
        if len(history) < turns:
            return 0.0
        return float(np.reshape(task["payoff"], (moves,) * turns)[tuple(a for (a,) in history)])

    def judge(task: PyTree, history: tuple) -> float:
        return float(np.reshape(task["payoff"], (moves,) * turns)[tuple(a for (a,) in history)].max())

    def tasks(rng: np.random.Generator) -> PyTree:
        return {"payoff": rng.random(moves**turns).astype(np.float32), "noise": np.zeros(turns, np.float32)}

    actors = tuple((t,) for t in range(turns))
    env = ArrayEnv("line", names, 1, turns, ("pay",), actors, reset, observe, step, verify)
    game = Game("line", env, Team((), ()), 1, turns, moves, "pay", prompt, pay, judge, tasks)
    return game._replace(team=team(env, game.prompts, LETTERS[:moves]))


def graded(rng: np.random.Generator, turns: int = 3, moves: int = 3) -> PyTree:
    """Task of ``line`` whose payoff is a sum of one part for each move, which depends on earlier moves.

    Every part is uniform and divided by sqrt(turns), so that the payoffs have the spread of ``line``.
    """
    parts = (rng.random((moves,) * (t + 1)).reshape((moves,) * (t + 1) + (1,) * (turns - t - 1)) for t in range(turns))
    payoff = sum(parts, start=np.zeros((moves,) * turns)) / turns**0.5
    return {"payoff": payoff.ravel().astype(np.float32), "noise": np.zeros(turns, np.float32)}


def chicken(rounds: int = 2) -> Game:
    env, table = matrix.make(matrix.Config(rounds=rounds)), matrix.GAMES["chicken"]

    def prompt(history: tuple, seat: int) -> str:
        return f"{1 + seat}{''.join(matrix.MOVES[a[seat]] + matrix.MOVES[a[1 - seat]] for a in history)}>"

    def pay(task: PyTree, history: tuple) -> float:
        first, second = history[-1]
        return float(sum(table[2 * first + second]))

    tasks = lambda rng: {"game": np.int32(0)}
    game = Game("matrix", env, Team((), ()), 2, rounds, 2, "payoff", prompt, pay, None, tasks)
    return game._replace(team=team(env, game.prompts, matrix.MOVES))
