"""A worker that registers its memory: what it leaves behind when it cannot be taken in, and whose its files are."""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
import pytest

from kvferry.client.engine_pools import EnginePools, PoolSpec, make_files
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.memory.making import registration_of
from kvferry.daemon.peers.dialing import dial_plainly
from kvferry.daemon.services import worker as worker_service
from kvferry.daemon.services.worker import WorkerService
from kvferry.daemon.sides import tiers as side_tiers
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.proto import common_pb2, worker_pb2
from kvferry.radix.digests import root_digest
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.mapping.segment import FileLock, Segment

PAGE = 16


def hello(
    folder: Path, name: str, order: StorageOrder = StorageOrder.LAYER_MAJOR, runs: int | None = None
) -> tuple[EnginePools, worker_pb2.WorkerHello]:
    """`runs`: of a head, in an engine's own layout, which the facts alone say; None: it has another."""
    geometry = common_pb2.Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32")
    facts = common_pb2.NamespaceFacts(
        model="synthetic", revision="1", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=root_digest()
    )
    spec = PoolSpec(8, PAGE, order, (), 1, str(folder))
    pools = make_files(spec, spec.geometry(geometry))
    message = worker_pb2.WorkerHello(protocol=1, role=common_pb2.ROLE_DECODE, worker=name, facts=facts)
    message.facts.geometry.page_size = PAGE
    if runs is not None:
        message.facts.geometry.layout, message.facts.geometry.head_runs = common_pb2.LAYOUT_ENGINE, runs
        message.facts.engine_layout = "an engine's"
    message.pool.CopyFrom(pools.message)
    return pools, message


def test_a_worker_that_no_lock_can_be_made_for_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = DaemonConfig(role="decode", pool="engine", shm_dir=str(tmp_path), page_size=PAGE)

    def full(path: str) -> FileLock:
        raise OSError(errno.EMFILE, "Too many open files", path)

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        first, message = hello(tmp_path, "first")
        with monkeypatch.context() as patched:
            patched.setattr(FileLock, "create", full)
            with pytest.raises(RequestError, match="Too many open files") as refused:
                await side.register(message)
        assert refused.value.code == common_pb2.ERROR_RESOURCE_EXHAUSTED
        assert side.workers.may_write == 0
        first.close()
        second, message = hello(tmp_path, "second")
        worker, welcome = await asyncio.wait_for(side.register(message), 5)
        assert (side.workers.may_write, welcome.pages, worker.name) == (1, 8, "second")
        await side.close()
        second.close()

    asyncio.run(story())


@pytest.mark.parametrize("block_tokens", [0, PAGE])
def test_a_host_tier_below_one_page_is_refused_whatever_the_pool_is_of(tmp_path: Path, block_tokens: int) -> None:
    row = 2 * 2 * PAGE * 16 * 4  # bytes

    async def registered(host_bytes: int) -> int:
        config = DaemonConfig(
            role="decode", pool="engine", shm_dir=str(tmp_path), page_size=PAGE, host_bytes=host_bytes
        )
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        pools, message = hello(tmp_path, "first", StorageOrder.PAGE_MAJOR, runs=2)
        message.pool.block_tokens = block_tokens
        tensors = message.pool.ranks[0].tensors
        if block_tokens:  # each layer's K and V is a tensor
            tensors[0].page_bytes = row // 4
            for run in range(1, 4):
                tensors.add().CopyFrom(tensors[0])
                tensors[-1].offset += run * row // 4
        try:
            await asyncio.wait_for(side.register(message), 5)
            host = side.cache.host
            assert host is not None
            while not host.pages:
                await asyncio.sleep(0.001)
            return host.pages
        finally:
            await side.close()
            pools.close()

    assert asyncio.run(registered(row)) == 1
    with pytest.raises(RequestError, match=f"--host-bytes is {row - 1}, a page of this model {row};") as refused:
        asyncio.run(registered(row - 1))
    assert refused.value.code == common_pb2.ERROR_RESOURCE_EXHAUSTED


def test_a_file_that_has_an_engines_name_meanwhile_is_left_alone(tmp_path: Path) -> None:
    config = DaemonConfig(role="decode", pool="engine", shm_dir=str(tmp_path), page_size=PAGE)

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        pools, message = hello(tmp_path, "engine")
        await side.register(message)
        name = message.pool.ranks[0].memories[0].file.name
        pools.close()
        again = Segment.create(str(tmp_path), name, 4096)
        await side.close()
        assert (tmp_path / name).exists()
        again.close()

    asyncio.run(story())


