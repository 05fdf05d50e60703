"""Dispatch: a master routes a query to one of four specialists, reads the answer and replies. All in JAX.

    turn  role        prompt                 a good completion (each ends with eos)
    0     master      Qset x 4>              f: a route, one of the letters a l f t
    1     function    fset x 4>              x(4)
    2     master      Rset x 4|x(4)>         x(4)

There are four kinds of queries. ``arithmetic``: 6*8. ``lookup``: cap?k, whose value stands in a table drawn from
``table_seed`` and can only be learned by trial or read from memory. ``function``: set x 4 -> x(4), add x 4 -> x(+4),
cut x 4 -> x(-4). ``transform``: rev abc -> cba, dup ab -> abab, rot abc -> bca. The specialist's answer is shown as
sampled, up to eos or R - 1 tokens.

Rewards, the same for all roles (a team return), at each transition:
    accuracy    1 at turn 2 if the reply equals the gold answer and ended with eos
    format      0.25 at turn 0 for a route (one letter, then eos); 0.25 at turn 2 for a reply that ended with eos
    efficiency  a cost, positive: 0.1 * sampled tokens / R
Without a readable route the episode ends at turn 0. A finished state changes no more and earns nothing.

Shared arguments: ``config`` has the settings, ``key`` is a PRNG key, and ``state`` the state of an episode. ``tokens``
[1 R] are completions, and ``length`` [1] their numbers of tokens. ``seed`` and ``rng`` (NumPy) determine tasks and
demonstrations. ``n`` is the number of samples of a role, and ``held_out`` the side of the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.array_env import (
    EOS,
    PAD,
    ArrayEnv,
    Observation,
    Samples,
    completion_end,
    encoded,
    pack,
    samples,
    task_draws,
    to_all,
    unless_finished,
)
from jaxmarl_llm.envs.prompt_grammar import prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task
from jaxmarl_llm.models.tokenizer import ByteTokenizer

SEP = ByteTokenizer.SEP
ROLES = ("master", "arithmetic", "lookup", "function", "transform")
KINDS = ROLES[1:]
ARITHMETIC, LOOKUP, FUNCTION, TRANSFORM = range(4)
ROUTES = "alft"
COMPONENTS = ("accuracy", "format", "efficiency")
LETTERS = "abcdefghijklmnopqrstuvwxyz"  # keys of lookups
WORDS = "abcdefgh"  # letters of transforms
VALUES = range(10, 40)  # of the lookup table
SIGNS = {"set": "", "add": "+", "cut": "-"}  # what the verbs of function queries put before the digit
QUERY, ANSWER = 7, 5  # longest query and answer


@dataclass(frozen=True)
class Config:
    """The settings of queries, rewards and demonstrations."""

    seed: int = 0  # of the training tasks
    table_seed: int | None = None  # of the lookup table; None: ``seed``
    tasks: int = 1024  # training tasks
    mixture: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # weights of KINDS
    response: int = 7  # R
    accuracy: float = 1.0  # reward of a right reply
    format: float = 0.25  # reward of a readable route, and of an ended reply
    efficiency: float = 0.1  # cost of a completion of full length
    # Probabilities of mistakes and memory entries in demonstrations.
    misroute: float = 0.6  # a function query is sent to transform
    wrong_product: float = 0.5  # a product is answered by a wrong random number
    rot_as_rev: float = 0.55  # rot is done as rev
    memory: float = 0.5  # a sample has memory entries before its prompt
    related: float = 0.5  # an entry is about the sample's query

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        if self.table_seed is not None:
            checks.at_least(path, self, 0, "table_seed")
        checks.weights(path, self, "mixture", KINDS)
        checks.in_range(path, self, ANSWER + 1, checks.MOST_TEXT, "response")
        checks.finite(path, self, "accuracy", "format", "efficiency")
        checks.probabilities(path, self, "misroute", "wrong_product", "rot_as_rev", "memory", "related")


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory, R query | answer >."""
    return 1 + QUERY + 1 + (config.response - 1) + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.response + 1


