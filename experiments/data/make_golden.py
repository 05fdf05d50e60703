"""Store the checkpoint of a tiny run, as this version writes it, for the tests of all later versions:

    python -m experiments.data.make_golden [--out=tests/storage/golden]

It writes VERSION.zip, the workdir after two steps, and VERSION.npz, every array of its state as numpy writes it. A
version has one such pair, made before its release, and the pair never changes (tests/storage/test_golden.py).
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from jaxmarl_llm import __version__

ONE_HEAD = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4}
# Two roles that share a model, with memories: parameters, moments of AdamW, memories, counters and a key.
CONFIG = {
    "steps": 2,
    "batch": 8,
    "group": 4,
    "env": {"name": "matrix", "eval_tasks": 4},
    "reward": {"payoff": 1.0},
    "memory_reward": {"payoff": 1.0},
    "memory": {"capacity": 2, "retrieve": 1, "warmup": 4},
    "team": {
        "max_new_tokens": 1,
        "remat": False,
        "parameter_sharing": "shared",
        "backbone": {"hidden_size": 4, "intermediate_size": 4, "num_layers": 1, **ONE_HEAD},
    },
    "sft": {"steps": 30, "batch": 16, "samples": 32, "optimizer": {"learning_rate": 0.1}},
    "optimizer": {"learning_rate": 0.01},
    "run": {"checkpoint_every": 100, "keep": 1, "eval_every": 0, "log_every": 100, "tensorboard": False},
}
FILES = ("checkpoints", "config.json", "metrics.jsonl")  # of the workdir


def arrays(state: Any) -> dict[str, np.ndarray]:
    """Every array of a state by path, without the frozen backbone; a PRNG key as its key data, bfloat16 as float32."""
    import jax

    from jaxmarl_llm.runs.files import without_shared

    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(without_shared(state)):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found[jax.tree_util.keystr(path)] = array.astype(np.float32) if array.dtype.kind == "V" else array
    return found


def make(out: Path) -> Path:
    """Train, and write both files to the folder ``out``. Returns the path of the zip file."""
    from jaxmarl_llm.config import from_dict
    from jaxmarl_llm.recipes import joyagents_r1
    from jaxmarl_llm.runs.loop import fit

    target = out / f"{__version__}.zip"
    if target.exists():
        raise SystemExit(f"{target} exists; the checkpoint of a version never changes")
    cfg = from_dict(joyagents_r1.Config, CONFIG)
    with tempfile.TemporaryDirectory() as folder:
        state = fit(cfg, joyagents_r1.make(cfg), folder)
        out.mkdir(parents=True, exist_ok=True)
        named: Any = arrays(state)  # numpy's types take each name for the argument allow_pickle
        np.savez_compressed(out / f"{__version__}.npz", **named)
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in sorted(Path(folder).rglob("*")):
                name = file.relative_to(folder)
                if name.parts[0] in FILES:
                    archive.write(file, name)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="tests/storage/golden")
    print(make(Path(parser.parse_args().out)))
