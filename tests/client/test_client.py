"""The worker's client against a scripted daemon: requests from admission to their end, locks, failures, deadlines."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import mkdtemp

import pytest

from kvferry.client import stream as stream_module
from kvferry.client.client import DaemonClient
from kvferry.client.one_rank import OneRank
from kvferry.client.requests import DaemonAbsent, DaemonGone, HandshakeFailed, NotOpened, RequestFailed, Retracted
from kvferry.frames import SUFFIX
from kvferry.proto import common_pb2, worker_pb2
from tests.client.requests import FACTS, GEOMETRY, admit, name
from tests.support.fake_daemon import FakeDaemon


def session(folder: Path, scenario: Callable[[FakeDaemon, DaemonClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with FakeDaemon(folder, GEOMETRY) as daemon:
            client = await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=10)
            try:
                await scenario(daemon, client)
            finally:
                await client.close()

    asyncio.run(run())


def test_decode_request_from_admit_to_finish(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        request = name()
        daemon.aux = b"first"
        pages = await admit(client, request)
        assert pages == (0, 1, 2)
        assert (await client.ready(request)).aux == b"first"
        client.pools.memories[0].reshape(daemon.pool.shape)[pages[2], :4] = 7
        assert daemon.pool[2, :4].tolist() == [7, 7, 7, 7]
        assert await client.grow(request, 13) == (3,)
        await client.finish(request, tokens=13, digests=bytes(32))
        assert client.open_requests == 0
        assert daemon.last("finish").finish.tokens == 13

    session(tmp_path, scenario)


def test_a_retraction_is_the_answer_of_a_grow_and_the_name_is_admitted_again(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        request = name()
        await admit(client, request)
        await client.ready(request)
        client.check_kept(request)
        daemon.override["grow"] = lambda message: []
        growing = asyncio.create_task(client.grow(request, 13))
        await daemon.wait_for("grow")
        daemon.retract(request.to_proto())
        with pytest.raises(Retracted):
            await growing
        with pytest.raises(Retracted):
            await client.grow(request, 13)
        with pytest.raises(Retracted):
            client.check_kept(request)
        client.check(request)
        assert daemon.kinds().count("grow") == 1
        daemon.retract(request.to_proto())
        await client.finish(request, tokens=9, digests=b"")
        daemon._pages.clear()
        await admit(client, request, tokens=10)
        client.check_kept(request)
        await client.finish(request, tokens=10, digests=b"")

    session(tmp_path, scenario)


def test_lock_is_taken_before_attached_and_held_until_close(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        await daemon.wait_for("attached")
        assert daemon.lock_was_held
        await client.close()
        assert not daemon.lock_is_held()
        assert daemon.kinds()[-1] == "quiesced"

    session(tmp_path, scenario)


def test_prefill_request(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        request = name()
        client.begin(request, digests=bytes(64), tokens=9, tail_digest=bytes(32), deadline_s=5)
        begun = await client.begun(request)
        assert begun.pages == (0, 1, 2)
        client.progress(request, 8)
        client.progress(request, 9)
        client.aux(request, b"blob")
        await client.ended(request, 5)
        assert daemon.kinds()[-3:] == ["progress", "progress", "aux"]
        assert client.open_requests == 0

    session(tmp_path, scenario)


def test_failed_raises_in_waiters_and_is_answered_by_abort(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        request = name()
        daemon.override["admit"] = lambda message: []
        waiting = asyncio.create_task(admit(client, request))
        await daemon.wait_for("admit")
        daemon.fail(request.to_proto(), common_pb2.ERROR_RESOURCE_EXHAUSTED, "pool has 4 pages")
        with pytest.raises(RequestFailed, match="pool has 4 pages") as failed:
            await waiting
        assert failed.value.code == common_pb2.ERROR_RESOURCE_EXHAUSTED
        with pytest.raises(RequestFailed):
            client.check(request)
        await client.abort(request, "answer")
        await daemon.wait_for("abort")
        assert client.open_requests == 0

    session(tmp_path, scenario)


def test_the_first_failure_is_the_reason(tmp_path: Path) -> None:
    """What a worker said before it heard of that is answered with another one."""

    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        request = name()
        daemon.override["begin"] = lambda message: []
        client.begin(request, digests=bytes(64), tokens=9, tail_digest=bytes(32), deadline_s=5)
        await daemon.wait_for("begin")
        daemon.fail(request.to_proto(), common_pb2.ERROR_UNAVAILABLE, "the daemon is shutting down")
        daemon.fail(request.to_proto(), common_pb2.ERROR_FAILED_PRECONDITION, "not a running request")
        await admit(client, name())  # both have come
        with pytest.raises(RequestFailed, match="shutting down"):
            client.check(request)
        with pytest.raises(RequestFailed, match="shutting down"):
            await client.begun(request)

    session(tmp_path, scenario)


def test_events_for_a_name_that_is_over_are_ignored(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        request = name()
        await admit(client, request)
        await client.abort(request, "front end left")
        daemon.fail(request.to_proto(), common_pb2.ERROR_ABORTED, "late")
        await admit(client, other := name())
        await client.abort(other, "")

    session(tmp_path, scenario)


def test_daemon_that_leaves_breaks_every_wait(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        daemon.override["admit"] = lambda message: []
        waiting = [asyncio.create_task(admit(client, name())) for _ in range(3)]
        await daemon.wait_for("admit", 3)
        daemon.events.put_nowait(None)
        for task in waiting:
            with pytest.raises(DaemonGone):
                await task
        assert isinstance(await asyncio.wait_for(client.gone, 5), DaemonGone)
        with pytest.raises(DaemonGone):
            await admit(client, name())

    session(tmp_path, scenario)


def test_no_answer_ends_by_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.client.client.ANSWER_SLACK_S", 0.05)

    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        daemon.override["admit"] = lambda message: []
        request = name()
        with pytest.raises(RequestFailed, match="did not say Admitted"):
            await client.admit(
                request, digests=b"", tokens=1, tail_digest=bytes(32), prefill="", max_new_tokens=1, deadline_s=0.05
            )
        await client.abort(request, "")

    session(tmp_path, scenario)


@pytest.mark.parametrize(("pages", "message"), [([0, 1], "has 2 ids"), ([0, 1, 64], "names page 64")])
def test_wrong_page_ids_break_the_session(tmp_path: Path, pages: list[int], message: str) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        daemon.override["admit"] = lambda order: [
            worker_pb2.WorkerEvent(admitted=worker_pb2.Admitted(name=order.admit.name, pages=pages))
        ]
        with pytest.raises(DaemonGone, match=message):
            await admit(client, name())

    session(tmp_path, scenario)


def test_pages_that_a_request_grew_by_follow_its_own(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        daemon.override["grow"] = lambda order: [
            worker_pb2.WorkerEvent(grown=worker_pb2.Grown(name=order.grow.name, first_page=2, pages=[9]))
        ]
        request = name()
        await admit(client, request)
        await client.ready(request)
        with pytest.raises(DaemonGone, match=r"Grown.first_page is 2; the request has 3 pages"):
            await client.grow(request, 13)

    session(tmp_path, scenario)


def test_a_name_that_is_in_use_is_refused_and_its_request_goes_on(tmp_path: Path) -> None:
    async def scenario(daemon: FakeDaemon, client: DaemonClient) -> None:
        request = name()
        await admit(client, request)
        with pytest.raises(NotOpened, match="is already in use"):
            await admit(client, request)
        assert daemon.kinds().count("admit") == 1
        await client.ready(request)
        await client.finish(request, tokens=9, digests=b"")

    session(tmp_path, scenario)


def test_refusal_names_the_reason(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeDaemon(tmp_path, GEOMETRY) as daemon:
            daemon.refuse = "facts.geometry.dtype: daemon has bfloat16, worker has float32"
            with pytest.raises(HandshakeFailed, match="daemon has bfloat16"):
                await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=10)

    asyncio.run(run())


def test_absent_daemon_is_an_error_within_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(HandshakeFailed, match="no daemon answered"):
        asyncio.run(DaemonClient.connect(str(tmp_path / "none"), common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=0.3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_daemon_that_does_not_welcome_a_worker_is_told_from_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """Of an engine with several ranks it may wait for another one."""
    monkeypatch.setattr(stream_module, "TOGETHER_SECONDS", 0.5)
    rank = OneRank(0, ranks, "e", common_pb2.ROLE_DECODE) if ranks > 1 else None
    others = r", nor 0\.5 s later: it waits for all 2 ranks of the engine" if ranks > 1 else ""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s") + SUFFIX)
        listening.listen()
        connecting = DaemonClient.connect(
            str(tmp_path / "s"), common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=0.3, rank=rank
        )
        began = time.monotonic()
        with pytest.raises(DaemonAbsent, match=rf"daemon on .*/s did not welcome this worker within \S+ s{others}$"):
            asyncio.run(connecting)
        assert ranks == 1 or time.monotonic() - began >= 0.8


def test_what_is_queued_on_a_device_is_over_before_the_daemon_hears_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And where that fails, or takes too long, it does not hear so: the lock tells. It is let go behind the device, or
    with the process."""
    settled = threading.Event()

    async def run(settle: Callable[[], object], deadline_s: float) -> FakeDaemon:
        async with FakeDaemon(Path(mkdtemp(dir=tmp_path)), GEOMETRY) as daemon:
            client = await DaemonClient.connect(daemon.socket, common_pb2.ROLE_DECODE, FACTS, "w", deadline_s=10)
            client.pools.settle = settle  # type: ignore[method-assign, assignment]
            closing = asyncio.create_task(client.close(deadline_s))
            await asyncio.sleep(0.3)
            assert "quiesced" not in daemon.kinds()
            assert daemon.lock_is_held()
            settled.set()
            await closing
            assert daemon.lock_is_held() is (settle is fails)
            return daemon

    def fails() -> None:
        raise RuntimeError("an illegal memory access")

    assert "quiesced" in asyncio.run(run(lambda: settled.wait(10), 10)).kinds()
    assert not [record for record in caplog.records if record.name.startswith("kvferry")]
    assert "quiesced" not in asyncio.run(run(fails, 10)).kinds()
    assert "an illegal memory access" in caplog.text
    assert "their lock stays while this lives" in caplog.text
    settled.clear()
    assert "quiesced" not in asyncio.run(run(lambda: settled.wait(10), 0.1)).kinds()
    assert "has not ended within 0.1 s" in caplog.text
