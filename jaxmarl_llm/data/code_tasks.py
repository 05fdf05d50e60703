"""Reader of programming problems: HumanEval, CoopHumanEval and MBPP (sanitised), as plain dict tasks.

A directory holds the upstream files:

    humaneval/HumanEval.jsonl[.gz]              MIT         openai/human-eval
    coophumaneval/che_raw.json                  see below   OpenMLRL/LLM_Collab_Code_Generation
    mbpp/sanitized-mbpp.json                    CC-BY-4.0   google-research/google-research

The package contains samples of HumanEval and MBPP. The repository of CoopHumanEval has no licence file, so the package
contains none of it; pass the directory of your own copy.

A task is ``{id, index, prompt, entry_point, test, solution}``. ``prompt`` is Python up to and including the docstring.
``test`` defines ``check(candidate)``. ``solution`` is a complete program ('' where upstream has none). The split
depends on ``index``, the upstream number of the problem (MBPP: its task_id), so samples of a file keep their splits:

    humaneval       dev 0-31     train 33-132    test 133-163
    coophumaneval   dev 50-65    train 0-49      test 66-81
    mbpp            dev 11-63    train 64-123    test 124-510

These are the published splits of MAGRPO: train[33:133], test[:32], ... of the 164 problems; [:50] and [50:66] of the
82; [:15] and [15:65] of MBPP's 257 sanitised test problems. For MBPP, no final test is published; here it is the rest.
The split ``all`` has all problems. HumanEval 32 is in no split, as upstream.
"""

from __future__ import annotations

import ast
import gzip
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from jaxmarl_llm import json_files
from jaxmarl_llm.data.loaders import Row, Task, _json_list, _jsonl, _need, base_folder
from jaxmarl_llm.data.loaders import _rows as _text_rows
from jaxmarl_llm.errors import ConfigError

MAX_CODE = 200_000  # characters of one program; the longest of these data sets has 10,000
BENCHMARKS = ("humaneval", "coophumaneval", "mbpp")
SPLITS = {
    "humaneval": {"dev": (0, 31), "train": (33, 132), "test": (133, 163)},
    "coophumaneval": {"dev": (50, 65), "train": (0, 49), "test": (66, 81)},
    "mbpp": {"dev": (11, 63), "train": (64, 123), "test": (124, 510)},
}
# Functions in both CoopHumanEval and HumanEval (16 of 82). Training on one data set contaminates the other.
SHARED = frozenset({
    "x_or_y", "will_it_fly", "valid_date", "unique_digits", "unique", "truncate_number", "simplify", "same_chars",
    "right_angle_triangle", "prime_length", "prime_fib", "largest_prime_factor", "is_multiply_prime", "is_happy",
    "skjkasdkd", "factorize",
})  # fmt: skip

# CoopHumanEval asserts that contradict the text of their problem, found with literal solutions of all 82 problems:
# task id -> (numbers of the asserts in check, from 0; reason).
KNOWN_BAD: Mapping[str, tuple[tuple[int, ...], str]] = {
    "CoopHumanEval/2": ((0, 2), "the text says mm-dd-yyyy, these want dd-mm-yyyy dates to be valid"),
    "CoopHumanEval/12": ((1, 3, 4), "45 = 3*3*5, 12 = 2*2*3 and 105 = 3*5*7 are products of three primes"),
    "CoopHumanEval/30": ((0, 1, 2, 3, 4), "11 is odd and its digits add up to 2, but no expected list starts with it"),
    "CoopHumanEval/44": ((1,), "'tset' is 'test' reversed, but the pair is expected to be left out"),
    "CoopHumanEval/45": ((0,), "'hi' adds up to 209 = 11*19, which is not prime"),
    "CoopHumanEval/50": ((4,), "ten angles of 140 add up to 1400, a ten-sided polygon needs 1440"),
    "CoopHumanEval/54": ((2, 4), "676 = 26*26 is a palindrome, but missing in the expected lists"),
}


