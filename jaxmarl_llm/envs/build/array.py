"""Build: a builder adds one node a turn to a graph of workers, which then answers a query once. All in JAX.

    turn  prompt             a good completion (each ends with eos)
    0     B4+7-2*5||6>       s0: a solver that listens to nobody becomes node 1
    1     B4+7-2*5|s0|5>     c1: a checker that listens to node 1 becomes node 2
    2     B4+7-2*5|s0c1|4>   x: the graph is run

Between the bars are the nodes in order, each with its role and the node that it listens to. The last digit is the
number of actions that are left, this one included. Actions:

    s0, s1 ...  add a solver; it listens to nobody (0), or to the node of that number
    c1, c2 ...  add a checker that listens to the node of that number
    d1, d2 ...  delete a node that nobody listens to; later nodes move up by one number
    x           run the graph and end the episode

An action is not possible when a node that it names is not there, or when a checker would listen to nobody. Deletion is
not possible where somebody listens to the node, and a run is not possible without a node. Nor is any other completion
possible. Such an action changes nothing but the number of actions left. After the last action the graph is run without
an x. A node listens to an earlier node alone, so every graph is acyclic. A graph has at most as many nodes as there are
actions.

The query has four digits and three operations. It is hard when it has a product (*), and easy otherwise. Workers are
functions with planted accuracy. A solver is right with probability .98 on easy queries and .5 on hard ones, whatever it
hears. A checker repeats a right answer, and repairs a wrong one with probability .9. The answer node ends the longest
chain of listeners; the first one of equally long chains counts. A graph without nodes has no answer node, and its
answer is wrong.

Rewards, at the last action unless said otherwise

    accuracy    1 if the answer is right
    cost        -.1 for each node
    unanswered  1 if the graph has no answer node
    chance      probability that the graph's answer is right
    nodes       number of nodes
    impossible  1 at an action that is not possible
    used        1 at an action that adds the node which the answer then is of
    actions     1 at every action

A weight of 0, or none, makes a component a fact that is logged, and that a credit rule may read. Whether the workers
are right is drawn anew in each episode.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples, and ``held_out`` the side of the split. T is the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    PAD,
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    task_draws,
    text_samples,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.prompt_grammar import Piece, prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task

ROLES = ("builder",)
SOLVER, CHECKER = range(2)  # roles of workers
WORKERS = "sc"
ZERO = ord("0")
EASY, HARD = range(2)  # types of queries
DIGITS = 4  # of a query
SUMS, PRODUCT = "+-", "*"
COMPONENTS = ("accuracy", "cost", "unanswered", "chance", "nodes", "impossible", "used", "actions")
MOST_ACTIONS = 8
RESPONSE = 3  # R: two characters and eos


@dataclass(frozen=True)
class Config:
    """The settings of queries, workers and demonstrations."""

    seed: int = 0  # of the training tasks
    tasks: int = 1024  # training tasks
    actions: int = 6  # at most, in an episode; also the largest number of nodes
    hard_share: float = 0.5  # of queries
    solver: tuple[float, float] = (0.98, 0.5)  # accuracy of a solver on easy queries, and on hard ones
    repair: float = 0.9  # probability that a checker repairs a wrong answer
    cost: float = 0.1  # of a node
    # Probabilities of actions in demonstrations.
    exit_rates: tuple[float, float] = (0.5, 0.3)  # an easy query's graph is run once it has a node, and a hard one's
    delete_rate: float = 0.1  # a node is deleted, where one may be
    impossible_rate: float = 0.15  # an action is not possible
    chain_rate: float = 0.6  # of additions to other nodes: a checker listens to the last node, else any possible one

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        checks.in_range(path, self, 1, MOST_ACTIONS, "actions")
        checks.probabilities(path, self, "hard_share", "repair", "delete_rate", "impossible_rate", "chain_rate")
        for name in ("solver", "exit_rates"):
            if not all(0 <= share <= 1 for share in getattr(self, name)):
                checks.refuse(path, name, "two probabilities in [0, 1]", getattr(self, name))
        checks.at_least(path, self, 0, "cost")
        rest = 1 - self.delete_rate - self.impossible_rate
        if max(self.exit_rates) > rest:
            checks.refuse(
                path, "exit_rates", f"at most 1 - delete_rate - impossible_rate = {rest:.3g}", self.exit_rates
            )


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return 1 + (2 * DIGITS - 1) + 1 + 2 * (config.actions - 1) + 3


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + RESPONSE


class Graph(struct.PyTreeNode):
    """Workers in order, with T places. A node hears an earlier node only.

    Attributes:
        role: SOLVER or CHECKER, of each node
        heard: the number of the node that each node listens to, counted from 1; 0 for nobody
        size: the number of nodes; later places are 0
    """

    role: Int[Array, " T"]
    heard: Int[Array, " T"]
    size: Int[Array, ""]


@struct.dataclass
class State:
    """An episode so far."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    graph: Graph
    done: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Keys decide whether workers are right."""
    return ArrayEnv(
        name="build",
        roles=ROLES,
        seats=1,
        max_turns=config.actions,
        components=COMPONENTS,
        actors=((0,),) * config.actions,
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    none = jnp.zeros(config.actions, jnp.int32)
    graph = Graph(none, none, jnp.int32(0))
    return State(jax.tree.map(jnp.int32, dict(task)), jnp.int32(0), graph, jnp.bool_(False))


def observe(config: Config, state: State) -> Observation:
    """The prompt of the builder."""
    left, shown = jnp.maximum(config.actions - state.turn, 0), config.actions - 1  # one action at least is left
    graph = state.graph
    nodes = jnp.stack([encoded(WORKERS)[graph.role], ZERO + graph.heard], axis=1)[:shown].reshape(-1)
    query: Piece = (state.task["query"], 2 * DIGITS - 1)
    made: Piece = (nodes, 2 * jnp.minimum(graph.size, shown))
    digit: Piece = ((ZERO + left)[None], 1)
    tokens, length = prompt_row("B", [query], [(1, [made]), (1, [digit])], prompt_length(config))
    return Observation(jnp.zeros(1, jnp.int32), tokens[None], length[None], ~state.done[None])


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after an action, the rewards of the turn, and whether the episode has finished."""
    action = read(state.graph, tokens[0], length[0])
    graph = act(state.graph, action)
    over = action.exits | (state.turn + 1 >= config.actions)
    node = answer_node(graph)
    chance, right = run(config, key, graph, state.task["hard"])
    amounts: dict[str, Array | float] = {
        "accuracy": 1.0 * (over & right),
        "cost": -config.cost * over * graph.size,
        "unanswered": 1.0 * (over & (node < 0)),
        "chance": over * chance,
        "nodes": 1.0 * over * graph.size,
        "impossible": 1.0 * ~action.possible,
        "used": 1.0 * (action.adds & (node == state.graph.size)),  # the new node is the last one
        "actions": 1.0,
    }
    after = State(task=state.task, turn=state.turn + 1, graph=graph, done=over)
    return unless_finished(state, after, {name: to_all(ROLES, amounts[name]) for name in COMPONENTS})


