"""Experts outside of this program: a function, or a chat endpoint with OpenAI's protocol.

An expert is given as ``module:function`` (or a callable). Or it is the base URL of an endpoint, such as
``http://localhost:8000/v1``, with the name of a model. A field names the environment variable that holds the key. The
key itself stands in no configuration and no message.

Every failure raises `ExpertError`. No answer is invented.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxmarl_llm.envs.checks import ARGS, refuse
from jaxmarl_llm.errors import ConfigError

MAX_ANSWER = 1 << 18  # bytes of an endpoint's reply
MOST_TIMEOUT, MOST_RETRIES = 3600, 10  # the pauses between attempts double
EXPECTED = "module:function, a function, or the base URL of an endpoint, http(s)://..."
Expert = Callable[..., Any]  # its arguments are those of the environment
RETRIED = (408, 409, 429, 500, 502, 503, 504)


class ExpertError(RuntimeError):
    """The failure of an expert to give a usable answer; the message is one line with the reason."""


@dataclass(frozen=True)
class Endpoint:
    """A chat endpoint."""

    url: str
    model: str
    key_env: str
    timeout: float  # seconds for one attempt, all of it
    retries: int  # attempts after the first
    pause: float = 0.5  # seconds before the first retry, doubled each time
    max_tokens: int = 1024

    def chat(self, instructions: str, question: str) -> str:
        """The endpoint's answer.

        instructions: the system's message
        question: the user's message

        Raises:
            ExpertError: No attempt brought an answer, or the answer is no text.
        """
        body = {
            "model": self.model,
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
            "messages": [{"role": "system", "content": instructions}, {"role": "user", "content": question}],
        }
        pause = self.pause
        for attempt in range(self.retries + 1):
            try:
                return self._ask(body)
            except _Again as error:
                if attempt == self.retries:
                    raise ExpertError(f"expert {self.url}: {error} ({attempt + 1} attempts)") from None
            time.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def _ask(self, body: dict[str, Any]) -> str:
        data = json.dumps(body).encode()  # ASCII: lone surrogates in a completion do no harm
        request = urllib.request.Request(f"{self.url.rstrip('/')}/chat/completions", data, method="POST")
        request.add_header("Content-Type", "application/json")
        if key := os.environ.get(self.key_env, ""):
            request.add_header("Authorization", f"Bearer {key}")
        deadline = time.monotonic() + self.timeout
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                raw = b""
                # The timeout of a socket is one of each read: a server that drips would never end.
                while chunk := reply.read1(1 << 16):
                    raw += chunk
                    if len(raw) > MAX_ANSWER:
                        raise ExpertError(f"expert {self.url}: an answer of more than {MAX_ANSWER} bytes")
                    if time.monotonic() > deadline:
                        raise _Again(f"no answer within {self.timeout:g} s")
                if reply.length:  # what is still to come
                    raise _Again(f"the answer was cut off {reply.length} bytes before its end")
        except urllib.error.HTTPError as error:
            with error:
                if error.code in RETRIED:
                    raise _Again(f"HTTP {error.code}") from None
                raise ExpertError(f"expert {self.url}: HTTP {error.code} {error.reason}") from None
        except TimeoutError:
            raise _Again(f"no answer within {self.timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:  # URLError is an OSError
            reason = getattr(error, "reason", error)
            raise _Again(f"{type(error).__name__}: {' '.join(str(reason).split())[:120]}") from None
        try:
            text = json.loads(raw)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            raise ExpertError(f"expert {self.url}: the reply is no chat completion") from None
        if not isinstance(text, str):
            raise ExpertError(f"expert {self.url}: the reply holds no text")
        return text


class _Again(Exception):
    """A failure after which another attempt may succeed."""


def check_limits(path: str, timeout: float, retries: int) -> None:
    """Check the limits of an endpoint. ``path``: name of the Config in messages.

    ``timeout``: seconds of one attempt. ``retries``: attempts after the first.
    """
    if not 0 < timeout <= MOST_TIMEOUT:
        refuse(path, "expert_timeout", f"more than 0 and at most {MOST_TIMEOUT} seconds", timeout)
    if not 0 <= retries <= MOST_RETRIES:
        refuse(path, "expert_retries", f"0 to {MOST_RETRIES}", retries)


def resolve(
    expert: Any,
    *,
    endpoint: Callable[..., Expert],
    path: str = ARGS,
    field: str = "expert",
    model: str = "",
    key_env: str = "OPENAI_API_KEY",
    timeout: float = 10.0,
    retries: int = 1,
) -> Expert:
    """The expert that a configuration names. Raises ConfigError.

    expert: a callable, ``module:function`` or the base URL of an endpoint
    endpoint: makes the expert of (url, model, key_env, timeout, retries), for instance a subclass of `Endpoint`
    path: the dotted name of the Config that holds the expert, for error messages
    field: the name of its field there
    model, key_env: an endpoint's model, and the environment variable that holds its key
    timeout, retries: an endpoint's seconds for one attempt, and its attempts after the first
    """
    if callable(expert):
        return expert
    if not isinstance(expert, str) or not expert:
        refuse(path, field, EXPECTED, expert)
    check_limits(path, timeout, retries)
    if re.match(r"https?://", expert):
        if not model:
            refuse(path, "expert_model", f"the name of a model of {expert}", model)
        return endpoint(expert, model, key_env, timeout, retries)
    module, _, name = expert.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path}.{field}: expected {EXPECTED}, got {expert!r} ({error})") from None
    if not callable(found):
        raise ConfigError(f"{path}.{field}: expected {EXPECTED}, got {expert!r}, which is not a function")
    return found
