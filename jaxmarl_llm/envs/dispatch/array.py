"""Dispatch: a master routes a query to one of four specialists, reads the answer and replies. All in JAX.

    turn  role        prompt                 a good completion (each ends with eos)
    0     master      Qset x 4>              f: a route, one of the letters a l f t
    1     function    fset x 4>              x(4)
    2     master      Rset x 4|x(4)>         x(4)

Queries: ``arithmetic`` 6*8; ``lookup`` cap?k, whose value stands in a table drawn from ``table_seed`` and can only be
learned by trial or read from memory; ``function`` set x 4 -> x(4), add x 4 -> x(+4), cut x 4 -> x(-4); ``transform``
rev abc -> cba, dup ab -> abab, rot abc -> bca. What the specialist said is shown as sampled, up to eos or R - 1 tokens.

Rewards, the same for all roles (a team return), at each transition:
    accuracy    1 at turn 2 if the reply equals the gold answer and ended with eos
    format      0.25 at turn 0 for a route (one letter, then eos); 0.25 at turn 2 for a reply that ended with eos
    efficiency  a cost, positive: 0.1 * sampled tokens / R
Without a readable route the episode ends at turn 0. A finished state changes no more and earns nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from jaxmarl_llm.envs.arrays import encoded, join, pack, samples
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer
from jaxmarl_llm.types import ArrayEnv, Observation

PAD, EOS, SEP = ByteTokenizer.PAD, ByteTokenizer.EOS, ByteTokenizer.SEP
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
Samples = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Config:
    seed: int = 0  # of the training tasks
    table_seed: int = 0  # of the lookup table
    tasks: int = 1024
    mixture: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # weights of KINDS
    response: int = 7  # R
    accuracy: float = 1.0
    format: float = 0.25
    efficiency: float = 0.1
    # Demonstrators: probabilities.
    misroute: float = 0.6  # a function query is sent to transform
    wrong_product: float = 0.5  # a product is answered by a wrong random number
    rot_as_rev: float = 0.55  # rot is done as rev
    memory: float = 0.5  # a sample has memory entries before its prompt
    related: float = 0.5  # an entry is about the sample's query

    def __post_init__(self):
        if self.response <= ANSWER:
            raise ConfigError(f"dispatch: response is {self.response}; answers need at least {ANSWER + 1} tokens")
        if len(self.mixture) != len(KINDS) or min(self.mixture) < 0 or sum(self.mixture) <= 0:
            raise ConfigError(f"dispatch: mixture is {self.mixture}; give a weight for each of {', '.join(KINDS)}")
        for name in ("misroute", "wrong_product", "rot_as_rev", "memory", "related"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"dispatch: {name} is {getattr(self, name)}; a probability lies in [0, 1]")


def prompt_length(config: Config) -> int:
    """P without memory: R query | answer >."""
    return 1 + QUERY + 1 + (config.response - 1) + 1


def entry_length(config: Config) -> int:
    """The longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.response + 1


@struct.dataclass
class State:
    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    route: Int[Array, ""]  # the specialist's index in ROLES, 0 before there is one
    said: Int[Array, "R-1"]  # the specialist's answer
    said_length: Int[Array, ""]
    done: Bool[Array, ""]
    verdict: Bool[Array, ""]  # whether the last move was right


def make(config: Config) -> ArrayEnv:
    """Nothing is random but the tasks: keys are not used."""
    P, R, A = prompt_length(config), config.response, len(ROLES)

    def rewards(*values) -> dict[str, Float[Array, "A"]]:
        return {name: jnp.full(A, value, jnp.float32) for name, value in zip(COMPONENTS, values, strict=True)}

    def reset(key: Array, task: dict[str, Array]) -> State:
        zero, no, said = jnp.int32(0), jnp.bool_(False), jnp.full(R - 1, PAD, jnp.int32)
        task = jax.tree.map(jnp.int32, task)
        return State(task=task, turn=zero, route=zero, said=said, said_length=zero, done=no, verdict=no)

    def observe(state: State) -> Observation:
        task, second, last = state.task, state.turn == 1, state.turn >= 2
        head = jnp.where(second, encoded("Q" + ROUTES)[state.route], jnp.where(last, ord("R"), ord("Q")))
        said = [(encoded("|"), last.astype(jnp.int32)), (state.said, jnp.where(last, state.said_length, 0))]
        tokens, length = join([(head[None], 1), (task["query"], task["query_length"]), *said, (encoded(">"), 1)], P)
        role = jnp.where(second, state.route, 0)
        return Observation(role=role[None], tokens=tokens[None], length=length[None], active=~state.done[None])

    def step(key: Array, state: State, tokens: Int[Array, "W R"], length: Int[Array, "W"]):
        task, tokens, length, here = state.task, tokens[0], jnp.clip(length[0], 0, R), jnp.arange(R)
        first, second, last = (state.turn == turn for turn in range(3))
        stops = (tokens == EOS) & (here < length)
        ended = stops.any()
        size = jnp.where(ended, jnp.argmax(stops), length).astype(jnp.int32)  # without eos
        letter = tokens[0] == encoded(ROUTES)
        routed = ended & (size == 1) & letter.any()
        same = (tokens[:ANSWER] == task["answer"]) | (here[:ANSWER] >= size)
        right = ended & (size == task["answer_length"]) & same.all()
        form = (first & routed) | (last & ended)
        earned = rewards(config.accuracy * (last & right), config.format * form, config.efficiency / R * length)
        moved = State(
            task=task,
            turn=state.turn + 1,
            route=jnp.where(first & routed, 1 + jnp.argmax(letter), state.route).astype(jnp.int32),
            said=jnp.where(second, jnp.where(here < size, tokens, PAD)[:-1], state.said),
            said_length=jnp.where(second, jnp.minimum(size, R - 1), state.said_length),
            done=last | (first & ~routed),
            verdict=jnp.where(first, routed & letter[task["kind"]], right),
        )
        moved = jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, moved)
        return moved, jax.tree.map(lambda r: jnp.where(state.done, 0.0, r), earned), moved.done

    def verify(state: State) -> dict[str, Float[Array, "A"]]:
        """Accuracy of the last move alone: the route, the specialist's answer, the reply."""
        return rewards(config.accuracy * state.verdict, 0.0, 0.0)

    return ArrayEnv("dispatch", ROLES, 1, 3, COMPONENTS, ((0,), (1, 2, 3, 4), (0,)), reset, observe, step, verify)


