"""Pages that a request takes over from one whose prefill daemon does not bring them: once, not to and fro, and never to
its own harm."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import pytest

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.decode import DecodeCore, DecodeLimits
from kvferry.daemon.core.effects import FailAsk, OpenSend, StartTransfer, StopTransfer
from kvferry.daemon.core.errors import unavailable
from kvferry.daemon.core.lease import LeaseState
from kvferry.daemon.core.prefill_entries import REST_SECONDS
from kvferry.daemon.core.prefill_entry import EntryState
from kvferry.daemon.core.take_over import MAX_TAKE_OVERS, PATIENCE_SECONDS, STALL_SECONDS
from kvferry.daemon.sides.decode import DecodeSide
from tests.regressions.request_cores import PAGE, Decode, Prefill, name

TICK = 0.05
A, B, C = (name(number) for number in range(1, 4))


class Wires:
    """A decode core whose transfers each bring a page after so many seconds; those of `silent` prefill daemons none."""

    def __init__(self, side: Decode, page_seconds: float, silent: tuple[str, ...] = ()) -> None:
        self.side, self.page_seconds, self.silent = side, page_seconds, silent
        self.running: dict[int, tuple[StartTransfer, float]] = {}
        self.now = 0.0
        self.follow()

    def follow(self) -> None:
        while seen := self.side.seen:
            self.side.seen = []
            for effect in seen:
                if isinstance(effect, StartTransfer):
                    self.running[effect.ask.transfer] = (effect, self.now)
                elif isinstance(effect, StopTransfer):
                    self.running.pop(effect.transfer, None)
                    self.side.core.transfer_drained(effect.transfer, self.now)
            if not self.side.seen:
                self.side.take()

    def run(self, until: float) -> None:
        while self.now < until and any(lease.state is LeaseState.FILLING for lease in self.side.core.leases.values()):
            self.now = round(self.now + TICK, 6)
            for number in list(self.running):
                self.bring(number)
            self.side.tick(self.now)
            self.follow()

    def bring(self, number: int) -> None:
        start, since = self.running.get(number, (None, 0.0))
        if start is None or start.prefill in self.silent or not start.ask.pages:
            return
        here = min(start.ask.pages, int((self.now - since + 1e-9) / self.page_seconds))
        arrived = [start.ask.first_page + i for i in range(here)]
        self.side.arrive(number, arrived, self.now)
        if here == start.ask.pages:
            del self.running[number]
            self.side.core.transfer_completed(number, self.now)
            self.side.take()
        self.follow()

    @property
    def states(self) -> Counter[str]:
        return Counter(lease.state.value for lease in self.side.core.leases.values())

    @property
    def taken_over(self) -> int:
        return self.side.core.transfer_counters.aborts["taken_over"]


def first_tokens(side: Decode, now: float = 0.0) -> None:
    for lease in list(side.core.leases.values()):
        side.core.aux(lease.prefill, lease.name, b"first token", now)
    side.take()


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("page_seconds", [0.3, 1.0])
def test_pages_that_come_slowly_do_not_change_hands(page_seconds: float, same: bool) -> None:
    side = Decode(64, queue=64)
    wires = Wires(side, page_seconds)
    for number in range(1, 21):
        side.admit(name(number), "x", 8, prefill="p" if same else f"p{number}", worker=number)
        wires.follow()
    first_tokens(side)
    wires.run(60.0)
    assert wires.states == {"ready": 20} and wires.taken_over == 0
    assert wires.now == pytest.approx(8 * page_seconds)


def test_a_wire_that_stands_still_in_the_middle_holds_up_nobody() -> None:
    """Whose own prefill daemon has the pages waits for STALL_SECONDS; then the pages change hands once."""
    side = Decode(64)
    side.admit(A, "x", 8, prefill="p1")
    (start,) = side.of(StartTransfer)
    side.arrive(start.ask.transfer, [0, 1], 0.0)
    side.admit(B, "x", 8, prefill="p2", worker=2)
    first_tokens(side)
    wires = Wires(side, 0.01, silent=("p1",))
    wires.run(0.9 * STALL_SECONDS)
    assert wires.taken_over == 0
    wires.run(60.0)
    assert wires.states == {"ready": 2} and wires.taken_over == 1
    assert wires.now < STALL_SECONDS + 0.2


def test_each_change_of_hands_is_waited_for_twice_as_long() -> None:
    """All prefill daemons have said that they have it, and none brings it."""
    side = Decode(64)
    for number in range(1, 4):
        side.admit(name(number), "x", 8, prefill=f"p{number}", worker=number)
    first_tokens(side)
    wires = Wires(side, 1.0, silent=("p1", "p2", "p3"))
    changes = []
    while wires.now < 30.0:
        before = wires.taken_over
        wires.run(wires.now + TICK)
        changes += [wires.now] * (wires.taken_over - before)
    waits = [after - before for before, after in zip([0.0, *changes], changes, strict=False)]
    assert waits == pytest.approx([STALL_SECONDS * 2**change for change in range(4)], abs=3 * TICK)


def test_one_that_has_just_asked_is_given_time() -> None:
    side = Decode(64)
    for number in range(1, 4):
        side.admit(name(number), "x", 4, prefill=f"p{number}", worker=number)
    side.core.aux("p3", C, b"first token", 4.8)
    side.tick(4.95)
    side.core.abort(1, A, 5.0)
    side.take()
    (stop,) = side.of(StopTransfer)
    side.core.transfer_drained(stop.transfer, 5.0)
    side.take()
    assert [start.prefill for start in side.of(StartTransfer)] == ["p2"]
    side.tick(5.0 + 0.7 * PATIENCE_SECONDS)
    assert not side.of(StopTransfer)
    side.tick(5.1 + PATIENCE_SECONDS)
    assert side.of(StopTransfer)


def fragmented(side: Decode) -> None:
    """A silent request is to bring ten single pages, of which it has not asked for three; another waits for them."""
    for pages in range(1, 21):
        side.admit(name(pages), "x", pages, prefill="slow", worker=1)
    side.admit(name(40), "x", 20, prefill="silent", worker=3)
    side.admit(name(50), "x", 20, prefill="p", worker=2)
    for pages in range(2, 21, 2):
        (number,) = (n for n in side.core.leases[name(pages)].transfers)
        side.arrive(number, [pages - 1])
        side.core.transfer_completed(number, 0.0)
        side.take()
    for pages in range(1, 21):
        side.core.abort(1, name(pages), 0.0)
        side.take()
        Wires(side, 1.0)
    assert len(side.core.leases[name(40)].filling) == 10 and len(side.core.leases[name(40)].runs) == 3


def test_what_is_not_asked_for_yet_is_taken_over_too() -> None:
    side = Decode(64, queue=64)
    fragmented(side)
    side.core.aux("p", name(50), b"first token", 1.0)
    side.take()
    wires = Wires(side, 0.01, silent=("silent",))
    wires.now = 1.0
    wires.run(3.0)
    taker = side.core.leases[name(50)]
    assert taker.state is LeaseState.READY and taker.filled_at < 2.0


def test_taking_over_is_no_round_of_asking() -> None:
    """A wrong part is asked for again, whatever was taken over before."""
    side = Decode(64, queue=64)
    for pages in range(1, 21):
        side.admit(name(pages), "x", pages, prefill="slow", worker=1)
    taker = name(50)
    side.admit(taker, "x", 20, prefill="p", worker=2)
    side.core.aux("p", taker, b"first token", 0.0)
    side.take()
    for tick in range(10):
        side.tick(0.3 + tick * TICK)
        for stop in side.of(StopTransfer):
            side.core.transfer_drained(stop.transfer, 0.3 + tick * TICK)
        side.take()
    lease = side.core.leases[taker]
    number = max(lease.transfers)
    side.core.transfer_broken(number, "checksum", 1.0)
    side.core.transfer_drained(number, 1.0)
    side.take()
    assert lease.state is LeaseState.FILLING and lease.asks == 2


def test_pages_that_were_coming_go_back_where_the_takers_prefill_daemon_has_them_no_more() -> None:
    """It keeps what it has sent for REST_SECONDS only, where others wait for room."""
    side, prefill = Decode(64), Prefill(8)
    side.admit(A, "x", 6, prefill="p1")
    (slow,) = side.of(StartTransfer)
    side.admit(B, "x", 6, prefill="p2", worker=2)
    (mine,) = side.of(StartTransfer)
    prefill.begin(B, "x", 6)
    prefill.ask_as(mine.ask, B)
    prefill.compute(B, 6)
    prefill.core.send_completed(1, mine.ask.transfer, 0.0)
    side.core.aux("p2", B, b"first token", 0.1)
    side.arrive(slow.ask.transfer, range(5), 0.3)
    prefill.begin(C, "other", 6)
    prefill.ask(C, 10, "other", 6)
    prefill.core.tick(1.1 * REST_SECONDS)
    assert prefill.core.entries[B].state is EntryState.YIELDED
    side.tick(0.4 + STALL_SECONDS)
    (stop,) = side.of(StopTransfer)
    side.core.transfer_drained(stop.transfer, 2.5)
    side.take()
    (again,) = (start for start in side.of(StartTransfer) if start.prefill == "p2")
    again.ask.transfer += 100  # the session is another one's, too
    prefill.ask_as(again.ask, B)
    (failed,) = prefill.of(FailAsk)
    side.core.transfer_failed(failed.transfer - 100, failed.error, 2.6)
    side.take()
    (back,) = side.of(StopTransfer)
    side.core.transfer_drained(back.transfer, 2.7)
    side.take()
    assert not side.told("failed") and side.core.leases[B].take_overs == MAX_TAKE_OVERS
    (last,) = side.of(StartTransfer)
    assert (last.prefill, last.ask.first_page, last.ask.pages) == ("p1", 5, 1)
    side.arrive(last.ask.transfer, [5], 3.0)
    assert side.core.leases[B].state is LeaseState.READY


def test_whom_pages_were_taken_from_hears_that_its_prompt_fails() -> None:
    """Also by words that cross ours."""
    side = Decode(64)
    side.admit(A, "x", 4, prefill="silent")
    side.admit(B, "x", 4, prefill="p", worker=2)
    side.core.aux("p", B, b"first token", 1.0)
    side.tick(1.0 + PATIENCE_SECONDS)
    (stop,) = side.of(StopTransfer)
    side.core.transfer_drained(stop.transfer, 1.5)
    side.take()
    side.core.transfer_failed(stop.transfer, unavailable("the prefill worker is gone"), 1.6)
    side.take()
    (failed,) = side.told("failed")
    assert failed.failed.name.request_id == A.request_id


def taken_over_while_a_scatter_runs(side: Decode) -> int:
    """A brought two pages and its first token, then nothing; B, which has its own, takes over. A's transfer, which
    drains from 2.1 s on."""
    side.admit(A, "x", 8, prefill="p")
    (transfer,) = side.core.leases[A].transfers
    side.arrive(transfer, [0, 1])
    side.admit(B, "x", 8, prefill="q", worker=2)
    first_tokens(side)
    side.take()
    side.tick(2.1)
    assert [stop.transfer for stop in side.of(StopTransfer)] == [transfer]
    return transfer


def test_a_refusal_of_what_another_brings_fails_nobody() -> None:
    """Whether it comes before the last scatter has ended or behind it."""
    for refused_at, drained_at in ((2.15, 2.2), (2.25, 2.2)):
        side = Decode(64)
        transfer = taken_over_while_a_scatter_runs(side)
        for at, happens in sorted({refused_at: "refused", drained_at: "drained"}.items()):
            if happens == "refused":
                side.core.transfer_failed(transfer, unavailable("its pages were given to others"), at)
            else:
                side.core.transfer_drained(transfer, at)
        side.take()
        assert not side.told("failed")
        (asked,) = (start.ask for start in side.of(StartTransfer) if start.prefill == "q")
        assert (asked.first_page, asked.pages) == (2, 6)
        side.arrive(asked.transfer, range(2, 8), 2.3)
        assert all(side.core.leases[each].state is LeaseState.READY for each in (A, B))


def test_one_take_over_is_counted_once_however_long_its_scatters_run() -> None:
    side = Decode(64)
    taken_over_while_a_scatter_runs(side)
    for now in (2.15, 2.2, 2.25, 2.3):
        side.tick(now)
    assert side.core.leases[B].take_overs == 1


def test_an_ask_of_no_pages_is_open_until_the_prompt_ends() -> None:
    for ends_well in (False, True):
        prefill = Prefill()
        prefill.begin(A, "x", 4)
        prefill.ask(A, 1, "x", 4, first=4)
        assert not prefill.of(OpenSend)
        if ends_well:
            prefill.core.progress(1, A, 4 * PAGE, 0.0)
            prefill.core.aux(1, A, b"first token", 0.0)
            prefill.take()
            assert [opened.transfer for opened in prefill.of(OpenSend)] == [1]
        else:
            prefill.core.abort(1, A, 1.0)
            prefill.take()
            assert [failed.transfer for failed in prefill.of(FailAsk)] == [1]


# -- standstills ---------------------------------------------------------------------------------------------------


def decode_side(core: DecodeCore, now: list[float]) -> DecodeSide:
    shell = DecodeSide(DaemonConfig(role="decode"), bytes(16), lambda: now[0])
    shell.core = core
    cast(Any, shell).flush = lambda: None
    return shell


def test_a_standstill_is_nobodys_lateness() -> None:
    side, now = Decode(64), [0.0]
    shell = decode_side(side.core, now)
    side.admit(A, "x", 4, prefill="p1")
    side.admit(B, "x", 4, prefill="p2", worker=2)
    side.core.aux("p2", B, b"first token", 0.0)
    now[0] = TICK
    shell.tick()
    now[0] = 30.0
    shell.tick(30.0 - 2 * TICK)
    side.take()
    assert not side.of(StopTransfer)
    now[0] = 30.0 + PATIENCE_SECONDS
    shell.tick()
    side.take()
    assert side.of(StopTransfer)


def test_a_standstill_takes_no_growth_and_no_retracted_request_for_late() -> None:
    side = Decode(8)
    limits = DecodeLimits(max_tokens=400, page_bytes=64, admission_seconds=30.0, queue=8, overcommit=4.0)
    side.core = DecodeCore(side.cache, limits)
    side.admit(A, "x", 3, prefill="", new=17)
    side.admit(B, "y", 3, prefill="", new=17, worker=2)
    side.core.grow(1, A, 5 * PAGE, 1.0)
    side.core.grow(1, A, 7 * PAGE, 1.0)
    side.take()
    assert side.told("retract")
    side.core.stood_still(90.0, 91.1)
    side.tick(91.1)
    assert not side.told("failed")
    side.tick(91.1 + limits.growth_seconds)
    assert side.told("failed")


def test_a_standstill_gives_no_pages_away_that_were_just_sent() -> None:
    prefill = Prefill(8)
    prefill.begin(A, "x", 6)
    prefill.ask(A, 1, "x", 6)
    prefill.compute(A, 6)
    prefill.core.send_completed(1, 1, 0.0)
    prefill.begin(B, "y", 6)
    prefill.ask(B, 2, "y", 6)
    prefill.core.stood_still(29.9, 30.0)
    prefill.core.tick(30.0)
    prefill.take()
    prefill.ask(A, 3, "x", 6)
    assert not prefill.of(FailAsk)
