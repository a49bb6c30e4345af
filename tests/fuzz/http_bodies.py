"""Bodies of HTTP requests to the front ends: of any bytes, from JSON to a request.

The first byte says of which kind. A body is a request, or an answer 400 that can be sent.
"""

from __future__ import annotations

import json
from random import Random

from kvferry.front.errors import ApiError
from kvferry.front.openai_types import ChatRequest, CompletionRequest, parse_request
from kvferry.front.vllm_body import HEAD_BYTES, Refusal, parse_body
from tests.fuzz.frames import bytes_changed
from tests.fuzz.stage import Finding

CHAT, COMPLETION, PASSED_ON = range(3)


def one_input(data: bytes) -> None:
    if not data:
        return
    kind, body = data[0] % 3, data[1:]
    if kind == PASSED_ON:
        _pass_on(body)
        return
    try:
        if kind == CHAT:
            request: ChatRequest | CompletionRequest = parse_request(ChatRequest, body)
        else:
            request = parse_request(CompletionRequest, body)
    except ApiError as error:
        said = json.loads(error.json())
        if error.status != 400 or not said["error"]["message"]:
            raise Finding(f"refused with {error.status}: {said}") from error
        return
    request.model_dump_json()


def _pass_on(body: bytes) -> None:
    """To a vLLM server, whose two halves of it are JSON again."""
    try:
        taken = parse_body(body)
    except Refusal as refusal:
        if refusal.status != 400:
            raise Finding(f"refused with {refusal.status}: {refusal}") from refusal
        return
    assert len(taken.head) <= HEAD_BYTES and taken.can_be_split in (True, False) and taken.streamed in (True, False)
    for half in (taken.for_prefill(bytes(16)), taken.for_decode(bytes(16), "p"), taken.alone()):
        fields = json.loads(half)
        if any(fields[name] != json.loads(bytes(taken.fields[name])) for name in _KEPT if name in taken.fields):
            raise Finding(f"{half!r} is not of {taken.fields}")


_KEPT = ("messages", "prompt", "model")
_TOKENS = (
    *ChatRequest.model_fields,
    *CompletionRequest.model_fields,
    *(
        "null",
        "true",
        "-1",
        "0",
        "1e999",
        "NaN",
        "1e-400",
        "9" * 400,
        "2.5",
        '"x"',
        "[",
        "]",
        "{",
        "}",
        "{}",
        "[]",
        ",",
    ),
    *(":", '"', '"\\ud800"', '"\\u0000"', "é", '"role": "user"', '{"type": "text", "text": "a"}', "[[1]]", "[" * 300),
)


def mutate(data: bytes, most: int, seed: int) -> bytes:
    chance = Random(seed)
    if chance.random() < 0.1:
        data = chance.choice(SEEDS)
    kind, body = data[:1], data[1:]
    if chance.random() < 0.3:
        body = bytes_changed(body, chance, most)
    else:
        at, token = chance.randint(0, len(body)), chance.choice(_TOKENS).encode()
        if chance.random() < 0.7 and b":" in body[:at]:  # in place of a value
            at = body.rindex(b":", 0, at) + 1
            ends = [end for end in (body.find(b",", at), body.find(b"}", at)) if end >= 0]
            body = body[:at] + token + (body[min(ends) :] if ends else b"")
        else:
            body = body[:at] + token + body[at:]
    return (kind + body)[:most] or b"\0"


def _seeds() -> list[bytes]:
    common = {"model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 1, "stream": True, "stop": ["a"]}
    chat = {**common, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_completion_tokens": 3}
    bodies = {
        CHAT: (chat, parts, {**chat, "stream_options": {"include_usage": True}, "return_token_ids": True}),
        COMPLETION: (
            {**common, "prompt": "once"},
            {"prompt": [1, 2, 3]},
            {"prompt": [[1, 2]], "n": 1, "logprobs": None},
        ),
        PASSED_ON: (chat, {"prompt": [1, 2], "kv_transfer_params": {"do_remote_decode": True}, "stream": False}),
    }
    return [bytes([kind]) + json.dumps(body).encode() for kind, those in bodies.items() for body in those]


SEEDS = _seeds()