def table(seed: int | np.random.Generator) -> np.ndarray:
    """A lookup table: for each letter a two-digit number, all different. The secret one is table(table_seed)."""
    return VALUES.start + np.random.default_rng(seed).permutation(len(VALUES))[: len(LETTERS)]


def draw(
    rng: np.random.Generator, config: Config, kind: int, values: np.ndarray, noise: float = 0.0
) -> tuple[str, str, str]:
    """A query, its answer, and what a demonstrator answers (the same without ``noise``). values: a lookup `table`."""
    pick = lambda options: options[rng.integers(len(options))]
    slip, rate = "", 0.0  # a wrong answer, and how often it is given
    if kind == ARITHMETIC:
        operator, x, y, other = pick("+-*"), *rng.integers(10, size=2), rng.integers(81)
        x, y = (max(x, y), min(x, y)) if operator == "-" else (x, y)
        query, gold = f"{x}{operator}{y}", {"+": x + y, "-": x - y, "*": x * y}[operator]
        slip, rate = str(other + (other >= gold)), config.wrong_product * (operator == "*")  # of 0..81, but gold
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
        slip, rate = word[::-1], config.rot_as_rev * (edit == "rot")
    return query, str(gold), str(slip if rng.random() < noise * rate else gold)


def make_tasks(config: Config, seed: int | None = None, n: int | None = None) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``); take another seed for evaluation.

    kind [n], query [n Lq], query_length [n], answer [n La], answer_length [n]. Lookup has only 26 different queries.
    """
    rng, values = np.random.default_rng([config.seed if seed is None else seed, 1]), table(config.table_seed)
    size, p = config.tasks if n is None else n, np.array(config.mixture) / sum(config.mixture)
    kinds = rng.choice(len(KINDS), size, p=p).astype(np.int32)
    draws = [draw(rng, config, kind, values) for kind in kinds]
    query, query_length = pack([query.encode() for query, _, _ in draws], QUERY)
    answer, answer_length = pack([gold.encode() for _, gold, _ in draws], ANSWER)
    return dict(kind=kinds, query=query, query_length=query_length, answer=answer, answer_length=answer_length)


def query_text(tasks: dict[str, np.ndarray], i: int) -> str:
    return ByteTokenizer().decode(tasks["query"][i])  # padding is no text


def _show(role: int, kind: int, query: str, said: str, late: bool) -> tuple[bytes, bytes]:
    """A role's prompt and completion; for the master, ``kind`` is that of the specialist it chooses."""
    if role == 0 and not late:
        return f"Q{query}>".encode(), ROUTES[kind].encode()
    return (f"{ROUTES[kind]}{query}>" if role else f"R{query}|{said}>").encode(), said.encode()


def demonstrations(config: Config, seed: int, n: int, *, context: int = 2, noise: float = 1.0) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    P = prompt_length + context * entry_length. The mistakes are systematic (``misroute``, ``wrong_product``,
    ``rot_as_rev``, all scaled by ``noise``), so imitation, greedy or not, solves at most 60 % of an even mixture. Half
    of the master's samples are routes, half replies that repeat the specialist (who, misled, speaks of another query).
    Entries, 1 to ``context`` before a share ``memory`` of the prompts, are without mistakes. The secret table is never
    used: each sample invents one, so that looked-up values are random, or repeat an entry of the same key.
    """
    out = {}
    for role, name in enumerate(ROLES):
        rng, prompts, completions = np.random.default_rng([seed, 2, role]), [], []
        p = np.eye(len(KINDS))[role - 1] if role else np.array(config.mixture) / sum(config.mixture)
        for kind in (kinds := rng.choice(len(KINDS), n, p=p)):
            values, late, prompt = table(rng), bool(rng.integers(2)), []
            query, gold, said = draw(rng, config, kind, values, noise)
            for _ in range(rng.integers(1, context + 1) if context and rng.random() < config.memory else 0):
                entry = (kind, query, gold, late)
                if rng.random() >= config.related:
                    other = kinds[rng.integers(n)]
                    entry = (other, *draw(rng, config, other, values)[:2], bool(rng.integers(2)))
                asked, reply = _show(role, *entry)
                prompt += [*asked, *reply, SEP]
            if role == 0 and kind == FUNCTION and rng.random() < noise * config.misroute:
                kind, said = TRANSFORM, draw(rng, config, TRANSFORM, values, noise)[2]
            asked, reply = _show(role, kind, query, said, late)
            prompts.append([*prompt, *asked])
            completions.append([*reply, EOS])
        out[name] = samples(
            prompts, completions, prompt_length(config) + context * entry_length(config), config.response
        )
    return out
