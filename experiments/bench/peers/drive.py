"""The peer's side of a comparison: the other system's step, in its own environment, one step for each line read.

A driver is run as ``python trl_grpo.py SPEC`` (SPEC is JSON) by the environment's Python and imports nothing of this
project. It prints one line of JSON when it is ready and one for each step it was asked for, on the stdout it was
started with; whatever else the system prints goes to stderr. It ends when its stdin does.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

SPEC: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "WANDB_MODE": "disabled"}
os.environ |= {"OMP_NUM_THREADS": str(SPEC.get("threads", 1)), "TQDM_DISABLE": "1"}
_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


class Turns:
    """Protocol of a driver: `begin` waits for the line that requests a step, `end` replies with the seconds since."""

    def __init__(self, *packages: str) -> None:
        self._clock: float | None = None
        versions = {name: importlib.metadata.version(name) for name in packages}
        print(json.dumps({"ready": True, "versions": versions}), file=_answers)

    def begin(self) -> None:
        if not sys.stdin.readline():
            _answers.flush()
            os._exit(0)  # the parent is gone or done; the system's own threads are not waited for
        self._clock = time.perf_counter()

    def end(self) -> None:
        if self._clock is not None:
            print(json.dumps({"seconds": time.perf_counter() - self._clock}), file=_answers)
        self._clock = None

    def items(self, item: Any, settle: Any = None) -> Iterator[Any]:
        """Infinite data set: a step lasts from one item to the next. ``settle()`` waits for unfinished work."""
        while True:
            if settle is not None:
                settle()
            self.end()
            self.begin()
            yield item


def words(vocab: int) -> Any:
    """Tokenizer of ``vocab`` words w0, w1, ...; the last two are eos and pad."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    eos, pad = f"w{vocab - 2}", f"w{vocab - 1}"
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, pad_token=pad, padding_side="left")


def prompt(length: int, vocab: int) -> str:
    """As many tokens of `words`, neither eos nor pad."""
    return " ".join(f"w{(7919 * i + 13) % (vocab - 2)}" for i in range(length))


def torch_model(hf: dict[str, Any]) -> Any:
    """A transformers model of this config.json with random weights, whose generation never stops early."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(SPEC["threads"])
    torch.manual_seed(0)
    hf = dict(hf) | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(hf.pop("model_type"), **hf))
