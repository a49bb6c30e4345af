"""What a decode side sends back: what its core wants of sessions' sending directions, and what these tell it. Shell."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING

from kvferry.daemon.core.effects import EndSend, SendEffect, VerifyRows
from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.core.limits import name_of
from kvferry.daemon.peers.receiving import ReceivingSession
from kvferry.daemon.peers.sending import Sending
from kvferry.daemon.peers.session import SessionBroken, SessionMeters
from kvferry.proto import peer_pb2 as peer
from kvferry.proto.limits import MAX_LOOKED_UP_PAGES
from kvferry.radix.digests import DIGEST_BYTES

if TYPE_CHECKING:
    from kvferry.daemon.sides.decode import DecodeSide


class DecodeReturns:
    """(SendingEvents) The sends of one side, over all its sessions that have a way back."""

    def __init__(self, side: DecodeSide) -> None:
        self._side = side
        self._sendings: dict[int, tuple[Sending, str]] = {}  # by number, with the prefill daemon's name
        self._numbers = itertools.count(1)

    def join(self, session: ReceivingSession, prefill: str, epoch: int) -> Sending:
        """The way back of a session that has one, to a pool of this epoch; before it runs."""
        side = self._side
        sending = Sending(
            session,
            SessionMeters(side.ready_core.returns.counters, side.latencies),
            number=next(self._numbers),
            send_slots=side.config.slots,
            remote_epoch=epoch,
            events=self,
            lanes=session.back_lanes,
        )
        self._sendings[sending.number] = sending, prefill
        return sending

    def session_over(self, sending: Sending) -> None:
        """No copy of the session runs, and its courier is reaped."""
        del self._sendings[sending.number]
        if self._side.core is not None:
            self._side.core.returns.session_down(sending.number, self._side.now())
            self._side.flush()

    def perform(self, effect: SendEffect | VerifyRows) -> None:
        if isinstance(effect, VerifyRows):
            self._side.tiers.host.verify(effect.rows, partial(self._verified, effect.session, effect.transfer))
            return
        sending, _ = self._sendings.get(effect.session, (None, ""))
        if sending is not None:
            sending.perform(effect)
        elif isinstance(effect, EndSend):  # it is over, with all its copies
            self._over(effect.session, effect.transfer, completed=False)

    def _verified(self, session: int, transfer: int, wrong: Collection[int] | None) -> None:
        self._side.ready_core.returns.verified(session, transfer, wrong, self._side.now())
        self._side.flush()

    def effect_failed(self, effect: SendEffect, message: str) -> None:
        sending, _ = self._sendings.get(effect.session, (None, ""))
        if sending is not None:
            sending.session.break_off(message)

    def _over(self, session: int, transfer: int, *, completed: bool) -> None:
        self._side.ready_core.returns.over(session, transfer, self._side.now(), completed=completed)
        self._side.flush()

    # -- the sessions' events --------------------------------------------------------------------------------------

    def on_ask(self, sending: Sending, ask: peer.Ask) -> None:
        side, returns = self._side, self._side.ready_core.returns
        try:
            name = name_of(ask.name)
            _, prefill = self._sendings[sending.number]
            if not ask.digests:
                returns.asked(sending.number, prefill, name, ask, side.now())
            elif self._answers(sending):
                returns.lend(sending.number, ask, side.deadline_of(ask.remaining_ms), side.now())
            else:
                raise unavailable("the daemon lends nothing that was looked up")
        except RequestError as error:
            sending.fail(ask.transfer, error)
        side.flush()

    def on_lookup(self, sending: Sending, lookup: peer.Lookup) -> None:
        size, most = len(lookup.digests), MAX_LOOKED_UP_PAGES * DIGEST_BYTES
        if not 0 < size <= most or size % DIGEST_BYTES:
            raise SessionBroken(
                f"lookup: digests has {size} bytes; it must have {DIGEST_BYTES} for every page, and at most {most}"
            )
        if len(lookup.namespace_id) != DIGEST_BYTES:
            raise SessionBroken(
                f"lookup: namespace_id has {len(lookup.namespace_id)} bytes; it must have {DIGEST_BYTES}"
            )
        returns = self._side.ready_core.returns
        pages = returns.found(lookup.namespace_id, lookup.digests) if self._answers(sending) else 0
        sending.session.send(peer.PeerMessage(found=peer.Found(lookup=lookup.lookup, pages=pages)))

    def _answers(self, sending: Sending) -> bool:
        """Whether the session's prefill daemon is told what it looks up. SessionBroken where that was not agreed on."""
        session, (_, prefill) = sending.session, self._sendings[sending.number]
        if not session.looks_up:
            raise SessionBroken("the peer looks up what is held here, which was not agreed on")
        if not self._side.lends:  # its host tier could not be pinned
            return False
        return not self._side.draining and not {prefill, session.remote}.intersection(self._side.config.closed_peers)

    def on_ask_end(self, sending: Sending, transfer: int) -> None:
        self._side.ready_core.returns.ask_end(sending.number, transfer, self._side.now())
        self._side.flush()

    def on_done(self, sending: Sending, name: peer.Done) -> None:
        raise SessionBroken("the peer sent done, which this side does not take")

    def on_send_completed(self, sending: Sending, transfer: int) -> None:
        self._over(sending.number, transfer, completed=True)

    def on_send_ended(self, sending: Sending, transfer: int) -> None:
        self._over(sending.number, transfer, completed=False)

    def on_send_failed(self, sending: Sending, transfer: int, message: str) -> None:
        sending.fail(transfer, unavailable(f"the pages could not be read: {message}"))
        self._over(sending.number, transfer, completed=False)
