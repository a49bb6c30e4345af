"""The carrying out of effects: in order, behind what clears pages; and requests that a side does not take."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.effects import Effect, EndSend, OpenSend, SendProgress, StartFetch, StopFetch, ZeroPages
from kvferry.daemon.core.limits import Name
from kvferry.daemon.memory.interface import CopyEnd
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.proto import common_pb2 as common
from kvferry.proto import peer_pb2 as peer
from kvferry.proto import worker_pb2 as wire
from kvferry.radix.pool import PageState
from tests.simulation.clock import Clock
from tests.simulation.daemons import PLAIN, SimSide
from tests.simulation.faults import Faults

NAME = Name(bytes(16), 1)


class Prefill(SimSide, PrefillSide):
    def __init__(self) -> None:
        clock = Clock(1)
        config = DaemonConfig(role="prefill", page_size=4, transfer_seconds=30.0)
        PrefillSide.__init__(self, config, bytes(16), lambda: clock.now)
        self.furnish(clock, PLAIN, Faults())
        self.performed: list[Effect] = []

    def perform(self, effect: Effect) -> None:
        self.performed.append(effect)
        super().perform(effect)


class Decode(SimSide, DecodeSide):
    def __init__(self) -> None:
        clock = Clock(1)
        config = DaemonConfig(role="decode", page_size=4, peers={"p": "127.0.0.1:1"})
        DecodeSide.__init__(self, config, bytes(16), lambda: clock.now)
        self.furnish(clock, PLAIN, Faults())


@pytest.mark.parametrize("problem", ["", "GpuError: launch: OTHER"])
def test_what_comes_behind_a_clearing_waits_for_it(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    """For ever, where it fails: the pages may hold another tenant's bytes."""
    reported: list[Any] = []

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        side, ends = Prefill(), list[CopyEnd]()
        monkeypatch.setattr(side.tiers.memory, "zero_pages", lambda pages, done: ends.append(done))
        before, behind = SendProgress(1, 1, 1), SendProgress(1, 1, 2)
        side._effects.extend([before, ZeroPages((3,)), behind])
        for _ in range(2):
            side.flush()
            assert side.performed == [before]
        ends[0](problem)
        side.flush()
        assert side.performed == ([before] if problem else [before, behind])

    asyncio.run(story())
    assert len(reported) == bool(problem)


def test_a_session_that_cannot_carry_out_an_effect_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end with it; else they would wait for what never happens."""
    broken: list[str] = []

    class Session:
        @property
        def sending(self) -> Session:
            return self

        fetching = session = sending

        def perform(self, effect: OpenSend) -> None:
            raise ValueError("pages must not be negative")

        def ask(self, ask: peer.Ask, page_ids: tuple[int, ...]) -> None:
            raise ValueError("page_ids names a page twice")

        def break_off(self, reason: str) -> None:
            broken.append(reason)

    side, decode, session = Prefill(), Decode(), cast(Any, Session())
    side.sessions[1] = session
    side._effects.extend([OpenSend(1, 1, 0, (3,), 1), StartFetch(1, peer.Ask(transfer=1), (3, 3))])
    side.flush()
    decode.returns._sendings[1] = session, "p"
    decode._effects.append(OpenSend(1, 1, 0, (3,), 1))
    decode.flush()
    assert broken == ["pages must not be negative", "page_ids names a page twice", "pages must not be negative"]


def test_a_send_of_a_session_that_is_over_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gather of it runs, and nobody else would say so to the core, which keeps its pages until then."""
    side, ended = Prefill(), list[tuple[int, int]]()
    monkeypatch.setattr(side.core, "send_ended", lambda session, transfer, now: ended.append((session, transfer)))
    side._effects.extend([OpenSend(1, 6, 0, (3,), 1), EndSend(1, 7)])
    side.flush()
    assert ended == [(1, 7)]


def test_a_fetch_of_a_session_that_is_over_has_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    side, drained = Prefill(), list[int]()
    monkeypatch.setattr(side.core, "fetch_drained", lambda transfer, now: drained.append(transfer))
    side._effects.extend([StartFetch(1, peer.Ask(transfer=6), (3,)), StopFetch(1, 7, "too_late")])
    side.flush()
    assert drained == [7]


def test_a_send_back_of_a_session_that_is_over_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    side, ended = Decode(), list[tuple[int, int, bool]]()

    def over(session: int, transfer: int, now: float, *, completed: bool) -> None:
        ended.append((session, transfer, completed))

    monkeypatch.setattr(side.ready_core.returns, "over", over)
    side._effects.extend([OpenSend(1, 6, 0, (3,), 1), EndSend(1, 7)])
    side.flush()
    assert ended == [(1, 7, False)]


# -- requests that are not taken -----------------------------------------------------------------------------------


def test_a_request_has_no_more_time_than_any() -> None:
    side = Prefill()
    for milliseconds, seconds in ((0, 30.0), (2_000, 2.0), (31_000, 30.0), (1 << 31, 30.0)):
        assert side.deadline_of(milliseconds) == side.now() + seconds


@pytest.mark.parametrize("make", [Prefill, Decode])
@pytest.mark.parametrize("what", ["too many pages are orphaned", "the daemon drains"])
def test_a_request_is_not_taken_where(make: Any, what: str) -> None:
    side = make()
    events: asyncio.Queue[wire.WorkerEvent] = asyncio.Queue()
    worker = side.enter(0, events)
    if what == "the daemon drains":
        side.draining = True
        code = common.ERROR_UNAVAILABLE
    else:
        orphaned = side.cache.pool.allocate(side.orphaned_bound or 1)
        side.cache.pool.move(orphaned, PageState.LEASED, PageState.ORPHANED)
        code = common.ERROR_RESOURCE_EXHAUSTED
    kind = "begin" if make is Prefill else "admit"
    message = wire.WorkerMessage()
    getattr(message, kind).CopyFrom(
        wire.Begin(name=NAME.to_proto(), tokens=4, digests=bytes(32))
        if make is Prefill
        else wire.Admit(name=NAME.to_proto(), tokens=4, digests=bytes(32), prefill="p", max_new_tokens=1)
    )
    side.handle(worker, kind, message)
    told = events.get_nowait()
    assert told.failed.error.code == code and events.empty()
    assert side.busy == 0
