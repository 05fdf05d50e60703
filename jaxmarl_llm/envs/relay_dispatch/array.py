"""Relay dispatch: a master routes each hop of a query to a specialist, which reads the last answer. All in JAX.

    turn    role        prompt             a good completion (each ends with eos)
    0       master      Q+3;?ip|c7>        A: a route, the letter of one specialist
    1       add_1       A+3|c7>            c0
    2       master      Q?ip|c0>           H
    3       look_2      H?ip|c0>           c4
    4       master      R|c4>              c4

A value is one of the letters a to h and a digit. An episode of h hops has 2 h + 1 turns: 5 to 11. There are four kinds
of operations, and several spellings of each verb:

    add     + ad up     the digit moves on by 1 to 9 places, modulo 10
    turn    * mv go     the letter moves on by 1 to 7 places, modulo 8
    place   = pt st     the letter becomes the given one
    look    ? of at     the digit becomes the one of the key, two letters, in a table drawn from ``table_seed``

The table of ``look`` can only be learned by trial or read from memory. Each kind has as many specialists as
``mistakes`` has probabilities. They know the same operations and differ in how often their demonstrations are wrong.
The master sees the next ``visible`` operations. An answer is shown as sampled, up to eos or R - 1 tokens.

Rewards, the same for all roles (a team return), at each transition of an episode of h hops:
    accuracy    1 at the last turn if the reply equals the gold answer and ended with eos
    pay         the stake of the query (0.25, 0.5 or 1) where accuracy is 1. High stakes are rare, so that the 97.5 %
                point of a normal fitted to the pay lies inside its range
    format      0.1 / (h + 1) for a route (one letter, then eos), and for a last reply that ended with eos
    efficiency  a cost, positive: 0.1 / (2 h + 1) * sampled tokens / R
Without a readable route the episode ends. A finished state changes no more and earns nothing.

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
from jaxmarl_llm.envs.prompt_grammar import Piece, prompt_row, prompt_text
from jaxmarl_llm.envs.splits import draw_task
from jaxmarl_llm.models.tokenizer import ByteTokenizer

SEP = ByteTokenizer.SEP
KINDS = ("add", "turn", "place", "look")
ADD, TURN, PLACE, LOOK = range(4)
VERBS = (("+", "ad", "up"), ("*", "mv", "go"), ("=", "pt", "st"), ("?", "of", "at"))
LETTERS, DIGITS = "abcdefgh", "0123456789"  # of values
_KEY_LETTERS = "ijklmnopqrstuvwxyz"
KEYS = tuple(a + _KEY_LETTERS[(i + 7) % 18] for i, a in enumerate(_KEY_LETTERS[:16]))  # two share one letter at most
ARGUMENTS = (tuple("123456789"), tuple("1234567"), tuple(LETTERS), KEYS)
FIRST = (0, 9, 16, 24)  # number of each kind's first operation: operations are numbered through all kinds
MARKS = "ABCDEFGHIJKLMNOP"  # of specialists: their routes, and the first character of their prompts
COMPONENTS = ("accuracy", "pay", "format", "efficiency")
STAKES = (0.25, 0.5, 1.0)
LEAST_HOPS, MOST_HOPS = 2, 5
OPERATION, VALUE = 4, 2  # longest operation, length of a value
NEXT = ";"  # between the operations that the master sees


@dataclass(frozen=True)
class Config:
    """The settings of queries, rewards, the local verifier and demonstrations."""

    seed: int = 0  # of the training tasks
    table_seed: int | None = None  # of the table of look; None: ``seed``
    tasks: int = 1024  # training tasks
    hops: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)  # weights of 2, 3, 4 and 5 hops
    mixture: tuple[float, ...] = (1.0, 1.0, 1.0, 0.5)  # weights of KINDS
    stakes: tuple[float, ...] = (6.0, 3.0, 1.0)  # weights of STAKES
    keys: int = 8  # of the table, out of KEYS
    spellings: int = 3  # of each verb that queries use
    visible: int = 2  # operations that the master sees
    response: int = 4  # R
    accuracy: float = 1.0  # reward of a right last reply
    pay: float = 1.0  # factor of the stake of a query
    format: float = 0.1  # of all the master's turns together
    efficiency: float = 0.1  # of all turns together
    verify_noise: tuple[float, ...] = (0.0,)  # probability of a flipped verdict: of each role, or one of all roles
    # Probabilities of mistakes and memory entries in demonstrations.
    mistakes: tuple[float, ...] = (0.1, 0.5)  # of a kind's first specialist, of its second one, ...: 2 to 4 of them
    misroute: float = 0.3  # to a specialist of another kind
    memory: float = 0.5  # a sample has memory entries before its prompt
    related: float = 0.5  # an entry is about the sample's operation

    def check(self, path: str) -> None:
        checks.tasks_and_seed(path, self)
        if self.table_seed is not None:
            checks.at_least(path, self, 0, "table_seed")
        checks.weights(path, self, "hops", tuple(f"{h} hops" for h in range(LEAST_HOPS, MOST_HOPS + 1)))
        checks.weights(path, self, "mixture", KINDS)
        checks.weights(path, self, "stakes", tuple(f"{stake:g}" for stake in STAKES))
        checks.in_range(path, self, 1, len(KEYS), "keys")
        checks.in_range(path, self, 1, len(VERBS[0]), "spellings")
        checks.in_range(path, self, 1, MOST_HOPS, "visible")
        checks.in_range(path, self, VALUE + 1, checks.MOST_TEXT, "response")
        checks.finite(path, self, "accuracy", "pay", "format", "efficiency")
        checks.probabilities(path, self, "misroute", "memory", "related")
        self._check_by_role(path, "mistakes", range(2, 5), "2 to 4 probabilities in [0, 1], of a kind's specialists")
        number = len(roles_of(self))
        expected = f"probabilities in [0, 1]: one for all roles, or one for each of {number} roles"
        self._check_by_role(path, "verify_noise", (1, number), expected)

    def _check_by_role(self, path: str, name: str, sizes: range | tuple[int, ...], expected: str) -> None:
        values = getattr(self, name)
        if len(values) not in sizes or not all(0 <= value <= 1 for value in values):
            checks.refuse(path, name, expected, values)


def roles_of(config: Config) -> tuple[str, ...]:
    """The master, and the specialists kind by kind: add_1, add_2, turn_1 and so on."""
    return ("master", *(f"{kind}_{j + 1}" for kind in KINDS for j in range(len(config.mistakes))))


def most_hops(config: Config) -> int:
    """H: the hops of the longest query."""
    return LEAST_HOPS + max(i for i, weight in enumerate(config.hops) if weight > 0)


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory, Q operations | answer >."""
    return 1 + config.visible * (OPERATION + 1) + (config.response - 1) + 1


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.response + 1


