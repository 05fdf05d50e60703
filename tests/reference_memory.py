"""Slow twin of the adaptive memory: one entry is one dict, one rule is one sentence of Python, all in float64."""

from __future__ import annotations

import math

import numpy as np


def unit(key):
    key = np.asarray(key, np.float64)
    norm = math.sqrt(float((key**2).sum()))
    return key / norm if norm > 0 else key


class Twin:
    def __init__(self, config):
        self.config = config
        self.slots = [None] * config.capacity
        self.rewards = []  # every reward ever seen
        self.now = 0

    def thresholds(self):
        mean, spread = float(np.mean(self.rewards)), self.config.z * float(np.std(self.rewards))
        return max(mean - spread, min(self.rewards)), min(mean + spread, max(self.rewards))

    def read(self, query):
        query = unit(query)
        found = []
        for slot, entry in enumerate(self.slots):
            if entry is not None and query.any():
                cosine = float(entry["key"] @ query)
                if cosine >= self.config.min_similarity:
                    found.append((-cosine, -entry["weight"], slot))
        found = sorted(found)[: self.config.retrieve]
        found += [(0.0, 0.0, -1)] * (self.config.retrieve - len(found))
        return [slot for _, _, slot in found], [-cosine for cosine, _, _ in found]

    def update(self, samples, now):
        """``samples``: dicts with key, ids, text, reward, retrieved, similarity, valid."""
        config, out = self.config, dict.fromkeys(("inserted", "refreshed", "penalised", "evicted"), 0)
        self.clock = max(self.now, now)
        samples = [s for s in samples if s["valid"] and np.isfinite([*s["key"], *s["similarity"], s["reward"]]).all()]
        self.rewards += [s["reward"] for s in samples]
        lo, hi = self.thresholds() if self.rewards else (0.0, 0.0)
        armed = len(self.rewards) >= config.warmup and len(set(self.rewards)) > 1
        before = list(self.slots)
        for s in samples:
            bad, good = armed and s["reward"] <= lo, armed and s["reward"] >= hi
            for slot in sorted(set(s["retrieved"])):
                entry = self.slots[slot] if 0 <= slot < config.capacity else None
                if entry is not None and entry is before[slot]:  # it was there when the prompt was made
                    cosines = [c for j, c in zip(s["retrieved"], s["similarity"]) if j == slot]
                    self.use(slot, s["reward"], min(max(*cosines, 0.0), 1.0), bad, out)
            if good and np.any(s["key"]):
                self.write(s, out)
        for slot, entry in enumerate(self.slots):
            if entry is not None:
                idle = self.clock - max(entry["last_used"], self.now)
                entry["weight"] -= config.alpha * (1 - math.exp(-config.decay * idle))
                self.evict_if_light(slot, out)
        self.now = self.clock
        left = [e["weight"] for e in self.slots if e is not None]
        hits = sum(any(j >= 0 for j in s["retrieved"]) for s in samples)
        out |= {"size": len(left), "mean_weight": sum(left) / max(len(left), 1), "hit": hits / max(len(samples), 1)}
        return out | {"lo": lo, "hi": hi}

    def use(self, slot, reward, cosine, bad, out):
        entry, config = self.slots[slot], self.config
        change = config.beta * cosine * (reward - entry["reward"])
        if bad:
            change = min(change, 0.0) - config.penalty
            out["penalised"] += 1
        entry["weight"] = min(entry["weight"] + change, config.max_weight)
        entry["uses"] += 1
        entry["reward"] += (reward - entry["reward"]) / (entry["uses"] + 1)
        entry["last_used"] = self.clock
        self.evict_if_light(slot, out)

    def evict_if_light(self, slot, out):
        if self.slots[slot]["weight"] < self.config.min_weight:
            self.slots[slot] = None
            out["evicted"] += 1

    def write(self, s, out):
        config, key = self.config, unit(s["key"])
        content = {"key": key, "ids": s["ids"], "text": s["text"]}
        cosines = [-math.inf if e is None else float(e["key"] @ key) for e in self.slots]
        best = int(np.argmax(cosines))
        if cosines[best] >= config.refresh_similarity:
            entry = self.slots[best]
            entry["last_used"], entry["weight"] = self.clock, max(entry["weight"], config.initial_weight)
            if s["reward"] > entry["reward"]:
                entry.update(content)
            out["refreshed"] += 1
            return
        entry = content | {"weight": config.initial_weight, "reward": float(np.mean(self.rewards)), "uses": 0}
        entry |= {"last_used": self.clock}
        if None in self.slots:
            self.slots[self.slots.index(None)] = entry
            out["inserted"] += 1
            return
        slot = min(range(config.capacity), key=lambda j: (self.slots[j]["weight"], self.slots[j]["last_used"], j))
        if self.slots[slot]["weight"] < config.initial_weight:
            self.slots[slot] = entry
            out["inserted"] += 1
            out["evicted"] += 1
