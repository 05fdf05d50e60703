"""Two programmers write one Python program: a helper function and the main function (MAGRPO's coding task).

Both act at once in each turn: ``helper`` writes ``aux``, ``main`` writes the function the problem asks for and may call
``aux``. Neither sees what the other wrote, only its own history and the feedback after each turn. The two are put
together and judged in a sandbox; both get the same rewards (a team return), at each turn:

    structure    [0, 1]       syntax    0 or 0.5       tests    [0, 1]       cooperation    [-0.5, 1.5]

by ``reward`` ``strict`` or ``parity`` (see `coding_rewards`), at most 4.0 in all. On the last turn come two components
that are no part of that reward. ``accuracy`` is 1 if the whole ``check`` passes. ``hardcoded`` is 1 if the answers of
the tests seem to stand in the code. A sample whose verdict could not be reached is invalid, never 0.

Feedback for the next turn: ``plain`` (revise), ``level`` (diagnostics) or ``expert`` (an outside expert's edits, see
`expert`). Generated code runs in `sandbox` only; without a working one ``make`` and ``tasks`` refuse, unless
``unsafe_exec``. One judge call takes at most ``wall`` seconds, and reading the two texts a few more; then the program
has failed. The environment's timeout (``env.timeout``) must be longer, so that only the machine's own delays make a
sample invalid. An expert's ``(expert_retries + 1) * expert_timeout`` comes on top.

Shared arguments: ``config`` has the settings, ``task`` is a row of `tasks`, and ``state`` the state of an episode.
"""

from __future__ import annotations

import ast
import copy
import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from jaxmarl_llm.config import one_of
from jaxmarl_llm.data import code_tasks
from jaxmarl_llm.envs import checks
from jaxmarl_llm.envs.chat import reply_message, with_memory
from jaxmarl_llm.envs.coding import cooperation_schemes, expert, pass_at_k
from jaxmarl_llm.envs.coding import prompts as coding_prompts
from jaxmarl_llm.envs.coding.analysis.syntax import bindings, function, own_nodes, parse
from jaxmarl_llm.envs.coding.prompts import ROLES, strategy
from jaxmarl_llm.envs.coding.rewards import AUX, COMPONENTS, Graded, grade_parity, grade_strict, prelude
from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Action, HostEnv, Message, Prompt, Rewards
from jaxmarl_llm.sandbox import judge as sandbox

__all__ = [
    "ROLES",
    "Config",
    "State",
    "Task",
    "ask",
    "demonstrations",
    "episode_metrics",
    "evaluate",
    "grade",
    "make",
    "split_solution",
    "stand_in",
    "strategy",
    "tasks",
    "with_memory",
]  # fmt: skip

Task = dict[str, Any]
SPLITS = ("train", "dev", "test", "all")
READING = 4.0  # seconds for reading the two texts and starting a jail, on a slow machine
MOST_SECONDS, MOST_MEMORY = 3600, 2**20  # CPU seconds and MiB that one program may be given
GRADERS = {"strict": grade_strict, "parity": grade_parity}