class Action(NamedTuple):
    """A completion as an action. At most one of ``adds``, ``deletes`` and ``exits`` is true, and then it is possible.

    ``role`` and ``target``: of the node to add. ``target`` is also the number of the node to delete.
    """

    adds: Bool[Array, ""]
    deletes: Bool[Array, ""]
    exits: Bool[Array, ""]
    role: Int[Array, ""]
    target: Int[Array, ""]

    @property
    def possible(self) -> Bool[Array, ""]:
        """Whether it is an action at all."""
        return self.adds | self.deletes | self.exits


def read(graph: Graph, tokens: Int[Array, " R"], length: Int[Array, ""]) -> Action:
    """The action of one completion on ``graph``. ``tokens`` [R] and ``length`` [] are of that completion."""
    first, second = jnp.pad(tokens, (0, 2), constant_values=PAD)[:2]
    ended, size = completion_end(tokens, length)
    two, target = ended & (size == 2), second - ZERO
    there = (target >= 1) & (target <= graph.size)
    solver, checker = first == ord("s"), first == ord("c")
    adds = two & jnp.where(solver, there | (target == 0), checker & there)
    deletes = two & (first == ord("d")) & there & ~(graph.heard == target).any()
    exits = ended & (size == 1) & (first == ord("x")) & (graph.size > 0)
    return Action(adds, deletes, exits, jnp.where(checker, CHECKER, SOLVER), target)


def act(graph: Graph, action: Action) -> Graph:
    """The graph after an action. ``graph``: with room for one node more. ``action``: as `read` returns it."""
    here = jnp.arange(len(graph.role))
    new = action.adds & (here == graph.size)
    role, heard = jnp.where(new, action.role, graph.role), jnp.where(new, action.target, graph.heard)
    behind = action.deletes & (here >= action.target - 1)  # the places that take over from their successors
    role, heard = (jnp.where(behind, jnp.append(x[1:], 0), x) for x in (role, heard))
    heard = heard - (action.deletes & (heard > action.target))
    return Graph(role, heard, graph.size + action.adds - action.deletes)


def answer_node(graph: Graph) -> Int[Array, ""]:
    """The place of the answer node of ``graph``, counted from 0; -1 without nodes."""
    depth = jnp.zeros(len(graph.role) + 1, jnp.int32)  # place 0 is nobody
    for place in range(len(graph.role)):
        depth = depth.at[place + 1].set((depth[graph.heard[place]] + 1) * (place < graph.size))
    return jnp.argmax(depth[1:]) * (graph.size > 0) - (graph.size == 0)