class Leaving:
    """The stream of a worker that says hello, and that it is quiesced."""

    def __init__(self, message: worker_pb2.WorkerHello) -> None:
        quiesced = worker_pb2.WorkerMessage(quiesced=worker_pb2.Quiesced())
        self._says = iter([worker_pb2.WorkerMessage(hello=message), quiesced])

    async def read(self) -> object:
        return next(self._says)

    async def write(self, event: worker_pb2.WorkerEvent) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise PermissionError(f"{code.name}: {details}")


def test_a_stream_ends_with_an_error_where_the_memory_is_still_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a stream with none is the word that it may be freed."""
    monkeypatch.setattr(worker_service, "RELEASE_SECONDS", 0.05)
    config = DaemonConfig(role="decode", pool="engine", shm_dir=str(tmp_path), page_size=PAGE)

    async def story(uses: str) -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        side.in_use = lambda: uses  # type: ignore[method-assign]
        pools, message = hello(tmp_path, "engine")
        try:
            await WorkerService({"decode": side}, "").Session(None, cast(Any, Leaving(message)))
        finally:
            await side.close()
            pools.close()

    asyncio.run(story(""))
    with pytest.raises(PermissionError, match="DEADLINE_EXCEEDED: the pool is still mapped after"):
        asyncio.run(story("a copy"))


def plain_hello(name: str) -> worker_pb2.WorkerHello:
    """Of a worker that takes the daemon's pool."""
    geometry = common_pb2.Geometry(layers=2, kv_heads=4, head_dim=16, dtype="float32", tensors=2)
    facts = common_pb2.NamespaceFacts(
        model="synthetic", revision="1", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=root_digest()
    )
    return worker_pb2.WorkerHello(protocol=1, role=common_pb2.ROLE_DECODE, worker=name, facts=facts)


def held_up(making: Callable[..., Awaitable[Any]], gate: asyncio.Event) -> Callable[..., Awaitable[Any]]:
    """`making` of a pool, which does not begin before the gate opens."""

    async def made(*arguments: object) -> Any:
        await gate.wait()
        return await making(*arguments)

    return made


@pytest.mark.parametrize("ranks", [1, 4])
def test_max_workers_bounds_those_that_come_while_the_pool_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    config = DaemonConfig(
        role="decode", shm_dir=str(tmp_path), page_size=PAGE, pool_bytes=1 << 20, ranks=ranks, max_workers=2
    )

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        gate = asyncio.Event()
        monkeypatch.setattr(side_tiers, "make_pool", held_up(side_tiers.make_pool, gate))
        # Two have a place; one of them gives up before the pool is there, and its place is another's.
        first, second = (asyncio.create_task(side.register(plain_hello(f"worker {i}"))) for i in range(2))
        await asyncio.sleep(0)
        for _ in range(3):
            with pytest.raises(RequestError, match=r"0 workers are here, .* 2 are coming") as refused:
                await asyncio.wait_for(side.register(plain_hello("one more")), 5)
            assert refused.value.code == common_pb2.ERROR_RESOURCE_EXHAUSTED
        second.cancel()
        await asyncio.wait([second])
        third = asyncio.create_task(side.register(plain_hello("third")))
        gate.set()
        taken = [(await coming)[1] for coming in (first, third)]
        assert side.workers.may_write == 2 and [len(welcome.rank_pools) for welcome in taken] == [ranks, ranks]
        with pytest.raises(RequestError, match=r"2 workers are here, .* 0 are coming"):
            await side.register(plain_hello("one more"))
        await side.close()

    asyncio.run(story())


def test_workers_that_come_at_once_are_as_many_as_max_workers(tmp_path: Path) -> None:
    config = DaemonConfig(
        role="decode", shm_dir=str(tmp_path), page_size=PAGE, pool_bytes=1 << 20, ranks=2, max_workers=3
    )

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        coming = [side.register(plain_hello(f"worker {i}")) for i in range(8)]
        answers = await asyncio.gather(*coming, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, RequestError)]
        assert [error.code for error in refused] == [common_pb2.ERROR_RESOURCE_EXHAUSTED] * 5
        assert side.workers.may_write == 3
        await side.close()

    asyncio.run(story())


