"""Requests of which one half alone comes to the prefill daemon: the other's end is told, and takes nobody's place."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.effects import EndSend, FailAsk, StartTransfer
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.prefill_entries import REST_SECONDS
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.workers import Worker
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.transfer.mapping.segment import FileLock
from tests.regressions.request_cores import DEADLINE, NAMESPACE, PAGE, Decode, Prefill, digests, name

TABLE = 8  # of request_cores.Prefill


def ended_early(side: Prefill, count: int) -> None:
    """Asked for, and Done before a worker came."""
    for number in range(1, count + 1):
        side.ask(name(number), number, "x", 1)
        side.core.done(1, name(number), 0.0)
        side.take()


def test_a_name_that_was_done_before_its_begin_is_neither_running_nor_waited_for() -> None:
    side = Prefill()
    shell = PrefillSide(DaemonConfig(role="prefill"), bytes(16), time.monotonic)
    shell.core = side.core
    side.ask(name(1), 1, "x", 1)
    assert (shell.busy, side.core.running) == (1, 1)
    side.core.done(1, name(1), 0.0)
    side.take()
    assert [effect.transfer for effect in side.of(EndSend)] == [1]
    assert (shell.busy, side.core.running, side.core.waiting_requests) == (0, 0, 0)
    assert shell.in_use() == ""
    with pytest.raises(RequestError, match="was ended by the decode daemon") as refused:
        side.begin(name(1), "x", 1)
    assert refused.value.code == common.ERROR_ABORTED
    assert not side.core.entries


def test_a_yielded_name_is_not_running() -> None:
    side = Prefill(pages=2)
    side.ask(name(1), 1, "x", 2)
    side.begin(name(1), "x", 2)
    side.compute(name(1), 2)
    side.core.send_completed(1, 1, 0.0)
    assert side.core.running == 1
    side.ask(name(2), 2, "y", 2)
    side.begin(name(2), "y", 2)
    assert (side.core.running, side.core.waiting_requests) == (1, 1)
    side.core.tick(REST_SECONDS)
    side.take()
    assert side.core.entries[name(1)].state is EntryState.YIELDED
    assert (side.core.running, side.core.waiting_requests) == (1, 0)
    assert side.told("begun")


def test_names_that_are_over_make_room_the_oldest_first() -> None:
    """As many as the table has places, and one more."""
    side = Prefill()
    ended_early(side, TABLE)
    assert len(side.core.entries) == TABLE
    side.ask(name(TABLE + 1), TABLE + 1, "y", 1)
    assert not side.of(FailAsk)
    assert len(side.core.entries) == TABLE and name(1) not in side.core.entries
    side.begin(name(TABLE + 2), "z", 1)
    assert side.told("begun")
    assert len(side.core.entries) == TABLE and name(2) not in side.core.entries
    with pytest.raises(RequestError, match="was ended by the decode daemon"):
        side.begin(name(3), "x", 1)


def test_a_yielded_name_makes_room_only_behind_those_that_were_done() -> None:
    """Who asks for it again is to be told at once, and waits for nothing."""
    side = Prefill(pages=2)
    side.ask(name(21), 1, "x", 2)
    side.begin(name(21), "x", 2)
    side.compute(name(21), 2)
    side.core.send_completed(1, 1, 0.0)
    side.begin(name(22), "y", 2)
    side.ask(name(22), 2, "y", 2)
    side.core.tick(REST_SECONDS)
    assert side.core.entries[name(21)].state is EntryState.YIELDED
    for number in range(3, TABLE + 1):
        side.ask(name(number), number, "z", 1)
        side.core.done(1, name(number), 0.0)
    assert len(side.core.entries) == TABLE
    side.ask(name(30), TABLE + 1, "z", 1)
    assert name(3) not in side.core.entries
    side.ask(name(21), TABLE + 2, "x", 2)
    (failed,) = side.of(FailAsk)
    assert (failed.transfer, failed.error.code) == (TABLE + 2, common.ERROR_UNAVAILABLE)
    for number in range(31, 31 + TABLE - 3):  # beside names 21, 22 and 30: every one of those that were done
        side.ask(name(number), number, "z", 1)
        assert name(21) in side.core.entries
    side.ask(name(50), 50, "z", 1)
    assert not side.of(FailAsk)
    assert name(21) not in side.core.entries and len(side.core.entries) == TABLE
    running = side.core.running
    side.ask(name(51), 51, "z", 1)
    assert len(side.of(FailAsk)) == 1 and side.core.running == running == TABLE


def test_only_names_that_are_over_make_room() -> None:
    side = Prefill()
    ended_early(side, 1)
    for number in range(2, TABLE + 2):
        side.ask(name(number), number, "x", 1)
        assert not side.of(FailAsk)
    side.ask(name(TABLE + 2), TABLE + 2, "x", 1)
    (failed,) = side.of(FailAsk)
    assert failed.error.code == common.ERROR_RESOURCE_EXHAUSTED
    assert failed.error.message == f"{TABLE} requests are in the rendezvous table; the bound is {TABLE}"
    with pytest.raises(RequestError, match="rendezvous table"):
        side.begin(name(TABLE + 3), "x", 1)


class Session:
    """What the shell says to one."""

    number = 1

    def __init__(self) -> None:
        self.number = 1
        self.failed: list[tuple[int, common.ErrorCode]] = []

    @property
    def sending(self) -> Session:
        return self

    def perform(self, effect: FailAsk) -> None:
        self.failed.append((effect.transfer, effect.error.code))


def begin_of(number: int, **fields: int) -> wire.WorkerMessage:
    message = wire.WorkerMessage()
    message.begin.name.CopyFrom(name(number).to_proto())
    message.begin.digests, message.begin.tokens = digests("x", 1), PAGE
    for field, value in fields.items():
        setattr(message.begin, field, value)
    return message


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("draining", common.ERROR_UNAVAILABLE),
        ("quarantine", common.ERROR_RESOURCE_EXHAUSTED),
        ("priority", common.ERROR_INVALID_ARGUMENT),
        ("tokens", common.ERROR_INVALID_ARGUMENT),
        ("namespace", common.ERROR_RESOURCE_EXHAUSTED),
    ],
)
def test_who_asked_is_told_when_the_begin_is_refused(
    why: str, code: common.ErrorCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = Prefill()
    shell = PrefillSide(DaemonConfig(role="prefill", page_size=PAGE, orphaned_share=0.0), bytes(16), time.monotonic)
    shell.core = side.core
    session = Session()
    shell.sessions[1] = cast(SendingSession, session)
    namespace = NAMESPACE
    if why == "quarantine":
        side.begin(name(2), "y", 1)
        side.core.worker_lost(1, 0.0)
        side.take()
    elif why == "namespace":
        monkeypatch.setattr("kvferry.daemon.core.cache.MAX_NAMESPACES", 0)
        namespace = b"o" * 32
    side.ask(name(1), 1, "x", 1)
    shell.draining = why == "draining"
    fields = {"priority": {"priority": 1 << 20}, "tokens": {"tokens": 2 * PAGE}}.get(why, {})
    worker = Worker(7, "w", namespace, cast(FileLock, None), asyncio.Queue())
    shell.handle(worker, "begin", begin_of(1, **fields))
    assert session.failed == [(1, code)]
    assert name(1) not in side.core.entries


def test_a_begin_that_is_refused_leaves_a_running_one_of_its_name_alone() -> None:
    side = Prefill()
    side.ask(name(1), 1, "x", 1)
    side.begin(name(1), "x", 1)
    side.core.begin_refused(name(1), RequestError(common.ERROR_UNAVAILABLE, "the daemon is shutting down"))
    side.take()
    assert not side.of(FailAsk) and side.core.entries[name(1)].sends == {1}


def test_an_abort_that_is_said_twice_is_counted_once() -> None:
    side = Prefill()
    side.ask(name(1), 1, "x", 1)
    side.begin(name(1), "x", 1)
    for _ in range(2):
        side.core.abort(1, name(1), 0.0)
        side.take()
        assert not side.told("ended"), "a gather of it runs"
    side.core.send_ended(1, 1, 0.0)
    side.take()
    assert len(side.told("ended")) == 1
    assert side.core.counters.aborted == 1


@pytest.mark.parametrize("entry", ["new", "asked"])
def test_an_ask_past_its_own_prompt_fails_when_it_comes(entry: str) -> None:
    """No worker has begun the prompt."""
    side = Prefill()
    if entry == "asked":
        side.ask(name(1), 1, "x", 2)
    ask = peer.Ask(transfer=2, name=name(1).to_proto(), namespace_id=NAMESPACE, first_page=1, pages=2, tokens=PAGE + 1)
    side.ask_as(ask, name(1))
    (failed,) = side.of(FailAsk)
    assert (failed.transfer, failed.error.code) == (2, common.ERROR_OUT_OF_RANGE)
    assert failed.error.message == "first_page 1 + pages 2 is past the prompt's 2 pages"
    ask.transfer, ask.pages = 3, 1
    side.core.ask(1, name(1), ask, DEADLINE, 0.0)
    side.take()
    assert not side.of(FailAsk)


def test_a_failure_of_the_prefill_side_is_marked_for_the_decode_worker() -> None:
    """What an ask failed of, and a session that is refused; not what the decode daemon itself says."""
    side = Decode(pages=8)
    for number, prefill in ((1, "p"), (2, "q")):
        side.admit(name(number), f"prompt {number}", 1, prefill=prefill)
        transfer = side.of(StartTransfer)[0].ask.transfer
        if prefill == "p":
            side.core.transfer_failed(transfer, RequestError(common.ERROR_RESOURCE_EXHAUSTED, "full"), 0.0)
        else:
            side.core.prefill_down("q", RequestError(common.ERROR_FAILED_PRECONDITION, "refused"), 0.0)
        side.take()
        (failed,) = side.told("failed")
        assert failed.failed.error.of_prefill
    side.admit(name(3), "prompt 3", 1)
    side.core.tick(DEADLINE)
    side.take()
    (failed,) = side.told("failed")
    assert failed.failed.error.code == common.ERROR_DEADLINE_EXCEEDED and not failed.failed.error.of_prefill