@struct.dataclass
class State:
    """An episode so far."""

    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    route: Int[Array, ""]  # the specialist's index in ROLES, 0 before there is one
    answer: Int[Array, " R-1"]  # the specialist's
    answer_length: Int[Array, ""]
    done: Bool[Array, ""]
    verdict: Bool[Array, ""]  # whether the last move was right


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks: keys are not used."""
    return ArrayEnv(
        name="dispatch",
        roles=ROLES,
        seats=1,
        max_turns=3,
        components=COMPONENTS,
        actors=((0,), (1, 2, 3, 4), (0,)),
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
        verify=partial(verify, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    zero, no, answer = jnp.int32(0), jnp.bool_(False), jnp.full(config.response - 1, PAD, jnp.int32)
    rows = jax.tree.map(jnp.int32, task)
    return State(task=rows, turn=zero, route=zero, answer=answer, answer_length=zero, done=no, verdict=no)


def observe(config: Config, state: State) -> Observation:
    """The prompt of the role that acts."""
    task, second, last = state.task, state.turn == 1, state.turn >= 2
    mark = jnp.where(second, encoded("Q" + ROUTES)[state.route], jnp.where(last, ord("R"), ord("Q")))
    entries = [(last, [(state.answer, state.answer_length)])]
    tokens, length = prompt_row(mark, [(task["query"], task["query_length"])], entries, prompt_length(config))
    role = jnp.where(second, state.route, 0)
    return Observation(role=role[None], tokens=tokens[None], length=length[None], active=~state.done[None])


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished."""
    task, R = state.task, config.response
    row, sampled, here = tokens[0], jnp.clip(length[0], 0, R), jnp.arange(R)
    first, second, last = (state.turn == turn for turn in range(3))
    ended, size = completion_end(row, sampled)
    letter = row[0] == encoded(ROUTES)
    routed = ended & (size == 1) & letter.any()
    same = (row[:ANSWER] == task["answer"]) | (here[:ANSWER] >= size)
    right = ended & (size == task["answer_length"]) & same.all()
    form = (first & routed) | (last & ended)
    rewards = _rewards(config.accuracy * (last & right), config.format * form, config.efficiency / R * sampled)
    after = State(
        task=task,
        turn=state.turn + 1,
        route=jnp.where(first & routed, 1 + jnp.argmax(letter), state.route).astype(jnp.int32),
        answer=jnp.where(second, jnp.where(here < size, row, PAD)[:-1], state.answer),
        answer_length=jnp.where(second, jnp.minimum(size, R - 1), state.answer_length),
        done=last | (first & ~routed),
        verdict=jnp.where(first, routed & letter[task["kind"]], right),
    )
    return unless_finished(state, after, rewards)


def verify(config: Config, state: State) -> dict[str, Float[Array, " A"]]:
    """The accuracy of the last move alone: the route, the specialist's answer, the reply."""
    return _rewards(config.accuracy * state.verdict, 0.0, 0.0)


def _rewards(*values: Array | float) -> dict[str, Float[Array, " A"]]:
    """The rewards of all roles, from one value for each of COMPONENTS."""
    return {name: to_all(ROLES, value) for name, value in zip(COMPONENTS, values, strict=True)}


def table(seed: int | np.random.Generator) -> np.ndarray:
    """A lookup table drawn from ``seed``: for each letter a two-digit number, all different.

    The secret table of an environment is `secret`.
    """
    return VALUES.start + np.random.default_rng(seed).permutation(len(VALUES))[: len(LETTERS)]


def secret(config: Config) -> np.ndarray:
    """The lookup table of an environment."""
    return table(config.seed if config.table_seed is None else config.table_seed)


def draw(
    rng: np.random.Generator, config: Config, kind: int, values: np.ndarray, noise: float = 0.0
) -> tuple[str, str, str]:
    """A random query of ``kind``, its answer, and a demonstrator's answer.

    values: a lookup `table`
    noise: scales the probabilities of the demonstrator's mistakes; without noise both answers are the same
    """
    pick = lambda options: options[rng.integers(len(options))]
    mistake, probability = "", 0.0
    if kind == ARITHMETIC:
        operator, x, y, other = pick("+-*"), *rng.integers(10, size=2), rng.integers(81)
        x, y = (max(x, y), min(x, y)) if operator == "-" else (x, y)
        query, gold = f"{x}{operator}{y}", {"+": x + y, "-": x - y, "*": x * y}[operator]
        mistake = str(other + (other >= gold))  # of 0..81, but gold
        probability = config.wrong_product * (operator == "*")
    elif kind == LOOKUP:
        key = rng.integers(len(LETTERS))
        query, gold = f"cap?{LETTERS[key]}", values[key]
    elif kind == FUNCTION:
        verb, device, digit = pick(tuple(SIGNS)), pick("uvwxyz"), rng.integers(10)
        query, gold = f"{verb} {device} {digit}", f"{device}({SIGNS[verb]}{digit})"
    else:
        edit, word = pick(("rev", "dup", "rot")), "".join(WORDS[i] for i in rng.permutation(len(WORDS))[:3])
        word = word[:2] if edit == "dup" else word
        query, gold = f"{edit} {word}", {"rev": word[::-1], "dup": 2 * word, "rot": word[1:] + word[0]}[edit]
        mistake, probability = word[::-1], config.rot_as_rev * (edit == "rot")
    return query, str(gold), str(mistake if rng.random() < noise * probability else gold)


