"""The end of a daemon: what is being made is let go, what is left is found again, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.daemon import server as server_module
from kvferry.daemon.peers.dialing import dial_plainly
from kvferry.daemon.server import Daemon
from kvferry.daemon.sides import side as side_module
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.side import AnySide
from kvferry.daemon.socket_file import SocketFile
from kvferry.proto import common_pb2, worker_pb2
from kvferry.radix.digests import root_digest
from kvferry.transfer.host_tier.rows import AnonymousRows
from kvferry.transfer.mapping.segment import reclaim_stale
from tests.daemon.daemons import PAGE, config_of, started


def hello() -> worker_pb2.WorkerHello:
    geometry = common_pb2.Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32", page_size=PAGE)
    facts = common_pb2.NamespaceFacts(
        model="synthetic", revision="1", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=root_digest()
    )
    return worker_pb2.WorkerHello(protocol=1, role=common_pb2.ROLE_DECODE, worker="first", facts=facts)


def shared_files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith("kvferry-"))


async def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        await asyncio.sleep(0.01)


# -- what is being made --------------------------------------------------------------------------------------------


class Allocation:
    """In place of `os.posix_fallocate`: the one of that number waits to be told to go on."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.allocate = os.posix_fallocate

    def __call__(self, fd: int, offset: int, nbytes: int) -> None:
        self.left -= 1
        if self.left < 0:
            self.reached.set()
            assert self.go_on.wait(20)
        self.allocate(fd, offset, nbytes)


@pytest.mark.parametrize("number", [0, 1], ids=["pool", "index"])
def test_a_side_that_ends_while_its_tiers_are_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    allocation = Allocation(number)
    monkeypatch.setattr(os, "posix_fallocate", allocation)

    async def story() -> None:
        side = DecodeSide(config_of(tmp_path, host_bytes=1 << 20), bytes(16), time.monotonic, dial_plainly)
        registering = asyncio.create_task(side.register(hello()))
        await until(allocation.reached.is_set)
        registering.cancel()
        closing = asyncio.create_task(side.close())
        await asyncio.wait([registering])
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not closing.done(), "a thread still makes memory"
        allocation.go_on.set()
        await asyncio.wait_for(closing, 20)
        assert shared_files(tmp_path) == []

    asyncio.run(story())
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_side_that_ends_while_its_host_tier_grows_waits_for_the_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on, make, ended = threading.Event(), threading.Event(), AnonymousRows.make, list[str]()

    def slow(rows: AnonymousRows, start: int, end: int, cpus: Collection[int]) -> None:
        reached.set()
        assert go_on.wait(20)
        make(rows, start, end, cpus)
        ended.append("made")

    monkeypatch.setattr(AnonymousRows, "make", slow)
    monkeypatch.setattr(AnonymousRows, "close", lambda rows: ended.append("closed"))

    async def story() -> None:
        side = DecodeSide(config_of(tmp_path, host_bytes=1 << 20), bytes(16), time.monotonic, dial_plainly)
        await side.register(hello())
        await until(reached.is_set)
        host = side.cache.host
        assert host is not None and host.pages == 0
        closing = asyncio.create_task(side.close())
        for _ in range(5):
            await asyncio.sleep(0.01)
        assert not closing.done(), "a thread still makes memory"
        go_on.set()
        await asyncio.wait_for(closing, 20)
        assert host.pages == 0
        assert ended == ["made", "closed"]
        assert shared_files(tmp_path) == []

    asyncio.run(story())


# -- what is left --------------------------------------------------------------------------------------------------


def test_a_side_whose_end_fails_keeps_neither_the_other_nor_its_own_files_for_ever(tmp_path: Path) -> None:
    class Failing:
        role, busy, draining, saves = "prefill", 0, False, False

        async def spill_all(self, deadline: float) -> None:
            pass

        def halt(self) -> None:
            pass

        async def close(self) -> None:
            raise OSError("it does not end")

    async def story() -> str:
        async with started(config_of(tmp_path)) as daemon:
            await daemon.sides["decode"].register(hello())
            stem = f"kvferry-{daemon.incarnation.hex()}"
            (tmp_path / f"{stem}-prefill-pool").touch()
            daemon.sides = {"prefill": cast(AnySide, Failing()), **daemon.sides}
            assert f"{stem}-decode-pool" in shared_files(tmp_path)
            daemon.stop()
            with pytest.raises(OSError, match="it does not end"):
                await daemon.run_until_stopped()
            return stem

    stem = asyncio.run(story())
    assert shared_files(tmp_path) == [f"{stem}-lock", f"{stem}-prefill-pool"]
    assert len(reclaim_stale(str(tmp_path))) == 2
    assert shared_files(tmp_path) == []


