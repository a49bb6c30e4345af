"""A prefill side's fetches: what its core wants of sessions' receiving directions, and what these tell it. Shell."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvferry.daemon.core.effects import LookUp, StartFetch, StopFetch, WakeAt
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name
from kvferry.daemon.peers.receiving import Receiving
from kvferry.daemon.peers.sending import SendingSession
from kvferry.daemon.peers.session import SessionBroken, SessionMeters
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.protocol.receiver import Receiver

if TYPE_CHECKING:
    from kvferry.daemon.sides.prefill import PrefillSide


class PrefillFetches:
    """The fetches of one side, over all its sessions; their transfers have numbers of one row."""

    def __init__(self, side: PrefillSide) -> None:
        self._side = side

    def join(self, session: SendingSession) -> Receiving:
        """The way back of a session that has one; before it runs."""
        side, lanes = self._side, session.back_lanes
        core = side.ready_core
        receiver = Receiver(
            epoch=side.tiers.epoch,
            lanes=lanes,
            slot_bytes=session.own_slot_bytes,
            slots=side.config.slots,
            counts=core.fetches.counters,
        )
        meters = SessionMeters(core.fetches.counters, side.latencies)
        events = _FetchEvents(side, session)
        return Receiving(session, meters, receiver=receiver, events=events, pages=events, lanes=lanes)

    def perform(self, effect: StartFetch | StopFetch | LookUp | WakeAt) -> None:
        side = self._side
        if isinstance(effect, WakeAt):
            asyncio.get_running_loop().call_later(max(0.0, effect.at - side.now()), self._wake)
            return
        session = side.sessions.get(effect.session)
        fetching = None if session is None else session.fetching
        if isinstance(effect, LookUp):
            if session is not None:
                session.look_up(effect.message)
        elif isinstance(effect, StartFetch):
            if fetching is not None:  # else its session is over, and the core knows
                fetching.ask(effect.ask, effect.page_ids)
        elif fetching is None or fetching.stop(effect.transfer, effect.reason):
            side.on_fetch_drained(effect.transfer)

    def _wake(self) -> None:
        if not self._side.closed:
            self._side.ready_core.wake(self._side.now())
            self._side.flush()


class _FetchEvents:
    """(ReceivingEvents, ReceivedPages) of one session."""

    def __init__(self, side: PrefillSide, session: SendingSession) -> None:
        self._side, self._session = side, session

    def on_session_up(self) -> None:
        fetches, session = self._side.ready_core.fetches, self._session
        fetches.session_up(session.number)
        if session.looks_up and session.remote not in self._side.config.closed_peers:
            fetches.look_ups.session_up(session.number)

    def on_pages(self, transfer: int, prompt_pages: Sequence[int]) -> None:
        self._side.on_fetched(transfer, prompt_pages)

    def on_complete(self, transfer: int) -> None:
        self._side.ready_core.fetch_completed(transfer, self._side.now())
        self._side.flush()

    def on_drained(self, transfer: int) -> None:
        self._side.on_fetch_drained(transfer)

    def on_broken(self, transfer: int, message: str) -> None:
        self._stopped(transfer, "wrong_parts")

    def on_ask_failed(self, transfer: int, error: RequestError) -> None:
        self._stopped(transfer, "refused")

    def _stopped(self, transfer: int, reason: str) -> None:
        self._side.ready_core.fetch_stopped(self._session.number, transfer, reason, self._side.now())
        self._side.flush()

    def on_aux(self, name: Name, blob: bytes) -> None:
        raise SessionBroken("the peer sent aux, which this side does not take")

    def on_found(self, found: peer.Found) -> None:
        self._side.ready_core.found(self._session.number, found.lookup, found.pages, self._side.now())
        self._side.flush()
