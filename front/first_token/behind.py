"""Decode's stream behind a first token that the client has. No I/O."""

from __future__ import annotations

import re

import msgspec

from kvferry.front.first_token.answer import SentToken

MAX_EVENT_BYTES = 32 * 1024 * 1024  # of decode's stream, until the token is out of it: one may have a prompt's ids
_END = re.compile(rb"\r?\n\r?\n")  # of an event
_NULL = msgspec.Raw(b"null")


class Unlike(Exception):
    """A reply does not begin with the token that was sent, or does not follow it."""

    check = (
        "check that decode servers have --scheduler-cls with kvferry's scheduler, that their logs say that replies "
        "begin with prefill's token, and that they have blocks free"
    )


class SaidReasoning(Unlike):
    """Decode's reply begins with reasoning, or a tool call, where text was sent: what follows it is no content."""

    check = "with this --reasoning-parser kvferry front must have --first-token decode"


class Lost(Exception):
    """Decode's stream is over, in the middle."""


class SaidError(Exception):
    """Decode's stream has an error in the token's place. `event`: as it came, with all that came behind it."""

    def __init__(self, event: bytes) -> None:
        super().__init__(event[:300].decode(errors="replace").strip())
        self.event = event


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: object = None
    reasoning_content: object = None
    tool_calls: object = None


class _StreamChoice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Counts(msgspec.Struct):
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _Counts | None = None
    error: object = None
    prompt_token_ids: list[int] | None = None


_CHUNKS = msgspec.json.Decoder(_Chunk)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class _Events:
    """A stream's events, each once it is whole. `done`: the rest is passed on as it comes."""

    def __init__(self) -> None:
        self._held = b""  # of an event that has not ended
        self._looked = 0  # bytes of it in which no end is
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """What goes on to the client."""
        if self.done:
            return data
        given, self._held = self._held + data, b""
        out: list[bytes] = []
        start = 0
        while not self.done:
            end = _END.search(given, max(start, self._looked))
            if end is None:
                self._hold(given[start:])
                return b"".join(out)
            self._looked = 0
            out.append(self._event(given[start : end.end()], given[end.end() :]))
            start = end.end()
        out.append(given[start:])
        return b"".join(out)

    def _hold(self, rest: bytes) -> None:
        if len(rest) > MAX_EVENT_BYTES:
            raise Unlike(f"decode's stream has an event of more than {MAX_EVENT_BYTES} bytes")
        self._held, self._looked = rest, max(0, len(rest) - 3)

    def _event(self, event: bytes, rest: bytes) -> bytes:
        """What goes on of an event, behind which `rest` has come already."""
        raise NotImplementedError