@dataclass(frozen=True)
class Config:
    """The settings of tasks, feedback, expert and sandbox.

    ``data`` is a directory as in `code_tasks`; None stands for the samples in the package (HumanEval and MBPP).
    """

    benchmark: Literal["humaneval", "coophumaneval", "mbpp"] = "humaneval"  # data set of the tasks
    data: str | None = None  # folder of the data sets, or its URL; None: the samples in the package
    split: str = "train"  # train, dev, test or all
    count: int = 0  # tasks; 0: all
    seed: int = 0  # of their order
    reward: Literal["strict", "parity"] = "strict"  # strict, or parity: the paper's
    max_turns: int = 1  # turns of an episode
    feedback: Literal["plain", "level", "expert"] = "plain"  # before a later turn: see above
    shown_tests: int = 1  # asserts that level feedback may show; 0: all
    expert: Any = ""  # module:function, a callable, or an endpoint's base URL
    expert_model: str = ""  # model that the endpoint is asked for
    expert_key_env: str = "OPENAI_API_KEY"  # the environment variable with the endpoint's key
    expert_timeout: float = 10.0  # seconds for one attempt
    expert_retries: int = 1  # attempts after a failed one
    exclude_shared: bool = False  # without the 16 functions that CoopHumanEval shares with HumanEval
    keep_bad_tests: bool = False  # keep CoopHumanEval's asserts that contradict their problem
    unsafe_exec: bool = False  # run generated code with this user's rights where no sandbox works
    cpu: float = 2.0  # seconds for one call, and for loading
    total: float = 6.0  # CPU seconds for one program, its judge included
    wall: float = 10.0  # wall seconds for the same, sleep included
    memory_mb: int = 512  # memory of one program
    max_timeouts: int = 2  # then the remaining tests of a program count as timed out

    def check(self, path: str) -> None:
        one_of(f"{path}.split", self.split, SPLITS)
        checks.in_range(path, self, 0, checks.MOST_TASKS, "count")
        checks.in_range(path, self, 1, checks.MOST_ROUNDS, "max_turns")
        checks.at_least(path, self, 0, "shown_tests")
        checks.at_least(path, self, 1, "max_timeouts")
        if not 0 < self.total <= MOST_SECONDS:
            checks.refuse(path, "total", f"more than 0 and at most {MOST_SECONDS} seconds", self.total)
        if not 0 < self.cpu <= self.total:
            checks.refuse(path, "cpu", f"more than 0 and at most total={self.total:g} seconds", self.cpu)
        if not 0 < self.wall <= MOST_SECONDS:
            checks.refuse(path, "wall", f"more than 0 and at most {MOST_SECONDS} seconds", self.wall)
        checks.in_range(path, self, 1, MOST_MEMORY, "memory_mb")
        expert.check_limits(path, self.expert_timeout, self.expert_retries)
        if not isinstance(self.expert, str) and not callable(self.expert):
            checks.refuse(path, "expert", expert.EXPECTED, self.expert)
        if self.feedback == "expert":
            self.advisor(path)

    def advisor(self, path: str = checks.ARGS) -> expert.Expert:
        """The configured expert. ``path`` is the name of this Config in error messages."""
        return expert.resolve(
            self.expert,
            path=path,
            model=self.expert_model,
            key_env=self.expert_key_env,
            timeout=self.expert_timeout,
            retries=self.expert_retries,
        )


@dataclass(frozen=True)
class State:
    """An episode so far; each role's conversation is its own. ``task`` is shared by all states and never changed."""

    task: Mapping[str, Any] = field(hash=False)
    helper: Prompt
    main: Prompt
    turn: int = 0


def make(config: Config) -> HostEnv:
    """Raises SandboxUnavailable, which is a ConfigError, where generated code cannot be run."""
    sandbox.probe(config.unsafe_exec)
    return HostEnv(
        name="coding",
        roles=ROLES,
        max_turns=config.max_turns,
        components=(*COMPONENTS, "accuracy", "hardcoded"),
        reset=reset,
        observe=observe,
        step=partial(step, config),
        seconds=config.wall + READING,
    )


def episode_metrics(spoken: Sequence[tuple[Task, Mapping[str, str]]]) -> dict[str, float]:
    """Share of each cooperation scheme among the joint actions, ``scheme/<name>``, for the log and its plot.

    ``spoken``: pairs of a task and its texts by role.
    """
    counts = cooperation_schemes.count((said["helper"], said["main"], task["entry_point"]) for task, said in spoken)
    return {f"scheme/{name}": n / max(1, len(spoken)) for name, n in counts.items()}


def reset(seed: int, task: Task) -> State:
    """The episode's first state. Everything is deterministic, so the seed has no effect."""
    prompts = coding_prompts.opening(task)
    return State(task, prompts["helper"], prompts["main"])


def observe(state: State) -> dict[str, Prompt]:
    """The prompts of both roles."""
    return {"helper": state.helper, "main": state.main}


