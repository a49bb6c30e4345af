"""A client's request to the front end before vLLM servers: read, checked as far as it must be to be passed on, and
split."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import msgspec

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 100  # of lists and objects in each other
MANY_BYTES = 1024 * 1024  # of messages: of more than these the first bytes count, whatever they are
DEFAULT_TOKENS = 16  # of a completion that names no bound, as vLLM has it
HEAD_BYTES = 4096  # of a prompt, by which conversations keep to a decode server

Json: TypeAlias = "bytes | msgspec.Raw"


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Body:
    """A client's request: each field's JSON as it came, which is not read where it need not be. What it says is vLLM's
    to judge. Its halves are JSON again."""

    fields: Mapping[str, Json]

    @property
    def can_be_split(self) -> bool:
        """One prompt, one reply, and nothing that needs the whole prompt computed where the reply is."""
        return (
            not self._has_several_prompts
            and self._told("n") in (None, 1)
            and self._told("best_of") in (None, 1)
            and not self._told("echo")
            and self._told("prompt_logprobs") is None
            and not self._told("use_beam_search")
        )

    @property
    def _has_several_prompts(self) -> bool:
        beginning = _OPENED.match(self.fields.get("prompt", b""))
        return beginning is not None and beginning[1] not in _NUMBER_OR_END

    @property
    def head(self) -> bytes:
        """The bytes with which all turns of a conversation begin, more or less."""
        messages = self.fields.get("messages", b"")
        if _OPENED.match(messages) and memoryview(messages).nbytes <= MANY_BYTES:
            return b",".join(_ITEMS.decode(messages)[:2])[:HEAD_BYTES]
        given = messages or self.fields.get("prompt", b"") or self.fields.get("input", b"")
        return bytes(memoryview(given)[:HEAD_BYTES])

    @property
    def streamed(self) -> bool:
        return bool(self._told("stream"))

    @property
    def begins_alike(self) -> bool:
        """Whether a stream of vLLM's begins with all of the first token's text, whatever the reply is bound by: then
        prefill's answer tells how. Not where a field is unknown here."""
        odd = [name for name, value in self.fields.items() if name not in _ALIKE and bytes(value) not in _NOT_TOLD]
        options = self._told("stream_options")
        each = isinstance(options, dict) and options.get("continuous_usage_stats")
        return self.streamed and not each and all(self._told(name) == _NEUTRAL.get(name, odd) for name in odd)

    @property
    def shows_ids(self) -> bool:
        return bool(self._told("return_token_ids"))

    @cached_property
    def prompt_ids(self) -> bytes | None:
        """The prompt's ids as the client has given them, in vLLM's JSON, where it has asked for ids; None: who has read
        the prompt knows them."""
        if "messages" in self.fields or self._told("truncate_prompt_tokens") is not None:
            return None
        if self._told("return_token_ids") is not True:  # vLLM takes texts for it, too
            return None
        prompt = bytes(self.fields.get("prompt", b"")).translate(None, b" \t\r\n")
        is_flat = prompt.startswith(b"[") and prompt.count(b"[") == 1 and not prompt.translate(None, b"[0123456789,]")
        return prompt if is_flat else None

    @property
    def asks_one_token(self) -> bool:
        most = self._told("max_completion_tokens") if "messages" in self.fields else None
        return (self._told("max_tokens") if most is None else most) == 1

    @property
    def may_end_at_once(self) -> bool:
        """Whether prefill's answer, where it ends by itself, is what one server answers."""
        return not self.streamed and not self._told("min_tokens")

    def _told(self, name: str) -> object:
        """The field's value; where msgspec has no place for it, its JSON."""
        try:
            return msgspec.json.decode(self.fields[name]) if name in self.fields else None
        except msgspec.DecodeError:
            return self.fields[name]

    def for_prefill(self, request_id: bytes) -> bytes:
        return self.first_token({"do_remote_decode": True, "kvferry_request": request_id.hex()})

    def first_token(self, kv_transfer_params: dict[str, object]) -> bytes:
        """The request for no more than its first token, in one piece, sampled as that of the whole reply. Ids of the
        prompt that are known are not said back: to write 9,000 takes vLLM 1.3 ms, and the others' answers as long."""
        without = {"stream_options", "min_tokens"}
        if self.streamed and self.prompt_ids is not None:
            without.add("return_token_ids")
        fields = {name: value for name, value in self.fields.items() if name not in without}
        fields |= {"stream": b"false", "max_tokens": b"1"}
        if self._told("min_tokens"):
            fields["min_tokens"] = b"1"
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = b"1"
        return _written(fields, kv_transfer_params)

    def for_decode(self, request_id: bytes, daemon: str) -> bytes:
        params = {"do_remote_prefill": True, "kvferry_request": request_id.hex(), "kvferry_prefill": daemon}
        return self.whole(params)

    def alone(self) -> bytes:
        return self.whole(None)

    def whole(self, kv_transfer_params: dict[str, object] | None) -> bytes:
        """All of the request, with these parameters in the place of the client's."""
        return _written(self.fields, kv_transfer_params)

    def behind(self, text: str, token: int | None) -> bytes | None:
        """The request for what is behind its first token, whoever is asked; its reply names its prompt's ids. None:
        there is none whose reply would be that of one server."""
        if any(self._told(name) for name in _OF_REPLIES) or self._told("truncate_prompt_tokens") is not None:
            return None
        prompt = self._chat_behind(text) if "messages" in self.fields else self._prompt_behind(text, token)
        bounds = {"max_completion_tokens", "max_tokens", "min_tokens"} & self.fields.keys()
        fewer = {name: self._one_less(name) for name in bounds}
        if "messages" not in self.fields and self._told("max_tokens") is None:
            fewer["max_tokens"] = DEFAULT_TOKENS - 1
        if prompt is None:
            return None
        told = {name: msgspec.json.encode(value) for name, value in fewer.items() if value is not None}
        return _written({**self.fields, **prompt, **told, "return_token_ids": b"true"}, None)

    def _one_less(self, name: str) -> int | None:
        told = self._told(name)
        return max(0, told - 1) if isinstance(told, int) else None

    def _prompt_behind(self, text: str, token: int | None) -> dict[str, Json] | None:
        prompt = bytes(self.fields.get("prompt", b"")).strip()
        if prompt.startswith(b'"') and text:
            return {"prompt": msgspec.json.encode(msgspec.json.decode(prompt, type=str) + text)}
        if prompt.startswith(b"[") and token is not None:
            return {"prompt": prompt[:-1] + b",%d]" % token}
        return None

    def _chat_behind(self, text: str) -> dict[str, Json] | None:
        """The text as the beginning of the assistant's message. Templates strip messages."""
        messages = bytes(self.fields["messages"]).strip()
        goes_on = self._told("continue_final_message") or self._told("add_generation_prompt") is False
        if goes_on or not text or text != text.strip() or not messages.endswith(b"}]"):
            return None
        said = msgspec.json.encode({"role": "assistant", "content": text})
        told = {"continue_final_message": b"true", "add_generation_prompt": b"false"}
        return {"messages": messages[:-1] + b"," + said + b"]", **told}


