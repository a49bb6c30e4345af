"""A daemon whose host tier is still being read from its file: what it serves, tells, and refuses."""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import re
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import pytest
from rich.console import Console

from kvferry.connectors.lookups import NOT_FREED
from kvferry.daemon.cli.stats import render
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.memory import growing_rows, host_tier
from kvferry.daemon.observe.stats import side_stats
from kvferry.daemon.server import Daemon
from kvferry.daemon.services.admin import AdminService
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import admin_pb2 as admin
from kvferry.proto import cache_pb2, common_pb2
from kvferry.radix.pool import PageState
from kvferry.radix.tree import PROMPT
from kvferry.transfer.host_tier.rows import FileRows
from tests.daemon.daemons import config_of, started
from tests.daemon.test_daemon_end import hello, until

MADE = 1 << 18  # bytes of a chunk, of which there are four


class Call:
    async def abort(self, code: Any, details: str) -> None:
        raise PermissionError(f"{code.name}: {details}")


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The second chunk is not made before it is set."""
    make, event = FileRows.make, threading.Event()

    def held(rows: FileRows, start: int, end: int, cpus: Collection[int]) -> None:
        if start > 0:
            assert event.wait(20)
        make(rows, start, end, cpus)

    monkeypatch.setattr(FileRows, "make", held)
    monkeypatch.setattr(growing_rows, "CHUNK_BYTES", MADE)
    yield event
    event.set()


@asynccontextmanager
async def served(config: DaemonConfig, go_on: threading.Event) -> AsyncIterator[Daemon]:
    """It ends, whatever is found."""
    async with started(config) as daemon:
        try:
            yield daemon
        finally:
            go_on.set()
            daemon.stop()
            await daemon.run_until_stopped()


def test_a_flush_is_refused_until_all_is_read(tmp_path: Path, go_on: threading.Event) -> None:
    async def story() -> None:
        config = config_of(tmp_path, host_dir=str(tmp_path / "host"), host_bytes=4 * MADE)
        async with served(config, go_on) as daemon:
            side, call = daemon.sides["decode"], cast(Any, Call())
            await side.register(hello())
            service, request = AdminService(daemon.sides), admin.FlushRequest(role=common_pb2.ROLE_DECODE)
            host = side.cache.host
            assert host is not None
            await until(lambda: host.pages)
            for strict in (False, True):
                request.strict = strict
                with pytest.raises(PermissionError, match=r"FAILED_PRECONDITION: .*read from its file: try again"):
                    await service.Flush(request, call)
            go_on.set()
            await until(lambda: not side.tiers.reads_file)
            assert host.pages == side.cache.host_asked
            assert await service.Flush(request, call) == admin.FlushReply()

    asyncio.run(story())


def unread(side: AnySide, space: bytes) -> int:
    """Rows of the namespace that the file names, and the tier did not come to."""
    file = side.tiers.host._file
    assert file is not None
    return len(file.named(space, side.tiers.host._there.pages))


def test_a_flush_that_is_refused_leaves_what_was_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, go_on: threading.Event
) -> None:
    monkeypatch.setattr(FileRows, "lacks", lambda rows, start, end: "injected" if start > 0 else "")

    async def story() -> None:
        config = config_of(tmp_path, host_dir=str(tmp_path / "host"), host_bytes=4 * MADE)
        async with served(config, go_on) as daemon:
            side, call = daemon.sides["decode"], cast(Any, Call())
            await side.register(hello())
            await until(lambda: not side.tiers.reads_file)
            cache, file, facts = side.cache, side.tiers.host._file, side.tiers.facts
            assert file is not None and facts is not None
            ours, theirs, last = facts.id, b"t" * 32, cache.host_asked - 1
            for row, space in ((last, ours), (last - 1, theirs)):  # as a larger tier left them
                file.write([row], space, b"d" * 32, bytes(32), np.zeros(1, np.uint64))
            service, request = AdminService(daemon.sides), admin.FlushRequest(role=common_pb2.ROLE_DECODE)

            space, page = cache.namespace(ours), b"p" * 32
            pages = cache.take(space, 1)
            assert pages is not None
            space.tree.insert(page, pages)
            cache.publish(space, 1)
            space.tree.lock(space.tree.match(page))
            request.strict = True
            with pytest.raises(PermissionError, match="FAILED_PRECONDITION"):
                await service.Flush(request, call)
            request.namespace_id = b"short"
            with pytest.raises(PermissionError, match="INVALID_ARGUMENT"):
                await service.Flush(request, call)
            assert (unread(side, ours), unread(side, theirs)) == (1, 1)

            request.namespace_id = theirs  # of which there is no tree
            with pytest.raises(PermissionError, match="NOT_FOUND"):
                await service.Flush(request, call)
            assert (unread(side, ours), unread(side, theirs)) == (1, 0)

            request.strict, request.namespace_id = False, b""
            assert (await service.Flush(request, call)).skipped_pages == 1
            assert unread(side, ours) == 0

    asyncio.run(story())


def shown(stats: cache_pb2.SideStats) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(render(cache_pb2.StatsReply(daemon="d", sides=[stats])))
    return captured.get()


def test_how_far_it_has_come_is_told(tmp_path: Path, go_on: threading.Event) -> None:
    async def story() -> None:
        config = config_of(tmp_path, host_dir=str(tmp_path / "host"), host_bytes=4 * MADE)
        async with served(config, go_on) as daemon:
            side = daemon.sides["decode"]
            await side.register(hello())
            asked, host = side.cache.host_asked, side.cache.host
            assert host is not None
            await until(lambda: host.pages)
            told = side_stats(side)
            assert (told.host.pages, told.host.free, told.host.asked_pages) == (asked // 4, asked // 4, asked)
            assert told.pool.pages == told.pool.asked_pages > 0
            assert f"{asked // 4} of {asked} x " in shown(told)
            go_on.set()
            await until(lambda: not side.tiers.reads_file)
            told = side_stats(side)
            assert told.host.pages == told.host.asked_pages == asked
            assert f"{asked} x " in shown(told) and " of " not in shown(told).partition("host pages")[2].split("\n")[0]

    asyncio.run(story())


def locked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FileRows:
    """Another daemon has the file."""
    monkeypatch.setattr(host_tier, "LOCKED_SECONDS", 0.1)
    return FileRows.open(str(folder / "host"), pages=1, page_bytes=1, layout=bytes(32), role="decode")


def test_a_flush_beside_a_file_that_could_not_be_opened_is_of_all_else_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later daemon finds what the file has. Connectors do not ask again."""

    async def story() -> None:
        config = config_of(tmp_path, host_dir=str(tmp_path / "host"), host_bytes=1 << 20)
        async with served(config, threading.Event()) as daemon:
            with monkeypatch.context() as patch:
                other, side = locked(tmp_path, patch), daemon.sides["decode"]
                await side.register(hello())
                await until(lambda: side.tiers.host_stays)
            cache, pages = side.cache, side.cache.pool
            ours, page = cache.namespace(side.tiers.facts.id if side.tiers.facts else b""), b"p" * 32
            taken = cache.take(ours, 1)
            assert taken is not None
            ours.tree.insert(page, taken)
            cache.publish(ours, 1)
            service, call = AdminService(daemon.sides), cast(Any, Call())
            lock = ours.tree.lock(ours.tree.match(page))
            request = admin.FlushRequest(namespace_id=ours.id, strict=True)
            with pytest.raises(PermissionError, match="FAILED_PRECONDITION: 1 pages are held"):
                await service.Flush(request, call)
            ours.tree.unlock(lock)
            assert pages.free == pages.pages - 1
            for which, freed, name in ((ours.id, 1, "this"), (b"t" * 32, 0, "this"), (b"", 0, "any")):
                request = admin.FlushRequest(namespace_id=which)
                with pytest.raises(PermissionError) as refused:
                    await service.Flush(request, call)
                assert str(refused.value).startswith(
                    f"ABORTED: {freed} device pages were freed, 0 are held; the host tier's file, which could not be "
                    f"opened, may still hold pages of {name} namespace: "
                ), str(refused.value)
                assert "another has it locked" in str(refused.value) and pages.free == pages.pages
            assert grpc.StatusCode.ABORTED not in NOT_FREED
            other.close()

    asyncio.run(story())


