"""A reply's first token, out of the prefill server's answer: as vLLM's stream would say it, and what decode's stream is
behind it. No I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

MAX_EVENT_BYTES = 32 * 1024 * 1024  # of decode's stream, until the token is out of it: one may have a prompt's ids
REPLACED = "\N{REPLACEMENT CHARACTER}"
_END = re.compile(rb"\r?\n\r?\n")  # of an event
_NULL = msgspec.Raw(b"null")


class Unlike(Exception):
    """Decode's reply does not begin with the token that was sent."""


class Lost(Exception):
    """Decode's stream is over, in the middle."""


class SaidError(Exception):
    """Decode's stream has an error in the token's place. `event`: as it came, with all that came behind it."""

    def __init__(self, event: bytes) -> None:
        super().__init__(event[:300].decode(errors="replace").strip())
        self.event = event


# -- prefill's answer --------------------------------------------------------------------------------------------------


class _Message(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None
    reasoning: object = None
    reasoning_content: object = None
    tool_calls: object = None
    function_call: object = None
    refusal: object = None
    audio: object = None

    @property
    def is_plain(self) -> bool:
        others = (self.reasoning, self.reasoning_content, self.tool_calls, self.function_call, self.refusal, self.audio)
        return not any(others)


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = _NULL


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Transfer(msgspec.Struct):
    kvferry_first_token: int | None = None


class PrefillAnswer(msgspec.Struct):
    """The fields that count here; what else vLLM says is passed over."""

    kv_transfer_params: _Transfer | None = None  # what kvferry's connector says: its pages are sent
    id: str = ""
    created: int = 0
    model: str = ""
    choices: list[_Choice] = []
    prompt_token_ids: msgspec.Raw = _NULL
    usage: _Usage | None = None

    @property
    def ends(self) -> bool:
        """Whether the reply has no more than this token, whatever its bound."""
        return len(self.choices) == 1 and self.choices[0].finish_reason == "stop"


_ANSWERS = msgspec.json.Decoder(PrefillAnswer)


def parse_answer(data: bytes) -> PrefillAnswer | None:
    """None: it is not what vLLM says."""
    try:
        return _ANSWERS.decode(data)
    except msgspec.DecodeError:
        return None


def as_whole_reply(data: bytes) -> bytes:
    """Prefill's answer as a client gets it: what it says to decode is left out."""
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    return msgspec.json.encode(fields | {"kv_transfer_params": _NULL})


# -- what the client gets at once --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstToken:
    text: str
    events: bytes  # of the reply's stream, up to it
    token: int | None  # where prefill names it
    shown: bool  # its id is in the events
    prompt_tokens: int


def first_token_of(answer: PrefillAnswer, *, shows_ids: bool) -> FirstToken | None:
    """What can be sent before decode has said anything. None: the answer is not one whole token of plain text behind
    which the reply goes on. shows_ids: the client has asked for them."""
    if len(answer.choices) != 1:
        return None
    choice = answer.choices[0]
    message, ids = choice.message, choice.token_ids
    text = choice.text if message is None else message.content
    if choice.finish_reason != "length" or choice.index or (message is not None and not message.is_plain):
        return None
    if text is None or text.endswith(REPLACED) or (not text and not shows_ids):
        return None
    if shows_ids and (ids is None or len(ids) != 1):
        return None
    shown = ids if shows_ids else None
    events = _text_event(answer, text, shown) if message is None else _chat_events(answer, message.role, text, shown)
    told = answer.kv_transfer_params
    token = shown[0] if shown else told.kvferry_first_token if told is not None else None
    usage = answer.usage or _Usage()
    return FirstToken(text, events, token, shows_ids, usage.prompt_tokens)


def _event(answer: PrefillAnswer, kind: str, choice: dict[str, object], more: dict[str, object]) -> bytes:
    head = {"id": answer.id, "object": kind, "created": answer.created, "model": answer.model}
    return b"data: " + msgspec.json.encode({**head, "choices": [choice], **more}) + b"\n\n"


def _text_event(answer: PrefillAnswer, text: str, ids: list[int] | None) -> bytes:
    choice: dict[str, object] = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    prompt = answer.choices[0].prompt_token_ids if ids is not None else None
    return _event(answer, "text_completion", {**choice, "prompt_token_ids": prompt, "token_ids": ids}, {})


def _chat_events(answer: PrefillAnswer, role: str, text: str, ids: list[int] | None) -> bytes:
    kind, end = "chat.completion.chunk", {"logprobs": None, "finish_reason": None}
    prompt = answer.prompt_token_ids if ids is not None else None
    opening: dict[str, object] = {"index": 0, "delta": {"role": role, "content": ""}, **end}
    said: dict[str, object] = {"index": 0, "delta": {"content": text}, **end, "token_ids": ids}
    first = _event(answer, kind, opening, {"prompt_token_ids": prompt, "prompt_text": None})
    return first + _event(answer, kind, said, {})


# -- decode's stream behind it -----------------------------------------------------------------------------------------


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


class _Chunk(msgspec.Struct):
    choices: list[_StreamChoice] = []
    usage: _Usage | None = None
    error: object = None


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

    def __init__(self, sent: FirstToken) -> None:
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
            raise Unlike(f"decode's reply begins with what is no content, where {self._want!r} was sent")
        if self._token is not None and ids:
            if ids[0] != self._token:
                raise Unlike(f"decode's reply begins with the token {ids[0]}, where {self._token} was sent")
            self._token, ids = None, ids[1:]
        common = min(len(text), len(self._want))
        if text[:common] != self._want[:common]:
            raise Unlike(f"decode's reply begins with {text[:64]!r}, where {self._want!r} was sent")
        self._want, text = self._want[common:], text[common:]
        self.done = not self._want and self._token is None
        if not self.done and choice.finish_reason is not None:
            raise Unlike(f"decode's reply ended before {self._want!r} of what was sent")
        return text, ids


class GoneOn(_Events):
    """The stream of another reply that begins behind the token, as if it began with it: without the chunk that says
    the role and the prompt's ids, its counts as those of one reply."""

    def __init__(self, sent: FirstToken) -> None:
        super().__init__()
        self._prompt_tokens = sent.prompt_tokens

    def _event(self, event: bytes, rest: bytes) -> bytes:
        data = data_of(event)
        if data is None or not (b'"usage"' in data or b'"role"' in data or b'"prompt_token_ids"' in data):
            return event
        try:
            chunk, fields = _CHUNKS.decode(data), _FIELDS.decode(data)
        except msgspec.DecodeError:
            return event
        if chunk.choices and _says_role(chunk.choices[0]):
            return b""
        if chunk.usage is not None:
            replied = chunk.usage.completion_tokens + 1
            told = {"prompt_tokens": self._prompt_tokens, "completion_tokens": replied}
            told["total_tokens"] = self._prompt_tokens + replied
            fields["usage"] = _json(_FIELDS.decode(fields["usage"]) | told)
        choice = _FIELDS.decode(_LIST.decode(fields["choices"])[0]) if chunk.choices else {}
        if choice.get("prompt_token_ids", _NULL) != _NULL:
            fields["choices"] = _json([choice | {"prompt_token_ids": _NULL}])
        elif chunk.usage is None:
            return event
        return b"data: " + _json(fields) + b"\n\n"


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