_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_OPENED = re.compile(rb"\[[ \t\r\n]*(.)")  # a list, and with what it begins
_OF_REPLIES = ("presence_penalty", "frequency_penalty", "bad_words")  # go by what was replied, but not by the prompt
_NUMBER_OR_END = b"-0123456789]"
_NOT_TOLD = (b"null", b"false", b"[]", b"{}", b'""')
_NEUTRAL: Mapping[str, object] = {
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "include_reasoning": True,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
}
_ALIKE = frozenset(
    re.findall(
        r"\w+",
        """
        model messages prompt stream stream_options user metadata store service_tier safety_identifier prompt_cache_key
        request_id priority cache_salt n best_of kv_transfer_params return_token_ids

        add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs truncate_prompt_tokens truncation_side

        temperature top_p top_k min_p seed presence_penalty frequency_penalty repetition_penalty length_penalty
        logit_bias allowed_token_ids bad_words max_tokens max_completion_tokens min_tokens ignore_eos stop_token_ids

        skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
        """,
    )
)
"""Fields whatever they say: what is asked, how it becomes a prompt, how tokens are sampled and become text."""


def _written(fields: Mapping[str, Json], kv_transfer_params: dict[str, object] | None) -> bytes:
    """The request in a form that the conversation is never read for: 10,000 token ids cost microseconds."""
    named = {name: value for name, value in fields.items() if name != "kv_transfer_params"}
    if kv_transfer_params is not None:
        named["kv_transfer_params"] = msgspec.json.encode(kv_transfer_params)
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + value for name, value in named.items()) + b"}"


def parse_body(data: bytes) -> Body:
    """A body of JSON in UTF-8. Refusal 400 names what is wrong."""
    try:
        data.decode()
        fields = _FIELDS.decode(data)
        if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_deep(data):
            raise _too_deep()
    except msgspec.ValidationError as error:
        raise Refusal(400, f"the body must be an object: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        pairs = ", or has half of a pair of surrogates" if b"\\u" in data else ""
        raise Refusal(400, f"the body is not JSON{pairs}: {error}") from error
    except RecursionError as error:
        raise _too_deep() from error
    return Body(fields)


def _is_deep(data: bytes) -> bool:
    try:
        return _deeper(msgspec.json.decode(data), MAX_DEPTH)
    except msgspec.DecodeError:  # a number that msgspec has no place for: msgspec itself has read it to its end
        return False


def _deeper(value: object, bound: int) -> bool:
    level = [value]
    for _ in range(bound):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _too_deep() -> Refusal:
    return Refusal(400, f"the body nests lists and objects more than {MAX_DEPTH} deep")
