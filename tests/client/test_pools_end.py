"""The end of a worker's pools on GPUs: every device is waited for, and memory of its own that a daemon may still have
mapped is not freed. The devices are played."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import grpc
import pytest
import torch

from kvferry.client import client as client_module
from kvferry.client import engine_gpu_pools, gpu_pools
from kvferry.client.attachment import Attachment
from kvferry.client.client import DaemonClient
from kvferry.client.engine_gpu_pools import LayerTensors
from kvferry.client.engine_pools import EnginePools, PoolSpec, make_files
from kvferry.client.requests import HandshakeFailed
from kvferry.daemon.services.worker_frames import FrameTalk
from kvferry.proto import common_pb2
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.mapping.segment import FileLock
from kvferry.workers.models import transformer as model
from kvferry.workers.models.paged_cache import RankView
from tests.client.requests import FACTS, GEOMETRY
from tests.support.fake_daemon import FakeDaemon

PAGES = 64
DEVICES = ["cuda:0", "cuda:1", "cuda:2"]


class Gpus:
    """In place of torch's: what was waited for, in order. Some fail, all may be late."""

    def __init__(self) -> None:
        self.settled: list[str] = []
        self.failing: dict[str, str] = {}
        self.seconds = 0.0

    def synchronize(self, device: object) -> None:
        time.sleep(self.seconds)
        self.settled.append(str(device))
        if str(device) in self.failing:
            raise RuntimeError(self.failing[str(device)])

    def current_stream(self, device: object) -> Any:
        event = SimpleNamespace(synchronize=lambda: self.synchronize(device))
        return SimpleNamespace(record_event=lambda: event)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    played = Gpus()
    monkeypatch.setattr(torch.cuda, "synchronize", played.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", played.current_stream)
    return played


def tensor_on(device: str) -> torch.Tensor:
    return cast(torch.Tensor, SimpleNamespace(device=torch.device(device)))


class DaemonsPools(gpu_pools.GpuRankPools):
    """A daemon's, as if they were mapped."""

    def __init__(self) -> None:
        self.memories, self.heads = [], []
        self._tensors = [[tensor_on(device)] for device in DEVICES]
        self._mappings = [cast(Any, SimpleNamespace(close=lambda: None)) for _ in DEVICES]


class OwnPools(LayerTensors):
    def __init__(self) -> None:
        geometry = replace(GEOMETRY, kv_heads=len(DEVICES))
        super().__init__(geometry, StorageOrder.PAGE_MAJOR, PAGES, [[[tensor_on(device)]] for device in DEVICES])


def model_settles() -> None:
    model.settle([RankView((tensor_on(device),), slice(0, 1)) for device in DEVICES])


@pytest.mark.parametrize("waits", [DaemonsPools().settle, OwnPools().settle, model_settles])
def test_one_device_that_fails_keeps_no_other_from_being_waited_for(gpus: Gpus, waits: Callable[[], None]) -> None:
    gpus.failing = {"cuda:0": "the first error", "cuda:1": "another one"}
    with pytest.raises(RuntimeError, match="the first error"):
        waits()
    assert gpus.settled == DEVICES


@pytest.mark.parametrize("make", [DaemonsPools, OwnPools])
def test_memory_goes_also_where_a_device_fails(gpus: Gpus, make: Callable[[], Any]) -> None:
    pools = make()
    gpus.failing = {"cuda:2": "broken"}
    with pytest.raises(RuntimeError, match="broken"):
        pools.release()
    assert not pools.memories
    pools.release()
    assert gpus.settled == DEVICES


@pytest.mark.parametrize("make", [DaemonsPools, OwnPools])
def test_the_lock_stays_with_a_process_whose_device_does_not_settle(
    tmp_path: Path, gpus: Gpus, caplog: pytest.LogCaptureFixture, make: Callable[[], Any]
) -> None:
    look = FileLock.create(str(tmp_path / "session"))
    for failing, held in (({}, False), ({"cuda:1": "broken"}, True)):
        gpus.failing = failing
        attachment = Attachment.__new__(Attachment)
        attachment.pools, attachment._own, attachment._segments = make(), None, []
        attachment._lock = FileLock.open(look.path)
        attachment._take_lock()
        attachment.close()
        attachment.close()
        assert look.try_acquire() is not held
        look.release()
    assert "their lock stays while this lives: broken" in caplog.text
    look.close()


# -- memory of the worker's own


class Mute(FakeDaemon):
    """A daemon that is slow to unmap: it does not end the stream."""

    async def _session(self, talk: FrameTalk) -> None:
        await super()._session(talk)
        await asyncio.Event().wait()


class Failing(FakeDaemon):
    """One that could not unmap, and says so; or that was killed."""

    async def _session(self, talk: FrameTalk) -> None:
        await super()._session(talk)
        await talk.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "still mapped")


