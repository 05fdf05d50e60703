"""Values and exceptions of the replies of a jail, and their one-line descriptions."""

from __future__ import annotations

import builtins
import contextlib
from typing import Any

from jaxmarl_llm.sandbox import codec


class CandidateError(Exception):
    """Stands for a program's exception that has no builtin base class below Exception."""


def value_of(reply: list) -> Any:
    """Value that a reply returns; raises the exception that it reports. ProtocolError for a malformed reply."""
    match reply:
        case ["ok", content]:
            return codec.plain(content)
        case ["unplain", str(why)]:
            raise CandidateError(f"the function returned {why}")
        case ["raised", list(names), str(own), str(message)] if all(isinstance(n, str) for n in names):
            raise _builtin_error(names, own, message)
    raise codec.ProtocolError("a reply of unknown form")


def _builtin_error(names: list[str], own: str, message: str) -> Exception:
    """Exception of the first builtin class in ``names`` whose constructor takes only a message.

    names: base classes, nearest first. own: class in the program. message: text of the exception.
    """
    for name in names:
        cls = getattr(builtins, name, None)
        if isinstance(cls, type) and issubclass(cls, Exception) and cls not in (Exception, StopIteration):
            with contextlib.suppress(TypeError):  # UnicodeDecodeError, ExceptionGroup
                return cls(message)
    return CandidateError(f"{own}: {message}" if own not in ("Exception", "BaseException") else message)


def line(error: BaseException) -> str:
    """Class and message of the exception ``error``, in one line of at most 200 characters."""
    try:
        text = str(error)
    except Exception:  # the message may contain an integer with too many digits
        text = ""
    name = "" if isinstance(error, CandidateError) else type(error).__name__
    text = ": ".join(part for part in (name, " ".join(text.split())) if part)
    return text[:200].encode("utf-8", "replace").decode("utf-8") or type(error).__name__
