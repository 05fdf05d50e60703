"""Advantage Alignment: the coupling of advantages makes players of the iterated prisoner's dilemma cooperate.

Tabular: a policy that remembers one round (P(C) at the start and after CC, CD, DC, DD), played against itself for 10
rounds, 600 updates of 128 matches in groups of 8, rewards / 5, Adam at 0.05. Thresholds 0.6 and 0.05 of moves; on seeds
100 to 104 it measured 0.76 to 0.77 with beta 2 and 0.00 with beta 0, at rates 0.02 and 0.1 alike (0.01 at 0.02).

Transformer: the recipe's ``tiny`` configuration; its margin was set before it was run at these settings. The same
credit in both: `credit.assign` under the recipe's ``Config().credit``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.claims import Claim, Finding, minus
from experiments.configs.advantage_alignment import tiny
from jaxmarl_llm.credit.assign import assign
from jaxmarl_llm.credit.rules import CreditRule, Sizes
from jaxmarl_llm.envs.matrix.array import GAMES
from jaxmarl_llm.recipes.advantage_alignment import Config, algorithm, make
from jaxmarl_llm.runs.compiled import make_program, task_data
from jaxmarl_llm.types import Counts, Nodes, Retrieval, Steps, Transitions, Tree

GOLDEN = "tests/recipes/test_advantage_alignment.py"
STATUS = "reproduced"
SEEDS = 10
TABULAR = "600 updates of 128 matches, both arms"
TOKENS = "100 supervised and 200 RL steps of 8 tasks, both arms"
CLAIMS = {
    "cooperates": Claim(
        "L",
        "tabular players with beta 2 cooperate in at least 0.6 of moves",
        "share of C minus 0.6",
        0.0,
        control="the fixed share 0.6",
        budget=TABULAR,
    ),
    "defects": Claim(
        "X",
        "tabular players with beta 0 cooperate in at most 0.05 of moves",
        "0.05 minus the share of C",
        0.0,
        control="the fixed share 0.05",
        budget=TABULAR,
    ),
    "transformer": Claim(
        "X",
        "a transformer cooperates in at least 0.3 of moves more with beta 2 than with beta 0",
        "share of C, beta 2 minus beta 0",
        0.3,
        control="beta 0, from the same parameters",
        budget=TOKENS,
    ),
}

ROUNDS, GROUP, TASKS, UPDATES, RATE = 10, 8, 16, 600, 0.05
MATCHES = GROUP * TASKS
PAYOFF = jnp.array(GAMES["prisoners"], jnp.float32).reshape(2, 2, 2)  # [own, other, player], 0 C, 1 D
LATE = 20  # last updates whose cooperation is averaged


def tree_of(payoff: jax.Array) -> Tree:
    """Matches [T n 2] as a forest of chains: node, step and transition tables in the order round, match, seat."""
    turns, n = payoff.shape[:2]
    j = turns * n
    turn, match = jnp.repeat(jnp.arange(turns), n), jnp.tile(jnp.arange(n), turns)
    parent = jnp.where(turn > 0, jnp.arange(j) - n, -1)
    each = lambda x: jnp.repeat(x, 2)
    zeros, yes = jnp.zeros(2 * j, jnp.int32), jnp.ones(2 * j, bool)
    role, grid = jnp.tile(jnp.arange(2), j), jnp.zeros((2 * j, 1))
    task = match // GROUP
    nodes = Nodes(
        grid.astype(int), zeros, role, zeros, each(task), each(turn), each(parent), Retrieval.empty(2 * j), yes
    )
    steps = Steps(jnp.arange(2 * j), grid.astype(int), zeros, grid > 0, grid, ~yes, zeros, zeros, yes)
    seats, done = jnp.arange(2 * j).reshape(j, 2), turn == turns - 1
    moves = Transitions(seats, parent, task, turn, {"payoff": payoff.reshape(j, 2)}, done, yes[:j], yes[:j])
    return Tree(nodes, steps, moves, Counts(*[jnp.int32(0)] * 7))


def seen(own: jax.Array, other: jax.Array) -> jax.Array:
    """What a player remembers: 0 at the start, then 1 to 4 for CC, CD, DC, DD (own move first)."""
    return 1 + 2 * own + other


def play(logits: jax.Array, key: jax.Array, opponent: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Memories and moves [T n 2] of MATCHES matches of a policy (logits of C [5]) against itself or another one."""
    table = jnp.stack([logits, logits if opponent is None else opponent])

    def round_(memory: jax.Array, key: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        cooperate = jax.nn.sigmoid(table[jnp.arange(2), memory])
        move = (jax.random.uniform(key, (MATCHES, 2)) >= cooperate).astype(jnp.int32)
        return seen(move, move[:, ::-1]), (memory, move)

    start = jnp.zeros((MATCHES, 2), jnp.int32)
    return jax.lax.scan(round_, start, jax.random.split(key, ROUNDS))[1]


@functools.partial(jax.jit, static_argnames=("rule",))
@functools.partial(jax.vmap, in_axes=(0, None))
def tabular(seed: jax.Array, rule: CreditRule) -> dict[str, jax.Array]:
    """The share of C over the LATE last updates, payoff a round, final P(C) by memory [5], payoffs against always D."""
    tx = optax.adam(RATE)

    def update(carry: tuple, key: jax.Array) -> tuple[tuple, tuple[jax.Array, jax.Array]]:
        logits, opt_state = carry
        memory, move = play(logits, key)
        payoff = PAYOFF[move[..., 0], move[..., 1]]
        credited = assign(rule, tree_of(payoff), weights=(("payoff", 0.2),), sizes=Sizes(ROUNDS, TASKS, 2))

        def loss(logits: jax.Array) -> jax.Array:
            sign = 1.0 - 2.0 * move
            return -jnp.mean(credited.advantage.reshape(move.shape) * jax.nn.log_sigmoid(sign * logits[memory]))

        updates, opt_state = tx.update(jax.grad(loss)(logits), opt_state, logits)
        return (optax.apply_updates(logits, updates), opt_state), (1.0 - move.mean(), payoff.mean())

    start = jnp.zeros(5)
    keys = jax.random.split(jax.random.key(seed), UPDATES + 1)
    (logits, _), (cooperation, payoff) = jax.lax.scan(update, (start, tx.init(start)), keys[1:])
    _, move = play(logits, keys[0], jnp.full(5, -jnp.inf))
    against = PAYOFF[move[..., 0], move[..., 1]].mean((0, 1))
    late = lambda x: x[-LATE:].mean()
    return dict(cooperation=late(cooperation), payoff=late(payoff), policy=jax.nn.sigmoid(logits), against=against)


def transformer(seeds: list[int], beta: float, steps: int | None = None) -> np.ndarray:
    """Share of C in the last LATE steps of the recipe's tiny configuration, by seed."""
    cfg = tiny()
    cfg = dataclasses.replace(
        cfg,
        steps=steps or cfg.steps,
        beta=beta,
    )
    recipe = make(cfg)
    run = jax.jit(jax.vmap(make_program(recipe).run))
    return np.asarray(run(jnp.array(seeds), task_data(recipe, seeds))[1]["cooperation"][:, -LATE:].mean(1))


def run(seeds: list[int], say: Callable[[str], None]) -> list[Finding]:
    on = Config()
    off = dataclasses.replace(on, beta=0.0)
    shown = lambda x: " ".join(f"{v:.2f}" for v in x)
    rules = {f"beta={cfg.beta:g}": algorithm(cfg).credit for cfg in (on, off)}
    arms = {name: jax.device_get(tabular(jnp.array(seeds), rule)) for name, rule in rules.items()}
    for name, got in arms.items():
        say(f"tabular, {name}: cooperation {shown(got['cooperation'])}, payoff {shown(got['payoff'])}")
        say(f"  P(C) at the start, after CC, CD, DC, DD: {'; '.join(map(shown, got['policy']))}")
        say(f"  payoff against always D {shown(got['against'][:, 0])}, and of always D {shown(got['against'][:, 1])}")
    table = {name: got["cooperation"].tolist() for name, got in arms.items()}
    with_it, without = table.values()
    tokens = {f"beta={beta:g}": transformer(seeds, beta).tolist() for beta in (on.beta, 0.0)}
    for name, values in tokens.items():
        say(f"transformer, {name}: cooperation {shown(values)}")
    return [
        Finding("cooperates", [c - 0.6 for c in with_it], table),
        Finding("defects", [0.05 - c for c in without], table),
        Finding("transformer", minus(*tokens.values()), tokens),
    ]
