"""The first token out of prefill's answer, and what decode's stream is behind it: no byte doubled, none missing."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.front.first_token.answer import SentToken, first_token_of, parse_answer
from kvferry.front.first_token.behind import Behind, Lost, SaidError, Unlike
from kvferry.front.vllm_body import parse_body

HEAD = {"id": "x", "object": "chunk", "created": 1, "model": "m"}
DONE = b"data: [DONE]\n\n"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


def event(choice: dict[str, object], **more: object) -> bytes:
    said = {**HEAD, "choices": [{"index": 0, **choice}], **more}
    return b"data: " + json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def said(chat: bool, text: str, ids: list[int] | None = None, end: str | None = None) -> bytes:
    words: dict[str, object] = {"delta": {"content": text}} if chat else {"text": text}
    return event({**words, "logprobs": None, "finish_reason": end, "token_ids": ids})


ROLE = event({"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})
USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":3}}\n\n'


def sent(text: str, token: int | None = None) -> SentToken:
    return SentToken(text, b"", token, token is not None, 3)


def cut(behind: Behind, pieces: list[bytes]) -> bytes:
    out = b"".join(behind.feed(piece) for piece in pieces)
    behind.end()
    return out


def split(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({place % (len(data) + 1) for place in places})
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def heard(stream: bytes) -> tuple[str, list[int], list[str]]:
    """Text, ids and reasons of a stream."""
    text, ids, reasons = "", [], []
    for line in stream.split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
            text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
            ids += choice.get("token_ids") or []
            reasons += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return text, ids, reasons


@given(
    st.booleans(),
    TEXTS.filter(bool),
    st.lists(TEXTS, max_size=4),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.booleans(),
    st.booleans(),
)
def test_the_rest_is_what_decode_said_without_the_token(
    chat: bool, first: str, more: list[str], places: list[int], merged: bool, shows: bool
) -> None:
    """However the stream is cut into pieces; merged: decode says its first two tokens in one chunk."""
    ids = list(range(7, 8 + len(more)))
    texts = [first, *more]
    told = [([ids[i]], texts[i]) for i in range(len(texts))]
    if merged and more:
        told[:2] = [(ids[:2], first + more[0])]
    chunks = [said(chat, text, each if shows else None) for each, text in told]
    rest = said(chat, "", None, "length") + USAGE + DONE
    stream = (ROLE if chat else b"") + b": ping\n\n" + b"".join(chunks) + rest
    out = cut(Behind(sent(first, 7 if shows else None)), split(stream, places))
    whole = heard(stream)
    assert heard(out) == (whole[0].removeprefix(first), whole[1][1:], whole[2])
    if not (merged and more):
        assert out == b": ping\n\n" + b"".join(chunks[1:]) + rest, "byte for byte"
    else:
        assert out.endswith(b"".join(chunks[1:]) + rest) and out.startswith(b": ping\n\n")


@given(st.booleans(), st.text("abc", min_size=2, max_size=5), st.integers(1, 4), st.lists(st.integers(0, 900)))
def test_a_token_whose_text_comes_in_several_chunks(chat: bool, first: str, place: int, places: list[int]) -> None:
    parts = [said(chat, first[:place]), said(chat, first[place:] + "!"), said(chat, "?", None, "stop"), DONE]
    out = cut(Behind(sent(first)), split(b"".join(parts), places))
    assert heard(out) == ("!?", [], ["stop"]) and out.endswith(parts[2] + DONE)


def test_a_reply_that_ends_with_it_still_says_why() -> None:
    out = cut(Behind(sent("Hi", 5)), [ROLE, said(True, "Hi", [5], "length"), USAGE, DONE])
    assert heard(out) == ("", [], ["length"]) and out.endswith(USAGE + DONE)


def test_a_token_without_text_is_known_by_its_id() -> None:
    out = cut(Behind(sent("", 5)), [ROLE, said(True, "", [5]), said(True, "é", [6]), DONE])
    assert out == said(True, "é", [6]) + DONE


@pytest.mark.parametrize(
    ("text", "token", "stream"),
    [
        ("Hi", None, said(True, "Ho")),
        ("Hi", None, said(True, "H", None, "stop")),
        ("Hi", None, DONE),
        ("Hi", None, said(True, "H") + DONE),
        ("Hi", 5, said(True, "Hi", [6])),
        ("Hi", 5, said(True, "Hi!")),
        ("Hi", 5, said(True, "H", [5, 6])),
        ("Hi", None, event({"delta": {"reasoning": "Hi"}})),
        ("Hi", None, event({"delta": {"tool_calls": [{"index": 0}]}})),
        ("Hi", None, event({"index": 1, "delta": {"content": "Hi"}})),
        ("Hi", None, b"data: no JSON\n\n"),
    ],
)
def test_another_reply_is_not_passed_on(text: str, token: int | None, stream: bytes) -> None:
    with pytest.raises(Unlike):
        Behind(sent(text, token)).feed(ROLE + stream)


def test_errors_and_ends_in_the_tokens_place() -> None:
    error = b'data: {"error":{"message":"no room"}}\n\n'
    with pytest.raises(SaidError, match="no room") as told:
        Behind(sent("Hi")).feed(ROLE + error + DONE)
    assert told.value.event == error + DONE
    behind = Behind(sent("Hi"))
    assert behind.feed(ROLE + said(True, "Hi")[:20]) == b""
    with pytest.raises(Lost):
        behind.end()


# -- prefill's answer --------------------------------------------------------------------------------------------------


def answered(**fields: Any) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi", "reasoning": None}, "logprobs": None}
    choice |= {"finish_reason": "length", "token_ids": None} | fields.pop("choice", {})
    told = {"kvferry_first_token": 9, "do_remote_prefill": True}
    usage = {"prompt_tokens": 12, "completion_tokens": 1}
    return json.dumps({**HEAD, "choices": [choice], "kv_transfer_params": told, "usage": usage, **fields}).encode()


def token_of(data: bytes, *, shows_ids: bool = False) -> SentToken | None:
    answer = parse_answer(data)
    assert answer is not None
    return first_token_of(answer, shows_ids=shows_ids)


def test_a_chats_first_token_is_said_as_vllm_says_it() -> None:
    got = token_of(answered())
    assert got is not None and (got.text, got.token, got.prompt_tokens) == ("Hi", 9, 12)
    role, text, _ = got.events.split(b"\n\n")
    assert role == (
        b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null,'
        b'"prompt_text":null}'
    )
    assert text == (
        b'data: {"id":"x","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":'
        b'{"content":"Hi"},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
    )


def test_a_completions_first_token_is_said_with_its_ids() -> None:
    choice = {"message": None, "text": "Hi", "token_ids": [9], "prompt_token_ids": [1, 2]}
    got = token_of(answered(choice=choice), shows_ids=True)
    assert got is not None and got.events == (
        b'data: {"id":"x","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"Hi",'
        b'"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":[1, 2],"token_ids":[9]}]}\n\n'
    )


def test_ids_that_the_front_end_knows_need_not_come_from_prefill() -> None:
    answer = parse_answer(answered(choice={"message": None, "text": "Hi"}))
    assert answer is not None
    got = first_token_of(answer, shows_ids=True, prompt_ids=b"[1,2]")
    assert got is not None and got.token == 9 and got.shown
    assert got.events.endswith(b'"prompt_token_ids":[1,2],"token_ids":[9]}]}\n\n')
    unnamed = parse_answer(answered(choice={"message": None, "text": "Hi"}, kv_transfer_params={}))
    assert unnamed is not None
    assert first_token_of(unnamed, shows_ids=True, prompt_ids=b"[1,2]") is None


@pytest.mark.parametrize(
    "choice",
    [
        {"finish_reason": "stop"},
        {"finish_reason": "tool_calls"},
        {"message": {"content": None}},
        {"message": {"content": ""}},
        {"message": {"content": "a\ufffd"}},
        {"message": {"content": "Hi", "reasoning": "so"}},
        {"message": {"content": "Hi", "reasoning_content": "so"}},
        {"message": {"content": "Hi", "tool_calls": [{}]}},
        {"index": 1},
    ],
)
def test_answers_that_are_not_one_whole_token_of_text(choice: dict[str, object]) -> None:
    assert token_of(answered(choice=choice)) is None


@pytest.mark.parametrize(
    ("fields", "alike"),
    [
        ({}, True),
        ({"temperature": 0.7, "seed": 1, "min_tokens": 3, "logit_bias": {"1": 2.0}}, True),
        ({"stop": None, "tools": [], "logprobs": False, "echo": False, "tool_choice": "none"}, True),
        ({"response_format": {"type": "text"}, "parallel_tool_calls": True, "top_logprobs": 0}, True),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, False),
        ({"stream": False}, False),
        ({"stop": ["x"]}, False),
        ({"logprobs": 0}, False),
        ({"logprobs": True}, False),
        ({"tools": [{}]}, False),
        ({"functions": [{}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"choice": ["a"]}}, False),
        ({"return_prompt_text": True}, False),
        ({"not_known_here": 1}, False),
    ],
)
def test_which_streams_begin_alike(fields: dict[str, object], alike: bool) -> None:
    assert parse_body(json.dumps({"stream": True, "messages": [], **fields}).encode()).begins_alike is alike
