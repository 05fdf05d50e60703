"""Chain: sums and differences of small numbers, modulo ten, worked out by teams under several protocols. All in JAX.

A question is a chain such as 3+4-2; its answer is one digit, (3 + 4 - 2) mod ``modulus``. ``filler`` plants that many
letters in front of one of its numbers (3+xk4-2), which mean nothing. Protocols, and who speaks at which turn:

    solo     solver      S3+4-2>           5
    verify   solver      S3+4-2>           9       at most ``rounds`` attempts; the verifier is skipped after the last
             verifier    V3+4-2|9>         n       y accepts and ends the episode, n (and what is neither) rejects
             solver      S3+4-2|9n>        5       sees its earlier attempts and their verdicts
    refine   generator   G3+4-2>           9       three roles in sequence, each once
             verifier    V3+4-2|9>         n
             refiner     F3+4-2|9n>        5
    meta     meta        M3+4-2>           3+4     a hint: what to do next; with ! at its end, the reply is final
             reasoner    R3+4-2|3+4>       7       sees the question and the hint
             meta        M3+4-2|7>         7-2!    sees the earlier replies; at most ``rounds`` hints
             reasoner    R3+4-2|7-2!>      5       with ``rounds`` 1 every reply is final

A completion ends with eos. An answer is one digit, a verdict y or n, a hint 1 to 4 of the characters 0-9 + - !. Any
other completion is malformed: it is shown as ``?``, a hint of that kind is not final, and a verdict does not accept.

Rewards. The episode is finished by its last answer, in ``meta`` only by one that was final; then
    accuracy   ``accuracy`` to all roles at the last turn, if the last answer is right
    format     ``format`` to all roles at the last turn, if no completion of the episode was malformed
    invalid    -``invalid`` to the role that acts, at a malformed completion
    shaping    in ``meta`` with one round: -``shaping`` to the meta-thinker for a hint that is a bare digit (it answers
               instead of planning), +``shaping`` to the reasoner for a well-formed answer
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs.arrays import encoded, join, pack, samples
from jaxmarl_llm.text import ConfigError
from jaxmarl_llm.tokenizer import ByteTokenizer
from jaxmarl_llm.types import ArrayEnv, Observation

PAD, EOS = ByteTokenizer.PAD, ByteTokenizer.EOS
COMPONENTS = ("accuracy", "format", "invalid", "shaping")
ROLES = {
    "solo": ("solver",),
    "verify": ("solver", "verifier"),
    "refine": ("generator", "verifier", "refiner"),
    "meta": ("meta", "reasoner"),
}
MARKS = {"solver": "S", "verifier": "V", "generator": "G", "refiner": "F", "meta": "M", "reasoner": "R"}
DIGITS, HINT, LETTERS = "0123456789", "0123456789+-!", "ghijkxyz"
LONGEST_HINT = 4
YES, UNREADABLE, FINAL = ord("y"), ord("?"), ord("!")


@dataclass(frozen=True)
class Config:
    seed: int = 0  # of the training tasks
    tasks: int = 1024
    protocol: str = "verify"
    rounds: int = 2  # attempts in verify, hints in meta
    terms: int = 3  # numbers of a chain
    largest: int = 4  # number of a chain
    modulus: int = 10
    filler: int = 0  # letters planted in a question
    accuracy: float = 1.0
    format: float = 0.1
    invalid: float = 0.1  # a penalty
    shaping: float = 0.0  # ReMA: 0.25
    # Demonstrators: probabilities.
    slip: float = 0.55  # an answer takes every minus for a plus
    lenient: float = 0.5  # a verdict on a wrong answer is y
    strict: float = 0.3  # a verdict on a right answer is n
    heed: float = 0.0  # a refiner that is told n does not give the same answer again
    misplan: float = 0.55  # a hint has plus for minus
    hasty: float = 0.3  # a hint is marked as final, or not, when it should be the other way

    def __post_init__(self):
        one_of("chain: protocol", self.protocol, tuple(ROLES))
        least = 2 if self.protocol == "verify" else 1
        if self.rounds < least:
            raise ConfigError(f"chain: rounds: expected >= {least} with protocol={self.protocol}, got {self.rounds}")
        if self.terms < 2 or self.tasks < 1 or self.filler < 0:
            raise ConfigError("chain: expected terms >= 2, tasks >= 1 and filler >= 0")
        if not 2 <= self.modulus <= 10 or not 1 <= self.largest <= 9:
            raise ConfigError("chain: expected modulus in [2, 10] and largest in [1, 9]: numbers are single digits")
        if self.shaping and (self.protocol != "meta" or self.rounds != 1):
            raise ConfigError("chain: shaping: expected 0; only protocol=meta with rounds=1 is shaped")
        for name in ("slip", "lenient", "strict", "heed", "misplan", "hasty"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"chain: {name} is {getattr(self, name)}; a probability lies in [0, 1]")

    @property
    def max_new(self) -> int:
        """Tokens of the longest well-formed completion, eos included."""
        return 1 + (LONGEST_HINT if self.protocol == "meta" else 1)

    @property
    def attempts(self) -> int:
        """Answers in an episode, at most."""
        return {"solo": 1, "refine": 2}.get(self.protocol, self.rounds)

    @property
    def max_turns(self) -> int:
        return {"solo": 1, "verify": 2 * self.rounds - 1, "refine": 3, "meta": 2 * self.rounds}[self.protocol]


def question_length(config: Config) -> int:
    return 2 * config.terms - 1 + config.filler


def prompt_length(config: Config) -> int:
    heard = 3 * (config.attempts - 1)
    if config.protocol == "meta":
        heard = max(2 * (config.rounds - 1), 1 + LONGEST_HINT)
    return 1 + question_length(config) + heard + 1


def entry_length(config: Config) -> int:
    """The longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + config.max_new