def step(config: Config, seed: int, state: State, actions: Mapping[str, Action]) -> tuple[State, Rewards, bool]:
    """The state after both completions, the rewards of the turn, and whether the episode has finished.

    ``seed`` has no effect. ``actions``: the completions by role. Raises Unscored or ExpertError, which make the
    transition invalid.
    """
    if set(actions) != set(ROLES) or state.turn >= config.max_turns:
        raise ValueError(f"expected an action of helper and main in an unfinished episode, got {sorted(actions)}")
    texts = {role: actions[role].text for role in ROLES}
    asked = state.task.get("asked", False)  # by a person
    graded = Graded({}) if asked else grade(config, state.task, texts["helper"], texts["main"])
    done = state.turn + 1 >= config.max_turns
    rewards = dict(graded.rewards)
    if done:
        rewards |= {} if asked else {"accuracy": float(graded.solved), "hardcoded": float(graded.hardcoded)}
        told = dict.fromkeys(ROLES, "")
    elif config.feedback == "level":
        told = coding_prompts.level(state.task, texts, graded, config.shown_tests)
    elif config.feedback == "expert":
        edits = expert.consult(config.advisor(), state.task, texts["helper"], texts["main"])
        told = coding_prompts.suggestions(state.task, edits)
    else:
        told = coding_prompts.plain(state.task)
    conversations = {}
    for role in ROLES:
        action = actions[role]
        feedback = (Message("user", told[role]),) if told[role] else ()
        conversations[role] = (*getattr(state, role), reply_message(role, action), *feedback)
    new = State(state.task, conversations["helper"], conversations["main"], state.turn + 1)
    return new, {role: dict(rewards) for role in ROLES}, done


def grade(config: Config, task: Mapping[str, Any], helper: str, main: str) -> Graded:
    """The program's rewards by the configured rules. Raises Unscored where the sandbox gives no verdict."""
    limits = sandbox.Limits(config.cpu, config.total, config.wall, config.memory_mb)
    report = partial(sandbox.judge, limits=limits, stop_after_timeouts=config.max_timeouts, unsafe=config.unsafe_exec)
    return GRADERS[config.reward](helper, main, task, report)


def evaluate(
    config: Config, samples: Iterable[tuple[Task, Sequence[tuple[str, str]]]], ks: Sequence[int] = (1,)
) -> dict[str, float]:
    """pass@k and its relatives, by the whole ``check``.

    ``samples``: (task, its (helper, main) completions in the order drawn). ``ks``: values of k. Samples without a
    verdict raise: an estimate over a part of them would not say so.
    """
    rows: list[dict[str, Sequence[float]]] = []
    for task, pairs in samples:
        graded = [grade(config, task, helper, main) for helper, main in pairs]
        rows.append(
            {
                "solved": [g.solved for g in graded],
                "tests": [g.rewards["tests"] for g in graded],
                "cooperation": [g.rewards["cooperation"] for g in graded],
            }
        )
    return pass_at_k.summary(rows, ks)


# -- tasks and demonstrations ------------------------------------------------------------------------------------------


def tasks(config: Config) -> list[Task]:
    """The split's tasks, in an order fixed by the seed. Refuses, like ``make``, where nothing could be scored."""
    log = logging.getLogger(__name__)
    log.info("%s", sandbox.describe(config.unsafe_exec))
    found, source = code_tasks.load_code(
        config.benchmark,
        data_dir=config.data,
        split=config.split,
        exclude_shared=config.exclude_shared,
        keep_bad_tests=config.keep_bad_tests,
    )
    if config.count > len(found):
        raise ConfigError(f"{checks.ARGS}.count: expected at most {len(found)} ({source}), got {config.count}")
    random.Random(f"{config.benchmark} {config.split} {config.seed}").shuffle(found)
    log.info("%s: %s", config.benchmark, source)
    return found[: config.count or None]


def ask(config: Config, text: str) -> Task:
    """The task of a person's problem, which has no tests, so nothing is run or paid.

    ``text``: The problem. Its first ``def NAME(`` names the function to write; without one the name is ``solution``.
    """
    found = re.search(r"\bdef\s+([A-Za-z_]\w*)\s*\(", text)
    return {"id": "asked", "asked": True, "entry_point": found[1] if found else "solution", "prompt": text}


