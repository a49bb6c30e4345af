"""A worker's Engine service against a scripted daemon: prefill, decode, failures, readers that leave, bounds."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from kvferry.byte_tokens import VOCABULARY
from kvferry.proto import common_pb2, engine_pb2, worker_pb2
from kvferry.radix.digests import prompt_digests
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout
from kvferry.workers.handoff import pack_first_token, unpack_first_token
from kvferry.workers.models.interface import Prompt
from kvferry.workers.models.synthetic import SimulatedTime, arrived_tail, output_token, page_content
from tests.support.fake_daemon import Event, FakeDaemon, Message
from tests.support.worker_stack import NO_TIME, WorkerStack, worker_stack

GEOMETRY = KVGeometry(layers=2, kv_heads=1, head_dim=4, dtype="float32", page_size=4, layout=Layout.PAGE_NHD)
FACTS = common_pb2.NamespaceFacts(model="synthetic", geometry=GEOMETRY.to_proto())
Scenario = Callable[[FakeDaemon, WorkerStack], Awaitable[None]]


def name() -> common_pb2.RequestName:
    return common_pb2.RequestName(request_id=os.urandom(16), attempt=1)


def prompt_of(tokens: list[int]) -> Prompt:
    array = np.array(tokens, dtype=np.uint32)
    digests = prompt_digests(array, page_size=4)
    return Prompt(array, digests.digests, digests.tail)


def expected_pages(tokens: list[int]) -> list[bytes]:
    prompt = prompt_of(tokens)
    pages = [
        page_content(prompt.digests[start : start + 32], GEOMETRY.page_bytes).tobytes()
        for start in range(0, len(prompt.digests), 32)
    ]
    if prompt.tail_digest:
        pages.append(arrived_tail(prompt.tail_digest, len(tokens) % 4, GEOMETRY).tobytes())
    return pages


def stored(daemon: FakeDaemon, pages: Sequence[int], tokens: int) -> list[bytes]:
    """What the pages hold when a daemon has cleared what is behind the last token."""
    content = [daemon.pool[page].copy() for page in pages]
    if tokens % 4:
        content[-1].reshape(GEOMETRY.fragments, 4, -1)[:, tokens % 4 :] = 0
    return [page.tobytes() for page in content]


def run(
    folder: Path,
    role: common_pb2.Role,
    scenario: Scenario,
    *,
    max_requests: int = 8,
    simulated: SimulatedTime = NO_TIME,
) -> None:
    async def session() -> None:
        async with (
            FakeDaemon(folder, GEOMETRY, pages=1100) as daemon,
            worker_stack(daemon.socket, role, FACTS, max_requests=max_requests, simulated=simulated) as stack,
        ):
            await asyncio.wait_for(scenario(daemon, stack), 60)

    asyncio.run(session())


async def decode_all(stack: WorkerStack, request: engine_pb2.DecodeRequest) -> list[engine_pb2.DecodeReply]:
    return [reply async for reply in stack.engine.Decode(request)]


def tokens_of(replies: list[engine_pb2.DecodeReply]) -> list[int]:
    return [token for reply in replies for token in reply.generated.tokens]


def test_describe(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        reply = await stack.engine.Describe(engine_pb2.DescribeRequest())
        assert (reply.role, reply.daemon, reply.daemon_address) == (common_pb2.ROLE_PREFILL, "fake", "127.0.0.1:7070")
        assert reply.facts.geometry.page_size == 4
        assert reply.max_tokens == 4096

    run(tmp_path, common_pb2.ROLE_PREFILL, scenario)


@pytest.mark.parametrize("tokens", [1, 3, 4, 13, 16])
def test_prefill_fills_the_pages_chunk_by_chunk(tmp_path: Path, tokens: int) -> None:
    prompt = list(range(tokens))

    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        request = engine_pb2.PrefillRequest(name=name(), tokens=prompt)
        reply = await stack.engine.Prefill(request)
        ends = [min(end, tokens) for end in range(6, tokens + 6, 6)]
        assert list(reply.chunk_ends) == ends
        blob = (await daemon.wait_for("aux")).aux.blob
        assert [message.progress.tokens for message in daemon.received if message.HasField("progress")] == ends
        assert unpack_first_token(blob, VOCABULARY) == output_token(prompt_of(prompt), 0)
        pages = daemon.pages_of(request.name)
        assert stored(daemon, pages, tokens) == expected_pages(prompt)

    run(tmp_path, common_pb2.ROLE_PREFILL, scenario)


def test_prefill_computes_only_what_is_not_matched(tmp_path: Path) -> None:
    prompt = list(range(14))

    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        for index, content in enumerate(expected_pages(prompt)[:2]):
            daemon.pool[index] = np.frombuffer(content, dtype=np.uint8)
        daemon.prefix_tokens = 8
        reply = await stack.engine.Prefill(engine_pb2.PrefillRequest(name=name(), tokens=prompt))
        assert reply.matched_tokens == 8
        assert list(reply.chunk_ends) == [14]
        assert stored(daemon, range(4), 14) == expected_pages(prompt)

    run(tmp_path, common_pb2.ROLE_PREFILL, scenario)


def test_failure_while_prefill_computes_stops_it_and_is_answered(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        def fail(message: Message) -> list[Event]:
            error = common_pb2.Error(code=common_pb2.ERROR_UNAVAILABLE, message="peer is down")
            return [Event(failed=worker_pb2.Failed(name=message.progress.name, error=error))]

        daemon.override["progress"] = fail
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.engine.Prefill(engine_pb2.PrefillRequest(name=name(), tokens=list(range(4000))))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "peer is down"
        await daemon.wait_for("abort")
        assert daemon.kinds().count("progress") < 600
        assert stack.client.open_requests == 0

    run(tmp_path, common_pb2.ROLE_PREFILL, scenario, simulated=SimulatedTime(prefill_token_s=0.001))


def test_failure_after_prefill_replied_is_answered_too(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        daemon.override["aux"] = lambda message: []
        request = engine_pb2.PrefillRequest(name=name(), tokens=[1, 2, 3])
        await stack.engine.Prefill(request)
        daemon.fail(request.name, common_pb2.ERROR_DEADLINE_EXCEEDED, "no decode daemon asked for it")
        await daemon.wait_for("abort")

    run(tmp_path, common_pb2.ROLE_PREFILL, scenario)


def test_prefill_deadline_stops_the_computation(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        request = engine_pb2.PrefillRequest(name=name(), tokens=list(range(3000)), deadline_ms=100)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.engine.Prefill(request)
        assert error.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await daemon.wait_for("abort")

    run(tmp_path, common_pb2.ROLE_PREFILL, scenario, simulated=SimulatedTime(prefill_token_s=0.001))


@pytest.mark.parametrize("prompt_tokens", [1, 4, 7, 8])
@pytest.mark.parametrize("new_tokens", [1, 2, 9])
def test_decode_gives_tokens_and_pages(tmp_path: Path, prompt_tokens: int, new_tokens: int) -> None:
    prompt = list(range(100, 100 + prompt_tokens))

    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        for index, content in enumerate(expected_pages(prompt)):
            daemon.pool[index] = np.frombuffer(content, dtype=np.uint8)
        expected = [output_token(prompt_of(prompt), index) for index in range(new_tokens)]
        daemon.aux = pack_first_token(expected[0])
        request = engine_pb2.DecodeRequest(name=name(), tokens=prompt, max_new_tokens=new_tokens, prefill="p")
        replies = await decode_all(stack, request)
        assert replies[0].started.delta_pages == 1
        assert tokens_of(replies) == expected
        assert (replies[-1].ending.reason, replies[-1].ending.output_tokens) == ("length", new_tokens)
        finish = daemon.last("finish").finish
        whole = [*prompt, *expected[:-1]]
        assert finish.tokens == len(whole)
        assert prompt_of(prompt).digests + finish.digests == prompt_of(whole).digests
        pages = daemon.pages_of(request.name)
        full = len(whole) // 4
        assert [daemon.pool[page].tobytes() for page in pages[:full]] == expected_pages(whole)[:full]
        assert len(pages) == -(-len(whole) // 4)

    run(tmp_path, common_pb2.ROLE_DECODE, scenario)


def test_decode_ends_at_a_stop_token(tmp_path: Path) -> None:
    prompt = [5, 6, 7]

    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        daemon.pool[0] = np.frombuffer(expected_pages(prompt)[0], dtype=np.uint8)
        expected = [output_token(prompt_of(prompt), index) for index in range(3)]
        daemon.aux = pack_first_token(expected[0])
        request = engine_pb2.DecodeRequest(
            name=name(), tokens=prompt, max_new_tokens=50, stop_tokens=[expected[2]], prefill="p"
        )
        replies = await decode_all(stack, request)
        assert tokens_of(replies) == expected
        assert (replies[-1].ending.reason, replies[-1].ending.output_tokens) == ("stop", 3)
        assert daemon.last("finish").finish.tokens == 5

    run(tmp_path, common_pb2.ROLE_DECODE, scenario)


def test_decode_without_a_prefill_daemon_computes_the_prompt(tmp_path: Path) -> None:
    prompt = list(range(14))

    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        for index, content in enumerate(expected_pages(prompt)[:2]):
            daemon.pool[index] = np.frombuffer(content, dtype=np.uint8)
        daemon.prefix_tokens = 8
        request = engine_pb2.DecodeRequest(name=name(), tokens=prompt, max_new_tokens=4)
        replies = await decode_all(stack, request)
        assert replies[0].started.matched_tokens == 8
        assert tokens_of(replies) == [output_token(prompt_of(prompt), index) for index in range(4)]
        assert [daemon.pool[page].tobytes() for page in range(3)] == expected_pages(prompt)[:3]

    run(tmp_path, common_pb2.ROLE_DECODE, scenario)


def test_a_wrong_byte_fails_the_request_and_names_the_page(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        request = engine_pb2.DecodeRequest(name=name(), tokens=[1, 2, 3, 4], max_new_tokens=4, prefill="p")
        with pytest.raises(grpc.aio.AioRpcError, match=r"page 0 \(page 0 of the request\)") as error:
            await decode_all(stack, request)
        assert error.value.code() == grpc.StatusCode.INTERNAL
        await daemon.wait_for("abort")

    run(tmp_path, common_pb2.ROLE_DECODE, scenario)


@pytest.mark.parametrize("prefill", ["", "p"])
def test_a_reader_that_leaves_keeps_what_is_computed(tmp_path: Path, prefill: str) -> None:
    """A reader that has enough, or is gone: full pages of prompt and output go to the tree all the same."""
    prompt = [1, 2, 3]

    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        daemon.aux = pack_first_token(output_token(prompt_of(prompt), 0))
        if prefill:
            daemon.pool[0] = np.frombuffer(expected_pages(prompt)[0], dtype=np.uint8)
        request = engine_pb2.DecodeRequest(name=name(), tokens=prompt, max_new_tokens=4000, prefill=prefill)
        call = stack.engine.Decode(request)
        read = 0
        async for reply in call:
            read += len(reply.generated.tokens)
            if read >= 20:
                break
        call.cancel()
        finish = (await daemon.wait_for("finish")).finish
        while len(stack.jobs):
            await asyncio.sleep(0.01)
        assert daemon.kinds().count("abort") == 0
        assert stack.client.open_requests == 0
        stored = len(prompt) + read - 1
        assert stored <= finish.tokens < stored + 50  # a step or two more while the cancellation was on its way
        whole = prompt + [output_token(prompt_of(prompt), index) for index in range(finish.tokens - len(prompt))]
        assert finish.digests == prompt_of(whole).digests
        full = finish.tokens // 4
        pages = daemon.pages_of(request.name)[:full]
        assert [daemon.pool[page].tobytes() for page in pages] == expected_pages(whole)[:full]

    run(tmp_path, common_pb2.ROLE_DECODE, scenario, simulated=SimulatedTime(decode_step_s=0.005))


def test_a_reader_that_leaves_before_ready_aborts(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        only_admitted = daemon._on_admit
        daemon.override["admit"] = lambda message: only_admitted(message)[:1]
        call = stack.engine.Decode(
            engine_pb2.DecodeRequest(name=name(), tokens=[1, 2, 3], max_new_tokens=5, prefill="p")
        )
        reading = asyncio.ensure_future(call.read())
        await daemon.wait_for("admit")
        call.cancel()
        await daemon.wait_for("abort")
        await asyncio.wait({reading})
        assert daemon.kinds().count("finish") == 0

    run(tmp_path, common_pb2.ROLE_DECODE, scenario)


def test_a_reader_that_leaves_while_the_prompt_is_computed_here_aborts(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        call = stack.engine.Decode(engine_pb2.DecodeRequest(name=name(), tokens=list(range(3000)), max_new_tokens=5))
        async for reply in call:
            if reply.HasField("started"):
                break
        call.cancel()
        await daemon.wait_for("abort")
        assert daemon.kinds().count("finish") == 0

    run(tmp_path, common_pb2.ROLE_DECODE, scenario, simulated=SimulatedTime(prefill_token_s=0.001))


def test_a_request_that_fails_while_it_decodes_is_aborted(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        request = engine_pb2.DecodeRequest(name=name(), tokens=[1, 2, 3], max_new_tokens=4000)
        decoding = asyncio.create_task(decode_all(stack, request))
        await daemon.wait_for("grow")
        daemon.fail(request.name, common_pb2.ERROR_INTERNAL, "the pool is gone")
        with pytest.raises(grpc.aio.AioRpcError, match="the pool is gone"):
            await decoding
        await daemon.wait_for("abort")
        assert daemon.kinds().count("finish") == 0

    run(tmp_path, common_pb2.ROLE_DECODE, scenario, simulated=SimulatedTime(decode_step_s=0.005))


def test_a_caller_that_leaves_while_prefill_computes_aborts(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        call = stack.engine.Prefill(engine_pb2.PrefillRequest(name=name(), tokens=list(range(3000))))
        await asyncio.wait({asyncio.ensure_future(daemon.wait_for("progress"))})
        call.cancel()
        await daemon.wait_for("abort")
        assert daemon.kinds().count("aux") == 0

    run(tmp_path, common_pb2.ROLE_PREFILL, scenario, simulated=SimulatedTime(prefill_token_s=0.001))


def test_requests_take_turns(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        requests = [engine_pb2.DecodeRequest(name=name(), tokens=[n, 2, 3], max_new_tokens=20) for n in range(4)]
        order: list[int] = []

        async def read(index: int) -> None:
            async for reply in stack.engine.Decode(requests[index]):
                order.extend([index] * len(reply.generated.tokens))

        await asyncio.gather(*(read(index) for index in range(4)))
        assert len(order) == 80
        assert set(order[:40]) == {0, 1, 2, 3}
        assert max(order[:40].count(index) for index in range(4)) < 20

    run(tmp_path, common_pb2.ROLE_DECODE, scenario, simulated=SimulatedTime(decode_step_s=0.002))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [1, VOCABULARY]}, rf"tokens\[1\] is {VOCABULARY}"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 5000}, "together they may be 4096"),
        ({"sampling": engine_pb2.Sampling(temperature=-1)}, "sampling.temperature is -1"),
        ({"sampling": engine_pb2.Sampling(top_p=1.5)}, "sampling.top_p is 1.5"),
        ({"name": common_pb2.RequestName(request_id=b"x", attempt=1)}, "name.request_id has 1 bytes"),
        ({"name": common_pb2.RequestName(request_id=bytes(16))}, "name.attempt is 0"),
    ],
)
def test_bad_requests_name_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        fields: dict[str, object] = {"name": name(), "tokens": [1, 2], "max_new_tokens": 3, **change}
        with pytest.raises(grpc.aio.AioRpcError, match=message) as error:
            await decode_all(stack, engine_pb2.DecodeRequest(**fields))  # type: ignore[arg-type]
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT

    run(tmp_path, common_pb2.ROLE_DECODE, scenario)


def test_one_request_too_many_is_refused(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        daemon.override["admit"] = lambda message: []
        call = stack.engine.Decode(engine_pb2.DecodeRequest(name=name(), tokens=[1], max_new_tokens=1))
        waiting = asyncio.ensure_future(call.read())
        await daemon.wait_for("admit")
        with pytest.raises(grpc.aio.AioRpcError, match="the worker takes 1") as error:
            await decode_all(stack, engine_pb2.DecodeRequest(name=name(), tokens=[1], max_new_tokens=1))
        assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        call.cancel()
        await asyncio.wait({waiting})

    run(tmp_path, common_pb2.ROLE_DECODE, scenario, max_requests=1)


def test_draining_refuses_new_and_finishes_running(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        running = asyncio.create_task(
            decode_all(stack, engine_pb2.DecodeRequest(name=name(), tokens=[1], max_new_tokens=30))
        )
        await daemon.wait_for("admit")
        draining = asyncio.create_task(stack.jobs.drain(30))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down") as error:
            await decode_all(stack, engine_pb2.DecodeRequest(name=name(), tokens=[1], max_new_tokens=1))
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert len(tokens_of(await running)) == 30
        await draining

    run(tmp_path, common_pb2.ROLE_DECODE, scenario, simulated=SimulatedTime(decode_step_s=0.005))


def test_the_other_roles_call_is_unimplemented(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stack.engine.Prefill(engine_pb2.PrefillRequest(name=name(), tokens=[1]))
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED

    run(tmp_path, common_pb2.ROLE_DECODE, scenario)


def test_a_daemon_that_leaves_gives_unavailable(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, stack: WorkerStack) -> None:
        daemon.override["admit"] = lambda message: []
        waiting = asyncio.create_task(
            decode_all(stack, engine_pb2.DecodeRequest(name=name(), tokens=[1], max_new_tokens=1))
        )
        await daemon.wait_for("admit")
        daemon.events.put_nowait(None)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await waiting
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE

    run(tmp_path, common_pb2.ROLE_DECODE, scenario)
