"""Programs in Python, for host models: a team solves problems of MBPP (sanitised). Protocols are those of `programs`.

Problems, tests and the sandbox are those of `coding`. Some tests of a problem are shown, the others are hidden. The
protocols, and who acts at which turn:

    plan      planner, coder
    solo      coder
    refine    coder, as often as ``attempts`` says
    reflect   planner, coder, then reflector and coder in turn, with at most ``reflections`` hints

    role       reads                                                            writes
    planner    the problem and the shown tests                                  a plan in words
    coder      the same, the plan; later its last program, verdicts, the hint   the function, as Python
    reflector  the problem, the shown tests, the last program and verdicts      a hint in words

Verdicts are those on shown tests alone, with the message of each that fails. An episode of reflect ends once the shown
tests pass. One of refine does not end before its last attempt, as in `programs`. Programs are judged as those of `main`
in `coding`. So a program has to define the function with a return of a value, and what it prints does not count.

Out of form are a plan without words or with more than ``plan_chars`` characters, and a hint alike with ``hint_chars``.
So is a program that does not define the function, or is no Python. So is every reply that the length limit ended. A
long plan or hint is cut, and a long program is cut in later prompts.

Rewards, where a role's own is what only the role that acts is paid:

    tests     share of the hidden tests that the last program passes, to all roles when the episode ends; with refine
              that of each program
    first     the same share of the first program, to all roles at its turn
    score     its own: the share of a program, to the coder
    invalid   its own: -1 for a reply out of form
    turns     its own: 1
    accuracy  1 if the last program passes all tests, to all roles when the episode ends

A reply without a verdict from the sandbox is invalid, and never 0. A plan and a hint may hold code: nothing looks for
it. A function that returns a constant passes some tests of problems with yes or no as the answer.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.chat import action_of, asked, cut, entry, with_memory
from jaxmarl_llm.envs.coding import env as coding
from jaxmarl_llm.envs.coding import prompts as coding_prompts
from jaxmarl_llm.envs.coding.analysis.syntax import code_of, parse
from jaxmarl_llm.envs.coding.rewards import Unscored, check_tests, prelude
from jaxmarl_llm.envs.programs.roles import MOST_REFLECTIONS, REFLECT_COMPONENTS, ROLES, order
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards
from jaxmarl_llm.sandbox import judge as sandbox
from jaxmarl_llm.sandbox.judge import Test, Verdict

__all__ = ["Config", "State", "demonstrations", "make", "strategy", "tasks", "with_memory"]

COMPONENTS = (*REFLECT_COMPONENTS, "accuracy")
PLANNER, CODER, REFLECTOR = ROLES["reflect"]
ASKED = {
    PLANNER: "Say in a few words how the function can work. Write no code.",
    CODER: "Write the function in Python, and nothing else.",
    REFLECTOR: "Say in one short sentence what to change in the program. Do not write the program.",
}
NOTHING = "none"  # in place of an empty plan, program or hint


@dataclass(frozen=True)
class Config:
    """The settings of protocol, problems and sandbox. Limits of the sandbox are those of `coding`."""

    protocol: str = "reflect"  # who acts when, see above
    attempts: int = 3  # programs of an episode, with protocol refine
    reflections: int = 2  # hints of an episode at most, with protocol reflect
    shown_tests: int = 1  # tests that prompts show; problems without another one are left out
    data: str | None = None  # folder of the data sets, or its URL; None: the samples in the package
    split: str = "train"  # train, dev, test or all
    count: int = 0  # tasks; 0: all
    seed: int = 0  # of their order
    plan_chars: int = 400  # characters of a plan
    hint_chars: int = 200  # characters of a hint
    program_chars: int = 1200  # characters of the last program in a prompt; longer ones are cut
    unsafe_exec: bool = False  # run generated code with this user's rights where no sandbox works
    cpu: float = 2.0  # seconds for one call, and for loading
    total: float = 6.0  # CPU seconds for one program, its judge included
    wall: float = 10.0  # wall seconds for the same, sleep included
    memory_mb: int = 512  # memory of one program

    def check(self, path: str) -> None:
        one_of(f"{path}.protocol", self.protocol, tuple(ROLES))
        checks.in_range(path, self, 1, checks.MOST_ROUNDS, "attempts")
        checks.in_range(path, self, 1, MOST_REFLECTIONS, "reflections")
        checks.at_least(path, self, 1, "shown_tests")
        checks.at_least(path, self, 0, "seed")
        checks.in_range(path, self, 1, checks.MOST_TEXT, "plan_chars", "hint_chars", "program_chars")
        self.coding.check(path)

    @property
    def coding(self) -> coding.Config:
        """The settings of `coding` for the same problems and sandbox."""
        return coding.Config(
            benchmark="mbpp",
            data=self.data,
            split=self.split,
            count=self.count,
            seed=self.seed,
            unsafe_exec=self.unsafe_exec,
            cpu=self.cpu,
            total=self.total,
            wall=self.wall,
            memory_mb=self.memory_mb,
        )

    @property
    def order(self) -> tuple[str, ...]:
        """The role that acts at each turn."""
        return order(self.protocol, self.attempts, self.reflections)


@dataclass(frozen=True)
class State:
    """An episode so far. ``task`` is shared by all states and never changed. Texts are as prompts show them."""

    task: Mapping[str, Any] = field(hash=False)
    turn: int = 0
    plan: str = ""
    program: str = ""  # the last one; empty before the first
    verdicts: str = ""  # on it
    hint: str = ""
    solved: bool = False  # the last program passes the shown tests
    done: bool = False


def make(config: Config) -> HostEnv:
    """The environment of ``config``. Raises SandboxUnavailable, a ConfigError, where generated code cannot be run."""
    sandbox.probe(config.unsafe_exec)
    return HostEnv(
        name="programs_text",
        roles=ROLES[config.protocol],
        max_turns=len(config.order),
        components=COMPONENTS,
        reset=reset,
        observe=partial(observe, config),
        step=partial(step, config),
        seconds=config.wall + coding.READING,
    )


# -- the episode -------------------------------------------------------------------------------------------------------


def reset(seed: int, task: Mapping[str, Any]) -> State:
    """The first state of an episode. Nothing is drawn, so ``seed`` has no effect."""
    return State(task)


def tests_of(task: Mapping[str, Any]) -> tuple[Test, ...]:
    """The tests of a problem in order, each once. The first ones are shown."""
    return check_tests(task["test"], task["entry_point"], prelude(task["prompt"], task["entry_point"]))


def observe(config: Config, state: State) -> dict[str, Prompt]:
    """The prompt of the role that acts."""
    if state.done:
        return {}
    role, task = config.order[state.turn], state.task
    shown = [_named(coding_prompts.asserted(test), task) for test in tests_of(task)[: config.shown_tests]]
    parts = [task["prompt"].rstrip(), "\n".join(["Shown tests:", *shown])]
    if role == CODER and PLANNER in ROLES[config.protocol]:
        parts.append(f"Plan: {state.plan}")
    if state.verdicts:
        parts += [f"Last program:\n{state.program}", f"Verdicts:\n{state.verdicts}"]
        parts += [f"Hint: {state.hint}"] if role == CODER and REFLECTOR in ROLES[config.protocol] else []
    return {role: (Message("system", f"You are the {role}. {ASKED[role]}"), Message("user", "\n\n".join(parts)))}


def _named(text: str, task: Mapping[str, Any]) -> str:
    """``text`` about a candidate, with the name of the function of ``task``."""
    return re.sub(r"\bcandidate\b", task["entry_point"], text)


class Judged(NamedTuple):
    """The verdict on a program.

    Attributes:
        proper: Whether it is Python and defines the function.
        score: Share of the hidden tests that pass.
        solves: Whether all shown tests pass.
        correct: Whether all tests pass.
        verdicts: Lines on the shown tests.
    """

    proper: bool
    score: float
    solves: bool
    correct: bool
    verdicts: str


def judge(config: Config, task: Mapping[str, Any], text: str) -> Judged:
    """The verdict on a reply of the coder.

    Args:
        config: The settings.
        task: A row of `tasks`.
        text: The reply.

    Raises:
        Unscored: The sandbox gave no verdict.
    """
    graded, shown = coding.grade(config.coding, task, "", text), config.shown_tests
    lines = coding_prompts.of_tests(graded, shown)
    if graded.report is None:
        why = "it is no Python program" if graded.rewards["structure"] else "it does not define the function"
        return Judged(False, 0.0, False, False, "\n".join([f"- {why}", *lines]))
    passed = [verdict is Verdict.PASS for verdict in graded.report.tests]
    score = sum(passed[shown:]) / len(passed[shown:])
    return Judged(True, score, all(passed[:shown]), graded.solved, _named("\n".join(lines), task))


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after a reply, the rewards of the turn, and whether the episode has finished.

    ``seed`` has no effect. ``actions``: the reply of the role that acts. Raises Unscored where the sandbox gave no
    verdict, which makes the transition invalid.
    """
    players, last = ROLES[config.protocol], len(config.order) - 1
    role = config.order[min(state.turn, last)]
    action = action_of(role, actions, state.done)
    after, said = replace(state, turn=state.turn + 1), action.text.strip()
    if role != CODER:
        most = config.plan_chars if role == PLANNER else config.hint_chars
        told = " ".join(cut(said, most).split()) or NOTHING
        after = replace(after, plan=told) if role == PLANNER else replace(after, hint=told)
        proper = bool(said) and len(said) <= most and not action.truncated
        return after, {role: _form(proper)}, False
    found = judge(config, state.task, action.text)
    done = state.turn >= last or (found.solves and config.protocol == "reflect")
    program = cut(code_of(action.text).strip(), config.program_chars) or NOTHING
    after = replace(after, program=program, verdicts=found.verdicts, solved=found.solves, done=done)
    team = {
        "tests": found.score if done or config.protocol == "refine" else 0.0,
        "first": 0.0 if state.program else found.score,
        "accuracy": float(found.correct and done),
    }
    own = {**_form(found.proper and not action.truncated), "score": found.score}
    return after, {name: team | (own if name == role else {}) for name in players}, done


