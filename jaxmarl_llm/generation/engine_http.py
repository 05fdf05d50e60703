"""Clients of engines that answer over HTTP: vLLM, tpu-inference and SGLang."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from jaxmarl_llm import json_files
from jaxmarl_llm.config import load_object
from jaxmarl_llm.generation.engine import (
    EngineClient,
    EngineCompletion,
    EngineConfig,
    EngineError,
    EngineRequest,
    ServedModel,
)

MAX_REPLY = 2**28  # bytes of one reply
AGAIN = (429, 502, 503, 504)  # HTTP statuses after which a request is sent again
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before a request is sent again; the last one from then on
SEEDS = 2**63

ClientFactory = Callable[[str, float], EngineClient]


def client_of(cfg: EngineConfig, url: str) -> EngineClient:
    """The client of an engine.

    Args:
        cfg: Names the client.
        url: Address of the engine.
    """
    known: dict[str, ClientFactory] = {"vllm": VllmClient, "sglang": SglangClient}
    factory = known.get(cfg.client) or load_object("config.engine.client", cfg.client)
    return factory(url, cfg.timeout)


class HttpClient:
    """Requests to an engine, and the models that it lists.

    Args:
        url: Address, without the path.
        timeout: Seconds in which a request is answered. Until then a request without an answer is sent again.
    """

    HINTS: ClassVar[Mapping[str, str]] = {}  # path -> how an engine is started that has it

    def __init__(self, url: str, timeout: float):
        self._url, self._timeout = url.rstrip("/"), timeout

    def served(self) -> list[ServedModel]:
        rows = _list(self._call("/v1/models", patient=False), "data", "/v1/models")
        models = [row for row in rows if isinstance(row, Mapping) and isinstance(row.get("id"), str)]
        models.sort(key=lambda row: row.get("parent") is not None)
        size = lambda row: row["max_model_len"] if type(row.get("max_model_len")) is int else None
        return [ServedModel(row["id"], size(row)) for row in models]

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
                    raise EngineError(f"{path}: {told}{self._hint(path, error.code)}") from None
            except (OSError, urllib.error.URLError) as error:  # refused, reset, or late
                told, away = json_files.reason(getattr(error, "reason", None) or error), True
            pause = PAUSES[min(tries, len(PAUSES) - 1)]
            tries += 1
            if not patient or time.monotonic() + pause >= end:
                late = f"no answer within {self._timeout:g} s: " if patient else ""
                raise EngineError(f"{path}: {late}{told}", away)
            time.sleep(pause)

    def _hint(self, path: str, code: int) -> str:
        return f"; {self.HINTS[path]}" if code in (404, 405) and path in self.HINTS else ""


class VllmClient(HttpClient):
    """An engine with vLLM's HTTP interface (vLLM, tpu-inference).

    Start it with ``--logprobs-mode processed_logprobs``. New parameters need ``VLLM_SERVER_DEV_MODE=1``, and adapters
    need ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
    """

    HINTS: ClassVar[Mapping[str, str]] = {
        "/v1/load_lora_adapter": "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
        "/collective_rpc": "start vLLM with VLLM_SERVER_DEV_MODE=1",
        "/reset_prefix_cache": "start vLLM with VLLM_SERVER_DEV_MODE=1",
    }

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


class SglangClient(HttpClient):
    """An engine with SGLang's HTTP interface.

    Adapters need ``--enable-lora`` and ``--max-lora-rank``. Seeds need ``--enable-deterministic-inference``.
    SGLang reports log-probs after the temperature and before filters, so filters are refused.
    """

    HINTS: ClassVar[Mapping[str, str]] = {"/load_lora_adapter": "start SGLang with --enable-lora"}

    def __init__(self, url: str, timeout: float):
        super().__init__(url, timeout)
        self._adapters: set[str] = set()

    def sample(self, request: EngineRequest) -> list[EngineCompletion]:
        sampling, where = request.sampling, "/generate"
        if sampling.filters and sampling.temperature > 0:
            raise EngineError(
                f"{where}: expected config.sampling without top_k, top_p and min_p, because SGLang reports log-probs "
                f"without them; got {sampling}"
            )
        shared = {
            "max_new_tokens": request.max_new_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": True,  # the stop ids of this request alone end a completion
            "stop_token_ids": [int(i) for i in request.stop_ids],
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        # With ``n`` in one entry all samples would have one seed.
        entries = [{**shared, "sampling_seed": (request.seed + i) % SEEDS} for i in range(request.samples)]
        body: dict[str, Any] = {
            "input_ids": [[int(i) for i in request.prompt_ids]] * request.samples,
            "sampling_params": entries,
            "return_logprob": True,
        }
        if request.model in self._adapters:
            body["lora_path"] = [request.model] * request.samples
        rows = self._call(where, body)
        if not isinstance(rows, list) or len(rows) != request.samples:
            raise EngineError(
                f"{where}: expected a list of {request.samples} completions, got {json_files.shown(rows)}"
            )
        return [self._completion(row, request, where) for row in rows]

    def _completion(self, row: Any, request: EngineRequest, where: str) -> EngineCompletion:
        told = row.get("meta_info") if isinstance(row, Mapping) else None
        told = told if isinstance(told, Mapping) else {}
        pairs = told.get("output_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) >= 2 for pair in pairs):
            raise EngineError(f"{where}: expected 'output_token_logprobs', got {json_files.shown(pairs)}")
        logprobs = [pair[0] for pair in pairs]
        if request.sampling.temperature == 0:  # a point mass; SGLang reports those of temperature 1
            logprobs = [0.0] * len(pairs)
        return _checked([pair[1] for pair in pairs], logprobs, told.get("finish_reason"), request, where)

    def load_weights(self, folder: str) -> None:
        self._done("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})

    def load_adapter(self, name: str, folder: str) -> None:
        try:
            self._done("/unload_lora_adapter", {"lora_name": name})
        except EngineError as error:  # an engine that has no such adapter refuses
            if error.away or name in self._adapters:
                raise
        self._done("/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self._adapters.add(name)

    def _done(self, path: str, body: Mapping[str, Any]) -> None:
        reply = self._call(path, body)
        if not isinstance(reply, Mapping) or reply.get("success") is not True:
            raise EngineError(f"{path}: expected 'success' of true, got {json_files.shown(reply, 300)}")


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
    except ValueError:  # no JSON: the text is shown as it is
        pass
    return json_files.shown(" ".join(text.split()), 300)


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
    told = found.get("logprobs")
    logprobs = told.get("token_logprobs") if isinstance(told, Mapping) else None
    if not isinstance(found.get("token_ids"), list):
        got = json_files.shown(found.get("token_ids"))
        raise EngineError(f"{path}: expected 'token_ids' (vLLM 0.11 or newer), got {got}")
    return _checked(found["token_ids"], logprobs, found.get("finish_reason"), request, path)


def _checked(ids: list[Any], logprobs: Any, reason: Any, request: EngineRequest, path: str) -> EngineCompletion:
    """A completion, checked. ``reason``: why the engine ended it, for messages."""
    if not ids or not all(type(i) is int for i in ids):
        raise EngineError(f"{path}: expected token ids, got {json_files.shown(ids)}")
    if not isinstance(logprobs, list) or len(logprobs) != len(ids) or not all(_is_logprob(x) for x in logprobs):
        raise EngineError(f"{path}: expected {len(ids)} log-probs, got {json_files.shown(logprobs)}")
    ended = ids[-1] in request.stop_ids
    if len(ids) > request.max_new_tokens or not (ended or len(ids) == request.max_new_tokens):
        raise EngineError(
            f"{path}: expected a completion of {request.max_new_tokens} tokens, or one that ends with a stop id; "
            f"got {len(ids)} tokens with finish_reason {json_files.shown(reason)}"
        )
    return EngineCompletion(tuple(ids), np.array(logprobs, np.float32), not ended)


def _is_logprob(value: Any) -> bool:
    return type(value) in (int, float) and value <= 1e-3