# -- whose socket it is --------------------------------------------------------------------------------------------


def test_a_successors_socket_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "d.sock")
    with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        first.bind(path)
        file = SocketFile(path)
        os.unlink(path)
        second.bind(path)
        file.remove()
        assert os.path.exists(path)
        own = SocketFile(path)
        own.remove()
        own.remove()
        assert not os.path.exists(path)


def is_there(path: str) -> bool:
    return os.path.exists(path)


def test_a_daemon_that_ends_leaves_the_socket_of_the_next(tmp_path: Path) -> None:
    async def story() -> None:
        async with started(config_of(tmp_path)) as first:
            ending = asyncio.Event()
            close = first.sides["decode"].close

            async def slow() -> None:
                await ending.wait()
                await close()

            cast(Any, first.sides["decode"]).close = slow
            first.stop()
            end = asyncio.create_task(first.run_until_stopped())
            await until(lambda: not is_there(first.config.socket))  # gRPC has let it go
            async with started(config_of(tmp_path)) as second:
                ending.set()
                await asyncio.wait_for(end, 20)
                assert is_there(second.config.socket)
                second.stop()
                await asyncio.wait_for(second.run_until_stopped(), 20)
                assert not is_there(second.config.socket)

    asyncio.run(story())


# -- how long it waits ---------------------------------------------------------------------------------------------

GRACE = 100.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class Busy:
    """A side whose requests never end; each look at them takes a second."""

    role = "decode"

    def __init__(self, clock: Clock, saves: bool) -> None:
        self.clock, self.saves = clock, saves
        self.draining = False
        self.spilled_at: float | None = None

    @property
    def busy(self) -> int:
        self.clock.now += 1.0
        return 1

    async def spill_all(self, deadline: float) -> None:
        self.spilled_at = self.clock.now

    def halt(self) -> None:
        pass


@asynccontextmanager
async def draining(folder: Path, monkeypatch: pytest.MonkeyPatch, *, saves: bool) -> AsyncIterator[tuple[Daemon, Busy]]:
    clock = Clock()
    monkeypatch.setattr(server_module, "time", clock)
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.0)
    daemon, side = Daemon(config_of(folder, grace_seconds=GRACE)), Busy(clock, saves)
    daemon.sides = {"decode": cast(AnySide, side)}
    yield daemon, side
    await asyncio.gather(*daemon._tasks)


@pytest.mark.parametrize(("saves", "share"), [(False, 1.0), (True, 0.8)])
def test_requests_have_the_grace_period_but_for_what_saving_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: bool, share: float
) -> None:
    async def story() -> None:
        async with draining(tmp_path, monkeypatch, saves=saves) as (daemon, side):
            await daemon._drain()
            assert side.spilled_at is not None
            assert share * GRACE <= side.spilled_at <= share * GRACE + 2

    asyncio.run(story())


def test_nothing_waits_once_an_invariant_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with draining(tmp_path, monkeypatch, saves=True) as (daemon, side):
            asyncio.get_running_loop().call_later(0.06, daemon._die, AssertionError("broken"))
            monkeypatch.setattr(side.clock, "monotonic", lambda: 0.0)  # the grace period never ends
            await asyncio.wait_for(daemon._drain(), 20)
            assert side.spilled_at is None

    asyncio.run(story())


def cache_pages(side: AnySide, pages: int) -> None:
    """Each of a prompt of its own."""
    assert side.tiers.facts is not None
    namespace = side.cache.namespace(side.tiers.facts.id)
    for number in range(pages):
        taken = side.cache.take(namespace, 1)
        assert taken is not None
        namespace.tree.insert(number.to_bytes(32, "big"), taken)
        side.cache.publish(namespace, 1)