def _form(proper: bool) -> dict[str, float]:
    """What a role is paid for the form of its reply."""
    return {"invalid": -float(not proper), "turns": 1.0}


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def tasks(config: Config) -> list[dict[str, Any]]:
    """The problems of the split that have a hidden test, in an order fixed by the seed.

    Raises:
        ConfigError: There is no working sandbox, the data cannot be read, or there are fewer than ``config.count``.
    """
    found = coding.tasks(replace(config, count=0).coding)
    kept = [task for task in found if len(tests_of(task)) > config.shown_tests]
    if left_out := len(found) - len(kept):
        logging.getLogger(__name__).info("programs_text: %d problems without a hidden test are left out", left_out)
    if not kept:
        checks.refuse(checks.ARGS, "shown_tests", "fewer than the tests of a problem", config.shown_tests)
    if config.count > len(kept):
        checks.refuse(checks.ARGS, "count", f"at most {len(kept)}, the problems with a hidden test", config.count)
    return kept[: config.count or None]


OPPOSITE: dict[type, type] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
TRIED = 3  # faults of a problem
CONSTRUCTS = {
    ast.For: "a loop",
    ast.While: "a loop",
    ast.ListComp: "a list of results",
    ast.GeneratorExp: "a pass over the items",
    ast.If: "a condition",
    ast.IfExp: "a condition",
    ast.Compare: "a comparison",
    ast.BinOp: "arithmetic",
}