@struct.dataclass
class State:
    task: dict[str, Int[Array, "..."]]  # one row of make_tasks
    turn: Int[Array, ""]
    answers: Int[Array, "A"]  # bytes, PAD where there is none yet
    verdicts: Int[Array, "A"]
    hint: Int[Array, "4"]  # the last one
    hint_length: Int[Array, ""]
    final: Bool[Array, ""]  # whether the last hint was marked
    proper: Bool[Array, ""]  # no malformed completion yet
    done: Bool[Array, ""]


def make(config: Config) -> ArrayEnv:
    """Nothing is random but the tasks: keys are not used."""
    P, protocol, N = prompt_length(config), config.protocol, config.attempts
    roles, last_turn = ROLES[protocol], config.max_turns - 1
    marks = encoded("".join(MARKS[role] for role in roles))
    order = [t if protocol == "refine" else t % 2 for t in range(config.max_turns)]
    acts = jnp.array(order, jnp.int32)
    judge, planner = (jnp.array([role == name for role in roles]) for name in ("verifier", "meta"))
    open_ended = protocol == "meta" and config.rounds > 1  # the team itself says when it has finished

    def reset(key: Array, task: dict[str, Array]) -> State:
        zero, no, none = jnp.int32(0), jnp.bool_(False), jnp.full(N, PAD, jnp.int32)
        hint = jnp.full(LONGEST_HINT, PAD, jnp.int32)
        task = jax.tree.map(jnp.int32, task)
        return State(task, zero, none, none, hint, zero, no, ~no, no)

    def observe(state: State) -> Observation:
        role = acts[jnp.minimum(state.turn, last_turn)]
        bar, heard = encoded("|"), []
        if protocol == "meta":
            for i in range(N - 1):
                told = ((role == 0) & (state.answers[i] != PAD)).astype(jnp.int32)
                heard += [(bar, told), (state.answers[i : i + 1], told)]
            told = (role == 1).astype(jnp.int32)
            heard += [(bar, told), (state.hint, told * state.hint_length)]
        elif protocol in ("verify", "refine"):
            now = jnp.minimum(state.turn // 2, N - 1)
            for i in range(N):  # the verifier sees the answer it judges, the others all that was judged
                told = jnp.where(judge[role], i == now, state.verdicts[i] != PAD).astype(jnp.int32)
                judged = told * (state.verdicts[i] != PAD)
                heard += [(bar, told), (state.answers[i : i + 1], told), (state.verdicts[i : i + 1], judged)]
        question = (state.task["question"], state.task["question_length"])
        tokens, length = join([(marks[role][None], 1), question, *heard, (encoded(">"), 1)], P)
        return Observation(role[None], tokens[None], length[None], ~state.done[None])

    def step(key: Array, state: State, tokens: Int[Array, "W R"], length: Int[Array, "W"]):
        tokens, length = jnp.pad(tokens[0], (0, LONGEST_HINT), constant_values=PAD), length[0]
        here = jnp.arange(len(tokens))
        stops = (tokens == EOS) & (here < length)
        ended = stops.any()
        size = jnp.where(ended, jnp.argmax(stops), length).astype(jnp.int32)  # without eos
        role = acts[jnp.minimum(state.turn, last_turn)]
        judges, plans = judge[role], planner[role]
        answers_now = ~judges & ~plans
        digit = jnp.isin(tokens[0], encoded(DIGITS[: config.modulus]))
        verdict = jnp.isin(tokens[0], encoded("yn"))
        in_hint = (jnp.isin(tokens, encoded(HINT)) | (here >= size)).all() & (size >= 1) & (size <= LONGEST_HINT)
        one = ended & (size == 1)
        proper = jnp.where(plans, ended & in_hint, one & jnp.where(judges, verdict, digit))
        said = jnp.where(proper, tokens[0], UNREADABLE)
        at = (jnp.arange(N) == state.turn // 2) & ~plans
        answers = jnp.where(at & answers_now, said, state.answers)
        verdicts = jnp.where(at & judges, said, state.verdicts)
        hint = jnp.where(here < size, tokens, PAD)[:LONGEST_HINT]
        bad = jnp.full(LONGEST_HINT, PAD, jnp.int32).at[0].set(UNREADABLE)
        hint = jnp.where(plans, jnp.where(proper, hint, bad), state.hint)
        hint_length = jnp.where(plans, jnp.where(proper, size, 1), state.hint_length)
        marked = proper & (tokens[jnp.maximum(size - 1, 0)] == FINAL)
        final = jnp.where(plans, marked, state.final)

        finished = answers_now & final if open_ended else jnp.bool_(True)
        over = state.turn >= last_turn
        if protocol == "verify":
            over |= judges & (said == YES)  # what is malformed is no YES
        elif open_ended:
            over |= finished
        clean = state.proper & proper
        right = answers[jnp.minimum(state.turn // 2, N - 1)] == ord("0") + state.task["answer"]
        mine = jnp.arange(len(roles)) == role
        team = lambda value: jnp.full(len(roles), value, jnp.float32)
        leaks = plans & proper & (size == 1) & digit
        shaped = jnp.where(plans, -1.0 * leaks, 1.0 * (answers_now & proper))
        rewards = {
            "accuracy": team(config.accuracy * (over & finished & right)),
            "format": team(config.format * (over & finished & clean)),
            "invalid": jnp.float32(-config.invalid * (mine & ~proper)),
            "shaping": jnp.float32(config.shaping * shaped * mine),
        }
        moved = State(state.task, state.turn + 1, answers, verdicts, hint, hint_length, final, clean, over)
        moved = jax.tree.map(lambda old, new: jnp.where(state.done, old, new), state, moved)
        return moved, jax.tree.map(lambda r: jnp.where(state.done, 0.0, r), rewards), moved.done

    actors = tuple((role,) for role in order)
    return ArrayEnv("chain", roles, 1, config.max_turns, COMPONENTS, actors, reset, observe, step)


def work_out(numbers: list[int], signs: str, modulus: int) -> int:
    """``numbers[0] signs[0] numbers[1] ...`` modulo ``modulus``."""
    return (numbers[0] + sum(n if s == "+" else -n for s, n in zip(signs, numbers[1:], strict=True))) % modulus


def draw(rng: np.random.Generator, config: Config) -> tuple[str, list[int], str]:
    """A question, its numbers and its signs."""
    numbers = rng.integers(config.largest + 1, size=config.terms).tolist()
    signs = "".join("+-"[i] for i in rng.integers(2, size=config.terms - 1))
    parts = [f"{sign}{number}" for sign, number in zip(("", *signs), numbers, strict=True)]
    where = rng.integers(config.terms) if config.filler else 0
    noise = "".join(LETTERS[i] for i in rng.integers(len(LETTERS), size=config.filler))
    parts[where] = parts[where][:-1] + noise + parts[where][-1]
    return "".join(parts), numbers, signs


def make_tasks(config: Config, seed: int | None = None, n: int | None = None) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``): question [n Q], question_length [n],
    answer [n].
    """
    rng = np.random.default_rng([config.seed if seed is None else seed, 1])
    draws = [draw(rng, config) for _ in range(config.tasks if n is None else n)]
    question, length = pack([q.encode() for q, _, _ in draws], question_length(config))
    gold = [work_out(numbers, signs, config.modulus) for _, numbers, signs in draws]
    return dict(question=question, question_length=length, answer=np.array(gold, np.int32))


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Imperfect samples for fine-tuning: role -> tokens [n P], length [n], completion [n R], completion_length [n].

    Mistakes are systematic: an answer that slips takes every minus for a plus, whatever it was told before (but a
    refiner keeps what is judged right, and may ``heed`` that it was wrong); verdicts are ``lenient`` and ``strict``;
    hints are misplanned (plus for minus) and ``hasty``. Prompts are those of play by such demonstrators, at turns drawn
    evenly from those at which the role may act.
    """
    out = {}
    for index, role in enumerate(ROLES[config.protocol]):
        rng, prompts, completions = np.random.default_rng([seed, 2, index]), [], []
        for _ in range(n):
            asked, reply = _META[role](rng, config) if config.protocol == "meta" else _show(rng, config, role)
            prompts.append([*asked.encode()])
            completions.append([*reply.encode(), EOS])
        out[role] = samples(prompts, completions, prompt_length(config), config.max_new)
    return out


def _answer(rng: np.random.Generator, config: Config, numbers: list[int], signs: str) -> int:
    slips = rng.random() < config.slip
    return work_out(numbers, "+" * len(signs) if slips else signs, config.modulus)


def _verdict(rng: np.random.Generator, config: Config, right: bool) -> str:
    return "yn"[int(rng.random() < config.strict)] if right else "ny"[int(rng.random() < config.lenient)]


def _show(rng: np.random.Generator, config: Config, role: str) -> tuple[str, str]:
    """A prompt and completion of ``role`` in solo, verify or refine."""
    question, numbers, signs = draw(rng, config)
    gold = work_out(numbers, signs, config.modulus)
    judged = rng.integers(config.rounds) if role == "solver" and config.protocol == "verify" else 0
    told = ""
    for _ in range(1 if role == "refiner" else judged):
        answer = _answer(rng, config, numbers, signs)
        told += f"|{answer}{'n' if role == 'solver' else _verdict(rng, config, answer == gold)}"
    answer = _answer(rng, config, numbers, signs)
    if role == "verifier":
        return f"V{question}|{answer}>", _verdict(rng, config, answer == gold)
    if role == "refiner":
        before, other = int(told[1]), {gold, work_out(numbers, "+" * len(signs), config.modulus)}
        if told[-1] == "y":
            answer = before
        elif rng.random() < config.heed and other != {before}:
            (answer,) = other - {before}
    return f"{MARKS[role]}{question}{told}>", str(answer)


def _plan(rng: np.random.Generator, config: Config, numbers: list[int], signs: str, done: list[int]) -> str:
    """The hint after the replies ``done``: the next step of the chain, its sign and mark perhaps wrong."""
    at = min(len(done), len(signs) - 1)
    sign = "+" if rng.random() < config.misplan else signs[at]
    last = (at == len(signs) - 1) != (rng.random() < config.hasty)
    return f"{done[-1] if done else numbers[0]}{sign}{numbers[at + 1]}{'!' * last}"


def _replies(rng: np.random.Generator, config: Config, numbers: list[int], signs: str) -> list[int]:
    """Some replies to hints that were carried out, slips included."""
    done: list[int] = []
    for _ in range(rng.integers(config.rounds)):
        done.append(_carry_out(rng, config, _plan(rng, config, numbers, signs, done)))
    return done


def _carry_out(rng: np.random.Generator, config: Config, hint: str) -> int:
    return _answer(rng, config, [int(hint[0]), int(hint[2])], hint[1])


def _show_meta(rng: np.random.Generator, config: Config) -> tuple[str, str]:
    question, numbers, signs = draw(rng, config)
    done = _replies(rng, config, numbers, signs)
    return f"M{question}{''.join(f'|{d}' for d in done)}>", _plan(rng, config, numbers, signs, done)


def _show_reasoner(rng: np.random.Generator, config: Config) -> tuple[str, str]:
    question, numbers, signs = draw(rng, config)
    hint = _plan(rng, config, numbers, signs, _replies(rng, config, numbers, signs))
    one = config.rounds == 1  # then the only reply is the answer
    return f"R{question}|{hint}>", str(_answer(rng, config, numbers, signs) if one else _carry_out(rng, config, hint))


_META = {"meta": _show_meta, "reasoner": _show_reasoner}