def drawn(
    rng: np.random.Generator,
    config: Config,
    kind: int,
    values: np.ndarray,
    noise: float = 0.0,
    held_out: bool = False,
) -> tuple[str, str, str]:
    """Draw a query from one side of the split. Arguments and results are those of `draw`.

    The query makes a task itself. Lookup queries are on both sides: their answers are a secret table that only training
    can show.
    """
    once = lambda: draw(rng, config, kind, values, noise)
    return once() if kind == LOOKUP else draw_task(once, lambda task: task[0], held_out)


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``). ``held_out``: the side of the split.

    kind [n], query [n Lq], query_length [n], answer [n La], answer_length [n]. Lookup has only 26 different queries.
    """
    rng, size = task_draws(config, seed, n, 1, held_out)
    values, p = secret(config), np.array(config.mixture) / sum(config.mixture)
    kinds = rng.choice(len(KINDS), size, p=p).astype(np.int32)
    draws = [drawn(rng, config, kind, values, held_out=held_out) for kind in kinds]
    query, query_length = pack([query.encode() for query, _, _ in draws], QUERY)
    answer, answer_length = pack([gold.encode() for _, gold, _ in draws], ANSWER)
    return dict(kind=kinds, query=query, query_length=query_length, answer=answer, answer_length=answer_length)


def parts(config: Config, tasks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parts of the held-out tasks [n] that are reported apart: lookups, which training saw, and unseen queries."""
    return {"seen": tasks["kind"] == LOOKUP, "unseen": tasks["kind"] != LOOKUP}


def query_text(tasks: dict[str, np.ndarray], i: int) -> str:
    """The query of task ``i`` of ``tasks``."""
    return ByteTokenizer().decode(tasks["query"][i])  # padding is no text


def _demonstration(role: int, kind: int, query: str, answer: str, late: bool) -> tuple[bytes, bytes]:
    """A prompt and completion of ``role``.

    kind: that of the query, for the master that of the specialist it chooses
    answer: the specialist's
    late: whether the master replies, rather than routes
    """
    if role == 0 and not late:
        return prompt_text("Q", query).encode(), ROUTES[kind].encode()
    asked = prompt_text(ROUTES[kind], query) if role else prompt_text("R", query, [answer])
    return asked.encode(), answer.encode()


def demonstrations(config: Config, seed: int, n: int, *, context: int = 2, noise: float = 1.0) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    P = prompt_length + context * entry_length. The mistakes are systematic (``misroute``, ``wrong_product``,
    ``rot_as_rev``, all scaled by ``noise``), so imitation, greedy or not, solves at most 60 % of an even mixture. Half
    of the master's samples are routes. The other half are replies that repeat the specialist, who after a wrong route
    answers another query. A share ``memory`` of the prompts has 1 to ``context`` entries before it, which are without
    mistakes. The secret table is never used: each sample invents one, so that looked-up values are random, or repeat
    an entry of the same key.
    """
    out = {}
    for role, name in enumerate(ROLES):
        pairs = list(_demonstrated(config, seed, n, role, context, noise))
        size = prompt_length(config) + context * entry_length(config)
        out[name] = samples([asked for asked, _ in pairs], [reply for _, reply in pairs], size, config.response)
    return out


def _demonstrated(
    config: Config, seed: int, n: int, role: int, context: int, noise: float
) -> Iterator[tuple[list[int], list[int]]]:
    """The ``n`` samples of ``role`` (an index), as token ids of prompt and completion; see `demonstrations`."""
    rng = np.random.default_rng([seed, 2, role])
    p = np.eye(len(KINDS))[role - 1] if role else np.array(config.mixture) / sum(config.mixture)
    for kind in (kinds := rng.choice(len(KINDS), n, p=p)):
        values, late, prompt = table(rng), bool(rng.integers(2)), []
        query, gold, answer = drawn(rng, config, kind, values, noise)
        for _ in range(rng.integers(1, context + 1) if context and rng.random() < config.memory else 0):
            entry = (kind, query, gold, late)
            if rng.random() >= config.related:
                other = kinds[rng.integers(n)]
                entry = (other, *drawn(rng, config, other, values)[:2], bool(rng.integers(2)))
            asked, reply = _demonstration(role, *entry)
            prompt += [*asked, *reply, SEP]
        if role == 0 and kind == FUNCTION and rng.random() < noise * config.misroute:
            kind, answer = TRANSFORM, drawn(rng, config, TRANSFORM, values, noise)[2]
        asked, reply = _demonstration(role, kind, query, answer, late)
        yield [*prompt, *asked], [*reply, EOS]
