"""External engines that sample completions: token ids in, token ids and their log-probs out.

`EngineClient` is the interface of an engine, and `generation.engine_http` has the clients of vLLM and SGLang. An engine
reads new parameters from a folder that it shares with the trainer.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from jaxmarl_llm import json_files
from jaxmarl_llm.config import at_least, load_object, positive
from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.generation.sampling import Sampling

CONNECTION_LIMIT = 2**12
CLIENTS = ("vllm", "sglang")


@dataclass(frozen=True)
class EngineConfig:
    """External engines that sample the completions of a host environment. Without ``urls`` this process samples.

    Samples of an engine are not reproducible to the bit. Their log-probs differ a little from the learner's, see
    ``loss.tis_clip`` and ``run.max_logprob_diff``.
    """

    # model -> address, as {"team": "http://127.0.0.1:8000"}; of adapters the name of their backbone, `backbone`
    urls: dict[str, str] = field(default_factory=dict)
    weights: str | None = None  # folder that trainer and engines share: parameters are written there before a rollout
    client: str = "vllm"  # vllm, sglang, or package.module:function of your own: (url, timeout) -> `EngineClient`
    timeout: float = 600.0  # seconds in which an engine has to answer a request, or to load parameters
    connections: int = 64  # requests in flight at one engine, at most

    def check(self, path: str) -> None:
        for name, url in self.urls.items():
            parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
            if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
                raise ConfigError(f"{path}.urls.{name}: expected http://HOST:PORT, got {json_files.shown(url)}")
        if self.urls and not self.weights:
            raise ConfigError(f"{path}.weights: expected a folder that trainer and engines share, got {self.weights!r}")
        if self.client not in CLIENTS:
            load_object(f"{path}.client", self.client)
        positive(f"{path}.timeout", self.timeout)
        at_least(f"{path}.connections", self.connections, 1, CONNECTION_LIMIT)


class EngineRequest(NamedTuple):
    """Completions of one prompt."""

    model: str  # as the engine names it: one of `EngineClient.served`, or an adapter
    prompt_ids: Sequence[int]
    samples: int
    max_new_tokens: int
    stop_ids: Sequence[int]  # a completion ends with the first of them
    seed: int  # from 0 to 2^63 - 1, another one for each prompt
    sampling: Sampling


class EngineCompletion(NamedTuple):
    """One completion of an engine."""

    ids: tuple[int, ...]  # the stop id included
    logprobs: np.ndarray  # of ``ids``, under the distribution that they were drawn from
    truncated: bool  # it has no stop id, because it reached ``max_new_tokens``


class ServedModel(NamedTuple):
    """A model that an engine serves."""

    name: str
    max_tokens: int | None  # of prompt and completion together; None: the engine does not say


class EngineClient(Protocol):
    """One engine. Functions may be called from several threads at once.

    Each function raises `EngineError` where the engine does not do what was asked.
    """

    def served(self) -> Sequence[ServedModel]:
        """The models that the engine serves, the one without adapters first. Asked once, at the start of a run."""
        ...

    def sample(self, request: EngineRequest, /) -> list[EngineCompletion]:
        """Sample.

        Args:
            request: A prompt, and how to sample its completions.
        """
        ...

    def load_weights(self, folder: str, /) -> None:
        """Replace the parameters of the model, and forget what was computed with the earlier ones.

        Args:
            folder: A folder that `transformers` loads, of the same architecture.
        """
        ...

    def load_adapter(self, name: str, folder: str, /) -> None:
        """Load an adapter, in place of the one that has this name.

        Args:
            name: Name in requests.
            folder: A folder that `peft` loads.
        """
        ...


class EngineError(RunError):
    """An engine that is away, slow, or refuses: one line. ``away``: nobody answered at its address."""

    def __init__(self, line: str, away: bool = False):
        super().__init__(line)
        self.away = away
