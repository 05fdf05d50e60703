"""Facts: a team answers a question about twelve facts that it can only search. All in JAX.

Tasks are those of `facts.tasks`, and the search is that of `facts.search`. The protocols, each a module of its own:

    pipeline   rewriter, selector and generator, once each, see `facts.pipeline`
    inspect    planner, solver, and an inspector that passes or has work done again, see `facts.inspection`
    refine     an actor searches, a refiner accepts or cuts its trace, the actor goes on, see `facts.refine`
    mask       planner, searcher, summarizer, updater and answerer keep a chain of steps, see `facts.mask`
    remember   extractor, profiler and retriever keep a memory of a stream and answer from it, see `facts.remember`
    tags       one agent writes plan, searches and answer as tagged segments, or a team does, see `facts.tags`

Shared argument: ``config`` has the settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxmarl_llm.config import one_of
from jaxmarl_llm.envs.array_env import ArrayEnv, Samples
from jaxmarl_llm.envs.facts import inspection, mask, pipeline, refine, remember, tags
from jaxmarl_llm.envs.facts.protocol import Protocol
from jaxmarl_llm.envs.facts.tasks import TaskConfig

PROTOCOLS: dict[str, Protocol] = {
    "pipeline": pipeline.PROTOCOL,
    "inspect": inspection.PROTOCOL,
    "refine": refine.PROTOCOL,
    "remember": remember.PROTOCOL,
    "mask": mask.PROTOCOL,
    "tags": tags.PROTOCOL,
}


@dataclass(frozen=True)
class Config(TaskConfig):
    """The settings of tasks, the protocol, and the settings of each protocol under its name."""

    protocol: str = "pipeline"  # who acts when, see above
    pipeline: pipeline.Settings = field(default_factory=pipeline.Settings)
    inspect: inspection.Settings = field(default_factory=inspection.Settings)
    refine: refine.Settings = field(default_factory=refine.Settings)
    remember: remember.Settings = field(default_factory=remember.Settings)
    mask: mask.Settings = field(default_factory=mask.Settings)
    tags: tags.Settings = field(default_factory=tags.Settings)

    def check(self, path: str) -> None:
        super().check(path)
        one_of(f"{path}.protocol", self.protocol, tuple(PROTOCOLS))
        getattr(self, self.protocol).check(f"{path}.{self.protocol}")


def make(config: Config) -> ArrayEnv:
    """The environment of ``config``."""
    return PROTOCOLS[config.protocol].make(config, getattr(config, config.protocol))


def make_tasks(
    config: Config, seed: int | None = None, n: int | None = None, *, held_out: bool = False
) -> dict[str, np.ndarray]:
    """``n`` tasks (or ``config.tasks``) drawn from ``seed`` (or ``config.seed``), as arrays of bytes and places.

    ``held_out``: the side of the split. The columns are those of `tasks.rows`, and what the protocol adds.
    """
    return PROTOCOLS[config.protocol].make_tasks(config, getattr(config, config.protocol), seed, n, held_out)


def demonstrations(config: Config, seed: int, n: int, *, context: int = 0) -> Samples:
    """``n`` imperfect samples of each role, drawn from ``seed``; the protocol says which mistakes they have.

    ``context`` is not used.
    """
    return PROTOCOLS[config.protocol].demonstrations(config, getattr(config, config.protocol), seed, n)


def prompt_length(config: Config) -> int:
    """P: the number of tokens of the longest prompt without memory."""
    return PROTOCOLS[config.protocol].prompt_length(getattr(config, config.protocol))


def entry_length(config: Config) -> int:
    """The number of tokens of the longest memory entry: a prompt, a completion without eos, sep."""
    return prompt_length(config) + PROTOCOLS[config.protocol].response
