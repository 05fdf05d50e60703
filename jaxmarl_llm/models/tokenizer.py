"""Text to token ids and back: in a prompt, an agent's own earlier turns are exactly the ids it sampled.

Two properties hold for every tokenizer here:

1. Content never becomes control. Only the chat template puts control ids into a prompt, whatever text a user, tool,
   memory or peer writes. Control ids are role markers, end of turn, ``<think>``, ``<tool_call>`` and every added token.
2. Token-in, token-out. A turn that the reader sampled is inserted as ids, and ``render`` is append-only:
   ``render(prompt + (own turn, ...))`` starts with ``render(prompt) + sampled ids``, for any template. This holds by
   construction: the text before an own turn is rendered as it was when the turn was sampled, generation header
   included. (Templates alone do not do this: Qwen3 drops ``<think>`` blocks from history, also the empty one it writes
   itself.)
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from jaxmarl_llm.errors import ConfigError
from jaxmarl_llm.messages import Message, Prompt
from jaxmarl_llm.models import tokenizer_files
from jaxmarl_llm.models.chat_template import ChatTemplate
from jaxmarl_llm.models.token_pieces import byte_level


class Text(NamedTuple):
    """Template text without control tokens. Neighbouring texts are encoded together, as in the whole template."""

    text: str


class Control(NamedTuple):
    """A control token of the template."""

    id: int


class Slot(NamedTuple):
    """Place of a message's content in the template."""

    message: int  # index of the message
    strip: bool = False  # whether the template strips white space around the content


class Fitted(NamedTuple):
    """A prompt that fits a length limit."""

    ids: list[int]
    cut: int  # number of content tokens left out


@dataclass
class _Part:
    content: str | list[int]
    cuttable: bool = False


class Tokenizer(ABC):
    """Interface of a tokenizer with a chat template.

    ``stop_ids`` end a completion; the template's own end of turn is the first. All ids are below ``vocab_size``.
    """

    name: str
    vocab_size: int
    pad_id: int
    stop_ids: tuple[int, ...]

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Encode plain content. The result never has control ids."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text, without the control tokens that mark turns."""

    def token_bytes(self, token: int) -> bytes | None:
        """Bytes of UTF-8 that a token adds to `decode`. ``token``: its id.

        Empty for a token that `decode` leaves out. None where the bytes depend on neighbours.
        """
        return None

    def token_name(self, token: int) -> str:
        """Name of a token for readers. ``token``: its id."""
        return f"<{token}>"

    def save(self, directory: Path) -> None:  # noqa: B027
        """Write the files from which transformers reads the tokenizer, where there are any."""

    @abstractmethod
    def layout(self, shape: tuple[tuple[str, bool], ...]) -> tuple[Text | Control | Slot, ...]:
        """Lay out the template, generation header included.

        Args:
            shape: (speaker, whether the message is inserted as ids) of each message.
        """

    def render(self, prompt: Prompt, reader: str) -> list[int]:
        """Encode a prompt, ready for ``reader`` to continue.

        A message that has ids and whose owner is ``reader`` is inserted as these ids. The template's end of turn
        follows; it is not doubled if it was sampled. ``raw`` messages are inserted without a template: at the end they
        are behind the generation header (a turn to be continued). A prompt of raw messages alone has no template.

        Args:
            prompt: the messages.
            reader: name of the agent that samples the next turn.
        """
        return self._join(self._parts(prompt, reader))

    def fit(self, prompt: Prompt, reader: str, max_length: int) -> Fitted:
        """Encode a prompt as `render` does, in at most ``max_length`` ids.

        Tokens are dropped from the middle of the longest content that is not a system message, then of the next
        longest. Template, system text and generation header stay whole. Raises `ConfigError` if these are too long.

        Args:
            prompt: the messages.
            reader: name of the agent that samples the next turn.
            max_length: largest number of ids.
        """
        parts, cut = self._parts(prompt, reader), 0
        ids = self._join(parts)
        while len(ids) > max_length:
            for part in parts:
                if part.cuttable and isinstance(part.content, str):
                    part.content = self.encode(part.content)
            longest = max((p for p in parts if p.cuttable), key=lambda p: len(p.content), default=None)
            if longest is None or not longest.content:
                raise ConfigError(
                    f"prompt of {reader!r}: template and system text alone take {len(ids)} tokens, limit {max_length}"
                )
            assert isinstance(longest.content, list)  # encoded above
            drop = min(len(ids) - max_length, len(longest.content))
            head = (len(longest.content) - drop + 1) // 2
            longest.content = [*longest.content[:head], *longest.content[head + drop :]]
            cut += drop
            ids = self._join(parts)
        return Fitted(ids, cut)

    def _parts(self, prompt: Prompt, reader: str) -> list[_Part]:
        if not prompt:
            raise ConfigError(f"prompt of {reader!r}: it has no messages")
        for message in prompt:
            if message.speaker == "raw" and message.ids is None:
                raise ConfigError(f"prompt of {reader!r}: a raw message needs ids")
        pieces = self.layout(tuple((m.speaker, _spliced(m, reader)) for m in prompt))
        parts = []
        for piece, after in zip(pieces, (*pieces[1:], None)):
            if isinstance(piece, Text):
                parts.append(_Part(piece.text))
            elif isinstance(piece, Control):
                parts.append(_Part([piece.id]))
            else:
                message = prompt[piece.message]
                content: str | list[int]
                if _spliced(message, reader):
                    assert message.ids is not None
                    content = [int(i) for i in message.ids]
                    if content and isinstance(after, Control) and content[-1] == after.id and after.id in self.stop_ids:
                        content.pop()  # the template writes it
                else:
                    content = message.text.strip() if piece.strip else message.text
                parts.append(_Part(content, cuttable=message.speaker != "system"))
        return parts

    def _join(self, parts: list[_Part]) -> list[int]:
        ids: list[int] = []
        run = ""
        for part in parts:
            if isinstance(part.content, str):
                run += part.content
            else:
                ids += self.encode(run) + part.content
                run = ""
        return ids + self.encode(run)


