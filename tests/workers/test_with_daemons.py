"""Synthetic workers with two real daemons: every page that arrives is checked byte for byte by the decode worker."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import grpc
import grpc.aio
import numpy as np
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc
from kvferry.radix.digests import prompt_digests
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.synthetic import output_token

PAGE_SIZE = 64


@dataclass
class Addresses:
    prefill_daemon: str
    decode_daemon: str
    prefill: str
    decode: str


class Engines:
    def __init__(self, addresses: Addresses) -> None:
        self._channels = {
            name: grpc.aio.insecure_channel(getattr(addresses, name)) for name in Addresses.__dataclass_fields__
        }
        self.prefill = engine_pb2_grpc.EngineStub(self._channels["prefill"])
        self.decode = engine_pb2_grpc.EngineStub(self._channels["decode"])

    async def sides(self) -> list[cache_pb2.SideStats]:
        daemons = [self._channels["prefill_daemon"], self._channels["decode_daemon"]]
        replies = [await cache_pb2_grpc.CacheStub(daemon).Stats(cache_pb2.StatsRequest()) for daemon in daemons]
        return [side for reply in replies for side in reply.sides]

    async def until_nothing_is_held(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            held = [
                (side.requests.running, side.requests.waiting, side.pool.locks, side.pool.leased, side.pool.promised)
                for side in await self.sides()
            ]
            if not any(map(any, held)):
                return
            assert time.monotonic() < deadline, f"still held (running, waiting, locks, leased, promised): {held}"
            await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    with Stack() as stack:
        sockets = {role: os.path.join(stack.folder, f"{role}.sock") for role in ("prefill", "decode")}
        common = ["--listen", "127.0.0.1:0", "--pool-bytes", "4MiB"]
        prefill_daemon = stack.start("prefill", ["serve", "--role", "prefill", "--socket", sockets["prefill"], *common])
        prefill_address = stack.ready(prefill_daemon)
        peer = ["--peer", f"prefill={prefill_address}"]
        decode_daemon = stack.start(
            "decode", ["serve", "--role", "decode", "--socket", sockets["decode"], *peer, *common]
        )
        workers = {
            role: stack.start(
                f"{role} worker",
                ["worker", role, "--synthetic", "--socket", sockets[role], "--listen", "127.0.0.1:0", *flags],
            )
            for role, flags in (
                ("prefill", ["--warmup", "2", "--chunk-tokens", "100", "--synthetic-prefill-us", "100"]),
                ("decode", ["--warmup", "2", "--synthetic-decode-us", "200"]),
            )
        }
        yield Addresses(
            prefill_address,
            stack.ready(decode_daemon),
            stack.ready(workers["prefill"]),
            stack.ready(workers["decode"]),
        )
        statuses = {process.name: stack.stop(process) for process in (*workers.values(), decode_daemon, prefill_daemon)}
        assert set(statuses.values()) == {0}, statuses


def run(addresses: Addresses, scenario: Callable[[Engines], Awaitable[None]]) -> None:
    async def bounded() -> None:
        engines = Engines(addresses)
        await asyncio.wait_for(scenario(engines), 60)
        await engines.until_nothing_is_held()

    asyncio.run(bounded())


def name() -> common_pb2.RequestName:
    return common_pb2.RequestName(request_id=os.urandom(16), attempt=1)


def expected_output(tokens: list[int], count: int) -> list[int]:
    array = np.array(tokens, dtype=np.uint32)
    digests = prompt_digests(array, page_size=PAGE_SIZE)
    return [output_token(Prompt(array, digests.digests, digests.tail), index) for index in range(count)]


@dataclass
class Answer:
    started: engine_pb2.Started
    prefilled: engine_pb2.PrefillReply
    tokens: list[int]


async def ask(engines: Engines, tokens: list[int], new_tokens: int) -> Answer:
    request = name()
    prefilling = asyncio.ensure_future(
        engines.prefill.Prefill(engine_pb2.PrefillRequest(name=request, tokens=tokens, deadline_ms=20_000))
    )
    order = engine_pb2.DecodeRequest(
        name=request, tokens=tokens, max_new_tokens=new_tokens, prefill="prefill", deadline_ms=20_000
    )
    replies = [reply async for reply in engines.decode.Decode(order)]
    output = [token for reply in replies for token in reply.generated.tokens]
    return Answer(replies[0].started, await prefilling, output)


def test_a_conversation_moves_only_what_is_new(addresses: Addresses) -> None:
    async def scenario(engines: Engines) -> None:
        rng = np.random.default_rng(1)
        history = [int(token) for token in rng.integers(0, 30_000, 150)]
        held = 0
        for _ in range(4):
            answer = await ask(engines, history, 70)
            assert answer.started.matched_tokens == held
            assert answer.started.delta_pages == -(-len(history) // PAGE_SIZE) - held // PAGE_SIZE
            assert answer.tokens == expected_output(history, 70)
            ends = list(answer.prefilled.chunk_ends)
            assert ends[-1] == len(history)
            assert ends[0] == min(answer.prefilled.matched_tokens + 100, len(history))
            held = (len(history) + 70 - 1) // PAGE_SIZE * PAGE_SIZE
            history += answer.tokens + [int(token) for token in rng.integers(0, 30_000, 30)]

    run(addresses, scenario)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 128, 300])
def test_prompts_of_every_kind_of_length_twice(addresses: Addresses, tokens: int) -> None:
    async def scenario(engines: Engines) -> None:
        prompt = [tokens * 3 + index for index in range(tokens)]
        first = await ask(engines, prompt, 3)
        again = await ask(engines, prompt, 3)
        assert first.tokens == again.tokens == expected_output(prompt, 3)
        assert again.started.matched_tokens == tokens // PAGE_SIZE * PAGE_SIZE

    run(addresses, scenario)


def test_many_requests_through_a_small_pool(addresses: Addresses) -> None:
    async def scenario(engines: Engines) -> None:
        prompts = [[index, *range(index, index + 90 + index * 7)] for index in range(40)]
        answers = await asyncio.gather(*(ask(engines, prompt, 30) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == expected_output(prompt, 30)

    run(addresses, scenario)


def test_a_reader_that_leaves_frees_its_pages(addresses: Addresses) -> None:
    async def scenario(engines: Engines) -> None:
        request = name()
        prompt = list(range(500, 700))
        prefilling = asyncio.ensure_future(
            engines.prefill.Prefill(engine_pb2.PrefillRequest(name=request, tokens=prompt, deadline_ms=20_000))
        )
        order = engine_pb2.DecodeRequest(
            name=request, tokens=prompt, max_new_tokens=8000, prefill="prefill", deadline_ms=20_000
        )
        call = engines.decode.Decode(order)
        async for reply in call:
            if reply.generated.tokens:
                break
        call.cancel()
        await prefilling
        await engines.until_nothing_is_held()

    run(addresses, scenario)


def test_both_calls_cancelled_while_the_prompt_is_computed(addresses: Addresses) -> None:
    async def scenario(engines: Engines) -> None:
        request = name()
        prompt = list(range(1000, 6000))
        prefilling = asyncio.ensure_future(
            engines.prefill.Prefill(engine_pb2.PrefillRequest(name=request, tokens=prompt, deadline_ms=20_000))
        )
        order = engine_pb2.DecodeRequest(
            name=request, tokens=prompt, max_new_tokens=5, prefill="prefill", deadline_ms=20_000
        )
        decoding = asyncio.ensure_future(engines.decode.Decode(order).read())
        await asyncio.sleep(0.05)
        prefilling.cancel()
        decoding.cancel()
        await asyncio.gather(prefilling, decoding, return_exceptions=True)
        await engines.until_nothing_is_held()

    run(addresses, scenario)


def test_a_prefill_call_that_is_cancelled_frees_its_pages_at_once(addresses: Addresses) -> None:
    """The deadlines are far: only the worker's Abort can free them."""

    async def scenario(engines: Engines) -> None:
        before = (await engines.sides())[0].requests.aborted
        request = name()
        prompt = list(range(10_000, 20_000))
        order = engine_pb2.DecodeRequest(
            name=request, tokens=prompt, max_new_tokens=5, prefill="prefill", deadline_ms=600_000
        )
        decoding = asyncio.ensure_future(engines.decode.Decode(order).read())
        prefilling = asyncio.ensure_future(
            engines.prefill.Prefill(engine_pb2.PrefillRequest(name=request, tokens=prompt, deadline_ms=600_000))
        )
        while not (await engines.sides())[0].pool.leased:
            assert not prefilling.done()
            await asyncio.sleep(0.005)
        prefilling.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as error:  # the daemons tell the decode worker
            await asyncio.wait_for(decoding, 20)
        assert error.value.code() == grpc.StatusCode.ABORTED
        await engines.until_nothing_is_held()
        assert (await engines.sides())[0].requests.aborted == before + 1

    run(addresses, scenario)