def run(config: Config, key: Array, graph: Graph, hard: Int[Array, ""]) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    """The probability that the answer of ``graph`` is right, and whether it is. ``hard``: the type of the query."""
    size = len(graph.role)
    solves, luck = jnp.array(config.solver)[hard], jax.random.uniform(key, (size,))
    chance, right = jnp.zeros(size + 1), jnp.zeros(size + 1, bool)  # place 0 is nobody
    for place in range(size):
        checks_it, of = graph.role[place] == CHECKER, graph.heard[place]
        repaired = chance[of] + (1 - chance[of]) * config.repair
        chance = chance.at[place + 1].set(jnp.where(checks_it, repaired, solves))
        own = luck[place] < jnp.where(checks_it, config.repair, solves)
        right = right.at[place + 1].set(own | (checks_it & right[of]))
    node = answer_node(graph)
    return jnp.where(node < 0, 0.0, chance[node + 1]), (node >= 0) & right[node + 1]


def query(rng: np.random.Generator, hard: int) -> str:
    """A random query of type ``hard``."""
    digits = rng.integers(10, size=DIGITS)
    operations = [SUMS[i] for i in rng.integers(2, size=DIGITS - 1)]
    if hard:
        operations[rng.integers(DIGITS - 1)] = PRODUCT
    return "".join(f"{digit}{operation}" for digit, operation in zip(digits, [*operations, ""], strict=True))


def drawn(rng: np.random.Generator, config: Config, held_out: bool = False) -> tuple[int, str]:
    """Draw the type of a query and the query from one side of the split. Types are as likely on both sides."""
    hard = int(rng.random() < config.hard_share)
    return hard, draw_task(lambda: query(rng, hard), str, held_out)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``). ``held_out``: the side of the split.

    They are hard [n], 0 or 1, and query [n 7], as bytes.
    """
    rng, count = task_draws(config, seed, n, 1, held_out)
    hard, queries = zip(*(drawn(rng, config, held_out) for _ in range(count)), strict=True)
    return dict(hard=np.array(hard, np.int32), query=np.array([list(q.encode()) for q in queries], np.int32))


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """Samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    They are the actions of random constructions on training queries, one after the other. ``exit_rates``,
    ``delete_rate`` and ``impossible_rate`` are the probabilities of its actions. The query's type decides the rate of
    exits alone. All other actions add a node. With probability ``chain_rate`` it is a checker that listens to the last
    node, where there is one. Otherwise each possible node has equal probability. ``context`` is not used.
    """
    rng = np.random.default_rng([seed, 2])
    pairs: list[tuple[str, str]] = []
    while len(pairs) < n:
        pairs += construction(rng, config, drawn(rng, config)[1])
    return {ROLES[0]: text_samples(pairs[:n], prompt_length(config), RESPONSE)}


def construction(rng: np.random.Generator, config: Config, of: str) -> Iterator[tuple[str, str]]:
    """The prompts and completions of one demonstrated construction. ``of``: the query."""
    nodes: list[str] = []
    exits = config.exit_rates[HARD if PRODUCT in of else EASY]
    for left in range(config.actions, 0, -1):
        move = _move(rng, config, nodes, exits)
        yield prompt_text("B", of, ["".join(nodes), str(left)]), move
        if move in additions(len(nodes)):
            nodes.append(move)
        elif move in deletions(nodes):
            nodes = without(nodes, int(move[1]))
        elif move == "x" and nodes:
            return


def _move(rng: np.random.Generator, config: Config, nodes: list[str], exits: float) -> str:
    """A demonstrator's action on ``nodes``, which is an exit with probability ``exits``."""
    kind, free = rng.random(), deletions(nodes)
    pick = lambda options: options[rng.integers(len(options))]
    if kind < config.impossible_rate:
        beyond = len(nodes) + 1
        heard = [f"d{k + 1}" for k in range(len(nodes)) if f"d{k + 1}" not in free]
        return pick([f"s{beyond}", f"c{beyond}", f"d{beyond}", "c0", *heard, *([] if nodes else ["x"])])
    if nodes and kind < config.impossible_rate + exits:
        return "x"
    if free and kind < config.impossible_rate + exits + config.delete_rate:
        return pick(free)
    if nodes and rng.random() < config.chain_rate:
        return f"c{len(nodes)}"
    return pick(additions(len(nodes)))


def additions(size: int) -> list[str]:
    """The actions that add a node to a graph of ``size`` nodes."""
    return [f"s{k}" for k in range(size + 1)] + [f"c{k}" for k in range(1, size + 1)]


def deletions(nodes: list[str]) -> list[str]:
    """The actions that delete one of ``nodes``, each as the action that added it."""
    heard = {int(node[1]) for node in nodes}
    return [f"d{k}" for k in range(1, len(nodes) + 1) if k not in heard]


def without(nodes: list[str], number: int) -> list[str]:
    """``nodes`` without the one of that ``number``, to which nobody listens; later ones move up by one."""
    kept = nodes[: number - 1] + nodes[number:]
    heard = [int(node[1]) for node in kept]
    return [f"{node[0]}{other - (other > number)}" for node, other in zip(kept, heard, strict=True)]
