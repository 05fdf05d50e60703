"""What teams without a model earn on `call_team`, and how many tasks there are:

    python -m experiments.studies.call_team_baselines [--data=DIR] [--conventions]

The first table counts tasks by source, specialist and split. The second one plays the held-out tasks. Routes are the
most frequent specialist of training, the specialist whose keywords the query has (`specialists.owner` on its words), or
the right one. Calls have the function whose words the query shares, without arguments or with those that regular
expressions find in the query. Columns are means: the share of right routes, the reward, and the share of right calls,
on all tasks, on those with an unseen function, and on unseen queries of seen functions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.envs.call_team import calls, env, prompts
from jaxmarl_llm.envs.call_team.specialists import SPECIALISTS, owner
from jaxmarl_llm.messages import Action

FLAGS = flags.FLAGS
Task = Mapping[str, Any]
Route = Callable[[Task], str]
Say = Callable[[Task, str], str]  # the task, and the role that writes -> the call

_NUMBER = re.compile(r"(?<![\w#])-?\d+(?:\.\d+)?")
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_DATE = re.compile(rf"\d{{4}}-\d\d-\d\d|\d+/\d+/\d{{4}}|(?:{_MONTHS}) \d+(?:st|nd|rd|th)?,? \d{{4}}")
_MARKED = re.compile(r"\S+@[\w.]+\w|#?\b[A-Za-z_]*\d[\w-]*\b")
_NAMED = re.compile(r"(?<!^)(?<![.?!] )\b[A-Z][\w'-]*(?: [A-Z][\w'-]*)*(?:, [A-Z][\w'-]*)?")
_QUOTED = re.compile(r"\"([^\"]+)\"|'([^']+)'")


def chosen(task: Task, role: str) -> Mapping[str, Any] | None:
    """The function of ``role`` whose words the query of ``task`` shares most; None where the role has none."""
    said = set(re.findall(r"[a-z]+", task["query"].lower()))
    shares = lambda function: len(said & set(re.findall(r"[a-z]+", prompts.signature(function).lower())))
    return max(prompts.offered(task, role), key=shares, default=None)


def found(task: Task, function: Mapping[str, Any]) -> dict[str, Any]:
    """The required arguments of ``function``, as regular expressions find them in the query, each text once."""
    query = task["query"]
    numbers = iter([float(n) if "." in n else int(n) for n in _NUMBER.findall(query)])
    quoted = [a or b for a, b in _QUOTED.findall(query)]
    texts = iter(dict.fromkeys([*quoted, *_NAMED.findall(query), *_MARKED.findall(query), *query.split()[-1:]]))
    made: dict[str, Any] = {}
    for key in function["required"]:
        kind = function["properties"].get(key, {}).get("type", "any")
        if kind in ("integer", "float", "number"):
            made[key] = next(numbers, 0)
        elif kind == "boolean":
            made[key] = True
        elif kind in ("array", "tuple"):
            made[key] = list(numbers) or list(texts)
        elif "date" in key and (date := _DATE.search(query)):
            made[key] = date[0]
        elif re.search("id$|number|email|zip", key) and (marked := _MARKED.search(query)):
            made[key] = marked[0]
        else:
            made[key] = next(texts, "")
    return made


def empty(task: Task, role: str) -> str:
    """A call without arguments."""
    function = chosen(task, role)
    return "" if function is None else calls.write(function["name"], {})


def copied(task: Task, role: str) -> str:
    """A call with the arguments that regular expressions find."""
    function = chosen(task, role)
    return "" if function is None else calls.write(function["name"], found(task, function))


def keyword(task: Task) -> str:
    """The specialist whose keywords the query of ``task`` has."""
    return owner("", task["query"], "bfcl")


def right(task: Task) -> str:
    """The specialist that owns the gold function of ``task``."""
    return task["specialist"]


def played(task: Task, route: str, call: str) -> dict[str, float]:
    """The components of an episode.

    Args:
        task: A task.
        route: Reply of the master.
        call: Reply of the specialist.
    """
    state, rewards, done = env.step(0, env.reset(0, task), {prompts.MASTER: Action(route, ())})
    if not done:
        _, rewards, _ = env.step(0, state, {state.role: Action(call, ())})
    return dict(rewards[prompts.MASTER])


def systems(train: Sequence[Task]) -> dict[str, tuple[Route, Say]]:
    """Name -> route and call of each team. ``train``: the training tasks."""
    ((most, _),) = Counter(task["specialist"] for task in train).most_common(1)
    return {
        "most frequent route, copied arguments": (lambda task: most, copied),
        "route by keywords, no arguments": (keyword, empty),
        "route by keywords, copied arguments": (keyword, copied),
        "right route, no arguments": (right, empty),
        "right route, copied arguments": (right, copied),
        "right route, right call": (right, lambda task, role: env.gold(task)[1][1]),
    }


def counts(train: Sequence[Task], test: Sequence[Task]) -> Iterator[str]:
    """Lines of the table of tasks by source and specialist.

    Args:
        train: Training tasks.
        test: Held-out tasks.
    """
    parts = {
        "training": list(train),
        "unseen function": [task for task in test if task["unseen_function"]],
        "unseen query": [task for task in test if not task["unseen_function"]],
    }
    yield "| tasks | " + " | ".join(parts) + " |"
    yield "| --- |" + " ---: |" * len(parts)
    for field, names in (("source", ("bfcl", "apibank", "retail")), ("specialist", tuple(SPECIALISTS))):
        for name in names:
            yield f"| {name} | " + " | ".join(str(sum(t[field] == name for t in p)) for p in parts.values()) + " |"
    governed = [str(sum(bool(task["governed"]) for task in part)) for part in parts.values()]
    yield f"| with a convention | {' | '.join(governed)} |"
    yield f"| all | {' | '.join(str(len(part)) for part in parts.values())} |"


def reached(train: Sequence[Task], test: Sequence[Task]) -> Iterator[str]:
    """Lines of the table of what teams reach on held-out tasks.

    Args:
        train: Training tasks.
        test: Held-out tasks.
    """
    yield "| team | routed | call | exact | exact, unseen function | exact, unseen query |"
    yield "| --- |" + " ---: |" * 5
    for name, (route, say) in systems(train).items():
        rows = [played(task, route(task), say(task, route(task))) for task in test]
        mean = lambda key, of=rows: float(np.mean([row[key] for row in of])) if of else float("nan")
        sides = [[row for row in rows if row["unseen_function"] == unseen] for unseen in (1.0, 0.0)]
        cells = [mean("routed"), mean("call"), mean("exact"), *(mean("exact", side) for side in sides)]
        yield f"| {name} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |"


def main() -> None:
    """Print both tables."""
    made = {"data_dir": FLAGS.data or None, "conventions": FLAGS.conventions}
    train, test = env.tasks(env.Config(**made)), env.tasks(env.Config(split="test", **made))
    print("\n".join([*counts(train, test), "", *reached(train, test)]))


if __name__ == "__main__":
    flags.DEFINE_string("data", "", "Directory of the data sets; empty: the samples in the package.")
    flags.DEFINE_bool("conventions", False, "Demand the written forms of arguments.")
    config_flags.run(lambda *_: main(), required=())