def test_the_next_engines_memory_is_another_pool(tmp_path: Path) -> None:
    """Of another epoch, and with nothing of what the last one's held."""
    config = DaemonConfig(role="decode", pool="engine", shm_dir=str(tmp_path), page_size=PAGE)

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        first, message = hello(tmp_path, "first")
        worker, welcome = await side.register(message)
        namespace = side.cache.namespace(welcome.namespace_id)
        taken = side.cache.take(namespace, 1)
        assert taken is not None
        namespace.tree.insert(bytes(32), taken)
        side.cache.publish(namespace, 1)
        worker.quiesced = True
        side.workers.leave(worker)
        assert not side.tiers.has_pool.is_set()
        first.close()
        second, message = hello(tmp_path, "second")
        _, again = await asyncio.wait_for(side.register(message), 20)
        assert again.epoch != welcome.epoch and side.tiers.has_pool.is_set()
        assert side.cache.pool.free == again.pages == 8
        await side.close()
        second.close()

    asyncio.run(story())


def test_memory_that_was_mapped_for_one_who_left_meanwhile_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may free it; and it would be nobody's, and keep out the next one."""
    config = DaemonConfig(role="decode", pool="engine", shm_dir=str(tmp_path), page_size=PAGE)

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        gate = asyncio.Event()
        monkeypatch.setattr(side_tiers, "map_pool", held_up(side_tiers.map_pool, gate))
        first, message = hello(tmp_path, "first")
        coming = asyncio.create_task(side.register(message))
        await asyncio.sleep(0)
        coming.cancel()
        await asyncio.wait([coming])
        gate.set()
        while side.tasks.running:
            await asyncio.sleep(0.001)
        assert side.tiers.facts is not None and not side.tiers.has_pool.is_set()
        first.close()
        second, message = hello(tmp_path, "second")
        worker, _ = await asyncio.wait_for(side.register(message), 20)
        assert worker.name == "second"
        await side.close()
        second.close()

    asyncio.run(asyncio.wait_for(story(), 20))


def test_later_workers_serve_the_first_ones_model(tmp_path: Path) -> None:
    """Tenants may differ."""
    config = DaemonConfig(role="decode", shm_dir=str(tmp_path), page_size=PAGE, pool_bytes=1 << 20)

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        await side.register(plain_hello("first"))
        tenant, other = plain_hello("tenant"), plain_hello("other")
        tenant.facts.tenant_salt_digest = bytes(32)
        await side.register(tenant)
        other.facts.model = "another"
        with pytest.raises(RequestError, match=r"this daemon serves another model: .*another.*, or restart it$"):
            await side.register(other)
        assert side.workers.may_write == 2
        await side.close()

    asyncio.run(story())


@pytest.mark.parametrize("runs", [0, 1, 2])
@pytest.mark.parametrize("order", [StorageOrder.LAYER_MAJOR, StorageOrder.LAYER_BLOCKS])
def test_pages_in_an_engines_own_layout_are_one_run_of_bytes(tmp_path: Path, order: StorageOrder, runs: int) -> None:
    """The first engine's, and those of each one that comes back."""
    config = DaemonConfig(role="decode", pool="engine", shm_dir=str(tmp_path), page_size=PAGE)
    said = f"storage is {order.name}; a page in an engine's own layout is one run of bytes on each rank"

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        apart, wrong = hello(tmp_path, "apart", order, runs)
        whole, right = hello(tmp_path, "whole", StorageOrder.PAGE_MAJOR, runs)
        with pytest.raises(RequestError, match=said):
            await side.register(wrong)
        await side.register(right)
        registration = registration_of(config, wrong)
        assert side.tiers.facts is not None and registration is not None
        with pytest.raises(RequestError, match=said):
            await side.tiers.fit(side.tiers.facts, registration)
        await side.close()
        apart.close()
        whole.close()

    asyncio.run(story())


def test_the_daemons_own_pool_is_page_by_page_for_an_engines_own_layout(tmp_path: Path) -> None:
    config = DaemonConfig(role="decode", shm_dir=str(tmp_path), page_size=PAGE, pool_bytes=1 << 20, storage="layer")

    async def story() -> None:
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        message = plain_hello("engine")
        message.facts.geometry.layout, message.facts.geometry.head_runs = common_pb2.LAYOUT_ENGINE, 1
        message.facts.engine_layout = "an engine's"
        with pytest.raises(RequestError, match=r"storage is LAYER_MAJOR; .* it takes --storage page"):
            await side.register(message)
        await side.close()

    asyncio.run(story())