class Behind(_Events):
    """Takes what was sent out of decode's stream: the token's text from its first deltas, its id where ids are shown,
    the chunk that says the role. All else goes on as it came, and nothing is looked at once the token is out."""

    def __init__(self, sent: SentToken) -> None:
        """`feed` raises Unlike, SaidError."""
        super().__init__()
        self._want = sent.text
        self._token = sent.token if sent.shown else None  # as long as it is to come

    def end(self) -> None:
        """Says that the stream is over."""
        if not self.done:
            raise Lost("its stream ended before it had the first token")

    def _event(self, event: bytes, rest: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        if data == b"[DONE]":
            raise Unlike("decode's reply ended before it had the token")
        try:
            chunk = _CHUNKS.decode(data)
        except msgspec.DecodeError as error:
            raise Unlike(f"decode's stream has an event that is no chunk: {error}") from error
        if chunk.error is not None:
            raise SaidError(event + rest)
        if not chunk.choices:
            return event
        if len(chunk.choices) > 1 or chunk.choices[0].index:
            raise Unlike("decode's reply has several choices")
        choice = chunk.choices[0]
        if _says_role(choice):
            return b""
        text, ids = self._taken(choice)
        if text == _text_of(choice) and ids == (choice.token_ids or []):
            return event
        if not text and not ids and choice.finish_reason is None:
            return b""
        return _rewritten(data, text, ids if choice.token_ids is not None else None)

    def _taken(self, choice: _StreamChoice) -> tuple[str, list[int]]:
        """What is left of a chunk's text and ids."""
        delta, text, ids = choice.delta, _text_of(choice), choice.token_ids or []
        if delta is not None and (delta.reasoning or delta.reasoning_content or delta.tool_calls):
            raise SaidReasoning(f"decode's reply begins with what is no content, where {self._want!r} was sent")
        if self._token is not None and ids:
            if ids[0] != self._token:
                raise Unlike(f"decode's reply begins with the token {ids[0]}, where {self._token} was sent")
            self._token, ids = None, ids[1:]
        common = min(len(text), len(self._want))
        if text[:common] != self._want[:common]:
            raise Unlike(f"decode's reply begins with {text[:64]!r}, where {self._want!r} was sent")
        self._want, text = self._want[common:], text[common:]
        self.done = not self._want and self._token is None
        if (text or ids) and not self.done:
            raise Unlike("decode's reply goes on before it has told the token's text and its id")
        if not self.done and choice.finish_reason is not None:
            raise Unlike(f"decode's reply ended before {self._want!r} of what was sent")
        return text, ids


class GoneOn(_Events):
    """The stream of another reply that begins behind the token, as if it began with it: without the chunk that says
    the role and the prompt's ids, its counts as those of one reply, the ids of its tokens only where ids are shown."""

    def __init__(self, sent: SentToken) -> None:
        """`feed` raises Unlike, SaidError."""
        super().__init__()
        self._sent = sent
        self._hidden = ("prompt_token_ids",) if sent.shown else ("prompt_token_ids", "token_ids")
        self.begun = False  # its prompt is the first reply's and the token

    def _event(self, event: bytes, rest: bytes) -> bytes:
        data = data_of(event)
        if data is None:
            return event
        try:
            chunk, fields = _CHUNKS.decode(data), _FIELDS.decode(data)
        except msgspec.DecodeError:
            return event
        if not self.begun:
            self._begin(chunk, event + rest)
        if chunk.choices and _says_role(chunk.choices[0]):
            return b""
        if chunk.usage is not None:
            prompt, replied = self._sent.prompt_tokens, chunk.usage.completion_tokens + 1
            told = {"prompt_tokens": prompt, "completion_tokens": replied, "total_tokens": prompt + replied}
            fields["usage"] = _json(_FIELDS.decode(fields["usage"]) | told)
        if chunk.choices:
            choice = _FIELDS.decode(_LIST.decode(fields["choices"])[0])
            fields["choices"] = _json([self._without_hidden(choice)])
        return b"data: " + _json(self._without_hidden(fields)) + b"\n\n"

    def _begin(self, chunk: _Chunk, stream: bytes) -> None:
        """Looks at the prompt's ids, which the first chunk has. A template may write another prompt for a message that
        is to go on, and a text may have other tokens where it is longer."""
        if chunk.error is not None:
            raise SaidError(stream)
        ids = chunk.prompt_token_ids or (chunk.choices[0].prompt_token_ids if chunk.choices else None) or []
        if len(ids) != self._sent.prompt_tokens + 1 or self._sent.token not in (None, ids[-1]):
            raise Unlike(f"the prompt to go on from is not the {self._sent.prompt_tokens} tokens and the one sent")
        self.begun = True

    def _without_hidden(self, fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
        return fields | {name: _NULL for name in self._hidden if name in fields}


def data_of(event: bytes) -> bytes | None:
    """What an event says. None: it is a comment, or has other fields."""
    lines = [line for line in event.splitlines() if line]
    if len(lines) != 1 or not lines[0].startswith(b"data:"):
        return None
    return lines[0].removeprefix(b"data:").strip()


def _text_of(choice: _StreamChoice) -> str:
    return (choice.text if choice.delta is None else choice.delta.content) or ""


def _says_role(choice: _StreamChoice) -> bool:
    delta = choice.delta
    said = delta is not None and delta.role is not None
    return said and not (_text_of(choice) or choice.token_ids or choice.finish_reason)


def _rewritten(data: bytes, text: str, ids: list[int] | None) -> bytes:
    """The chunk with this text and these ids in the place of its own; the prompt's ids have been sent."""
    chunk = _FIELDS.decode(data)
    choice = _FIELDS.decode(_LIST.decode(chunk["choices"])[0])
    if "delta" in choice:
        choice["delta"] = _json(_FIELDS.decode(choice["delta"]) | {"content": _json(text)})
    else:
        choice["text"] = _json(text)
    if ids is not None:
        choice["token_ids"] = _json(ids)
    if "prompt_token_ids" in choice:
        choice["prompt_token_ids"] = _NULL
    chunk["choices"] = _json([_json(choice)])
    return b"data: " + _json(chunk) + b"\n\n"


def _json(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
