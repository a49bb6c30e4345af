"""Forty calls of OpenAI's Python client against both front ends: each has its answer, or the 400 that says why not.

The servers behind the reference front end are scripted, those behind the one for vLLM speak vLLM's HTTP; both reply the
same letters to the same prompt. Before vLLM `kvferry front` is a process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import openai
import pytest

from kvferry.front.chat import ByteTokenizer, ChatMessage
from tests.support.front_process import front_process
from tests.support.front_stack import MODEL, Stack, echo_reply
from tests.support.small_vllm import VECTOR, SmallVllm

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
ELSEWHERE = r"only .* is supported, got .*; the front end before vLLM servers .* passes it on"
HI = [{"role": "user", "content": "hi"}]
Client = openai.OpenAI


class Refused(NamedTuple):
    """The expected error: its status, and what its message must have."""

    status: int
    says: str


class Call(NamedTuple):
    name: str
    make: Callable[[Client], Any]  # a plain value
    reference: Any
    vllm: Any  # what is expected: a value, or Refused


def reply(*contents: str, most: int = 8) -> str:
    roles = ("user", "assistant")
    chat = [ChatMessage(roles[i % 2], content) for i, content in enumerate(contents)]
    tokenizer = ByteTokenizer()
    return bytes(echo_reply(tokenizer.encode_piece(tokenizer.render_chat(chat)))[:most]).decode()


def completed(prompt: str) -> str:
    return bytes(echo_reply(list(prompt.encode()))).decode()


def chat(look: Callable[[Any], Any], **fields: Any) -> Callable[[Client], Any]:
    """A chat call, and what of its answer is looked at."""
    whole: dict[str, Any] = {"model": MODEL, "messages": HI, **fields}
    return lambda client: look(client.chat.completions.create(**whole))


def completion(look: Callable[[Any], Any], **fields: Any) -> Callable[[Client], Any]:
    whole: dict[str, Any] = {"model": MODEL, "prompt": "once", **fields}
    return lambda client: look(client.completions.create(**whole))


def content(answer: Any) -> Any:
    return answer.choices[0].message.content


def text(answer: Any) -> Any:
    return answer.choices[0].text


def streamed(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def streamed_text(chunks: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def last_usage(chunks: Any) -> int:
    return [int(chunk.usage.completion_tokens) for chunk in chunks if chunk.usage][-1]


SAID, TOLD = reply("hi"), completed("once")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "reply", "schema": {"type": "object"}}}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
CHAT = [
    Call("chat", chat(content), SAID, SAID),
    Call("chat of three turns", chat(content, messages=[*HI, {"role": "assistant", "content": "yes"}, *HI]),
         reply("hi", "yes", "hi"), reply("hi", "yes", "hi")),
    Call("max_tokens", chat(content, max_tokens=3), SAID[:3], SAID[:3]),
    Call("max_completion_tokens", chat(content, max_completion_tokens=2), SAID[:2], SAID[:2]),
    Call("finish_reason", chat(lambda a: a.choices[0].finish_reason, max_tokens=3), "length", "length"),
    Call("stream", chat(streamed, stream=True), SAID, SAID),
    Call("stream with usage", chat(last_usage, stream=True, stream_options={"include_usage": True}), 8, 8),
    Call("stop", chat(content, stop=SAID[3]), SAID.split(SAID[3])[0], SAID.split(SAID[3])[0]),
    Call("several stops", chat(content, stop=["~~", SAID[2:4]]), SAID[:2], SAID[:2]),
    Call("temperature, top_p, seed", chat(content, temperature=0.5, top_p=0.9, seed=7), SAID, SAID),
    Call("user, metadata, store", chat(content, user="me", metadata={"a": "b"}, store=False), SAID, SAID),
    Call("usage", chat(lambda a: a.usage.completion_tokens, max_tokens=5), 5, 5),
    Call("n of 1", chat(lambda a: len(a.choices), n=1), 1, 1),
    Call("n of 3", chat(lambda a: len(a.choices), n=3), Refused(400, "^.*n: " + ELSEWHERE), 3),
    Call("logprobs", chat(lambda a: len(a.choices[0].logprobs.content), logprobs=True),
         Refused(400, "logprobs: " + ELSEWHERE), 8),
    Call("top_logprobs", chat(lambda a: len(a.choices[0].logprobs.content[0].top_logprobs), logprobs=True,
                              top_logprobs=2), Refused(400, "logprobs: " + ELSEWHERE), 2),
    Call("presence_penalty", chat(content, presence_penalty=0.5), Refused(400, "presence_penalty: " + ELSEWHERE), SAID),
    Call("frequency_penalty", chat(content, frequency_penalty=0.5),
         Refused(400, "frequency_penalty: " + ELSEWHERE), SAID),
    Call("a penalty of 3", chat(content, presence_penalty=3), Refused(400, "presence_penalty: "),
         Refused(400, r"presence_penalty must be in \[-2, 2\]")),
    Call("logit_bias", chat(content, logit_bias={"5": 1}), Refused(400, "logit_bias: " + ELSEWHERE), SAID),
    Call("response_format text", chat(content, response_format={"type": "text"}), SAID, SAID),
    Call("response_format json_object", chat(lambda a: json.loads(content(a)), response_format={"type": "json_object"}),
         Refused(400, "response_format: " + ELSEWHERE), {"reply": SAID}),
    Call("response_format json_schema", chat(lambda a: json.loads(content(a)), response_format=SCHEMA),
         Refused(400, "response_format: " + ELSEWHERE), {"reply": SAID}),
    Call("tools", chat(lambda a: a.choices[0].message.tool_calls[0].function.name, tools=[TOOL]),
         Refused(400, "tools: " + ELSEWHERE), "look"),
    Call("a picture", chat(content, messages=IMAGE), Refused(400, r"messages.0.content: .*only text"),
         reply(str(IMAGE[0]["content"]))),
    Call("no messages", chat(content, messages=[]), Refused(400, "messages: "), Refused(400, "must not be empty")),
    Call("temperature of 3", chat(content, temperature=3), Refused(400, "temperature: "), Refused(400, "temperature")),
    Call("another model", chat(content, model="gpt"), Refused(404, "'gpt' is not served"),
         Refused(404, "`gpt` does not exist")),
]  # fmt: skip
OTHER = [
    Call("completion", completion(text), TOLD, TOLD),
    Call("completion of ids", completion(text, prompt=list(b"once")), TOLD, TOLD),
    Call("completion streamed", completion(streamed_text, stream=True), TOLD, TOLD),
    Call("several prompts", completion(lambda a: [c.text for c in a.choices], prompt=["once", "twice"]),
         Refused(400, "one prompt a request"), [TOLD, completed("twice")]),
    Call("echo", completion(text, echo=True), Refused(400, "echo: " + ELSEWHERE), "once" + TOLD),
    Call("completion's logprobs", completion(lambda a: a.choices[0].logprobs.token_logprobs[0], logprobs=1),
         Refused(400, "logprobs: " + ELSEWHERE), -0.5),
    Call("max_tokens of 0", completion(text, max_tokens=0), Refused(400, "max_tokens: "), Refused(400, "max_tokens")),
    Call("embeddings", lambda c: c.embeddings.create(model=MODEL, input=["a", "b"], encoding_format="float")
         .data[1].embedding, Refused(400, "/v1/embeddings: .*kvferry front --vllm-decode"), VECTOR),
    Call("responses", lambda c: c.responses.create(model=MODEL, input="once").output_text,
         Refused(400, "/v1/responses: .*kvferry front --vllm-decode"), TOLD),
    Call("responses streamed", lambda c: "".join(
        event.delta for event in c.responses.create(model=MODEL, input="once", stream=True)
        if event.type == "response.output_text.delta"), Refused(400, "/v1/responses: "), TOLD),
    Call("models", lambda c: [model.id for model in c.models.list()], [MODEL], [MODEL]),
    Call("a model that is not there", lambda c: c.models.retrieve("gpt").id, Refused(404, "'gpt' is not served here"),
         Refused(404, "'gpt' is not served here")),
]  # fmt: skip
CALLS = CHAT + OTHER


@pytest.fixture(scope="module")
def reference() -> Iterator[Client]:
    with Stack() as stack:
        yield openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def vllm() -> Iterator[Client]:
    with SmallVllm() as prefill, SmallVllm() as decode:
        flags = ("--vllm-prefill", f"p={prefill.url}", "--vllm-decode", decode.url)
        with front_process(*flags) as front:
            yield openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


def check(call: Call, client: Client, expected: Any) -> None:
    if not isinstance(expected, Refused):
        assert call.make(client) == expected
        return
    with pytest.raises(openai.APIStatusError) as caught:
        call.make(client)
    assert caught.value.status_code == expected.status
    assert isinstance(caught.value.body, dict)
    assert re.search(expected.says, caught.value.body["message"]), caught.value.body["message"]


def test_there_are_forty() -> None:
    assert len({call.name for call in CALLS}) == len(CALLS) == 40


@pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
def test_before_reference_workers(call: Call, reference: Client) -> None:
    check(call, reference, call.reference)


@pytest.mark.parametrize("call", CALLS, ids=[call.name for call in CALLS])
def test_before_vllm_servers(call: Call, vllm: Client) -> None:
    check(call, vllm, call.vllm)
