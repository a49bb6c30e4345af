"""Requests to the front end before vLLM servers: what is refused, passed on as it came, and split."""

from __future__ import annotations

import json

import pytest

from kvferry.front.vllm_body import MAX_DEPTH, Refusal, parse_body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"temperature": NaN}', "not JSON: "),
        (b'{"prompt": "\\ud800"}', "half of a pair of surrogates"),
        (b'{"prompt": "\xed\xa0\x80"}', "not JSON"),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "more than 100 deep"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "more than 100 deep"),
    ],
)
def test_bodies_that_cannot_be_passed_on(data: bytes, message: str) -> None:
    with pytest.raises(Refusal, match=message) as refused:
        parse_body(data)
    assert refused.value.status == 400


def test_bodies_with_many_parts_or_pairs_of_surrogates_are_passed_on() -> None:
    for text in (b'"\\ud83d\\ude00"', b"[" + b"[]," * 500 + b"[]]", b"1e999", b"9" * 400, b" [1 , 2]"):
        body = parse_body(b'{"prompt": ' + text + b"}")
        assert body.whole({}) == b'{"prompt":' + text.strip() + b',"kv_transfer_params":{}}', "as it came"


@pytest.mark.parametrize(
    ("field", "split"),
    [
        (b'"prompt": [1, 2]', True),
        (b'"prompt": [\n -1]', True),
        (b'"prompt": [ ]', True),
        (b'"prompt": "[["', True),
        (b'"prompt": ["a"]', False),
        (b'"prompt": [ [1], [2]]', False),
        (b'"n": 1', True),
        (b'"n": null', True),
        (b'"n": 2', False),
        (b'"n": ' + b"9" * 400, False),
        (b'"n": 1e999', False),
        (b'"best_of": 3', False),
        (b'"echo": true', False),
        (b'"echo": false', True),
        (b'"prompt_logprobs": 0', False),
        (b'"use_beam_search": true', False),
    ],
)
def test_what_is_split(field: bytes, split: bool) -> None:
    assert parse_body(b"{" + field + b"}").can_be_split is split


@pytest.mark.parametrize(
    ("least", "asked"),
    [(b"", None), (b'"min_tokens": 0,', None), (b'"min_tokens": 5,', 1), (b'"min_tokens": "many",', 1)],
)
def test_the_first_token_is_sampled_as_that_of_the_whole_reply(least: bytes, asked: int | None) -> None:
    """A reply of so many tokens at least does not end with its first; more than it cannot be asked of prefill."""
    body = parse_body(b"{" + least + b'"max_tokens": 9, "seed": 3, "stream": true, "stream_options": {}, "stop": "x"}')
    half = json.loads(body.for_prefill(bytes(16)))
    assert half.pop("min_tokens", None) == asked
    del half["kv_transfer_params"]
    assert half == {"max_tokens": 1, "seed": 3, "stream": False, "stop": "x"}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        (b'"prompt": [1, 2,\n3]', False),
        (b'"prompt": []', False),
        (b'"prompt": "text"', True),
        (b'"prompt": [[1, 2]]', True),
        (b'"prompt": [1, -2]', True),
        (b'"prompt": [1, 2e0]', True),
        (b'"prompt": [1, 2], "truncate_prompt_tokens": 1', True),
        (b'"prompt": [1, 2], "messages": []', True),
        (b'"prompt": [1, 2], "stream": false', True),
        (b'"prompt": [1, 2], "return_token_ids": "false"', True),
        (b'"prompt": [1, 2], "return_token_ids": 1', True),
        (b'"messages": []', True),
    ],
)
def test_prefill_is_asked_for_the_prompts_ids_only_where_nobody_here_knows_them(fields: bytes, asked: bool) -> None:
    body = parse_body(b'{"stream": true, "return_token_ids": true, ' + fields + b"}")
    assert ("return_token_ids" in json.loads(body.for_prefill(bytes(16)))) is asked
    assert json.loads(body.for_decode(bytes(16), "p"))["return_token_ids"]


def test_ids_that_are_known_are_said_as_vllm_says_them() -> None:
    body = parse_body(b'{"stream": true, "return_token_ids": true, "prompt": [1, 2,\n 3]}')
    assert body.prompt_ids == b"[1,2,3]"
