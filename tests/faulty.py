"""An environment whose reward fails, for `tests/runs/test_health.py`. Worker processes import it: it needs no JAX."""

from __future__ import annotations

import dataclasses
import time

from jaxmarl_llm.messages import HostEnv, Message

TASKS = 100


@dataclasses.dataclass(frozen=True)
class Config:
    split: str = "train"
    count: int = 0


def my_reward():
    raise KeyError("my reward has a bug")


def prompt(text):
    return (Message("raw", "", tuple(text.encode())),)


class Make:
    """Builds the environment of a fault. share: of the training tasks, the last of them, whose reward fails."""

    def __init__(self, fault, share):
        self.fault, self.share = fault, share

    def __call__(self):
        return HostEnv("faulty", ("solver",), 1, ("accuracy",), lambda seed, task: task, self.observe, self.step)

    def observe(self, task):
        return {"solver": (Message("user", 100 * "long "),) if self.fault == "long" else prompt("?")}

    def step(self, seed, task, actions):
        value = float(seed % 2)
        if TASKS * (1 - self.share) <= task < TASKS:
            if self.fault == "raise":
                my_reward()
            if self.fault == "hang":
                time.sleep(600)
            if self.fault == "few":
                return task, {"solver": {"accuracy": value}}
            value = {"nan": float("nan"), "none": None, "string": "1.0"}.get(self.fault, value)
        return task, {"solver": {"accuracy": value}}, True