@struct.dataclass
class State:
    """An episode so far."""

    task: dict[str, Array]  # one row of make_tasks
    turn: Int[Array, ""]
    route: Int[Array, ""]  # the specialist's index among the roles, 0 before there is one
    answer: Int[Array, " R-1"]  # the last answer; first the value that the query begins with
    answer_length: Int[Array, ""]
    done: Bool[Array, ""]
    verdict: Bool[Array, ""]  # whether the last move was right, as the local verifier sees it


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``. Nothing is random but the tasks and the verdicts of a noisy verifier."""
    roles = roles_of(config)
    specialists = tuple(range(1, len(roles)))
    return ArrayEnv(
        name="relay_dispatch",
        roles=roles,
        seats=1,
        max_turns=2 * most_hops(config) + 1,
        components=COMPONENTS,
        actors=((0,), *((specialists, (0,)) * most_hops(config))),
        reset=partial(reset, config),
        observe=partial(observe, config),
        step=partial(step, config),
        verify=partial(verify, config),
    )


def reset(config: Config, key: Array, task: Mapping[str, Array]) -> State:
    """The first state of an episode on ``task``, one row of `make_tasks`."""
    rows = jax.tree.map(jnp.asarray, dict(task))
    answer = jnp.full(config.response - 1, PAD, jnp.int32).at[:VALUE].set(rows["values"][0])
    no, zero = jnp.bool_(False), jnp.int32(0)
    return State(rows, zero, zero, answer, jnp.int32(VALUE), done=no, verdict=no)


def observe(config: Config, state: State) -> Observation:
    """The prompt of the role that acts."""
    task, hop, asked = state.task, state.turn // 2, state.turn % 2 == 1
    mark = jnp.where(hop >= task["hops"], ord("R"), encoded("Q" + MARKS)[jnp.where(asked, state.route, 0)])
    subject: list[Piece] = []
    for ahead in range(config.visible):
        at = jnp.minimum(hop + ahead, task["spelled"].shape[0] - 1)
        shown = ((hop + ahead < task["hops"]) & ~(asked & (ahead > 0))).astype(jnp.int32)
        subject += [(encoded(NEXT), shown)] if ahead else []
        subject.append((task["spelled"][at], shown * task["spelled_length"][at]))
    tokens, length = prompt_row(mark, subject, [(True, [(state.answer, state.answer_length)])], prompt_length(config))
    role = jnp.where(asked, state.route, 0)
    return Observation(role=role[None], tokens=tokens[None], length=length[None], active=~state.done[None])


def step(
    config: Config, key: Array, state: State, tokens: Int[Array, "1 R"], length: Int[Array, "1"]
) -> tuple[State, dict[str, Float[Array, " A"]], Bool[Array, ""]]:
    """The state after a completion, the rewards of the turn, and whether the episode has finished.

    ``key``: decides whether the local verifier errs.
    """
    task, R, hop = state.task, config.response, state.turn // 2
    row, sampled, here = tokens[0], jnp.clip(length[0], 0, R), jnp.arange(R)
    asked = state.turn % 2 == 1
    last = ~asked & (hop >= task["hops"])
    ended, size = completion_end(row, sampled)
    letter = row[0] == encoded(MARKS[: len(roles_of(config)) - 1])
    routed = ~asked & ~last & ended & (size == 1) & letter.any()
    chosen = jnp.argmax(letter)
    gold = task["values"][jnp.minimum(hop + asked, task["hops"])]
    right = ended & (size == VALUE) & (row[:VALUE] == gold).all()
    fitting = routed & (chosen // len(config.mistakes) == task["kinds"][jnp.minimum(hop, task["kinds"].shape[0] - 1)])
    rewards = _rewards(
        config,
        config.accuracy * (last & right),
        config.pay * (last & right) * task["stake"],
        config.format * (routed | (last & ended)) / (task["hops"] + 1),
        config.efficiency / R * sampled / (2 * task["hops"] + 1),
    )
    acting = jnp.where(asked, state.route, 0)
    noise = jnp.broadcast_to(jnp.array(config.verify_noise, jnp.float32), len(roles_of(config)))[acting]
    after = State(
        task=task,
        turn=state.turn + 1,
        route=jnp.where(routed, 1 + chosen, state.route).astype(jnp.int32),
        answer=jnp.where(asked, jnp.where(here < size, row, PAD)[:-1], state.answer),
        answer_length=jnp.where(asked, jnp.minimum(size, R - 1), state.answer_length).astype(jnp.int32),
        done=last | (~asked & ~last & ~routed),
        verdict=jnp.where(asked | last, right, fitting) ^ (jax.random.uniform(key) < noise),
    )
    return unless_finished(state, after, rewards)


def verify(config: Config, state: State) -> dict[str, Float[Array, " A"]]:
    """The accuracy and pay of the last move alone: the route's kind, the specialist's answer, the reply.

    With a probability of ``verify_noise`` of the role that made the move, the verdict is the opposite.
    """
    right = state.verdict
    return _rewards(config, config.accuracy * right, config.pay * right * state.task["stake"], 0.0, 0.0)


def _rewards(config: Config, *values: Array | float) -> dict[str, Float[Array, " A"]]:
    """The rewards of all roles, from one value for each of COMPONENTS."""
    return {name: to_all(roles_of(config), value) for name, value in zip(COMPONENTS, values, strict=True)}


# -- tasks -------------------------------------------------------------------------------------------------------------


def table(seed: int | np.random.Generator) -> np.ndarray:
    """A table of look drawn from ``seed``: the digit of each of KEYS. That of an environment is `secret`."""
    return np.random.default_rng(seed).integers(len(DIGITS), size=len(KEYS))


def secret(config: Config) -> np.ndarray:
    """The table of an environment."""
    return table(config.seed if config.table_seed is None else config.table_seed)


def result(kind: int, argument: int, value: str, digits: np.ndarray) -> str:
    """The value that an operation makes of ``value``.

    argument: its place in ARGUMENTS[kind]
    digits: a `table`
    """
    letter, digit = LETTERS.index(value[0]), int(value[1])
    if kind == ADD:
        digit = (digit + argument + 1) % len(DIGITS)
    elif kind == TURN:
        letter = (letter + argument + 1) % len(LETTERS)
    elif kind == PLACE:
        letter = argument
    else:
        digit = int(digits[argument])
    return f"{LETTERS[letter]}{digit}"


@dataclass(frozen=True)
class Query:
    """A query without its answer: what makes a task itself, and how it is spelled."""

    start: str
    operations: tuple[tuple[int, int], ...]  # kind and argument of each hop
    spellings: tuple[int, ...]  # of each hop's verb

    @property
    def content(self) -> str:
        """What makes the task itself: the start and the operations, in one spelling."""
        return " ".join([self.start, *(spell(kind, argument, 0) for kind, argument in self.operations)])

    @property
    def spelled(self) -> list[str]:
        """The text of each operation."""
        return [spell(*operation, s) for operation, s in zip(self.operations, self.spellings, strict=True)]

    def values(self, digits: np.ndarray) -> list[str]:
        """The start, and the value behind each hop. ``digits``: a `table`."""
        out = [self.start]
        for kind, argument in self.operations:
            out.append(result(kind, argument, out[-1], digits))
        return out


def spell(kind: int, argument: int, spelling: int) -> str:
    """The text of an operation: ``kind``, ``argument`` and ``spelling`` are indices."""
    return VERBS[kind][spelling] + ARGUMENTS[kind][argument]


def random_operation(rng: np.random.Generator, config: Config, kind: int) -> tuple[int, int, int]:
    """Kind, argument and spelling of a random operation of ``kind``."""
    options = config.keys if kind == LOOK else len(ARGUMENTS[kind])
    return kind, int(rng.integers(options)), int(rng.integers(config.spellings))


def random_value(rng: np.random.Generator) -> str:
    """Draw a random value: a letter and a digit."""
    return f"{LETTERS[rng.integers(len(LETTERS))]}{rng.integers(len(DIGITS))}"


def random_query(rng: np.random.Generator, config: Config) -> Query:
    """A random query, from either side of the split."""
    p, lengths = (np.array(weights) / sum(weights) for weights in (config.mixture, config.hops))
    hops = LEAST_HOPS + rng.choice(len(lengths), p=lengths)
    rows = [random_operation(rng, config, int(kind)) for kind in rng.choice(len(KINDS), hops, p=p)]
    return Query(random_value(rng), tuple((k, a) for k, a, _ in rows), tuple(s for _, _, s in rows))


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``). ``held_out``: the side of the split.

    The columns are hops [n], kinds [n H], spelled [n H 4], spelled_length [n H], values [n H+1 2], stake [n], and
    meaning [n H+1]. The values are the start, and the value behind each hop. The meaning holds the numbers of the start
    and of each operation, which make the task itself. Columns are -1, PAD or 0 behind the last hop.
    """
    rng, size = task_draws(config, seed, n, 1, held_out)
    digits, H = secret(config), most_hops(config)
    draw = lambda: random_query(rng, config)
    queries = [draw_task(draw, lambda query: query.content, held_out) for _ in range(size)]
    stakes = rng.choice(STAKES, size, p=np.array(config.stakes) / sum(config.stakes)).astype(np.float32)
    behind = lambda row, width: [*row, *[-1] * (width - len(row))]
    texts = [text for q in queries for text in [*q.spelled, *[""] * (H - len(q.operations))]]
    spelled, spelled_length = pack([text.encode() for text in texts], OPERATION)
    values = [value for q in queries for value in [*q.values(digits), *[""] * (H - len(q.operations))]]
    start = lambda value: 10 * LETTERS.index(value[0]) + int(value[1])
    numbers = [[start(q.start), *(FIRST[kind] + argument for kind, argument in q.operations)] for q in queries]
    return dict(
        hops=np.array([len(q.operations) for q in queries], np.int32),
        kinds=np.array([behind([kind for kind, _ in q.operations], H) for q in queries], np.int32),
        spelled=spelled.reshape(size, H, OPERATION),
        spelled_length=spelled_length.reshape(size, H),
        values=pack([value.encode() for value in values], VALUE)[0].reshape(size, H + 1, VALUE),
        stake=stakes,
        meaning=np.array([behind(row, H + 1) for row in numbers], np.int32),
    )


