"""A client's request to the front end before vLLM servers: read, checked as far as it must be to be passed on, and
split."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import NoReturn

MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_DEPTH = 100  # of lists and objects in each other
HEAD_BYTES = 4096  # of a prompt, by which conversations keep to a decode server


class Refusal(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Body:
    """A client's request, as parsed from JSON; what it says is vLLM's to judge. Its halves are JSON again."""

    fields: dict[str, object]

    @property
    def can_be_split(self) -> bool:
        """One prompt, one reply, and nothing that needs the whole prompt computed where the reply is."""
        prompt = self.fields.get("prompt")
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return (
            not several
            and self.fields.get("n", 1) in (None, 1)
            and self.fields.get("best_of", 1) in (None, 1)
            and not self.fields.get("echo")
            and self.fields.get("prompt_logprobs") is None
            and not self.fields.get("use_beam_search")
        )

    @property
    def head(self) -> bytes:
        """The bytes with which all turns of a conversation begin, more or less."""
        messages = self.fields.get("messages")
        shown = _json(messages[:2]) if isinstance(messages, list) else self._written.get("prompt", b"")
        return shown[:HEAD_BYTES]

    @property
    def streamed(self) -> bool:
        return bool(self.fields.get("stream"))

    def for_prefill(self, request_id: bytes) -> bytes:
        fields = {name: value for name, value in self.fields.items() if name not in ("stream_options", "min_tokens")}
        fields |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        return self.write(fields, {"do_remote_decode": True, "kvferry_request": request_id.hex()})

    def for_decode(self, request_id: bytes, daemon: str) -> bytes:
        params = {"do_remote_prefill": True, "kvferry_request": request_id.hex(), "kvferry_prefill": daemon}
        return self.write(self.fields, params)

    def alone(self) -> bytes:
        return self.write(self.fields, None)

    def write(self, fields: dict[str, object], kv_transfer_params: dict[str, object] | None) -> bytes:
        """`fields`, in which the conversation is this one's, with the parameters in the place of the client's."""
        others = {name: value for name, value in fields.items() if name not in (*_LONG, "kv_transfer_params")}
        if kv_transfer_params is not None:
            others["kv_transfer_params"] = kv_transfer_params
        parts = [_json(others)[1:-1]] if others else []
        parts += [_json(name) + b":" + value for name, value in self._written.items()]
        return b"{" + b",".join(parts) + b"}"

    @functools.cached_property
    def _written(self) -> dict[str, bytes]:
        """What is long is written once for both halves: half a millisecond for 9,000 token ids."""
        return {name: _json(self.fields[name]) for name in _LONG if name in self.fields}


_LONG = ("messages", "prompt")


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def parse_body(data: bytes) -> Body:
    """A body of JSON in UTF-8 that can be written as such again. Refusal 400 names what is wrong."""
    try:
        text = data.decode()
        fields = json.loads(text, parse_constant=_no_number, parse_float=_finite)
        if "\\u" in text:
            json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise Refusal(400, f"the body has a lone surrogate, \\u{ord(half):04x}: it is no character") from error
    except ValueError as error:
        raise Refusal(400, f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep() from error
    if not isinstance(fields, dict):
        raise Refusal(400, f"the body is a {type(fields).__name__}; it must be an object")
    if text.count("[") + text.count("{") > MAX_DEPTH and _deeper(fields, MAX_DEPTH):
        raise _too_deep()
    return Body(fields)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"{text[:40]} is beyond what a float holds")
    return value


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
