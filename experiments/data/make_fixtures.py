"""Create the data samples of the package from a directory with the full files. Equal input gives equal bytes.

    python -m experiments.data.make_fixtures --data_dir=DIR [--out=jaxmarl_llm/data/fixtures]

DIR holds gsm8k/ bfcl/ hotpotqa/ taubench_retail/ scitldr/ as described in jaxmarl_llm/data/loaders.py, humaneval/ mbpp/
as described in jaxmarl_llm/data/code_tasks.py, and apibank/ as described in jaxmarl_llm/data/call_sets.py.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

from jaxmarl_llm.data import code_tasks
from jaxmarl_llm.data.loaders import FIXTURES
from jaxmarl_llm.envs.assistant import env as assistant
from jaxmarl_llm.envs.coding import env as coding

CC_BY_SA = """HotpotQA by Zhilin Yang, Peng Qi, Saizheng Zhang, Yoshua Bengio, William W. Cohen, Ruslan Salakhutdinov
and Christopher D. Manning (2018), https://hotpotqa.github.io, and the Wikipedia text in it, are distributed under the
Creative Commons Attribution-ShareAlike 4.0 International License (CC BY-SA 4.0),
https://creativecommons.org/licenses/by-sa/4.0/legalcode.

This folder holds an unmodified selection of its questions and is distributed under the same licence. The licence
covers this folder only, not the program around it.
"""


CC_BY = """MBPP (Mostly Basic Python Problems) by Jacob Austin, Augustus Odena, Maxwell Nye and others (2021, Program
Synthesis with Large Language Models, arXiv 2108.07732), in https://github.com/google-research/google-research, is
distributed under the Creative Commons Attribution 4.0 International License (CC BY 4.0),
https://creativecommons.org/licenses/by/4.0/legalcode; so says its dataset card, google-research-datasets/mbpp.