def load_code(
    benchmark: str,
    *,
    data_dir: str | Path | None = None,
    split: str,
    exclude_shared: bool = False,
    keep_bad_tests: bool = False,
) -> tuple[list[Task], str]:
    """Tasks of one split in upstream order, and a line that names the source.

    benchmark: one of BENCHMARKS. data_dir: directory with the files; None reads the samples in the package. split: a
    name in SPLITS, or "all". exclude_shared: leave out the functions in SHARED. keep_bad_tests: keep the asserts in
    KNOWN_BAD. By default they are removed, and so is a problem without other asserts. Raises ConfigError.
    """
    if benchmark not in BENCHMARKS:
        raise ConfigError(f"benchmark {benchmark!r}: expected one of {', '.join(BENCHMARKS)}")
    if split != "all" and split not in SPLITS[benchmark]:
        raise ConfigError(f"split {split!r} of {benchmark}: expected one of {', '.join(SPLITS[benchmark])} or all")
    path = _find(benchmark, data_dir)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    left_out = 0
    for where, row in _rows(path):
        task = (_mbpp if benchmark == "mbpp" else _humaneval)(where, row)
        if task["id"] in seen:
            raise ConfigError(f"{where}: field 'task_id': {task['id']!r:.80} is a duplicate of {seen[task['id']]}")
        seen[task["id"]] = where
        first, last = SPLITS[benchmark].get(split, (0, task["index"]))
        if not first <= task["index"] <= last or (exclude_shared and task["entry_point"] in SHARED):
            continue
        if not keep_bad_tests and task["id"] in KNOWN_BAD:
            usable = _without_bad(task, where)
            if usable is None:
                left_out += 1
                continue
            task = usable
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{path}: no tasks in split {split}")
    note = f", {left_out} left out (all their asserts are known to be wrong)" if left_out else ""
    return tasks, f"{path}, split {split}, {len(tasks)} tasks{note}"


def _find(benchmark: str, data_dir: str | Path | None) -> Path:
    """File of a benchmark. Raises ConfigError when it is missing."""
    if data_dir is None and benchmark == "coophumaneval":
        raise ConfigError(
            "benchmark coophumaneval: not in the package (its repository states no licence); "
            "give the directory that holds coophumaneval/che_raw.json"
        )
    base = base_folder(data_dir)
    names = {
        "humaneval": ("HumanEval.jsonl.gz", "HumanEval.jsonl"),
        "coophumaneval": ("che_raw.json",),
        "mbpp": ("sanitized-mbpp.json",),
    }[benchmark]
    for folder in (base / benchmark, base):
        for name in names:
            if (folder / name).is_file():
                return folder / name
    raise ConfigError(f"{base / benchmark}: none of the files {', '.join(names)} is there")


def _rows(path: Path) -> Iterator[Row]:
    """Rows of a file, by its suffix."""
    if path.suffix == ".gz":
        return _gz_rows(path)
    return _jsonl(path) if path.suffix == ".jsonl" else _json_list(path)


