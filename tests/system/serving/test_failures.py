"""Clean losses: workers, daemons and couriers end, the others serve on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import grpc
import pytest

from kvferry.daemon.cli.stack import Stack, StackError
from kvferry.daemon.cli.system import start_replicas
from tests.support.engines import Engines, Turn, courier_pids, settled, standing_still, stats, wait_until
from tests.support.stacks import SmallSystem
from tests.system.clients import client_with_pages

PAGE = 16
pytestmark = pytest.mark.timeout(60)


def in_background(engines: Engines, tokens: list[int], max_new: int, into: list[Turn]) -> threading.Thread:
    thread = threading.Thread(target=lambda: into.append(engines.turn(tokens, max_new)))
    thread.start()
    return thread


def test_prefill_daemon_down_fails_its_requests_and_it_is_met_again(stack: Stack) -> None:
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
    prompt = list(range(100))
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn(prompt, 4).error is None
        stack.kill(prefills[0].daemon)
        started = time.monotonic()
        failed = engines.turn(list(range(1000, 1100)), 4, deadline_s=8)
        assert failed.error is not None
        assert failed.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED)
        assert time.monotonic() - started < 8
    with Engines(None, decodes[0]) as alone:
        served = alone.turn(prompt, 4)
        assert served.error is None, served.details
        assert served.matched == 96
    settled(decodes[0])


@pytest.mark.nightly
def test_a_killed_worker_frees_its_leases(stack: Stack) -> None:
    slow = ["--synthetic-decode-us", "50000"]
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, decode_worker_flags=slow))
    turns: list[Turn] = []
    with Engines(prefills[0], decodes[0]) as engines:
        thread = in_background(engines, list(range(100)), 400, turns)
        wait_until(lambda: stats(decodes[0]).transfers.completed == 1)
        assert stats(decodes[0]).pool.locks == 1
        stack.kill(decodes[0].worker)
        thread.join(20)
    assert turns[0].code is grpc.StatusCode.UNAVAILABLE
    side = settled(decodes[0])
    assert side.requests.aborted == 1
    assert side.pool.cached == 6  # what arrived stays
    settled(prefills[0])


@pytest.mark.nightly
def test_a_worker_with_a_broken_stream_keeps_its_pages_until_its_lock_is_released(stack: Stack) -> None:
    """It may still write: its pages are orphaned, and freed only with the kernel's proof."""
    _, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
    decode = decodes[0]

    async def break_the_stream() -> None:
        client = await client_with_pages(decode)
        assert stats(decode).pool.leased == 7
        client._stream.frames.abort()
        await asyncio.to_thread(wait_until, lambda: stats(decode).pool.orphaned > 0)
        await asyncio.sleep(0.5)
        pool = stats(decode).pool
        assert (pool.leased, pool.orphaned, pool.locks) == (0, 7, 1)
        await client.close()  # lets the file lock go

    asyncio.run(break_the_stream())
    assert settled(decode, 2.0).pool.free == stats(decode).pool.pages


def test_a_killed_prefill_worker_fails_its_request_cleanly(stack: Stack) -> None:
    spec = SmallSystem(page_size=PAGE, worker_flags=["--synthetic-prefill-us", "20000", "--chunk-tokens", "16"])
    prefills, decodes = start_replicas(stack, spec)
    turns: list[Turn] = []
    with Engines(prefills[0], decodes[0]) as engines:
        thread = in_background(engines, list(range(300)), 4, turns)
        wait_until(lambda: stats(decodes[0]).transfers.delta_pages >= 2)
        stack.kill(prefills[0].worker)
        thread.join(20)
    assert turns[0].code is grpc.StatusCode.UNAVAILABLE
    side = settled(decodes[0])
    assert side.pool.cached >= 2  # what arrived stays
    settled(prefills[0])


@pytest.mark.nightly
def test_a_killed_courier_costs_its_session_only(stack: Stack) -> None:
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn(list(range(100)), 4).error is None
        for replica in (prefills[0], decodes[0]):
            couriers = courier_pids(replica.daemon.popen.pid)
            before = courier_pids(decodes[0].daemon.popen.pid)
            assert len(couriers) == 1
            os.kill(couriers[0], signal.SIGKILL)
            wait_until(lambda old=before: courier_pids(decodes[0].daemon.popen.pid) not in ([], old))
            wait_until(lambda: [peer.state for peer in stats(decodes[0]).peers] == ["up"])
            turn = engines.turn(list(range(100)), 4)
            assert turn.error is None, turn.details
            assert turn.matched == 96  # the tree has lost nothing
        assert stats(decodes[0]).requests.failed == 0
    settled(decodes[0])
    settled(prefills[0])


def test_client_that_leaves_aborts_both_halves(stack: Stack) -> None:
    spec = SmallSystem(page_size=PAGE, worker_flags=["--synthetic-prefill-us", "20000", "--chunk-tokens", "16"])
    prefills, decodes = start_replicas(stack, spec)
    with Engines(prefills[0], decodes[0]) as engines:
        turns: list[Turn] = []
        threads = [in_background(engines, [i] * 300, 4, turns) for i in range(4)]
        wait_until(lambda: stats(decodes[0]).transfers.delta_pages >= 1)
        for channel in engines._channels:
            channel.close()
        for thread in threads:
            thread.join(10)
    assert all(turn.error is not None for turn in turns)
    settled(decodes[0])
    settled(prefills[0])


@pytest.mark.nightly
def test_a_silent_prefill_daemon_costs_its_requests_only(stack: Stack) -> None:
    """It neither answers nor closes: heard of no more for 3 s, it is lost, and met again when it goes on."""
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
    with Engines(prefills[0], decodes[0]) as engines, Engines(None, decodes[0]) as alone:
        assert engines.turn(list(range(100)), 4).error is None
        with standing_still([prefills[0].daemon.popen.pid]):
            turns: list[Turn] = []
            thread = in_background(engines, list(range(1000, 1100)), 4, turns)
            wait_until(lambda: stats(decodes[0]).peers[0].state != "up", 10)
            thread.join(20)
            assert turns[0].error is not None
            # Dialling it again finds a port that accepts and never answers.
            time.sleep(6)
            assert decodes[0].daemon.popen.poll() is None
            assert alone.turn(list(range(100)), 4).matched == 96
        wait_until(lambda: stats(decodes[0]).peers[0].state == "up", 20)
        again = engines.turn(list(range(1000, 1100)), 4)
        assert again.error is None, again.details
    settled(decodes[0])
    settled(prefills[0])


def test_a_port_that_is_taken_is_refused(stack: Stack) -> None:
    first = stack.ready(
        stack.start("one", ["serve", "--role", "decode", "--listen", "127.0.0.1:0", *socket_of(stack, 1)])
    )
    second = stack.start("two", ["serve", "--role", "decode", "--listen", first, *socket_of(stack, 2)])
    with pytest.raises(StackError, match=f"listen {first}"):
        stack.ready(second)


def socket_of(stack: Stack, number: int) -> list[str]:
    return ["--socket", os.path.join(stack.folder, f"{number}.sock")]
