"""External engines that sample completions: token ids in, token ids and their log-probs out.

`EngineClient` is the interface of an engine. `VllmClient` speaks the HTTP interface of vLLM, which tpu-inference has
too. An engine reads new parameters from a folder that it shares with the trainer.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxmarl_llm import json_files
from jaxmarl_llm.config import at_least, load_object, positive
from jaxmarl_llm.errors import ConfigError, RunError
from jaxmarl_llm.generation.sampling import Sampling

CONNECTION_LIMIT = 2**12
MAX_REPLY = 2**28  # bytes of one reply
AGAIN = (429, 502, 503, 504)  # HTTP statuses after which a request is sent again
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before a request is sent again; the last one from then on


@dataclass(frozen=True)
class EngineConfig:
    """External engines that sample the completions of a host environment. Without ``urls`` this process samples.

    Samples of an engine are not reproducible to the bit. Their log-probs differ a little from the learner's, see
    ``loss.tis_clip`` and ``run.max_logprob_diff``.
    """

    # model -> address, as {"team": "http://127.0.0.1:8000"}; of adapters the name of their backbone, `backbone`
    urls: dict[str, str] = field(default_factory=dict)
    weights: str | None = None  # folder that trainer and engines share: parameters are written there before a rollout
    client: str = "vllm"  # or package.module:function of your own: (url, timeout) -> `EngineClient`
    timeout: float = 600.0  # seconds in which an engine has to answer a request, or to load parameters
    connections: int = 64  # requests in flight at one engine, at most

    def check(self, path: str) -> None:
        for name, url in self.urls.items():
            parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
            if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
                raise ConfigError(f"{path}.urls.{name}: expected http://HOST:PORT, got {json_files.shown(url)}")
        if self.urls and not self.weights:
            raise ConfigError(f"{path}.weights: expected a folder that trainer and engines share, got {self.weights!r}")
        if self.client != "vllm":
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


ClientFactory = Callable[[str, float], EngineClient]


def client_of(cfg: EngineConfig, url: str) -> EngineClient:
    """The client of an engine.

    Args:
        cfg: Names the client.
        url: Address of the engine.
    """
    factory: ClientFactory = VllmClient if cfg.client == "vllm" else load_object("config.engine.client", cfg.client)
    return factory(url, cfg.timeout)


class VllmClient:
    """An engine with vLLM's HTTP interface (vLLM, tpu-inference).

    Start it with ``--logprobs-mode processed_logprobs``. New parameters need ``VLLM_SERVER_DEV_MODE=1``, and adapters
    need ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.

    Args:
        url: Address, without the path.
        timeout: Seconds in which a request is answered. Until then a request without an answer is sent again.
    """

    def __init__(self, url: str, timeout: float):
        self._url, self._timeout = url.rstrip("/"), timeout

    def served(self) -> list[ServedModel]:
        rows = _list(self._call("/v1/models", patient=False), "data", "/v1/models")
        models = [row for row in rows if isinstance(row, Mapping) and isinstance(row.get("id"), str)]
        models.sort(key=lambda row: row.get("parent") is not None)
        size = lambda row: row["max_model_len"] if type(row.get("max_model_len")) is int else None
        return [ServedModel(row["id"], size(row)) for row in models]

    def sample(self, request: EngineRequest) -> list[EngineCompletion]:
        sampling = request.sampling
        body = {
            "model": request.model,
            "prompt": [int(i) for i in request.prompt_ids],
            "n": request.samples,
            "max_tokens": request.max_new_tokens,
            "seed": request.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "ignore_eos": True,  # the stop ids of this request alone end a completion
            "stop_token_ids": [int(i) for i in request.stop_ids],
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
        }
        where = "/v1/completions"
        choices = _list(self._call(where, body), "choices", where)
        if len(choices) != request.samples:
            raise EngineError(f"{where}: expected {request.samples} completions, got {len(choices)}")
        return [_completion(choice, request, where) for choice in sorted(choices, key=_index)]

    def load_weights(self, folder: str) -> None:
        self._call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        self._call("/reset_prefix_cache", {})

    def load_adapter(self, name: str, folder: str) -> None:
        body = {"lora_name": name, "lora_path": folder, "load_inplace": True}
        self._call("/v1/load_lora_adapter", body)

    def _call(self, path: str, body: Mapping[str, Any] | None = None, patient: bool = True) -> Any:
        """What the engine answers. ``body``: of a POST; None: a GET. ``patient``: whether to ask again."""
        data = None if body is None else json.dumps(body).encode()
        end, tries = time.monotonic() + self._timeout, 0
        while True:
            request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
            left = max(end - time.monotonic(), 0.001)
            try:
                with urllib.request.urlopen(request, timeout=left) as reply:
                    return _parsed(reply.read(MAX_REPLY + 1), path)
            except urllib.error.HTTPError as error:
                told, away = f"HTTP {error.code}: {_told(error)}", False
                if error.code not in AGAIN:
                    raise EngineError(f"{path}: {told}{_hint(path, error.code)}") from None
            except (OSError, urllib.error.URLError) as error:  # refused, reset, or late
                told, away = json_files.reason(getattr(error, "reason", None) or error), True
            pause = PAUSES[min(tries, len(PAUSES) - 1)]
            tries += 1
            if not patient or time.monotonic() + pause >= end:
                late = f"no answer within {self._timeout:g} s: " if patient else ""
                raise EngineError(f"{path}: {late}{told}", away)
            time.sleep(pause)


def _parsed(reply: bytes, path: str) -> Any:
    if len(reply) > MAX_REPLY:
        raise EngineError(f"{path}: the answer has more than {MAX_REPLY} bytes")
    try:
        return json.loads(reply) if reply.strip() else None
    except ValueError:
        return reply.decode("utf-8", "replace")  # some paths answer with a word


def _told(error: urllib.error.HTTPError) -> str:
    """What an engine says about an error, on one line."""
    text = error.read(2**16).decode("utf-8", "replace")
    try:
        found = json.loads(text)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or text
        text = found if isinstance(found, str) else text
    except ValueError:
        pass
    return json_files.shown(" ".join(text.split()), 300)


def _hint(path: str, code: int) -> str:
    if code not in (404, 405):
        return ""
    if path == "/v1/load_lora_adapter":
        return "; start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
    return "; start vLLM with VLLM_SERVER_DEV_MODE=1" if path in ("/collective_rpc", "/reset_prefix_cache") else ""


def _list(reply: Any, key: str, path: str) -> list[Any]:
    if not isinstance(reply, Mapping) or not isinstance(reply.get(key), list):
        raise EngineError(f"{path}: expected an object with the list {key!r}, got {json_files.shown(reply)}")
    return reply[key]


def _index(choice: Any) -> int:
    index = choice.get("index") if isinstance(choice, Mapping) else None
    return index if type(index) is int else 0


def _completion(choice: Any, request: EngineRequest, path: str) -> EngineCompletion:
    """A choice of vLLM's answer, checked."""
    found = choice if isinstance(choice, Mapping) else {}
    ids, told = found.get("token_ids"), found.get("logprobs")
    logprobs = told.get("token_logprobs") if isinstance(told, Mapping) else None
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise EngineError(f"{path}: expected 'token_ids' (vLLM 0.11 or newer), got {json_files.shown(ids)}")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids) or not all(_is_logprob(x) for x in logprobs):
        raise EngineError(f"{path}: expected {len(ids)} 'token_logprobs', got {json_files.shown(logprobs)}")
    ended = ids[-1] in request.stop_ids
    if len(ids) > request.max_new_tokens or not (ended or len(ids) == request.max_new_tokens):
        why = json_files.shown(found.get("finish_reason"))
        raise EngineError(
            f"{path}: expected a completion of {request.max_new_tokens} tokens, or one that ends with a stop id; "
            f"got {len(ids)} tokens with finish_reason {why}"
        )
    return EngineCompletion(tuple(ids), np.array(logprobs, np.float32), not ended)


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and value <= 1e-3