def stand_in(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of this environment that need no data but the package's, for plans. ``args``: those of a run."""
    benchmark = args.get("benchmark")
    absent = benchmark == "coophumaneval" and not args.get("data")  # the package has no sample of it
    return {**args, "benchmark": "humaneval"} if absent else dict(args)


def demonstrations(config: Config, tasks: Iterable[Task]) -> list[tuple[str, Prompt, str]]:
    """Samples (role, prompt, completion) from the canonical solutions.

    A solution that comes apart gives a sample of both roles, any other one of main alone.
    """
    out = []
    for task in tasks:
        prompts = coding_prompts.opening(task)
        helper, main = split_solution(task)
        out += [(role, prompts[role], code) for role, code in (("helper", helper), ("main", main)) if code]
    return out


def split_solution(task: Mapping[str, Any]) -> tuple[str, str]:
    """The canonical solution as (helper, main), docstrings left out.

    It comes apart where it has exactly one function beside the entry point. This function is at the margin, or inside
    the entry point without use of its names. That function becomes ``aux``, unless main would be a mere wrapper of it.
    Otherwise the helper is '' and main the whole; without a solution both are ''.
    """
    module = parse(task["solution"]) if task["solution"] else None
    entry = function(module, task["entry_point"])
    if module is None or entry is None:
        return "", ""
    imports = [n for n in module.body if _imports(n)]
    main = copy.deepcopy(entry)
    main.body = _without_docstring(main.body)
    whole = copy.deepcopy(main)
    given = parse(prelude(task["prompt"], task["entry_point"]))
    known = set(bindings(given)) if given is not None else set()
    imports = [n for n in imports if not set(bindings(ast.Module([n], []))) <= known]
    margin = [n for n in module.body if n is not entry and getattr(n, "name", "") not in known and not _imports(n)]
    inner = [n for n in main.body if isinstance(n, ast.FunctionDef)]
    helper: ast.FunctionDef | None = None
    if len(margin) == 1 and isinstance(margin[0], ast.FunctionDef) and not inner:
        helper = copy.deepcopy(margin[0])
    elif len(inner) == 1 and not margin and not _closes_over(inner[0], main):
        helper = inner[0]
        main.body.remove(helper)
    kept = [n for n in margin if n.lineno < entry.lineno]
    alone = "", _source(*imports, *kept, whole, *(n for n in margin if n not in kept))
    used = [n for n in ast.walk(main) if isinstance(n, ast.Name)]
    if helper is None or not any(n.id == helper.name for n in used) or any(n.id == AUX for n in used):
        return alone
    old, helper.body = helper.name, _without_docstring(helper.body)
    for node in (n for tree in (helper, main) for n in ast.walk(tree)):
        if isinstance(node, ast.Name) and node.id == old:
            node.id = AUX
    helper.name = AUX
    parts = _source(*_needed(imports, helper), helper), _source(*_needed(imports, main), main)
    return alone if cooperation_schemes.classify(*parts, entry.name).startswith("trivial") else parts


def _source(*nodes: ast.stmt) -> str:
    return "\n".join(ast.unparse(n) for n in nodes) + "\n"


def _needed(imports: Sequence[ast.stmt], node: ast.AST) -> list[ast.stmt]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return [n for n in imports if names & set(bindings(ast.Module([n], []))) or "*" in ast.unparse(n)]


def _imports(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(body) > 1:
        return body[1:]
    return body


def _closes_over(inner: ast.FunctionDef, outer: ast.FunctionDef) -> bool:
    """Does the inner function use a name of the outer one, or rebind one?"""
    own = {a.arg for a in ast.walk(inner) if isinstance(a, ast.arg)} | {inner.name}
    own |= {n.id for n in ast.walk(inner) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    read = {n.id for n in ast.walk(inner) if isinstance(n, ast.Name)} - own
    local = {a.arg for a in ast.walk(outer.args) if isinstance(a, ast.arg)}
    local |= {n.id for n in own_nodes(outer) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local |= {name for n in outer.body if _imports(n) for name in bindings(ast.Module([n], []))}
    return bool(read & local) or any(isinstance(n, (ast.Nonlocal, ast.Global)) for n in ast.walk(inner))