def _gz_rows(path: Path) -> Iterator[Row]:
    """Rows of a gzip file with one JSON value on each line. Raises ConfigError."""
    try:
        with gzip.open(path) as file:
            yield from _text_rows(cast(BinaryIO, file), path, json_files.MAX_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: not a whole gzip file ({error})") from None


def _parse(source: str, field: str, where: str) -> ast.Module:
    """Syntax tree of the Python code in ``field``. Raises ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in upstream docstrings
            return ast.parse(source) if len(source) <= MAX_CODE else _too_long()
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the parser's stack is "memory"
        raise ConfigError(f"{where}: field {field!r} is not Python ({json_files.reason(error)})") from None


def _too_long() -> NoReturn:
    raise ValueError(f"more than {MAX_CODE} characters")


def _humaneval(where: str, row: Mapping[str, Any]) -> Task:
    """Task of a row in the format of HumanEval. CoopHumanEval has the same format without solutions."""
    id, prompt = _need(row, "task_id", str, where), _need(row, "prompt", str, where)
    entry, test = _need(row, "entry_point", str, where), _need(row, "test", str, where)
    number = re.search(r"/([0-9]{1,9})$", id)
    if not number:
        raise ConfigError(f"{where}: field 'task_id' {id!r:.80} does not end with /<number>")
    # A prompt without a docstring ends with an empty body.
    body = _parse(prompt + "\n    pass\n", "prompt", where).body
    if not any(isinstance(node, ast.FunctionDef) and node.name == entry for node in body):
        raise ConfigError(f"{where}: field 'entry_point': {entry!r:.80} is not defined in the prompt")
    _check(_parse(test, "test", where), where)
    completion = row.get("canonical_solution", "")
    solution = prompt + completion if isinstance(completion, str) and completion else ""
    if solution:
        _parse(solution, "canonical_solution", where)
    return {
        "id": id, "index": int(number[1]), "prompt": prompt, "entry_point": entry, "test": test, "solution": solution,
    }  # fmt: skip


def _check(test: ast.Module, where: str) -> ast.FunctionDef:
    """Function ``check`` of a test. Raises ConfigError unless it asserts something about its candidate."""
    found = [node for node in test.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not found:
        raise ConfigError(f"{where}: field 'test' defines no function check(candidate)")
    names = {node.id for node in ast.walk(found[-1]) if isinstance(node, ast.Name)}
    if not any(isinstance(node, ast.Assert) for node in ast.walk(found[-1])) or "candidate" not in names:
        raise ConfigError(f"{where}: field 'test' asserts nothing about candidate")
    return found[-1]


def _mbpp(where: str, row: Mapping[str, Any]) -> Task:
    """Task of a row of MBPP.

    Its asserts become a ``check``. Its one-line text becomes a docstring below the signature of the reference.
    """
    number, text = _need(row, "task_id", int, where), _need(row, "prompt", str, where)
    code, tests = _need(row, "code", str, where), _need(row, "test_list", list, where)
    imports = row.get("test_imports") or []
    if not isinstance(imports, list) or not tests or not all(isinstance(t, str) for t in [*tests, *imports]):
        raise ConfigError(f"{where}: fields 'test_list' and 'test_imports' must be lists of str, the first filled")
    body = _parse(code, "code", where).body
    defined = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
    # Upstream runs the tests in the namespace of the code, and one test uses a module that the code imports.
    imports = imports + [ast.unparse(n) for n in body if isinstance(n, ast.Import) and _uses(tests, n)]
    first = _parse(tests[0], "test_list", where)
    called = [n.func.id for n in ast.walk(first) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    entry = next((name for name in called if name in defined), None)
    if entry is None:
        raise ConfigError(f"{where}: field 'test_list' calls no function that 'code' defines")
    lines = [*imports, *(re.sub(rf"\b{re.escape(entry)}\b", "candidate", t.strip()) for t in tests)]
    test = "def check(candidate):\n" + "\n".join("    " + line.replace("\n", "\n    ") for line in lines) + "\n"
    _check(_parse(test, "test_list", where), where)
    arguments = ast.unparse(defined[entry].args)
    prompt = f"def {entry}({arguments}):\n    '''{text.strip()}\n    '''\n"
    _parse(prompt, "prompt", where)
    return {
        "id": f"MBPP/{number}", "index": number, "prompt": prompt, "entry_point": entry, "test": test,
        "solution": code.replace("\r\n", "\n") + "\n",
    }  # fmt: skip


def _uses(tests: list[str], node: ast.Import) -> bool:
    """Whether a test uses a module of this import."""
    return any(re.search(rf"\b{re.escape(alias.asname or alias.name)}\.", t) for alias in node.names for t in tests)


def _without_bad(task: Task, where: str) -> Task | None:
    """Task without its asserts in KNOWN_BAD; None when no assert remains."""
    module = _parse(task["test"], "test", where)
    check, bad, number = _check(module, where), set(KNOWN_BAD[task["id"]][0]), 0
    kept: list[ast.stmt] = []
    for statement in check.body:
        if isinstance(statement, ast.Assert):
            number += 1
            if number - 1 in bad:
                continue
        kept.append(statement)
    if not any(isinstance(node, ast.Assert) for node in kept):
        return None
    check.body = kept
    return task | {"test": ast.unparse(module) + "\n"}
