"""Pools that are the engine's own memory: what holds of the daemon's holds of them, as long as the engine lives."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import threading
from pathlib import Path

import grpc
import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.engine_pools import EnginePools, PoolSpec, make_files
from kvferry.client.requests import HandshakeFailed
from kvferry.daemon.cli.stack import Process, Stack, StackError
from kvferry.daemon.cli.system import start_replicas
from kvferry.proto import common_pb2, worker_pb2
from kvferry.radix.digests import root_digest
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.mapping.segment import Segment
from tests.support.engines import Engines, Turn, settled, stats, wait_until
from tests.system.serving.engine_pools import ENGINE, again, met_again, on_engines
from tests.system.serving.ranks import PAGE, Case, chat_over_both_tiers, ids, spec_of


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(1, 2, ("layer-blocks", "layer")), id="1 to 2"),
        pytest.param(Case(2, 1, ("layer", "layer-blocks"), layout="hnd", slot_bytes=4096), id="2 to 1"),
        pytest.param(Case(2, 2, ("page", "page")), id="whole pages"),
        pytest.param(Case(2, 1, ("page", "layer"), heads=1, tensors=1, indexer=132), id="latents and an indexer"),
    ],
)
def test_chats_over_both_tiers(stack: Stack, case: Case) -> None:
    """The synthetic workers check every byte of what is transferred, spilled and restored."""
    prefills, decodes = start_replicas(stack, on_engines(spec_of(case), 40, case))
    prefill, decode = chat_over_both_tiers(prefills[0], decodes[0], case)
    assert (prefill.pool.pages, decode.pool.pages) == (40, 40)
    assert not [
        name for name in os.listdir("/dev/shm") if name.startswith(f"kvferry-engine-{decodes[0].worker.popen.pid}-")
    ]


def test_what_the_host_tier_has_survives_the_engine(stack: Stack) -> None:
    """The synthetic workers check every byte of what is transferred, spilled and restored. One is killed, and another
    comes with another number of pages: what was spilled comes back."""
    case = Case(1, 2, ("layer-blocks", "layer"))
    system = on_engines(spec_of(case), 24, case)
    prefills, decodes = start_replicas(stack, system)
    stem = f"kvferry-engine-{decodes[0].worker.popen.pid}-"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(stem)]
    rng = random.Random(5)
    prompts = [ids(rng, 6 * PAGE + 3) for _ in range(10)]
    with Engines(prefills[0], decodes[0]) as engines:
        for prompt in prompts:
            assert engines.turn(prompt, 4).error is None
        turn = engines.turn(prompts[-1], 4)
        assert (turn.matched, turn.delta_pages) == (6 * PAGE, 1), "a delta, as with a pool of the daemon's"
    before = settled(decodes[0])
    assert before.host.cached > 0
    stack.kill(decodes[0].worker)
    decode = again(stack, decodes[0], "decode", system, ["--pool-pages", "48"])
    side = stats(decode)
    assert side.pool.pages == side.pool.free == 48
    assert side.host.cached == before.host.cached
    with Engines(prefills[0], decode) as engines:
        turns = [met_again(engines, prompt, 4) for prompt in prompts]
    assert [turn.details for turn in turns if turn.error] == []
    # Whole prompts are there; of others the end is, but what was before it on the device is gone.
    assert sum(turn.matched for turn in turns) >= before.host.cached * PAGE // 2
    after = settled(decode)
    assert after.tiers.restored_pages > before.tiers.restored_pages
    assert after.tiers.mismatched_pages == after.tiers.restore_failed_pages == 0


@pytest.mark.nightly
def test_engines_of_both_sides_come_and_go(stack: Stack) -> None:
    """Both are killed, twice; sessions and pools are made anew each time, larger and smaller."""
    case = Case(1, 1, ("layer", "layer"))
    system = on_engines(spec_of(case), 24, case)
    prefills, decodes = start_replicas(stack, system)
    rng = random.Random(5)
    prompts = [ids(rng, 6 * PAGE + 3) for _ in range(10)]
    with Engines(prefills[0], decodes[0]) as engines:
        for prompt in prompts:
            assert engines.turn(prompt, 4).error is None
    prefill, decode = prefills[0], decodes[0]
    before = settled(decode)
    for decode_pages in (48, 16):
        stack.kill(decode.worker)
        stack.kill(prefill.worker)
        decode = again(stack, decode, "decode", system, ["--pool-pages", str(decode_pages)])
        prefill = again(stack, prefill, "prefill", system, [])
        side = stats(decode)
        assert side.pool.pages == side.pool.free == decode_pages
        assert side.host.cached >= before.host.cached > 0
        with Engines(prefill, decode) as engines:
            turns = [met_again(engines, prompt, 4) for prompt in prompts]
        assert [turn.details for turn in turns if turn.error] == []
        after = settled(decode)
        assert after.tiers.restored_pages > before.tiers.restored_pages
        assert after.tiers.mismatched_pages == after.tiers.restore_failed_pages == 0
        before = after


@pytest.mark.nightly
def test_requests_of_an_engine_that_is_killed_fail_and_may_be_tried_again(stack: Stack) -> None:
    case = Case(1, 1, ("layer", "layer"))
    system = on_engines(spec_of(case), 200, case)
    slow = dataclasses.replace(system, worker_flags=[*system.worker_flags, "--synthetic-prefill-us", "10000"])
    prefills, decodes = start_replicas(stack, slow)
    rng = random.Random(6)
    results: list[Turn] = []
    with Engines(prefills[0], decodes[0]) as engines:
        prompts = [ids(rng, 400) for _ in range(3)]
        thread = threading.Thread(target=lambda: results.extend(engines.turns(prompts, 4, deadline_s=20)))
        thread.start()
        # All three are asked for: one that comes after the engine's end would find its name ended, ABORTED.
        wait_until(lambda: stats(prefills[0]).transfers.active == 3, 15)
        stack.kill(prefills[0].worker)
        thread.join(30)
        assert not thread.is_alive()
    assert [turn.code for turn in results] == [grpc.StatusCode.UNAVAILABLE] * 3, [turn.details for turn in results]
    wait_until(lambda: "unmapped" in prefills[0].daemon.tail(1000), 15)
    prefill = again(stack, prefills[0], "prefill", system, [])
    with Engines(prefill, decodes[0]) as engines:
        assert met_again(engines, prompts[0], 4).error is None
    settled(decodes[0])
    settled(prefill)


@pytest.mark.nightly
def test_an_engine_that_stops_leaves_when_its_memory_is_unmapped(stack: Stack) -> None:
    case = Case(1, 1, ("page", "page"))
    system = on_engines(spec_of(case), 40, case)
    prefills, decodes = start_replicas(stack, system)
    prompt = ids(random.Random(7), 4 * PAGE + 1)
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn(prompt, 4).error is None
    stack.stop(decodes[0].worker)
    assert "unmapped" in decodes[0].daemon.tail(1000)
    assert "has not said" not in decodes[0].worker.tail(1000)
    assert stats(decodes[0]).pool.cached == 0
    decode = again(stack, decodes[0], "decode", system, [])
    with Engines(prefills[0], decode) as engines:
        turn = met_again(engines, prompt, 4)
    assert turn.error is None, turn.details
    assert turn.matched == 0, "nothing was spilled, and the memory is gone"


# -- what is refused ---------------------------------------------------------------------------------------------------


def facts(heads: int = 1) -> common_pb2.NamespaceFacts:
    geometry = common_pb2.Geometry(layers=2, kv_heads=heads, head_dim=16, dtype="float32")
    return common_pb2.NamespaceFacts(
        model="synthetic", revision="1", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=root_digest()
    )


def pools(folder: Path, pages: int = 8) -> EnginePools:
    spec = PoolSpec(pages, PAGE, StorageOrder.LAYER_MAJOR, (), 1, str(folder))
    return make_files(spec, spec.geometry(facts().geometry))


async def hello(socket: str, own: worker_pb2.EnginePool | None, name: str = "test") -> str:
    """ "" when the daemon welcomes it, else why not. A worker that is welcomed leaves without having attached."""
    message = worker_pb2.WorkerHello(protocol=1, role=common_pb2.ROLE_DECODE, worker=name, facts=facts())
    message.facts.geometry.page_size = PAGE
    if own is not None:
        message.pool.CopyFrom(own)
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        call = channel.stream_stream(
            "/kvferry.v1.Worker/Session",
            request_serializer=worker_pb2.WorkerMessage.SerializeToString,
            response_deserializer=worker_pb2.WorkerEvent.FromString,
        )(wait_for_ready=True)
        await call.write(worker_pb2.WorkerMessage(hello=message))
        try:
            event = await asyncio.wait_for(call.read(), 20)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        if event is grpc.aio.EOF:
            return f"{(await call.code()).name}: {await call.details()}"
        call.cancel()
        return ""


def daemon(stack: Stack, folder: Path, *words: str) -> tuple[Process, str]:
    socket = os.path.join(stack.folder, "decode.sock")
    common = ["--name", "decode", "--listen", "127.0.0.1:0", "--socket", socket, "--page-size", str(PAGE)]
    process = stack.start("decode", ["serve", "--role", "decode", *common, "--shm-dir", str(folder), *words])
    stack.ready(process)
    return process, socket


def tensor(message: worker_pb2.EnginePool, number: int) -> worker_pb2.EngineTensor:
    return message.ranks[0].tensors[number]


def name_of(message: worker_pb2.EnginePool, name: str) -> None:
    message.ranks[0].memories[0].file.name = name


def test_bad_registrations_are_refused_by_field_value_and_bound(stack: Stack, tmp_path: Path) -> None:
    _, socket = daemon(stack, tmp_path, *ENGINE)
    own = pools(tmp_path)
    good = own.message
    nbytes, page = good.ranks[0].memories[0].nbytes, 16 * 16 * 4

    def changed(change: object) -> worker_pb2.EnginePool:
        message = worker_pb2.EnginePool()
        message.CopyFrom(good)
        assert callable(change)
        change(message)
        return message

    (tmp_path / "folder").mkdir()
    os.symlink(own.message.ranks[0].memories[0].file.name, tmp_path / "link")
    Segment.create(str(tmp_path), "short", nbytes - 1).close()
    cases = {
        f"tensors[3] ends at byte {nbytes + 1} (offset {3 * 8 * page + 1}, 8 pages of stride {page}); pool.ranks[0]"
        f".memories[0] has {nbytes} bytes": lambda m: setattr(tensor(m, 3), "offset", tensor(m, 3).offset + 1),
        f"tensors[1].page_bytes is {page // 2}; a page of 16 tokens, 1 heads of 16 float32 has {page}": (
            lambda m: setattr(tensor(m, 1), "page_bytes", page // 2)
        ),
        f"tensors[0].page_stride is {page - 1}; it must be {page} to": lambda m: setattr(
            tensor(m, 0), "page_stride", page - 1
        ),
        "overlaps tensors[1]: their pages are 0 bytes apart": lambda m: setattr(
            tensor(m, 1), "offset", tensor(m, 0).offset
        ),
        "tensors[1].memory is 1; it must be 0 to 0": lambda m: setattr(tensor(m, 1), "memory", 1),
        "tensors has 5 entries; 2 layers of 2 tensors in storage LAYER_MAJOR have 4": lambda m: m.ranks[
            0
        ].tensors.add(),
        "memories has 0 entries; it must have 1 to 4": lambda m: m.ranks[0].ClearField("memories"),
        "memories[0] is neither a file nor a GPU's allocation": lambda m: m.ranks[0].memories[0].ClearField("file"),
        "pool.ranks has 2 entries; this daemon's --ranks is 1": lambda m: m.ranks.add(),
        "pool.pages is 0; it must be 1 to 2147483647": lambda m: setattr(m, "pages", 0),
        "file.name is '../x'; it must be 1 to 128 letters": lambda m: name_of(m, "../x"),
        "file.name is '/etc/passwd'": lambda m: name_of(m, "/etc/passwd"),
        "file.name is 'kvferry-00112233445566778899aabbccddeeff-decode-pool'": lambda m: name_of(
            m, "kvferry-00112233445566778899aabbccddeeff-decode-pool"
        ),
        "file.name 'none': [Errno 2]": lambda m: name_of(m, "none"),
        "file.name 'link': [Errno 40]": lambda m: name_of(m, "link"),
        "file.name 'folder': [Errno 21]": lambda m: name_of(m, "folder"),
        f"file.name 'short': it has {nbytes - 1} bytes; {nbytes} were registered": lambda m: name_of(m, "short"),
        "the memories are a GPU's; this daemon's --device is 'cpu'": lambda m: (
            m.ranks[0].memories[0].gpu.MergeFrom(worker_pb2.GpuAllocation(ipc_handle=bytes(64), device_uuid=bytes(16)))
        ),
        "gpu.ipc_handle has 3 bytes; it must have 64": lambda m: (
            m.ranks[0].memories[0].gpu.MergeFrom(worker_pb2.GpuAllocation(ipc_handle=bytes(3), device_uuid=bytes(16)))
        ),
    }

    async def all_of_them() -> None:
        for words, change in cases.items():
            said = await hello(socket, changed(change))
            assert words in said, f"{words!r} is not in {said!r}"
        assert "the worker registers no memory" in await hello(socket, None)
        assert await hello(socket, good) == ""  # after all of them the daemon takes a good one, and lets it go again
        other = pools(tmp_path, 3)
        assert await hello(socket, other.message) == ""
        other.close()

    asyncio.run(all_of_them())
    own.close()


def test_one_engine_process_a_side(stack: Stack, tmp_path: Path) -> None:
    _, socket = daemon(stack, tmp_path, *ENGINE)

    async def two() -> None:
        first = await DaemonClient.connect(socket, common_pb2.ROLE_DECODE, facts(), "first", own=pools(tmp_path))
        with pytest.raises(
            HandshakeFailed, match=r"the memory of worker 'first', which is here; .* one engine process"
        ):
            await DaemonClient.connect(socket, common_pb2.ROLE_DECODE, facts(), "second", own=pools(tmp_path))
        await first.close()
        third = await DaemonClient.connect(socket, common_pb2.ROLE_DECODE, facts(), "third", own=pools(tmp_path, 5))
        assert third.welcome.pages == 5
        assert third.welcome.epoch != first.welcome.epoch
        await third.close()

    asyncio.run(two())
    assert [name for name in os.listdir(tmp_path) if name.startswith("kvferry-engine")] == []


def test_a_daemon_with_a_pool_of_its_own_takes_no_registration(stack: Stack, tmp_path: Path) -> None:
    _, socket = daemon(stack, tmp_path, "--pool-bytes", "1MiB")
    own = pools(tmp_path)
    assert "start it with --pool engine" in asyncio.run(hello(socket, own.message))
    own.close()


@pytest.mark.nightly
def test_a_worker_of_another_page_size_is_refused(stack: Stack) -> None:
    case = Case(1, 1, ("layer", "layer"))
    system = on_engines(spec_of(case), 40, case)
    words = [*system.worker_flags, "--page-size", "32"]
    with pytest.raises(StackError, match="page_size: the worker has 32, the daemon 16"):
        start_replicas(stack, dataclasses.replace(system, worker_flags=words))
