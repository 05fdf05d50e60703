"""Rewards of a helper and a main function that make one program: ``strict`` to train with, ``parity`` to compare.

Both have MAGRPO's ladder, in four components that add up to at most 4.0:

    structure    0.4 the helper defines ``aux`` and returns something; 0.6 main defines the entry point; else stop
    syntax       0.5 the two together are a program; otherwise stop
    tests        the share of the tests that pass
    cooperation  when tests pass and aux is there: 0.5 main calls aux, 1.0 main is more than a wrapper, -0.5 it
                 throws results away

``parity`` reads text as upstream does (`published_reward` lists the faults), and one test is enough for cooperation.
``strict`` reads the syntax tree, and cooperation needs every test: a constant passes some, with any helper. Comments,
strings, unreachable code and functions that main defines itself are no calls. A value must reach what main returns or
decide it (`code_flow`); otherwise there is no cooperation at all. A wrapper is one however long. An aux that only gives
back an argument or a constant is none. The tests of ``strict`` are all of ``check``, loops and long asserts included.

A verdict that could not be reached raises ``Unscored``: the sample is invalid, never 0.

Shared arguments: ``helper`` and ``main`` are completions, and ``task`` is a row of the environment's tasks. ``test`` is
the text of its tests, and ``entry_point`` the name of the function that main writes. ``report_fn`` runs tests in the
sandbox.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from jaxmarl_llm.envs.coding import published_reward
from jaxmarl_llm.envs.coding.analysis import syntax as code_ast
from jaxmarl_llm.envs.coding.analysis.flow import flow
from jaxmarl_llm.envs.coding.analysis.values import Flow, Kind
from jaxmarl_llm.sandbox.judge import Report, Test, Verdict

COMPONENTS = ("structure", "syntax", "tests", "cooperation")
AUX = "aux"
ReportFn = Callable[[str, Sequence[Test]], Report]
Task = Mapping[str, Any]


class Unscored(RuntimeError):
    """The sandbox failed, not the program."""


class Graded(NamedTuple):
    """``rewards`` by component. ``solved``: the whole ``check`` passes. ``report`` is None if nothing was run; its
    tests are ``tests``, one each. ``notes`` say what a reader should know, such as answers copied from the tests.
    """

    rewards: dict[str, float]
    solved: bool = False
    tests: tuple[Test, ...] = ()
    report: Report | None = None
    flow: Flow | None = None
    notes: tuple[str, ...] = ()
    hardcoded: bool = False  # the tests' answers seem to stand in the code

    @property
    def total(self) -> float:
        return sum(self.rewards.values())


def parity(helper: str, main: str, task: Task, report_fn: ReportFn) -> dict[str, float]:
    """Components of the published reward."""
    return grade_parity(helper, main, task, report_fn).rewards


def strict(helper: str, main: str, task: Task, report_fn: ReportFn) -> dict[str, float]:
    """Components of the strict reward."""
    return grade_strict(helper, main, task, report_fn).rewards


def grade_parity(helper: str, main: str, task: Task, report_fn: ReportFn) -> Graded:
    """Grade a joint action by the published reward."""
    rewards = dict.fromkeys(COMPONENTS, 0.0)
    entry, prompt = task["entry_point"], task["prompt"]
    aux_code = _read(published_reward.extract, helper, AUX) or ""
    main_code = _read(published_reward.extract, main, entry) or ""
    rewards["structure"] = 0.4 * published_reward.has_return(aux_code) + 0.6 * published_reward.has_return(main_code)
    if not published_reward.has_return(main_code):
        return Graded(rewards)
    program = published_reward.program(prompt, aux_code, main_code)
    if not published_reward.parses(program):
        return Graded(rewards)
    rewards["syntax"] = 0.5
    lines = published_reward.asserts(task["test"], entry)
    if not lines:
        return Graded(rewards)
    setup = published_reward.imports(prompt)
    tests = [Test(line, (entry,), setup) for line in lines if published_reward.runnable(line)]
    solved, report = _judged(report_fn, program, tests, task)
    rewards["tests"] = report.passed / len(lines)
    if report.passed and aux_code and published_reward.calls_aux(main_code):
        rewards["cooperation"] = 0.5 + (not published_reward.is_wrapper(main_code))
        rewards["cooperation"] -= 0.5 * published_reward.ignores_result(main_code)
    copied = bool(_read(hardcoded, program, task["test"]))
    return Graded(rewards, solved, tuple(tests), report, hardcoded=copied)


def grade_strict(helper: str, main: str, task: Task, report_fn: ReportFn) -> Graded:
    """Grade a joint action by the strict reward."""
    rewards = dict.fromkeys(COMPONENTS, 0.0)
    entry = task["entry_point"]
    helper_code, main_code = _read(code_ast.code_of, helper) or "", _read(code_ast.code_of, main) or ""
    has_aux, has_main = bool(_read(code_ast.defined, helper_code, AUX)), bool(_read(code_ast.defined, main_code, entry))
    rewards["structure"] = 0.4 * has_aux + 0.6 * has_main
    if not has_main:
        return Graded(rewards)
    program = _read(code_ast.combine, prelude(task["prompt"], entry), helper_code, main_code)
    if program is None or not _read(code_ast.compiles, program):
        return Graded(rewards)
    rewards["syntax"] = 0.5
    tests = check_tests(task["test"], entry, prelude(task["prompt"], entry))
    solved, report = _judged(report_fn, program, tests, task)
    rewards["tests"] = report.passed / len(tests)
    copied = bool(_read(hardcoded, program, task["test"]))
    notes = ["answers of the tests stand in the code"] if copied else []
    found = _read(cooperation, main_code, entry)
    if found is None:
        notes.append("too complex to analyse")
    elif report.passed == len(tests) and has_aux and found.used and _read(works, helper_code):
        rewards["cooperation"] = 0.5 + (not found.wrapper) - 0.5 * (found.ignored > 0)
    return Graded(rewards, solved, tests, report, found, tuple(notes), copied)


def _read(function: Callable[..., Any], *texts: str) -> Any:
    """``function(*texts)`` of a completion; None where it raises. What a text causes is never a missing verdict."""
    try:
        return function(*texts)
    except Exception as error:
        logging.getLogger(__name__).warning("reading a completion: %s: %s", type(error).__name__, str(error)[:200])
        return None


def _judged(report_fn: ReportFn, program: str, tests: Sequence[Test], task: Task) -> tuple[bool, Report]:
    """Does the whole ``check`` pass, and the report on ``tests``; both from one start of the jail."""
    report = report_fn(program, [*tests, full_check(task)])
    if not report.valid:
        details = [d for v, d in zip(report.tests, report.details) if v is Verdict.INFRA_ERROR]
        why = next(iter(details), "") or report.load_detail
        raise Unscored(f"task {task['id']}: no verdict from the sandbox ({why})")
    if len(report.tests) != len(tests) + 1:
        raise Unscored(f"task {task['id']}: {len(report.tests)} verdicts on {len(tests) + 1} tests")
    solved = report.load is Verdict.PASS and report.tests[-1] is Verdict.PASS
    return solved, report._replace(tests=report.tests[:-1], details=report.details[:-1])


# -- tests -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def prelude(prompt: str, entry_point: str) -> str:
    """Code of ``prompt`` before the function to write: imports, and helper functions in a few problems."""
    source = prompt + "\n    pass\n"  # a prompt without a docstring ends with an empty body
    module = code_ast.parse(source)
    if module is None:
        return ""
    before = []
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            break
        before.append(ast.get_source_segment(source, node) or "")
    return "\n".join(before)


# Some tests draw random inputs; the same ones for every program make the verdict a function of the program.
_SEED = "import random as _random\n_random.seed(0)"


@lru_cache(maxsize=4096)
def check_tests(test: str, entry_point: str, setup: str = "") -> tuple[Test, ...]:
    """``check`` as one test for each of its statements that asserts something about the candidate, in order.

    The plain statements before it (imports, inputs) stand in front. ``setup``: code before every test.
    """
    module = ast.parse(test)
    check = code_ast.function(module, "check")
    if check is None:
        raise ValueError("the test defines no function check")
    outside = [ast.unparse(node) for node in module.body if node is not check]
    argument = check.args.args[0].arg if check.args.args else "candidate"
    known, before, tests, seen = {argument}, [f"{argument} = {entry_point}"], [], set()
    for node in check.body:
        names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        source = ast.unparse(node)
        if not any(isinstance(n, ast.Assert) for n in ast.walk(node)):
            if names & known:  # what it assigns is an answer
                known |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            before.append(source)
        elif names & known and source not in seen:
            seen.add(source)
            code = "\n".join([*outside, *before, source])
            tests.append(Test(code, (entry_point,), f"{_SEED}\n{setup}"))
    if not tests:
        raise ValueError("the test asserts nothing about its candidate")
    return tuple(tests)


def full_check(task: Task) -> Test:
    """``check`` as upstream runs it: pass or fail. (One problem of MBPP wants a function named check.)"""
    entry = task["entry_point"]
    return Test(
        f"_candidate = {entry}\n{task['test']}\ncheck(_candidate)\n",
        (entry,),
        f"{_SEED}\n{prelude(task['prompt'], entry)}",
    )


# -- cooperation -------------------------------------------------------------------------------------------------------


def cooperation(main_code: str, entry_point: str) -> Flow | None:
    """Flow of aux's value in main; None if main is no function or beyond analysis.

    Args:
        main_code: Program text of the second role.
        entry_point: Name of the function that it defines.
    """
    module = code_ast.parse(main_code)
    return flow(module, entry_point, AUX) if module is not None else None


def works(helper_code: str) -> bool:
    """Whether aux in ``helper_code`` does anything.

    An aux that always gives back one and the same argument or scalar does nothing.
    """
    module = code_ast.parse(helper_code)
    found = flow(module, AUX, "") if module is not None else None
    if found is None:
        return module is not None and code_ast.function(module, AUX) is not None  # beyond analysis: it is not nothing
    trivial = all(o.kind <= Kind.TRIVIAL and not o.text.startswith(("List", "Dict", "Set")) for o in found.outcomes)
    return not trivial or len({o.text for o in found.outcomes}) > 1


@lru_cache(maxsize=4096)
def _answers(test: str) -> tuple[tuple[str, str], ...]:
    """(argument, expected) of each ``assert candidate(literal, ...) == literal``, as dumps."""
    found = []
    for node in ast.walk(ast.parse(test)):
        if not (isinstance(node, ast.Compare) and isinstance(node.left, ast.Call) and len(node.comparators) == 1):
            continue
        call = node.left
        if isinstance(call.func, ast.Name) and call.func.id == "candidate" and call.args:
            whole = ast.Tuple(call.args, ast.Load()) if len(call.args) > 1 else call.args[0]
            found.append((ast.dump(whole), ast.dump(node.comparators[0])))
    return tuple(found)


def hardcoded(program: str, test: str) -> bool:
    """Whether ``program`` seems to contain the answers of ``test``.

    That is: at least three of the tests' inputs, and half of them, are written down beside the expected results. This
    is a note for the reader, not a verdict: the examples in the problem text are often among the tests.
    """
    module, answers = code_ast.parse(program), _answers(test)
    if module is None or code_ast.depth(module) > 4 * code_ast.MAX_DEPTH:
        return False
    literals = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp)
    try:
        written = {ast.dump(n) for n in ast.walk(module) if isinstance(n, literals)}
    except (RecursionError, ValueError):
        return False
    copied = sum(argument in written and expected in written for argument, expected in answers)
    return copied >= 3 and 2 * copied >= len(answers)
