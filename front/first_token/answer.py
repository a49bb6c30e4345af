"""A prefill server's answer, and the reply's first token out of it, as vLLM's stream would say it. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

REPLACED = "\N{REPLACEMENT CHARACTER}"
_NULL = msgspec.Raw(b"null")


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
class SentToken:
    """What the client has of a reply that prefill's answer began."""

    text: str
    events: bytes  # of the reply's stream, up to it
    token: int | None  # where prefill names it
    shown: bool  # its id is in the events
    prompt_tokens: int


def first_token_of(answer: PrefillAnswer, *, shows_ids: bool, prompt_ids: bytes | None = None) -> SentToken | None:
    """What can be sent before decode has said anything. None: the answer is not one whole token of plain text behind
    which the reply goes on. shows_ids: the client has asked for them. prompt_ids: the prompt's, where they are known
    and prefill was not asked for ids."""
    if len(answer.choices) != 1:
        return None
    choice = answer.choices[0]
    message, ids = choice.message, choice.token_ids
    text = choice.text if message is None else message.content
    if choice.finish_reason != "length" or choice.index or (message is not None and not message.is_plain):
        return None
    if text is None or text.endswith(REPLACED) or (not text and not shows_ids):
        return None
    told = answer.kv_transfer_params.kvferry_first_token if answer.kv_transfer_params is not None else None
    if prompt_ids is not None:
        choice.prompt_token_ids = msgspec.Raw(prompt_ids)
        ids = None if told is None else [told]
    if shows_ids and (ids is None or len(ids) != 1):
        return None
    shown = ids if shows_ids else None
    events = _text_event(answer, text, shown) if message is None else _chat_events(answer, message.role, text, shown)
    token = shown[0] if shown else told
    usage = answer.usage or _Usage()
    return SentToken(text, events, token, shows_ids, usage.prompt_tokens)


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