def _spliced(message: Message, reader: str) -> bool:
    return message.speaker == "raw" or (message.ids is not None and message.owner == reader)


def _valid(text: str) -> str:
    """Join pairs of surrogates and replace single ones, so that the text can be encoded in UTF-8."""
    if any("\ud800" <= c <= "\udfff" for c in text):
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes: ids 0-255, then pad, eos, sep, system, user, assistant, tool; 263 is unused.

    A message is its role marker, its bytes, and sep, or eos for the assistant. The generation header is the assistant
    marker alone.
    """

    PAD, EOS, SEP = 256, 257, 258
    ROLES: ClassVar = {"system": 259, "user": 260, "assistant": 261, "tool": 262}

    name = "bytes"
    vocab_size = 264
    pad_id = PAD
    stop_ids = (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(_valid(text).encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= i < 256).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if 0 <= token < 256 else b""

    def token_name(self, token: int) -> str:
        names = {"pad": self.PAD, "eos": self.EOS, "sep": self.SEP, **self.ROLES}
        return next((f"<{name}>" for name, number in names.items() if number == token), super().token_name(token))

    def save(self, directory: Path) -> None:
        tokenizer_files.save_bytes(directory, {"pad": self.PAD, "eos": self.EOS, "sep": self.SEP, **self.ROLES})

    def layout(self, shape: tuple[tuple[str, bool], ...]) -> tuple[Text | Control | Slot, ...]:
        pieces: list[Text | Control | Slot] = []
        header = max((k + 1 for k, (speaker, _) in enumerate(shape) if speaker != "raw"), default=None)
        for k, (speaker, _) in enumerate(shape):
            if speaker == "raw":
                pieces.append(Slot(k))
            elif speaker in self.ROLES:
                end = self.EOS if speaker == "assistant" else self.SEP
                pieces += [Control(self.ROLES[speaker]), Slot(k), Control(end)]
            else:
                raise ConfigError(f"speaker {speaker!r}: expected one of {', '.join(self.ROLES)} or raw")
            if k + 1 == header:
                pieces.append(Control(self.ROLES["assistant"]))
        return tuple(pieces)


# Ends of text beside the template's end of turn; published generation configs list them as eos too.
_STOPS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "</s>")
# Placeholder of message k in the template: private-use characters. The white space shows whether it is stripped.
_MARK = "\u2003\ue000{}\ue001\u2003"
_MARKS = re.compile("(\u2003?)\ue000(\\d+)\ue001\u2003?")


class HFTokenizer(Tokenizer):
    """Hugging Face tokenizer with its chat template.

    The template is rendered with a placeholder in place of every content, so it cannot read or change content. Only
    where it strips white space is content stripped. On content without added tokens and ``</think>`` the ids are those
    of the tokenizer's own ``apply_chat_template``; this is checked once, on construction.

    Args:
        path: a directory with ``tokenizer.json``, or a ``.gguf`` file.
        enable_thinking: argument of templates that know it (Qwen3); None leaves it out.
        chat_template: a template in place of the tokenizer's own.
    """

    def __init__(
        self, path: str | Path, *, enable_thinking: bool | None = None, chat_template: str | None = None
    ) -> None:
        path = Path(path)
        with tokenizer_files.one_line(f"tokenizer {path}"):
            self._open(path, enable_thinking, chat_template)

    def _open(self, path: Path, enable_thinking: bool | None, chat_template: str | None) -> None:
        self.name = str(path)
        self.hf = tokenizer_files.load(path)
        if chat_template is not None:
            self.hf.chat_template = chat_template
        if not isinstance(self.hf.chat_template, str):
            raise ConfigError(f"tokenizer {path}: it has no single chat template; give chat_template=")
        self._chat_template = ChatTemplate(self.hf.chat_template, f"tokenizer {path}")
        self._template_args: dict[str, Any] = dict(self.hf.special_tokens_map)
        if enable_thinking is not None:
            if "enable_thinking" not in self.hf.chat_template:
                raise ConfigError(f"tokenizer {path}: its chat template does not know enable_thinking")
            self._template_args["enable_thinking"] = enable_thinking
        self._backend = self.hf.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self._added = {t.content: i for i, t in added.items()}
        self._left_out = frozenset(i for i, t in added.items() if t.special)  # of decoded text
        self._byte_level = type(self._backend.decoder).__name__ == "ByteLevel"
        self._control = frozenset(self._added.values())
        self._added_pattern = re.compile("|".join(map(re.escape, sorted(self._added, key=len, reverse=True))) or "$^")
        self._plain = _without_added_tokens(self._backend)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self._cached_layout = functools.lru_cache(maxsize=4096)(self._layout)
        self.stop_ids = self._find_stops(path)
        pad = self.hf.pad_token_id
        self.pad_id = self.stop_ids[-1] if pad is None else pad
        for name, id in (("pad", self.pad_id), *(("eos", id) for id in self.stop_ids)):
            if not 0 <= id < self.vocab_size:
                raise ConfigError(f"tokenizer {path}: {name} token: id {id} is outside the {self.vocab_size} ids")
        self._check(path)

    def encode(self, text: str) -> list[int]:
        ids = self._plain.encode(_valid(text), add_special_tokens=False).ids
        if not self._control.isdisjoint(ids):
            bad = next(i for i in ids if i in self._control)
            raise ConfigError(
                f"tokenizer {self.name}: plain text gives control token {self._backend.id_to_token(bad)!r}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes | None:
        if token in self._left_out or (text := self._backend.id_to_token(token)) is None:
            return b""
        return byte_level(text) if self._byte_level else None

    def token_name(self, token: int) -> str:
        return self._backend.id_to_token(token) or super().token_name(token)

    def save(self, directory: Path) -> None:
        self.hf.save_pretrained(str(directory))

    def layout(self, shape: tuple[tuple[str, bool], ...]) -> tuple[Text | Control | Slot, ...]:
        return self._cached_layout(shape)

    def _layout(self, shape: tuple[tuple[str, bool], ...]) -> tuple[Text | Control | Slot, ...]:
        pieces: list[Text | Control | Slot] = []
        index: list[int] = []  # message of each templated turn so far
        cut, behind = 0, ""  # turns that are in pieces already, and the text behind the last of them that is

        def emit(header: bool) -> None:
            nonlocal behind
            text = self._template(tuple(shape[k][0] for k in index), header)
            if cut:
                text = _MARKS.split(text, maxsplit=cut)[-1]
            if not text.startswith(behind):
                raise ConfigError(f"tokenizer {self.name}: its chat template rewrites text before a raw message")
            pieces.extend(self._parse(text[len(behind) :], index))
            behind = text

        for k, (speaker, spliced) in enumerate(shape):
            if speaker == "raw":
                if index:
                    emit(header=all(s == "raw" for s, _ in shape[k:]))
                pieces.append(Slot(k))
            elif speaker == "assistant" and spliced and index:
                emit(header=True)
                pieces.append(Slot(k))
                index.append(k)
                cut, behind = len(index), ""
            else:
                index.append(k)
        if index:
            emit(header=True)
        return tuple(pieces)

    def _template(self, speakers: tuple[str, ...], header: bool) -> str:
        """Render the template with a mark for every content. Each mark must occur once, and in order."""
        messages = [{"role": s, "content": _MARK.format(k)} for k, s in enumerate(speakers)]
        text = self._chat_template.render(messages, add_generation_prompt=header, **self._template_args)
        if [int(m[2]) for m in _MARKS.finditer(text)] != list(range(len(speakers))):
            raise ConfigError(f"tokenizer {self.name}: its chat template drops, repeats or moves turns of {speakers}")
        return text

    def _parse(self, text: str, index: Sequence[int]) -> list[Text | Control | Slot]:
        pieces: list[Text | Control | Slot] = []
        start = 0
        for mark in (*_MARKS.finditer(text), None):
            plain, at = text[start : mark.start() if mark else None], 0
            for token in self._added_pattern.finditer(plain):
                pieces += [Text(plain[at : token.start()]), Control(self._added[token[0]])]
                at = token.end()
            pieces.append(Text(plain[at:]))
            if mark:
                pieces.append(Slot(index[int(mark[2])], strip=not mark[1]))
                start = mark.end()
        return [p for p in pieces if p != Text("")]

    def _find_stops(self, path: Path) -> tuple[int, ...]:
        """Find the template's end of turn, eos of the tokenizer and of generation_config.json, known ends of text."""
        pieces = self.layout((("user", False), ("assistant", False), ("user", False)))
        answer = next(k for k, piece in enumerate(pieces) if isinstance(piece, Slot) and piece.message == 1)
        after = pieces[answer + 1]
        stops = [after.id] if isinstance(after, Control) else []
        stops += [] if self.hf.eos_token_id is None else [self.hf.eos_token_id]
        stops += tokenizer_files.stop_ids(path, self.vocab_size)
        stops += [self._added[s] for s in _STOPS if s in self._added]
        if not stops:
            raise ConfigError(f"tokenizer {path}: it has no eos token")
        return tuple(dict.fromkeys(stops))

    def _check(self, path: Path) -> None:
        """Check that encoding in pieces equals encoding the whole (not so if the tokenizer marks a text's start)."""
        contents = ("Hi, you: 3 x 4?", "\n 12 \u00e9\u4f60", "And\nthen")
        speakers = ("user", "assistant", "user")
        text = self._template(speakers, header=True)
        whole = _MARKS.sub(lambda m: contents[int(m[2])] if m[1] else contents[int(m[2])].strip(), text)
        expected = self._backend.encode(whole, add_special_tokens=False).ids
        if self.render(tuple(map(Message, speakers, contents)), "") != expected:
            raise ConfigError(f"tokenizer {path}: its chat template cannot be encoded in pieces")


def _without_added_tokens(backend: Any) -> Any:
    """Copy a tokenizer without its added tokens, special or not, for content."""
    from tokenizers import Tokenizer as Backend

    spec = json.loads(backend.to_str())
    spec["added_tokens"] = []
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    return Backend.from_str(json.dumps(spec))
