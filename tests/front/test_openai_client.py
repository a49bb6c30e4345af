"""The `openai` client against the front end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from kvferry.front.chat import ByteTokenizer, ChatMessage
from tests.support.front_stack import MODEL, PAGE_SIZE, Stack, echo_reply


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def messages(*contents: str) -> list[ChatCompletionMessageParam]:
    chat: list[ChatCompletionMessageParam] = []
    for i, content in enumerate(contents):
        if i % 2:
            chat.append({"role": "assistant", "content": content})
        else:
            chat.append({"role": "user", "content": content})
    return chat


def prompt_ids(*contents: str) -> list[int]:
    roles = ("user", "assistant")
    tokenizer = ByteTokenizer()
    return tokenizer.encode_piece(
        tokenizer.render_chat([ChatMessage(roles[i % 2], content) for i, content in enumerate(contents)])
    )


def text_of(tokens: list[int]) -> str:
    return bytes(tokens).decode()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError, match="'other' is not served here, only 'toy'"):
        client.models.retrieve("other")


def test_chat_whole(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=messages("hello"), max_tokens=8)
    prompt = prompt_ids("hello")
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.content == text_of(echo_reply(prompt))
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == len(prompt) + 8


def test_chat_streamed(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages("stream"),
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == text_of(echo_reply(prompt_ids("stream"))[:5])
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_stream_without_usage_has_none(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages("x"), stream=True))
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_cached_tokens_are_what_the_decode_side_matched(client: openai.OpenAI) -> None:
    first = "a first turn that is long enough to fill a page or two of tokens"
    reply = client.chat.completions.create(model=MODEL, messages=messages(first), max_tokens=8)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    answer = reply.choices[0].message.content
    assert answer is not None
    left = reply.usage.total_tokens - 1  # the last token's KV is never computed
    reply = client.chat.completions.create(model=MODEL, messages=messages(first, answer, "and more"), max_tokens=8)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == left // PAGE_SIZE * PAGE_SIZE


def test_text_parts_and_developer_messages(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    whole: Any = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    reply = client.chat.completions.create(model=MODEL, messages=whole)
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode_piece("[developer]\nbe kind\n[user]\none two\n[assistant]\n")
    assert reply.choices[0].message.content == text_of(echo_reply(prompt))


def test_completion_of_text_and_of_token_ids(client: openai.OpenAI) -> None:
    tokens = list(b"once upon a time")
    expected = text_of(echo_reply(tokens))
    prompts: list[Any] = ["once upon a time", tokens, ["once upon a time"], [tokens]]
    for prompt in prompts:
        reply = client.completions.create(model=MODEL, prompt=prompt)
        assert reply.choices[0].text == expected
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == len(tokens)


def test_completion_streamed_with_token_ids(client: openai.OpenAI) -> None:
    tokens = list(range(40, 80))
    stream = client.completions.create(
        model=MODEL, prompt=tokens, max_tokens=6, stream=True, extra_body={"return_token_ids": True}
    )
    chunks: list[Any] = list(stream)
    assert chunks[0].prompt_token_ids == tokens
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", [])]
    assert ids == echo_reply(tokens)[:6]
    assert chunks[-1].kvferry["delta_pages"] == -(-len(tokens) // PAGE_SIZE)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_with_token_ids(client: openai.OpenAI) -> None:
    reply: Any = client.chat.completions.create(
        model=MODEL, messages=messages("ids"), max_tokens=3, extra_body={"return_token_ids": True}
    )
    assert reply.prompt_token_ids == prompt_ids("ids")
    assert reply.choices[0].token_ids == echo_reply(prompt_ids("ids"))[:3]
    assert reply.kvferry["admit_to_ready_us"] == 7
    assert reply.kvferry["host_tokens"] == 3


def test_stop_string(client: openai.OpenAI, stack: Stack) -> None:
    whole = text_of(echo_reply(list(b"stop here")))
    reply = client.completions.create(model=MODEL, prompt="stop here", stop=[whole[3:5], "never"])
    assert reply.choices[0].text == whole[:3]
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5
    streamed = client.completions.create(model=MODEL, prompt="stop here", stop=whole[3:5], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole[:3]


def test_sampling_is_passed_on(client: openai.OpenAI, stack: Stack) -> None:
    client.completions.create(
        model=MODEL, prompt="s", temperature=0.5, top_p=0.25, seed=-1, max_tokens=3, extra_body={"top_k": 7}
    )
    decode, prefill = stack.decode[0].decodes[-1], stack.prefill[0].prefills[-1]
    assert decode.sampling == prefill.sampling
    assert (decode.sampling.temperature, decode.sampling.top_p, decode.sampling.top_k) == (0.5, 0.25, 7)
    assert decode.sampling.seed == 2**64 - 1
    assert decode.max_new_tokens == 3
    assert decode.name == prefill.name
    assert (len(decode.name.request_id), decode.name.attempt) == (16, 1)
    assert decode.prefill == "p0"
    assert decode.deadline_ms == prefill.deadline_ms == 60_000


@pytest.mark.parametrize(("given", "priority"), [({}, 0), ({"priority": None}, 0), ({"priority": -7}, -7)])
def test_priority_is_passed_on(client: openai.OpenAI, stack: Stack, given: dict[str, Any], priority: int) -> None:
    client.chat.completions.create(model=MODEL, messages=messages("p"), extra_body=given)
    decode, prefill = stack.decode[0].decodes[-1], stack.prefill[0].prefills[-1]
    assert decode.priority == prefill.priority == priority
    assert not decode.warmup
    assert not prefill.warmup


def test_a_warm_up_is_passed_on_and_its_reply_is_not_remembered(client: openai.OpenAI, stack: Stack) -> None:
    def remembered() -> int:
        replies: dict[str, int] = httpx.get(f"{stack.url}/kvferry/stats").json()["replies"]
        return replies["remembered_replies"]

    before = remembered()
    client.chat.completions.create(model=MODEL, messages=messages("w"), extra_body={"kvferry_warmup": True})
    assert stack.decode[0].decodes[-1].warmup
    assert stack.prefill[0].prefills[-1].warmup
    assert remembered() == before
    client.chat.completions.create(model=MODEL, messages=messages("w"))
    assert remembered() == before + 1


def test_without_a_seed_every_request_has_its_own(client: openai.OpenAI, stack: Stack) -> None:
    for _ in range(2):
        client.completions.create(model=MODEL, prompt="s")
    first, second = (request.sampling.seed for request in stack.decode[0].decodes[-2:])
    assert first != second


REFUSED: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", r"greater than or equal to 1, got 0"),
    ("completions", {"prompt": "x", "temperature": 2.5}, 400, "temperature", r"less than or equal to 2, got 2.5"),
    ("completions", {"prompt": "x", "top_p": 0}, 400, "top_p", r"greater than 0, got 0"),
    ("completions", {"prompt": "x", "top_k": -2}, 400, "top_k", r"greater than or equal to -1, got -2"),
    ("completions", {"prompt": "x", "priority": 1001}, 400, "priority", r"less than or equal to 1000, got 1001"),
    ("completions", {"prompt": "x", "priority": -1001}, 400, "priority", r"greater than or equal to -1000, got -1001"),
    ("completions", {"prompt": "x", "priority": "high"}, 400, "priority", r"valid integer, got 'high'"),
    ("completions", {"prompt": "x", "kvferry_warmup": 1}, 400, "kvferry_warmup", r"valid boolean, got 1"),
    ("completions", {"prompt": "x", "seed": 2**65}, 400, "seed", r"less than or equal to"),
    ("completions", {"prompt": "x", "stop": ["a"] * 5}, 400, "stop", r"at most 4 items"),
    ("completions", {"prompt": "x", "stop": ""}, 400, "stop", r"entry 0 must have 1 to 256 characters, got 0"),
    ("completions", {"prompt": "x", "n": 2}, 400, "n", r"only 1 is supported, got 2"),
    ("completions", {"prompt": "x", "logprobs": 3}, 400, "logprobs", r"only False is supported, got 3"),
    ("completions", {"prompt": "x", "best_off": 3}, 400, "best_off", r"is not supported, got 3"),
    ("completions", {"prompt": "x", "max_tokens": True}, 400, "max_tokens", r"valid integer, got True"),
    ("completions", {"prompt": "x", "min_tokens": 4}, 400, None, r"min_tokens is supported only with ignore_eos"),
    ("completions", {"prompt": "x", "stream_options": {}}, 400, None, r"stream_options is allowed only with stream"),
    ("completions", {}, 400, "prompt", r"prompt: is required"),
    ("completions", {"prompt": ""}, 400, "prompt", r"at least 1 token, got 0"),
    ("completions", {"prompt": []}, 400, "prompt", r"at least 1, got 0"),
    ("completions", {"prompt": ["a", "b"]}, 400, "prompt", r"one prompt a request is supported, got a list of 2"),
    ("completions", {"prompt": [1, 2.5]}, 400, "prompt", r"entry 1 must be a token id, got 2.5"),
    ("completions", {"prompt": [5, -1]}, 400, "prompt", r"entry 1 must be >= 0 and < 32000, got -1"),
    ("completions", {"prompt": [5, 6, 32000]}, 400, "prompt", r"entry 2 must be >= 0 and < 32000, got 32000"),
    ("completions", {"prompt": 7}, 400, "prompt", r"must be a string or a list of token ids, got int"),
    ("completions", {"prompt": "x" * 4096}, 400, "prompt", r"4096 tokens; prompt and output together may have 4096"),
    ("completions", {"prompt": "x" * 96, "max_tokens": 4001}, 400, "max_tokens", r"<= 4000 behind .* got 4001"),
    ("completions", {"prompt": "x", "model": "gpt"}, 404, "model", r"'gpt' is not served here, only 'toy'"),
    ("chat/completions", {"messages": []}, 400, "messages", r"at least 1 item"),
    ("chat/completions", {"messages": [{"role": "boss", "content": "x"}]}, 400, "messages.0.role", r"'boss'"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages.0.content",
        r"part 0 must be .* only text is supported",
    ),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages.0.content", r"is required"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
        400,
        "tools",
        r"only \[\] is supported",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "message"), REFUSED)
def test_refused(stack: Stack, path: str, body: dict[str, Any], status: int, param: str | None, message: str) -> None:
    response = httpx.post(f"{stack.url}/v1/{path}", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert re.search(message, error["message"]), error["message"]


@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_request(stack: Stack, body: bytes) -> None:
    response = httpx.post(f"{stack.url}/v1/completions", content=body)
    assert response.status_code == 400
    assert "the body" in response.json()["error"]["message"]


def test_neutral_values_of_unsupported_parameters_are_accepted(stack: Stack) -> None:
    body = {
        "prompt": "x",
        "n": 1,
        "best_of": 1,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "logprobs": None,
        "user": "someone",
        "ignore_eos": True,
        "min_tokens": 3,
    }
    assert httpx.post(f"{stack.url}/v1/completions", json=body).status_code == 200


def test_unknown_routes_have_openais_error_form(stack: Stack) -> None:
    response = httpx.get(f"{stack.url}/v1/nothing")
    assert response.status_code == 404
    assert "/v1/nothing" in response.json()["error"]["message"]


def test_health_and_stats(stack: Stack) -> None:
    assert httpx.get(f"{stack.url}/health").json() == {"status": "ok"}
    stats = httpx.get(f"{stack.url}/kvferry/stats").json()
    assert stats["ready"]
    assert stats["model"] == MODEL
    assert stats["running"] == 0
    assert [server["state"] for server in stats["prefill"] + stats["decode"]] == ["up", "up"]
