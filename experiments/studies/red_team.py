"""Degenerate strategies against the shipped rewards: what each one earns, beside a human reference.

    python -m experiments.studies.red_team [--data=DIR] [--split=test] [--tasks=N] [--only=writing] [--out=FILE.md]

A strategy is a rule that needs no understanding: copy, invent, repeat, shuffle, stop early, answer at once. A reward
holds when no strategy earns more than the median reference. Both the median and the mean over tasks count. A strategy
may use the best partner text of a task too, so that it is judged at its strongest.

The references. Writing: a human summary with a run of the abstract's sentences (tldr), or the beginning of the human
abstract with a later part of it (arxiv), whichever pair pays most; a task without such a pair counts as 0. Nobody
wrote introductions for arxiv, so whole sentences of the abstract are the reference there, and strategies that copy
sentences come close to it. Assistant: the scripted perfect team. Coding: the canonical solution. Questions about
passages (`facts_text`): gold titles as queries, their numbers, the gold answer. Calls (`call_team`): the right route
and the gold call; with conventions on the tasks that have one, in the demanded form. The reference game: a human
summary as the hint, and a listener that knows the title. Two writers: a human summary, one of those that pay. Letters
(the small text tasks): a perfect team, whose master repeats what its specialist says. Some roles play the strategy and
the others are perfect, where the strategy says so. A spoilt perfect reply comes close to the reference where most of
it is right.

The columns of the paper are the published reward on the same texts: `parity` of writing, `sum` of the assistant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from absl import flags

from experiments.studies.red_team_assistant import assistant_table
from experiments.studies.red_team_calls import calls_table
from experiments.studies.red_team_coding import coding_table
from experiments.studies.red_team_facts import facts_table
from experiments.studies.red_team_letters import LETTERS, letters_table
from experiments.studies.red_team_reference import game_table, writers_table
from experiments.studies.red_team_table import Table, markdown
from experiments.studies.red_team_writing import WRITING_TASKS, writing_table
from jaxmarl_llm.cli import config_flags
from jaxmarl_llm.envs.assistant import env as assistant
from jaxmarl_llm.envs.call_team import env as call_team
from jaxmarl_llm.envs.coding import env as coding
from jaxmarl_llm.envs.facts import text as facts
from jaxmarl_llm.envs.reference_game import env as game
from jaxmarl_llm.envs.two_writers import env as writers
from jaxmarl_llm.envs.writing import env as writing

FLAGS = flags.FLAGS


def tables(data: str | None = None, count: int = 0, only: str = "", split: str = "train") -> Iterable[Table]:
    """All tables, one after another. CoopHumanEval needs ``data``: the package has no sample of it.

    Args:
        data: Directory of data sets; None for the samples in the package.
        count: Tasks of each table; 0 for all.
        only: Beginning of the tables' titles.
        split: Part of the data sets.
    """
    made: dict[str, Callable[[], Table]] = {}
    for name, args in WRITING_TASKS.items():
        told = writing.Config(data=data, split=split, count=count, **args)
        made[f"writing, {name}"] = partial(writing_table, f"writing, {name}", told)
    for domain in assistant.DOMAINS:
        config = assistant.Config(data_dir=data, split=split, count=count)
        made[f"assistant, {domain}"] = partial(assistant_table, domain, config)
    made["coding, humaneval"] = lambda: coding_table(coding.Config(data=data, split=split))
    made["coding, mbpp"] = lambda: coding_table(coding.Config(benchmark="mbpp", data=data, split=split))
    if data:
        made["coding, coophumaneval"] = lambda: coding_table(coding.Config("coophumaneval", data=data, split=split))
    made["facts_text"] = lambda: facts_table(facts.Config(data_dir=data, split=split), count)
    made["reference_game"] = lambda: game_table(game.Config(data=data, split=split, count=count))
    made["two_writers"] = lambda: writers_table(writers.Config(data=data, split=split, count=count))
    for title, demanded in (("call_team", False), ("call_team, conventions", True)):
        told_calls = call_team.Config(data_dir=data, split=split, conventions=demanded)
        made[title] = partial(calls_table, told_calls, count)
    for name in LETTERS:
        made[f"letters, {name}"] = partial(letters_table, name, count)
    return (make() for title, make in made.items() if title.startswith(only))


def main(argv: Sequence[str]) -> None:
    """Prints all tables, and writes them to ``--out``."""
    from experiments.studies.common import origin

    start = time.time()
    parts = [markdown(table) for table in tables(FLAGS.data or None, FLAGS.tasks, FLAGS.only, FLAGS.split)]
    made = origin()
    head = (
        "# Red team: degenerate strategies against the shipped rewards\n\n"
        f"Made on {made['date']} at commit {made['commit']} on {made['machine']} in {time.time() - start:.0f} s by\n\n"
        f"    {made['command']}\n\n{__doc__.split(chr(10) * 2, 2)[2].strip()}\n"
    )
    page = "\n".join([head, *parts])
    print(page)
    if FLAGS.out:
        Path(FLAGS.out).write_text(page)


if __name__ == "__main__":
    flags.DEFINE_string("data", "", "Directory of the data sets; empty: the samples in the package.")
    flags.DEFINE_integer("tasks", 0, "Tasks of each table; 0: all.", lower_bound=0)
    flags.DEFINE_enum("split", "train", ["train", "test"], "Part of the data sets.")
    flags.DEFINE_string("only", "", "Only tables whose title begins so, such as writing.")
    flags.DEFINE_string("out", "", "Also write the page to this file.")
    config_flags.run(lambda *_: main([]), required=())