def test_a_file_is_unopened_from_the_start_and_one_before_the_first_worker_is_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other side's chunk may be made first, for long."""

    async def story() -> None:
        config = config_of(tmp_path, host_dir=str(tmp_path / "host"), host_bytes=1 << 20)
        async with served(config, threading.Event()) as daemon:
            service, request, call = AdminService(daemon.sides), admin.FlushRequest(), cast(Any, Call())
            with pytest.raises(PermissionError, match=r"FAILED_PRECONDITION: .* has not been read from its file: try"):
                await service.Flush(request, call)
            with monkeypatch.context() as patch:
                other = locked(tmp_path, patch)
                with growing_rows.MAKING:
                    await daemon.sides["decode"].register(hello())
                    with pytest.raises(PermissionError, match="ABORTED: 0 device pages were freed"):
                        await service.Flush(request, call)
                other.close()

    asyncio.run(story())


def test_what_the_host_tier_has_is_flushed_while_no_engine_is_there(tmp_path: Path) -> None:
    async def story() -> None:
        config = config_of(tmp_path, host_bytes=1 << 20)
        async with served(config, threading.Event()) as daemon:
            side, request = daemon.sides["decode"], admin.FlushRequest(strict=True)
            await side.register(hello())
            host = side.cache.host
            assert host is not None
            await until(lambda: host.pages)
            side.tiers.has_pool.clear()
            ours = side.cache.namespace(side.tiers.facts.id if side.tiers.facts else b"")
            ours.tree.insert_host(b"h" * 32, host.allocate(1, PageState.LEASED), 0, PROMPT, 0)
            reply = await AdminService(daemon.sides).Flush(request, cast(Any, Call()))
            assert (reply.host_pages, host.free) == (1, host.pages)
            side.tiers.has_pool.set()

    asyncio.run(story())