def parts(config: Config, tasks: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parts of the held-out tasks [n] that are reported apart: with a look, whose table has to be known, and without.

    No task of either part is a training task. The keys of the first part are in training tasks.
    """
    looks = (tasks["kinds"] == LOOK).any(1)
    return {"with_look": looks, "without_look": ~looks}


# -- demonstrations ----------------------------------------------------------------------------------------------------


def demonstrations(config: Config, seed: int, n: int, *, context: int = 2, noise: float = 1.0) -> Samples:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    P = prompt_length + context * entry_length. The master's samples are of the hops and the last turns of training
    tasks. It chooses one of a kind's specialists at random, and one of another kind with probability ``misroute``. A
    specialist's samples are single operations; a share of ``mistakes`` is answered by another random value. Both
    probabilities are scaled by ``noise``. A share ``memory`` of the prompts has 1 to ``context`` entries before it,
    without mistakes. With probability ``related`` an entry is of the same operation, in any spelling and with any last
    answer. The environment's table is never used: each sample invents one, so that a look is a random digit, or repeats
    an entry.
    """
    size = prompt_length(config) + context * entry_length(config)
    out = {}
    for role, name in enumerate(roles_of(config)):
        pairs = list(_demonstrated(config, seed, n, role, context, noise))
        out[name] = samples([asked for asked, _ in pairs], [reply for _, reply in pairs], size, config.response)
    return out


def _demonstrated(
    config: Config, seed: int, n: int, role: int, context: int, noise: float
) -> Iterator[tuple[list[int], list[int]]]:
    """The ``n`` samples of ``role`` (an index), as token ids of prompt and completion; see `demonstrations`."""
    rng = np.random.default_rng([seed, 2, role])
    make_one = partial(_specialist_sample, role=role) if role else _master_sample
    for _ in range(n):
        digits, prompt = table(rng), []
        shown = make_one(rng, config, digits, noise)
        reply = shown.reply
        for _ in range(rng.integers(1, context + 1) if context and rng.random() < config.memory else 0):
            about = shown.operation if rng.random() < config.related else None
            entry = make_one(rng, config, digits, 0.0, about)
            prompt += [*entry.prompt.encode(), *entry.reply.encode(), SEP]
            # A master that chooses the right kind chooses the specialist of the entry.
            if role == 0 and about is not None and _kind(config, shown.reply) == about[0]:
                reply = entry.reply
        yield [*prompt, *shown.prompt.encode()], [*reply.encode(), EOS]


@dataclass(frozen=True)
class _Sample:
    """A prompt, a reply, and the kind and argument that the prompt is about; None: a last reply of the master."""

    prompt: str
    reply: str
    operation: tuple[int, int] | None


def _kind(config: Config, route: str) -> int:
    """The kind that the specialist of a ``route`` serves."""
    return MARKS.index(route) // len(config.mistakes)


def _master_sample(
    rng: np.random.Generator,
    config: Config,
    digits: np.ndarray,
    noise: float,
    operation: tuple[int, int] | None = None,
) -> _Sample:
    """A turn of the master in a training task.

    digits: a `table`
    noise: scales the probability of a wrong kind
    operation: kind and argument of the turn's operation; None: any, or the last turn
    """

    def draw() -> tuple[Query, int]:
        query = random_query(rng, config)
        hop = int(rng.integers(len(query.operations) + (operation is None)))
        if operation is not None:
            rows = (*query.operations[:hop], operation, *query.operations[hop + 1 :])
            query = Query(query.start, rows, query.spellings)
        return query, hop

    query, hop = draw_task(draw, lambda drawn: drawn[0].content, held_out=False)
    last, each = query.values(digits)[hop], len(config.mistakes)
    if hop == len(query.operations):
        return _Sample(prompt_text("R", "", [last]), last, None)
    kind = query.operations[hop][0]
    if rng.random() < noise * config.misroute:
        kind = (kind + int(rng.integers(1, len(KINDS)))) % len(KINDS)
    prompt = prompt_text("Q", NEXT.join(query.spelled[hop : hop + config.visible]), [last])
    return _Sample(prompt, MARKS[kind * each + int(rng.integers(each))], query.operations[hop])


def _specialist_sample(
    rng: np.random.Generator,
    config: Config,
    digits: np.ndarray,
    noise: float,
    operation: tuple[int, int] | None = None,
    *,
    role: int,
) -> _Sample:
    """One operation of the kind of specialist ``role`` (an index among the roles); arguments as `_master_sample`."""
    kind, number = divmod(role - 1, len(config.mistakes))
    _, argument, spelling = random_operation(rng, config, kind)
    argument = argument if operation is None else operation[1]
    value = random_value(rng)
    gold = answer = result(kind, argument, value, digits)
    wrong = rng.random() < noise * config.mistakes[number]
    while wrong and answer == gold:
        answer = random_value(rng)
    return _Sample(prompt_text(MARKS[role - 1], spell(kind, argument, spelling), [value]), answer, (kind, argument))
