"""The receiving end of a session: transfers opened for the decode core, parts scattered into its pool.

Stages that it times: `first_part`, from the Ask to the notification of the transfer's first part; of each part
`scatter`, from the notification to the end of the copy; of each part that completes pages `publish`, its share of the
core's step that follows. The core is told at once of all pages of a transfer whose copies ended in one turn of the
loop: its step costs as much for one part. Nothing that ends a transfer is told before them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.core.limits import Name, name_of
from kvferry.daemon.memory.interface import PartCopies
from kvferry.daemon.peers.session import Session, SessionBroken, SessionMeters, SessionSetup
from kvferry.proto import peer_pb2 as peer
from kvferry.transfer.courier.link import CourierLink
from kvferry.transfer.courier.messages import Notification, PostDone
from kvferry.transfer.geometry.rank_lanes import Lane
from kvferry.transfer.protocol.credit_groups import CreditGroups
from kvferry.transfer.protocol.receiver import Receiver, Regrant, Scatter, ScatterResult, TransferBroken
from kvferry.transfer.protocol.slots import Credit

if TYPE_CHECKING:
    from kvferry.daemon.peers.sending import Sending


class ReceivedPages(Protocol):
    """The owner of the pages."""

    def on_pages(self, transfer: int, prompt_pages: Sequence[int]) -> None: ...

    def on_drained(self, transfer: int) -> None: ...


class ReceivingEvents(Protocol):
    """The owner of the session and its transfers."""

    def on_session_up(self) -> None: ...

    def on_complete(self, transfer: int) -> None: ...

    def on_broken(self, transfer: int, message: str) -> None: ...

    def on_ask_failed(self, transfer: int, error: RequestError) -> None: ...

    def on_aux(self, name: Name, blob: bytes) -> None: ...

    def on_found(self, found: peer.Found) -> None: ...


class Receiving:
    """The receiving direction of a session."""

    KINDS: ClassVar[frozenset[str]] = frozenset(("aux", "ask_failed", "ask_ended", "found"))

    def __init__(
        self,
        session: Session,
        meters: SessionMeters,
        *,
        receiver: Receiver,
        events: ReceivingEvents,
        pages: ReceivedPages,
        lanes: Sequence[Lane],
    ) -> None:
        self.session = session
        self._lanes = lanes
        self.receiver = receiver
        self.moved_bytes = 0  # of pages, out of slots
        self._events = events
        self._pages = pages
        self._counters = meters.counters
        self._latencies = meters.latencies
        self._traces = meters.traces
        self._asked: dict[int, float] = {}  # transfers without a part yet
        self._arrived: dict[int, list[list[int]]] = {}  # by transfer: pages of which the core is to be told, by parts
        self._credits = CreditGroups(receiver.slots, receiver.ranks)
        self._direction = session.join(self)

    # -- the owner's words ---------------------------------------------------------------------------------------

    def ask(self, ask: peer.Ask, page_ids: Sequence[int]) -> None:
        """Opens the transfer and sends the Ask. The session must be up."""
        self.receiver.open(ask.transfer, first_page=ask.first_page, pages=ask.pages, page_ids=page_ids)
        if ask.pages:
            self._asked[ask.transfer] = time.monotonic()
        self.session.send(peer.PeerMessage(ask=ask))
        self._expect()

    def stop(self, transfer: int, reason: str) -> bool:
        """Wants no more of the transfer. True: no copy into its pages runs; False: on_drained follows."""
        self.session.send(peer.PeerMessage(ask_end=peer.AskEnd(transfer=transfer, reason=reason)))
        self._asked.pop(transfer, None)
        self._arrived.pop(transfer, None)  # as those that were still to come
        drained = self.receiver.end(transfer)
        self._rest()
        self._expect()
        return drained

    def done(self, name: Name) -> None:
        self.session.send(peer.PeerMessage(done=peer.Done(name=name.to_proto())))

    # -- the session's events ------------------------------------------------------------------------------------

    def open_parts(self, link: CourierLink) -> PartCopies:
        return self.session.memory.receiving(link, self._lanes)

    def on_up(self) -> None:
        self._send_credits(self.receiver.initial_credits())
        self._events.on_session_up()

    def on_message(self, kind: str, message: peer.PeerMessage) -> None:
        if kind == "aux":
            try:
                name = name_of(message.aux.name)
            except RequestError as error:
                raise SessionBroken(f"aux: {error}") from error
            self._events.on_aux(name, message.aux.blob)
        elif kind == "ask_failed":
            failed = message.ask_failed
            self._publish(failed.transfer)  # what arrived is not to be asked for again
            self._events.on_ask_failed(failed.transfer, RequestError.from_proto(failed.error))
        elif kind == "found":
            self._events.on_found(message.found)
        # ask_ended: the sender posts no more of it; our side had let go already

    def on_courier(self, event: PostDone | Notification) -> bool:
        if not isinstance(event, Notification):
            return False
        actions = self.receiver.notification(event.payload, lambda slot: event.header or self._parts.read_header(slot))
        for action in actions:
            if isinstance(action, Scatter):
                self._scatter(action)
            elif isinstance(action, Regrant):
                self._give_back(action.credit)
            elif isinstance(action, TransferBroken):
                self._broken(action)
        return True

    @property
    def _parts(self) -> PartCopies:
        return self.session.parts(self._direction)

    def _scatter(self, scatter: Scatter) -> None:
        slot, begin = scatter.slot, time.monotonic()
        if (asked := self._asked.pop(scatter.transfer, None)) is not None:
            self._latencies.add_stage("first_part", begin - asked)

        def done(problem: str, payload_sum: int | None) -> None:
            self.session.copy_ends()
            if problem:
                self._scattered(self.receiver.scatter_failed(slot, problem))
                return
            assert (payload_sum is not None) == self.session.checksums, "a session sums all its parts or none"
            copied = time.monotonic()
            self._latencies.add_stage("scatter", copied - begin)
            self._traces.part(scatter.transfer, "scatter", begin, copied)
            self._scattered(self.receiver.scattered(slot, payload_sum))

        self.session.copy_begins()
        self._counters.copied_bytes += scatter.nbytes
        self.moved_bytes += scatter.nbytes
        self._parts.scatter(scatter, done)

    def _scattered(self, result: ScatterResult) -> None:
        # Credits go first: the sender can refill the slots while the pages are published.
        self._give_back(result.credit)
        transfer = result.transfer
        if result.arrived:
            if transfer not in self._arrived:
                asyncio.get_running_loop().call_soon(self._publish, transfer)
            self._arrived.setdefault(transfer, []).append(result.arrived)
        if result.broken is not None:
            self._broken(result.broken)
        if result.complete:
            self._publish(transfer)
            self._events.on_complete(transfer)
            self._expect()
        if result.drained:
            self._pages.on_drained(transfer)

    def _broken(self, broken: TransferBroken) -> None:
        self._publish(broken.transfer)
        self._events.on_broken(broken.transfer, broken.message)

    def _publish(self, transfer: int) -> None:
        """Tells the core of the transfer's pages that arrived since the last time."""
        if (runs := self._arrived.pop(transfer, None)) is None:
            return
        begin = time.monotonic()
        pages = sorted(page for run in runs for page in run) if len(runs) > 1 else runs[0]
        self._counters.pages += len(pages)
        self._pages.on_pages(transfer, pages)
        share = (time.monotonic() - begin) / len(runs)
        for _ in runs:
            self._latencies.add_stage("publish", share)

    def _give_back(self, credit: Credit) -> None:
        if group := self._credits.add(credit):
            self._send_credits(group)
        self._rest()

    def _rest(self) -> None:
        if len(self._credits) and not self.receiver.transfers():
            self._send_credits(self._credits.rest())

    def _send_credits(self, credits: Sequence[Credit]) -> None:
        message = peer.Credits(credits=[peer.Credit(slot=c.slot, generation=c.generation) for c in credits])
        self.session.send(peer.PeerMessage(credits=message))

    def _expect(self) -> None:
        self.session.expect(self._direction, len(self.receiver.transfers()))


class ReceivingSession(Session):
    """A decode daemon's end of a session: it receives, and may send back."""

    def __init__(
        self,
        setup: SessionSetup,
        meters: SessionMeters,
        *,
        receiver: Receiver,
        events: ReceivingEvents,
        pages: ReceivedPages,
    ) -> None:
        super().__init__(setup)
        self.returning: Sending | None = None  # where there is a way back
        self.receiving = Receiving(self, meters, receiver=receiver, events=events, pages=pages, lanes=setup.lanes)