def test_a_prompt_that_was_handed_over_is_let_go_when_nobody_wants_it(addresses: Addresses) -> None:
    """The deadline is far: only the Abort can free its pages."""

    async def scenario(engines: Engines) -> None:
        order = engine_pb2.PrefillRequest(name=name(), tokens=list(range(200)), deadline_ms=600_000)
        await engines.prefill.Prefill(order)
        assert (await engines.sides())[0].pool.locks == 1
        for _ in range(2):
            await engines.prefill.Abort(engine_pb2.AbortRequest(name=order.name))
        await engines.until_nothing_is_held()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engines.prefill.Abort(engine_pb2.AbortRequest())
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engines.decode.Abort(engine_pb2.AbortRequest(name=order.name))
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(addresses, scenario)


def test_a_prefill_call_that_is_cancelled_while_it_waits_for_pages(addresses: Addresses) -> None:
    async def scenario(engines: Engines) -> None:
        # of more than half the pool: it waits until a decode daemon asks for it, and none does
        order = engine_pb2.PrefillRequest(name=name(), tokens=list(range(10_000)), deadline_ms=600_000)
        prefilling = asyncio.ensure_future(engines.prefill.Prefill(order))
        while not (await engines.sides())[0].requests.waiting:
            assert not prefilling.done()
            await asyncio.sleep(0.005)
        prefilling.cancel()
        await engines.until_nothing_is_held()

    run(addresses, scenario)


def test_without_a_prefill_server_the_decode_worker_computes(addresses: Addresses) -> None:
    async def scenario(engines: Engines) -> None:
        prompt = list(range(7000, 7200))
        order = engine_pb2.DecodeRequest(name=name(), tokens=prompt, max_new_tokens=80)
        replies = [reply async for reply in engines.decode.Decode(order)]
        assert [token for reply in replies for token in reply.generated.tokens] == expected_output(prompt, 80)
        assert replies[0].started.delta_pages == 0
        longer = [*prompt, *expected_output(prompt, 80), 1, 2]
        answer = await ask(engines, longer, 3)
        assert answer.started.matched_tokens == (200 + 79) // PAGE_SIZE * PAGE_SIZE

    run(addresses, scenario)


def test_a_prefill_that_never_comes_is_an_error_by_the_deadline(addresses: Addresses) -> None:
    async def scenario(engines: Engines) -> None:
        order = engine_pb2.DecodeRequest(
            name=name(), tokens=[1, 2, 3], max_new_tokens=5, prefill="prefill", deadline_ms=300
        )
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await engines.decode.Decode(order).read()
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED

    run(addresses, scenario)