def without_addresses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = mmap.mmap

    def strict(fd: int, nbytes: int, **how: int) -> mmap.mmap:
        if fd == -1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return make(fd, nbytes, **how)

    monkeypatch.setattr(mmap, "mmap", strict)


@pytest.mark.parametrize(
    ("breaks", "in_file", "why"),
    [
        (locked, True, r"\(--host-dir '.*/host'\) cannot be had: .*another has it locked: .*kvferry-host-decode.rows"),
        (without_addresses, False, r"\(--host-bytes\) cannot be had: .*1048576 bytes of addresses .* RLIMIT_AS is "),
    ],
)
def test_a_tier_that_cannot_be_had_costs_no_more_than_the_tier(
    breaks: Callable[[Path, pytest.MonkeyPatch], Any],
    in_file: bool,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        folder = str(tmp_path / "host") if in_file else ""
        async with served(config_of(tmp_path, host_dir=folder, host_bytes=1 << 20), threading.Event()) as daemon:
            with monkeypatch.context() as patch:
                kept = breaks(tmp_path, patch)
                side = daemon.sides["decode"]
                await side.register(hello())
                await until(lambda: side.tiers.host_stays)
            told = side_stats(side)
            assert (told.host.pages, told.host.asked_pages) == (0, side.cache.host_asked) and told.pool.pages > 0
            assert re.search(f"1048576 bytes {why}", told.tiers.host_stays), told.tiers.host_stays
            assert "it stays so" in shown(told)
            assert daemon._snapshots.take().lacks == [] and not side.tiers.reads_file
            service, request = AdminService(daemon.sides), admin.FlushRequest(role=common_pb2.ROLE_DECODE)
            if not in_file:
                assert await service.Flush(request, cast(Any, Call())) == admin.FlushReply()
            pages = side.cache.take(side.cache.namespace(bytes(32)), side.cache.pool.pages)
            assert pages is not None, "the pool serves"
            if kept is not None:
                kept.close()

    asyncio.run(story())
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert error.startswith("the host tier stays at 0 of ") and re.search(why, error)