This folder holds an unmodified selection of its problems. The licence covers this folder only.
"""
NOTICES = {"hotpotqa": CC_BY_SA, "mbpp": CC_BY}  # of the sets without a LICENSE file


def pick(rows: list[Any], count: int) -> list[Any]:
    """Sample of ``count`` rows in their original order, drawn with a fixed seed."""
    return [rows[i] for i in sorted(random.Random(0).sample(range(len(rows)), count))]


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").split("\n") if line.strip()]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8", newline="\n")


def write_jsonl(path: Path, rows: list[dict]) -> None:
    write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def write_json(path: Path, value: Any) -> None:
    write(path, json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def gsm8k(source: Path, out: Path) -> str:
    for split, count in (("train", 60), ("test", 40)):
        write_jsonl(out / f"{split}.jsonl", pick(jsonl(source / f"{split}.jsonl"), count))
    return "60 of the train and 40 of the test rows, unchanged"


def bfcl(source: Path, out: Path) -> str:
    for category in ("simple_python", "multiple", "live_simple"):
        name = f"BFCL_v4_{category}.json"
        rows = pick([r for r in jsonl(source / name) if len(json.dumps(r)) < 2500], 30)
        answers = {r["id"]: r for r in jsonl(source / "possible_answer" / name)}
        write_jsonl(out / name, rows)
        write_jsonl(out / "possible_answer" / name, [answers[r["id"]] for r in rows])
    return "30 rows each of simple_python, multiple and live_simple with their possible answers, unchanged"


def apibank(source: Path, out: Path) -> str:
    files = [p for p in sorted((source / "lv1-lv2-samples").glob("*/*.jsonl")) if 0 < p.stat().st_size < 1200]
    for path in pick(files, 30):
        write(out / path.relative_to(source), path.read_text("utf-8"))
    return "30 of the 264 dialogues, each of less than 1,200 bytes, unchanged"


def hotpotqa(source: Path, out: Path) -> str:
    rows = json.loads((source / "dev_distractor_slice.json").read_text("utf-8"))
    write_json(out / "dev_distractor_slice.json", pick([r for r in rows if len(r["context"]["title"]) == 10], 30))
    return "30 of the 100 questions with all their paragraphs, unchanged"


def taubench_retail(source: Path, out: Path) -> str:
    db = {t: json.loads((source / f"{t}.json").read_text("utf-8")) for t in ("users", "orders", "products")}
    config = assistant.Config(data_dir=str(source.parent))
    users: set[str] = set()
    for split, count in (("train", 26), ("dev", 4), ("test", 10)):
        tasks = json.loads((source / f"tasks_{split}.json").read_text("utf-8"))
        chosen = pick([t for t in tasks if 1 <= len(t["actions"]) <= 3 and usable(config, t)], count)
        users |= {t["user_id"] for t in chosen}
        write_json(out / f"tasks_{split}.json", chosen)
    orders = {key: o for key, o in db["orders"].items() if o["user_id"] in users}
    products = {i["product_id"] for o in orders.values() for i in o["items"]}
    write_json(out / "users.json", {k: u for k, u in db["users"].items() if k in users})
    write_json(out / "orders.json", orders)
    write_json(out / "products.json", {k: p for k, p in db["products"].items() if k in products})
    what = "40 solvable tasks with 1 to 3 gold actions, and their users, those users' orders and these orders' products"
    return f"{what}, unchanged; upstream's task files are Python literals"


def scitldr(source: Path, out: Path) -> str:
    for split, count in (("train", 64), ("test", 32)):
        rows = jsonl(source / "SciTLDR-A" / f"{split}.jsonl")
        fit = [r for r in rows if 100 <= size(*r["source"]) <= 300 and min(size(t) for t in r["target"]) >= 8]
        write_jsonl(out / "SciTLDR-A" / f"{split}.jsonl", pick(fit, count))
    return "64 train and 32 test rows of 100 to 300 abstract words and summaries of at least 8, unchanged"


def humaneval(source: Path, out: Path) -> str:
    lines = gzip.decompress((source / "HumanEval.jsonl.gz").read_bytes()).decode().split("\n")
    rows = [json.loads(line) for line in lines if line.strip()]
    chosen = code_sample("humaneval", source.parent, {"train": 14, "dev": 4, "test": 6})
    write_jsonl(out / "HumanEval.jsonl", [r for r in rows if r["task_id"] in chosen])
    return "24 of the 164 problems, of each split first those whose solution has two functions, unchanged, unpacked"


def mbpp(source: Path, out: Path) -> str:
    rows = json.loads((source / "sanitized-mbpp.json").read_text("utf-8"))
    chosen = code_sample("mbpp", source.parent, {"train": 8, "dev": 4, "test": 4})
    write_json(out / "sanitized-mbpp.json", [r for r in rows if f"MBPP/{r['task_id']}" in chosen])
    return "16 of the 427 sanitised problems, chosen as in humaneval, unchanged"


def code_sample(benchmark: str, data: Path, counts: dict[str, int]) -> set[str]:
    """Ids of a sample of problems. Half of each split's share has solutions with a helper function, if there are
    enough.
    """
    chosen: set[str] = set()
    for split, count in counts.items():
        tasks, _ = code_tasks.load_code(benchmark, data_dir=data, split=split)
        apart = [t["id"] for t in tasks if coding.split_solution(t)[0]]
        first = pick(apart, min(count // 2, len(apart)))
        chosen |= {*first, *pick([t["id"] for t in tasks if t["id"] not in first], count - len(first))}
    return chosen


def size(*texts: str) -> int:
    """Number of words."""
    return sum(len(text.split()) for text in texts)


def usable(config: assistant.Config, row: dict) -> bool:
    """Whether the reference script of the environment solves a task."""
    return assistant.solvable(config, assistant.as_task("shop", row | {"id": ""}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data_dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=FIXTURES)
    flags = parser.parse_args()
    for cut in (gsm8k, bfcl, apibank, hotpotqa, taubench_retail, scitldr, humaneval, mbpp):
        source, out = flags.data_dir / cut.__name__, flags.out / cut.__name__
        what = cut(source, out)
        notes = (source / "SOURCE.txt").read_text("utf-8").split("\n")
        kept = [line for line in notes if line.startswith(("repo:", "commit:", "licence:"))]
        if cut is mbpp:  # the copy's note is older than the look at the dataset card
            kept[-1] = "licence: CC-BY-4.0 (the dataset card of google-research-datasets/mbpp says so)"
        write(out / "SOURCE.txt", "\n".join([*kept, f"this folder: {what}; cut by experiments/make_fixtures.py", ""]))
        if (source / "LICENSE").exists():
            shutil.copyfile(source / "LICENSE", out / "LICENSE")
        else:
            write(out / "LICENSE", NOTICES[cut.__name__])


if __name__ == "__main__":
    main()
