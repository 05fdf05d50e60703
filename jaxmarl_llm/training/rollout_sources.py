"""Which completion an entry of a memory was written from, for recorded rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxmarl_llm.agents.memory import encode_text
from jaxmarl_llm.training.algorithm import StepParts, StepResult

TOLERANCE = 1e-5  # of the cosine of two equal keys: the memory and this module round differently


def sources(step: StepParts, result: StepResult, role: int, store: Any, slots: np.ndarray) -> dict[int, int]:
    """Find the completions whose prompt and content are those of entries.

    Args:
        step: Parts of the training step.
        result: Result of the step, on the host.
        role: Index of the role that owns the memory.
        store: The memory after the step.
        slots: Slots that the step wrote [n].

    Returns:
        Slot -> row of the first such completion. A slot without one is left out.
    """
    tree, found = result.tree, dict[int, int]()
    rows = np.flatnonzero(result.credited.valid & (tree.nodes.role[tree.steps.node] == role))
    if not len(slots) or not len(rows):
        return found
    query = tree.nodes.retrieved.query[tree.steps.node[rows]][:, : store.key.shape[1]].astype(np.float32)
    keys = query / np.maximum(np.linalg.norm(query, axis=1, keepdims=True), 1e-30)
    near = keys @ np.asarray(store.key[slots], np.float32).T > 1 - TOLERANCE  # [rows n]
    asked = np.flatnonzero(near.any(1))
    if not len(asked):
        return found
    entries = _entries(step, result, rows[asked], store)
    for k, slot in enumerate(slots.tolist()):
        content = store.ids[slot, : store.length[slot]].tolist(), store.text[slot].tobytes()
        for at, entry in zip(asked.tolist(), entries, strict=True):
            if near[at, k] and entry == content:
                found[slot] = int(rows[at])
                break
    return found


def _entries(step: StepParts, result: StepResult, rows: np.ndarray, store: Any) -> Sequence[tuple[list[int], bytes]]:
    """Ids and bytes of the entry that each of ``rows`` would write. Without a program, so on one process alone."""
    runner, size = step.env_runner, store.text.shape[1]
    if not runner.array:
        ids, length, texts = runner.lessons(step.team, result.played, rows)
        return [(ids[k, : length[k]].tolist(), encode_text(texts[k], size).tobytes()) for k in range(len(rows))]
    tokenizer, tree, empty = step.team.models[0].tokenizer, result.tree, bytes(size)
    separator: int = tokenizer.SEP  # array environments have the tokenizer of bytes
    out = []
    for s in rows.tolist():
        n = tree.steps.node[s]
        asked = tree.nodes.tokens[n, tree.nodes.retrieved.added[n] : tree.nodes.length[n]].tolist()
        answered = [t for t in tree.steps.tokens[s, : tree.steps.length[s]].tolist() if t not in tokenizer.stop_ids]
        out.append(([*asked, *answered, separator][: store.ids.shape[1]], empty))
    return out
