"""A front end that streams prefill's first token, before servers that speak vLLM's HTTP, a token a chunk."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.front.upstream.legs import Server
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_app import create_app
from kvferry.front.vllm_places import Place
from tests.front.test_vllm_first import heard
from tests.front.test_vllm_front import CHAT, ask
from tests.support.http_apps import serving

TEXT = "/v1/completions"
Json = dict[str, object]


@dataclass
class Engine:
    """Says its words, a token each, whose ids are their numbers."""

    words: list[str]
    prompt_tokens: int = 12
    status: int = 200
    reason: str = "length"
    says: str = "content"  # in a chat's stream
    refuses_more: bool = False  # than one request
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    breaks: str = ""  # "dies", "hangs", "error": once, in the place of its first token
    breaks_again: bool = False
    behind: list[str] = field(default_factory=list)  # said to a request that nobody prefills for, with a token more
    prompt_behind: list[int] = field(default_factory=lambda: [*range(12), 0])  # of that request
    asked: list[Json] = field(default_factory=list)
    left: int = 0

    def __post_init__(self) -> None:
        self.may_answer.set()
        self.may_end.set()

    def app(self) -> Starlette:
        return Starlette(routes=[Route(path, self.__call__, methods=["POST"]) for path in (CHAT, TEXT)])

    async def __call__(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body)
        if self.status != 200 or (self.refuses_more and len(self.asked) > 1):
            return JSONResponse({"error": {"message": "broken"}}, 500)
        if body.get("stream"):
            return StreamingResponse(self.chunks(body, request.url.path == CHAT), media_type="text/event-stream")
        await self.may_answer.wait()
        return JSONResponse(self.whole(body, request.url.path == CHAT))

    def head(self, chat: bool) -> Json:
        return {"id": "x", "object": "chat.completion.chunk" if chat else "text_completion", "created": 1, "model": "m"}

    def whole(self, body: Json, chat: bool) -> Json:
        text = "" if self.reason == "stop" else self.words[0]
        choice: Json = {"index": 0, "logprobs": None, "finish_reason": self.reason, "stop_reason": None}
        choice |= {"message": {"role": "assistant", "content": text, "reasoning": None}} if chat else {"text": text}
        ids = body.get("return_token_ids")
        choice |= {"token_ids": [0] if ids else None}
        prompt: Json = {"prompt_token_ids": [*range(self.prompt_tokens)] if ids else None}
        choice |= {} if chat else prompt
        told: Json = prompt if chat else {}
        told |= {"usage": {"prompt_tokens": self.prompt_tokens, "total_tokens": 13, "completion_tokens": 1}}
        if "kv_transfer_params" in body:
            told["kv_transfer_params"] = {"do_remote_prefill": True, "kvferry_first_token": 0}
        return {**self.head(chat), "choices": [choice], **told}

    async def chunks(self, body: Json, chat: bool) -> AsyncIterator[bytes]:
        ids, goes_on = body.get("return_token_ids"), "kv_transfer_params" not in body and bool(self.behind)
        words, prompt = (self.behind, self.prompt_behind) if goes_on else (self.words, [*range(self.prompt_tokens)])

        def event(choice: Json, **more: object) -> bytes:
            choices = [{"index": 0, **choice}] if choice else []
            told = {**self.head(chat), "choices": choices, **more}
            return b"data: " + json.dumps(told, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"

        try:
            await self.may_answer.wait()
            breaks, self.breaks = self.breaks, self.breaks if self.breaks_again else ""
            if breaks == "hangs":
                await asyncio.sleep(60)
            if breaks == "dies":
                raise RuntimeError("gone")
            if breaks == "error":
                yield b'data: {"error":{"message":"no room"}}\n\n'
                yield b"data: [DONE]\n\n"
                return
            if chat:
                opening: Json = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
                yield event(opening, prompt_token_ids=prompt if ids else None, prompt_text=None)
            for number, word in enumerate(words):
                end = "length" if number == len(words) - 1 else None
                said: Json = {"delta": {self.says: word}} if chat else {"text": word}
                said |= {"logprobs": None, "finish_reason": end}
                said |= {} if chat and end is None else {"stop_reason": None}
                said |= {} if chat else {"prompt_token_ids": prompt if ids and not number else None}
                yield event(said | {"token_ids": [number] if ids else None})
                if number == 1:
                    await self.may_end.wait()
            usage = {"prompt_tokens": len(prompt), "completion_tokens": len(words)}
            yield event({}, usage={**usage, "total_tokens": len(prompt) + len(words)})
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left += 1
            raise


@dataclass
class Place3:
    prefill: Engine
    decode: Engine
    other: Engine
    front: VllmFront
    client: httpx.AsyncClient

    def ended(self, result: str) -> float:
        lines = self.front.metrics.text().decode().splitlines()
        name = f'kvferry_front_prefill_first_tokens_total{{result="{result}"}}'
        return next(float(line.split()[-1]) for line in lines if line.startswith(name))


@contextlib.asynccontextmanager
async def world(words: list[str] | None = None, **settings: object) -> AsyncIterator[Place3]:
    engines = [Engine(words or ["Fer", "ry", " boat"]) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(engine.app())) for engine in engines]
        config = VllmConfig(
            prefill=(Place(urls[0], "p"),),
            decode=(Place(urls[1]),),
            first_token="prefill",
            **settings,  # type: ignore[arg-type]
        )
        front = VllmFront(config)
        stack.push_async_callback(front.close)
        address = await stack.enter_async_context(serving(create_app(front)))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=address, trust_env=False, timeout=10))
        w = Place3(*engines, front, client)
        yield w
        for _ in range(300):
            if not (front.running or sum(server.running for server in (*front.prefill, *front.decode))):
                return
            await asyncio.sleep(0.01)
        raise AssertionError("something still runs")


def streams(path: str = CHAT, **fields: object) -> Json:
    prompt = {"messages": ask()["messages"]} if path == CHAT else {"prompt": [*range(12)]}
    return {**prompt, "model": "m", "max_tokens": 9, "stream": True, **fields}


async def read(w: Place3, asked: Json, path: str = CHAT) -> tuple[bytes, bool]:
    """What was streamed, and whether it is whole. Decode may answer once anything has come."""
    got = b""
    try:
        async with w.client.stream("POST", path, json=asked) as reply:
            assert (reply.status_code, reply.headers["content-type"][:17]) == (200, "text/event-stream")
            async for piece in reply.aiter_bytes():
                got += piece
                w.decode.may_answer.set()
    except httpx.RemoteProtocolError:
        return got, False
    return got, True


async def direct(engine: Engine, asked: Json, path: str) -> bytes:
    return b"".join([piece async for piece in engine.chunks(asked, path == CHAT)])


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("ids", [False, True])
def test_the_token_comes_before_decode_says_a_word_and_the_stream_is_decodes(path: str, ids: bool) -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            asked = streams(path, return_token_ids=ids)
            async with w.client.stream("POST", path, json=asked) as reply:
                pieces = reply.aiter_bytes()
                got = await anext(pieces)
                assert heard(got) == ("Fer", [0] if ids else [], [])
                w.decode.may_answer.set()
                got += b"".join([piece async for piece in pieces])
            assert got == await direct(w.decode, asked, path), "byte for byte what one server says"
            assert w.ended("met") == 1
            assert bool(w.prefill.asked[0].get("return_token_ids")) is (ids and path == CHAT)

    asyncio.run(run())


def test_where_decode_is_first_or_the_request_is_odd_the_reply_is_decodes() -> None:
    async def run() -> None:
        async with world() as w:
            for fields in ({"stop": ["x"]}, {"logprobs": True}, {"stream": False}):
                assert (await w.client.post(CHAT, json={**ask(stream=True), **fields})).status_code == 200
            w.prefill.may_answer.clear()
            got, whole = await read(w, streams())
            assert (got, whole) == (await direct(w.decode, {}, CHAT), True)
            assert sum(w.ended(result) for result in ("met", "gone_on", "unlike", "lost", "whole")) == 0
            w.prefill.may_answer.set()

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_of_one_token_is_prefills_alone(stream: bool) -> None:
    async def run() -> None:
        async with world() as w:
            asked = ask(stream=stream, max_tokens=1)
            reply = await w.client.post(CHAT, json=asked)
            whole = await direct(w.prefill, {}, CHAT) if stream else json.dumps(w.prefill.whole({}, True)).encode()
            assert reply.content.replace(b" ", b"") == whole.replace(b" ", b"")
            assert not w.decode.asked and "kv_transfer_params" not in w.prefill.asked[0]
            assert w.ended("whole") == 1
            w.prefill.status = 500
            assert (await w.client.post(CHAT, json=asked)).status_code == 200
            assert len(w.decode.asked) == 1 and w.front.counts.again == 1

    asyncio.run(run())


def test_a_prefill_server_that_hangs_over_the_only_token_is_not_waited_for_as_a_reply_is() -> None:
    async def run() -> None:
        async with world(first_token_s=0.3) as w:
            w.prefill.may_answer.clear()
            assert (await w.client.post(CHAT, json=ask(max_tokens=1))).status_code == 200
            assert len(w.decode.asked) == 1 and w.front.counts.again == 1
            w.prefill.may_answer.set()

    asyncio.run(run())


def test_a_reply_that_ends_at_once_is_prefills_and_decode_is_let_go() -> None:
    async def run() -> None:
        async with world() as w:
            w.prefill.reason = "stop"
            w.decode.may_answer.clear()
            reply = (await w.client.post(CHAT, json=ask())).json()
            assert reply["choices"][0]["finish_reason"] == "stop" and reply["kv_transfer_params"] is None
            assert reply["usage"]["completion_tokens"] == 1 and w.ended("whole") == 1
            w.decode.may_answer.set()

    asyncio.run(run())


def test_another_token_of_decodes_is_not_gone_on_from(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.words, w.decode.behind = ["Other", "ry"], ["ry", " boat"]
            got, whole = await read(w, streams())
            assert whole and heard(got) == ("Ferry boat", [], ["length"])
            assert "kv_transfer_params" not in w.decode.asked[1] and w.ended("gone_on") == 1
            assert "'Other'" in caplog.text and "--scheduler-cls" in caplog.text

    asyncio.run(run())


def test_another_token_of_decodes_breaks_the_reply_off_where_nobody_can_go_on() -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.words = ["Other", "ry"]
            got, whole = await read(w, streams(presence_penalty=1.0))
            assert heard(got.partition(b'data: {"error"')[0])[0] == "Fer" and not whole
            assert b"'Other'" in got and w.ended("unlike") == 1 and len(w.decode.asked) == 1

    asyncio.run(run())


def test_a_thought_that_prefill_called_content_is_not_gone_on_from(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.says = "reasoning"
            got, whole = await read(w, streams())
            assert heard(got.partition(b'data: {"error"')[0])[0] == "Fer" and not whole
            assert w.ended("unlike") == 1 and len(w.decode.asked) == 1 and "--reasoning-parser" in caplog.text

    asyncio.run(run())


@pytest.mark.parametrize("breaks", ["dies", "error"])
@pytest.mark.parametrize(
    ("path", "fields", "goes_on_from"),
    [
        (TEXT, {"max_tokens": 9, "min_tokens": 3}, {"prompt": [*range(12), 0], "max_tokens": 8, "min_tokens": 2}),
        (TEXT, {"prompt": "A ", "max_tokens": None}, {"prompt": "A Fer", "max_tokens": 15}),
        (CHAT, {"max_completion_tokens": 7}, {"max_completion_tokens": 6, "continue_final_message": True}),
    ],
)
@pytest.mark.parametrize("others", [False, True])
def test_another_decode_server_goes_on_from_the_token(
    breaks: str, path: str, fields: Json, goes_on_from: Json, others: bool
) -> None:
    async def run() -> None:
        async with world() as w:
            if others:
                (url,) = (str(server.url) for server in w.front.decode)
                w.front.decode.append(Server(Place(url.replace("127.0.0.1", "localhost"))))
            w.decode.may_answer.clear()
            w.decode.breaks, w.decode.behind = breaks, ["ry", " boat"]
            got, whole = await read(w, streams(path, **fields), path)
            assert whole and heard(got) == ("Ferry boat", [], ["length"]) and got.count(b'"role"') == (path == CHAT)
            usage = json.loads(got.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
            assert usage == {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15}
            again = w.decode.asked[1]
            assert again["return_token_ids"] is True and b'token_ids":[' not in got, "those are the front end's to see"
            assert {name: again[name] for name in goes_on_from} == goes_on_from and "kv_transfer_params" not in again
            if path == CHAT:
                assert again["messages"][-1] == {"role": "assistant", "content": "Fer"}  # type: ignore[index]
                assert again["add_generation_prompt"] is False
            assert w.ended("gone_on") == 1

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_ids_of_a_reply_that_another_goes_on_from_are_those_of_one(path: str) -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.breaks, w.decode.behind = "dies", ["ry", " boat"]
            got, _ = await read(w, streams(path, return_token_ids=True), path)
            assert heard(got) == ("Ferry boat", [0, 0, 1], ["length"])
            assert got.count(b'"prompt_token_ids":[') == 1 and w.ended("gone_on") == 1

    asyncio.run(run())


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("prompt", [[*range(14), 0], [*range(12), 9], [*range(11), 0], []])
def test_a_reply_behind_another_prompt_is_not_taken(path: str, prompt: list[int]) -> None:
    """A template that closes a thought, a token that is another in a longer text, or one with the last, and no ids."""

    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.breaks, w.decode.behind, w.decode.prompt_behind = "dies", ["ry", " boat"], prompt
            asked = streams(path, **({"prompt": "A "} if path == TEXT else {}))
            got, whole = await read(w, asked, path)
            assert heard(got.partition(b'data: {"error"')[0])[0] == "Fer" and b'"error"' in got and not whole
            assert w.ended("lost") == 1 and w.ended("gone_on") == 0

    asyncio.run(run())


def test_one_that_is_to_go_on_and_fails_as_it_begins_breaks_the_reply_off() -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.breaks, w.decode.breaks_again = "error", True
            got, whole = await read(w, streams())
            assert heard(got.partition(b'data: {"error"')[0])[0] == "Fer" and b'"error"' in got and not whole
            assert w.ended("lost") == 1 and len(w.decode.asked) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("breaks", "fields"), [("dies", {"presence_penalty": 0.5}), ("error", {"bad_words": ["x"]}), ("dies", {})]
)
def test_where_no_way_leads_on_the_reply_breaks_off(breaks: str, fields: Json) -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.breaks, w.decode.refuses_more = breaks, not fields
            got, whole = await read(w, streams(**fields))
            said, _, error = got.partition(b'data: {"error"')
            assert heard(said)[0] == "Fer" and error and not whole
            assert w.ended("lost") == 1 and len(w.decode.asked) == (1 if fields else 3)

    asyncio.run(run())


def test_a_decode_server_that_has_failed_is_no_longer_counted_as_busy() -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.may_end.clear()
            w.decode.breaks, w.decode.behind = "error", ["ry", " boat", "!"]
            async with w.client.stream("POST", CHAT, json=streams()) as reply:
                pieces, got = reply.aiter_bytes(), b""
                while b"boat" not in got:
                    got += await anext(pieces)
                    w.decode.may_answer.set()
                assert [server.running for server in w.front.decode] == [1], "the one that goes on"
                w.decode.may_end.set()
                got += b"".join([piece async for piece in pieces])
            assert heard(got)[0] == "Ferry boat!"

    asyncio.run(run())


def test_where_no_decode_server_is_known_any_more_the_reply_breaks_off() -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            w.decode.breaks = "error"
            async with w.client.stream("POST", CHAT, json=streams()) as reply:
                pieces = reply.aiter_bytes()
                await anext(pieces)
                w.front.decode.clear()
                w.decode.may_answer.set()
                with pytest.raises(httpx.RemoteProtocolError):
                    [piece async for piece in pieces]
            assert w.ended("lost") == 1 and len(w.decode.asked) == 1

    asyncio.run(run())


def test_a_client_that_leaves_behind_the_token_ends_both_halves() -> None:
    async def run() -> None:
        async with world() as w:
            w.decode.may_answer.clear()
            async with w.client.stream("POST", CHAT, json=streams()) as reply:
                await anext(reply.aiter_bytes())
            for _ in range(300):
                if w.decode.left:
                    break
                await asyncio.sleep(0.01)
            assert w.decode.left == 1

    asyncio.run(run())


def test_a_decode_server_that_says_nothing_behind_the_token_is_given_up() -> None:
    async def run() -> None:
        async with world(next_token_s=0.3) as w:
            w.decode.may_answer.clear()
            w.decode.breaks = "hangs"
            got, whole = await read(w, streams(presence_penalty=1.0))
            assert b"said nothing for 0.3 s" in got and not whole and w.ended("lost") == 1

    asyncio.run(run())
