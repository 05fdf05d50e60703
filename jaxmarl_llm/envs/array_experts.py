"""Experts outside of the program that answer in an array environment (`Observation.expert`).

A compiled rollout calls back to Python, once for all states of a turn. A callback runs in this process, so one process
plays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from absl import logging
from jaxtyping import Array, Bool, Int

from jaxmarl_llm.distributed import processes
from jaxmarl_llm.envs.checks import ARGS
from jaxmarl_llm.envs.outside_experts import ExpertError
from jaxmarl_llm.errors import ConfigError

AT_ONCE = 8  # questions that are asked at the same time


class HostExpert:
    """An expert that is asked for one state after a map over states, from inside a compiled program.

    A question that was answered is not asked again in this process. A question without an answer is asked again when it
    comes up again. The reason of each kind of failure is logged once.

    Args:
        expert: Function from the text of a question to the text of an answer. It is called from several threads.
        size: X, the tokens of the longest answer.
        reads: Whether an answer has the form that the environment reads.
        form: That form in words, for messages.

    Raises:
        ConfigError: The run has several processes.
    """

    def __init__(self, expert: Callable[[str], Any], size: int, reads: Callable[[str], bool], form: str):
        if processes.count() > 1:
            raise ConfigError(f"{ARGS}: an expert outside answers in one process alone, got {processes.count()}")
        self.expert, self.size, self.reads, self.form = expert, size, reads, form
        self.answers: dict[str, str] = {}
        self._failures: set[str] = set()
        self._lock = threading.Lock()

    def __call__(
        self, question: Int[Array, " T"], length: Int[Array, ""], wanted: Bool[Array, ""]
    ) -> tuple[Int[jax.Array, " X"], Int[jax.Array, ""]]:
        """The answer to a question, and its number of tokens; 0 without an answer.

        Args:
            question: Its bytes, padded.
            length: Number of its tokens.
            wanted: Whether it is asked at all.
        """
        shapes = jax.ShapeDtypeStruct((self.size,), np.int32), jax.ShapeDtypeStruct((), np.int32)
        return jax.pure_callback(self._rows, shapes, question, length, wanted, vmap_method="broadcast_all")

    def _rows(self, question: Array, length: Array, wanted: Array) -> tuple[np.ndarray, np.ndarray]:
        """As `__call__`, of questions [... T], from the host."""
        asked, count, where = np.asarray(question), np.asarray(length), np.nonzero(np.asarray(wanted))
        tokens, size = np.zeros((*count.shape, self.size), np.int32), np.zeros(count.shape, np.int32)
        texts = {at: bytes(asked[at][: count[at]].tolist()).decode() for at in zip(*where, strict=True)}
        self._ask(sorted({*texts.values()} - {*self.answers}))
        for at, text in texts.items():
            ids = self.answers.get(text, "").encode()
            tokens[at][: len(ids)], size[at] = list(ids), len(ids)
        return tokens, size

    def _ask(self, texts: list[str]) -> None:
        """Ask what is not known. Answers go to ``answers``."""
        if not texts:
            return
        with ThreadPoolExecutor(min(AT_ONCE, len(texts))) as pool:
            found = list(pool.map(self._answer, texts))
        with self._lock:
            self.answers |= {text: answer for text, answer in zip(texts, found, strict=True) if answer is not None}

    def _answer(self, question: str) -> str | None:
        """The checked answer to one question; None without one."""
        try:
            said = self.expert(question)
            if not isinstance(said, str):
                raise ExpertError(f"expert: an answer must be text, not {type(said).__name__}")
            said = said.strip()
            if len(said.encode("utf-8", "replace")) > self.size or not self.reads(said):
                raise ExpertError(f"expert: expected {self.form}, got {said[:40]!r}")
            return said
        except ExpertError as error:
            reason = str(error)
        except Exception as error:  # of any kind: it is the user's own
            reason = f"expert raised {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        with self._lock:
            new = reason not in self._failures and len(self._failures) < 20
            self._failures |= {reason} if new else set()
        if new:
            logging.warning("%s; what the expert does not answer is invalid", reason)
        return None