@pytest.mark.parametrize("breaks", [False, True])
def test_nothing_more_is_saved_once_an_invariant_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """Of two copies that run together both are found by the next daemon, or the one that was before the error."""
    monkeypatch.setattr(side_module, "SPILL_PAGES", 4)
    written: list[int] = []
    copies: list[object] = []
    both_run, broken, numbers = threading.Event(), threading.Event(), itertools.count()

    async def story() -> None:
        config = config_of(tmp_path, host_dir=str(tmp_path / "host"), host_bytes=1 << 20)
        async with started(config) as daemon:
            side = daemon.sides["decode"]
            await side.register(hello())
            await until(lambda: not side.tiers.reads_file)
            cache_pages(side, 8)
            memory, tier, file = side.tiers.memory, side.tiers.host, cast(Any, side.tiers.host._rows)
            spill, start, write = memory.spill, tier.start, file.write

            def starts(*words: Any) -> None:
                copies.append(words)
                if len(copies) == 2:
                    both_run.set()
                start(*words)

            loop = asyncio.get_running_loop()

            def spills(*words: Any) -> None:
                assert both_run.wait(20)
                if breaks and next(numbers):  # the second one's entries come behind the error
                    assert broken.wait(20)
                spill(*words)

            def dies() -> None:
                daemon._die(AssertionError("broken"))
                broken.set()

            def writes(rows: Any, *words: Any) -> None:
                written.append(len(rows))
                write(rows, *words)
                if breaks:
                    loop.call_soon_threadsafe(dies)

            monkeypatch.setattr(tier, "start", starts)
            monkeypatch.setattr(memory, "spill", spills)
            monkeypatch.setattr(file, "write", writes)
            daemon.stop()
            end = asyncio.create_task(daemon.run_until_stopped())
            await asyncio.wait([end], timeout=20)
            assert end.done()
            assert str(end.exception()) == ("broken" if breaks else "None")

    asyncio.run(story())
    assert len(copies) == 2
    assert written == ([4] if breaks else [4, 4])


def test_an_error_of_the_saving_ends_the_daemon_in_its_order(tmp_path: Path) -> None:
    async def story() -> None:
        async with started(config_of(tmp_path)) as daemon:
            side = daemon.sides["decode"]

            async def fails(deadline: float) -> None:
                raise AssertionError("broken")

            cast(Any, side).spill_all = fails
            daemon.stop()
            with pytest.raises(AssertionError, match="broken"):
                await daemon.run_until_stopped()
            assert not is_there(daemon.config.socket) and shared_files(tmp_path) == []

    asyncio.run(story())


def test_who_watches_the_health_of_either_service_hears_of_the_end(tmp_path: Path) -> None:
    """Over gRPC. One watcher more is gone before, and takes nothing from the others."""
    reply = health_pb2.HealthCheckResponse

    async def story() -> None:
        async with started(config_of(tmp_path)) as daemon, grpc.aio.insecure_channel(daemon.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            gone, *watches = [health.Watch(health_pb2.HealthCheckRequest(service=name)) for name in ("", "", "engine")]
            said = [(await watch.read()).status for watch in (gone, *watches)]
            assert said == [reply.SERVING, reply.SERVING, reply.NOT_SERVING]
            gone.cancel()
            await daemon.sides["decode"].register(hello())
            daemon._health.set("engine", [])
            assert (await watches[1].read()).status == reply.SERVING
            daemon.stop()
            end = asyncio.create_task(daemon.run_until_stopped())
            assert [(await watch.read()).status for watch in watches] == [reply.NOT_SERVING] * 2
            await asyncio.wait_for(end, 20)

    asyncio.run(story())


def test_all_services_drain_at_once_while_a_watcher_of_the_health_reads_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with draining(tmp_path, monkeypatch, saves=False) as (daemon, side):
            daemon._health.set("engine", [])
            slow, asked = Slow(), [health_pb2.HealthCheckRequest(service=name) for name in ("", "engine")]
            watches = [asyncio.create_task(daemon._health.Watch(each, cast(Any, slow))) for each in asked]
            await asyncio.sleep(0)
            drain = asyncio.create_task(daemon._drain())
            await asyncio.sleep(0)
            assert side.draining
            for each in asked:
                reply = await daemon._health.Check(each, cast(Any, slow))
                assert reply.status == reply.NOT_SERVING, each.service
            await asyncio.wait_for(drain, 20)
            for watch in watches:
                watch.cancel()
            await asyncio.wait(watches)

    asyncio.run(story())


class Slow:
    """The call of a watcher that never reads, and of one who asks once."""

    async def write(self, reply: health_pb2.HealthCheckResponse) -> None:
        await asyncio.Event().wait()

    def set_trailing_metadata(self, metadata: object) -> None:
        pass
