"""The core is told at once of all pages that arrived in a turn of the loop, and of no page of a transfer that it
stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.peers import session as session_module
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.messages import Notification
from kvferry.transfer.protocol.slots import PartHeader, PartNotice
from tests.daemon.peers.played_sessions import EPOCH, Link, Stream, met
from tests.daemon.peers.test_session_words import PAGE_BYTES, Copies, Owner, receiving, run, settle, until


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    Copies.running = []
    monkeypatch.setattr(session_module, "CourierLink", Link)


def part(session: ReceivingSession, slot: int, page: int, generation: int = 1, transfer: int = 1) -> None:
    """Comes, and is being copied."""
    header = PartHeader(
        epoch=EPOCH,
        transfer=transfer,
        slot=slot,
        generation=generation,
        lane=0,
        first_page=page,
        byte_offset=0,
        nbytes=PAGE_BYTES,
    )
    session._on_courier(Notification(PartNotice(EPOCH, transfer, slot, generation).pack(), header.pack()))


async def two_of_three(owner: Owner) -> tuple[ReceivingSession, asyncio.Task[None]]:
    """The second and the first of three pages are copied out of their slots in one turn."""
    session = receiving(owner)
    running = asyncio.create_task(session.run(Stream(met(0))))
    await until(lambda: owner.heard)
    session.receiving.ask(peer.Ask(transfer=1, pages=3), [5, 6, 7])
    part(session, 0, page=1)
    part(session, 1, page=0)
    while Copies.running:
        Copies.running.pop()()
    assert not owner.arrived
    return session, running


def test_pages_of_one_turn_are_told_together_and_in_order() -> None:
    async def story() -> None:
        owner = Owner()
        session, running = await two_of_three(owner)
        await settle()
        assert owner.arrived == [(1, [0, 1])] and not owner.complete
        part(session, 0, page=2, generation=2)
        Copies.running.pop()()
        assert owner.arrived == [(1, [0, 1]), (1, [2])] and owner.complete == [1], "the last one waits for no turn"
        running.cancel()
        await asyncio.wait([running])

    run(story())


def test_the_end_of_a_transfer_is_told_behind_its_pages() -> None:
    async def story() -> None:
        owner = Owner()
        session, running = await two_of_three(owner)
        part(session, 0, page=2, generation=2)
        Copies.running.pop()()
        assert owner.arrived == [(1, [0, 1, 2])] and owner.complete == [1]
        await settle()
        assert len(owner.arrived) == 1
        running.cancel()
        await asyncio.wait([running])

    run(story())


def test_no_page_of_a_stopped_transfer_is_told() -> None:
    """Its pages may be another's by then."""

    async def story() -> None:
        owner = Owner()
        session, running = await two_of_three(owner)
        assert session.receiving.stop(1, "enough")
        await settle()
        assert not owner.arrived
        running.cancel()
        await asyncio.wait([running])

    run(story())


class Listener(Owner):
    """It notes pages among the words, and errs at those of some transfer."""

    errs_at = 0

    def on_pages(self, transfer: int, prompt_pages: Sequence[int]) -> None:
        if transfer == self.errs_at:
            raise KeyError(transfer)
        self.heard.append(f"pages of {transfer}: {list(prompt_pages)}")

    def on_complete(self, transfer: int) -> None:
        self.heard.append(f"complete: {transfer}")

    def on_ask_failed(self, transfer: int, error: RequestError) -> None:
        self.heard.append(f"failed: {transfer}")


def wrong_part(session: ReceivingSession) -> None:
    part(session, 0, page=0, generation=2)  # which came


def refusal(session: ReceivingSession) -> None:
    failed = peer.AskFailed(transfer=1, error=unavailable("it ends").to_proto())
    session._dispatch(peer.PeerMessage(ask_failed=failed))


@pytest.mark.parametrize(("ends", "word"), [(wrong_part, "broken: "), (refusal, "failed: 1")])
def test_what_ends_a_transfer_is_told_behind_its_pages(ends: Callable[[ReceivingSession], None], word: str) -> None:
    """Else they were asked for again."""

    async def story() -> None:
        owner = Listener()
        session, running = await two_of_three(owner)
        ends(session)
        pages, last = owner.heard[1:]
        assert pages == "pages of 1: [0, 1]" and last.startswith(word)
        running.cancel()
        await asyncio.wait([running])

    run(story())


@pytest.mark.parametrize("completes", [False, True])
def test_an_error_at_the_pages_of_one_transfer_keeps_no_others(completes: bool) -> None:
    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))
        owner = Listener()
        owner.errs_at = 1
        session, running = await two_of_three(owner)
        session.receiving.ask(peer.Ask(transfer=2, pages=1 if completes else 2), [8] if completes else [8, 9])
        part(session, 0, page=0, generation=2, transfer=2)
        Copies.running.pop()()
        await settle()
        assert owner.heard[1:] == ["pages of 2: [0]", *["complete: 2"] * completes]
        assert [type(error) for error in errors] == [KeyError]
        running.cancel()
        await asyncio.wait([running])

    errors: list[object] = []
    run(story())


def test_what_arrived_is_told_before_its_session_is_over() -> None:
    async def story() -> None:
        owner = Listener()
        session = receiving(owner)
        running = asyncio.create_task(session.run(Stream(met(0))))
        running.add_done_callback(lambda _: owner.heard.append("over"))
        await until(lambda: owner.heard)
        session.receiving.ask(peer.Ask(transfer=1, pages=3), [5, 6, 7])
        part(session, 0, page=1)
        session.break_off("enough")
        await settle()
        Copies.running.pop()()
        await asyncio.wait([running])
        await settle()
        assert owner.heard[1:] == ["pages of 1: [1]", "over"]

    run(story())
