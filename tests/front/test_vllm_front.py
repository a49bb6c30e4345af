"""The front end before vLLM servers: what each half is sent, and what becomes of failures. The servers here only speak
vLLM's HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvferry.front import main as front_main
from kvferry.front.vllm import VllmConfig, VllmFront
from kvferry.front.vllm_app import create_app
from kvferry.front.vllm_body import parse_body
from kvferry.front.vllm_places import Place, parse_decode, parse_prefill
from tests.support.http_apps import serving

CHAT = "/v1/chat/completions"


@dataclass
class FakeVllm:
    """Answers with its name; `hold` keeps it from answering, `status` makes it fail."""

    name: str
    status: int = 200
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    asked: list[dict[str, object]] = field(default_factory=list)
    heard: list[dict[str, str]] = field(default_factory=list)  # headers
    waits: int = 0  # requests that have come as far as `hold`
    left: int = 0  # clients that went before they had all
    sends: bool = True  # prefill: its connector sends pages

    chunk: asyncio.Event = field(default_factory=asyncio.Event)  # set: another follows the first

    def __post_init__(self) -> None:
        self.hold.set()
        self.chunk.set()

    def app(self) -> Starlette:
        asked = [Route(path, self.__call__, methods=["POST"]) for path in (CHAT, "/v1/completions")]
        return Starlette(routes=[Route("/health", self.health), *asked])

    async def __call__(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.asked.append(body)
        self.heard.append(dict(request.headers))
        if body.get("stream"):
            return StreamingResponse(self.chunks(), media_type="text/event-stream")
        await self.wait(request)
        told = {"from": self.name, "path": request.url.path}
        sent = "kv_transfer_params" in body and self.name == "prefill" and self.sends
        return JSONResponse({**told, "kv_transfer_params": {"do_remote_prefill": True}} if sent else told, self.status)

    async def health(self, request: Request) -> Response:
        return Response(status_code=self.status)

    async def wait(self, request: Request) -> None:
        self.waits += 1
        while not self.hold.is_set():
            if await request.is_disconnected():
                self.left += 1
                return
            await asyncio.sleep(0.01)

    async def chunks(self) -> AsyncIterator[bytes]:
        self.waits += 1
        try:
            await self.hold.wait()
            for i in range(3):
                yield f"data: {self.name} {i}\n\n".encode()
                await asyncio.sleep(0.05)
                await self.chunk.wait()
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.left += 1
            raise


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1500):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it does not come")


@dataclass
class World:
    prefill: FakeVllm
    decode: FakeVllm
    front: VllmFront
    client: httpx.AsyncClient

    async def at_rest(self) -> None:
        for _ in range(300):
            if not (self.front.running or sum(s.running for s in (*self.front.prefill, *self.front.decode))):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"still running: {self.front.running}")


@contextlib.asynccontextmanager
async def world(dp_rank: int | None = None, **settings: object) -> AsyncIterator[World]:
    fakes = FakeVllm("prefill"), FakeVllm("decode")
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(serving(fake.app())) for fake in fakes]
        prefill, decode = Place(urls[0], "p", dp_rank), Place(urls[1], "", dp_rank)
        config = VllmConfig(prefill=(prefill,), decode=(decode,), **settings)  # type: ignore[arg-type]
        front = VllmFront(config)
        stack.push_async_callback(front.close)
        address = await stack.enter_async_context(serving(create_app(front)))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=address, trust_env=False, timeout=10))
        yield World(*fakes, front, client)
        await World(*fakes, front, client).at_rest()


def places(*hosts: str) -> tuple[Place, ...]:
    return tuple(Place(f"http://{host}") for host in hosts)


def ask(**fields: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, **fields}


def test_both_halves_are_asked_at_once_under_one_name() -> None:
    async def run() -> None:
        async with world() as w:
            w.prefill.hold.clear()
            w.decode.hold.clear()
            asking = asyncio.create_task(w.client.post(CHAT, json=ask(max_completion_tokens=7)))
            while not (w.prefill.asked and w.decode.asked):
                await asyncio.sleep(0.01)
            w.decode.hold.set()
            w.prefill.hold.set()
            reply = await asking
            assert (reply.status_code, reply.json()) == (200, {"from": "decode", "path": CHAT})
            (first,), (second,) = w.prefill.asked, w.decode.asked
            assert (first["max_tokens"], first["max_completion_tokens"], first["stream"]) == (1, 1, False)
            assert (second["max_tokens"], second["max_completion_tokens"]) == (9, 7)
            told, heard = first["kv_transfer_params"], second["kv_transfer_params"]
            assert isinstance(told, dict) and isinstance(heard, dict)
            assert told["do_remote_decode"] and heard["do_remote_prefill"] and heard["kvferry_prefill"] == "p"
            assert (
                told["kvferry_request"] == heard["kvferry_request"]
                and len(bytes.fromhex(told["kvferry_request"])) == 16
            )

    asyncio.run(run())


@pytest.mark.parametrize("dp_rank", [None, 1])
def test_each_half_is_told_its_data_parallel_rank(dp_rank: int | None) -> None:
    async def run() -> None:
        async with world(dp_rank) as w:
            assert (await w.client.post(CHAT, json=ask())).status_code == 200
            for (heard,) in (w.prefill.heard, w.decode.heard):
                assert heard.get("x-data-parallel-rank") == (None if dp_rank is None else str(dp_rank))
            servers = (await w.client.get("/stats")).json()["servers"]
            assert [server["dp_rank"] for server in servers] == [dp_rank, dp_rank]

    asyncio.run(run())


def test_a_reply_is_streamed_as_it_comes() -> None:
    async def run() -> None:
        async with world() as w, w.client.stream("POST", CHAT, json=ask(stream=True)) as reply:
            chunks = [chunk async for chunk in reply.aiter_bytes()]
            assert b"".join(chunks).endswith(b"data: decode 2\n\ndata: [DONE]\n\n")
            assert len(chunks) > 1 and reply.headers["content-type"].startswith("text/event-stream")

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_where_prefill_fails_decode_goes_on_alone(stream: bool) -> None:
    async def run() -> None:
        async with world() as w:
            w.prefill.status = 500
            w.decode.hold.clear()
            asking = asyncio.create_task(w.client.post(CHAT, json=ask(stream=stream)))
            while not any("kv_transfer_params" not in body for body in w.decode.asked):
                await asyncio.sleep(0.01)
            w.decode.hold.set()
            assert (await asking).status_code == 200
            assert w.front.counts.again == 1

    asyncio.run(run())


def test_a_prefill_server_that_is_gone_is_passed_over_for_a_while() -> None:
    async def run() -> None:
        async with world() as w:
            w.front.prefill[0].place = Place("http://127.0.0.1:9")
            w.decode.hold.clear()
            asking = asyncio.create_task(w.client.post(CHAT, json=ask()))
            while not any("kv_transfer_params" not in body for body in w.decode.asked):
                await asyncio.sleep(0.01)
            w.decode.hold.set()
            assert (await asking).status_code == 200
            assert (await w.client.post(CHAT, json=ask())).status_code == 200
            assert (w.front.counts.again, w.front.counts.alone) == (1, 1)

    asyncio.run(run())


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"prompt_logprobs": 0}, {"best_of": 3}]
)
def test_what_cannot_be_split_goes_to_decode_only(fields: dict[str, object]) -> None:
    async def run() -> None:
        async with world() as w:
            reply = await w.client.post(
                "/v1/completions", json={"prompt": "a", "kv_transfer_params": {"x": 1}, **fields}
            )
            assert reply.json() == {"from": "decode", "path": "/v1/completions"}
            assert w.prefill.asked == [] and "kv_transfer_params" not in w.decode.asked[0]
            assert w.front.counts.alone == 1

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_byte_ends_both_halves(stream: bool) -> None:
    async def run() -> None:
        async with world() as w:
            w.prefill.hold.clear()
            w.decode.hold.clear()
            asking = asyncio.create_task(w.client.post(CHAT, json=ask(stream=stream)))
            await until(lambda: (w.prefill.waits, w.decode.waits) == (1, 1))  # however long the halves take to come
            asking.cancel()
            await w.at_rest()
            await until(lambda: (w.prefill.left, w.decode.left) == (1, 1))

    asyncio.run(run())


def test_a_client_that_leaves_in_the_middle_ends_both_halves() -> None:
    async def run() -> None:
        async with world() as w:
            w.prefill.hold.clear()
            w.decode.chunk = asyncio.Event()
            async with w.client.stream("POST", CHAT, json=ask(stream=True)) as reply:
                await anext(reply.aiter_bytes())
                await until(lambda: w.prefill.waits == 1)
            await w.at_rest()
            await until(lambda: (w.prefill.left, w.decode.left) == (1, 1))

    asyncio.run(run())


def test_what_prefill_refuses_or_does_not_send_decode_does_alone() -> None:
    async def run() -> None:
        async with world() as w:
            for status, sends in ((401, True), (200, False)):
                w.prefill.status, w.prefill.sends = status, sends
                w.decode.asked.clear()
                w.decode.hold.clear()
                asking = asyncio.create_task(w.client.post(CHAT, json=ask(), headers={"authorization": "Bearer x"}))
                await until(lambda: any("kv_transfer_params" not in body for body in w.decode.asked))
                w.decode.hold.set()
                assert (await asking).status_code == 200
            assert w.front.counts.again == 2
            for heard in (*w.prefill.heard, *w.decode.heard):
                assert (heard["authorization"], heard["accept-encoding"]) == ("Bearer x", "identity")
            wrong = await w.client.post(CHAT, json=ask(), headers={"authorization": b"Bearer \xe9"})
            assert wrong.status_code == 400 and "authorization: " in wrong.json()["error"]["message"]

    asyncio.run(run())


def test_each_kind_of_reply_has_its_own_deadline() -> None:
    async def run() -> None:
        async with world(first_token_s=0.3, next_token_s=0.1, reply_s=5.0) as w:
            w.decode.hold.clear()
            asking = asyncio.create_task(w.client.post("/v1/completions", json={"prompt": "a", "n": 2}))
            streaming = asyncio.create_task(
                w.client.post("/v1/completions", json={"prompt": "a", "n": 2, "stream": True})
            )
            reply = await streaming
            assert reply.status_code == 504 and "said nothing for 0.3 s" in reply.json()["error"]["message"]
            await asyncio.sleep(0.2)
            w.decode.hold.set()
            assert (await asking).status_code == 200

    asyncio.run(run())


def test_a_first_token_may_take_longer_than_the_next() -> None:
    async def run() -> None:
        async with world(first_token_s=5.0, next_token_s=0.15) as w:
            w.decode.hold.clear()
            streaming = asyncio.create_task(
                w.client.post("/v1/completions", json={"prompt": "a", "n": 2, "stream": True})
            )
            await asyncio.sleep(0.4)
            w.decode.hold.set()
            assert (await streaming).content.endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def test_one_decode_server_that_is_well_is_enough() -> None:
    async def run() -> None:
        async with world() as w:
            gone = type(w.front.decode[0])(Place("http://127.0.0.1:9"))
            w.front.decode.insert(0, gone)
            assert (await w.client.get("/health")).status_code == 200
            w.decode.status = 500
            assert (await w.client.get("/health")).status_code == 503

    asyncio.run(run())


def test_a_load_factor_below_one_leaves_a_server_all_the_same() -> None:
    front = VllmFront(VllmConfig(prefill=(), decode=places("a", "b"), load_factor=0.5, load_slack=0.0))
    for server in front.decode:
        server.running = 10
    assert front.choose_decode(b"head") in front.decode
    asyncio.run(front.close())
    parser = argparse.ArgumentParser(exit_on_error=False)
    front_main.add_arguments(parser)
    with pytest.raises(argparse.ArgumentError, match=r"must be >= 1, got '0\.5'"):
        parser.parse_args(["--load-factor", "0.5"])


def test_decode_that_is_gone_and_what_is_no_request_are_told() -> None:
    async def run() -> None:
        async with world() as w:
            assert (await w.client.post(CHAT, content=b"{")).status_code == 400
            assert (
                (await w.client.post(CHAT, json=[1]))
                .json()["error"]["message"]
                .startswith("the body must be an object")
            )
            w.front.decode[0].place = Place("http://127.0.0.1:9")
            reply = await w.client.post(CHAT, json=ask())
            assert reply.status_code == 503 and "cannot be reached" in reply.json()["error"]["message"]
            assert (await w.client.get("/health")).status_code == 503

    asyncio.run(run())


def test_more_requests_than_allowed_are_refused() -> None:
    async def run() -> None:
        async with world(max_requests=1) as w:
            w.decode.hold.clear()
            first = asyncio.create_task(w.client.post(CHAT, json=ask()))
            while not w.decode.asked:
                await asyncio.sleep(0.01)
            assert (await w.client.post(CHAT, json=ask())).status_code == 429
            w.decode.hold.set()
            assert (await first).status_code == 200
            assert (await w.client.get("/stats")).json()["refused"] == 1

    asyncio.run(run())


def test_any_prefill_server_takes_any_turn() -> None:
    """What it lacks it fetches, with the way back, or computes."""
    front = VllmFront(VllmConfig(prefill=places("a", "b", "c"), decode=places("d")))
    chosen = []
    for _ in range(6):
        server = front.choose_prefill()
        assert server is not None
        server.running += 1
        chosen.append(server.url)
    assert len(set(chosen)) == 3 and max(server.running for server in front.prefill) == 2


def test_a_conversation_keeps_to_its_decode_server_unless_that_has_much_more_to_do() -> None:
    front = VllmFront(VllmConfig(prefill=(), decode=places("a", "b", "c"), load_slack=2.0))
    messages: list[dict[str, str]] = []
    heads = []
    for turn in range(4):
        messages += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": "answer"}]
        heads.append(parse_body(json.dumps({"messages": messages}).encode()).head)
    chosen = {front.choose_decode(head).url for head in heads}
    assert len(chosen) == 1
    busy = front.choose_decode(heads[0])
    busy.running = 30
    assert front.choose_decode(heads[0]) is not busy
    others = {front.choose_decode(f"chat {i}".encode()).url for i in range(50)}
    assert len(others) == 2
    asyncio.run(front.close())


@pytest.mark.parametrize(
    "text", ["http://host:1", "=http://host:1", "name=host:1", "a/b=http://host:1", "name=http://host:1,2"]
)
def test_servers_are_named_as_told(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_prefill(text)


@pytest.mark.parametrize(("text", "message"), [("host:1", "a URL"), ("http://h,0", "1 to"), ("http://h,two", "1 to")])
def test_what_is_no_decode_server(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_decode(text)


def test_each_data_parallel_rank_is_a_place_of_its_own() -> None:
    assert parse_prefill("p=http://host:1/") == (Place("http://host:1", "p"),)
    assert parse_prefill("p-{dp_rank}=http://host:1,2") == (
        Place("http://host:1", "p-0", 0),
        Place("http://host:1", "p-1", 1),
    )
    assert parse_decode("http://host:1,2") == (Place("http://host:1", "", 0), Place("http://host:1", "", 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--prefill and --decode are required (or --vllm-decode)"),
        (["--vllm-prefill", "p=http://a"], "--vllm-decode is required"),
        (["--vllm-decode", "http://a", "--decode", "h:1"], "do not go with --prefill and --decode"),
    ],
)
def test_which_servers_it_is_before_must_be_clear(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    front_main.add_arguments(parser)
    assert front_main.run(parser.parse_args(words)) == 2
    assert message in capsys.readouterr().err