class Own(NamedTuple):
    pools: EnginePools
    tensor: weakref.ref[torch.Tensor]

    def is_freed(self) -> bool:
        gc.collect()
        return self.tensor() is None


def own(folder: Path) -> Own:
    """It has a worker's registration of files, and tensors."""
    files = make_files(PoolSpec(PAGES, GEOMETRY.page_size, StorageOrder.PAGE_MAJOR, (), 1, str(folder)), GEOMETRY)
    files.close()
    tensor = torch.zeros(1)
    files.pools = LayerTensors(GEOMETRY, StorageOrder.PAGE_MAJOR, PAGES, [[tensor]])
    return Own(files, weakref.ref(tensor))


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(client_module, "UNMAP_DEADLINE_S", 1.6)
    yield
    engine_gpu_pools._kept.clear()


def session(
    folder: Path, mine: Own, scenario: Callable[[FakeDaemon, DaemonClient], Awaitable[None]], make: type[FakeDaemon]
) -> FakeDaemon:
    async def run() -> FakeDaemon:
        async with make(folder, GEOMETRY, pages=PAGES) as daemon:
            client = await DaemonClient.connect(
                daemon.socket, common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=10, own=mine.pools
            )
            await daemon.wait_for("attached")
            await scenario(daemon, client)
            return daemon

    return asyncio.run(run())


async def closes(daemon: FakeDaemon, client: DaemonClient) -> None:
    await client.close(0.1)
    assert not daemon.lock_is_held()


def test_own_memory_goes_when_the_daemon_has_unmapped_it_however_late_the_device_is(
    tmp_path: Path, gpus: Gpus, caplog: pytest.LogCaptureFixture
) -> None:
    gpus.seconds = 0.4
    mine = own(tmp_path)
    assert "quiesced" in session(tmp_path, mine, closes, FakeDaemon).kinds()
    assert mine.is_freed()
    assert not caplog.records


async def closes_behind_the_daemon(daemon: FakeDaemon, client: DaemonClient) -> None:
    await daemon._server.stop(0)
    await client.gone
    await closes(daemon, client)


@pytest.mark.parametrize(
    ("scenario", "make", "seconds"),
    [
        pytest.param(closes, Mute, 0.0, id="no word"),
        pytest.param(closes, Failing, 0.0, id="an error"),
        pytest.param(closes_behind_the_daemon, FakeDaemon, 0.0, id="a broken stream"),
        pytest.param(closes, FakeDaemon, 2.4, id="a device that is late"),
    ],
)
def test_own_memory_that_may_be_mapped_stays_with_the_process(
    tmp_path: Path,
    gpus: Gpus,
    caplog: pytest.LogCaptureFixture,
    scenario: Callable[[FakeDaemon, DaemonClient], Awaitable[None]],
    make: type[FakeDaemon],
    seconds: float,
) -> None:
    gpus.seconds = seconds
    mine = own(tmp_path)
    daemon = session(tmp_path, mine, scenario, make)
    assert not mine.is_freed()
    assert ("quiesced" in daemon.kinds()) is (make is not FakeDaemon)
    assert "it stays on cpu while this lives" in caplog.text


def test_own_memory_of_a_session_that_does_not_come_about_may_be_mapped(tmp_path: Path, gpus: Gpus) -> None:
    mine = own(tmp_path)

    async def refused() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY, pages=PAGES - 1) as daemon:
            with pytest.raises(HandshakeFailed, match="64 were registered"):
                await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, FACTS, "w", own=mine.pools)

    asyncio.run(refused())
    assert not mine.is_freed()