def outline(solution: str) -> str:
    """A plan of a program in words: what it uses, in order, each once. ``solution``: its text."""
    module = parse(solution)
    used = []
    for node in ast.walk(module) if module is not None else ():
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            used.append(name)
        used.append(CONSTRUCTS.get(type(node), ""))
    return f"Use {', '.join(dict.fromkeys(filter(None, used))) or 'the arguments'}, and return the result."


def faults(solution: str) -> Iterator[tuple[str, str]]:
    """Programs with one fault each, and the hint that mends it. ``solution``: a program as `ast.unparse` writes it.

    A fault is a comparison that is reversed, a plus for a minus or the reverse, or a number that is one too large.
    """
    total = len(list(ast.walk(ast.parse(solution))))
    for number in range(total):
        module = ast.parse(solution)
        node = list(ast.walk(module))[number]
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE:
            node.ops[0] = OPPOSITE[type(node.ops[0])]()
        elif isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE:
            node.op = OPPOSITE[type(node.op)]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        else:
            continue
        wrong = ast.unparse(module)
        pairs = enumerate(zip(solution.split("\n"), wrong.split("\n"), strict=False), 1)
        line, right = next((line, right) for line, (right, other) in pairs if right != other)
        yield wrong, f"Line {line} should be: {right.strip()}"


def demonstrations(config: Config, tasks: Iterable[Mapping[str, Any]]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, reply) of good replies on ``tasks``: an outline of the solution, and the solution.

    With reflect and refine there are also replies behind a program with one fault (`faults`) that the sandbox has
    found. The hint says which line should be what, and the coder then writes the solution.
    """
    out: list[tuple[str, Prompt, str]] = []
    for task in tasks:
        module = parse(task["solution"])
        if module is None or not task["solution"]:
            continue
        solution, state = ast.unparse(module), reset(0, task)
        if PLANNER in ROLES[config.protocol]:
            state = _says(config, out, state, outline(solution))
        out.append((CODER, observe(config, state)[CODER], solution))
        if len(config.order) > state.turn + 1:
            out += _mended(config, state, solution)
    return out


def _says(config: Config, samples: list[tuple[str, Prompt, str]], state: State, reply: str) -> State:
    """Adds a sample of the role that acts, and returns the state after its ``reply``."""
    ((role, prompt),) = observe(config, state).items()
    samples.append((role, prompt, reply))
    return step(config, 0, state, {role: Action(reply, ())})[0]


def _mended(config: Config, state: State, solution: str) -> list[tuple[str, Prompt, str]]:
    """Samples behind the first of a few programs with a fault that a shown test finds."""
    for (wrong, hint), _ in zip(faults(solution), range(TRIED), strict=False):
        try:
            after = step(config, 0, state, {CODER: Action(wrong, ())})[0]
        except Unscored as error:
            logging.getLogger(__name__).warning("programs_text: no demonstration behind a fault: %s", error)
            return []
        if not after.solved:
            out: list[tuple[str, Prompt, str]] = []
            if REFLECTOR in ROLES[config.protocol]:
                after = _says(config, out, after, hint)
            return [*out, (CODER, observe(config, after)[CODER], solution)]
    return []


def strategy(role: str, prompt: Prompt, action: Action, rewards: Mapping[str, float]) -> str:
    """The memory entry of a sample of ``role``: the problem in its ``prompt``, its text, its tests.

    ``action``: the reply. ``rewards``: the role's components.
    """
    return entry(role, rewards.get("tests", 0.0), asked(prompt).split("def ")[-1], action)
